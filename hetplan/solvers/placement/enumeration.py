"""The best plan of a small inventory: every set of machines.

All sets are rated, smaller ones first; a set is of no interest unless it is worth more than its best
division into two. The program is solved as if each set were worth the most that it may be, the sets chosen are solved
exactly, and so on until nothing changes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hetplan.estimator.base import FloatArray
from hetplan.solvers.base import Solution
from hetplan.solvers.highs import maximise
from hetplan.solvers.placement.bound import layer_rate_bound
from hetplan.solvers.placement.columns import Columns, Rated, price_of
from hetplan.solvers.placement.program import MARGIN, SAME, TIGHT, Program, Proof, division
from hetplan.solvers.placement.spaces import Machines, seconds_left

# Share of the best at which all machines together are looked at first.
_CLOSE = 0.98
# Tolerance of the first look at a set.
_FIRST_LOOK = 2e-3


class Enumeration(Program):
    """All sets of machines."""

    def enumerate(self) -> Solution:
        """All sets of machines."""
        grid = sorted(itertools.product(*(range(count + 1) for count in self.columns.counts)), key=sum)[1:]
        parts = np.zeros([count + 1 for count in self.columns.counts])
        proof, complete = None, True
        if self.columns.limited:
            # The proof leaves latency out, as only then machines alone say what a pipeline may be worth.
            free = replace(self, problem=self.problem.replace(slo=None, latency_penalty=0.0))
            proof = free._prove_free(grid)
        for machines in grid:
            if time.monotonic() > self.deadline:
                complete = False
                break
            least = self._least(machines, parts)
            known = self._rate(machines, least)
            parts[machines] = max(least if self.problem.objective != "throughput_per_cost" else 0.0, known.worth)
        chosen, searched = self._choose(grid)
        if not complete or (not chosen and (not searched or self.columns.unanswered)):
            return self._at_once(chosen, proof)
        if not chosen:
            raise self._none(complete)
        objective = self._objective(chosen)
        if not self.columns.limited:
            proof = self._prove(grid)
        if proof is None:
            bound = layer_rate_bound(self.problem, self.estimator)
            return self._solution(chosen, bound.value, bound.certificate)
        kind = "dual"
        off = abs(proof.bound - objective) > TIGHT * objective
        if searched and off and self.problem.objective != "throughput_per_cost":
            kind = "enumeration"
            if not self.columns.limited:
                proof.bound = objective if self.problem.objective == "cost" else objective * (1 + 4 * MARGIN)
        return self._solution(chosen, proof.bound, proof.certificate(kind))

    def _prove_free(self, grid: Sequence[Machines]) -> Proof | None:
        """Prices for the problem without limits on latency."""
        self.columns = Columns(self.problem, self.estimator, self.deadline)
        parts = np.zeros([count + 1 for count in self.columns.counts])
        for machines in grid:
            if time.monotonic() > self.deadline:
                return None
            least = self._least(machines, parts)
            parts[machines] = max(least, self._rate(machines, least).worth)
        return self._prove(grid)

    def _least(self, machines: Machines, parts: FloatArray) -> float:
        """What a set has to be worth more than, to be of interest."""
        if self.problem.objective == "throughput_per_cost":
            # ``parts`` at no machines holds the best ratio so far.
            costs = self.columns.costs
            best = max((r.worth / price_of(m, costs) for m, r in self.columns.rated.items()), default=0.0)
            return best * price_of(machines, costs) * (1 - 1e-12)
        return division(machines, parts)

    def _rate(self, machines: Machines, least: float) -> Rated:
        if self.columns.limited:
            return self.columns.realise(machines, least=least)
        return self.columns.rate(machines, least=least, tolerance=_FIRST_LOOK)

    def _choose(self, grid: Sequence[Machines]) -> tuple[list[Rated], bool]:
        """The best choice: sets that matter are solved exactly until those that are known are no worse than any.

        And whether it is: not where time is over, or where a search ended without an answer.
        """
        rated = self.columns.rated
        grid = [machines for machines in grid if machines in rated]
        if self.problem.objective == "throughput_per_cost":
            return self._best_per_cost(grid)
        everything = rated.get(self.columns.counts)
        if everything is not None and everything.reached > _CLOSE * self._useful(grid)[0][self.columns.counts]:
            # One pipeline on all machines, if it is about the best, rules most others out.
            self.columns.realise(self.columns.counts)
        given_up: set[Machines] = set()
        while True:
            if seconds_left(self.deadline) <= 0:
                given_up.update(machines for machines in grid if rated[machines].value is None)
            parts, useful = self._useful(grid, given_up)
            if self.problem.objective == "cost":
                chosen = self._cheapest(useful, time_limit_s=max(1.0, seconds_left(self.deadline))) or []
                needed = 0.0
            else:
                known, known_useful = self._useful(grid, grid)
                chosen = _divided(parts, set(useful), self.columns.counts)
                needed = float(known[self.columns.counts])
                if needed > 0 and parts[self.columns.counts] <= needed * (1 + SAME):
                    chosen = _divided(known, set(known_useful), self.columns.counts)
            unknown = [machines for machines in chosen if rated[machines].value is None]
            if not unknown:
                return [rated[machines] for machines in chosen], not given_up
            # The largest may already be enough to do without the others.
            machines = max(unknown, key=sum)
            rest = tuple(n - m for n, m in zip(self.columns.counts, machines, strict=True))
            least, before = max(division(machines, parts), needed - float(parts[rest])), rated[machines].worth
            found = self.columns.realise(machines, least=least)
            if found.value is None and found.worth >= before:
                given_up.add(machines)

    def _best_per_cost(self, grid: Sequence[Machines]) -> tuple[list[Rated], bool]:
        rated, costs = self.columns.rated, self.columns.costs
        while True:
            over = seconds_left(self.deadline) <= 0
            sets = [machines for machines in grid if not over or rated[machines].value is not None]
            best = max(sets, key=lambda m: rated[m].worth / price_of(m, costs), default=None)
            if best is None or rated[best].worth <= 0:
                return [], not over
            if rated[best].value is not None:
                return [rated[best]], not over
            self.columns.realise(best)

    def _prove(self, grid: Sequence[Machines]) -> Proof | None:
        """Prices by the linear program over all sets."""
        if self.problem.objective == "throughput_per_cost":
            costs, rated = self.columns.costs, self.columns.rated
            best = max(rated[m].worth / price_of(m, costs) for m in grid) * (1 + MARGIN)
            return Proof(np.maximum(costs * best, 0.0), best)
        _, useful = self._useful(grid)
        duals = self._linear(useful)
        if duals is None:
            return None
        return self._proof(duals.prices * (1 + MARGIN))

    def _cheapest(self, sets: Sequence[Machines], time_limit_s: float) -> list[Machines] | None:
        worths = [min(self.columns.rated[m].worth, self.columns.cap) for m in sets]
        found = maximise(self._program(sets, worths, integer=True), time_limit_s=time_limit_s, gap=0.0)
        if found.values is None:
            return None
        numbers = np.rint(found.values).astype(int).tolist()
        return [m for m, n in zip(sets, numbers, strict=True) for _ in range(n)]


def _divided(parts: FloatArray, useful: set[Machines], machines: Machines) -> list[Machines]:
    """The sets that make up what ``machines`` are worth together."""
    chosen, left = [], [machines]
    while left:
        machines = left.pop()
        if parts[machines] <= 0:
            continue
        if machines in useful:
            chosen.append(machines)
            continue
        sub = parts[tuple(slice(0, n + 1) for n in machines)]
        both = sub + np.flip(sub)
        both[machines] = both[(0,) * len(machines)] = -np.inf
        first = tuple(int(i) for i in np.unravel_index(int(both.argmax()), both.shape))
        left += [first, tuple(a - b for a, b in zip(machines, first, strict=True))]
    return chosen
