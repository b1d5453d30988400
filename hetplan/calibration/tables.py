"""Kernel tables in CSV form: reading them, by GPU.

``gemm_<GPU>.csv``: engine, dtype, m, n, k, latency_us. ``attn_prefill_<GPU>.csv``: engine, batch, isl, n_heads,
n_kv_heads, head_dim, latency_us, optionally prefix_len. ``attn_decode_<GPU>.csv``: engine, batch, kv_len, n_heads,
n_kv_heads, head_dim, latency_us. ``comm_<GPU>.csv``: lib, op_name, num_gpus, bytes (of one rank), latency_us.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hetplan.calibration.attention import AttentionTable, FloatArray
from hetplan.catalog.dtypes import Dtype
from hetplan.catalog.tables import gpu_name
from hetplan.errors import InvalidInputError, UnknownNameError

if TYPE_CHECKING:
    from pandas import DataFrame

KINDS = ("gemm", "attn_prefill", "attn_decode", "comm")
COLUMNS = {
    "gemm": ("engine", "dtype", "m", "n", "k", "latency_us"),
    "attn_prefill": ("engine", "batch", "isl", "n_heads", "n_kv_heads", "head_dim", "latency_us"),
    "attn_decode": ("engine", "batch", "kv_len", "n_heads", "n_kv_heads", "head_dim", "latency_us"),
    "comm": ("lib", "op_name", "num_gpus", "bytes", "latency_us"),
}
MICROSECOND = 1e-6


class Multiplies(NamedTuple):
    """What a dtype label of the tables stands for: our name, stored bits of a weight and of an activation."""

    dtype: Dtype
    weight_bits: float
    activation_bits: float


# Weight-only types (_wo) multiply in 16 bit; a block's scale is 32 bits over 128 x 128 weights, too few to count.
DTYPE_LABELS: dict[str, Multiplies] = {
    "bfloat16": Multiplies("bf16", 16, 16),
    "float16": Multiplies("fp16", 16, 16),
    "fp8": Multiplies("fp8", 8, 8),
    "int8": Multiplies("int8", 8, 8),
    "nvfp4": Multiplies("fp4", 4.5, 4.5),
}


@dataclass(frozen=True, slots=True)
class KernelTables:
    """The tables of one GPU that were found, as frames; ``names`` says from which files."""

    gpu: str
    frames: dict[str, DataFrame]
    names: tuple[str, ...]


def read_kernel_tables(gpu: str, folder: Path) -> KernelTables:
    """The tables of a GPU in a folder, or in a folder ``aiconfigurator`` inside it.

    Raises
    ------
    InvalidInputError
        If there is none, or one lacks a column.
    """
    wanted = gpu_name(gpu)
    found: dict[str, DataFrame] = {}
    names = []
    for kind in KINDS:
        for path in sorted(folder.glob(f"{kind}_*.csv")):
            if _gpu_of(path, kind) == wanted and kind not in found:
                found[kind] = _read(path, kind)
                names.append(path.name)
    if not found:
        inside = folder / "aiconfigurator"
        if inside.is_dir():
            return read_kernel_tables(gpu, inside)
        raise InvalidInputError(
            f"{folder}: no table of {wanted}; give files such as gemm_{wanted}.csv, attn_prefill_{wanted}.csv, "
            f"attn_decode_{wanted}.csv or comm_{wanted}.csv"
        )
    return KernelTables(wanted, found, tuple(names))


def _gpu_of(path: Path, kind: str) -> str | None:
    try:
        return gpu_name(path.stem.removeprefix(f"{kind}_"))
    except UnknownNameError:
        return None


def _read(path: Path, kind: str) -> DataFrame:
    import pandas

    try:
        frame = pandas.read_csv(path)
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path}: not a readable CSV table: {error}") from None
    missing = [name for name in COLUMNS[kind] if name not in frame.columns]
    if missing:
        raise InvalidInputError(f"{path}: no column {', '.join(missing)}; it needs {', '.join(COLUMNS[kind])}")
    numbers = [name for name in COLUMNS[kind] if name not in ("engine", "dtype", "lib", "op_name")]
    for name in numbers:
        values = pandas.to_numeric(frame[name], errors="coerce").to_numpy(dtype=np.float64)
        wrong = ~(np.isfinite(values) & (values > 0))
        if wrong.any():
            line = int(np.flatnonzero(wrong)[0]) + 2
            raise InvalidInputError(f"{path}, line {line}: {name} is {frame[name].iloc[line - 2]!r}; a positive number")
        frame[name] = values
    return frame


def attention_table(frame: DataFrame, phase: str) -> AttentionTable:
    """Attention kernels of a frame, in seconds."""
    tokens = frame["isl" if phase == "prefill" else "kv_len"]
    prefix: FloatArray | float = frame["prefix_len"].to_numpy(dtype=np.float64) if "prefix_len" in frame else 0.0
    return AttentionTable(
        sequences=frame["batch"].to_numpy(dtype=np.float64),
        tokens=tokens.to_numpy(dtype=np.float64),
        heads=frame["n_heads"].to_numpy(dtype=np.float64),
        kv_heads=frame["n_kv_heads"].to_numpy(dtype=np.float64),
        seconds=frame["latency_us"].to_numpy(dtype=np.float64) * MICROSECOND,
        head_dim=frame["head_dim"].to_numpy(dtype=np.float64),
        prefix_tokens=prefix,
    )
