"""Predictions beside measurements: errors by group, the worst rows, ranking, and the share inside the bands.

Each run is predicted three ways, always: from the datasheet (the paper's roofline over the vendor's peaks), as the
paper does (its roofline over calibrated rates), and by the default estimator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from hetplan.catalog.calibration import Calibration
from hetplan.catalog.models import get_model
from hetplan.catalog.tables import datasheet_calibration, default_instance_type, get_calibration, get_gpu
from hetplan.errors import HetplanError
from hetplan.estimator.prediction import predict_replicas
from hetplan.estimator.replica import make_replica
from hetplan.problem.placement import EstimatorName
from hetplan.scoring.runs import MeasuredRun

FloatArray = NDArray[np.float64]
METHODS = ("datasheet", "paper", "ours")
# Two measurements closer than this do not rank.
TIE = 0.02


@dataclass(frozen=True, slots=True)
class Scored:
    """One measured value and its three predictions, the last with its band. ``label`` says which row it is."""

    group: str
    label: str
    measured: float
    datasheet: float
    paper: float
    ours: float
    low: float
    high: float
    source: str
    # What is alike in rows whose order is compared, the GPUs of this one, and whether its values are times.
    peers: tuple[object, ...] | None = None
    gpus: int = 1
    is_time: bool = False

    def error(self, method: str) -> float:
        """Signed relative error of a method's prediction."""
        return float(getattr(self, method)) / self.measured - 1

    def per_gpu(self, value: float) -> float:
        """What a GPU gives for a value of this row: its share of a rate, or the inverse of all GPUs' time."""
        return 1 / (value * self.gpus) if self.is_time else value / self.gpus


@dataclass(frozen=True, slots=True)
class GroupScore:
    """Errors of a group, as fractions: mean absolute, median absolute, median signed, for each method.

    NaN where a method has no prediction, or no row a band.
    """

    group: str
    rows: int
    mean_error: Mapping[str, float]
    median_error: Mapping[str, float]
    bias: Mapping[str, float]
    inside_band: float
    half_width: float
    worst: tuple[Scored, ...]
    pairs_ranked: int
    pairs_right: Mapping[str, int]
    ties: int
    left_out: Mapping[str, int]


def score_runs(
    runs: Iterable[MeasuredRun],
    *,
    calibrations: Mapping[str, Calibration] | None = None,
    engine: str | None = None,
    methods: Sequence[str] = METHODS,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Scored], dict[str, dict[str, int]]]:
    """Predict every run that is not excluded.

    Parameters
    ----------
    runs : iterable of MeasuredRun
    calibrations : mapping of str to Calibration, optional
        By GPU name, instead of the shipped ones.
    engine : str, optional
        Whose step overheads to take for all rows, instead of each row's own.
    methods : sequence of str
        Which to predict with; the others are NaN.
    on_progress : callable, optional
        Called with rows done and rows in all.

    Returns
    -------
    scored : list of Scored
    left_out : dict of str to dict of str to int
        Rows that were not scored, by group and reason.
    """
    own = calibrations or {}
    kept: dict[tuple[object, ...], list[MeasuredRun]] = {}
    left_out: dict[str, dict[str, int]] = {}
    everything = list(runs)
    for run in everything:
        if run.excluded is not None:
            count_left_out(left_out, run.group, run.excluded)
            continue
        key = (run.gpu, run.model, run.weight_dtype, run.kv_dtype, run.tensor_parallel, run.pipeline_parallel,
               run.schedule, run.engine)  # fmt: skip
        kept.setdefault(key, []).append(run)
    scored: list[Scored] = []
    done = len(everything) - sum(len(rows) for rows in kept.values())
    for rows in kept.values():
        try:
            scored += _score_alike(rows, own, engine, methods, left_out)
        except HetplanError as error:
            for run in rows:
                count_left_out(left_out, run.group, str(error))
        done += len(rows)
        if on_progress is not None:
            on_progress(done, len(everything))
    return scored, left_out


def count_left_out(left_out: dict[str, dict[str, int]], group: str, reason: str, rows: int = 1) -> None:
    """Add rows that are not scored to a group's reasons."""
    if rows:
        reasons = left_out.setdefault(group, {})
        reasons[reason] = reasons.get(reason, 0) + rows


def _score_alike(
    rows: Sequence[MeasuredRun],
    own: Mapping[str, Calibration],
    engine: str | None,
    methods: Sequence[str],
    left_out: dict[str, dict[str, int]],
) -> list[Scored]:
    """Rows that differ in their load and metric only: each method predicts them in one call."""
    run = rows[0]
    gpu = get_gpu(run.gpu)
    machine = default_instance_type(gpu)
    spec = get_model(run.model).with_dtypes(weight_dtype=run.weight_dtype, kv_dtype=run.kv_dtype)
    calibration = own.get(gpu.name) or get_calibration(gpu)
    load = tuple(
        np.array([float(getattr(r, name)) for r in rows]) for name in ("batch", "input_tokens", "output_tokens")
    )
    ways: dict[str, tuple[Calibration, EstimatorName]] = {
        "datasheet": (datasheet_calibration(gpu), "paper"),
        "paper": (calibration, "paper"),
        "ours": (calibration, "calibrated"),
    }
    columns: dict[str, dict[str, FloatArray]] = {}
    source = ""
    for method in methods:
        used, estimator = ways[method]
        replica = make_replica(
            spec,
            machine,
            used,
            tensor_parallel=run.tensor_parallel,
            pipeline_parallel=run.pipeline_parallel,
            schedule=run.schedule,
            engine=engine or run.engine,
            estimator=estimator,
            # A run that was measured did fit: what the engine reserves is not asked here.
            gpu_memory_utilization=1.0 if run.schedule != "closed_loop" else 0.9,
        )
        columns[method] = predict_replicas(replica, *load)
        source = replica.source
    scored = []
    for at, measured in enumerate(rows):
        values = dict.fromkeys(METHODS, float("nan"))
        values |= {method: float(columns[method][measured.metric][at]) for method in methods}
        if not all(np.isfinite(values[method]) for method in methods):
            count_left_out(left_out, measured.group, "does not fit the memory by our account")
            continue
        band = columns[methods[-1]]
        scored.append(
            Scored(
                group=measured.group,
                label=(
                    f"{measured.table}:{measured.line} {spec.name} {gpu.name} TP{measured.tensor_parallel} "
                    f"batch {measured.batch:g} {measured.input_tokens:g}/{measured.output_tokens:g}"
                ),
                measured=measured.value,
                **values,
                low=float(band[f"{measured.metric}_low"][at]),
                high=float(band[f"{measured.metric}_high"][at]),
                source=source,
                peers=_peers(measured),
                gpus=measured.tensor_parallel * measured.pipeline_parallel,
                is_time=measured.metric != "output_tokens_per_s",
            )
        )
    return scored


def _peers(run: MeasuredRun) -> tuple[object, ...]:
    """What is alike in runs whose order is compared: all but the number of GPUs, and what follows from it."""
    batch = None if run.schedule == "in_flight" else run.batch
    load = (run.schedule, batch, run.input_tokens, run.output_tokens)
    return run.table, run.metric, run.engine, run.gpu, run.model, run.weight_dtype, run.kv_dtype, *load


def summarise(
    scored: Iterable[Scored], left_out: Mapping[str, Mapping[str, int]], *, worst: int = 3
) -> list[GroupScore]:
    """Errors by group, in the order in which the groups came."""
    groups: dict[str, list[Scored]] = {}
    for one in scored:
        groups.setdefault(one.group, []).append(one)
    for name in left_out:
        groups.setdefault(name, [])
    return [_group_score(name, rows, left_out.get(name, {}), worst) for name, rows in groups.items()]


def _group_score(name: str, rows: list[Scored], left_out: Mapping[str, int], worst: int) -> GroupScore:
    errors = {method: np.array([row.error(method) for row in rows]) for method in METHODS}
    # Kernels have no band.
    banded = [row for row in rows if not math.isnan(row.low)]
    inside = np.array([row.low <= row.measured <= row.high for row in banded])
    widths = np.array([(row.high - row.low) / 2 / row.ours for row in banded])
    ranked, right, ties = rank_pairs(rows)

    def over(function: Callable[[FloatArray], np.floating], values: FloatArray) -> float:
        return float(function(values)) if len(values) else float("nan")

    return GroupScore(
        group=name,
        rows=len(rows),
        mean_error={m: over(np.mean, np.abs(e)) for m, e in errors.items()},
        median_error={m: over(np.median, np.abs(e)) for m, e in errors.items()},
        bias={m: over(np.median, e) for m, e in errors.items()},
        inside_band=over(np.mean, inside.astype(np.float64)),
        half_width=over(np.median, widths),
        worst=tuple(sorted(rows, key=lambda row: -abs(row.error("ours")))[:worst]),
        pairs_ranked=ranked,
        pairs_right=right,
        ties=ties,
        left_out=left_out,
    )


def rank_pairs(rows: Iterable[Scored]) -> tuple[int, dict[str, int], int]:
    """Pairs of rows that differ in their number of GPUs alone: which gives more per GPU, and who says so.

    Returns
    -------
    ranked : int
        Pairs that are not ties.
    right : dict of str to int
        Pairs that each method orders as measured.
    ties : int
        Pairs within 2%.
    """
    alike: dict[tuple[object, ...], list[Scored]] = {}
    for row in rows:
        if row.peers is not None:
            alike.setdefault(row.peers, []).append(row)
    ranked, ties = 0, 0
    right = dict.fromkeys(METHODS, 0)
    for peers in alike.values():
        for a, b in combinations(peers, 2):
            if a.gpus == b.gpus:
                continue
            measured = a.per_gpu(a.measured) / b.per_gpu(b.measured)
            if abs(measured - 1) <= TIE:
                ties += 1
                continue
            ranked += 1
            for method in METHODS:
                predicted = a.per_gpu(getattr(a, method)) / b.per_gpu(getattr(b, method))
                right[method] += (predicted > 1) == (measured > 1)
    return ranked, right, ties
