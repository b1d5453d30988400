"""Sets of machines, and the best pipeline on each: what `exact` chooses among.

A set is a tuple with the number of machines of every pool. Much is known of a set before its best pipeline is: a rate
that none exceeds, and a rate that the relaxation of `covering` reaches. Both are computed as far as they are asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hetplan.estimator.base import Estimator, FloatArray
from hetplan.estimator.pipeline import egress_usd_per_hour, micro_batch, pipeline_rates, sequences_that_fit
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers import threads
from hetplan.solvers.base import PipelineChoice
from hetplan.solvers.placement.chain import machine_sets
from hetplan.solvers.placement.choice import value_of
from hetplan.solvers.placement.spaces import ESTIMATING, MOST_BOXES, Machines, Space, seconds_left
from hetplan.solvers.placement.tables import build_tables, stage_options

# A rate is the best to this relative tolerance.
EXACT = 2e-10
# Boxes after which a pipeline in order that is near to what the relaxation reaches is good enough.
_BOXES_NEAR = 2000
# Machines that have few enough orders for the best to be found.
_FEW_ORDERS = 4
# Partial pipelines that a search under latency limits keeps.
_MOST_LABELS, _SECONDS_OF_LABELS = 10_000_000, 20.0


@dataclass(slots=True)
class Rated:
    """What is known of a set of machines.

    Attributes
    ----------
    upper : float
        No pipeline on it is worth more.
    reached : float
        What a pipeline is worth in the relaxation; 0 where none is known.
    value : float or None
        What ``choice`` is worth; None until it was looked for.
    choice : PipelineChoice or None
    """

    upper: float
    reached: float = 0.0
    value: float | None = None
    choice: PipelineChoice | None = None

    @property
    def worth(self) -> float:
        """The most that it may be worth; what its pipeline is worth once that is known."""
        return self.upper if self.value is None else self.value


@dataclass
class Columns:
    """All sets of machines of a problem, each rated as far as it was asked for.

    Without ``egress`` no pipeline sends over a zone link that costs something. ``unanswered`` are sets whose search
    ended before it knew whether there is a better pipeline.
    """

    problem: PlacementProblem
    estimator: Estimator
    deadline: float = math.inf
    egress: bool = True
    rated: dict[Machines, Rated] = field(default_factory=dict)
    unanswered: set[Machines] = field(default_factory=set)

    def __post_init__(self) -> None:
        pools = self.problem.cluster.pools
        options = stage_options(self.problem, list(range(len(pools))), whole_nodes=False)
        self.counts: Machines = tuple(pool.count for pool in pools)
        self.costs = np.array([pool.offer.billed_usd_per_hour for pool in pools])
        # For costs, more than the demand is worth nothing.
        self.cap = np.inf
        if self.problem.objective == "cost":
            self.cap = self.problem.workload.requests_per_s or 0.0
        self.limited = self.problem.slo is not None
        self.tables = build_tables(self.problem, self.estimator, options, egress=self.egress)
        self.spaces = [Space(self.problem, self.estimator, self.tables, one) for one in machine_sets(self.problem)]
        self.spaces = [space for space in self.spaces if space.pools]

    def rate(self, machines: Machines, *, least: float = 0.0, tolerance: float = 1e-2) -> Rated:
        """What a set is worth in the relaxation, as far as that is more than ``least``."""
        known = self.rated.get(machines)
        if known is not None and (
            known.value is not None or known.upper <= least or known.upper <= known.reached * (1 + 2 * tolerance)
        ):
            return known
        reached, upper = 0.0, 0.0
        for space in self.spaces:
            if space.holds(machines):
                rate, bound, _ = space.rate(machines, least=max(least, reached), tolerance=tolerance)
                reached, upper = max(reached, rate), max(upper, bound)
        if known is None:
            known = self.rated[machines] = Rated(upper, reached)
        else:
            known.upper, known.reached = min(known.upper, upper), max(known.reached, reached)
        return known

    def sift(self, sets: Sequence[Machines], least: Sequence[float], tolerance: float) -> list[Machines]:
        """Those sets that may be worth more than ``least``, above 0; of the others it is known that they are not."""
        if not sets or seconds_left(self.deadline) <= 0:
            return list(sets)
        limits, dear = np.array(least), np.zeros(len(sets), dtype=np.bool_)
        for space in self.spaces:
            held = np.array([space.holds(machines) for machines in sets])
            looked = np.flatnonzero(held & ~dear)
            if looked.size:
                dear[looked] = space.outweighing([sets[i] for i in looked.tolist()], limits[looked], tolerance)
        for machines, limit, more in zip(sets, limits.tolist(), dear.tolist(), strict=True):
            if more:
                continue
            known = self.rated.get(machines)
            if known is None:
                self.rated[machines] = Rated(limit / (1 - tolerance))
            else:
                known.upper = min(known.upper, limit / (1 - tolerance))
        return [machines for machines, more in zip(sets, dear.tolist(), strict=True) if more]

    def rate_each(self, sets: Sequence[Machines], least: Sequence[float], tolerance: float) -> list[Rated]:
        """Rate several sets; see `rate`."""
        return threads.each(
            lambda one: self.rate(one[0], least=one[1], tolerance=tolerance), list(zip(sets, least, strict=True))
        )

    def realise(self, machines: Machines, *, least: float = 0.0, tolerance: float = EXACT, near: bool = False) -> Rated:
        """The best pipeline on a set, which may leave some of the machines out; none unless worth more than ``least``.

        ``near``: where the relaxation is not reached, one that comes near will do.
        """
        known = self.rated.setdefault(machines, Rated(np.inf))
        if known.value is not None:
            return known
        value, choice, upper = least, None, 0.0
        for space in self.spaces:
            if not space.holds(machines):
                continue
            found: PipelineChoice | None
            if self.limited:
                # Latency aside, it may already be worth too little.
                _, bound, _ = space.rate(machines, least=value, tolerance=1e-2)
                if bound <= value * (1 + 1e-2) and value > 0:
                    _, bound, _ = space.rate(machines, least=value, tolerance=tolerance)
                if bound <= value * (1 + 2 * tolerance):
                    upper = max(upper, bound)
                    continue
                labels = int(_MOST_LABELS * min(1.0, seconds_left(self.deadline) / _SECONDS_OF_LABELS))
                found, worth, complete = space.search(machines, value, max(labels, 1000))
                if not complete:
                    self.unanswered.add(machines)
                upper = max(upper, max(worth, value) if complete else bound)
            else:
                rate, bound, at = space.rate(machines, least=value, tolerance=tolerance)
                found = space.place(machines, at) if rate > 0 else None
                if rate > 0 and found is None and near and sum(machines) > _FEW_ORDERS:
                    found = space.order_near(machines, at)
                elif rate > 0 and found is None and not space.stands(machines):
                    bound = 0.0
                elif rate > 0 and found is None:
                    most = _BOXES_NEAR if near else MOST_BOXES
                    rate, bound, at = space.rate(
                        machines, least=value, tolerance=tolerance, ordered=True, most_boxes=most
                    )
                    found = space.place(machines, at) if rate > 0 else None
                upper = max(upper, bound)
            if found is not None:
                found, worth = self.best_batch(found)
                if worth > value:
                    value, choice = worth, found
        known.upper = max(min(known.upper, upper), value)
        if choice is not None or least == 0.0:
            known.value, known.choice, known.reached = value, choice, value
        return known

    def best_batch(self, choice: PipelineChoice) -> tuple[PipelineChoice, float]:
        """The pipeline at its best micro-batch, whatever the estimator's own rule would take, and its value."""
        with ESTIMATING:
            fitting = sequences_that_fit(self.problem, self.estimator, choice.stages)
        most = micro_batch(self.estimator, fitting, len(choice.stages))
        batches = np.arange(1, most + 1)
        with ESTIMATING:
            rates = pipeline_rates(self.problem, self.estimator, choice.stages, batches)
            values = value_of(self.problem, rates)
        best = int(np.argmax(values))
        rate = float(rates.requests_per_s[best])
        egress = egress_usd_per_hour(self.problem, self.estimator, choice.stages, rate)
        return PipelineChoice(choice.stages, choice.offers, best + 1, egress), float(values[best])

    def best_ratio(
        self,
        prices: FloatArray,
        *,
        least: float,
        most_found: int,
        tolerance: float,
        deadline: float,
        useful: float = math.inf,
    ) -> tuple[float, float]:
        """Most worth per price of any set in the relaxation, if above ``least``, and a bound; sets met become known.

        A bound that is not below ``useful`` is of no use: some sets that are worth more will do.
        """
        ratio, bound = 0.0, 0.0
        for space in self.spaces:
            reached, upper, found = space.best_ratio(
                prices, self.counts, least=max(least, ratio), most_found=most_found, tolerance=tolerance, useful=useful,
                cap=self.cap, deadline=deadline,
            )  # fmt: skip
            ratio, bound = max(ratio, reached), max(bound, upper)
            for machines, rate, most in found:
                known = self.rated.get(machines)
                if known is None and len(self.spaces) == 1:
                    self.rated[machines] = Rated(most, rate)
                elif known is None:
                    # Another space may hold the set as well.
                    self.rated[machines] = Rated(np.inf, rate)
                elif known.value is None:
                    known.reached = max(known.reached, rate)
        return ratio, bound


def price_of(machines: Machines, prices: FloatArray) -> float:
    """What a set costs at some prices."""
    return float(np.dot(machines, prices))
