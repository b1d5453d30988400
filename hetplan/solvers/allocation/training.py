"""What buyings cost in training scenarios and with nothing drawn, and what that proves of other buyings.

A buying is replicas of options and, where each query type pays for its own copy of the weights, which type has which.
Where weights are stored once, every type may use all that is bought.

The second stage is a linear program in which replicas are limits, so the prices of a buying's scenarios bound the cost
of every buying: a constant, less what each replica could hold at those prices (`Cut`). This is the optimality cut of
the L-shaped method, with the replica's own share of the program solved as a knapsack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hetplan.problem.robust import Robust
from hetplan.solvers.allocation.assignment import NEXT_TO_NOTHING, Assignment, choose, placed_pairs
from hetplan.solvers.allocation.options import SLACK, FloatArray, IntArray, Options
from hetplan.solvers.allocation.scenarios import VIOLATED, Drawn, Operated, Operations, Placement, draw_factors

_NEXT_TO_ZERO = 1e-100


@dataclass(frozen=True, slots=True)
class Buying:
    """Replicas by option, in order, and the copies of weights: (query type, pair); none where they are shared."""

    replicas: tuple[tuple[int, int], ...]
    copies: frozenset[tuple[int, int]] = frozenset()

    @property
    def numbers(self) -> IntArray:
        return np.array([number for number, _ in self.replicas], dtype=np.int64)

    @property
    def counts(self) -> IntArray:
        return np.array([count for _, count in self.replicas], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Cut:
    """No buying costs less than its fixed cost and ``usd`` less ``gains`` (O,) of each replica."""

    usd: float
    gains: FloatArray


@dataclass(frozen=True, slots=True)
class Costs:
    """What a buying costs in S scenarios; I query types, B options bought.

    Attributes
    ----------
    usd : (S,) float
        All costs.
    unserved : (S, I) float
    used : (I, B) bool
        Whether some scenario sends some of a type to an option.
    cut : Cut
        Of what counts of the costs.
    """

    usd: FloatArray
    unserved: FloatArray
    used: NDArray[np.bool_]
    cut: Cut

    @property
    def violation_rate(self) -> float:
        return float((self.unserved > VIOLATED).mean(axis=1).mean())


@dataclass(slots=True)
class Training:
    """The scenarios of a problem, and what is known of buyings in them."""

    options: Options
    robust: Robust
    drawn: Drawn = field(init=False)
    _costs: dict[Buying, Costs] = field(default_factory=dict)
    _shares: dict[Buying, Assignment | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        o, r = self.options, self.robust
        self.drawn = draw_factors(
            o.number,
            len(o.unserved_usd),
            scenarios=r.scenarios,
            seed=r.seed,
            delay_spread=r.delay_spread,
            error_spread=r.error_spread,
            arrival_spread=r.arrival_spread,
            stress=r.stress,
        )

    # ---- buyings

    def make(self, replicas: Mapping[int, int], copies: Iterable[tuple[int, int]] | None = None) -> Buying:
        """A buying; by default with every copy of weights that some type can use."""
        o = self.options
        kept = tuple(sorted((number, count) for number, count in replicas.items() if count))
        if not o.stored_per_type:
            return Buying(kept)
        useful = {(int(i), int(o.pair[n])) for n, _ in kept for i in np.flatnonzero(o.most[:, n] > 0)}
        return Buying(kept, frozenset(useful if copies is None else useful & set(copies)))

    def placed(self, buying: Buying) -> NDArray[np.bool_]:
        """(I, O) which type may use which option that is bought, if a share there is within its promises."""
        o, numbers = self.options, buying.numbers
        placed = np.zeros(o.most.shape, dtype=bool)
        placed[:, numbers] = o.most[:, numbers] > 0
        if o.stored_per_type:
            has = np.zeros((len(placed), o.pairs), dtype=bool)
            for query, pair in buying.copies:
                has[query, pair] = True
            placed &= has[:, o.pair]
        return placed

    def fixed_usd(self, buying: Buying) -> float:
        """Rent and stored weights."""
        o = self.options
        rent = float(o.rent_usd[buying.numbers] @ buying.counts)
        if o.stored_per_type:
            return rent + sum(float(o.pair_usd[pair]) for _, pair in buying.copies)
        return rent + float(o.pair_usd[np.unique(o.pair[buying.numbers])].sum())

    # ---- what they cost

    def shares(self, buying: Buying) -> Assignment | None:
        """The best shares with nothing drawn; None where no shares keep the problem's limits."""
        if buying not in self._shares:
            self._shares[buying] = choose(
                self.options,
                buying.numbers.tolist(),
                time_limit_s=np.inf,
                bought=dict(buying.replicas),
                placed=self.placed(buying),
            )
        return self._shares[buying]

    def nominal(self, buying: Buying) -> tuple[float, Cut]:
        """The cost with nothing drawn but for budget, storage and what must be served, and what that proves."""
        o = self.options
        types = len(o.unserved_usd)
        drawn = Drawn(np.ones((1, types)), *np.ones((2, 1, *o.most.shape)))
        (one,) = self._operated(buying, drawn)
        constants, gains = self._proven(buying, [one], drawn)
        return self.fixed_usd(buying) + one.usd, Cut(float(constants[0]), gains[0])

    def costs(self, buying: Buying) -> Costs:
        """The second stage of every scenario, each type using what it has a share of as planned."""
        if buying not in self._costs:
            shares = self.shares(buying)
            each = self._operated(buying, self.drawn, None if shares is None else shares.shares > NEXT_TO_NOTHING)
            usd = self.fixed_usd(buying) + np.array([one.usd for one in each])
            constants, gains = self._proven(buying, each, self.drawn)
            weights = self._weights(usd)
            self._costs[buying] = Costs(
                usd=usd,
                unserved=np.array([one.unserved for one in each]),
                used=np.max([one.shares for one in each], axis=0) > SLACK,
                cut=Cut(float(weights @ constants), weights @ gains),
            )
        return self._costs[buying]

    def risk_usd(self, costs: Costs) -> float:
        """What counts of the costs: their mean, or the mean of the worst."""
        return float(self._weights(costs.usd) @ costs.usd)

    def _weights(self, usd: FloatArray) -> FloatArray:
        if self.robust.objective == "expected_cost":
            return np.full(len(usd), 1 / len(usd))
        return tail_weights(usd, self.robust.cvar_level)

    def _operated(self, buying: Buying, drawn: Drawn, placed: NDArray[np.bool_] | None = None) -> list[Operated]:
        o, numbers = self.options, buying.numbers
        # A type that may use one option of a pair may use all of them.
        ways = placed_pairs(o, self.placed(buying) if placed is None else placed)[:, o.pair[numbers]]
        operations = Operations(Placement(o.subset(numbers), buying.counts, ways, 0.0, 0.0))
        return [
            operations.solve(arrivals, delays[:, numbers], errors[:, numbers])
            for arrivals, delays, errors in zip(drawn.arrivals, drawn.delays, drawn.errors, strict=True)
        ]

    # ---- what they prove

    def _proven(self, buying: Buying, each: list[Operated], drawn: Drawn) -> tuple[FloatArray, FloatArray]:
        """(S,) constants and (S, O) gains of a replica: no buying costs less in a scenario, beside what is fixed."""
        o, decisions = self.options, self.options.problem.decisions
        prices = np.array([one.type_prices for one in each])
        demand, limits = prices[:, 0], np.minimum(prices[:, 1:], 0.0)
        error, delay, first = (limits[:, row, :, None] for row in range(3))
        times = drawn.arrivals if decisions.penalties == "per_request" else np.ones_like(drawn.arrivals)
        unserved_usd = o.unserved_usd * times
        left_usd = unserved_usd - demand - (limits.sum(axis=1) if o.served else 0.0)
        constants = (demand + limits.sum(axis=1) + np.minimum(left_usd, 0.0)).sum(axis=1)
        usd = (o.unit_usd - o.storage_usd[:, None]) * drawn.delays * times[:, :, None]
        units = demand[:, :, None] + error * o.error * drawn.errors + delay * o.delay * drawn.delays - usd
        if o.ttft is not None:
            units = units + first * o.ttft * drawn.delays
        if decisions.delay == "each":
            late = o.delay if o.ttft is None else np.maximum(o.delay, o.ttft)
            units = np.where(late * drawn.delays <= 1 + SLACK, units, 0.0)
        units = np.maximum(units, 0.0)
        load = o.load * drawn.arrivals[:, :, None]
        cache = np.zeros_like(load)
        if decisions.kv_memory == "littles_law":
            cache = o.cache * drawn.arrivals[:, :, None] * drawn.delays
        gains = np.minimum(_knapsack(units, load), _knapsack(units, cache))
        # Where an option is bought, its own prices may prove more.
        own = buying.numbers
        load_price, cache_price = np.maximum(-np.array([one.option_prices for one in each]), 0.0).transpose(1, 0, 2)
        beyond = units[:, :, own] - load_price[:, None] * load[:, :, own] - cache_price[:, None] * cache[:, :, own]
        gains[:, own] = np.minimum(gains[:, own], load_price + cache_price + np.maximum(beyond, 0.0).sum(axis=1))
        # Storage of what is served comes beside that: at most a part of what is paid for what is not.
        storage_usd = o.storage_usd * drawn.arrivals
        part = (storage_usd / np.maximum(unserved_usd, _NEXT_TO_ZERO)).max(axis=1)
        kept = np.where(part < 1, 1 - part, 1.0)
        constants = kept * constants + np.where(part < 1, storage_usd.sum(axis=1), 0.0)
        return constants, kept[:, None] * gains


def tail_weights(usd: FloatArray, level: float) -> FloatArray:
    """(S,) weights under which costs sum to the mean of the worst ``1 - level`` of them."""
    count = (1 - level) * len(usd)
    weights = np.empty(len(usd))
    weights[np.argsort(-usd, kind="stable")] = np.clip(count - np.arange(len(usd)), 0.0, 1.0) / count
    return weights


def _knapsack(gains: FloatArray, takes: FloatArray) -> FloatArray:
    """(S, O) the most of gains (S, I, O) that fits a capacity of 1, each share at most 1."""
    order = np.argsort(-gains / np.maximum(takes, _NEXT_TO_ZERO), axis=1)
    gains, takes = np.take_along_axis(gains, order, axis=1), np.take_along_axis(takes, order, axis=1)
    left = 1 - (np.cumsum(takes, axis=1) - takes)
    most: FloatArray = (gains * np.clip(left / np.maximum(takes, _NEXT_TO_ZERO), 0.0, 1.0)).sum(axis=1)
    return most
