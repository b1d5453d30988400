"""Checks a placement plan against the problem it carries: many short checks over one scene, hence the length.

Nothing here comes from the solvers, nor from the code that combines stages for them: of the estimator only
the times and bytes of single stages are taken, and what follows from them is computed again. A plan may
have been edited or damaged in any way, so every check runs guarded: it yields violations and never stops
the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from hetplan.catalog.dtypes import DTYPE_BITS, Dtype
from hetplan.catalog.engines import LIMITS, LimitName
from hetplan.catalog.hardware import GpuSpec, InstanceType
from hetplan.catalog.model import ModelSpec
from hetplan.catalog.offers import Offer, Pool, ZoneLink
from hetplan.estimator.base import Estimator, Phase, make_estimator
from hetplan.plan import Certificate, Pipeline, Plan, Prediction, Stage, StageMemory
from hetplan.problem.placement import PlacementProblem
from hetplan.units import BITS_PER_BYTE, GB, SECONDS_PER_HOUR
from hetplan.verification.certificate import Proven, allowed_degrees, layer_rate_bound
from hetplan.verification.findings import (
    COMMON,
    OF_PLACEMENT,
    SAME,
    Violation,
    check_status,
    close,
    found,
    guarded,
)
from hetplan.verification.interruptions import LongRun, long_run

_UNITS = {"throughput": "req/s", "throughput_per_cost": "req/s per $/h", "cost": "$/h"}

# Percentiles that a plan's requests live through, by plan, level and seed: simulated elsewhere.
Simulate = Callable[[Plan, float, int], Mapping[str, float]]

# Every code that a plan of this kind can break.
MEANINGS = COMMON | OF_PLACEMENT


@dataclass(frozen=True, slots=True)
class _Figures:
    """What one copy of a pipeline does, recomputed."""

    requests_per_s: float
    ttft_s: float
    tpot_s: float
    latency_s: float

    def limited(self) -> dict[str, float]:
        """Latencies by the names that an Slo gives their limits."""
        return {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "e2e_s": self.latency_s}


@dataclass(frozen=True, slots=True)
class _Scene:
    """The plan, and its problem by name."""

    plan: Plan
    problem: PlacementProblem
    model: ModelSpec
    estimator: Estimator
    machines: dict[str, InstanceType]
    pools: dict[str, Pool]
    simulate: Simulate | None = None
    known_latencies: dict[str, float] = field(default_factory=dict)
    known_figures: dict[str, _Figures] = field(default_factory=dict)
    confirmed: list[str] = field(default_factory=list)

    def pipelines(self) -> Iterator[tuple[str, Pipeline]]:
        for d, deployment in enumerate(self.plan.deployments):
            for p, pipeline in enumerate(deployment.pipelines):
                yield f"deployments[{d}].pipelines[{p}]", pipeline

    def computable(self, pipeline: Pipeline) -> bool:
        """Whether the estimator can be asked about it at all; where not, another check says why."""
        return pipeline.micro_batch >= 1 and all(
            stage.instance_type in self.machines
            and 0 <= stage.layers[0] <= stage.layers[1] <= self.model.layer_count
            and 1 <= stage.tensor_parallel <= self.machines[stage.instance_type].gpu_count
            for stage in pipeline.stages
        )

    def percentiles(self) -> dict[str, float]:
        """What the plan's requests live through at the promised percentile, simulated once; empty without one."""
        slo = self.problem.slo
        if not self.known_latencies and self.simulate is not None and slo is not None and slo.percentile is not None:
            self.known_latencies.update(self.simulate(self.plan, slo.percentile, self.plan.provenance.seed))
        return self.known_latencies

    def figures(self, where: str, pipeline: Pipeline) -> _Figures:
        """Recomputed once for each pipeline."""
        if where not in self.known_figures:
            self.known_figures[where] = _figures(self, pipeline)
        return self.known_figures[where]


def examine_placement(
    plan: Plan, well_formed: bool, simulate: Simulate | None = None
) -> tuple[list[Violation], list[str]]:
    """What is wrong with a plan that places one model, and which bound of it is proven.

    Parameters
    ----------
    plan : Plan
    well_formed : bool
        Every field is within its own limits. How long the proof takes is bounded only then; otherwise it is left out.
    simulate : callable, optional
        See `hetplan.verification.verify_plan`.

    Returns
    -------
    violations : list of Violation
    confirmed : list of str
        What is proven, as a phrase; empty where nothing is.
    """
    scenes: list[_Scene] = []

    def set_scene() -> Iterator[Violation]:
        problem = plan.placement
        scenes.append(
            _Scene(
                plan=plan,
                problem=problem,
                model=problem.model,
                estimator=make_estimator(problem),
                machines={machine.name: machine for machine in problem.cluster.instance_types},
                pools={pool.offer.name: pool for pool in problem.cluster.pools},
                simulate=simulate,
            )
        )
        yield from ()

    violations = guarded("problem", "a readable problem", set_scene)
    for scene in scenes:
        violations += guarded("deployments", "readable pipelines", _check_pipelines, scene)
        for needed, check in _CHECKS.items():
            violations += guarded("plan", needed, check, scene)
        if well_formed:
            violations += guarded("certificate", "a certificate", _check_certificate, scene)
    return violations, [phrase for scene in scenes for phrase in scene.confirmed]


# ---- the problem


def _check_calibrations(scene: _Scene) -> Iterator[Violation]:
    stated = scene.problem.calibration_sha256
    counts = Counter(calibration.gpu for calibration in scene.problem.calibrations)
    for gpu in sorted({machine.gpu.name for machine in scene.machines.values()} - counts.keys()):
        yield found("calibration_missing", "problem.calibrations", gpu, "one for each GPU")
    for gpu, count in counts.items():
        if count > 1:
            yield found("calibration_repeated", f"problem.calibrations.{gpu}", count, 1)
    for calibration in scene.problem.calibrations:
        where, digest = f"problem.calibration_sha256.{calibration.gpu}", calibration.sha256
        if calibration.gpu not in stated:
            yield found("calibration_digest_missing", where, "none", digest)
        elif stated[calibration.gpu] != digest:
            yield found("calibration_changed", where, stated[calibration.gpu], digest)
    for gpu in sorted(stated.keys() - counts.keys()):
        where = f"problem.calibration_sha256.{gpu}"
        yield found("calibration_changed", where, stated[gpu], "no content")


def _check_offers(scene: _Scene) -> Iterator[Violation]:
    for name, pool in scene.pools.items():
        where, price = f"problem.cluster.{name}", pool.offer.price_usd_per_hour
        free = price is None and pool.offer.market == "owned"
        if not free and (price is None or not price > 0):
            yield found("price_not_positive", where, price, 0)
        if pool.offer.instance_type not in scene.machines:
            yield found("instance_type_unknown", where, pool.offer.instance_type, ", ".join(scene.machines))


def _check_promises(scene: _Scene) -> Iterator[Violation]:
    """Promises that this checker cannot confirm are findings: silence would confirm them."""
    for name, pool in scene.pools.items() if scene.problem.objective == "expected_cost" else ():
        offer = pool.offer
        if offer.market == "spot" and (offer.interruptions_per_hour is None or offer.notice_s is None):
            needed = "interruptions_per_hour and notice_s"
            yield found("promise_not_checkable", f"problem.cluster.{name}", "an expected cost without them", needed)
    slo = scene.problem.slo
    if slo is not None and slo.percentile is not None:
        lived = scene.percentiles()
        if not lived:
            yield found(
                "promise_not_checkable",
                "problem.slo",
                f"the percentile {slo.percentile:g} without a simulation",
                "means",
            )
        for name, limit in slo.limits().items() if lived and slo.hard else ():
            if not lived[name] <= limit * (1 + SAME):
                yield found("slo_broken", f"P{100 * slo.percentile:g} of {name}", lived[name], limit)
    for query in scene.problem.workload.query_types:
        if query.slo is not None:
            where = f"problem.workload.{query.name}"
            yield found("promise_not_checkable", where, "a query type's own Slo", "the problem's Slo")


def _check_deployments(scene: _Scene) -> Iterator[Violation]:
    for d, deployment in enumerate(scene.plan.deployments):
        if deployment.model != scene.model.name:
            yield found("model_differs", f"deployments[{d}]", deployment.model, scene.model.name)


def _check_inventory(scene: _Scene) -> Iterator[Violation]:
    used: Counter[str] = Counter()
    for _, pipeline in scene.pipelines():
        for name in pipeline.nodes:
            used[name] += pipeline.count
    for name, count in used.items():
        if name in scene.pools and count > scene.pools[name].count:
            yield found("inventory_exceeded", f"problem.cluster.{name}", count, scene.pools[name].count)


# ---- pipelines: structure


def _check_pipelines(scene: _Scene) -> Iterator[Violation]:
    for where, pipeline in scene.pipelines():
        for needed, check in _PIPELINE_CHECKS.items():
            yield from guarded(where, needed, check, scene, where, pipeline)


def _check_layers(scene: _Scene, where: str, pipeline: Pipeline) -> Iterator[Violation]:
    if pipeline.role != "both":
        yield found("role_not_supported", where, pipeline.role, "both")
    total, expected = scene.model.layer_count, 0
    for s, stage in enumerate(pipeline.stages):
        here = f"{where}.stages[{s}]"
        start, stop = stage.layers
        if stop <= start:
            yield found("stage_empty", here, stop - start, 1)
        if stop > total:
            yield found("layers_outside_model", here, stop, total)
        if start > expected:
            yield found("layers_missing", here, start, expected)
        if start < expected:
            yield found("layers_overlap", here, start, expected)
        expected = stop
    if expected < total:
        yield found("layers_missing", where, "its end", expected)


def _check_nodes(scene: _Scene, where: str, pipeline: Pipeline) -> Iterator[Violation]:
    stages_on = Counter(stage.node for stage in pipeline.stages)
    for n, name in enumerate(pipeline.nodes):
        here = f"{where}.nodes[{n}]"
        if stages_on[n] == 0:
            yield found("node_unused", here, 0, 1)
        if name not in scene.pools:
            yield found("offer_unknown", here, name, ", ".join(scene.pools))
    for s, stage in enumerate(pipeline.stages):
        here = f"{where}.stages[{s}]"
        if not 0 <= stage.node < len(pipeline.nodes):
            yield found("node_unknown", here, stage.node, len(pipeline.nodes) - 1)
            continue
        pool = scene.pools.get(pipeline.nodes[stage.node])
        if pool is not None and pool.offer.instance_type != stage.instance_type:
            yield found("offer_of_other_type", here, stage.instance_type, pool.offer.instance_type)


def _check_order(scene: _Scene, where: str, pipeline: Pipeline) -> Iterator[Violation]:
    """Engines order their ranks node by node."""
    stages_on: dict[int, list[int]] = {}
    for s, stage in enumerate(pipeline.stages):
        stages_on.setdefault(stage.node, []).append(s)
    for node, stages in stages_on.items():
        if stages[-1] - stages[0] >= len(stages):
            consecutive = list(range(stages[0], stages[0] + len(stages)))
            yield found("node_visited_twice", f"{where}.nodes[{node}]", stages, consecutive)


def _offers(scene: _Scene, pipeline: Pipeline) -> list[Offer | None]:
    """The offer of each stage's machine, where the plan names one."""
    names = [pipeline.nodes[s.node] if 0 <= s.node < len(pipeline.nodes) else "" for s in pipeline.stages]
    return [scene.pools[name].offer if name in scene.pools else None for name in names]


def _crossed(scene: _Scene, one: Offer | None, other: Offer | None) -> ZoneLink | None:
    """The zone link that a send between two machines takes; the one that names more of their zones."""
    if one is None or other is None or one.place == other.place:
        return None

    def ends(offer: Offer) -> dict[str, int]:
        region = f"{offer.provider}/{offer.region}"
        return {region: 0 if offer.zone else 1} | ({f"{region}/{offer.zone}": 1} if offer.zone else {})

    mine, theirs = ends(one), ends(other)
    best, most = None, -1
    for link in scene.problem.cluster.zone_links:
        for a, b in (link.ends, link.ends[::-1]):
            if a in mine and b in theirs and mine[a] + theirs[b] > most:
                best, most = link, mine[a] + theirs[b]
    return best


def _check_regions(scene: _Scene, where: str, pipeline: Pipeline) -> Iterator[Violation]:
    for s, (one, other) in enumerate(pairwise(_offers(scene, pipeline)), start=1):
        if one is None or other is None or _crossed(scene, one, other) is not None:
            continue
        if (one.provider, one.region) != (other.provider, other.region):
            places = (f"{offer.provider}/{offer.region}" for offer in (other, one))
            yield found("regions_mixed", f"{where}.stages[{s}]", *places)


def _check_groups(scene: _Scene, where: str, pipeline: Pipeline) -> Iterator[Violation]:
    owners: dict[tuple[int, int], str] = {}
    for s, stage in enumerate(pipeline.stages):
        here = f"{where}.stages[{s}]"
        for gpu in stage.gpu_indices:
            owner = owners.setdefault((stage.node, gpu), f"stages[{s}]")
            if owner != f"stages[{s}]" or stage.gpu_indices.count(gpu) > 1:
                yield found("gpu_used_twice", here, gpu, owner)
        if len(stage.gpu_indices) != stage.tensor_parallel:
            yield found("gpu_count_differs", here, len(stage.gpu_indices), stage.tensor_parallel)
        machine = scene.machines.get(stage.instance_type)
        if machine is None:
            yield found("instance_type_unknown", here, stage.instance_type, ", ".join(scene.machines))
            continue
        for gpu in stage.gpu_indices:
            if not 0 <= gpu < machine.gpu_count:
                yield found("gpu_outside_node", here, gpu, machine.gpu_count - 1)
        allowed = allowed_degrees(scene.model, machine)
        if stage.tensor_parallel not in allowed:
            yield found("tensor_parallel_invalid", here, stage.tensor_parallel, ", ".join(map(str, allowed)) or "none")
        native = _native_dtype(machine.gpu, scene.model.compute_dtype)
        # The paper's estimator does not ask whether a GPU has the model's type.
        if scene.estimator.name == "calibrated" and stage.compute_dtype != native:
            yield found("compute_dtype_differs", here, stage.compute_dtype, native)


def _check_engine(scene: _Scene, where: str, pipeline: Pipeline) -> Iterator[Violation]:
    """The limits of the engine that the problem carries."""
    engine = scene.problem.engine
    if engine is None:
        return
    degrees = sorted({stage.tensor_parallel for stage in pipeline.stages})
    dtypes = sorted({stage.compute_dtype for stage in pipeline.stages})
    gpus: Counter[int] = Counter()
    for stage in pipeline.stages:
        gpus[stage.node] += len(stage.gpu_indices)
    visits = [node for node, _ in groupby(pipeline.stages, key=lambda stage: stage.node)]
    broken: dict[LimitName, str | None] = {
        "one-tensor-parallel-degree": f"degrees {degrees}" if len(degrees) > 1 else None,
        "equal-gpus-per-node": f"{list(gpus.values())} GPUs" if len(set(gpus.values())) > 1 else None,
        "consecutive-stages-per-node": f"nodes in the order {visits}" if len(set(visits)) < len(visits) else None,
        "one-dtype": ", ".join(dtypes) if len(dtypes) > 1 else None,
    }
    for limit in engine.limits:
        if broken[limit] is not None:
            yield found("engine_limit_broken", where, broken[limit], LIMITS[limit])


def _native_dtype(gpu: GpuSpec, wanted: Dtype) -> Dtype | None:
    """The type in which a GPU multiplies: the wanted one, else a 16-bit one, else fp32."""
    runs: list[Dtype] = [dtype for dtype in gpu.native_dtypes if dtype in gpu.dense_flops]
    order: tuple[Dtype, ...] = (wanted, "bf16", "fp16", "fp32")
    for dtype in order:
        if dtype in runs:
            return dtype
    return None


# ---- pipelines: memory and batch


def _check_memory(scene: _Scene, where: str, pipeline: Pipeline) -> Iterator[Violation]:
    if not scene.computable(pipeline):
        return
    work = scene.problem.workload
    typical_tokens = work.mean_input_tokens + work.mean_output_tokens
    longest_tokens = float(max(_needed_tokens(scene.problem), pipeline.max_model_len))
    final = len(pipeline.stages) - 1
    for s, stage in enumerate(pipeline.stages):
        here = f"{where}.stages[{s}]"
        machine = scene.machines[stage.instance_type]
        memory = scene.estimator.stage_memory(
            scene.model,
            machine,
            layers=stage.layers,
            tensor_parallel=stage.tensor_parallel,
            first=s == 0,
            last=s == final,
        )
        reserved, start = _kept_for_another(scene, stage, memory, longest_tokens)
        taken = memory.weight_bytes + memory.activation_bytes + memory.other_bytes + reserved
        left = memory.usable_bytes - taken
        if left < 0:
            yield found("weights_do_not_fit", here, taken, memory.usable_bytes)
        for code, stated, right in (
            ("weight_bytes_differ", stage.weight_bytes, memory.weight_bytes),
            ("activation_bytes_differ", stage.activation_bytes, memory.activation_bytes),
            ("kv_cache_bytes_differ", stage.kv_cache_bytes, left),
            ("other_bytes_differ", stage.other_bytes, memory.other_bytes),
            ("reserved_bytes_differ", stage.reserved_bytes, reserved),
            ("start_kv_cache_bytes_differ", stage.start_kv_cache_bytes, start),
        ):
            # Plans of earlier versions do not state what else the engine takes.
            if stated is not None and stated != right:
                yield found(code, here, stated, right)
        matrices, parts = _matrix_bytes(scene, stage, first=s == 0, last=s == final)
        if not abs(stage.weight_bytes - matrices) <= parts:
            yield found("weight_bytes_not_of_matrices", here, stage.weight_bytes, matrices)
        room = min(stage.kv_cache_bytes, left)
        for code, count, tokens in (
            ("kv_cache_too_small", pipeline.max_num_seqs, typical_tokens),
            ("longest_request_does_not_fit", 1, longest_tokens),
        ):
            needed = count * scene.estimator.sequence_bytes(
                scene.model,
                machine,
                layers=stage.layers,
                tensor_parallel=stage.tensor_parallel,
                tokens=tokens,
                input_tokens=work.mean_prefill_tokens,
                last=s == final,
            )
            if not needed <= room * (1 + 1e-12):
                yield found(code, here, needed, room)


def _kept_for_another(scene: _Scene, stage: Stage, memory: StageMemory, longest_tokens: float) -> tuple[int, int]:
    """Bytes of a GPU that a second engine beside this one needs, and those of them that hold its first KV cache.

    Activations and context once more; each layer's cache of so many of the longest requests, in whole blocks and one
    to spare; and the same with their weights for the layers that it may have more, as if all were of the largest kind.
    """
    problem, model, degree = scene.problem, scene.model, stage.tensor_parallel
    machine = scene.machines[stage.instance_type]
    sequences = problem.handover_sequences
    if sequences < 1:
        return 0, 0
    block = 128 if machine.provider == "local" else 16
    whole = math.ceil(longest_tokens / block) * block
    cached, weights = [], []
    for index in range(model.layer_count):
        kind = model.layer_pattern[index]
        one, spare = (math.ceil(model.layer_kv_bytes_per_sequence(kind, t, degree)) for t in (whole, block))
        cached.append(sequences * one + spare)
    for index in {model.layer_pattern.index(kind) for kind in model.layer_pattern}:
        held = (
            scene.estimator.stage_memory(
                model, machine, layers=layers, tensor_parallel=degree, first=False, last=False
            ).weight_bytes
            for layers in ((index, index + 1), (index, index))
        )
        weights.append(next(held) - next(held))
    start = sum(cached[slice(*stage.layers)])
    more = problem.handover_layers * (max(weights) + max(cached))
    return memory.activation_bytes + memory.other_bytes + start + more, start


def _matrix_bytes(scene: _Scene, stage: Stage, *, first: bool, last: bool) -> tuple[float, int]:
    """Bytes of a stage's weights on one GPU, from the model's matrices, and of how many rounded parts."""
    model, degree = scene.model, stage.tensor_parallel
    element = DTYPE_BITS[model.base_dtype] / BITS_PER_BYTE

    def layer(index: int, ranks: int) -> float:
        kind = model.layer_kinds[model.layer_pattern[index]]
        matrices = sum(m.weight_bytes(ranks, model.base_dtype, model.quantization) for m in kind.linears)
        return matrices + kind.other_parameter_count * element

    total = math.fsum(layer(index, degree) for index in range(*stage.layers))
    parts = stage.layers[1] - stage.layers[0]
    # The paper places neither the embedding nor the head.
    if scene.estimator.name != "paper":
        rows = -(-model.vocabulary_size // degree)
        count = 0
        if first:
            count += rows * model.hidden_size + model.other_embedding_parameter_count
        if last:
            count += model.final_norm_parameter_count + (rows if model.head_bias else 0)
            count += 0 if model.tied_embeddings and first else rows * model.hidden_size
        total += count * element
        parts += 2
    if model.checkpoint_bytes is not None:
        once = model.embedding_parameter_count + model.head_parameter_count + model.final_norm_parameter_count
        whole = math.fsum(layer(index, 1) for index in range(model.layer_count)) + once * element
        total *= model.checkpoint_bytes / whole
    return total, parts + 1


def _needed_tokens(problem: PlacementProblem) -> int:
    """Tokens of the longest request that must fit."""
    if problem.max_model_len is not None:
        return problem.max_model_len
    return math.ceil(
        max(query.input_tokens.maximum + query.output_tokens.maximum for query in problem.workload.query_types)
    )


def _check_batch(scene: _Scene, where: str, pipeline: Pipeline) -> Iterator[Violation]:
    needed, handled = _needed_tokens(scene.problem), scene.model.max_position_tokens
    if pipeline.max_model_len < needed:
        yield found("max_model_len_too_short", where, pipeline.max_model_len, needed)
    if pipeline.max_model_len > handled:
        yield found("max_model_len_beyond_model", where, pipeline.max_model_len, handled)
    machines = [scene.machines[s.instance_type] for s in pipeline.stages if s.instance_type in scene.machines]
    limit = min((scene.estimator.batch_limit(machine) for machine in machines), default=None)
    if limit is not None and pipeline.max_num_seqs > limit:
        yield found("batch_limit_exceeded", where, pipeline.max_num_seqs, limit)
    shares = len(pipeline.stages) if scene.estimator.micro_batches else 1
    if pipeline.micro_batch * shares != pipeline.max_num_seqs:
        share = f"{pipeline.max_num_seqs} / {shares}"
        yield found("micro_batch_differs", where, pipeline.micro_batch, share)


# ---- pipelines: times and money


def _figures(scene: _Scene, pipeline: Pipeline) -> _Figures:
    """Eqs. 4 and 5 at the pipeline's own micro-batch, sends counted in the sender's stage.

    Micro-batches pass the stages one after another; a request's first token comes after its own prefill, and
    the rest of its time spreads over its decode steps. The paper's request waits for the slowest prefill, then
    for the slowest decode.
    """
    work, size = scene.problem.workload, float(pipeline.micro_batch)
    prefill = _phase_seconds(scene, pipeline, "prefill", size, work.mean_prefill_tokens)
    decode = _phase_seconds(scene, pipeline, "decode", size, work.mean_input_tokens)
    slowest = max(prefill) + max(decode)
    if scene.estimator.micro_batches:
        latency = math.fsum(prefill) + math.fsum(decode)
        first_token = math.fsum(_phase_seconds(scene, pipeline, "prefill", 1.0, work.mean_prefill_tokens))
    else:
        latency, first_token = slowest, max(prefill)
    steps = scene.estimator.decode_steps(work.mean_output_tokens)
    if steps == 0:
        first_token = latency
    return _Figures(
        requests_per_s=size / slowest,
        ttft_s=first_token,
        tpot_s=(latency - first_token) / steps if steps > 0 else 0.0,
        latency_s=latency,
    )


def _phase_seconds(scene: _Scene, pipeline: Pipeline, phase: Phase, batch: float, input_tokens: float) -> list[float]:
    """Seconds of a phase in each stage, its send to the next stage included."""
    output_tokens, final = scene.problem.workload.mean_output_tokens, len(pipeline.stages) - 1
    offers = _offers(scene, pipeline)
    seconds = []
    for s, stage in enumerate(pipeline.stages):
        machine = scene.machines[stage.instance_type]
        spent: float = scene.estimator.stage_seconds(
            scene.model,
            machine,
            layers=stage.layers,
            tensor_parallel=stage.tensor_parallel,
            batch=[batch],
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            first=s == 0,
            last=s == final,
            phase=phase,
        ).item()
        if s < final:
            following, crossed = pipeline.stages[s + 1], _crossed(scene, offers[s], offers[s + 1])
            spent += scene.estimator.boundary_seconds(
                scene.model,
                machine,
                scene.machines[following.instance_type],
                same_node=stage.node == following.node,
                batch=[batch],
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                phase=phase,
                between=None if crossed is None else crossed.link,
            ).item()
        seconds.append(spent)
    return seconds


def _check_predictions(scene: _Scene, where: str, pipeline: Pipeline) -> Iterator[Violation]:
    if not scene.computable(pipeline):
        return
    figures, stated = scene.figures(where, pipeline), pipeline.predictions
    output_tokens_per_s = figures.requests_per_s * scene.problem.workload.mean_output_tokens
    pairs: dict[str, tuple[Prediction, float]] = {
        "requests_per_s": (stated.requests_per_s, figures.requests_per_s),
        "ttft_s": (stated.ttft_s, figures.ttft_s),
        "tpot_s": (stated.tpot_s, figures.tpot_s),
        "latency_s": (stated.latency_s, figures.latency_s),
        "output_tokens_per_s": (stated.output_tokens_per_s, output_tokens_per_s),
    }
    for name, (prediction, right) in pairs.items():
        here = f"{where}.predictions.{name}"
        if not close(prediction.value, right):
            yield found("prediction_differs", here, prediction.value, right)
        if not prediction.low <= prediction.value <= prediction.high:
            band = f"{prediction.low:.6g} to {prediction.high:.6g}"
            yield found("band_excludes_value", here, prediction.value, band)
    slo = scene.problem.slo
    for name, limit in slo.limits().items() if slo is not None and slo.hard and slo.percentile is None else ():
        if not figures.limited()[name] <= limit * (1 + SAME):
            yield found("slo_broken", f"{where}.{name}", figures.limited()[name], limit)


def _egress_usd_per_gb(scene: _Scene, pipeline: Pipeline) -> float:
    """Of all zone links that a request crosses together."""
    links = [_crossed(scene, one, other) for one, other in pairwise(_offers(scene, pipeline))]
    return math.fsum(link.egress_usd_per_gb for link in links if link is not None)


def _egress(scene: _Scene, where: str, pipeline: Pipeline) -> float:
    """$/h of what one copy sends over zone links at its rate."""
    usd_per_gb = _egress_usd_per_gb(scene, pipeline)
    if usd_per_gb == 0:
        return 0.0
    work = scene.problem.workload
    each = scene.estimator.sent_bytes(
        scene.model, input_tokens=work.mean_prefill_tokens, output_tokens=work.mean_output_tokens
    )
    sent_gb = each * scene.figures(where, pipeline).requests_per_s * SECONDS_PER_HOUR / GB
    return usd_per_gb * sent_gb


def _copy_cost(scene: _Scene, where: str, pipeline: Pipeline) -> float:
    """$/h of one copy: its machines and its egress."""
    machines = math.fsum(scene.pools[name].offer.price_usd_per_hour or 0.0 for name in pipeline.nodes)
    return machines + _egress(scene, where, pipeline)


def _check_cost(scene: _Scene, where: str, pipeline: Pipeline) -> Iterator[Violation]:
    known = all(name in scene.pools for name in pipeline.nodes)
    if known and (scene.computable(pipeline) or _egress_usd_per_gb(scene, pipeline) == 0):
        egress, cost = _egress(scene, where, pipeline), _copy_cost(scene, where, pipeline)
        if not close(pipeline.egress_usd_per_hour, egress):
            yield found("pipeline_egress_differs", where, pipeline.egress_usd_per_hour, egress)
        if not close(pipeline.cost_usd_per_hour, cost):
            yield found("pipeline_cost_differs", where, pipeline.cost_usd_per_hour, cost)


_PIPELINE_CHECKS: dict[str, Callable[[_Scene, str, Pipeline], Iterator[Violation]]] = {
    "layers in order": _check_layers,
    "nodes and their offers": _check_nodes,
    "nodes one after another": _check_order,
    "one region": _check_regions,
    "groups of GPUs": _check_groups,
    "an engine's limits": _check_engine,
    "memory of each stage": _check_memory,
    "batch limits": _check_batch,
    "predictions": _check_predictions,
    "a cost": _check_cost,
}


# ---- the plan


def _check_routes(scene: _Scene) -> Iterator[Violation]:
    names = [query.name for query in scene.problem.workload.query_types]
    sums = dict.fromkeys(names, 0.0)
    for r, route in enumerate(scene.plan.routes):
        where = f"routes[{r}]"
        if not 0 <= route.deployment < len(scene.plan.deployments):
            yield found("route_deployment_unknown", where, route.deployment, len(scene.plan.deployments) - 1)
        if route.query_type in sums:
            sums[route.query_type] += route.fraction
        else:
            yield found("route_query_type_unknown", where, route.query_type, ", ".join(names))
    for name, total in sums.items():
        if not close(total, 1.0):
            yield found("route_fractions", f"routes of {name}", total, 1)


def _check_totals(scene: _Scene) -> Iterator[Violation]:
    plan, problem = scene.plan, scene.problem
    if plan.objective_name != problem.objective:
        yield found("objective_name_differs", "objective_name", plan.objective_name, problem.objective)
    pipelines = [pipeline for _, pipeline in scene.pipelines()]
    if not all(scene.computable(p) and all(name in scene.pools for name in p.nodes) for p in pipelines):
        return
    figures = [scene.figures(where, pipeline) for where, pipeline in scene.pipelines()]
    cost = math.fsum(p.count * _copy_cost(scene, where, p) for where, p in scene.pipelines())
    egress = math.fsum(p.count * _egress(scene, where, p) for where, p in scene.pipelines())
    rate = math.fsum(p.count * f.requests_per_s for p, f in zip(pipelines, figures, strict=True))
    if not close(plan.requests_per_s, rate):
        yield found("plan_rate_differs", "requests_per_s", plan.requests_per_s, rate)
    if not close(plan.cost_usd_per_hour, cost):
        yield found("plan_cost_differs", "cost_usd_per_hour", plan.cost_usd_per_hour, cost)
    if not close(plan.egress_usd_per_hour, egress):
        yield found("plan_egress_differs", "egress_usd_per_hour", plan.egress_usd_per_hour, egress)
    tokens_per_hour = rate * problem.workload.mean_output_tokens * SECONDS_PER_HOUR
    price, stated = cost / tokens_per_hour * 1e6, plan.usd_per_million_output_tokens
    if not close(stated, price):
        yield found("token_price_differs", "usd_per_million_output_tokens", stated, price)
    demand = problem.workload.requests_per_s
    if problem.objective == "cost" and demand is not None and not rate >= demand * (1 - SAME):
        yield found("demand_not_met", "requests_per_s", rate, demand)
    if problem.objective == "expected_cost":
        runs = [(p.count, _long_run(scene, where, p)) for where, p in scene.pipelines()]
        tokens = math.fsum(count * run.tokens_per_hour for count, run in runs)
        wanted = tokens if demand is None else demand * problem.workload.mean_output_tokens * SECONDS_PER_HOUR
        if not tokens >= wanted * (1 - SAME):
            yield found("demand_not_met", "output tokens per hour after interruptions", tokens, wanted)
        bill = math.fsum(count * run.usd_per_hour for count, run in runs)
        objective = bill / wanted * 1e6 if wanted > 0 else math.inf
    elif problem.objective == "cost":
        objective = cost
    else:
        objective = math.fsum(
            p.count * f.requests_per_s * _penalty(problem, scene.percentiles() or f.limited())
            for p, f in zip(pipelines, figures, strict=True)
        )
        if problem.objective == "throughput_per_cost":
            objective = objective / cost if cost > 0 else math.inf
    if not close(plan.objective, objective):
        yield found("objective_differs", "objective", plan.objective, objective)


def _long_run(scene: _Scene, where: str, pipeline: Pipeline) -> LongRun:
    """One copy with the interruptions of its machines."""
    problem = scene.problem
    prefill = _phase_seconds(
        scene, pipeline, "prefill", float(pipeline.micro_batch), problem.workload.mean_prefill_tokens
    )
    return long_run(
        problem,
        [scene.pools[name].offer for name in pipeline.nodes],
        sequences=pipeline.max_num_seqs,
        micro_batch=pipeline.micro_batch,
        slowest_prefill_s=max(prefill),
        requests_per_s=scene.figures(where, pipeline).requests_per_s,
        egress_usd_per_hour=_egress(scene, where, pipeline),
    )


def _penalty(problem: PlacementProblem, latencies: Mapping[str, float]) -> float:
    """What eq. 7 leaves of a pipeline's worth under a soft Slo, by its worst latency."""
    if problem.slo is None or problem.slo.hard:
        return 1.0
    worst = max(latencies[name] / limit for name, limit in problem.slo.limits().items())
    return 1 - problem.latency_penalty * max(0.0, worst - 1)


def _check_status(scene: _Scene) -> Iterator[Violation]:
    yield from check_status(scene.plan, minimised=scene.problem.objective in {"cost", "expected_cost"})


def _check_certificate(scene: _Scene) -> Iterator[Violation]:
    plan, certificate = scene.plan, scene.plan.certificate
    if certificate is None or plan.bound is None or scene.problem.objective == "expected_cost":
        return
    try:
        proven = _proven(scene, certificate, plan.bound)
    except ValueError as error:
        limit = "a usable weight for each kind of layer"
        if certificate.kind != "layer_rate":
            limit = "a usable price for each offer"
        yield found("certificate_invalid", "certificate", str(error), limit)
        return
    yield from _check_covered(scene)
    minimised = scene.problem.objective == "cost"
    overstated = plan.bound - proven.bound if minimised else proven.bound - plan.bound
    if not (proven.holds and overstated <= SAME * abs(plan.bound)):
        yield found("bound_not_proven", "bound", plan.bound, proven.bound if proven.holds else proven.why)
        return
    side = "lower" if minimised else "upper"
    scene.confirmed.append(f"{side} bound {plan.bound:.6g} {_UNITS[scene.problem.objective]} confirmed, {proven.why}")


def _proven(scene: _Scene, certificate: Certificate, stated: float) -> Proven:
    problem = scene.problem
    if problem.slo is not None and problem.slo.percentile is not None:
        # What bounds all plans bounds those that keep a percentile.
        problem = problem.model_copy(update={"slo": None, "latency_penalty": 0.0})
    if certificate.kind == "layer_rate":
        bound = layer_rate_bound(problem, scene.estimator, certificate.kind_weights)
        return Proven(bound=bound, why="by the best rate of layers on each machine", holds=True)
    # Only this proof needs a compiler.
    from hetplan.verification.prices import proven_bound

    return proven_bound(problem, scene.estimator, certificate, stated)


def _check_covered(scene: _Scene) -> Iterator[Violation]:
    for where, pipeline in scene.pipelines():
        for s, stage in enumerate(pipeline.stages):
            machine = scene.machines.get(stage.instance_type)
            if machine is not None and stage.tensor_parallel > 0 and machine.gpu_count % stage.tensor_parallel:
                limit = f"degrees that divide {machine.gpu_count}"
                yield found("certificate_does_not_cover", f"{where}.stages[{s}]", stage.tensor_parallel, limit)


_CHECKS: dict[str, Callable[[_Scene], Iterator[Violation]]] = {
    "calibrations and their digests": _check_calibrations,
    "offers with prices": _check_offers,
    "promises": _check_promises,
    "deployments of the model": _check_deployments,
    "an inventory": _check_inventory,
    "routes": _check_routes,
    "totals and an objective": _check_totals,
    "a status, bound and gap": _check_status,
}
