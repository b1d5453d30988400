"""The default: quick heuristics, then the exact search until the gap is small."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import ClassVar

from hetplan.errors import HetplanError, InfeasibleError, NoSolutionError
from hetplan.estimator.base import make_estimator
from hetplan.plan import Certificate, Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import OnIncumbent, Progress, Solution, Solver, check_time_limit
from hetplan.solvers.placement.bound import layer_rate_bound
from hetplan.solvers.placement.choice import better, tighter
from hetplan.solvers.placement.dp_beam import DpBeam
from hetplan.solvers.placement.even import Even
from hetplan.solvers.placement.exact import Exact

# Under limits on latency the exact search of a large model is slow, and rarely better than the heuristics.
_LIMITED_S = 10.0


class Auto:
    """Runs `Even` and `DpBeam` for a plan at once, then `Exact`, and keeps the best plan and the tightest bound.

    Parameters
    ----------
    beam_width : int
        Of the beam.
    gap : float
        Relative distance of plan and bound at which the search ends. Small inventories are solved to the optimum.
    """

    name: ClassVar[str] = "auto"

    def __init__(self, beam_width: int = 3, gap: float = 0.01) -> None:
        beam, self._exact = DpBeam(beam_width=beam_width), Exact(gap=gap)
        self.beam_width, self.gap = beam.beam_width, self._exact.gap
        self._heuristics: tuple[Solver, ...] = (Even(), beam)

    def solve(
        self,
        problem: PlacementProblem,
        *,
        time_limit_s: float = 60.0,
        seed: int = 0,
        warm_start: Plan | None = None,
        on_incumbent: OnIncumbent | None = None,
    ) -> Solution:
        """Best of all, with its bound; see `hetplan.solvers.base.Solver`."""
        began = time.monotonic()
        deadline = began + check_time_limit(time_limit_s)
        problem.refuse_unsupported()
        bound = layer_rate_bound(problem, make_estimator(problem))
        proven, certificate = bound.value, bound.certificate

        best: Solution | None = None
        failure: HetplanError | None = None

        def remaining() -> float:
            return max(0.0, deadline - time.monotonic())

        def report(objective: float | None, said: str) -> None:
            if on_incumbent is not None:
                on_incumbent(Progress(time.monotonic() - began, objective, proven, said))

        def progress(made: Progress) -> None:
            nonlocal proven
            if made.bound is not None and tighter(problem, made.bound, proven):
                proven = made.bound
            objective = None if best is None else best.objective
            if made.objective is not None and better(problem, made.objective, objective):
                objective = made.objective
            report(objective, made.message)

        for solver in (*self._heuristics, self._exact):
            if best is not None and remaining() == 0.0:
                break
            exact = solver is self._exact
            limit_s = min(remaining(), _LIMITED_S) if exact and problem.slo is not None else remaining()
            try:
                found = solver.solve(
                    problem,
                    time_limit_s=limit_s,
                    seed=seed,
                    warm_start=warm_start,
                    on_incumbent=progress if exact else None,
                )
            except InfeasibleError:
                raise
            except NoSolutionError as error:
                failure = error
                continue
            if found.bound is not None and found.certificate is not None:
                proven, certificate = _tightest(problem, (proven, certificate), (found.bound, found.certificate))
            if better(problem, found.objective, None if best is None else best.objective):
                best = found
                report(found.objective, solver.name)
        if best is None:
            said = str(failure)
            raise NoSolutionError(f"{said}. None is ruled out: the bound on {problem.objective} is {proven:.4g}")
        return replace(
            best, bound=proven, certificate=certificate, parameters={"beam_width": self.beam_width, "gap": self.gap}
        )


def _tightest(
    problem: PlacementProblem, one: tuple[float, Certificate], other: tuple[float, Certificate]
) -> tuple[float, Certificate]:
    """The tighter of two proven bounds with its certificate."""
    return one if tighter(problem, one[0], other[0]) else other
