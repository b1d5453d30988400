"""Searches boxes of pipelines for those that may be worth more than their machines.

A box holds the pipelines of micro-batches b in [b1, b2] and D in [D1, D2] stages whose slowest prefill takes x of
[x1, x2] and slowest decode y of [y1, y2], seconds per request. Each is worth at most what x1 and y1 allow, and needs
machines that hold all layers within x2 and y2. Both are easy to bound: every stage holds at most so many layers, so a
machine with j stages holds at most so many, and a knapsack over machines gives the cheapest set that holds them all.
A box whose cheapest set costs more than anything in it is worth is done; the others are split.

Nothing is assumed of how times depend on the batch: over an interval the least of each table entry counts.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hetplan.verification.arrangement import arrange, too_many_arrangements
from hetplan.verification.tables import (
    FIRST_INSIDE,
    FIRST_OUTSIDE,
    LAST,
    LIMIT_COUNT,
    MIDDLE_INSIDE,
    MIDDLE_OUTSIDE,
    ONLY,
    ROLE_COUNT,
    FloatArray,
    IntArray,
    Limits,
    Tables,
    fill_room,
)

# A machine holds the pipeline's first stage (1), its last (2), both (3) or neither (0).
_HOLDS_FIRST, _HOLDS_LAST, _HOLDS_BOTH = 1, 2, 3
# Boxes in which both ends are worth this nearly the same are not split.
_NARROW = 1e-8
# A box of which only so much is left is looked at again before it is split.
_SHRUNK = 0.8
# The more sets of machines a box may hold while it is left to the caller, the narrower it is.
_WIDE, _MIDDLING, _THIN = 0.05, 0.01, 0.001
_FEW_SETS, _MORE_SETS, _MANY_SETS = 8, 100, 300
# A value is found to this relative tolerance, half of it by telling apart what is faster only by rounding.
VALUE_TOLERANCE = 2e-10
_FASTER = 0.5 * VALUE_TOLERANCE
# Columns of a box.
BOX_COLUMNS = 10
_NODE, _B1, _B2, _D1, _D2, _X1, _X2, _Y1, _Y2, _BOTH = range(BOX_COLUMNS)

DONE, RIPE, STOPPED = range(3)


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _worth(tables: Tables, node: int, batch: float, fewest: int, x: float, y: float) -> float:
    """The most that pipelines of at least these times are worth; -1 where a hard limit rules them out."""
    slowest = x + y
    worth = min(1.0 / slowest, tables.demand) if slowest > 0.0 else tables.demand
    worst = 0.0
    for metric in range(3):
        limit = tables.limits_s[metric]
        if limit == np.inf:
            continue
        if tables.micro_batches:
            ends = tables.floors_s[metric, 2, node] + tables.floors_s[metric, 3, node]
            ends += max(0, fewest - 2) * tables.floors_s[metric, 1, node]
            if fewest == 1:
                ends = min(ends, tables.floors_s[metric, 4, node])
            least = tables.floors_s[metric, 0, node] + ends
            if metric == 0:
                least = max(least, batch * slowest)
        elif metric == 0 or (metric == 1 and tables.decode_steps == 0.0):
            least = batch * slowest
        elif metric == 1:
            least = batch * x
        else:
            least = batch * y / tables.decode_steps if tables.decode_steps > 0.0 else 0.0
        worst = max(worst, least / limit)
    if worst > 1.0:
        if tables.hard:
            return -1.0 if worst > 1.0 + 1e-8 else worth
        worth *= 1.0 - tables.penalty * (worst - 1.0)
    return worth


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _stage_capacity(
    tables: Tables, limits: Limits, option: int, role: int, node: int, room: FloatArray, used: FloatArray
) -> int:
    """The most units of layers that a stage holds in a role; -1 for none. ``room``, ``used`` are overwritten."""
    layers, kinds = tables.layers_before.shape[0] - 1, tables.layers_before.shape[1] - 1
    if not fill_room(tables, limits, option, role, node, 0.0, 0.0, room):
        return -1
    used[:] = 0.0
    starts_first = role == FIRST_INSIDE or role == FIRST_OUTSIDE or role == ONLY  # noqa: PLR1714
    stops_last = role == LAST or role == ONLY  # noqa: PLR1714
    low = 0 if starts_first else 1
    high = layers if stops_last else layers - 1
    if kinds == 1:
        most = high - low
        for i in range(LIMIT_COUNT):
            if room[i, 0] > 0.0:
                most = min(most, int(room[i, kinds] / room[i, 0]))
        if role == ONLY and most < layers:
            return -1
        return most if most >= 1 else -1
    # Windows of layers that fit: for each start the farthest stop.
    most, stop, start = -1, low, low
    while start < (1 if starts_first else high):
        if stop < high:
            fits = True
            for i in range(LIMIT_COUNT):
                more = used[i]
                for kind in range(kinds):
                    if tables.layers_before[stop + 1, kind] > tables.layers_before[stop, kind]:
                        more += room[i, kind]
                fits = fits and more <= room[i, kinds]
            if fits:
                for i in range(LIMIT_COUNT):
                    for kind in range(kinds):
                        if tables.layers_before[stop + 1, kind] > tables.layers_before[stop, kind]:
                            used[i] += room[i, kind]
                stop += 1
                continue
        if stop > start:
            if not stops_last or stop == high:
                most = max(most, tables.layers_before[stop, kinds] - tables.layers_before[start, kinds])
            for i in range(LIMIT_COUNT):
                for kind in range(kinds):
                    if tables.layers_before[start + 1, kind] > tables.layers_before[start, kind]:
                        used[i] -= room[i, kind]
        else:
            stop += 1
        start += 1
    return int(most)


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _machine_capacity(
    tables: Tables, limits: Limits, node: int, fewest: int, most: int, type_count: IntArray, held: IntArray
) -> None:
    """Fills ``held`` (T, 4, J + 1): the most units on a machine of j stages that holds which ends; -1 for none.

    And -1 where there is no machine of the type.
    """
    for t in range(held.shape[0]):
        for ends in range(4):
            for j in range(held.shape[2]):
                held[t, ends, j] = -1
    options, kinds = tables.options.shape[0], tables.layers_before.shape[1] - 1
    room, used = np.empty((LIMIT_COUNT, kinds + 1)), np.empty(LIMIT_COUNT)
    # The order of roles is the order in which a stage of the machine fills them.
    caps = np.empty((options, ROLE_COUNT), dtype=np.int64)
    for o in range(options):
        small = limits.sequences <= tables.types[tables.options[o, 0], 1]
        small = small and type_count[tables.options[o, 0]] > 0
        for role in range(ROLE_COUNT):
            caps[o, role] = -1
            if small and (fewest == 1 if role == ONLY else most >= 2):
                caps[o, role] = _stage_capacity(tables, limits, o, role, node, room, used)
    for t in range(tables.types.shape[0]):
        if type_count[t] == 0:
            continue
        gpus = tables.types[t, 0]
        deepest = min(gpus, most, held.shape[2] - 1)
        # inside[j, g]: j middle stages that send inside the node, on at most g GPUs.
        inside = np.empty((deepest + 1, gpus + 1), dtype=np.int64)
        for j in range(deepest + 1):
            for g in range(gpus + 1):
                inside[j, g] = 0 if j == 0 else -1
                if j == 0:
                    continue
                for o in range(options):
                    if tables.options[o, 0] != t or caps[o, MIDDLE_INSIDE] < 0:
                        continue
                    degree = tables.options[o, 1]
                    if degree <= g and inside[j - 1, g - degree] >= 0:
                        inside[j, g] = max(inside[j, g], inside[j - 1, g - degree] + caps[o, MIDDLE_INSIDE])
        for o in range(options):
            if tables.options[o, 0] != t:
                continue
            left = gpus - tables.options[o, 1]
            if left < 0:
                continue
            held[t, _HOLDS_BOTH, 1] = max(held[t, _HOLDS_BOTH, 1], caps[o, ONLY])
            held[t, _HOLDS_FIRST, 1] = max(held[t, _HOLDS_FIRST, 1], caps[o, FIRST_OUTSIDE])
            for j in range(1, deepest + 1):
                if inside[j - 1, left] >= 0:
                    if caps[o, MIDDLE_OUTSIDE] >= 0:
                        held[t, 0, j] = max(held[t, 0, j], inside[j - 1, left] + caps[o, MIDDLE_OUTSIDE])
                    if caps[o, LAST] >= 0:
                        held[t, _HOLDS_LAST, j] = max(held[t, _HOLDS_LAST, j], inside[j - 1, left] + caps[o, LAST])
            if caps[o, FIRST_INSIDE] < 0:
                continue
            for final in range(options):
                rest = left - tables.options[final, 1]
                if tables.options[final, 0] != t or rest < 0:
                    continue
                for j in range(2, deepest + 1):
                    if inside[j - 2, rest] < 0:
                        continue
                    front = inside[j - 2, rest] + caps[o, FIRST_INSIDE]
                    if caps[final, MIDDLE_OUTSIDE] >= 0:
                        held[t, _HOLDS_FIRST, j] = max(held[t, _HOLDS_FIRST, j], front + caps[final, MIDDLE_OUTSIDE])
                    if caps[final, LAST] >= 0:
                        held[t, _HOLDS_BOTH, j] = max(held[t, _HOLDS_BOTH, j], front + caps[final, LAST])
        if tables.stages_per_machine > 0:
            for j in range(held.shape[2]):
                for ends in range(4):
                    if j != tables.stages_per_machine:
                        held[t, ends, j] = -1


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _largest(held: IntArray, kind: int, units: int) -> int:
    most = -1
    for ends in range(4):
        for j in range(held.shape[2]):
            # A machine's stages follow one another: with both ends it is the only one.
            if ends != _HOLDS_BOTH or held[kind, ends, j] >= units:
                most = max(most, held[kind, ends, j])
    return most


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _hold_all(held: IntArray, type_count: IntArray, units: int, fewest: int, most: int) -> bool:
    """Whether all of so many machines of each type together hold all units in D1 to D2 stages."""
    machines, deepest = 0, held.shape[2] - 1
    for t in range(type_count.shape[0]):
        machines += type_count[t]
    # The most units by stages and ends; -1 where there is no way.
    best, after = np.empty((most + 1, 4), dtype=np.int64), np.empty((most + 1, 4), dtype=np.int64)
    for stages in range(most + 1):
        for ends in range(4):
            best[stages, ends] = -1
    best[0, 0] = 0
    reached = 0  # stages
    for t in range(type_count.shape[0]):
        for _ in range(type_count[t]):
            for stages in range(most + 1):
                for ends in range(4):
                    after[stages, ends] = -1
            for stages in range(min(reached, most) + 1):
                for ends in range(4):
                    if best[stages, ends] < 0:
                        continue
                    for more in range(4):
                        if more & ends or (more == _HOLDS_BOTH and machines > 1):
                            continue
                        for j in range(1, min(deepest, most - stages) + 1):
                            if held[t, more, j] >= 0:
                                total = best[stages, ends] + held[t, more, j]
                                after[stages + j, ends | more] = max(after[stages + j, ends | more], total)
            best, after = after, best
            reached += deepest
    held_units = -1
    for stages in range(fewest, most + 1):
        held_units = max(held_units, best[stages, _HOLDS_BOTH])
    return held_units >= units


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _cover(
    held: IntArray,
    pool_type: IntArray,
    pool_count: IntArray,
    pool_price: FloatArray,
    units: int,
    fewest: int,
    most: int,
    budget: float,
    counted: bool,
) -> float:
    """Price of the cheapest machines that hold all units in D1 to D2 stages; infinite where it is ``budget`` or more.

    A bound below it unless ``counted``: each machine then has as many stages as it likes.
    """
    pools, deepest = pool_type.shape[0], held.shape[2] - 1
    largest, ratio = np.empty(pools), np.empty(pools)
    order = np.empty(pools, dtype=np.int64)
    cheapest = np.inf
    for p in range(pools):
        largest[p] = _largest(held, pool_type[p], units)
        ratio[p] = np.inf
        if largest[p] > 0:
            ratio[p] = pool_price[p] / largest[p]
        elif largest[p] == 0:
            ratio[p] = pool_price[p] * 1e300
        for j in range(fewest, min(deepest, most) + 1):
            if held[pool_type[p], _HOLDS_BOTH, j] >= units and pool_price[p] < budget:
                budget = cheapest = pool_price[p]
        # By price for what they hold.
        place = p
        while place > 0 and ratio[order[place - 1]] > ratio[p]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = p
    left = np.zeros(pools + 1)
    for i in range(pools - 1, -1, -1):
        left[i] = left[i + 1] + max(0.0, largest[order[i]]) * pool_count[order[i]]
    if left[0] < units:
        return cheapest
    last = most if counted else 0
    least = np.empty((last + 1, 4, units + 1))
    for stages in range(last + 1):
        for ends in range(4):
            for have in range(units + 1):
                least[stages, ends, have] = np.inf
    least[0, 0, 0] = 0.0
    reached = 0  # stages
    for i in range(pools):
        p = order[i]
        if largest[p] < 0:
            break
        t, price = pool_type[p], pool_price[p]
        for copy in range(pool_count[p]):
            behind = left[i + 1] + largest[p] * (pool_count[p] - copy)
            # Downwards, so that no machine is taken twice.
            for stages in range(reached, -1, -1):
                for ends in range(3, -1, -1):
                    for have in range(units, -1, -1):
                        paid = least[stages, ends, have]
                        missing = units - have
                        if paid + price >= budget or missing > behind or paid + missing * ratio[p] >= budget:
                            continue
                        for more in range(_HOLDS_BOTH):
                            if more & ends:
                                continue
                            for j in range(1, min(deepest, most - stages) + 1):
                                if held[t, more, j] < 0:
                                    continue
                                total, then = min(units, have + held[t, more, j]), stages + j if counted else 0
                                if paid + price < least[then, ends | more, total]:
                                    least[then, ends | more, total] = paid + price
                                    if total == units and (ends | more) == _HOLDS_BOTH and then >= fewest * counted:
                                        budget = cheapest = min(cheapest, paid + price)
            reached = min(last, reached + deepest)
    return cheapest


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _list_sets(
    held: IntArray,
    pool_type: IntArray,
    pool_count: IntArray,
    pool_price: FloatArray,
    units: int,
    budget: float,
    limit: int,
    found: IntArray,
) -> int:
    """Fills ``found`` with the machines of each pool that might hold all units for less than ``budget``; how many.

    More than ``limit`` when there are more, or when looking takes long.
    """
    pools = pool_type.shape[0]
    largest, ratio, left = np.empty(pools), np.empty(pools + 1), np.zeros(pools + 1)
    count, paid, have = np.empty(pools, dtype=np.int64), np.zeros(pools + 1), np.zeros(pools + 1)
    ratio[pools] = np.inf
    for p in range(pools - 1, -1, -1):
        count[p] = -1
        largest[p] = _largest(held, pool_type[p], units)
        ratio[p] = ratio[p + 1]
        if largest[p] > 0:
            ratio[p] = min(ratio[p], pool_price[p] / largest[p])
        left[p] = left[p + 1] + max(0.0, largest[p]) * pool_count[p]
    level, sets, steps = 0, 0, 0
    while level >= 0:
        steps += 1
        if steps > 60 * limit + 1000:
            return limit + 1
        count[level] += 1
        cost = paid[level] + count[level] * pool_price[level]
        holds = have[level] + count[level] * max(0.0, largest[level])
        usable = largest[level] >= 0 or count[level] == 0
        if count[level] > pool_count[level] or cost >= budget or not usable:
            level -= 1
            continue
        missing = units - holds
        if level == pools - 1:
            if missing <= 0:
                if sets == limit:
                    return limit + 1
                for p in range(pools):
                    found[sets, p] = count[p]
                sets += 1
            continue
        if missing > left[level + 1] or (missing > 0 and cost + missing * ratio[level + 1] >= budget):
            continue
        level += 1
        count[level], paid[level], have[level] = -1, cost, holds
    return sets


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _sift(
    tables: Tables,
    limits: Limits,
    node: int,
    fewest: int,
    most: int,
    pool_type: IntArray,
    pool_price: FloatArray,
    slack: float,
    held: IntArray,
    known: IntArray,
    sets: int,
    found: IntArray,
) -> int:
    """Keeps those of the sets that are not known and together hold all units as fast as their price asks; how many."""
    units = tables.layers_before[-1, -1]
    own_held = np.empty((held.shape[0], held.shape[1], held.shape[2]), dtype=np.int64)
    type_count = np.zeros(tables.types.shape[0], dtype=np.int64)
    kept = 0
    for i in range(sets):
        type_count[:] = 0
        price = 0.0
        for p in range(pool_type.shape[0]):
            type_count[pool_type[p]] += found[i, p]
            price += found[i, p] * pool_price[p]
        if not _hold_all(held, type_count, units, fewest, most) or _is_row(known, found, i):
            continue
        both_s = limits.both_s
        if price * (1.0 - 1e-9) > slack:
            both_s = min(both_s, 1.0 / (price * (1.0 - 1e-9) - slack))
        own = Limits(limits.prefill_s, limits.decode_s, both_s, limits.sequences)
        _machine_capacity(tables, own, node, fewest, most, type_count, own_held)
        if not _hold_all(own_held, type_count, units, fewest, most):
            continue
        ordered = tables.ordered and not too_many_arrangements(tables, type_count, most)
        if ordered and not arrange(tables, type_count, node, own, fewest, most)[0]:
            continue
        for p in range(pool_type.shape[0]):
            found[kept, p] = found[i, p]
        kept += 1
    return kept


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _is_row(rows: IntArray, others: IntArray, other: int) -> bool:
    for i in range(rows.shape[0]):
        same = True
        for p in range(rows.shape[1]):
            same = same and rows[i, p] == others[other, p]
        if same:
            return True
    return False


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def search(
    tables: Tables,
    pool_type: IntArray,
    pool_count: IntArray,
    pool_price: FloatArray,
    slack: float,
    least_worth: float,
    whole: bool,
    boxes: FloatArray,
    depth: int,
    most_boxes: int,
    known: IntArray,
    found: IntArray,
) -> tuple[int, int, int, float, int]:
    """Work through a stack of boxes.

    Parameters
    ----------
    pool_type, pool_count, pool_price : (P,) arrays
        The machines at hand.
    slack : float
        A box stays while its pipelines may be worth more than their price less this.
    least_worth : float
        And more than this.
    whole : bool
        Only pipelines that take all machines, whatever they cost; ``least_worth`` then rises to the most that one is
        worth.
    boxes : (C, 10) array
        The stack, the first ``depth`` rows of it; changed.
    most_boxes : int
        After so many it stops.
    known : (K, P) array
        Sets of machines that need not be found again.
    found : (L, P) array
        Filled with the few sets of machines that may pass when a box is left to the caller.

    Returns
    -------
    outcome, depth, sets, least_worth, boxes
        RIPE when ``found`` holds ``sets`` sets; STOPPED after ``most_boxes``, or when a narrow box holds more than L.
    """
    units = tables.layers_before[-1, -1]
    gpus = 1
    for t in range(tables.types.shape[0]):
        gpus = max(gpus, tables.types[t, 0])
    held = np.empty((tables.types.shape[0], 4, gpus + 1), dtype=np.int64)
    type_count = np.zeros(tables.types.shape[0], dtype=np.int64)
    for p in range(pool_type.shape[0]):
        type_count[pool_type[p]] += pool_count[p]
    seen = 0
    while depth > 0:
        if seen >= most_boxes or depth + 2 > boxes.shape[0]:
            return STOPPED, depth, 0, least_worth, seen
        seen += 1
        depth -= 1
        node, low_b, high_b = int(boxes[depth, _NODE]), boxes[depth, _B1], boxes[depth, _B2]
        fewest, most = int(boxes[depth, _D1]), int(boxes[depth, _D2])
        low_x, high_x, low_y, high_y = boxes[depth, _X1], boxes[depth, _X2], boxes[depth, _Y1], boxes[depth, _Y2]
        both, again = boxes[depth, _BOTH], False
        worth = _worth(tables, node, low_b, fewest, low_x, low_y)
        if worth <= least_worth * (1.0 + VALUE_TOLERANCE) or worth <= 0.0:
            continue
        budget = (worth + slack) / (1.0 + 1e-9)
        # What is worth more than the least is no slower than this.
        if least_worth > 0.0:
            both = min(both, 1.0 / least_worth)
        high_x, high_y = min(high_x, both - low_y), min(high_y, both - low_x)
        price = np.inf
        limits = Limits(high_x, high_y, both, low_b * fewest if tables.micro_batches else low_b)
        _machine_capacity(tables, limits, node, fewest, most, type_count, held)
        slowest_x, slowest_y = high_x, high_y
        ordered = tables.ordered and whole and not too_many_arrangements(tables, type_count, most)
        if whole:
            if not _hold_all(held, type_count, units, fewest, most):
                continue
            if ordered:
                arranged, slowest_x, slowest_y = arrange(tables, type_count, node, limits, fewest, most)
                if not arranged:
                    continue
        else:
            # The count of stages only matters where the cheaper look leaves something.
            price = 0.0
            for counted in range(2):
                if price < budget:
                    price = _cover(held, pool_type, pool_count, pool_price, units, fewest, most, budget, counted == 1)
            if price >= budget:
                continue
            # Machines of this price pass only with pipelines that are as fast.
            if price * (1.0 - 1e-9) > slack:
                both = min(both, 1.0 / (price * (1.0 - 1e-9) - slack))
                if both - low_y < high_x or both - low_x < high_y:
                    before = high_x - low_x + high_y - low_y
                    high_x, high_y = min(high_x, both - low_y), min(high_y, both - low_x)
                    again = high_x - low_x + high_y - low_y < _SHRUNK * before
        boxes[depth, _X2], boxes[depth, _Y2], boxes[depth, _BOTH] = high_x, high_y, both
        if again:
            depth += 1
            continue
        narrow, dear, single = False, False, low_b == high_b and fewest == most
        if single:
            reached = _worth(tables, node, low_b, fewest, slowest_x, slowest_y)
            if whole:
                least_worth = max(least_worth, reached)
                if worth <= least_worth * (1.0 + VALUE_TOLERANCE):
                    continue
            narrow = worth <= reached * (1.0 + _NARROW)
            # More than the machines cost: nothing is proven unless another look at them shows less.
            dear = not whole and price * (1.0 + _NARROW) < reached
        # The widest side is split: of times by their share of the sum, of counts by their ratio.
        width_x = (high_x - low_x) / max(low_x + low_y, 1e-3 * high_x)
        width_y = (high_y - low_y) / max(low_x + low_y, 1e-3 * high_y)
        width_b = (high_b - low_b) / low_b
        width_d = float(most - fewest) / fewest
        widest = max(width_x, width_y, width_b, width_d)
        if not whole:
            limit = found.shape[0]
            if widest > _THIN and not dear:
                several = _MORE_SETS if widest > _MIDDLING else _MANY_SETS
                limit = min(limit, _FEW_SETS if widest > _WIDE else several)
            sets = _list_sets(held, pool_type, pool_count, pool_price, units, budget, limit, found)
            if sets <= limit or limit == found.shape[0]:
                listed = min(sets, limit)
                kept = _sift(
                    tables, limits, node, fewest, most, pool_type, pool_price, slack, held, known, listed, found
                )
                if sets > limit and kept > 0:
                    # There are more, so that the box stays.
                    return RIPE, depth + 1, kept, least_worth, seen
                if sets <= limit:
                    if kept == 0:
                        continue
                    return RIPE, depth, kept, least_worth, seen
                if narrow:
                    return STOPPED, depth, 0, least_worth, seen
        for column in range(BOX_COLUMNS):
            boxes[depth + 1, column] = boxes[depth, column]
        if ordered and single and widest <= _MIDDLING:
            # All that is as slow in both is worth no more: what is left is faster in one.
            faster_x, faster_y = slowest_x * (1.0 - _FASTER), slowest_y * (1.0 - _FASTER)
            as_slow = _worth(tables, node, low_b, fewest, faster_x, faster_y)
            if as_slow <= least_worth * (1.0 + VALUE_TOLERANCE) and faster_x > low_x and faster_y > low_y:
                boxes[depth, _X1], boxes[depth, _Y2] = faster_x, faster_y
                boxes[depth + 1, _X2] = faster_x
                depth += 2
                continue
        if widest == width_b:
            # The half of larger batches, which is worth more, comes first.
            leaf, size = node, 1
            while leaf < tables.leaves:
                leaf, size = 2 * leaf, 2 * size
            middle = low_b + size // 2
            boxes[depth, _NODE], boxes[depth, _B2] = 2 * node, min(middle - 1, high_b)
            boxes[depth + 1, _NODE], boxes[depth + 1, _B1] = 2 * node + 1, middle
            depth += 1 if middle > high_b else 2
        elif widest == width_d:
            boxes[depth, _D1] = (fewest + most) // 2 + 1
            boxes[depth + 1, _D2] = (fewest + most) // 2
            depth += 2
        else:
            low, high, column = low_x, high_x, _X1
            if widest == width_y:
                low, high, column = low_y, high_y, _Y1
            # Between far ends by the ratio.
            between = 0.5 * (low + high)
            if low == 0.0:
                between = 0.1 * high
            elif high > 4.0 * low:
                between = np.sqrt(low * high)
            boxes[depth, column] = between
            boxes[depth + 1, column + 1] = between
            depth += 2
    return DONE, 0, 0, least_worth, seen
