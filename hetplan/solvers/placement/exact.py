"""The best plan of a cluster, with a proof: every set of machines for small inventories, column generation for large.

A plan is a choice of pipelines on disjoint sets of machines, so that the best plan is an integer program with a
column for each set (`program`). Small inventories: `enumeration`. Large ones: `generation`. The certificate of a plan
is a price for each machine.
"""

from __future__ import annotations

import math
import time
from typing import ClassVar

from hetplan.errors import InvalidInputError
from hetplan.estimator.base import make_estimator
from hetplan.plan import Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import OnIncumbent, Solution, check_time_limit
from hetplan.solvers.placement.bound import refuse_infeasible
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
        columns = Columns(problem, estimator, deadline)
        sets = math.prod(count + 1 for count in columns.counts)
        if sets <= _FEW_SETS:
            return Enumeration(problem, estimator, columns, self.gap, began, deadline, on_incumbent).enumerate()
        return Generation(problem, estimator, columns, self.gap, began, deadline, on_incumbent).generate(warm_start)
