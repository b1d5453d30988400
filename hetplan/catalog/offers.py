"""What can be rented or is owned: offers with prices, and the cluster they form."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from itertools import combinations
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
        return f"{self.place}/{self.instance_type}/{self.market}"

    @property
    def place(self) -> str:
        """Where its machines stand, as the ends of a `ZoneLink` say it: provider/region[/zone]."""
        region = f"{self.provider}/{self.region}"
        return region if self.zone is None else f"{region}/{self.zone}"

    @property
    def billed_usd_per_hour(self) -> float:
        """Dollars an hour that enter a plan's cost: zero for owned machines without a price."""
        return self.price_usd_per_hour or 0.0

    @property
    def expected_interruptions_per_hour(self) -> float:
        """How often a machine is taken: never where it is not spot."""
        return (self.interruptions_per_hour or 0.0) if self.market == "spot" else 0.0

    def age_days(self, today: datetime.date) -> int | None:
        """Days since the price was seen; None when the source states no day."""
        return None if self.observed_on is None else (today - self.observed_on).days


class Pool(Frozen):
    """Up to ``count`` machines of one offer."""

    offer: Offer
    count: Annotated[int, Field(ge=1)]


class ZoneLink(Frozen):
    """The network between two places, and its price.

    Between regions: a pipeline may cross there, and crosses regions nowhere else. Between zones of one region, where
    pipelines stand across zones anyway: what their sends pass besides the machines' own network.

    Attributes
    ----------
    ends : (str, str)
        Places as the names of offers begin: ``provider/region`` for all of a region, such as ``aws/us-west-2``, or
        ``provider/region/zone``. Where several links join two machines, the one that names more zones counts.
    link : Link
        From machine to machine: its latency holds what a message takes at both ends.
    egress_usd_per_gb : float
        Price of a GB (10**9 bytes) sent between the ends, either way.
    """

    ends: tuple[str, str]
    link: Link
    egress_usd_per_gb: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        one, other = self.ends
        if _holds(one, other) or _holds(other, one):
            raise ValueError(f"a zone link joins two places that lie apart, not {one!r} and {other!r}")
        return self

    def joins(self, one: str, other: str) -> bool:
        """Whether machines in these places are at its two ends."""
        (a, b) = self.ends
        return (_holds(a, one) and _holds(b, other)) or (_holds(a, other) and _holds(b, one))


def _holds(end: str, place: str) -> bool:
    return place == end or place.startswith(f"{end}/")


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
        self._check_zone_links()
        return self

    def _check_zone_links(self) -> None:
        places = list(dict.fromkeys(pool.offer.place for pool in self.pools))
        seen: set[frozenset[str]] = set()
        for link in self.zone_links:
            for end in link.ends:
                if not any(_holds(end, place) for place in places):
                    raise ValueError(
                        f"a zone link ends in {end!r}, where the cluster has no machine; its places: "
                        f"{', '.join(places)}"
                    )
            if frozenset(link.ends) in seen:
                raise ValueError(f"the zone link between {' and '.join(link.ends)} is listed twice; keep one")
            seen.add(frozenset(link.ends))
        for one, other in combinations(places, 2):
            nearest = self._nearest_links(one, other)
            if len(nearest) > 1:
                said = "; ".join(" and ".join(link.ends) for link in nearest)
                raise ValueError(
                    f"{one} and {other} are joined by several zone links ({said}); add one that names both"
                )

    def instance_type(self, name: str) -> InstanceType:
        """The instance type of that name."""
        return next(t for t in self.instance_types if t.name == name)

    def _nearest_links(self, one: str, other: str) -> list[ZoneLink]:
        """Of the links that join two places, those that name most of them whole."""
        joining = [link for link in self.zone_links if link.joins(one, other)]
        named = [len({one, other} & set(link.ends)) for link in joining]
        return [link for link, many in zip(joining, named, strict=True) if many == max(named)]

    def zone_link(self, one: str, other: str) -> ZoneLink | None:
        """The link between machines in two places, by `Offer.place`; None where only their own networks are between."""
        # Asked for every send: in one place nothing is between.
        if one == other or not self.zone_links:
            return None
        return next(iter(self._nearest_links(one, other)), None)

    def may_follow(self, one: Offer, other: Offer) -> bool:
        """Whether a pipeline's next machine may be the other: in its region, or where a zone link leads."""
        region = (one.provider, one.region) == (other.provider, other.region)
        return region or self.zone_link(one.place, other.place) is not None

    def pool_groups(self) -> list[list[int]]:
        """Pools whose machines may stand in one pipeline, each in one group: regions, those that links join together.

        Within a group of several regions not every machine may follow every other: see `may_follow`.
        """
        groups: list[list[int]] = []
        for index, pool in enumerate(self.pools):
            joined = [g for g in groups if any(self.may_follow(self.pools[i].offer, pool.offer) for i in g)]
            apart = [g for g in groups if g not in joined]
            groups = [*apart, sorted([*(i for g in joined for i in g), index])]
        return sorted(groups)

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
