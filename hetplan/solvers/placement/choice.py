"""What placement solvers share once they have shapes: the batch of a pipeline, and the objective of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hetplan.estimator.base import Estimator, FloatArray
from hetplan.estimator.pipeline import (
    PipelineRates,
    StageShape,
    egress_usd_per_hour,
    micro_batch,
    pipeline_rates,
    sequences_that_fit,
)
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import PipelineChoice

# Times summed in another order differ in their last digits: a limit that a plan just reaches is kept.
LIMIT_TOLERANCE = 1e-9


def value_of(problem: PlacementProblem, rates: PipelineRates) -> FloatArray:
    """(B,) requests/s after the latency penalty of eq. 7; minus infinity where a hard limit is broken."""
    value = rates.requests_per_s
    if problem.slo is None:
        return value
    measured = {"ttft_s": rates.ttft_s, "tpot_s": rates.tpot_s, "e2e_s": rates.latency_s}
    ratios = [measured[name] / limit for name, limit in problem.slo.limits().items()]
    excess = np.maximum(np.max(ratios, axis=0) - 1.0, 0.0)
    if problem.slo.hard:
        return np.where(excess > LIMIT_TOLERANCE, -np.inf, value)
    return np.asarray(value * (1.0 - problem.latency_penalty * excess))


def choose_batch(
    problem: PlacementProblem, estimator: Estimator, stages: tuple[StageShape, ...], offers: tuple[str, ...]
) -> tuple[PipelineChoice, float] | None:
    """The pipeline at its best micro-batch and the value there; None when nothing fits or a hard limit breaks.

    In paper mode the batch is the largest that fits (eq. 6); otherwise the one of the highest value, the
    smallest among equals.
    """
    most = micro_batch(estimator, sequences_that_fit(problem, estimator, stages), len(stages))
    if most < 1:
        return None
    largest_only = not estimator.micro_batches and problem.slo is None
    batches = np.arange(most if largest_only else 1, most + 1)
    rates = pipeline_rates(problem, estimator, stages, batches)
    values = value_of(problem, rates)
    if estimator.micro_batches:
        best = int(np.argmax(values))
    else:
        allowed = np.flatnonzero(values > -np.inf)
        best = int(allowed[-1]) if allowed.size else 0
    if values[best] == -math.inf:
        return None
    egress = egress_usd_per_hour(problem, estimator, stages, float(rates.requests_per_s[best]))
    return PipelineChoice(stages, offers, int(batches[best]), egress), float(values[best])


def offer_prices(problem: PlacementProblem) -> dict[str, float]:
    """Dollars an hour of each offer, by name."""
    return {pool.offer.name: pool.offer.billed_usd_per_hour for pool in problem.cluster.pools}


def cost_of(problem: PlacementProblem, pipelines: Sequence[PipelineChoice]) -> float:
    """Dollars an hour of some pipelines: of their machines, and of what they send over zone links."""
    prices = offer_prices(problem)
    machines = sum(prices[offer] for pipeline in pipelines for offer in pipeline.offers)
    return machines + sum(pipeline.egress_usd_per_hour for pipeline in pipelines)


def objective_of(problem: PlacementProblem, pipelines: Sequence[PipelineChoice], values: Sequence[float]) -> float:
    """The plan's objective: total value, total value per cost, or cost."""
    if problem.objective == "cost":
        return cost_of(problem, pipelines)
    total = sum(values)
    if problem.objective == "throughput_per_cost":
        return total / cost_of(problem, pipelines)
    return total


def tighter(problem: PlacementProblem, bound: float, than: float) -> bool:
    """True when a proven bound says more than another: higher for costs, lower otherwise."""
    return bound > than if problem.objective == "cost" else bound < than


def better(problem: PlacementProblem, objective: float, than: float | None) -> bool:
    """True when an objective beats another: lower for costs, higher otherwise."""
    if than is None:
        return True
    return objective < than if problem.objective == "cost" else objective > than
