"""The five ways to meet interruptions that ShuntServe compares (section 7.2).

None of them changes the plan, and a lost machine is replaced by a spot machine of its type, or by an on-demand one
where there is none: the "auxiliary on-demand fallback" of section 8.2. The paper does not say whether on-demand
machines are given back when spot returns: by default they are kept, which over days leaves little spot;
``return_to_spot=True`` gives them back.
"""

from __future__ import annotations

from typing import ClassVar

from hetplan.policies.renting import Renting, back_to_spot, missing
from hetplan.policies.situation import Actions, DefaultMove, Event, Loss, Move, Notice, Situation


class _Fixed:
    """Shared by all five: which of the two mechanisms they have, and how they rent.

    Parameters
    ----------
    return_to_spot : bool
        Whether on-demand machines give way to cheaper spot that returns.
    """

    name: ClassVar[str]
    tick_s: ClassVar[float | None] = None
    migrates: ClassVar[bool]
    concurrent: ClassVar[bool]
    only_on_demand: ClassVar[bool] = False

    def __init__(self, *, return_to_spot: bool = False) -> None:
        self.return_to_spot = return_to_spot

    @property
    def parallel_start(self) -> bool:
        """With concurrent initialisation comes the tensor store; without, an engine loads its weights itself."""
        return self.concurrent

    @property
    def default_move(self) -> DefaultMove:
        """Migration keeps what was generated."""
        return "recompute" if self.migrates else "restart"

    def decide(self, situation: Situation, event: Event) -> Actions:
        """Say what to do about an event."""
        renting = Renting(situation)
        if isinstance(event, Notice):
            if not self.concurrent:
                # Nothing happens before the machine is gone.
                return Actions()
            if situation.touched is not None:
                self._replace(renting, event.pool, situation.touched)
            return Actions(
                tuple(renting.requests),
                start_concurrently=bool(renting.requests),
                moves=self._moves(situation),
            )
        for pipeline, pool in missing(situation):
            self._replace(renting, pool, pipeline.name)
        if isinstance(event, Loss):
            return Actions(tuple(renting.requests), moves=self._moves(situation))
        back = back_to_spot(renting, situation) if self.return_to_spot and not self.only_on_demand else ()
        return Actions(
            tuple(renting.requests),
            start_concurrently=bool(back) and self.concurrent,
            return_to_spot=back,
        )

    def _replace(self, renting: Renting, pool: str, pipeline: str) -> None:
        if self.only_on_demand or not renting.rent(pool, "spot", pipeline):
            renting.rent(pool, "on_demand", pipeline)

    def _moves(self, situation: Situation) -> tuple[Move, ...]:
        return (self.default_move,) * len(situation.in_flight)


class OnDemand(_Fixed):
    """On-demand machines only, which nobody takes."""

    name = "on-demand"
    migrates = False
    concurrent = False
    only_on_demand = True


class NoHandling(_Fixed):
    """Requests begin again; the pipeline is started anew after the loss."""

    name = "none"
    migrates = False
    concurrent = False


class Migration(_Fixed):
    """Output-preserving migration alone: requests keep their tokens; the pipeline is started anew after the loss."""

    name = "migration"
    migrates = True
    concurrent = False


class Concurrent(_Fixed):
    """Concurrent initialisation alone: the new pipeline starts at the notice; requests begin again on it."""

    name = "concurrent"
    migrates = False
    concurrent = True


class Both(_Fixed):
    """ShuntServe: concurrent initialisation, and requests keep their tokens."""

    name = "both"
    migrates = True
    concurrent = True
