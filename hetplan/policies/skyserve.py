"""SkyServe's SpotHedge, for pipelines of several machines."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from hetplan.errors import InvalidInputError
from hetplan.policies.renting import Renting, missing, stand_ins
from hetplan.policies.situation import Actions, DefaultMove, Event, Loss, Move, Notice, PoolView, Situation


class SkyServe:
    """Spare spot machines spread over pools, and on-demand ones for as long as spot is missing.

    Parameters
    ----------
    extra_spot : int
        Spot machines held beyond what the pipelines need.

    Notes
    -----
    Mao et al., "SkyServe: Serving AI Models across Regions and Clouds with Spot Instances" (EuroSys 2025), and
    SkyPilot's documentation of ``dynamic_ondemand_fallback``. Kept: spot is launched where none was taken lately, over
    as many pools as possible; once all of them took one, all count again; more spot is held than needed; while spot is
    not ready, an on-demand machine stands in, and it goes when spot is ready; notices are not used; requests that were
    in flight are sent again by their clients.

    Departures: SkyServe counts whole replicas, each on machines of one kind. Here a spare is one machine, of the kind
    that was lost last, which takes the place of a lost one in any pipeline; and it serves nothing while it is a spare.
    """

    name: ClassVar[str] = "skyserve"
    # SkyServe's autoscaler decides every 20 seconds.
    tick_s: ClassVar[float | None] = 20.0
    parallel_start: ClassVar[bool] = False
    default_move: ClassVar[DefaultMove] = "restart"

    def __init__(self, *, extra_spot: int = 1) -> None:
        if extra_spot < 0:
            raise InvalidInputError(f"extra_spot is {extra_spot}; give 0 or more machines")
        self.extra_spot = extra_spot

    def decide(self, situation: Situation, event: Event) -> Actions:
        """Say what to do about an event."""
        if isinstance(event, Notice):
            return Actions()
        renting = Renting(situation)
        spread = _Spread(situation)
        # Kinds of the on-demand machines that stand in: each is to be followed by a spot machine.
        followed = []
        for pipeline, pool in missing(situation):
            if renting.spare(pool, pipeline.name):
                continue
            if renting.rent(pool, "on_demand", pipeline.name):
                followed.append(pool)
            else:
                renting.rent(pool, "spot", pipeline.name, prefer=spread)
        given_back = []
        for pipeline, node in stand_ins(situation):
            if renting.spare(node.pool, pipeline.name):
                given_back.append(node.name)
            else:
                followed.append(node.pool)
        wanted = followed + [self._kind(situation, event)] * self.extra_spot
        for pool in wanted[renting.spares_left() :]:
            renting.rent(pool, "spot", None, prefer=spread)
        restart: Move = "restart"
        return Actions(
            tuple(renting.requests),
            start_concurrently=bool(given_back),
            moves=(restart,) * len(situation.in_flight) if isinstance(event, Loss) else (),
            return_to_spot=tuple(given_back),
        )

    def _kind(self, situation: Situation, event: Event) -> str:
        """The pool whose kind of machine is kept spare: the event's, or the one with the most machines."""
        if isinstance(event, Loss):
            return event.pool
        used = Counter(node.pool for pipeline in situation.pipelines for node in pipeline.nodes)
        return max(used or situation.pools, key=lambda pool: (used[pool], pool))


class _Spread:
    """Prefers pools that took no machine lately, then those where the fewest machines are held."""

    def __init__(self, situation: Situation) -> None:
        nodes = [*situation.spares, *(n for p in situation.pipelines for n in p.nodes)]
        self._held = Counter(node.pool for node in nodes if node.market == "spot")

    def __call__(self, pool: PoolView) -> float:
        return self._held[pool.name] + (1_000_000 if pool.interrupted else 0)
