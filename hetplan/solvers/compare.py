"""Every solver on one problem: the same estimator, the same machines, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from hetplan.base import Frozen
from hetplan.errors import InfeasibleError, NoSolutionError, UnsupportedFeatureError
from hetplan.plan import Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import check_time_limit, get_solver, solver_names
from hetplan.solvers.build import build_plan, relative_gap


class ComparedPlan(Frozen):
    """What one solver made of the problem: a plan, or why it has none. ``elapsed_s`` is the time it took."""

    solver: str
    plan: Plan | None
    failure: str | None
    elapsed_s: Annotated[float, Field(ge=0)]


class Comparison(Frozen):
    """Rows in the order in which the solvers ran; ``bound`` is the best that any of them proved, None without one."""

    objective_name: str
    rows: tuple[ComparedPlan, ...]

    @property
    def bound(self) -> float | None:
        proved = [row.plan.bound for row in self.rows if row.plan is not None and row.plan.bound is not None]
        if not proved:
            return None
        return max(proved) if self.objective_name == "cost" else min(proved)

    def gap(self, row: ComparedPlan) -> float | None:
        """Distance of a row's objective from the best proven bound, relative to the objective."""
        if row.plan is None or self.bound is None:
            return None
        return relative_gap(self.bound, row.plan.objective)


def compare_solvers(
    problem: PlacementProblem,
    *,
    solvers: Sequence[str] | None = None,
    time_limit_s: float = 60.0,
    seed: int = 0,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Comparison:
    """See `hetplan.compare`."""
    check_time_limit(time_limit_s)
    names = list(solver_names() if solvers is None else solvers)
    chosen = [get_solver(name) for name in names]
    rows = []
    for number, (name, solver) in enumerate(zip(names, chosen, strict=True)):
        if on_progress is not None:
            on_progress(number, len(names), name)
        began = time.monotonic()
        plan, failure = None, None
        try:
            solution = solver.solve(problem, time_limit_s=time_limit_s, seed=seed)
            plan = build_plan(problem, solution, solver=name, seed=seed)
        except (InfeasibleError, NoSolutionError, UnsupportedFeatureError) as error:
            failure = str(error)
        rows.append(ComparedPlan(solver=name, plan=plan, failure=failure, elapsed_s=time.monotonic() - began))
    if on_progress is not None:
        on_progress(len(names), len(names), "")
    return Comparison(objective_name=problem.objective, rows=tuple(rows))
