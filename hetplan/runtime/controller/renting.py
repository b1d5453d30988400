"""The controller's state as a policy sees it."""

from __future__ import annotations

from collections.abc import Collection

from hetplan.policies import Actions, Event, Loss, Node, PipelineState, PipelineView, Return, Situation, Tick
from hetplan.runtime.controller.adopting import in_turn
from hetplan.runtime.controller.desired import Desired, Slot
from hetplan.runtime.controller.notices import policy_notice
from hetplan.runtime.controller.state import ControllerState, Machine


def spares(desired: Desired, state: ControllerState) -> list[Machine]:
    """Machines that stay and belong to no pipeline."""
    used = {name for g in state.generations for name in g.machines}
    return [m for m in state.machines if m.stays and m.name not in used and m.offer in desired.offers]


def situation(desired: Desired, state: ControllerState, now_s: float, touched: str | None) -> Situation:
    """What the policy may know."""
    return Situation(
        time_s=now_s,
        pipelines=tuple(_view(desired, state, slot, now_s) for slot in desired.slots),
        pools=desired.pools(state, now_s),
        start_s=desired.start_s,
        touched=touched,
        spares=tuple(_node(desired, machine) for machine in spares(desired, state)),
    )


def on_notice(desired: Desired, state: ControllerState, machine: Machine, pipeline: int, now_s: float) -> Actions:
    """What the policy does about a machine of a pipeline that is announced to go."""
    pool = desired.pool(machine.offer)
    event = policy_notice(machine.name, pool, machine.deadline_s or now_s, now_s)
    return desired.policy.decide(situation(desired, state, now_s, str(pipeline)), event)


def on_event(
    desired: Desired, state: ControllerState, now_s: float, *, lost: Collection[Machine], returned: Collection[str]
) -> Actions:
    """What the policy does about machines that are missing, after a loss, a return, or at any other time."""
    event: Event = Tick(now_s)
    if lost:
        machine = min(lost, key=lambda m: m.name)
        event = Loss(now_s, desired.pool(machine.offer), machine.name)
    elif returned:
        pool = desired.pool(min(returned))
        event = Return(now_s, pool, desired.pools(state, now_s)[pool].spot_free)
    return desired.policy.decide(situation(desired, state, now_s, None), event)


def _view(desired: Desired, state: ControllerState, slot: Slot, now_s: float) -> PipelineView:
    latest = state.newest(slot.pipeline)
    serving = any(g.pipeline == slot.pipeline and g.phase == "serving" and not g.failed for g in state.generations)
    bound = (None,) * len(slot.offers) if latest is None else latest.machines
    machines = [None if name is None else state.machine(name) for name in bound]
    held = set(in_turn(desired, state, slot, now_s))
    missing = tuple(
        desired.pool(offer)
        for rank, (offer, machine) in enumerate(zip(slot.offers, machines, strict=True))
        if machine is None and rank not in held
    )
    phase: PipelineState = "serving" if serving else "dead" if missing else "initialising"
    nodes = tuple(_node(desired, m) for m in machines if m is not None)
    return PipelineView(str(slot.pipeline), nodes, phase, missing)


def _node(desired: Desired, machine: Machine) -> Node:
    return Node(machine.name, desired.pool(machine.offer), desired.market(machine.offer), machine.deadline_s)
