"""Effective rates of a GPU, from its calibration, with the source of each."""

from __future__ import annotations

from hetplan.catalog.calibration import Calibration, Quantity
from hetplan.catalog.dtypes import DTYPE_BITS, Dtype
from hetplan.catalog.hardware import GpuSpec


def compute_rate(calibration: Calibration, gpu: GpuSpec, dtype: Dtype) -> Quantity:
    """Effective FLOP/s of a GPU in a type: calibrated, or the 16-bit rate scaled by the datasheet's ratio.

    A type that the calibration lacks takes the other 16-bit type's rate, or that rate times the ratio of
    the datasheet's peaks; the source then says so.
    """
    if dtype in calibration.compute_flops:
        return calibration.compute_flops[dtype]
    for base in ("bf16", "fp16"):
        known = calibration.compute_flops.get(base)
        if known is None:
            continue
        if DTYPE_BITS[dtype] == DTYPE_BITS[base]:
            return known
        peak, base_peak = gpu.dense_flops.get(dtype), gpu.dense_flops.get(base)
        if peak is not None and base_peak is not None:
            return Quantity(
                value=known.value * peak / base_peak,
                source=known.source if known.source == "datasheet" else "assumed",
                reference=f"{base} rate ({known.reference}) x datasheet ratio of {dtype} to {base}",
            )
        return known
    return next(iter(calibration.compute_flops.values()))
