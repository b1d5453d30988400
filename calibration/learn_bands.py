"""Learn the error bands of the default estimator from static batches that others measured.

Run by hand: ``HETPLAN_DATA=... python calibration/learn_bands.py``. Predicts every row with the shipped
calibration and with datasheet rates alone, prints the quantiles of measured over predicted time, and so
gives the factors in hetplan/estimator/bands.py. Rows that the source's notes call wrong are left out:
Argonne rows faster than reading the weights, Splitwise prefills of batch 64 at two GPUs.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import hetplan as hp
from hetplan.catalog.tables import datasheet_calibration, get_calibration, get_gpu
from hetplan.errors import HetplanError

_MODELS = {
    "LLaMA 7B": "llama-2-7b",
    "LLaMA 70B": "llama-2-70b",
    "Mistral 7B": "mistral-7b",
    "llama2-70b": "llama-2-70b",
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-2-70b-hf": "llama-2-70b",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    # The same shapes as 3.1.
    "meta-llama/Meta-Llama-3-8B": "llama-3.1-8b",
    "meta-llama/Meta-Llama-3-70B": "llama-3.1-70b",
}
_GPUS = {
    "H100": "H100-SXM5-80GB",
    "L40S": "L40S",
    "h100-80gb": "H100-SXM5-80GB",
    "a100-80gb": "A100-SXM4-80GB",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One measured run. ``quantity``: "ttft_s", "tpot_s" or "latency_s"."""

    source: str
    model: str
    gpu: str
    degree: int
    batch: int
    input_tokens: int
    output_tokens: int
    quantity: str
    seconds: float
    fp8: bool = False


def rows(data: Path) -> Iterator[Row]:
    """All rows that are scored."""
    for r in _read(data / "trtllm_docs" / "e2e_static_v0.9.0.csv"):
        if r["model"] not in _MODELS or (r["gpu"] == "L40S" and r["tp"] != "1"):
            continue
        batch, tokens = int(r["batch"]), (int(r["isl"]), int(r["osl"]))
        gpu = "A100-SXM4-80GB" if r["gpu"] == "A100" else _GPUS[r["gpu"]]
        quantity, seconds = "ttft_s", float(r["value"]) / 1e3
        if r["metric"] == "out_tok_s_total":
            quantity, seconds = "latency_s", batch * tokens[1] / float(r["value"])
        shape = (int(r["tp"]), batch, *tokens)
        yield Row("trtllm-static", _MODELS[r["model"]], gpu, *shape, quantity, seconds, r["precision"] == "FP8")
    for r in _read(data / "argonne" / "e2e_static.csv"):
        if r["model"] not in _MODELS or r["below_weight_read_bound"] == "1":
            continue
        gpu = "A100-SXM4-40GB" if r["gpu"] == "A100" else _GPUS[r["gpu"]]
        tokens = (int(r["io_len"]), int(r["io_len"]))
        name = f"argonne-{r['engine']}"
        shape = (int(r["tp"]), int(r["batch"]), *tokens)
        yield Row(name, _MODELS[r["model"]], gpu, *shape, "latency_s", float(r["latency_s"]))
    for r in _read(data / "splitwise" / "e2e_static.csv"):
        shape = (int(r["tp"]), int(r["batch"]), int(r["isl"]), int(r["osl"]))
        yield Row("splitwise", _MODELS[r["model"]], _GPUS[r["gpu"]], *shape, "tpot_s", float(r["tpot_ms"]) / 1e3)
        if not (shape[0] == 2 and shape[1] == 64):
            yield Row("splitwise", _MODELS[r["model"]], _GPUS[r["gpu"]], *shape, "ttft_s", float(r["prefill_ms"]) / 1e3)


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def ratio(row: Row, *, datasheet: bool) -> float | None:
    """Measured over predicted time; None when the prediction is refused."""
    calibration = datasheet_calibration(get_gpu(row.gpu)) if datasheet else get_calibration(row.gpu)
    try:
        prediction = hp.predict(
            row.model,
            row.gpu,
            tensor_parallel=row.degree,
            batch=row.batch,
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            weight_dtype="fp8" if row.fp8 else None,
            calibration=calibration,
            gpu_memory_utilization=1.0,
        )
    except HetplanError:
        return None
    return row.seconds / float(getattr(prediction, row.quantity))


def main() -> None:
    """Print quantiles per source and quantity, then the pooled factors."""
    data = Path(os.environ["HETPLAN_DATA"])
    scored = list(rows(data))
    for datasheet in (False, True):
        print("datasheet rates" if datasheet else "shipped calibrations")
        groups: dict[str, list[float]] = {}
        refused = 0
        for row in scored:
            value = ratio(row, datasheet=datasheet)
            if value is None:
                refused += 1
                continue
            groups.setdefault(f"{row.source} {row.quantity}", []).append(value)
            groups.setdefault(f"all {row.quantity}", []).append(value)
        for name, values in sorted(groups.items()):
            low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
            error = float(np.mean(np.abs(1 / np.asarray(values) - 1)))
            shares = f"5% {low:5.2f} median {middle:5.2f} 95% {high:5.2f}"
            print(f"  {name:34s} n={len(values):4d} {shares} MAPE {error:.1%}")
        print(f"  refused {refused}")
        # Sources count alike, so that the largest does not decide.
        by_source = [np.asarray(v) for name, v in groups.items() if not name.startswith("all ")]
        low = float(np.mean([np.quantile(v, 0.05) for v in by_source]))
        high = float(np.mean([np.quantile(v, 0.95) for v in by_source]))
        print(f"  band on a time: {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
