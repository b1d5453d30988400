"""Where to rent a machine: parts that policies share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator

from hetplan.policies.situation import Node, PipelineView, PoolView, RentedMarket, Request, Situation


class Renting:
    """Requests of one decision: it knows what is left after those already made.

    Parameters
    ----------
    situation : Situation
        What can be rented, and the spares.
    """

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._taken: Counter[tuple[str, RentedMarket]] = Counter()
        self._spares = [node for node in situation.spares if node.deadline_s is None]
        self.requests: list[Request] = []

    def spare(self, pool: str, pipeline: str) -> bool:
        """Have a spare of the pool's instance type serve the pipeline; whether there is one."""
        kind = self._situation.instance_type(pool)
        spare = next((s for s in self._spares if self._situation.instance_type(s.pool) == kind), None)
        if spare is None:
            return False
        self._spares.remove(spare)
        self.requests.append(Request(spare.pool, spare.market, pipeline))
        return True

    def rent(
        self,
        pool: str,
        market: RentedMarket,
        pipeline: str | None,
        *,
        prefer: Callable[[PoolView], float] | None = None,
    ) -> bool:
        """Rent a machine of the pool's instance type; whether one can be had.

        Parameters
        ----------
        pool : str
            Where the machine before it stood.
        market : "spot" or "on_demand"
            How to rent.
        pipeline : str or None
            For which pipeline, or a spare.
        prefer : callable, optional
            Least first; by default the same pool, then the cheapest.
        """
        kind = self._situation.instance_type(pool)
        open_pools = [
            p for p in self._situation.pools.values() if p.instance_type == kind and self._left(p, market) > 0
        ]
        if not open_pools:
            return False
        first = prefer or (lambda p: p.name != pool)
        chosen = min(open_pools, key=lambda p: (first(p), price(p, market), p.name))
        self._taken[chosen.name, market] += 1
        self.requests.append(Request(chosen.name, market, pipeline))
        return True

    def spares_left(self) -> int:
        """Spares that no request of this decision takes."""
        return len(self._spares)

    def _left(self, pool: PoolView, market: RentedMarket) -> int:
        free = pool.spot_free if market == "spot" else pool.on_demand_free
        return free - self._taken[pool.name, market]


def price(pool: PoolView, market: RentedMarket) -> float:
    """Dollars an hour of a machine."""
    return pool.spot_usd_per_hour if market == "spot" else pool.on_demand_usd_per_hour


def missing(situation: Situation) -> Iterator[tuple[PipelineView, str]]:
    """Pipelines and the pools of machines that they lack."""
    for pipeline in situation.pipelines:
        for pool in pipeline.missing:
            yield pipeline, pool


def stand_ins(situation: Situation) -> Iterator[tuple[PipelineView, Node]]:
    """On-demand machines in pipelines that serve."""
    for pipeline in situation.pipelines:
        if pipeline.state == "serving":
            for node in pipeline.nodes:
                if node.market == "on_demand":
                    yield pipeline, node


def back_to_spot(renting: Renting, situation: Situation, *, kept: Collection[str] = ()) -> tuple[str, ...]:
    """Rent spot for the on-demand machines of pipelines that serve, where there is some that is cheaper.

    Parameters
    ----------
    renting : Renting
        Takes the requests.
    situation : Situation
        What stands and what can be rented.
    kept : collection of str
        Pipelines whose on-demand machines stay.

    Returns
    -------
    tuple of str
        The machines that can be given back.
    """
    back = []
    for pipeline, node in stand_ins(situation):
        pool = situation.pools[node.pool]
        cheaper = pool.spot_usd_per_hour < pool.on_demand_usd_per_hour
        if pipeline.name not in kept and cheaper and renting.rent(node.pool, "spot", pipeline.name):
            back.append(node.name)
    return tuple(back)
