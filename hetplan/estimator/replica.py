"""One replica: a model on ``pipeline_parallel`` even stages of one kind of machine, under a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from hetplan.catalog.calibration import Calibration
from hetplan.catalog.hardware import InstanceType
from hetplan.catalog.model import ModelSpec
from hetplan.catalog.offers import Cluster, Offer, Pool
from hetplan.catalog.steps import get_step_overheads
from hetplan.errors import InvalidInputError
from hetplan.estimator.bands import Quality, describe_source, quality_of
from hetplan.estimator.base import Estimator, FloatArray, make_estimator
from hetplan.estimator.calibrated import CalibratedEstimator
from hetplan.estimator.identity import Same
from hetplan.estimator.pipeline import StageShape, even_layers, pipeline_times, stage_memories
from hetplan.estimator.schedules import ReplicaTimes, closed_loop, in_flight, static_batch
from hetplan.plan import StageMemory
from hetplan.problem.placement import EstimatorName, PlacementProblem
from hetplan.workload.requests import Workload

Schedule = Literal["static", "in_flight", "closed_loop"]
SCHEDULES: tuple[Schedule, ...] = ("static", "in_flight", "closed_loop")

# Whose step overheads stand for a schedule when no engine is named: those most of its runs were measured with.
SCHEDULE_ENGINES: dict[Schedule, str] = {
    "static": "tensorrt-llm-0.9",
    "in_flight": "tensorrt-llm-0.14",
    "closed_loop": "tensorrt-llm-1.0",
}


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica ready to be asked about any load: what does not depend on the load is worked out once."""

    problem: PlacementProblem
    estimator: Estimator
    stages: tuple[StageShape, ...]
    memories: tuple[StageMemory, ...]
    schedule: Schedule
    quality: Quality
    source: str

    def sequences_that_fit(self, tokens: FloatArray) -> FloatArray:
        """(N,) sequences of so many tokens that the KV cache of every stage holds, at most the engine's limit."""
        problem, last = self.problem, len(self.stages) - 1
        fits = np.full(tokens.shape, float(problem.max_num_seqs or problem.step_overheads.max_num_seqs))
        for number, (stage, memory) in enumerate(zip(self.stages, self.memories, strict=True)):
            for at, count in enumerate(tokens.tolist()):
                one = self.estimator.sequence_bytes(
                    problem.model,
                    stage.machine,
                    layers=stage.layers,
                    tensor_parallel=stage.tensor_parallel,
                    tokens=count,
                    input_tokens=count,
                    last=number == last,
                )
                room = memory.kv_cache_bytes // one if one > 0 else fits[at]
                fits[at] = min(fits[at], room) if memory.kv_cache_bytes >= one else 0.0
        return fits

    def times(self, batch: FloatArray, input_tokens: FloatArray, output_tokens: FloatArray) -> ReplicaTimes:
        """What the replica does under its schedule for (N,) loads."""
        if not isinstance(self.estimator, CalibratedEstimator):
            return self._plain_times(batch, input_tokens, output_tokens)
        load = (self.problem, self.estimator, self.stages, batch, input_tokens, output_tokens)
        if self.schedule == "static":
            return static_batch(*load)
        if self.schedule == "in_flight":
            return in_flight(*load)
        return closed_loop(*load, self.sequences_that_fit(input_tokens + output_tokens))

    def _plain_times(self, batch: FloatArray, input_tokens: FloatArray, output_tokens: FloatArray) -> ReplicaTimes:
        """The paper's own composition (eqs. 4 and 5), which knows static batches only.

        Under the other schedules the prefill of all spreads over the decode steps of each.
        """
        rows = []
        for one, prompt, answer in zip(batch, input_tokens, output_tokens, strict=True):
            # Not checked again: whoever asks has seen to it that the model takes such a request.
            load = Workload(input_tokens=float(prompt), output_tokens=float(answer))
            problem = self.problem.model_copy(update={"workload": load})
            times = pipeline_times(problem, self.estimator, self.stages, one)
            prefill, decode = float(times.prefill.sum()), float(times.decode.sum())
            steps = self.estimator.decode_steps(float(answer))
            tpot = decode / steps if steps > 0 else 0.0
            if self.schedule != "static":
                prefill = prefill / float(one)
                tpot = (decode + (float(one) - 1) * prefill) / steps if steps > 0 else 0.0
            latency = prefill + tpot * steps
            rows.append((prefill, tpot, latency, float(one) * float(answer) / latency))
        return ReplicaTimes(*np.array(rows, dtype=np.float64).T)


def make_replica(
    model: ModelSpec,
    machine: InstanceType,
    calibration: Calibration,
    *,
    tensor_parallel: int,
    pipeline_parallel: int,
    schedule: Schedule,
    engine: str | None,
    estimator: EstimatorName,
    gpu_memory_utilization: float | None,
) -> Replica:
    """Check what was asked and put the replica together.

    Raises
    ------
    InvalidInputError
        For values out of range.
    """
    asked = (tensor_parallel, pipeline_parallel, schedule, engine, estimator, gpu_memory_utilization)
    return _made(Same(model), Same(machine), Same(calibration), *asked)


@lru_cache(maxsize=64)
def _made(
    kept_model: Same,
    kept_machine: Same,
    kept_calibration: Same,
    tensor_parallel: int,
    pipeline_parallel: int,
    schedule: Schedule,
    engine: str | None,
    estimator: EstimatorName,
    gpu_memory_utilization: float | None,
) -> Replica:
    model, machine, calibration = kept_model.value, kept_machine.value, kept_calibration.value
    _check_shape(model, machine, tensor_parallel, pipeline_parallel, schedule)
    overheads = get_step_overheads(SCHEDULE_ENGINES[schedule] if engine is None else engine)
    groups = machine.gpu_count // tensor_parallel
    nodes = -(-pipeline_parallel // groups)
    offer = Offer(
        instance_type=machine.name, provider=machine.provider, region="here", market="owned", source="asked for"
    )
    problem = PlacementProblem(
        model=model,
        cluster=Cluster(instance_types=(machine,), pools=(Pool(offer=offer, count=nodes),)),
        # Loads are given later; this one only has to be valid.
        workload=Workload(input_tokens=1, output_tokens=1),
        estimator=estimator,
        calibrations=(calibration,),
        step_overheads=overheads,
        gpu_memory_utilization=(
            overheads.gpu_memory_utilization if gpu_memory_utilization is None else gpu_memory_utilization
        ),
    )
    stages, start = [], 0
    for number, size in enumerate(even_layers(model.layer_count, pipeline_parallel)):
        stages.append(StageShape((start, start + size), machine, tensor_parallel, number // groups))
        start += size
    shape = [(machine, tensor_parallel)]
    source = describe_source(problem, estimator, shape) + f"; host {machine.name}"
    chosen = make_estimator(problem)
    return Replica(
        problem,
        chosen,
        tuple(stages),
        tuple(stage_memories(problem, chosen, stages)),
        schedule,
        quality_of(problem, estimator, shape),
        source,
    )


def _check_shape(model: ModelSpec, machine: InstanceType, degree: int, stages: int, schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise InvalidInputError(f"schedule is 'static', 'in_flight' or 'closed_loop', got {schedule!r}")
    for name, count in (("tensor_parallel", degree), ("pipeline_parallel", stages)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidInputError(f"{name}={count!r}: a whole number from 1 is needed")
    if degree > machine.gpu_count:
        raise InvalidInputError(
            f"tensor_parallel={degree}: {machine.name} has {machine.gpu_count} GPUs, "
            "and a group stays inside one machine"
        )
    valid = model.valid_tensor_parallel(machine.gpu_count)
    if degree not in valid:
        raise InvalidInputError(f"tensor_parallel={degree} does not divide the heads of {model.name}; valid: {valid}")
    if stages > model.layer_count:
        raise InvalidInputError(f"pipeline_parallel is 1 to {model.layer_count} (the layers), got {stages}")
