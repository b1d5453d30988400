"""What is wanted: pipelines, the offers of their machines, and where else machines may be rented."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetplan.catalog.offers import Offer
from hetplan.policies import Policy
from hetplan.policies.situation import PoolView, RentedMarket
from hetplan.runtime.controller.state import ControllerState, SlotState


@dataclass(frozen=True, slots=True)
class Slot:
    """A pipeline copy of a plan: the offer of each of its machines, by rank, and its model."""

    pipeline: int
    offers: tuple[str, ...]
    model: str = ""


@dataclass(frozen=True, slots=True)
class Desired:
    """What is to be served, and how it is kept so.

    Attributes
    ----------
    slots : tuple of Slot
    offers : mapping
        All that may be rented, by name: the plan's, and fallbacks.
    counts : mapping
        How many machines of each may be held; one that is not listed has no limit.
    policy : Policy
    stores : bool
        Whether machines hold weights in a store.
    beside : bool
        Whether a new engine fits beside an old one on a machine: with a store and room that the plan keeps.
    first_port, ports : int
        Of engines: they take ports in turn, from ``first_port`` on.
    start_s : float
        Predicted seconds from renting a machine to its pipeline serving.
    drain_s : float
        Longest that engines may go on with their streams once the router has a new target.
    retry_s : float
        How long an offer without a machine is not asked again.
    max_failures : int
        Starts in a row that may fail before a pipeline is left alone.
    max_deaths : int
        Engines in a row that may end before they have served for ``settled_s``.
    settled_s : float
        An engine that served so long has shown that it can: what failed before is forgotten.
    longest_pause_s : float
        Before a start after a failure; the pause is 2 s after the first and doubles.
    """

    slots: tuple[Slot, ...]
    offers: Mapping[str, Offer]
    policy: Policy
    counts: Mapping[str, int] = field(default_factory=dict)
    stores: bool = False
    beside: bool = False
    first_port: int = 8000
    ports: int = 1000
    start_s: float = 120.0
    drain_s: float = 120.0
    retry_s: float = 60.0
    max_failures: int = 3
    max_deaths: int = 6
    settled_s: float = 600.0
    longest_pause_s: float = 60.0

    def slot(self, pipeline: int) -> Slot | None:
        """The pipeline of that number, if it is still wanted."""
        return next((s for s in self.slots if s.pipeline == pipeline), None)

    def given_up(self, remembered: SlotState) -> bool:
        """Whether a pipeline is left alone, as it does not start or does not live."""
        return remembered.failures >= self.max_failures or remembered.deaths >= self.max_deaths

    def pause_s(self, remembered: SlotState) -> float:
        """Seconds before a pipeline is started after its last failure."""
        return float(min(self.longest_pause_s, 2.0 ** min(remembered.failures + remembered.deaths, 30)))

    def kind(self, offer: str) -> str:
        """The instance type of an offer."""
        return self.offers[offer].instance_type

    def market(self, offer: str) -> RentedMarket:
        """How a policy sees an offer's machines: owned ones are not taken, as on-demand ones."""
        return "spot" if self.offers[offer].market == "spot" else "on_demand"

    def pool(self, offer: str) -> str:
        """The pool of an offer: its place and instance type, whatever the market."""
        return f"{self.offers[offer].place}/{self.offers[offer].instance_type}"

    def offer_of(self, pool: str, market: RentedMarket) -> str | None:
        """The offer of a pool and market."""
        return next((o for o in self.offers if self.pool(o) == pool and self.market(o) == market), None)

    def pools(self, state: ControllerState, now_s: float) -> dict[str, PoolView]:
        """Where machines can be rented now."""
        # One that is going makes room for the one that takes its place.
        held = Counter(m.offer for m in state.machines if m.stays)
        short = {offer for offer, until_s in state.short_until_s if until_s > now_s}
        views = {}
        for pool in dict.fromkeys(map(self.pool, self.offers)):
            spot, on_demand = self.offer_of(pool, "spot"), self.offer_of(pool, "on_demand")
            views[pool] = PoolView(
                name=pool,
                instance_type=self.kind(spot or on_demand or ""),
                spot_free=self._free(spot, held, short),
                on_demand_free=self._free(on_demand, held, short),
                spot_usd_per_hour=self._price(spot),
                on_demand_usd_per_hour=self._price(on_demand),
                interrupted=spot in short,
            )
        return views

    def can_be_had(self, state: ControllerState, offer: str, now_s: float) -> bool:
        """Whether a machine of an offer may be rented now."""
        held = Counter(m.offer for m in state.machines if m.stays)
        short = {name for name, until_s in state.short_until_s if until_s > now_s}
        return self._free(offer, held, short) > 0

    def _free(self, offer: str | None, held: Counter[str], short: set[str]) -> int:
        if offer is None or offer in short:
            return 0
        return max(0, self.counts.get(offer, 10**6) - held[offer])

    def _price(self, offer: str | None) -> float:
        return math.inf if offer is None else self.offers[offer].billed_usd_per_hour
