"""What a policy is told and what it answers: events, the situation, actions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
RentedMarket = Literal["spot", "on_demand"]
PipelineState = Literal["serving", "initialising", "dead"]
Move = Literal["stay", "recompute", "transfer", "restart"]
DefaultMove = Literal["restart", "recompute", "transfer"]


@dataclass(frozen=True, slots=True)
class Notice:
    """At ``time_s`` the provider says that it takes the machine in ``grace_s`` seconds."""

    time_s: float
    pool: str
    node: str
    grace_s: float

    @property
    def deadline_s(self) -> float:
        """When the machine is lost."""
        return self.time_s + self.grace_s


@dataclass(frozen=True, slots=True)
class Loss:
    """At ``time_s`` the machine is gone."""

    time_s: float
    pool: str
    node: str


@dataclass(frozen=True, slots=True)
class Return:
    """At ``time_s`` the pool grew: it has ``count`` spot machines to rent."""

    time_s: float
    pool: str
    count: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened; time to look around, every `Policy.tick_s` seconds."""

    time_s: float


MarketEvent = Notice | Loss | Return
Event = MarketEvent | Tick


@dataclass(frozen=True, slots=True)
class Node:
    """A machine: its pool, how it is rented, and when it will be lost if it is under notice."""

    name: str
    pool: str
    market: RentedMarket
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class PipelineView:
    """A pipeline as a policy sees it.

    Attributes
    ----------
    name : str
        Unique.
    nodes : tuple of Node
        The machines that stand.
    state : "serving", "initialising" or "dead"
        Whether it answers requests, is being started, or waits for machines.
    missing : tuple of str
        Pools of the machines that it has lost and that are not on order.
    """

    name: str
    nodes: tuple[Node, ...]
    state: PipelineState
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolView:
    """Where a machine can be rented.

    Attributes
    ----------
    name, instance_type : str
        Pools of one instance type can stand in for each other.
    spot_free, on_demand_free : int
        Machines to be had now.
    spot_usd_per_hour, on_demand_usd_per_hour : float
        Price of a machine; infinity for a market that is not there.
    expected_return_s : float
        Predicted seconds until a spot machine can be had when there is none; infinity if unknown.
    interrupted : bool
        Whether the pool took a machine lately and has not granted one since.
    history : tuple of int
        Machines seen available at the last moments, evenly apart, the latest last; empty if not recorded.
    """

    name: str
    instance_type: str
    spot_free: int
    on_demand_free: int
    spot_usd_per_hour: float
    on_demand_usd_per_hour: float
    expected_return_s: float = math.inf
    interrupted: bool = False
    history: tuple[int, ...] = ()


def _empty() -> FloatArray:
    return np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """Requests in flight on the pipeline that an event touches.

    Attributes
    ----------
    context_tokens : (R,) array
        Prompt and tokens generated so far: what a recomputation has to read again.
    remaining_tokens : (R,) array
        Predicted tokens still to generate.
    recompute_s, transfer_s : (R,) array
        Predicted seconds to build each cache anew elsewhere, and to send it there.
    step_s : float
        Seconds of one decode step here.
    """

    context_tokens: FloatArray = field(default_factory=_empty)
    remaining_tokens: FloatArray = field(default_factory=_empty)
    recompute_s: FloatArray = field(default_factory=_empty)
    transfer_s: FloatArray = field(default_factory=_empty)
    step_s: float = 0.0

    def __len__(self) -> int:
        return int(self.context_tokens.size)


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy may know when it decides.

    Attributes
    ----------
    time_s : float
        Now.
    pipelines : tuple of PipelineView
        All of them, in a fixed order.
    pools : mapping of str to PoolView
        Where machines can be rented, by name.
    start_s : float
        Predicted seconds from renting a machine to its pipeline serving, started concurrently.
    in_flight : InFlight
        Requests of the pipeline that the event touches.
    touched : str, optional
        The pipeline that the event's machine belongs to, or belonged to until now.
    spares : tuple of Node
        Machines held or on order that belong to no pipeline.
    spot_availability : float
        Predicted share of the time that a pipeline of spot machines serves.
    reduced : bool
        Whether the plan in force was made for fewer machines than first wanted.
    """

    time_s: float
    pipelines: tuple[PipelineView, ...]
    pools: Mapping[str, PoolView]
    start_s: float
    in_flight: InFlight = field(default_factory=InFlight)
    touched: str | None = None
    spares: tuple[Node, ...] = ()
    spot_availability: float = 1.0
    reduced: bool = False

    def instance_type(self, pool: str) -> str:
        """What kind of machine a pool has."""
        return self.pools[pool].instance_type


@dataclass(frozen=True, slots=True)
class Request:
    """A machine to rent: where, how, and for which pipeline; None for a spare."""

    pool: str
    market: RentedMarket
    pipeline: str | None = None


@dataclass(frozen=True, slots=True)
class Actions:
    """What to do.

    Attributes
    ----------
    request_replacements : tuple of Request
        Machines to rent now.
    start_concurrently : bool
        Start the new engines while the old ones serve.
    moves : tuple of "stay", "recompute", "transfer" or "restart"
        For each request in flight on the pipeline that the event touches: it ends where it is before it would have
        to leave; it leaves with its tokens and its cache is built anew; its cache is sent; it begins again from its
        prompt. Empty when nothing is decided about them.
    drain : bool
        Send no new request to the touched pipeline from now on.
    replan : bool
        Ask for a new plan over the machines there are; if there is one, its pipelines lack nothing.
    return_to_spot : tuple of str
        On-demand machines to give back once the spot machines requested here serve in their place.
    """

    request_replacements: tuple[Request, ...] = ()
    start_concurrently: bool = False
    moves: tuple[Move, ...] = ()
    drain: bool = False
    replan: bool = False
    return_to_spot: tuple[str, ...] = ()


class Policy(Protocol):
    """What every policy has.

    Attributes
    ----------
    name : str
        What it is registered as.
    tick_s : float or None
        Seconds between the `Tick` events that it wants; None for none.
    parallel_start : bool
        Whether its engines start beside the loading of their weights, as a tensor store allows.
    default_move : "restart", "recompute" or "transfer"
        How requests leave that no action names. "transfer": at a hand-over that no loss forces a cache is sent where
        that takes less than to build it anew; otherwise it is built anew.
    """

    name: ClassVar[str]
    tick_s: ClassVar[float | None]

    @property
    def parallel_start(self) -> bool:
        """See above."""
        ...

    @property
    def default_move(self) -> DefaultMove:
        """See above."""
        ...

    def decide(self, situation: Situation, event: Event) -> Actions:
        """Say what to do about an event."""
        ...
