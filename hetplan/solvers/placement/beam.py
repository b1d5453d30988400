"""Algorithm 1 of ShuntServe as one compiled loop over tables.

A candidate is its last stage, the row of the candidate it extends, and what later stages need: the
smallest stage capacity, the GPUs left in the open machine of each pool, the cost, a hash of its
multiset of options. Complexity: O(N^2 / 2 * S * k * O) candidates, each timed over its at most S
stages and K kinds, so O(N^2 S^2 k O K) time and O(N S k) memory.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hetplan.estimator.base import FloatArray
from hetplan.solvers.placement.tables import IntArray


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
    long = 0.0
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


@njit(cache=True, error_model="numpy")
def beam_search(
    width: int,
    max_stages: int,
    per_cost: bool,
    micro_batches: bool,
    batch_cap: int,
    prefix: IntArray,
    option_pool: IntArray,
    option_gpus: IntArray,
    pool_count: IntArray,
    pool_gpus: IntArray,
    pool_price: FloatArray,
    layer_s: FloatArray,
    end_s: FloatArray,
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
    ``penalty`` is gamma of eq. 7, infinite for hard limits, which complete pipelines must keep.
    Candidates of equal score keep the order in which they were found, as in the literal algorithm.
    """
    layers = prefix.shape[0] - 1
    kinds = prefix.shape[1]
    options = option_pool.size
    pools = pool_count.size
    top = layer_s.shape[3] - 1

    # A candidate is a row: its rank among those of the same (layers placed, stages), and its last stage.
    per_layer = (max_stages + 1) * width
    rows = (layers + 1) * per_layer
    found = np.zeros((layers + 1, max_stages + 1), np.int64)
    score = np.zeros(rows)
    cost = np.zeros(rows)
    # fits, multiset, option, first layer, parent row, whether the boundary before it is inside a node.
    state = np.zeros((rows, 6), np.int64)
    # Machines opened, then GPUs free in the open machine, of each pool.
    held = np.zeros((rows, 2 * pools), np.int64)

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
                    for o in range(options):
                        pool = option_pool[o]
                        gpus = option_gpus[o]
                        in_open = held[parent, pools + pool] >= gpus
                        if not in_open and held[parent, pool] >= pool_count[pool]:
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
                        chain[s, 3] = 1 if s > 0 and in_open and option_pool[chain[s - 1, 0]] == pool else 0

                        # Eq. 5 over the stages of the candidate, with the new batch.
                        slow_p = 0.0
                        slow_d = 0.0
                        sum_both = 0.0
                        sum_alone = 0.0
                        for j in range(s + 1):
                            u = chain[j, 0]
                            end_role = (1 if j == 0 else 0) + (2 if complete and j == s else 0)
                            p = end_s[u, end_role, 0, batch]
                            d = end_s[u, end_role, 1, batch]
                            alone = end_s[u, end_role, 0, 1]
                            for k in range(kinds):
                                n = prefix[chain[j, 2], k] - prefix[chain[j, 1], k]
                                p += n * layer_s[u, 0, k, batch]
                                d += n * layer_s[u, 1, k, batch]
                                alone += n * layer_s[u, 0, k, 1]
                            if j < s:
                                send = send_index[option_pool[u], option_pool[chain[j + 1, 0]], chain[j + 1, 3]]
                                p += send_s[send, 0, batch]
                                d += send_s[send, 1, batch]
                                alone += send_s[send, 0, 1]
                            slow_p = max(slow_p, p)
                            slow_d = max(slow_d, d)
                            sum_both += p + d
                            sum_alone += alone
                        value = batch / (slow_p + slow_d)
                        if penalty > 0.0:
                            ttft = sum_alone if micro_batches else slow_p
                            latency = sum_both if micro_batches else slow_p + slow_d
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
                        price = cost[parent] if in_open else cost[parent] + pool_price[pool]
                        if per_cost:
                            value /= price

                        # Keep the best of each multiset of options, and the best ``width`` of those.
                        identity = state[parent, 1] + option_hash[o]
                        first = high * per_layer + (s + 1) * width
                        count = found[high, s + 1]
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
                            for i in range(6):
                                state[first + at, i] = state[first + at - 1, i]
                            for i in range(2 * pools):
                                held[first + at, i] = held[first + at - 1, i]
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
                        for i in range(2 * pools):
                            held[row, i] = held[parent, i]
                        if in_open:
                            held[row, pools + pool] -= gpus
                        else:
                            held[row, pool] += 1
                            held[row, pools + pool] = pool_gpus[pool] - gpus

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
