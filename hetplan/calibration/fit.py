"""A calibration from measured kernels: each model fitted to the points that its rule chooses, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hetplan.calibration.attention import (
    choose_decode_points,
    choose_prefill_points,
    fit_decode_attention,
    fit_prefill_attention,
)
from hetplan.calibration.collectives import fit_all_reduce, merge_all_reduces
from hetplan.calibration.gemm import MAX_POINTS, choose_gemm_points, fit_gemm, served_from_memory
from hetplan.calibration.tables import DTYPE_LABELS, MICROSECOND, KernelTables, attention_table, read_kernel_tables
from hetplan.catalog.calibration import Calibration, Quantity
from hetplan.catalog.dtypes import Dtype
from hetplan.catalog.hardware import GpuSpec
from hetplan.catalog.kernels import AllReduceCurve, DecodeAttentionFit, GemmFit, PrefillAttentionFit
from hetplan.catalog.tables import datasheet_calibration, get_gpu
from hetplan.errors import InvalidInputError
from hetplan.estimator.gemm import gemm_seconds

if TYPE_CHECKING:
    from pandas import DataFrame

# Whose kernels are taken where a table holds several.
ENGINE_ORDER = ("vllm", "sglang", "trtllm")
# Effective rates are read off the fit at these shapes: a GEMM bound by compute, and a GEMV that streams 512 MiB.
LARGE_GEMM = (4096.0, 8192.0, 8192.0)
LARGE_GEMV = (1.0, 32768.0, 8192.0)


def fit_tables(gpu: str, folder: Path, *, engine: str | None = None) -> Calibration:
    """See `hetplan.Calibration.fit`."""
    tables = read_kernel_tables(gpu, folder)
    spec = get_gpu(gpu)
    return fit_kernels(spec, tables, engine=engine)


def fit_kernels(spec: GpuSpec, tables: KernelTables, *, engine: str | None = None) -> Calibration:
    """A calibration of the kernels of some tables; what they lack stays with the datasheet, and says so."""
    reference = ", ".join(tables.names)
    start = datasheet_calibration(spec)
    matrices = ", ".join(name for name in tables.names if name.startswith("gemm"))
    gemms = _gemms(spec, tables.frames.get("gemm"), engine, matrices)
    compute, memory = dict(start.compute_flops), start.memory_bytes_per_s
    for fit in gemms:
        rate = large_gemm_flops(fit)
        compute[fit.dtype] = Quantity(value=rate, source="measured", reference=f"large GEMMs, {reference}")
        if fit.dtype in ("bf16", "fp16"):
            other: Dtype = "fp16" if fit.dtype == "bf16" else "bf16"
            if other in spec.native_dtypes:
                compute[other] = compute[fit.dtype]
            memory = Quantity(value=streamed_bytes_per_s(fit), source="measured", reference=f"GEMVs, {reference}")
    prefill, decode = attention_fits(spec, tables, engine)
    return Calibration(
        gpu=spec.name,
        compute_flops=compute,
        memory_bytes_per_s=memory,
        kernel_s=start.kernel_s,
        gemms=gemms,
        prefill_attention=prefill,
        decode_attention=decode,
        all_reduces=all_reduce_curves(tables.frames.get("comm"), reference),
        engine=", ".join(dict.fromkeys(fit.engine for fit in gemms)) or None,
    )


def large_gemm_flops(fit: GemmFit) -> float:
    """FLOP/s of a large GEMM."""
    m, n, k = LARGE_GEMM
    return float(2 * m * n * k / gemm_seconds(fit, m, n, k))


def streamed_bytes_per_s(fit: GemmFit) -> float:
    """Bytes/s of a GEMV whose weights exceed every cache."""
    m, n, k = LARGE_GEMV
    return float(n * k * fit.weight_bits / 8 / gemm_seconds(fit, m, n, k))


def choose_engine(frame: DataFrame, engine: str | None) -> str:
    """The engine whose rows are taken.

    Raises
    ------
    InvalidInputError
        If the asked one has none.
    """
    there = [str(name) for name in frame["engine"].unique()]
    if engine is not None:
        if engine not in there:
            raise InvalidInputError(f"no kernels of engine {engine!r}; the table holds {', '.join(there)}")
        return engine
    return next((name for name in ENGINE_ORDER if name in there), there[0])


def fit_gemm_rows(
    spec: GpuSpec, rows: DataFrame, label: str, engine: str, reference: str
) -> tuple[GemmFit, np.ndarray]:
    """A fit of one engine's GEMMs in one type, and which rows it was calibrated on."""
    dtype, weight_bits, activation_bits = DTYPE_LABELS[label]
    shapes = rows[["m", "n", "k"]].to_numpy(dtype=np.float64)
    chosen = choose_gemm_points(shapes)
    points = rows.iloc[chosen]
    native = spec.runs_as(dtype)
    fit = fit_gemm(
        points["m"],
        points["n"],
        points["k"],
        points["latency_us"].to_numpy(dtype=np.float64) * MICROSECOND,
        peak_flops=spec.dense_flops[native],
        peak_bytes_per_s=spec.bandwidth_bytes_per_s,
        sm_count=spec.sm_count,
        engine=engine,
        dtype=dtype,
        weight_bits=weight_bits,
        activation_bits=activation_bits,
        source=f"measured at {len(chosen)} shapes of {reference}",
    )
    return fit, chosen


def _gemms(spec: GpuSpec, frame: DataFrame | None, engine: str | None, reference: str) -> tuple[GemmFit, ...]:
    if frame is None:
        return ()
    fits = []
    for label in sorted({str(name) for name in frame["dtype"]}):
        rows = frame[frame["dtype"] == label]
        if label not in DTYPE_LABELS or spec.runs_as(DTYPE_LABELS[label].dtype) != DTYPE_LABELS[label].dtype:
            continue
        chosen = choose_engine(rows, engine)
        mine = rows[rows["engine"] == chosen].groupby(["m", "n", "k"])["latency_us"].median().reset_index()
        fits.append(fit_gemm_rows(spec, _from_memory(spec, mine, label), label, chosen, reference)[0])
    return tuple(sorted(fits, key=lambda fit: fit.dtype))


def _from_memory(spec: GpuSpec, rows: DataFrame, label: str) -> DataFrame:
    """Rows whose weights were never read faster than the memory can: a benchmark may find the others in a cache.

    The largest matrix that was, and every smaller one, are left out: between two layers of a model other layers pass,
    and no cache holds the weights.
    """
    _, weight_bits, activation_bits = DTYPE_LABELS[label]
    shapes = rows[["m", "n", "k"]].to_numpy(dtype=np.float64)
    seconds = rows["latency_us"].to_numpy(dtype=np.float64) * MICROSECOND
    real = served_from_memory(shapes, seconds, spec.bandwidth_bytes_per_s, weight_bits, activation_bits)
    weights = shapes[:, 1] * shapes[:, 2]
    kept = weights > weights[~real].max(initial=0.0)
    # Where that leaves too little to fit, the fit itself leaves single points out.
    return rows[kept].reset_index(drop=True) if kept.sum() >= MAX_POINTS else rows


def attention_fits(
    spec: GpuSpec, tables: KernelTables, engine: str | None
) -> tuple[PrefillAttentionFit | None, DecodeAttentionFit | None]:
    """Fits of prefill and decode attention, None where there is no table."""
    flops = max(spec.dense_flops.get(dtype, 0.0) for dtype in ("bf16", "fp16"))
    bandwidth = spec.bandwidth_bytes_per_s
    prefill = decode = None
    frame = tables.frames.get("attn_prefill")
    if frame is not None:
        table = attention_table(frame[frame["engine"] == choose_engine(frame, engine)], "prefill")
        points = table.rows(choose_prefill_points(table))
        prefill = fit_prefill_attention(points, peak_flops=flops, peak_bytes_per_s=bandwidth)
    frame = tables.frames.get("attn_decode")
    if frame is not None:
        table = attention_table(frame[frame["engine"] == choose_engine(frame, engine)], "decode")
        points = table.rows(choose_decode_points(table))
        decode = fit_decode_attention(points, peak_flops=flops, peak_bytes_per_s=bandwidth)
    return prefill, decode


def all_reduce_curves(frame: DataFrame | None, reference: str, host: str | None = None) -> tuple[AllReduceCurve, ...]:
    """All-reduce of each group size: the faster of vLLM's custom kernels and NCCL, where both were measured."""
    if frame is None:
        return ()
    curves = []
    rows = frame[frame["op_name"] == "all_reduce"]
    for size in sorted({int(count) for count in rows["num_gpus"]}):
        group = rows[rows["num_gpus"] == size]
        found = []
        for library in sorted(group["lib"].unique(), key=lambda name: (not str(name).startswith("vllm"), str(name))):
            if str(library).startswith("trtllm") and group["lib"].nunique() > 1:
                continue
            mine = group[group["lib"] == library].groupby("bytes", as_index=False)["latency_us"].median()
            found.append(
                fit_all_reduce(
                    mine["bytes"],
                    mine["latency_us"].to_numpy(dtype=np.float64) * MICROSECOND,
                    host=host,
                    tensor_parallel=size,
                    library=str(library),
                    source="measured",
                    reference=reference,
                )
            )
        curves.append(merge_all_reduces(found))
    return tuple(curves)
