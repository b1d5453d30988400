"""Waiting in simulated replicas against queueing theory, and full replicas against the estimator's steady state."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from hetplan.catalog.models import get_model
from hetplan.catalog.tables import default_instance_type, get_calibration, get_gpu
from hetplan.estimator.calibrated import step_work
from hetplan.estimator.prediction import predict_replicas
from hetplan.estimator.queueing import mg1_wait_s
from hetplan.estimator.replica import Replica, make_replica
from hetplan.simulator.fleet import Fleet, Limits, kind_of_replica
from hetplan.simulator.traffic import Traffic
from hetplan.workload.requests import Workload
from tests.simulator.small_clocks import straight_tables

RHO = 0.5
# Two-sided 99% of Student's t with 29 degrees of freedom.
T_99 = 2.756
BATCHES = 30
SEEDS = range(5)


# With long prompts few tokens are a small growth of the context: a request is few events.
PROMPT = 4000


def poisson(answers: NDArray[np.int64], rate: float, seed: int) -> Traffic:
    count = len(answers)
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=count)
    none = np.zeros(count, dtype=np.int64)
    return Traffic(np.cumsum(gaps), np.full(count, PROMPT), answers, none, none, ("all",))


def waits(traffic: Traffic, limits: Limits, step_s: float) -> NDArray[np.float64]:
    tables = straight_tables(step_s=step_s, token_s=0.0, context_s=0.0, max_context=1 << 16, max_step_tokens=1 << 13)
    fleet = Fleet.of_tables([tables], [limits], traffic)
    fleet.add(0)
    fleet.advance(math.inf)
    found = fleet.requests
    return np.asarray(found["started_s"] - found["arrival_s"])


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and half-width of its 99% interval by batch means; the first tenth is left out."""
    settled = values[len(values) // 10 :]
    batches = settled[: len(settled) // BATCHES * BATCHES].reshape(BATCHES, -1).mean(axis=1)
    return float(batches.mean()), float(T_99 * batches.std(ddof=1) / math.sqrt(BATCHES))


@pytest.mark.parametrize("seed", SEEDS)
def test_one_server_of_equal_requests_waits_as_m_d_1(seed: int) -> None:
    traffic = poisson(np.ones(300_000, np.int64), RHO, seed)
    mean, half = interval(waits(traffic, Limits(1, 1 << 13, 1 << 20), 1.0))
    assert half <= 0.03 * mean
    assert abs(mean - float(mg1_wait_s(RHO, 1.0, 0.0))) <= half


@pytest.mark.parametrize("seed", SEEDS)
def test_several_sequences_wait_as_m_m_c(seed: int) -> None:
    """Sequences in flight are the servers; a step takes the same whatever it holds."""
    servers, tokens, count = 2, 1000, 700_000
    drawn = np.random.default_rng(100 + seed).exponential(tokens, size=count)
    answers = np.maximum(np.rint(drawn), 1).astype(np.int64)
    mean_s = float(answers.mean()) / tokens
    rate = RHO * servers / mean_s
    mean, half = interval(waits(poisson(answers, rate, seed), Limits(servers, 1 << 13, 1 << 40), 1 / tokens))
    assert half <= 0.03 * mean
    # Erlang C; who comes during a step waits for its end: half a step of those that find a sequence free.
    offered = RHO * servers
    waiting = offered**servers / math.factorial(servers) / (1 - RHO)
    chance = waiting / (sum(offered**k / math.factorial(k) for k in range(servers)) + waiting)
    theory = chance * mean_s / servers / (1 - RHO)
    busy = 1 - 1 / (sum(offered**k / math.factorial(k) for k in range(servers)) + waiting)
    theory += busy * 0.5 / tokens
    assert abs(mean - theory) <= half


# ---- against the estimator


def a_replica(stages: int = 1) -> Replica:
    gpu = get_gpu("H100")
    return make_replica(
        get_model("llama-3.1-8b"),
        default_instance_type(gpu),
        get_calibration(gpu),
        tensor_parallel=1,
        pipeline_parallel=stages,
        schedule="in_flight",
        engine="vllm",
        estimator="calibrated",
        gpu_memory_utilization=None,
    )


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_one_request_takes_the_sum_over_stages_of_its_steps(stages: int) -> None:
    replica = a_replica(stages)
    prompt, answer = 700, 120
    load = Workload(input_tokens=prompt, output_tokens=answer, requests_per_s=1.0)
    kind = kind_of_replica(replica, load, max_num_seqs=8)
    fleet = Fleet([kind], Traffic.closed_loop(load, clients=1, requests=1))
    fleet.add(0)
    fleet.advance(math.inf)

    def seconds(**work: float) -> float:
        """Of a step through all stages, its sends apart."""
        return sum(
            float(
                replica.estimator.stage_step_s(  # type: ignore[attr-defined]
                    replica.problem.model, stage.machine, stage.layers, stage.tensor_parallel, step_work(**work)
                )[0]
            )
            for stage in replica.stages
        )

    first = seconds(prompts=1.0, prompt_tokens=prompt)
    rest = sum(seconds(sequences=1.0, context=prompt + k) for k in range(answer - 1))
    found = fleet.requests
    sent_first, sent_rest = _sends(replica, prompt), _sends(replica, 1) * (answer - 1)
    assert found["first_s"][0] == pytest.approx(first + sent_first, rel=2e-3)
    assert found["finish_s"][0] == pytest.approx(first + sent_first + rest + sent_rest, rel=2e-3)


def _sends(replica: Replica, tokens: float) -> float:
    """Seconds of a step's sends between all stages."""
    work = step_work(sequences=tokens)
    return sum(
        float(
            replica.estimator.send_step_s(  # type: ignore[attr-defined]
                replica.problem.model, here.machine, there.machine, work, same_node=here.node == there.node
            )[0]
        )
        for here, there in zip(replica.stages[:-1], replica.stages[1:], strict=True)
    )


@pytest.mark.parametrize(("batch", "prompt", "answer"), [(16, 500, 200), (64, 1000, 300), (128, 200, 100)])
def test_a_full_replica_serves_what_the_steady_state_predicts(batch: int, prompt: int, answer: int) -> None:
    replica = a_replica()
    load = Workload(input_tokens=prompt, output_tokens=answer, requests_per_s=1.0)
    fleet = Fleet(
        [kind_of_replica(replica, load, max_num_seqs=batch)],
        Traffic.closed_loop(load, clients=batch, requests=batch * 20),
    )
    fleet.add(0)
    fleet.advance(math.inf)
    rate = len(fleet.requests) * answer / fleet.now_s
    one = np.ones(1)
    predicted = predict_replicas(replica, batch * one, prompt * one, answer * one)["output_tokens_per_s"][0]
    assert rate == pytest.approx(predicted, rel=0.05)
