"""What to do when spot machines are about to be taken, are lost, or can be had again: pure decisions.

Whoever runs pipelines, a simulator or a controller, describes the `Situation`, hands over the event, and carries out
the `Actions`. A policy holds parameters only and remembers nothing, so that the same situation gives the same actions.

What a running side makes of actions:

- A request that a spare machine of the pool's instance type and market can serve takes the spare; else a machine is
  rented at once. Its pipeline is started anew with it as soon as it is ready. With ``start_concurrently`` the new
  engines start beside the old ones, which serve on until the new ones are ready (the hand-over) or the machine is
  lost; without, the old engines end first.
- Requests in flight leave at the hand-over or when the machine is lost, whichever is first, as ``moves`` says;
  transfers begin early enough to end by then. Until then they are served where they are.
"""

from hetplan.policies.situation import (
    Actions,
    Event,
    InFlight,
    Loss,
    MarketEvent,
    Move,
    Node,
    Notice,
    PipelineState,
    PipelineView,
    Policy,
    PoolView,
    RentedMarket,
    Request,
    Return,
    Situation,
    Tick,
)

__all__ = [
    "Actions",
    "Event",
    "InFlight",
    "Loss",
    "MarketEvent",
    "Move",
    "Node",
    "Notice",
    "PipelineState",
    "PipelineView",
    "Policy",
    "PoolView",
    "RentedMarket",
    "Request",
    "Return",
    "Situation",
    "Tick",
]
