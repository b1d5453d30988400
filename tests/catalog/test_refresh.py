"""Fresh prices: rows of another catalogue become an offers file that a cluster takes."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import pytest

import hetplan as hp
from hetplan.catalog.clusters import cluster_from_file
from hetplan.catalog.refresh import gpuhunt_query, refreshed_offers

TODAY = datetime.date(2026, 12, 1)


@dataclass
class Row:
    instance_name: str
    location: str
    price: float
    spot: bool = False
    provider: str = "aws"


def test_known_machines_become_offers_that_a_cluster_reads(tmp_path: Path) -> None:
    rows = [
        Row("g6.xlarge", "us-west-2", 0.81),
        Row("g6.xlarge", "us-west-2", 0.3, spot=True),
        Row("g6.xlarge", "us-west-2", 0.4, spot=True),
        Row("m5.large", "us-west-2", 0.1),
    ]
    file = tmp_path / "offers.csv"
    file.write_text(refreshed_offers(["aws"], TODAY, query=lambda _: rows))
    cluster = cluster_from_file(file)
    assert [(p.offer.market, p.offer.price_usd_per_hour, p.offer.observed_on) for p in cluster.pools] == [
        ("on_demand", 0.81, TODAY),
        ("spot", 0.3, TODAY),
    ]


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan")])
def test_a_price_that_is_none_is_refused(price: float) -> None:
    with pytest.raises(hp.InvalidInputError, match=r"g6\.xlarge"):
        refreshed_offers(["aws"], TODAY, query=lambda _: [Row("g6.xlarge", "us-west-2", price)])


def test_nothing_known_is_an_error() -> None:
    with pytest.raises(hp.InvalidInputError, match="no price"):
        refreshed_offers(["aws"], TODAY, query=lambda _: [])


def test_without_the_extra_the_way_out_is_named() -> None:
    with pytest.raises(hp.InvalidInputError, match=r"hetplan\[prices\]"):
        gpuhunt_query(["aws"])
