"""How one query type may be served: a pattern is a handful of options and the share that each takes.

A type's shares obey three rows (they add up to one, mean delay, mean error), so a vertex of what it may do has at most
three options in it. That each option in a pattern must be bought whole is what the usual relaxation (a share needs as
much of an option as it takes of a type) gives away: mixing an accurate and a fast model needs both.

For given prices of using an option and of each unit on it, the cheapest pattern comes from looking at every option,
every two and every three; what is left out cannot be cheaper.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hetplan.solvers.allocation.options import FloatArray, IntArray

_EDGE = 1e-9
# Golden sections in each of two prices.
_SECTIONS = 12


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _worth_a_look(
    fixed: FloatArray, pair_fixed: FloatArray, unit: FloatArray, delay: FloatArray, error: FloatArray
) -> IntArray:
    """Options by their fixed price, without those that another undercuts in everything: it could stand for them."""
    order = np.argsort(fixed)
    kept = np.empty(fixed.size, np.int64)
    count = 0
    for s in range(order.size):
        a = order[s]
        undercut = not (delay[a] < np.inf and error[a] < np.inf)
        for k in range(count):
            if undercut:
                break
            b = kept[k]
            undercut = (
                pair_fixed[b] <= pair_fixed[a] and unit[b] <= unit[a] and delay[b] <= delay[a] and error[b] <= error[a]
            )
        if not undercut:
            kept[count] = a
            count += 1
    return kept[:count]


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def cheapest_patterns(
    fixed: FloatArray,
    pair_fixed: FloatArray,
    unit: FloatArray,
    delay: FloatArray,
    error: FloatArray,
    pair: IntArray,
    most_found: int,
    limit: float,
    three: bool,
) -> tuple[float, IntArray, FloatArray, FloatArray]:
    """The cheapest patterns of one type.

    Parameters
    ----------
    fixed, pair_fixed, unit : (N,) float, at least 0 the first two
        Price of having an option in the pattern, of having its pair there (once, however many of its options there
        are), and of all of the type on it. Leaving the type unserved is an option too, alone in its pair.
    delay, error : (N,) float
        As shares of the limit; infinite where the option cannot serve the type.
    pair : (N,) int
    most_found : int
        Patterns wanted: of each option, the cheapest that has it and costs less than ``limit``, the cheapest options
        first.
    three : bool
        Look at every three options as well; without, ``least`` is of patterns of one or two.

    Returns
    -------
    least : float
        Price of the cheapest pattern of all.
    members : (F, 3) int
        Options; -1 where there are fewer.
    shares : (F, 3) float
    prices : (F,) float
    """
    n = fixed.size
    best_price = np.full(n, np.inf)
    best_members = np.full((n, 3), -1, np.int64)
    best_shares = np.zeros((n, 3))
    least = np.inf
    for a in range(n):
        if delay[a] <= 1 + _EDGE and error[a] <= 1 + _EDGE:
            price = fixed[a] + pair_fixed[a] + unit[a]
            least = min(least, price)
            if price < best_price[a]:
                best_price[a] = price
                best_members[a, 0], best_members[a, 1], best_members[a, 2] = a, -1, -1
                best_shares[a, 0], best_shares[a, 1], best_shares[a, 2] = 1.0, 0.0, 0.0
    # No pattern costs less per unit than its cheapest option: what its fixed prices leave decides whether to look on.
    cheapest_unit = np.inf
    for a in range(n):
        if delay[a] < np.inf and unit[a] < cheapest_unit:
            cheapest_unit = unit[a]
    order = _worth_a_look(fixed, pair_fixed, unit, delay, error)
    n = order.size
    for s in range(n):
        a = order[s]
        if 2 * fixed[a] + pair_fixed[a] + cheapest_unit >= max(least, limit):
            # One whose pair costs less may still come.
            if 2 * fixed[a] + cheapest_unit >= max(least, limit):
                break
            continue
        for t in range(s + 1, n):
            b = order[t]
            if fixed[a] + pair_fixed[a] + fixed[b] + cheapest_unit >= max(least, limit):
                break
            both = fixed[a] + fixed[b] + pair_fixed[a] + (0.0 if pair[a] == pair[b] else pair_fixed[b])
            if both + cheapest_unit >= max(least, limit):
                continue
            # The share of a between which both limits hold.
            low, high = 0.0, 1.0
            for q in range(2):
                va, vb = (delay[a], delay[b]) if q == 0 else (error[a], error[b])
                if va <= 1 and vb <= 1:
                    continue
                if va > 1 and vb > 1:
                    high = -1.0
                    break
                cut = (1 - vb) / (va - vb)
                if va > 1:
                    high = min(high, cut)
                else:
                    low = max(low, cut)
            if low <= high:
                x = high if unit[a] < unit[b] else low
                if _EDGE < x < 1 - _EDGE:
                    price = both + x * unit[a] + (1 - x) * unit[b]
                    least = min(least, price)
                    for m in (a, b):
                        if price < best_price[m]:
                            best_price[m] = price
                            best_members[m, 0], best_members[m, 1], best_members[m, 2] = a, b, -1
                            best_shares[m, 0], best_shares[m, 1], best_shares[m, 2] = x, 1 - x, 0.0
            # Three, with both limits met exactly.
            for r in range(t + 1, n if three else 0):
                c = order[r]
                if both + fixed[c] + cheapest_unit >= max(least, limit):
                    break
                # Shares p of a, q of b, 1 - p - q of c.
                d1, d2, dr = delay[a] - delay[c], delay[b] - delay[c], 1 - delay[c]
                e1, e2, er = error[a] - error[c], error[b] - error[c], 1 - error[c]
                determinant = d1 * e2 - d2 * e1
                if abs(determinant) < 1e-12:
                    continue
                p = (dr * e2 - d2 * er) / determinant
                q3 = (d1 * er - dr * e1) / determinant
                z = 1 - p - q3
                if p > _EDGE and q3 > _EDGE and z > _EDGE:
                    price = both + fixed[c]
                    if pair[c] != pair[a] and pair[c] != pair[b]:
                        price += pair_fixed[c]
                    price += p * unit[a] + q3 * unit[b] + z * unit[c]
                    least = min(least, price)
                    for m in (a, b, c):
                        if price < best_price[m]:
                            best_price[m] = price
                            best_members[m, 0], best_members[m, 1], best_members[m, 2] = a, b, c
                            best_shares[m, 0], best_shares[m, 1], best_shares[m, 2] = p, q3, z
    found = 0
    members = np.full((most_found, 3), -1, np.int64)
    shares = np.zeros((most_found, 3))
    prices = np.full(most_found, np.inf)
    for a in np.argsort(best_price):
        if found == most_found or best_price[a] >= limit:
            break
        same = False
        for f in range(found):
            if (
                members[f, 0] == best_members[a, 0]
                and members[f, 1] == best_members[a, 1]
                and members[f, 2] == best_members[a, 2]
            ):
                same = True
        if same:
            continue
        members[found], shares[found], prices[found] = best_members[a], best_shares[a], best_price[a]
        found += 1
    return least, members[:found], shares[:found], prices[:found]


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def cheapest_with(
    own: FloatArray,
    own_unit: FloatArray,
    own_delay: FloatArray,
    own_error: FloatArray,
    fixed: FloatArray,
    unit: FloatArray,
    delay: FloatArray,
    error: FloatArray,
    limit: float,
    three: bool,
) -> FloatArray:
    """What the cheapest pattern costs that has a certain option, and otherwise options of a set.

    Parameters
    ----------
    own, own_unit, own_delay, own_error : (C,) float
        As ``fixed``, ``unit``, ``delay`` and ``error``, of options outside the set.
    fixed, unit, delay, error : (N,) float
        Of the set, as in `cheapest_patterns`, each pair apart.
    limit : float
    three : bool
        As in `cheapest_patterns`.

    Returns
    -------
    (C,) float
        Never above ``limit``.
    """
    order = _worth_a_look(fixed, np.zeros(fixed.size), unit, delay, error)
    n = order.size
    set_unit = np.inf
    for s in range(n):
        set_unit = min(set_unit, unit[order[s]])
    prices = np.full(own.size, limit)
    for k in range(own.size):
        da, ea = own_delay[k], own_error[k]
        if not da < np.inf:
            continue
        base = own[k]
        cheapest_unit = min(set_unit, own_unit[k])
        best = limit
        if da <= 1 + _EDGE and ea <= 1 + _EDGE:
            best = min(best, base + own_unit[k])
        for t in range(n):
            b = order[t]
            if base + fixed[b] + cheapest_unit >= best:
                break
            low, high = 0.0, 1.0
            for q in range(2):
                va, vb = (da, delay[b]) if q == 0 else (ea, error[b])
                if va <= 1 and vb <= 1:
                    continue
                if va > 1 and vb > 1:
                    high = -1.0
                    break
                cut = (1 - vb) / (va - vb)
                if va > 1:
                    high = min(high, cut)
                else:
                    low = max(low, cut)
            if low <= high:
                x = high if own_unit[k] < unit[b] else low
                if x > _EDGE:
                    best = min(best, base + fixed[b] + x * own_unit[k] + (1 - x) * unit[b])
            for r in range(t + 1, n if three else 0):
                c = order[r]
                if base + fixed[b] + fixed[c] + cheapest_unit >= best:
                    break
                d1, d2, dr = da - delay[c], delay[b] - delay[c], 1 - delay[c]
                e1, e2, er = ea - error[c], error[b] - error[c], 1 - error[c]
                determinant = d1 * e2 - d2 * e1
                if abs(determinant) < 1e-12:
                    continue
                p = (dr * e2 - d2 * er) / determinant
                q3 = (d1 * er - dr * e1) / determinant
                z = 1 - p - q3
                if p > _EDGE and q3 > _EDGE and z > _EDGE:
                    price = base + fixed[b] + fixed[c] + p * own_unit[k] + q3 * unit[b] + z * unit[c]
                    best = min(best, price)
        prices[k] = best
    return prices


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def cheapest_in_part(
    fixed: FloatArray, pair_fixed: FloatArray, unit: FloatArray, delay: FloatArray, error: FloatArray
) -> float:
    """A price that no pattern is below, however many options there are: as if what an option costs came in parts.

    A pattern pays for each of its options whole; it costs no less than the shares of them that it has. Prices of the
    two limits, each found by golden sections, leave the cheapest single option. Arguments as of `cheapest_patterns`.
    """
    n = 0
    usable = np.empty(unit.size, np.int64)
    for a in range(unit.size):
        if delay[a] < np.inf and error[a] < np.inf:
            usable[n] = a
            n += 1
    if n == 0:
        return np.inf
    own, late, wrong = np.empty(n), np.empty(n), np.empty(n)
    top = 0.0
    for k in range(n):
        a = usable[k]
        own[k], late[k], wrong[k] = fixed[a] + pair_fixed[a] + unit[a], delay[a] - 1, error[a] - 1
        top = max(top, own[k] if own[k] < np.inf else 0.0)
    best = own.min()
    ratio = 0.6180339887498949
    # A limit is worth no more than the dearest option; twice that leaves room.
    high = 2 * min(top, 100 * max(best, 1e-9)) + 1.0
    low_x, high_x = 0.0, high
    value_x = np.full(2, -np.inf)
    for _ in range(_SECTIONS):
        for side in range(2):
            x = high_x - ratio * (high_x - low_x) if side == 0 else low_x + ratio * (high_x - low_x)
            value_x[side] = -np.inf
            low_y, high_y = 0.0, high
            value_y = np.full(2, -np.inf)
            for _ in range(_SECTIONS):
                for part in range(2):
                    y = high_y - ratio * (high_y - low_y) if part == 0 else low_y + ratio * (high_y - low_y)
                    value_y[part] = (own + x * late + y * wrong).min()
                    value_x[side] = max(value_x[side], value_y[part])
                if value_y[0] >= value_y[1]:
                    high_y = low_y + ratio * (high_y - low_y)
                else:
                    low_y = high_y - ratio * (high_y - low_y)
            best = max(best, value_x[side])
        if value_x[0] >= value_x[1]:
            high_x = low_x + ratio * (high_x - low_x)
        else:
            low_x = high_x - ratio * (high_x - low_x)
    return float(best)
