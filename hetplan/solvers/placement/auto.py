"""The default: the best of the heuristics, with a proven bound."""

from __future__ import annotations

import time
from typing import ClassVar

from hetplan.errors import HetplanError, InfeasibleError, NoSolutionError
from hetplan.estimator.base import make_estimator
from hetplan.plan import Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import OnIncumbent, Progress, Solution, Solver, check_time_limit
from hetplan.solvers.placement.bound import layer_rate_bound
from hetplan.solvers.placement.choice import better
from hetplan.solvers.placement.dp_beam import DpBeam
from hetplan.solvers.placement.even import Even


class Auto:
    """Runs `Even` and `DpBeam`, keeps the better plan, and bounds every plan by `layer_rate_bound`.

    Parameters
    ----------
    beam_width : int
        Of the beam.
    """

    name: ClassVar[str] = "auto"

    def __init__(self, beam_width: int = 3) -> None:
        beam = DpBeam(beam_width=beam_width)
        self.beam_width = beam.beam_width
        self._solvers: tuple[Solver, ...] = (Even(), beam)

    def solve(
        self,
        problem: PlacementProblem,
        *,
        time_limit_s: float = 60.0,
        seed: int = 0,
        warm_start: Plan | None = None,
        on_incumbent: OnIncumbent | None = None,
    ) -> Solution:
        """Best of both, with its bound; see `hetplan.solvers.base.Solver`."""
        began = time.monotonic()
        deadline = began + check_time_limit(time_limit_s)
        problem.refuse_unsupported()
        bound = layer_rate_bound(problem, make_estimator(problem))

        best: Solution | None = None
        failure: HetplanError | None = None
        for solver in self._solvers:
            remaining = max(0.0, deadline - time.monotonic())
            if best is not None and remaining == 0.0:
                break
            try:
                found = solver.solve(problem, time_limit_s=remaining, seed=seed, warm_start=warm_start)
            except InfeasibleError:
                raise
            except NoSolutionError as error:
                failure = error
                continue
            if better(problem, found.objective, None if best is None else best.objective):
                best = found
                if on_incumbent is not None:
                    on_incumbent(Progress(time.monotonic() - began, found.objective, bound.value, solver.name))
        if best is None:
            said = str(failure)
            raise NoSolutionError(f"{said}. None is ruled out: the bound on {problem.objective} is {bound.value:.4g}")
        return Solution(
            pipelines=best.pipelines,
            objective=best.objective,
            bound=bound.value,
            certificate=bound.certificate,
            parameters={"beam_width": self.beam_width},
        )
