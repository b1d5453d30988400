"""A calibration from a run of `hetplan.calibration.measure.measure`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from hetplan.calibration.attention import AttentionTable, fit_decode_attention, fit_prefill_attention
from hetplan.calibration.collectives import fit_all_reduce
from hetplan.calibration.device_names import gpu_of
from hetplan.calibration.fit import large_gemm_flops, streamed_bytes_per_s
from hetplan.calibration.gemm import fit_gemm
from hetplan.calibration.lattice import NORM_KERNELS, NORM_PASSES, Kind
from hetplan.calibration.processors import fit_serial_decode, fit_serial_gemm, fit_serial_prefill
from hetplan.calibration.raw_run import CalibrationRun
from hetplan.catalog.calibration import Calibration, CalibrationPoint, Quantity
from hetplan.catalog.dtypes import DTYPE_BITS, Dtype, dtype_bytes
from hetplan.catalog.hardware import GpuSpec
from hetplan.catalog.kernels import AllReduceCurve, DecodeAttentionFit, GemmFit, PrefillAttentionFit
from hetplan.catalog.tables import datasheet_calibration, get_gpu, list_gpus
from hetplan.errors import InvalidInputError
from hetplan.estimator.gemm import OUTPUT_BITS
from hetplan.estimator.usual import DEFAULTS, QUANTISED_DEFAULTS, Peaks, gemm_defaults

_LIBRARY: dict[Kind, str] = {"cuda": "nccl", "rocm": "rccl", "cpu": "gloo"}
# A launch cannot be told from nothing below this.
_LEAST_KERNEL_S = 1e-7
# The pass that quantises activations: a run times the kernel behind it, which takes them quantised.
_QUANTISING = ("quantise_row_s", "quantise_rate")
_TWINS: dict[Dtype, Dtype] = {"bf16": "fp16", "fp16": "bf16"}


def fit_run(run: CalibrationRun, gpu: str | GpuSpec | None = None) -> Calibration:
    """Fit the kernels of a measured run.

    Parameters
    ----------
    run : CalibrationRun
    gpu : str or GpuSpec, optional
        Which GPU the device is; by default the catalogued one of the device's name, ``local-cpu`` for a CPU. A name
        that the catalogue lacks takes its peaks from the run itself.

    Returns
    -------
    Calibration
        Fits of what was measured, with the points behind them; what was not keeps the datasheet's numbers and says so.

    Raises
    ------
    UnknownNameError
        If the device is not in the catalogue and ``gpu`` is not given.
    InvalidInputError
        If the run holds no gemm or gemv.
    """
    spec, name = _device(run, gpu)
    matrices: dict[Dtype, list[CalibrationPoint]] = {}
    for point in run.points:
        if point.operation in ("gemm", "gemv"):
            matrices.setdefault(point.dtype, []).append(point)
    if not matrices:
        raise InvalidInputError("a calibration is made of GEMMs at least; measure the operations gemm and gemv too")
    gemms = [_gemm(run, spec, dtype, points) for dtype, points in matrices.items()]
    reference = f"{run.device.name}, {run.device.engine}"

    def measured(value: float, what: str) -> Quantity:
        return Quantity(value=value, source="measured", reference=f"{what}, {reference}", observed_on=run.measured_on)

    compute = {} if spec is None else dict(datasheet_calibration(spec).compute_flops)
    for fit in gemms:
        compute[fit.dtype] = measured(large_gemm_flops(fit), "large GEMMs")
        twin = _TWINS.get(fit.dtype)
        if twin is not None and twin not in matrices and spec is not None and twin in spec.native_dtypes:
            compute[twin] = compute[fit.dtype]
    # Weights of the widest type stream with the fewest instructions per byte.
    widest = max(gemms, key=lambda fit: DTYPE_BITS[fit.dtype])
    memory = measured(streamed_bytes_per_s(widest), "GEMVs")
    kernel_s = _kernel_s(run.points, memory.value)
    prefill, decode = _attention(run, spec, widest)
    return Calibration(
        gpu=name,
        compute_flops=compute,
        memory_bytes_per_s=memory,
        kernel_s=_assumed_kernel_s() if kernel_s is None else measured(kernel_s, "norms of one token"),
        gemms=tuple(sorted(gemms, key=lambda fit: fit.dtype)),
        prefill_attention=prefill,
        decode_attention=decode,
        all_reduces=_all_reduces(run, reference),
        points=run.points,
        device=run.device.name,
        driver=run.device.driver,
        engine=run.device.engine,
        measured_on=run.measured_on,
    )


def _device(run: CalibrationRun, gpu: str | GpuSpec | None) -> tuple[GpuSpec | None, str]:
    """Datasheet and name; no datasheet where the catalogue has none."""
    if isinstance(gpu, GpuSpec):
        return gpu, gpu.name
    if gpu is None:
        name = gpu_of(run.device)
        return get_gpu(name), name
    known = {name.lower(): name for name in list_gpus()}.get(gpu.strip().lower())
    return (None, gpu.strip()) if known is None else (get_gpu(known), known)


def _gemm(run: CalibrationRun, spec: GpuSpec | None, dtype: Dtype, points: Sequence[CalibrationPoint]) -> GemmFit:
    m, n, k = (_column(points, name) for name in "mnk")
    seconds = np.array([point.seconds for point in points])
    engine = run.device.engine.split(" ")[0]
    source = f"measured: {len(points)} points on {run.device.name}"
    if run.device.kind == "cpu":
        threads = run.device.threads or 1
        return fit_serial_gemm(m, n, k, seconds, threads=threads, dtype=dtype, engine=engine, source=source)
    peaks = _peaks(run, spec, dtype)
    bits = DTYPE_BITS[dtype]
    fit = fit_gemm(
        m,
        n,
        k,
        seconds,
        peak_flops=peaks.flops,
        peak_bytes_per_s=peaks.bytes_per_s,
        sm_count=None if spec is None else spec.sm_count,
        engine=engine,
        dtype=dtype,
        weight_bits=bits,
        activation_bits=bits,
        source=source,
        defaults={name: value for name, value in gemm_defaults(bits).items() if name not in _QUANTISING},
    )
    if bits >= OUTPUT_BITS:
        return fit
    row_s, rate = (QUANTISED_DEFAULTS[name].value for name in _QUANTISING)
    return fit.replace(quantise_row_s=row_s, quantise_bytes_per_s=rate * peaks.bytes_per_s)


def _peaks(run: CalibrationRun, spec: GpuSpec | None, dtype: Dtype) -> Peaks:
    """The datasheet's, else those of which the largest measured rates are the usual shares."""
    if spec is not None and dtype in spec.dense_flops:
        return Peaks(spec.dense_flops[dtype], spec.bandwidth_bytes_per_s)
    points = [p for p in run.points if p.operation in ("gemm", "gemv") and p.dtype == dtype]
    m, n, k = (_column(points, name) for name in "mnk")
    seconds = np.array([point.seconds for point in points])
    flops = float((2 * m * n * k / seconds).max()) / DEFAULTS["compute"].value
    if spec is not None:
        return Peaks(flops, spec.bandwidth_bytes_per_s)
    read = float((n * k * dtype_bytes(dtype) / seconds).max())
    return Peaks(flops, read / DEFAULTS["bandwidth"].value)


def _kernel_s(points: Sequence[CalibrationPoint], bytes_per_s: float) -> float | None:
    """Seconds of a small kernel: norms of one token, less what they move."""
    launches = []
    for point in points:
        if point.operation == "norm" and point.shape["tokens"] == 1:
            moved = NORM_PASSES * point.shape["hidden"] * dtype_bytes(point.dtype)
            launches.append((point.seconds - moved / bytes_per_s) / NORM_KERNELS)
    return max(_LEAST_KERNEL_S, median(launches)) if launches else None


def _assumed_kernel_s() -> Quantity:
    return datasheet_calibration(get_gpu(list_gpus()[0])).kernel_s


def _attention(
    run: CalibrationRun, spec: GpuSpec | None, gemm: GemmFit
) -> tuple[PrefillAttentionFit | None, DecodeAttentionFit | None]:
    prefill, decode = (_table(run, operation) for operation in ("attention_prefill", "attention_decode"))
    if run.device.kind == "cpu":
        return (
            None if prefill is None else fit_serial_prefill(prefill, gemm),
            None if decode is None else fit_serial_decode(decode, gemm),
        )
    if spec is None:
        peaks = _peaks(run, spec, gemm.dtype)
    else:
        flops = max(spec.dense_flops.get(dtype, 0.0) for dtype in ("bf16", "fp16"))
        peaks = Peaks(flops, spec.bandwidth_bytes_per_s)
    flops, bandwidth = peaks
    return (
        None if prefill is None else fit_prefill_attention(prefill, peak_flops=flops, peak_bytes_per_s=bandwidth),
        None if decode is None else fit_decode_attention(decode, peak_flops=flops, peak_bytes_per_s=bandwidth),
    )


def _table(run: CalibrationRun, operation: str) -> AttentionTable | None:
    """The points of an operation in the type that has most of them, the first of equals."""
    counts = Counter(point.dtype for point in run.points if point.operation == operation)
    if not counts:
        return None
    ((dtype, _),) = counts.most_common(1)
    points = [p for p in run.points if p.operation == operation and p.dtype == dtype]
    return AttentionTable(
        sequences=_column(points, "batch"),
        tokens=_column(points, "tokens"),
        heads=_column(points, "heads"),
        kv_heads=_column(points, "kv_heads"),
        seconds=np.array([point.seconds for point in points]),
        head_dim=_column(points, "head_dim"),
        kv_element_bytes=dtype_bytes(dtype),
    )


def _all_reduces(run: CalibrationRun, reference: str) -> tuple[AllReduceCurve, ...]:
    groups: dict[int, list[CalibrationPoint]] = {}
    for point in run.points:
        if point.operation == "all_reduce":
            groups.setdefault(point.shape["tensor_parallel"], []).append(point)
    return tuple(
        fit_all_reduce(
            _column(points, "message_bytes"),
            [point.seconds for point in points],
            host=None,
            tensor_parallel=degree,
            library=_LIBRARY[run.device.kind],
            source="measured",
            reference=reference,
        )
        for degree, points in sorted(groups.items())
        if len(points) > 1
    )


def _column(points: Sequence[CalibrationPoint], name: str) -> NDArray[np.float64]:
    return np.array([float(point.shape[name]) for point in points])
