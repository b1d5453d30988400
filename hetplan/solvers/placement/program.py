"""The integer program that `exact` solves: a column for each set of machines.

A plan is a choice of pipelines on disjoint sets of machines. `columns` knows what the best pipeline on a set is worth,
or at most worth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetplan.errors import InfeasibleError, NoSolutionError, Reason
from hetplan.estimator.base import Estimator, FloatArray
from hetplan.plan import Certificate
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import OnIncumbent, Progress, Solution
from hetplan.solvers.highs import Milp, maximise, maximise_linear
from hetplan.solvers.placement.bound import layer_rate_bound
from hetplan.solvers.placement.choice import better
from hetplan.solvers.placement.columns import Columns, Rated, price_of
from hetplan.solvers.placement.dp_beam import DpBeam
from hetplan.solvers.placement.even import Even
from hetplan.solvers.placement.spaces import Machines

# What proven prices and bounds leave to rounding.
MARGIN = 2e-9
# A set is worth more than its parts when it is by more than this.
SAME = 5e-10
# Bounds this near to the objective need no other proof.
TIGHT = 1e-7
# A demand that is missed by this share is reached.
_REACHED = 5e-10
# Shares of the demand below this are none.
_NEXT_TO_NONE = 1e-8


@dataclass(slots=True)
class Proof:
    """Prices that no pipeline outweighs, and the bound on the objective that they prove."""

    prices: FloatArray
    bound: float
    rate_usd: float | None = None

    def certificate(self, kind: str = "dual") -> Certificate:
        """As the plan carries it."""
        return Certificate(
            kind="enumeration" if kind == "enumeration" else "dual",
            pool_prices=tuple(float(price) for price in self.prices),
            usd_per_hour_per_request_rate=self.rate_usd,
        )


@dataclass(frozen=True, slots=True)
class Duals:
    """The linear program over the columns at hand: its value, prices of machines, and the columns it uses."""

    value: float
    prices: FloatArray
    used: list[Machines]


@dataclass(slots=True)
class Program:
    """The columns of a problem, and what comes of choosing among them."""

    problem: PlacementProblem
    estimator: Estimator
    columns: Columns
    gap: float
    began: float
    deadline: float
    on_incumbent: OnIncumbent | None
    incumbent: float | None = None
    _reported: tuple[float | None, float | None] = field(default=(None, None))

    def _worth(self, machines: Machines) -> float:
        """What the program counts a set as worth."""
        known = self.columns.rated[machines]
        worth = known.worth if known.value is not None or known.reached == 0.0 else known.reached
        return min(worth, self.columns.cap)

    def _program(self, sets: Sequence[Machines], worths: Sequence[float], *, integer: bool) -> Milp:
        program, counts = Milp(), self.columns.counts
        cost = self.problem.objective == "cost"
        scale = 1.0 if cost else 1e3 / max(max(worths, default=1.0), 1e-30)
        for machines, worth in zip(sets, worths, strict=True):
            most = min(n // m for n, m in zip(counts, machines, strict=True) if m)
            gain = -price_of(machines, self.columns.costs) if cost else worth * scale
            program.column(0.0, float(most) if integer else math.inf, gain=gain, integer=integer)
        for pool, count in enumerate(counts):
            program.row([(i, float(m[pool])) for i, m in enumerate(sets) if m[pool]], most=float(count))
        if cost:
            demand = self.problem.workload.requests_per_s or 0.0
            terms = [(i, worth / demand) for i, worth in enumerate(worths)]
            if integer:
                # HiGHS loses its way among whole numbers with coefficients near its tolerance.
                terms = [(i, part) for i, part in terms if part >= _NEXT_TO_NONE]
            if not integer:
                # What is not served costs more than any machine does.
                costs = self.columns.costs
                dearest = max((price_of(m, costs) / w for m, w in zip(sets, worths, strict=True) if w > 0), default=1.0)
                terms.append((program.column(0.0, math.inf, gain=-10 * dearest * demand), 1.0))
            program.row(terms, least=1.0 - _REACHED)
        return program

    def _linear(self, sets: Sequence[Machines], *, known: bool = False) -> Duals | None:
        """The linear program: with what sets may be worth, or only what is ``known`` to be reached."""
        worths = [self._worth(m) if known else min(self.columns.rated[m].worth, self.columns.cap) for m in sets]
        found = maximise_linear(self._program(sets, worths, integer=False))
        if found is None:
            return None
        used = [m for m, x in zip(sets, found.values[: len(sets)].tolist(), strict=True) if x > 1e-9]
        counts = len(self.columns.counts)
        if self.problem.objective != "cost":
            scale = 1e3 / max(max(worths, default=1.0), 1e-30)
            return Duals(found.objective / scale, np.maximum(found.prices[:counts], 0.0) / scale, used)
        demand = self.problem.workload.requests_per_s or 0.0
        rate_usd = abs(float(found.prices[counts])) / demand
        if rate_usd <= 0:
            return None
        gained = np.maximum(found.prices[:counts], 0.0)
        return Duals(-found.objective, (self.columns.costs + gained) / rate_usd, used)

    def _proof(self, prices: FloatArray) -> Proof:
        """The best bound that prices prove which no pipeline outweighs."""
        counts, costs = np.array(self.columns.counts), self.columns.costs
        if self.problem.objective == "throughput":
            return Proof(prices, float(prices @ counts))
        demand = self.problem.workload.requests_per_s or 0.0
        usable = prices > 0
        best = Proof(prices, 0.0, 0.0)
        for rate_usd in (costs[usable] / prices[usable]).tolist():
            raised = np.maximum(prices, costs / rate_usd) if rate_usd > 0 else prices
            bound = rate_usd * demand - float(np.maximum(rate_usd * raised - costs, 0.0) @ counts)
            if bound > best.bound:
                best = Proof(raised * (1 + 1e-15), bound, rate_usd * (1 + 1e-12))
        if best.rate_usd == 0.0:
            best = Proof(prices, 0.0, float(np.max(costs[usable] / prices[usable], initial=0.0)))
        return best

    def _whole(self, sets: Sequence[Machines], time_limit_s: float) -> list[Machines] | None:
        """The best whole numbers of some columns."""
        worths = [self._worth(m) for m in sets]
        program = self._program(sets, worths, integer=True)
        found = maximise(program, time_limit_s=time_limit_s, gap=1e-4 if self.gap else 1e-10)
        if found.values is None:
            return None
        numbers = np.rint(found.values).astype(int).tolist()
        return [m for m, n in zip(sets, numbers, strict=True) for _ in range(n)]

    def _objective(self, chosen: Sequence[Rated]) -> float:
        total = math.fsum(one.value or 0.0 for one in chosen)
        if self.problem.objective == "throughput":
            return total
        prices = {pool.offer.name: pool.offer.billed_usd_per_hour for pool in self.problem.cluster.pools}
        cost = sum(prices[offer] for one in chosen if one.choice for offer in one.choice.offers)
        return cost if self.problem.objective == "cost" else total / cost

    def _rated(self, chosen: Sequence[Machines]) -> list[Rated]:
        return [self.columns.rated[machines] for machines in chosen]

    def _solution(self, chosen: Sequence[Rated], bound: float, certificate: Certificate) -> Solution:
        pipelines = tuple(one.choice for one in chosen if one.choice is not None)
        objective = self._objective(chosen)
        self._report(objective, bound, "done")
        return Solution(pipelines, objective, bound, certificate, {"gap": self.gap})

    def _at_once(self, chosen: Sequence[Rated], proof: Proof | None = None) -> Solution:
        """When time is over: what there is or what heuristics find, whichever is better, with the bound there is."""
        quick = layer_rate_bound(self.problem, self.estimator)
        bound, certificate = quick.value, quick.certificate
        if proof is not None:
            bound, certificate = proof.bound, proof.certificate()
        best = self._solution(chosen, bound, certificate) if chosen else None
        for heuristic in (Even(), DpBeam()):
            try:
                found = heuristic.solve(self.problem, time_limit_s=0.0)
            except (InfeasibleError, NoSolutionError):
                continue
            if better(self.problem, found.objective, None if best is None else best.objective):
                best = Solution(found.pipelines, found.objective, bound, certificate, {"gap": self.gap})
        if best is None:
            raise self._none(complete=False)
        return best

    def _report(self, objective: float | None, bound: float | None, said: str) -> None:
        if self.on_incumbent is not None and (objective, bound) != self._reported:
            self._reported = (objective, bound)
            self.on_incumbent(Progress(time.monotonic() - self.began, objective, bound, said))

    def _none(self, complete: bool) -> InfeasibleError | NoSolutionError:
        model, problem = self.problem.model.name, self.problem
        if not complete:
            return NoSolutionError(f"no plan for {model} was found in time, and none is ruled out. Allow more time")
        if problem.objective == "cost" and any(r.worth > 0 for r in self.columns.rated.values()):
            wanted, most = problem.workload.requests_per_s or 0.0, self._most()
            return InfeasibleError(
                f"{model} is asked for {wanted:g} req/s; the best plan of this cluster serves {most:.4g}. "
                "Add machines or lower requests_per_s",
                [Reason("demand", model, wanted, most, "req/s")],
            )
        if problem.slo is not None:
            kept = ", ".join(f"{name} <= {limit:g} s" for name, limit in problem.slo.limits().items())
            return InfeasibleError(
                f"no pipeline of {model} on any set of these machines is worth anything within {kept}. Relax the "
                "limit, or add faster GPUs",
                [Reason(name, model, limit, limit, "s") for name, limit in problem.slo.limits().items()],
            )
        return InfeasibleError(
            f"no set of these machines holds a pipeline of {model} with one request of "
            f"{problem.longest_request_tokens:,} tokens. Add machines, use a smaller dtype, or lower max_model_len",
            [Reason("memory", model, problem.model.layer_count, 0, "layers")],
        )

    def _useful(
        self, grid: Sequence[Machines], as_known: Collection[Machines] = ()
    ) -> tuple[FloatArray, list[Machines]]:
        """What all machines up to each set may be worth together, and the sets that are worth more than their parts.

        ``as_known``: sets that are worth what their known pipeline is, and nothing without one.
        """
        only_known = set(as_known)
        parts = np.zeros([count + 1 for count in self.columns.counts])
        useful = []
        for machines in grid:
            known = self.columns.rated[machines]
            least, worth = division(machines, parts), min(known.worth, self.columns.cap)
            if machines in only_known:
                worth = min(known.value or 0.0, self.columns.cap)
            if worth > least * (1 + SAME):
                useful.append(machines)
                least = worth
            parts[machines] = least
        return parts, useful

    def _most(self) -> float:
        """Requests/s of all machines together, at most."""
        grid = sorted(self.columns.rated, key=sum)
        return float(self._useful(grid)[0][self.columns.counts]) if grid else 0.0


def division(machines: Machines, parts: FloatArray) -> float:
    """The best that a set is worth when it is divided into two, by what smaller sets are worth."""
    sub = parts[tuple(slice(0, n + 1) for n in machines)]
    both = sub + np.flip(sub)
    # Undivided is no division.
    both[machines] = both[(0,) * len(machines)] = 0.0
    return float(both.max())
