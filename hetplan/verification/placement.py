"""Checks a placement plan against the problem it carries: many short checks over one scene, hence the length.

Nothing here comes from the solvers, nor from the code that combines stages for them: of the estimator only
the times and bytes of single stages are taken, and what follows from them is computed again. A plan may
have been edited or damaged in any way, so every check runs guarded: it yields violations and never stops
the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from pydantic import field_validator

from hetplan.base import Frozen
from hetplan.catalog.dtypes import DTYPE_BITS, Dtype
from hetplan.catalog.engines import LIMITS, LimitName
from hetplan.catalog.hardware import GpuSpec, InstanceType
from hetplan.catalog.model import ModelSpec
from hetplan.catalog.offers import Offer, Pool, ZoneLink
from hetplan.errors import InvalidInputError
from hetplan.estimator.base import Estimator, Phase, make_estimator
from hetplan.plan import OPTIMALITY_GAP, Certificate, Pipeline, Plan, Prediction, Stage
from hetplan.problem.placement import PlacementProblem
from hetplan.units import BITS_PER_BYTE, GB, SECONDS_PER_HOUR
from hetplan.verification.certificate import Proven, allowed_degrees, layer_rate_bound

# Sums of the same numbers in another order differ by less than this.
_TOLERANCE = 1e-9

_UNITS = {"throughput": "req/s", "throughput_per_cost": "req/s per $/h", "cost": "$/h"}

# Every code, and what it means; {value} and {limit} are the violation's.
MEANINGS: dict[str, str] = {
    "malformed": "{value}; a plan has {limit}",
    "check_failed": "could not be checked: {value}; needed: {limit}",
    "calibration_missing": "{value} is in the cluster without a calibration; needed: {limit}",
    "calibration_repeated": "{value} calibrations of one GPU; at most {limit}",
    "calibration_digest_missing": "the plan states the sha256 {value}; the calibration has {limit}",
    "calibration_changed": "the plan states the sha256 {value}; the calibration's content has {limit}",
    "price_not_positive": "costs {value} $/h; a price is above {limit}",
    "promise_not_checkable": "{value} cannot be checked; what can: {limit}",
    "model_differs": "serves {value}; the problem asks for {limit}",
    "role_not_supported": "a pipeline in the role {value}; placement knows {limit}",
    "layers_missing": "goes on at layer {value}; layer {limit} comes next and is nowhere",
    "layers_overlap": "starts at layer {value}; the layers before {limit} are placed already",
    "layers_outside_model": "ends at layer {value}; the model has {limit}",
    "stage_empty": "holds {value} layers; a stage has at least {limit}",
    "instance_type_unknown": "runs on {value}; the cluster has {limit}",
    "tensor_parallel_invalid": "tensor-parallel degree {value}; the model and the machine allow {limit}",
    "gpu_count_differs": "{value} GPUs; its tensor-parallel degree is {limit}",
    "gpu_outside_node": "uses GPU {value}; the machine's last is {limit}",
    "gpu_used_twice": "uses GPU {value}, which {limit} has",
    "compute_dtype_differs": "states {value}; its GPU multiplies in {limit}",
    "node_unknown": "runs on node {value}; the pipeline's last is {limit}",
    "node_unused": "{value} stages run on it; a machine that is paid for has at least {limit}",
    "offer_unknown": "{value} is not offered; the cluster offers {limit}",
    "offer_of_other_type": "runs on a {value}; the node's offer is for a {limit}",
    "node_visited_twice": "its stages are {value} of the pipeline; a node's stages follow one another: {limit}",
    "regions_mixed": "its neighbour is in {limit}, it is in {value}; a pipeline crosses regions by zone links alone",
    "engine_limit_broken": "{value}; the engine asks that {limit}",
    "inventory_exceeded": "the plan uses {value} machines; the cluster has {limit}",
    "weights_do_not_fit": "weights, activations and the engine take {value} bytes a GPU; usable are {limit}",
    "weight_bytes_differ": "states {value} bytes of weights a GPU; the estimator gives {limit}",
    "weight_bytes_not_of_matrices": "states {value} bytes of weights a GPU; its matrices add up to {limit}",
    "activation_bytes_differ": "states {value} bytes of activations a GPU; the estimator gives {limit}",
    "kv_cache_bytes_differ": "states {value} bytes of KV cache a GPU; what is left for it is {limit}",
    "kv_cache_too_small": "the sequences in flight take {value} bytes a GPU; the KV cache has {limit}",
    "longest_request_does_not_fit": "the longest request takes {value} bytes a GPU; the KV cache has {limit}",
    "max_model_len_too_short": "serves requests of up to {value} tokens; the problem asks for {limit}",
    "max_model_len_beyond_model": "serves requests of up to {value} tokens; the model handles {limit}",
    "batch_limit_exceeded": "keeps {value} sequences in flight; its engines take {limit}",
    "micro_batch_differs": "has micro-batches of {value}; its stages share its sequences as {limit}",
    "prediction_differs": "states {value}; recomputed: {limit}",
    "band_excludes_value": "predicts {value} outside its own band {limit}",
    "slo_broken": "{value} s; the hard limit is {limit} s",
    "pipeline_cost_differs": "states {value} $/h; its machines and its egress cost {limit}",
    "pipeline_egress_differs": "states {value} $/h of egress; what it sends over zone links costs {limit}",
    "plan_rate_differs": "states {value} req/s; its pipelines add up to {limit}",
    "plan_cost_differs": "states {value} $/h; its machines and its egress cost {limit}",
    "plan_egress_differs": "states {value} $/h of egress; what its pipelines send over zone links costs {limit}",
    "token_price_differs": "states {value} $ per million output tokens; recomputed: {limit}",
    "demand_not_met": "serves {value} req/s; the workload brings {limit}",
    "route_fractions": "the fractions of its routes sum to {value}; they must sum to {limit}",
    "route_query_type_unknown": "routes {value}; the workload has {limit}",
    "route_deployment_unknown": "leads to deployment {value}; the plan's last is {limit}",
    "objective_name_differs": "the plan's objective is {value}; the problem's is {limit}",
    "objective_differs": "states {value}; recomputed: {limit}",
    "bound_incomplete": "the plan gives {value}; bound, gap and certificate come together: {limit}",
    "bound_on_wrong_side": "the bound {value} contradicts the objective {limit}, which a plan reaches",
    "gap_differs": "states a gap of {value}; bound and objective are {limit} apart",
    "status_differs": "claims to be {value}; its gap makes it {limit}",
    "certificate_invalid": "{value}; needed: {limit}",
    "certificate_does_not_cover": "tensor-parallel degree {value}; the certificate counts {limit} only",
    "bound_not_proven": "the bound is {value}; the certificate proves {limit}",
}


class Violation(Frozen):
    """One way in which a plan is unsound.

    Attributes
    ----------
    code : str
        What kind of fault it is.
    where : str
        The part of the plan, as a path such as ``deployments[0].pipelines[1].stages[0]``.
    value, limit : str or float
        What the plan has and what it should have or may have at most.
    """

    code: str
    where: str
    value: str | float
    limit: str | float

    @field_validator("value", "limit", mode="before")
    @classmethod
    def _spell_out(cls, value: Any) -> str | float:
        """Numbers as they are; infinities, NaN and anything else as text, so that a finding can always be stated."""
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        return str(value)

    def __str__(self) -> str:
        meaning = MEANINGS.get(self.code, "{value}; the limit is {limit}")
        return f"{self.where}: {meaning.format(value=_shown(self.value), limit=_shown(self.limit))} [{self.code}]"


def _shown(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.12g}"


def _found(code: str, where: str, value: object, limit: object) -> Violation:
    return Violation.from_dict({"code": code, "where": where, "value": value, "limit": limit})


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

    def figures(self, where: str, pipeline: Pipeline) -> _Figures:
        """Recomputed once for each pipeline."""
        if where not in self.known_figures:
            self.known_figures[where] = _figures(self, pipeline)
        return self.known_figures[where]


def verify_plan(plan: Plan) -> list[Violation]:
    """Check a plan against its own problem.

    Parameters
    ----------
    plan : Plan
        Also one whose fields were changed without being checked.

    Returns
    -------
    list of Violation
        Empty when the plan is sound. A fault often shows in several places: changed layers also change times.
    """
    return examine_plan(plan)[0]


def confirmed_bound(plan: Plan) -> str | None:
    """Which bound of the plan is proven and by what, as a phrase; None without a proven bound."""
    return examine_plan(plan)[1]


def examine_plan(plan: Plan) -> tuple[list[Violation], str | None]:
    """What `verify_plan` and `confirmed_bound` say, at the cost of one."""
    found: list[Violation] = []
    try:
        # A fresh copy has no cached values of an earlier state.
        plan = Plan.from_dict(plan.model_dump(warnings=False))
    except Exception as error:
        lines = str(error).splitlines() if isinstance(error, InvalidInputError) else [repr(error)]
        found += [_found("malformed", "plan", line, "valid fields") for line in lines]
    malformed = bool(found)
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
            )
        )
        yield from ()

    found += _guarded("problem", "a readable problem", set_scene)
    for scene in scenes:
        found += _guarded("deployments", "readable pipelines", _check_pipelines, scene)
        for needed, check in _CHECKS.items():
            found += _guarded("plan", needed, check, scene)
        # How long the proof takes is bounded only where every field is within its own limits.
        if not malformed:
            found += _guarded("certificate", "a certificate", _check_certificate, scene)
    confirmed = [phrase for scene in scenes for phrase in scene.confirmed]
    return list(dict.fromkeys(found)), confirmed[0] if confirmed else None


def _guarded(where: str, needed: str, check: Callable[..., Iterable[Violation]], *arguments: Any) -> list[Violation]:
    """What a check finds; an exception inside it is a finding too, since a damaged plan can break any assumption."""
    found: list[Violation] = []
    try:
        for violation in check(*arguments):
            found.append(violation)
    except Exception as error:
        found.append(_found("check_failed", where, f"{type(error).__name__}: {error}", needed))
    return found


def _close(one: float, other: float) -> bool:
    """Equal up to rounding; false for NaN."""
    return math.isclose(one, other, rel_tol=_TOLERANCE)


# ---- the problem


def _check_calibrations(scene: _Scene) -> Iterator[Violation]:
    stated = scene.problem.calibration_sha256
    counts = Counter(calibration.gpu for calibration in scene.problem.calibrations)
    for gpu in sorted({machine.gpu.name for machine in scene.machines.values()} - counts.keys()):
        yield _found("calibration_missing", "problem.calibrations", gpu, "one for each GPU")
    for gpu, count in counts.items():
        if count > 1:
            yield _found("calibration_repeated", f"problem.calibrations.{gpu}", count, 1)
    for calibration in scene.problem.calibrations:
        where, digest = f"problem.calibration_sha256.{calibration.gpu}", calibration.sha256
        if calibration.gpu not in stated:
            yield _found("calibration_digest_missing", where, "none", digest)
        elif stated[calibration.gpu] != digest:
            yield _found("calibration_changed", where, stated[calibration.gpu], digest)
    for gpu in sorted(stated.keys() - counts.keys()):
        where = f"problem.calibration_sha256.{gpu}"
        yield _found("calibration_changed", where, stated[gpu], "no content")


def _check_offers(scene: _Scene) -> Iterator[Violation]:
    for name, pool in scene.pools.items():
        where, price = f"problem.cluster.{name}", pool.offer.price_usd_per_hour
        free = price is None and pool.offer.market == "owned"
        if not free and (price is None or not price > 0):
            yield _found("price_not_positive", where, price, 0)
        if pool.offer.instance_type not in scene.machines:
            yield _found("instance_type_unknown", where, pool.offer.instance_type, ", ".join(scene.machines))


def _check_promises(scene: _Scene) -> Iterator[Violation]:
    """Promises that this checker cannot confirm are findings: silence would confirm them."""
    slo = scene.problem.slo
    if slo is not None and slo.percentile is not None:
        yield _found("promise_not_checkable", "problem.slo", f"the percentile {slo.percentile:g}", "means")
    for query in scene.problem.workload.query_types:
        if query.slo is not None:
            where = f"problem.workload.{query.name}"
            yield _found("promise_not_checkable", where, "a query type's own Slo", "the problem's Slo")


def _check_deployments(scene: _Scene) -> Iterator[Violation]:
    for d, deployment in enumerate(scene.plan.deployments):
        if deployment.model != scene.model.name:
            yield _found("model_differs", f"deployments[{d}]", deployment.model, scene.model.name)


def _check_inventory(scene: _Scene) -> Iterator[Violation]:
    used: Counter[str] = Counter()
    for _, pipeline in scene.pipelines():
        for name in pipeline.nodes:
            used[name] += pipeline.count
    for name, count in used.items():
        if name in scene.pools and count > scene.pools[name].count:
            yield _found("inventory_exceeded", f"problem.cluster.{name}", count, scene.pools[name].count)


# ---- pipelines: structure


def _check_pipelines(scene: _Scene) -> Iterator[Violation]:
    for where, pipeline in scene.pipelines():
        for needed, check in _PIPELINE_CHECKS.items():
            yield from _guarded(where, needed, check, scene, where, pipeline)


def _check_layers(scene: _Scene, where: str, pipeline: Pipeline) -> Iterator[Violation]:
    if pipeline.role != "both":
        yield _found("role_not_supported", where, pipeline.role, "both")
    total, expected = scene.model.layer_count, 0
    for s, stage in enumerate(pipeline.stages):
        here = f"{where}.stages[{s}]"
        start, stop = stage.layers
        if stop <= start:
            yield _found("stage_empty", here, stop - start, 1)
        if stop > total:
            yield _found("layers_outside_model", here, stop, total)
        if start > expected:
            yield _found("layers_missing", here, start, expected)
        if start < expected:
            yield _found("layers_overlap", here, start, expected)
        expected = stop
    if expected < total:
        yield _found("layers_missing", where, "its end", expected)


def _check_nodes(scene: _Scene, where: str, pipeline: Pipeline) -> Iterator[Violation]:
    stages_on = Counter(stage.node for stage in pipeline.stages)
    for n, name in enumerate(pipeline.nodes):
        here = f"{where}.nodes[{n}]"
        if stages_on[n] == 0:
            yield _found("node_unused", here, 0, 1)
        if name not in scene.pools:
            yield _found("offer_unknown", here, name, ", ".join(scene.pools))
    for s, stage in enumerate(pipeline.stages):
        here = f"{where}.stages[{s}]"
        if not 0 <= stage.node < len(pipeline.nodes):
            yield _found("node_unknown", here, stage.node, len(pipeline.nodes) - 1)
            continue
        pool = scene.pools.get(pipeline.nodes[stage.node])
        if pool is not None and pool.offer.instance_type != stage.instance_type:
            yield _found("offer_of_other_type", here, stage.instance_type, pool.offer.instance_type)


def _check_order(scene: _Scene, where: str, pipeline: Pipeline) -> Iterator[Violation]:
    """Engines order their ranks node by node."""
    stages_on: dict[int, list[int]] = {}
    for s, stage in enumerate(pipeline.stages):
        stages_on.setdefault(stage.node, []).append(s)
    for node, stages in stages_on.items():
        if stages[-1] - stages[0] >= len(stages):
            consecutive = list(range(stages[0], stages[0] + len(stages)))
            yield _found("node_visited_twice", f"{where}.nodes[{node}]", stages, consecutive)


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
            yield _found("regions_mixed", f"{where}.stages[{s}]", *places)


def _check_groups(scene: _Scene, where: str, pipeline: Pipeline) -> Iterator[Violation]:
    owners: dict[tuple[int, int], str] = {}
    for s, stage in enumerate(pipeline.stages):
        here = f"{where}.stages[{s}]"
        for gpu in stage.gpu_indices:
            owner = owners.setdefault((stage.node, gpu), f"stages[{s}]")
            if owner != f"stages[{s}]" or stage.gpu_indices.count(gpu) > 1:
                yield _found("gpu_used_twice", here, gpu, owner)
        if len(stage.gpu_indices) != stage.tensor_parallel:
            yield _found("gpu_count_differs", here, len(stage.gpu_indices), stage.tensor_parallel)
        machine = scene.machines.get(stage.instance_type)
        if machine is None:
            yield _found("instance_type_unknown", here, stage.instance_type, ", ".join(scene.machines))
            continue
        for gpu in stage.gpu_indices:
            if not 0 <= gpu < machine.gpu_count:
                yield _found("gpu_outside_node", here, gpu, machine.gpu_count - 1)
        allowed = allowed_degrees(scene.model, machine)
        if stage.tensor_parallel not in allowed:
            yield _found("tensor_parallel_invalid", here, stage.tensor_parallel, ", ".join(map(str, allowed)) or "none")
        native = _native_dtype(machine.gpu, scene.model.compute_dtype)
        # The paper's estimator does not ask whether a GPU has the model's type.
        if scene.estimator.name == "calibrated" and stage.compute_dtype != native:
            yield _found("compute_dtype_differs", here, stage.compute_dtype, native)


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
            yield _found("engine_limit_broken", where, broken[limit], LIMITS[limit])


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
        taken = memory.weight_bytes + memory.activation_bytes + memory.other_bytes
        left = memory.usable_bytes - taken
        if left < 0:
            yield _found("weights_do_not_fit", here, taken, memory.usable_bytes)
        for code, stated, right in (
            ("weight_bytes_differ", stage.weight_bytes, memory.weight_bytes),
            ("activation_bytes_differ", stage.activation_bytes, memory.activation_bytes),
            ("kv_cache_bytes_differ", stage.kv_cache_bytes, left),
        ):
            if stated != right:
                yield _found(code, here, stated, right)
        matrices, parts = _matrix_bytes(scene, stage, first=s == 0, last=s == final)
        if not abs(stage.weight_bytes - matrices) <= parts:
            yield _found("weight_bytes_not_of_matrices", here, stage.weight_bytes, matrices)
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
                yield _found(code, here, needed, room)


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
        yield _found("max_model_len_too_short", where, pipeline.max_model_len, needed)
    if pipeline.max_model_len > handled:
        yield _found("max_model_len_beyond_model", where, pipeline.max_model_len, handled)
    machines = [scene.machines[s.instance_type] for s in pipeline.stages if s.instance_type in scene.machines]
    limit = min((scene.estimator.batch_limit(machine) for machine in machines), default=None)
    if limit is not None and pipeline.max_num_seqs > limit:
        yield _found("batch_limit_exceeded", where, pipeline.max_num_seqs, limit)
    shares = len(pipeline.stages) if scene.estimator.micro_batches else 1
    if pipeline.micro_batch * shares != pipeline.max_num_seqs:
        share = f"{pipeline.max_num_seqs} / {shares}"
        yield _found("micro_batch_differs", where, pipeline.micro_batch, share)


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
        if not _close(prediction.value, right):
            yield _found("prediction_differs", here, prediction.value, right)
        if not prediction.low <= prediction.value <= prediction.high:
            band = f"{prediction.low:.6g} to {prediction.high:.6g}"
            yield _found("band_excludes_value", here, prediction.value, band)
    slo = scene.problem.slo
    for name, limit in slo.limits().items() if slo is not None and slo.hard else ():
        if not figures.limited()[name] <= limit * (1 + _TOLERANCE):
            yield _found("slo_broken", f"{where}.{name}", figures.limited()[name], limit)


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
        if not _close(pipeline.egress_usd_per_hour, egress):
            yield _found("pipeline_egress_differs", where, pipeline.egress_usd_per_hour, egress)
        if not _close(pipeline.cost_usd_per_hour, cost):
            yield _found("pipeline_cost_differs", where, pipeline.cost_usd_per_hour, cost)


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
            yield _found("route_deployment_unknown", where, route.deployment, len(scene.plan.deployments) - 1)
        if route.query_type in sums:
            sums[route.query_type] += route.fraction
        else:
            yield _found("route_query_type_unknown", where, route.query_type, ", ".join(names))
    for name, total in sums.items():
        if not _close(total, 1.0):
            yield _found("route_fractions", f"routes of {name}", total, 1)


def _check_totals(scene: _Scene) -> Iterator[Violation]:
    plan, problem = scene.plan, scene.problem
    if plan.objective_name != problem.objective:
        yield _found("objective_name_differs", "objective_name", plan.objective_name, problem.objective)
    pipelines = [pipeline for _, pipeline in scene.pipelines()]
    if not all(scene.computable(p) and all(name in scene.pools for name in p.nodes) for p in pipelines):
        return
    figures = [scene.figures(where, pipeline) for where, pipeline in scene.pipelines()]
    cost = math.fsum(p.count * _copy_cost(scene, where, p) for where, p in scene.pipelines())
    egress = math.fsum(p.count * _egress(scene, where, p) for where, p in scene.pipelines())
    rate = math.fsum(p.count * f.requests_per_s for p, f in zip(pipelines, figures, strict=True))
    if not _close(plan.requests_per_s, rate):
        yield _found("plan_rate_differs", "requests_per_s", plan.requests_per_s, rate)
    if not _close(plan.cost_usd_per_hour, cost):
        yield _found("plan_cost_differs", "cost_usd_per_hour", plan.cost_usd_per_hour, cost)
    if not _close(plan.egress_usd_per_hour, egress):
        yield _found("plan_egress_differs", "egress_usd_per_hour", plan.egress_usd_per_hour, egress)
    tokens_per_hour = rate * problem.workload.mean_output_tokens * SECONDS_PER_HOUR
    price, stated = cost / tokens_per_hour * 1e6, plan.usd_per_million_output_tokens
    if not _close(stated, price):
        yield _found("token_price_differs", "usd_per_million_output_tokens", stated, price)
    demand = problem.workload.requests_per_s
    if problem.objective == "cost" and demand is not None and not rate >= demand * (1 - _TOLERANCE):
        yield _found("demand_not_met", "requests_per_s", rate, demand)
    if problem.objective == "expected_cost":
        yield _found("promise_not_checkable", "objective", "an expected cost", "throughput and cost")
        return
    if problem.objective == "cost":
        objective = cost
    else:
        objective = math.fsum(
            p.count * f.requests_per_s * _penalty(problem, f) for p, f in zip(pipelines, figures, strict=True)
        )
        if problem.objective == "throughput_per_cost":
            objective = objective / cost if cost > 0 else math.inf
    if not _close(plan.objective, objective):
        yield _found("objective_differs", "objective", plan.objective, objective)


def _penalty(problem: PlacementProblem, figures: _Figures) -> float:
    """What eq. 7 leaves of a pipeline's worth under a soft Slo, by its worst latency."""
    if problem.slo is None or problem.slo.hard:
        return 1.0
    worst = max(figures.limited()[name] / limit for name, limit in problem.slo.limits().items())
    return 1 - problem.latency_penalty * max(0.0, worst - 1)


def _check_status(scene: _Scene) -> Iterator[Violation]:
    plan = scene.plan
    parts = {"bound": plan.bound, "gap": plan.gap, "certificate": plan.certificate}
    present = [name for name, part in parts.items() if part is not None]
    if present and len(present) < len(parts):
        yield _found("bound_incomplete", "plan", ", ".join(present), "all or none")
    earned = "optimal" if plan.gap is not None and plan.gap <= OPTIMALITY_GAP else "feasible"
    if plan.status != earned:
        yield _found("status_differs", "status", plan.status, earned)
    if plan.bound is None:
        return
    slack = _TOLERANCE * abs(plan.objective)
    minimised = scene.problem.objective in {"cost", "expected_cost"}
    excess = plan.bound - plan.objective if minimised else plan.objective - plan.bound
    if not excess <= slack:
        yield _found("bound_on_wrong_side", "bound", plan.bound, plan.objective)
    gap = abs(plan.bound - plan.objective) / max(abs(plan.objective), 1e-9)
    if plan.gap is not None and not abs(plan.gap - gap) <= _TOLERANCE * max(1.0, gap):
        yield _found("gap_differs", "gap", plan.gap, gap)


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
        yield _found("certificate_invalid", "certificate", str(error), limit)
        return
    yield from _check_covered(scene)
    minimised = scene.problem.objective == "cost"
    overstated = plan.bound - proven.bound if minimised else proven.bound - plan.bound
    if not (proven.holds and overstated <= _TOLERANCE * abs(plan.bound)):
        yield _found("bound_not_proven", "bound", plan.bound, proven.bound if proven.holds else proven.why)
        return
    side = "lower" if minimised else "upper"
    scene.confirmed.append(f"{side} bound {plan.bound:.6g} {_UNITS[scene.problem.objective]} confirmed, {proven.why}")


def _proven(scene: _Scene, certificate: Certificate, stated: float) -> Proven:
    if certificate.kind == "layer_rate":
        bound = layer_rate_bound(scene.problem, scene.estimator, certificate.kind_weights)
        return Proven(bound=bound, why="by the best rate of layers on each machine", holds=True)
    # Only this proof needs a compiler.
    from hetplan.verification.prices import proven_bound

    return proven_bound(scene.problem, scene.estimator, certificate, stated)


def _check_covered(scene: _Scene) -> Iterator[Violation]:
    for where, pipeline in scene.pipelines():
        for s, stage in enumerate(pipeline.stages):
            machine = scene.machines.get(stage.instance_type)
            if machine is not None and stage.tensor_parallel > 0 and machine.gpu_count % stage.tensor_parallel:
                limit = f"degrees that divide {machine.gpu_count}"
                yield _found("certificate_does_not_cover", f"{where}.stages[{s}]", stage.tensor_parallel, limit)


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
