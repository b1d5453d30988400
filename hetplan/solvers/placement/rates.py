"""The best rate of one pipeline on given machines, by branch and bound over its batch, stages and two slowest times.

A box is an interval of batches, of stage counts, of x and of y (see `covering`). Machines that do not hold
all layers at the box's upper limits on x and y, with the fewest sequences in flight, make no pipeline in it; a
box's rate is at most 1 / (x + y) at its lower limits.
"""

from __future__ import annotations

import heapq

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetplan.estimator.base import FloatArray
from hetplan.solvers.placement.arranging import arrange
from hetplan.solvers.placement.covering import Arrays, Seconds, covers, machine_units, receivers_of
from hetplan.solvers.placement.tables import IntArray

# Sums in another order differ in their last digits.
_ROUNDING = 1e-12
_LARGEST_SECONDS = 1e6
# Boxes in each of which a rate is tried; later in some of them.
_OFTEN = 200
# What a factor e in batches or stages counts for against all of x + y, when the widest side of a box is split.
_SPAN_OF_BATCHES = 0.1
_SPAN_OF_STAGES = 0.4
# Sides of a box.
_BATCHES, _STAGES, _X, _Y = range(4)

# Node of the batches' tree; fewest and most stages; least and most x; least and most y.
Box = tuple[int, int, int, float, float, float, float]


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def widest_side(box: Box, low: IntArray, high: IntArray) -> tuple[int, float]:
    """The side of a box that is split next, and how wide it is."""
    node, d1, d2, x1, x2, y1, y2 = box
    side, widest = _BATCHES, np.log(high[node] / low[node]) * _SPAN_OF_BATCHES
    span = np.log(d2 / d1) * _SPAN_OF_STAGES
    if span > widest:
        side, widest = _STAGES, span
    span = (x2 - x1) / (x2 + y2)
    if span > widest:
        side, widest = _X, span
    span = (y2 - y1) / (x2 + y2)
    if span > widest:
        side, widest = _Y, span
    return side, widest


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def half_of(box: Box, side: int, upper: int) -> Box:
    """The lower (0) or upper (1) half of a box, cut across a side; of batches, the node may have none."""
    node, d1, d2, x1, x2, y1, y2 = box
    if side == _BATCHES:
        node = 2 * node + upper
    elif side == _STAGES:
        middle = (d1 + d2) // 2
        d1, d2 = (d1, middle) if upper == 0 else (middle + 1, d2)
    elif side == _X:
        middle_x = 0.5 * (x1 + x2)
        x1, x2 = (x1, middle_x) if upper == 0 else (middle_x, x2)
    else:
        middle_y = 0.5 * (y1 + y2)
        y1, y2 = (y1, middle_y) if upper == 0 else (middle_y, y2)
    return node, d1, d2, x1, x2, y1, y2


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def best_rate(
    arrays: Arrays,
    seconds: Seconds,
    machines: IntArray,
    most_stages: int,
    at_least: float,
    tolerance: float,
    most_boxes: int,
    ordered: bool,
) -> tuple[float, float, int, int, float, float, int]:
    """Most requests/s of a pipeline on some machines.

    Parameters
    ----------
    arrays : Arrays
    seconds : Seconds
    machines : (M,) int
        Pool of each machine; some may stay out.
    most_stages : int
    at_least : float
        Rates up to this are of no interest.
    tolerance : float
        Relative distance of rate and bound at which the search ends.
    most_boxes : int
        Boxes after which it ends at any distance.
    ordered : bool
        Whether machines are put in order, so that the rate is reached by a pipeline; else by the relaxation.

    Returns
    -------
    rate, bound : float
        A rate that is reached (0 if none above ``at_least``), and what none exceeds, at least ``at_least``.
    batch, stages : int
    x, y : float
        Seconds per request that reach it.
    boxes : int
    """
    gpus, low, high, slow, units = arrays.gpus, arrays.low, arrays.high, arrays.slow, arrays.units
    micro_batches = arrays.micro_batches
    needed = units[-1]
    leaves = low.size // 2
    best = np.empty((8, most_stages + 1), np.int64)
    counts, slow_counts = np.zeros(gpus.size, np.int64), np.zeros(gpus.size, np.int64)
    most_gpus = behind = 0
    for p in machines:
        counts[p] += 1
        if slow[p]:
            slow_counts[p] += 1
            behind += 1
    for p in range(gpus.size):
        most_gpus = max(most_gpus, gpus[p])
    held = np.empty((gpus.size, 6, most_gpus + 1), np.int64)
    inner = np.empty((most_gpus + 1, most_gpus + 1), np.int64)
    receivers = np.empty((gpus.size, gpus.size), np.int64)
    receivers_of(arrays.slower, counts, receivers)
    mixed = 0 < behind < machines.size
    to_slow = np.empty((gpus.size, gpus.size if mixed else 0), np.int64)
    if mixed:
        receivers_of(arrays.slower, slow_counts, to_slow)
    s_best = 1.0 / at_least if at_least > 0 else 2.0 * _LARGEST_SECONDS
    found = (0, 0, 0.0, 0.0)
    start = min(s_best, _LARGEST_SECONDS)
    heap = [(0.0, 1, 1, most_stages if micro_batches else 1, 0.0, start, 0.0, start)]
    boxes = 0
    bound = 0.0
    while len(heap) > 0:
        s1, node, d1, d2, x1, x2, y1, y2 = heapq.heappop(heap)
        if s1 >= s_best * (1.0 - tolerance):
            bound = max(bound, 1.0 / s1)
            break
        if boxes >= most_boxes:
            bound = max(bound, 1.0 / max(s1, 1e-30))
            break
        box = (node, d1, d2, x1, x2, y1, y2)
        side, _ = widest_side(box, low, high)
        for upper in range(2):
            c, e1, e2, u1, u2, v1, v2 = half_of(box, side, upper)
            if high[c] < low[c]:
                continue
            if u1 + v1 >= s_best * (1.0 - tolerance):
                continue
            # Neither is larger than what the other leaves of the best sum.
            u2 = min(u2, s_best - v1)
            v2 = min(v2, s_best - u1)
            boxes += 1
            depth = e2 if micro_batches else most_stages
            tight = machine_units(arrays, counts, receivers, to_slow, c, e1, depth, u2, v2, s_best, held, inner)
            if not covers(machines, held, depth, micro_batches, best, needed, slow, mixed):
                continue
            if low[c] == high[c] and e1 == e2:
                if ordered:
                    placed, tight_x, tight_y = arrange(arrays, seconds, counts, low[c], depth, u2, v2, s_best)
                    if placed.shape[0] == 0:
                        continue
                    tight = (tight_x, tight_y)
                s = tight[0] + tight[1]
                if s < s_best * (1.0 - _ROUNDING):
                    s_best = s
                    found = (low[c], e1, tight[0], tight[1])
            elif boxes < _OFTEN or boxes % 4 == 0:
                # A rate to prune by: the largest batch, or else the smallest, with the most stages.
                for b in (high[c], low[c]):
                    leaf = leaves + b - 1
                    tried = machine_units(
                        arrays, counts, receivers, to_slow, leaf, e2, depth, u2, v2, s_best, held, inner
                    )
                    boxes += 1
                    if covers(machines, held, depth, micro_batches, best, needed, slow, mixed):
                        if ordered:
                            placed, tight_x, tight_y = arrange(arrays, seconds, counts, b, depth, u2, v2, s_best)
                            if placed.shape[0] == 0:
                                continue
                            tried = (tight_x, tight_y)
                        s = tried[0] + tried[1]
                        if s < s_best * (1.0 - _ROUNDING):
                            s_best = s
                            found = (b, e2, tried[0], tried[1])
                        break
            if u1 + v1 < s_best * (1.0 - tolerance):
                heapq.heappush(heap, (u1 + v1, c, e1, e2, u1, u2, v1, v2))
    rate = 1.0 / s_best if found[0] > 0 else 0.0
    # Boxes this near to the best were left out.
    return rate, max(bound, 1.0 / (s_best * (1.0 - tolerance))), found[0], found[1], found[2], found[3], boxes


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def outweighing(
    arrays: Arrays, sets: IntArray, least: FloatArray, most_stages: int, tolerance: float, most_boxes: int
) -> tuple[NDArray[np.bool_], int]:
    """Which sets of machines may be worth more than ``least``.

    The search of `best_rate` for all sets at once: what a machine holds in a box is counted once, for all. Where the
    sets are about as fast, this is many times sooner than one by one.

    Parameters
    ----------
    arrays : Arrays
    sets : (N, P) int
        Machines of each pool.
    least : (N,) float
        Requests/s up to which a set is of no interest, above 0.
    most_stages : int
    tolerance : float
        Of no interest are those, too, that are worth more by no more than this share.
    most_boxes : int
        Boxes after which all that are left are taken to be worth more.

    Returns
    -------
    outweighs : (N,) bool
        False where the set is proven to be worth at most ``least`` / (1 - ``tolerance``).
    boxes : int
    """
    gpus, low, high, slow, units = arrays.gpus, arrays.low, arrays.high, arrays.slow, arrays.units
    micro_batches = arrays.micro_batches
    needed = units[-1]
    leaves = low.size // 2
    many, pools = sets.shape
    # No set has more machines of a pool.
    counts, slow_counts = np.zeros(pools, np.int64), np.zeros(pools, np.int64)
    sizes, mixed = np.zeros(many, np.int64), np.zeros(many, np.bool_)
    largest = most_gpus = 0
    for i in range(many):
        behind = 0
        for p in range(pools):
            counts[p] = max(counts[p], sets[i, p])
            sizes[i] += sets[i, p]
            behind += sets[i, p] if slow[p] else 0
        mixed[i] = 0 < behind < sizes[i]
        largest = max(largest, int(sizes[i]))
    machines = np.zeros((many, largest), np.int64)
    for i in range(many):
        at = 0
        for p in range(pools):
            machines[i, at : at + sets[i, p]] = p
            at += sets[i, p]
    for p in range(pools):
        most_gpus = max(most_gpus, gpus[p])
        if slow[p]:
            slow_counts[p] = counts[p]
    held = np.empty((pools, 6, most_gpus + 1), np.int64)
    most = np.empty(pools, np.int64)
    best = np.empty((8, most_stages + 1), np.int64)
    inner = np.empty((most_gpus + 1, most_gpus + 1), np.int64)
    anywhere = np.empty((pools, 0), np.int64)
    to_slow = np.empty((pools, pools if mixed.any() else 0), np.int64)
    if mixed.any():
        receivers_of(arrays.slower, slow_counts, to_slow)
    s_best = 1.0 / least
    start = s_best.max()
    outweighs = np.zeros(many, np.bool_)
    # Sets that may have a pipeline in a box, by the number of its list.
    lists = [np.arange(many)]
    free = [0]
    free.pop()
    heap = [(0.0, 1, 1, most_stages if micro_batches else 1, 0.0, start, 0.0, start, 0)]
    boxes = 0
    kept = np.empty(many, np.int64)
    while len(heap) > 0:
        _, node, d1, d2, x1, x2, y1, y2, at = heapq.heappop(heap)
        members = lists[at]
        free.append(at)
        if boxes >= most_boxes:
            outweighs[members] = True
            continue
        box = (node, d1, d2, x1, x2, y1, y2)
        side, _ = widest_side(box, low, high)
        for half in range(2):
            c, e1, e2, u1, u2, v1, v2 = half_of(box, side, half)
            if high[c] < low[c]:
                continue
            count = 0
            both = 0.0
            for k in range(members.size):
                i = int(members[k])
                if not outweighs[i] and u1 + v1 < s_best[i] * (1.0 - tolerance):
                    kept[count] = i
                    count += 1
                    both = max(both, s_best[i])
            if count == 0:
                continue
            u2 = min(u2, both - v1)
            v2 = min(v2, both - u1)
            depth = e2 if micro_batches else most_stages
            leaf = low[c] == high[c] and e1 == e2
            # In the box; then at its largest batch and most stages, which is a pipeline.
            for attempt in range(1 if leaf else 2):
                if attempt == 0:
                    machine_units(arrays, counts, anywhere, to_slow, c, e1, depth, u2, v2, both, held, inner)
                else:
                    improves = False
                    for j in range(count):
                        improves = improves or u2 + v2 < s_best[kept[j]]
                    if not improves:
                        break
                    machine_units(
                        arrays, counts, anywhere, to_slow, leaves + high[c] - 1, e2, depth, u2, v2, both, held, inner
                    )
                boxes += 1
                for p in range(pools):
                    most[p] = 0
                    if counts[p] > 0:
                        for f in range(4):
                            for s in range(1, min(depth, most_gpus) + 1):
                                most[p] = max(most[p], held[p, f, s])
                holding = 0
                for j in range(count):
                    i = kept[j]
                    if attempt == 1 and u2 + v2 >= s_best[i]:
                        continue
                    total = 0
                    for k in range(sizes[i]):
                        total += most[machines[i, k]]
                    if total < needed or not covers(
                        machines[i, : sizes[i]], held, depth, micro_batches, best, needed, slow, mixed[i]
                    ):
                        continue
                    if (attempt == 1 or leaf) and u2 + v2 < s_best[i]:
                        outweighs[i] = True
                    if attempt == 0:
                        kept[holding] = i
                        holding += 1
                if attempt == 0:
                    count = holding
            open_sets = 0
            for j in range(count):
                if not outweighs[kept[j]]:
                    kept[open_sets] = kept[j]
                    open_sets += 1
            if open_sets == 0:
                continue
            if len(free) > 0:
                slot = free.pop()
                lists[slot] = kept[:open_sets].copy()
            else:
                slot = len(lists)
                lists.append(kept[:open_sets].copy())
            heapq.heappush(heap, (u1 + v1, c, e1, e2, u1, u2, v1, v2, slot))
    return outweighs, boxes
