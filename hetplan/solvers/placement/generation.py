"""The best plan of a large inventory: column generation.

Prices of machines (duals of the linear program) that no pipeline outweighs bound every plan. `pricing` finds the sets
that are worth most for their price, whatever the sizes, or proves that none is worth more. The prices asked for next
are the `centre` of those that no known column outweighs and that may prove a better bound; before that, sets around the
columns in use are looked at, which takes less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hetplan import __version__
from hetplan.errors import InfeasibleError, NoSolutionError
from hetplan.estimator.base import FloatArray, make_estimator
from hetplan.plan import Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers import threads
from hetplan.solvers.base import Solution
from hetplan.solvers.build import relative_gap
from hetplan.solvers.placement.bound import machine_rates
from hetplan.solvers.placement.centre import analytic_centre
from hetplan.solvers.placement.choice import better, tighter
from hetplan.solvers.placement.columns import Columns, Rated, price_of
from hetplan.solvers.placement.dp_beam import DpBeam
from hetplan.solvers.placement.even import Even
from hetplan.solvers.placement.program import MARGIN, TIGHT, Duals, Program, Proof
from hetplan.solvers.placement.spaces import Machines, seconds_left

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
# Share of their price that sets are worth at least which help to choose whole numbers.
_ANY = 0.3


class Generation(Program):
    """Column generation."""

    def generate(self, warm_start: Plan | None) -> Solution:
        """Column generation."""
        if self.problem.objective == "throughput_per_cost":
            return self._best_of_all()
        self._first_columns(warm_start)
        hint = self._old_prices(warm_start)
        warm = hint is not None
        before = hint if warm_start is not None and _rules(warm_start, self.problem) else None
        if hint is None and sum(self.columns.counts) >= _MANY_MACHINES:
            hint = self._prices_of_a_part()
        proof, chosen = self._converge(max(self.gap, TIGHT), hint, final=True, warm=warm, before=before)
        if not chosen:
            return self._at_once([], proof)
        return self._solution(self._rated(chosen), proof.bound, proof.certificate())

    def _prices_of_a_part(self) -> FloatArray | None:
        """About the prices of the whole inventory, found sooner on a part of it; its columns become known.

        In the part, machines that differ in their network alone are of one kind.
        """
        cluster, rated = self.problem.cluster, self.columns.rated
        alike: dict[object, list[int]] = {}
        for number, pool in enumerate(cluster.pools):
            machine, offer = cluster.instance_type(pool.offer.instance_type), pool.offer
            links = tuple(sorted((size, str(link)) for size, link in machine.intra_node_links.items()))
            cost = offer.billed_usd_per_hour if self.problem.objective == "cost" else None
            key = (machine.gpu.name, machine.gpu_count, links, offer.place, cost)
            alike.setdefault(key, []).append(number)
        kinds = list(alike.values())
        pools = [
            cluster.pools[kind[0]].replace(count=-(-sum(self.columns.counts[i] for i in kind) // _PART))
            for kind in kinds
        ]
        if sum(pool.count for pool in pools) == sum(self.columns.counts):
            return None
        names = {pool.offer.instance_type for pool in pools}
        types = tuple(machine for machine in cluster.instance_types if machine.name in names)
        problem = self.problem.replace(cluster=cluster.replace(instance_types=types, pools=tuple(pools)))
        estimator = make_estimator(problem)
        columns = Columns(problem, estimator, self.deadline, egress=self.columns.egress)
        firsts = [kind[0] for kind in kinds]
        for machines, known in rated.items():
            own = tuple(machines[first] for first in firsts)
            if sum(own) == sum(machines):
                columns.rated[own] = replace(known)
        part = Generation(problem, estimator, columns, self.gap, self.began, self.deadline, None)
        if not part._columns():
            return None
        proof, _ = part._converge(max(2 * self.gap, _PART_GAP), None, final=False)
        for machines in part._columns():
            counts = dict(zip(firsts, machines, strict=True))
            whole = tuple(counts.get(number, 0) for number in range(len(cluster.pools)))
            # Its bound may be of networks that are not all there are.
            rated.setdefault(whole, Rated(math.inf, columns.rated[machines].reached))
        prices = np.zeros(len(cluster.pools))
        for kind, price in zip(kinds, proof.prices.tolist(), strict=True):
            prices[kind] = price
        return prices

    def _converge(
        self,
        wanted: float,
        hint: FloatArray | None,
        *,
        final: bool,
        warm: bool = False,
        before: FloatArray | None = None,
    ) -> tuple[Proof, list[Machines]]:
        """Prices and columns until they meet within a gap; with ``final`` a choice of whole pipelines as well.

        The prices asked for are the centre of all that may prove a better bound, by the columns known. ``warm``: the
        ``hint`` is of about the same problem. ``before``: prices that an older plan proves for this problem.
        """
        proof = self._proof(np.array(machine_rates(self.problem, self.columns.tables)[2]) * (1 + MARGIN))
        if before is not None and self._best_known(self._columns(), before) <= 1:
            older = self._proof(np.maximum(before, 1e-9 * proof.prices))
            if tighter(self.problem, older.bound, proof.bound):
                proof, hint, warm = older, None, True
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
            if asked and self._best_known(sets, asked[0]) <= _USEFUL:
                prices, tolerance = asked.pop(0), wanted / _PART_OF_GAP if warm else _LOOSEST
            else:
                asked, prices = [], self._centre(proof, sets)
                if duals is not None and duals.used != around:
                    if self._add_neighbours(duals, prices, proof, pricing):
                        continue
                    # At other prices there may be some; of many machines it takes long to find out.
                    around = duals.used if many else []
            known = self._best_known(sets, prices)
            ratio, most = self.columns.best_ratio(
                prices,
                least=known * (1 - 1e-6),
                most_found=_ENOUGH,
                tolerance=tolerance,
                useful=self._useful_ratio(prices, proof),
                deadline=pricing,
            )
            better = self._proof(prices * max(most, known) * (1 + MARGIN))
            if tighter(self.problem, better.bound, proof.bound):
                proof, stuck = better, 0
                if final:
                    self._report(self.incumbent, proof.bound, f"{len(self.columns.rated)} sets of machines")
            elif ratio <= known * (1 + 1e-6):
                stuck += 1

    def _useful_ratio(self, prices: FloatArray, proof: Proof) -> float:
        """Times these prices, those that no pipeline outweighs would bound plans as they are bound already."""
        together = price_of(self.columns.counts, prices)
        if self.problem.objective != "throughput" or together <= 0:
            return math.inf
        return proof.bound / together

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
                [pool.offer.name for pool in warm_start.placement.cluster.pools],
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

    def _add_neighbours(self, duals: Duals, prices: FloatArray, proof: Proof, deadline: float) -> int:
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

    def _best_known(self, sets: Sequence[Machines], prices: FloatArray) -> float:
        """The most that a pipeline known on one of the sets is worth per price."""
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
            # Sets around the chosen ones that a better plan may have; around any, while nothing is chosen.
            around = dict.fromkeys(_around(best or self._linear_used(), self.columns.counts))
            least = {machines: self._wanted(machines, proof, best) for machines in around}
            added = self._add(self._undecided(least, proof), least, self.deadline)
            if seconds_left(self.deadline) <= 0 or (not added and not improved):
                break
        return best

    def _wanted(self, machines: Machines, proof: Proof, chosen: Sequence[Machines]) -> float:
        """What a set has to be worth to help: a better plan loses no more to the prices than the one chosen does."""
        price, loss = price_of(machines, proof.prices), math.inf
        if chosen:
            loss = abs(proof.bound - self._objective(self._rated(chosen)))
            if self.problem.objective == "cost":
                loss /= max(proof.rate_usd or 0.0, 1e-30)
        return max(_ANY * price, price - loss)

    def _realised(self, proof: Proof, before: list[Machines]) -> list[Machines]:
        """The best whole numbers of columns, once the pipeline of each that is chosen is known."""
        columns = self.columns

        def look_at(machines: Machines) -> None:
            if seconds_left(self.deadline) > 0:
                columns.realise(machines, tolerance=max(_FINE, self.gap / 20), near=True)

        while True:
            over = seconds_left(self.deadline) <= 0
            near = [m for m in self._columns() if self._worth(m) >= self._wanted(m, proof, before)]
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

    def _best_of_all(self) -> Solution:
        """The one pipeline of most requests per dollar: prices are what the machines cost."""
        columns = self.columns
        costs = np.maximum(columns.costs, 1e-9 * max(float(columns.costs.max()), 1e-9))
        self._first_columns(None)
        bound = math.inf
        for tolerance in (5e-2, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8):
            known = self._best_known(self._columns(), costs)
            _, most = columns.best_ratio(
                costs, least=known * (1 - 1e-6), most_found=_ENOUGH, tolerance=tolerance, deadline=self.deadline
            )
            bound = min(bound, max(most, known) * (1 + MARGIN))
            while True:
                sets = self._columns()
                best = max(sets, key=lambda m: self._worth(m) / price_of(m, costs), default=None)
                if best is None or columns.rated[best].value is not None:
                    break
                # The best order of many machines across regions takes long to prove; the bound does not rest on it.
                columns.realise(best, near=seconds_left(self.deadline) <= 0)
            if best is not None:
                objective = self._objective([columns.rated[best]])
                self._report(objective, bound, "1 pipeline")
                if relative_gap(bound, objective) <= max(self.gap, TIGHT):
                    break
            if seconds_left(self.deadline) <= 0:
                break
        if best is None or not math.isfinite(bound):
            return self._at_once([])
        return self._solution([columns.rated[best]], bound, Proof(costs * bound, bound).certificate())


def _rules(plan: Plan, problem: PlacementProblem) -> bool:
    """Whether an older plan's prices hold for a problem: the same one, but for machines that are gone.

    A set of the machines that are left was one before, so that no pipeline on it outweighs its price. That the older
    certificate is true is taken on trust, where this version made it; checking the new plan proves the bound anew.
    """
    old = plan.placement
    if plan.provenance.version != __version__:
        return False
    calibrations = {calibration.gpu: calibration for calibration in old.calibrations}
    if any(calibrations.get(calibration.gpu) != calibration for calibration in problem.calibrations):
        return False
    machines = {machine.name: machine for machine in old.cluster.instance_types}
    pools = {pool.offer.name: pool for pool in old.cluster.pools}
    return (
        all(machines.get(machine.name) == machine for machine in problem.cluster.instance_types)
        and all(
            pool.offer.name in pools
            and pools[pool.offer.name].offer == pool.offer
            and pools[pool.offer.name].count >= pool.count
            for pool in problem.cluster.pools
        )
        and problem.cluster.zone_links == old.cluster.zone_links
        and problem.replace(
            cluster=old.cluster, calibrations=old.calibrations, calibration_sha256=old.calibration_sha256
        )
        == old
    )


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
