"""How many layers machines hold within limits: what the exact search counts instead of placing layers.

A pipeline serves T = 1 / (x + y) requests per second, where x and y are the most seconds per request that a
stage of it spends in prefill and in decode. Within limits on x and y, at a batch and a number of stages, a
group of GPUs holds so many layers and no more, and a machine as many as its best split into groups. A
set of machines makes a pipeline if they hold all layers together.

Two things make this a relaxation, exact in nearly every case: a stage sends at the speed of its own
network card, as it does when machines stand in the order of their cards; and where layers differ, a group
holds the window of layers that suits it best.

Batches come as intervals, the nodes of a binary tree: node 1 is all batches, node i splits into 2 i and 2 i + 1.
Seconds of an interval are the least of its batches, so that no order among batches is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetplan.estimator.base import FloatArray
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.placement.tables import FIRST, LAST, IntArray, StageTables

# What a stage is and where it sends: in the middle or first, to its own node or outside; last; first and last.
_MIDDLE_IN, _MIDDLE_OUT, _FIRST_IN, _FIRST_OUT, _LAST_ONE, _ONLY = range(6)
_VARIANT_ROLES = (0, 0, FIRST, FIRST, LAST, FIRST | LAST)
# Layers of a kind that ends before this share of the model count as no layers: see `units_of`.
_PREFIX_SHARE = 0.1
# Networks that are so many times slower than the next are told apart.
_SLOWER = 1.5


class Arrays(NamedTuple):
    """What the compiled functions read.

    P pools, O options of theirs, K kinds of layers, R roles, N layers, V nodes of the batches' tree, E kinds of sends.
    Seconds are per request, and the least of a node's batches.
    """

    gpus: IntArray  # (P,): that a machine grants
    fixed_stages: IntArray  # (P,): stages that each machine has to have within an engine's limits; 0 leaves it free
    first_option: IntArray  # (P + 1,): options of pool p are those from first_option[p]
    degree: IntArray  # (O,)
    low: IntArray  # (V,): batches of a node
    high: IntArray  # (V,), below low where the node has none
    layer_s: FloatArray  # (V, O, 2, K): of one layer
    base_s: FloatArray  # (V, O, 6, 2): of a stage of each variant beside its layers, with its send to the best receiver
    slower_s: FloatArray  # (E, V, 2): that a send takes longer than that
    slower: IntArray  # (P, P): its row for a sender's and a receiver's pool
    slow: NDArray[np.bool_]  # (P,): pools behind the slowest networks: see `covers`
    units: IntArray  # (N + 1,): units before each layer; without unequal layers its number
    before: int  # layers before those that are all alike and are the units; -1 where the units are not all alike
    prefix: IntArray  # (N + 1, K): layers of each kind before each layer
    room_bytes: FloatArray  # (O, R): of one GPU, left for layers and KV cache
    weight_bytes: FloatArray  # (O, K): of a layer
    sequence_bytes: FloatArray  # (O, K): of a layer, for a typical sequence in flight
    longest_bytes: FloatArray  # (O, K): of a layer, for the longest sequence
    end_sequence_bytes: FloatArray  # (O, R): of a typical sequence, beside the layers
    batch_limit: IntArray  # (O,): most sequences in flight
    micro_batches: bool  # sequences in flight are a batch for every stage; else one batch


class Seconds(NamedTuple):
    """What `arranging.arrange` reads beside ``Arrays``: seconds at each batch, from 0 (unused) to B."""

    layer_s: FloatArray  # (O, 2, K, B + 1): of one layer
    end_s: FloatArray  # (O, R, 2, B + 1): of a stage beside its layers
    send_s: FloatArray  # (sends, 2, B + 1): of a boundary
    send_rows: IntArray  # (P, P, 2): its row for a sender's pool, a receiver's, and whether they share a node


@dataclass(frozen=True, slots=True)
class Covering:
    """Tables of one set of pools whose machines may stand in one pipeline.

    Attributes
    ----------
    pools : (P,) int
        The pools, as numbered in the problem.
    option : (O,) int
        The number that each option has in the problem's tables.
    arrays : Arrays
    seconds : Seconds
    """

    pools: IntArray
    option: IntArray
    arrays: Arrays
    seconds: Seconds

    @property
    def gpus(self) -> IntArray:
        """GPUs that a machine of each pool grants."""
        return self.arrays.gpus

    @property
    def fixed_stages(self) -> IntArray:
        """Stages that a machine of each pool has to have; 0 leaves it free."""
        return self.arrays.fixed_stages

    @property
    def first_option(self) -> IntArray:
        """Options of pool p are those from ``first_option[p]``."""
        return self.arrays.first_option


def units_of(problem: PlacementProblem) -> IntArray:
    """Units before each layer: one for every layer, none for kinds that occur only in a short prefix.

    Such a prefix (the dense layers before a mixture) lies in the first stage, whose window starts with it. Were it
    counted, every stage would be credited with the cheap layers.
    """
    model = problem.model
    pattern, count = model.layer_pattern, model.layer_count
    last = {kind: index for index, kind in enumerate(pattern)}
    counted = [int(len(last) == 1 or last[kind] >= _PREFIX_SHARE * count) for kind in pattern]
    return np.concatenate([[0], np.cumsum(counted)]).astype(np.int64)


def make_covering(
    problem: PlacementProblem, tables: StageTables, granted: dict[int, int], options: list[int], *, micro_batches: bool
) -> Covering:
    """Tables for the pools in ``granted`` (GPUs of each machine) and some options of theirs.

    O(options x batches) time and memory.
    """
    by_pool = {pool: [o for o in options if tables.options[o].pool == pool] for pool in granted}
    pools = [pool for pool, mine in by_pool.items() if mine]
    order = [o for pool in pools for o in by_pool[pool]]
    degrees = np.array([tables.options[o].degree for o in order], dtype=np.int64)
    first = np.cumsum([0, *(len(by_pool[pool]) for pool in pools)])
    gpus = np.array([granted[pool] for pool in pools], dtype=np.int64)
    fixed = np.zeros(len(pools), dtype=np.int64)
    if "equal-gpus-per-node" in problem.limits:
        fixed[:] = gpus // degrees[first[:-1]]
    top = tables.max_batch
    leaves = 1 << (top - 1).bit_length() if top > 1 else 1
    axis = np.arange(1, top + 1)
    layer = np.full((2 * leaves, len(order), 2, tables.layer_s.shape[2]), np.inf)
    base = np.full((2 * leaves, len(order), 6, 2), np.inf)
    for i, number in enumerate(order):
        layer[leaves : leaves + top, i] = np.moveaxis(tables.layer_s[number, :, :, 1:] / axis, -1, 0)
        pool = tables.options[number].pool
        rows = tables.send_index[pool, pools, 0]
        outside = tables.send_s[rows[rows >= 0], :, 1:].min(axis=0)
        own = int(tables.send_index[pool, pool, 1])
        inside = tables.send_s[own, :, 1:] if own >= 0 else np.full_like(outside, np.inf)
        sends = (inside, outside, inside, outside, 0.0, 0.0)
        for variant, (role, send) in enumerate(zip(_VARIANT_ROLES, sends, strict=True)):
            base[leaves : leaves + top, i, variant] = np.moveaxis(
                (tables.end_s[number, role, :, 1:] + send) / axis, -1, 0
            )
    slower_s, slower = _slower(tables, pools, leaves)
    low, high = np.ones(2 * leaves, dtype=np.int64), np.zeros(2 * leaves, dtype=np.int64)
    low[leaves:] = np.arange(1, leaves + 1)
    high[leaves:] = np.where(low[leaves:] <= top, low[leaves:], 0)
    for start in (leaves >> level for level in range(1, leaves.bit_length())):
        left, right = slice(2 * start, 4 * start, 2), slice(2 * start + 1, 4 * start, 2)
        layer[start : 2 * start] = np.minimum(layer[left], layer[right])
        base[start : 2 * start] = np.minimum(base[left], base[right])
        low[start : 2 * start], high[start : 2 * start] = low[left], np.maximum(high[left], high[right])
    units = units_of(problem)
    zeros = int(np.count_nonzero(units == 0)) - 1
    before = zeros if len(set(problem.model.layer_pattern[zeros:])) == 1 else -1
    o = np.array(order, dtype=np.int64)
    arrays = Arrays(
        gpus=gpus,
        fixed_stages=fixed,
        first_option=first,
        degree=degrees,
        low=low,
        high=high,
        layer_s=layer,
        base_s=base,
        slower_s=slower_s,
        slower=slower,
        slow=_slow(tables, pools),
        units=units,
        before=before,
        prefix=tables.prefix,
        room_bytes=tables.room_bytes[o].astype(np.float64),
        weight_bytes=tables.weight_bytes[o].astype(np.float64),
        sequence_bytes=tables.sequence_bytes[o],
        longest_bytes=tables.longest_bytes[o],
        end_sequence_bytes=tables.end_sequence_bytes[o],
        batch_limit=tables.batch_limit[o],
        micro_batches=micro_batches,
    )
    send_rows = np.ascontiguousarray(tables.send_index[np.ix_(pools, pools)])
    seconds = Seconds(tables.layer_s[o], tables.end_s[o], tables.send_s, send_rows)
    return Covering(pools=np.array(pools, dtype=np.int64), option=o, arrays=arrays, seconds=seconds)


def _slower(tables: StageTables, pools: list[int], leaves: int) -> tuple[FloatArray, IntArray]:
    """How much longer each send between pools takes than the sender's best, at each node of the batches' tree."""
    top = tables.max_batch
    axis = np.arange(1, top + 1)
    rows: list[FloatArray] = []
    seen: dict[bytes, int] = {}
    index = np.zeros((len(pools), len(pools)), dtype=np.int64)
    for i, pool in enumerate(pools):
        sends = tables.send_s[tables.send_index[pool, pools, 0], :, 1:]
        longer = (sends - sends.min(axis=0)) / axis
        for j in range(len(pools)):
            key = longer[j].tobytes()
            if key not in seen:
                seen[key] = len(rows)
                tree = np.full((2 * leaves, 2), np.inf)
                tree[leaves : leaves + top] = longer[j].T
                for start in (leaves >> level for level in range(1, leaves.bit_length())):
                    left, right = slice(2 * start, 4 * start, 2), slice(2 * start + 1, 4 * start, 2)
                    tree[start : 2 * start] = np.minimum(tree[left], tree[right])
                rows.append(tree)
            index[i, j] = seen[key]
    return np.stack(rows), index


def _slow(tables: StageTables, pools: list[int]) -> NDArray[np.bool_]:
    """Pools whose sends to their like take longer than the widest gap between any two pools."""
    rows = tables.send_index[pools, pools, 0]
    seconds = tables.send_s[np.maximum(rows, 0), :, -1].sum(axis=-1)
    order = np.sort(seconds)
    ratios = order[1:] / np.maximum(order[:-1], 1e-30)
    if ratios.size == 0 or ratios.max() < _SLOWER:
        return np.zeros(len(pools), dtype=np.bool_)
    return np.asarray(seconds > order[int(ratios.argmax())])


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def receivers_of(slower: IntArray, counts: IntArray, receivers: IntArray) -> None:
    """Fill ``receivers`` (P, P) with the rows of ``slower`` of each pool's sends to machines, -1 after the last.

    ``counts`` (P,): machines of each pool that are sent to.
    """
    pools = counts.size
    for p in range(pools):
        at = 0
        for q in range(pools):
            if counts[q] > (1 if p == q else 0):
                known = False
                for i in range(at):
                    known = known or receivers[p, i] == slower[p, q]
                if not known:
                    receivers[p, at] = slower[p, q]
                    at += 1
        if at < pools:
            receivers[p, at] = -1


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _held(
    prefix: IntArray,
    units: IntArray,
    layer_s: FloatArray,
    weights: FloatArray,
    sequence: FloatArray,
    longest: FloatArray,
    node: int,
    option: int,
    variant: int,
    n: float,
    left_x: float,
    left_y: float,
    left_both: float,
    many: float,
    one: float,
) -> int:
    """Units that a stage holds at most; -1 where it holds no layer. A last digit too much only loosens the bound.

    ``left_x``, ``left_y``, ``left_both`` are seconds per request for layers, ``many`` bytes for them with n sequences
    of typical length, ``one`` with the longest one alone. The arrays are fields of ``Arrays``.
    """
    layers, kinds = prefix.shape[0] - 1, prefix.shape[1]
    starts_first = variant == _FIRST_IN or variant == _FIRST_OUT or variant == _ONLY  # noqa: PLR1714
    ends_last = variant >= _LAST_ONE
    # Windows that start where the role lets them; the best of those that fit.
    best = -1
    start = 0 if starts_first else 1
    end = start
    sx = sy = sm = so = 0.0
    while start < layers:
        stop = layers if ends_last else layers - 1
        while end < stop:
            ax = ay = am = ao = 0.0
            for k in range(kinds):
                if prefix[end + 1, k] > prefix[end, k]:
                    ax = layer_s[node, option, 0, k]
                    ay = layer_s[node, option, 1, k]
                    am = weights[option, k] + n * sequence[option, k]
                    ao = weights[option, k] + longest[option, k]
            if (
                (sx + ax) * (1 - 1e-12) > left_x
                or (sy + ay) * (1 - 1e-12) > left_y
                or (sx + ax + sy + ay) * (1 - 1e-12) > left_both
                or (sm + am) * (1 - 1e-12) > many
                or (so + ao) * (1 - 1e-12) > one
            ):
                break
            sx += ax
            sy += ay
            sm += am
            so += ao
            end += 1
        if end > start and (not ends_last or end == layers):
            best = max(best, int(units[end] - units[start]))
            if ends_last:
                return best
        if starts_first:
            return best
        if end == start:
            # This layer does not fit at all.
            start += 1
            end = start
            sx = sy = sm = so = 0.0
            continue
        for k in range(kinds):
            if prefix[start + 1, k] > prefix[start, k]:
                sx -= layer_s[node, option, 0, k]
                sy -= layer_s[node, option, 1, k]
                sm -= weights[option, k] + n * sequence[option, k]
                so -= weights[option, k] + longest[option, k]
        start += 1
    return best


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _fill_alike(
    arrays: Arrays, node: int, option: int, n: float, x: float, y: float, both: float, sends: FloatArray, caps: IntArray
) -> tuple[float, float]:
    """Fill ``caps[option]`` where layers are alike after the first few, which lie in the first stage.

    ``sends``: (2, 2), seconds of x and y that a send takes longer, outside of the node and to a slow network. Returns
    the most x and y that the stages need to hold as much.
    """
    prefix, before, layer_s, base_s = arrays.prefix, arrays.before, arrays.layer_s, arrays.base_s
    weights, sequence, longest = arrays.weight_bytes, arrays.sequence_bytes, arrays.longest_bytes
    layers, kinds = prefix.shape[0] - 1, prefix.shape[1]
    body = 0
    for k in range(kinds):
        if prefix[layers, k] > prefix[layers - 1, k]:
            body = k
    # What the first layers take.
    first_x = first_y = first_many = first_one = 0.0
    for k in range(kinds if before > 0 else 0):
        many_k, one_k = weights[option, k] + n * sequence[option, k], weights[option, k] + longest[option, k]
        first_x += prefix[before, k] * layer_s[node, option, 0, k]
        first_y += prefix[before, k] * layer_s[node, option, 1, k]
        first_many += prefix[before, k] * many_k
        first_one += prefix[before, k] * one_k
    layer_x, layer_y = layer_s[node, option, 0, body], layer_s[node, option, 1, body]
    layer_many = weights[option, body] + n * sequence[option, body]
    layer_one = weights[option, body] + longest[option, body]
    most, tight_x, tight_y = float(layers - before), 0.0, 0.0
    # Layers per second and per byte; where a layer takes nothing, as good as no limit.
    per_x, per_y, per_both = 1.0 / max(layer_x, 1e-30), 1.0 / max(layer_y, 1e-30), 1.0 / max(layer_x + layer_y, 1e-30)
    per_many, per_one = 1.0 / max(layer_many, 1e-30), 1.0 / max(layer_one, 1e-30)
    for v in range(8 if sends[1, 0] < np.inf else 6):
        # The last two are the second and the fourth, sending to a slow network.
        u = v if v < 6 else 2 * v - 11
        role = 0 if u < 2 else (1 if u < 4 else (2 if u == 4 else 3))
        base_x, base_y = base_s[node, option, u, 0], base_s[node, option, u, 1]
        if v == _MIDDLE_OUT or v == _FIRST_OUT:  # noqa: PLR1714, SIM109
            base_x, base_y = base_x + sends[0, 0], base_y + sends[0, 1]
        elif v >= 6:
            base_x, base_y = base_x + sends[1, 0], base_y + sends[1, 1]
        left_x, left_y = (x - base_x) * (1 + 1e-12), (y - base_y) * (1 + 1e-12)
        left_both = (both - base_x - base_y) * (1 + 1e-12)
        room, ends = arrays.room_bytes[option, role], arrays.end_sequence_bytes[option, role]
        many, one = room - n * ends, room - ends
        if left_x <= 0 or left_y <= 0 or left_both <= 0 or many < 0 or one < 0 or room <= 0:
            continue
        ends_last = u >= _LAST_ONE
        if role & 1 and before > 0:
            left_x, left_y, left_both = left_x - first_x, left_y - first_y, left_both - first_x - first_y
            many, one = many - first_many, one - first_one
            if left_x <= 0 or left_y <= 0 or left_both <= 0 or many < 0 or one < 0:
                if not ends_last:
                    # Some of the first layers: how many is not counted.
                    caps[option, v], tight_x, tight_y = 0, x, y
                continue
            base_x, base_y = base_x + first_x, base_y + first_y
        held = int(min(
            most if before > 0 or ends_last else most - 1.0,
            min(left_x * per_x, left_y * per_y, left_both * per_both) + 1e-9,
            min(many * per_many, one * per_one) + 1e-9,
        ))  # fmt: skip
        if u == _ONLY and held < layers - before:
            continue
        if held >= 1:
            caps[option, v] = held
            tight_x = max(tight_x, base_x + held * layer_x)
            tight_y = max(tight_y, base_y + held * layer_y)
        elif before > 0 and not ends_last:
            caps[option, v], tight_x, tight_y = 0, x, y
    return tight_x, tight_y


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _fill_caps(
    arrays: Arrays,
    p: int,
    receivers: IntArray,
    to_slow: IntArray,
    node: int,
    fewest: int,
    x: float,
    y: float,
    both: float,
    caps: IntArray,
) -> tuple[float, float]:
    """Fill ``caps[option, variant]`` for the options of a pool: units that one stage holds, -1 where it cannot be.

    The last two variants are the second and the fourth, sending to a slow network. Returns limits on x and y, no
    larger, within which the stages hold as much.
    """
    slower_s, base_s, room, end_sequence = arrays.slower_s, arrays.base_s, arrays.room_bytes, arrays.end_sequence_bytes
    tight_x = tight_y = 0.0
    n = float(arrays.low[node] * fewest if arrays.micro_batches else arrays.low[node])
    # What a send takes longer outside of the node, and to a slow network.
    sends = np.zeros((2, 2))
    if receivers.shape[1] > 0:
        sends[0] = np.inf
        for i in range(receivers.shape[1]):
            row = receivers[p, i]
            if row < 0:
                break
            for k in range(2):
                sends[0, k] = min(sends[0, k], slower_s[row, node, k])
    sends[1] = np.inf
    if not arrays.slow[p]:
        for i in range(to_slow.shape[1]):
            row = to_slow[p, i]
            if row < 0:
                break
            for k in range(2):
                sends[1, k] = min(sends[1, k], slower_s[row, node, k])
    for o in range(arrays.first_option[p], arrays.first_option[p + 1]):
        for v in range(8):
            caps[o, v] = -1
        if n > arrays.batch_limit[o]:
            continue
        if arrays.before >= 0:
            own_x, own_y = _fill_alike(arrays, node, o, n, x, y, both, sends, caps)
            tight_x, tight_y = max(tight_x, own_x), max(tight_y, own_y)
            continue
        for v in range(8 if sends[1, 0] < np.inf else 6):
            u = v if v < 6 else 2 * v - 11
            role = 0 if u < 2 else (1 if u < 4 else (2 if u == 4 else 3))
            base_x, base_y = base_s[node, o, u, 0], base_s[node, o, u, 1]
            if v == _MIDDLE_OUT or v == _FIRST_OUT:  # noqa: PLR1714, SIM109
                base_x, base_y = base_x + sends[0, 0], base_y + sends[0, 1]
            elif v >= 6:
                base_x, base_y = base_x + sends[1, 0], base_y + sends[1, 1]
            left_x, left_y = (x - base_x) * (1 + 1e-12), (y - base_y) * (1 + 1e-12)
            left_both = (both - base_x - base_y) * (1 + 1e-12)
            many, one = room[o, role] - n * end_sequence[o, role], room[o, role] - end_sequence[o, role]
            if left_x <= 0 or left_y <= 0 or left_both <= 0 or many < 0 or one < 0 or room[o, role] <= 0:
                continue
            caps[o, v] = _held(
                arrays.prefix, arrays.units, arrays.layer_s, arrays.weight_bytes, arrays.sequence_bytes,
                arrays.longest_bytes, node, o, u, n, left_x, left_y, left_both, many, one,
            )  # fmt: skip
    if arrays.before < 0:
        return x, y
    return min(x, tight_x), min(y, tight_y)


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def most_units(
    arrays: Arrays,
    counts: IntArray,
    anywhere: IntArray,
    node: int,
    fewest: int,
    most_stages: int,
    x: float,
    y: float,
    both: float,
    most: IntArray,
    inner: IntArray,
) -> None:
    """Fill ``most[pool, 0, stages]``: no less than any flag of `machine_units` has, sooner, and about the most of them.

    ``anywhere``: (P, 0).
    """
    degree = arrays.degree
    caps = np.empty((degree.size, 8), np.int64)
    columns = min(most_stages, most.shape[2] - 1)
    for p in range(counts.size):
        if counts[p] == 0:
            continue
        for s in range(columns + 1):
            most[p, 0, s] = -1
        _fill_caps(arrays, p, anywhere, anywhere, node, fewest, x, y, both, caps)
        a, b, g, fixed = arrays.first_option[p], arrays.first_option[p + 1], arrays.gpus[p], arrays.fixed_stages[p]
        deepest = min(most_stages, g)
        for o in range(a, b):
            # Inside the machine its best of first and middle stages; at its end the best of all.
            if degree[o] <= g:
                most[p, 0, 1] = max(most[p, 0, 1], caps[o, 1], caps[o, 3], caps[o, 4], caps[o, 5])
            caps[o, 0] = max(caps[o, 0], caps[o, 2])
            caps[o, 1] = max(caps[o, 1], caps[o, 4])
        if deepest > 1:
            _fill_inner(degree, caps, a, b, g, deepest - 1, inner)
        for s in range(2, deepest + 1):
            for o in range(a, b):
                d = degree[o]
                if d < g and caps[o, 1] >= 0 and inner[g - d, s - 1] >= 0:
                    most[p, 0, s] = max(most[p, 0, s], caps[o, 1] + inner[g - d, s - 1])
        if fixed == 0:
            for s in range(1, columns + 1):
                most[p, 0, s] = max(most[p, 0, s], most[p, 0, s - 1])
        else:
            for s in range(1, columns + 1):
                if s != fixed:
                    most[p, 0, s] = -1


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _fill_inner(degree: IntArray, caps: IntArray, a: int, b: int, gpus: int, most: int, inner: IntArray) -> None:
    """Fill ``inner[c, s]``: the most that s middle stages, all sending inside the node, hold on c GPUs."""
    for c in range(gpus + 1):
        inner[c, 0] = 0
        for s in range(1, most + 1):
            inner[c, s] = inner[c - 1, s] if c > 0 else -1
    for o in range(a, b):
        d, units = degree[o], caps[o, 0]
        if units < 0:
            continue
        # With what came before and more of this option.
        for c in range(d, gpus + 1):
            for s in range(1, most + 1):
                if inner[c - d, s - 1] >= 0:
                    inner[c, s] = max(inner[c, s], units + inner[c - d, s - 1])


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def machine_units(
    arrays: Arrays,
    counts: IntArray,
    receivers: IntArray,
    to_slow: IntArray,
    node: int,
    fewest: int,
    most_stages: int,
    x: float,
    y: float,
    both: float,
    held: IntArray,
    inner: IntArray,
) -> tuple[float, float]:
    """Fill ``held[pool, flag, stages]``: units that a machine of each pool holds at most, -1 where it cannot be.

    Of each pool that has machines by ``counts``, within x, y, and ``both`` for their sum. Flags are what it holds of
    first (1) and last stage (2); 4 is middle stages of which the last sends to a slow network, 5 first and middle ones.
    ``receivers``, ``to_slow``: rows of `receivers_of`, or no column where a machine may send to any, and where there is
    no slow network. ``fewest`` stages set the sequences in flight, ``most_stages`` the stages looked at; no machine has
    more than GPUs, which are the columns of ``held``. ``inner`` is scratch of (GPUs + 1, GPUs + 1). Returns limits on x
    and y, no larger, within which the machines hold as much.
    """
    degree = arrays.degree
    tight_x = tight_y = 0.0
    columns = min(most_stages, held.shape[2] - 1)
    caps = np.empty((degree.size, 8), np.int64)
    for p in range(counts.size):
        if counts[p] == 0:
            continue
        a, b = arrays.first_option[p], arrays.first_option[p + 1]
        own_x, own_y = _fill_caps(arrays, p, receivers, to_slow, node, fewest, x, y, both, caps)
        tight_x, tight_y = max(tight_x, own_x), max(tight_y, own_y)
        g, fixed = arrays.gpus[p], arrays.fixed_stages[p]
        most = min(most_stages, g)
        _fill_inner(degree, caps, a, b, g, most, inner)
        for f in range(6):
            for s in range(columns + 1):
                held[p, f, s] = -1
        for s in range(1, most + 1):
            if fixed > 0 and s != fixed:
                continue
            for o in range(a, b):
                d = degree[o]
                if d > g:
                    continue
                for v, f in ((1, 0), (6, 4), (4, 2)):
                    if caps[o, v] >= 0 and inner[g - d, s - 1] >= 0:
                        held[p, f, s] = max(held[p, f, s], caps[o, v] + inner[g - d, s - 1])
                if s == 1:
                    held[p, 1, s] = max(held[p, 1, s], caps[o, 3])
                    held[p, 3, s] = max(held[p, 3, s], caps[o, 5])
                    held[p, 5, s] = max(held[p, 5, s], caps[o, 7])
                elif caps[o, 2] >= 0:
                    for q in range(a, b):
                        left = g - d - degree[q]
                        if left < 0 or inner[left, s - 2] < 0:
                            continue
                        for v, f in ((1, 1), (6, 5), (4, 3)):
                            if caps[q, v] >= 0:
                                held[p, f, s] = max(held[p, f, s], caps[o, 2] + caps[q, v] + inner[left, s - 2])
        if fixed == 0:
            # More stages than help are as many as do.
            for f in range(6):
                for s in range(1, columns + 1):
                    held[p, f, s] = max(held[p, f, s], held[p, f, s - 1])
    return tight_x, tight_y


# Ways in which machines behind slow and fast networks stand: any; slow before fast; slow alone; fast alone; or else
# some machine behind a fast network sends to one behind a slow one.
ANY, SLOW_FIRST, SLOW_ALONE, FAST_ALONE, FAST_TO_SLOW = range(5)


@njit(cache=True, error_model="numpy", inline="always")
def allowed(flag: int, slow: bool, way: int) -> bool:
    """Whether a machine may hold ends like this in a way of standing."""
    if way == FAST_TO_SLOW:
        return True
    if flag > 3 or (way == SLOW_ALONE and not slow) or (way == FAST_ALONE and slow):
        return False
    if way == SLOW_FIRST:
        return flag == 0 or (flag == 1 and slow) or (flag == 2 and not slow)
    return True


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def covers(
    machines: IntArray,
    held: IntArray,
    depth: int,
    count_stages: bool,
    best: IntArray,
    needed: int,
    slow: NDArray[np.bool_],
    mixed: bool,
) -> bool:
    """Whether these machines, some of which may stay out, hold ``needed`` units as one pipeline of ``depth`` stages.

    Or of fewer. ``machines``: pool of each. ``best`` is scratch of (8, stages + 1). ``mixed``: some are behind slow
    networks, some not.
    """
    for way in range(ANY, FAST_TO_SLOW + 1):
        holds = _covers(machines, held, depth, count_stages, best, needed, slow, way)
        # However they stand comes first, and is all there is to ask where networks are alike.
        if way == ANY and holds and mixed:
            continue
        if way == ANY or holds:
            return bool(holds)
    return False


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _covers(
    machines: IntArray,
    held: IntArray,
    depth: int,
    count_stages: bool,
    best: IntArray,
    needed: int,
    slow: NDArray[np.bool_],
    way: int,
) -> bool:
    # As if stages were not counted: that alone rules most out, and decides where there are stages enough.
    kinds, states = (6, 8) if way == FAST_TO_SLOW else (4, 4)
    for state in range(states):
        best[state, 0] = -1
    best[0, 0] = 0
    top_stages = min(depth, held.shape[2] - 1)
    useful = 0
    tops = np.empty(6, np.int64)
    for p in machines:
        deepest = 0
        for f in range(kinds):
            tops[f] = -1
            if not allowed(f, slow[p], way):
                continue
            for s in range(1, top_stages + 1):
                if held[p, f, s] > tops[f]:
                    tops[f] = held[p, f, s]
                    deepest = max(deepest, s)
        useful += deepest
        for state in range(states - 1, -1, -1):
            top = best[state, 0]
            for f in range(kinds):
                # What a flag adds to a state: 4 and 5 have sent to a slow network.
                if f & state == f and tops[f] >= 0 and best[state - f, 0] >= 0:
                    top = max(top, best[state - f, 0] + tops[f])
            best[state, 0] = top
    if best[states - 1, 0] < needed:
        return False
    if not count_stages or useful <= depth:
        return True
    for used in range(depth + 1):
        for state in range(states):
            best[state, used] = -1
        best[0, used] = 0
    # What a machine may hold: its flags, stages and units, where another stage holds more.
    ways = np.empty((6 * depth, 3), np.int64)
    last = -1
    count = 0
    for p in machines:
        if p != last:
            count = 0
            last = p
            for f in range(kinds):
                if not allowed(f, slow[p], way):
                    continue
                most = -1
                for s in range(1, top_stages + 1):
                    if held[p, f, s] > most:
                        most = held[p, f, s]
                        ways[count, 0] = f
                        ways[count, 1] = s
                        ways[count, 2] = most
                        count += 1
        for used in range(depth, 0, -1):
            for i in range(count):
                f, before, units = ways[i, 0], used - ways[i, 1], ways[i, 2]
                if before < 0:
                    continue
                for state in range(f, states):
                    if f & state == f and best[state - f, before] >= 0:
                        best[state, used] = max(best[state, used], best[state - f, before] + units)
    return bool(best[states - 1, depth] >= needed)
