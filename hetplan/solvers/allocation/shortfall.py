"""Why no allocation keeps all limits, and how far which of them must move.

A problem without an answer is asked again with one limit moved: feasible as far as the limit can matter, it is moved
back to where the last answer is. Prices of delay and of unserved traffic are left out of these problems, so that the
search looks for the least that counts against the budget, and the budget needed is what it finds.

- ``budget_usd``: the least rent and storage with which all other limits hold, by one search.
- ``storage_capacity_gb``: by bisection.
- ``delay_limit_s``, ``ttft_limit_s``, ``error_limit``: of each query type whose limit, moved alone, makes the problem
  feasible; where none does, the common factor on all of them. By bisection.
- ``max_unserved``: as those; where no type alone helps, the share that all of them may be left unserved.

Where no limit of the first kinds helps alone, the smallest set of them that does is moved together.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetplan.errors import InfeasibleError, Reason
from hetplan.problem.allocation import AllocationProblem
from hetplan.solvers.allocation.branching import Tree
from hetplan.solvers.allocation.limits import BUDGET, EVERY_TYPE, STORAGE, UNSERVED, Kind, Limit, kinds_of
from hetplan.solvers.allocation.options import make_options

# Seconds that are always there, at most, and the share of what is left that one search may take.
_LEAST_S, _MOST_S, _SHARE = 2.0, 15.0, 0.25
# How near to each other a value that is enough and one that is not must come, and the budget's distance from its bound.
_NEAR, _GAP = 0.005, 1e-4
# Any answer will do: the search ends at the first.
_ANY = 0.999
# Digits of a figure, which is rounded up to them, and the room for rounding below them.
_DIGITS, _ROOM = 4, 1e-6
# Ways out that the message lists; the reasons hold all.
_LISTED = 6
# By how much the budget is raised until there is an answer.
_STRIDE = 4.0


@dataclass(frozen=True, slots=True)
class Move:
    """A limit, and how far it is moved."""

    limit: Limit
    needed: float

    @property
    def relative(self) -> float:
        """The part of the limit, or of the traffic that is served, by which it moves."""
        if self.limit.constraint == UNSERVED:
            return (self.needed - self.limit.available) / (1 - self.limit.available)
        return self.needed / self.limit.available - 1

    @property
    def reason(self) -> Reason:
        one = self.limit
        return Reason(one.constraint, one.subject, self.needed, one.available, one.unit)

    def __str__(self) -> str:
        one, needed = self.limit, f"{self.needed:.{_DIGITS}g}"
        if one.constraint == BUDGET:
            return f"raise budget_usd from ${one.available:g} to ${needed}"
        if one.constraint == STORAGE:
            return f"raise storage_capacity_gb from {one.available:g} GB to {needed} GB"
        of = "every query type" if one.subject == EVERY_TYPE else f"{one.subject!r}"
        if one.constraint == UNSERVED:
            if needed == "1":
                return f"drop {of} (max_unserved 1 instead of {one.available:g})"
            return f"allow max_unserved of {of} {needed} instead of {one.available:g}"
        if one.factor:
            return f"raise {one.constraint} of {of} to {needed} times what it is"
        unit = f" {one.unit}" if one.unit == "s" else ""
        return f"raise {one.constraint} of {of} from {one.available:g}{unit} to {needed}{unit}"


def infeasible(problem: AllocationProblem, *, time_limit_s: float) -> InfeasibleError:
    """The error of a problem that no allocation answers, with how far each limit that helps must move.

    Parameters
    ----------
    problem : AllocationProblem
        Proven to have no answer.
    time_limit_s : float
        Seconds for it; at least 2 and at most 15 are taken, and what the last search needs to end.

    Returns
    -------
    InfeasibleError
        ``reasons``, the smallest move relative to its limit first: any one of them is enough, or, where the message
        says so, the last ones together.
    """
    search = _Search(time.monotonic() + min(max(time_limit_s, _LEAST_S), _MOST_S))
    *promises, unserved = kinds_of(problem)
    alone = [move for kind in promises for move in _moves(search, problem, kind)]
    joint = [] if alone else _joint(search, problem, promises)
    left = _moves(search, problem, unserved)
    if alone or joint:
        # To serve nothing is no way out beside others.
        left = [move for move in left if move.needed < 1 or move.limit.subject != EVERY_TYPE]
    alone = sorted([*alone, *left], key=lambda move: move.relative)
    ways = [str(move) for move in alone[:_LISTED]]
    if joint:
        ways.append(" and ".join(str(move) for move in joint))
    said = ", or ".join(ways)
    more = f" ({len(alone) - _LISTED} more are among the reasons)" if len(alone) > _LISTED else ""
    late = ". Figures may be higher than needed, and a way out may be missing: a search ended before its proof"
    return InfeasibleError(
        f"no allocation serves what must be served within all limits. {said[0].upper()}{said[1:]}{more}"
        f"{'' if search.proven else late}",
        [move.reason for move in (*alone, *joint)],
    )


@dataclass(slots=True)
class _Search:
    """Searches until a deadline; ``proven`` says whether each came to its end."""

    deadline: float
    proven: bool = field(default=True)

    def run(self, problem: AllocationProblem, gap: float) -> float | None:
        """What the best answer found costs; None where there is none, or none was found."""
        left, asked = self.deadline - time.monotonic(), _asked(problem)
        if asked is None:
            return 0.0
        if left <= 0:
            self.proven = False
            return None
        until = time.monotonic() + max(_SHARE * left, min(left, 1.0))
        tree = Tree(make_options(asked), gap, until, lambda usd, bound: None)
        tree.search()
        if tree.best is None:
            self.proven &= tree.infeasible
            return None
        if gap < _ANY:
            self.proven &= tree.bound >= tree.best.usd * (1 - _NEAR)
        return tree.best.usd

    def feasible(self, problem: AllocationProblem) -> bool:
        return self.run(problem, _ANY) is not None

    def least(self, problem: AllocationProblem, limit: Limit) -> float | None:
        """The least value of a limit with which the problem has an answer, rounded up; None where none is enough."""
        if limit.constraint == BUDGET:
            # A budget far above what is needed costs the search its sense of proportion.
            budget, usd = limit.available, None
            while usd is None and budget < limit.most and time.monotonic() < self.deadline:
                budget = min(budget * _STRIDE, limit.most)
                usd = self.run(limit.moved(problem, budget), _GAP)
            return None if usd is None else _rounded_up(usd)
        serves_nothing = limit.constraint == UNSERVED and limit.subject == EVERY_TYPE
        if not serves_nothing and not self.feasible(limit.moved(problem, limit.most)):
            return None
        low, high = limit.available, limit.most
        if limit.constraint == UNSERVED:
            # Often the first request of a type costs as much as most of them: then it is dropped altogether.
            nearly = max(low, high * (1 - _NEAR))
            low, high = (low, nearly) if self.feasible(limit.moved(problem, nearly)) else (nearly, high)
        while high - low > _NEAR * high and time.monotonic() < self.deadline:
            middle = math.sqrt(low * high) if low > 0 else high / 2
            if self.feasible(limit.moved(problem, middle)):
                high = middle
            else:
                low = middle
        self.proven &= high - low <= _NEAR * high
        return min(_rounded_up(high), limit.most)


def _moves(search: _Search, problem: AllocationProblem, kind: Kind) -> list[Move]:
    """Of a kind, each limit that helps alone; where none does, all of them together if that helps."""
    moves = []
    if len(kind.each) == 1 or kind.together.constraint == UNSERVED or search.feasible(_lifted(problem, [kind])):
        for limit in kind.each:
            needed = search.least(problem, limit)
            if needed is not None:
                moves.append(Move(limit, needed))
        if not moves and len(kind.each) != 1:
            needed = search.least(problem, kind.together)
            if needed is not None:
                moves.append(Move(kind.together, needed))
    return moves


def _joint(search: _Search, problem: AllocationProblem, kinds: Sequence[Kind]) -> list[Move]:
    """The first of the smallest sets of kinds that help together, and how far each must move; none where none does."""
    if not search.feasible(_lifted(problem, kinds)):
        return []
    for size in range(2, len(kinds) + 1):
        for some in itertools.combinations(kinds, size):
            if search.feasible(_lifted(problem, some)):
                moves: list[Move] = []
                now = problem
                # The budget, first in the list, comes last: it is what the others leave to pay.
                for kind in reversed(some):
                    others = _lifted(now, [k for k in some if k.together.constraint not in _names(moves, kind)])
                    found = _moves(search, others, kind)
                    if not found:
                        return []
                    best = min(found, key=lambda move: move.relative)
                    moves.append(best)
                    now = best.limit.moved(now, best.needed)
                return moves
    return []


def _names(moves: Sequence[Move], kind: Kind) -> set[str]:
    return {kind.together.constraint, *(move.limit.constraint for move in moves)}


def _lifted(problem: AllocationProblem, kinds: Sequence[Kind]) -> AllocationProblem:
    """The problem with all limits of some kinds where they do not matter any more."""
    for kind in kinds:
        problem = kind.together.moved(problem, kind.together.most)
    return problem


def _rounded_up(value: float) -> float:
    """To the digits that are shown: what is shown is enough."""
    step = 10.0 ** (math.floor(math.log10(value)) + 1 - _DIGITS)
    return math.ceil(value * (1 + _ROOM) / step) * step


def _asked(problem: AllocationProblem) -> AllocationProblem | None:
    """A problem that has an answer where this one has, of what must be served alone; None where nothing must be.

    A type of which a part may be left unserved is one with less traffic: serving less keeps every limit. Said so, the
    search cannot buy a part of a replica for a part of the type.
    """
    queries, decisions = problem.query_types, problem.decisions
    must = [i for i, q in enumerate(queries) if q.max_unserved < 1]
    if not must:
        return None
    changed = []
    for q in (queries[i] for i in must):
        fields: dict[str, float | None] = {"delay_usd_per_ms": 0.0, "unserved_usd": 0.0}
        # The literal cache is of one request, whatever the traffic.
        if decisions.kv_memory == "littles_law":
            served = 1 - q.max_unserved
            fields |= {"max_unserved": 0.0, "requests_per_hour": q.requests_per_hour * served}
            if decisions.slo_on == "all":
                fields["error_limit"] = q.error_limit / served
                if decisions.delay == "average":
                    fields["delay_limit_s"] = q.delay_limit_s / served
                    fields["ttft_limit_s"] = None if q.ttft_limit_s is None else q.ttft_limit_s / served
        changed.append(q.replace(**fields))
    tables = ("delay_s", "ttft_s", "capacity_per_hour")
    return problem.replace(
        query_types=tuple(changed),
        configurations=tuple(
            c.replace(**{name: tuple(getattr(c, name)[i] for i in must) for name in tables})
            for c in problem.configurations
        ),
    )
