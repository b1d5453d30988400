"""Learn hetplan/catalog/steps.py: what each engine's steps cost beside their kernels.

Run by hand: ``HETPLAN_DATA=folder python calibration/learn_steps.py [engine ...]``. Predicts each engine's measured
runs with the shipped calibrations and looks for the overheads that leave the least absolute log error, large errors
counted linearly. Prints the values and what is left; leaves each GPU and each model out in turn.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from hetplan.catalog.steps import STEP_OVERHEADS, StepOverheads
from hetplan.scoring.runs import MeasuredRun, read_runs
from hetplan.scoring.score import score_runs

# Engine -> its tables, groups that teach it, and the overheads that its runs can tell apart.
TAUGHT: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "tensorrt-llm-0.9": ("trtllm_docs/e2e_static_v0.9.0.csv", ("static", "TTFT"), ("step_s", "prefill_step_s")),
    "tensorrt-llm-0.14": (
        "trtllm_docs/offline_ifb_v0.14.0.csv",
        ("in-flight throughput (TensorRT-LLM 0.14), TP",),
        ("step_s", "rank_step_s", "all_reduce_factor"),
    ),
    "tensorrt-llm-1.0": (
        "aiconfigurator/e2e_online_silicon.csv", ("closed-loop TPOT, H100",), ("step_s", "prefill_layer_s")
    ),
    "vllm": ("aiconfigurator/e2e_online_silicon.csv", ("closed-loop TPOT, H100",), ("step_s", "prefill_layer_s")),
    "vllm-2023": (
        "splitwise/e2e_static.csv", ("static",), ("step_s", "rank_step_s")
    ),
    "sglang": ("aiconfigurator/e2e_online_silicon.csv", ("closed-loop TPOT, H200",), ("step_s", "prefill_layer_s")),
}  # fmt: skip
# Least value that the logarithm of an overhead can stand for, seconds.
LEAST = 1e-5
# Errors above this count linearly.
SCALE = 0.1


def runs_of(data: Path, engine: str) -> list[MeasuredRun]:
    """The runs that teach an engine."""
    table, groups, _ = TAUGHT[engine]
    return [
        run
        for run in read_runs(data / table)
        if run.engine == engine and run.excluded is None and run.group.startswith(groups)
    ]


def errors(runs: Iterable[MeasuredRun], overheads: StepOverheads) -> np.ndarray:
    """Log errors of the default estimator under some overheads."""
    kept = STEP_OVERHEADS[overheads.engine]
    STEP_OVERHEADS[overheads.engine] = overheads
    try:
        scored, _ = score_runs(runs, methods=("ours",))
    finally:
        STEP_OVERHEADS[overheads.engine] = kept
    return np.log([row.ours / row.measured for row in scored])


def learn(runs: list[MeasuredRun], start: StepOverheads, names: tuple[str, ...]) -> StepOverheads:
    """The overheads with the least error."""

    def at(x: np.ndarray) -> StepOverheads:
        return start.replace(**{name: float(np.exp(value)) for name, value in zip(names, x, strict=True)})

    def loss(x: np.ndarray) -> float:
        e = errors(runs, at(x)) / SCALE
        return float(np.mean(np.sqrt(1 + e * e) - 1))

    first = np.log([max(getattr(start, name), LEAST) for name in names])
    best = minimize(loss, first, method="Nelder-Mead", options={"xatol": 0.02, "fatol": 1e-4, "maxfev": 150})
    rounded = {name: float(f"{np.exp(value):.2g}") for name, value in zip(names, best.x, strict=True)}
    return start.replace(**{name: 0.0 if value < 3 * LEAST else value for name, value in rounded.items()})


def mean_error(log_errors: np.ndarray) -> float:
    """MAPE of some log errors."""
    return float(np.mean(np.abs(np.exp(log_errors) - 1)))


def left_out(runs: list[MeasuredRun], start: StepOverheads, names: tuple[str, ...], field: str) -> Mapping[str, float]:
    """MAPE on each value of a field, learnt from the others."""
    found = {}
    for value in sorted({getattr(run, field) for run in runs}):
        others = [run for run in runs if getattr(run, field) != value]
        mine = [run for run in runs if getattr(run, field) == value]
        if others:
            found[value] = mean_error(errors(mine, learn(others, start, names)))
    return found


def main() -> None:
    """Run the script."""
    data = Path(os.environ.get("HETPLAN_DATA") or sys.exit("set HETPLAN_DATA to the data folder"))
    for engine in sys.argv[1:] or TAUGHT:
        runs, names = runs_of(data, engine), TAUGHT[engine][2]
        learnt = learn(runs, STEP_OVERHEADS[engine], names)
        print(engine, {name: getattr(learnt, name) for name in names}, f"{len(runs)} runs")
        print(f"  in sample {mean_error(errors(runs, learnt)):.1%}")
        for field in ("gpu", "model"):
            for value, error in left_out(runs, learnt, names, field).items():
                own = mean_error(errors([run for run in runs if getattr(run, field) == value], learnt))
                print(f"  without {value}: {error:.1%} on it, {own:.1%} in sample")


if __name__ == "__main__":
    main()
