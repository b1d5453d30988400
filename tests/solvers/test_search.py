"""The search within latency limits against every pipeline there is, on random small machines and limits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from builders import make_cluster, make_gpu, make_machine, make_pool, problem_of, tiny_llama
from small_cases import any_model, read_by_paper, zigzag_times
from whole_placements import WholePlacements

import hetplan as hp
from hetplan.catalog.engines import get_engine
from hetplan.catalog.hardware import InstanceType, Link
from hetplan.estimator.base import make_estimator
from hetplan.estimator.pipeline import StageShape, micro_batch, pipeline_rates, sequences_that_fit
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.placement.choice import value_of
from hetplan.solvers.placement.search import Found, best_under_limits
from hetplan.solvers.placement.tables import build_tables, stage_options

SAME = 1e-9
MOST_LABELS = 10**8


def drawn(seed: int, *, paper: bool = False, zigzag: bool = False) -> PlacementProblem:
    """Two to four machines whose memory is about what a part of a small model needs, without limits yet."""
    rng = np.random.default_rng([seed, paper, zigzag])
    model = (read_by_paper if paper else any_model)(rng)
    sequences = int(rng.integers(4, 20))
    made = []
    left = 5
    for number in range(int(rng.integers(1, 4))):
        gpus = int(rng.choice([1, 1, 2, 3]))
        count = int(rng.integers(1, 3)) if gpus == 1 else 1
        if gpus * count > left:
            continue
        left -= gpus * count
        share = rng.uniform(0.2, 1.2) * model.weight_bytes / 2**30
        gpu = make_gpu(
            f"gpu-{number}", memory_gib=(0.8 + share) / 0.89, gb_per_s=rng.uniform(100, 1000),
            tflops=rng.uniform(20, 300),
        )  # fmt: skip
        machine = make_machine(f"box-{number}", gpu=gpu, gpu_count=gpus, pcie=float(rng.choice([2e9, 50e9])))
        link = Link(latency_s=float(rng.choice([5e-6, 1e-3])), bytes_per_s=float(rng.choice([1e8, 1e10])))
        made.append((machine.replace(inter_node_link=link), make_pool(machine, count)))
    output = 1.0 if rng.random() < 0.1 else float(rng.integers(2, 500))
    workload = hp.Workload(input_tokens=float(rng.integers(50, 2000)), output_tokens=output)
    return problem_of(
        model, make_cluster(*made), workload, estimator="paper" if paper else "calibrated", max_num_seqs=sequences,
        max_num_batched_tokens=256,
    )  # fmt: skip


def limited(
    seed: int, every: WholePlacements, *, hard: bool
) -> tuple[PlacementProblem, tuple[float, dict[str, float]] | None] | None:
    """The problem with limits that bind, and its best pipeline; None when nothing fits without limits."""
    rng = np.random.default_rng([seed, hard])
    best = best_of_all(every)
    if best is None:
        return None
    reached, least = best[1], every.least
    limits = {}
    for name in rng.choice(sorted(least), size=int(rng.integers(1, 4)), replace=False).tolist():
        if reached[name] > 0:
            limits[name] = least[name] * (reached[name] / least[name]) ** float(rng.choice([0.2, 0.6, 0.9, 1.0, -0.1]))
    limits = limits or {"e2e_s": least["e2e_s"] * 1.2}
    penalty = float(rng.choice([0.05, 0.5, 5.0]))
    problem = every.problem.replace(slo=hp.Slo(**limits, hard=hard), latency_penalty=penalty)
    return problem, best_of_all(every.asked(problem))


def machines_of(problem: PlacementProblem) -> tuple[int, ...]:
    return tuple(index for index, pool in enumerate(problem.cluster.pools) for _ in range(pool.count))


def best_of_all(every: WholePlacements, pools: Sequence[int] | None = None) -> tuple[float, dict[str, float]] | None:
    """The best pipeline on some or all of these machines, or of all there are, by trying everything."""
    cluster = every.problem.cluster
    pools = machines_of(every.problem) if pools is None else pools
    best = None
    for size in range(1, min(len(pools), every.layers) + 1):
        for taken in sorted(set(itertools.combinations(sorted(pools), size))):
            names = [cluster.pools[pool].offer.instance_type for pool in taken]
            found = every.best_pipeline([cluster.instance_type(name) for name in names])
            if found is not None and (best is None or found.value > best[0]):
                best = found.value, found.latencies
    return best


def searched(problem: PlacementProblem, pools: tuple[int, ...] | None = None, **asked: Any) -> Found:
    """What the search finds on all machines, or on some; ``asked`` goes before what all of them allow."""
    estimator = make_estimator(problem)
    every = list(range(len(problem.cluster.pools)))
    tables = build_tables(problem, estimator, stage_options(problem, every, whole_nodes=False))
    given: dict[str, Any] = {
        "gpus": {option.pool: option.machine.gpu_count for option in tables.options},
        "fixed_stages": dict.fromkeys(every, 0),
        "options": {pool: [o for o, option in enumerate(tables.options) if option.pool == pool] for pool in every},
        "at_least": 0.0,
        "most_labels": MOST_LABELS,
    } | asked
    pools = machines_of(problem) if pools is None else pools
    found = best_under_limits(problem, tables, estimator, pools, **given)
    if not found.stages:
        assert (found.value, found.micro_batch) == (0.0, 0)
        return found

    # It is a pipeline on these machines, it fits, and it is worth what is said.
    options, stages = tables.options, found.stages
    assert [0, *(end for _, _, end, _ in stages)] == [*(first for _, first, _, _ in stages), problem.model.layer_count]
    visits = [machine for machine, _ in itertools.groupby(machine for *_, machine in stages)]
    assert len(visits) == len(set(visits))
    for machine in visits:
        mine = [option for option, *_, where in stages if where == machine]
        pool, taken = pools[machine], sum(options[option].degree for option in mine)
        assert set(mine) <= set(given["options"][pool])
        fixed = given["fixed_stages"][pool]
        assert taken <= given["gpus"][pool] if not fixed else (len(mine), taken) == (fixed, given["gpus"][pool])
    shapes = [StageShape((a, b), options[o].machine, options[o].degree, node) for o, a, b, node in stages]
    most = micro_batch(estimator, sequences_that_fit(problem, estimator, shapes), len(shapes))
    assert 1 <= found.micro_batch <= most
    rates = pipeline_rates(problem, estimator, shapes, found.micro_batch)
    assert found.value == pytest.approx(float(value_of(problem, rates)[0]), rel=1e-12)
    return found


def agree(found: Found, best: tuple[float, dict[str, float]] | None) -> None:
    assert found.complete
    if best is None or best[0] <= 0:
        assert found.stages == ()
    else:
        assert found.value == pytest.approx(best[0], rel=SAME)


CASES = [
    pytest.param(seed, paper, zigzag, hard, id=f"{seed}{' paper' * paper}{' zigzag' * zigzag}{' hard' * hard}")
    for paper, zigzag, hard in itertools.product((False, True), repeat=3)
    for seed in range(8 if paper else 24)
]


@pytest.mark.parametrize(("seed", "paper", "zigzag", "hard"), CASES)
def test_the_best_of_all_pipelines_is_found(seed: int, paper: bool, zigzag: bool, hard: bool) -> None:
    with zigzag_times() if zigzag else nullcontext():
        case = limited(seed, WholePlacements(drawn(seed, paper=paper, zigzag=zigzag)), hard=hard)
        if case is not None:
            agree(searched(case[0]), case[1])


def test_few_cases_are_empty() -> None:
    drawn_ones = [limited(seed, WholePlacements(drawn(seed)), hard=False) for seed in range(24)]
    worth = [case for case in drawn_ones if case is not None and case[1] is not None and case[1][0] > 0]
    assert len(worth) >= 16
    assert len({len(case[0].slo.limits()) for case in worth if case[0].slo}) == 3
    assert any(len(case[0].model.layer_kinds) > 1 for case in worth)


@pytest.mark.parametrize("seed", range(8))
def test_within_an_engines_limits(seed: int) -> None:
    free = drawn(seed)
    case = limited(seed, WholePlacements(free.replace(engine=get_engine("vllm-0.32"))), hard=False)
    if case is None:
        return
    problem, best = case
    tables = stage_options(problem, list(range(len(problem.cluster.pools))), whole_nodes=False)
    most = max(option.machine.gpu_count for option in tables)
    found = []
    # As many GPUs of every machine, in groups of one degree.
    for degree, stages in itertools.product({option.degree for option in tables}, range(1, most + 1)):
        gpus = degree * stages
        options = {
            option.pool: [o]
            for o, option in enumerate(tables)
            if option.degree == degree and option.machine.gpu_count >= gpus
        }
        pools = tuple(pool for pool in machines_of(problem) if pool in options)
        fixed = dict.fromkeys(options, stages)
        found.append(searched(problem, pools, gpus=dict.fromkeys(options, gpus), fixed_stages=fixed, options=options))
    agree(max(found, key=lambda one: one.value), best)


class Filled(WholePlacements):
    """Three stages on every machine, and none of its GPUs idle."""

    def ways(self, machine: InstanceType) -> list[tuple[int, ...]]:
        return [way for way in super().ways(machine) if (len(way), sum(way)) == (3, machine.gpu_count)]


def node_problem(**limits: Any) -> PlacementProblem:
    """Two nodes of four GPUs: groups of one, two and four."""
    machines = [
        make_machine(f"node-{number}", gpu=make_gpu(f"gpu-{number}", memory_gib=2, gb_per_s=speed), gpu_count=4)
        for number, speed in enumerate((300, 500))
    ]
    cluster = make_cluster(*((machine, make_pool(machine)) for machine in machines))
    return problem_of(
        tiny_llama(num_hidden_layers=6), cluster, slo=hp.Slo(hard=False, **limits), latency_penalty=1.0,
        max_num_seqs=16, max_num_batched_tokens=256,
    )  # fmt: skip


def test_stages_per_machine_are_fixed() -> None:
    problem = node_problem(e2e_s=1.0)
    best = best_of_all(Filled(problem))
    assert best is not None
    found = searched(problem, fixed_stages={0: 3, 1: 3})
    agree(found, best)
    assert found.value < searched(problem).value


def test_some_machines_and_options() -> None:
    problem = node_problem(tpot_s=0.002)
    whole = WholePlacements(problem)
    agree(searched(problem, (1,)), best_of_all(whole, [1]))
    agree(searched(problem, (1, 0)), best_of_all(whole))
    tables = stage_options(problem, [0, 1], whole_nodes=False)
    ones = {pool: [o for o, option in enumerate(tables) if option.pool == pool][:1] for pool in (0, 1)}
    single = searched(problem, options=ones)
    assert {option for option, *_ in single.stages} <= {ones[0][0], ones[1][0]}
    assert single.value <= searched(problem).value
    alone = searched(problem, gpus={0: 0, 1: 1})
    assert {(option, machine) for option, *_, machine in alone.stages} == {(ones[1][0], 1)}
    assert searched(problem, options={0: [], 1: []}) == Found(0.0, (), 0, True)


def test_values_up_to_at_least_are_of_no_interest() -> None:
    problem = node_problem(e2e_s=0.3, ttft_s=0.01)
    best = searched(problem)
    assert searched(problem, at_least=best.value) == Found(0.0, (), 0, True)
    assert searched(problem, at_least=best.value * (1 - 1e-9)).value == pytest.approx(best.value, rel=SAME)


def test_a_search_that_is_cut_short_says_so() -> None:
    problem = node_problem(e2e_s=0.3)
    best = searched(problem).value
    found = [searched(problem, most_labels=10**power) for power in range(8)]
    assert [one.value for one in found] == sorted(one.value for one in found)
    assert found[-1].complete
    assert (found[0].complete, found[0].value) == (False, 0.0)
    assert all(one.value == best for one in found if one.complete)


def test_what_cannot_be_asked_is_refused() -> None:
    problem = node_problem(e2e_s=0.3)
    with pytest.raises(ValueError, match="no slo"):
        searched(problem.replace(slo=None))
    with pytest.raises(ValueError, match="at_least"):
        searched(problem, at_least=-1.0)
