"""Prices: positive, dated, with a source; doubts are raised against a given day and never stored in a plan."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import pytest
from builders import WORKLOAD, make_cluster, make_machine, make_pool, tiny_llama, verified

import hetplan as hp
from hetplan.catalog.clusters import cluster_from_dict, cluster_from_file, price_warnings
from hetplan.catalog.tables import get_offer, list_offers, notice_s

TODAY = datetime.date(2026, 6, 1)
CLUSTER_24 = {"g6.12xlarge": 3, "g5.12xlarge": 2, "g6e.xlarge": 4}


def offer(**changes: Any) -> hp.Offer:
    values: dict[str, Any] = {
        "instance_type": "g6.xlarge",
        "provider": "aws",
        "region": "us-west-2",
        "market": "on_demand",
        "price_usd_per_hour": 0.8048,
        "source": "price page",
        "observed_on": TODAY,
    }
    return hp.Offer(**(values | changes))


# ---- positive

NOT_A_PRICE = [0, -1, -0.0001, math.nan, math.inf]


@pytest.mark.parametrize("price", NOT_A_PRICE)
@pytest.mark.parametrize("market", ["on_demand", "spot", "owned"])
def test_a_price_is_positive(market: str, price: float) -> None:
    with pytest.raises(hp.InvalidInputError, match="price_usd_per_hour"):
        offer(price_usd_per_hour=price, market=market)


@pytest.mark.parametrize("price", [0, -2])
def test_a_price_in_a_mapping_or_file_is_positive(price: float, tmp_path: Path) -> None:
    entry = {
        "instance_type": "g6.xlarge",
        "count": 1,
        "market": "on_demand",
        "region": "x",
        "price_usd_per_hour": price,
    }
    with pytest.raises(hp.InvalidInputError, match="price_usd_per_hour"):
        cluster_from_dict({"offers": [entry]})
    table = tmp_path / "offers.csv"
    table.write_text(f"instance_type,count,market,region,price_usd_per_hour\ng6.xlarge,1,on_demand,x,{price}\n")
    with pytest.raises(hp.InvalidInputError, match=r"offers\.csv, line 2.*price_usd_per_hour"):
        cluster_from_file(table)


@pytest.mark.parametrize("market", ["on_demand", "spot"])
def test_only_an_owned_machine_may_have_no_price(market: str) -> None:
    with pytest.raises(hp.InvalidInputError, match="no price"):
        offer(price_usd_per_hour=None, market=market)
    assert offer(price_usd_per_hour=None, market="owned").billed_usd_per_hour == 0


# ---- source and date


def test_every_catalogued_price_has_a_source_and_a_day_or_a_warning() -> None:
    for row in list_offers():
        assert row.source
        assert row.price_usd_per_hour is not None
        if row.observed_on is None:
            assert any("no day" in text for text in price_warnings([row], TODAY))


@pytest.mark.parametrize(
    ("age_days", "limit_days", "warns"),
    [(0, 90, False), (89, 90, False), (90, 90, False), (91, 90, True), (4000, 90, True), (10, 9, True), (1, 0, True)],
)
def test_an_old_price_is_flagged_against_the_given_day(age_days: int, limit_days: int, warns: bool) -> None:
    old = offer(observed_on=TODAY - datetime.timedelta(days=age_days))
    found = price_warnings([old], TODAY, limit_days)
    assert bool(found) == warns
    if warns:
        assert f"{age_days} days old" in found[0]
        assert "$0.8048" in found[0]


def test_a_price_from_the_future_and_one_without_a_day_are_flagged() -> None:
    (future,) = price_warnings([offer(observed_on=TODAY + datetime.timedelta(days=1))], TODAY)
    assert "after today" in future
    (undated,) = price_warnings([offer(observed_on=None)], TODAY)
    assert "no day" in undated


@pytest.mark.parametrize(("spot", "warns"), [(0.30, False), (0.8048, True), (1.20, True)])
def test_a_spot_price_that_saves_nothing_is_flagged(spot: float, warns: bool) -> None:
    found = price_warnings([offer(market="spot", price_usd_per_hour=spot), offer()], TODAY)
    assert bool(found) == warns


def test_an_owned_machine_has_no_price_to_doubt() -> None:
    assert price_warnings([offer(market="owned", price_usd_per_hour=None, observed_on=None)], TODAY) == []


def test_doubts_are_never_stored_in_a_plan() -> None:
    """A plan keeps the price with its day and source; how old that is depends on who looks when."""
    plan = verified(hp.optimize(model="llama-3.2-1b", cluster={"g6.xlarge": 1}, workload=WORKLOAD))
    before = plan.to_json()
    offers = [pool.offer for pool in plan.problem.cluster.pools]
    assert price_warnings(offers, datetime.date(2099, 1, 1)) != []
    assert plan.to_json() == before
    assert "days old" not in before
    (kept,) = offers
    assert kept.source
    assert f'"price_usd_per_hour": {kept.price_usd_per_hour}' in before


# ---- notice


@pytest.mark.parametrize(
    ("provider", "seconds"), [("aws", 120), ("gcp", 30), ("azure", 30), ("alibaba", 300), ("nobody-knows", 0)]
)
def test_notice_is_the_providers(provider: str, seconds: float) -> None:
    assert notice_s(provider) == seconds
    entry = {
        "instance_type": "g6.xlarge",
        "count": 1,
        "market": "spot",
        "region": "x",
        "provider": provider,
        "price_usd_per_hour": 0.3,
    }
    for given, expected in ((entry, seconds), (entry | {"notice_s": 7}, 7)):
        (pool,) = cluster_from_dict({"offers": [given]}).pools
        assert pool.offer.notice_s == expected


def test_catalogued_spot_offers_carry_their_notice() -> None:
    spot = list_offers(market="spot")
    assert spot
    assert all(row.notice_s == notice_s(row.provider) for row in spot)
    assert get_offer("g6.xlarge", region="us-west-2").notice_s is None


# ---- published bills


def test_the_paper_s_bill() -> None:
    """50 minutes of the 24-GPU cluster, on demand in us-west-2: $27.16."""
    cluster = hp.Cluster.from_counts(CLUSTER_24, region="us-west-2")
    assert cluster.gpu_count == 24
    assert cluster.price_usd_per_hour * 50 / 60 == pytest.approx(27.16, abs=0.005)


@pytest.mark.parametrize("usd", [0.01, 1.0, 12.5])
@pytest.mark.parametrize("count", [1, 3])
def test_a_plan_is_billed_for_the_machines_it_uses(count: int, usd: float) -> None:
    machine = make_machine()
    cluster = make_cluster((machine, make_pool(machine, count, usd=usd)))
    plan = verified(hp.optimize(model=tiny_llama(), cluster=cluster, workload=WORKLOAD))
    used = sum(p.count * len(p.nodes) for p in plan.deployments[0].pipelines)
    assert used == count
    assert plan.cost_usd_per_hour == pytest.approx(count * usd)
