"""The linear program over patterns, and the bound that its prices prove.

A column is a pattern of one type (`patterns`), a replica of an option, or the stored weights of a pair. Rows: each type
takes one pattern in all; what takes patterns with an option is bought whole (and its weights are stored); an option's
replicas hold what is put on them; budget and storage. `pricer` says what prices of the rows prove.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetplan.solvers import threads
from hetplan.solvers.allocation.options import FloatArray, IntArray, Options
from hetplan.solvers.allocation.patterns import cheapest_in_part, cheapest_patterns, cheapest_with
from hetplan.solvers.allocation.pricer import Pricer, Prices, Restrictions, Tables
from hetplan.solvers.highs import GrowingLinear

# Patterns of a type that one pricing adds at most, and options.
_PATTERNS, _OPTIONS = 8, 20
# The part of what an option outside costs that its types are asked for; the rest tells whether it can be closed.
_SPREAD = 0.5
# The part of what a value lacks to the cutoff that its bound may lack to the value.
_LOOSE = 0.1
# What passing a limit by its whole costs, in budgets and costs of dropping all traffic.
_BEYOND = 100.0
# The share of its value to which a program is solved while options are still to come.
_ROUGH = 3e-3
# Options up to which every three are tried; the bound with more of them lets patterns pay for parts.
_MOST_TRIED = 4000
# How often options outside are asked for more, before the bound is taken as it is.
_ROUNDS = 40
# Seconds for the first program of a node, however late it is.
_FIRST_S = 5.0
# A pattern is added when it is cheaper than the type's price by this share.
_CHEAPER = 1e-7


@dataclass(slots=True)
class Pattern:
    """Options (by their number in the whole problem; -1 for unserved) and shares of one type."""

    query: int
    members: tuple[int, ...]
    shares: tuple[float, ...]


@dataclass(slots=True)
class Found:
    """Where a linear program ended."""

    bound: float
    value: float
    prices: Prices
    replicas: FloatArray
    # (I, O) shares of the patterns in use, and of what types use at all.
    shares: FloatArray
    used: FloatArray


class Master:
    """The linear program over some options of a problem; options and patterns join it as they are found.

    ``chosen`` lists the options in it by their number in the whole problem.
    """

    def __init__(self, options: Options) -> None:
        o = self.options = options
        self.chosen: list[int] = []
        self.patterns: list[Pattern] = []
        self._queries = len(o.unserved_usd)
        self._lp = GrowingLinear()
        self._rows = 0
        self._columns = 0
        self._known: set[tuple[int, tuple[int, ...], tuple[float, ...]]] = set()
        self._at: dict[int, int] = {}
        self._pair_at: dict[int, int] = {}
        # What a limit is passed by costs so much that no answer does: the program always has a solution, with prices.
        self.beyond_usd = _BEYOND * (o.problem.budget_usd + float(o.unserved_usd.sum()))
        # One row a type; budget and storage in shares of their limits.
        self._take = self._add_rows(np.ones(self._queries), np.ones(self._queries))
        self._budget, self._storage = self._add_rows(np.full(2, -np.inf), np.ones(2)).tolist()
        self._ttft = (
            self._add_rows(np.full(self._queries, -np.inf), np.ones(self._queries)) if o.ttft is not None else None
        )
        self._unserved = self._add_rows(np.full(self._queries, -np.inf), o.max_unserved)
        for row in (self._budget, self._storage, *self._unserved.tolist()):
            self._add_column(self.beyond_usd, np.inf, [row], [-1.0])
        self._links: list[IntArray] = []
        self._load_rows: list[int] = []
        self._cache_rows: list[int] = []
        self._replica_columns: list[int] = []
        self._one_rows: dict[int, int] = {}
        self._pair_links: list[IntArray] = []
        self._pair_columns: list[int] = []
        self._pattern_columns: list[int] = []
        # Of a type and an option: the row that pays its copy in any case.
        self._copies: dict[tuple[int, int], int] = {}
        self._stored_apart = o.many and not o.stored_per_type
        self._pricer = Pricer(o)

    def _add_rows(self, lower: FloatArray, upper: FloatArray) -> IntArray:
        self._lp.add_rows(lower, upper)
        self._rows += len(lower)
        return np.arange(self._rows - len(lower), self._rows)

    def _add_column(self, cost: float, upper: float, rows: Sequence[int], values: Sequence[float]) -> int:
        self._lp.add_columns(
            np.array([cost]), np.array([upper]), np.array([0]), np.array(rows, dtype=np.int64), np.array(values)
        )
        self._columns += 1
        return self._columns - 1

    def add_option(self, number: int) -> None:
        """An option joins, with its rows."""
        o, queries = self.options, self._queries
        if number in self._at:
            return
        pair = int(o.pair[number])
        rent, budget_usd, storage_gb = float(o.rent_usd[number]), o.problem.budget_usd, o.problem.storage_capacity_gb
        links = self._add_rows(np.full(queries + 2, -np.inf), np.zeros(queries + 2))
        rows, values = [*links.tolist(), self._budget], [-1.0] * (queries + 2) + [rent / budget_usd]
        cost = rent
        if not o.many:
            if pair not in self._one_rows:
                self._one_rows[pair] = int(self._add_rows(np.array([-np.inf]), np.ones(1))[0])
            rows.append(self._one_rows[pair])
            values.append(1.0)
            if not o.stored_per_type:
                cost += float(o.pair_usd[pair])
                values[queries + 2] += float(o.pair_usd[pair]) / budget_usd
                rows.append(self._storage)
                values.append(float(o.pair_gb[pair]) / storage_gb)
        self._at[number] = len(self.chosen)
        self.chosen.append(number)
        self._links.append(links[:queries])
        self._load_rows.append(int(links[queries]))
        self._cache_rows.append(int(links[queries + 1]))
        self._replica_columns.append(self._add_column(cost, np.inf, rows, values))
        if self._stored_apart and pair not in self._pair_at:
            rows_of_pair = self._add_rows(np.full(queries, -np.inf), np.zeros(queries))
            self._pair_at[pair] = len(self._pair_links)
            self._pair_links.append(rows_of_pair)
            self._pair_columns.append(
                self._add_column(
                    float(o.pair_usd[pair]),
                    1.0,
                    [*rows_of_pair.tolist(), self._budget, self._storage],
                    [-1.0] * queries + [float(o.pair_usd[pair]) / budget_usd, float(o.pair_gb[pair]) / storage_gb],
                )
            )

    def add_pattern(self, pattern: Pattern) -> bool:
        """A pattern joins; False where it is there already."""
        o, p = self.options, self._pricer
        # Two options may be mixed at either end of what their limits allow.
        key = (pattern.query, pattern.members, tuple(round(share, 9) for share in pattern.shares))
        if key in self._known:
            return False
        self._known.add(key)
        i, cost = pattern.query, 0.0
        terms: dict[int, float] = {int(self._take[i]): 1.0}

        def put(row: int, value: float) -> None:
            if value:
                terms[row] = terms.get(row, 0.0) + value

        copied: set[int] = set()
        for number, share in zip(pattern.members, pattern.shares, strict=True):
            if number < 0:
                cost += share * float(o.unserved_usd[i])
                put(int(self._unserved[i]), share)
                if self._ttft is not None and o.served:
                    put(int(self._ttft[i]), share)
                continue
            at = self._at[number]
            first = int(o.pair[number]) not in copied
            copied.add(int(o.pair[number]))
            copy_usd, copy_gb = (float(p.copy_usd[number]), float(p.copy_gb[number])) if first else (0.0, 0.0)
            cost += share * float(o.unit_usd[i, number]) + copy_usd
            put(int(self._links[at][i]), 1.0)
            put(self._load_rows[at], share * float(o.load[i, number]))
            put(self._cache_rows[at], share * float(o.cache[i, number]))
            put(self._budget, (share * float(o.storage_usd[i]) + copy_usd) / p.budget_usd)
            put(self._storage, (share * float(o.storage_gb[i]) + copy_gb) / p.storage_gb)
            if self._ttft is not None and o.ttft is not None:
                put(int(self._ttft[i]), share * float(o.ttft[i, number]))
        for (query, other), row in self._copies.items():
            if query == i and int(o.pair[other]) in copied:
                put(row, 1.0)
        if self._stored_apart:
            for pair in {int(o.pair[number]) for number in pattern.members if number >= 0}:
                put(int(self._pair_links[self._pair_at[pair]][i]), 1.0)
        self._pattern_columns.append(self._add_column(cost, np.inf, list(terms), list(terms.values())))
        self.patterns.append(pattern)
        return True

    def _pay_copy(self, query: int, number: int) -> None:
        """A row and a column with which a type's copy of an option's weights is paid, used or not."""
        p = self._pricer
        usd, gb = float(p.copy_usd[number]), float(p.copy_gb[number])
        users = [
            column
            for column, pattern in zip(self._pattern_columns, self.patterns, strict=True)
            if pattern.query == query
            and any(other >= 0 and self.options.pair[other] == self.options.pair[number] for other in pattern.members)
        ]
        self._lp.add_row(-np.inf, np.inf, users, [1.0] * len(users))
        row, self._rows = self._rows, self._rows + 1
        # What is not used is paid all the same.
        self._add_column(usd, 1.0, [row, self._budget, self._storage], [1.0, usd / p.budget_usd, gb / p.storage_gb])
        self._copies[query, number] = row

    def restrict(self, within: Restrictions) -> None:
        """Limits of a branch on the columns that are there."""
        for at, number in enumerate(self.chosen):
            self._lp.set_bounds(self._replica_columns[at], float(within.least[number]), float(within.most[number]))
        for query, number in np.argwhere(within.paid).tolist():
            if (query, number) not in self._copies:
                self._pay_copy(query, number)
        for (query, number), row in self._copies.items():
            self._lp.set_row(row, 1.0 if within.paid[query, number] else -np.inf, np.inf)
        if self._stored_apart:
            stored = {int(self.options.pair[number]) for number in self.chosen if within.least[number] > 0}
            for pair, at in self._pair_at.items():
                self._lp.set_bounds(self._pair_columns[at], 1.0 if pair in stored else 0.0, 1.0)
        for column, pattern in zip(self._pattern_columns, self.patterns, strict=True):
            barred = any(n >= 0 and within.barred[pattern.query, n] for n in pattern.members)
            self._lp.set_bounds(column, 0.0, 0.0 if barred else np.inf)

    def prices(self, duals: FloatArray) -> Prices:
        """Duals of the rows, as prices for all options of the problem; 0 for those that are not in it."""
        o, queries = self.options, self._queries
        link, pair_link = np.zeros((queries, o.count)), np.zeros((queries, o.pairs))
        load, cache = np.zeros(o.count), np.zeros(o.count)
        paid = np.maximum(-duals, 0.0)
        if self.chosen:
            link[:, self.chosen] = paid[np.array(self._links)].T
            load[self.chosen], cache[self.chosen] = paid[self._load_rows], paid[self._cache_rows]
        for pair, at in self._pair_at.items():
            pair_link[:, pair] = paid[self._pair_links[at]]
        copy = np.zeros((queries, o.count))
        budget, storage = float(paid[self._budget]), float(paid[self._storage])
        copies = self._pricer.copies(budget, storage)
        for (query, number), row in self._copies.items():
            copy[query, number] = min(max(float(duals[row]), 0.0), float(copies[number]))
        ttft = paid[self._ttft] if self._ttft is not None else np.zeros(queries)
        return Prices(
            link, copy, pair_link, load, cache, ttft, paid[self._unserved], budget, storage,
        )  # fmt: skip

    def solve(
        self, within: Restrictions, cutoff: float, *, tolerance: float = 1e-7, deadline: float = np.inf
    ) -> Found | None:
        """Add patterns and options until none is cheaper, or the bound passes ``cutoff``.

        ``tolerance`` is the share of the value to which the bound must come. None where nothing is feasible within the
        restrictions, or time is over before there is a bound.
        """
        self.restrict(within)
        best: Found | None = None
        allowed = within.most > 0
        # While options are still to come, prices need not be exact.
        fine, before = len(np.setdiff1d(np.flatnonzero(allowed), self.chosen)) == 0, np.inf
        while True:
            # Late as it may be, the first program is solved: its prices bound something.
            found = self._lp.solve(max(deadline - time.monotonic(), _FIRST_S if best is None else 0.0))
            if found is None:
                return best
            over = time.monotonic() >= deadline
            chosen = np.array(self.chosen, dtype=np.int64)
            pricer, inside = Pricer(self.options.subset(chosen)), within.subset(chosen)
            whole = self.prices(found.prices)
            prices = whole.subset(chosen)
            tables = pricer.tables(prices, inside)
            duals = found.prices[self._take]
            rough = 0.0 if fine else _ROUGH * max(abs(found.objective), 1e-9)
            gained, before = before - found.objective, found.objective
            # Patterns of three options are looked for when those of fewer are all known.
            if self._price(tables, duals, chosen, three=False)[0] and gained > rough / 10 and not over:
                continue
            added, least = self._price(tables, duals, chosen, three=True)
            # Below the cutoff the node is divided in any case: its bound need not be close.
            loose = _LOOSE * max(cutoff - found.objective, 0.0) if cutoff < np.inf else 0.0
            near = max(tolerance * max(abs(found.objective), 1e-9), loose, rough)
            inner = pricer.bound(prices, inside, least, tables.paid_usd)
            if added and found.objective - inner > near and inner < cutoff and not over:
                continue
            outside = np.setdiff1d(np.flatnonzero(allowed), chosen)
            if len(outside):
                # As patterns inside: those of three when there is no other news.
                for three in (False, True):
                    asked, gains = self._outside(whole, within, chosen, outside, least, three=three)
                    first = np.argsort(gains)[:_OPTIONS]
                    missing = outside[first[gains[first] < -near / 4]]
                    if len(missing) or time.monotonic() >= deadline:
                        break
                whole = asked
                over = over or time.monotonic() >= deadline
                if not fine and not over:
                    fine = not len(missing)
                    before = np.inf
                    if fine:
                        continue
                elif over or not len(missing):
                    whole, bound, missing = self._whole_bound(whole, within, outside, gains, least, near)
                if len(missing) and not over:
                    for number in missing.tolist():
                        self.add_option(number)
                    self.restrict(within)
                    continue
            else:
                bound = inner
            if best is None or bound > best.bound:
                best = Found(bound, found.objective, whole, *self._used(found.values))
            if best.bound >= cutoff or found.objective - best.bound <= near:
                break
            if not added or over:
                break
        return best

    def _used(self, values: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Replicas, shares, and how far types use options, in a solution."""
        o = self.options
        replicas = np.zeros(o.count)
        for number, column in zip(self.chosen, self._replica_columns, strict=True):
            # Options that joined since have no value.
            replicas[number] = values[column] if column < len(values) else 0.0
        shares, used = np.zeros(o.most.shape), np.zeros(o.most.shape)
        for column, pattern in zip(self._pattern_columns, self.patterns, strict=True):
            if column < len(values) and values[column] > 1e-9:
                for number, share in zip(pattern.members, pattern.shares, strict=True):
                    if number >= 0:
                        shares[pattern.query, number] += values[column] * share
                        used[pattern.query, number] += values[column]
        return replicas, shares, used

    def _outside(
        self,
        prices: Prices,
        within: Restrictions,
        chosen: IntArray,
        outside: IntArray,
        least: FloatArray,
        *,
        three: bool,
    ) -> tuple[Prices, FloatArray]:
        """Prices for options outside too, such that hardly a pattern with them is cheaper, and what they cost then."""
        o = self.options
        pricer = Pricer(o)
        link, load = prices.link.copy(), prices.load.copy()

        def needed(tables: Tables) -> FloatArray:
            inside = np.append(chosen, o.count)

            def of_type(i: int) -> FloatArray:
                found: FloatArray = least[i] - cheapest_with(
                    tables.fixed[i, outside] - prices.link[i, outside], tables.unit[i, outside],
                    tables.delay[i, outside], tables.error[i, outside], tables.fixed[i, inside],
                    tables.unit[i, inside], tables.delay[i, inside], tables.error[i, inside], least[i], three,
                )  # fmt: skip
                return found

            return np.maximum(np.stack(threads.each(of_type, range(self._queries))), 0.0)

        need = needed(pricer.tables(prices, within))
        # What cannot all be on one replica pays for its load there.
        own_load = o.load[:, outside]
        order = np.argsort(-need / own_load, axis=0)
        filled = np.cumsum(np.take_along_axis(np.where(need > 0, own_load, 0.0), order, 0), axis=0)
        marginal = np.take_along_axis(need / own_load, order, 0)
        over = filled > 1
        if over.any():
            at = np.argmax(over, axis=0)
            load[outside] = np.where(over.any(axis=0), np.take_along_axis(marginal, at[None], 0)[0], 0.0)
            need = needed(pricer.tables(replace(prices, load=load), within))
        link[:, outside] = need
        gains = pricer.replicas(replace(prices, link=link, load=load))[outside]
        # What an option costs beyond that is asked of the types in part: then few patterns with it need a look.
        share = np.maximum(least, 0.0) / max(float(np.maximum(least, 0.0).sum()), 1e-12)
        link[:, outside] += _SPREAD * np.maximum(gains, 0.0) * share[:, None]
        return replace(prices, link=link, load=load), gains

    def _whole_bound(
        self,
        prices: Prices,
        within: Restrictions,
        outside: IntArray,
        gains: FloatArray,
        inside_least: FloatArray,
        near: float,
    ) -> tuple[Prices, float, IntArray]:
        """Prices and bound with every option that is allowed, and options that would have to join for a better one.

        Patterns of several options outside may cost less than a type's cheapest inside: one of them is asked for the
        difference, as long as what it costs beyond its rows pays for that.
        """
        o = self.options
        allowed = np.flatnonzero(within.most > 0)
        pricer, inside = Pricer(o.subset(allowed)), within.subset(allowed)
        place = np.full(o.count, -1, dtype=np.int64)
        place[allowed] = np.arange(len(allowed))
        if len(allowed) > _MOST_TRIED:
            prices = self._afforded(prices)
            some = prices.subset(allowed)
            tables = pricer.tables(some, inside)

            def in_part(i: int) -> float:
                return float(
                    cheapest_in_part(
                        tables.fixed[i], tables.pair_fixed[i], tables.unit[i], tables.delay[i], tables.error[i]
                    )
                )

            least = np.array(threads.each(in_part, range(self._queries)))
            return prices, pricer.bound(some, inside, least, tables.paid_usd), allowed[:0]
        spare = np.full(len(allowed), -np.inf)
        spare[place[outside]] = (1 - _SPREAD) * np.maximum(gains, 0.0)
        some = prices.subset(allowed)
        tables = pricer.tables(some, inside)
        least = np.empty(self._queries)
        open_types, short = list(range(self._queries)), near / self._queries / 4
        for _ in range(_ROUNDS):
            still_open = []
            for i in open_types:
                target = inside_least[i] - short
                least[i], members, _, costs = cheapest_patterns(
                    tables.fixed[i], tables.pair_fixed[i], tables.unit[i], tables.delay[i], tables.error[i],
                    tables.pair, _PATTERNS, target, True,
                )  # fmt: skip
                for numbers, cost in zip(members.tolist(), costs.tolist(), strict=True):
                    ones = [n for n in numbers if 0 <= n < len(allowed)]
                    payer = max(ones, key=lambda n: float(spare[n]), default=-1)
                    if payer >= 0 and spare[payer] > -np.inf:
                        spare[payer] -= inside_least[i] - cost
                        some.link[i, payer] += inside_least[i] - cost
                        tables.fixed[i, payer] += inside_least[i] - cost
                        still_open.append(i)
            open_types = list(dict.fromkeys(still_open))
            if not open_types:
                break
        bound = pricer.bound(some, inside, least, tables.paid_usd)
        link = prices.link.copy()
        link[:, allowed] = some.link
        asked = np.flatnonzero((spare < -near / 4) & np.isfinite(spare))
        return replace(prices, link=link), bound, allowed[asked[np.argsort(spare[asked])][:_OPTIONS]]

    def _afforded(self, prices: Prices) -> Prices:
        """The prices, lowered where the rows of an option pay more for it than it costs."""
        pricer = Pricer(self.options)
        asked = prices.link.sum(axis=0) + prices.load + prices.cache
        own = pricer.replicas(prices) + asked
        part = np.where(asked > own, np.maximum(own, 0.0) / np.maximum(asked, 1e-300), 1.0)
        return replace(prices, link=prices.link * part, load=prices.load * part, cache=prices.cache * part)

    def _price(self, tables: Tables, duals: FloatArray, chosen: IntArray, *, three: bool) -> tuple[int, FloatArray]:
        """Add patterns that are cheaper than their type's price; how many, and each type's cheapest."""
        least, added = np.empty(self._queries), 0
        for i, dual in enumerate(duals.tolist()):
            least[i], members, shares, _ = cheapest_patterns(
                tables.fixed[i], tables.pair_fixed[i], tables.unit[i], tables.delay[i], tables.error[i],
                tables.pair, _PATTERNS, dual - _CHEAPER * (abs(dual) + 1), three,
            )  # fmt: skip
            for numbers, parts in zip(members.tolist(), shares.tolist(), strict=True):
                named = sorted(
                    (int(chosen[n]) if n < len(chosen) else -1, x)
                    for n, x in zip(numbers, parts, strict=True)
                    if n >= 0
                )
                added += self.add_pattern(Pattern(i, tuple(n for n, _ in named), tuple(x for _, x in named)))
        return added, least
