"""Predictions for people: one replica as described, or the pipelines of a plan under a workload."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import numpy as np

from hetplan.base import Frozen
from hetplan.errors import InfeasibleError, InvalidInputError, Reason
from hetplan.estimator.bands import band_around
from hetplan.estimator.base import Estimator, FloatArray, make_estimator
from hetplan.estimator.pipeline import (
    StageShape,
    egress_usd_per_hour,
    micro_batch,
    predictions_at,
    sequence_bytes,
    sequences_that_fit,
    stage_memories,
)
from hetplan.estimator.replica import Replica
from hetplan.plan import Pipeline, PipelinePredictions, Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.units import GIB, SECONDS_PER_HOUR, format_bytes
from hetplan.workload.requests import Workload


class ReplicaPrediction(Frozen):
    """One replica under a schedule.

    Attributes
    ----------
    ttft_s, latency_s : float
        Seconds to the first and to the last token of a request.
    tpot_s : float
        Seconds per output token without the first; unless the batch is static, others' prefill is in it.
    tpot_including_first_s : float
        ``latency_s`` over all output tokens.
    output_tokens_per_s : float
        Of the whole replica.
    max_batch : int
        Sequences that fit the KV cache; a larger batch would queue.
    band : dict of str to (low, high, level)
    source : str
        What the figures rest on.
    """

    ttft_s: float
    tpot_s: float
    tpot_including_first_s: float
    latency_s: float
    output_tokens_per_s: float
    max_batch: int
    band: dict[str, tuple[float, float, float]]
    source: str


class PlanEstimate(Frozen):
    """What a plan does under a workload when every pipeline is kept full; one entry of ``pipelines`` per pipeline."""

    requests_per_s: float
    output_tokens_per_s: float
    cost_usd_per_hour: float
    usd_per_million_output_tokens: float
    pipelines: tuple[PipelinePredictions, ...]


def predict_replica(replica: Replica, *, batch: int, input_tokens: float, output_tokens: float) -> ReplicaPrediction:
    """See `hetplan.predict`."""
    _check_load(batch, input_tokens, output_tokens)
    problem_model = replica.problem.model
    load = (np.array([float(batch)]), np.array([float(input_tokens)]), np.array([float(output_tokens)]))
    tokens = load[1] + load[2]
    fits = int(replica.sequences_that_fit(tokens)[0])
    if fits < 1:
        raise _shortfall(replica.problem, replica.estimator, replica.stages, float(tokens[0]))
    times = replica.times(*load)
    values = {name: float(getattr(times, name)[0]) for name in ("ttft_s", "tpot_s", "latency_s", "output_tokens_per_s")}
    source = replica.source
    if tokens[0] > problem_model.max_position_tokens:
        source += (
            f"; times only: {tokens[0]:,.0f} tokens, where {problem_model.name} was made for "
            f"{problem_model.max_position_tokens:,}"
        )
    if batch > fits:
        source += f"; {batch:g} sequences exceed the KV cache, which holds {fits}"
    return ReplicaPrediction(
        **values,
        tpot_including_first_s=values["latency_s"] / output_tokens,
        max_batch=fits,
        band={name: band_around(name, value, replica.quality) for name, value in values.items()},
        source=source,
    )


def predict_replicas(
    replica: Replica, batch: FloatArray, input_tokens: FloatArray, output_tokens: FloatArray
) -> dict[str, FloatArray]:
    """See `hetplan.predict_many`: a column for each figure, its band beside it; NaN where a load does not fit."""
    fits = replica.sequences_that_fit(input_tokens + output_tokens)
    times = replica.times(batch, input_tokens, output_tokens)
    columns: dict[str, FloatArray] = {"max_batch": fits}
    for name in ("ttft_s", "tpot_s", "latency_s", "output_tokens_per_s"):
        value = np.where(fits >= 1, getattr(times, name), np.nan)
        low, high, _ = band_around(name, 1.0, replica.quality)
        columns |= {name: value, f"{name}_low": value * low, f"{name}_high": value * high}
    return columns


def _check_load(batch: float, input_tokens: float, output_tokens: float) -> None:
    given: dict[str, object] = {"batch": batch, "input_tokens": input_tokens, "output_tokens": output_tokens}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
            raise InvalidInputError(f"{name}={value!r}: a positive number is needed")
    if batch != int(batch):
        raise InvalidInputError(f"batch={batch!r}: a whole number from 1 is needed")


def _shortfall(
    problem: PlacementProblem, estimator: Estimator, stages: Sequence[StageShape], tokens: float
) -> InfeasibleError:
    """Why not even one sequence of so many tokens fits."""
    worst_short, said = -math.inf, ""
    reasons = []
    longest = sequence_bytes(problem, estimator, stages, tokens)
    for stage, memory, one in zip(stages, stage_memories(problem, estimator, stages), longest, strict=True):
        needed = memory.taken_bytes + one
        if needed - memory.usable_bytes > worst_short:
            worst_short = needed - memory.usable_bytes
            said = (
                f"{problem.model.name} needs {format_bytes(needed)} on each {stage.machine.gpu.name} at "
                f"TP{stage.tensor_parallel} ({format_bytes(memory.weight_bytes)} weights, "
                f"{format_bytes(memory.activation_bytes)} activations, {format_bytes(one)} KV cache for one request of "
                f"{tokens:,.0f} tokens); {format_bytes(memory.usable_bytes)} are usable: "
                f"{format_bytes(worst_short)} short. Use more GPUs or weight_dtype='fp8'"
            )
            reasons = [Reason("memory", problem.model.name, needed / GIB, memory.usable_bytes / GIB, "GiB")]
    return InfeasibleError(said, reasons)


def _sequences_or_shortfall(problem: PlacementProblem, estimator: Estimator, stages: list[StageShape]) -> int:
    """Sequences that fit; raises with the shortfall when not even one does."""
    fits = sequences_that_fit(problem, estimator, stages)
    if fits > 0:
        return fits
    raise _shortfall(problem, estimator, stages, float(problem.longest_request_tokens))


def estimate_plan(plan: Plan, workload: Workload | None) -> PlanEstimate:
    """See `hetplan.estimate`."""
    problem = plan.placement
    if workload is not None:
        # The pipelines are given, and what they keep for a second engine: a demand that they were bought for no longer
        # matters.
        longest = max(problem.longest_request_tokens, workload.max_tokens)
        problem = problem.replace(workload=workload, max_model_len=longest, objective="throughput")
    estimator = make_estimator(problem)
    predicted: list[PipelinePredictions] = []
    rate = tokens = 0.0
    cost = plan.cost_usd_per_hour - plan.egress_usd_per_hour
    for deployment in plan.deployments:
        for pipeline in deployment.pipelines:
            stages = shapes_of(problem, pipeline)
            if problem.longest_request_tokens > pipeline.max_model_len:
                longest = problem.longest_request_tokens
                raise InfeasibleError(
                    f"the workload's longest request has {longest:,} tokens; this plan's pipelines take "
                    f"{pipeline.max_model_len:,}. Plan again with max_model_len={longest}",
                    [Reason("max_model_len", deployment.model, longest, pipeline.max_model_len, "tokens")],
                )
            fits = min(pipeline.max_num_seqs, _sequences_or_shortfall(problem, estimator, stages))
            batch = max(1, micro_batch(estimator, fits, len(stages)))
            here = predictions_at(problem, estimator, stages, min(batch, pipeline.micro_batch))
            predicted.append(here)
            rate += pipeline.count * here.requests_per_s.value
            tokens += pipeline.count * here.output_tokens_per_s.value
            cost += pipeline.count * egress_usd_per_hour(problem, estimator, stages, here.requests_per_s.value)
    return PlanEstimate(
        requests_per_s=rate,
        output_tokens_per_s=tokens,
        cost_usd_per_hour=cost,
        usd_per_million_output_tokens=float(np.float64(cost) / SECONDS_PER_HOUR / tokens * 1e6),
        pipelines=tuple(predicted),
    )


def shapes_of(problem: PlacementProblem, pipeline: Pipeline) -> list[StageShape]:
    """The stages of a plan's pipeline as the estimator takes them."""
    places = {pool.offer.name: pool.offer.place for pool in problem.cluster.pools}
    return [
        StageShape(
            s.layers,
            problem.cluster.instance_type(s.instance_type),
            s.tensor_parallel,
            s.node,
            places[pipeline.nodes[s.node]],
        )
        for s in pipeline.stages
    ]
