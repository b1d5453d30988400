"""How long an engine step takes, compiled: `PipelineTables` of all pipelines as plain arrays, and the look-up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetplan.estimator.step_tables import CONTEXT_STEP, FIRST_REACH, PROMPT_COUNTS, PROMPT_STEP, PipelineTables

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Clock(NamedTuple):
    """Tables of the stages of all pipelines; see `hetplan.estimator.step_tables` for their axes.

    Attributes
    ----------
    tokens_s, decode_s, prefill_s, floor_s, extra_s
        Layer tables, the first axis their number.
    layer, layers : (stages, kinds)
        Tables of a stage, -1 where it has fewer, and how many of its layers are of each.
    end_tokens_s, send_s, sampled_s, prefill_step_s
        Of each stage.
    prompt_counts : (K,) float
    """

    tokens_s: FloatArray
    decode_s: FloatArray
    prefill_s: FloatArray
    floor_s: FloatArray
    extra_s: FloatArray
    layer: IntArray
    layers: FloatArray
    end_tokens_s: FloatArray
    send_s: FloatArray
    sampled_s: FloatArray
    prefill_step_s: FloatArray
    prompt_counts: FloatArray


def make_clock(pipelines: Sequence[PipelineTables]) -> tuple[Clock, list[int]]:
    """The clock of several pipelines whose tables are of one size, and the number of each one's first stage."""
    layers = [table for tables in pipelines for table in tables.layers]
    stages, firsts, offset, begins = [], [], 0, 0
    for tables in pipelines:
        firsts.append(begins)
        begins += len(tables.stages)
        stages += [(stage, offset) for stage in tables.stages]
        offset += len(tables.layers)
    kinds = max(len(stage.layers) for stage, _ in stages)
    layer = np.full((len(stages), kinds), -1, dtype=np.int64)
    count = np.zeros((len(stages), kinds))
    for row, (stage, before) in enumerate(stages):
        for column, (number, layer_count) in enumerate(stage.layers):
            layer[row, column], count[row, column] = before + number, layer_count
    clock = Clock(
        tokens_s=np.stack([table.tokens_s for table in layers]),
        decode_s=np.stack([table.decode_s for table in layers]),
        prefill_s=np.stack([table.prefill_s for table in layers]),
        floor_s=np.array([table.floor_s for table in layers]),
        extra_s=np.array([table.extra_s for table in layers]),
        layer=layer,
        layers=count,
        end_tokens_s=np.stack([stage.tokens_s for stage, _ in stages]),
        send_s=np.stack([stage.send_s for stage, _ in stages]),
        sampled_s=np.stack([stage.sampled_s for stage, _ in stages]),
        prefill_step_s=np.array([stage.prefill_step_s for stage, _ in stages]),
        prompt_counts=np.array(PROMPT_COUNTS, dtype=np.float64),
    )
    return clock, firsts


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def stage_seconds(
    clock: Clock, stage: int, prompts: int, prompt_tokens: int, reach: float, sequences: int, context: float
) -> float:
    """Seconds of a step in a stage, its send apart.

    Parameters
    ----------
    prompts, prompt_tokens, reach : int, int, float
        Prompts in the step, their new tokens together, and the mean context before them.
    sequences, context : int, float
        Sequences that decode, and the mean of the tokens before theirs.
    """
    tokens = prompt_tokens + sequences
    seconds = clock.end_tokens_s[stage, tokens] + clock.sampled_s[stage, prompts + sequences]
    if prompts > 0:
        seconds += clock.prefill_step_s[stage]
    for column in range(clock.layer.shape[1]):
        table = clock.layer[stage, column]
        if table < 0:
            break
        one = clock.tokens_s[table, tokens]
        if prompts > 0:
            one += _prefill_s(clock, table, float(prompts), prompt_tokens / prompts, reach)
        if sequences > 0:
            one += _decode_s(clock, table, sequences, context)
        if prompts > 0 and one < clock.floor_s[table]:
            one = clock.floor_s[table]
        seconds += clock.layers[stage, column] * (one + clock.extra_s[table])
    return float(seconds)


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _decode_s(clock: Clock, table: int, sequences: int, context: float) -> float:
    place = math.log(max(context, 1.0)) / CONTEXT_STEP
    low = min(int(place), clock.decode_s.shape[2] - 2)
    # Straight in the context itself, not in its logarithm.
    left, right = math.exp(CONTEXT_STEP * low), math.exp(CONTEXT_STEP * (low + 1))
    part = (max(context, 1.0) - left) / (right - left)
    row = clock.decode_s[table, sequences]
    return float(row[low] + part * (row[low + 1] - row[low]))


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _prefill_s(clock: Clock, table: int, prompts: float, length: float, reach: float) -> float:
    values = clock.prefill_s[table]
    k = 0
    while k < len(clock.prompt_counts) - 2 and clock.prompt_counts[k + 1] <= prompts:
        k += 1
    by_count = (prompts - clock.prompt_counts[k]) / (clock.prompt_counts[k + 1] - clock.prompt_counts[k])
    place = math.log(max(length, 1.0)) / PROMPT_STEP
    p = max(min(int(place), values.shape[1] - 2), 0)
    left, right = math.exp(PROMPT_STEP * p), math.exp(PROMPT_STEP * (p + 1))
    by_length = (max(length, 1.0) - left) / (right - left)
    if reach < FIRST_REACH:
        c, by_reach = 0, reach / FIRST_REACH
    else:
        c = min(1 + int(math.log2(reach / FIRST_REACH)), values.shape[2] - 2)
        low = FIRST_REACH * 2.0 ** (c - 1)
        by_reach = (reach - low) / low
    seconds = 0.0
    for i, share_i in ((k, 1 - by_count), (k + 1, by_count)):
        for j, share_j in ((p, 1 - by_length), (p + 1, by_length)):
            for m, share_m in ((c, 1 - by_reach), (c + 1, by_reach)):
                seconds += share_i * share_j * share_m * values[i, j, m]
    return float(seconds)
