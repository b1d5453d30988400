"""The pipeline that is worth most for the price of its machines, whatever the prices: what column generation asks.

Branch and bound over the boxes of `rates`, where the machines are not given. In a box, machines that hold all
layers cost at least what dynamic programming finds over (what is held: first and last stage, stages, units). A box
is closed when that price says so, or when so few sets of machines can be paid that each can be looked at alone.
"""

from __future__ import annotations

import heapq

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetplan.estimator.base import FloatArray
from hetplan.solvers.placement.covering import (
    ANY,
    FAST_TO_SLOW,
    SLOW_FIRST,
    Arrays,
    allowed,
    machine_units,
    most_units,
    receivers_of,
)
from hetplan.solvers.placement.rates import half_of, widest_side
from hetplan.solvers.placement.tables import IntArray

# Sets that are listed before a box is split instead; and in a tiny one.
_FEW, _MANY = 8, 64
# Partial sets that are looked at for each.
_PARTIAL = 25
# Share of x + y below which a box is small, and tiny.
_SMALL, _TINY = 0.02, 0.002
# How much too high a box's bound is by guess, times its widest side.
_INFLATED = 2.0


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _add_machine(new: FloatArray, old: FloatArray, units: int, price: float) -> None:
    """Lower prices of holding at least r units by one machine more, for each r."""
    least = old[0] + price
    near = min(units, new.size - 1)
    if new[near] > least:
        for r in range(near + 1):
            new[r] = min(new[r], least)
    for r in range(units + 1, new.size):
        new[r] = min(new[r], old[r - units] + price)


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _add_machines(new: FloatArray, old: FloatArray, units: int, price: float) -> None:
    """As `_add_machine`, for any number of machines where ``old`` is ``new``."""
    for r in range(1, min(units, new.size - 1) + 1):
        new[r] = min(new[r], old[0] + price)
    for r in range(units + 1, new.size):
        new[r] = min(new[r], old[r - units] + price)


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _copy(to: FloatArray, rows: FloatArray, states: int, top: int, needed: int) -> None:
    for state in range(states):
        for used in range(top + 1):
            for r in range(needed + 1):
                to[state, used, r] = rows[state, used, r]


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def cheapest_cover(
    needed: int,
    held: IntArray,
    depth: int,
    count_stages: bool,
    copies: IntArray,
    endless: NDArray[np.bool_],
    prices: FloatArray,
    budget: float,
    rows: FloatArray,
    spare: FloatArray,
    slow: NDArray[np.bool_],
    way: int,
) -> float:
    """The least price of machines that hold ``needed`` units in one pipeline; infinite above ``budget``.

    Fills ``rows`` (P + 1, 4 or 8, stages + 1, units + 1): the least price of holding at least so many units by machines
    of pool p and the pools after it. ``endless``: pools of whose machines no set needs more. ``way``: how machines
    stand, see `covering.covers`.
    """
    top, most_held = depth if count_stages else 0, min(depth, held.shape[2] - 1)
    pools, kinds = held.shape[0], min(held.shape[1], 6 if way == FAST_TO_SLOW else 4)
    states = 8 if kinds == 6 else kinds
    for state in range(states):
        for used in range(top + 1):
            for r in range(needed + 1):
                rows[pools, state, used, r] = np.inf
    for used in range(top + 1):
        rows[pools, 0, used, 0] = 0.0
    for p in range(pools - 1, -1, -1):
        price = prices[p]
        _copy(rows[p], rows[p + 1], states, top, needed)
        if kinds == 1 and endless[p]:
            new = rows[p]
            last = -1
            for s in range(1, most_held + 1):
                units = held[p, 0, s]
                if units < 0 or units == last:
                    continue
                last = units
                for used in range(s if count_stages else 0, top + 1):
                    _add_machines(new[0, used], new[0, used - s if count_stages else 0], units, price)
            continue
        for copy in range(copies[p]):
            # What is read has not seen this machine yet.
            if copy == 0:
                old = rows[p + 1]
            else:
                _copy(spare, rows[p], states, top, needed)
                old = spare
            new = rows[p]
            for flags in range(states):
                for f in range(kinds):
                    if f & flags != f or not allowed(f, slow[p], way):
                        continue
                    last = -1
                    for s in range(1, most_held + 1):
                        units = held[p, f, s]
                        # As much was held with fewer stages.
                        if units < 0 or units == last:
                            continue
                        last = units
                        for used in range(s if count_stages else 0, top + 1):
                            before = used - s if count_stages else 0
                            _add_machine(new[flags, used], old[flags - f, before], units, price)
    best = rows[0, states - 1, top, needed]
    return float(best) if best <= budget else np.inf


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def few_sets(
    needed: int,
    held: IntArray,
    depth: int,
    count_stages: bool,
    copies: IntArray,
    prices: FloatArray,
    budget: float,
    rows: FloatArray,
    cover: IntArray,
    sets: IntArray,
    most_sets: int,
) -> int:
    """All sets of machines within budget that hold ``needed`` units: fills ``sets``.

    -1 less those found when they are not few.
    """
    pools = copies.size
    top = depth if count_stages else 0
    chosen = np.zeros(pools, np.int64)
    for used in range(top + 1):
        for state in range(4):
            cover[0, state, used] = -1
        cover[0, 0, used] = 0
    # cover[i] is after i machines; p is the pool being decided, chosen[p] how many of it.
    machines = 0
    spent = 0.0
    count = 0
    looked = 0
    p = 0
    while True:
        looked += 1
        if looked > _PARTIAL * most_sets:
            return -1 - count
        # What is missing costs at least this.
        least = np.inf
        for flags in range(4):
            for used in range(top + 1):
                have = cover[machines, flags, used]
                if have >= 0:
                    least = min(least, rows[p, 3 - flags, top - used, max(0, needed - have)])
        if spent + least <= budget and p < pools:
            # Leave this pool, for now with none of it.
            chosen[p] = 0
            p += 1
            continue
        if spent + least <= budget:
            if count == most_sets:
                return -1 - count
            for q in range(pools):
                sets[count, q] = chosen[q]
            count += 1
        # Back to the last pool of which one more can be taken.
        p -= 1
        while p >= 0:
            if chosen[p] < copies[p] and spent + prices[p] <= budget and machines + 1 < cover.shape[0]:
                break
            machines -= chosen[p]
            spent -= chosen[p] * prices[p]
            chosen[p] = 0
            p -= 1
        if p < 0:
            return count
        chosen[p] += 1
        spent += prices[p]
        old, new = cover[machines], cover[machines + 1]
        machines += 1
        for flags in range(4):
            for used in range(top + 1):
                most = old[flags, used]
                for f in range(4):
                    if f & flags != f:
                        continue
                    for s in range(1, min(used if count_stages else depth, held.shape[2] - 1) + 1):
                        before = old[flags - f, used - s if count_stages else 0]
                        if held[p, f, s] >= 0 and before >= 0:
                            most = max(most, before + held[p, f, s])
                new[flags, used] = most
        p += 1


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def row_of(known: FloatArray, key: int) -> int:
    """Where a set stands in ``known`` (size, 2), or would stand: its key, and a bound on its rate."""
    size = known.shape[0]
    at = int(key % size)
    while known[at, 0] != 0.0 and known[at, 0] != float(key):
        at = (at + 1) % size
    return at


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def dear_sets(
    arrays: Arrays,
    counts: IntArray,
    prices: FloatArray,
    keys: IntArray,
    known: FloatArray,
    boxes: FloatArray,
    most_listed: int,
    most_stages: int,
    target: float,
    rate_cap: float,
    most_work: float,
) -> tuple[IntArray, FloatArray, FloatArray]:
    """Sets of machines on which a pipeline may be worth more per price than ``target``.

    Parameters
    ----------
    arrays : Arrays
    counts : (P,) int
        Machines of each pool, at least one.
    prices : (P,) float
        Of one machine each, above 0.
    keys : (P,) int
        Numbers whose sums tell sets apart.
    known : (size, 2) float
        Bounds on rates of sets, as `row_of` finds them.
    boxes : (H, 9) float
        What is searched: requests/s per price that none in the box exceeds, the box, and a guess of what one in it
        reaches, by which the search goes. No row: everything.
    most_listed : int
        Sets after which the search stops.
    most_stages : int
    target : float
        Requests/s per price.
    rate_cap : float
        Requests/s beyond this are worth nothing.
    most_work : float
        After which the search stops, where a plain box is 1.

    Returns
    -------
    sets : (F, P) int
        Those that the known bounds leave open.
    ratios : (F,) float
        What each may be worth per price, in the box that it was found in.
    boxes : (H, 9) float
        What is left to search.
    """
    gpus, low, high, slow, units = arrays.gpus, arrays.low, arrays.high, arrays.slow, arrays.units
    micro_batches = arrays.micro_batches
    needed = units[-1]
    pools = gpus.size
    anywhere = np.empty((pools, 0), np.int64)
    slow_counts = np.zeros(pools, np.int64)
    behind = most_gpus = 0
    for p in range(pools):
        if slow[p]:
            slow_counts[p] = counts[p]
            behind += 1
        most_gpus = max(most_gpus, gpus[p])
    mixed = 0 < behind < pools
    held = np.empty((pools, 6, most_gpus + 1), np.int64)
    most = np.empty((pools, 1, most_gpus + 1), np.int64)
    inner = np.empty((most_gpus + 1, most_gpus + 1), np.int64)
    to_slow = np.empty((pools, pools if mixed else 0), np.int64)
    if mixed:
        receivers_of(arrays.slower, slow_counts, to_slow)
    # Variables, as a function compiles anew for literals.
    anyhow, never = int(np.int64(ANY)), bool(np.int64(0))
    copies = np.zeros(pools, np.int64)
    wanted, endless = np.zeros(pools, np.int64), np.zeros(pools, np.bool_)
    rows = np.empty((pools + 1, 4, most_stages + 1, needed + 1))
    spare = np.empty((8, most_stages + 1, needed + 1))
    others = np.empty((pools + 1 if mixed else 1, 8, most_stages + 1, needed + 1))
    cover = np.empty((24, 4, most_stages + 1), np.int64)
    few = np.zeros((_MANY, pools), np.int64)
    total = 0
    cheapest = prices[0]
    for p in range(1, pools):
        cheapest = min(cheapest, prices[p])
    start = 1.0 / (target * cheapest)
    heap = [(-np.inf, np.inf, 1, 1, most_stages if micro_batches else 1, 0.0, start, 0.0, start)]
    if boxes.shape[0] > 0:
        heap.clear()
        for i in range(boxes.shape[0]):
            if boxes[i, 0] > target:
                heap.append((
                    -boxes[i, 8], boxes[i, 0], int(boxes[i, 1]), int(boxes[i, 2]), int(boxes[i, 3]),
                    boxes[i, 4], boxes[i, 5], boxes[i, 6], boxes[i, 7],
                ))  # fmt: skip
        heapq.heapify(heap)
    # Both halves of a box may list as many as there is room for.
    sets, ratios = np.zeros((most_listed + 2 * _MANY, pools), np.int64), np.zeros(most_listed + 2 * _MANY)
    listed = np.zeros((4 * sets.shape[0], 2))
    work = 0.0
    while len(heap) > 0 and work < most_work and total < most_listed:
        _, top, node, d1, d2, x1, x2, y1, y2 = heapq.heappop(heap)
        price_before = cheapest
        if top < np.inf:
            price_before = min(rate_cap, 1.0 / max(x1 + y1, 1e-30)) / top
        box = (node, d1, d2, x1, x2, y1, y2)
        side, widest = widest_side(box, low, high)
        for upper in range(2):
            c, e1, e2, u1, u2, v1, v2 = half_of(box, side, upper)
            if high[c] < low[c]:
                continue
            rate = min(rate_cap, 1.0 / max(u1 + v1, 1e-30))
            budget = rate / target
            if cheapest > budget:
                continue
            # Machines cost at least what they did in the box this one is a part of; a set that is worth more than
            # the target has x + y below what that price allows, and so may each of its stages. Again at the new price.
            price = price_before
            small, closed, counted = widest < _SMALL, False, False
            for _ in range(2):
                work += 1.0
                both_limit = 1.0 / (target * price)
                depth = e2 if micro_batches else most_stages
                each = min(depth, most_gpus)
                if small:
                    machine_units(arrays, counts, anywhere, to_slow, c, e1, depth, u2, v2, both_limit, held, inner)
                else:
                    most_units(arrays, counts, anywhere, c, e1, depth, u2, v2, both_limit, most, inner)
                per_unit = np.inf
                per_stage = np.inf
                stages = 0
                first = last = both = False
                for p in range(pools):
                    copies[p] = 0
                    wanted[p], endless[p] = 0, False
                    largest = -1
                    useful = 0
                    for f in range(4 if small else 0):
                        for s in range(1, each + 1):
                            if held[p, f, s] > held[p, f, s - 1] and s > useful:
                                useful = s
                    for s in range(1, each + 1):
                        if small:
                            most[p, 0, s] = max(held[p, 0, s], held[p, 1, s], held[p, 2, s], held[p, 3, s])
                        if most[p, 0, s] > largest:
                            largest = most[p, 0, s]
                            useful = max(useful, s)
                    if largest < 0 or prices[p] > budget:
                        continue
                    many = int(min(float(counts[p]), budget / prices[p]))
                    if micro_batches:
                        many = min(many, depth)
                    copies[p] = many
                    # The cheapest set needs no more of a pool than hold everything, two for the ends and one that sends
                    # to a slow network.
                    enough = (needed + max(largest, 1) - 1) // max(largest, 1) + 3
                    wanted[p], endless[p] = min(many, enough), enough <= many
                    stages += useful * many
                    per_unit = min(per_unit, prices[p] / max(largest, 1))
                    per_stage = min(per_stage, prices[p] / useful)
                    for s in range(1, each + 1 if small else 0):
                        first = first or held[p, 1, s] >= 0
                        last = last or held[p, 2, s] >= 0
                        both = both or held[p, 3, s] >= 0
                closed = (small and not (both or (first and last))) or needed * per_unit > budget
                if closed:
                    break
                # Stages need no counting where all that help are allowed.
                counted = micro_batches and stages > depth
                # No set that can be paid has more stages than this that help.
                depth = int(min(float(min(depth, stages)), budget / per_stage + 1e-9))
                # First as if every machine held its best of first, middle and last stages, and stages were not counted;
                # then they are; exactly in small boxes.
                now = cheapest_cover(
                    needed, most, depth, never, wanted, endless, prices, budget, rows, spare, slow, anyhow
                )
                machines_tried = 0
                for p in range(pools):
                    machines_tried += 1 if endless[p] else wanted[p]
                cells = (depth + 1 if counted else 1) * needed * machines_tried * 1e-5
                work += cells
                if now < np.inf and counted:
                    now = cheapest_cover(
                        needed, most, depth, counted, wanted, endless, prices, budget, rows, spare, slow, anyhow
                    )
                if small and now < np.inf:
                    work += 4 * cells
                    now = cheapest_cover(
                        needed, held, depth, counted, wanted, endless, prices, budget, rows, spare, slow, anyhow
                    )
                if small and mixed and now < np.inf:
                    exactly = np.inf
                    work += 16 * cells
                    for way in range(SLOW_FIRST, FAST_TO_SLOW + 1):
                        exactly = min(exactly, cheapest_cover(
                            needed, held, depth, counted, wanted, endless, prices, budget, others, spare, slow, way
                        ))  # fmt: skip
                    now = exactly
                closed = now == np.inf
                if closed or now <= price * 1.005:
                    price = max(price, now)
                    break
                price = now
            if closed:
                continue
            found = -1
            if small:
                most_sets = int(_MANY if widest < _TINY else _FEW)
                found = few_sets(needed, held, depth, counted, copies, prices, budget, rows, cover, few, most_sets)
            if found < 0:
                guess = rate / price / (1.0 + _INFLATED * widest)
                heapq.heappush(heap, (-guess, rate / price, c, e1, e2, u1, u2, v1, v2))
                # Of so many sets in a tiny box, some will do.
                found = -1 - found if widest < _TINY else 0
            for i in range(found):
                key, paid = 0, 0.0
                for p in range(pools):
                    key += few[i, p] * keys[p]
                    paid += few[i, p] * prices[p]
                at = row_of(known, key)
                if known[at, 0] != 0.0 and known[at, 1] <= target * paid:
                    continue
                at = row_of(listed, key)
                if listed[at, 0] == 0.0:
                    listed[at, 0] = float(key)
                    sets[total] = few[i]
                    ratios[total] = rate / paid
                    total += 1
    left = np.empty((len(heap), 9))
    for i in range(len(heap)):
        guess, top, node, d1, d2, x1, x2, y1, y2 = heap[i]
        left[i, 0], left[i, 1], left[i, 2], left[i, 3] = top, node, d1, d2
        left[i, 4], left[i, 5], left[i, 6], left[i, 7], left[i, 8] = x1, x2, y1, y2, -guess
    return sets[:total], ratios[:total], left
