"""The closed form of what interruptions cost, against a simulation of losses and starts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hetplan.errors import InvalidInputError
from hetplan.estimator.interruption import (
    Handling,
    expected_excess_s,
    interruption_cost,
    usd_per_million_output_tokens,
)

USUAL: dict[str, Any] = {
    "nodes": 4,
    "interruptions_per_hour": 0.5,
    "notice_s": 100.0,
    "start_s": 111.3,
    "start_deviation_s": 15.0,
    "prompt_tokens_in_flight": 20_000,
    "output_tokens_in_flight": 3_000,
    "prefill_tokens_per_s": 3_000,
    "output_tokens_per_s": 300,
}
HANDLINGS: tuple[Handling, ...] = ("none", "migration", "concurrent", "both")


def run_of_losses(rng: np.random.Generator, handling: Handling, hours: float) -> tuple[float, float, float]:
    """Share of time served, interruptions an hour that met a serving pipeline, machine-seconds paid twice an hour."""
    losses = rng.poisson(USUAL["nodes"] * USUAL["interruptions_per_hour"] * hours)
    at = np.sort(rng.uniform(0, hours * 3600, losses))
    start = rng.normal(USUAL["start_s"], USUAL["start_deviation_s"], losses)
    concurrent = handling in ("concurrent", "both")
    lacking = np.maximum(start - USUAL["notice_s"], 0) if concurrent else start
    down, met, until = 0.0, 0, 0.0
    for begin, stop in zip(at, at + lacking, strict=True):
        met += begin >= until
        down += max(stop - max(begin, until), 0.0)
        until = max(until, stop)
    overlap = np.minimum(start, USUAL["notice_s"]).sum() if concurrent else 0.0
    return 1 - down / (hours * 3600), met / hours, overlap / hours


@pytest.mark.parametrize("handling", HANDLINGS)
@pytest.mark.parametrize("often", [0.5, 5.0])
def test_a_simulation_of_losses_and_starts_agrees(
    handling: Handling, often: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(USUAL, "interruptions_per_hour", often)
    rng = np.random.default_rng(7)
    runs = np.array([run_of_losses(rng, handling, 100.0) for _ in range(40)])
    cost = interruption_cost(handling=handling, **USUAL)
    expected = np.array([cost.availability, cost.interruptions_per_hour, cost.overlap_machine_s_per_hour])
    error = runs.std(axis=0, ddof=1) / math.sqrt(len(runs))
    assert (np.abs(runs.mean(axis=0) - expected) <= 3 * error).all()


def test_without_interruptions_nothing_is_lost() -> None:
    cost = interruption_cost(handling="none", **{**USUAL, "interruptions_per_hour": 0.0})
    assert (cost.availability, cost.lost_output_tokens_per_hour, cost.overlap_fraction) == (1, 0, 0)
    assert usd_per_million_output_tokens(cost, price_usd_per_hour=1.08, output_tokens_per_s=300) == pytest.approx(1.0)


def test_each_mechanism_helps_and_both_help_most() -> None:
    usd = {
        handling: usd_per_million_output_tokens(
            interruption_cost(handling=handling, **USUAL), price_usd_per_hour=10.0, output_tokens_per_s=300
        )
        for handling in HANDLINGS
    }
    assert usd["both"] < usd["concurrent"] < usd["none"]
    assert usd["both"] < usd["migration"] < usd["none"]


def test_what_is_lost_is_written_out() -> None:
    """One machine, one interruption in an hour that serves: the parts by hand."""
    values = {**USUAL, "nodes": 1, "interruptions_per_hour": 1.0, "start_s": 0.0, "start_deviation_s": 0.0}
    kept = interruption_cost(handling="migration", **values)
    assert kept.recomputed_tokens_per_hour == 23_000
    assert kept.lost_output_tokens_per_hour == pytest.approx(23_000 / 3_000 * 300)
    again = interruption_cost(handling="none", **values)
    assert again.recomputed_tokens_per_hour == 20_000
    assert again.lost_output_tokens_per_hour == pytest.approx(20_000 / 3_000 * 300 + 3_000)


def test_overlap_lasts_as_long_as_the_start_within_the_notice() -> None:
    values = {**USUAL, "nodes": 2, "interruptions_per_hour": 0.5, "start_deviation_s": 0.0}
    short = interruption_cost(handling="both", **{**values, "notice_s": 30.0})
    assert short.overlap_machine_s_per_hour == pytest.approx(30.0)
    assert short.overlap_fraction == pytest.approx(30.0 / 7200)
    long = interruption_cost(handling="both", **{**values, "notice_s": 300.0})
    assert long.overlap_machine_s_per_hour == pytest.approx(111.3)
    assert long.availability == 1


def test_the_papers_grace_periods() -> None:
    """Downtime is what exceeds the grace: 30 s of Azure leave 81.3 s of it, 120 s of AWS and 300 s of Alibaba none."""
    assert [round(expected_excess_s(111.3, 0.0, grace), 1) for grace in (30, 120, 300)] == [81.3, 0, 0]


def test_no_output_costs_without_end() -> None:
    cost = interruption_cost(handling="none", **{**USUAL, "interruptions_per_hour": 1e4})
    assert usd_per_million_output_tokens(cost, price_usd_per_hour=1.0, output_tokens_per_s=1e-9) == math.inf


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nodes", 0),
        ("interruptions_per_hour", -1.0),
        ("notice_s", math.nan),
        ("start_s", math.inf),
        ("start_deviation_s", -1.0),
        ("prompt_tokens_in_flight", -1),
        ("output_tokens_in_flight", -1),
        ("prefill_tokens_per_s", 0.0),
        ("output_tokens_per_s", 0.0),
    ],
)
def test_a_number_out_of_range_is_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=field):
        interruption_cost(handling="both", **{**USUAL, field: value})
