"""Machines in order, with the layers of each stage: what the counting of `covering` leaves open.

Within limits on every stage's prefill and decode seconds, at a batch and a number of stages, dynamic
programming over the machines used finds how far the layers get: a stage takes all the layers it can, since a
later start never ends earlier. Sends are known, as a state says where the next stage stands.

Where every machine has to have so many stages, a stage must leave a layer to each that follows, and how many follow
depends on the machines that stay out. So all stages given are used there, and callers ask for each number of them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hetplan.estimator.base import FloatArray
from hetplan.solvers.placement.covering import Arrays, Seconds
from hetplan.solvers.placement.tables import IntArray


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _reach(
    prefix: IntArray,
    layer_s: FloatArray,
    weights: FloatArray,
    sequence: FloatArray,
    longest: FloatArray,
    option: int,
    batch: int,
    start: int,
    stop: int,
    left_x: float,
    left_y: float,
    left_both: float,
    n: int,
    free: float,
    end_sequence: float,
) -> int:
    """The last layer + 1 that a stage from ``start`` holds, at most ``stop``; ``start`` when it holds none.

    ``left_x``, ``left_y``, ``left_both`` are seconds for layers, ``free`` bytes for them with n sequences, each of
    which takes ``end_sequence`` beside them. The arrays are fields of ``Arrays``, but ``layer_s`` of ``Seconds``.
    """
    low, high = start, stop
    while low < high:
        middle = (low + high + 1) // 2
        x = y = bytes_held = typical = long = 0.0
        for k in range(prefix.shape[1]):
            count = prefix[middle, k] - prefix[start, k]
            x += count * layer_s[option, 0, k, batch]
            y += count * layer_s[option, 1, k, batch]
            bytes_held += count * weights[option, k]
            typical += count * sequence[option, k]
            long += count * longest[option, k]
        room = free - bytes_held
        fits = x <= left_x and y <= left_y and x + y <= left_both and room > 0 and room >= long + end_sequence
        # As the estimator counts: whole sequences.
        if fits and typical + end_sequence > 0:
            fits = np.floor(room / (typical + end_sequence)) >= n
        if fits:
            low = middle
        else:
            high = middle - 1
    return low


@njit(cache=True, error_model="numpy", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def arrange(
    arrays: Arrays, seconds: Seconds, counts: IntArray, batch: int, stages: int, x: float, y: float, both: float
) -> tuple[IntArray, float, float]:
    """Place all layers on some machines within limits.

    Parameters
    ----------
    arrays : Arrays
    seconds : Seconds
    counts : (P,) int
        Machines of each pool.
    batch : int
        Sequences in a micro-batch.
    stages : int
        Most stages, which set the sequences in flight. Exactly as many as whole machines of them have, where machines
        have to have so many.
    x, y, both : float
        Seconds per request that a stage may spend in prefill, in decode and in both.

    Returns
    -------
    placed : (S, 4) int
        Option, first layer, end layer and machine of each stage; empty when there is no way.
    slowest_x, slowest_y : float
        What its slowest stages spend.
    """
    gpus, fixed, first_option, degree = arrays.gpus, arrays.fixed_stages, arrays.first_option, arrays.degree
    prefix, weights, sequence, longest = arrays.prefix, arrays.weight_bytes, arrays.sequence_bytes, arrays.longest_bytes
    room, end_sequence = arrays.room_bytes, arrays.end_sequence_bytes
    layer_s, end_s, send_s, send_rows = seconds
    layers, kinds = prefix.shape[0] - 1, prefix.shape[1]
    # The pools of which there are machines, and what one machine of theirs adds to the number of a state.
    pools, stride = np.empty(gpus.size, np.int64), np.empty(gpus.size, np.int64)
    width = most_gpus = 0
    total = 1
    for p in range(gpus.size):
        if counts[p] > 0:
            pools[width] = p
            stride[width] = total
            width += 1
            total *= counts[p] + 1
            most_gpus = max(most_gpus, gpus[p])
    n = batch * stages if arrays.micro_batches else batch
    # Within an engine's limits all machines have as many stages.
    whole = arrays.micro_batches and fixed.max() > 0
    if whole:
        stages -= stages % fixed.max()
    limit_x = x * batch * (1 + 1e-12)
    limit_y = y * batch * (1 + 1e-12)
    limit_both = both * batch * (1 + 1e-12)
    # How far layers got when the next stage stands on a new machine of pool q; or on the same machine with some GPUs.
    outside = np.empty((total, width, stages + 1), np.int64)
    inside = np.empty((total, width, most_gpus + 1, stages + 1), np.int64)
    for u in range(total):
        for t in range(width):
            for s in range(stages + 1):
                outside[u, t, s] = 0 if u == 0 and s == 0 else -1
                for left in range(most_gpus + 1):
                    inside[u, t, left, s] = -1
    # The stage before, where there is one: its option, and the GPUs left before it (-1: it opened its machine).
    came_out = np.empty((total, width, stages + 1, 2), np.int64)
    came_in = np.empty((total, width, most_gpus + 1, stages + 1, 2), np.int64)
    end_u = end_stages = end_option = end_left = -1
    for u in range(total):
        for phase in range(2):
            # First the machines that are open, from most GPUs left to fewest; then new ones.
            for t in range(width):
                p = pools[t]
                if phase == 1 and (u // stride[t]) % (counts[p] + 1) == counts[p]:
                    continue
                for left in range(gpus[p], 0 if phase == 0 else gpus[p] - 1, -1):
                    for s in range(stages):
                        start = inside[u, t, left, s] if phase == 0 else outside[u, t, s]
                        if start < 0 or end_u >= 0:
                            continue
                        u_new = u if phase == 0 else u + stride[t]
                        for o in range(first_option[p], first_option[p + 1]):
                            if degree[o] > left or n > arrays.batch_limit[o]:
                                continue
                            after = left - degree[o]
                            # The last stage?
                            if (fixed[p] == 0 or after == 0) and (not whole or s + 1 == stages):
                                role = 2 + (1 if s == 0 else 0)
                                reached = _reach(
                                    prefix, layer_s, weights, sequence, longest, o, batch, start, layers,
                                    limit_x - end_s[o, role, 0, batch], limit_y - end_s[o, role, 1, batch],
                                    limit_both - end_s[o, role, 0, batch] - end_s[o, role, 1, batch],
                                    n, room[o, role], end_sequence[o, role],
                                )  # fmt: skip
                                if reached == layers and start < layers:
                                    end_u, end_stages, end_option = u_new, s + 1, o
                                    end_left = left if phase == 0 else -1
                                    break
                            if s + 1 >= stages:
                                continue
                            role = 1 if s == 0 else 0
                            # The stages that are to come hold a layer each: all, or those on this machine and the last.
                            stop = layers - max(1, after // degree[o] if fixed[p] > 0 else 0)
                            if whole:
                                stop = layers - (stages - s - 1)
                            for r in range(-1, width):
                                if r < 0:
                                    if after == 0:
                                        continue
                                    row = send_rows[p, p, 1]
                                else:
                                    if fixed[p] > 0 and after > 0:
                                        continue
                                    q = pools[r]
                                    if (u_new // stride[r]) % (counts[q] + 1) == counts[q]:
                                        continue
                                    row = send_rows[p, q, 0]
                                reached = _reach(
                                    prefix, layer_s, weights, sequence, longest, o, batch, start, stop,
                                    limit_x - end_s[o, role, 0, batch] - send_s[row, 0, batch],
                                    limit_y - end_s[o, role, 1, batch] - send_s[row, 1, batch],
                                    limit_both - end_s[o, role, 0, batch] - end_s[o, role, 1, batch]
                                    - send_s[row, 0, batch] - send_s[row, 1, batch],
                                    n, room[o, role], end_sequence[o, role],
                                )  # fmt: skip
                                if reached <= start:
                                    continue
                                if r < 0 and reached > inside[u_new, t, after, s + 1]:
                                    inside[u_new, t, after, s + 1] = reached
                                    came_in[u_new, t, after, s + 1, 0] = o
                                    came_in[u_new, t, after, s + 1, 1] = left if phase == 0 else -1
                                elif r >= 0 and reached > outside[u_new, r, s + 1]:
                                    outside[u_new, r, s + 1] = reached
                                    came_out[u_new, r, s + 1, 0] = o
                                    came_out[u_new, r, s + 1, 1] = left if phase == 0 else -1
                        if end_u >= 0:
                            break
    if end_u < 0:
        return np.empty((0, 4), np.int64), 0.0, 0.0
    placed = np.empty((end_stages, 4), np.int64)
    u, o, left, stop = end_u, end_option, end_left, layers
    t = 0
    for s in range(end_stages - 1, -1, -1):
        placed[s, 0] = o
        placed[s, 2] = stop
        # Whether it opened its machine, for now.
        placed[s, 3] = 1 if left < 0 else 0
        for i in range(width):
            if first_option[pools[i]] <= o < first_option[pools[i] + 1]:
                t = i
        if left < 0:
            u -= stride[t]
            stop = outside[u, t, s]
            if s > 0:
                o, left = came_out[u, t, s, 0], came_out[u, t, s, 1]
        else:
            stop = inside[u, t, left, s]
            o, left = came_in[u, t, left, s, 0], came_in[u, t, left, s, 1]
        placed[s, 1] = stop
    machine = -1
    slowest_x = slowest_y = 0.0
    for s in range(end_stages):
        machine += placed[s, 3]
        placed[s, 3] = machine
    for s in range(end_stages):
        o = placed[s, 0]
        role = (1 if s == 0 else 0) + (2 if s == end_stages - 1 else 0)
        spent_x, spent_y = end_s[o, role, 0, batch], end_s[o, role, 1, batch]
        for k in range(kinds):
            count = prefix[placed[s, 2], k] - prefix[placed[s, 1], k]
            spent_x += count * layer_s[o, 0, k, batch]
            spent_y += count * layer_s[o, 1, k, batch]
        if s < end_stages - 1:
            p = q = 0
            for i in range(gpus.size):
                if first_option[i] <= o < first_option[i + 1]:
                    p = i
                if first_option[i] <= placed[s + 1, 0] < first_option[i + 1]:
                    q = i
            row = send_rows[p, q, 1 if placed[s + 1, 3] == placed[s, 3] else 0]
            spent_x += send_s[row, 0, batch]
            spent_y += send_s[row, 1, batch]
        slowest_x = max(slowest_x, spent_x)
        slowest_y = max(slowest_y, spent_y)
    return placed, slowest_x / batch, slowest_y / batch
