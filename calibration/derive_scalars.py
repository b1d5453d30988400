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
# Layers, and weights that a decode step reads: all but the embedding.
BATCH_1_MODELS = {
    "meta-llama/Llama-2-7b-hf": (32, 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096),
    "meta-llama/Meta-Llama-3-8B": (32, 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096),
    "mistralai/Mistral-7B-v0.1": (32, 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 32000 * 4096),
}

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


def gemm_rates(data: Path, table: str, engine: str, dtype: str, element_bytes: int) -> tuple[float, float]:
    """FLOP/s of large GEMMs and bytes/s of large GEMVs."""
    compute, memory = [], []
    for row in read(data / "aiconfigurator" / f"gemm_{table}.csv"):
        m, n, k, seconds = int(row["m"]), int(row["n"]), int(row["k"]), float(row["latency_us"]) * 1e-6
        if row["engine"] != engine or row["dtype"] != dtype or min(n, k) < LARGE_SIDE:
            continue
        if m >= LARGE_TOKENS:
            compute.append(2 * m * n * k / seconds)
        if m == 1 and n * k * element_bytes >= BEYOND_L2_BYTES:
            memory.append(n * k * element_bytes / seconds)
    return median(compute), median(memory)


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


def step_s(data: Path, gpu: str, memory_bytes_per_s: float, kernel: float) -> float:
    """Median over models and engines of a batch-1 decode step less its weights and kernels."""
    left = []
    for row in read(data / "argonne" / "e2e_static.csv"):
        single = row["tp"] == "1" and row["batch"] == "1" and row["io_len"] == "128"
        if row["gpu"] != gpu or not single or row["below_weight_read_bound"] != "0":
            continue
        if row["model"] in BATCH_1_MODELS and row["engine"] in ("vLLM", "TensorRT-LLM"):
            layers, weights = BATCH_1_MODELS[row["model"]]
            step = float(row["latency_s"]) / int(row["io_len"])
            left.append(step - 2 * weights / memory_bytes_per_s - layers * KERNELS_PER_LAYER * kernel)
    return median(left)


def sixteen_bit(gpu: GpuSpec, value: float, source: Source, reference: str) -> dict[Dtype, Quantity]:
    """One rate for bf16 and fp16, whichever the GPU has: tensor cores run both alike."""
    halves: tuple[Dtype, ...] = ("bf16", "fp16")
    return {dtype: quantity(value, source, reference) for dtype in halves if dtype in gpu.dense_flops}


def build(data: Path) -> dict[str, Calibration]:
    """Every shipped calibration, by GPU."""
    vidur = "mean of norm, rotary, activation and add at up to 16 tokens, vidur layer profile of {}"
    kernels = {name: kernel_s(data, name) for name in ("a40", "a100", "h100")}

    def kernel(name: str, source: Source = "measured") -> Quantity:
        where = vidur.format(name.upper()) + ("" if source == "measured" else ", borrowed")
        return quantity(kernels[name], source, where)

    def gemm(gpu: GpuSpec, table: str, engine: str, release: str) -> tuple[dict[Dtype, Quantity], Quantity]:
        flops, rate = gemm_rates(data, table, engine, "bfloat16", 2)
        where = f"gemm_{table}.csv, {engine} {release}, {AICONFIGURATOR}"
        compute = sixteen_bit(gpu, flops, "measured", f"bfloat16 GEMMs with m >= 1024, n and k >= 4096: {where}")
        if engine == "vllm" and "fp8" in gpu.dense_flops:
            eight, _ = gemm_rates(data, table, engine, "fp8", 1)
            compute["fp8"] = quantity(eight, "measured", f"fp8 GEMMs with m >= 1024, n and k >= 4096: {where}")
        return compute, quantity(rate, "measured", f"bfloat16 GEMVs with weights from 128 MiB: {where}")

    a100, a100_40, h100, h200 = map(get_gpu, ("A100-SXM4-80GB", "A100-SXM4-40GB", "H100-SXM5-80GB", "H200-SXM-141GB"))
    l40s, l4, t4 = map(get_gpu, ("L40S", "L4", "T4"))
    a100_compute, a100_memory = gemm(a100, "A100-SXM-80GB", "trtllm", "1.0.0")
    h100_compute, h100_memory = gemm(h100, "H100-SXM", "vllm", "0.24.0")
    l40s_compute, l40s_memory = gemm(l40s, "L40S", "vllm", "0.24.0")

    argonne = (
        "batch-1 decode less weights and kernels, median over 7-8B models, vLLM and TensorRT-LLM: "
        "Argonne {} static runs"
    )
    helix_a100, helix_l4, helix_t4 = (helix_rates(data, name) for name in ("A100", "L4", "T4"))
    a100_step = step_s(data, "A100", helix_a100[1], kernels["a100"])
    h100_step = step_s(data, "H100", h100_memory.value, kernels["h100"])

    def borrowed_step(value: float, name: str) -> Quantity:
        return quantity(value, "assumed", f"as on {name}: {argonne.format(name)}")

    decode = f"weight bytes over time of a llama2-70b decode layer at 2 requests, rounded to 0.1 ms at source: {HELIX}"
    prefill = f"whole prefill layers, attention included: {HELIX}"
    calibrations = [
        Calibration(
            gpu=a100.name, compute_flops=a100_compute, memory_bytes_per_s=a100_memory, kernel_s=kernel("a100"),
            step_s=borrowed_step(a100_step, "A100"),
        ),
        Calibration(
            gpu=a100_40.name,
            compute_flops=sixteen_bit(
                a100_40, a100_compute["bf16"].value, "measured",
                f"A100-SXM4-80GB's GEMMs (the same chip at the same power); Helix's whole prefill layers on an A100 "
                f"run at {helix_a100[0] / 1e12:.0f} TFLOP/s",
            ),
            memory_bytes_per_s=quantity(
                helix_a100[1], "measured",
                f"{decode}. That its A100 is the 40 GB part is inferred; the 80 GB part reaches the same share "
                "of its peak",
            ),
            kernel_s=kernel("a100"),
            step_s=quantity(a100_step, "measured", argonne.format("A100")),
        ),
        Calibration(
            gpu=h100.name, compute_flops=h100_compute, memory_bytes_per_s=h100_memory, kernel_s=kernel("h100"),
            step_s=quantity(h100_step, "measured", argonne.format("H100")),
        ),
        Calibration(
            gpu=h200.name,
            compute_flops={
                d: quantity(q.value, "assumed", f"measured on H100-SXM5-80GB, the same chip and power: {q.reference}")
                for d, q in h100_compute.items()
            },
            memory_bytes_per_s=quantity(
                h200.bandwidth_bytes_per_s * h100_memory.value / h100.bandwidth_bytes_per_s, "assumed",
                f"its datasheet's 4800 GB/s times the {h100_memory.value / h100.bandwidth_bytes_per_s:.3f} of its "
                "datasheet that H100-SXM5-80GB reaches",
            ),
            kernel_s=kernel("h100", "assumed"),
            step_s=borrowed_step(h100_step, "H100"),
        ),
        Calibration(
            gpu=l40s.name, compute_flops=l40s_compute, memory_bytes_per_s=l40s_memory,
            kernel_s=kernel("a40", "assumed"), step_s=borrowed_step(a100_step, "A100"),
        ),
        Calibration(
            gpu=l4.name,
            compute_flops=sixteen_bit(
                l4, 55e12, "published",
                "ShuntServe, section 7.1.5, about 55 TFLOP/s; Helix's whole prefill layers run at "
                f"{helix_l4[0] / 1e12:.0f}",
            ),
            memory_bytes_per_s=quantity(helix_l4[1], "measured", decode),
            kernel_s=kernel("a40", "assumed"),
            step_s=borrowed_step(a100_step, "A100"),
        ),
        Calibration(
            gpu=t4.name,
            compute_flops=sixteen_bit(t4, helix_t4[0], "measured", prefill),
            memory_bytes_per_s=quantity(helix_t4[1], "measured", decode),
            kernel_s=kernel("a40", "assumed"),
            step_s=borrowed_step(a100_step, "A100"),
        ),
        datasheet_calibration(get_gpu("A10G")).replace(
            kernel_s=kernel("a40", "assumed"), step_s=borrowed_step(a100_step, "A100")
        ),
        datasheet_calibration(get_gpu("B200-SXM-180GB")).replace(
            kernel_s=kernel("h100", "assumed"), step_s=borrowed_step(h100_step, "H100")
        ),
    ]  # fmt: skip
    return {found.gpu: found for found in calibrations}


def main() -> None:
    """Run the script."""
    data = Path(os.environ.get("HETPLAN_DATA") or sys.exit("set HETPLAN_DATA to the data folder"))

    def show(found: Quantity | None, unit: float) -> str:
        return "-" if found is None else f"{found.value / unit:.4g} ({found.source})"

    print("GPU | 16-bit TFLOP/s | fp8 TFLOP/s | GB/s | kernel us | step ms")
    for name, found in build(data).items():
        found.save(CALIBRATIONS / f"{name}.json")
        half = found.compute_flops.get("bf16") or found.compute_flops["fp16"]
        cells = [show(half, 1e12), show(found.compute_flops.get("fp8"), 1e12), show(found.memory_bytes_per_s, 1e9)]
        print(" | ".join([name, *cells, show(found.kernel_s, 1e-6), show(found.step_s, 1e-3)]))


if __name__ == "__main__":
    main()
