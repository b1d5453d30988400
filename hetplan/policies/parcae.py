"""Parcae's proactive handling of interruptions, for serving."""

from __future__ import annotations

import math
from collections import Counter
from typing import ClassVar

import numpy as np

from hetplan.errors import InvalidInputError
from hetplan.policies.moves import choose_move, share_link
from hetplan.policies.renting import Renting, missing
from hetplan.policies.situation import Actions, DefaultMove, Event, Loss, Move, Notice, Return, Situation


class Parcae:
    """Spot only: spare machines are rented before a pool is predicted to shrink, and requests are migrated in time.

    Parameters
    ----------
    horizon : int
        How many steps of the pools' history to look ahead.

    Notes
    -----
    Duan et al., "Parcae: Proactive, Liveput-Optimized DNN Training on Preemptible Instances" (NSDI 2024). Kept: the
    number of machines is predicted from its recent history, and what the prediction says will be lost is prepared for
    in advance; a notice starts a live migration; the parallel configuration changes when machines are lost for good or
    come back; on-demand machines are not used.

    Departures: Parcae predicts with ARIMA over the last 12 minutes; here it is a straight line by least squares,
    within the counts that were seen. Parcae trains, and maximises liveput, samples a second expected under the
    prediction; here the plan is made anew when a machine cannot be replaced. What migrates is not parameters but
    the requests' caches: sent where that is quicker and fits the grace, else recomputed.
    """

    name: ClassVar[str] = "parcae"
    # Parcae predicts in steps of a minute.
    tick_s: ClassVar[float | None] = 60.0
    parallel_start: ClassVar[bool] = True
    default_move: ClassVar[DefaultMove] = "transfer"

    def __init__(self, *, horizon: int = 12) -> None:
        if horizon < 1:
            raise InvalidInputError(f"horizon is {horizon}; give at least 1 step")
        self.horizon = horizon

    def decide(self, situation: Situation, event: Event) -> Actions:
        """Say what to do about an event."""
        renting = Renting(situation)
        unmet = False
        for pipeline, pool in missing(situation):
            unmet |= not self._replace(renting, pool, pipeline.name)
        if isinstance(event, Notice):
            if situation.touched is not None:
                unmet |= not self._replace(renting, event.pool, situation.touched)
            return Actions(
                tuple(renting.requests),
                start_concurrently=bool(renting.requests),
                moves=_moves(situation, event.grace_s),
                replan=unmet,
            )
        if isinstance(event, Loss):
            return Actions(tuple(renting.requests), moves=_moves(situation, 0.0), replan=unmet)
        self._prepare(renting, situation)
        return Actions(tuple(renting.requests), replan=situation.reduced and isinstance(event, Return))

    @staticmethod
    def _replace(renting: Renting, pool: str, pipeline: str) -> bool:
        return renting.spare(pool, pipeline) or renting.rent(pool, "spot", pipeline)

    def _prepare(self, renting: Renting, situation: Situation) -> None:
        """Rent spares for the machines that will be too many, elsewhere if possible."""
        held = Counter(node.pool for pipeline in situation.pipelines for node in pipeline.nodes)
        falling = {
            pool.name: held[pool.name] - predicted_count(pool.history, self.horizon)
            for pool in situation.pools.values()
            if pool.history
        }
        short = [name for name in sorted(falling) for _ in range(falling[name])]
        for name in short[renting.spares_left() :]:
            renting.rent(name, "spot", None, prefer=lambda pool: falling.get(pool.name, 0) > 0)


def predicted_count(history: tuple[int, ...], horizon: int) -> int:
    """Machines after so many steps more: a line through the history, within its least and greatest count.

    Parameters
    ----------
    history : tuple of int
        Counts, evenly apart, the latest last; at least one.
    horizon : int
        Steps ahead.

    Returns
    -------
    int
        Rounded down.

    Examples
    --------
    >>> predicted_count((5, 5, 4, 4, 3, 3), 2), predicted_count((2, 2, 2), 12)
    (3, 2)
    """
    if len(history) == 1:
        return history[0]
    slope, level = np.polyfit(np.arange(len(history)), history, 1)
    ahead = level + slope * (len(history) - 1 + horizon)
    # A hair below a whole number by rounding is that number.
    return int(np.clip(math.floor(ahead + 1e-9), min(history), max(history)))


def _moves(situation: Situation, grace_s: float) -> tuple[Move, ...]:
    flight = situation.in_flight
    # Nothing is left to end where it is: with no token to go it would have ended.
    endless = np.full(len(flight), np.inf)
    moves = choose_move(flight.context_tokens, endless, grace_s, flight.recompute_s, flight.transfer_s, 1.0)
    shared = share_link(moves, flight.recompute_s, flight.transfer_s, grace_s)
    return tuple(shared.tolist())
