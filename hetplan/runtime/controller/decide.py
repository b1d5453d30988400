"""What is to be done: pure functions from what is known to what it should become and to the next actions.

`fold` takes a fact into the state, `advance` makes the state what it should become (generations, machines that are
wanted or not any more), and `actions` reads off it what the world lacks. Nothing here remembers anything else, so a
controller that was killed goes on from its state alone, and every action may be carried out twice.

Rules that hold whatever happens:

- A generation that serves leaves only when the router has confirmed a newer one of its pipeline, or when it has failed;
  one of a plan before as `adopting` says: when the router has confirmed those that take its place, or in turn.
- Engines are ended only when the router has confirmed targets without them, or when they have failed.
- A machine is given back when no generation is listed on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.policies import Actions
from hetplan.runtime.controller.adopting import forget, in_turn, retire_unwanted
from hetplan.runtime.controller.desired import Desired, Slot
from hetplan.runtime.controller.renting import on_event, on_notice, spares
from hetplan.runtime.controller.state import ControllerState, Generation, Machine, SlotState

# Before a machine is taken its engines get the time to end by themselves.
_MARGIN_S = 5.0


# What has become of something.
@dataclass(frozen=True, slots=True)
class Requested:
    """The provider has been asked for a machine."""

    machine: str


@dataclass(frozen=True, slots=True)
class NoMachine:
    """The provider has none of an offer, or it did not start."""

    machine: str
    why: str


@dataclass(frozen=True, slots=True)
class MachineReady:
    """Its agent answers."""

    machine: str
    address: str


@dataclass(frozen=True, slots=True)
class MachineLost:
    """It is gone without having been given back."""

    machine: str
    why: str


@dataclass(frozen=True, slots=True)
class Noticed:
    """It will be taken."""

    machine: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Released:
    """It has been given back."""

    machine: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The store of a rank's machine holds its weights."""

    key: tuple[int, int]
    rank: int


@dataclass(frozen=True, slots=True)
class Started:
    """The engines of a generation were told to start."""

    key: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Healthy:
    """The engines of a generation answer."""

    key: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Failed:
    """An engine has ended, or weights could not be loaded."""

    key: tuple[int, int]
    why: str


@dataclass(frozen=True, slots=True)
class Ended:
    """All engines of a generation have ended."""

    key: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Targeted:
    """The router has confirmed its targets, with the weights and routes of a serving."""

    targets: tuple[tuple[int, int], ...]
    revision: int
    serving: str


Fact = (
    Requested
    | NoMachine
    | MachineReady
    | MachineLost
    | Noticed
    | Released
    | Loaded
    | Started
    | Healthy
    | Failed
    | Ended
    | Targeted
)


# What is to be done.
@dataclass(frozen=True, slots=True)
class Rent:
    """Ask the provider for a machine."""

    machine: str
    offer: str


@dataclass(frozen=True, slots=True)
class Await:
    """See whether a machine that was asked for has come."""

    machine: str


@dataclass(frozen=True, slots=True)
class Release:
    """Give a machine back."""

    machine: str


@dataclass(frozen=True, slots=True)
class Load:
    """Have the store of a rank's machine load its weights."""

    key: tuple[int, int]
    rank: int
    machine: str


@dataclass(frozen=True, slots=True)
class Start:
    """Start the engines of a generation."""

    key: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Probe:
    """See whether a generation answers by now."""

    key: tuple[int, int]


@dataclass(frozen=True, slots=True)
class End:
    """End the engines of a generation; what still runs after the grace is killed."""

    key: tuple[int, int]
    grace_s: float


@dataclass(frozen=True, slots=True)
class SetTargets:
    """Tell the router all of its targets, and the routes; streams elsewhere may take the grace to move."""

    targets: tuple[tuple[int, int], ...]
    grace_s: float
    serving: str


@dataclass(frozen=True, slots=True)
class Replan:
    """Ask for another plan: this one lacks machines."""

    why: str


Action = Rent | Await | Release | Load | Start | Probe | End | SetTargets | Replan


def fold(desired: Desired, state: ControllerState, fact: Fact, now_s: float) -> ControllerState:
    """The state once a fact is known. A fact about what is no longer listed changes nothing."""
    match fact:
        case Targeted():
            return _fold_targets(state, fact, now_s)
        case (
            Requested(name) | NoMachine(name) | MachineReady(name) | MachineLost(name) | Noticed(name) | Released(name)
        ):
            machine = state.machine(name)
            return state if machine is None else _fold_machine(desired, state, machine, fact, now_s)
        case _:
            generation = next((g for g in state.generations if g.key == fact.key), None)
            return state if generation is None else _fold_generation(desired, state, generation, fact, now_s)


def _fold_targets(state: ControllerState, fact: Targeted, now_s: float) -> ControllerState:
    counters = state.counters.replace(shunts=state.counters.shunts + (fact.targets != state.targets))
    served = {pipeline for pipeline, _ in fact.targets}
    for slot in state.slots:
        if slot.pipeline in served and slot.away_since_s is not None:
            counters = counters.replace(last_return_s=now_s - slot.away_since_s)
            state = state.with_slot(slot.replace(away_since_s=None))
    return state.replace(targets=fact.targets, revision=fact.revision, told=fact.serving, counters=counters)


def _fold_machine(
    desired: Desired, state: ControllerState, machine: Machine, fact: Fact, now_s: float
) -> ControllerState:
    match fact:
        case Requested() if machine.phase == "wanted":
            return state.with_machine(machine.replace(phase="booting"))
        case NoMachine(_, why):
            others = tuple(s for s in state.short_until_s if s[0] != machine.offer)
            state = state.replace(short_until_s=(*others, (machine.offer, now_s + desired.retry_s)))
            return state.with_machine(machine.replace(lost=True, why=why))
        case MachineReady(_, address) if machine.phase in ("wanted", "booting"):
            return state.with_machine(machine.replace(phase="ready", address=address))
        case MachineLost(_, why):
            return state.with_machine(machine.replace(lost=True, why=why))
        case Noticed(_, deadline_s):
            earliest = deadline_s if machine.deadline_s is None else min(deadline_s, machine.deadline_s)
            return state.with_machine(machine.replace(deadline_s=earliest))
        case Released() if machine.phase == "releasing":
            return state.replace(machines=tuple(m for m in state.machines if m.name != machine.name))
        case _:
            return state


def _fold_generation(
    desired: Desired, state: ControllerState, generation: Generation, fact: Fact, now_s: float
) -> ControllerState:
    match fact:
        case Loaded(_, rank):
            return state.with_generation(generation.replace(loaded=tuple(sorted({*generation.loaded, rank}))))
        case Started():
            return state.with_generation(generation.replace(started=True))
        case Healthy() if generation.phase == "starting" and generation.started and not generation.failed:
            slot = state.slot(generation.pipeline)
            state = state.with_slot(slot.replace(failures=0, why="" if not slot.deaths else slot.why))
            return state.with_generation(generation.replace(phase="serving", healthy_s=now_s))
        case Failed(_, why) if generation.phase != "leaving" and not generation.failed:
            return _fail(desired, state, generation, why, now_s)
        case Ended():
            if generation.phase == "leaving":
                return state.replace(generations=tuple(g for g in state.generations if g.key != generation.key))
            return state
        case _:
            return state


def _fail(desired: Desired, state: ControllerState, generation: Generation, why: str, now_s: float) -> ControllerState:
    """Its engines have ended. Starts that fail and engines that die young count, and put off the next start."""
    slot = _forgiven(desired, state, state.slot(generation.pipeline), now_s)
    if generation.healthy_s is None:
        slot = slot.replace(failures=slot.failures + 1)
    elif now_s - generation.healthy_s < desired.settled_s:
        slot = slot.replace(deaths=slot.deaths + 1)
    if slot.failures >= desired.max_failures:
        why = f"{slot.failures} starts failed, the last by: {why}"
    elif slot.deaths >= desired.max_deaths:
        why = f"{slot.deaths} engines ended soon after they had become healthy, the last by: {why}"
    pause_s = desired.pause_s(slot) if slot.failures + slot.deaths else 0.0
    state = state.with_slot(slot.replace(why=why, not_before_s=now_s + pause_s))
    counters = state.counters.replace(failures=state.counters.failures + 1)
    return state.replace(counters=counters).with_generation(generation.replace(failed=True, why=why))


def _forgiven(desired: Desired, state: ControllerState, slot: SlotState, now_s: float) -> SlotState:
    """Without what failed before, where an engine has served long."""
    began = [g.healthy_s for g in state.generations if g.pipeline == slot.pipeline and g.healthy_s is not None]
    serves = [g for g in state.generations if g.pipeline == slot.pipeline and g.phase == "serving" and not g.failed]
    if serves and now_s - min(began) >= desired.settled_s and (slot.deaths or slot.failures):
        return slot.replace(failures=0, deaths=0, why="")
    return slot


def advance(desired: Desired, state: ControllerState, now_s: float) -> tuple[ControllerState, tuple[Replan, ...]]:
    """What the state should become, and whether another plan is asked for.

    A policy may answer its own orders with others, so it comes to rest after a few applications, not after one.
    """
    returned = [offer for offer, until_s in state.short_until_s if until_s <= now_s]
    state = state.replace(short_until_s=tuple(s for s in state.short_until_s if s[1] > now_s))
    for remembered in state.slots:
        state = state.with_slot(_forgiven(desired, state, remembered, now_s))
    state = _cancel_exchanges(_part_with_what_is_lost(state))
    replan = False
    if not state.draining:
        for slot in desired.slots:
            state = _begin(desired, state, slot, now_s)
        for slot in desired.slots:
            state, asked = _heed_notices(desired, state, slot, now_s)
            replan |= asked
        state, asked = _fill(desired, state, now_s, returned)
        replan |= asked
    state = _retire(desired, state, now_s)
    state = _give_back(desired, _note_absence(state, now_s))
    return forget(desired, state), (Replan("machines are missing that cannot be had"),) if replan else ()


def _part_with_what_is_lost(state: ControllerState) -> ControllerState:
    """Generations on lost machines have failed; those that have not started lack one instead."""
    for generation in state.generations:
        machines = [None if name is None else state.machine(name) for name in generation.machines]
        gone = [m for m in machines if m is not None and (m.lost or m.phase == "releasing")]
        now = generation
        if now.phase == "starting" and not now.started and not now.failed:
            going = [m for m in machines if m is not None and not m.stays]
            kept = tuple(None if m is None or m in going else m.name for m in machines)
            now = now.replace(machines=kept, loaded=tuple(r for r in now.loaded if kept[r] is not None))
        elif gone and not now.failed and now.phase != "leaving":
            now = now.replace(failed=True, why=f"machine {gone[0].name} is lost: {gone[0].why}")
        if now.failed and now.phase != "leaving":
            now = now.replace(phase="leaving")
        state = state if now == generation else state.with_generation(now)
    return state


def _note_absence(state: ControllerState, now_s: float) -> ControllerState:
    """Since when nothing serves a pipeline that was served."""
    served = {g.pipeline for g in state.generations if g.phase == "serving" and not g.failed}
    for pipeline in {pipeline for pipeline, _ in state.targets} - served:
        slot = state.slot(pipeline)
        if slot.away_since_s is None:
            state = state.with_slot(slot.replace(away_since_s=now_s))
    return state


def _begin(desired: Desired, state: ControllerState, slot: Slot, now_s: float) -> ControllerState:
    """A first generation, or one after a failure, on the machines that are still there."""
    remembered = state.slot(slot.pipeline)
    if state.newest(slot.pipeline) is not None or desired.given_up(remembered):
        return state
    if remembered.not_before_s is not None and now_s < remembered.not_before_s:
        return state
    before = [g for g in state.generations if g.pipeline == slot.pipeline]
    last = max(before, key=lambda g: g.generation, default=None)
    kept: list[str | None] = [None] * len(slot.offers)
    if last is not None:
        for rank, name in enumerate(last.machines):
            machine = None if name is None else state.machine(name)
            kept[rank] = name if machine is not None and machine.stays else None
    state = _new_generation(desired, state, slot, kept)
    if remembered.generations:
        return state
    # The plan's own offers come first.
    for rank, offer in enumerate(slot.offers):
        if kept[rank] is None and _can_be_had(desired, state, offer, now_s):
            state = _bind(desired, state, slot, rank, offer)
    return state


def _new_generation(
    desired: Desired, state: ControllerState, slot: Slot, machines: list[str | None]
) -> ControllerState:
    remembered = state.slot(slot.pipeline)
    number = remembered.generations + 1
    taken = {g.port for g in state.generations}
    used = state.ports_used
    while desired.first_port + used % desired.ports in taken:
        used += 1
    port = desired.first_port + used % desired.ports
    counters = state.counters.replace(generations=state.counters.generations + 1)
    state = state.with_slot(remembered.replace(generations=number)).replace(ports_used=used + 1, counters=counters)
    return state.with_generation(
        Generation(pipeline=slot.pipeline, generation=number, machines=tuple(machines), port=port)
    )


def _bind(desired: Desired, state: ControllerState, slot: Slot, rank: int, offer: str) -> ControllerState:
    """A spare of the offer, or a machine that is wanted from now on, as a rank of the newest generation."""
    latest = state.newest(slot.pipeline)
    if latest is None:
        return state
    spare = next((m for m in spares(desired, state) if m.offer == offer), None)
    if spare is None:
        named = state.machines_named + 1
        spare = Machine(name=f"m-{named}", offer=offer)
        state = state.replace(machines_named=named)
    state = state.with_machine(spare.replace(spare=False))
    machines = tuple(spare.name if r == rank else name for r, name in enumerate(latest.machines))
    return state.with_generation(latest.replace(machines=machines))


def _heed_notices(desired: Desired, state: ControllerState, slot: Slot, now_s: float) -> tuple[ControllerState, bool]:
    """A new generation beside one whose machines are announced to go, if the policy has one started."""
    latest = state.newest(slot.pipeline)
    if latest is None or not (latest.started or latest.phase == "serving"):
        return state, False
    if desired.given_up(state.slot(slot.pipeline)):
        return state, False
    replan, answers = False, []
    for name in latest.machines:
        machine = None if name is None else state.machine(name)
        if machine is not None and machine.deadline_s is not None:
            answer = on_notice(desired, state, machine, slot.pipeline, now_s)
            replan |= answer.replan
            wanted = [r for r in answer.request_replacements if r.pipeline == str(slot.pipeline)]
            if wanted:
                answers.append(desired.offer_of(wanted[0].pool, wanted[0].market))
    if not any(answers):
        return state, replan
    machines = [None if name is None else state.machine(name) for name in latest.machines]
    state = _new_generation(desired, state, slot, [m.name if m is not None and m.stays else None for m in machines])
    for offer in answers:
        state = _bind_kind(desired, state, slot, offer)
    return state, replan


def _bind_kind(desired: Desired, state: ControllerState, slot: Slot, offer: str | None) -> ControllerState:
    """A machine of an offer as the first rank that lacks one of its kind."""
    latest = state.newest(slot.pipeline)
    if offer is None or latest is None:
        return state
    for rank, name in enumerate(latest.machines):
        if name is None and desired.kind(slot.offers[rank]) == desired.kind(offer):
            return _bind(desired, state, slot, rank, offer)
    return state


def _fill(desired: Desired, state: ControllerState, now_s: float, returned: list[str]) -> tuple[ControllerState, bool]:
    """Machines for what is missing, and cheaper ones in place of others, as the policy says."""
    for slot in desired.slots:
        latest = state.newest(slot.pipeline)
        # What is not spot stays what it is, and a machine that is there is taken before one is rented.
        for rank, name in enumerate(() if latest is None else latest.machines):
            own = slot.offers[rank]
            if name is None and (_is_there(desired, state, own) or _is_owned(desired, state, own, now_s)):
                state = _bind(desired, state, slot, rank, own)
    lost = [m for m in state.machines if m.lost and m.offer in desired.offers]
    answer = on_event(desired, state, now_s, lost=lost, returned=[o for o in returned if o in desired.offers])
    state = _exchange(desired, state, answer)
    for request in answer.request_replacements:
        offer = desired.offer_of(request.pool, request.market)
        place = None if request.pipeline is None else desired.slot(int(request.pipeline))
        if offer is None:
            continue
        if place is not None:
            state = _bind_kind(desired, state, place, offer)
        else:
            named = state.machines_named + 1
            spare = Machine(name=f"m-{named}", offer=offer, spare=True)
            state = state.replace(machines_named=named).with_machine(spare)
    return state, answer.replan


def _can_be_had(desired: Desired, state: ControllerState, offer: str, now_s: float) -> bool:
    return _is_there(desired, state, offer) or desired.can_be_had(state, offer, now_s)


def _is_there(desired: Desired, state: ControllerState, offer: str) -> bool:
    return any(m.offer == offer for m in spares(desired, state))


def _is_owned(desired: Desired, state: ControllerState, offer: str, now_s: float) -> bool:
    """Whether it is no spot machine, and can be had."""
    return desired.market(offer) == "on_demand" and desired.can_be_had(state, offer, now_s)


def _exchange(desired: Desired, state: ControllerState, answer: Actions) -> ControllerState:
    """Start generations beside those whose machines are to be given back, and hold what is missing there open."""
    for slot in desired.slots:
        latest = state.newest(slot.pipeline)
        if latest is None or latest.phase != "serving":
            continue
        if desired.given_up(state.slot(slot.pipeline)):
            continue
        # The machines of the plan itself are no stand-ins.
        back = [
            name
            for name in latest.machines
            if name in answer.return_to_spot and name is not None and _stands_in(desired, state, slot, latest, name)
        ]
        kept = [None if name in back else name for name in latest.machines]
        if not back or (not desired.beside and any(kept)):
            continue
        for given in back:
            machine = state.machine(given)
            if machine is not None:
                state = state.with_machine(machine.replace(give_back=True))
        state = _new_generation(desired, state, slot, kept)
    return state


def _stands_in(desired: Desired, state: ControllerState, slot: Slot, latest: Generation, name: str) -> bool:
    machine = state.machine(name)
    planned = slot.offers[latest.machines.index(name)]
    return machine is not None and desired.market(planned) == "spot" and desired.market(machine.offer) == "on_demand"


def _retire(desired: Desired, state: ControllerState, now_s: float) -> ControllerState:
    """Old generations leave once the router has a newer one."""
    if state.draining:
        leaving = [g for g in state.generations if g.phase != "leaving"]
        for generation in leaving:
            state = state.with_generation(generation.replace(phase="leaving"))
        return state
    for generation in state.generations:
        confirmed = state.confirmed(generation.pipeline)
        if generation.phase == "leaving" or desired.slot(generation.pipeline) is None or confirmed is None:
            continue
        if generation.generation < confirmed:
            state = state.with_generation(generation.replace(phase="leaving"))
    return retire_unwanted(desired, state, now_s)


def _cancel_exchanges(state: ControllerState) -> ControllerState:
    """Where no cheaper machine came, the dearer one is kept."""
    for generation in state.generations:
        if generation.phase != "starting" or generation.started or None not in generation.machines:
            continue
        older = [g for g in state.generations if g.pipeline == generation.pipeline and g.phase == "serving"]
        if not older or older[-1].failed:
            continue
        machines = [state.machine(name) for name in older[-1].machines if name is not None]
        present = [m for m in machines if m is not None]
        if any(m.give_back for m in present) and all(m.stays or m.give_back for m in present):
            if any(m.lost or m.deadline_s is not None for m in present):
                continue
            for machine in present:
                state = state.with_machine(machine.replace(give_back=False))
            state = state.with_generation(generation.replace(phase="leaving"))
    return state


def _give_back(desired: Desired, state: ControllerState) -> ControllerState:
    """Machines that no generation is listed on. Spares are held until they are lost or announced to go."""
    used = {name for g in state.generations for name in g.machines}
    known = {m.name for m in spares(desired, state) if desired.counts.get(m.offer, 1) > 0}
    held = {m.name for m in state.machines if m.spare and m.name in known and not state.draining}
    for machine in state.machines:
        if machine.phase != "releasing" and (machine.lost or machine.name not in used | held):
            state = state.with_machine(machine.replace(phase="releasing"))
    return state


def targets(state: ControllerState) -> tuple[tuple[int, int], ...]:
    """What the router should send requests to: of each pipeline the newest generation that serves."""
    serving: dict[int, int] = {}
    for g in state.generations:
        if g.phase == "serving" and not g.failed:
            serving[g.pipeline] = max(g.generation, serving.get(g.pipeline, 0))
    return tuple(sorted(serving.items()))


def actions(desired: Desired, state: ControllerState, now_s: float) -> list[Action]:
    """What the world lacks to be as the state says; what is already under way is listed again."""
    todo: list[Action] = []
    for machine in state.machines:
        if machine.phase == "releasing":
            todo.append(Release(machine.name))
        elif machine.phase == "wanted":
            todo.append(Rent(machine.name, machine.offer))
        elif machine.phase == "booting":
            todo.append(Await(machine.name))
    wanted = targets(state)
    # At the end the router ends first, by itself.
    told = state.told == state.serving or not wanted
    if (wanted != state.targets or not told) and not state.draining:
        replaced = [g for g in state.generations if g.key in state.targets and g.key not in wanted]
        graces = [_grace_s(desired, state, generation, now_s) for generation in replaced]
        todo.append(SetTargets(wanted, min([desired.drain_s, *graces]), state.serving))
    for generation in state.generations:
        if generation.phase == "leaving":
            if generation.failed or state.draining or generation.key not in state.targets:
                todo.append(End(generation.key, _grace_s(desired, state, generation, now_s)))
        elif generation.phase == "starting":
            todo += _towards_serving(desired, state, generation)
    return todo


def _grace_s(desired: Desired, state: ControllerState, generation: Generation, now_s: float) -> float:
    # What was never healthy has no streams.
    if generation.failed or generation.healthy_s is None:
        return 0.0
    deadlines = [m.deadline_s for m in state.machines if m.name in generation.machines and m.deadline_s is not None]
    return max(0.0, min([desired.drain_s, *(d - now_s - _MARGIN_S for d in deadlines)]))


def _towards_serving(desired: Desired, state: ControllerState, generation: Generation) -> list[Action]:
    if generation.started:
        return [Probe(generation.key)]
    machines = [None if name is None else state.machine(name) for name in generation.machines]
    loads: list[Action] = [
        Load(generation.key, rank, machine.name)
        for rank, machine in enumerate(machines)
        if desired.stores and machine is not None and machine.phase == "ready" and rank not in generation.loaded
    ]
    if loads or any(machine is None or machine.phase != "ready" for machine in machines):
        return loads
    return [Start(generation.key)] if _room(desired, state, generation) else []


def _room(desired: Desired, state: ControllerState, generation: Generation) -> bool:
    """Whether its engines fit on their machines: alone, or beside one other where the plan keeps room for that."""
    others = [g for g in state.generations if g.key != generation.key and g.started]
    beside = [g for g in others if set(g.machines) & set(generation.machines)]
    if any(g.failed for g in beside):
        return False
    return not beside or (desired.beside and len(beside) == 1)


def standing_still(desired: Desired, state: ControllerState, now_s: float) -> dict[int, str]:
    """Pipelines that nothing serves, and why."""
    served = {pipeline for pipeline, _ in targets(state)}
    found = {}
    for slot in desired.slots:
        if slot.pipeline in served:
            continue
        latest, remembered = state.newest(slot.pipeline), state.slot(slot.pipeline)
        if latest is not None and in_turn(desired, state, slot, now_s):
            found[slot.pipeline] = "it waits for a machine that a pipeline of the plan before has"
        elif latest is None:
            found[slot.pipeline] = remembered.why or "it has not begun"
        elif None in latest.machines:
            kinds = [desired.kind(o) for o, m in zip(slot.offers, latest.machines, strict=True) if m is None]
            found[slot.pipeline] = f"no machine of {', '.join(kinds)} can be had"
        else:
            found[slot.pipeline] = "it is starting"
    return found
