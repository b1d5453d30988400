"""The cheapest way to serve a query type: a few configurations that each cost something when used, and two limits.

Shares of configurations (and of what is left unserved) add to 1 and keep two means at 0 or below. A set of members
costs their fixed prices, that of each of their pairs once, and what the shares cost. For a given set the shares are
those of a linear program of three rows, of which some best answer uses at most three members; a set without the others
costs no more, as fixed prices are never negative. So the best of all sets is among single members, two of them with the
least cost on a line, and three that keep both means at 0 exactly: all are looked at, save those that cannot be better
than what is found.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hetplan.verification.tables import BoolArray, FloatArray, IntArray

# Steps of the linear program that helps to leave members out; any of its prices are valid.
_STEPS = 60
_EPSILON = 1e-12


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _limit_prices(unit: FloatArray, first: FloatArray, second: FloatArray, start: int) -> tuple[float, float]:
    """Prices of both means, for which the least of unit + price x mean is high.

    They are those of the linear program without fixed prices, by a simplex method of three rows. It starts from the
    member ``start``, which keeps both means at 0 or below.
    """
    size = unit.shape[0]
    # Columns: both slacks, then members. The inverse of the basis, with the right-hand side last.
    rows = np.zeros((3, 4))
    for row in range(3):
        rows[row, row] = 1.0
    rows[0, 2], rows[1, 2] = -first[start], -second[start]
    rows[0, 3], rows[1, 3], rows[2, 3] = -first[start], -second[start], 1.0
    costs = np.zeros(3)
    costs[2] = unit[start]
    for _ in range(_STEPS):
        y = np.zeros(3)
        for column in range(3):
            for row in range(3):
                y[column] += costs[row] * rows[row, column]
        entering, least = -3, -_EPSILON * (abs(y[2]) + 1.0)
        for slack in range(2):
            if -y[slack] < least:
                entering, least = slack - 2, -y[slack]
        for o in range(size):
            reduced = unit[o] - y[0] * first[o] - y[1] * second[o] - y[2]
            if reduced < least:
                entering, least = o, reduced
        if entering == -3:
            break
        column_of = np.zeros(3)
        if entering < 0:
            column_of[entering + 2] = 1.0
        else:
            column_of[0], column_of[1], column_of[2] = first[entering], second[entering], 1.0
        direction = np.zeros(3)
        for row in range(3):
            for column in range(3):
                direction[row] += rows[row, column] * column_of[column]
        leaving, ratio = -1, np.inf
        for row in range(3):
            if direction[row] > _EPSILON and rows[row, 3] / direction[row] < ratio:
                leaving, ratio = row, rows[row, 3] / direction[row]
        if leaving < 0:
            break
        pivot = direction[leaving]
        for column in range(4):
            rows[leaving, column] /= pivot
        for row in range(3):
            if row != leaving:
                for column in range(4):
                    rows[row, column] -= direction[row] * rows[leaving, column]
        costs[leaving] = 0.0 if entering < 0 else unit[entering]
    price_first, price_second = 0.0, 0.0
    for row in range(3):
        price_first -= costs[row] * rows[row, 0]
        price_second -= costs[row] * rows[row, 1]
    # NaN compares false.
    return (price_first if price_first > 0.0 else 0.0), (price_second if price_second > 0.0 else 0.0)


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def least_pattern(
    fixed: FloatArray,
    pair: IntArray,
    pair_fixed: FloatArray,
    unit: FloatArray,
    first: FloatArray,
    second: FloatArray,
) -> float:
    """The least cost of a set of members.

    Parameters
    ----------
    fixed, unit : (N,) float array
        What a member costs when it is used at all, and for the whole share. Fixed prices are not negative. The last
        member is the unserved share, which alone keeps both means at 0 or below.
    pair : (N,) int array
        A member's pair, an index into ``pair_fixed``; -1 for none.
    pair_fixed : (P,) float array
        What a pair costs when any of its members is used.
    first, second : (N,) float array
        What each share adds to the two means.

    Returns
    -------
    float
    """
    size = fixed.shape[0]
    own = fixed.copy()
    for o in range(size):
        if pair[o] >= 0:
            own[o] += pair_fixed[pair[o]]
    best = np.inf
    for o in range(size):
        if first[o] <= 0.0 and second[o] <= 0.0:
            best = min(best, own[o] + unit[o])
    # Shares that keep the limits cost no less than this, as means at 0 or below cost nothing at these prices.
    price_first, price_second = _limit_prices(unit, first, second, size - 1)
    floor = np.inf
    for o in range(size):
        floor = min(floor, unit[o] + price_first * first[o] + price_second * second[o])
    # A set with a member pays for it and its pair.
    order = np.argsort(fixed)
    kept = np.empty(size, dtype=np.int64)
    count = 0
    for o in order:
        if own[o] + floor >= best:
            continue
        # Nor is a member needed in whose place another makes no set dearer and no limit harder to keep.
        undercut = False
        for k in range(count):
            other = kept[k]
            least = fixed[other] if pair[other] == pair[o] else own[other]
            if least <= fixed[o] and unit[other] <= unit[o] and first[other] <= first[o] and second[other] <= second[o]:
                undercut = True
                break
        if not undercut:
            kept[count] = o
            count += 1
    # Members are in order of their fixed prices from here on.
    f, u, a, e = fixed[kept[:count]], unit[kept[:count]], first[kept[:count]], second[kept[:count]]
    p = pair[kept[:count]]
    for i in range(count):
        for j in range(i + 1, count):
            if f[i] + f[j] + floor >= best:
                break
            paid = own[kept[i]] + own[kept[j]]
            if p[i] == p[j] and p[i] >= 0:
                paid -= pair_fixed[p[i]]
            if paid + floor >= best:
                continue
            # The share t of j, from low to high, that keeps both means.
            low, high = 0.0, 1.0
            for mean in range(2):
                one, other_one = (a[i], a[j]) if mean == 0 else (e[i], e[j])
                if one > 0.0 and other_one > 0.0:
                    low, high = 1.0, 0.0
                elif one > 0.0:
                    low = max(low, one / (one - other_one))
                elif other_one > 0.0:
                    high = min(high, one / (one - other_one))
            if low <= high:
                t = low if u[i] <= u[j] else high
                best = min(best, paid + (1.0 - t) * u[i] + t * u[j])
    for i in range(count):
        if 3.0 * f[i] + floor >= best:
            break
        if own[kept[i]] + floor >= best:
            continue
        for j in range(i + 1, count):
            if f[i] + 2.0 * f[j] + floor >= best:
                break
            base = own[kept[i]] + own[kept[j]]
            if p[i] == p[j] and p[i] >= 0:
                base -= pair_fixed[p[i]]
            if base + floor >= best:
                continue
            last_share = a[i] * e[j] - a[j] * e[i]
            for k in range(j + 1, count):
                if f[i] + f[j] + f[k] + floor >= best:
                    break
                share_i = a[j] * e[k] - a[k] * e[j]
                share_j = a[k] * e[i] - a[i] * e[k]
                # The shares that keep both means at 0, up to their sum: all of one sign.
                positive = share_i >= 0.0 and share_j >= 0.0 and last_share >= 0.0
                negative = share_i <= 0.0 and share_j <= 0.0 and last_share <= 0.0
                whole = share_i + share_j + last_share
                if not (positive or negative) or whole == 0.0:
                    continue
                paid = base
                if p[k] < 0 or (p[k] != p[i] and p[k] != p[j]):
                    paid += own[kept[k]]
                else:
                    paid += f[k]
                best = min(best, paid + (share_i * u[i] + share_j * u[j] + last_share * u[k]) / whole)
    return float(best)


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def least_patterns(
    usable: BoolArray,
    fixed: FloatArray,
    pair: IntArray,
    pair_fixed: FloatArray,
    unit: FloatArray,
    first: FloatArray,
    second: FloatArray,
    unserved: FloatArray,
) -> FloatArray:
    """`least_pattern` of each type.

    Parameters
    ----------
    usable : (I, N) bool array
        What a type may use.
    fixed, unit, first, second : (I, N) float array
    pair : (N,) int array
    pair_fixed : (I, P) float array
    unserved : (I, 3) float array
        Of the unserved share: its unit cost and what it adds to each mean.

    Returns
    -------
    (I,) float array
    """
    types = fixed.shape[0]
    least = np.empty(types)
    for i in range(types):
        members = np.flatnonzero(usable[i])
        count = members.shape[0]
        f, u = np.zeros(count + 1), np.empty(count + 1)
        a, e = np.empty(count + 1), np.empty(count + 1)
        p = np.full(count + 1, -1)
        f[:count], u[:count] = fixed[i][members], unit[i][members]
        a[:count], e[:count], p[:count] = first[i][members], second[i][members], pair[members]
        u[count], a[count], e[count] = unserved[i, 0], unserved[i, 1], unserved[i, 2]
        least[i] = least_pattern(f, p, pair_fixed[i], u, a, e)
    return least
