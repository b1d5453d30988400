"""The kernels of one GPU of a tensor-parallel group, bound to a model's number formats and an engine.

Everything that a calibration does not hold is derived from its rates here, in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hetplan.catalog.calibration import Calibration
from hetplan.catalog.dtypes import DTYPE_BITS, Dtype, dtype_bytes
from hetplan.catalog.hardware import GpuSpec, InstanceType
from hetplan.catalog.kernels import GemmFit
from hetplan.catalog.model import LayerKind, Linear, ModelSpec
from hetplan.catalog.steps import StepOverheads
from hetplan.estimator.base import FloatArray
from hetplan.estimator.communication import AllReduce, all_gather_s, all_reduce_for
from hetplan.estimator.gemm import gemm_seconds
from hetplan.estimator.identity import Same
from hetplan.estimator.rates import compute_rate
from hetplan.estimator.usual import Peaks, peaks_behind, usual_decode_attention, usual_gemm, usual_prefill_attention
from hetplan.units import BITS_PER_BYTE


@dataclass(frozen=True, slots=True)
class LayerGemms:
    """The GEMMs of a layer that multiply in one type: (G, 1) columns, one row per GEMM that runs.

    ``active`` experts are used by a token, of those that ``idle_log`` = log(1 - active/experts) stands for.
    """

    fit: GemmFit
    outputs: FloatArray
    inputs: FloatArray
    weight_bits: FloatArray
    active: FloatArray
    experts: FloatArray
    idle_log: FloatArray

    def seconds(self, tokens: FloatArray) -> FloatArray:
        """(N,) seconds of all of them for (N,) tokens."""
        # A router that picks uniformly: the experts that the tokens are expected to touch.
        touched = -self.experts * np.expm1(tokens * self.idle_log)
        each = gemm_seconds(
            self.fit,
            tokens * self.active,
            self.outputs,
            self.inputs,
            weight_bits=self.weight_bits,
            groups=touched,
        )
        return np.asarray(each.sum(axis=0), dtype=np.float64)


class GroupKernels:
    """What the estimator asks of one GPU of a group. Immutable once made; cheap to keep."""

    def __init__(
        self,
        model: ModelSpec,
        machine: InstanceType,
        degree: int,
        calibration: Calibration,
        overheads: StepOverheads,
    ) -> None:
        gpu = machine.gpu
        self.model = model
        self.degree = degree
        # An engine that was timed on this very machine goes before what is usual of it.
        own = next((found for found in calibration.step_overheads if found.engine == overheads.engine), None)
        self.overheads = overheads = own or overheads
        self.element_bytes = dtype_bytes(model.base_dtype)
        self.kv_element_bytes = dtype_bytes(model.kv_dtype)
        self.bytes_per_s = calibration.memory_bytes_per_s.value
        self.kernel_s = calibration.kernel_s.value
        base = gpu.runs_as(model.base_dtype)
        self.flops = compute_rate(calibration, gpu, base).value
        self.index_flops = compute_rate(calibration, gpu, gpu.runs_as("fp8")).value
        self.base_gemm = gemm_fit(calibration, gpu, base)
        native = gpu.runs_as(model.compute_dtype)
        self.gemm = self.base_gemm if native == base else gemm_fit(calibration, gpu, native)
        if overheads.fused_quantisation:
            self.gemm = self.gemm.replace(quantise_row_s=0.0, quantise_bytes_per_s=None)
        peaks = _peaks(calibration, gpu, base)
        self.prefill_attention = calibration.prefill_attention or usual_prefill_attention(*peaks)
        # Other layers pass between two uses of a layer's KV cache: no cache of the chip still holds it.
        self.decode_attention = (calibration.decode_attention or usual_decode_attention(*peaks)).replace(cache_bytes=1)
        self.all_reduce: AllReduce | None = all_reduce_for(machine, degree, calibration) if degree > 1 else None
        self.layers = [self._layer_gemms(model, layer) for layer in model.layer_kinds]
        columns = -(-model.vocabulary_size // degree)
        self.head_shape = (float(columns), float(model.hidden_size))

    def _layer_gemms(self, model: ModelSpec, layer: LayerKind) -> list[LayerGemms]:
        groups: dict[str, list[Linear]] = {}
        for matrix in layer.linears:
            groups.setdefault(matrix.fused or matrix.name, []).append(matrix)
        found: dict[bool, list[tuple[float, float, float, int, int]]] = {}
        for group in groups.values():
            head = group[0]
            shapes = [matrix.shape(self.degree) for matrix in group]
            inputs, outputs = shapes[0][0], sum(columns for _, columns in shapes)
            stored = sum(m.weight_bytes(self.degree, model.base_dtype, model.quantization) for m in group)
            bits = stored * BITS_PER_BYTE / head.experts / (inputs * outputs)
            # Matrices left unquantised, such as routers, multiply in the base type.
            quantized = head.quantized and model.quantization is not None
            own_type = quantized or DTYPE_BITS[model.compute_dtype] >= 16
            found.setdefault(own_type, []).append((outputs, inputs, bits, head.active_experts, head.experts))
        return [_columns(self.gemm if own_type else self.base_gemm, rows) for own_type, rows in sorted(found.items())]

    def linear_seconds(self, kind: int, tokens: FloatArray) -> FloatArray:
        """(N,) seconds of a layer's matrices for (N,) tokens."""
        parts = self.layers[kind]
        seconds = parts[0].seconds(tokens) if parts else np.zeros_like(tokens)
        for more in parts[1:]:
            seconds = seconds + more.seconds(tokens)
        return seconds

    def head_seconds(self, rows: FloatArray) -> FloatArray:
        """(N,) seconds of the LM head for (N,) rows of hidden states."""
        columns, inputs = self.head_shape
        return gemm_seconds(self.base_gemm, rows, columns, inputs, weight_bits=self.element_bytes * BITS_PER_BYTE)

    def all_reduce_seconds(self, message_bytes: FloatArray) -> FloatArray:
        """(N,) seconds of one all-reduce inside the engine; zero for a single GPU."""
        if self.all_reduce is None:
            return np.zeros_like(message_bytes)
        return self.overheads.all_reduce_factor * self.all_reduce.seconds(message_bytes)

    def all_gather_seconds(self, gathered_bytes: FloatArray) -> FloatArray:
        """(N,) seconds of one all-gather; zero for a single GPU."""
        if self.all_reduce is None:
            return np.zeros_like(gathered_bytes)
        return all_gather_s(gathered_bytes, self.all_reduce.link, self.degree)


@lru_cache(maxsize=512)
def group_kernels(model: Same, machine: Same, degree: int, calibration: Same, overheads: Same) -> GroupKernels:
    """The kernels of a group, bound once for all problems that share the records."""
    return GroupKernels(model.value, machine.value, degree, calibration.value, overheads.value)


def _columns(fit: GemmFit, rows: Sequence[tuple[float, float, float, int, int]]) -> LayerGemms:
    table: NDArray[np.float64] = np.array(rows, dtype=np.float64).T[:, :, np.newaxis]
    outputs, inputs, bits, active, experts = table
    with np.errstate(divide="ignore"):
        idle = np.log1p(-active / experts)
    return LayerGemms(fit, outputs, inputs, bits, active, experts, idle)


def gemm_fit(calibration: Calibration, gpu: GpuSpec, dtype: Dtype) -> GemmFit:
    """The fitted GEMM of a type, the other 16-bit type's for lack of it, else one derived from the rates."""
    alike = [fit for fit in calibration.gemms if DTYPE_BITS[fit.dtype] == DTYPE_BITS[dtype] >= 16]
    for fit in [*(f for f in calibration.gemms if f.dtype == dtype), *alike]:
        return fit
    return usual_gemm(*_peaks(calibration, gpu, dtype), sm_count=gpu.sm_count, dtype=dtype)


def _peaks(calibration: Calibration, gpu: GpuSpec, dtype: Dtype) -> Peaks:
    """Peaks whose usual shares are the calibration's rates; a datasheet's rates are peaks already."""
    compute, memory = compute_rate(calibration, gpu, dtype), calibration.memory_bytes_per_s
    behind = peaks_behind(compute.value, memory.value)
    return Peaks(
        compute.value if compute.source == "datasheet" else behind.flops,
        memory.value if memory.source == "datasheet" else behind.bytes_per_s,
    )
