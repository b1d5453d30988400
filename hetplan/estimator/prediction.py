"""Predictions for people: one replica as described, or the pipelines of a plan under a workload."""

from __future__ import annotations

from typing import Literal

import numpy as np

from hetplan.base import Frozen
from hetplan.catalog.calibration import Calibration
from hetplan.catalog.hardware import InstanceType
from hetplan.catalog.model import ModelSpec
from hetplan.catalog.offers import Cluster, Offer, Pool
from hetplan.errors import InfeasibleError, InvalidInputError, Reason, UnsupportedFeatureError
from hetplan.estimator.bands import band_around, describe_source
from hetplan.estimator.base import Estimator, make_estimator
from hetplan.estimator.pipeline import (
    StageShape,
    even_layers,
    micro_batch,
    pipeline_times,
    predictions_at,
    sequence_bytes,
    sequences_that_fit,
    stage_memories,
)
from hetplan.plan import Pipeline, PipelinePredictions, Plan
from hetplan.problem.placement import EstimatorName, PlacementProblem
from hetplan.units import GIB, SECONDS_PER_HOUR, format_bytes
from hetplan.workload.requests import Workload

Schedule = Literal["static", "in_flight", "closed_loop"]


class ReplicaPrediction(Frozen):
    """One replica running a static batch.

    Attributes
    ----------
    ttft_s, latency_s : float
        Seconds to the first and to the last token of the batch.
    tpot_s : float
        Seconds per output token without the first.
    tpot_including_first_s : float
        ``latency_s`` over all output tokens.
    output_tokens_per_s : float
        Of the whole batch.
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


def predict_replica(
    model: ModelSpec,
    machine: InstanceType,
    calibration: Calibration,
    *,
    gpu: str,
    tensor_parallel: int,
    pipeline_parallel: int,
    batch: int,
    input_tokens: float,
    output_tokens: float,
    schedule: Schedule,
    engine: str | None,
    estimator: EstimatorName,
    gpu_memory_utilization: float,
) -> ReplicaPrediction:
    """See `hetplan.predict`."""
    _check_replica(model, machine, tensor_parallel, pipeline_parallel, batch, schedule, engine)
    groups = machine.gpu_count // tensor_parallel
    nodes = -(-pipeline_parallel // groups)
    offer = Offer(
        instance_type=machine.name, provider=machine.provider, region="here", market="owned", source="asked for"
    )
    problem = PlacementProblem(
        model=model,
        cluster=Cluster(instance_types=(machine,), pools=(Pool(offer=offer, count=nodes),)),
        workload=Workload(input_tokens=input_tokens, output_tokens=output_tokens),
        estimator=estimator,
        calibrations=(calibration,),
        gpu_memory_utilization=gpu_memory_utilization,
    )
    stages, start = [], 0
    for number, size in enumerate(even_layers(model.layer_count, pipeline_parallel)):
        stages.append(StageShape((start, start + size), machine, tensor_parallel, number // groups))
        start += size
    chosen = make_estimator(problem)
    fits = _sequences_or_shortfall(problem, chosen, stages)
    times = pipeline_times(problem, chosen, stages, batch)
    ttft, decode = float(times.prefill.sum()), float(times.decode.sum())
    steps = chosen.decode_steps(output_tokens)
    values = {
        "ttft_s": ttft,
        "tpot_s": decode / steps if steps > 0 else 0.0,
        "latency_s": ttft + decode,
        "output_tokens_per_s": batch * output_tokens / (ttft + decode),
    }
    source = describe_source(problem, estimator, [(machine, tensor_parallel)]) + f"; host {machine.name}"
    if batch > fits:
        source += f"; {batch} sequences exceed the KV cache, which holds {fits}"
    return ReplicaPrediction(
        **values,
        tpot_including_first_s=(ttft + decode) / output_tokens,
        max_batch=fits,
        band={name: band_around(name, value, estimator, [calibration]) for name, value in values.items()},
        source=source,
    )


def _check_replica(
    model: ModelSpec, machine: InstanceType, degree: int, stages: int, batch: int, schedule: str, engine: str | None
) -> None:
    if schedule not in ("static", "in_flight", "closed_loop"):
        raise InvalidInputError(f"schedule is 'static', 'in_flight' or 'closed_loop', got {schedule!r}")
    if schedule != "static":
        raise UnsupportedFeatureError(f"schedule={schedule!r} is not answered yet; use 'static'")
    if engine is not None:
        raise UnsupportedFeatureError(f"engine={engine!r}: engine-specific models are not there yet; use engine=None")
    for name, count in (("batch", batch), ("tensor_parallel", degree), ("pipeline_parallel", stages)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidInputError(f"{name}={count!r}: a whole number from 1 is needed")
    if degree > machine.gpu_count or degree < 1:
        raise InvalidInputError(
            f"tensor_parallel={degree}: {machine.name} has {machine.gpu_count} GPUs, "
            "and a group stays inside one machine"
        )
    valid = model.valid_tensor_parallel(machine.gpu_count)
    if degree not in valid:
        raise InvalidInputError(f"tensor_parallel={degree} does not divide the heads of {model.name}; valid: {valid}")
    if not 1 <= stages <= model.layer_count:
        raise InvalidInputError(f"pipeline_parallel is 1 to {model.layer_count} (the layers), got {stages}")


def _sequences_or_shortfall(problem: PlacementProblem, estimator: Estimator, stages: list[StageShape]) -> int:
    """Sequences that fit; raises with the shortfall when not even one does."""
    fits = sequences_that_fit(problem, estimator, stages)
    if fits > 0:
        return fits
    worst_short, said = 0.0, ""
    longest = sequence_bytes(problem, estimator, stages, float(problem.longest_request_tokens))
    for stage, memory, one in zip(stages, stage_memories(problem, estimator, stages), longest, strict=True):
        needed = memory.weight_bytes + memory.activation_bytes + memory.other_bytes + one
        if needed - memory.usable_bytes > worst_short:
            worst_short = needed - memory.usable_bytes
            said = (
                f"{problem.model.name} needs {format_bytes(needed)} on each {stage.machine.gpu.name} at "
                f"TP{stage.tensor_parallel} ({format_bytes(memory.weight_bytes)} weights, "
                f"{format_bytes(memory.activation_bytes)} activations, {format_bytes(one)} KV cache for one request of "
                f"{problem.longest_request_tokens:,} tokens); {format_bytes(memory.usable_bytes)} are usable: "
                f"{format_bytes(worst_short)} short. Use more GPUs or weight_dtype='fp8'"
            )
            reason = Reason("memory", problem.model.name, needed / GIB, memory.usable_bytes / GIB, "GiB")
    raise InfeasibleError(said, [reason])


def estimate_plan(plan: Plan, workload: Workload | None) -> PlanEstimate:
    """See `hetplan.estimate`."""
    problem = plan.problem
    if workload is not None:
        # The pipelines are given: a demand that they were bought for no longer matters.
        problem = problem.replace(workload=workload, max_model_len=None, objective="throughput")
    estimator = make_estimator(problem)
    predicted: list[PipelinePredictions] = []
    rate = tokens = 0.0
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
    cost = plan.cost_usd_per_hour
    return PlanEstimate(
        requests_per_s=rate,
        output_tokens_per_s=tokens,
        cost_usd_per_hour=cost,
        usd_per_million_output_tokens=float(np.float64(cost) / SECONDS_PER_HOUR / tokens * 1e6),
        pipelines=tuple(predicted),
    )


def shapes_of(problem: PlacementProblem, pipeline: Pipeline) -> list[StageShape]:
    """The stages of a plan's pipeline as the estimator takes them."""
    return [
        StageShape(s.layers, problem.cluster.instance_type(s.instance_type), s.tensor_parallel, s.node)
        for s in pipeline.stages
    ]
