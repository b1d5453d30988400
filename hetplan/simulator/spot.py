"""A made-up spot market whose pools grow scarce together: availability from a seed.

Departures from recorded markets: no time of day, no price, and machines come and go one by one, though within a
scarce spell in quick succession.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hetplan.base import Frozen
from hetplan.errors import InvalidInputError
from hetplan.simulator.availability import Availability
from hetplan.units import SECONDS_PER_HOUR

__all__ = ["HIGH_END", "MID_TIER", "MarketRates", "spot_market"]

_Rate = Annotated[float, Field(ge=0)]
# The market runs this long before time 0, so that it starts in its own balance: many times the longest spell.
_WARM_UP_S = 5 * 24 * SECONDS_PER_HOUR


class MarketRates(Frozen):
    """How a pool's machines come and go: a hidden state, plenty or scarce, and rates in each.

    Attributes
    ----------
    plenty_s, scarce_s : float
        Mean length of a spell of each state, in seconds; spells are exponential.
    plenty_leave_per_hour, scarce_leave_per_hour : float
        How often each available machine is taken away.
    plenty_return_per_hour, scarce_return_per_hour : float
        How often each missing machine comes back.
    """

    plenty_s: Annotated[float, Field(gt=0)]
    scarce_s: Annotated[float, Field(gt=0)]
    plenty_leave_per_hour: _Rate
    plenty_return_per_hour: _Rate
    scarce_leave_per_hour: _Rate
    scarce_return_per_hour: _Rate

    @property
    def scarce_fraction(self) -> float:
        """Share of the time in which the pool is scarce."""
        return self.scarce_s / (self.plenty_s + self.scarce_s)


# Spells of 8 hours and 1 hour, and all rates but the first, are chosen: no trace is published. The first is fitted so
# that 688 of 1,701 windows of 50 minutes hold no change (ShuntServe, section 7.2) for pools of 3, 2 and 4 machines
# with correlation 0.3, by the stationary distribution of the whole chain (hidden states x counts) and the survival of
# its changes. A machine is then available for 90% of the time.
MID_TIER = MarketRates(
    plenty_s=8 * SECONDS_PER_HOUR,
    scarce_s=SECONDS_PER_HOUR,
    plenty_leave_per_hour=0.0491,
    plenty_return_per_hour=6.0,
    scarce_leave_per_hour=3.0,
    scarce_return_per_hour=0.2,
)
# H100 was available for 28.64% of six days (ShuntServe, section 2.2): the length of plenty is fitted to that for a pool
# of one machine with scarce spells of 8 hours, the other rates as above but for hardly any return while scarce.
HIGH_END = MID_TIER.replace(
    plenty_s=2.96 * SECONDS_PER_HOUR, scarce_s=8 * SECONDS_PER_HOUR, scarce_return_per_hour=0.02
)


def spot_market(
    pools: Mapping[str, int],
    duration_s: float,
    *,
    seed: int,
    rates: MarketRates | Mapping[str, MarketRates] = MID_TIER,
    correlation: float = 0.3,
) -> Availability:
    """Availability of pools over time, drawn from a seed.

    Parameters
    ----------
    pools : mapping of str to int
        The most machines each pool ever has; 0 for one that never has any, as B200 in ShuntServe's six days.
    duration_s : float
        Seconds.
    seed : int
        The same seed and arguments give the same market.
    rates : MarketRates or mapping of str to MarketRates
        For all pools, or for each one. The defaults are fitted to two numbers of ShuntServe, see `MID_TIER`.
    correlation : float
        Between the hidden states of any two pools, 0 (each its own) to 1 (all scarce at once). The default of 0.3 is
        chosen: pools of one region share demand, but mid-tier and high-end ones were scarce at different times.

    Returns
    -------
    Availability

    Raises
    ------
    InvalidInputError
        If there is no pool, a number is out of range, or pools of different spells are to be correlated.

    Notes
    -----
    Given the hidden state, a pool of capacity K with n machines loses one at rate n x leave and regains one at rate
    (K - n) x return: a birth-death process. Hidden states are drawn anew at epochs: at rate ``c`` x lambda one state
    for all pools at once, at rate (1 - c) x lambda one for each pool alone, scarce with the probability of
    `MarketRates.scarce_fraction`, with lambda = 1/plenty + 1/scarce. Each pool's state is then the same two-state
    Markov chain whatever the correlation, and two pools agree by more than chance just when the last epoch of either
    was a common one, which has the probability c / (2 - c): with c = 2 rho / (1 + rho) the correlation is rho.

    Examples
    --------
    >>> spot_market({"g6.12xlarge": 3, "g5.12xlarge": 2}, 6 * 86_400, seed=0).pools
    ('g5.12xlarge', 'g6.12xlarge')
    """
    names = sorted(pools)
    _check(pools, duration_s, correlation)
    if isinstance(rates, MarketRates):
        rates = dict.fromkeys(names, rates)
    missing = [name for name in names if name not in rates]
    if missing:
        raise InvalidInputError(f"no rates for pool {missing[0]}; give them for every pool")
    kinds = [rates[name] for name in names]
    if correlation > 0 and len({(kind.plenty_s, kind.scarce_s) for kind in kinds}) > 1:
        raise InvalidInputError(
            "pools with spells of different lengths cannot share states; give one length, or correlation=0"
        )
    path = _Chain(np.array([pools[name] for name in names]), kinds, correlation, np.random.default_rng(seed))
    return Availability(dict(zip(names, path.run(duration_s), strict=True)), duration_s)


def _check(pools: Mapping[str, int], duration_s: float, correlation: float) -> None:
    if not pools:
        raise InvalidInputError("a market without pools; give at least one")
    for name, capacity in pools.items():
        if capacity < 0:
            raise InvalidInputError(f"pool {name} has {capacity} machines; give 0 or more")
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise InvalidInputError(f"duration_s is {duration_s}; give a finite number above 0")
    if not 0 <= correlation <= 1:
        raise InvalidInputError(f"correlation is {correlation}; give a number from 0 to 1")


class _Chain:
    """The whole Markov chain: hidden states and counts, drawn event by event."""

    def __init__(
        self, capacity: NDArray[np.int64], kinds: list[MarketRates], correlation: float, rng: np.random.Generator
    ) -> None:
        self.rng = rng
        self.capacity = capacity
        self.scarce_fraction = np.array([kind.scarce_fraction for kind in kinds])
        # Row 0 while plenty, row 1 while scarce; per second.
        self.leave = np.array([[k.plenty_leave_per_hour, k.scarce_leave_per_hour] for k in kinds]).T / SECONDS_PER_HOUR
        self.back = np.array([[k.plenty_return_per_hour, k.scarce_return_per_hour] for k in kinds]).T / SECONDS_PER_HOUR
        common = 2 * correlation / (1 + correlation)
        epochs = np.array([1 / kind.plenty_s + 1 / kind.scarce_s for kind in kinds])
        # Without correlation there is no common epoch, and each pool has its own rate.
        self.epochs = np.concatenate(([common * epochs[0]], (1 - common) * epochs))

    def run(self, duration_s: float) -> list[tuple[list[float], list[int]]]:
        """Times and counts of each pool."""
        size, rng = self.capacity.size, self.rng
        each = np.arange(size)
        scarce = (rng.random(size) < self.scarce_fraction).astype(np.int64)
        counts = self.capacity.copy()
        steps: list[tuple[list[float], list[int]]] = []
        now = -_WARM_UP_S
        while True:
            leave, back = self.leave[scarce, each] * counts, self.back[scarce, each] * (self.capacity - counts)
            ends = np.cumsum(np.concatenate((self.epochs, leave, back)))
            now += rng.exponential(1 / ends[-1])
            if now > 0 and not steps:
                steps = [([0.0], [int(count)]) for count in counts]
            if now > duration_s:
                return steps
            event = int(np.searchsorted(ends, rng.random() * ends[-1], side="right"))
            kind, pool = divmod(event - 1, size)
            if event == 0:
                scarce[:] = rng.random() < self.scarce_fraction
            elif kind == 0:
                scarce[pool] = rng.random() < self.scarce_fraction[pool]
            else:
                counts[pool] += -1 if kind == 1 else 1
                if steps:
                    steps[pool][0].append(now)
                    steps[pool][1].append(int(counts[pool]))
