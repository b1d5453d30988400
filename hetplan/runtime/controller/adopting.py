"""From one plan to another, pure: which pipelines go on as they are, and when those of the plan before may leave.

`adopt` says what is wanted from now on. Pipelines that the new plan has too keep their numbers, engines and machines.
Those that it has not serve on until others do: they leave once every pipeline of their model that can be started is
with the router. Where a new one needs a machine that an old one holds, that one leaves before: one at a time, the last
of its model last, and none while a pipeline of the new plan fails to start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hetplan.runtime.controller.desired import Desired, Slot
from hetplan.runtime.controller.state import ControllerState, Generation, Origin, SlotState


def adopt(
    state: ControllerState, serving: str, pipelines: Sequence[Origin], *, stands_in: bool = False
) -> ControllerState:
    """The state in which a serving's pipelines are wanted, and no others.

    Parameters
    ----------
    state : ControllerState
    serving : str
        Its fingerprint.
    pipelines : sequence of Origin
        All of it.
    stands_in : bool
        It is served only until what is served now can be again.
    """
    free = sorted(state.slots, key=lambda slot: (-_liveness(state, slot), slot.pipeline))
    numbered, slots = state.pipelines_numbered, {slot.pipeline: slot for slot in state.slots}
    for origin in pipelines:
        same = next((s for s in free if s.origin is not None and s.origin.started_as == origin.started_as), None)
        if same is None:
            numbered += 1
            same = SlotState(pipeline=numbered)
        else:
            free.remove(same)
        slots[same.pipeline] = same.replace(origin=origin)
        state = _taken_back(state, same.pipeline)
    known = (*(f for f in state.servings if f != serving), serving)
    adopted = state.serving != serving
    return state.replace(
        serving=serving,
        servings=known,
        returns_to=(state.returns_to or state.serving) if stands_in else None,
        slots=tuple(slots[number] for number in sorted(slots)),
        pipelines_numbered=numbered,
        counters=state.counters.replace(adoptions=state.counters.adoptions + adopted),
    )


def _taken_back(state: ControllerState, pipeline: int) -> ControllerState:
    """A pipeline that is wanted again serves on if the router still has the generation that was to leave."""
    for generation in state.generations:
        leaves = generation.phase == "leaving" and not generation.failed and generation.healthy_s is not None
        if generation.pipeline != pipeline or not leaves or generation.key not in state.targets:
            continue
        if state.newest(pipeline) is None and not state.draining:
            state = state.with_generation(generation.replace(phase="serving"))
    return state


def forget(desired: Desired, state: ControllerState) -> ControllerState:
    """Without pipelines that are not wanted and of which nothing is left."""
    there = {slot.pipeline for slot in desired.slots} | {g.pipeline for g in state.generations}
    return state.replace(slots=tuple(slot for slot in state.slots if slot.pipeline in there))


def unwanted(desired: Desired, state: ControllerState) -> list[Generation]:
    """Generations of plans before that start or serve."""
    return [g for g in state.generations if desired.slot(g.pipeline) is None and g.phase != "leaving"]


def in_turn(desired: Desired, state: ControllerState, slot: Slot, now_s: float) -> tuple[int, ...]:
    """Ranks of a pipeline that lack a machine which pipelines of plans before hold, where no other can be rented."""
    latest = state.newest(slot.pipeline)
    if latest is None:
        return ()
    old = {name for g in state.generations if desired.slot(g.pipeline) is None for name in g.machines}
    held = Counter(m.offer for m in state.machines if m.name in old and m.stays)
    found = []
    for rank, name in enumerate(latest.machines):
        offer = slot.offers[rank]
        if name is None and held[offer] and not desired.can_be_had(state, offer, now_s):
            held[offer] -= 1
            found.append(rank)
    return tuple(found)


def retire_unwanted(desired: Desired, state: ControllerState, now_s: float) -> ControllerState:
    """Let those of plans before leave whose place is taken, and the one whose machine is needed now."""
    old = unwanted(desired, state)
    leaves = [g for g in old if g.phase == "starting" or _place_is_taken(desired, state, g)]
    if not leaves:
        leaves = _next_in_turn(desired, state, old, now_s)
    for generation in leaves:
        state = state.with_generation(generation.replace(phase="leaving"))
    return state


def _place_is_taken(desired: Desired, state: ControllerState, generation: Generation) -> bool:
    model = _model(desired, state, generation.pipeline)
    heirs = [slot for slot in desired.slots if slot.model == model] or list(desired.slots)
    confirmed = [slot for slot in heirs if state.confirmed(slot.pipeline) is not None]
    if confirmed and _is_taken_away(state, generation):
        return True
    others = [slot for slot in heirs if slot not in confirmed]
    return bool(confirmed) and all(desired.given_up(state.slot(slot.pipeline)) for slot in others)


def _next_in_turn(desired: Desired, state: ControllerState, old: list[Generation], now_s: float) -> list[Generation]:
    """The one old pipeline, if any, whose machine a new one waits for."""
    leaving = [g for g in state.generations if desired.slot(g.pipeline) is None and g.phase == "leaving"]
    if leaving or any(_on_its_way(state, slot) or _fails(state, slot) for slot in desired.slots):
        return []
    needed = {slot.offers[r] for slot in desired.slots for r in _waits_only_for(desired, state, slot, now_s)}
    holders = [
        g
        for g in old
        if any(m.offer in needed and m.stays for m in state.machines if m.name in g.machines)
        # The router has it: what it has not yet confirmed may be about to serve.
        and g.key in state.targets
    ]
    serving = Counter(_model(desired, state, pipeline) for pipeline, _ in state.targets)
    holders.sort(key=lambda g: (serving[_model(desired, state, g.pipeline)] <= 1, g.pipeline))
    return holders[:1]


def _waits_only_for(desired: Desired, state: ControllerState, slot: Slot, now_s: float) -> tuple[int, ...]:
    """Ranks whose machines old pipelines hold, where nothing else is missing."""
    latest = state.newest(slot.pipeline)
    waits = in_turn(desired, state, slot, now_s)
    if latest is None or latest.phase != "starting" or not waits:
        return ()
    for rank, name in enumerate(latest.machines):
        machine = None if name is None else state.machine(name)
        if rank not in waits and (machine is None or machine.phase != "ready"):
            return ()
    return waits


def _on_its_way(state: ControllerState, slot: Slot) -> bool:
    latest = state.newest(slot.pipeline)
    return latest is not None and None not in latest.machines and latest.key not in state.targets


def _fails(state: ControllerState, slot: Slot) -> bool:
    remembered = state.slot(slot.pipeline)
    return remembered.failures + remembered.deaths > 0 and state.confirmed(slot.pipeline) is None


def _is_taken_away(state: ControllerState, generation: Generation) -> bool:
    machines = [m for m in state.machines if m.name in generation.machines]
    return any(m.deadline_s is not None for m in machines)


def _model(desired: Desired, state: ControllerState, pipeline: int) -> str:
    slot, origin = desired.slot(pipeline), state.slot(pipeline).origin
    if slot is not None:
        return slot.model
    return "" if origin is None else origin.model


def _liveness(state: ControllerState, slot: SlotState) -> int:
    """What is served is taken over first, then what starts."""
    latest = state.newest(slot.pipeline)
    return 0 if latest is None else 2 if latest.phase == "serving" else 1
