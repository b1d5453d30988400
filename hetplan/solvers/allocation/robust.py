"""Allocation plans made against scenarios: what they cost together is least, within what may be spent as planned.

=============================  ======================================================================================
two-stage program              here
=============================  ======================================================================================
first stage                    `Buying`: replicas of options, and copies of weights where types pay for their own
second stage                   shares in each scenario, as `scenarios` finds them (`Training.costs`)
optimality cuts (L-shaped)     `Cut`, one for each buying that is evaluated
master                         `Search.around`: every way to add up to two replicas to what is kept, by what cuts prove
=============================  ======================================================================================

A plan buys few replicas, so the master needs no program: what cuts prove of every pair of options is a table, and the
pair that could cost least is evaluated next, until none could be better. Beginning from nothing this finds the best of
all plans of at most two replicas; then one replica of the best plan is exchanged for up to two others, again and again.

With nothing drawn a plan keeps all of the problem's limits. What it costs then is its objective, so that the certified
optimum bounds it as any plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import InfeasibleError, NoSolutionError, Reason
from hetplan.problem.allocation import AllocationProblem
from hetplan.problem.robust import Robust
from hetplan.solvers.allocation.assignment import NEXT_TO_NOTHING, STANDBY, Assignment, placed_pairs
from hetplan.solvers.allocation.copies import choose_copies
from hetplan.solvers.allocation.exact import Exact
from hetplan.solvers.allocation.options import SLACK, FloatArray, IntArray
from hetplan.solvers.allocation.training import Buying, Costs, Cut, Training, tail_weights
from hetplan.solvers.base import AllocationSolution, OnIncumbent, Progress, check_time_limit

# Share of the time that the certified optimum may take.
_OPTIMUM_SHARE = 0.5
# Options of which every pair is looked at: those that could cost least alone.
_PAIRED = 500
# Buyings evaluated around one base where a target of violations keeps the cuts from ending it.
_EVALUATED = 150
# Dollars below which two plans cost the same.
_SAME_USD = 1e-7
# Seconds for the choice of copies of one buying.
_COPIES_S = 5.0


def solve_robust(
    problem: AllocationProblem,
    robust: Robust,
    *,
    gap: float = 1e-6,
    time_limit_s: float = 60.0,
    seed: int = 0,
    on_incumbent: OnIncumbent | None = None,
) -> AllocationSolution:
    """The plan that costs least over training scenarios, with the bound that is certified of its nominal cost.

    Parameters
    ----------
    problem : AllocationProblem
    robust : Robust
    gap : float
        Of the certified optimum.
    time_limit_s, seed, on_incumbent
        As of `hetplan.solvers.base.Solver`.

    Raises
    ------
    InfeasibleError
        If nothing keeps the problem's limits, or no plan was found that keeps ``max_violation_rate``; the message
        gives the rate that was reached.
    NoSolutionError
        If nothing was found in time.
    """
    began = time.monotonic()
    deadline = began + check_time_limit(time_limit_s)
    optimum = Exact(gap).solve(
        problem, time_limit_s=_OPTIMUM_SHARE * time_limit_s, seed=seed, on_incumbent=on_incumbent
    )
    training = Training(optimum.options, robust)
    optimum_usd = optimum.assignment.usd
    limit_usd = math.inf if robust.max_extra_cost is None else (1 + robust.max_extra_cost) * optimum_usd

    def report(best: Tried, evaluated: int) -> None:
        if on_incumbent is not None:
            said = f"${best.usd:.2f} in training, {best.costs.violation_rate:.1%} violated, {evaluated} evaluated"
            on_incumbent(Progress(time.monotonic() - began, best.shares.usd, optimum.bound, said))

    search = Search(training, limit_usd * (1 + STANDBY), deadline, report)
    search.run(optimum.assignment)
    best = search.best
    if best is None:
        raise NoSolutionError(
            "no plan that keeps the problem's limits was evaluated in time. Allow more time, or a larger max_extra_cost"
        )
    if best.excess > 0:
        raise _too_many_violations(robust, best)
    costs = best.costs
    bound = None if optimum.bound is None else min(optimum.bound, best.shares.usd)
    reached = {
        "optimum_usd": optimum_usd,
        "training_mean_usd": float(costs.usd.mean()),
        "training_cvar_usd": float(tail_weights(costs.usd, robust.cvar_level) @ costs.usd),
        "training_violation_rate": costs.violation_rate,
    }
    settings = {f"robust_{name}": value for name, value in robust.model_dump().items()}
    return AllocationSolution(
        optimum.options, best.shares, bound, optimum.certificate, dict(optimum.parameters) | settings | reached
    )


def _too_many_violations(robust: Robust, best: Tried) -> InfeasibleError:
    rate, target = best.costs.violation_rate, robust.max_violation_rate
    extra = "" if robust.max_extra_cost is None else f" that costs at most {robust.max_extra_cost:.4g} more as planned"
    return InfeasibleError(
        f"no plan was found{extra} of which at most {target:.4g} of the (scenario, query type) are violated in "
        f"training; the least that was reached is {rate:.4g}. Raise max_violation_rate, max_extra_cost or budget_usd",
        [Reason("max_violation_rate", "the training scenarios", rate, float(target or 0.0), "violated")],
    )


@dataclass(frozen=True, slots=True)
class Tried:
    """A buying that keeps all limits as planned: its shares then, its scenarios, and what counts of them.

    ``excess`` are violations beyond the target.
    """

    buying: Buying
    shares: Assignment
    costs: Costs
    excess: float
    usd: float

    def better_than(self, other: Tried | None) -> bool:
        """Fewer violations beyond the target, or as many and cheaper."""
        if other is None or self.excess != other.excess:
            return other is None or self.excess < other.excess
        return self.usd < other.usd - _SAME_USD


@dataclass(slots=True)
class Search:
    """What is known so far; ``limit_usd`` is the most that a plan may cost as planned."""

    training: Training
    limit_usd: float
    deadline: float
    report: Callable[[Tried, int], None]
    best: Tried | None = None
    _evaluated: int = 0
    _seen: set[Buying] = field(default_factory=set)
    _cuts: list[Cut] = field(default_factory=list)
    _nominal_cuts: list[Cut] = field(default_factory=list)

    def run(self, optimum: Assignment) -> None:
        """From the optimum as planned, until no exchange is better or time is over."""
        t = self.training
        bought = {int(n): int(optimum.replicas[n]) for n in np.flatnonzero(optimum.replicas)}
        paid = np.argwhere(placed_pairs(t.options, optimum.shares > NEXT_TO_NOTHING))
        self._try(t.make(bought, {(int(i), int(pair)) for i, pair in paid}))
        self._evaluate(t.make(bought))
        self._around({})
        before = None
        while self.best is not None and self.best is not before and not self._over():
            before = self.best
            held = dict(before.buying.replicas)
            self._around(held)
            for number in held:
                self._around({n: count - (n == number) for n, count in held.items() if count > (n == number)})

    def _over(self) -> bool:
        return time.monotonic() >= self.deadline

    # ---- one buying

    def _evaluate(self, buying: Buying) -> bool:
        """Whether it came to its scenarios: where it may keep all limits as planned."""
        t, o = self.training, self.training.options
        self._seen.add(buying)
        usd, cut = t.nominal(buying)
        self._nominal_cuts.append(cut)
        spared = self._spared_usd(buying) if o.stored_per_type else 0.0
        if usd - spared > self.limit_usd:
            return False
        if not o.stored_per_type and not self._keeps_limits(buying):
            return False
        costs = t.costs(buying)
        self._cuts.append(costs.cut)
        if not o.stored_per_type:
            self._try(buying)
        elif self.best is None or self.best.excess > 0 or t.risk_usd(costs) - spared < self.best.usd:
            self._choose_copies(buying)
        return True

    def _spared_usd(self, full: Buying) -> float:
        """Copies that need not be paid: one of each pair is, and one of each type that must be served."""
        o = self.training.options
        pairs = np.array([pair for _, pair in full.copies], dtype=np.int64)
        each = [
            min(float(o.pair_usd[pair]) for query, pair in full.copies if query == i)
            for i in {query for query, _ in full.copies}
            if self._must_be_served()[i]
        ]
        return float(o.pair_usd[pairs].sum()) - max(float(o.pair_usd[np.unique(pairs)].sum()), sum(each))

    def _must_be_served(self) -> NDArray[np.bool_]:
        """(I,) of which types some is served in every plan within the limits."""
        o = self.training.options
        must: NDArray[np.bool_] = (o.max_unserved < 1) | (o.unserved_usd > self.limit_usd)
        return must

    def _keeps_limits(self, buying: Buying) -> bool:
        shares = self.training.shares(buying)
        return shares is not None and shares.usd <= self.limit_usd

    def _try(self, buying: Buying) -> Tried | None:
        """Take it where it is the best; None where it breaks a limit as planned."""
        t, o = self.training, self.training.options
        shares = t.shares(buying)
        if shares is None or shares.usd > self.limit_usd:
            return None
        if o.stored_per_type:
            paid = np.argwhere(placed_pairs(o, shares.shares > NEXT_TO_NOTHING))
            fewer = t.make(dict(buying.replicas), {(int(i), int(pair)) for i, pair in paid})
            if fewer != buying:
                return self._try(fewer)
        costs = t.costs(buying)
        self._evaluated += 1
        target = t.robust.max_violation_rate
        excess = 0.0 if target is None else costs.violation_rate - target
        found = Tried(buying, shares, costs, excess if excess > SLACK else 0.0, t.risk_usd(costs))
        if found.better_than(self.best):
            self.best = found
            self.report(found, self._evaluated)
        return found

    def _choose_copies(self, full: Buying) -> None:
        """Try what is bought with the copies of weights that are best, where they may be better than what is known."""
        known = self.best is not None and self.best.excess <= 0
        chosen = choose_copies(
            self.training,
            full,
            limit_usd=self.limit_usd,
            below_usd=self.best.usd if self.best is not None and known else math.inf,
            time_limit_s=min(_COPIES_S, max(self.deadline - time.monotonic(), 0.0)),
        )
        if chosen is not None:
            self._try(chosen)

    # ---- many of them

    def _around(self, base: dict[int, int]) -> None:
        """The best of what is kept with at most two replicas more."""
        t, o = self.training, self.training.options
        additions = self._additions(base)
        lower = np.full(len(additions.usd), -np.inf)
        for cut in self._nominal_cuts:
            lower[additions.least_usd(cut) > self.limit_usd] = np.inf
        for cut in self._cuts:
            np.maximum(lower, additions.least_usd(cut), out=lower)
        evaluated = 0
        while len(lower) and not self._over():
            at = int(np.argmin(lower))
            if lower[at] == np.inf:
                return
            if self.best is not None and self.best.excess <= 0 and lower[at] >= self.best.usd - _SAME_USD:
                return
            lower[at] = np.inf
            bought = dict(base)
            for number in (int(additions.first[at]), int(additions.second[at])):
                if number < o.count:
                    bought[number] = bought.get(number, 0) + 1
            buying = t.make(bought)
            if buying in self._seen:
                continue
            came = self._evaluate(buying)
            lower[additions.least_usd(self._nominal_cuts[-1]) > self.limit_usd] = np.inf
            if came:
                np.maximum(lower, additions.least_usd(self._cuts[-1]), out=lower)
                evaluated += 1
                if t.robust.max_violation_rate is not None and evaluated >= _EVALUATED:
                    return

    def _additions(self, base: dict[int, int]) -> _Additions:
        """None, one or two replicas more that the limits may allow; the number of options stands for none."""
        t, o = self.training, self.training.options
        kept = t.make(base, ()) if base else Buying(())
        numbers, counts = kept.numbers, kept.counts
        held = np.append(np.isin(o.pair, o.pair[numbers]), False)
        rent, pair = np.append(o.rent_usd, 0.0), np.append(o.pair, -1)
        stored = np.where(held, 0.0, np.append(o.pair_usd[o.pair], 0.0))
        kept_usd = float(o.rent_usd[numbers] @ counts) + float(o.pair_usd[np.unique(o.pair[numbers])].sum())
        alone = kept_usd + o.rent_usd + stored[:-1]
        for cut in self._cuts:
            alone = np.maximum(alone, kept_usd + o.rent_usd + stored[:-1] + cut.usd - cut.gains)
        some = np.sort(np.argsort(alone, kind="stable")[:_PAIRED])
        one, other = np.triu_indices(len(some))
        none = np.full(1, o.count)
        first = np.concatenate([some[one], some, none])
        second = np.concatenate([some[other], np.full(len(some), o.count), none])
        twice = pair[first] == pair[second]
        stored_usd = stored[first] + np.where(twice, 0.0, stored[second])
        usd = kept_usd + rent[first] + rent[second] + stored_usd
        keep = usd + self._least_stored_usd() <= o.problem.budget_usd * (1 + SLACK)
        keep &= usd <= self.limit_usd
        if not o.many:
            keep &= ~held[first] & ~held[second] & (~twice | (second == o.count))
        if not base:
            keep[-1] = False
        return _Additions(numbers, counts, first[keep], second[keep], usd[keep])

    def _least_stored_usd(self) -> float:
        """Storage of the traffic that must be served for the cost to be within its limit."""
        o = self.training.options
        left = np.minimum(o.max_unserved, self.limit_usd / np.maximum(o.unserved_usd, 1e-100))
        return float(o.storage_usd @ np.maximum(1 - left, 0.0))


@dataclass(frozen=True, slots=True)
class _Additions:
    """Replicas added to what is kept: ``first`` and ``second`` of each, and what is fixed with them, at least."""

    numbers: IntArray
    counts: IntArray
    first: IntArray
    second: IntArray
    usd: FloatArray

    def least_usd(self, cut: Cut) -> FloatArray:
        """What a cut proves of each."""
        gains = np.append(cut.gains, 0.0)
        kept = cut.usd - float(cut.gains[self.numbers] @ self.counts)
        least: FloatArray = self.usd + kept - gains[self.first] - gains[self.second]
        return least
