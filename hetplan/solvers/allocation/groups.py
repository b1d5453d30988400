"""What the greedy heuristics keep: at most one group of GPUs for each pair of model and tier, and what it serves.

A pair's groups stand in the order of their rent, so that the heuristics speak of levels: the first is the smallest group
that holds the weights. Everything here is compiled, and works on arrays over query types (I), pairs (P), levels (L) and
options (O). Values of delay, time to first token and error are shares of the type's limit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetplan.solvers.allocation.assignment import Assignment, total_usd
from hetplan.solvers.allocation.options import SLACK, FloatArray, IntArray, Options

compiled = njit(cache=True, error_model="numpy", nogil=True)
# Rounding that limits are held within: a tenth of what answers are checked against.
ROUNDING = 1e-10
# A share below this is none.
NOTHING = 1e-9


class Table(NamedTuple):
    """A problem as the heuristics read it, and which of the paper's three mechanisms they use.

    Attributes
    ----------
    at : (P, L) int
        Option of a pair at a level, by rent; -1 above the last.
    serves : (I, O) bool
        Whether the option may serve any of the type.
    keeps_limits : (I, O) bool
        Whether it does so within the type's delay and time to first token.
    every : bool
        Whether delay and time to first token are limited for every option rather than for the mean.
    ranked_storage : float
        What a dollar of storage counts in the ranking.
    """

    at: IntArray
    rent_usd: FloatArray
    unit_usd: FloatArray
    delay: FloatArray
    error: FloatArray
    ttft: FloatArray
    load: FloatArray
    cache: FloatArray
    serves: NDArray[np.bool_]
    keeps_limits: NDArray[np.bool_]
    pair_gb: FloatArray
    pair_usd: FloatArray
    storage_gb: FloatArray
    storage_usd: FloatArray
    unserved_usd: FloatArray
    budget_usd: float
    capacity_gb: float
    per_type: bool
    served: bool
    every: bool
    ranked_storage: float
    m1: bool
    m2: bool
    m3: bool


class State(NamedTuple):
    """Who is served where: shares (I, P), each pair's level (-1: none), and what follows from them.

    ``left`` (I,) is unserved; ``delay``, ``error`` and ``ttft`` (I,) are sums over what is served; ``load`` and ``cache``
    (P,) are the group's; ``totals`` is rent in dollars, storage in GB, storage in dollars.
    """

    shares: FloatArray
    level: IntArray
    left: FloatArray
    delay: FloatArray
    error: FloatArray
    ttft: FloatArray
    load: FloatArray
    cache: FloatArray
    totals: FloatArray


def make_table(options: Options, *, m1: bool = True, m2: bool = True, m3: bool = True) -> Table:
    """The table of some options, which may be none."""
    o, problem = options, options.problem
    by_rent = np.lexsort((np.arange(o.count), o.gpus, o.rent_usd, o.pair))
    pair = o.pair[by_rent]
    level = np.arange(o.count) - np.searchsorted(pair, pair)
    at = np.full((o.pairs, int(level.max(initial=0)) + 1), -1, dtype=np.int64)
    at[pair, level] = by_rent
    ttft = np.zeros_like(o.delay) if o.ttft is None else o.ttft
    serves = o.most > 0
    return Table(
        at=at,
        rent_usd=np.ascontiguousarray(o.rent_usd),
        unit_usd=np.ascontiguousarray(o.unit_usd),
        delay=np.ascontiguousarray(o.delay),
        error=np.ascontiguousarray(o.error),
        ttft=np.ascontiguousarray(ttft),
        load=np.ascontiguousarray(o.load),
        cache=np.ascontiguousarray(o.cache),
        serves=np.ascontiguousarray(serves),
        keeps_limits=np.ascontiguousarray(serves & (o.delay <= 1 + SLACK) & (ttft <= 1 + SLACK)),
        pair_gb=np.ascontiguousarray(o.pair_gb),
        pair_usd=np.ascontiguousarray(o.pair_usd),
        storage_gb=np.ascontiguousarray(o.storage_gb),
        storage_usd=np.ascontiguousarray(o.storage_usd),
        unserved_usd=np.ascontiguousarray(o.unserved_usd),
        budget_usd=float(problem.budget_usd),
        capacity_gb=float(problem.storage_capacity_gb),
        per_type=o.stored_per_type,
        served=o.served,
        every=problem.decisions.delay == "each",
        ranked_storage=1.0 if problem.decisions.ranking_storage == "horizon" else 1.0 / problem.horizon_hours,
        m1=m1,
        m2=m2,
        m3=m3,
    )


def assignment_of(options: Options, table: Table, state: State) -> Assignment:
    """What a state says, over options."""
    replicas = np.zeros(options.count, dtype=np.int64)
    shares = np.zeros(options.most.shape)
    bought = np.flatnonzero(state.level >= 0)
    numbers = table.at[bought, state.level[bought]]
    replicas[numbers] = 1
    shares[:, numbers] = state.shares[:, bought]
    return Assignment(replicas, shares, total_usd(options, replicas, shares))


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def nothing_yet(table: Table) -> State:
    """No group, and all unserved."""
    types, pairs = table.unserved_usd.size, table.pair_gb.size
    return State(
        np.zeros((types, pairs)), np.full(pairs, -1), np.ones(types), np.zeros(types), np.zeros(types),
        np.zeros(types), np.zeros(pairs), np.zeros(pairs), np.zeros(3),
    )  # fmt: skip


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def copy_of(state: State) -> State:
    """A state that changes apart."""
    return State(
        state.shares.copy(), state.level.copy(), state.left.copy(), state.delay.copy(), state.error.copy(),
        state.ttft.copy(), state.load.copy(), state.cache.copy(), state.totals.copy(),
    )  # fmt: skip


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def become(state: State, other: State) -> None:
    """Take over another state."""
    state.shares[:] = other.shares
    state.level[:] = other.level
    state.left[:] = other.left
    state.delay[:] = other.delay
    state.error[:] = other.error
    state.ttft[:] = other.ttft
    state.load[:] = other.load
    state.cache[:] = other.cache
    state.totals[:] = other.totals


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def recompute(table: Table, state: State) -> float:
    """All that follows from shares and levels, anew; what it costs."""
    types, pairs = state.shares.shape
    state.left[:] = 1.0
    state.delay[:] = 0.0
    state.error[:] = 0.0
    state.ttft[:] = 0.0
    state.load[:] = 0.0
    state.cache[:] = 0.0
    state.totals[:] = 0.0
    usd = 0.0
    for p in range(pairs):
        if state.level[p] < 0:
            continue
        o = table.at[p, state.level[p]]
        state.totals[0] += table.rent_usd[o]
        copies = 0 if table.per_type else 1
        for i in range(types):
            x = state.shares[i, p]
            if x <= 0:
                continue
            if table.per_type:
                copies += 1
            state.left[i] -= x
            state.delay[i] += x * table.delay[i, o]
            state.error[i] += x * table.error[i, o]
            state.ttft[i] += x * table.ttft[i, o]
            state.load[p] += x * table.load[i, o]
            state.cache[p] += x * table.cache[i, o]
            state.totals[1] += x * table.storage_gb[i]
            state.totals[2] += x * table.storage_usd[i]
            usd += x * table.unit_usd[i, o]
        state.totals[1] += copies * table.pair_gb[p]
        state.totals[2] += copies * table.pair_usd[p]
        usd += table.rent_usd[o] + copies * table.pair_usd[p]
    for i in range(types):
        usd += table.unserved_usd[i] * max(state.left[i], 0.0)
    return usd


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def wanted_level(table: Table, state: State, i: int, p: int) -> int:
    """The level at which a pair would serve a type: M1 where there is no group yet, else M3; -1 where it can't."""
    now = state.level[p]
    if now < 0 and not table.m1:
        return 0
    if now >= 0 and table.keeps_limits[i, table.at[p, now]]:
        return int(now)
    if now < 0 or table.m3:
        for level in range(now + 1, table.at.shape[1]):
            o = table.at[p, level]
            if o < 0:
                break
            if table.keeps_limits[i, o]:
                return level
    return -1 if table.m1 else int(now)


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def new_copies(table: Table, state: State, i: int, p: int) -> int:
    """How often a pair's weights are stored once more when it serves a type as well: 0 or 1."""
    if table.per_type:
        return 0 if state.shares[i, p] > 0 else 1
    return 0 if state.level[p] >= 0 else 1


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def _room(value: float, used: float, done: float, served: bool) -> float:
    """The largest further share of an option that keeps one limit, of which ``used`` is taken by the share ``done``."""
    if served:
        return np.inf if value <= 1 else (done - used) / (value - 1)
    return np.inf if value <= 0 else (1 - used) / value


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def effective_coverage(table: Table, state: State, i: int, p: int, level: int) -> float:
    """The largest share of a type that a pair can take by what is left of the type and of its limits (equation 8)."""
    o = table.at[p, level]
    if not table.serves[i, o]:
        return 0.0
    done = 1 - state.left[i]
    most = min(state.left[i], _room(table.error[i, o], state.error[i], done, table.served))
    if not table.every:
        # What the pair serves of it already moves along.
        moved, old = state.shares[i, p], o
        if moved > 0:
            old = table.at[p, state.level[p]]
        delay = state.delay[i] + moved * (table.delay[i, o] - table.delay[i, old])
        ttft = state.ttft[i] + moved * (table.ttft[i, o] - table.ttft[i, old])
        most = min(most, _room(table.delay[i, o], delay, done, table.served))
        most = min(most, _room(table.ttft[i, o], ttft, done, table.served))
    return most


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def fits(table: Table, state: State, i: int, p: int, level: int, x: float) -> bool:
    """Whether every limit still holds when a pair, at a level, takes a share of a type (step 4)."""
    o = table.at[p, level]
    if not table.serves[i, o]:
        return False
    limit = 1 + ROUNDING
    now = state.level[p]
    old = table.at[p, now] if now >= 0 else o
    rent = state.totals[0] + table.rent_usd[o] - (table.rent_usd[old] if now >= 0 else 0.0)
    copies = new_copies(table, state, i, p)
    if state.totals[1] + copies * table.pair_gb[p] + x * table.storage_gb[i] > table.capacity_gb * limit:
        return False
    stored_usd = state.totals[2] + copies * table.pair_usd[p] + x * table.storage_usd[i]
    if rent + stored_usd > table.budget_usd * limit:
        return False
    load, cache = x * table.load[i, o], x * table.cache[i, o]
    if old == o:
        load += state.load[p]
        cache += state.cache[p]
    else:
        for q in range(state.left.size):
            share = state.shares[q, p]
            if share <= 0:
                continue
            load += share * table.load[q, o]
            cache += share * table.cache[q, o]
            if not table.serves[q, o]:
                return False
            if q != i and not table.every:
                most = (1 - state.left[q] if table.served else 1.0) + ROUNDING
                if state.delay[q] + share * (table.delay[q, o] - table.delay[q, old]) > most:
                    return False
                if state.ttft[q] + share * (table.ttft[q, o] - table.ttft[q, old]) > most:
                    return False
    if load > limit or cache > limit:
        return False
    most = (1 - state.left[i] + x if table.served else 1.0) + ROUNDING
    if state.error[i] + x * table.error[i, o] > most:
        return False
    if table.every:
        return True
    moved = state.shares[i, p]
    delay = state.delay[i] + moved * (table.delay[i, o] - table.delay[i, old]) + x * table.delay[i, o]
    ttft = state.ttft[i] + moved * (table.ttft[i, o] - table.ttft[i, old]) + x * table.ttft[i, o]
    return delay <= most and ttft <= most


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def set_level(table: Table, state: State, p: int, level: int) -> None:
    """Rent another group for a pair, or its first, or (-1) none: then nothing may be served there."""
    now = state.level[p]
    if now == level:
        return
    o = table.at[p, level] if level >= 0 else -1
    if now >= 0:
        old = table.at[p, now]
        state.totals[0] -= table.rent_usd[old]
    else:
        old = -1
    if not table.per_type and (now < 0 or level < 0):
        sign = 1 if now < 0 else -1
        state.totals[1] += sign * table.pair_gb[p]
        state.totals[2] += sign * table.pair_usd[p]
    state.level[p] = level
    state.load[p] = 0.0
    state.cache[p] = 0.0
    if level < 0:
        return
    state.totals[0] += table.rent_usd[o]
    if old < 0:
        return
    for q in range(state.left.size):
        share = state.shares[q, p]
        if share > 0:
            state.delay[q] += share * (table.delay[q, o] - table.delay[q, old])
            state.ttft[q] += share * (table.ttft[q, o] - table.ttft[q, old])
            state.load[p] += share * table.load[q, o]
            state.cache[p] += share * table.cache[q, o]


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def put(table: Table, state: State, i: int, p: int, level: int, x: float) -> None:
    """Serve a share of a type by a pair at a level."""
    copies = new_copies(table, state, i, p)
    set_level(table, state, p, level)
    if table.per_type:
        state.totals[1] += copies * table.pair_gb[p]
        state.totals[2] += copies * table.pair_usd[p]
    _count(table, state, i, p, x)


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def take_away(table: Table, state: State, i: int, p: int) -> None:
    """Serve none of a type by a pair, and rent nothing for a pair that then serves nobody."""
    _count(table, state, i, p, -state.shares[i, p])
    state.shares[i, p] = 0.0
    if table.per_type:
        state.totals[1] -= table.pair_gb[p]
        state.totals[2] -= table.pair_usd[p]
    if is_idle(state, p):
        set_level(table, state, p, -1)


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def is_idle(state: State, p: int) -> bool:
    """Whether a pair serves nobody."""
    for q in range(state.left.size):
        if state.shares[q, p] > 0:
            return False
    return True


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def _count(table: Table, state: State, i: int, p: int, x: float) -> None:
    o = table.at[p, state.level[p]]
    state.shares[i, p] += x
    state.left[i] -= x
    state.delay[i] += x * table.delay[i, o]
    state.error[i] += x * table.error[i, o]
    state.ttft[i] += x * table.ttft[i, o]
    state.load[p] += x * table.load[i, o]
    state.cache[p] += x * table.cache[i, o]
    state.totals[1] += x * table.storage_gb[i]
    state.totals[2] += x * table.storage_usd[i]
