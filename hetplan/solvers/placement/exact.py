"""The best plan of a cluster, with a proof: every set of machines for small inventories, column generation for large.

A plan is a choice of pipelines on disjoint sets of machines, so that the best plan is an integer program with a
column for each set (`program`). Small inventories: `enumeration`. Large ones: `generation`. The certificate of a plan
is a price for each machine.

What a pipeline pays for zone links depends on its order of machines and its rate, not on its machines alone. Where
costs count and such a link has a price, the program is solved twice: as if egress were free, which bounds every plan,
and without sends over links that cost something. The better plan of the two, egress paid, is returned with the bound
of the first, so that a plan that pays for egress is seldom proven to be the best.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import ClassVar

from hetplan.errors import InfeasibleError, InvalidInputError, NoSolutionError
from hetplan.estimator.base import Estimator, make_estimator
from hetplan.estimator.pipeline import pipeline_rates
from hetplan.plan import Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import OnIncumbent, Progress, Solution, check_time_limit
from hetplan.solvers.placement.bound import refuse_infeasible
from hetplan.solvers.placement.choice import better, objective_of, value_of
from hetplan.solvers.placement.columns import Columns
from hetplan.solvers.placement.enumeration import Enumeration
from hetplan.solvers.placement.generation import Generation

# Inventories with no more sets of machines than this are enumerated.
_FEW_SETS = 1500


class Exact:
    """Exact search.

    Parameters
    ----------
    gap : float
        Relative distance of bound and objective at which the search ends, e.g. 0.01; 0 asks for the optimum.
    """

    name: ClassVar[str] = "exact"

    def __init__(self, gap: float = 0.0) -> None:
        if isinstance(gap, bool) or not isinstance(gap, (int, float)) or not 0 <= gap < 1:
            raise InvalidInputError(f"gap is a number from 0 to below 1, got {gap!r}")
        self.gap = float(gap)

    def solve(
        self,
        problem: PlacementProblem,
        *,
        time_limit_s: float = 60.0,
        seed: int = 0,
        warm_start: Plan | None = None,
        on_incumbent: OnIncumbent | None = None,
    ) -> Solution:
        """Search until the gap is proven or time is over; see `hetplan.solvers.base.Solver`."""
        began = time.monotonic()
        deadline = began + check_time_limit(time_limit_s)
        problem.refuse_unsupported()
        estimator = make_estimator(problem)
        refuse_infeasible(problem, estimator)
        priced = any(link.egress_usd_per_gb > 0 for link in problem.cluster.zone_links)
        if not priced or problem.objective == "throughput":
            return self._search(problem, estimator, began, deadline, warm_start, on_incumbent)

        def tell_bound(made: Progress) -> None:
            # What is reached while egress counts as free is not what a plan is worth.
            if on_incumbent is not None:
                on_incumbent(replace(made, objective=None))

        free = self._search(problem, estimator, began, began + (deadline - began) / 2, warm_start, tell_bound)
        best = _paid(problem, estimator, free)
        if any(pipeline.egress_usd_per_hour for pipeline in free.pipelines):
            try:
                without = self._search(problem, estimator, began, deadline, warm_start, None, egress=False)
                without = _paid(problem, estimator, without)
                best = without if better(problem, without.objective, best.objective) else best
            except (InfeasibleError, NoSolutionError):
                # There is none but those that pay.
                pass
        best = replace(best, bound=free.bound, certificate=free.certificate)
        if on_incumbent is not None:
            on_incumbent(Progress(time.monotonic() - began, best.objective, best.bound, "done"))
        return best

    def _search(
        self,
        problem: PlacementProblem,
        estimator: Estimator,
        began: float,
        deadline: float,
        warm_start: Plan | None,
        on_incumbent: OnIncumbent | None,
        *,
        egress: bool = True,
    ) -> Solution:
        columns = Columns(problem, estimator, deadline, egress=egress)
        sets = math.prod(count + 1 for count in columns.counts)
        if sets <= _FEW_SETS:
            return Enumeration(problem, estimator, columns, self.gap, began, deadline, on_incumbent).enumerate()
        return Generation(problem, estimator, columns, self.gap, began, deadline, on_incumbent).generate(warm_start)


def _paid(problem: PlacementProblem, estimator: Estimator, solution: Solution) -> Solution:
    """The solution with the objective that it reaches when egress is paid."""
    values = []
    for pipeline in solution.pipelines:
        rates = pipeline_rates(problem, estimator, pipeline.stages, pipeline.micro_batch)
        values.append(float(value_of(problem, rates)[0]))
    return replace(solution, objective=objective_of(problem, solution.pipelines, values))
