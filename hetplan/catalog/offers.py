"""What can be rented or is owned: offers with prices, and the cluster they form."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hetplan.base import Frozen
from hetplan.catalog.hardware import InstanceType, Link

Market = Literal["spot", "on_demand", "owned"]


class Offer(Frozen):
    """An instance type for rent in a place and market, or owned.

    ``price_usd_per_hour`` is for the whole machine; None only for owned ones, which then cost nothing.
    ``notice_s``: warning before a spot machine is taken (AWS 120, GCP and Azure 30, some 0).
    """

    instance_type: str
    provider: str
    region: str
    zone: str | None = None
    market: Market
    price_usd_per_hour: Annotated[float, Field(gt=0)] | None = None
    source: str
    observed_on: datetime.date | None = None
    notice_s: Annotated[float, Field(ge=0)] | None = None
    interruptions_per_hour: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.price_usd_per_hour is None and self.market != "owned":
            raise ValueError(
                f"the {self.market} offer of {self.instance_type} in {self.region} has no price; only owned ones may"
            )
        return self

    @property
    def name(self) -> str:
        """Unique in a cluster: provider/region[/zone]/type/market."""
        place = self.region if self.zone is None else f"{self.region}/{self.zone}"
        return f"{self.provider}/{place}/{self.instance_type}/{self.market}"

    @property
    def billed_usd_per_hour(self) -> float:
        """Dollars an hour that enter a plan's cost: zero for owned machines without a price."""
        return self.price_usd_per_hour or 0.0

    def age_days(self, today: datetime.date) -> int | None:
        """Days since the price was seen; None when the source states no day."""
        return None if self.observed_on is None else (today - self.observed_on).days


class Pool(Frozen):
    """Up to ``count`` machines of one offer."""

    offer: Offer
    count: Annotated[int, Field(ge=1)]


class ZoneLink(Frozen):
    """The link between two places (regions or zones); pipelines stay in one region where none is given."""

    ends: tuple[str, str]
    link: Link


class Cluster(Frozen):
    """The machines a plan may use: offers with counts, and the instance types they name."""

    instance_types: tuple[InstanceType, ...]
    pools: Annotated[tuple[Pool, ...], Field(min_length=1)]
    zone_links: tuple[ZoneLink, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        known = [t.name for t in self.instance_types]
        if len(set(known)) != len(known):
            raise ValueError(f"an instance type is listed twice: {sorted(n for n in known if known.count(n) > 1)[0]}")
        for pool in self.pools:
            if pool.offer.instance_type not in known:
                raise ValueError(f"offer {pool.offer.name} names an instance type that instance_types lacks")
        names = [pool.offer.name for pool in self.pools]
        if len(set(names)) != len(names):
            twice = sorted(n for n in names if names.count(n) > 1)[0]
            raise ValueError(f"offer {twice} is listed twice; add the counts")
        return self

    def instance_type(self, name: str) -> InstanceType:
        """The instance type of that name."""
        return next(t for t in self.instance_types if t.name == name)

    @property
    def gpu_count(self) -> int:
        return sum(pool.count * self.instance_type(pool.offer.instance_type).gpu_count for pool in self.pools)

    @property
    def gpu_memory_bytes(self) -> int:
        total = 0
        for pool in self.pools:
            machine = self.instance_type(pool.offer.instance_type)
            total += pool.count * machine.gpu_count * machine.gpu.memory_bytes
        return total

    @property
    def price_usd_per_hour(self) -> float:
        """Everything rented at once."""
        return sum(pool.count * pool.offer.billed_usd_per_hour for pool in self.pools)

    @classmethod
    def from_counts(
        cls, counts: Mapping[str, int], *, region: str, market: Market = "on_demand", provider: str = "aws"
    ) -> Cluster:
        """Catalogued machines of one provider, region and market.

        Parameters
        ----------
        counts : mapping of str to int
            Instance type to the most machines of it, such as ``{"g6.12xlarge": 3}``.
        region, market, provider : str
            Where and how they are rented; together with the type they name one price.

        Raises
        ------
        InvalidInputError
            For an empty mapping or a count below one.
        UnknownNameError
            For an instance type, region or market without an offer; the nearest are listed.
        """
        from hetplan.catalog.tables import cluster_from_counts

        return cluster_from_counts(counts, region=region, market=market, provider=provider)
