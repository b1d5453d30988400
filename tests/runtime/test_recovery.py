"""Choices for running requests against brute force, and costs learned from what is seen."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.errors import InvalidInputError
from hetplan.runtime.recovery import (
    ObservedCosts,
    Recovery,
    RecoveryCosts,
    RunningRequest,
    TransferCost,
    choose_recovery,
)

LINK = TransferCost(latency_s=0.1, cache_bytes_per_token=131_072, bytes_per_s=1.25e9, source="test")
COSTS = RecoveryCosts(
    context_tokens=(1000, 64_000),
    recompute_s=(0.15, 9.5),
    recompute_source="test",
    step_s=0.1,
    step_source="test",
    transfer=LINK,
)


def running(context: int, remaining: int, name: str = "r", **values: bool) -> RunningRequest:
    return RunningRequest(request_id=name, context_tokens=context, remaining_tokens=remaining, **values)


def move_of(request: RunningRequest, grace_left_s: float, costs: RecoveryCosts | None = COSTS) -> str:
    return choose_recovery([request], grace_left_s, costs)[request.request_id].move


def test_a_request_that_ends_in_time_stays() -> None:
    assert move_of(running(64_000, 300), 30.0) == "stay"
    assert move_of(running(64_000, 301), 30.0) == "transfer"


def test_long_contexts_are_sent_and_short_ones_computed() -> None:
    assert move_of(running(500, 4000), 30.0) == "recompute"
    assert move_of(running(64_000, 4000), 30.0) == "transfer"


def test_what_cannot_be_sent_in_time_or_at_all_is_computed() -> None:
    assert move_of(running(64_000, 4000), 5.0) == "recompute"
    assert move_of(running(64_000, 4000), 30.0, COSTS.replace(transfer=None)) == "recompute"
    recovery = choose_recovery([running(64_000, 4000, sendable=False)], 30.0, COSTS)["r"]
    assert (recovery.move, recovery.transfer_s) == ("recompute", None)


def test_with_nothing_known_everything_is_computed() -> None:
    assert choose_recovery([running(64_000, 1)], 30.0, None) == {
        "r": Recovery(move="recompute", stay_s=None, recompute_s=None, transfer_s=None)
    }


def test_no_requests_no_answers() -> None:
    assert choose_recovery([], 30.0, COSTS) == {}


def test_predictions_are_those_of_the_costs() -> None:
    recovery = choose_recovery([running(64_000, 4000)], 30.0, COSTS)["r"]
    assert recovery.stay_s == pytest.approx(400.0)
    assert recovery.recompute_s == pytest.approx(9.5)
    assert recovery.transfer_s == pytest.approx(0.1 + 64_000 * 131_072 / 1.25e9)


def test_bad_questions_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="'r' is there twice"):
        choose_recovery([running(1, 1), running(2, 1)], 30.0, COSTS)
    with pytest.raises(InvalidInputError, match="grace_left_s=-1"):
        choose_recovery([running(1, 1)], -1.0, COSTS)
    with pytest.raises(InvalidInputError, match="grace_left_s=nan"):
        choose_recovery([running(1, 1)], float("nan"), None)


REQUESTS = st.lists(
    st.tuples(st.integers(1, 100_000), st.integers(0, 2000), st.booleans()), min_size=1, max_size=6
).map(lambda rows: [running(c, r, str(i), sendable=s) for i, (c, r, s) in enumerate(rows)])


@given(REQUESTS, st.floats(0, 60))
@settings(max_examples=150, deadline=None)
def test_choices_against_all_that_could_be_sent(requests: list[RunningRequest], grace_left_s: float) -> None:
    """Sent caches fit the link together and spare at least half of the most that can be spared."""
    answers = choose_recovery(requests, grace_left_s, COSTS)
    assert list(answers) == [request.request_id for request in requests]
    leaving = []
    for request in requests:
        answer = answers[request.request_id]
        assert answer.stay_s is not None
        assert (answer.move == "stay") == (answer.stay_s <= grace_left_s)
        if answer.move == "transfer":
            assert request.sendable
        if answer.move != "stay" and answer.transfer_s is not None:
            leaving.append(answer)

    def spared(sent: tuple[Recovery, ...]) -> float:
        if sum(answer.transfer_s or 0.0 for answer in sent) > grace_left_s:
            return 0.0
        return sum((answer.recompute_s or 0.0) - (answer.transfer_s or 0.0) for answer in sent)

    chosen = tuple(answer for answer in leaving if answer.move == "transfer")
    assert sum(answer.transfer_s or 0.0 for answer in chosen) <= grace_left_s
    subsets = itertools.chain.from_iterable(itertools.combinations(leaving, n) for n in range(len(leaving) + 1))
    assert spared(chosen) >= max(map(spared, subsets)) / 2 - 1e-9


TABLES = st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 10)), min_size=1, max_size=6).map(
    lambda rows: COSTS.replace(
        context_tokens=tuple(np.cumsum([step for step, _ in rows]).tolist()),
        recompute_s=tuple(np.cumsum([seconds for _, seconds in rows]).tolist()),
    )
)


@given(TABLES)
@settings(deadline=None)
def test_a_longer_context_never_takes_less(costs: RecoveryCosts) -> None:
    seconds = costs.recompute_seconds(np.arange(1, 2 * costs.context_tokens[-1], 37))
    assert (np.diff(seconds) >= -1e-9).all()
    assert costs.recompute_seconds(costs.context_tokens) == pytest.approx(costs.recompute_s)


@pytest.mark.parametrize(
    ("tokens", "seconds", "why"),
    [
        ((1000,), (0.1, 0.2), "1 context_tokens and 2 recompute_s"),
        ((1000, 1000), (0.1, 0.2), "ascend"),
        ((0, 1000), (0.1, 0.2), "ascend from at least 1"),
        ((1000, 2000), (0.2, 0.1), "a longer context takes no less"),
        ((1000, 2000), (-0.2, 0.1), "from 0"),
    ],
)
def test_a_table_that_cannot_be_is_refused(tokens: tuple[int, ...], seconds: tuple[float, ...], why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        COSTS.replace(context_tokens=tokens, recompute_s=seconds)


def test_nothing_is_known_before_a_prefill_and_a_step() -> None:
    seen = ObservedCosts()
    assert seen.costs() is None
    seen.prefill(1000, 0.1)
    assert seen.costs() is None
    seen.step(0.02)
    costs = seen.costs(LINK)
    assert costs is not None
    assert (costs.context_tokens, costs.recompute_s, costs.step_s, costs.transfer) == ((1000,), (0.1,), 0.02, LINK)
    assert "1 observed prefills" in costs.recompute_source


def test_impossible_observations_are_left_out() -> None:
    seen = ObservedCosts()
    for tokens, seconds in ((0, 1.0), (10, -1.0), (10, float("nan")), (10, float("inf"))):
        seen.prefill(tokens, seconds)
        seen.step(seconds if tokens else -1.0)
    assert seen.costs() is None


@given(st.integers(0, 2**31), st.floats(1e-5, 1e-3), st.floats(0.001, 0.2))
@settings(max_examples=20, deadline=None)
def test_costs_are_learned_through_stragglers(seed: int, per_token_s: float, step_s: float) -> None:
    """One observation in five is ten times too slow; what is learned is right all the same."""
    generator = np.random.default_rng(seed)
    seen = ObservedCosts()
    for index in range(1000):
        tokens = int(generator.integers(64, 16_384))
        slow = 10.0 if index % 5 == 0 else 1.0
        seen.prefill(tokens, slow * per_token_s * tokens)
        seen.step(slow * step_s)
    costs = seen.costs()
    assert costs is not None
    assert costs.step_s == pytest.approx(step_s)
    asked = np.array([2000, 6000, 12_000])
    assert costs.recompute_seconds(asked) == pytest.approx(per_token_s * asked, rel=1e-6)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1e4)), min_size=1, max_size=200))
@settings(deadline=None)
def test_what_is_seen_is_always_a_table(observations: list[tuple[int, float]]) -> None:
    seen = ObservedCosts(kept=5)
    seen.step(0.01)
    for tokens, seconds in observations:
        seen.prefill(tokens, seconds)
    costs = seen.costs()
    assert costs is not None
    assert len(costs.context_tokens) <= 20


def test_old_observations_are_forgotten() -> None:
    seen = ObservedCosts(kept=3)
    for seconds in (9.0, 9.0, 9.0, 1.0, 1.0):
        seen.prefill(100, seconds)
        seen.step(seconds)
    costs = seen.costs()
    assert costs is not None
    assert (costs.recompute_s, costs.step_s) == ((1.0,), 1.0)


def test_a_learner_keeps_something() -> None:
    with pytest.raises(InvalidInputError, match="kept=0"):
        ObservedCosts(0)
