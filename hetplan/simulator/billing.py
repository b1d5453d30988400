"""What rented machines cost: by the second, from when they are rented to when they are given back or taken."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from hetplan.errors import InvalidInputError, UnknownNameError
from hetplan.units import SECONDS_PER_HOUR

__all__ = ["Billing"]

# AWS and Google Cloud bill virtual machines by the second, the first 60 seconds in any case.
_LEAST_S = 60.0

K = TypeVar("K")


@dataclass(slots=True)
class _Lease:
    pool: str
    market: str
    start_s: float
    stop_s: float = math.inf


class Billing:
    """Leases of machines and what they cost. Two machines that stand side by side are both paid.

    Parameters
    ----------
    usd_per_hour : mapping of (pool, market) to float
        Price of a machine.
    least_s : float
        What a lease is billed at least, in seconds. AWS does not bill spot machines that it takes back within their
        first hour; this does.

    Raises
    ------
    InvalidInputError
        For a price or least time below 0.

    Examples
    --------
    >>> bill = Billing({("g6", "spot"): 3.6, ("g6", "on_demand"): 7.2})
    >>> bill.start("g6/0", "g6", "spot", 0)
    >>> bill.start("g6/1", "g6", "on_demand", 900)
    >>> bill.stop("g6/0", 1000)
    >>> bill.cost_usd(1900), bill.by_market(1900)
    (3.0, {'spot': 1.0, 'on_demand': 2.0})
    """

    def __init__(self, usd_per_hour: Mapping[tuple[str, str], float], *, least_s: float = _LEAST_S) -> None:
        for (pool, market), price in usd_per_hour.items():
            if not (math.isfinite(price) and price >= 0):
                raise InvalidInputError(f"the {market} price of {pool} is {price}; give dollars an hour from 0")
        if not (math.isfinite(least_s) and least_s >= 0):
            raise InvalidInputError(f"least_s is {least_s}; give a finite number from 0")
        self._usd_per_hour = dict(usd_per_hour)
        self._least_s = least_s
        self._leases: dict[str, _Lease] = {}

    def start(self, node: str, pool: str, market: str, at_s: float) -> None:
        """Begin the lease of a machine; its name is used for one lease only.

        Raises
        ------
        UnknownNameError
            If the pool has no price in that market.
        InvalidInputError
            If the machine has had a lease.
        """
        if (pool, market) not in self._usd_per_hour:
            raise UnknownNameError("price", f"{pool} {market}", [f"{p} {m}" for p, m in self._usd_per_hour])
        if node in self._leases:
            raise InvalidInputError(f"machine {node} is billed already; give each lease a name of its own")
        self._leases[node] = _Lease(pool, market, at_s)

    def stop(self, node: str, at_s: float) -> None:
        """End a lease.

        Raises
        ------
        UnknownNameError
            If there is no such lease.
        InvalidInputError
            If it has ended already, or begins after ``at_s``.
        """
        lease = self._leases.get(node)
        if lease is None:
            raise UnknownNameError("lease", node, self._leases)
        if lease.stop_s < math.inf:
            raise InvalidInputError(f"the lease of {node} ended at {lease.stop_s} s already")
        if at_s < lease.start_s:
            raise InvalidInputError(f"the lease of {node} begins at {lease.start_s} s; it cannot end at {at_s} s")
        lease.stop_s = at_s

    def cost_usd(self, until_s: float) -> float:
        """Dollars for what was used until then."""
        return math.fsum(usd for _, usd in self._costs(until_s))

    def by_pool(self, until_s: float) -> dict[str, float]:
        """Dollars by pool."""
        return self._sums((lease.pool, usd) for lease, usd in self._costs(until_s))

    def by_market(self, until_s: float) -> dict[str, float]:
        """Dollars by market."""
        return self._sums((lease.market, usd) for lease, usd in self._costs(until_s))

    def machine_s(self, until_s: float) -> dict[tuple[str, str], float]:
        """Seconds that machines of each pool and market stood, as they were, not as they are billed."""
        return self._sums(
            ((lease.pool, lease.market), min(lease.stop_s, until_s) - lease.start_s)
            for lease in self._leases.values()
            if lease.start_s < until_s
        )

    def _costs(self, until_s: float) -> Iterator[tuple[_Lease, float]]:
        for lease in self._leases.values():
            if lease.start_s < until_s:
                # Rounded first: a sum of seconds may lie a hair above a whole one.
                whole = math.ceil(round(min(lease.stop_s, until_s) - lease.start_s, 6))
                seconds = max(whole, self._least_s)
                yield lease, seconds * self._usd_per_hour[lease.pool, lease.market] / SECONDS_PER_HOUR

    @staticmethod
    def _sums(parts: Iterator[tuple[K, float]]) -> dict[K, float]:
        sums: dict[K, float] = {}
        for key, value in parts:
            sums[key] = sums.get(key, 0.0) + value
        return sums
