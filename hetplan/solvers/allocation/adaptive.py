"""AGH: the adaptive greedy heuristic of Cheng and Nguyen (Algorithm 2), as published.

==========================  ==========================================================================================
paper                       here
==========================  ==========================================================================================
eight orderings             `_orderings`: falling and rising requests, price of unserved, storage, and error limit
R                           `_random_orderings`: by I J K
five without improvement    ``_PATIENCE``
L, relocate                 ``_PASSES``, `_relocate`
consolidate                 `_consolidate`
==========================  ==========================================================================================

Where it departs, or says what the paper does not:

- The greedy heuristic's departures (`hetplan.solvers.allocation.greedy`).
- What a move costs is counted whole: a larger group where it goes changes the delay of types that are there, and an
  empty group where it came from is given back.
- Consolidation offers a type to pairs that have a group, other than the one to be closed; when all is done, groups that
  serve nobody are given back.
- Between two answers of which only one keeps the most that may be left unserved, that one is better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np

from hetplan.plan import Plan
from hetplan.problem.allocation import AllocationProblem
from hetplan.solvers.allocation.assignment import Assignment
from hetplan.solvers.allocation.greedy import (
    COVERAGE_BUDGET,
    check_coverage_budget,
    check_switches,
    construct,
    refuse_dropped,
    serve,
)
from hetplan.solvers.allocation.groups import (
    NOTHING,
    State,
    Table,
    assignment_of,
    become,
    bool_,
    compiled,
    copy_of,
    fits,
    int_,
    is_idle,
    make_table,
    new_copies,
    nothing_yet,
    put,
    recompute,
    set_level,
    take_away,
    wanted_level,
)
from hetplan.solvers.allocation.options import IntArray, Options, make_options
from hetplan.solvers.base import AllocationSolution, OnIncumbent, Progress, check_time_limit

# Orderings without a better answer after which it ends, and passes of relocation for each.
_PATIENCE, _PASSES = 5, 3
# Random orderings: of problems larger than a number of triples (type, model, tier), and of the smallest.
_RANDOM_ORDERINGS, _MOST_RANDOM = ((5000, 3), (2000, 5), (500, 10)), 20
# Dollars that count as an improvement.
_BETTER_USD = 1e-7


class Agh:
    """The adaptive greedy heuristic.

    Parameters
    ----------
    m1, m2, m3, coverage_budget
        As of `hetplan.solvers.allocation.greedy.Gh`.
    """

    name: ClassVar[str] = "agh"

    def __init__(
        self, *, m1: bool = True, m2: bool = True, m3: bool = True, coverage_budget: float = COVERAGE_BUDGET
    ) -> None:
        check_switches(m1=m1, m2=m2, m3=m3)
        self.m1, self.m2, self.m3 = m1, m2, m3
        self.coverage_budget = check_coverage_budget(coverage_budget)

    def solve(
        self,
        problem: AllocationProblem,
        *,
        time_limit_s: float = 60.0,
        seed: int = 0,
        warm_start: Plan | None = None,
        on_incumbent: OnIncumbent | None = None,
    ) -> AllocationSolution:
        """Run the heuristic; see `hetplan.solvers.base.AllocationSolver`. It begins from nothing, not from a plan."""
        began = time.monotonic()
        check_time_limit(time_limit_s)
        options = make_options(problem)

        def report(usd: float, orderings: int) -> None:
            if on_incumbent is not None:
                on_incumbent(Progress(time.monotonic() - began, usd, None, f"ordering {orderings}"))

        found = adaptive_assignment(
            options,
            seed=seed,
            deadline_s=began + time_limit_s,
            m1=self.m1,
            m2=self.m2,
            m3=self.m3,
            coverage_budget=self.coverage_budget,
            on_better=report,
        )
        refuse_dropped(problem, found)
        parameters = {"m1": self.m1, "m2": self.m2, "m3": self.m3, "coverage_budget": self.coverage_budget}
        return AllocationSolution(options, found, parameters=parameters)


def adaptive_assignment(
    options: Options,
    *,
    seed: int = 0,
    deadline_s: float = np.inf,
    m1: bool = True,
    m2: bool = True,
    m3: bool = True,
    coverage_budget: float = COVERAGE_BUDGET,
    on_better: Callable[[float, int], None] | None = None,
) -> Assignment:
    """What the adaptive heuristic does with some options; it may leave more unserved than the problem allows.

    Parameters
    ----------
    options : Options
    seed : int
        Of the random orderings.
    deadline_s : float
        Time of the monotonic clock after which no ordering begins; the first always does.
    on_better : callable, optional
        Called with the dollars of each better answer that leaves no more unserved than may be, and its ordering from 1.
    """
    table = make_table(options, m1=m1, m2=m2, m3=m3)
    best: tuple[bool, float, State] | None = None
    waited = 0
    for number, order in enumerate(_orderings(options, seed), start=1):
        if best is not None and time.monotonic() > deadline_s:
            break
        state = nothing_yet(table)
        usd = _one_ordering(table, state, order, coverage_budget)
        dropped = bool((state.types["left"] > options.max_unserved + NOTHING).any())
        if best is not None and (dropped, usd) >= (best[0], best[1] - _BETTER_USD):
            waited += 1
            if waited == _PATIENCE:
                break
            continue
        best, waited = (dropped, usd, state), 0
        if on_better is not None and not dropped:
            on_better(usd, number)
    assert best is not None  # noqa: S101 (there are always eight orderings)
    return assignment_of(options, table, best[2])


def _orderings(options: Options, seed: int) -> Iterator[IntArray]:
    """Orderings of the types: falling and rising by four keys, then random."""
    queries = options.problem.query_types
    keys = (
        np.array([q.requests_per_hour for q in queries]),
        options.unserved_usd,
        options.storage_gb,
        np.array([q.error_limit for q in queries]),
    )
    for key in keys:
        yield np.argsort(-key, kind="stable")
        yield np.argsort(key, kind="stable")
    stream = np.random.default_rng(seed)
    for _ in range(_random_orderings(options.problem)):
        yield stream.permutation(len(queries))


def _random_orderings(problem: AllocationProblem) -> int:
    triples = len(problem.query_types) * len(problem.models) * len(problem.tiers)
    return next((number for size, number in _RANDOM_ORDERINGS if triples > size), _MOST_RANDOM)


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def _one_ordering(table: Table, state: State, order: IntArray, coverage_budget: float) -> float:
    """Make of an empty state an answer from one ordering, improved; its dollars."""
    construct(table, state, order, coverage_budget)
    for _ in range(_PASSES):
        if not _relocate(table, state):
            break
    _consolidate(table, state)
    for p in range(state.pairs.size):
        if state.pairs[p].level >= 0 and is_idle(state, p):
            set_level(table, state, p, int_(-1))
    return recompute(table, state)


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def _relocate(table: Table, state: State) -> bool:
    """One pass: move each type's share on a pair whole to where all costs least; whether any moved."""
    types, pairs = state.shares.shape
    improved = False
    for i in range(types):
        for p in range(pairs):
            x = state.shares[i, p]
            if x <= NOTHING:
                continue
            level = state.pairs[p].level
            take_away(table, state, i, p)
            best, best_level = p, level
            least = _added_usd(table, state, i, p, level, x) - _BETTER_USD
            for other in range(pairs):
                if other == p:
                    continue
                wanted = wanted_level(table, state, i, other)
                if wanted < 0:
                    continue
                usd = _added_usd(table, state, i, other, wanted, x)
                if usd < least and fits(table, state, i, other, wanted, x):
                    best, best_level, least = other, wanted, usd
            put(table, state, i, best, best_level, x)
            improved = improved or best != p
    return improved


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def _added_usd(table: Table, state: State, i: int, p: int, level: int, x: float) -> float:
    """What all costs more when a pair, at a level, takes a share of a type."""
    o, now = table.at[p, level], state.pairs[p].level
    usd: float = table.rent_usd[o] + new_copies(table, state, i, p) * table.pairs[p].usd + x * table.uses[i, o].unit_usd
    if now < 0:
        return usd
    old = table.at[p, now]
    usd -= table.rent_usd[old]
    if old != o:
        for q in range(state.types.size):
            usd += state.shares[q, p] * (table.uses[q, o].unit_usd - table.uses[q, old].unit_usd)
    return usd


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def _consolidate(table: Table, state: State) -> None:
    """Close groups, the least loaded first, where all costs less with their types on the others."""
    types, pairs = state.shares.shape
    usd = recompute(table, state)
    load = np.array([state.pairs[p].load if state.pairs[p].level >= 0 else np.inf for p in range(pairs)])
    for p in np.argsort(load, kind="mergesort"):
        if state.pairs[p].level < 0:
            break
        other = copy_of(state)
        for i in range(types):
            if state.shares[i, p] > 0:
                take_away(table, other, i, p)
        set_level(table, other, p, int_(-1))
        for i in range(types):
            if state.shares[i, p] > 0:
                serve(table, other, i, bool_(True), p)
        other_usd = recompute(table, other)
        if other_usd < usd - _BETTER_USD:
            become(state, other)
            usd = other_usd
