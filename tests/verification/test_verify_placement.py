"""A sound plan has no violations; every way of tampering with one is found, under its own code."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, reduce
from typing import Any

import pytest
from pydantic import BaseModel

import hetplan as hp
from hetplan.catalog.hardware import Link
from hetplan.catalog.offers import Cluster, Offer, Pool, ZoneLink
from hetplan.catalog.tables import get_calibration
from hetplan.estimator.base import make_estimator
from hetplan.estimator.pipeline import (
    StageShape,
    egress_usd_per_hour,
    micro_batch,
    predictions_at,
    sequences_that_fit,
    stage_memories,
)
from hetplan.plan import Certificate, Deployment, Pipeline, Plan, Provenance, Route, Stage
from hetplan.problem.placement import PlacementProblem
from hetplan.verification import Violation, verify_plan
from hetplan.verification.certificate import layer_rate_bound
from hetplan.verification.placement import MEANINGS

G6, G6E, G5 = "g6.12xlarge", "g6e.xlarge", "g5.xlarge"
WORKLOAD = hp.Workload(input_tokens=763, output_tokens=232)

# One stage of a plan built by hand: offer index, first GPU, tensor-parallel degree, layers.
HandStage = tuple[int, int, int, tuple[int, int]]


def on_demand(machine: str) -> str:
    return f"aws/us-west-2/{machine}/on_demand"


def make_problem(cluster: Mapping[str, int] | Cluster, model: str = "llama-3.1-8b", **options: Any) -> PlacementProblem:
    machines = cluster if isinstance(cluster, Cluster) else Cluster.from_counts(cluster, region="us-west-2")
    calibrations = tuple(get_calibration(gpu) for gpu in sorted({t.gpu.name for t in machines.instance_types}))
    return PlacementProblem(
        model=hp.ModelSpec.get(model),
        cluster=machines,
        calibrations=calibrations,
        calibration_sha256={c.gpu: c.sha256 for c in calibrations},
        **({"workload": WORKLOAD} | options),
    )


def make_pipeline(problem: PlacementProblem, nodes: Sequence[str], stages: Sequence[HandStage], count: int) -> Pipeline:
    estimator = make_estimator(problem)
    offers = {pool.offer.name: pool.offer for pool in problem.cluster.pools}
    shapes = [
        StageShape(
            layers,
            problem.cluster.instance_type(offers[nodes[node]].instance_type),
            degree,
            node,
            offers[nodes[node]].place,
        )
        for node, _, degree, layers in stages
    ]
    batch = micro_batch(estimator, sequences_that_fit(problem, estimator, shapes), len(shapes))
    assert batch > 0
    predicted = predictions_at(problem, estimator, shapes, batch)
    egress = egress_usd_per_hour(problem, estimator, shapes, predicted.requests_per_s.value)
    return Pipeline(
        nodes=tuple(nodes),
        stages=tuple(
            Stage(
                layers=shape.layers,
                node=shape.node,
                instance_type=shape.machine.name,
                gpu_indices=tuple(range(gpu, gpu + shape.tensor_parallel)),
                tensor_parallel=shape.tensor_parallel,
                compute_dtype=shape.machine.gpu.runs_as(problem.model.compute_dtype),
                weight_bytes=memory.weight_bytes,
                activation_bytes=memory.activation_bytes,
                kv_cache_bytes=memory.kv_cache_bytes,
                other_bytes=memory.other_bytes,
                reserved_bytes=memory.reserved_bytes,
                start_kv_cache_bytes=memory.start_kv_cache_bytes,
            )
            for shape, memory, (_, gpu, _, _) in zip(
                shapes, stage_memories(problem, estimator, shapes), stages, strict=True
            )
        ),
        count=count,
        max_num_seqs=batch * len(shapes) if estimator.micro_batches else batch,
        micro_batch=batch,
        max_model_len=problem.longest_request_tokens,
        predictions=predicted,
        cost_usd_per_hour=sum(offers[name].billed_usd_per_hour for name in nodes) + egress,
        egress_usd_per_hour=egress,
    )


def make_plan(
    problem: PlacementProblem, pipelines: Sequence[Pipeline], *, kind_weights: tuple[float, ...] | None = None
) -> Plan:
    rate = sum(p.count * p.predictions.requests_per_s.value for p in pipelines)
    cost = sum(p.count * p.cost_usd_per_hour for p in pipelines)
    objective = {"throughput": rate, "throughput_per_cost": rate / cost if cost else 0.0, "cost": cost}[
        problem.objective
    ]
    proof: dict[str, Any] = {"status": "feasible"}
    if kind_weights is not None:
        bound = layer_rate_bound(problem, make_estimator(problem), kind_weights)
        proof |= {
            "bound": bound,
            "gap": abs(bound - objective) / objective,
            "certificate": Certificate(kind="layer_rate", kind_weights=kind_weights),
        }
    return Plan(
        problem=problem,
        deployments=(Deployment(model=problem.model.name, pipelines=tuple(pipelines)),),
        routes=tuple(Route(query_type=q.name, deployment=0, fraction=1.0) for q in problem.workload.query_types),
        requests_per_s=rate,
        cost_usd_per_hour=cost,
        egress_usd_per_hour=sum(p.count * p.egress_usd_per_hour for p in pipelines),
        usd_per_million_output_tokens=cost / (rate * problem.workload.mean_output_tokens * 3600) * 1e6,
        objective_name=problem.objective,
        objective=objective,
        provenance=Provenance(solver="by hand", version="test"),
        **proof,
    )


# On each g6.12xlarge (4 GPUs): two groups of two. Two g6e.xlarge (1 GPU) behind one another.
ON_G6: list[HandStage] = [(0, 0, 2, (0, 16)), (0, 2, 2, (16, 32))]
ON_G6E: list[HandStage] = [(0, 0, 1, (0, 20)), (1, 0, 1, (20, 32))]


@cache
def sound_plan(**options: Any) -> Plan:
    problem = make_problem({G6: 2, G6E: 3, G5: 1}, **options)
    return make_plan(
        problem,
        [
            make_pipeline(problem, [on_demand(G6)], ON_G6, count=2),
            make_pipeline(problem, [on_demand(G6E), on_demand(G6E)], ON_G6E, count=1),
        ],
        kind_weights=(1.0,),
    )


@cache
def handover_plan() -> Plan:
    return sound_plan(handover_sequences=2, handover_layers=1)


@cache
def plan_for_demand() -> Plan:
    workload = hp.Workload(input_tokens=763, output_tokens=232, requests_per_s=2.0)
    return sound_plan(objective="cost", workload=workload)


@cache
def plan_with_two_kinds_of_layers() -> Plan:
    problem = make_problem({"p6-b200.48xlarge": 2}, model="deepseek-v3")
    assert len(problem.model.layer_kinds) == 2
    whole: list[HandStage] = [(0, 0, 8, (0, problem.model.layer_count))]
    return make_plan(
        problem, [make_pipeline(problem, [on_demand("p6-b200.48xlarge")], whole, count=2)], kind_weights=(1.0, 1.0)
    )


@cache
def plan_across_regions(*links: ZoneLink) -> Plan:
    west, east = (Cluster.from_counts({G6E: 1}, region=region) for region in ("us-west-2", "us-east-1"))
    problem = make_problem(Cluster(instance_types=west.instance_types, pools=west.pools + east.pools, zone_links=links))
    nodes = [pool.offer.name for pool in problem.cluster.pools]
    return make_plan(problem, [make_pipeline(problem, nodes, ON_G6E, count=1)], kind_weights=(1.0,))


COAST_TO_COAST = ZoneLink(
    ends=("aws/us-east-1", "aws/us-west-2"), link=Link(latency_s=0.03, bytes_per_s=5e8), egress_usd_per_gb=0.02
)


def plan_over_a_zone_link() -> Plan:
    return plan_across_regions(COAST_TO_COAST)


def changed(record: Any, path: str, value: Any) -> Any:
    """``record`` with the value at a dotted path replaced, unchecked; a function is given the old value."""
    name, _, rest = path.partition(".")
    if isinstance(record, BaseModel):
        old: Any = getattr(record, name)
    elif isinstance(record, dict):
        old = record[name]
    else:
        old = record[int(name)]
    if rest:
        new = changed(old, rest, value)
    elif callable(value):
        new = value(old)
    else:
        new = value
    if isinstance(record, BaseModel):
        return record.model_copy(update={name: new})
    if isinstance(record, dict):
        return record | {name: new}
    return (*record[: int(name)], new, *record[int(name) + 1 :])


def codes(plan: Plan) -> set[str]:
    return {violation.code for violation in verify_plan(plan)}


def raised(old: float) -> float:
    return old * 1.001


def lowered(old: float) -> float:
    return old * 0.999


A, B = "deployments.0.pipelines.0", "deployments.0.pipelines.1"
Change = tuple[str, Any]

# What is tampered with -> the code that must appear.
TAMPERED: dict[str, tuple[str, Callable[[], Plan], list[Change]]] = {
    "a layer is lost": ("layers_missing", sound_plan, [(f"{A}.stages.0.layers", (0, 15))]),
    "the last layer is lost": ("layers_missing", sound_plan, [(f"{A}.stages.1.layers", (16, 31))]),
    "the first layer is lost": ("layers_missing", sound_plan, [(f"{A}.stages.0.layers", (1, 16))]),
    "a layer is placed twice": ("layers_overlap", sound_plan, [(f"{A}.stages.0.layers", (0, 17))]),
    "stages in the wrong order": ("layers_overlap", sound_plan, [(f"{A}.stages", lambda s: s[::-1])]),
    "layers past the model": ("layers_outside_model", sound_plan, [(f"{A}.stages.1.layers", (16, 33))]),
    "a stage without layers": ("stage_empty", sound_plan, [(f"{A}.stages.0.layers", (0, 0))]),
    "a reserved role": ("role_not_supported", sound_plan, [(f"{A}.role", "prefill")]),
    "an unknown machine": ("instance_type_unknown", sound_plan, [(f"{A}.stages.0.instance_type", "g7.huge")]),
    "a GPU in two stages": ("gpu_used_twice", sound_plan, [(f"{A}.stages.1.gpu_indices", (1, 2))]),
    "a GPU twice in a stage": ("gpu_used_twice", sound_plan, [(f"{A}.stages.1.gpu_indices", (3, 3))]),
    "a GPU the node lacks": ("gpu_outside_node", sound_plan, [(f"{A}.stages.1.gpu_indices", (3, 4))]),
    "a GPU too many": ("gpu_count_differs", sound_plan, [(f"{B}.stages.0.gpu_indices", (0, 1))]),
    "a degree that does not divide the heads": (
        "tensor_parallel_invalid",
        sound_plan,
        [(f"{A}.stages.0.tensor_parallel", 3), (f"{A}.stages.0.gpu_indices", (0, 1, 2))],
    ),
    "a degree past the node": (
        "tensor_parallel_invalid",
        sound_plan,
        [(f"{B}.stages.0.tensor_parallel", 2), (f"{B}.stages.0.gpu_indices", (0, 1))],
    ),
    "a node that does not exist": ("node_unknown", sound_plan, [(f"{A}.stages.1.node", 1)]),
    "a node without a stage": ("node_unused", sound_plan, [(f"{A}.nodes", (on_demand(G6), on_demand(G6E)))]),
    "an offer the cluster lacks": ("offer_unknown", sound_plan, [(f"{A}.nodes.0", "aws/us-west-2/g6.12xlarge/spot")]),
    "an offer of another machine": ("offer_of_other_type", sound_plan, [(f"{A}.nodes.0", on_demand(G5))]),
    "another compute type": ("compute_dtype_differs", sound_plan, [(f"{A}.stages.0.compute_dtype", "fp16")]),
    "two regions in one pipeline": ("regions_mixed", plan_across_regions, []),
    "a node left and visited again": (
        "node_visited_twice",
        sound_plan,
        [
            (f"{A}.stages", lambda s: (s[0], changed(s[0], "node", 1), s[1])),
            (f"{A}.nodes", (on_demand(G6), on_demand(G6))),
        ],
    ),
    "two degrees on an engine that takes one": (
        "engine_limit_broken",
        sound_plan,
        [
            ("problem.engine", "vllm-0.32"),
            (f"{A}.stages.0.tensor_parallel", 1),
            (f"{A}.stages.0.gpu_indices", (0,)),
        ],
    ),
    "two types on an engine that takes one": (
        "engine_limit_broken",
        sound_plan,
        [("problem.engine", "vllm-0.32"), (f"{A}.stages.0.compute_dtype", "fp16")],
    ),
    "an engine that nobody knows": ("malformed", sound_plan, [("problem.engine", "vllm-9")]),
    "more copies than machines": ("inventory_exceeded", sound_plan, [(f"{A}.count", 3)]),
    "fewer machines in the cluster": ("inventory_exceeded", sound_plan, [("problem.cluster.pools.1.count", 1)]),
    "a smaller GPU": (
        "weights_do_not_fit",
        sound_plan,
        [("problem.cluster.instance_types.1.gpu.memory_bytes", 2**32)],
    ),
    "weights lowered": ("weight_bytes_differ", sound_plan, [(f"{A}.stages.0.weight_bytes", lambda b: b - 1)]),
    "a larger matrix": (
        "weight_bytes_not_of_matrices",
        sound_plan,
        [("problem.model.layer_kinds.0.linears.0.outputs", lambda n: n + 128)],
    ),
    "activations lowered": ("activation_bytes_differ", sound_plan, [(f"{A}.stages.0.activation_bytes", 0)]),
    "the engine's own lowered": ("other_bytes_differ", sound_plan, [(f"{A}.stages.0.other_bytes", 0)]),
    "a reserve asked for": ("reserved_bytes_differ", sound_plan, [("problem.handover_sequences", 1)]),
    "a cache in what is kept": (
        "kv_cache_bytes_differ",
        handover_plan,
        [(f"{A}.stages.0.kv_cache_bytes", lambda b: b + 2**20)],
    ),
    "less kept than asked for": (
        "reserved_bytes_differ",
        handover_plan,
        [(f"{A}.stages.0.reserved_bytes", lambda b: b - 1)],
    ),
    "a second engine with less": (
        "start_kv_cache_bytes_differ",
        handover_plan,
        [(f"{A}.stages.0.start_kv_cache_bytes", lambda b: b // 2)],
    ),
    "KV cache raised": ("kv_cache_bytes_differ", sound_plan, [(f"{A}.stages.0.kv_cache_bytes", lambda b: b + 1)]),
    "KV cache lowered": ("kv_cache_too_small", sound_plan, [(f"{A}.stages.0.kv_cache_bytes", lambda b: b // 2**10)]),
    "batch raised": (
        "kv_cache_too_small",
        sound_plan,
        [("problem.max_num_seqs", 65536), (f"{A}.max_num_seqs", 20000), (f"{A}.micro_batch", 10000)],
    ),
    "batch past the engine's": (
        "batch_limit_exceeded",
        sound_plan,
        [(f"{A}.max_num_seqs", 1026), (f"{A}.micro_batch", 513)],
    ),
    "another micro-batch": ("micro_batch_differs", sound_plan, [(f"{A}.micro_batch", lambda b: b - 1)]),
    "requests longer than the cache": (
        "longest_request_does_not_fit",
        sound_plan,
        [(f"{B}.max_model_len", 5_000_000)],
    ),
    "requests longer than the model's": ("max_model_len_beyond_model", sound_plan, [(f"{A}.max_model_len", 131_073)]),
    "a shorter request": ("max_model_len_too_short", sound_plan, [(f"{A}.max_model_len", 994)]),
    "a longer request asked": ("max_model_len_too_short", sound_plan, [("problem.max_model_len", 4096)]),
    "throughput raised": ("prediction_differs", sound_plan, [(f"{A}.predictions.requests_per_s.value", raised)]),
    "TTFT lowered": ("prediction_differs", sound_plan, [(f"{A}.predictions.ttft_s.value", lowered)]),
    "TPOT lowered": ("prediction_differs", sound_plan, [(f"{A}.predictions.tpot_s.value", lowered)]),
    "latency lowered": ("prediction_differs", sound_plan, [(f"{A}.predictions.latency_s.value", lowered)]),
    "tokens raised": ("prediction_differs", sound_plan, [(f"{A}.predictions.output_tokens_per_s.value", raised)]),
    "another estimator": ("prediction_differs", sound_plan, [("problem.estimator", "paper")]),
    "a band beside the value": (
        "band_excludes_value",
        sound_plan,
        [(f"{A}.predictions.ttft_s.low", lambda low: low * 10)],
    ),
    "a hard TPOT limit": ("slo_broken", sound_plan, [("problem.slo", hp.Slo(tpot_s=0.001))]),
    "a hard TTFT limit": ("slo_broken", sound_plan, [("problem.slo", hp.Slo(ttft_s=0.001))]),
    "a hard latency limit": ("slo_broken", sound_plan, [("problem.slo", hp.Slo(e2e_s=0.001))]),
    "a soft limit": (
        "objective_differs",
        sound_plan,
        [("problem.slo", hp.Slo(tpot_s=0.001, hard=False)), ("problem.latency_penalty", 0.1)],
    ),
    "a percentile promised": ("promise_not_checkable", sound_plan, [("problem.slo", hp.Slo(tpot_s=9, percentile=0.9))]),
    "interruptions promised": ("objective_differs", sound_plan, [("problem.objective", "expected_cost")]),
    "a query type's own limit": (
        "promise_not_checkable",
        sound_plan,
        [("problem.workload.query_types.0.slo", hp.Slo(tpot_s=9))],
    ),
    "a price altered": (
        "pipeline_cost_differs",
        sound_plan,
        [("problem.cluster.pools.1.offer.price_usd_per_hour", raised)],
    ),
    "a pipeline's cost lowered": ("pipeline_cost_differs", sound_plan, [(f"{A}.cost_usd_per_hour", lowered)]),
    "a price of nothing": (
        "price_not_positive",
        sound_plan,
        [("problem.cluster.pools.1.offer.price_usd_per_hour", 0.0)],
    ),
    "no price": ("price_not_positive", sound_plan, [("problem.cluster.pools.1.offer.price_usd_per_hour", None)]),
    "a pipeline's egress lowered": (
        "pipeline_egress_differs",
        plan_over_a_zone_link,
        [(f"{A}.egress_usd_per_hour", lowered)],
    ),
    "the plan's egress left out": ("plan_egress_differs", plan_over_a_zone_link, [("egress_usd_per_hour", 0.0)]),
    "a dearer zone link": (
        "pipeline_cost_differs",
        plan_over_a_zone_link,
        [("problem.cluster.zone_links.0.egress_usd_per_gb", 0.09)],
    ),
    "a slower zone link": (
        "prediction_differs",
        plan_over_a_zone_link,
        [("problem.cluster.zone_links.0.link.bytes_per_s", 1e6)],
    ),
    "a zone link taken away": ("regions_mixed", plan_over_a_zone_link, [("problem.cluster.zone_links", ())]),
    "the plan's rate raised": ("plan_rate_differs", sound_plan, [("requests_per_s", raised)]),
    "the plan's cost lowered": ("plan_cost_differs", sound_plan, [("cost_usd_per_hour", lowered)]),
    "the token price lowered": ("token_price_differs", sound_plan, [("usd_per_million_output_tokens", lowered)]),
    "the objective raised": ("objective_differs", sound_plan, [("objective", raised)]),
    "another objective": ("objective_name_differs", sound_plan, [("objective_name", "cost")]),
    "another objective asked": (
        "objective_differs",
        sound_plan,
        [("problem.objective", "throughput_per_cost"), ("objective_name", "throughput_per_cost")],
    ),
    "more demand": (
        "demand_not_met",
        plan_for_demand,
        [("problem.workload.query_types.0.requests_per_s", 1000.0)],
    ),
    "a route lost": ("route_fractions", sound_plan, [("routes", ())]),
    "half a route": ("route_fractions", sound_plan, [("routes.0.fraction", 0.5)]),
    "a route for nobody": ("route_query_type_unknown", sound_plan, [("routes.0.query_type", "chat")]),
    "a route to nowhere": ("route_deployment_unknown", sound_plan, [("routes.0.deployment", 1)]),
    "another model": ("model_differs", sound_plan, [("deployments.0.model", "llama-3.1-70b")]),
    "the bound lowered below the objective": (
        "bound_on_wrong_side",
        sound_plan,
        [("bound", lambda bound: bound / 1000)],
    ),
    "the cost's bound raised above it": ("bound_on_wrong_side", plan_for_demand, [("bound", 1000.0)]),
    "the bound tightened": ("bound_not_proven", sound_plan, [("bound", lowered)]),
    "the cost's bound tightened": ("bound_not_proven", plan_for_demand, [("bound", raised)]),
    "the certificate's weights changed": (
        "bound_not_proven",
        plan_with_two_kinds_of_layers,
        [("certificate.kind_weights", (1.0, 0.0))],
    ),
    "a weight too many": ("certificate_invalid", sound_plan, [("certificate.kind_weights", (1.0, 1.0))]),
    "a certificate of nothing": ("certificate_invalid", sound_plan, [("certificate.kind_weights", (0.0,))]),
    "a negative weight": ("malformed", sound_plan, [("certificate.kind_weights", (-1.0,))]),
    "another proof": ("malformed", sound_plan, [("certificate.kind", "trust me")]),
    "a group the certificate leaves out": (
        "certificate_does_not_cover",
        sound_plan,
        [(f"{A}.stages.0.tensor_parallel", 3)],
    ),
    "a bound without proof": ("bound_incomplete", sound_plan, [("certificate", None)]),
    "the gap lowered": ("gap_differs", sound_plan, [("gap", lowered)]),
    "optimal with a gap": ("status_differs", sound_plan, [("status", "optimal")]),
    "optimal without a bound": (
        "status_differs",
        sound_plan,
        [("status", "optimal"), ("bound", None), ("gap", None), ("certificate", None)],
    ),
    "feasible without a gap": ("status_differs", sound_plan, [("gap", 0.0)]),
    "a calibration changed": (
        "calibration_changed",
        sound_plan,
        [("problem.calibrations.0.memory_bytes_per_s.value", raised)],
    ),
    "a digest changed": ("calibration_changed", sound_plan, [("problem.calibration_sha256.L4", "0" * 64)]),
    "a digest of nothing": (
        "calibration_changed",
        sound_plan,
        [("problem.calibration_sha256", lambda digests: digests | {"H100": "0" * 64})],
    ),
    "a digest lost": ("calibration_digest_missing", sound_plan, [("problem.calibration_sha256", {})]),
    "a calibration lost": ("calibration_missing", sound_plan, [("problem.calibrations", lambda c: c[1:])]),
    "a calibration twice": ("calibration_repeated", sound_plan, [("problem.calibrations", lambda c: c + c[:1])]),
    "a batch of nothing": ("malformed", sound_plan, [(f"{A}.micro_batch", 0)]),
    "no deployments at all": ("check_failed", sound_plan, [("deployments", None)]),
    "no problem at all": ("check_failed", sound_plan, [("problem", None)]),
}


@pytest.mark.parametrize(
    "plan", [sound_plan, plan_for_demand, plan_with_two_kinds_of_layers], ids=lambda make: make.__name__
)
def test_a_plan_built_by_hand_is_sound(plan: Callable[[], Plan]) -> None:
    assert [str(violation) for violation in verify_plan(plan())] == []


@pytest.mark.parametrize("options", [{"estimator": "paper"}, {"objective": "throughput_per_cost"}], ids=str)
def test_it_is_sound_under_the_other_estimator_and_objective(options: dict[str, Any]) -> None:
    assert [str(violation) for violation in verify_plan(sound_plan(**options))] == []


@pytest.mark.parametrize("what", TAMPERED)
def test_tampering_is_found_under_its_code(what: str) -> None:
    code, make, changes = TAMPERED[what]
    plan = reduce(lambda p, change: changed(p, *change), changes, make())
    found = verify_plan(plan)
    assert code in {violation.code for violation in found}
    for violation in found:
        assert violation.code in MEANINGS
        assert violation.where in str(violation)


def test_every_code_is_provoked_by_a_test() -> None:
    assert {code for code, _, _ in TAMPERED.values()} == set(MEANINGS)


def test_a_violation_says_what_is_wrong_in_words_and_numbers() -> None:
    (violation,) = verify_plan(changed(sound_plan(), "cost_usd_per_hour", 10.0))[:1]
    right = 2 * 4.6016 + 2 * 1.861
    assert violation == Violation(code="plan_cost_differs", where="cost_usd_per_hour", value=10.0, limit=right)
    assert str(violation) == (
        "cost_usd_per_hour: states 10 $/h; its machines and its egress cost 12.9252 [plan_cost_differs]"
    )


def test_a_value_that_is_no_number_can_still_be_stated() -> None:
    assert Violation(code="x", where="y", value=math.inf, limit=math.nan).value == "inf"
    assert str(Violation(code="new", where="y", value=1, limit="two")) == "y: 1; the limit is two [new]"


def test_scaled_weights_prove_the_same_bound() -> None:
    assert codes(changed(sound_plan(), "certificate.kind_weights", (7.5,))) == set()


def test_a_looser_bound_is_proven_too() -> None:
    plan = sound_plan()
    bound = (plan.bound or 0.0) * 2
    gap = (bound - plan.objective) / plan.objective
    assert codes(plan.model_copy(update={"bound": bound, "gap": gap})) == set()


def test_a_pipeline_crosses_regions_by_zone_links_alone() -> None:
    plan = plan_across_regions()
    assert codes(plan) == {"regions_mixed"}
    elsewhere = COAST_TO_COAST.replace(ends=("aws/us-east-1", "aws/us-west-1"))
    # No machine stands there, which a cluster refuses; the crossing is a fault of its own.
    assert "regions_mixed" in codes(changed(plan, "problem.cluster.zone_links", (elsewhere,)))
    assert codes(plan_over_a_zone_link()) == set()


def test_egress_is_what_a_request_sends_times_the_rate_times_the_price() -> None:
    plan = plan_over_a_zone_link()
    model, pipeline = plan.problem.model, plan.deployments[0].pipelines[0]
    # Two bytes of each hidden value: those of the prompt, then one row for each token after the first.
    sent_gb = (763 + 232 - 1) * model.hidden_size * 2 / 1e9
    usd = sent_gb * pipeline.predictions.requests_per_s.value * 3600 * 0.02
    assert pipeline.egress_usd_per_hour == pytest.approx(usd)
    assert plan.egress_usd_per_hour == pytest.approx(usd)
    assert plan.cost_usd_per_hour == pytest.approx(2 * 1.861 + usd)


def test_a_pipeline_visits_a_node_once_without_an_engine_too() -> None:
    problem = make_problem({G6: 2})
    back: list[HandStage] = [(0, 0, 1, (0, 12)), (1, 0, 1, (12, 20)), (0, 1, 1, (20, 32))]
    plan = make_plan(problem, [make_pipeline(problem, [on_demand(G6), on_demand(G6)], back, count=1)])
    assert [str(violation) for violation in verify_plan(plan)] == [
        "deployments[0].pipelines[0].nodes[0]: its stages are [0, 2] of the pipeline; a node's stages follow one "
        "another: [0, 1] [node_visited_twice]"
    ]


def test_stages_that_leave_a_node_and_come_back_break_an_engines_limits() -> None:
    problem = make_problem({G6: 2}, engine="vllm-0.32")
    there: list[HandStage] = [(0, 0, 1, (0, 8)), (0, 1, 1, (8, 16)), (1, 0, 1, (16, 24)), (1, 1, 1, (24, 32))]
    back = [there[0], there[2], there[1], there[3]]
    nodes = [on_demand(G6), on_demand(G6)]
    for stages, expected in ((there, set()), (back, {"engine_limit_broken", "node_visited_twice"})):
        ordered = [(node, gpu, degree, there[s][3]) for s, (node, gpu, degree, _) in enumerate(stages)]
        plan = make_plan(problem, [make_pipeline(problem, nodes, ordered, count=1)])
        assert codes(plan) == expected
    uneven: list[HandStage] = [(0, 0, 1, (0, 11)), (0, 1, 1, (11, 22)), (1, 0, 1, (22, 32))]
    plan = make_plan(problem, [make_pipeline(problem, nodes, uneven, count=1)])
    assert [str(violation) for violation in verify_plan(plan)] == [
        "deployments[0].pipelines[0]: [2, 1] GPUs; the engine asks that every node of a pipeline gives it the same "
        "number of GPUs [engine_limit_broken]"
    ]


@pytest.mark.parametrize("machines", [1, 2, 4, 8])
def test_the_proof_covers_what_a_small_cluster_can_hold(machines: int) -> None:
    """With few GPUs a stage holds many layers, so that batches are small: the proof must know as much as the plan."""
    workload = hp.Workload(input_tokens=1823, output_tokens=323)
    plan = hp.optimize(model="qwen3-8b", cluster={"g4dn.xlarge": machines}, workload=workload, weight_dtype="fp8")
    assert plan.bound is not None
    assert [str(violation) for violation in verify_plan(plan)] == []


def test_an_owned_machine_needs_no_price() -> None:
    west = Cluster.from_counts({G6E: 1}, region="us-west-2")
    offer = Offer(instance_type=G6E, provider="own", region="cellar", market="owned", source="bought")
    problem = make_problem(west.replace(pools=(Pool(offer=offer, count=1),)))
    whole: list[HandStage] = [(0, 0, 1, (0, 32))]
    plan = make_plan(problem, [make_pipeline(problem, [offer.name], whole, count=1)], kind_weights=(1.0,))
    assert plan.cost_usd_per_hour == 0
    assert codes(plan) == set()


def test_a_soft_limit_lowers_the_objective_by_the_worst_excess_of_each_pipeline() -> None:
    plan = sound_plan(slo=hp.Slo(tpot_s=0.05, ttft_s=10.0, hard=False), latency_penalty=0.25)
    worth = 0.0
    for pipeline in plan.deployments[0].pipelines:
        excess = pipeline.predictions.tpot_s.value / 0.05 - 1
        assert excess > 0
        worth += pipeline.count * pipeline.predictions.requests_per_s.value * (1 - 0.25 * excess)
    assert "objective_differs" in codes(plan)
    assert plan.bound is not None
    gap = (plan.bound - worth) / worth
    assert codes(plan.model_copy(update={"objective": worth, "gap": gap})) == set()


@pytest.mark.parametrize("solver", ["auto", "dp-beam", "even"])
@pytest.mark.parametrize("objective", ["throughput", "throughput_per_cost", "cost"])
@pytest.mark.parametrize("estimator", ["calibrated", "paper"])
def test_solvers_return_sound_plans(solver: str, objective: Any, estimator: Any) -> None:
    plan = hp.optimize(
        model="qwen3-32b",
        cluster={G6: 1, "g5.12xlarge": 1, G6E: 2},
        workload=hp.Workload(input_tokens=763, output_tokens=232, requests_per_s=0.5),
        objective=objective,
        solver=solver,
        estimator=estimator,
    )
    assert [str(violation) for violation in hp.verify(plan)] == []


def _leaves(record: Any, path: str = "") -> Iterator[str]:
    if isinstance(record, BaseModel):
        children = [(name, getattr(record, name)) for name in type(record).model_fields]
    elif isinstance(record, dict):
        children = [(str(name), value) for name, value in record.items() if "." not in str(name)]
    elif isinstance(record, tuple):
        children = [(str(number), value) for number, value in enumerate(record)]
    else:
        children = []
    if path:
        yield path.removeprefix(".")
    for name, value in children:
        yield from _leaves(value, f"{path}.{name}")


def test_no_damage_makes_it_raise() -> None:
    plan = sound_plan()
    paths = [path for path in _leaves(plan) if "intra_node_links" not in path]
    rng = random.Random(0)
    nonsense: list[Any] = [None, -1, 0, 10**30, math.nan, math.inf, "?", (), {}]
    for path in rng.sample(paths, 150):
        verify_plan(changed(plan, path, rng.choice(nonsense)))
    for path in rng.sample(paths, 50):
        assert verify_plan(changed(plan, path, _Alien())), path


@pytest.mark.parametrize("path", ["problem.cluster.instance_types.0.gpu_count", "problem.max_num_seqs", f"{A}.count"])
def test_absurd_sizes_end_in_a_violation_soon(path: str) -> None:
    assert codes(changed(sound_plan(), path, 10**30))


class _Alien:
    """Nothing that a plan may hold."""
