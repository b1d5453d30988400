"""What is known of a market from what was seen."""

from __future__ import annotations

import math

import pytest

from hetplan.errors import InvalidInputError
from hetplan.simulator.availability import Availability
from hetplan.simulator.market import Market
from hetplan.simulator.outlook import Outlook

PRICES = {("a", "spot"): 1.0, ("a", "on_demand"): 3.0, ("b", "on_demand"): 4.0}
KINDS = {"a": "g6", "b": "g6"}


def seen_until(time_s: float, prior_return_s: float | None = None) -> Outlook:
    """Pool a loses its machine at 100, has it back at 160, loses it again at 200 and has it back at 220."""
    steps = {"a": ([0, 100, 160, 200, 220], [1, 0, 1, 0, 1]), "b": ([0], [2])}
    market = Market(Availability(steps, 300), notice_s=10, seed=0, held={"a": 1})
    outlook = Outlook(
        market, instance_types=KINDS, usd_per_hour=PRICES, on_demand_free=5, prior_return_s=prior_return_s
    )
    outlook.look()
    while market.next_change_s() <= time_s:
        outlook.see(market.advance(market.next_change_s()))
        outlook.look()
        market.acquire("a", 1)
    market.advance(time_s)
    return outlook


@pytest.mark.parametrize(
    ("time_s", "prior_return_s", "expected_s", "interrupted"),
    [
        (50, None, math.inf, False),
        (95, None, math.inf, True),
        (130, None, math.inf, True),
        (170, None, 60, False),
        (210, None, 70, True),
        (230, None, 40, False),
        (50, 600, 600, False),
        (130, 600, 630, True),
        (230, 600, 680 / 3, False),
    ],
)
def test_outages_so_far_tell_how_long_the_next_will_last(
    time_s: float, prior_return_s: float | None, expected_s: float, interrupted: bool
) -> None:
    view = seen_until(time_s, prior_return_s).views()["a"]
    assert view.expected_return_s == pytest.approx(expected_s)
    assert view.interrupted is interrupted


def test_counts_are_remembered_whoever_holds_them() -> None:
    assert seen_until(230).views()["a"].history == (1, 1, 0, 1, 1, 0, 1)


def test_a_market_without_a_price_has_nothing_to_rent() -> None:
    view = seen_until(50).views()["b"]
    assert (view.spot_free, view.spot_usd_per_hour) == (0, math.inf)
    assert (view.on_demand_free, view.on_demand_usd_per_hour) == (5, 4.0)


def test_every_pool_needs_a_kind() -> None:
    market = Market(Availability({"a": ([0], [1])}, 10), notice_s=0, seed=0)
    with pytest.raises(InvalidInputError, match="pool a"):
        Outlook(market, instance_types={}, usd_per_hour=PRICES, on_demand_free=0)
