"""No plan beats the layer-rate bound: not a solver's, not one put together at random."""

from __future__ import annotations

import numpy as np
import pytest
from builders import TINY_MIXTURE, make_cluster, make_gpu, make_machine, make_pool, problem_of, tiny_llama
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import hetplan as hp
from hetplan.catalog.hardware import InstanceType
from hetplan.catalog.offers import Cluster
from hetplan.estimator.base import make_estimator
from hetplan.estimator.pipeline import StageShape, micro_batch, pipeline_rates, sequences_that_fit
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import solver_names
from hetplan.solvers.placement.bound import layer_rate_bound, refuse_infeasible


@st.composite
def machines(draw: st.DrawFn, name: str) -> InstanceType:
    gpu = make_gpu(
        f"gpu-{name}",
        memory_gib=draw(st.sampled_from([2, 4, 16])),
        gb_per_s=draw(st.sampled_from([100, 300, 2000])),
        tflops=draw(st.sampled_from([20, 100, 600])),
    )
    return make_machine(
        name,
        gpu=gpu,
        gpu_count=draw(st.sampled_from([1, 2, 3, 4])),
        pcie=draw(st.sampled_from([1e9, 50e9])),
        network=draw(st.sampled_from([1e8, 5e9])),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    pools = []
    for name in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        machine = draw(machines(name))
        pools.append((machine, make_pool(machine, draw(st.integers(1, 2)), usd=draw(st.sampled_from([0.1, 1, 30])))))
    return make_cluster(*pools)


@st.composite
def problems(draw: st.DrawFn, objective: str = "throughput", estimator: str = "calibrated") -> PlacementProblem:
    mixed = estimator == "calibrated" and draw(st.booleans())
    if mixed:
        model = hp.ModelSpec.from_config(TINY_MIXTURE | {"max_position_embeddings": 10**7})
    else:
        model = tiny_llama(num_hidden_layers=draw(st.integers(1, 8)), max_position_embeddings=10**7)
    workload = hp.Workload(
        input_tokens=draw(st.sampled_from([1, 50, 763, 3000])),
        output_tokens=draw(st.sampled_from([1, 2, 232, 1000])),
        requests_per_s=draw(st.sampled_from([0.01, 1, 20])),
        prefix_cache_hit_rate=draw(st.sampled_from([0.0, 0.9])),
    )
    return problem_of(
        model, draw(clusters()), workload, objective=objective, estimator=estimator,
        max_num_seqs=draw(st.sampled_from([4, 64])), max_num_batched_tokens=512,
    )  # fmt: skip


@st.composite
def random_pipelines(draw: st.DrawFn, problem: PlacementProblem) -> list[list[StageShape]]:
    """Pipelines on disjoint machines: any order of groups of any degree, layers cut anywhere."""
    layers = problem.model.layer_count
    groups: list[tuple[InstanceType, int, int]] = []
    node = 0
    for pool in problem.cluster.pools:
        machine = problem.cluster.instance_type(pool.offer.instance_type)
        for _ in range(pool.count):
            free = machine.gpu_count
            while free:
                fitting = [d for d in machine.valid_tensor_parallel(problem.model) if d <= free]
                degree = draw(st.sampled_from(fitting))
                groups.append((machine, degree, node))
                free -= degree
            node += 1
    nodes = draw(st.permutations(range(node)))
    pipelines: list[list[StageShape]] = []
    cut = draw(st.integers(1, node))
    for mine in (nodes[:cut], nodes[cut:]):
        chosen = draw(st.permutations([g for g in groups if g[2] in mine]))[:layers]
        if not chosen:
            continue
        cuts = (
            sorted(draw(st.sets(st.integers(1, layers - 1), min_size=len(chosen) - 1, max_size=len(chosen) - 1)))
            if len(chosen) > 1
            else []
        )
        edges = [0, *cuts, layers]
        pipelines.append(
            [
                StageShape((edges[i], edges[i + 1]), machine, degree, where)
                for i, (machine, degree, where) in enumerate(chosen)
            ]
        )
    return pipelines


def best_rate(problem: PlacementProblem, stages: list[StageShape]) -> float:
    """Requests per second of a pipeline at its best batch; zero when it holds none."""
    estimator = make_estimator(problem)
    most = micro_batch(estimator, sequences_that_fit(problem, estimator, stages), len(stages))
    if most < 1:
        return 0.0
    return float(np.max(pipeline_rates(problem, estimator, stages, np.arange(1, most + 1)).requests_per_s))


@pytest.mark.parametrize("estimator", ["calibrated", "paper"])
@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_pipelines_put_together_at_random_stay_below(estimator: str, data: st.DataObject) -> None:
    problem = data.draw(problems(estimator=estimator))
    bound = layer_rate_bound(problem, make_estimator(problem)).value
    total = sum(best_rate(problem, stages) for stages in data.draw(random_pipelines(problem)))
    assert total <= bound * (1 + 1e-9)


@pytest.mark.parametrize("estimator", ["calibrated", "paper"])
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_a_ratio_put_together_at_random_stays_below(estimator: str, data: st.DataObject) -> None:
    problem = data.draw(problems("throughput_per_cost", estimator))
    bound = layer_rate_bound(problem, make_estimator(problem)).value
    pipelines = data.draw(random_pipelines(problem))
    prices = {pool.offer.instance_type: pool.offer.billed_usd_per_hour for pool in problem.cluster.pools}
    rates = [best_rate(problem, stages) for stages in pipelines]
    costs = [sum({s.node: prices[s.machine.name] for s in stages}.values()) for stages in pipelines]
    assert sum(rates) / sum(costs) <= bound * (1 + 1e-9)
    assert max(r / c for r, c in zip(rates, costs, strict=True)) <= bound * (1 + 1e-9)


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_a_fleet_put_together_at_random_costs_no_less(data: st.DataObject) -> None:
    problem = data.draw(problems("cost"))
    pipelines = data.draw(random_pipelines(problem))
    rates = [best_rate(problem, stages) for stages in pipelines]
    assume(sum(rates) > 0)
    # The demand is what this very fleet serves.
    served = problem.replace(
        workload=problem.workload.replace(
            query_types=(problem.workload.query_types[0].replace(requests_per_s=sum(rates)),)
        )
    )
    bound = layer_rate_bound(served, make_estimator(served)).value
    prices = {pool.offer.instance_type: pool.offer.billed_usd_per_hour for pool in problem.cluster.pools}
    cost = sum(sum({s.node: prices[s.machine.name] for s in stages}.values()) for stages in pipelines)
    assert bound <= cost * (1 + 1e-9)


@pytest.mark.parametrize("objective", ["throughput", "throughput_per_cost", "cost"])
@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_no_solver_beats_it_and_the_checker_confirms_it(objective: str, data: st.DataObject) -> None:
    problem = data.draw(problems(objective))
    for solver in solver_names():
        try:
            plan = hp.optimize(problem, solver=solver)
        except (hp.InfeasibleError, hp.NoSolutionError):
            continue
        assert [str(violation) for violation in hp.verify(plan)] == []
        bound = layer_rate_bound(problem, make_estimator(problem)).value
        better = bound - plan.objective if objective == "cost" else plan.objective - bound
        assert better <= 1e-9 * abs(bound)


@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_no_proof_of_infeasibility_rules_out_a_pipeline_that_exists(data: st.DataObject) -> None:
    """Limits drawn so tight that a pipeline put together at random just keeps them."""
    problem = data.draw(problems())
    for stages in data.draw(random_pipelines(problem)):
        estimator = make_estimator(problem)
        most = micro_batch(estimator, sequences_that_fit(problem, estimator, stages), len(stages))
        if most < 1:
            continue
        refuse_infeasible(problem, estimator)
        tight = problem.replace(max_model_len=longest_that_fits(problem, stages))
        refuse_infeasible(tight, make_estimator(tight))
        rates = pipeline_rates(problem, estimator, stages, np.arange(1, most + 1))
        for name, reached in (("ttft_s", rates.ttft_s), ("tpot_s", rates.tpot_s), ("e2e_s", rates.latency_s)):
            least = float(np.min(reached))
            if least > 0:
                strict = problem.replace(slo=hp.Slo(**{name: least * (1 + 1e-9)}))
                refuse_infeasible(strict, make_estimator(strict))


def longest_that_fits(problem: PlacementProblem, stages: list[StageShape]) -> int:
    """The longest request that the pipeline has room for, in tokens."""
    low, high = problem.workload.max_tokens, problem.model.max_position_tokens
    while low < high:
        middle = (low + high + 1) // 2
        longer = problem.replace(max_model_len=middle)
        fits = sequences_that_fit(longer, make_estimator(longer), stages) > 0
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def test_one_machine_alone_comes_close() -> None:
    """The bound leaves out ends and sends only: on one GPU with many small layers little is left out."""
    machine = make_machine(gpu=make_gpu(memory_gib=16))
    model = tiny_llama(num_hidden_layers=60, vocab_size=256)
    plan = hp.optimize(
        model=model, cluster=make_cluster((machine, make_pool(machine))),
        workload=hp.Workload(input_tokens=763, output_tokens=232),
    )  # fmt: skip
    assert plan.gap is not None
    assert plan.gap < 0.25
