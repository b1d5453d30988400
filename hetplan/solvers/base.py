"""The solver contract, and the registry of solvers by name.

A solver is a small object with a ``name``, parameters given at construction, and `Solver.solve`. It
returns a `Solution` or raises `InfeasibleError` (proven: none exists) or `NoSolutionError` (none
found in time). It never returns a plan that breaks a limit, and leaves ``bound`` None unless it has
proven one. Registering a class makes it reachable as ``optimize(..., solver="name")``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hetplan.errors import InvalidInputError, UnknownNameError, nearest_names
from hetplan.estimator.pipeline import StageShape
from hetplan.plan import Certificate, Plan
from hetplan.problem.placement import PlacementProblem

if TYPE_CHECKING:
    from hetplan.problem.allocation import AllocationProblem
    from hetplan.solvers.allocation.assignment import Assignment
    from hetplan.solvers.allocation.options import Options


@dataclass(frozen=True, slots=True)
class PipelineChoice:
    """A pipeline that a solver chose: its stages, the offer of each of its machines, and its micro-batch.

    ``egress_usd_per_hour``: what it sends over zone links costs, at its rate.
    """

    stages: tuple[StageShape, ...]
    offers: tuple[str, ...]
    micro_batch: int
    egress_usd_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solver found: pipelines, the objective they reach, and the bound it has proven, if any."""

    pipelines: tuple[PipelineChoice, ...]
    objective: float
    bound: float | None = None
    certificate: Certificate | None = None
    parameters: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AllocationSolution:
    """What a solver found for an allocation problem: an assignment over options, and the bound it has proven, if any.

    ``bound`` is in dollars over the horizon, as the assignment's own ``usd``: no plan costs less.
    """

    options: Options
    assignment: Assignment
    bound: float | None = None
    certificate: Certificate | None = None
    parameters: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """What an anytime solver reports: seconds since it began, best objective, bound, and what it does."""

    elapsed_s: float
    objective: float | None
    bound: float | None
    message: str


OnIncumbent = Callable[[Progress], None]


class Solver(Protocol):
    """What every solver offers."""

    name: ClassVar[str]

    def solve(
        self,
        problem: PlacementProblem,
        *,
        time_limit_s: float = 60.0,
        seed: int = 0,
        warm_start: Plan | None = None,
        on_incumbent: OnIncumbent | None = None,
    ) -> Solution:
        """Solve a problem.

        Parameters
        ----------
        problem : PlacementProblem
        time_limit_s : float
            Seconds after which the best plan so far is returned; a solver always finishes its first plan.
        seed : int
            Makes random choices repeatable.
        warm_start : Plan, optional
            An older plan to begin from.
        on_incumbent : callable, optional
            Called with a `Progress` at each better plan or bound.

        Raises
        ------
        InfeasibleError
            If no plan exists; its reasons give each limit and the shortfall.
        NoSolutionError
            If none was found and none ruled out.
        """
        ...


class AllocationSolver(Protocol):
    """What every solver of allocation problems offers: as `Solver`, the objective being dollars over the horizon."""

    name: ClassVar[str]

    def solve(
        self,
        problem: AllocationProblem,
        *,
        time_limit_s: float = 60.0,
        seed: int = 0,
        warm_start: Plan | None = None,
        on_incumbent: OnIncumbent | None = None,
    ) -> AllocationSolution:
        """Solve a problem; arguments and errors as of `Solver.solve`; `hetplan.optimize` adds the reasons."""
        ...


_SOLVERS: dict[str, tuple[str, str]] = {
    "alpaserve": ("hetplan.solvers.placement.alpaserve", "AlpaServe"),
    "auto": ("hetplan.solvers.placement.auto", "Auto"),
    "dp-beam": ("hetplan.solvers.placement.dp_beam", "DpBeam"),
    "even": ("hetplan.solvers.placement.even", "Even"),
    "exact": ("hetplan.solvers.placement.exact", "Exact"),
    "helix": ("hetplan.solvers.placement.helix", "Helix"),
    "hexgen": ("hetplan.solvers.placement.hexgen", "HexGen"),
    "spotserve": ("hetplan.solvers.placement.spotserve", "SpotServe"),
}
_ALLOCATION_SOLVERS: dict[str, tuple[str, str]] = {
    "agh": ("hetplan.solvers.allocation.adaptive", "Agh"),
    "auto": ("hetplan.solvers.allocation.auto", "Auto"),
    "gh": ("hetplan.solvers.allocation.greedy", "Gh"),
    "milp": ("hetplan.solvers.allocation.exact", "Exact"),
}


def solver_names() -> list[str]:
    """Names of the placement solvers."""
    return sorted(_SOLVERS)


def allocation_solver_names() -> list[str]:
    """Names of the solvers of allocation problems."""
    return sorted(_ALLOCATION_SOLVERS)


def get_solver(name: str, **parameters: Any) -> Solver:
    """A placement solver by name, with its own parameters.

    Raises
    ------
    UnknownNameError
        If there is no such solver.
    InvalidInputError
        If it does not take a parameter, or not that value.
    """
    solver: Solver = _registered(_SOLVERS, "solver", name, parameters)
    return solver


def get_allocation_solver(name: str, **parameters: Any) -> AllocationSolver:
    """A solver of allocation problems by name, with its own parameters; errors as of `get_solver`."""
    solver: AllocationSolver = _registered(_ALLOCATION_SOLVERS, "allocation solver", name, parameters)
    return solver


def _registered(registry: Mapping[str, tuple[str, str]], what: str, name: str, parameters: Mapping[str, Any]) -> Any:
    if not isinstance(name, str) or name not in registry:
        raise UnknownNameError(what, str(name), registry, f"There are: {', '.join(sorted(registry))}.")
    module, class_name = registry[name]
    kind = getattr(import_module(module), class_name)
    known = [p for p in inspect.signature(kind).parameters if p not in ("args", "kwargs")]
    for parameter in parameters:
        if parameter not in known:
            nearest = ", ".join(nearest_names(parameter, known)) or ", ".join(known) or "none"
            raise InvalidInputError(
                f"unknown argument {parameter!r}: neither an argument of optimize nor an option of {what} {name!r} "
                f"(its options: {nearest})"
            )
    return kind(**parameters)


def check_count(value: object, name: str, most: int = 10_000) -> int:
    """A solver option that counts something, refused unless it is a whole number from 1 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidInputError(f"{name} is a whole number from 1 to {most}, got {value!r}")
    return value


def check_time_limit(time_limit_s: float) -> float:
    """The limit, refused when negative or not a number."""
    if isinstance(time_limit_s, bool) or not isinstance(time_limit_s, (int, float)) or not time_limit_s >= 0:
        raise InvalidInputError(f"time_limit_s is a number of seconds from 0, got {time_limit_s!r}")
    return time_limit_s
