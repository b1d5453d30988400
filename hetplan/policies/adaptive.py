"""The policy of this package: each request, each machine and each market by what it is predicted to cost."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from hetplan.errors import InvalidInputError
from hetplan.policies.moves import choose_move, share_link
from hetplan.policies.renting import Renting, back_to_spot, missing, price
from hetplan.policies.situation import Actions, DefaultMove, Event, Loss, Move, Notice, Return, Situation


class Adaptive:
    """Concurrent initialisation; requests move by prediction; on-demand when waiting for spot would cost more.

    Parameters
    ----------
    downtime_usd_per_hour : float, optional
        What an hour without one pipeline costs beyond the price of its idle machines. None takes the on-demand price of
        all its machines: what the service is worth at least to someone who would rent them.
    availability : float, optional
        Share of the time, above 0 and below 1, that a pipeline is to serve on the average: as many pipelines are kept
        on on-demand machines as that takes (`on_demand_floor`). None keeps none.

    Notes
    -----
    - A request stays if it ends before its pipeline has to go. Otherwise its cache is sent or built anew, whichever is
      predicted to take less; it can be sent if that fits the grace, together with the others that go over the link.
    - A lost machine is replaced by spot of its type, in its pool or another. If there is none, an on-demand machine is
      rented if waiting costs more: ``(idle machines + downtime) x wait > on-demand price x (wait + start)``, where the
      on-demand machine is paid from now until spot that returns after the wait has started.
    - If neither is had, or no return is in sight, a new plan is asked for; and again when machines return.
    - On-demand machines give way to cheaper spot that returns, but for those of the floor: the first pipelines.
    """

    name: ClassVar[str] = "hetplan"
    tick_s: ClassVar[float | None] = 60.0
    parallel_start: ClassVar[bool] = True
    default_move: ClassVar[DefaultMove] = "transfer"

    def __init__(self, *, downtime_usd_per_hour: float | None = None, availability: float | None = None) -> None:
        if downtime_usd_per_hour is not None and not (
            math.isfinite(downtime_usd_per_hour) and downtime_usd_per_hour >= 0
        ):
            raise InvalidInputError(
                f"downtime_usd_per_hour is {downtime_usd_per_hour}; give a finite number from 0, or None"
            )
        if availability is not None and not 0 < availability < 1:
            raise InvalidInputError(f"availability is {availability}; give a share above 0 and below 1, or None")
        self.downtime_usd_per_hour = downtime_usd_per_hour
        self.availability = availability

    def decide(self, situation: Situation, event: Event) -> Actions:
        """Say what to do about an event."""
        renting = Renting(situation)
        unmet = [
            pool for pipeline, pool in missing(situation) if not self._replace(renting, situation, pool, pipeline.name)
        ]
        if isinstance(event, Notice):
            return self._on_notice(situation, event, renting, unmet)
        replan = _no_return_soon(situation, unmet)
        if isinstance(event, Loss):
            return Actions(tuple(renting.requests), moves=_moves(situation, 0.0, 0.0), replan=replan)
        back = back_to_spot(renting, situation, kept=self._kept_on_demand(situation))
        return Actions(
            tuple(renting.requests),
            start_concurrently=bool(back),
            replan=situation.reduced and isinstance(event, Return),
            return_to_spot=back,
        )

    def _on_notice(self, situation: Situation, event: Notice, renting: Renting, unmet: list[str]) -> Actions:
        others_serve = any(p.state == "serving" and p.name != situation.touched for p in situation.pipelines)
        touched = situation.touched
        replaced = touched is not None and self._replace(renting, situation, event.pool, touched)
        if touched is not None and not replaced:
            unmet = [*unmet, event.pool]
        in_time = replaced and situation.start_s <= event.grace_s
        stay_s = situation.start_s if in_time else event.grace_s
        # A cache can be sent to a pipeline that serves, or to the new one once it does.
        send_s = event.grace_s if others_serve else max(event.grace_s - situation.start_s, 0.0)
        built_s = situation.in_flight.recompute_s
        # So close to the end, what a new request would have done here is less than building its cache again.
        drain = others_serve and not in_time and built_s.size > 0 and event.grace_s <= float(built_s.mean())
        return Actions(
            tuple(renting.requests),
            start_concurrently=replaced,
            moves=_moves(situation, stay_s, send_s),
            drain=drain,
            replan=_no_return_soon(situation, unmet),
        )

    def _replace(self, renting: Renting, situation: Situation, pool: str, pipeline: str) -> bool:
        if pipeline in self._kept_on_demand(situation) and renting.rent(pool, "on_demand", pipeline):
            return True
        if renting.spare(pool, pipeline) or renting.rent(pool, "spot", pipeline):
            return True
        return self._waiting_costs_more(situation, pool, pipeline) and renting.rent(pool, "on_demand", pipeline)

    def _waiting_costs_more(self, situation: Situation, pool: str, pipeline: str) -> bool:
        """Whether a pipeline that stands still until spot returns costs more than an on-demand machine."""
        view = next(p for p in situation.pipelines if p.name == pipeline)
        standing = [node for node in view.nodes if node.deadline_s is None]
        lost = sum(price(situation.pools[node.pool], node.market) for node in standing)
        if self.downtime_usd_per_hour is not None:
            lost += self.downtime_usd_per_hour
        else:
            places = [*(node.pool for node in view.nodes), *view.missing]
            lost += sum(situation.pools[place].on_demand_usd_per_hour for place in places)
        machine = situation.pools[pool]
        wait_s = machine.expected_return_s
        if math.isinf(wait_s):
            return lost > machine.on_demand_usd_per_hour
        return lost * wait_s > machine.on_demand_usd_per_hour * (wait_s + situation.start_s)

    def _kept_on_demand(self, situation: Situation) -> set[str]:
        if self.availability is None:
            return set()
        names = [pipeline.name for pipeline in situation.pipelines]
        return set(names[: on_demand_floor(self.availability, situation.spot_availability, len(names))])


def on_demand_floor(availability: float, spot_availability: float, pipelines: int) -> int:
    """Fewest pipelines on on-demand machines for a mean availability; these are taken to serve all the time.

    Parameters
    ----------
    availability : float
        Wanted share of the time that a pipeline serves, on the average over all.
    spot_availability : float
        Predicted share for a pipeline of spot machines.
    pipelines : int
        How many there are.

    Returns
    -------
    int
        From 0 to ``pipelines``.

    Examples
    --------
    >>> on_demand_floor(0.99, 0.95, 4), on_demand_floor(0.9, 0.95, 4)
    (4, 0)
    """
    if spot_availability >= availability:
        return 0
    share = (availability - spot_availability) / (1 - spot_availability)
    return min(math.ceil(share * pipelines - 1e-9), pipelines)


def _no_return_soon(situation: Situation, unmet: list[str]) -> bool:
    """Whether some machine that could not be had will not return within the time that a start takes."""
    return any(situation.pools[pool].expected_return_s > situation.start_s for pool in unmet)


def _moves(situation: Situation, stay_s: float, send_s: float) -> tuple[Move, ...]:
    flight = situation.in_flight
    sendable = np.where(flight.transfer_s <= send_s, flight.transfer_s, np.inf)
    moves = choose_move(
        flight.context_tokens, flight.remaining_tokens, stay_s, flight.recompute_s, sendable, flight.step_s
    )
    return tuple(share_link(moves, flight.recompute_s, flight.transfer_s, send_s).tolist())
