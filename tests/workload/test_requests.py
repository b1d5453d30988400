"""Request classes, their lengths and rates, and promises."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hetplan as hp
from hetplan.workload.traces import Trace

# ---- lengths


def test_a_number_is_a_distribution_of_one_length() -> None:
    one = hp.Workload(input_tokens=763, output_tokens=232)
    (only,) = one.query_types
    assert only.input_tokens == hp.TokenDistribution(tokens=(763,), shares=(1.0,))
    assert (one.mean_input_tokens, one.mean_output_tokens, one.max_tokens) == (763, 232, 995)


def test_moments_of_a_distribution() -> None:
    lengths = hp.TokenDistribution(tokens=(100, 1000, 10), shares=(0.5, 0.2, 0.3))
    assert lengths.mean == pytest.approx(253)
    assert lengths.maximum == 1000
    assert [lengths.quantile(level) for level in (0.0, 0.3, 0.31, 0.8, 0.81, 1.0)] == [10, 10, 100, 100, 1000, 1000]


@given(samples=st.lists(st.integers(1, 100_000), min_size=1, max_size=400))
@settings(max_examples=200, deadline=None)
def test_a_histogram_keeps_the_mean_and_the_longest(samples: list[int]) -> None:
    lengths = hp.TokenDistribution.from_samples(samples)
    assert lengths.mean == pytest.approx(sum(samples) / len(samples))
    assert lengths.maximum == max(samples)
    assert min(samples) <= min(lengths.tokens)
    assert len(lengths.tokens) <= 65
    assert sum(lengths.shares) == pytest.approx(1)
    assert lengths == hp.TokenDistribution.from_samples(reversed(samples))


def test_no_samples_are_no_distribution() -> None:
    with pytest.raises(hp.InvalidInputError, match="no samples"):
        hp.TokenDistribution.from_samples([])


@pytest.mark.parametrize("samples", [[0], [-3, 5], [math.nan], [math.inf]])
def test_senseless_samples_are_refused(samples: list[float]) -> None:
    with pytest.raises(hp.InvalidInputError):
        hp.TokenDistribution.from_samples(samples)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tokens": (), "shares": ()}, "tokens"),
        ({"tokens": (1, 2), "shares": (1.0,)}, "2 token counts but 1 shares"),
        ({"tokens": (0,), "shares": (1.0,)}, "tokens"),
        ({"tokens": (1,), "shares": (0.5,)}, "sum to 0.5"),
        ({"tokens": (1, 2), "shares": (1.0, 1.0)}, "sum to 2"),
        ({"tokens": (1,), "shares": (1.0,), "weights": (1,)}, "weights"),
    ],
)
def test_a_bad_distribution_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(hp.InvalidInputError, match=said):
        hp.TokenDistribution(**values)


# ---- classes

CHAT: dict[str, Any] = {"name": "chat", "requests_per_s": 3.0, "input_tokens": 100, "output_tokens": 200}
CODE: dict[str, Any] = {"name": "code", "requests_per_s": 1.0, "input_tokens": 900, "output_tokens": 40}


def test_classes_weigh_by_their_rates() -> None:
    both = hp.Workload(query_types=[CHAT, hp.QueryType(**CODE)])
    assert both.requests_per_s == 4
    assert both.mean_input_tokens == pytest.approx((3 * 100 + 900) / 4)
    assert both.mean_output_tokens == pytest.approx((3 * 200 + 40) / 4)
    # The longest prompt and answer of one class, not of two.
    assert both.max_tokens == 940


def test_a_cached_prefix_is_not_computed() -> None:
    warm = hp.Workload(query_types=[CHAT | {"prefix_cache_hit_rate": 0.5}, CODE])
    assert warm.mean_prefill_tokens == pytest.approx((3 * 50 + 900) / 4)
    assert warm.mean_input_tokens == pytest.approx((3 * 100 + 900) / 4)
    assert hp.Workload(input_tokens=800, output_tokens=1, prefix_cache_hit_rate=0.25).mean_prefill_tokens == 600


def test_a_fraction_of_a_token_rounds_up_to_fit() -> None:
    assert hp.Workload(input_tokens=10.2, output_tokens=5.1).max_tokens == 16


def test_without_a_rate_there_is_none() -> None:
    assert hp.Workload(input_tokens=1, output_tokens=1).requests_per_s is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "input_tokens"),
        ({"input_tokens": 5}, "output_tokens"),
        ({"output_tokens": 5}, "input_tokens"),
        ({"query_types": []}, "query_types"),
        ({"query_types": [CHAT, CHAT]}, "chat"),
        ({"query_types": [CHAT, {k: v for k, v in CODE.items() if k != "requests_per_s"}]}, "requests_per_s"),
        ({"query_types": [CHAT], "input_tokens": 5}, "input_tokens"),
        ({"query_types": [CHAT], "prefix_cache_hit_rate": 0.5}, "prefix_cache_hit_rate"),
        ({"input_tokens": 5, "output_tokens": 5, "tokens": 5}, "tokens"),
        ({"query_types": [CHAT | {"requests_per_s": -1}]}, "requests_per_s"),
        ({"query_types": [CHAT | {"rate": 1}]}, "rate"),
        ({"input_tokens": "many", "output_tokens": 5}, "input_tokens"),
        ({"input_tokens": True, "output_tokens": 5}, "input_tokens"),
    ],
)
def test_a_bad_workload_is_refused_by_field(values: dict[str, Any], said: str) -> None:
    with pytest.raises(hp.InvalidInputError, match=said):
        hp.Workload(**values)


@pytest.mark.parametrize("values", [{"input_tokens": 763, "output_tokens": 232}, {"query_types": [CHAT, CODE]}])
def test_a_workload_survives_json_and_plain_data(values: dict[str, Any]) -> None:
    workload = hp.Workload(**values)
    assert hp.Workload.from_json(workload.model_dump_json()) == workload
    assert hp.Workload.from_dict(values) == workload
    assert workload.replace() == workload


def test_a_trace_becomes_a_class_with_its_rate_and_lengths() -> None:
    trace = Trace(
        name="afternoon",
        source="test",
        arrival_s=[0.0, 1.0, 2.0, 10.0],
        input_tokens=[10, 20, 30, 40],
        output_tokens=[1, 2, 3, 400],
    )
    workload = hp.Workload.from_trace(trace, prefix_cache_hit_rate=0.5)
    (only,) = workload.query_types
    assert only.name == "afternoon"
    assert workload.requests_per_s == trace.requests_per_s
    assert workload.mean_input_tokens == pytest.approx(25)
    assert workload.mean_prefill_tokens == pytest.approx(12.5)
    assert workload.max_tokens == 440


# ---- promises


def test_a_promise_lists_what_it_limits() -> None:
    assert hp.Slo(ttft_s=1, e2e_s=10).limits() == {"ttft_s": 1, "e2e_s": 10}
    assert hp.Slo(tpot_s=0.1).hard


def test_a_promise_about_nothing_is_refused() -> None:
    with pytest.raises(hp.InvalidInputError, match="limits nothing"):
        hp.Slo()


@pytest.mark.parametrize(
    ("values", "said"),
    [({"ttft_s": 0}, "ttft_s"), ({"ttft_s": 1, "percentile": 1.0}, "percentile"), ({"ttft": 1}, "ttft"),
     ({"ttft_s": "soon"}, "ttft_s"), ({"ttft_s": 1, "hard": "maybe"}, "hard")],
)  # fmt: skip
def test_a_bad_promise_is_refused_by_field(values: dict[str, Any], said: str) -> None:
    with pytest.raises(hp.InvalidInputError, match=said):
        hp.Slo(**values)
