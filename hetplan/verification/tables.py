"""What stages take, as arrays that compiled code reads, and the room that limits leave a stage for layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

# What a stage sends and holds beside its layers: a middle stage that sends inside its node or to another one, a first
# stage likewise, the last stage, a pipeline's only stage.
MIDDLE_INSIDE, MIDDLE_OUTSIDE, FIRST_INSIDE, FIRST_OUTSIDE, LAST, ONLY = range(6)
ROLE_COUNT = 6
# What is limited in a stage: prefill, decode, both together; bytes, and bytes with the longest request.
LIMIT_COUNT = 5
_PREFILL, _DECODE, _BOTH, _BYTES, _LONGEST = range(LIMIT_COUNT)
# Rounding of sums in another order never rules out a stage that fits exactly.
_LENIENT = 1e-11


class Tables(NamedTuple):
    """Least times of options (a machine type's group of some degree) over intervals of batches, and their memory.

    Intervals are nodes of a binary tree: 1 is the root, i has children 2 i and 2 i + 1, ``leaves + b - 1`` is batch b
    alone. Times are seconds per request. O options, T machine types, K kinds of layers, R roles, V nodes.
    """

    seconds: FloatArray  # (2, O, K + R, V), phase first: of a layer of each kind, then of each role beside its layers
    bytes: FloatArray  # (3, O, K + R): of a layer, then the room of each role; of a sequence; with the longest request
    extra_s: FloatArray  # (2, T, T, V): of a send to another node of the second type, beyond the best type's
    options: IntArray  # (O, 2): machine type, degree
    types: IntArray  # (T, 2): GPUs, most sequences in flight
    layers_before: IntArray  # (N + 1, K + 1): of each kind, and units
    floors_s: (
        FloatArray  # (3, 5, V): least e2e, ttft, tpot of a batch's layers, and of a middle, first, last, only stage
    )
    limits_s: FloatArray  # (3,), infinite where there is none
    leaves: int
    ordered: bool  # it matters which machine follows which: sends differ by receiver, or layers by kind
    stages_per_machine: int  # 0: as many as its GPUs allow
    hard: bool
    penalty: float  # share of the worth lost for each whole excess over a limit
    micro_batches: bool  # n = b D sequences in flight; else n = b, and a request waits for the slowest stages alone
    decode_steps: float
    demand: float  # no pipeline is worth more


class Limits(NamedTuple):
    """What each stage of a pipeline keeps to. Seconds are per request; ``both_s`` may be infinite."""

    prefill_s: float
    decode_s: float
    both_s: float
    sequences: float


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def fill_room(
    tables: Tables,
    limits: Limits,
    option: int,
    role: int,
    node: int,
    extra_prefill_s: float,
    extra_decode_s: float,
    room: FloatArray,
) -> bool:
    """Fills ``room`` (5, K + 1): what a layer of each kind takes, and what limits leave for all; false for none."""
    kinds = tables.layers_before.shape[1] - 1
    extras = (extra_prefill_s, extra_decode_s)
    for column in range(kinds + 1):
        at = column if column < kinds else kinds + role
        for phase in range(2):
            room[phase, column] = tables.seconds[phase, option, at, node]
            if column == kinds:
                room[phase, column] += extras[phase]
        room[_BOTH, column] = room[_PREFILL, column] + room[_DECODE, column]
        value, sequence = tables.bytes[0, option, at], limits.sequences * tables.bytes[1, option, at]
        room[_LONGEST, column] = tables.bytes[2, option, at]
        if column < kinds:
            room[_BYTES, column] = value + sequence
        else:
            room[_BYTES, column] = value - sequence + _LENIENT * abs(value)
            room[_LONGEST, column] += _LENIENT * abs(value)
    room[_PREFILL, kinds] = limits.prefill_s * (1.0 + _LENIENT) - room[_PREFILL, kinds]
    room[_DECODE, kinds] = limits.decode_s * (1.0 + _LENIENT) - room[_DECODE, kinds]
    both_s = min(limits.both_s, limits.prefill_s + limits.decode_s)
    room[_BOTH, kinds] = both_s * (1.0 + _LENIENT) - room[_BOTH, kinds]
    # An infinite time leaves no room whatever the limit is; NaN compares false.
    some = True
    for i in range(LIMIT_COUNT):
        some = some and room[i, kinds] >= 0.0
    return some
