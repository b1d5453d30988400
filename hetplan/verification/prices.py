"""What a certificate of kind ``dual`` or ``enumeration`` proves, computed again from its prices.

A price for each machine, such that no pipeline is worth more than the machines it takes, bounds every plan. Whether
that is so is looked up for all pipelines at once (`box_search`). Where the bound lies above what is stated, a plan that
passes the stated bound consists of pipelines worth nearly as much as their machines; those sets of machines are
listed, each with the most that a pipeline on it is worth, and the best choice among them is found. What pipelines pay
for zone links is left out, as it makes no plan cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import LinearConstraint, milp

from hetplan.estimator.base import Estimator
from hetplan.plan import Certificate
from hetplan.problem.placement import PlacementProblem
from hetplan.verification.box_search import BOX_COLUMNS, DONE, RIPE, search
from hetplan.verification.certificate import Proven
from hetplan.verification.stage_tables import Space, StageTimes, settings
from hetplan.verification.tables import FloatArray

_TOLERANCE = 1e-9
_STACK = 4000
_MANY_SETS = 4000
# Boxes after which a proof is given up: minutes.
_MOST_BOXES = 3_000_000

Machines = tuple[int, ...]


def proven_bound(problem: PlacementProblem, estimator: Estimator, certificate: Certificate, stated: float) -> Proven:
    """The bound on the objective that a certificate of prices proves.

    Parameters
    ----------
    problem : PlacementProblem
    estimator : Estimator
        The problem's own.
    certificate : Certificate
        Of kind "dual" or "enumeration".
    stated : float
        The bound that kind "enumeration" is to prove.

    Returns
    -------
    Proven

    Raises
    ------
    ValueError
        If the prices do not match the cluster, are not finite or lie below what the machines cost.
    """
    prices, rate_price = _checked(problem, certificate)
    pools = problem.cluster.pools
    counts = [pool.count for pool in pools]
    if problem.objective == "throughput":
        bound = math.fsum(count * price for count, price in zip(counts, prices, strict=True))
    elif problem.objective == "throughput_per_cost":
        bound = max(price / pool.offer.billed_usd_per_hour for price, pool in zip(prices, pools, strict=True))
    else:
        demand = problem.workload.requests_per_s or 0.0
        profits = (
            pool.count * (rate_price * price - pool.offer.billed_usd_per_hour)
            for price, pool in zip(prices, pools, strict=True)
        )
        bound = rate_price * demand - math.fsum(profits)
    slack = 0.0
    if certificate.kind == "enumeration":
        if problem.objective == "throughput_per_cost":
            raise ValueError("objective throughput_per_cost has no certificate of kind enumeration")
        if problem.objective == "throughput":
            slack = max(0.0, bound - stated)
        else:
            slack = max(0.0, stated - bound) / rate_price if rate_price > 0 else 0.0
    scan = _Scan(problem, estimator, prices, slack)
    dear = scan.run()
    nothing = math.inf if problem.objective != "cost" else 0.0
    if dear is not None:
        return Proven(nothing, dear, holds=False)
    if slack == 0.0:
        return Proven(bound, "by prices per machine", holds=True)
    worth = scan.worth
    why = f"by prices per machine and {len(worth)} sets of machines"
    if problem.objective == "throughput":
        return Proven(min(bound, max(stated_floor(bound, slack), _best_throughput(worth, counts))), why, holds=True)
    costs = [pool.offer.billed_usd_per_hour for pool in pools]
    cheapest = _least_cost(worth, counts, costs, problem.workload.requests_per_s or 0.0)
    return Proven(max(bound, min(stated, cheapest)), why, holds=True)


def stated_floor(bound: float, slack: float) -> float:
    """Plans below the stated bound are not looked at, so no less than it is proven."""
    return bound - slack


def _checked(problem: PlacementProblem, certificate: Certificate) -> tuple[tuple[float, ...], float]:
    prices, pools = certificate.pool_prices, problem.cluster.pools
    if len(prices) != len(pools):
        raise ValueError(f"{len(prices)} prices for {len(pools)} offers")
    if not all(math.isfinite(price) and price >= 0 for price in prices):
        raise ValueError(f"prices must be finite and non-negative, got {list(prices)}")
    rate_price = certificate.usd_per_hour_per_request_rate
    if problem.objective != "cost":
        return prices, 0.0
    if rate_price is None or not (math.isfinite(rate_price) and rate_price >= 0):
        raise ValueError(
            f"usd_per_hour_per_request_rate is {rate_price}; objective cost needs what one request/s is worth"
        )
    for price, pool in zip(prices, pools, strict=True):
        cost = pool.offer.billed_usd_per_hour
        if not rate_price * price >= cost * (1 - 1e-12):
            raise ValueError(f"{pool.offer.name} is priced {rate_price * price:.9g} $/h and costs {cost:.9g}")
    return prices, rate_price


@dataclass
class _Scan:
    """Finds the sets of machines on which a pipeline may be worth their price less the slack."""

    problem: PlacementProblem
    estimator: Estimator
    prices: tuple[float, ...]
    slack: float
    # Machines of each pool -> the most that a pipeline on them is worth, where that is near their price.
    worth: dict[Machines, float] = field(default_factory=dict)
    boxes: int = 0
    _seen: set[Machines] = field(default_factory=set)

    def run(self) -> str | None:
        """Fills ``worth``; in words, what contradicts the prices."""
        times = StageTimes(self.problem, self.estimator)
        spaces = [Space(times, setting) for setting in settings(self.problem)]
        for space in spaces:
            for machines in self._sets(space):
                if machines is None:
                    return "nothing: too many sets of machines are worth about their price"
                price = self.price(machines)
                worth = max(self._worth(other, machines) for other in spaces)
                if worth > price * (1 + _TOLERANCE):
                    return f"nothing: {self.named(machines)} may be worth {worth:.9g}, priced {price:.9g}"
                if worth > price - self.slack:
                    self.worth[machines] = worth
        return None

    def price(self, machines: Machines) -> float:
        return math.fsum(count * price for count, price in zip(machines, self.prices, strict=True))

    def named(self, machines: Machines) -> str:
        pools = self.problem.cluster.pools
        return " + ".join(f"{n} x {pool.offer.name}" for n, pool in zip(machines, pools, strict=True) if n)

    def _sets(self, space: Space) -> Iterator[Machines | None]:
        """Sets not seen before of one space; None when there are too many."""
        pools = space.setting.pools
        counts = {pool: self.problem.cluster.pools[pool].count for pool in pools}
        tables, pool_type = space.tables(counts)
        boxes = np.zeros((_STACK, BOX_COLUMNS))
        boxes[0] = space.first_box(tables, counts)
        found, depth, outcome = np.zeros((_MANY_SETS, len(pools)), dtype=np.int64), 1, RIPE
        seen = [
            [machines[pool] for pool in pools]
            for machines in self._seen
            if all(pool in pools or not count for pool, count in enumerate(machines))
        ]
        known = np.array(seen, dtype=np.int64).reshape(-1, len(pools))
        while outcome == RIPE:
            outcome, depth, sets, _, boxes_seen = search(
                tables,
                pool_type,
                np.array(list(counts.values())),
                np.array([self.prices[pool] for pool in pools]),
                self.slack,
                0.0,
                False,
                boxes,
                depth,
                _MOST_BOXES - self.boxes,
                known,
                found,
            )
            self.boxes += boxes_seen
            if outcome == RIPE:
                for row in found[:sets]:
                    machines = self._as_machines(dict(zip(pools, row.tolist(), strict=True)))
                    if machines not in self._seen:
                        self._seen.add(machines)
                        yield machines
                known = np.concatenate([known, found[:sets]])
                if len(self._seen) > _MANY_SETS:
                    yield None
                    return
        if outcome != DONE:
            yield None

    def _as_machines(self, counts: Mapping[int, int]) -> Machines:
        return tuple(counts.get(pool, 0) for pool in range(len(self.prices)))

    def _worth(self, space: Space, machines: Machines) -> float:
        """The most that a pipeline of the space on exactly these machines is worth; 0 when far below their price."""
        if any(count and pool not in space.setting.pools for pool, count in enumerate(machines)):
            return 0.0
        least = max(0.0, self.price(machines) - self.slack)
        taken = {pool: count for pool, count in enumerate(machines) if count}
        tables, pool_type = space.tables(taken)
        boxes = np.zeros((_STACK, BOX_COLUMNS))
        boxes[0] = space.first_box(tables, taken)
        nothing = np.zeros((0, len(taken)), dtype=np.int64)
        outcome, _, _, worth, boxes_seen = search(
            tables,
            pool_type,
            np.array(list(taken.values())),
            np.zeros(len(taken)),
            0.0,
            least,
            True,
            boxes,
            1,
            _MOST_BOXES,
            nothing,
            nothing,
        )
        self.boxes += boxes_seen
        if outcome != DONE:
            return math.inf
        return worth * (1 + 1e-9) if worth > least else 0.0


def _best_throughput(worth: Mapping[Machines, float], counts: list[int]) -> float:
    """The most that pipelines on disjoint sets of the machines are worth together."""
    if not worth:
        return 0.0
    sets, values = np.array(list(worth)).T, np.array(list(worth.values()))
    return -_solve(-values, LinearConstraint(sets, -np.inf, np.array(counts, dtype=float)))


def _least_cost(worth: Mapping[Machines, float], counts: list[int], costs: list[float], demand: float) -> float:
    """$/h of the cheapest pipelines on disjoint sets of the machines that are worth the demand together."""
    if not worth:
        return math.inf
    sets, values = np.array(list(worth)).T, np.array(list(worth.values()))
    limits = [
        LinearConstraint(sets, -np.inf, np.array(counts, dtype=float)),
        LinearConstraint(values[np.newaxis] / demand, 1 - _TOLERANCE, np.inf),
    ]
    return _solve(np.array(costs) @ sets, *limits)


def _solve(objective: FloatArray, *limits: LinearConstraint) -> float:
    """The proven bound on the least of an integer program; infinite when nothing is feasible."""
    found = milp(
        objective, integrality=np.ones(len(objective), dtype=np.int64), constraints=limits, options={"mip_rel_gap": 0.0}
    )
    if found.status == 2:
        return math.inf
    dual = found.mip_dual_bound
    if dual is None:
        raise ValueError(f"the choice among sets of machines could not be made: {found.message}")
    return float(dual)
