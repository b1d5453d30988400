"""What a certificate of kind ``tree`` proves about an allocation problem, computed again from its prices.

Prices of the problem's limits, none negative, bound every answer from below: what an answer leaves of a limit is never
worth less than nothing, so its cost is at least that of its parts when each pays for what it takes of the limits. The
parts are then chosen each by itself: the cheapest pattern of each query type (`pattern_search`), the number of replicas
of each configuration, and whether the weights of each model on a tier are stored.

A tree of parts bounds better: each node holds the answers that its branches above leave, and the nodes without parts
together hold all. A node may close configurations: with one replica of such a one, all of the node's answers cost at
least so much that what is left need not hold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetplan.plan import BoundNode, Certificate, RowPrices
from hetplan.problem.allocation import AllocationProblem
from hetplan.verification.allocation_terms import Option, option_count, options_of, terms_of
from hetplan.verification.pattern_search import least_patterns
from hetplan.verification.tables import BoolArray, FloatArray

# Limits are this much wider here, so that rounding never leaves out an answer that keeps to them.
_LENIENT = 1e-12
_Find = Callable[[int], "int | None"]
# What rounding may add to a sum, as a share of the sum of its terms' sizes.
_ROUNDING = 1e-13


def proven_bound(problem: AllocationProblem, certificate: Certificate) -> float:
    """The lower bound on the objective that a certificate of kind "tree" proves.

    Parameters
    ----------
    problem : AllocationProblem
    certificate : Certificate

    Returns
    -------
    float
        The least bound of the parts that the tree leaves; infinite where it leaves none.

    Raises
    ------
    ValueError
        If the nodes are no tree, or prices or branches are not of the problem.
    """
    if certificate.kind != "tree":
        raise ValueError(f"a certificate of kind {certificate.kind}")
    nodes = certificate.nodes
    if not nodes:
        raise ValueError("a tree without nodes")
    bounder = _Bounder(problem)
    waiting: dict[int, _Part] = {0: bounder.everything()}
    proven = math.inf
    for number, node in enumerate(nodes):
        if number not in waiting:
            raise ValueError(f"nodes[{number}] is no part of another node")
        part = waiting.pop(number)
        try:
            least, parts = bounder.bound_node(node, part)
        except ValueError as error:
            raise ValueError(f"nodes[{number}]: {error}") from None
        proven = min(proven, least)
        for child, inside in zip(node.parts, parts, strict=True):
            if not number < child < len(nodes) or child in waiting:
                raise ValueError(f"nodes[{number}] has the part {child}; parts are later nodes, each of one node")
            waiting[child] = inside
    return proven


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of all answers: replicas of each configuration, and the use of it by types. Parts share arrays."""

    least: FloatArray  # (N,)
    most: FloatArray  # (N,)
    barred: BoolArray  # (I, N): the type does not use it
    paid: BoolArray  # (I, N): the type's copy of its weights is stored

    def with_most(self, columns: Any, most: float) -> _Part:
        """The same with at most so many replicas of some configurations."""
        changed = self.most.copy()
        changed[columns] = most
        return replace(self, most=changed)


@dataclass(frozen=True, slots=True)
class _Bound:
    """What prices prove: the bound, and what it rises by with a replica of each configuration more than none."""

    usd: float
    rise_usd: FloatArray  # (N,)


class _Bounder:
    """A problem's terms, and bounds by prices."""

    def __init__(self, problem: AllocationProblem) -> None:
        self.problem, self.decisions = problem, problem.decisions
        self.numbers = option_count(problem)
        options = _undominated(problem)
        terms = terms_of(problem, options)
        fits = (terms.weight_gb <= terms.memory_gb * (1 + _LENIENT)) & (
            terms.rent_usd <= problem.budget_usd * (1 + _LENIENT)
        )
        kept = np.flatnonzero(fits).tolist()
        self.options = [options[column] for column in kept]
        self.terms = terms = terms_of(problem, self.options)
        self.column = {one.number: column for column, one in enumerate(self.options)}
        queries = problem.query_types
        self.types, self.size = len(queries), len(self.options)
        pairs, self.pair = np.unique(terms.pair, return_inverse=True)
        self.pair = self.pair.astype(np.int64)
        self.pair_count = len(pairs)
        self.pair_of = {int(pair): index for index, pair in enumerate(pairs)}
        # A configuration of each pair, for what all of them share.
        self.any_of_pair = np.array([np.flatnonzero(self.pair == p)[0] for p in range(len(pairs))], dtype=np.int64)
        free = terms.memory_gb - terms.weight_gb
        takes_memory = terms.cache_gb > 0
        with np.errstate(divide="ignore", invalid="ignore"):
            self.cache = np.where(takes_memory, terms.cache_gb / free, 0.0)
        self.usable = ~(takes_memory & (free <= 0))
        delay = terms.delay_s / _column(query.delay_limit_s for query in queries)
        error = terms.error / _column(query.error_limit for query in queries)
        limits = [math.inf if query.ttft_limit_s is None else query.ttft_limit_s for query in queries]
        self.has_ttft = np.isfinite(limits)
        self.ttft = terms.ttft_s / _column(limits)
        served = self.decisions.slo_on == "served"
        unserved_mean = 0.0 if served else -1.0
        # Means, as what shares add to (mean / limit - 1). Where each configuration must keep a limit, the mean does.
        self.delay_mean = delay - 1.0 - _LENIENT
        if self.decisions.delay == "each":
            self.usable &= (self.delay_mean <= 0) & (self.ttft <= 1 + _LENIENT)
            self.delay_mean = np.full_like(self.delay_mean, -1.0)
        self.error_mean = error - 1.0 - _LENIENT
        self.unserved_means = np.full((self.types, 2), unserved_mean - _LENIENT)
        self.max_unserved = np.array([query.max_unserved for query in queries])
        self.stored_by_type = self.decisions.model_storage == "per_query_type"
        self.many = self.decisions.replicas == "many"

    def everything(self) -> _Part:
        """All answers; as many replicas as the budget rents."""
        with np.errstate(divide="ignore"):
            rented = np.floor(self.problem.budget_usd * (1 + _LENIENT) / self.terms.rent_usd)
        # Replicas beyond those that hold all of every type cost rent and allow nothing: some cheapest answer has none.
        held = np.ceil(np.maximum(self.terms.load.sum(axis=0), self.cache.sum(axis=0)) * (1 + _LENIENT))
        rented = np.minimum(rented, np.maximum(held, 1.0))
        none = np.zeros((self.types, self.size), dtype=np.bool_)
        most = rented if self.many else np.ones(self.size)
        return _Part(np.zeros(self.size), most, none, none)

    def bound_node(self, node: BoundNode, part: _Part) -> tuple[float, list[_Part]]:
        """The least cost of answers that the node's prices leave out or, without parts, of all; and its parts."""
        branches = [branch for branch in (node.replicas, node.copied) if branch is not None]
        if len(branches) > 1 or len(node.parts) != 2 * len(branches):
            raise ValueError(f"{len(node.parts)} parts by {len(branches)} branches; a node has two by one, or none")
        closed = [column for column in map(self.column_of, node.closed) if column is not None and part.most[column] > 0]
        least, left = math.inf, part
        if not self.empty(part) and (closed or not branches):
            if node.prices is None:
                raise ValueError("no prices; only a node with parts that closes nothing does without")
            bound = self.bound(node.prices, part)
            if closed:
                least = bound.usd + bound.rise_usd[closed].min().item()
                left = part.with_most(closed, 0.0)
            if not branches and not self.empty(left):
                least = min(least, self.bound(node.prices, left).usd if closed else bound.usd)
        return least, self.branched(node, left) if branches else []

    def column_of(self, number: int) -> int | None:
        """Of a configuration; None where no answer needs it."""
        if number >= self.numbers:
            raise ValueError(f"configuration {number}; the last is {self.numbers - 1}")
        return self.column.get(number)

    def branched(self, node: BoundNode, part: _Part) -> list[_Part]:
        """The node's two parts."""
        nothing = part.with_most(slice(None), -1.0)
        if node.replicas is not None:
            column, count = self.column_of(node.replicas[0]), node.replicas[1]
            if column is None:
                # No answer that is looked at buys it.
                return [part, nothing]
            second = part
            if not self.many:
                others = self.pair == self.pair[column]
                others[column] = False
                second = part.with_most(others, 0.0)
            least = second.least.copy()
            least[column] = max(least[column], count + 1)
            return [part.with_most(column, min(part.most[column], count)), replace(second, least=least)]
        i, number = node.copied or (0, 0)
        column = self.column_of(number)
        if not self.stored_by_type:
            raise ValueError("a branch on a type's copy of weights; this problem stores them once")
        if i >= self.types:
            raise ValueError(f"query type {i}; the last is {self.types - 1}")
        if column is None:
            return [nothing, part]
        paid, barred = part.paid.copy(), part.barred.copy()
        paid[i, column] = barred[i, column] = True
        return [replace(part, paid=paid), replace(part, barred=barred)]

    def empty(self, part: _Part) -> bool:
        """Whether no answer is left: more replicas than allowed, or than the budget rents."""
        rent = float(part.least @ self.terms.rent_usd)
        return bool((part.least > part.most).any()) or rent > self.problem.budget_usd * (1 + _LENIENT)

    def bound(self, prices: RowPrices, part: _Part) -> _Bound:
        """What prices prove of the answers in a part."""
        with np.errstate(all="ignore"):
            return self._bound(prices, part)

    def _bound(self, prices: RowPrices, part: _Part) -> _Bound:
        problem, terms = self.problem, self.terms
        link = self.rows(prices.link, self.column_of, self.size)
        pair_link = self.rows(prices.pair_link, self.pair_column_of, self.pair_count)
        load, cache = self.values(prices.load, self.column_of), self.values(prices.cache, self.column_of)
        ttft, unserved = self.of_types(prices.ttft), self.of_types(prices.unserved)
        if (ttft[~self.has_ttft] > 0).any():
            raise ValueError("a price of a time to first token that has no limit")
        if prices.pair_link and (self.stored_by_type or not self.many):
            raise ValueError("prices of stored weights; this problem stores them with a configuration or for each type")
        # What a dollar of rent or storage, and a gigabyte of it, cost with the prices of budget and storage.
        dollar, gigabyte = 1.0 + prices.budget / problem.budget_usd, prices.storage / problem.storage_capacity_gb
        copy = dollar * terms.copy_usd + gigabyte * terms.copy_gb
        spared = self.spared(prices, part, copy)
        unit = terms.delay_usd + load * terms.load + cache * self.cache + ttft[:, None] * self.ttft
        unit += (dollar * terms.traffic_usd + gigabyte * terms.traffic_gb)[:, None]
        fixed, pair_fixed = link, pair_link
        if self.stored_by_type and self.many:
            # A type's copy is of the model on the tier, whichever of its configurations it uses.
            prepaid = np.zeros((self.types, self.pair_count))
            np.add.at(prepaid.T, self.pair, spared.T)
            whole = copy[self.any_of_pair]
            if (prepaid > whole * (1 + _LENIENT)).any():
                raise ValueError("more of a copy is paid in any case than it costs")
            pair_fixed = np.maximum(whole - prepaid, 0.0)
        elif self.stored_by_type:
            fixed = link + np.maximum(copy - spared, 0.0)
        served = self.decisions.slo_on == "served"
        left_out = terms.unserved_usd + unserved + (ttft if served else 0.0)
        patterns = least_patterns(
            self.usable & ~part.barred & (part.most > 0),
            np.ascontiguousarray(fixed),
            self.pair,
            np.ascontiguousarray(pair_fixed),
            np.ascontiguousarray(np.where(self.usable, unit, 0.0)),
            self.delay_mean,
            self.error_mean,
            np.column_stack([left_out, self.unserved_means]),
        )
        own = dollar * terms.rent_usd
        if not self.many and not self.stored_by_type:
            own = own + copy
        linked = link.sum(axis=0)
        cost = own - linked - load - cache
        bought, rise, most_bought = self._replicas(cost, part)
        weights = 0.0
        if self.many and not self.stored_by_type:
            weights = self._weights(copy[self.any_of_pair] - pair_link.sum(axis=0), part)
        paid = prices.budget + prices.storage + ttft.sum() + float(unserved @ self.max_unserved)
        usd = math.fsum([*patterns.tolist(), *bought.tolist(), weights, float(spared.sum()), -paid])
        size = np.abs(patterns).sum() + ((own + linked + load + cache) * most_bought).sum() + paid
        size += (copy[self.any_of_pair]).sum() + pair_link.sum() + spared.sum()
        usd -= _ROUNDING * float(size)
        if math.isnan(usd):
            raise ValueError("prices so large that their sums are no numbers")
        return _Bound(usd, rise)

    def _replicas(self, cost: FloatArray, part: _Part) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Least costs of replicas, what one more than none adds, and how many there are where it is least."""
        if self.many:
            count = np.where(cost < 0, part.most, part.least)
            # Where one is bought already, or pays for itself, one more than none adds nothing.
            rise = np.where(part.least > 0, 0.0, np.maximum(cost, 0.0))
            return np.where(count > 0, cost * count, 0.0), rise, count
        least, rise, count = np.zeros(self.pair_count), np.zeros(self.size), np.zeros(self.size)
        for p in range(self.pair_count):
            members = np.flatnonzero((self.pair == p) & (part.most > 0))
            bought = members[part.least[members] > 0]
            if len(bought):
                chosen = bought[0]
            elif len(members) and cost[members].min() < 0:
                chosen = members[cost[members].argmin()]
            else:
                rise[members] = cost[members]
                continue
            least[p], count[chosen] = cost[chosen], 1.0
            # With another one of a pair bought already there is no answer, and nothing to add.
            rise[members] = np.maximum(cost[members] - cost[chosen], 0.0) if not len(bought) else 0.0
        return least, rise, count

    def _weights(self, cost: FloatArray, part: _Part) -> float:
        """Least costs of storing the weights of pairs, which those that are bought do."""
        stored, storable = np.zeros(self.pair_count, dtype=np.bool_), np.zeros(self.pair_count, dtype=np.bool_)
        stored[self.pair[part.least > 0]] = True
        storable[self.pair[part.most > 0]] = True
        return float(cost[stored].sum() + np.minimum(cost[storable & ~stored], 0.0).sum())

    def spared(self, prices: RowPrices, part: _Part, copy: FloatArray) -> FloatArray:
        """(I, N): what types' uses of configurations are spared of their copies, which are paid in any case."""
        spared = np.zeros((self.types, self.size))
        if prices.spared and not self.stored_by_type:
            raise ValueError("a type's copy of weights is priced; this problem stores them once")
        for i, number, price in prices.spared:
            column = self.column_of(number)
            if i >= self.types:
                raise ValueError(f"query type {i}; the last is {self.types - 1}")
            if column is None or not part.paid[i, column]:
                raise ValueError(f"query type {i} is spared configuration {number}, whose copy no branch pays")
            if spared[i, column] > 0 or not price <= copy[column] * (1 + _LENIENT):
                raise ValueError(f"query type {i} is spared {price} of configuration {number}; its copy costs less")
            spared[i, column] = min(price, copy[column])
        return spared

    def pair_column_of(self, pair: int) -> int | None:
        last = len(self.problem.models) * len(self.problem.tiers) - 1
        if pair > last:
            raise ValueError(f"model on tier {pair}; the last is {last}")
        return self.pair_of.get(pair)

    def rows(self, listed: Iterable[tuple[int, tuple[float, ...]]], find: _Find, size: int) -> FloatArray:
        """(I, size): listed prices of each type."""
        table = np.zeros((self.types, size))
        seen = set()
        for number, row in listed:
            column = find(number)
            if len(row) != self.types or number in seen:
                raise ValueError(f"{len(row)} prices of {number}; one for each of {self.types} query types, once")
            seen.add(number)
            if column is not None:
                table[:, column] = row
        return table

    def values(self, listed: Iterable[tuple[int, float]], find: _Find) -> FloatArray:
        """(N,): a listed price of each configuration."""
        return self._once(listed, find, self.size)

    def of_types(self, listed: Iterable[tuple[int, float]]) -> FloatArray:
        """(I,): a listed price of each type."""

        def find(i: int) -> int:
            if i >= self.types:
                raise ValueError(f"query type {i}; the last is {self.types - 1}")
            return i

        return self._once(listed, find, self.types)

    @staticmethod
    def _once(listed: Iterable[tuple[int, float]], find: _Find, size: int) -> FloatArray:
        table, seen = np.zeros(size), set()
        for number, price in listed:
            column = find(number)
            if number in seen:
                raise ValueError(f"two prices of {number}")
            seen.add(number)
            if column is not None:
                table[column] = price
        return table


def _column(values: Iterable[float]) -> FloatArray:
    return np.array(list(values), dtype=np.float64)[:, None]


def _undominated(problem: AllocationProblem) -> list[Option]:
    """All configurations but those that another one replaces in every answer.

    By the formulas, more tensor parallelism on as many GPUs means fewer stages: computation is split further and fewer
    sends are waited for, so delay and time to first token are no longer, and with them the delay penalty and the cache
    of requests in flight are no larger; rent, compute, weights, errors and the model on its tier are the same. Replicas
    of both, merged, hold what both held.
    """
    options = list(options_of(problem))
    if problem.configurations:
        return options
    largest: dict[tuple[int, int, int], Option] = {}
    for one in options:
        key = (one.model, one.tier, one.gpus)
        if key not in largest or one.tensor_parallel > largest[key].tensor_parallel:
            largest[key] = one
    return sorted(largest.values(), key=lambda one: one.number)
