"""One replica under each schedule: a static batch, sequences kept in flight, or a closed loop of clients.

All three are composed of engine steps. With S stages, S micro-batches are in flight: a step of all of them
takes S times the slowest stage, and no less than a way through all stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.estimator.base import FloatArray
from hetplan.estimator.calibrated import CalibratedEstimator, StepWork, step_work
from hetplan.estimator.pipeline import StageShape
from hetplan.problem.placement import PlacementProblem


@dataclass(frozen=True, slots=True)
class ReplicaTimes:
    """(N,) seconds of a request's first token, of each later one, and of all; and tokens per second of the replica."""

    ttft_s: FloatArray
    tpot_s: FloatArray
    latency_s: FloatArray
    output_tokens_per_s: FloatArray


def static_batch(
    problem: PlacementProblem,
    estimator: CalibratedEstimator,
    stages: Sequence[StageShape],
    batch: FloatArray,
    input_tokens: FloatArray,
    output_tokens: FloatArray,
) -> ReplicaTimes:
    """A batch that starts and ends together: one prefill of all prompts, then decode steps at their mean context."""
    ttft = through(problem, estimator, stages, step_work(prompts=batch, prompt_tokens=input_tokens)).sum(axis=0)
    context = input_tokens + output_tokens / 2
    steps = np.maximum(output_tokens - 1, 0.0)
    tpot = through(problem, estimator, stages, step_work(sequences=batch, context=context)).sum(axis=0)
    tpot = np.where(steps > 0, tpot, 0.0)
    latency = ttft + steps * tpot
    return ReplicaTimes(ttft, tpot, latency, batch * output_tokens / latency)


def in_flight(
    problem: PlacementProblem,
    estimator: CalibratedEstimator,
    stages: Sequence[StageShape],
    batch: FloatArray,
    input_tokens: FloatArray,
    output_tokens: FloatArray,
) -> ReplicaTimes:
    """``batch`` sequences kept in flight from a queue that never ends, all of the same lengths.

    Sequences that started together end together, so their successors' prompts come together too: they fill
    steps up to the engine's token limit, beside the decoding of the others; the other steps only decode. Where
    prompts alone need more steps than a sequence has tokens, fewer sequences decode at a time.
    """
    share = _micro_batch(problem, batch, len(stages))
    room = _room(problem, share)
    filling = share * input_tokens / room
    decoding = share * np.minimum(1.0, output_tokens / np.maximum(filling, 1e-12))
    context = input_tokens + output_tokens / 2
    prompts = np.minimum(room / input_tokens, share)
    filling = share / prompts
    mixed = _round(
        problem,
        estimator,
        stages,
        step_work(
            prompts=prompts,
            prompt_tokens=input_tokens,
            sequences=np.maximum(decoding - np.minimum(prompts, decoding), 0.0),
            context=context,
        ),
    )
    plain = _round(problem, estimator, stages, step_work(sequences=share, context=context))
    cycle = filling * mixed + np.maximum(output_tokens - filling, 0.0) * plain
    in_all = share * len(stages)
    tpot = cycle / np.maximum(output_tokens, filling)
    ttft = mixed
    latency = ttft + tpot * np.maximum(output_tokens - 1, 0.0)
    return ReplicaTimes(ttft, tpot, latency, in_all * output_tokens / cycle)


def closed_loop(
    problem: PlacementProblem,
    estimator: CalibratedEstimator,
    stages: Sequence[StageShape],
    batch: FloatArray,
    input_tokens: FloatArray,
    output_tokens: FloatArray,
    fits: FloatArray,
) -> ReplicaTimes:
    """``batch`` clients that each send the next request when the last is answered, in the steady state.

    Requests come one by one: each of a sequence's decode steps holds the prompt of another with the probability
    that one arrives in it. Clients beyond what fits wait their turn.
    """
    running = _micro_batch(problem, np.minimum(batch, np.maximum(fits, 1.0)), len(stages))
    room = _room(problem, running)
    per_step = running / output_tokens
    prompts = np.minimum(np.maximum(per_step, 1.0), np.maximum(room / input_tokens, 1.0))
    filling = running / prompts
    context = input_tokens + output_tokens / 2
    decoding = np.maximum(running * np.minimum(1.0, output_tokens / filling) - np.minimum(prompts, 1.0), 0.0)
    mixed = _round(
        problem,
        estimator,
        stages,
        step_work(prompts=prompts, prompt_tokens=input_tokens, sequences=decoding, context=context),
    )
    plain = _round(problem, estimator, stages, step_work(sequences=running, context=context))
    # Its own prompt is in none of a request's decode steps.
    held = np.minimum(1.0, filling * (running - 1) / running / output_tokens)
    tpot = plain + held * (mixed - plain)
    cycle = np.maximum(filling, output_tokens) * (plain + np.minimum(1.0, filling / output_tokens) * (mixed - plain))
    rate = running * len(stages) / cycle
    waiting = np.maximum(batch - running * len(stages), 0.0) / rate
    ttft = waiting + mixed + plain / 2
    latency = ttft + tpot * np.maximum(output_tokens - 1, 0.0)
    return ReplicaTimes(ttft, tpot, latency, rate * output_tokens)


def _micro_batch(problem: PlacementProblem, batch: FloatArray, stages: int) -> FloatArray:
    """Sequences of one micro-batch, within what the engine runs."""
    most = problem.max_num_seqs or problem.step_overheads.max_num_seqs
    return np.minimum(batch, float(most)) / stages


def _room(problem: PlacementProblem, sequences: FloatArray) -> FloatArray:
    """Prompt tokens that a step takes beside the decoding ones; at least half of the engine's limit."""
    limit = float(problem.max_num_batched_tokens or problem.step_overheads.max_num_batched_tokens)
    return np.maximum(limit - sequences, limit / 2)


def through(
    problem: PlacementProblem, estimator: CalibratedEstimator, stages: Sequence[StageShape], work: StepWork
) -> FloatArray:
    """(S, N) seconds of a step in each stage, its send included."""
    rows = []
    for number, stage in enumerate(stages):
        row = estimator.stage_step_s(problem.model, stage.machine, stage.layers, stage.tensor_parallel, work)
        if number + 1 < len(stages):
            following = stages[number + 1]
            same = stage.node == following.node
            crossed = problem.cluster.zone_link(stage.place, following.place)
            between = None if crossed is None else crossed.link
            row = row + estimator.send_step_s(
                problem.model, stage.machine, following.machine, work, same_node=same, between=between
            )
        rows.append(row)
    return np.stack(rows)


def _round(
    problem: PlacementProblem, estimator: CalibratedEstimator, stages: Sequence[StageShape], work: StepWork
) -> FloatArray:
    """(N,) seconds until each micro-batch has made a step."""
    each = through(problem, estimator, stages, work)
    whole = np.maximum(len(stages) * each.max(axis=0), each.sum(axis=0)) if len(stages) > 1 else each[0]
    return np.asarray(whole, dtype=np.float64)
