"""What a renter knows of a spot market from what it has seen so far: the views that policies decide on."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hetplan.errors import InvalidInputError
from hetplan.policies import Loss, MarketEvent, PoolView, RentedMarket, Return
from hetplan.simulator.market import Market

__all__ = ["Outlook"]

# Parcae predicts from the last 12 steps.
_REMEMBERED = 12


@dataclass(slots=True)
class _Seen:
    history: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    interrupted: bool = False
    # Since when a lost machine has not come back, and the outages that have ended.
    out_since_s: float | None = None
    outages_s: float = 0.0
    returns: int = 0


class Outlook:
    """Memory of a market: how its pools fared, and so what is to be expected of them.

    Parameters
    ----------
    market : Market
        Asked for what it would grant now, never for what is to come.
    instance_types : mapping of str to str
        The instance type of each pool.
    usd_per_hour : mapping of (pool, market) to float
        Prices; a pool without one cannot be rented in that market.
    on_demand_free : int
        Machines that each pool has on demand at any time.
    prior_return_s : float, optional
        Expected length of an outage before any was seen, which then counts as one; None if nothing is known.

    Raises
    ------
    InvalidInputError
        If a pool has no instance type.

    Notes
    -----
    An outage lasts from the loss of a machine until its pool has machines to grant again. Its expected rest is the time
    spent in outages, the present one included, over the number that ended: the estimate of largest likelihood if they
    are exponential.
    """

    def __init__(
        self,
        market: Market,
        *,
        instance_types: Mapping[str, str],
        usd_per_hour: Mapping[tuple[str, str], float],
        on_demand_free: int,
        prior_return_s: float | None = None,
    ) -> None:
        for pool in market.pools:
            if pool not in instance_types:
                raise InvalidInputError(f"no instance type for pool {pool}; give one for every pool")
        self._market = market
        self._instance_types = dict(instance_types)
        self._usd_per_hour = dict(usd_per_hour)
        self._on_demand_free = on_demand_free
        self._prior_return_s = prior_return_s
        self._seen = {pool: _Seen() for pool in market.pools}

    def instance_type(self, pool: str) -> str:
        """The instance type of a pool."""
        return self._instance_types[pool]

    def see(self, events: Iterable[MarketEvent]) -> None:
        """Take note of events, in their order."""
        for event in events:
            seen = self._seen[event.pool]
            seen.interrupted = not isinstance(event, Return)
            if isinstance(event, Loss) and seen.out_since_s is None:
                seen.out_since_s = event.time_s
            if isinstance(event, Return) and seen.out_since_s is not None:
                seen.outages_s += event.time_s - seen.out_since_s
                seen.returns += 1
                seen.out_since_s = None

    def look(self) -> None:
        """Remember what each pool has now; to be called at even distances, such as at a policy's ticks."""
        for pool, seen in self._seen.items():
            seen.history.append(self._market.free(pool) + len(self._market.nodes(pool)))

    def views(self) -> dict[str, PoolView]:
        """The pools as a policy sees them now."""
        return {pool: self._view(pool, seen) for pool, seen in self._seen.items()}

    def _view(self, pool: str, seen: _Seen) -> PoolView:
        return PoolView(
            name=pool,
            instance_type=self._instance_types[pool],
            spot_free=self._market.free(pool) if (pool, "spot") in self._usd_per_hour else 0,
            on_demand_free=self._on_demand_free if (pool, "on_demand") in self._usd_per_hour else 0,
            spot_usd_per_hour=self._price(pool, "spot"),
            on_demand_usd_per_hour=self._price(pool, "on_demand"),
            expected_return_s=self._expected_return_s(seen),
            interrupted=seen.interrupted,
            history=tuple(seen.history),
        )

    def _price(self, pool: str, market: RentedMarket) -> float:
        return self._usd_per_hour.get((pool, market), math.inf)

    def _expected_return_s(self, seen: _Seen) -> float:
        spent = seen.outages_s
        if seen.out_since_s is not None:
            spent += self._market.now_s - seen.out_since_s
        if self._prior_return_s is not None:
            return (self._prior_return_s + spent) / (1 + seen.returns)
        return spent / seen.returns if seen.returns else math.inf
