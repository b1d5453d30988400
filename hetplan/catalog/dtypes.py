"""Number formats: names, sizes, and how a quantised matrix is stored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hetplan.base import Frozen
from hetplan.units import BITS_PER_BYTE

Dtype = Literal["fp32", "bf16", "fp16", "fp8", "int8", "fp4", "int4"]

DTYPE_BITS: dict[Dtype, int] = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4, "int4": 4}

# Spellings found in config.json (torch_dtype, dtype, kv_cache_quant_algo) and on command lines.
DTYPE_ALIASES: dict[str, Dtype] = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8_e4m3fn": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
    **{name: name for name in DTYPE_BITS},
}


def dtype_bytes(dtype: Dtype) -> float:
    """Bytes of one element; half a byte for 4-bit formats."""
    return DTYPE_BITS[dtype] / BITS_PER_BYTE


class Quantization(Frozen):
    """How quantised matrices are stored: the weights, and the scales beside them.

    One scale (and zero point) covers ``group_inputs`` x ``group_outputs`` weights; None means the
    whole side of the matrix, so None x None is one scale per tensor and None x 1 one per output.
    """

    method: str
    bits: Annotated[int, Field(gt=0, le=16)]
    group_inputs: Annotated[int, Field(gt=0)] | None = None
    group_outputs: Annotated[int, Field(gt=0)] | None = None
    scale_bits: Annotated[int, Field(ge=0)] = 32
    zero_point_bits: Annotated[int, Field(ge=0)] = 0

    def matrix_bytes(self, inputs: int, outputs: int) -> int:
        """Bytes of an ``outputs`` x ``inputs`` matrix with its scales, each part rounded up."""
        across = 1 if self.group_inputs is None else -(-inputs // self.group_inputs)
        along = 1 if self.group_outputs is None else -(-outputs // self.group_outputs)
        weights = -(-inputs * outputs * self.bits // BITS_PER_BYTE)
        return weights + -(-across * along * (self.scale_bits + self.zero_point_bits) // BITS_PER_BYTE)
