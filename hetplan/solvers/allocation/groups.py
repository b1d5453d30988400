"""What the greedy heuristics keep: at most one group of GPUs for each pair of model and tier, and what it serves.

A pair's groups stand in the order of their rent, so that the heuristics speak of levels: the first is the smallest
group that holds the weights. Arrays are over query types (I), pairs (P), levels (L) and options (O); delay, time to
first token and error are shares of the type's limit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from hetplan.solvers.allocation.assignment import Assignment, total_usd
from hetplan.solvers.allocation.options import SLACK, FloatArray, IntArray, Options

compiled = njit(cache=True, error_model="numpy", nogil=True)
# A value written out is a type of its own to the compiler: functions called with one would be compiled once more.
int_: Any = np.int64
bool_: Any = np.bool_
# Rounding that limits are held within: a tenth of what answers are checked against.
ROUNDING = 1e-10
# A share below this is none.
NOTHING = 1e-9


# Of a type on an option; of a type; of a pair. Records, as each array that a compiled function takes costs compilation.
_USE = np.dtype(
    [(name, np.float64) for name in ("unit_usd", "delay", "error", "ttft", "load", "cache")]
    + [(name, np.bool_) for name in ("serves", "keeps_limits")]
)
_TYPE = np.dtype([(name, np.float64) for name in ("storage_gb", "storage_usd", "unserved_usd")])
_PAIR = np.dtype([("gb", np.float64), ("usd", np.float64)])
# Of a type that is served; of a pair's group.
_SERVED = np.dtype([(name, np.float64) for name in ("left", "delay", "error", "ttft")])
_GROUP = np.dtype([("level", np.int64), ("load", np.float64), ("cache", np.float64)])


class Table(NamedTuple):
    """A problem as the heuristics read it, and which of the paper's three mechanisms they use.

    Attributes
    ----------
    at : (P, L) int
        Option of a pair at a level, by rent; -1 above the last.
    rent_usd : (O,) float
    uses : (I, O) records
        As in `Options`; ``serves``: whether the option may serve any of the type, and ``keeps_limits``: within the
        type's delay and time to first token.
    types : (I,) records
    pairs : (P,) records
        Stored weights.
    every : bool
        Whether delay and time to first token are limited for every option rather than for the mean.
    ranked_storage : float
        What a dollar of storage counts in the ranking.
    """

    at: IntArray
    rent_usd: FloatArray
    uses: Any
    types: Any
    pairs: Any
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
    """Who is served where: shares, each pair's group, and what follows from them.

    Attributes
    ----------
    shares : (I, P) float
    types : (I,) records
        What is left of a type, and its delay, error and time to first token, each a sum over what is served.
    pairs : (P,) records
        The level of the pair's group (-1: none), and what is used of its compute and its memory for KV cache.
    totals : (3,) float
        Rent in dollars, storage in GB, storage in dollars.
    """

    shares: FloatArray
    types: Any
    pairs: Any
    totals: FloatArray


def make_table(options: Options, *, m1: bool = True, m2: bool = True, m3: bool = True) -> Table:
    """The table of some options, which may be none."""
    o, problem = options, options.problem
    by_rent = np.lexsort((np.arange(o.count), o.gpus, o.rent_usd, o.pair))
    pair = o.pair[by_rent]
    level = np.arange(o.count) - np.searchsorted(pair, pair)
    at = np.full((o.pairs, int(level.max(initial=0)) + 1), -1, dtype=np.int64)
    at[pair, level] = by_rent
    uses = np.zeros(o.most.shape, _USE)
    for name in ("unit_usd", "delay", "error", "load", "cache"):
        uses[name] = getattr(o, name)
    if o.ttft is not None:
        uses["ttft"] = o.ttft
    uses["serves"] = o.most > 0
    uses["keeps_limits"] = uses["serves"] & (o.delay <= 1 + SLACK) & (uses["ttft"] <= 1 + SLACK)
    types = np.zeros(len(o.unserved_usd), _TYPE)
    for name in ("storage_gb", "storage_usd", "unserved_usd"):
        types[name] = getattr(o, name)
    pairs = np.zeros(o.pairs, _PAIR)
    pairs["gb"], pairs["usd"] = o.pair_gb, o.pair_usd
    return Table(
        at=at,
        rent_usd=np.ascontiguousarray(o.rent_usd),
        uses=uses,
        types=types,
        pairs=pairs,
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


def nothing_yet(table: Table) -> State:
    """No group, and all unserved."""
    types, pairs = np.zeros(len(table.types), _SERVED), np.zeros(len(table.pairs), _GROUP)
    types["left"], pairs["level"] = 1.0, -1
    return State(np.zeros((len(types), len(pairs))), types, pairs, np.zeros(3))


def assignment_of(options: Options, table: Table, state: State) -> Assignment:
    """What a state says, over options."""
    replicas = np.zeros(options.count, dtype=np.int64)
    shares = np.zeros(options.most.shape)
    bought = np.flatnonzero(state.pairs["level"] >= 0)
    numbers = table.at[bought, state.pairs["level"][bought]]
    replicas[numbers] = 1
    shares[:, numbers] = state.shares[:, bought]
    return Assignment(replicas, shares, total_usd(options, replicas, shares))


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def copy_of(state: State) -> State:
    """A state that changes apart."""
    return State(state.shares.copy(), state.types.copy(), state.pairs.copy(), state.totals.copy())


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def become(state: State, other: State) -> None:
    """Take over another state."""
    state.shares[:] = other.shares
    state.types[:] = other.types
    state.pairs[:] = other.pairs
    state.totals[:] = other.totals


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def recompute(table: Table, state: State) -> float:
    """All that follows from shares and levels, anew; what it costs."""
    types, pairs = state.shares.shape
    for i in range(types):
        done = state.types[i]
        done.left, done.delay, done.error, done.ttft = 1.0, 0.0, 0.0, 0.0
    state.totals[:] = 0.0
    usd = 0.0
    for p in range(pairs):
        state.pairs[p].load = 0.0
        state.pairs[p].cache = 0.0
        if state.pairs[p].level < 0:
            continue
        o = table.at[p, state.pairs[p].level]
        state.totals[0] += table.rent_usd[o]
        copies = 0 if table.per_type else 1
        for i in range(types):
            x = state.shares[i, p]
            if x <= 0:
                continue
            if table.per_type:
                copies += 1
            state.types[i].left -= x
            state.types[i].delay += x * table.uses[i, o].delay
            state.types[i].error += x * table.uses[i, o].error
            state.types[i].ttft += x * table.uses[i, o].ttft
            state.pairs[p].load += x * table.uses[i, o].load
            state.pairs[p].cache += x * table.uses[i, o].cache
            state.totals[1] += x * table.types[i].storage_gb
            state.totals[2] += x * table.types[i].storage_usd
            usd += x * table.uses[i, o].unit_usd
        state.totals[1] += copies * table.pairs[p].gb
        state.totals[2] += copies * table.pairs[p].usd
        usd += table.rent_usd[o] + copies * table.pairs[p].usd
    for i in range(types):
        usd += table.types[i].unserved_usd * max(state.types[i].left, 0.0)
    return usd


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def wanted_level(table: Table, state: State, i: int, p: int) -> int:
    """The level at which a pair would serve a type: M1 where there is no group yet, else M3; -1 where it can't."""
    now = state.pairs[p].level
    if now < 0 and not table.m1:
        return 0
    if now >= 0 and table.uses[i, table.at[p, now]].keeps_limits:
        return int(now)
    if now < 0 or table.m3:
        for level in range(now + 1, table.at.shape[1]):
            o = table.at[p, level]
            if o < 0:
                break
            if table.uses[i, o].keeps_limits:
                return level
    return -1 if table.m1 else int(now)


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def new_copies(table: Table, state: State, i: int, p: int) -> int:
    """How often a pair's weights are stored once more when it serves a type as well: 0 or 1."""
    if table.per_type:
        return 0 if state.shares[i, p] > 0 else 1
    return 0 if state.pairs[p].level >= 0 else 1


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
    if not table.uses[i, o].serves:
        return 0.0
    done = 1 - state.types[i].left
    most: float = min(state.types[i].left, _room(table.uses[i, o].error, state.types[i].error, done, table.served))
    if not table.every:
        # What the pair serves of it already moves along.
        moved, old = state.shares[i, p], o
        if moved > 0:
            old = table.at[p, state.pairs[p].level]
        delay = state.types[i].delay + moved * (table.uses[i, o].delay - table.uses[i, old].delay)
        ttft = state.types[i].ttft + moved * (table.uses[i, o].ttft - table.uses[i, old].ttft)
        most = min(most, _room(table.uses[i, o].delay, delay, done, table.served))
        most = min(most, _room(table.uses[i, o].ttft, ttft, done, table.served))
    return most


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def fits(table: Table, state: State, i: int, p: int, level: int, x: float) -> bool:
    """Whether every limit still holds when a pair, at a level, takes a share of a type (step 4)."""
    o = table.at[p, level]
    if not table.uses[i, o].serves:
        return False
    limit = 1 + ROUNDING
    now = state.pairs[p].level
    old = table.at[p, now] if now >= 0 else o
    rent = state.totals[0] + table.rent_usd[o] - (table.rent_usd[old] if now >= 0 else 0.0)
    copies = new_copies(table, state, i, p)
    if state.totals[1] + copies * table.pairs[p].gb + x * table.types[i].storage_gb > table.capacity_gb * limit:
        return False
    stored_usd = state.totals[2] + copies * table.pairs[p].usd + x * table.types[i].storage_usd
    if rent + stored_usd > table.budget_usd * limit:
        return False
    load, cache = x * table.uses[i, o].load, x * table.uses[i, o].cache
    if old == o:
        load += state.pairs[p].load
        cache += state.pairs[p].cache
    else:
        for q in range(state.types.size):
            share = state.shares[q, p]
            if share <= 0:
                continue
            load += share * table.uses[q, o].load
            cache += share * table.uses[q, o].cache
            if not table.uses[q, o].serves:
                return False
            if q != i and not table.every:
                most = (1 - state.types[q].left if table.served else 1.0) + ROUNDING
                if state.types[q].delay + share * (table.uses[q, o].delay - table.uses[q, old].delay) > most:
                    return False
                if state.types[q].ttft + share * (table.uses[q, o].ttft - table.uses[q, old].ttft) > most:
                    return False
    if load > limit or cache > limit:
        return False
    most = (1 - state.types[i].left + x if table.served else 1.0) + ROUNDING
    if state.types[i].error + x * table.uses[i, o].error > most:
        return False
    if table.every:
        return True
    moved = state.shares[i, p]
    delay = moved * (table.uses[i, o].delay - table.uses[i, old].delay) + x * table.uses[i, o].delay
    ttft = moved * (table.uses[i, o].ttft - table.uses[i, old].ttft) + x * table.uses[i, o].ttft
    within: bool = state.types[i].delay + delay <= most and state.types[i].ttft + ttft <= most
    return within


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def set_level(table: Table, state: State, p: int, level: int) -> None:
    """Rent another group for a pair, or its first, or (-1) none: then nothing may be served there."""
    now = state.pairs[p].level
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
        state.totals[1] += sign * table.pairs[p].gb
        state.totals[2] += sign * table.pairs[p].usd
    state.pairs[p].level = level
    state.pairs[p].load = 0.0
    state.pairs[p].cache = 0.0
    if level < 0:
        return
    state.totals[0] += table.rent_usd[o]
    if old < 0:
        return
    for q in range(state.types.size):
        share = state.shares[q, p]
        if share > 0:
            state.types[q].delay += share * (table.uses[q, o].delay - table.uses[q, old].delay)
            state.types[q].ttft += share * (table.uses[q, o].ttft - table.uses[q, old].ttft)
            state.pairs[p].load += share * table.uses[q, o].load
            state.pairs[p].cache += share * table.uses[q, o].cache


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def put(table: Table, state: State, i: int, p: int, level: int, x: float) -> None:
    """Serve a share of a type by a pair at a level."""
    copies = new_copies(table, state, i, p)
    set_level(table, state, p, level)
    if table.per_type:
        state.totals[1] += copies * table.pairs[p].gb
        state.totals[2] += copies * table.pairs[p].usd
    _count(table, state, i, p, x)


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def take_away(table: Table, state: State, i: int, p: int) -> None:
    """Serve none of a type by a pair, and rent nothing for a pair that then serves nobody."""
    _count(table, state, i, p, -state.shares[i, p])
    state.shares[i, p] = 0.0
    if table.per_type:
        state.totals[1] -= table.pairs[p].gb
        state.totals[2] -= table.pairs[p].usd
    if is_idle(state, p):
        set_level(table, state, p, int_(-1))


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def is_idle(state: State, p: int) -> bool:
    """Whether a pair serves nobody."""
    return not (state.shares[:, p] > 0).any()


@compiled  # type: ignore[untyped-decorator, unused-ignore]
def _count(table: Table, state: State, i: int, p: int, x: float) -> None:
    o = table.at[p, state.pairs[p].level]
    state.shares[i, p] += x
    state.types[i].left -= x
    state.types[i].delay += x * table.uses[i, o].delay
    state.types[i].error += x * table.uses[i, o].error
    state.types[i].ttft += x * table.uses[i, o].ttft
    state.pairs[p].load += x * table.uses[i, o].load
    state.pairs[p].cache += x * table.uses[i, o].cache
    state.totals[1] += x * table.types[i].storage_gb
    state.totals[2] += x * table.types[i].storage_usd
