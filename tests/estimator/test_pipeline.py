"""From stages to pipelines (eqs. 4 to 6), worked out by hand over an estimator whose times are a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from builders import make_cluster, make_machine, make_pool, problem_of, tiny_llama
from numpy.typing import ArrayLike

import hetplan as hp
from hetplan.catalog.hardware import InstanceType
from hetplan.estimator.base import Estimator, FloatArray, Phase, batch_array, make_estimator
from hetplan.estimator.pipeline import (
    StageShape,
    micro_batch,
    pipeline_rates,
    pipeline_times,
    predictions_at,
    sequences_that_fit,
    stage_memories,
)
from hetplan.plan import StageMemory

# Seconds of one layer and one sequence, by machine and phase; a send costs SEND, inside a node a tenth of it.
LAYER = {"fast": {"prefill": 1.0, "decode": 2.0}, "slow": {"prefill": 3.0, "decode": 1.0}}
SEND = {"prefill": 0.5, "decode": 0.25}
ROOM = {"fast": 1000, "slow": 400}


@dataclass
class Table:
    """Times and bytes that a person can add up."""

    micro_batches: bool = True
    limit: int = 10_000
    name: ClassVar[str] = "calibrated"

    def stage_seconds(
        self, model: hp.ModelSpec, machine: InstanceType, *, layers: tuple[int, int], batch: ArrayLike, phase: Phase,
        first: bool, last: bool, **rest: Any,
    ) -> FloatArray:  # fmt: skip
        ends = 10.0 * first + 100.0 * last
        return np.atleast_2d((layers[1] - layers[0]) * LAYER[machine.name][phase] * batch_array(batch) + ends)

    def stage_memory(
        self, model: hp.ModelSpec, machine: InstanceType, *, layers: tuple[int, int], **rest: Any
    ) -> StageMemory:
        return StageMemory(
            usable_bytes=ROOM[machine.name],
            weight_bytes=50 * (layers[1] - layers[0]),
            activation_bytes=7,
            other_bytes=3,
        )

    def sequence_bytes(
        self, model: hp.ModelSpec, machine: InstanceType, *, layers: tuple[int, int], tokens: float, **rest: Any
    ) -> float:
        return (layers[1] - layers[0]) * tokens / 100

    def boundary_seconds(
        self, model: hp.ModelSpec, sender: InstanceType, receiver: InstanceType, *, same_node: bool, batch: ArrayLike,
        phase: Phase, **rest: Any,
    ) -> FloatArray:  # fmt: skip
        return SEND[phase] * batch_array(batch) * (0.1 if same_node else 1.0)

    def sent_bytes(self, model: hp.ModelSpec, *, input_tokens: float, output_tokens: float) -> float:
        return 1e6 * (input_tokens + output_tokens)

    def decode_steps(self, output_tokens: float) -> float:
        return output_tokens - 1

    def batch_limit(self, machine: InstanceType) -> int:
        return self.limit


FAST, SLOW = make_machine("fast", gpu_count=2), make_machine("slow")
CLUSTER = make_cluster((FAST, make_pool(FAST, 2)), (SLOW, make_pool(SLOW, 2)))
PROBLEM = problem_of(tiny_llama(num_hidden_layers=6), CLUSTER, hp.Workload(input_tokens=300, output_tokens=101))
# Layers 0-2 and 3-4 on one fast node, layer 5 on a slow one.
STAGES = [
    StageShape((0, 3), FAST, 1, 0),
    StageShape((3, 5), FAST, 1, 0),
    StageShape((5, 6), SLOW, 1, 1),
]


def test_a_send_counts_in_the_stage_that_sends() -> None:
    times = pipeline_times(PROBLEM, Table(), STAGES, [1, 4])
    assert times.prefill.tolist() == [[3 + 10 + 0.05, 12 + 10 + 0.2], [2 + 0.5, 8 + 2.0], [3 + 100, 12 + 100]]
    assert times.decode.tolist() == [[6 + 10 + 0.025, 24 + 10 + 0.1], [4 + 0.25, 16 + 1.0], [1 + 100, 4 + 100]]


def test_throughput_and_latency_with_micro_batches() -> None:
    rates = pipeline_rates(PROBLEM, Table(), STAGES, [4])
    prefill, decode = [22.2, 10.0, 112.0], [34.1, 17.0, 104.0]
    assert rates.requests_per_s.item() == pytest.approx(4 / (112 + 104))
    assert rates.latency_s.item() == pytest.approx(sum(prefill) + sum(decode))
    # The first token comes after the request's own prefill, alone.
    assert rates.ttft_s.item() == pytest.approx(13.05 + 2.5 + 103)
    assert rates.tpot_s.item() == pytest.approx((sum(prefill) + sum(decode) - 118.55) / 100)


def test_throughput_and_latency_in_paper_mode() -> None:
    rates = pipeline_rates(PROBLEM, Table(micro_batches=False), STAGES, [4])
    assert rates.requests_per_s.item() == pytest.approx(4 / (112 + 104))
    assert rates.latency_s.item() == pytest.approx(112 + 104)
    assert rates.ttft_s.item() == pytest.approx(112)
    assert rates.tpot_s.item() == pytest.approx(104 / 100)


def test_the_slowest_prefill_and_the_slowest_decode_may_be_of_different_stages() -> None:
    stages = [StageShape((0, 4), FAST, 1, 0), StageShape((4, 6), SLOW, 1, 1)]
    times = pipeline_times(PROBLEM, Table(), stages, 50)
    assert times.prefill.argmax() == 1
    assert times.decode.argmax() == 0
    slowest = (300.0 + 100) + (400.0 + 10 + 12.5)
    assert pipeline_rates(PROBLEM, Table(), stages, 50).requests_per_s.item() == pytest.approx(50 / slowest)


def test_one_token_answers_have_no_tpot() -> None:
    problem = PROBLEM.replace(workload=hp.Workload(input_tokens=300, output_tokens=1))
    assert pipeline_rates(problem, Table(), STAGES, [1]).tpot_s.item() == 0


# ---- eq. 6


@pytest.mark.parametrize(
    ("stages", "fits"),
    [
        # Fast: (1000 - 10 - 150) / (3 x 4.01) = 69; (1000 - 10 - 100) / 8.02 = 110; slow: (400 - 10 - 50) / 4.01 = 84.
        (STAGES, 69),
        # Slow holds five layers: (400 - 10 - 250) / 20.05 = 6.
        ([StageShape((0, 1), FAST, 1, 0), StageShape((1, 6), SLOW, 1, 1)], 6),
        # Slow with all six: (400 - 10 - 300) / 24.06 = 3.
        ([StageShape((0, 6), SLOW, 1, 0)], 3),
    ],
)
def test_the_fullest_stage_bounds_the_sequences(stages: list[StageShape], fits: int) -> None:
    assert sequences_that_fit(PROBLEM, Table(), stages) == fits


def test_the_engine_s_limit_bounds_them_too() -> None:
    assert sequences_that_fit(PROBLEM, Table(limit=20), STAGES) == 20


@pytest.mark.parametrize(("max_model_len", "fits"), [(401, 3), (1_499, 3), (1_501, 0), (8_000, 0)])
def test_no_room_for_the_longest_request_is_no_room_at_all(max_model_len: int, fits: int) -> None:
    """90 bytes are left, and six layers take 0.06 bytes a token: 1,500 tokens."""
    problem = PROBLEM.replace(max_model_len=max_model_len)
    assert sequences_that_fit(problem, Table(), [StageShape((0, 6), SLOW, 1, 0)]) == fits


def test_weights_that_do_not_fit_leave_nothing() -> None:
    problem = problem_of(tiny_llama(num_hidden_layers=9), CLUSTER, hp.Workload(input_tokens=300, output_tokens=101))
    stages = [StageShape((0, 9), SLOW, 1, 0)]
    assert stage_memories(problem, Table(), stages)[0].kv_cache_bytes < 0
    assert sequences_that_fit(problem, Table(), stages) == 0


@pytest.mark.parametrize(
    ("micro_batches", "sequences", "stages", "expected"),
    [(True, 69, 3, 23), (True, 2, 3, 0), (True, 256, 1, 256), (False, 69, 3, 69), (False, 2, 3, 2)],
)
def test_sequences_in_flight_share_the_stages(micro_batches: bool, sequences: int, stages: int, expected: int) -> None:
    assert micro_batch(Table(micro_batches=micro_batches), sequences, stages) == expected


# ---- predictions


def test_predictions_state_the_values_with_bands() -> None:
    rates = pipeline_rates(PROBLEM, Table(), STAGES, [4])
    stated = predictions_at(PROBLEM, Table(), STAGES, 4)
    for name in ("requests_per_s", "ttft_s", "tpot_s", "latency_s"):
        prediction = getattr(stated, name)
        assert prediction.value == pytest.approx(getattr(rates, name).item())
        assert prediction.low <= prediction.value <= prediction.high
        assert prediction.source == stated.requests_per_s.source
    assert stated.output_tokens_per_s.value == pytest.approx(rates.requests_per_s.item() * 101)


@pytest.mark.parametrize("estimator", ["calibrated", "paper"])
def test_batches_at_once_are_batches_one_by_one(estimator: str) -> None:
    chosen: Estimator = make_estimator(PROBLEM.replace(estimator=estimator))
    at_once = pipeline_rates(PROBLEM, chosen, STAGES, [1, 5, 30])
    for column, batch in enumerate([1, 5, 30]):
        alone = pipeline_rates(PROBLEM, chosen, STAGES, batch)
        for name in ("requests_per_s", "ttft_s", "tpot_s", "latency_s"):
            assert getattr(at_once, name)[column] == getattr(alone, name).item()


@pytest.mark.parametrize("estimator", ["calibrated", "paper"])
def test_a_cached_prefix_is_not_computed_but_attended(estimator: str) -> None:
    cold = PROBLEM.replace(estimator=estimator)
    warm = cold.replace(workload=hp.Workload(input_tokens=300, output_tokens=101, prefix_cache_hit_rate=0.5))
    before, after = (pipeline_times(p, make_estimator(p), STAGES, 4) for p in (cold, warm))
    assert np.all(after.prefill < before.prefill)
    np.testing.assert_allclose(after.decode, before.decode)
