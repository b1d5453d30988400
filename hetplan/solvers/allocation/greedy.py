"""GH: the greedy heuristic of Cheng and Nguyen (Algorithm 1), as published.

==========================  ==========================================================================================
paper                       here
==========================  ==========================================================================================
M1 (equation 6)             `groups.wanted_level`, of a pair without a group: its smallest that keeps the type's delay
M2 (7, 8)                   `serve`: candidates by whether they cover all that is left, then by dollars for each unit
M3 (9)                      `groups.wanted_level`, of a pair with one: a larger group where this one is too slow
F, Cost (10, 11), beta      `open_for_coverage`, ``coverage_budget``
lambda                      ``requests_per_hour``, by which types are served, the largest first
==========================  ==========================================================================================

Where it departs, or says what the paper does not:

- The problem's `Decisions` hold throughout, so a limit on the mean of what is served leaves room for a slower or less
  accurate option only after others have made it; a limit on the time to first token counts as the delay does.
- A larger group changes the delay of types that are there already. It is recomputed, and refused where it breaks a
  limit.
- Weights that are stored once cost nothing in the ranking of a pair that has a group, and count in the budget of the
  first phase.
- Without M1 the smallest group that holds the weights is taken; every limit is still verified before committing, so
  that no mechanism, left out, makes an answer that breaks one.
- At most one group for each pair of model and tier, whatever the problem allows.

A group that the first phase opens stays open, used or not, as published. See `hetplan.solvers.allocation.adaptive` for
what mends that.
"""

from __future__ import annotations

import time
from typing import ClassVar

import numpy as np

from hetplan.errors import InvalidInputError, NoSolutionError
from hetplan.plan import Plan
from hetplan.problem.allocation import AllocationProblem
from hetplan.solvers.allocation.assignment import Assignment
from hetplan.solvers.allocation.groups import (
    NOTHING,
    State,
    Table,
    assignment_of,
    bool_,
    compiled,
    effective_coverage,
    fits,
    int_,
    make_table,
    new_copies,
    nothing_yet,
    put,
    set_level,
    wanted_level,
)
from hetplan.solvers.allocation.options import SLACK, IntArray, Options, make_options
from hetplan.solvers.base import AllocationSolution, OnIncumbent, Progress, check_time_limit

# Of the budget, in the paper's runs (beta).
COVERAGE_BUDGET = 0.8
# How far below all that is left of a type a share counts as less than all.
_LESS = 1e-12


class Gh:
    """The greedy heuristic.

    Parameters
    ----------
    m1, m2, m3 : bool
        Use the paper's three mechanisms: groups chosen by memory and delay, ranking by dollars for each unit of
        coverage, larger groups for pairs that have one.
    coverage_budget : float
        Share of the budget at which the first phase, which opens groups until every type has one, ends.
    """

    name: ClassVar[str] = "gh"

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
        """Run the heuristic once; see `hetplan.solvers.base.AllocationSolver`. Nothing in it is random."""
        began = time.monotonic()
        check_time_limit(time_limit_s)
        options = make_options(problem)
        found = greedy_assignment(options, m1=self.m1, m2=self.m2, m3=self.m3, coverage_budget=self.coverage_budget)
        refuse_dropped(problem, found)
        if on_incumbent is not None:
            on_incumbent(Progress(time.monotonic() - began, found.usd, None, "served greedily"))
        parameters = {"m1": self.m1, "m2": self.m2, "m3": self.m3, "coverage_budget": self.coverage_budget}
        return AllocationSolution(options, found, parameters=parameters)


def greedy_assignment(
    options: Options,
    *,
    m1: bool = True,
    m2: bool = True,
    m3: bool = True,
    coverage_budget: float = COVERAGE_BUDGET,
) -> Assignment:
    """What the greedy heuristic does with some options; it may leave more unserved than the problem allows."""
    table = make_table(options, m1=m1, m2=m2, m3=m3)
    requests = np.array([q.requests_per_hour for q in options.problem.query_types])
    order = np.argsort(-requests, kind="stable")
    state = nothing_yet(table)
    construct(table, state, order, coverage_budget)
    return assignment_of(options, table, state)


def check_switches(**switches: object) -> None:
    """Refuse what is neither True nor False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise InvalidInputError(f"{name} is True or False, got {value!r}")


def check_coverage_budget(value: object) -> float:
    """A share of the budget, refused unless from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InvalidInputError(f"coverage_budget is a share of the budget from 0 to 1, got {value!r}")
    return float(value)


def refuse_dropped(problem: AllocationProblem, found: Assignment) -> None:
    """Refuse an assignment that leaves more of a type unserved than may be."""
    unserved = 1 - found.shares.sum(axis=1)
    for query, part in zip(problem.query_types, unserved.tolist(), strict=True):
        if part > query.max_unserved + SLACK:
            raise NoSolutionError(
                f"the greedy heuristic leaves {part:.1%} of query type {query.name!r} unserved; "
                f"at most {query.max_unserved:.1%} may be. Use solver='auto', or raise max_unserved"
            )


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def construct(table: Table, state: State, order: IntArray, coverage_budget: float) -> None:
    """Both phases, from an empty state, with the types of the second in an order."""
    open_for_coverage(table, state, coverage_budget)
    for i in order:
        serve(table, state, i, bool_(False), int_(-1))


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def open_for_coverage(table: Table, state: State, coverage_budget: float) -> None:
    """Open groups until each type has one that could serve it: most types for a dollar first."""
    types, pairs = state.shares.shape
    # Level of M1 in an empty state, for types that the pair's model is accurate enough for.
    level = np.full((types, pairs), -1)
    for i in range(types):
        for p in range(pairs):
            if table.uses[i, table.at[p, 0]].error <= 1 + SLACK:
                level[i, p] = wanted_level(table, state, i, p)
    uncovered = np.ones(types, np.bool_)
    while uncovered.any() and state.totals[0] + state.totals[2] < coverage_budget * table.budget_usd:
        best, best_level, most = -1, -1, 0.0
        for p in range(pairs):
            if state.pairs[p].level >= 0:
                continue
            covered, highest = 0, -1
            for i in range(types):
                if uncovered[i] and level[i, p] >= 0:
                    covered += 1
                    highest = max(highest, level[i, p])
            if covered == 0:
                continue
            rent = table.rent_usd[table.at[p, highest]]
            if not table.per_type:
                if state.totals[1] + table.pairs[p].gb > table.capacity_gb:
                    continue
                if state.totals[0] + state.totals[2] + rent + table.pairs[p].usd > table.budget_usd:
                    continue
            elif state.totals[0] + rent > table.budget_usd:
                continue
            worth = covered / rent
            if worth > most:
                best, best_level, most = p, highest, worth
        if best < 0:
            break
        set_level(table, state, best, best_level)
        for i in range(types):
            if level[i, best] >= 0:
                uncovered[i] = False


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def serve(table: Table, state: State, i: int, only_open: bool, barred: int) -> None:
    """Serve what is left of a type (the second phase's steps 1 to 4).

    Parameters
    ----------
    only_open : bool
        By pairs that have a group.
    barred : int
        A pair that may not serve it; -1 for none.
    """
    pairs = state.pairs.size
    if state.types[i].left <= NOTHING:
        return
    candidates = np.empty(pairs, np.int64)
    levels = np.empty(pairs, np.int64)
    dollars = np.empty(pairs)
    partial = np.zeros(pairs, np.bool_)
    count = 0
    for p in range(pairs):
        now = state.pairs[p].level
        if p == barred or (only_open and now < 0):
            continue
        level = wanted_level(table, state, i, p)
        if level < 0:
            continue
        covers = effective_coverage(table, state, i, p, level)
        if covers <= NOTHING:
            continue
        o = table.at[p, level]
        rent = table.rent_usd[o] - (table.rent_usd[table.at[p, now]] if now >= 0 else 0.0)
        stored = new_copies(table, state, i, p) * table.pairs[p].usd + table.types[i].storage_usd
        usd = rent + table.ranked_storage * stored + table.uses[i, o].unit_usd - table.types[i].storage_usd
        candidates[count], levels[count] = p, level
        if table.m2:
            dollars[count] = usd / covers
            partial[count] = covers < state.types[i].left - _LESS
        else:
            dollars[count] = usd
        count += 1
    order = np.argsort(dollars[:count], kind="mergesort")
    for part in (False, True):
        for c in order:
            if partial[c] != part:
                continue
            if state.types[i].left <= NOTHING:
                return
            p, level = candidates[c], levels[c]
            x = effective_coverage(table, state, i, p, level)
            if x > NOTHING and fits(table, state, i, p, level, x):
                put(table, state, i, p, level, x)
