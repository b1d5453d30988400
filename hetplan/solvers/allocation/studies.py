"""The paper's experiments on one problem, each a function that returns plain rows.

=============================  ======================================================================================
paper                          here
=============================  ======================================================================================
Figures 2(a) to 2(c)           `stress_study`
Table 2                        `budget_study`, `BUDGETS`
Figures 2(d) to 2(f)           `sweep`
Table 3                        `ablation`
Table 5                        `runtime`
none                           `robust_study`
=============================  ======================================================================================

A row is a dict, ready for ``pandas.DataFrame``. Where a solver finds nothing, what it would have given is NaN.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from hetplan.errors import InfeasibleError, NoSolutionError
from hetplan.plan import Plan
from hetplan.problem.allocation import AllocationProblem
from hetplan.problem.robust import Robust
from hetplan.solvers.allocation.build import build_allocation_plan
from hetplan.solvers.allocation.options import make_options
from hetplan.solvers.allocation.robust import solve_robust
from hetplan.solvers.allocation.scenarios import Reroute, ScenarioResult, evaluate, make_placement, sent_where
from hetplan.solvers.base import AllocationSolution, get_allocation_solver

Row = dict[str, Any]

SOLVERS = ("milp", "gh", "agh")
STRESSES = (1.0, 1.2, 1.5)
# Table 2 and its note: budget, and the factor on the price of unserved image and video.
BUDGETS: Mapping[str, tuple[float, float]] = {
    "S1": (100.0, 1.0),
    "S2": (75.0, 1.0),
    "S3": (72.0, 1.0),
    "S4": (75.0, 5.0),
    "S5": (72.0, 5.0),
}
RAISED = ("image", "video")
# Factor on delays and errors at which limits are the tightest tried, and halvings of what is between it and 1.
_TIGHTEST, _HALVINGS = 2.5, 7
_MECHANISMS: Mapping[str, Mapping[str, bool]] = {
    "all": {},
    "without m1": {"m1": False},
    "without m2": {"m2": False},
    "without m3": {"m3": False},
}


def stress_study(
    problem: AllocationProblem,
    *,
    solvers: Sequence[str] = SOLVERS,
    stresses: Sequence[float] = STRESSES,
    scenarios: int = 500,
    seed: int = 0,
    reroute: Reroute = "placed",
    time_limit_s: float = 60.0,
) -> list[Row]:
    """What each solver's answer costs, and how often it is violated, when delays and errors are inflated.

    Parameters
    ----------
    problem : AllocationProblem
    solvers : sequence of str
    stresses : sequence of float
        Factors on every delay and error.
    scenarios, seed, reroute
        As of `hetplan.solvers.allocation.scenarios.evaluate`.
    time_limit_s : float
        Of each solve.

    Returns
    -------
    list of dict
        ``solver``, ``stress``, ``nominal_usd`` and the means over scenarios: ``rent_usd``, ``stored_usd``,
        ``storage_usd``, ``delay_usd``, ``unserved_usd``, ``mean_usd``, ``half_width_usd``, ``violation_rate``.
    """
    rows = []
    for solver in solvers:
        found = _solved(problem, solver, time_limit_s)
        for stress in stresses:
            row = {"solver": solver, "stress": stress, "nominal_usd": _usd(found)}
            rows.append(row | _means(found, scenarios=scenarios, seed=seed, stress=stress, reroute=reroute))
    return rows


def budget_study(
    problem: AllocationProblem,
    *,
    solvers: Sequence[str] = ("gh", "agh", "milp"),
    settings: Mapping[str, tuple[float, float]] = BUDGETS,
    raised: Sequence[str] = RAISED,
    scenarios: int = 500,
    seed: int = 0,
    reroute: Reroute = "placed",
    time_limit_s: float = 60.0,
) -> list[Row]:
    """Two-stage evaluation at other budgets and prices of unserved traffic.

    Parameters
    ----------
    settings : mapping
        Name -> budget in dollars, factor on ``unserved_usd``.
    raised : sequence of str
        Query types, by name or by what stands before "-" in it, that the factor is for.
    solvers, scenarios, seed, reroute, time_limit_s
        As of `stress_study`.

    Returns
    -------
    list of dict
        As of `stress_study`, with ``setting``, ``budget_usd`` and ``unserved_factor``.
    """
    rows = []
    for name, (budget_usd, factor) in settings.items():
        other = problem.replace(
            budget_usd=budget_usd,
            query_types=tuple(
                q.replace(unserved_usd=q.unserved_usd * factor) if q.name.partition("-")[0] in raised else q
                for q in problem.query_types
            ),
        )
        for solver in solvers:
            found = _solved(other, solver, time_limit_s)
            row = {"setting": name, "budget_usd": budget_usd, "unserved_factor": factor, "solver": solver}
            rows.append(
                row | {"nominal_usd": _usd(found)} | _means(found, scenarios=scenarios, seed=seed, reroute=reroute)
            )
    return rows


def ablation(problem: AllocationProblem, *, solver: str = "agh", time_limit_s: float = 60.0) -> list[Row]:
    """The heuristic without one of its mechanisms.

    Returns
    -------
    list of dict
        ``mechanisms``, ``nominal_usd``, ``unserved`` (the largest share of a type), and the ``plan``, None where
        nothing is bought.
    """
    rows = []
    for name, options in _MECHANISMS.items():
        found = _solved(problem, solver, time_limit_s, **options)
        plan: Plan | None = None
        if found is not None and found.assignment.replicas.any():
            plan = build_allocation_plan(problem, found, solver=solver, seed=0)
        rows.append({"mechanisms": name, "nominal_usd": _usd(found), "unserved": _unserved(found), "plan": plan})
    return rows


def sweep(
    problem: AllocationProblem,
    *,
    solver: str = "agh",
    delay_limits: Sequence[float] = (1.0,),
    error_limits: Sequence[float] = (1.0,),
    budgets: Sequence[float] = (1.0,),
    prices: Sequence[float] = (1.0,),
    time_limit_s: float = 60.0,
) -> list[Row]:
    """Solve with every combination of factors on delay limits, error limits, the budget and the price of GPUs.

    Returns
    -------
    list of dict
        ``delay_limit``, ``error_limit``, ``budget``, ``price`` (the factors), ``nominal_usd``, ``rent_usd``, ``gpus``
        and ``unserved`` (the largest share of a type).
    """
    rows = []
    for delay, error, budget, price in itertools.product(delay_limits, error_limits, budgets, prices):
        other = _scaled(problem, delay, error).replace(
            budget_usd=problem.budget_usd * budget,
            tiers=tuple(t.replace(usd_per_hour=t.usd_per_hour * price) for t in problem.tiers),
            configurations=tuple(c.replace(usd_per_hour=c.usd_per_hour * price) for c in problem.configurations),
        )
        found = _solved(other, solver, time_limit_s)
        row: Row = {"delay_limit": delay, "error_limit": error, "budget": budget, "price": price}
        row |= {"nominal_usd": _usd(found), "unserved": _unserved(found)}
        if found is None:
            row |= {"rent_usd": np.nan, "gpus": 0}
        else:
            replicas = found.assignment.replicas
            row |= {"rent_usd": float(found.options.rent_usd @ replicas), "gpus": int(found.options.gpus @ replicas)}
        rows.append(row)
    return rows


def runtime(problem: AllocationProblem, *, solvers: Sequence[str] = SOLVERS, time_limit_s: float = 60.0) -> list[Row]:
    """Seconds of each solver; compile the heuristics first by solving anything.

    Returns
    -------
    list of dict
        ``solver``, ``elapsed_s``, ``nominal_usd``, ``bound_usd`` (NaN of a heuristic).
    """
    rows = []
    for solver in solvers:
        began = time.perf_counter()
        found = _solved(problem, solver, time_limit_s)
        elapsed_s = time.perf_counter() - began
        bound = np.nan if found is None or found.bound is None else found.bound
        rows.append({"solver": solver, "elapsed_s": elapsed_s, "nominal_usd": _usd(found), "bound_usd": bound})
    return rows


def robust_study(
    problem: AllocationProblem,
    *,
    extra_costs: Sequence[float] = (0.05, 0.10, 0.20),
    stress: float = 1.5,
    training_scenarios: int = 50,
    training_seed: int = 0,
    scenarios: int = 500,
    seed: int = 1,
    time_limit_s: float = 60.0,
    on_progress: Callable[[str], None] | None = None,
) -> list[Row]:
    """Robust plans beside cheapest ones that may cost as much more, under stress and scenarios that none has seen.

    Parameters
    ----------
    extra_costs : sequence of float
        What plans may cost more than the optimum, as a share of it.
    stress : float
        Factor on every delay and error, in training and after it.
    training_scenarios, training_seed : int
        What the robust plans are made against.
    scenarios, seed : int
        What all plans are judged by; the seed is another one than in training.
    time_limit_s : float
        Of each solve.
    on_progress : callable, optional
        Called with what is done next.

    Returns
    -------
    list of dict
        ``plan``, ``extra_cost``, ``nominal_usd``, ``elapsed_s``, and under each way to send types elsewhere
        (``placed``, ``any``) ``mean_usd``, ``half_width_usd`` and ``violation_rate``, with the way before the name.
        Plans are "exact" (at no extra cost), "budget raised" (the optimum under a budget raised by the extra cost),
        "limits tightened" (the optimum under limits on delay and error that are tightened until it costs as much more)
        and "robust".
    """
    options = make_options(problem, prune=False)

    def judged(name: str, extra_cost: float, began: float, found: AllocationSolution | None) -> Row:
        row: Row = {"plan": name, "extra_cost": extra_cost, "nominal_usd": _usd(found)}
        row["elapsed_s"] = time.perf_counter() - began
        for reroute in get_args(Reroute):
            means = dict.fromkeys(("mean_usd", "half_width_usd", "violation_rate"), np.nan)
            if found is not None:
                # Of another problem than the one it is judged in, where that had other limits.
                placement = make_placement(options, *sent_where(found), reroute=reroute)
                result = evaluate(placement, scenarios=scenarios, seed=seed, stress=stress)
                means = {name: getattr(result, name) for name in means}
            row |= {f"{reroute}_{name}": value for name, value in means.items()}
        return row

    def tell(doing: str) -> None:
        if on_progress is not None:
            on_progress(doing)

    tell("exact")
    began = time.perf_counter()
    optimum = _solved(problem, "milp", time_limit_s)
    rows = [judged("exact", 0.0, began, optimum)]
    for extra_cost in extra_costs if optimum is not None else ():
        limit_usd = (1 + extra_cost) * _usd(optimum)
        tell(f"+{extra_cost:.0%}: budget raised")
        began = time.perf_counter()
        raised = problem.replace(budget_usd=problem.budget_usd + extra_cost * _usd(optimum))
        rows.append(judged("budget raised", extra_cost, began, _solved(raised, "milp", time_limit_s)))
        tell(f"+{extra_cost:.0%}: limits tightened")
        began = time.perf_counter()
        tight = _tightest(problem, optimum, limit_usd, time_limit_s)
        rows.append(judged("limits tightened", extra_cost, began, tight))
        tell(f"+{extra_cost:.0%}: robust")
        began = time.perf_counter()
        robust = Robust(scenarios=training_scenarios, seed=training_seed, stress=stress, max_extra_cost=extra_cost)
        found = solve_robust(problem, robust, time_limit_s=time_limit_s)
        rows.append(judged("robust", extra_cost, began, found))
    return rows


def _tightest(
    problem: AllocationProblem, optimum: AllocationSolution | None, limit_usd: float, time_limit_s: float
) -> AllocationSolution | None:
    """The optimum under the tightest limits on delay and error at which it costs no more than a number of dollars."""
    best, loosest, tightest = optimum, 1.0, _TIGHTEST
    for _ in range(_HALVINGS):
        factor = (loosest + tightest) / 2
        found = _solved(_scaled(problem, 1 / factor, 1 / factor), "auto", time_limit_s)
        if found is not None and found.assignment.usd <= limit_usd:
            best, loosest = found, factor
        else:
            tightest = factor
    return best


def _scaled(problem: AllocationProblem, delay: float, error: float) -> AllocationProblem:
    """With factors on the limits of every type."""
    return problem.replace(
        query_types=tuple(
            q.replace(
                delay_limit_s=q.delay_limit_s * delay,
                ttft_limit_s=None if q.ttft_limit_s is None else q.ttft_limit_s * delay,
                error_limit=q.error_limit * error,
            )
            for q in problem.query_types
        )
    )


def _solved(problem: AllocationProblem, solver: str, time_limit_s: float, **options: bool) -> AllocationSolution | None:
    try:
        return get_allocation_solver(solver, **options).solve(problem, time_limit_s=time_limit_s, seed=0)
    except (InfeasibleError, NoSolutionError):
        return None


def _usd(found: AllocationSolution | None) -> float:
    return np.nan if found is None else found.assignment.usd


def _unserved(found: AllocationSolution | None) -> float:
    return np.nan if found is None else float(np.clip(1 - found.assignment.shares.sum(axis=1), 0, 1).max())


def _means(
    found: AllocationSolution | None, *, scenarios: int, seed: int, reroute: Reroute, stress: float = 1.0
) -> dict[str, float]:
    names = ("rent_usd", "stored_usd", "storage_usd", "delay_usd", "unserved_usd")
    if found is None:
        return dict.fromkeys((*names, "mean_usd", "half_width_usd", "violation_rate"), np.nan)
    result: ScenarioResult = evaluate(found, scenarios=scenarios, seed=seed, stress=stress, reroute=reroute)
    return {name: float(np.mean(getattr(result, name))) for name in names} | {
        "mean_usd": result.mean_usd,
        "half_width_usd": result.half_width_usd,
        "violation_rate": result.violation_rate,
    }
