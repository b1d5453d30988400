"""Demand that drifts over the horizon: an allocation kept as it is, or solved again in every window.

=============================  ======================================================================================
paper (section 4.3)            here
=============================  ======================================================================================
288 windows of 5 minutes       ``windows`` of the problem's horizon
lambda(t + 1), sigma           `walk`: a geometric random walk of each type's rate, one step a window
DM-24h, GH-24h, AGH-24h        ``static_usd`` with solver "milp", "gh", "agh"
AGH-5min, keep-best            ``rolling_usd``: solved again at each window's rates, adopted where that is cheaper
=============================  ======================================================================================

Where it departs, or says what the paper does not:

- A window costs its part of what the horizon would cost at the window's rates, with the best shares on what is bought
  (`hetplan.solvers.allocation.scenarios.Operations`, nothing else drawn).
- What is newly bought loads its weights, while its GPUs are rented and idle: a gigabyte costs the rent of one replica
  for the time it takes (``load_gb_per_s``), or ``switching_usd_per_gb``. A new allocation is adopted where its window,
  this included, costs less than the window of the one that is there.
- Solved again with the same seed: with rates as they were, a solver gives the answer that it gave.
- For a window's problem the storage capacity grows with the traffic, as the second stage has no such limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hetplan.errors import InfeasibleError, InvalidInputError, NoSolutionError
from hetplan.plan import Plan
from hetplan.problem.allocation import AllocationProblem
from hetplan.solvers.allocation.options import FloatArray, IntArray, make_options
from hetplan.solvers.allocation.scenarios import Operations, Placement, Reroute, make_placement, placement_of
from hetplan.solvers.base import AllocationSolver, check_count, get_allocation_solver
from hetplan.units import BITS_PER_BYTE, SECONDS_PER_HOUR

OnWindow = Callable[[int, int], None]

# Weights come over a 10 Gbit/s link: an assumption, of the order of cloud object storage and of one local disk.
LOAD_GB_PER_S = 10 / BITS_PER_BYTE
# Less than this share of a window's cost is no improvement.
_BETTER = 1e-9
_STREAM = 3


@dataclass(frozen=True, slots=True)
class RollingResult:
    """Costs over the horizon; T trials.

    Attributes
    ----------
    static_usd : (T,) float
        Of the first window's allocation, kept.
    rolling_usd : (T,) float
        Solved again in every window and adopted where cheaper, switching included; NaN where that was not asked for.
    switching_usd : (T,) float
        The part of ``rolling_usd`` that is for loading weights.
    switches : (T,) int
        Allocations adopted after the first.
    static_unserved, rolling_unserved : (T,) float
        Mean unserved share over windows and types.
    """

    static_usd: FloatArray
    rolling_usd: FloatArray
    switching_usd: FloatArray
    switches: IntArray
    static_unserved: FloatArray
    rolling_unserved: FloatArray


def rolling(
    problem: AllocationProblem,
    *,
    solver: str | AllocationSolver = "agh",
    windows: int = 288,
    sigma: float = 0.03,
    trials: int = 30,
    seed: int = 0,
    resolve: bool = True,
    reroute: Reroute = "placed",
    switching_usd_per_gb: float | None = None,
    load_gb_per_s: float = LOAD_GB_PER_S,
    time_limit_s: float = 60.0,
    on_progress: OnWindow | None = None,
) -> RollingResult:
    """Let demand drift, and compare an allocation that stays with one that is solved again in every window.

    Parameters
    ----------
    problem : AllocationProblem
        With the rates of the first window.
    solver : str or AllocationSolver
    windows : int
        Equal parts of the horizon.
    sigma : float
        Standard deviation of a window's step of the logarithm of each rate.
    trials : int
    seed : int
        Of the walks, which are the same for every solver, and of the solver.
    resolve : bool
        Without, only the allocation that stays is followed.
    reroute : "placed" or "any"
        As of `hetplan.solvers.allocation.scenarios.evaluate`.
    switching_usd_per_gb : float, optional
        Of weights loaded; by default the rent of the replica that loads them, at ``load_gb_per_s``.
    load_gb_per_s : float
        At which one replica loads.
    time_limit_s : float
        Of each solve.
    on_progress : callable, optional
        Called with trials done and trials in all.

    Returns
    -------
    RollingResult

    Raises
    ------
    InvalidInputError
        For values out of range.
    InfeasibleError, NoSolutionError
        If the first window cannot be solved; where a later one cannot, what is there stays.
    """
    windows, trials = check_count(windows, "windows"), check_count(trials, "trials")
    for name, value, least in (("sigma", sigma, 0.0), ("load_gb_per_s", load_gb_per_s, 1e-9)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
            raise InvalidInputError(f"{name} is a number from {least:g}, got {value!r}")
    if switching_usd_per_gb is not None and not 0 <= switching_usd_per_gb < math.inf:
        raise InvalidInputError(f"switching_usd_per_gb is a number from 0, got {switching_usd_per_gb!r}")
    used = get_allocation_solver(solver) if isinstance(solver, str) else solver
    options = make_options(problem, prune=False)
    known: dict[tuple[bytes, bytes, bytes], Operations] = {}

    def solved(rates: FloatArray) -> Placement:
        found = used.solve(at_rates(problem, rates), time_limit_s=time_limit_s, seed=seed)
        answer, numbers = found.assignment, found.options.number
        bought = {int(numbers[n]): int(answer.replicas[n]) for n in np.flatnonzero(answer.replicas)}
        sent = {(int(i), int(numbers[n])) for i, n in np.argwhere(answer.shares > 0)}
        return make_placement(options, bought, sent, reroute=reroute)

    def operated(placement: Placement, rates: FloatArray) -> tuple[float, float]:
        """Dollars of a window, and the mean unserved share in it."""
        if placement.key not in known:
            known[placement.key] = Operations(placement)
        found = known[placement.key].solve(rates)
        return (placement.fixed_usd + found.usd) / windows, float(found.unserved.mean())

    first = solved(np.ones(len(problem.query_types)))
    static_usd, rolling_usd, switching_usd, static_unserved, rolling_unserved = np.zeros((5, trials))
    switches = np.zeros(trials, dtype=np.int64)
    for trial in range(trials):
        now = first
        known.clear()
        for window, rates in enumerate(walk(len(problem.query_types), windows, sigma, trial, seed)):
            kept_usd, kept_unserved = operated(first, rates)
            static_usd[trial] += kept_usd
            static_unserved[trial] += kept_unserved / windows
            if not resolve:
                continue
            usd, unserved = operated(now, rates) if now.key != first.key else (kept_usd, kept_unserved)
            other = _or_none(solved, rates) if window else None
            if other is not None and other.key != now.key:
                switching = _switching_usd(now, other, switching_usd_per_gb, load_gb_per_s)
                other_usd, other_unserved = operated(other, rates)
                if other_usd + switching < usd * (1 - _BETTER):
                    now, usd, unserved = other, other_usd + switching, other_unserved
                    switches[trial] += 1
                    switching_usd[trial] += switching
            rolling_usd[trial] += usd
            rolling_unserved[trial] += unserved / windows
        if on_progress is not None:
            on_progress(trial + 1, trials)
    if not resolve:
        rolling_usd[:] = rolling_unserved[:] = np.nan
    return RollingResult(static_usd, rolling_usd, switching_usd, switches, static_unserved, rolling_unserved)


def operated_usd_per_hour(plan: Plan, requests_per_hour: Mapping[str, float]) -> float:
    """Dollars an hour of what a plan bought, with the best shares on it for other rates of each query type.

    Rent, storage, delays and what is turned away, as the plan's problem has them.

    Raises
    ------
    InvalidInputError
        If the plan does not answer an allocation problem.
    NoSolutionError
        If the program is lost to rounding.
    """
    placement = placement_of(plan)
    problem = placement.options.problem
    rates = factors(problem, requests_per_hour)
    return (placement.fixed_usd + Operations(placement).solve(rates).usd) / problem.horizon_hours


def walk(types: int, windows: int, sigma: float, trial: int, seed: int) -> FloatArray:
    """(windows, types) factors on the rates: 1 in the first window, then a geometric random walk.

    A larger ``sigma`` stretches the same steps.
    """
    own = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_STREAM, trial)))
    steps = own.normal(size=(windows, types))
    steps[0] = 0.0
    factors: FloatArray = np.exp(sigma * steps.cumsum(axis=0))
    return factors


def factors(problem: AllocationProblem, requests_per_hour: Mapping[str, float]) -> FloatArray:
    """(I,): of the rate of each query type."""
    return np.array([requests_per_hour[query.name] / query.requests_per_hour for query in problem.query_types])


def at_rates(problem: AllocationProblem, rates: FloatArray) -> AllocationProblem:
    """The problem with each query type's rate so many times as high, (I,).

    Its storage capacity grows with the traffic where there is more of it.
    """
    if (rates == 1).all():
        return problem
    queries = problem.query_types
    old, new = (
        sum(
            q.storage_kb_per_token * q.tokens * q.requests_per_hour * rate
            for q, rate in zip(queries, some, strict=True)
        )
        for some in (np.ones(len(queries)).tolist(), rates.tolist())
    )
    return problem.replace(
        query_types=tuple(
            q.replace(requests_per_hour=q.requests_per_hour * rate)
            for q, rate in zip(queries, rates.tolist(), strict=True)
        ),
        storage_capacity_gb=problem.storage_capacity_gb * max(1.0, new / old if old > 0 else 1.0),
    )


def _or_none(solved: Callable[[FloatArray], Placement], rates: FloatArray) -> Placement | None:
    try:
        return solved(rates)
    except (InfeasibleError, NoSolutionError):
        return None


def _switching_usd(now: Placement, other: Placement, usd_per_gb: float | None, load_gb_per_s: float) -> float:
    """Loading the weights of the replicas that the other placement has and this one has not."""
    o, problem = other.options, other.options.problem
    there = dict(zip(now.options.number.tolist(), now.replicas.tolist(), strict=True))
    usd = 0.0
    for n, (number, replicas) in enumerate(zip(o.number.tolist(), other.replicas.tolist(), strict=True)):
        new = max(replicas - there.get(number, 0), 0)
        gb = problem.models[int(o.model[n])].weight_gb * problem.tiers[int(o.tier[n])].weight_scale
        rent_usd_per_s = float(o.rent_usd[n]) / problem.horizon_hours / SECONDS_PER_HOUR
        usd += new * gb * (rent_usd_per_s / load_gb_per_s if usd_per_gb is None else usd_per_gb)
    return usd
