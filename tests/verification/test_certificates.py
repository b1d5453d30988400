"""Prices as a proof: true bounds are confirmed, false ones never, by comparison with every pipeline there is."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

import hetplan as hp
from hetplan.estimator.base import make_estimator
from hetplan.estimator.pipeline import (
    StageShape,
    micro_batch,
    pipeline_rates,
    sequences_that_fit,
)
from hetplan.plan import Certificate, Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.verification import confirmed_bound, verify_plan
from hetplan.verification.prices import proven_bound
from tests.builders import TINY_MIXTURE, make_cluster, make_gpu, make_machine, make_pool, problem_of, tiny_llama

Machines = tuple[int, ...]


# ---- every pipeline


_WORTHS: dict[str, dict[Machines, float]] = {}


def every_worth(problem: PlacementProblem) -> dict[Machines, float]:
    """Sets of machines (how many of each pool) -> the most that a pipeline on them is worth; tried once a problem."""
    key = problem.model_dump_json()
    if key not in _WORTHS:
        _WORTHS[key] = _tried(problem)
    return _WORTHS[key]


def _tried(problem: PlacementProblem) -> dict[Machines, float]:
    estimator, pools = make_estimator(problem), problem.cluster.pools
    best: dict[Machines, float] = {}
    for order in machine_orders([pool.count for pool in pools]):
        if len({(pools[p].offer.provider, pools[p].offer.region) for p in order}) > 1:
            continue
        machines = [problem.cluster.instance_type(pools[p].offer.instance_type) for p in order]
        used = Counter(order)
        key = tuple(used[p] for p in range(len(pools)))
        for degrees in product(*(degree_lists(problem, machine.gpu_count) for machine in machines)):
            shapes = [(n, degree) for n, each in enumerate(degrees) for degree in each]
            if len(shapes) > problem.model.layer_count or not engine_allows(problem, degrees):
                continue
            for layers in splits(problem.model.layer_count, len(shapes)):
                stages = [
                    StageShape(span, machines[n], degree, n) for span, (n, degree) in zip(layers, shapes, strict=True)
                ]
                fit = micro_batch(estimator, sequences_that_fit(problem, estimator, stages), len(stages))
                if fit >= 1:
                    worth = best_batch(problem, stages, fit)
                    best[key] = max(best.get(key, 0.0), worth)
    return best


def machine_orders(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    def extend(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for pool, count in enumerate(counts):
            if order.count(pool) < count:
                yield (*order, pool)
                yield from extend((*order, pool))

    yield from extend(())


def degree_lists(problem: PlacementProblem, gpus: int) -> list[tuple[int, ...]]:
    allowed = [degree for degree in problem.model.valid_tensor_parallel(gpus) if gpus % degree == 0]
    found: list[tuple[int, ...]] = []

    def extend(degrees: tuple[int, ...]) -> None:
        for degree in allowed:
            if sum(degrees) + degree <= gpus:
                found.append((*degrees, degree))
                extend((*degrees, degree))

    extend(())
    return found


def engine_allows(problem: PlacementProblem, degrees: Sequence[Sequence[int]]) -> bool:
    unlike = {
        "equal-gpus-per-node": len({sum(each) for each in degrees}) > 1,
        "one-tensor-parallel-degree": len({d for each in degrees for d in each}) > 1,
    }
    return problem.engine is None or not any(unlike.get(limit, False) for limit in problem.engine.limits)


def splits(layers: int, parts: int) -> Iterator[list[tuple[int, int]]]:
    for cuts in combinations(range(1, layers), parts - 1):
        ends = (0, *cuts, layers)
        yield list(pairwise(ends))


def best_batch(problem: PlacementProblem, stages: Sequence[StageShape], fit: int) -> float:
    rates = pipeline_rates(problem, make_estimator(problem), stages, np.arange(1, fit + 1))
    worth = rates.requests_per_s.copy()
    if problem.slo is not None:
        figures = {"ttft_s": rates.ttft_s, "tpot_s": rates.tpot_s, "e2e_s": rates.latency_s}
        excess = np.max([figures[name] / limit for name, limit in problem.slo.limits().items()], axis=0) - 1
        if problem.slo.hard:
            worth[excess > 0] = 0.0
        else:
            worth *= 1 - problem.latency_penalty * np.maximum(excess, 0)
    if problem.objective == "cost":
        assert problem.workload.requests_per_s is not None
        worth = np.minimum(worth, problem.workload.requests_per_s)
    return float(worth.max())


def best_choice(worth: dict[Machines, float], counts: Sequence[int]) -> float:
    """The most that pipelines on disjoint sets of the machines are worth together."""
    best = 0.0
    for machines, value in worth.items():
        left = [have - take for have, take in zip(counts, machines, strict=True)]
        if min(left) >= 0:
            best = max(best, value + best_choice(worth, left))
    return best


def least_cost(worth: dict[Machines, float], counts: Sequence[int], costs: Sequence[float], demand: float) -> float:
    if demand <= 1e-12:
        return 0.0
    best = math.inf
    for machines, value in worth.items():
        left = [have - take for have, take in zip(counts, machines, strict=True)]
        if min(left) >= 0 and value > 0:
            price = sum(take * cost for take, cost in zip(machines, costs, strict=True))
            best = min(best, price + least_cost(worth, left, costs, demand - value))
    return best


# ---- problems and certificates


def random_problem(seed: int, *, network: float | None = 3e9, **options: Any) -> PlacementProblem:
    """At most four machines of two or three kinds; the same network for all unless ``network`` is None."""
    rng = random.Random(seed)
    pools = []
    left = 4
    for name in "abc"[: rng.choice([2, 2, 3])]:
        count = rng.randint(1, min(2, left - 1)) if left > 1 else 1
        left -= count
        gpu = make_gpu(
            f"X{name}",
            memory_gib=rng.choice([0.3, 0.35, 8]),
            gb_per_s=rng.choice([200, 450, 900]),
            tflops=rng.choice([40, 90]),
        )
        machine = make_machine(
            name,
            gpu=gpu,
            gpu_count=rng.choice([1, 2, 2, 3]) if count == 1 else rng.choice([1, 2]),
            pcie=rng.choice([5e9, 40e9]),
            network=rng.choice([2e8, 3e9, 2e10]) if network is None else network,
        )
        pools.append((machine, make_pool(machine, count, usd=rng.choice([0.5, 1.0, 2.0]))))
        if left <= 0:
            break
    model = options.pop("model", None) or tiny_llama()
    return problem_of(model, make_cluster(*pools), **({"max_num_seqs": rng.choice([3, 8, 14])} | options))


def base_prices(problem: PlacementProblem, seed: int) -> list[float]:
    rng = random.Random(seed)
    machines = [problem.cluster.instance_type(pool.offer.instance_type) for pool in problem.cluster.pools]
    return [m.gpu_count * m.gpu.bandwidth_bytes_per_s / 1e9 * rng.uniform(0.7, 1.4) for m in machines]


def least_scale(worth: dict[Machines, float], prices: Sequence[float]) -> float:
    """What prices are to be multiplied by so that no pipeline is worth more than its machines."""
    return max(value / sum(n * p for n, p in zip(machines, prices, strict=True)) for machines, value in worth.items())


def dual(prices: Sequence[float], scale: float = 1.0, **fields: Any) -> Certificate:
    return Certificate(**({"kind": "dual", "pool_prices": tuple(price * scale for price in prices)} | fields))


def holds(problem: PlacementProblem, certificate: Certificate) -> bool:
    return proven_bound(problem, make_estimator(problem), certificate, 0.0).holds


TINY_TWO_KINDS = hp.ModelSpec.from_config(TINY_MIXTURE | {"num_hidden_layers": 5}, name="tiny mixture")
WITH_DEMAND = hp.Workload(input_tokens=763, output_tokens=232, requests_per_s=12.0)
VARIANTS: dict[str, dict[str, Any]] = {
    "throughput": {},
    "paper": {"estimator": "paper"},
    "cost": {"objective": "cost", "workload": WITH_DEMAND},
    "engine": {"engine": "vllm-0.32"},
    "plugin": {"engine": "hetplan"},
}


# ---- dual


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("variant", VARIANTS)
def test_prices_hold_exactly_when_no_pipeline_is_worth_more(variant: str, seed: int) -> None:
    problem = random_problem(seed, **VARIANTS[variant])
    worth = every_worth(problem)
    if not worth:
        pytest.skip("no pipeline fits")
    prices = base_prices(problem, seed)
    scale = least_scale(worth, prices)
    rate = 1e6 if problem.objective == "cost" else None
    for factor, expected in ((1 + 1e-6, True), (1 - 1e-6, False), (1 - 1e-3, False), (0.5, False)):
        certificate = dual(prices, scale * factor, usd_per_hour_per_request_rate=rate)
        assert holds(problem, certificate) is expected, factor


# Where it matters which machine follows which: sends that differ by receiver, layers that differ by kind.
ORDERED: dict[str, dict[str, Any]] = {
    "networks": {"network": None},
    "layers": {"model": TINY_TWO_KINDS},
    "both": {"network": None, "model": TINY_TWO_KINDS},
    "engine": {"network": None, "engine": "vllm-0.32"},
    "plugin": {"network": None, "engine": "hetplan"},
}


@pytest.mark.parametrize("seed", range(200, 206))
@pytest.mark.parametrize("variant", ORDERED)
def test_the_order_of_machines_is_taken_into_account(variant: str, seed: int) -> None:
    problem = random_problem(seed, **ORDERED[variant])
    worth = every_worth(problem)
    prices = base_prices(problem, seed)
    scale = least_scale(worth, prices)
    assert holds(problem, dual(prices, scale * (1 + 1e-6)))
    assert not holds(problem, dual(prices, scale * (1 - 1e-6)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("hard", [True, False], ids=["hard", "soft"])
@pytest.mark.parametrize("estimator", ["calibrated", "paper"])
def test_limits_on_latency(estimator: str, hard: bool, seed: int) -> None:
    """What a limit takes from a pipeline may be counted short; what is left is never worth more than is proven."""
    free = random_problem(seed + 300, estimator=estimator)
    slo = hp.Slo(tpot_s=0.8 * tpot_on_the_first(free), hard=hard)
    problem = free.replace(slo=slo, latency_penalty=0.0 if hard else 0.3)
    worth = {machines: value for machines, value in every_worth(problem).items() if value > 0}
    prices = base_prices(problem, seed)
    assert holds(problem, dual(prices, least_scale(every_worth(free), prices) * (1 + 1e-6)))
    if worth:
        scale = least_scale(worth, prices)
        assert not holds(problem, dual(prices, scale * (1 - 1e-6)))
        if estimator == "paper":
            assert holds(problem, dual(prices, scale * (1 + 1e-6)))


def tpot_on_the_first(problem: PlacementProblem) -> float:
    stages = [StageShape((0, problem.model.layer_count), problem.cluster.instance_types[0], 1, 0)]
    return float(pipeline_rates(problem, make_estimator(problem), stages, [8]).tpot_s[0])


# ---- enumeration


def lp_prices(worth: dict[Machines, float], counts: Sequence[int]) -> tuple[float, ...]:
    """Prices of the machines at which no set is worth more and all machines together are cheapest."""
    sets, values = np.array(list(worth), dtype=float), np.array(list(worth.values()))
    found = linprog(np.array(counts, dtype=float), A_ub=-sets, b_ub=-values, bounds=(1e-3, None))
    return tuple(float(price) * (1 + 1e-6) for price in found.x)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("estimator", ["calibrated", "paper"])
def test_few_sets_of_machines_prove_the_best_choice_among_them(estimator: str, seed: int) -> None:
    problem = random_problem(seed, estimator=estimator)
    worth, counts = every_worth(problem), [pool.count for pool in problem.cluster.pools]
    if not worth:
        pytest.skip("no pipeline fits")
    certificate = Certificate(kind="enumeration", pool_prices=lp_prices(worth, counts))
    best = best_choice(worth, counts)
    proven = proven_bound(problem, make_estimator(problem), certificate, best * (1 + 1e-8))
    assert proven.bound == pytest.approx(best, rel=2e-8)
    stated = best * (1 - 1e-6)
    proven = proven_bound(problem, make_estimator(problem), certificate, stated)
    assert proven.bound >= best * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(200, 206))
@pytest.mark.parametrize("variant", ORDERED)
def test_few_sets_prove_the_best_choice_where_the_order_of_machines_matters(variant: str, seed: int) -> None:
    problem = random_problem(seed, **ORDERED[variant])
    worth, counts = every_worth(problem), [pool.count for pool in problem.cluster.pools]
    certificate = Certificate(kind="enumeration", pool_prices=lp_prices(worth, counts))
    best = best_choice(worth, counts)
    proven = proven_bound(problem, make_estimator(problem), certificate, best * (1 + 1e-8))
    assert proven.bound == pytest.approx(best, rel=2e-8)
    proven = proven_bound(problem, make_estimator(problem), certificate, best * (1 - 1e-6))
    assert proven.bound >= best * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(200, 206))
@pytest.mark.parametrize("variant", ["networks", "both"])
def test_what_machines_are_worth_is_exact_for_each_set_of_them(variant: str, seed: int) -> None:
    """Dear machines and a low stated bound: all sets are looked at, and the best choice among them is the bound."""
    problem = random_problem(seed, **ORDERED[variant])
    worth, counts = every_worth(problem), [pool.count for pool in problem.cluster.pools]
    dear = 2 * max(worth.values())
    certificate = Certificate(kind="enumeration", pool_prices=(dear,) * len(counts))
    best = best_choice(worth, counts)
    proven = proven_bound(problem, make_estimator(problem), certificate, 0.5 * best)
    assert proven.bound == pytest.approx(best, rel=2e-9)


@pytest.mark.parametrize("seed", range(6))
def test_few_sets_of_machines_prove_the_cheapest_choice(seed: int) -> None:
    free = random_problem(seed, model=tiny_llama(num_hidden_layers=3))
    counts = [pool.count for pool in free.cluster.pools]
    costs = [pool.offer.billed_usd_per_hour for pool in free.cluster.pools]
    demand = 0.7 * best_choice(every_worth(free), counts)
    workload = hp.Workload(input_tokens=763, output_tokens=232, requests_per_s=demand)
    problem = free.replace(objective="cost", workload=workload)
    worth = every_worth(problem)
    cheapest = least_cost(worth, counts, costs, demand)
    # Dual of covering the demand: lambda per request/s; a machine's price is at least its cost.
    rate = 0.5 * max(
        sum(n * c for n, c in zip(machines, costs, strict=True)) / value for machines, value in worth.items()
    )
    sets, values = np.array(list(worth), dtype=float), np.array(list(worth.values()))
    found = linprog(np.array(counts) * 1.0, A_ub=-sets, b_ub=-values, bounds=[(c / rate, None) for c in costs])
    certificate = Certificate(
        kind="enumeration",
        pool_prices=tuple(float(p) * (1 + 1e-7) for p in found.x),
        usd_per_hour_per_request_rate=rate,
    )
    proven = proven_bound(problem, make_estimator(problem), certificate, cheapest)
    assert proven.bound == pytest.approx(cheapest, rel=1e-8)
    proven = proven_bound(problem, make_estimator(problem), certificate, cheapest * (1 + 1e-6))
    assert proven.bound <= cheapest * (1 + 1e-9)


# ---- plans


def small_problem(**options: Any) -> PlacementProblem:
    small = make_machine("small", gpu=make_gpu("S"))
    large = make_machine("large", gpu=make_gpu("L", gb_per_s=700, tflops=120), gpu_count=2)
    cluster = make_cluster((small, make_pool(small, 2, usd=1.0)), (large, make_pool(large, 1, usd=3.0)))
    return problem_of(tiny_llama(), cluster, **({"max_num_seqs": 8} | options))


def certified(problem: PlacementProblem, certificate: Certificate, bound: float) -> Plan:
    plan = hp.optimize(problem, solver="dp-beam")
    gap = abs(bound - plan.objective) / plan.objective
    status = "optimal" if gap <= 1e-6 else "feasible"
    return plan.model_copy(update={"bound": bound, "gap": gap, "status": status, "certificate": certificate})


def found_in(plan: Plan) -> list[str]:
    return [str(violation) for violation in verify_plan(plan)]


def test_a_plan_with_prices_is_sound_and_says_what_is_confirmed() -> None:
    problem = small_problem()
    worth, counts = every_worth(problem), [2, 1]
    prices = lp_prices(worth, counts)
    best = best_choice(worth, counts)
    total = 2 * prices[0] + prices[1]
    plan = certified(problem, Certificate(kind="dual", pool_prices=prices), total)
    assert found_in(plan) == []
    assert confirmed_bound(plan) == f"upper bound {total:.6g} req/s confirmed, by prices per machine"
    plan = certified(problem, Certificate(kind="enumeration", pool_prices=prices), best * (1 + 1e-8))
    assert found_in(plan) == []
    assert confirmed_bound(plan) is not None
    assert confirmed_bound(plan.model_copy(update={"bound": None, "gap": None, "certificate": None})) is None


def test_requests_per_dollar_are_bounded_by_the_dearest_price_for_a_machines_cost() -> None:
    problem = small_problem(objective="throughput_per_cost")
    worth = every_worth(problem)
    costs = [1.0, 3.0]
    best = max(value / (machines[0] + 3 * machines[1]) for machines, value in worth.items())
    certificate = dual(costs, best * (1 + 1e-9))
    plan = certified(problem, certificate, best * (1 + 2e-9))
    assert found_in(plan) == []
    assert plan.status == "optimal"


def test_each_way_of_tampering_with_prices_has_its_own_message() -> None:
    problem = small_problem()
    prices = lp_prices(every_worth(problem), [2, 1])
    bound = 2 * prices[0] + prices[1]
    plan = certified(problem, Certificate(kind="dual", pool_prices=prices), bound)

    def told(**fields: Any) -> str:
        changed = {"kind": "dual", "pool_prices": prices} | fields
        (line,) = found_in(plan.model_copy(update={"certificate": Certificate(**changed)}))
        return line

    lower = found_in(certified(problem, Certificate(kind="dual", pool_prices=prices), bound * (1 - 1e-6)))
    assert any(f"the certificate proves {bound:.12g} [bound_not_proven]" in line for line in lower)
    cheaper = told(pool_prices=(prices[0], prices[1] * 0.999))
    assert "proves nothing: " in cheaper
    assert "own/here/large/on_demand may be worth" in cheaper
    assert told(pool_prices=prices[:1]) == (
        "certificate: 1 prices for 2 offers; needed: a usable price for each offer [certificate_invalid]"
    )


def layer_moved(content: dict[str, Any]) -> None:
    front, back = next(p["stages"][:2] for d in content["deployments"] for p in d["pipelines"] if len(p["stages"]) > 1)
    front["layers"][1] -= 1
    back["layers"][0] -= 1


def objective_raised(content: dict[str, Any]) -> None:
    content["objective"] *= 1 + 1e-6


def bound_lowered(content: dict[str, Any]) -> None:
    content["bound"] *= 1 - 1e-6
    content["gap"] = abs(content["bound"] - content["objective"]) / content["objective"]


def price_altered(content: dict[str, Any]) -> None:
    content["certificate"]["pool_prices"][0] *= 0.99


TAMPERING: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "layer moved": (layer_moved, "weight_bytes_differ"),
    "objective raised": (objective_raised, "objective_differs"),
    "bound lowered": (bound_lowered, "the certificate proves [0-9]"),
    "price altered": (price_altered, "the certificate proves nothing: .* may be worth"),
}


@pytest.mark.parametrize("case", TAMPERING)
def test_tampering_with_a_certified_plan_is_caught_by_name(case: str) -> None:
    machine = make_machine("small", gpu=make_gpu("S", memory_gib=0.35))
    problem = problem_of(tiny_llama(), make_cluster((machine, make_pool(machine, 2, usd=1.0))), max_num_seqs=8)
    (price,) = lp_prices(every_worth(problem), [2])
    plan = certified(problem, dual([price]), 2 * price)
    assert found_in(plan) == []
    change, message = TAMPERING[case]
    content = json.loads(plan.to_json())
    change(content)
    found = found_in(Plan.from_dict(content))
    assert any(re.search(message, line) for line in found)


def test_prices_of_a_cost_bound_are_worth_what_the_machines_cost() -> None:
    workload = hp.Workload(input_tokens=763, output_tokens=232, requests_per_s=5.0)
    problem = small_problem(objective="cost", workload=workload)
    estimator = make_estimator(problem)

    def refused(**fields: Any) -> str:
        with pytest.raises(ValueError, match=r".") as caught:
            proven_bound(problem, estimator, Certificate(kind="dual", **fields), 1.0)
        return str(caught.value)

    assert "needs what one request/s is worth" in refused(pool_prices=(10.0, 30.0))
    low = refused(pool_prices=(10.0, 30.0), usd_per_hour_per_request_rate=0.09)
    assert low == "own/here/small/on_demand is priced 0.9 $/h and costs 1"
    assert "finite" in refused(pool_prices=(math.nan, 30.0), usd_per_hour_per_request_rate=1.0)


def test_tampering_with_a_plan_of_the_exact_solver_is_told_apart() -> None:
    """A layer moved, the objective raised, the bound lowered, a price altered: each by a message of its own."""
    workload = hp.Workload(input_tokens=763, output_tokens=232)
    machines = {"g6.12xlarge": 1, "g5.12xlarge": 1}
    plan = hp.optimize(model="qwen3-32b", cluster=machines, workload=workload, solver="exact")
    assert plan.status == "optimal"
    assert found_in(plan) == []
    assert plan.certificate is not None
    assert plan.bound is not None
    deployment = plan.deployments[0]
    pipeline = next(p for p in deployment.pipelines if len(p.stages) > 1)
    first, second, *rest = pipeline.stages
    moved = pipeline.replace(
        stages=(
            first.replace(layers=(0, first.layers[1] + 1)),
            second.replace(layers=(first.layers[1] + 1, second.layers[1])),
            *rest,
        )
    )
    pipelines = tuple(moved if p is pipeline else p for p in deployment.pipelines)
    prices = plan.certificate.pool_prices
    cheaper = plan.certificate.replace(pool_prices=(prices[0] * 0.9, *prices[1:]))
    tampered = {
        "weight_bytes_differ": plan.model_copy(
            update={"deployments": (deployment.model_copy(update={"pipelines": pipelines}),)}
        ),
        "objective_differs": plan.model_copy(update={"objective": plan.objective * 1.1}),
        "bound_not_proven": plan.model_copy(update={"bound": plan.bound * 0.9}),
        "proves nothing": plan.model_copy(update={"certificate": cheaper}),
    }
    for said, other in tampered.items():
        assert any(said in line for line in found_in(other)), (said, found_in(other))
