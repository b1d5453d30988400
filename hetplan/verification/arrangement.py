"""Decides whether given machines, in some order, hold all layers within limits.

A pipeline visits each machine once and fills a machine's stages side by side, so what is still possible depends on the
machines used, the one that is open, its free GPUs and the stages so far. Of two ways to get there the one that has
placed more layers is never worse: a stage that starts later never ends earlier, whatever kinds its layers are of.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetplan.verification.tables import (
    FIRST_INSIDE,
    FIRST_OUTSIDE,
    LAST,
    LIMIT_COUNT,
    MIDDLE_INSIDE,
    MIDDLE_OUTSIDE,
    ONLY,
    FloatArray,
    IntArray,
    Limits,
    Tables,
    fill_room,
)

# States looked at for one set of machines: some 50 ms, and 32 MB.
_MOST_STATES = 4_000_000
# What follows a stage: another one of its machine, the end, or a machine of each type.
_INSIDE, _END, _OUTSIDE = range(3)


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def too_many_arrangements(tables: Tables, type_count: IntArray, most: int) -> bool:
    """Whether it would take long to look at all arrangements of so many machines of each type."""
    states, taken, gpus = float(most), 0, 1
    for t in range(type_count.shape[0]):
        states *= type_count[t] + 1
        if type_count[t] > 0:
            taken += 1
            gpus = max(gpus, tables.types[t, 0])
    return states * taken * (gpus + 1) > _MOST_STATES


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _farthest(
    tables: Tables,
    limits: Limits,
    option: int,
    role: int,
    node: int,
    receiver: int,
    room: FloatArray,
    used: FloatArray,
    stops: IntArray,
) -> bool:
    """Fills ``stops`` (N + 1,): where a stage that starts at a layer stops at the latest; false if it holds none."""
    layers, kinds = stops.shape[0] - 1, tables.layers_before.shape[1] - 1
    prefill_s, decode_s = 0.0, 0.0
    if receiver >= 0:
        prefill_s = tables.extra_s[0, tables.options[option, 0], receiver, node]
        decode_s = tables.extra_s[1, tables.options[option, 0], receiver, node]
    for start in range(layers + 1):
        stops[start] = start
    if limits.sequences > tables.types[tables.options[option, 0], 1]:
        return False
    if not fill_room(tables, limits, option, role, node, prefill_s, decode_s, room):
        return False
    if kinds == 1:
        most = layers
        for i in range(LIMIT_COUNT):
            if room[i, 0] > 0.0:
                most = min(most, int(room[i, 1] / room[i, 0]))
        for start in range(layers + 1):
            stops[start] = min(layers, start + most)
        return bool(most > 0)
    for i in range(LIMIT_COUNT):
        used[i] = 0.0
    stop, some = 0, False
    for start in range(layers):
        while stop < layers:
            fits = True
            for i in range(LIMIT_COUNT):
                more = used[i]
                for kind in range(kinds):
                    more += room[i, kind] * (tables.layers_before[stop + 1, kind] - tables.layers_before[stop, kind])
                fits = fits and more <= room[i, kinds]
            if not fits:
                break
            for i in range(LIMIT_COUNT):
                for kind in range(kinds):
                    used[i] += room[i, kind] * (tables.layers_before[stop + 1, kind] - tables.layers_before[stop, kind])
            stop += 1
        stops[start] = stop
        if stop == start:
            stop += 1
            continue
        some = True
        for i in range(LIMIT_COUNT):
            for kind in range(kinds):
                used[i] -= room[i, kind] * (tables.layers_before[start + 1, kind] - tables.layers_before[start, kind])
    return some


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _all_stops(tables: Tables, limits: Limits, node: int, taken: IntArray) -> tuple[NDArray[np.bool_], IntArray]:
    """Of a middle and of a first stage, each option and what follows it: whether it holds any layer; `_farthest`."""
    layers, kinds = tables.layers_before.shape[0] - 1, tables.layers_before.shape[1] - 1
    options, follow = tables.options.shape[0], _OUTSIDE + len(taken)
    stops = np.zeros((2, options, follow, layers + 1), dtype=np.int64)
    usable = np.zeros((2, options, follow), dtype=np.bool_)
    room, used = np.empty((LIMIT_COUNT, kinds + 1)), np.empty(LIMIT_COUNT)
    for o in range(options):
        there = False
        for t in taken:
            there = there or t == tables.options[o, 0]
        if not there:
            continue
        for first in range(2):
            for after in range(follow):
                receiver = -1
                if after == _INSIDE:
                    role = FIRST_INSIDE if first else MIDDLE_INSIDE
                elif after == _END:
                    role = ONLY if first else LAST
                else:
                    role = FIRST_OUTSIDE if first else MIDDLE_OUTSIDE
                    receiver = taken[after - _OUTSIDE]
                usable[first, o, after] = _farthest(
                    tables, limits, o, role, node, receiver, room, used, stops[first, o, after]
                )
    return usable, stops


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _slowest(
    tables: Tables, taken: IntArray, node: int, came: IntArray, stage: int, entry: int, width: int
) -> tuple[float, float]:
    """The slowest prefill and decode of an arrangement, from its last stage back."""
    layers, kinds = tables.layers_before.shape[0] - 1, tables.layers_before.shape[1] - 1
    options, types = tables.options.shape[0], len(taken)
    slowest = np.zeros(2)
    stop, receiver, outside = layers, -1, False
    last = stage
    while stage >= 0:
        start = entry % (layers + 1)
        option = entry // (layers + 1) % options
        state = entry // (layers + 1) // options
        if stage == last:
            role = ONLY if stage == 0 else LAST
        elif outside:
            role = FIRST_OUTSIDE if stage == 0 else MIDDLE_OUTSIDE
        else:
            role = FIRST_INSIDE if stage == 0 else MIDDLE_INSIDE
        for phase in range(2):
            spent = tables.seconds[phase, option, kinds + role, node]
            if outside:
                spent += tables.extra_s[phase, tables.options[option, 0], receiver, node]
            for kind in range(kinds):
                held = tables.layers_before[stop, kind] - tables.layers_before[start, kind]
                spent += max(0, held) * tables.seconds[phase, option, kind, node]
            slowest[phase] = max(slowest[phase], spent)
        stage -= 1
        if stage >= 0:
            stop = start
            entry = came[stage, state]
            # Machines used and the open one's type stay the same inside a machine.
            before = entry // (layers + 1) // options
            outside = before // width // types != state // width // types
            receiver = taken[state // width % types]
    return slowest[0], slowest[1]


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _latest(stops: IntArray, start: int, fewest: int) -> int:
    """The latest layer up to ``start`` from which a stage holds any; -1 if none from ``fewest`` on.

    The stages before it give up what it cannot begin with.
    """
    while start >= fewest and stops[start] <= start:
        start -= 1
    return start if start >= fewest else -1


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def arrange(
    tables: Tables, type_count: IntArray, node: int, limits: Limits, fewest: int, most: int
) -> tuple[bool, float, float]:
    """Whether all the machines hold all layers in D1 to D2 stages within limits, and how slow such stages are.

    Parameters
    ----------
    tables : Tables
    type_count : (T,) int array
        Machines of each type, all of them to be used.
    node : int
        Of the tree of batches.
    limits : Limits
        Of every stage.
    fewest, most : int
        D1 and D2.

    Returns
    -------
    found, prefill_s, decode_s
        The slowest prefill and the slowest decode of the arrangement found, per request.

    Notes
    -----
    A stage that gives up layers for the next one may be left with none: what is found is then a bound, not a pipeline.
    """
    layers, options = tables.layers_before.shape[0] - 1, tables.options.shape[0]
    # Types that are there, the machines of each, and what one of them adds to the code of the machines used.
    taken = np.empty(type_count.shape[0], dtype=np.int64)
    types, codes, machines, width = 0, 1, 0, 0
    for t in range(type_count.shape[0]):
        if type_count[t] > 0:
            taken[types] = t
            types += 1
    taken = taken[:types]
    step = np.empty(types, dtype=np.int64)
    for t in range(types):
        step[t] = codes
        codes *= type_count[taken[t]] + 1
        machines += type_count[taken[t]]
        width = max(width, tables.types[taken[t], 0] + 1)
    fewest = max(fewest, machines)
    if fewest > most:
        return False, np.inf, np.inf
    usable, stops = _all_stops(tables, limits, node, taken)
    # A state is the machines used, the open one's type and its free GPUs; with it, layers placed or -1.
    states = codes * types * width
    reached, following = np.empty(states, dtype=np.int64), np.empty(states, dtype=np.int64)
    for state in range(states):
        reached[state] = -1
    # How a state after so many stages came about: the state before, the last stage's option and first layer.
    came = np.empty((most, states), dtype=np.int64)
    for t in range(types):
        reached[(step[t] * types + t) * width + tables.types[taken[t], 0]] = 0
    for stage in range(most):
        first = 1 if stage == 0 else 0
        for state in range(states):
            following[state] = -1
        for state in range(states):
            start = reached[state]
            if start < 0:
                continue
            left, t, code = state % width, state // width % types, state // width // types
            unopened = machines
            for other in range(types):
                unopened -= code // step[other] % (type_count[taken[other]] + 1)
            if unopened >= most - stage:
                continue
            for o in range(options):
                free = left - tables.options[o, 1]
                if tables.options[o, 0] != taken[t] or free < 0:
                    continue
                entry = (state * options + o) * (layers + 1)
                if usable[first, o, _INSIDE] and free > 0 and unopened + 1 < most - stage:
                    # Each of the stages to come holds a layer.
                    high = layers - max(unopened + 1, fewest - stage - 1)
                    begin = _latest(stops[first, o, _INSIDE], min(start, high - 1), stage)
                    then = state - tables.options[o, 1]
                    if begin >= 0 and min(high, stops[first, o, _INSIDE, begin]) > following[then]:
                        following[then] = min(high, stops[first, o, _INSIDE, begin])
                        came[stage, then] = entry + begin
                full = tables.stages_per_machine * tables.options[o, 1]
                if full > 0 and tables.types[taken[t], 0] - free != full:
                    continue
                if unopened == 0:
                    begin = min(start, layers - 1)
                    fits = usable[first, o, _END] and begin >= stage and stops[first, o, _END, begin] == layers
                    if fits and stage + 1 >= fewest:
                        prefill_s, decode_s = _slowest(tables, taken, node, came, stage, entry + begin, width)
                        return True, prefill_s, decode_s
                    continue
                for other in range(types):
                    if code // step[other] % (type_count[taken[other]] + 1) == type_count[taken[other]]:
                        continue
                    if usable[first, o, _OUTSIDE + other]:
                        high = layers - max(unopened, fewest - stage - 1)
                        begin = _latest(stops[first, o, _OUTSIDE + other], min(start, high - 1), stage)
                        then = ((code + step[other]) * types + other) * width + tables.types[taken[other], 0]
                        if begin >= 0 and min(high, stops[first, o, _OUTSIDE + other, begin]) > following[then]:
                            following[then] = min(high, stops[first, o, _OUTSIDE + other, begin])
                            came[stage, then] = entry + begin
        reached, following = following, reached
    return False, np.inf, np.inf
