"""Branch and price: the allocation problem to a proven gap.

A node's bound is that of the linear program over patterns (`master`). Where an option is bought in part, one branch
buys less of it and the other more; where all are whole but a type pays for part of a copy of a model, one branch bars
the type from the option and the other pays the copy. Whole answers come from options in use, by the compact program
(`assignment`), at the root and now and then below, and from nodes whose options are whole.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.solvers.allocation.assignment import (
    NEXT_TO_NOTHING,
    Assignment,
    assign,
    choose,
    stored_weights_gb,
    total_usd,
)
from hetplan.solvers.allocation.master import Found, Master, Pattern
from hetplan.solvers.allocation.options import SLACK, Options
from hetplan.solvers.allocation.pricer import Pricer, Prices, Restrictions

# How far from whole a number is that counts as whole.
_WHOLE = 1e-6
# Options with which the compact program looks for answers beside those in use: which cost least beside their rows.
_NEAR = 8
# Seconds for such a search, nodes between two, and the share of all time that they take.
_SEARCH_S, _EVERY, _SEARCH_SHARE = 1.0, 8, 0.2
# Share of the time after which the root's program is left as it is, and of what is left then that a search may take.
_ROOT_SHARE, _LAST_SHARE = 0.6, 0.9
# Seconds for the best shares on options that are whole; the choice of copies goes on in the tree.
_ASSIGN_S = 0.3
# Seconds in which options of an answer are exchanged for others, and how many others.
_EXCHANGE_S, _EXCHANGED = 0.5, 30
# Seconds of search that the root has before the tree.
_ROOT_SEARCH_S = 0.3
# Seconds of search that the root has for nothing.
_FIRST_SEARCH_S = 0.1
# Options of the root that the tree begins with, and the share above their type's price up to which it keeps patterns.
_KEPT_OPTIONS, _KEPT_SHARE = 40, 0.05


@dataclass(slots=True)
class Node:
    """A part of all answers, and what is known of it.

    Attributes
    ----------
    within : Restrictions
        What it allows, before ``closed``.
    prices, bound
        Prices of the rows, and what they prove of it.
    closed : list of int
        Options that no better answer in it has, by the same prices.
    replicas : (int, int) or None
        It is divided into answers with at most so many replicas of an option, and with more.
    copy : (int, int) or None
        It is divided into answers in which a type uses an option, and does not.
    parts : list of Node
        In that order.
    """

    within: Restrictions
    prices: Prices
    bound: float
    closed: list[int] = field(default_factory=list)
    replicas: tuple[int, int] | None = None
    copy: tuple[int, int] | None = None
    parts: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Tree:
    """A search that can be asked how far it has come.

    ``report`` is called with the best cost and the bound when either changes. ``infeasible``: it is proven that no
    answer keeps all limits.
    """

    options: Options
    gap: float
    deadline: float
    report: Callable[[float | None, float], None]
    best: Assignment | None = None
    root: Node | None = None
    nodes: int = 0
    bound: float = -math.inf
    infeasible: bool = False
    _began: float = field(default_factory=time.monotonic)
    _searched_s: float = -_FIRST_SEARCH_S
    _assigned: set[tuple[tuple[int, int], ...]] = field(default_factory=set)
    # What is proven of the answers with closed options.
    _least_closed: float = math.inf

    def search(self) -> None:
        """Until best and bound meet within the gap, or time is over."""
        master = Master(self.options)
        for i in range(len(self.options.unserved_usd)):
            master.add_pattern(Pattern(i, (-1,), (1.0,)))
        if self.best is not None:
            # Its options are a start: their prices tell others apart.
            for number in np.flatnonzero(self.best.replicas).tolist():
                master.add_option(number)
        everything = Restrictions.none(self.options)
        # When this takes too long, the rest of the time is for an answer.
        enough = self._began + _ROOT_SHARE * (self.deadline - self._began)
        found = master.solve(everything, math.inf, deadline=enough)
        if found is None:
            return
        over = time.monotonic() >= enough
        root = self.root = Node(everything, found.prices, found.bound)
        self._bounded([found.bound])
        self._answers(found, near=0)
        self.infeasible = self.best is None and found.bound > self._no_more_usd()
        if self._done() or self.infeasible:
            return
        left = self.deadline - time.monotonic()
        self._answers(found, near=_NEAR, limit_s=_LAST_SHARE * left if over else min(_ROOT_SEARCH_S, left / 4))
        if self._done() or over:
            return
        self._exchange(found)
        if self._done():
            return
        master = self._lean(master, found)
        count = itertools.count()
        waiting: list[tuple[float, int, Node]] = [(root.bound, next(count), root)]
        # What is done, by its bound.
        least_done = math.inf
        ahead: Node | None = None
        while waiting or ahead:
            node = heapq.heappop(waiting)[2] if ahead is None else ahead
            ahead = None
            self._bounded([node.bound, least_done, *(bound for bound, _, _ in waiting[:1])])
            if self._done() or time.monotonic() >= self.deadline:
                return
            if node.bound < self._cutoff():
                found = master.solve(node.within, self._cutoff(), tolerance=self._tolerance(), deadline=self.deadline)
                self.nodes += 1
                if found is None:
                    return
                if found.bound > node.bound:
                    node.bound, node.prices = found.bound, found.prices
            if node.bound < self._cutoff():
                if self.nodes % _EVERY == 1:
                    self._answers(found, near=_NEAR)
                self._close(node, found)
                self._divide(node, found)
            if not node.parts:
                least_done = min(least_done, node.bound)
                continue
            more_first = node.replicas is None or found.replicas[node.replicas[0]] - node.replicas[1] > 0.5
            nearer, other = node.parts[::-1] if more_first else node.parts
            heapq.heappush(waiting, (other.bound, next(count), other))
            ahead = nearer
        self._bounded([least_done])
        # Where the choice of copies was cut short, an answer may have been missed.
        certain = not self.options.stored_per_type or least_done >= self._no_more_usd()
        self.infeasible = self.best is None and certain

    def _cutoff(self) -> float:
        return self._no_more_usd() if self.best is None else self.best.usd - self.gap * abs(self.best.usd)

    def _no_more_usd(self) -> float:
        """More than any answer costs that keeps the limits."""
        o = self.options
        dearest = np.where(o.most > 0, o.unit_usd, 0.0).max(axis=1, initial=0.0)
        return float(o.problem.budget_usd + np.maximum(dearest, o.unserved_usd).sum()) * (1 + 1e-6)

    def _tolerance(self) -> float:
        return max(1e-7, self.gap / 10)

    def _done(self) -> bool:
        return self.best is not None and self.bound >= self._cutoff()

    def _bounded(self, parts: list[float]) -> None:
        """The bound of all parts of the tree together."""
        bound = min([*parts, self._least_closed, *([] if self.best is None else [self.best.usd])])
        if bound > self.bound and math.isfinite(bound):
            self.bound = bound
            self.report(None if self.best is None else self.best.usd, bound)

    def _take(self, answer: Assignment | None) -> None:
        if answer is not None and (self.best is None or answer.usd < self.best.usd - 1e-9):
            self.best = answer
            self.report(answer.usd, self.bound)

    def _answers(self, found: Found, near: int, limit_s: float | None = None) -> None:
        """Whole answers with the options in use, and some that are nearly worth their price."""
        used = set(np.flatnonzero(found.replicas > _WHOLE).tolist())
        if near:
            spare = Pricer(self.options).one_more(found.prices, Restrictions.none(self.options))
            used |= set(np.argsort(spare)[:near].tolist())
            if self.best is not None:
                used |= set(np.flatnonzero(self.best.replicas).tolist())
        began = time.monotonic()
        limit = min(_SEARCH_S, (self.deadline - began) / 4, _SEARCH_SHARE * (began - self._began) - self._searched_s)
        limit = limit if limit_s is None else limit_s
        if limit > 0:
            self._take(choose(self.options, sorted(used), time_limit_s=limit, gap=max(self.gap / 2, 1e-7)))
            self._searched_s += time.monotonic() - began

    def _exchange(self, found: Found) -> None:
        """Better answers with an option more, less, or another, of those that cost least beside their rows."""
        o, began = self.options, time.monotonic()
        until = began + min(_EXCHANGE_S, (self.deadline - began) / 4)
        spare = Pricer(o).one_more(found.prices, Restrictions.none(o))
        near = np.argsort(spare)[:_EXCHANGED].tolist()
        tried: set[tuple[tuple[int, int], ...]] = set()
        improved = self.best is not None
        while improved and self.best is not None:
            improved = False
            held = {int(n): int(self.best.replicas[n]) for n in np.flatnonzero(self.best.replicas)}
            fewer = [{n: count for n, count in held.items() if n != out} for out in held]
            more = [{**base, n: 1} for n in near if n not in held for base in (*fewer, held)]
            for bought in (*fewer, *more):
                key = tuple(sorted(bought.items()))
                if not bought or key in tried or found.bound + max(float(spare[n]) for n in bought) >= self._cutoff():
                    continue
                if not o.many and len({int(o.pair[n]) for n in bought}) < len(bought):
                    continue
                if time.monotonic() >= until:
                    return
                tried.add(key)
                before = self.best
                self._take(assign(o, bought, time_limit_s=_ASSIGN_S))
                if self.best is not before:
                    improved = True
                    break

    def _lean(self, master: Master, root: Found) -> Master:
        """A new program with the options and patterns that are near their price."""
        o = self.options
        spare = Pricer(o).one_more(root.prices, Restrictions.none(o))
        kept = [n for n in master.chosen if root.replicas[n] > _WHOLE]
        kept += [n for n in sorted(master.chosen, key=lambda n: float(spare[n]))[:_KEPT_OPTIONS] if n not in kept]
        lean = Master(o)
        for number in kept:
            lean.add_option(number)
        known = {-1, *kept}
        tables = Pricer(o).tables(root.prices, Restrictions.none(o))
        cheapest = [math.inf] * len(o.unserved_usd)
        costs = []
        for pattern in master.patterns:
            if not known.issuperset(pattern.members):
                costs.append(math.inf)
                continue
            cost, pairs = 0.0, set()
            for number, share in zip(pattern.members, pattern.shares, strict=True):
                cost += float(tables.fixed[pattern.query, number]) + share * float(tables.unit[pattern.query, number])
                if number >= 0 and int(o.pair[number]) not in pairs:
                    pairs.add(int(o.pair[number]))
                    cost += float(tables.pair_fixed[pattern.query, number])
            costs.append(cost)
            cheapest[pattern.query] = min(cheapest[pattern.query], cost)
        for pattern, cost in zip(master.patterns, costs, strict=True):
            if pattern.members == (-1,) or cost <= cheapest[pattern.query] * (1 + _KEPT_SHARE):
                lean.add_pattern(pattern)
        return lean

    def _close(self, node: Node, found: Found) -> None:
        """Options that no better answer in this part of the tree has."""
        within = node.within
        spare = Pricer(self.options).one_more(node.prices, within)
        closed = (within.least == 0) & (within.most > 0) & (node.bound + spare >= self._cutoff())
        closed[found.replicas > _WHOLE] = False
        node.closed = np.flatnonzero(closed).tolist()
        if node.closed:
            self._least_closed = min(self._least_closed, node.bound + float(spare[closed].min()))

    def _divide(self, node: Node, found: Found) -> None:
        """Parts that together hold every answer of this one; none where the best is known."""
        o, replicas = self.options, found.replicas
        within = replace(node.within, most=node.within.most.copy())
        within.most[node.closed] = 0
        down = np.floor(replicas + _WHOLE)
        part = np.minimum(replicas - down, 1 - (replicas - down))
        part[replicas - down < _WHOLE] = 0.0
        if part.max(initial=0.0) > _WHOLE:
            number = int(np.argmax(part * o.rent_usd))
            self._split(node, within, number, int(down[number]))
            return
        bought = {int(n): round(replicas[n]) for n in np.flatnonzero(replicas > _WHOLE)}
        key = tuple(sorted(bought.items()))
        if key not in self._assigned:
            self._assigned.add(key)
            limit_s = min(_ASSIGN_S, max(self.deadline - time.monotonic(), 0.1))
            self._take(assign(o, bought, time_limit_s=limit_s))
        self._take(self._as_it_is(found, bought))
        if node.bound >= self._cutoff():
            return
        # Nothing is bought in part: what the bound leaves out are copies, or stored weights.
        copies = Pricer(o).copy_usd * np.minimum(found.used, 1 - found.used)
        copies[within.paid | within.barred | (found.used < _WHOLE)] = 0.0
        for query, number in np.argwhere(within.paid).tolist():
            # One copy serves all options of its pair.
            copies[query, o.pair == o.pair[number]] = 0.0
        open_ones = [n for n in bought if within.least[n] < bought[n]]
        if copies.max(initial=0.0) > _WHOLE:
            query, number = divmod(int(np.argmax(copies)), o.count)
            barred, paid = within.barred.copy(), within.paid.copy()
            barred[query, number], paid[query, number] = True, True
            node.copy = (query, number)
            node.parts = [
                Node(replace(within, paid=paid), node.prices, node.bound),
                Node(replace(within, barred=barred), node.prices, node.bound),
            ]
        elif open_ones:
            number = max(open_ones, key=lambda n: float(o.rent_usd[n]))
            self._split(node, within, number, bought[number] - 1)

    def _as_it_is(self, found: Found, bought: dict[int, int]) -> Assignment | None:
        """The program's own solution, where replicas are whole and whole copies keep budget and storage."""
        o = self.options
        replicas = np.zeros(o.count, dtype=np.int64)
        for number, many in bought.items():
            replicas[number] = many
        shares = np.where((found.shares > NEXT_TO_NOTHING) & (replicas > 0), found.shares, 0.0)
        unserved = 1 - shares.sum(axis=1)
        stored_gb = stored_weights_gb(o, replicas, shares)
        usd_per_gb = o.problem.storage_usd_per_gb_hour * o.problem.horizon_hours
        gb = stored_gb + float(o.storage_gb @ shares.sum(axis=1))
        paid = float(o.rent_usd @ replicas) + usd_per_gb * gb
        keeps = gb <= o.problem.storage_capacity_gb and paid <= o.problem.budget_usd
        if not keeps or (unserved > o.max_unserved + SLACK).any():
            return None
        return Assignment(replicas, shares, total_usd(o, replicas, shares))

    def _split(self, node: Node, within: Restrictions, number: int, most: int) -> None:
        """At most so many replicas of an option, and more."""
        o = self.options
        fewer, more, rest = within.most.copy(), within.least.copy(), within.most
        fewer[number], more[number] = most, most + 1
        if not o.many:
            rest = np.where((o.pair == o.pair[number]) & (np.arange(o.count) != number), 0, rest)
        node.replicas = (number, most)
        node.parts = [
            Node(replace(within, most=fewer), node.prices, node.bound),
            Node(Restrictions(more, rest, within.barred, within.paid), node.prices, node.bound),
        ]
