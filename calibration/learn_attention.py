"""Learn the defaults of the attention models over GPUs, and score the models.

``HETPLAN_DATA=folder python calibration/learn_attention.py``. The folder holds ``aiconfigurator/attn_*_<GPU>.csv``.
Prints priors (``hetplan/calibration/attention.py`` has vLLM's), then mean absolute relative errors, their median and
the median signed error, in percent, on every kernel that was not fitted to: with priors from all GPUs (in sample),
from the others (left out), from the others and no points at all (datasheet), and of a roofline at the datasheet's
peaks.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import hetplan.calibration.attention as models
from hetplan.calibration.attention import AttentionTable, Prior
from hetplan.catalog.tables import get_gpu
from hetplan.estimator.attention import DecodeAttentionFit, PrefillAttentionFit

FloatArray = NDArray[np.float64]
GPUS = ("A100-SXM-80GB", "H100-SXM", "L40S")
ENGINES = ("vllm", "trtllm")

# Where the search for the priors starts, with spreads so wide that a thousand kernels decide.
PREFILL_START: Prior = {
    "launch_s": (1e-5, 1.0),
    "compute": (0.6, 1.0),
    "block_alone": (0.012, 1.0),
    "block_overhead_flops": (6e6, 1.0),
    "padding_tokens": (100.0, 1.0),
    "memory": (0.7, 1.0),
    "kv": (0.4, 1.0),
    "cache_gain": (1.5, 1.0),
    "cache_bytes": (4e7, 1.0),
}
DECODE_START: Prior = {
    "launch_s": (9e-6, 1.0),
    "split_s": (3e-6, 1.0),
    "memory": (0.9, 1.0),
    "cache_gain": (1.5, 1.0),
    "cache_bytes": (4.7e7, 1.0),
    "unsplit": (0.04, 1.0),
    "split": (0.3, 1.0),
    "unit_s": (3e-8, 1.0),
    "head_s": (5e-10, 1.0),
    "compute": (0.4, 1.0),
}
# Every fifth row teaches a prior: the rest would only take time.
STRIDE = 5
# Least spread of a parameter between GPUs (three of them agree by chance), and allowance for GPUs unlike these.
LEAST_SPREAD, WIDER = 0.2, 1.2


def read(data: Path, phase: str, gpu: str, engine: str) -> AttentionTable:
    """Kernels of one engine on one GPU."""
    with (data / "aiconfigurator" / f"attn_{phase}_{gpu}.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["engine"] == engine]

    def column(name: str) -> FloatArray:
        return np.array([float(row[name]) for row in rows])

    return AttentionTable(
        sequences=column("batch"),
        tokens=column("isl" if phase == "prefill" else "kv_len"),
        heads=column("n_heads"),
        kv_heads=column("n_kv_heads"),
        seconds=column("latency_us") * 1e-6,
        head_dim=column("head_dim"),
        prefix_tokens=column("prefix_len") if phase == "prefill" and "prefix_len" in rows[0] else 0.0,
    )


def peaks(gpu: str) -> tuple[float, float]:
    """Dense 16-bit FLOP/s and bytes/s of the datasheet."""
    spec = get_gpu(gpu)
    return spec.dense_flops.get("bf16", 0.0) or spec.dense_flops["fp16"], spec.bandwidth_bytes_per_s


def values_of(phase: str, table: AttentionTable, gpu: str) -> dict[str, float]:
    """Dimensionless parameters fitted to a fifth of all kernels."""
    flops, bandwidth = peaks(gpu)
    part = table.rows(np.arange(0, len(table.seconds), STRIDE))
    start = PREFILL_START if phase == "prefill" else DECODE_START

    def seconds(values: dict[str, float]) -> FloatArray:
        if phase == "prefill":
            fields = models._prefill(values, flops, bandwidth)
            return part.prefill_seconds(PrefillAttentionFit.model_construct(**fields))
        return part.decode_seconds(DecodeAttentionFit.model_construct(**models._decode(values, flops, bandwidth)))

    starts = (start["cache_bytes"][0],) if phase == "prefill" else models.CACHE_STARTS_BYTES
    return models._fit(seconds, part.seconds, start, starts)


def prior_from(found: list[dict[str, float]]) -> Prior:
    """Mean and spread over GPUs, of logarithms."""
    prior: dict[str, tuple[float, float]] = {}
    for name in found[0]:
        logs = np.log([values[name] for values in found])
        spread = float(np.clip(logs.std(), LEAST_SPREAD, 1.0)) * WIDER
        prior[name] = (float(f"{np.exp(logs.mean()):.3g}"), float(f"{spread:.2g}"))
    return prior


def score(predicted: FloatArray, table: AttentionTable, rows: NDArray[np.bool_]) -> str:
    """MAPE / median / bias in percent."""
    error = 100 * (predicted / table.seconds - 1)[rows]
    return f"{np.abs(error).mean():5.1f} /{np.median(np.abs(error)):5.1f} /{np.median(error):+6.1f}"


def roofline(phase: str, table: AttentionTable, gpu: str) -> FloatArray:
    """The longer of FLOPs and bytes at the datasheet's peaks."""
    flops, bandwidth = peaks(gpu)
    dim = np.asarray(table.head_dim)
    if phase == "prefill":
        work = 4 * dim * table.heads * table.sequences * table.pairs
        moved = 4 * dim * table.sequences * table.tokens * (table.heads + table.kv_heads)
    else:
        work = 4 * dim * table.heads * table.sequences * table.tokens
        moved = table.kv_bytes
    return np.asarray(np.maximum(work / flops, moved / bandwidth))


def parts(phase: str, table: AttentionTable, held: NDArray[np.bool_]) -> dict[str, NDArray[np.bool_]]:
    """Kernels that are scored apart."""
    if phase == "prefill":
        return {"all": held}
    large = table.kv_bytes > models.LARGE_KV_BYTES
    packed = table.heads <= models.MOST_QUERIES_PER_KV_HEAD * table.kv_heads
    return {"large KV": held & large, "large, <=32 q/kv": held & large & packed, "small KV": held & ~large}


def main() -> None:
    """Print priors and scores."""
    data = Path(os.environ["HETPLAN_DATA"])
    for phase in ("prefill", "decode"):
        for engine in ENGINES:
            tables = {gpu: read(data, phase, gpu, engine) for gpu in GPUS}
            if phase == "decode":
                taught = {
                    gpu: table.rows(np.flatnonzero(table.heads <= models.MOST_QUERIES_PER_KV_HEAD * table.kv_heads))
                    for gpu, table in tables.items()
                }
            else:
                taught = tables
            found = {gpu: values_of(phase, table, gpu) for gpu, table in taught.items()}
            every = prior_from(list(found.values()))
            print(f"\n{phase} {engine} prior: {every}")
            for gpu in GPUS:
                print("   ", gpu, {name: float(f"{value:.3g}") for name, value in found[gpu].items()})
            for gpu, table in tables.items():
                others = prior_from([found[other] for other in GPUS if other != gpu])
                report(phase, gpu, table, every, others)


def report(phase: str, gpu: str, table: AttentionTable, every: Prior, others: Prior) -> None:
    """Print the scores of one GPU."""
    flops, bandwidth = peaks(gpu)
    choose = models.choose_prefill_points if phase == "prefill" else models.choose_decode_points
    chosen = choose(table)
    held = np.ones(len(table.seconds), dtype=bool)
    held[chosen] = False
    points = table.rows(chosen)
    predictions: dict[str, FloatArray] = {}
    for name, prior in (("in sample", every), ("left out", others)):
        known = {"peak_flops": flops, "peak_bytes_per_s": bandwidth}
        if phase == "prefill":
            prefill = models.fit_prefill_attention(points, **known, prior=prior)
            predictions[name] = table.prefill_seconds(prefill)
            predictions[f"{name}, no correction"] = table.prefill_seconds(prefill.replace(correction=None))
        else:
            decode = models.fit_decode_attention(points, **known, prior=prior)
            predictions[name] = table.decode_seconds(decode)
            predictions[f"{name}, no correction"] = table.decode_seconds(decode.replace(correction=None))
    if phase == "prefill":
        predictions["datasheet"] = table.prefill_seconds(
            models.datasheet_prefill_attention(flops, bandwidth, prior=others)
        )
    else:
        predictions["datasheet"] = table.decode_seconds(
            models.datasheet_decode_attention(flops, bandwidth, prior=others)
        )
    predictions["roofline"] = roofline(phase, table, gpu)
    print(f"  {gpu}: {len(chosen)} points, {held.sum()} held out")
    for name, predicted in predictions.items():
        scores = "   ".join(f"{p}: {score(predicted, table, r)}" for p, r in parts(phase, table, held).items())
        print(f"    {name:24} {scores}")


if __name__ == "__main__":
    main()
