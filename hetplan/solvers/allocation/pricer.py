"""What prices of the rows of `master` make of options and patterns, and the bound that they prove.

Any prices that are not negative bound the problem from below: by each type's cheapest pattern, and by options and pairs
that cost less than what their rows pay. The same holds for a part of all answers, which `Restrictions` describe.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.solvers.allocation.options import FloatArray, IntArray, Options


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of the rows, none negative, for the options of a problem.

    ``link`` (I, O), ``pair_link`` (I, P), ``load`` and ``cache`` (O,), ``ttft`` and ``unserved`` (I,), ``budget`` and
    ``storage`` in dollars for the whole limit. ``copy`` (I, O): what a type's use of an option is spared where its copy
    of the weights is paid for in any case.
    """

    link: FloatArray
    copy: FloatArray
    pair_link: FloatArray
    load: FloatArray
    cache: FloatArray
    ttft: FloatArray
    unserved: FloatArray
    budget: float
    storage: float

    def subset(self, keep: IntArray) -> Prices:
        """Those of some options."""
        return Prices(
            self.link[:, keep], self.copy[:, keep], self.pair_link, self.load[keep], self.cache[keep], self.ttft,
            self.unserved, self.budget, self.storage,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Restrictions:
    """What a branch allows: replicas of each option, and options that a type may use or has paid for.

    ``least``, ``most`` (O,) replicas. ``barred`` and ``paid`` (I, O): the type does not use the option; the type's copy
    of the weights is stored, used or not (where weights are stored for each type).
    """

    least: IntArray
    most: IntArray
    barred: NDArray[np.bool_]
    paid: NDArray[np.bool_]

    @classmethod
    def none(cls, options: Options) -> Restrictions:
        shape = options.most.shape
        return cls(
            np.zeros(options.count, dtype=np.int64), options.most_replicas(),
            np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool),
        )  # fmt: skip

    def subset(self, keep: IntArray) -> Restrictions:
        """Of some options."""
        return Restrictions(self.least[keep], self.most[keep], self.barred[:, keep], self.paid[:, keep])


class Pricer:
    """What patterns, options and pairs cost at given prices of the rows."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.budget_usd = options.problem.budget_usd
        self.storage_gb = options.problem.storage_capacity_gb
        # What a type stores once more for each option that it uses.
        self.copy_usd = options.pair_usd[options.pair] if options.stored_per_type else np.zeros(options.count)
        self.copy_gb = options.pair_gb[options.pair] if options.stored_per_type else np.zeros(options.count)

    def stored(self, prices: Prices) -> FloatArray:
        """(P,) what a pair's stored weights cost at prices of budget and storage."""
        o = self.options
        dollar, gigabyte = 1 + prices.budget / self.budget_usd, prices.storage / self.storage_gb
        return np.asarray(dollar * o.pair_usd + gigabyte * o.pair_gb)

    def copies(self, budget: float, storage: float) -> FloatArray:
        """(O,) what a type's own copy of an option's weights costs at prices of budget and storage."""
        return np.asarray((1 + budget / self.budget_usd) * self.copy_usd + storage / self.storage_gb * self.copy_gb)

    def units(self, prices: Prices, budget: float, storage: float) -> FloatArray:
        """(I, O) what all of a type costs on an option, its shares of the rows included."""
        o = self.options
        unit = o.unit_usd + prices.load * o.load + (budget * o.storage_usd + storage * o.storage_gb)[:, None]
        used = prices.cache > 0
        if used.any():
            unit[:, used] += prices.cache[used] * o.cache[:, used]
        if o.ttft is not None:
            unit += prices.ttft[:, None] * o.ttft
        return unit

    def tables(self, prices: Prices, within: Restrictions) -> Tables:
        """Prices of using options, of their pairs and of units, one column more for leaving the type unserved."""
        o = self.options
        budget, storage = prices.budget / self.budget_usd, prices.storage / self.storage_gb
        copies = self.copies(prices.budget, prices.storage)
        spared = np.where(within.paid, np.minimum(prices.copy, copies), 0.0)
        # The copy of a pair, whichever of its options are used: where there may be several, once for all of them.
        copy = copies - spared
        fixed, pair_fixed = prices.link + copy, prices.pair_link[:, o.pair]
        if o.many and o.stored_per_type:
            of_pair = np.zeros((len(spared), o.pairs))
            np.add.at(of_pair.T, o.pair, spared.T)
            fixed, pair_fixed = prices.link, np.maximum(copies - of_pair[:, o.pair], 0.0)
        usable = (o.most > 0) & ~within.barred & (within.most > 0)
        delay = np.where(usable, 0.0 if o.problem.decisions.delay == "each" else o.delay, np.inf)
        none = np.zeros((len(o.unserved_usd), 1))
        aside = none + (1.0 if o.served else 0.0)
        # More may be left unserved than is allowed: its price says otherwise.
        left = (o.unserved_usd + prices.unserved)[:, None]
        if o.ttft is not None and o.served:
            left = left + prices.ttft[:, None]
        return Tables(
            np.hstack([fixed, none]),
            np.hstack([pair_fixed, none]),
            np.hstack([self.units(prices, budget, storage), left]),
            np.hstack([delay, aside]),
            np.hstack([o.error, aside]),
            np.append(o.pair, o.pairs).astype(np.int64),
            float(spared.sum()),
        )

    def replicas(self, prices: Prices) -> FloatArray:
        """(O,) what a replica costs beside what its rows pay."""
        o = self.options
        own = o.rent_usd * (1 + prices.budget / self.budget_usd)
        if not o.many and not o.stored_per_type:
            own = own + self.stored(prices)[o.pair]
        return np.asarray(own - prices.link.sum(axis=0) - prices.load - prices.cache)

    def weights(self, prices: Prices) -> FloatArray:
        """(P,) what a pair's stored weights cost beside what its rows pay."""
        o = self.options
        if not (o.many and not o.stored_per_type):
            return np.zeros(o.pairs)
        return np.asarray(self.stored(prices) - prices.pair_link.sum(axis=0))

    def bound(self, prices: Prices, within: Restrictions, least: FloatArray, paid_usd: float) -> float:
        """What prices prove, given each type's cheapest pattern."""
        o = self.options
        cost = self.replicas(prices)
        if o.many:
            chosen = float(np.where(cost >= 0, cost * within.least, cost * within.most).sum())
        else:
            # At most one of a pair; one that must be bought leaves no choice.
            must = within.least > 0
            free = np.where((within.most > 0) & ~must, np.minimum(cost, 0.0), 0.0)
            free[np.isin(o.pair, o.pair[must])] = 0.0
            least_of_pair = np.zeros(o.pairs)
            np.minimum.at(least_of_pair, o.pair, free)
            chosen = float(least_of_pair.sum() + cost[must].sum())
        weights = self.weights(prices)
        stored = float(np.minimum(weights, 0.0).sum())
        if o.many:
            must_store = np.zeros(o.pairs, dtype=bool)
            must_store[o.pair[within.least > 0]] = True
            stored += float(np.maximum(weights[must_store], 0.0).sum())
        limits = prices.budget + prices.storage + float(prices.ttft.sum() + prices.unserved @ o.max_unserved)
        return float(least.sum()) + chosen + stored + paid_usd - limits

    def one_more(self, prices: Prices, within: Restrictions) -> FloatArray:
        """(O,) by how much the bound rises when an option that the bound leaves out must be bought."""
        o, cost = self.options, self.replicas(prices)
        if o.many:
            return np.maximum(cost, 0.0)
        least_of_pair, allowed = np.zeros(o.pairs), within.most > 0
        np.minimum.at(least_of_pair, o.pair[allowed], np.minimum(cost[allowed], 0.0))
        return np.asarray(cost - least_of_pair[o.pair])


@dataclass(frozen=True, slots=True)
class Tables:
    """(I, O + 1) what patterns pay for options and units; the last column is of the unserved share."""

    fixed: FloatArray
    pair_fixed: FloatArray
    unit: FloatArray
    delay: FloatArray
    error: FloatArray
    pair: IntArray
    paid_usd: float
