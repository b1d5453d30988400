"""Learn the error bands in hetplan/estimator/bands.py from held-out runs that others measured.

Run by hand: ``HETPLAN_DATA=folder python calibration/learn_bands.py``. Each GPU is predicted with its own calibration
points and with engine overheads learnt from the other GPUs; an engine that ran on one GPU is held out by model, or by
tensor-parallel degree where it ran one model. The bands are the 5% and 95% quantiles of measured over predicted time,
tables weighing alike. Then each table is covered by the bands of the other tables' and GPUs' rows, and the share
inside printed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from learn_steps import TAUGHT, learn

from hetplan.catalog.calibration import Calibration
from hetplan.catalog.steps import STEP_OVERHEADS, StepOverheads
from hetplan.catalog.tables import datasheet_calibration, get_calibration, get_gpu
from hetplan.estimator.bands import TIME_BANDS
from hetplan.scoring.runs import MeasuredRun, read_runs
from hetplan.scoring.score import score_runs

RATES = ("output_tokens_per_s",)
BORROWED = ("H200-SXM-141GB", "A100-PCIE-80GB", "A100-SXM4-40GB")
# Engines of other days are scored, but say nothing about what is served today.
PAST = ("vllm-2023",)
LEVEL = 0.9


@dataclass(frozen=True)
class Residual:
    """Log of measured over predicted time of one run."""

    table: str
    gpu: str
    kind: str
    basis: str
    value: float


def kind_of(metric: str) -> str:
    """The quantities that have a band of their own."""
    return metric if metric in ("ttft_s", "tpot_s") else "request"


def folds(runs: list[MeasuredRun]) -> Iterator[tuple[list[MeasuredRun], list[MeasuredRun]]]:
    """(learn from, held out): by GPU, else by model, else by degree."""
    for field in ("gpu", "model", "tensor_parallel"):
        values = sorted({getattr(run, field) for run in runs})
        if len(values) > 1:
            for value in values:
                yield (
                    [run for run in runs if getattr(run, field) != value],
                    [run for run in runs if getattr(run, field) == value],
                )
            return


def with_overheads(overheads: StepOverheads, runs: list[MeasuredRun], basis: str) -> list[Residual]:
    """Residuals of some runs under learnt overheads and a kind of calibration."""
    method = "paper" if basis == "paper" else "ours"
    kept = STEP_OVERHEADS[overheads.engine]
    STEP_OVERHEADS[overheads.engine] = overheads
    try:
        found = []
        for run in runs:
            scored, _ = score_runs([run], calibrations={run.gpu: calibration_of(run.gpu, basis)}, methods=(method,))
            for row in scored:
                ratio = row.measured / getattr(row, method)
                time_ratio = 1 / ratio if run.metric in RATES else ratio
                found.append(Residual(run.table, run.gpu, kind_of(run.metric), basis, float(np.log(time_ratio))))
        return found
    finally:
        STEP_OVERHEADS[overheads.engine] = kept


def calibration_of(gpu: str, basis: str) -> Calibration:
    """A GPU's calibration, reduced to what a basis says was measured."""
    own = get_calibration(gpu)
    if basis == "datasheet":
        return datasheet_calibration(get_gpu(gpu))
    if basis == "rates":
        return own.replace(gemms=(), prefill_attention=None, decode_attention=None)
    return own


def residuals(data: Path) -> list[Residual]:
    """Everything that is held out, under every basis."""
    found: list[Residual] = []
    tables = sorted({table for table, _, _ in TAUGHT.values()})
    for table in tables:
        everything = [run for run in read_runs(data / table) if run.excluded is None and "outliers" not in run.group]
        for engine, (own_table, _, names) in TAUGHT.items():
            if engine in PAST:
                continue
            runs = [run for run in everything if run.engine == engine and own_table == table]
            measured = [run for run in runs if run.gpu not in BORROWED]
            for others, held_out in folds(measured):
                learnt = learn(others, STEP_OVERHEADS[engine], names)
                for basis in ("fitted", "rates", "datasheet", "paper"):
                    found += with_overheads(learnt, held_out, basis)
            borrowed = [run for run in runs if run.gpu in BORROWED]
            found += with_overheads(STEP_OVERHEADS[engine], borrowed, "borrowed")
    return found


def band(rows: list[Residual]) -> tuple[float, float]:
    """Quantiles over rows, each table weighing alike."""
    tables = [row.table for row in rows]
    weights = np.array([1 / tables.count(row.table) for row in rows])
    order = np.argsort([row.value for row in rows])
    values = np.array([row.value for row in rows])[order]
    share = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    tail = (1 - LEVEL) / 2
    return float(np.exp(np.interp(tail, share, values))), float(np.exp(np.interp(1 - tail, share, values)))


def shipped(everything: list[Residual], basis: str) -> None:
    """Print what the bands in the code hold of the held-out rows."""
    rows = [row for row in everything if row.basis == basis]
    bands = [np.log(TIME_BANDS[basis, row.kind]) for row in rows]
    inside = np.mean([low <= row.value <= high for row, (low, high) in zip(rows, bands, strict=True)])
    half = np.median([(np.exp(high) - np.exp(low)) / 2 for low, high in bands])
    print(f"{basis}: shipped bands hold {inside:.1%} of {len(rows)} held-out rows, median half-width {half:.0%}")


def main() -> None:
    """Run the script."""
    data = Path(os.environ.get("HETPLAN_DATA") or sys.exit("set HETPLAN_DATA to the data folder"))
    everything = residuals(data)
    for basis in ("fitted", "borrowed", "rates", "datasheet", "paper"):
        shipped(everything, basis)
        for kind in ("ttft_s", "tpot_s", "request"):
            rows = [row for row in everything if (row.basis, row.kind) == (basis, kind)]
            if not rows:
                continue
            low, high = band(rows)
            print(
                f'("{basis}", "{kind}"): ({low:.2f}, {high:.2f}),  {len(rows)} rows, {(high - low) / 2:.0%} half-width'
            )
            for table, gpu in sorted({(row.table, row.gpu) for row in rows}):
                mine = [row for row in rows if (row.table, row.gpu) == (table, gpu)]
                others = [row for row in rows if (row.table, row.gpu) != (table, gpu)]
                if others:
                    low, high = np.log(band(others))
                    inside = np.mean([low <= row.value <= high for row in mine])
                    print(f"    {table} {gpu}: {inside:.0%} of {len(mine)} inside the others' band")


if __name__ == "__main__":
    main()
