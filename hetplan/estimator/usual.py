"""What is usual of kernels that nobody measured: shares of a GPU's peaks, learnt from the GPUs that were.

`hetplan.calibration` starts its fits here and is drawn back to it by what its points do not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hetplan.catalog.dtypes import Dtype
from hetplan.catalog.kernels import DecodeAttentionFit, GemmFit, PrefillAttentionFit
from hetplan.estimator.gemm import OUTPUT_BITS, gemm_seconds

DEFAULT_SM_COUNT = 128  # between A100 (108), H100 (132) and L40S (142), where a datasheet gives none


class Default(NamedTuple):
    """A parameter's typical value over GPUs and its spread in the log (`FRACTIONS`: in the log odds)."""

    value: float
    spread: float


# Medians over A100, H100 and L40S with TensorRT-LLM and vLLM (calibration/learn_gemm.py). Rates are fractions of the
# datasheet's; throttle is boost over sustained rate, less one.
DEFAULTS: dict[str, Default] = {
    "compute": Default(1.0, 0.12),
    "bandwidth": Default(0.79, 0.1),
    "launch_s": Default(1.7e-6, 0.45),
    "wave_fraction": Default(0.23, 1.2),
    "k_step_s": Default(1.0e-9, 0.4),
    "fill_inputs": Default(750.0, 0.5),
    "split_s": Default(3.2e-6, 0.2),
    "throttle": Default(0.2, 1.2),
}
# Quantised activations: a pass over them first, and CUTLASS kernels that do not split k (H100 and L40S, vLLM fp8).
QUANTISED_DEFAULTS: dict[str, Default] = DEFAULTS | {
    "compute": Default(0.88, 0.12),
    "bandwidth": Default(0.76, 0.1),
    "launch_s": Default(1.7e-6, 0.9),
    "wave_fraction": Default(0.14, 0.9),
    "k_step_s": Default(0.5e-9, 0.9),
    "dispatch_fraction": Default(0.7, 1.0),
    "fill_inputs": Default(750.0, 1.0),
    "split_s": Default(30e-6, 0.2),
    "quantise_row_s": Default(8e-9, 0.4),
    "quantise_rate": Default(0.75, 0.45),
}


# Parameter -> its usual value, and by how much its logarithm varies between GPUs.
Prior = Mapping[str, tuple[float, float]]

# Printed by calibration/learn_attention.py from vLLM's kernels on A100-SXM, H100-SXM and L40S (aiconfigurator-core
# 0.12.0). With them TensorRT-LLM's kernels fit within 0.1 points as well as with priors of their own.
PREFILL_PRIOR: Prior = {
    "launch_s": (8.48e-6, 0.43),
    "compute": (0.59, 0.24),
    "block_alone": (0.0106, 0.24),
    "block_overhead_flops": (5.1e6, 0.63),
    "padding_tokens": (75.2, 0.46),
    "memory": (0.751, 0.54),
    "kv": (0.233, 0.24),
    "cache_gain": (1.91, 0.83),
    "cache_bytes": (2.32e7, 1.2),
}
DECODE_PRIOR: Prior = {
    "launch_s": (1.13e-5, 0.24),
    "split_s": (3.79e-6, 0.53),
    "memory": (0.814, 0.24),
    "cache_gain": (0.879, 1.2),
    "cache_bytes": (4.69e7, 0.71),
    "unsplit": (0.0513, 1.2),
    "split": (0.496, 0.44),
    "unit_s": (2.79e-8, 0.24),
    "head_s": (5.9e-10, 0.86),
    "compute": (0.266, 0.33),
}


def usual_gemm(
    peak_flops: float,
    peak_bytes_per_s: float,
    *,
    sm_count: int | None = None,
    engine: str = "any",
    dtype: Dtype = "bf16",
    weight_bits: float = 16,
    activation_bits: float = 16,
    defaults: Mapping[str, Default] | None = None,
) -> GemmFit:
    """What is typical of a GPU that nobody measured.

    Parameters
    ----------
    peak_flops : float
        Dense datasheet rate of the format that is multiplied (16-bit for weight-only quantisation).
    peak_bytes_per_s : float
        Datasheet memory bandwidth.
    sm_count : int, optional
        Streaming multiprocessors; `DEFAULT_SM_COUNT` if unknown.
    engine, dtype : str
        Labels.
    weight_bits, activation_bits : float
        Stored width of a weight, and width of an activation as multiplied.
    defaults : mapping, optional
        Shared defaults other than the shipped ones.
    """
    known = defaults if defaults is not None else gemm_defaults(activation_bits)
    start = {name: default.value for name, default in known.items()}
    return GemmFit(
        engine=engine,
        dtype=dtype,
        source="datasheet",
        sm_count=DEFAULT_SM_COUNT if sm_count is None else sm_count,
        weight_bits=weight_bits,
        activation_bits=activation_bits,
        **gemm_fields(start, peak_flops, peak_bytes_per_s),
    )


def gemm_defaults(activation_bits: float) -> dict[str, Default]:
    """What is usual of 16-bit activations, or of those that are quantised first."""
    return DEFAULTS if activation_bits >= OUTPUT_BITS else QUANTISED_DEFAULTS


def gemm_fields(values: Mapping[str, float], peak_flops: float, peak_bytes_per_s: float) -> dict[str, float]:
    """Dimensionless parameters of a GPU -> fields of `GemmFit`."""
    fields = dict(values)
    fields["boost_flops"] = fields.pop("compute") * peak_flops
    fields["sustained_flops"] = fields["boost_flops"] / (1 + fields.pop("throttle"))
    fields["bytes_per_s"] = fields.pop("bandwidth") * peak_bytes_per_s
    if "quantise_rate" in fields:
        fields["quantise_bytes_per_s"] = fields.pop("quantise_rate") * peak_bytes_per_s
    return fields


def usual_prefill_attention(
    peak_flops: float, peak_bytes_per_s: float, prior: Prior = PREFILL_PRIOR
) -> PrefillAttentionFit:
    """Prefill attention of a GPU that nobody measured: usual shares of the datasheet's dense 16-bit peaks."""
    values = {name: value for name, (value, _) in prior.items()}
    return PrefillAttentionFit(**prefill_fields(values, peak_flops, peak_bytes_per_s))


def usual_decode_attention(
    peak_flops: float, peak_bytes_per_s: float, prior: Prior = DECODE_PRIOR
) -> DecodeAttentionFit:
    """Decode attention of a GPU that nobody measured, in the same way."""
    values = {name: value for name, (value, _) in prior.items()}
    return DecodeAttentionFit(**decode_fields(values, peak_flops, peak_bytes_per_s))


def prefill_fields(values: Mapping[str, float], flops: float, bandwidth: float) -> dict[str, Any]:
    """Fields of the fit from shares of the peaks; ``block`` counts FLOPs, ``cache_gain`` is over memory."""
    return {
        "launch_s": values["launch_s"],
        "compute_flops": values["compute"] * flops,
        "block_flops": values["block_alone"] * flops,
        "block_s": values["block_overhead_flops"] / flops,
        "padding_tokens": values["padding_tokens"],
        "memory_bytes_per_s": values["memory"] * bandwidth,
        "kv_bytes_per_s": values["kv"] * bandwidth,
        "cached_bytes_per_s": values["memory"] * bandwidth * (1 + values["cache_gain"]),
        "cache_bytes": values["cache_bytes"],
        "correction": None,
    }


def decode_fields(values: Mapping[str, float], flops: float, bandwidth: float) -> dict[str, Any]:
    """Fields of a decode attention fit from shares of the peaks; ``cache_gain`` is over memory."""
    return {
        "launch_s": values["launch_s"],
        "split_s": values["split_s"],
        "memory_bytes_per_s": values["memory"] * bandwidth,
        "cached_bytes_per_s": values["memory"] * bandwidth * (1 + values["cache_gain"]),
        "cache_bytes": values["cache_bytes"],
        "unsplit_bytes_per_s": values["unsplit"] * bandwidth,
        "split_bytes_per_s": values["split"] * bandwidth,
        "unit_s": values["unit_s"],
        "head_s": values["head_s"],
        "compute_flops": values["compute"] * flops,
        "correction": None,
    }


class Peaks(NamedTuple):
    """Peaks of which the usual shares meet some measured rates."""

    flops: float
    bytes_per_s: float


def peaks_behind(flops: float, bytes_per_s: float) -> Peaks:
    """The peaks of a GPU whose large GEMMs and GEMVs were measured, and nothing else.

    Parameters
    ----------
    flops : float
        Rate of large GEMMs.
    bytes_per_s : float
        Rate of GEMVs that stream large weights.
    """
    peaks = Peaks(flops, bytes_per_s)
    # The two hardly meet: GEMMs of this size are bound by one, GEMVs by the other.
    for _ in range(3):
        fit = usual_gemm(*peaks)
        m, side = 4096.0, 8192.0
        computed = 2 * m * side * side / float(gemm_seconds(fit, m, side, side))
        streamed = 2 * side * 4 * side / float(gemm_seconds(fit, 1.0, 4 * side, side))
        peaks = Peaks(peaks.flops * flops / computed, peaks.bytes_per_s * bytes_per_s / streamed)
    return peaks
