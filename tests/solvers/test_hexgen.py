"""HexGen's search: the same for a seed, never above the best plan there is, near it where that is known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from brute import TINY, best_pipeline, best_plan, mixture_problem, splits, tiny_problem
from builders import make_cluster, make_gpu, make_machine, make_pool, problem_of, tiny_llama, verified

import hetplan as hp
from hetplan.estimator.base import make_estimator
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.placement.chain import Chains, Group, as_asked, machine_sets
from hetplan.solvers.placement.hexgen import HexGen
from hetplan.solvers.placement.layout import best_layout

ENGINE = "vllm-0.33"
WORKLOAD = hp.Workload(input_tokens=763, output_tokens=232)


def chains_of(problem: PlacementProblem) -> Chains:
    return Chains(problem, make_estimator(problem))


# ---- the search


@pytest.mark.parametrize("name", TINY)
def test_no_plan_beats_the_best_there_is_and_none_is_far_below(name: str) -> None:
    plan = verified(hp.optimize(tiny_problem(name), solver="hexgen"))
    assert 0.97 * best_plan(name) <= plan.objective <= best_plan(name) * (1 + 1e-9)


def test_the_seed_decides_the_plan() -> None:
    problem = mixture_problem()
    plans = [hp.optimize(problem, solver="hexgen", seed=seed, generations=30).to_json() for seed in (3, 3, 4)]
    assert plans[0] == plans[1]
    assert '"seed":3' in plans[0].replace(" ", "")


def test_more_generations_are_no_worse() -> None:
    problem = tiny_problem("all unlike")
    objectives = [hp.optimize(problem, solver="hexgen", generations=n).objective for n in (1, 20, 200)]
    assert objectives == sorted(objectives)


@pytest.mark.parametrize(("option", "value"), [("generations", 0), ("population", True), ("perturbations", 1.5)])
def test_options_are_counts(option: str, value: object) -> None:
    with pytest.raises(hp.InvalidInputError, match=option):
        HexGen(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("solver", ["hexgen", "helix"])
def test_an_engine_s_limits_are_kept(solver: str) -> None:
    problem = mixture_problem(engine=ENGINE)
    assert verified(hp.optimize(problem, solver=solver)).requests_per_s > 0


@pytest.mark.parametrize("solver", ["hexgen", "helix"])
def test_hard_limits_are_kept_or_the_failure_is_honest(solver: str) -> None:
    free = hp.optimize(mixture_problem(), solver=solver)
    slowest = max(p.predictions.latency_s.value for p in free.deployments[0].pipelines)
    limited = mixture_problem(slo=hp.Slo(e2e_s=0.8 * slowest, hard=True))
    plan = verified(hp.optimize(limited, solver=solver))
    assert all(p.predictions.latency_s.value <= 0.8 * slowest for p in plan.deployments[0].pipelines)
    with pytest.raises(hp.InfeasibleError):
        hp.optimize(mixture_problem(slo=hp.Slo(e2e_s=1e-6, hard=True)), solver=solver)


@pytest.mark.parametrize("solver", ["hexgen", "helix"])
def test_a_model_beyond_the_cluster_is_infeasible(solver: str) -> None:
    machine = make_machine("one", gpu=make_gpu("one", memory_gib=1))
    cluster = make_cluster((machine, make_pool(machine, 2)))
    with pytest.raises(hp.InfeasibleError):
        hp.optimize(model=tiny_llama(num_hidden_layers=200), cluster=cluster, workload=WORKLOAD, solver=solver)


# ---- a chain's value and layers, which both planners use


CHAINED = {
    "two kinds": mixture_problem,
    "paper": lambda: problem_of(
        tiny_llama(num_hidden_layers=4), TINY["all unlike"], WORKLOAD, estimator="paper", max_num_seqs=16
    ),
    "latency": lambda: mixture_problem(slo=hp.Slo(ttft_s=0.1, tpot_s=0.004, hard=False), latency_penalty=0.1),
}


@pytest.mark.parametrize("name", CHAINED)
def test_a_chain_is_worth_what_the_estimator_says(name: str) -> None:
    """The tables, the kinds of layers and the ends add up to the pipeline's own figures."""
    problem = CHAINED[name]()
    chains = chains_of(problem)
    options = chains.tables.options
    checked = 0
    for size in (1, 2, 3):
        for chosen in itertools.product(range(len(options)), repeat=size):
            pools = [options[o].pool for o in chosen]
            if len(set(pools)) < size:
                continue
            groups = [Group(o, node) for node, o in enumerate(chosen)]
            for parts in splits(chains.layer_count, size):
                cuts = np.array([0, *(stop for _, stop in parts)])
                value, choice = chains.value(groups, cuts), chains.choice(groups, cuts, pools)
                if choice is None:
                    assert value <= 0
                else:
                    assert value == pytest.approx(choice[1], rel=1e-9)
                    checked += 1
    assert checked > 50


def test_balanced_layers_are_near_the_best_split() -> None:
    chains = chains_of(mixture_problem())
    options = chains.tables.options
    for order in itertools.permutations(range(len(options)), 3):
        if len({options[o].pool for o in order}) < 3:
            continue
        groups = [Group(o, node) for node, o in enumerate(order)]
        every = [
            chains.value(groups, np.array([0, *(stop for _, stop in parts)])) for parts in splits(chains.layer_count, 3)
        ]
        _, value = chains.balanced(groups)
        # It looks at the sum of both phases, the pipeline at the slowest of each.
        assert 0.97 * max(every) <= value <= max(every) * (1 + 1e-9)


@pytest.mark.parametrize("name", TINY)
def test_a_group_s_pipeline_uses_all_its_machines_and_is_near_the_best(name: str) -> None:
    problem = tiny_problem(name)
    counts = [pool.count for pool in problem.cluster.pools]
    pools = tuple(pool for pool, count in enumerate(counts) for _ in range(count))
    layout = best_layout(chains_of(problem), machine_sets(problem), counts, np.random.default_rng(1), 48)
    assert layout is not None
    assert sorted(layout.pools) == list(pools)
    assert {group.node for group in layout.groups} == set(range(len(pools)))
    best = best_pipeline(name, pools)
    # The best pipeline may leave a GPU of a larger machine idle; HexGen's never does.
    single = all(machine.gpu_count == 1 for machine in problem.cluster.instance_types)
    assert (0.9 if single else 0.6) * best <= layout.value <= best * (1 + 1e-9)


def test_a_plan_keeps_what_the_objective_asks_for() -> None:
    costs, values = [1.0, 2.0, 5.0, 1.0], [1.0, 3.0, 6.0, 0.0]
    problem = {
        objective: problem_of(
            tiny_llama(), TINY["one fast"], hp.Workload(input_tokens=10, output_tokens=10, requests_per_s=rate),
            objective=objective,
        )
        for objective, rate in [("throughput", None), ("throughput_per_cost", None), ("cost", 6.5)]
    }  # fmt: skip
    assert sorted(as_asked(problem["throughput"], costs, values)) == [0, 1, 2]
    assert as_asked(problem["throughput_per_cost"], costs, values) == [1]
    # The second and third serve nine; with the first alone beside the third, seven are enough for less.
    kept = as_asked(problem["cost"], costs, values)
    assert sum(values[i] for i in kept) >= 6.5
    assert all(sum(values[j] for j in kept if j != i) < 6.5 for i in kept)
    assert as_asked(problem["cost"], costs[:2], values[:2]) == []
