"""Algorithm 1 of ShuntServe as one compiled loop over tables.

A candidate is its last stage, the row of the candidate it extends, and what later stages need: the
smallest stage capacity, the machines opened of each pool, the GPUs left on the last one, the cost, a hash of
its multiset of options. Complexity: O(N^2 / 2 * S * k * O) candidates, each timed over its at most S
stages and K kinds, so O(N^2 S^2 k O K) time and O(N S k) memory.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hetplan.estimator.base import FloatArray
from hetplan.solvers.placement.tables import IntArray, StageTables

# Slack on the throughput below which a candidate is dropped early, so that rounding never drops an equal one.
_ROUNDING = 1e-12


def pack_seconds(tables: StageTables) -> tuple[FloatArray, FloatArray]:
    """The tables as the search walks them: everything of one batch and option side by side.

    Returns
    -------
    stage_s : (B + 1, O, 2 K + 8) float
        Prefill and decode seconds of each layer kind, then of each role's ends.
    send_s : (B + 1, sends, 2) float
    """
    options, _, kinds, batches = tables.layer_s.shape
    stage_s = np.empty((batches, options, 2 * kinds + 8))
    for o in range(options):
        stage_s[:, o, : 2 * kinds] = tables.layer_s[o].swapaxes(0, 1).reshape(2 * kinds, batches).T
        stage_s[:, o, 2 * kinds :] = tables.end_s[o].reshape(8, batches).T
    return stage_s, np.ascontiguousarray(np.moveaxis(tables.send_s, 2, 0))


@njit(cache=True, error_model="numpy")
def _capacity(
    option: int,
    role: int,
    low: int,
    high: int,
    prefix: IntArray,
    room: IntArray,
    weights: IntArray,
    sequence: FloatArray,
    longest: FloatArray,
    end_sequence: FloatArray,
    limit: IntArray,
) -> int:
    """Eq. 6 for one stage: sequences in flight that fit, zero when the longest request does not."""
    free = room[option, role]
    typical = end_sequence[option, role]
    long = end_sequence[option, role]
    for k in range(prefix.shape[1]):
        n = prefix[high, k] - prefix[low, k]
        free -= n * weights[option, k]
        typical += n * sequence[option, k]
        long += n * longest[option, k]
    if free < long or free <= 0:
        return 0
    if typical <= 0.0:
        return int(limit[option])
    return min(int(free // typical), int(limit[option]))


@njit(cache=True, error_model="numpy", inline="always")
def _seconds(
    stage_s: FloatArray, prefix: IntArray, batch: int, option: int, role: int, low: int, high: int
) -> tuple[float, float]:
    """Prefill and decode seconds of a stage, its send apart."""
    kinds = prefix.shape[1]
    p = stage_s[batch, option, 2 * kinds + 2 * role]
    d = stage_s[batch, option, 2 * kinds + 2 * role + 1]
    first = high - low
    for k in range(1, kinds):
        n = prefix[high, k] - prefix[low, k]
        first -= n
        p += n * stage_s[batch, option, 2 * k]
        d += n * stage_s[batch, option, 2 * k + 1]
    p += first * stage_s[batch, option, 0]
    d += first * stage_s[batch, option, 1]
    return p, d


@njit(cache=True, error_model="numpy")
def beam_search(
    width: int,
    max_stages: int,
    per_cost: bool,
    micro_batches: bool,
    fill_nodes: bool,
    batch_cap: int,
    prefix: IntArray,
    option_pool: IntArray,
    option_gpus: IntArray,
    pool_count: IntArray,
    pool_gpus: IntArray,
    pool_price: FloatArray,
    stage_s: FloatArray,
    send_s: FloatArray,
    send_index: IntArray,
    room: IntArray,
    weights: IntArray,
    sequence: FloatArray,
    longest: FloatArray,
    end_sequence: FloatArray,
    limit: IntArray,
    option_hash: IntArray,
    penalty: float,
    ttft_limit: float,
    tpot_limit: float,
    latency_limit: float,
    decode_steps: float,
) -> tuple[float, IntArray, int]:
    """Search one pipeline over all layers.

    Returns
    -------
    score : float
        Of the best complete pipeline, minus infinity when there is none.
    stages : (S, 2) int
        Option and first layer of each stage.
    evaluations : int
        Candidates whose throughput was computed or whose batch was found to be zero.

    Notes
    -----
    ``stage_s`` and ``send_s`` are laid out by `pack_seconds`. ``penalty`` is gamma of eq. 7, infinite for
    hard limits, which complete pipelines must keep. A machine's stages follow one another: a stage joins the
    machine of the stage before it where it is of that pool and fits, and opens one otherwise; what is left of the
    old one stays idle. With ``fill_nodes`` nothing does: stages use the whole of what ``pool_gpus`` grants.
    Candidates of equal score keep the order in which they were found, as in the literal algorithm. A
    candidate is dropped as soon as the stages timed so far show that it cannot enter a full list.
    """
    layers = prefix.shape[0] - 1
    options = option_pool.size
    pools = pool_count.size
    top = stage_s.shape[0] - 1

    # A candidate is a row: its rank among those of the same (layers placed, stages), and its last stage.
    per_layer = (max_stages + 1) * width
    rows = (layers + 1) * per_layer
    found = np.zeros((layers + 1, max_stages + 1), np.int64)
    score = np.zeros(rows)
    cost = np.zeros(rows)
    # fits, multiset, option, first layer, parent row, whether the boundary before it is inside a node, GPUs left.
    state = np.zeros((rows, 7), np.int64)
    # Machines opened of each pool.
    opened = np.zeros((rows, pools), np.int64)

    # The stages of the candidate that is being extended, first to last: option, first and end layer, inside.
    chain = np.zeros((max_stages + 1, 4), np.int64)

    found[0, 0] = 1
    state[0, 0] = top
    evaluations = 0
    for high in range(1, layers + 1):
        complete = high == layers
        # Eq. 6 for the new stage, for each first layer and option.
        capacity = np.zeros((high, options), np.int64)
        for low in range(high):
            role = (1 if low == 0 else 0) + (2 if complete else 0)
            for o in range(options):
                capacity[low, o] = _capacity(
                    o, role, low, high, prefix, room, weights, sequence, longest, end_sequence, limit
                )
        for low in range(high):
            role = (1 if low == 0 else 0) + (2 if complete else 0)
            for s in range(min(low, max_stages - 1) + 1):
                for c in range(found[low, s]):
                    parent = low * per_layer + s * width + c
                    row = parent
                    end = low
                    for j in range(s - 1, -1, -1):
                        chain[j, 0] = state[row, 2]
                        chain[j, 1] = state[row, 3]
                        chain[j, 2] = end
                        chain[j, 3] = state[row, 5]
                        end = state[row, 3]
                        row = state[row, 4]
                    older_batch = -1
                    older_p = 0.0
                    older_d = 0.0
                    older_sum = 0.0
                    last_pool = option_pool[chain[s - 1, 0]] if s > 0 else -1
                    idle = state[parent, 6]
                    for o in range(options):
                        pool = option_pool[o]
                        gpus = option_gpus[o]
                        in_open = pool == last_pool and idle >= gpus
                        free = idle if in_open else pool_gpus[pool]
                        # A machine is filled before the next is opened, and none is left half used.
                        if fill_nodes and ((idle > 0 and not in_open) or (complete and free != gpus)):
                            continue
                        if not in_open and opened[parent, pool] >= pool_count[pool]:
                            continue
                        evaluations += 1
                        fits = min(state[parent, 0], capacity[low, o])
                        batch = fits // (s + 1) if micro_batches else fits
                        batch = min(batch, batch_cap)
                        if batch <= 0:
                            continue
                        chain[s, 0] = o
                        chain[s, 1] = low
                        chain[s, 2] = high
                        chain[s, 3] = 1 if in_open else 0

                        price = cost[parent] if in_open else cost[parent] + pool_price[pool]
                        first = high * per_layer + (s + 1) * width
                        count = found[high, s + 1]
                        # Less throughput than this, and the candidate cannot beat the last of a full list.
                        needed = 0.0
                        if count == width:
                            needed = score[first + width - 1] * (1.0 - _ROUNDING)
                            if per_cost:
                                needed *= price

                        # Eq. 5 over the stages of the candidate, the new one first, with the new batch.
                        end_role = (1 if s == 0 else 0) + (2 if complete else 0)
                        slow_p, slow_d = _seconds(stage_s, prefix, batch, o, end_role, low, high)
                        if (slow_p + slow_d) * needed > batch:
                            continue
                        sum_both = slow_p + slow_d
                        if s > 0:
                            # All but the last of the older stages take the same time after any new stage.
                            if batch != older_batch:
                                older_batch = batch
                                older_p = 0.0
                                older_d = 0.0
                                older_sum = 0.0
                                for j in range(s - 1):
                                    p, d = _seconds(
                                        stage_s,
                                        prefix,
                                        batch,
                                        chain[j, 0],
                                        1 if j == 0 else 0,
                                        chain[j, 1],
                                        chain[j, 2],
                                    )
                                    send = send_index[
                                        option_pool[chain[j, 0]], option_pool[chain[j + 1, 0]], chain[j + 1, 3]
                                    ]
                                    p += send_s[batch, send, 0]
                                    d += send_s[batch, send, 1]
                                    older_p = max(older_p, p)
                                    older_d = max(older_d, d)
                                    older_sum += p + d
                            j = s - 1
                            p, d = _seconds(
                                stage_s, prefix, batch, chain[j, 0], 1 if j == 0 else 0, chain[j, 1], chain[j, 2]
                            )
                            send = send_index[option_pool[chain[j, 0]], pool, chain[s, 3]]
                            if send_s[batch, send, 0] == np.inf:
                                continue
                            p += send_s[batch, send, 0]
                            d += send_s[batch, send, 1]
                            slow_p = max(slow_p, p, older_p)
                            slow_d = max(slow_d, d, older_d)
                            sum_both += p + d + older_sum
                            if (slow_p + slow_d) * needed > batch:
                                continue
                        value = batch / (slow_p + slow_d)
                        if penalty > 0.0:
                            sum_alone = 0.0
                            for j in range(s + 1):
                                end_role = (1 if j == 0 else 0) + (2 if complete and j == s else 0)
                                p, d = _seconds(stage_s, prefix, 1, chain[j, 0], end_role, chain[j, 1], chain[j, 2])
                                sum_alone += p
                                if j < s:
                                    send = send_index[
                                        option_pool[chain[j, 0]], option_pool[chain[j + 1, 0]], chain[j + 1, 3]
                                    ]
                                    sum_alone += send_s[1, send, 0]
                            latency = sum_both if micro_batches else slow_p + slow_d
                            ttft = sum_alone if micro_batches else slow_p
                            if decode_steps == 0:
                                ttft = latency
                            excess = max(ttft / ttft_limit, latency / latency_limit)
                            if decode_steps > 0:
                                excess = max(excess, (latency - ttft) / decode_steps / tpot_limit)
                            excess -= 1.0
                            if excess > 0.0:
                                if penalty == np.inf:
                                    if complete:
                                        continue
                                else:
                                    value *= 1.0 - penalty * excess
                        if per_cost:
                            value /= price

                        # Keep the best of each multiset of options, and the best ``width`` of those.
                        identity = state[parent, 1] + option_hash[o]
                        at = 0
                        while at < count and state[first + at, 1] != identity:
                            at += 1
                        if at < count:
                            if not value > score[first + at]:
                                continue
                        elif count < width:
                            found[high, s + 1] = count + 1
                        else:
                            at = count - 1
                            if not value > score[first + at]:
                                continue
                        while at > 0 and score[first + at - 1] < value:
                            score[first + at] = score[first + at - 1]
                            cost[first + at] = cost[first + at - 1]
                            for i in range(7):
                                state[first + at, i] = state[first + at - 1, i]
                            for i in range(pools):
                                opened[first + at, i] = opened[first + at - 1, i]
                            at -= 1
                        row = first + at
                        score[row] = value
                        cost[row] = price
                        state[row, 0] = fits
                        state[row, 1] = identity
                        state[row, 2] = o
                        state[row, 3] = low
                        state[row, 4] = parent
                        state[row, 5] = chain[s, 3]
                        state[row, 6] = free - gpus
                        for i in range(pools):
                            opened[row, i] = opened[parent, i]
                        if not in_open:
                            opened[row, pool] += 1

    best = -np.inf
    best_row = 0
    best_s = 0
    for s in range(1, max_stages + 1):
        for c in range(found[layers, s]):
            row = layers * per_layer + s * width + c
            if score[row] > best:
                best = score[row]
                best_row = row
                best_s = s
    stages = np.zeros((best_s, 2), np.int64)
    for j in range(best_s - 1, -1, -1):
        stages[j, 0] = state[best_row, 2]
        stages[j, 1] = state[best_row, 3]
        best_row = state[best_row, 4]
    return best, stages, evaluations
