"""From stages to a pipeline: how many sequences fit, how fast it goes, how long a request takes (eqs. 4-6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from hetplan.catalog.hardware import InstanceType
from hetplan.estimator.bands import Quality, band_around, describe_source, quality_of
from hetplan.estimator.base import PHASES, Estimator, FloatArray, batch_array
from hetplan.plan import PipelinePredictions, Prediction, StageMemory
from hetplan.problem.placement import PlacementProblem
from hetplan.units import GB, SECONDS_PER_HOUR


@dataclass(frozen=True, slots=True)
class StageShape:
    """A stage before its memory and times are known. ``node`` numbers the machines of the pipeline.

    ``place``: where its machine stands, by `Offer.place`; in a pipeline of one place it may be left out.
    """

    layers: tuple[int, int]
    machine: InstanceType
    tensor_parallel: int
    node: int
    place: str = ""


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """(S, B) seconds of each phase in each stage, sends included, for micro-batches of B sequences."""

    prefill: FloatArray
    decode: FloatArray


@dataclass(frozen=True, slots=True)
class PipelineRates:
    """(B,) what a pipeline does when full: requests per second, and the latency of a request that does not queue."""

    requests_per_s: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    latency_s: FloatArray


def even_layers(layer_count: int, stages: int) -> list[int]:
    """Layers per stage as vLLM splits them: the remainder goes one each to the stages before the last.

    >>> even_layers(61, 4)
    [15, 15, 16, 15]
    """
    share, rest = divmod(layer_count, stages)
    sizes = [share] * stages
    for back in range(2, rest + 2):
        sizes[-back] += 1
    return sizes


def stage_memories(problem: PlacementProblem, estimator: Estimator, stages: Sequence[StageShape]) -> list[StageMemory]:
    """Memory of one GPU of each stage."""
    last = len(stages) - 1
    return [
        estimator.stage_memory(
            problem.model,
            stage.machine,
            layers=stage.layers,
            tensor_parallel=stage.tensor_parallel,
            first=number == 0,
            last=number == last,
        )
        for number, stage in enumerate(stages)
    ]


def sequence_bytes(
    problem: PlacementProblem, estimator: Estimator, stages: Sequence[StageShape], tokens: float | None = None
) -> list[float]:
    """Bytes that one more sequence in flight takes on one GPU of each stage.

    ``tokens``: length of the sequence; by default the workload's mean prompt plus answer.
    """
    work = problem.workload
    length = work.mean_input_tokens + work.mean_output_tokens if tokens is None else tokens
    last = len(stages) - 1
    return [
        estimator.sequence_bytes(
            problem.model,
            stage.machine,
            layers=stage.layers,
            tensor_parallel=stage.tensor_parallel,
            tokens=length,
            input_tokens=work.mean_prefill_tokens,
            last=number == last,
        )
        for number, stage in enumerate(stages)
    ]


def sequences_that_fit(problem: PlacementProblem, estimator: Estimator, stages: Sequence[StageShape]) -> int:
    """Eq. 6: the most sequences in flight. Zero when weights, or the longest request, do not fit some stage."""
    memories = stage_memories(problem, estimator, stages)
    longest = sequence_bytes(problem, estimator, stages, float(problem.longest_request_tokens))
    most = min(estimator.batch_limit(stage.machine) for stage in stages)
    for memory, typical, one in zip(memories, sequence_bytes(problem, estimator, stages), longest, strict=True):
        if memory.kv_cache_bytes < one:
            return 0
        # Layers without attention keep nothing for a sequence.
        if typical > 0:
            most = min(most, int(memory.kv_cache_bytes // typical))
    return most


def micro_batch(estimator: Estimator, sequences: int, stages: int) -> int:
    """Sequences in one stage at a time: a share for each stage in flight, or all of them in paper mode."""
    return sequences // stages if estimator.micro_batches else sequences


def pipeline_times(
    problem: PlacementProblem, estimator: Estimator, stages: Sequence[StageShape], batch: ArrayLike
) -> PipelineTimes:
    """Seconds of both phases in each stage for the workload's mean request."""
    model, work = problem.model, problem.workload
    sequences = batch_array(batch)
    tokens = {"prefill": work.mean_prefill_tokens, "decode": work.mean_input_tokens}
    seconds: dict[str, FloatArray] = {}
    last = len(stages) - 1
    for phase in PHASES:
        rows = []
        for number, stage in enumerate(stages):
            row = estimator.stage_seconds(
                model,
                stage.machine,
                layers=stage.layers,
                tensor_parallel=stage.tensor_parallel,
                batch=sequences,
                input_tokens=tokens[phase],
                output_tokens=work.mean_output_tokens,
                first=number == 0,
                last=number == last,
                phase=phase,
            )[0]
            if number < last:
                following = stages[number + 1]
                crossed = problem.cluster.zone_link(stage.place, following.place)
                row = row + estimator.boundary_seconds(
                    model,
                    stage.machine,
                    following.machine,
                    same_node=stage.node == following.node,
                    batch=sequences,
                    input_tokens=tokens[phase],
                    output_tokens=work.mean_output_tokens,
                    phase=phase,
                    between=None if crossed is None else crossed.link,
                )
            rows.append(row)
        seconds[phase] = np.stack(rows)
    return PipelineTimes(prefill=seconds["prefill"], decode=seconds["decode"])


def pipeline_rates(
    problem: PlacementProblem, estimator: Estimator, stages: Sequence[StageShape], batch: ArrayLike
) -> PipelineRates:
    """Throughput (eqs. 4 and 5) and latency of a pipeline for micro-batches of ``batch`` sequences.

    Throughput is b / (max_i prefill_i(b) + max_i decode_i(b)). With micro-batches a request passes the
    stages one after another: its latency is sum_i prefill_i(b) + decode_i(b), its first token comes after its
    own prefill, sum_i prefill_i(1), and continuous batching spreads the rest, the other requests' prefill
    included, evenly over its decode steps. In paper mode latency is the slowest prefill plus the
    slowest decode, the first token comes after the former.
    """
    sequences = batch_array(batch)
    times = pipeline_times(problem, estimator, stages, sequences)
    slowest = times.prefill.max(axis=0) + times.decode.max(axis=0)
    if estimator.micro_batches:
        latency = times.prefill.sum(axis=0) + times.decode.sum(axis=0)
        alone = pipeline_times(problem, estimator, stages, 1).prefill.sum()
        ttft = np.full_like(latency, alone)
    else:
        latency, ttft = slowest, times.prefill.max(axis=0)
    steps = estimator.decode_steps(problem.workload.mean_output_tokens)
    if steps > 0:
        tpot = (latency - ttft) / steps
    else:
        # The first token is the last.
        ttft, tpot = latency, np.zeros_like(latency)
    return PipelineRates(requests_per_s=sequences / slowest, ttft_s=ttft, tpot_s=tpot, latency_s=latency)


def egress_usd_per_hour(
    problem: PlacementProblem, estimator: Estimator, stages: Sequence[StageShape], requests_per_s: float
) -> float:
    """What a pipeline pays for what it sends over zone links, at a rate of requests."""
    links = [problem.cluster.zone_link(one.place, other.place) for one, other in pairwise(stages)]
    usd_per_gb = math.fsum(link.egress_usd_per_gb for link in links if link is not None)
    if usd_per_gb == 0:
        return 0.0
    work = problem.workload
    each = estimator.sent_bytes(
        problem.model, input_tokens=work.mean_prefill_tokens, output_tokens=work.mean_output_tokens
    )
    return usd_per_gb * each / GB * requests_per_s * SECONDS_PER_HOUR


def predictions_at(
    problem: PlacementProblem, estimator: Estimator, stages: Sequence[StageShape], batch: int
) -> PipelinePredictions:
    """A pipeline's predictions with bands and source, at one micro-batch size."""
    rates = pipeline_rates(problem, estimator, stages, batch)
    output_tokens = problem.workload.mean_output_tokens
    values = {
        "requests_per_s": float(rates.requests_per_s[0]),
        "ttft_s": float(rates.ttft_s[0]),
        "tpot_s": float(rates.tpot_s[0]),
        "latency_s": float(rates.latency_s[0]),
    }
    values["output_tokens_per_s"] = values["requests_per_s"] * output_tokens
    shapes = [(stage.machine, stage.tensor_parallel) for stage in stages]
    source, quality = describe_source(problem, estimator.name, shapes), quality_of(problem, estimator.name, shapes)
    return PipelinePredictions(**{name: _with_band(name, value, quality, source) for name, value in values.items()})


def _with_band(name: str, value: float, quality: Quality, source: str) -> Prediction:
    low, high, level = band_around(name, value, quality)
    return Prediction(value=value, low=low, high=high, level=level, source=source)
