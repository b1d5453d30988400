"""The steady state of a pipeline in closed form, against what is known, and against simulated requests."""

from __future__ import annotations

import math

import numpy as np
import pytest

import hetplan as hp
from hetplan.catalog.models import get_model
from hetplan.catalog.tables import default_instance_type, get_calibration, get_gpu
from hetplan.estimator.prompt_queue import CELLS, first_token_delays, immediate_delays, mixed, prompt_grid
from hetplan.estimator.queueing import (
    LATENCIES,
    SteadyState,
    mg1_wait_s,
    percentile_of,
    plan_steady_states,
    steady_state,
)
from hetplan.estimator.replica import make_replica
from hetplan.simulator.fleet import Fleet, ReplicaKind, kind_of_replica
from hetplan.simulator.results import SimulationResult
from hetplan.simulator.traffic import Traffic
from tests.builders import make_cluster, make_machine, make_pool, problem_of, tiny_llama

LEVELS = (0.5, 0.9, 0.99)
PLAIN = hp.Workload(input_tokens=763, output_tokens=232)
_rng = np.random.default_rng(0)
VARIED = hp.Workload(
    input_tokens=hp.TokenDistribution.from_samples(np.clip(_rng.lognormal(6.3, 0.9, 4000), 8, 6000).round()),
    output_tokens=hp.TokenDistribution.from_samples(np.clip(_rng.lognormal(5.0, 0.8, 4000), 2, 1500).round()),
)


def at(load: hp.Workload, rate: float) -> hp.Workload:
    query = load.query_types[0]
    return hp.Workload(query_types=[query.replace(requests_per_s=rate)])


def kind_of(model: str, gpu: str, degree: int, stages: int, load: hp.Workload, most: int) -> ReplicaKind:
    found = get_gpu(gpu)
    replica = make_replica(
        get_model(model),
        default_instance_type(found),
        get_calibration(found),
        tensor_parallel=degree,
        pipeline_parallel=stages,
        schedule="in_flight",
        engine="vllm",
        estimator="calibrated",
        gpu_memory_utilization=None,
    )
    return kind_of_replica(replica, load, max_num_seqs=most)


def settled(kind: ReplicaKind, rate: float) -> SteadyState:
    return steady_state(
        kind.problem,
        kind.estimator,
        kind.stages,
        requests_per_s=rate,
        max_num_seqs=kind.max_num_seqs,
        max_step_tokens=kind.max_step_tokens,
    )


# Model, GPU, tensor and pipeline parallel, workload, sequences at most, rates of 30% to 70% of what it serves; and
# the largest relative error of TTFT, and of TPOT and end-to-end, at P50, P90 and P99.
CASES = [
    ("llama-3.1-8b", "H100", 1, 1, PLAIN, 256, (9.3, 21.6), 0.12, 0.10),
    ("llama-3.1-8b", "H100", 1, 1, VARIED, 256, (9.1, 21.3), 0.20, 0.10),
    ("qwen3-32b", "H100", 2, 1, PLAIN, 96, (4.0, 9.0), 0.15, 0.12),
    ("llama-3.1-8b", "L4", 1, 2, PLAIN, 160, (0.92, 2.16), 0.20, 0.15),
    ("llama-3.1-8b", "A10G", 1, 2, VARIED, 160, (1.03, 2.41), 0.20, 0.30),
    ("llama-3.1-70b", "L4", 1, 8, PLAIN, 20, (0.056,), 0.20, 0.15),
]
SEEDS = range(2)
REQUESTS = 2500


@pytest.mark.parametrize(("model", "gpu", "degree", "stages", "load", "most", "rates", "ttft", "tpot"), CASES)
def test_percentiles_are_those_of_simulated_requests(
    model: str,
    gpu: str,
    degree: int,
    stages: int,
    load: hp.Workload,
    most: int,
    rates: tuple[float, ...],
    ttft: float,
    tpot: float,
) -> None:
    kind = kind_of(model, gpu, degree, stages, at(load, 1.0), most)
    for rate in rates:
        state = settled(kind, rate)
        runs = [simulated(kind, at(load, rate), seed) for seed in SEEDS]
        for name, allowed in (("ttft_s", ttft), ("tpot_s", tpot), ("e2e_s", tpot)):
            lived = np.mean([run.percentile(name, LEVELS) for run in runs], axis=0)
            predicted = np.array([state.percentile(name, level) for level in LEVELS])
            said = " ".join(f"P{100 * v:g} {p:.3f}/{s:.3f}" for v, p, s in zip(LEVELS, predicted, lived, strict=True))
            print(
                f"{model} {gpu} TP{degree} PP{stages} {state.utilization:.0%} busy: {name} {said}, predicted/simulated"
            )
            np.testing.assert_allclose(predicted, lived, rtol=allowed, err_msg=f"{name} at {rate}")


def simulated(kind: ReplicaKind, load: hp.Workload, seed: int) -> SimulationResult:
    """Poisson requests at one replica, the first sixth left out."""
    assert load.requests_per_s is not None
    fleet = Fleet([kind], Traffic.poisson(load, duration_s=REQUESTS / load.requests_per_s, seed=seed))
    fleet.add(0)
    fleet.advance(math.inf)
    return SimulationResult(fleet.now_s, 0.0, ("all",), fleet.requests[REQUESTS // 6 :])


# ---- what is known


def test_with_prompts_that_take_no_time_the_wait_is_half_a_step() -> None:
    """Steps of one length: who comes waits evenly up to a step for its end, then a step for its token."""
    grid = prompt_grid(np.array([100.0]), np.array([1.0]))
    step = np.full(CELLS, 0.1)
    delays = first_token_delays(grid, requests_per_s=1.0, step_s=step, pass_s=step, step_tokens=1e6)
    assert delays.mean_s == pytest.approx(0.15, rel=1e-6)
    assert delays.covered(0.19) == pytest.approx(0.9, rel=1e-6)


@pytest.mark.parametrize("rate", [2.0, 6.0])
def test_one_prompt_a_step_waits_as_m_d_1(rate: float) -> None:
    """Steps that hold one prompt each, and take no time without: a server of equal services."""
    grid = prompt_grid(np.array([80.0]), np.array([1.0]))
    step = np.where(np.arange(CELLS) > 0, 0.1, 1e-4)
    delays = first_token_delays(grid, requests_per_s=rate, step_s=step, pass_s=step, step_tokens=80.0)
    # All that come in a step are counted as ahead: a step more for each that comes behind.
    wait = float(mg1_wait_s(rate, 0.1, 0.0))
    assert wait <= delays.mean_s - 0.1 <= wait + rate * 0.1 * 0.1


def test_lengths_between_cells_keep_their_mean() -> None:
    lengths, shares = np.array([37.0, 811.0, 5003.0]), np.array([0.5, 0.3, 0.2])
    grid = prompt_grid(lengths, shares)
    assert grid.prompt_share.sum() == pytest.approx(1.0)
    assert grid.tokens @ grid.prompt_share == pytest.approx(lengths @ shares)


def test_an_exponential_wait_is_added() -> None:
    grid = prompt_grid(np.array([80.0]), np.array([1.0]))
    delays = mixed([(1.0, immediate_delays(grid, np.zeros(CELLS)))])
    assert delays.covered(2.0, wait_share=0.4, wait_s=1.0) == pytest.approx(1 - 0.4 * math.exp(-2.0), rel=1e-4)


def small_problem(**changes: object) -> hp.PlacementProblem:
    machine = make_machine()
    load = hp.Workload(input_tokens=200, output_tokens=50, **changes)  # type: ignore[arg-type]
    return problem_of(tiny_llama(), make_cluster((machine, make_pool(machine, 3))), load)


def test_little_s_law_and_a_lone_request() -> None:
    plan = hp.optimize(small_problem(requests_per_s=0.01), solver="even")
    states = plan_steady_states(plan)
    # Alone, a request meets nobody: its own prompt, then its own steps.
    for name in LATENCIES:
        assert percentile_of(states, name, 0.5) == pytest.approx(states[0].mean(name), rel=0.02)
    assert sum(s.requests_per_s for s in states) == pytest.approx(0.01)
    for busy in plan_steady_states(plan, plan.requests_per_s / 2):
        assert busy.in_flight == pytest.approx(busy.requests_per_s * busy.mean("e2e_s"), rel=0.05)


def test_percentiles_grow_with_the_rate_and_the_level_until_the_queue_does() -> None:
    plan = hp.optimize(small_problem(requests_per_s=1.0), solver="even")
    before = dict.fromkeys(LATENCIES, 0.0)
    for share in (0.1, 0.3, 0.5, 0.7):
        states = plan_steady_states(plan, share * plan.requests_per_s)
        for name in LATENCIES:
            levels = [percentile_of(states, name, level) for level in LEVELS]
            assert levels == sorted(levels)
            assert levels[1] >= 0.97 * before[name]
            before[name] = levels[1]
    assert percentile_of(plan_steady_states(plan, 3 * plan.requests_per_s), "ttft_s", 0.5) == math.inf
    assert plan_steady_states(plan, 3 * plan.requests_per_s)[0].mean("e2e_s") == math.inf


def test_what_cannot_be_said_is_refused() -> None:
    plan = hp.optimize(small_problem(), solver="even")
    with pytest.raises(hp.InvalidInputError, match="give the workload requests_per_s"):
        plan_steady_states(plan)
    with pytest.raises(hp.InvalidInputError, match="above 0"):
        plan_steady_states(plan, 0.0)
    states = plan_steady_states(plan, 1.0)
    with pytest.raises(hp.InvalidInputError, match="ttft_s, tpot_s, e2e_s"):
        states[0].percentile("latency", 0.5)
    with pytest.raises(hp.InvalidInputError, match="from 0 to below 1"):
        states[0].percentile("ttft_s", 1.0)
    paper = hp.optimize(small_problem(requests_per_s=1.0).replace(estimator="paper"), solver="even")
    with pytest.raises(hp.UnsupportedFeatureError, match="estimator='calibrated'"):
        plan_steady_states(paper)
