"""Fit hetplan/catalog/data/calibrations/<GPU>.json from tables that others measured.

Run by hand, after import_tables.py: ``HETPLAN_DATA=folder python calibration/derive_scalars.py``. The
folder holds ``aiconfigurator/gemm_<GPU>.csv``, ``helix/per_layer.csv``, ``vidur/layer_ops.csv`` and
``argonne/e2e_static.csv``; its README explains them. Only the scalars are kept.

- compute: median rate of large GEMMs (m >= 1024, n and k >= 4096), one engine's kernels;
- memory: median rate of GEMVs whose weights exceed 128 MiB, more than any L2 here (smaller ones were
  partly timed out of the L2: L40S shows up to 2 TB/s);
- kernel: mean time of norm, rotary, activation and add at up to 16 tokens;
- step: what is left of a batch-1 decode step after weights and kernels.

A type that nobody measured stays out: the estimator scales it from the 16-bit rate, and says so.

Helix's whole layers stand in where no GEMM table exists: prefill FLOPs over time from a third of the
longest prompt up, decode weight bytes over time at 2 requests of the 70B model, whose KV cache is small
beside its weights (the 30B model has no grouped KV heads, and the context is not stated).
"""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from statistics import fmean, median

from hetplan.catalog.calibration import Calibration, Quantity, Source
from hetplan.catalog.dtypes import Dtype
from hetplan.catalog.hardware import GpuSpec
from hetplan.catalog.tables import datasheet_calibration, get_gpu
from hetplan.units import MIB

CALIBRATIONS = Path(__file__).resolve().parent.parent / "hetplan" / "catalog" / "data" / "calibrations"
Row = dict[str, str]

LARGE_TOKENS = 1024
LARGE_SIDE = 4096
BEYOND_L2_BYTES = 128 * MIB
SMALL_TOKENS = 16
SMALL_KERNELS = ("input_layernorm_ms", "post_attention_layernorm_ms", "attn_rope_ms", "mlp_act_ms", "add_ms")
# Two norms, rotary with KV write, activation, attention: as the calibrated estimator counts them.
KERNELS_PER_LAYER = 5

# Weights of one decoder layer: attention (query and output, key and value), gated MLP.
LLAMA_2_70B_LAYER = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672
LLAMA_1_30B_LAYER = 4 * 6656**2 + 3 * 6656 * 17920
HELIX_LAYERS = {"llama1_30b": LLAMA_1_30B_LAYER, "llama2_70b": LLAMA_2_70B_LAYER}
AICONFIGURATOR = "aiconfigurator-core 0.12.0 (NVIDIA)"
HELIX = "Helix per-layer tables, TP 1"


def read(path: Path) -> list[Row]:
    """All rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rounded(value: float) -> float:
    """Four digits: more than any of these measurements holds."""
    return float(f"{value:.4g}")


def quantity(value: float, source: Source, reference: str) -> Quantity:
    """A number of a calibration, rounded."""
    return Quantity(value=rounded(value), source=source, reference=reference)


def helix_rates(data: Path, gpu: str) -> tuple[float, float]:
    """FLOP/s of prefill layers and bytes/s of a decode layer."""
    compute: list[float] = []
    rows = [row for row in read(data / "helix" / "per_layer.csv") if row["gpu"] == gpu and row["tp"] == "1"]
    for model, weights in HELIX_LAYERS.items():
        prompts = [(int(r["tokens_or_requests"]), float(r["layer_ms"]) * 1e-3)
                   for r in rows if r["model"] == model and r["phase"] == "prefill"]  # fmt: skip
        longest = max((tokens for tokens, _ in prompts), default=0)
        compute += [2 * weights * tokens / seconds for tokens, seconds in prompts if tokens * 3 >= longest]
    decode = next(
        float(row["layer_ms"]) * 1e-3
        for row in rows
        if row["model"] == "llama2_70b" and row["phase"] == "decode" and row["tokens_or_requests"] == "2"
    )
    return median(compute), 2 * LLAMA_2_70B_LAYER / decode


def kernel_s(data: Path, gpu: str) -> float:
    """Mean time of a kernel that is neither GEMM nor attention."""
    rows = [
        row for row in read(data / "vidur" / "layer_ops.csv")
        if row["gpu"] == gpu and int(row["num_tokens"]) <= SMALL_TOKENS
    ]  # fmt: skip
    return fmean(float(row[name]) * 1e-3 for row in rows for name in SMALL_KERNELS if row[name])


def sixteen_bit(gpu: GpuSpec, value: float, source: Source, reference: str) -> dict[Dtype, Quantity]:
    """One rate for bf16 and fp16, whichever the GPU has: tensor cores run both alike."""
    halves: tuple[Dtype, ...] = ("bf16", "fp16")
    return {dtype: quantity(value, source, reference) for dtype in halves if dtype in gpu.dense_flops}


def build(data: Path) -> dict[str, Calibration]:
    """Every shipped calibration, by GPU."""
    kernel = quantity(
        2e-6, "assumed", "a small kernel inside a CUDA graph: between what vidur's layer profiles show with launch "
        f"({kernel_s(data, 'a100') * 1e6:.1f} us on A100, {kernel_s(data, 'h100') * 1e6:.1f} us on H100) and none",
    )  # fmt: skip
    a100, a100_40, h100, h200 = map(get_gpu, ("A100-SXM4-80GB", "A100-SXM4-40GB", "H100-SXM5-80GB", "H200-SXM-141GB"))
    a100_pcie, l40s, l4, t4 = map(get_gpu, ("A100-PCIE-80GB", "L40S", "L4", "T4"))

    def tables(gpu: GpuSpec) -> Calibration:
        found = Calibration.fit(gpu.name, data / "aiconfigurator")
        # Collectives are a host's: links.csv and all_reduce.csv carry them.
        return found.replace(all_reduces=(), points=())

    a100_fit, h100_fit, l40s_fit = (tables(gpu) for gpu in (a100, h100, l40s))
    helix_a100, helix_l4, helix_t4 = (helix_rates(data, name) for name in ("A100", "L4", "T4"))
    decode = f"weight bytes over time of a llama2-70b decode layer at 2 requests, rounded to 0.1 ms at source: {HELIX}"
    prefill = f"whole prefill layers, attention included: {HELIX}"
    a100_share = a100_fit.memory_bytes_per_s.value / a100.bandwidth_bytes_per_s
    share = h100_fit.memory_bytes_per_s.value / h100.bandwidth_bytes_per_s
    calibrations = [
        a100_fit,
        borrow(
            a100_fit, a100_40, bytes_per_s=helix_a100[1], reference=f"{decode}. That its A100 is the 40 GB part is "
            "inferred; the 80 GB part reaches the same share of its peak",
        ),
        borrow(
            a100_fit, a100_pcie,
            bytes_per_s=a100_pcie.bandwidth_bytes_per_s * a100_share,
            reference="its datasheet's bandwidth times the share of its own that A100-SXM4-80GB reaches",
        ),
        h100_fit,
        borrow(
            h100_fit, h200, bytes_per_s=h200.bandwidth_bytes_per_s * share,
            reference=f"its datasheet's 4800 GB/s times the {share:.3f} of its datasheet that H100-SXM5-80GB reaches",
        ),
        l40s_fit,
        Calibration(
            gpu=l4.name,
            compute_flops=sixteen_bit(
                l4, 55e12, "published",
                "ShuntServe, section 7.1.5, about 55 TFLOP/s in GEMMs; Helix's whole prefill layers, attention "
                f"included, run at {helix_l4[0] / 1e12:.0f}",
            ),
            memory_bytes_per_s=quantity(helix_l4[1], "measured", decode),
            kernel_s=kernel,
        ),
        Calibration(
            gpu=t4.name,
            compute_flops=sixteen_bit(
                t4, helix_t4[0] * 55e12 / helix_l4[0], "measured",
                f"{prefill}, over the share of GEMM rates that L4's layers reach ({helix_l4[0] / 55e12:.2f})",
            ),
            memory_bytes_per_s=quantity(helix_t4[1], "measured", decode),
            kernel_s=kernel,
        ),
        datasheet_calibration(get_gpu("A10G")),
        datasheet_calibration(get_gpu("B200-SXM-180GB")),
    ]  # fmt: skip
    return {found.gpu: found.replace(kernel_s=kernel) for found in calibrations}


def borrow(owner: Calibration, gpu: GpuSpec, *, bytes_per_s: float, reference: str) -> Calibration:
    """The calibration of a GPU of the same chip and power with another memory."""
    ratio = bytes_per_s / owner.memory_bytes_per_s.value
    prefill, decode = owner.prefill_attention, owner.decode_attention
    if prefill is None or decode is None:
        raise ValueError(f"{owner.gpu} has no attention kernels to borrow")
    where = f"as on {owner.gpu}, the same chip"
    return owner.replace(
        gpu=gpu.name,
        compute_flops=dict(datasheet_calibration(gpu).compute_flops)
        | {
            dtype: quantity(q.value, "assumed", f"{where}: {q.reference}")
            for dtype, q in owner.compute_flops.items()
            if q.source == "measured"
        },
        memory_bytes_per_s=quantity(bytes_per_s, "assumed", reference),
        gemms=tuple(
            fit.replace(bytes_per_s=fit.bytes_per_s * ratio, source=f"assumed {where}; {fit.source}")
            for fit in owner.gemms
        ),
        prefill_attention=prefill.replace(
            memory_bytes_per_s=prefill.memory_bytes_per_s * ratio, kv_bytes_per_s=prefill.kv_bytes_per_s * ratio
        ),
        decode_attention=decode.replace(
            memory_bytes_per_s=decode.memory_bytes_per_s * ratio,
            cached_bytes_per_s=max(decode.cached_bytes_per_s, decode.memory_bytes_per_s * ratio),
        ),
    )


def main() -> None:
    """Run the script."""
    data = Path(os.environ.get("HETPLAN_DATA") or sys.exit("set HETPLAN_DATA to the data folder"))

    def show(found: Quantity | None, unit: float) -> str:
        return "-" if found is None else f"{found.value / unit:.4g} ({found.source})"

    print("GPU | 16-bit TFLOP/s | fp8 TFLOP/s | GB/s")
    for name, found in build(data).items():
        found.save(CALIBRATIONS / f"{name}.json")
        half = found.compute_flops.get("bf16") or found.compute_flops["fp16"]
        cells = [show(half, 1e12), show(found.compute_flops.get("fp8"), 1e12), show(found.memory_bytes_per_s, 1e9)]
        print(" | ".join([name, *cells]))


if __name__ == "__main__":
    main()
