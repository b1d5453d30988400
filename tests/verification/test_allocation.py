"""Allocation plans built by hand are sound, tampered ones are found, and bounds are confirmed when they are true."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import numpy as np
import pytest

import hetplan as hp
from hetplan.plan import BoundNode, Certificate, Plan, RowPrices
from hetplan.problem.allocation import (
    AllocationProblem,
    Configuration,
    Decisions,
    QueryDemand,
    ServedModel,
    Tier,
)
from hetplan.verification import Violation, confirmed_bound, verify_plan
from hetplan.verification.allocation import MEANINGS
from hetplan.verification.allocation_bound import proven_bound
from hetplan.verification.pattern_search import least_pattern
from tests.builders import make_machine, make_pool
from tests.verification.allocations_by_hand import (
    Key,
    bound_of,
    copy_usd_and_gb,
    fits,
    free_bound,
    keys,
    least_of_sets,
    optimum,
    plan_of,
    rent_usd,
    with_bound,
)
from tests.verification.test_verify_placement import changed

ONE_OTHER = [
    {"model_storage": "per_query_type"},
    {"slo_on": "all"},
    {"delay": "each"},
    {"kv_memory": "residence"},
    {"weights": "unscaled"},
    {"replicas": "one"},
    {"penalties": "per_request"},
    {"ranking_storage": "hour"},
]
DECISIONS = {
    "default": Decisions(),
    "paper": Decisions.paper(),
    **{next(iter(each.values())): Decisions.from_dict(each) for each in ONE_OTHER},
    "per_query_type, one": Decisions(model_storage="per_query_type", replicas="one"),
    "each, all": Decisions(delay="each", slo_on="all"),
    "each, one": Decisions(delay="each", replicas="one"),
}


def small(decisions: Decisions, seed: int = 0, **changes: Any) -> AllocationProblem:
    """Four types on four models and five tiers; two of the types are promised a time to first token."""
    problem = AllocationProblem.canonical(query_types=4, models=4, tiers=5, seed=seed, decisions=decisions)
    queries = [
        query.replace(ttft_limit_s=0.3 * query.delay_limit_s) if i % 2 else query
        for i, query in enumerate(problem.query_types)
    ]
    values = {"query_types": tuple(queries), "tensor_parallel": (1, 2, 4), "pipeline_parallel": (1, 2)}
    return problem.replace(**(values | changes))


def tiny(decisions: Decisions, seed: int = 0) -> AllocationProblem:
    """Three types, two models on two tiers, eight configurations."""
    whole = AllocationProblem.canonical(query_types=3, models=6, tiers=10, seed=seed, decisions=decisions)
    models, tiers = (2, 4), (7, 9)
    queries = [
        query.replace(
            errors=tuple(query.errors[j] for j in models),
            ttft_limit_s=0.4 * query.delay_limit_s if i < 2 else None,
            max_unserved=1.0 if i < 2 else 0.7,
            requests_per_hour=query.requests_per_hour * 40,
            storage_kb_per_token=query.storage_kb_per_token / 160,
        )
        for i, query in enumerate(whole.query_types)
    ]
    return whole.replace(
        query_types=tuple(queries),
        models=tuple(whole.models[j] for j in models),
        tiers=tuple(whole.tiers[k] for k in tiers),
        tensor_parallel=(1, 2),
        pipeline_parallel=(1,),
        budget_usd=3 * whole.budget_usd,
    )


def listed(decisions: Decisions | None = None) -> AllocationProblem:
    """Two types on machines of a catalogue, with estimated delays; two precisions of one machine."""
    box, large = make_machine("box"), make_machine("large box", gpu_count=2)
    tiers = (
        Tier(
            name="box bf16",
            gpu="X1",
            weight_dtype="bf16",
            memory_gb=8,
            bandwidth_gb_per_s=300,
            tflops=60,
            usd_per_hour=0.5,
            instance_type=box,
            offer=make_pool(box, usd=0.5).offer,
        ),
        Tier(
            name="box fp8",
            gpu="X1",
            weight_dtype="fp8",
            memory_gb=8,
            bandwidth_gb_per_s=300,
            tflops=60,
            usd_per_hour=0.5,
            weight_scale=0.5,
            error_factor=1.1,
            instance_type=box,
            offer=make_pool(box, usd=0.5).offer,
        ),
        Tier(
            name="large box",
            gpu="X1",
            weight_dtype="bf16",
            memory_gb=8,
            bandwidth_gb_per_s=300,
            tflops=60,
            usd_per_hour=1.2,
            instance_type=large,
            offer=make_pool(large, usd=1.2).offer,
        ),
    )
    models = (
        ServedModel(name="little", weight_gb=2, kv_bytes_per_token=1e5, gflop_per_token=2, layers=5),
        ServedModel(name="big", weight_gb=12, kv_bytes_per_token=2e5, gflop_per_token=12, layers=9),
    )
    queries = (
        QueryDemand(
            name="chat",
            input_tokens=500,
            output_tokens=200,
            requests_per_hour=9000,
            delay_limit_s=6,
            ttft_limit_s=0.5,
            error_limit=0.06,
            delay_usd_per_ms=1e-4,
            unserved_usd=900,
            storage_kb_per_token=5,
            errors=(0.09, 0.02),
        ),
        QueryDemand(
            name="code",
            input_tokens=300,
            output_tokens=600,
            requests_per_hour=1500,
            delay_limit_s=12,
            error_limit=0.1,
            delay_usd_per_ms=2e-4,
            unserved_usd=800,
            storage_kb_per_token=5,
            errors=(0.12, 0.03),
            max_unserved=0.2,
        ),
    )

    def configuration(model: int, tier: int, n: int, m: int, machines: int, slow: float) -> Configuration:
        return Configuration(
            model=model,
            tier=tier,
            tensor_parallel=n,
            pipeline_parallel=m,
            machines=machines,
            usd_per_hour=tiers[tier].usd_per_hour * machines,
            delay_s=(3 * slow, 7 * slow),
            ttft_s=(0.2 * slow, 0.25 * slow),
            capacity_per_hour=(2500 / slow, 1100 / slow),
        )

    configurations = (
        configuration(0, 0, 1, 1, 1, 1.0),
        configuration(0, 1, 1, 1, 1, 0.7),
        configuration(1, 0, 1, 2, 2, 1.7),
        configuration(1, 1, 1, 2, 2, 1.3),
        configuration(1, 2, 2, 1, 1, 1.1),
    )
    return AllocationProblem(
        query_types=queries,
        models=models,
        tiers=tiers,
        budget_usd=400,
        storage_capacity_gb=200,
        storage_usd_per_gb_hour=1e-3,
        decisions=decisions or Decisions(),
        configurations=configurations,
    )


@cache
def solved(what: str) -> Plan:
    problem = listed() if what == "listed" else small(DECISIONS[what])
    answer = optimum(problem)
    plan = plan_of(problem, answer.counts, answer.shares)
    assert plan.objective == pytest.approx(answer.usd, rel=1e-6)
    return plan


@cache
def reference() -> Plan:
    """The answer to tamper with, with a bound that its certificate proves."""
    plan = solved("default")
    assert isinstance(plan.problem, AllocationProblem)
    certificate = Certificate(kind="tree", nodes=(BoundNode(prices=RowPrices()),))
    return with_bound(plan, free_bound(plan.problem), certificate)


def one_each() -> Plan:
    return solved("one")


def for_each() -> Plan:
    return solved("each")


def of_the_list() -> Plan:
    return solved("listed")


def with_room(decisions: Decisions) -> AllocationProblem:
    """A large budget, and limits that the largest model keeps."""
    problem = small(decisions, budget_usd=1e4)
    queries = [
        query.replace(
            delay_limit_s=9 * query.delay_limit_s,
            ttft_limit_s=9 * query.ttft_limit_s if query.ttft_limit_s else None,
        )
        for query in problem.query_types
    ]
    return problem.replace(query_types=tuple(queries), storage_capacity_gb=1e4)


@cache
def mixed() -> Plan:
    """Made by hand: one type on two stages of two GPUs, one half on a second configuration."""
    problem = with_room(Decisions())
    best = max(range(4), key=lambda model: problem.models[model].weight_gb)
    wide, narrow = Key(best, 4, 2, 2), Key(best, 4, 4, 1)
    shares = {(i, wide): 0.5 for i in range(4)} | {(i, narrow): 0.5 for i in range(4)}
    return plan_of(problem, {wide: 3, narrow: 3}, shares)


# ---- plans


@pytest.mark.parametrize("what", [*DECISIONS, "listed"])
def test_an_optimal_answer_is_sound(what: str) -> None:
    assert [str(violation) for violation in verify_plan(solved(what))] == []


def test_a_mix_with_several_stages_and_a_bound_is_sound() -> None:
    assert [str(violation) for violation in verify_plan(mixed())] == []
    assert [str(violation) for violation in verify_plan(reference())] == []


def raised(value: Any) -> Any:
    return value * 1.01


def lowered(value: Any) -> Any:
    return value * 0.99


def one_replica_each(deployments: Any) -> Any:
    return tuple(changed(each, "pipelines.0.count", 1) for each in deployments)


def first(path: str) -> str:
    return f"deployments.0.pipelines.0.{path}"


Change = tuple[str, Any]
TAMPERED: dict[str, tuple[str, Callable[[], Plan], list[Change]]] = {
    "a model that is not there": ("model_unknown", reference, [("deployments.0.model", "gpt")]),
    "another model": ("weight_share_differs", reference, [("deployments.0.model", "Llama-3.1-70B")]),
    "a pipeline twice": ("pipelines_differ", reference, [("deployments.0.pipelines", lambda p: p + p)]),
    "no pipelines": ("malformed", reference, [("deployments.0.pipelines", ())]),
    "no replicas": ("malformed", reference, [(first("count"), 0)]),
    "more replicas": ("plan_cost_differs", reference, [(first("count"), lambda n: n + 1)]),
    "fewer replicas": ("compute_exceeded", of_the_list, [("deployments", one_replica_each)]),
    "a machine that is not there": ("tier_unknown", reference, [(first("nodes"), ("TPU x1",))]),
    "more GPUs on the node": ("nodes_differ", reference, [(first("nodes"), lambda n: (n[0] + "0",))]),
    "another node": ("nodes_differ", of_the_list, [(first("nodes"), lambda n: n + n)]),
    "another stage's machine": ("instance_type_differs", mixed, [(first("stages.1.instance_type"), "A6000 x1")]),
    "a degree that is not allowed": ("configuration_not_allowed", reference, [("problem.tensor_parallel", (8,))]),
    "degrees not listed": ("configuration_not_allowed", of_the_list, [(first("stages.0.tensor_parallel"), 3)]),
    "another degree of one stage": ("tensor_parallel_differs", mixed, [(first("stages.1.tensor_parallel"), 1)]),
    "a configuration twice": (
        "configuration_repeated",
        reference,
        [("deployments", lambda each: each + each[:1])],
    ),
    "two configurations of a model on a tier": (
        "second_of_model_and_tier",
        mixed,
        [("problem.decisions.replicas", "one")],
    ),
    "two replicas where one is allowed": ("replicas_not_one", one_each, [(first("count"), 2)]),
    "prefill alone": ("role_not_supported", reference, [(first("role"), "prefill")]),
    "a node too many": ("node_unknown", mixed, [(first("stages.1.node"), 1)]),
    "a GPU too many": ("gpu_count_differs", mixed, [(first("stages.1.gpu_indices"), (2, 3, 4))]),
    "other GPUs": ("gpu_indices_differ", mixed, [(first("stages.1.gpu_indices"), (0, 1))]),
    "a layer lost": ("layers_missing", mixed, [(first("stages.1.layers"), lambda span: (span[0] + 1, span[1]))]),
    "a layer twice": ("layers_overlap", mixed, [(first("stages.1.layers"), lambda span: (span[0] - 1, span[1]))]),
    "layers lost at the end": ("layers_missing", mixed, [(first("stages.1.layers"), lambda s: (s[0], s[1] - 1))]),
    "a layer too many": ("layers_outside_model", mixed, [(first("stages.1.layers"), lambda s: (s[0], s[1] + 1))]),
    "an empty stage": ("stage_empty", mixed, [(first("stages.1.layers"), lambda s: (s[1], s[1]))]),
    "an uneven split": (
        "layers_uneven",
        mixed,
        [(first("stages.0.layers"), (0, 3)), (first("stages.1.layers"), lambda s: (3, s[1]))],
    ),
    "another precision": ("precision_differs", reference, [(first("stages.0.compute_dtype"), "fp8")]),
    "another precision of the list": ("precision_differs", of_the_list, [(first("stages.0.compute_dtype"), "fp32")]),
    "weights lowered": ("weight_share_differs", reference, [(first("stages.0.weight_bytes"), lowered)]),
    "activations": ("activations_stated", reference, [(first("stages.0.activation_bytes"), 1)]),
    "more room for KV cache": ("kv_cache_share_differs", reference, [(first("stages.0.kv_cache_bytes"), raised)]),
    "a band beside its value": ("band_excludes_value", reference, [(first("predictions.ttft_s.value"), 2.0)]),
    "a cheaper pipeline": ("pipeline_cost_differs", reference, [(first("cost_usd_per_hour"), lowered)]),
    "egress of a pipeline": ("pipeline_egress_differs", reference, [(first("egress_usd_per_hour"), 1.0)]),
    "egress": ("plan_egress_differs", reference, [("egress_usd_per_hour", 1.0)]),
    "a price raised": ("pipeline_cost_differs", reference, [("problem.tiers", lambda all_: tuple(
        changed(tier, "usd_per_hour", raised) for tier in all_))]),
    "too little memory": ("memory_exceeded", mixed, [("problem.tiers.4.memory_gb", 15.0)]),
    "requests in flight": (
        "memory_exceeded",
        reference,
        [("problem.models", lambda all_: tuple(changed(m, "kv_bytes_per_token", 1e9) for m in all_))],
    ),
    "slower GPUs": (
        "compute_exceeded",
        reference,
        [("problem.tiers", lambda all_: tuple(changed(tier, "tflops", 1.0) for tier in all_))],
    ),
    "a route twice": ("route_repeated", reference, [("routes", lambda routes: routes + routes[:1])]),
    "a route of nothing": ("route_empty", reference, [("routes.0.fraction", 0.0)]),
    "a route to nowhere": ("route_deployment_unknown", reference, [("routes.0.deployment", 99)]),
    "a route of nobody": ("route_query_type_unknown", reference, [("routes.0.query_type", "dance")]),
    "a route enlarged": ("served_too_much", mixed, [("routes.0.fraction", 0.6)]),
    "a route lost": (
        "unserved_too_much",
        of_the_list,
        [("routes", lambda routes: [route for route in routes if route.query_type == "chat"])],
    ),
    "a route lost that may be": ("objective_differs", reference, [("routes", lambda routes: routes[1:])]),
    "slower answers": ("delay_exceeded", reference, [("problem.query_types.0.delay_limit_s", lambda s: s / 1e3)]),
    "a slower route": ("route_delay_exceeded", for_each, [("problem.query_types.0.delay_limit_s", lambda s: s / 1e3)]),
    "a later token": ("ttft_exceeded", reference, [("problem.query_types.1.ttft_limit_s", 1e-4)]),
    "a later token of a route": ("route_ttft_exceeded", for_each, [("problem.query_types.1.ttft_limit_s", 1e-4)]),
    "more errors": ("error_exceeded", reference, [("problem.query_types.0.error_limit", lambda e: e / 10)]),
    "a smaller budget": ("budget_exceeded", reference, [("problem.budget_usd", 1.0)]),
    "less storage": ("storage_exceeded", reference, [("problem.storage_capacity_gb", 1.0)]),
    "the plan's rate raised": ("served_rate_differs", reference, [("requests_per_s", raised)]),
    "the plan's cost lowered": ("plan_cost_differs", reference, [("cost_usd_per_hour", lowered)]),
    "the token price lowered": ("token_price_differs", reference, [("usd_per_million_output_tokens", lowered)]),
    "the objective lowered": ("objective_differs", reference, [("objective", lowered)]),
    "another objective": ("objective_name_differs", reference, [("objective_name", "cost")]),
    "the penalty per request": ("objective_differs", reference, [("problem.decisions.penalties", "per_request")]),
    "storage for each type": ("objective_differs", reference, [("problem.decisions.model_storage", "per_query_type")]),
    "weights unscaled": ("weight_share_differs", lambda: solved("unscaled"), [("problem.decisions.weights", "scaled")]),
    "the bound raised above it": ("bound_on_wrong_side", reference, [("bound", 1e6)]),
    "the bound raised": ("bound_not_proven", reference, [("bound", lambda bound: bound * (1 + 1e-6))]),
    "a bound without proof": ("bound_incomplete", reference, [("certificate", None)]),
    "the gap lowered": ("gap_differs", reference, [("gap", lowered)]),
    "optimal with a gap": ("status_differs", reference, [("status", "optimal")]),
    "another proof": ("certificate_invalid", reference, [("certificate.kind", "dual")]),
    "no nodes": ("certificate_invalid", reference, [("certificate.nodes", ())]),
    "no problem": ("check_failed", reference, [("problem", None)]),
    "no deployments": ("check_failed", reference, [("deployments", None)]),
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERED)
def test_tampering_is_found_under_its_code(what: str) -> None:
    code, make, changes = TAMPERED[what]
    plan = reduce(lambda p, change: changed(p, *change), changes, make())
    found = verify_plan(plan)
    assert code in {violation.code for violation in found}, [str(violation) for violation in found]
    if plan.problem is not None:
        for violation in found:
            assert violation.code in MEANINGS
            assert violation.where in str(violation)


def test_every_code_is_provoked_by_a_test() -> None:
    assert {code for code, _, _ in TAMPERED.values()} == set(MEANINGS)


@pytest.mark.parametrize(("over", "refused"), [(0.9e-6, False), (1.1e-6, True)])
def test_a_limit_may_be_passed_by_rounding_only(over: float, refused: bool) -> None:
    plan = solved("default")
    spent = next(v.value for v in verify_plan(changed(plan, "problem.budget_usd", 1.0)) if v.code == "budget_exceeded")
    assert isinstance(spent, float)
    found = verify_plan(changed(plan, "problem.budget_usd", spent / (1 + over)))
    assert ("budget_exceeded" in {violation.code for violation in found}) == refused


def test_a_violation_says_what_is_wrong_in_words_and_numbers() -> None:
    plan = changed(reference(), "routes.0.fraction", 0.0)
    line = next(str(violation) for violation in verify_plan(plan) if violation.code == "route_empty")
    assert line == "routes[0]: sends a share of 0; a route has more than 0 [route_empty]"


def test_weights_stored_for_each_type_are_of_the_model_on_the_tier() -> None:
    """Two configurations of one model on one tier share a type's copy."""
    problem = with_room(Decisions(model_storage="per_query_type"))
    plan = mixed()
    assert isinstance(plan.problem, AllocationProblem)
    once = plan.problem.horizon_hours * problem.storage_usd_per_gb_hour * max(m.weight_gb for m in problem.models)
    other = plan.replace(problem=problem, objective=plan.objective + 3 * once)
    assert [str(violation) for violation in verify_plan(other)] == []


# ---- patterns


def test_the_least_pattern_is_that_of_all_sets() -> None:
    draw = np.random.default_rng(5)
    for trial in range(30):
        size = int(draw.integers(2, 8))
        fixed = draw.uniform(0, 1, size) * draw.integers(0, 2, size) * (0.1, 1.0, 3.0)[trial % 3]
        unit, first_mean, second_mean = draw.uniform(0, 3, size), draw.uniform(-1, 2, size), draw.uniform(-1, 2, size)
        pair = draw.integers(0, 3, size)
        pair_fixed = draw.uniform(0, 1, 3) * (trial % 4 > 0)
        fixed[-1], pair[-1], unit[-1] = 0.0, -1, draw.uniform(3, 30)
        first_mean[-1] = second_mean[-1] = 0.0 if trial % 2 else -1.0
        least = least_pattern(fixed, pair, pair_fixed, unit, first_mean, second_mean)
        by_hand = least_of_sets(
            list(fixed),
            [None if p < 0 else p for p in pair],
            dict(enumerate(pair_fixed)),
            list(unit),
            [list(first_mean), list(second_mean)],
            most=4,
        )
        assert least == pytest.approx(by_hand, rel=1e-7)


# ---- bounds

N = BoundNode(prices=RowPrices())


def random_prices(problem: AllocationProblem, draw: np.random.Generator, paid: set[tuple[int, int]]) -> RowPrices:
    """Prices of the size that limits are worth, of every row that the problem has."""
    decisions, types = problem.decisions, range(len(problem.query_types))
    size = float(draw.choice([0.3, 1.0, 2.0]))

    def each(most: float) -> tuple[float, ...]:
        return tuple(draw.uniform(0, size * most / len(types), len(types)) * draw.integers(0, 2, len(types)))

    every = list(enumerate(keys(problem)))
    once = decisions.model_storage == "once" and decisions.replicas == "many"
    budget, storage = draw.uniform(0, 20, 2)
    spared = [
        (i, o, draw.uniform(0, 0.5) * copy_usd_and_gb(problem, every[o][1])[0])
        for i, o in sorted(paid)
        if fits(problem, every[o][1])
    ]
    pairs = len(problem.models) * len(problem.tiers)
    return RowPrices(
        link=tuple((o, each(rent_usd(problem, key))) for o, key in every),
        pair_link=tuple((p, each(0.1)) for p in range(pairs)) if once else (),
        spared=tuple(spared),
        load=tuple((o, draw.uniform(0, 0.5) * rent_usd(problem, key)) for o, key in every),
        cache=tuple((o, draw.uniform(0, 0.2) * rent_usd(problem, key)) for o, key in every),
        ttft=tuple((i, draw.uniform(0, 5)) for i in types if problem.query_types[i].ttft_limit_s is not None),
        unserved=tuple((i, draw.uniform(0, 5)) for i in types),
        budget=budget,
        storage=storage,
    )


def climbed_prices(problem: AllocationProblem, draw: np.random.Generator, steps: int) -> RowPrices:
    """Prices that prove much, found by changing some of them at random and keeping what proves more."""
    every, types = keys(problem), len(problem.query_types)
    once = problem.decisions.model_storage == "once" and problem.decisions.replicas == "many"
    pairs = len(problem.models) * len(problem.tiers)
    limited = [i for i in range(types) if problem.query_types[i].ttft_limit_s is not None]
    rent = np.array([rent_usd(problem, key) for key in every])
    shape = {"link": (len(every), types), "pair_link": (pairs, types), "load": (len(every),), "cache": (len(every),)}
    values = {name: np.zeros(size) for name, size in shape.items()}
    values |= {
        "ttft": np.zeros(len(limited)),
        "unserved": np.zeros(types),
        "budget": np.zeros(1),
        "storage": np.zeros(1),
    }
    values["link"] = np.outer(rent, np.full(types, 0.9 / types))

    def prices() -> RowPrices:
        whole = {name: value.tolist() for name, value in values.items()}
        whole["ttft"] = list(zip(limited, whole["ttft"], strict=True))
        for name in ("link", "pair_link", "load", "cache", "unserved"):
            whole[name] = list(enumerate(whole[name]))
        if not once:
            whole["pair_link"] = []
        return RowPrices.from_dict(whole | {"budget": whole["budget"][0], "storage": whole["storage"][0]})

    def proven() -> float:
        return proven_bound(problem, Certificate(kind="tree", nodes=(BoundNode(prices=prices()),)))

    best, busy = proven(), {"link": np.zeros_like(values["link"]), "load": 0.9 * rent}
    idle = {name: values[name] for name in busy}
    values |= busy
    if proven() < best:
        values |= idle
    best = proven()
    for _ in range(steps):
        name = str(draw.choice(["link", "link", "load", "load", *values]))
        old = values[name]
        change = draw.normal(0, draw.choice([0.1, 1.0, 10.0, 100.0]), old.shape) * (draw.random(old.shape) < 0.3)
        values[name] = np.maximum(old + change, 0.0)
        now = proven()
        if now > best:
            best = now
        else:
            values[name] = old
    return prices()


def random_tree(
    problem: AllocationProblem, draw: np.random.Generator, branches: int, known: RowPrices | None = None
) -> Certificate:
    """Branches on anything, with prices that know nothing of them."""
    every = keys(problem)
    used = [o for o, key in enumerate(every) if fits(problem, key)]
    nodes: list[BoundNode] = []
    waiting: list[set[tuple[int, int]]] = [set()]
    while len(nodes) < len(waiting):
        paid = waiting[len(nodes)]
        prices = random_prices(problem, draw, paid)
        if known is not None:
            prices = known.replace(spared=prices.spared)
        closed = tuple(draw.choice(used, 2, replace=False).tolist()) if draw.random() < 0.3 else ()
        if len(nodes) >= branches:
            nodes.append(BoundNode(prices=prices, closed=closed))
            continue
        parts = (len(waiting), len(waiting) + 1)
        o = int(draw.choice(used))
        if problem.decisions.model_storage != "once" and draw.random() < 0.5:
            i = int(draw.integers(len(problem.query_types)))
            # Of a pair, one copy is paid.
            same = {p for p in paid if every[p[1]][:2] == every[o][:2] and p[0] == i}
            waiting += [paid if same else paid | {(i, o)}, paid]
            nodes.append(BoundNode(prices=prices, closed=closed, copied=(i, o), parts=parts))
        else:
            waiting += [paid, paid]
            count = int(draw.integers(0, 3))
            nodes.append(BoundNode(prices=prices, closed=closed, replicas=(o, count), parts=parts))
    return Certificate(kind="tree", nodes=tuple(nodes))


@pytest.mark.parametrize("what", DECISIONS)
def test_prices_prove_what_they_prove_by_hand(what: str) -> None:
    draw = np.random.default_rng(1)
    problem = tiny(DECISIONS[what])
    for prices in (RowPrices(), random_prices(problem, draw, set()), random_prices(problem, draw, set())):
        certificate = Certificate(kind="tree", nodes=(BoundNode(prices=prices),))
        assert proven_bound(problem, certificate) == pytest.approx(bound_of(problem, prices), rel=1e-9, abs=1e-7)


@pytest.mark.parametrize("what", [*DECISIONS, "listed"])
def test_no_tree_proves_more_than_the_optimum(what: str) -> None:
    problem = listed() if what == "listed" else tiny(DECISIONS[what])
    best, most = optimum(problem).usd, 0.0
    known = climbed_prices(problem, np.random.default_rng(0), steps=1500)
    for seed in range(30):
        draw = np.random.default_rng(seed)
        tree = random_tree(problem, draw, branches=seed % 6, known=known if seed % 3 else None)
        proven = proven_bound(problem, tree)
        assert proven <= best * (1 + 1e-6)
        most = max(most, proven)
    # The prices are good enough to tell a bound that is too high.
    assert most > 0.4 * best


def bought(plan: Plan) -> tuple[int, int]:
    """The number of the plan's first configuration, and its replicas."""
    problem = plan.problem
    assert isinstance(problem, AllocationProblem)
    pipeline = plan.deployments[0].pipelines[0]
    model = [m.name for m in problem.models].index(plan.deployments[0].model)
    tier = [t.name for t in problem.tiers].index(pipeline.nodes[0].rpartition(" x")[0])
    key = Key(model, tier, pipeline.stages[0].tensor_parallel, len(pipeline.stages))
    return keys(problem).index(key), pipeline.count


def test_a_true_bound_is_confirmed_in_words() -> None:
    plan = reference()
    assert confirmed_bound(plan) == f"lower bound {plan.bound:.6g} $ confirmed, by prices of its limits"


def test_a_tree_is_confirmed_and_an_empty_part_needs_no_prices() -> None:
    plan = reference()
    number, _ = bought(plan)
    node = BoundNode(prices=RowPrices())
    tree = Certificate(kind="tree", nodes=(BoundNode(replicas=(number, 100_000), parts=(1, 2)), node, BoundNode()))
    assert verify_plan(plan.replace(certificate=tree)) == []
    assert (confirmed_bound(plan.replace(certificate=tree)) or "").endswith("in 2 parts")


@pytest.mark.parametrize(("storage", "replicas"), [("once", "many"), ("once", "one"), ("per_query_type", "many")])
def test_replicas_that_must_be_bought_are_paid(storage: str, replicas: str) -> None:
    """Of the two parts of all answers, with and without the only configuration, the one without drops everything."""
    whole = tiny(Decisions.from_dict({"model_storage": storage, "replicas": replicas}))
    queries = [query.replace(errors=query.errors[:1], max_unserved=1.0) for query in whole.query_types]
    problem = whole.replace(
        query_types=tuple(queries), models=whole.models[:1], tiers=whole.tiers[1:], tensor_parallel=(2,)
    )
    (key,) = keys(problem)
    tree = Certificate(kind="tree", nodes=(BoundNode(replicas=(0, 0), parts=(1, 2)), N, N))
    stored = copy_usd_and_gb(problem, key)[0] if storage == "once" else 0.0
    assert proven_bound(problem, tree) == pytest.approx(
        bound_of(problem, RowPrices()) + rent_usd(problem, key) + stored
    )
    # Closed, it costs at least its rent more; without it nothing is served.
    closing = Certificate(kind="tree", nodes=(BoundNode(prices=RowPrices(), closed=(0,)),))
    closed = bound_of(problem, RowPrices()) + rent_usd(problem, key) + (stored if replicas == "one" else 0.0)
    assert proven_bound(problem, closing) == pytest.approx(closed)


def test_what_is_closed_is_only_as_dear_as_its_prices_prove() -> None:
    plan = reference()
    problem = plan.problem
    assert isinstance(problem, AllocationProblem)
    number, _ = bought(plan)
    assert plan.bound is not None
    closing = Certificate(kind="tree", nodes=(BoundNode(prices=RowPrices(), closed=(number,)),))
    rent = rent_usd(problem, keys(problem)[number])
    # Without it the rest costs no less, and with it at least its rent more.
    assert plan.bound * (1 - 1e-9) <= proven_bound(problem, closing) <= plan.bound + rent + 1e-9


INVALID: dict[str, tuple[str, tuple[BoundNode, ...]]] = {
    "a part that is the node": ("parts are later nodes", (BoundNode(replicas=(0, 0), parts=(0, 1)), N)),
    "a part twice": ("each of one node", (BoundNode(replicas=(0, 0), parts=(1, 1)), N)),
    "a part that is not there": ("parts are later nodes", (BoundNode(replicas=(0, 0), parts=(1, 2)), N)),
    "a node of nothing": ("no part of another", (N, N)),
    "one part": ("1 parts by 1 branches", (BoundNode(replicas=(0, 0), parts=(1,)), N)),
    "two branches": ("by 2 branches", (BoundNode(replicas=(0, 0), copied=(0, 0), parts=(1, 2)), N, N)),
    "parts without a branch": ("2 parts by 0 branches", (BoundNode(parts=(1, 2)), N, N)),
    "a leaf without prices": ("no prices", (BoundNode(),)),
    "closed without prices": ("no prices", (BoundNode(closed=(0,), replicas=(0, 0), parts=(1, 2)), N, N)),
    "a configuration that is not there": ("the last is", (BoundNode(prices=RowPrices(), closed=(10**6,)),)),
    "a branch on nothing": ("the last is", (BoundNode(replicas=(10**6, 0), parts=(1, 2)), N, N)),
    "a copy that is stored once": ("stores them once", (BoundNode(copied=(0, 0), parts=(1, 2)), N, N)),
    "a copy spared that is stored once": (
        "stores them once",
        (BoundNode(prices=RowPrices(spared=((0, 0, 1.0),))),),
    ),
    "prices of too few types": ("one for each", (BoundNode(prices=RowPrices(link=((0, (1.0,)),))),)),
    "a price twice": ("two prices", (BoundNode(prices=RowPrices(load=((0, 1.0), (0, 2.0)))),)),
    "a type that is not there": ("query type 99", (BoundNode(prices=RowPrices(unserved=((99, 1.0),))),)),
    "a pair that is not there": (
        "the last is",
        (BoundNode(prices=RowPrices(pair_link=((10**6, (0.0,) * 4),))),),
    ),
    "a first token without a limit": ("has no limit", (BoundNode(prices=RowPrices(ttft=((0, 1.0),))),)),
}  # fmt: skip


@pytest.mark.parametrize("what", INVALID)
def test_a_broken_tree_is_refused(what: str) -> None:
    reason, nodes = INVALID[what]
    plan = reference().replace(certificate=Certificate(kind="tree", nodes=nodes))
    found = verify_plan(plan)
    assert {violation.code for violation in found} == {"certificate_invalid"}, [str(v) for v in found]
    assert reason in str(found[0])


def test_prices_without_end_prove_nothing() -> None:
    for prices in (RowPrices(budget=1e308, storage=1e308), RowPrices(link=((0, (1e308,) * 4),))):
        plan = reference().replace(certificate=Certificate(kind="tree", nodes=(BoundNode(prices=prices),)))
        assert {v.code for v in verify_plan(plan)} <= {"bound_not_proven", "certificate_invalid"}
        assert confirmed_bound(plan) is None


@pytest.mark.parametrize("replicas", ["many", "one"])
def test_a_copy_is_spared_only_where_a_branch_pays_it(replicas: str) -> None:
    problem = tiny(Decisions.from_dict({"model_storage": "per_query_type", "replicas": replicas}))
    number = next(o for o, key in enumerate(keys(problem)) if fits(problem, key))
    usd = copy_usd_and_gb(problem, keys(problem)[number])[0]
    for price, reason in ((usd, None), (usd * 1.1, "costs less")):
        spared = BoundNode(prices=RowPrices(spared=((0, number, price),)))
        tree = Certificate(kind="tree", nodes=(BoundNode(copied=(0, number), parts=(1, 2)), spared, N))
        if reason is None:
            assert proven_bound(problem, tree) >= bound_of(problem, RowPrices()) * (1 - 1e-12)
        else:
            with pytest.raises(ValueError, match=reason):
                proven_bound(problem, tree)
    with pytest.raises(ValueError, match="whose copy no branch pays"):
        proven_bound(problem, Certificate(kind="tree", nodes=(spared,)))


def test_verify_and_the_facade_agree() -> None:
    plan = changed(reference(), "requests_per_s", raised)
    found = hp.verify(plan)
    assert [type(violation) for violation in found] == [Violation]
    assert found == verify_plan(plan)
