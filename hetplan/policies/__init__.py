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

from __future__ import annotations

from collections.abc import Callable

from hetplan.errors import UnknownNameError
from hetplan.policies.adaptive import Adaptive, on_demand_floor
from hetplan.policies.moves import choose_move, share_link
from hetplan.policies.parcae import Parcae, predicted_count
from hetplan.policies.shuntserve import Both, Concurrent, Migration, NoHandling, OnDemand
from hetplan.policies.situation import (
    Actions,
    DefaultMove,
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
from hetplan.policies.skyserve import SkyServe

__all__ = [
    "POLICIES",
    "Actions",
    "Adaptive",
    "Both",
    "Concurrent",
    "DefaultMove",
    "Event",
    "InFlight",
    "Loss",
    "MarketEvent",
    "Migration",
    "Move",
    "NoHandling",
    "Node",
    "Notice",
    "OnDemand",
    "Parcae",
    "PipelineState",
    "PipelineView",
    "Policy",
    "PoolView",
    "RentedMarket",
    "Request",
    "Return",
    "Situation",
    "SkyServe",
    "Tick",
    "choose_move",
    "on_demand_floor",
    "policy",
    "predicted_count",
    "share_link",
]

POLICIES: dict[str, Callable[..., Policy]] = {
    kind.name: kind for kind in (OnDemand, NoHandling, Migration, Concurrent, Both, SkyServe, Parcae, Adaptive)
}


def policy(name: str, **parameters: float | None) -> Policy:
    """A policy by its name.

    Parameters
    ----------
    name : str
        "on-demand", "none", "migration", "concurrent", "both", "skyserve", "parcae" or "hetplan".
    **parameters
        What its class takes.

    Returns
    -------
    Policy

    Raises
    ------
    UnknownNameError
        For another name.
    InvalidInputError
        For a parameter out of range.

    Examples
    --------
    >>> policy("hetplan", availability=0.99).name
    'hetplan'
    """
    if name not in POLICIES:
        raise UnknownNameError("policy", name, POLICIES)
    return POLICIES[name](**parameters)
