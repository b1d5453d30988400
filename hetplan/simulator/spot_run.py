"""A fleet on rented machines that come and go: a policy decides, this room carries it out (over 300 lines: one life).

Pipelines stand on machines of pools. The market warns of losses and takes machines; at each event the policy says what
to rent, how to start it and what becomes of requests in flight. Time goes from event to event; between them the fleet
serves.

What it takes for granted: old and new engines fit a machine side by side (as with a tensor store), and starting the
new ones does not slow the old ones down; a cache can be sent between any two pipelines of the plan, its parts in
parallel; the router knows at once which pipelines serve.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hetplan.policies import (
    Actions,
    Event,
    InFlight,
    Loss,
    Move,
    Node,
    Notice,
    PipelineState,
    PipelineView,
    Policy,
    RentedMarket,
    Return,
    Situation,
    Tick,
    share_link,
)
from hetplan.simulator.billing import Billing
from hetplan.simulator.engine import DONE, REFUSED
from hetplan.simulator.fleet import Fleet, ReplicaKind
from hetplan.simulator.market import Market
from hetplan.simulator.outlook import Outlook
from hetplan.simulator.results import Happening, Span
from hetplan.simulator.start_times import StartTimes

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
# Machines of each pool -> pools and kinds of pipelines over them.
Replan = Callable[[Mapping[str, int]], Sequence[tuple[tuple[str, ...], ReplicaKind]]]
OnProgress = Callable[[int, int], None]


@dataclass(slots=True)
class Machine:
    """A rented machine: when it is ready to run something, and when it will be lost."""

    name: str
    pool: str
    market: RentedMarket
    ready_s: float
    deadline_s: float | None = None


@dataclass(slots=True)
class Start:
    """Engines on their way: since when, when the old ones end (never, beside them), and when the new ones serve."""

    begun_s: float
    old_end_s: float
    ready_s: float
    over: list[Machine]


@dataclass(slots=True)
class Life:
    """A pipeline over time.

    ``slots``: its machines, None where one is missing; ``incoming``: those that will take a slot at the next start.
    ``parked``: its machines serve in pipelines of a smaller plan meanwhile.
    """

    name: str
    kind: int
    pools: tuple[str, ...]
    slots: list[Machine | None]
    incoming: dict[int, Machine] = field(default_factory=dict)
    replica: int | None = None
    start: Start | None = None
    moves: dict[int, Move] = field(default_factory=dict)
    given_back: set[str] = field(default_factory=set)
    since_s: float = 0.0
    parked: bool = False
    stand_in: bool = False

    @property
    def state(self) -> PipelineState:
        if self.replica is not None:
            return "serving"
        return "initialising" if self.start is not None else "dead"


@dataclass(frozen=True, slots=True)
class Costs:
    """Predicted seconds of moving a request of a kind: per token, beside what every move takes."""

    recompute_token_s: float
    recompute_least_s: float
    transfer_token_s: float
    step_s: float


class SpotRun:
    """One run of a fleet under a market and a policy.

    Parameters
    ----------
    fleet : Fleet
        Without replicas yet.
    pipelines : sequence of (name, kind, pools)
        Which kind of the fleet, and the pool of each machine.
    policy : Policy
    market : Market
        Of the spot pools.
    outlook : Outlook
    billing : Billing
    starts : StartTimes
    start_together : bool
        Weights are loaded beside the start of the engines, as with a tensor store; else one after the other.
    costs : sequence of Costs
        By kind.
    answer_tokens : float array
        Lengths of answers that are known from before: what remains of a request is predicted from them.
    market_of : "spot" or "on_demand"
        How the first machines are rented.
    seed : int
    replan : callable, optional
    """

    def __init__(
        self,
        fleet: Fleet,
        pipelines: Sequence[tuple[str, int, tuple[str, ...]]],
        *,
        policy: Policy,
        market: Market,
        outlook: Outlook,
        billing: Billing,
        starts: StartTimes,
        start_together: bool,
        costs: Sequence[Costs],
        answer_tokens: FloatArray,
        market_of: RentedMarket,
        seed: int,
        replan: Replan | None = None,
    ) -> None:
        self.fleet, self.policy, self.market, self.outlook, self.billing = fleet, policy, market, outlook, billing
        self.starts, self._together, self._costs, self._replan = starts, start_together, list(costs), replan
        self._answers = np.sort(answer_tokens)
        self._answer_sums = np.concatenate([np.cumsum(self._answers[::-1])[::-1], [0.0]])
        self._rng = np.random.default_rng(seed)
        self.happenings: list[Happening] = []
        self.spans: list[Span] = []
        self.replica_names: list[str] = []
        self.spares: list[Machine] = []
        self._made = 0
        self._replanned: Counter[str] | None = None
        self.lives = [Life(name, kind, pools, [None] * len(pools)) for name, kind, pools in pipelines]
        held = {pool: list(market.nodes(pool)) for pool in market.pools}
        for life in self.lives:
            for slot, pool in enumerate(life.pools):
                if market_of == "spot" and held[pool]:
                    life.slots[slot] = self._lease(held[pool].pop(0), pool, "spot", 0.0)
                elif market_of == "on_demand":
                    life.slots[slot] = self._lease(self._new_name(pool), pool, "on_demand", 0.0)
            if all(life.slots):
                self._serve(life)
        for pool, rest in held.items():
            for node in rest:
                market.release(pool, node)

    # ---- time

    def run(self, *, until_s: float = math.inf, on_progress: OnProgress | None = None) -> None:
        """Serve until nothing is left to do, nothing that is left can be done any more, or the time is over."""
        tick_s = self.policy.tick_s
        next_tick = tick_s if tick_s is not None else math.inf
        # What a market lacked at the start is asked for at once.
        self._decide(Tick(0.0))
        while True:
            due = min(
                [self.market.next_change_s(), next_tick, until_s, *(t for life in self.lives for t in _due(life))]
            )
            self.fleet.advance(due)
            if (self.fleet.idle and not self.fleet.held) or due >= until_s:
                break
            if self._hopeless(due):
                self._note(due, "ended", "run", "requests wait for machines that do not come back")
                break
            self._starts(due)
            for event in self.market.advance(due):
                self.outlook.see([event])
                self._meet(event)
            if due >= next_tick:
                next_tick = due + (tick_s or math.inf)
                self.outlook.look()
                self._decide(Tick(due))
            if on_progress is not None:
                ended = np.isin(self.fleet.requests["status"], (DONE, REFUSED))
                on_progress(int(ended.sum()), len(self.fleet.traffic))
        end_s = self.end_s
        for life in self.lives:
            self._span(life, end_s)

    @property
    def end_s(self) -> float:
        """When the last request was answered; the time of the run where some are left."""
        finish = self.fleet.requests["finish_s"]
        last = float(np.nanmax(finish)) if not np.isnan(finish).all() else 0.0
        return last if self.fleet.idle and not self.fleet.held else max(last, self.fleet.now_s)

    def _hopeless(self, now_s: float) -> bool:
        """Nothing serves, nothing starts, and the market has no more news."""
        waits = any(life.state != "dead" for life in self.lives)
        return not waits and self.fleet.idle and math.isinf(self.market.next_change_s(now_s))

    # ---- events

    def _meet(self, event: Notice | Loss | Return) -> None:
        if isinstance(event, Return):
            self._note(event.time_s, "return", event.pool, f"{event.count} to be had")
            self._decide(event)
            return
        machine, life = self._find(event.node)
        if machine is None:
            return
        if isinstance(event, Notice):
            machine.deadline_s = event.deadline_s
            self._note(event.time_s, "notice", event.node, f"{event.grace_s:g} s")
            self._decide(event, life)
            return
        self._note(event.time_s, "loss", event.node)
        self._end_lease(machine, event.time_s)
        if life is None:
            if machine in self.spares:
                self.spares.remove(machine)
            self._decide(event)
            return
        in_use = machine in life.slots
        for slot, one in enumerate(life.slots):
            if one is machine:
                # Who was to take its place does so now.
                life.slots[slot] = life.incoming.pop(slot, None)
        life.incoming = {slot: one for slot, one in life.incoming.items() if one is not machine}
        if life.start is not None and machine in life.start.over:
            self._span(life, event.time_s)
            life.start = None
        self._decide(event, life, lost=in_use)
        if life.stand_in:
            self._dissolve(life, event.time_s)
            self._plan_smaller(event.time_s)
        else:
            self._plan_start(life, event.time_s)

    def _decide(self, event: Event, life: Life | None = None, *, lost: bool = False) -> None:
        now = event.time_s
        flying = np.zeros(0, dtype=np.int64)
        if life is not None and life.replica is not None:
            self.fleet.settle(life.replica)
            flying = self.fleet.requests_at(life.replica)
        actions = self.policy.decide(self._situation(now, life, flying), event)
        if life is not None:
            if len(actions.moves) == len(flying):
                life.moves |= {
                    i: move for i, move in zip(flying.tolist(), actions.moves, strict=True)
                    if not (lost and i in life.moves)
                }  # fmt: skip
            if actions.drain and life.replica is not None:
                self.fleet.close(life.replica)
            if lost:
                self._leave(life, now)
        for name in actions.return_to_spot:
            for one in self.lives:
                if any(m is not None and m.name == name for m in one.slots):
                    one.given_back.add(name)
        self._rent(actions, now)
        if actions.replan:
            self._plan_smaller(now)

    def _rent(self, actions: Actions, now: float) -> None:
        touched = []
        for request in actions.request_replacements:
            life = next((one for one in self.lives if one.name == request.pipeline), None)
            machine = None
            if life is not None:
                machine = next((m for m in self.spares if m.pool == request.pool and m.market == request.market), None)
                if machine is not None:
                    self.spares.remove(machine)
            if machine is None:
                machine = self._rented(request.pool, request.market, now)
            if machine is None:
                continue
            slot = None if life is None else self._slot_for(life, machine)
            if life is None or slot is None:
                self.spares.append(machine)
                continue
            if life.slots[slot] is None:
                life.slots[slot] = machine
            else:
                life.incoming[slot] = machine
            touched.append(life)
        for life in touched:
            self._plan_start(life, now, concurrently=actions.start_concurrently)

    def _rented(self, pool: str, market: RentedMarket, now: float) -> Machine | None:
        if market == "spot":
            granted = self.market.acquire(pool, 1)
            if not granted:
                return None
            name = granted[0]
        else:
            name = self._new_name(pool)
        self._note(now, "rent", name, market)
        return self._lease(name, pool, market, now + self.starts.draw(self._rng).node_ready_s, at_s=now)

    def _slot_for(self, life: Life, machine: Machine) -> int | None:
        """The slot that a machine is for: a missing one of its type, one under notice, one that is given back."""
        kind = self.outlook.instance_type(machine.pool)
        alike = [
            slot for slot, pool in enumerate(life.pools)
            if self.outlook.instance_type(pool) == kind and slot not in life.incoming
        ]  # fmt: skip
        there = {slot: one for slot in alike if (one := life.slots[slot]) is not None}
        missing = [slot for slot in alike if slot not in there]
        doomed = [slot for slot, one in there.items() if one.deadline_s is not None]
        given_back = [slot for slot, one in there.items() if one.name in life.given_back]
        return next(iter((*missing, *doomed, *given_back)), None)

    # ---- starts

    def _plan_start(self, life: Life, now: float, *, concurrently: bool = False) -> None:
        """Start a pipeline's new engines as soon as all its machines are there, if all are on their way."""
        over = [life.incoming.get(slot, machine) for slot, machine in enumerate(life.slots)]
        if life.parked or any(machine is None for machine in over):
            return
        machines = [machine for machine in over if machine is not None]
        if any(m.deadline_s is not None for m in machines) or (life.replica is not None and not life.incoming):
            return
        if life.start is not None and [m.name for m in life.start.over] == [m.name for m in machines]:
            return
        there_s = max(now, *(m.ready_s for m in machines))
        draw = self.starts.draw(self._rng)
        load, engines = draw.store_load_s, draw.engine_init_s
        takes_s = max(load, engines) if self._together else load + engines
        self._span(life, now)
        life.start = Start(there_s, math.inf if concurrently else there_s, there_s + takes_s, machines)

    def _starts(self, now: float) -> None:
        for life in list(self.lives):
            start = life.start
            if start is None:
                continue
            if start.old_end_s <= now and life.replica is not None:
                self._leave(life, now)
            if start.ready_s <= now:
                self._hand_over(life, now)

    def _hand_over(self, life: Life, now: float) -> None:
        self._span(life, now)
        # Caches can be sent while the new engines start.
        sent_s = now - life.start.begun_s if life.start is not None else 0.0
        life.start = None
        old = [m for m in life.slots if m is not None and m not in life.incoming.values()]
        for slot, machine in life.incoming.items():
            life.slots[slot] = machine
        life.incoming = {}
        for machine in old:
            if machine not in life.slots:
                self._give_back(machine, now)
        leaving = life.replica
        if leaving is not None:
            self.fleet.close(leaving)
        if not life.stand_in:
            self._close_stand_ins(life, now)
        self._serve(life)
        if leaving is not None:
            self._resubmit(life, leaving, now, sending_s=sent_s)
        self.fleet.open_held()
        life.given_back &= {m.name for m in life.slots if m is not None}
        life.moves = {}

    def _serve(self, life: Life) -> None:
        life.replica = self.fleet.add(life.kind)
        self.replica_names.append(life.name)
        life.parked = False
        self._note(self.fleet.now_s, "serves", life.name)

    def _leave(self, life: Life, now: float) -> None:
        """A pipeline's engines end; its requests go where the policy said."""
        if life.replica is None:
            return
        self._span(life, now)
        leaving, life.replica = life.replica, None
        self._resubmit(life, leaving, now, sending_s=0.0)
        life.moves = {}

    def _resubmit(self, life: Life, replica: int, now: float, *, sending_s: float) -> None:
        """Send a pipeline's requests on; ``sending_s``: for how long caches that no action names could be sent."""
        self.fleet.settle(replica)
        flying = self.fleet.requests_at(replica)
        flight = self._in_flight(life, flying)
        sent = np.where(flight.transfer_s < flight.recompute_s, "transfer", "recompute")
        sent = share_link(sent, flight.recompute_s, flight.transfer_s, sending_s)
        quicker = dict(zip(flying.tolist(), sent.tolist(), strict=True))
        requests = self.fleet.stop(replica)
        table = self.fleet.requests
        for i in requests.tolist():
            move = life.moves.get(i, "stay")
            if move == "stay":
                # Not named, or meant to end in time and did not.
                move = self.policy.default_move
                if move == "transfer":
                    move = quicker[i]
            if move == "restart":
                table["recomputed"][i] += table["computed"][i]
                table["computed"][i] = table["emitted"][i] = 0
                table["first_s"][i] = math.nan
            elif move == "recompute":
                table["recomputed"][i] += table["computed"][i]
                table["computed"][i] = 0
            table["moves"][i] += 1
        # At a hand-over to the new engines, after a loss to whom the router chooses.
        to = -1 if life.replica is None or life.replica == replica else life.replica
        self.fleet.submit(requests, now + self._pace_s(life, requests), replica=to)

    def _pace_s(self, life: Life, requests: IntArray) -> FloatArray:
        """When each of the requests that leave together comes again, after now.

        What needs no prompt computed would all be taken up in one step, and a pipeline whose sequences are all in one
        step uses one stage at a time. So they come in as many groups as there are stages, a stage's time apart.
        """
        ready = self.fleet.requests["computed"][requests] > 0
        stages = self.fleet.stages_of(life.kind)
        group = np.arange(ready.sum()) * stages // max(int(ready.sum()), 1)
        later = np.zeros(len(requests))
        later[ready] = group * self._costs[life.kind].step_s / stages
        # Behind them come those whose prompts are computed: before them they would keep them from their next token.
        later[~ready] = later.max(initial=0.0)
        return later

    # ---- a smaller plan

    def _plan_smaller(self, now: float) -> None:
        """Serve with what stands idle, or go back to the whole plan where its machines can be had again."""
        if self._replan is None:
            return
        for life in self.lives:
            if life.parked and life.start is None:
                self._try_whole(life, now)
        idle = [life for life in self.lives if life.state == "dead" and not life.parked and not life.stand_in]
        machines = [m for life in idle for m in life.slots if m is not None and m.deadline_s is None]
        if any(life.parked for life in self.lives):
            machines += [m for m in self.spares if m.deadline_s is None]
        counts = Counter(m.pool for m in machines)
        if not machines or counts == self._replanned:
            return
        self._replanned = counts
        found = self._replan(counts)
        if not found:
            return
        for life in idle:
            life.slots, life.parked = [None] * len(life.pools), True
        self.spares = [m for m in self.spares if m not in machines]
        for pools, kind in found:
            taken = []
            for pool in pools:
                machine = next(m for m in machines if m.pool == pool)
                machines.remove(machine)
                taken.append(machine)
            self._made += 1
            self._costs.append(self._costs[self.lives[0].kind])
            life = Life(f"stand-in {self._made}", self.fleet.add_kind(kind), pools, list(taken), stand_in=True)
            life.since_s = now
            self.lives.append(life)
            self._note(now, "plan", life.name, ", ".join(pools))
            self._plan_start(life, now)
        self.spares += machines

    def _try_whole(self, life: Life, now: float) -> None:
        """Start a parked pipeline over the machines of its stand-ins and what the market has again."""
        have = [m for one in self.lives if one.stand_in for m in one.slots if m is not None and m.deadline_s is None]
        have += self.spares
        slots: list[Machine | None] = []
        for pool in life.pools:
            machine = next((m for m in have if m.pool == pool), None)
            if machine is not None:
                have.remove(machine)
            slots.append(machine)
        lacking = Counter(pool for pool, machine in zip(life.pools, slots, strict=True) if machine is None)
        if any(self.market.free(pool) < count for pool, count in lacking.items()):
            return
        for slot, pool in enumerate(life.pools):
            if slots[slot] is None:
                slots[slot] = self._rented(pool, "spot", now)
        life.slots, life.parked = slots, False
        self.spares = [m for m in self.spares if m not in slots]
        self._plan_start(life, now, concurrently=True)

    def _dissolve(self, life: Life, now: float) -> None:
        """A stand-in has lost a machine: the others are spare."""
        self._leave(life, now)
        self._span(life, now)
        self.lives.remove(life)
        self.spares += [m for m in life.slots if m is not None]
        self._replanned = None

    def _close_stand_ins(self, life: Life, now: float) -> None:
        """The whole pipeline serves again: those that stood in on its machines end."""
        kept = {m.name for m in life.slots if m is not None}
        for one in [one for one in self.lives if one.stand_in]:
            if not any(m is not None and m.name in kept for m in one.slots):
                continue
            self._leave(one, now)
            for machine in one.slots:
                if machine is not None and machine.name not in kept:
                    self._give_back(machine, now)
            self._span(one, now)
            self.lives.remove(one)
            self._replanned = None

    # ---- machines

    def _lease(self, name: str, pool: str, market: RentedMarket, ready_s: float, *, at_s: float = 0.0) -> Machine:
        self.billing.start(name, pool, market, at_s)
        return Machine(name, pool, market, ready_s, self.market.deadline_s(name) if market == "spot" else None)

    def _new_name(self, pool: str) -> str:
        self._made += 1
        return f"{pool}/on demand {self._made}"

    def _end_lease(self, machine: Machine, now: float) -> None:
        self.billing.stop(machine.name, now)

    def _give_back(self, machine: Machine, now: float) -> None:
        self._note(now, "give back", machine.name)
        self._end_lease(machine, now)
        if machine.market == "spot":
            self.market.release(machine.pool, machine.name)

    def _find(self, name: str) -> tuple[Machine | None, Life | None]:
        for life in self.lives:
            for machine in (*life.slots, *life.incoming.values()):
                if machine is not None and machine.name == name:
                    return machine, life
        return next((m for m in self.spares if m.name == name), None), None

    # ---- what a policy is told

    def _situation(self, now: float, life: Life | None, flying: IntArray) -> Situation:
        start_s = self.starts.expected_together_s() if self._together else self.starts.expected_one_by_one_s()
        return Situation(
            time_s=now,
            pipelines=tuple(_view(one) for one in self.lives if not one.stand_in),
            pools=self.outlook.views(),
            start_s=start_s,
            in_flight=InFlight() if life is None else self._in_flight(life, flying),
            touched=None if life is None or life.stand_in else life.name,
            spares=tuple(_node(machine) for machine in self.spares),
            reduced=any(one.parked for one in self.lives),
        )

    def _in_flight(self, life: Life, flying: IntArray) -> InFlight:
        table, costs = self.fleet.requests[flying], self._costs[life.kind]
        context = (table["prompt"] + table["emitted"]).astype(np.float64)
        longer = np.searchsorted(self._answers, table["emitted"], side="right")
        count = len(self._answers) - longer
        mean = self._answer_sums[longer] / np.maximum(count, 1)
        remaining = np.where(count > 0, mean - table["emitted"], 1.0)
        return InFlight(
            context_tokens=context,
            remaining_tokens=np.maximum(remaining, 1.0),
            recompute_s=costs.recompute_least_s + context * costs.recompute_token_s,
            transfer_s=context * costs.transfer_token_s,
            step_s=costs.step_s,
        )

    # ---- what is remembered

    def _note(self, time_s: float, kind: str, subject: str, detail: str = "") -> None:
        self.happenings.append(Happening(time_s, kind, subject, detail))

    def _span(self, life: Life, now: float) -> None:
        if now > life.since_s:
            self.spans.append(Span(life.name, life.state, life.since_s, now))
        life.since_s = now


def _due(life: Life) -> list[float]:
    if life.start is None:
        return []
    due = [life.start.ready_s]
    if life.replica is not None and math.isfinite(life.start.old_end_s):
        due.append(life.start.old_end_s)
    return due


def _node(machine: Machine) -> Node:
    return Node(machine.name, machine.pool, machine.market, machine.deadline_s)


def _view(life: Life) -> PipelineView:
    nodes = tuple(_node(m) for m in life.slots if m is not None)
    missing = (
        ()
        if life.parked
        else tuple(
            pool for slot, pool in enumerate(life.pools) if life.slots[slot] is None and slot not in life.incoming
        )
    )
    return PipelineView(life.name, nodes, life.state, missing)
