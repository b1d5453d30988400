"""The best plan of a cluster, with a proof: every set of machines for small inventories, column generation for large.

A plan is a choice of pipelines on disjoint sets of machines, so that the best plan is an integer program with a
column for each set. `columns` knows what the best pipeline on a set is worth, or at most worth.

Small inventories: all sets are rated, smaller ones first; a set is of no interest unless it is worth more than its best
division into two. The program is solved as if each set were worth the most that it may be, the sets chosen are solved
exactly, and so on until nothing changes.

Large inventories: column generation. Prices of machines (duals of the linear program) that no pipeline outweighs
bound every plan. `pricing` finds the sets that are worth most for their price, whatever the sizes, or proves that
none is worth more. The prices asked for next are the `centre` of those that no known column outweighs and that may
prove a better bound; before that, sets around the columns in use are looked at, which takes less.

The certificate of a plan is the prices.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from hetplan.errors import InfeasibleError, InvalidInputError, NoSolutionError, Reason
from hetplan.estimator.base import Estimator, FloatArray, make_estimator
from hetplan.plan import Certificate, Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import OnIncumbent, Progress, Solution, check_time_limit
from hetplan.solvers.build import relative_gap
from hetplan.solvers.highs import Milp, maximise, maximise_linear
from hetplan.solvers.placement import threads
from hetplan.solvers.placement.bound import layer_rate_bound, machine_rates, refuse_infeasible
from hetplan.solvers.placement.centre import analytic_centre
from hetplan.solvers.placement.choice import better, tighter
from hetplan.solvers.placement.columns import Columns, Machines, Rated, price_of, seconds_left
from hetplan.solvers.placement.dp_beam import DpBeam
from hetplan.solvers.placement.even import Even

# Inventories with no more sets of machines than this are enumerated.
_FEW_SETS = 1500
# What proven prices and bounds leave to rounding.
_MARGIN = 2e-9
# A set is worth more than its parts when it is by more than this.
_SAME = 5e-10
# Share of the best at which all machines together are looked at first.
_CLOSE = 0.98
# Tolerance of the first look at a set.
_FIRST_LOOK = 2e-3
# A demand that is missed by this share is reached.
_REACHED = 5e-10
# Bounds this near to the objective need no other proof.
_TIGHT = 1e-7
# Copies of one machine that make a first column.
_COPIES = 8
# Pricings in a row that prove nothing new before the search ends, and new sets after which one stops.
_PATIENCE, _ENOUGH = 4, 20
# Tolerance of a pricing: at most, and what part of the gap.
_LOOSEST, _PART_OF_GAP = 0.05, 4
# Share of the gap wanted to which the linear program is solved; whole pipelines lose the rest.
_NEAR = 0.9
# Prices that known columns outweigh by more than this are not asked for.
_USEFUL = 1.05
# How far inside of its limits the search for a centre begins, and how much more than all columns a better bound weighs.
_INSIDE, _TOWARDS = 5e-4, 1.0
# Share of the time that is kept for choosing whole pipelines.
_FOR_WHOLE = 0.1
# Machines from which on prices are first looked for on a part of them, one in so many, and to what gap.
_MANY_MACHINES, _PART, _PART_GAP = 40, 16, 2e-2
# Sets rated between two linear programs, and in how many rounds.
_NEIGHBOURS, _ROUNDS = 40, 20
# To what tolerance they are rated; and sets that are used.
_ROUGH, _FINE = 1e-2, 5e-4
# Share of its proven price up to which a set is worth next to nothing.
_NEXT_TO_NOTHING = 0.05
# How much less than their price sets may be worth which help to choose whole numbers.
_SLACK = 0.03
# The same share while there is no choice at all.
_ANY = 0.3


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
class _Duals:
    """The linear program over the columns at hand: its value, prices of machines, and the columns it uses."""

    value: float
    prices: FloatArray
    used: list[Machines]


class Exact:
    """Exact search.

    Parameters
    ----------
    gap : float
        Relative distance of bound and objective at which the search ends, e.g. 0.01; 0 asks for the optimum.
    """

    name: ClassVar[str] = "exact"

    def __init__(self, gap: float = 0.0) -> None:
        if isinstance(gap, bool) or not isinstance(gap, (int, float)) or not 0 <= gap < 1:
            raise InvalidInputError(f"gap is a number from 0 to below 1, got {gap!r}")
        self.gap = float(gap)

    def solve(
        self,
        problem: PlacementProblem,
        *,
        time_limit_s: float = 60.0,
        seed: int = 0,
        warm_start: Plan | None = None,
        on_incumbent: OnIncumbent | None = None,
    ) -> Solution:
        """Search until the gap is proven or time is over; see `hetplan.solvers.base.Solver`."""
        began = time.monotonic()
        deadline = began + check_time_limit(time_limit_s)
        problem.refuse_unsupported()
        estimator = make_estimator(problem)
        refuse_infeasible(problem, estimator)
        columns = Columns(problem, estimator, deadline)
        run = _Run(problem, estimator, columns, self.gap, began, deadline, on_incumbent)
        sets = math.prod(count + 1 for count in columns.counts)
        if sets <= _FEW_SETS:
            return run.enumerate(self)
        return run.generate(self, warm_start)


@dataclass(slots=True)
class _Run:
    problem: PlacementProblem
    estimator: Estimator
    columns: Columns
    gap: float
    began: float
    deadline: float
    on_incumbent: OnIncumbent | None
    incumbent: float | None = None
    _reported: tuple[float | None, float | None] = field(default=(None, None))

    # ---- small inventories

    def enumerate(self, solver: Exact) -> Solution:
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
        chosen = self._choose(grid)
        if not complete:
            return self._at_once(solver, chosen, proof)
        if not chosen:
            raise self._none(complete)
        objective = self._objective(chosen)
        if not self.columns.limited:
            proof = self._prove(grid)
        if proof is None:
            bound = layer_rate_bound(self.problem, self.estimator)
            return self._solution(solver, chosen, bound.value, bound.certificate)
        kind = "dual"
        if self.problem.objective != "throughput_per_cost" and abs(proof.bound - objective) > _TIGHT * objective:
            kind = "enumeration"
            if not self.columns.limited:
                proof.bound = objective if self.problem.objective == "cost" else objective * (1 + 4 * _MARGIN)
        return self._solution(solver, chosen, proof.bound, proof.certificate(kind))

    def _at_once(self, solver: Exact, chosen: Sequence[Rated], proof: Proof | None = None) -> Solution:
        """When time is over: what there is or what heuristics find, whichever is better, with the bound there is."""
        quick = layer_rate_bound(self.problem, self.estimator)
        bound, certificate = quick.value, quick.certificate
        if proof is not None:
            bound, certificate = proof.bound, proof.certificate()
        best = self._solution(solver, chosen, bound, certificate) if chosen else None
        for heuristic in (Even(), DpBeam()):
            try:
                found = heuristic.solve(self.problem, time_limit_s=0.0)
            except (InfeasibleError, NoSolutionError):
                continue
            if better(self.problem, found.objective, None if best is None else best.objective):
                best = Solution(found.pipelines, found.objective, bound, certificate, {"gap": solver.gap})
        if best is None:
            raise self._none(complete=False)
        return best

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
        return _division(machines, parts)

    def _rate(self, machines: Machines, least: float) -> Rated:
        if self.columns.limited:
            return self.columns.realise(machines, least=least)
        return self.columns.rate(machines, least=least, tolerance=_FIRST_LOOK)

    def _choose(self, grid: Sequence[Machines]) -> list[Rated]:
        """The best choice: sets that matter are solved exactly until those that are known are no worse than any."""
        rated = self.columns.rated
        grid = [machines for machines in grid if machines in rated]
        if self.problem.objective == "throughput_per_cost":
            return self._best_per_cost(grid)
        everything = rated.get(self.columns.counts)
        if everything is not None and everything.reached > _CLOSE * self._useful(grid)[0][self.columns.counts]:
            # One pipeline on all machines, if it is about the best, rules most others out.
            self.columns.realise(self.columns.counts)
        while True:
            parts, useful = self._useful(grid)
            if self.problem.objective == "cost":
                chosen = self._cheapest(useful, time_limit_s=max(1.0, seconds_left(self.deadline))) or []
                needed = 0.0
            else:
                known, known_useful = self._useful(grid, proven=True)
                chosen = _divided(parts, set(useful), self.columns.counts)
                needed = float(known[self.columns.counts])
                if needed > 0 and parts[self.columns.counts] <= needed * (1 + _SAME):
                    return [rated[machines] for machines in _divided(known, set(known_useful), self.columns.counts)]
            unknown = [machines for machines in chosen if rated[machines].value is None]
            if not unknown:
                return [rated[machines] for machines in chosen]
            # The largest may already be enough to do without the others.
            machines = max(unknown, key=sum)
            rest = tuple(n - m for n, m in zip(self.columns.counts, machines, strict=True))
            least = max(_division(machines, parts), needed - float(parts[rest]))
            self.columns.realise(machines, least=least)

    def _best_per_cost(self, grid: Sequence[Machines]) -> list[Rated]:
        rated, costs = self.columns.rated, self.columns.costs
        while True:
            best = max(grid, key=lambda m: rated[m].worth / price_of(m, costs), default=None)
            if best is None or rated[best].worth <= 0:
                return []
            if rated[best].value is not None:
                return [rated[best]]
            self.columns.realise(best)

    def _useful(self, grid: Sequence[Machines], *, proven: bool = False) -> tuple[FloatArray, list[Machines]]:
        """What all machines up to each set may be worth together, and the sets that are worth more than their parts.

        ``proven``: what the pipelines that are known are worth.
        """
        parts = np.zeros([count + 1 for count in self.columns.counts])
        useful = []
        for machines in grid:
            known = self.columns.rated[machines]
            least, worth = _division(machines, parts), min(known.worth, self.columns.cap)
            if proven:
                worth = min(known.value or 0.0, self.columns.cap)
            if worth > least * (1 + _SAME):
                useful.append(machines)
                least = worth
            parts[machines] = least
        return parts, useful

    def _prove(self, grid: Sequence[Machines]) -> Proof | None:
        """Prices by the linear program over all sets."""
        if self.problem.objective == "throughput_per_cost":
            costs, rated = self.columns.costs, self.columns.rated
            best = max(rated[m].worth / price_of(m, costs) for m in grid) * (1 + _MARGIN)
            return Proof(np.maximum(costs * best, 0.0), best)
        _, useful = self._useful(grid)
        duals = self._linear(useful)
        if duals is None:
            return None
        return self._proof(duals.prices * (1 + _MARGIN))

    # ---- the program over columns

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
            if not integer:
                # What is not served costs more than any machine does.
                costs = self.columns.costs
                dearest = max((price_of(m, costs) / w for m, w in zip(sets, worths, strict=True) if w > 0), default=1.0)
                terms.append((program.column(0.0, math.inf, gain=-10 * dearest * demand), 1.0))
            program.row(terms, least=1.0 - _REACHED)
        return program

    def _linear(self, sets: Sequence[Machines], *, known: bool = False) -> _Duals | None:
        """The linear program: with what sets may be worth, or only what is ``known`` to be reached."""
        worths = [self._worth(m) if known else min(self.columns.rated[m].worth, self.columns.cap) for m in sets]
        found = maximise_linear(self._program(sets, worths, integer=False))
        if found is None:
            return None
        used = [m for m, x in zip(sets, found.values[: len(sets)].tolist(), strict=True) if x > 1e-9]
        counts = len(self.columns.counts)
        if self.problem.objective != "cost":
            scale = 1e3 / max(max(worths, default=1.0), 1e-30)
            return _Duals(found.objective / scale, np.maximum(found.prices[:counts], 0.0) / scale, used)
        demand = self.problem.workload.requests_per_s or 0.0
        rate_usd = abs(float(found.prices[counts])) / demand
        if rate_usd <= 0:
            return None
        gained = np.maximum(found.prices[:counts], 0.0)
        return _Duals(-found.objective, (self.columns.costs + gained) / rate_usd, used)

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

    def _cheapest(self, sets: Sequence[Machines], time_limit_s: float) -> list[Machines] | None:
        worths = [min(self.columns.rated[m].worth, self.columns.cap) for m in sets]
        found = maximise(self._program(sets, worths, integer=True), time_limit_s=time_limit_s, gap=0.0)
        if found.values is None:
            return None
        numbers = np.rint(found.values).astype(int).tolist()
        return [m for m, n in zip(sets, numbers, strict=True) for _ in range(n)]

    # ---- what comes out

    def _objective(self, chosen: Sequence[Rated]) -> float:
        total = math.fsum(one.value or 0.0 for one in chosen)
        if self.problem.objective == "throughput":
            return total
        prices = {pool.offer.name: pool.offer.billed_usd_per_hour for pool in self.problem.cluster.pools}
        cost = sum(prices[offer] for one in chosen if one.choice for offer in one.choice.offers)
        return cost if self.problem.objective == "cost" else total / cost

    def _solution(self, solver: Exact, chosen: Sequence[Rated], bound: float, certificate: Certificate) -> Solution:
        pipelines = tuple(one.choice for one in chosen if one.choice is not None)
        objective = self._objective(chosen)
        self._report(objective, bound, "done")
        return Solution(pipelines, objective, bound, certificate, {"gap": solver.gap})

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

    def _most(self) -> float:
        """Requests/s of all machines together, at most."""
        grid = sorted(self.columns.rated, key=sum)
        return float(self._useful(grid)[0][self.columns.counts]) if grid else 0.0

    # ---- large inventories

    def generate(self, solver: Exact, warm_start: Plan | None) -> Solution:
        """Column generation."""
        if self.problem.objective == "throughput_per_cost":
            return self._best_of_all(solver)
        self._first_columns(warm_start)
        hint = self._old_prices(warm_start)
        warm = hint is not None
        full = self.columns.counts
        if hint is None and sum(full) >= _MANY_MACHINES:
            # A part of the inventory has about the same prices, and they are found sooner.
            part = tuple(-(-count // _PART) for count in full)
            if part != full:
                self.columns.counts = part
                if self._columns():
                    hint = self._converge(max(2 * self.gap, _PART_GAP), hint, final=False)[0].prices
            self.columns.counts = full
        proof, chosen = self._converge(max(self.gap, _TIGHT), hint, final=True, warm=warm)
        if not chosen:
            return self._at_once(solver, [])
        rated = [self.columns.rated[machines] for machines in chosen]
        return self._solution(solver, rated, proof.bound, proof.certificate())

    def _converge(
        self, wanted: float, hint: FloatArray | None, *, final: bool, warm: bool = False
    ) -> tuple[Proof, list[Machines]]:
        """Prices and columns until they meet within a gap; with ``final`` a choice of whole pipelines as well.

        The prices asked for are the centre of all that may prove a better bound, by the columns known. ``warm``: the
        ``hint`` is of about the same problem.
        """
        proof = self._proof(np.array(machine_rates(self.problem, self.columns.tables)[2]) * (1 + _MARGIN))
        # The last part of the time is for whole numbers.
        pricing = self.deadline - _FOR_WHOLE * (self.deadline - self.began) if final else self.deadline
        looked, stuck = math.inf, 0
        many = sum(self.columns.counts) >= _MANY_MACHINES
        # Columns around which there were no better ones.
        around: list[Machines] = []
        # First the prices of single machines tell which sets are of no interest; an older plan's are about right.
        asked = [] if warm else [proof.prices]
        if hint is not None:
            asked.append(np.maximum(hint, 1e-9 * proof.prices))
        chosen: list[Machines] = []
        while True:
            sets = self._columns()
            duals = self._linear(sets, known=True) if sets else None
            gap = math.inf if duals is None else relative_gap(proof.bound, duals.value)
            over = seconds_left(pricing) <= 0 or stuck > _PATIENCE
            if not final and (gap <= _NEAR * wanted or over):
                return proof, []
            enough = bool(chosen) and relative_gap(proof.bound, self._objective(self._rated(chosen))) <= wanted
            if over or enough or gap <= _NEAR * min(wanted, 0.5 * looked):
                chosen, looked = self._whole_numbers(proof, chosen), gap
                reached = relative_gap(proof.bound, self._objective(self._rated(chosen))) if chosen else math.inf
                if over or reached <= wanted or seconds_left(self.deadline) <= 0:
                    return proof, chosen
            tolerance = max(1e-4, min(_LOOSEST, gap / _PART_OF_GAP))
            if asked and self._best_known(asked[0]) <= _USEFUL:
                prices, tolerance = asked.pop(0), wanted / _PART_OF_GAP if warm else _LOOSEST
            else:
                asked, prices = [], self._centre(proof, sets)
                if duals is not None and duals.used != around:
                    if self._add_neighbours(duals, prices, proof, pricing):
                        continue
                    # At other prices there may be some; of many machines it takes long to find out.
                    around = duals.used if many else []
            known = self._best_known(prices)
            ratio, most = self.columns.best_ratio(
                prices,
                least=known * (1 - 1e-6),
                most_found=_ENOUGH,
                tolerance=tolerance,
                deadline=pricing,
            )
            better = self._proof(prices * max(most, known) * (1 + _MARGIN))
            if tighter(self.problem, better.bound, proof.bound):
                proof, stuck = better, 0
                if final:
                    self._report(self.incumbent, proof.bound, f"{len(self.columns.rated)} sets of machines")
            elif ratio <= known * (1 + 1e-6):
                stuck += 1

    def _centre(self, proof: Proof, sets: Sequence[Machines]) -> FloatArray:
        """Prices in the middle of those that no known column outweighs and that may prove a better bound."""
        counts, costs = np.array(self.columns.counts, dtype=float), self.columns.costs
        worths = np.array([self._worth(m) for m in sets])
        columns, machines = np.array(sets, dtype=float).reshape(len(sets), len(counts)), np.eye(len(counts))
        if self.problem.objective != "cost":
            start = proof.prices * (1 + _INSIDE) + _INSIDE * proof.prices.max()
            rows = np.vstack([columns, machines, -counts])
            limits = np.concatenate([worths, np.zeros(len(counts)), [-(1 + _INSIDE) * float(counts @ start)]])
        else:
            # Beside the prices, in dollars, what a request/s is worth.
            demand, rate_usd = self.problem.workload.requests_per_s or 0.0, proof.rate_usd or 0.0
            start = np.append(np.maximum(rate_usd * proof.prices, costs) * (1 + _INSIDE), rate_usd)
            start[:-1] += _INSIDE * start[:-1].max()
            rows = np.vstack(
                [
                    np.column_stack([columns, -worths]),
                    np.eye(len(counts) + 1),
                    np.append(-counts, demand),
                ]
            )
            least = float(rows[-1] @ start)
            limits = np.concatenate([np.zeros(len(sets)), costs, [0.0], [least - _INSIDE * float(counts @ start[:-1])]])
        weights = np.ones(len(rows))
        weights[-1] = _TOWARDS * (len(rows) - 1)
        if (rows @ start - limits).min() <= 0:
            return proof.prices
        point = analytic_centre(rows, limits, weights, start)
        if self.problem.objective != "cost":
            return point
        return np.asarray(point[:-1] / point[-1])

    def _rated(self, chosen: Sequence[Machines]) -> list[Rated]:
        return [self.columns.rated[machines] for machines in chosen]

    def _first_columns(self, warm_start: Plan | None) -> None:
        """One machine or several of a pool, and the sets of an older plan or of a plan by heuristics."""
        counts, rated = self.columns.counts, self.columns.rated
        pools, served = [pool for pool, count in enumerate(counts) if count], dict[int, int]()
        for copies in range(1, _COPIES + 1):
            # One more than the fewest that hold a pipeline.
            pools = [pool for pool in pools if copies <= min(counts[pool], served.get(pool, copies) + 1)]
            units = [_unit(pool, len(counts), copies) for pool in pools]
            for pool, known in zip(pools, self.columns.rate_each(units, [0.0] * len(units), _ROUGH), strict=True):
                if known.reached > 0:
                    served.setdefault(pool, copies)
        sets: list[Sequence[str]] = []
        if warm_start is not None:
            sets = [p.nodes for deployment in warm_start.deployments for p in deployment.pipelines]
        else:
            # The search with a beam takes longer: only where there is no column yet.
            for heuristic in (Even(), DpBeam()) if not self._columns() else (Even(),):
                try:
                    found = heuristic.solve(self.problem, time_limit_s=0.2 * seconds_left(self.deadline))
                except (InfeasibleError, NoSolutionError):
                    continue
                sets += [choice.offers for choice in found.pipelines]
        names = {pool.offer.name: number for number, pool in enumerate(self.problem.cluster.pools)}
        for offers in sets:
            taken = [0] * len(counts)
            for offer in offers:
                if offer in names:
                    taken[names[offer]] += 1
            machines = tuple(min(n, most) for n, most in zip(taken, counts, strict=True))
            if any(machines) and machines not in rated:
                self.columns.rate(machines)

    def _old_prices(self, warm_start: Plan | None) -> FloatArray | None:
        """Prices of an older plan's certificate; None where an offer has none."""
        if warm_start is None or warm_start.certificate is None or not warm_start.certificate.pool_prices:
            return None
        old = dict(
            zip(
                [pool.offer.name for pool in warm_start.problem.cluster.pools],
                warm_start.certificate.pool_prices,
                strict=False,
            )
        )
        prices = [old.get(pool.offer.name, 0.0) for pool in self.problem.cluster.pools]
        return np.array(prices) if all(price > 0 for price in prices) else None

    def _columns(self) -> list[Machines]:
        """Sets on which a pipeline is known, and for which there are machines."""
        counts = self.columns.counts
        return [
            m
            for m, known in self.columns.rated.items()
            if (known.reached > 0 if known.value is None else known.value > 0)
            and all(a <= b for a, b in zip(m, counts, strict=True))
        ]

    def _add_neighbours(self, duals: _Duals, prices: FloatArray, proof: Proof, deadline: float) -> int:
        """Adds sets that differ by a machine or two from the best and are worth more than their price."""
        least = {
            machines: price_of(machines, prices) * (1 + 1e-4)
            for machines in dict.fromkeys(_around(duals.used, self.columns.counts))
        }
        return self._add(self._undecided(least, proof)[:_NEIGHBOURS], least, deadline)

    def _add(self, sets: Sequence[Machines], least: Mapping[Machines, float], deadline: float) -> int:
        """Rate sets as far as they are worth more than ``least``; how many are."""
        added, hand = 0, 4 * threads.count()
        for first in range(0, len(sets), hand):
            if seconds_left(deadline) <= 0:
                break
            part = sets[first : first + hand]
            added += sum(known.reached > 0 for known in self.columns.rate_each(part, [least[m] for m in part], _ROUGH))
        return added

    def _best_known(self, prices: FloatArray) -> float:
        sets = self._columns()
        if not sets:
            return 1e-3
        worths = np.array([self._worth(m) for m in sets])
        return float((worths / (np.array(sets) @ prices)).max())

    def _undecided(self, least: Mapping[Machines, float], proof: Proof) -> list[Machines]:
        """Sets that may be worth more than ``least``, and of which no pipeline is known; the most hopeful first."""
        open_sets: list[tuple[float, float, Machines]] = []
        for machines, wanted in least.items():
            known, most = self.columns.rated.get(machines), min(price_of(machines, proof.prices), self.columns.cap)
            # What is next to nothing is of no interest at any price.
            limit = max(wanted, _NEXT_TO_NOTHING * most)
            if known is not None and (known.value is not None or known.upper <= limit or known.reached > 0):
                continue
            if most > limit:
                open_sets.append((limit / most, limit, machines))
        open_sets.sort()
        kept = set(self.columns.sift([m for _, _, m in open_sets], [limit for _, limit, _ in open_sets], _ROUGH))
        return [machines for _, _, machines in open_sets if machines in kept]

    def _whole_numbers(self, proof: Proof, before: list[Machines]) -> list[Machines]:
        """The best whole pipelines among the columns near their price, each on machines in order."""
        best = before
        for _ in range(_ROUNDS):
            chosen = self._realised(proof, best)
            improved = False
            if chosen:
                objective = self._objective(self._rated(chosen))
                improved = not best or better(self.problem, objective, self._objective(self._rated(best)))
                if improved:
                    best, self.incumbent = chosen, objective
                    self._report(objective, proof.bound, f"{len(chosen)} pipelines")
                if relative_gap(proof.bound, objective) <= self.gap:
                    break
            # Sets around the chosen ones that are nearly worth their price; any, while nothing is chosen.
            share = 1 - _SLACK if best else _ANY
            around = dict.fromkeys(_around(best or self._linear_used(), self.columns.counts))
            least = {machines: share * price_of(machines, proof.prices) for machines in around}
            added = self._add(self._undecided(least, proof), least, self.deadline)
            if seconds_left(self.deadline) <= 0 or (not added and not improved):
                break
        return best

    def _realised(self, proof: Proof, before: list[Machines]) -> list[Machines]:
        """The best whole numbers of columns, once the pipeline of each that is chosen is known."""
        columns = self.columns

        def look_at(machines: Machines) -> None:
            if seconds_left(self.deadline) > 0:
                columns.realise(machines, tolerance=max(_FINE, self.gap / 20), near=True)

        while True:
            share, over = 1 - _SLACK if before else _ANY, seconds_left(self.deadline) <= 0
            near = [m for m in self._columns() if self._worth(m) >= share * price_of(m, proof.prices)]
            sets = list(dict.fromkeys([*near, *self._linear_used(), *before]))
            if over:
                sets = [m for m in sets if columns.rated[m].value is not None]
            chosen = self._whole(sets, time_limit_s=max(0.3, min(5.0, 0.3 * seconds_left(self.deadline))))
            if chosen is None:
                return before
            unknown = [m for m in dict.fromkeys(chosen) if columns.rated[m].value is None]
            if not unknown:
                return chosen
            threads.each(look_at, unknown)

    def _linear_used(self) -> list[Machines]:
        duals = self._linear(self._columns(), known=True)
        return [] if duals is None else duals.used

    def _best_of_all(self, solver: Exact) -> Solution:
        """The one pipeline of most requests per dollar: prices are what the machines cost."""
        columns = self.columns
        costs = np.maximum(columns.costs, 1e-9 * max(float(columns.costs.max()), 1e-9))
        self._first_columns(None)
        bound = math.inf
        for tolerance in (5e-2, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8):
            known = self._best_known(costs)
            _, most = columns.best_ratio(
                costs, least=known * (1 - 1e-6), most_found=_ENOUGH, tolerance=tolerance, deadline=self.deadline
            )
            bound = min(bound, max(most, known) * (1 + _MARGIN))
            while True:
                sets = self._columns()
                best = max(sets, key=lambda m: self._worth(m) / price_of(m, costs), default=None)
                if best is None or columns.rated[best].value is not None:
                    break
                columns.realise(best)
            if best is not None:
                objective = self._objective([columns.rated[best]])
                self._report(objective, bound, "1 pipeline")
                if relative_gap(bound, objective) <= max(self.gap, _TIGHT):
                    break
            if seconds_left(self.deadline) <= 0:
                break
        if best is None or not math.isfinite(bound):
            return self._at_once(solver, [])
        return self._solution(solver, [columns.rated[best]], bound, Proof(costs * bound, bound).certificate())


def _division(machines: Machines, parts: FloatArray) -> float:
    """The best that a set is worth when it is divided into two, by what smaller sets are worth."""
    sub = parts[tuple(slice(0, n + 1) for n in machines)]
    both = sub + np.flip(sub)
    # Undivided is no division.
    both[machines] = both[(0,) * len(machines)] = 0.0
    return float(both.max())


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


def _unit(pool: int, pools: int, copies: int = 1) -> Machines:
    return tuple(copies if other == pool else 0 for other in range(pools))


def _around(sets: Sequence[Machines], counts: Machines) -> Iterator[Machines]:
    """Sets with a machine more, a machine less, or one exchanged for another; and single machines with another."""
    units = [_unit(pool, len(counts)) for pool in range(len(counts)) if counts[pool]]
    for machines in [*sets, *units]:
        fewer = [_less(machines, unit) for unit in units]
        for one in [machines, *(f for f in fewer if f is not None)]:
            if one != machines and any(one):
                yield one
            for unit in units:
                more = tuple(a + b for a, b in zip(one, unit, strict=True))
                if more != machines and all(a <= b for a, b in zip(more, counts, strict=True)):
                    yield more


def _less(machines: Machines, unit: Machines) -> Machines | None:
    fewer = tuple(a - b for a, b in zip(machines, unit, strict=True))
    return fewer if min(fewer) >= 0 else None
