"""Whatever happens to machines, engines and controller, every pipeline ends up served once, or says why not."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.catalog.offers import Offer
from hetplan.policies import policy
from hetplan.runtime.controller.adopting import adopt, unwanted
from hetplan.runtime.controller.decide import (
    Action,
    Await,
    End,
    Ended,
    Fact,
    Failed,
    Healthy,
    Load,
    Loaded,
    MachineLost,
    MachineReady,
    NoMachine,
    Noticed,
    Probe,
    Release,
    Released,
    Rent,
    Requested,
    SetTargets,
    Start,
    Started,
    Targeted,
    actions,
    advance,
    fold,
    standing_still,
    targets,
)
from hetplan.runtime.controller.desired import Desired, Slot
from hetplan.runtime.controller.state import ControllerState, Origin

GRACE_S = 120.0


def offer(kind: str, market: str, price: float) -> Offer:
    return Offer(
        instance_type=kind,
        provider="aws",
        region="here",
        market=market,
        price_usd_per_hour=price,
        source="made up",
    )


OFFERS = {
    o.name: o
    for kind, price in (("big", 4.0), ("small", 1.0))
    for o in (offer(kind, "spot", price), offer(kind, "on_demand", 3 * price))
}
BIG, BIG_DEMAND, SMALL, SMALL_DEMAND = OFFERS
# Of each pipeline its offers and its model.
Pipelines = tuple[tuple[tuple[str, ...], str], ...]
FIRST: Pipelines = (((BIG, SMALL), "x"), ((SMALL,), "x"))
PLANS: tuple[Pipelines, ...] = (
    FIRST,
    (((SMALL,), "x"), ((SMALL, SMALL), "x")),
    (((BIG,), "y"), ((SMALL,), "x")),
    (((BIG, SMALL), "x"), ((BIG,), "y")),
)
# As many as the largest of the plans needs, and none on demand.
FEW = {BIG: 2, SMALL: 3, BIG_DEMAND: 0, SMALL_DEMAND: 0}


def fingerprint(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()


def origins(plan: Pipelines) -> list[Origin]:
    return [
        Origin(
            serving=fingerprint(plan),
            plan=0,
            number=number,
            model=one[1],
            weight=1.0,
            started_as=fingerprint(one),
        )
        for number, one in enumerate(plan, start=1)
    ]


def served(plan: Pipelines) -> ControllerState:
    fresh = ControllerState(given=fingerprint(plan), serving=fingerprint(plan))
    return adopt(fresh, fingerprint(plan), origins(plan))


def slots_of(plan: Pipelines, state: ControllerState) -> tuple[Slot, ...]:
    own = [s for s in state.slots if s.origin is not None and s.origin.serving == fingerprint(plan)]
    return tuple(Slot(s.pipeline, plan[s.origin.number - 1][0], s.origin.model) for s in own)


def wanted(
    name: str = "hetplan",
    *,
    stores: bool = True,
    beside: bool = True,
    counts: dict[str, int] | None = None,
    **options: float,
) -> Desired:
    return Desired(
        slots_of(FIRST, served(FIRST)),
        OFFERS,
        policy(name, **options),
        counts=counts or {},
        stores=stores,
        beside=beside,
        start_s=60.0,
        retry_s=60.0,
        ports=50,
    )


@dataclass
class World:
    """A provider, machines, engines and a router, and a controller that is asked step by step."""

    desired: Desired
    state: ControllerState = field(default_factory=lambda: served(FIRST))
    now_s: float = 1000.0
    empty: set[str] = field(default_factory=set)
    alive: dict[str, bool] = field(default_factory=dict)
    engines: dict[tuple[int, int], str] = field(default_factory=dict)
    router: tuple[tuple[int, int], ...] = ()
    released: Counter[str] = field(default_factory=Counter)
    confirmed: set[tuple[int, int]] = field(default_factory=set)
    broken: bool = False
    adoptions: int = 0
    last_wanted: dict[int, int] = field(default_factory=dict)
    leaving: set[tuple[int, int]] = field(default_factory=set)
    taken: set[tuple[int, str]] = field(default_factory=set)

    def adopt(self, plan: Pipelines) -> None:
        for slot in self.desired.slots:
            self.last_wanted[slot.pipeline] = self.adoptions
        self.adoptions += 1
        self.leaving |= {g.key for g in self.state.generations if g.phase == "leaving"}
        self.state = adopt(self.state, fingerprint(plan), origins(plan))
        self.desired = replace(self.desired, slots=slots_of(plan, self.state))
        self.note_served()

    def note_served(self) -> None:
        """The router has something of the plan in force."""
        wanted = [slot for pipeline, _ in self.router if (slot := self.desired.slot(pipeline)) is not None]
        self.taken |= {(self.adoptions, slot.model) for slot in wanted}

    def todo(self) -> list[Action]:
        """As the loop does: once. That it comes to rest when nothing happens is seen on a copy."""
        self.state, _ = advance(self.desired, self.state, self.now_s)
        rest, passes = self.state, 0
        while (after := advance(self.desired, rest, self.now_s)[0]) != rest:
            rest, passes = after, passes + 1
            assert passes < 6, "it does not come to rest"
        return actions(self.desired, self.state, self.now_s)

    def learn(self, fact: Fact) -> None:
        self.state = fold(self.desired, self.state, fact, self.now_s)

    def do(self, action: Action) -> None:
        match action:
            case Rent(name, offer_):
                if offer_ in self.empty and name not in self.alive:
                    self.learn(NoMachine(name, "none left"))
                else:
                    # A name that was asked for before is the same machine.
                    self.alive.setdefault(name, True)
                    self.learn(Requested(name))
            case Await(name):
                if self.alive[name]:
                    self.learn(MachineReady(name, "127.0.0.1"))
                else:
                    self.learn(MachineLost(name, "taken"))
            case Release(name):
                running = [g for g in self.state.generations if name in g.machines and g.key in self.engines]
                assert not self.alive.get(name) or not running, f"{name} is given back under {running}"
                self.released[name] += 1
                self.alive.pop(name, None)
                self.learn(Released(name))
            case Load(key, rank, name):
                if self.alive.get(name):
                    self.learn(Loaded(key, rank))
                else:
                    self.learn(MachineLost(name, "does not answer"))
            case Start(key):
                assert key not in self.engines
                if all(self.alive.get(name) for name in self.generation(key).machines):
                    self.engines[key] = "started"
                self.learn(Started(key))
            case Probe(key):
                if self.engines.get(key) in ("started", "healthy") and not self.broken:
                    self.engines[key] = "healthy"
                    self.learn(Healthy(key))
                else:
                    self.learn(Failed(key, "it ended"))
            case End(key, _):
                self.may_end(key)
                self.engines.pop(key, None)
                self.learn(Ended(key))
            case SetTargets(new, _, serving):
                assert all(self.engines.get(key) == "healthy" or not self.whole(key) for key in new)
                self.router = new
                self.confirmed |= set(new)
                self.note_served()
                self.learn(Targeted(new, self.state.revision + 1, serving))

    def generation(self, key: tuple[int, int]):
        return next(g for g in self.state.generations if g.key == key)

    def whole(self, key: tuple[int, int]) -> bool:
        return all(self.alive.get(name) for name in self.generation(key).machines) and key in self.engines

    def may_end(self, key: tuple[int, int]) -> None:
        """A generation that answers is ended only when the router has had a newer one of its pipeline."""
        if self.engines.get(key) != "healthy" or not self.whole(key) or self.state.draining:
            return
        assert key not in self.router
        if self.desired.slot(key[0]) is None:
            self.may_end_of_a_plan_before(key)
            return
        # It may have failed since: what has begun to end is not taken back.
        if key in self.leaving:
            # It left before another plan was adopted, and was held to the rules then.
            return
        others = [k for k in self.confirmed if k[0] == key[0] and k[1] > key[1]]
        assert others or self.generation(key).failed, f"the only generation of pipeline {key[0]} is ended"

    def may_end_of_a_plan_before(self, key: tuple[int, int]) -> None:
        """Only when something of a plan after it has served its model, or where machines are few."""
        models = {m for n, m in self.taken if n > self.last_wanted[key[0]]}
        model = self.state.slot(key[0]).origin.model
        known = {slot.model for slot in self.desired.slots}
        assert (model in models if model in known else models) or self.desired.counts or self.generation(key).failed

    def settle(self, rounds: int = 80) -> None:
        for _ in range(rounds):
            todo = self.todo()
            if not todo and self.now_s > 0:
                before = self.state
                self.now_s += 61
                if not self.todo() and self.state.short_until_s == before.short_until_s == ():
                    return
                continue
            for action in todo:
                if action in self.todo():
                    self.do(action)

    def served(self) -> list[int]:
        return [pipeline for pipeline, _ in self.router]


def started(desired: Desired) -> World:
    world = World(desired)
    world.settle()
    assert world.served() == [1, 2]
    return world


def machine_of(world: World, pipeline: int, rank: int = 0) -> str:
    return world.generation({k[0]: k for k in world.router}[pipeline]).machines[rank]


def test_a_plan_is_started_on_its_own_offers() -> None:
    world = started(wanted())
    assert sorted(m.offer for m in world.state.machines) == sorted([BIG, SMALL, SMALL])
    assert len(world.alive) == 3
    assert len({g.port for g in world.state.generations}) == 2


def test_a_notice_starts_a_generation_beside_the_old_one_and_keeps_what_stays() -> None:
    world = started(wanted())
    big, small = machine_of(world, 1, 0), machine_of(world, 1, 1)
    world.learn(Noticed(big, world.now_s + GRACE_S))
    order = []
    for _ in range(30):
        for action in world.todo():
            if action in world.todo():
                order.append(type(action).__name__)
                world.do(action)
    assert [o for o in order if o != "Probe"] == [
        "Rent", "Await", "Load", "Load", "Start", "SetTargets", "End", "Release",
    ] or [o for o in order if o != "Probe"] == [
        "Rent", "Load", "Await", "Load", "Start", "SetTargets", "End", "Release",
    ]  # fmt: skip
    assert machine_of(world, 1, 1) == small
    assert world.released == {big: 1}
    assert dict(world.router) == {1: 2, 2: 1}


def test_without_room_beside_the_new_generation_waits_for_the_old_one() -> None:
    world = started(wanted(stores=False, beside=False))
    big = machine_of(world, 1, 0)
    world.learn(Noticed(big, world.now_s + GRACE_S))
    world.settle(6)
    assert dict(world.router)[1] == 1
    world.alive[big] = False
    world.learn(MachineLost(big, "taken"))
    world.settle()
    assert dict(world.router) == {1: 2, 2: 1}


def test_on_demand_stands_in_and_gives_way_when_spot_is_back() -> None:
    world = started(wanted("both", return_to_spot=True))
    world.empty = {SMALL}
    gone = machine_of(world, 2)
    world.alive[gone] = False
    world.learn(MachineLost(gone, "taken"))
    world.settle(12)
    assert world.state.machine(machine_of(world, 2)).offer == SMALL_DEMAND
    world.empty = set()
    world.now_s += 100
    world.settle()
    assert world.state.machine(machine_of(world, 2)).offer == SMALL
    assert sorted(m.offer for m in world.state.machines) == sorted([BIG, SMALL, SMALL])


def test_an_exchange_that_gets_no_machine_leaves_things_as_they_are() -> None:
    world = started(wanted("both", return_to_spot=True))
    world.empty = {SMALL}
    gone = machine_of(world, 2)
    world.learn(MachineLost(gone, "taken"))
    world.alive[gone] = False
    world.settle(40)
    stand_in = machine_of(world, 2)
    world.settle(40)
    assert machine_of(world, 2) == stand_in
    assert world.engines[{k[0]: k for k in world.router}[2]] == "healthy"


def test_what_cannot_be_started_is_left_alone_and_says_why() -> None:
    world = World(wanted(), broken=True)
    world.settle()
    assert world.served() == []
    why = standing_still(world.desired, world.state, world.now_s)
    assert set(why) == {1, 2}
    assert "3 starts failed, the last by: it ended" in why[1]
    assert not world.alive


def test_draining_ends_everything() -> None:
    world = started(wanted())
    world.state = world.state.replace(draining=True)
    world.settle()
    assert world.state.machines == world.state.generations == ()
    assert not world.alive
    assert not world.engines


def test_another_plan_is_taken_over_without_a_gap() -> None:
    world = started(wanted())
    world.adopt((((SMALL, SMALL), "x"),))
    world.settle()
    assert world.served() == [3]
    assert len(world.alive) == 2


def die(world: World, pipeline: int, after_s: float) -> float | None:
    """Its engine dies; the seconds until the next start, None if there is none."""
    world.now_s += after_s
    world.todo()
    key = {k[0]: k for k in world.router}[pipeline]
    world.engines[key] = "dead"
    world.learn(Failed(key, "out of memory"))
    began_s = world.now_s
    while world.state.newest(pipeline) is None:
        for action in world.todo():
            if isinstance(action, (End, SetTargets)):
                world.do(action)
        if world.now_s - began_s > 100:
            return None
        world.now_s += 1
    pause_s = world.now_s - 1 - began_s
    world.settle()
    return pause_s


def test_an_engine_that_dies_young_is_started_after_growing_pauses_and_then_left_alone() -> None:
    world = started(wanted())
    pauses = [die(world, 2, 5.0) for _ in range(6)]
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, None]
    why = standing_still(world.desired, world.state, world.now_s)
    assert "6 engines ended soon after they had become healthy, the last by: out of memory" in why[2]
    assert world.served() == [1]


def test_an_engine_that_served_long_begins_anew() -> None:
    world = started(wanted())
    assert [die(world, 2, 5.0) for _ in range(4)][-1] == 16.0
    die(world, 2, 700.0)
    assert [die(world, 2, 5.0) for _ in range(3)] == [2.0, 4.0, 8.0]
    assert world.state.counters.failures == 8


@settings(max_examples=20, deadline=None)
@given(lived_s=st.lists(st.sampled_from([1.0, 100.0, 400.0, 700.0]), min_size=1, max_size=12))
def test_pauses_are_bounded_and_only_those_that_die_young_are_left_alone(lived_s: list[float]) -> None:
    world = started(wanted())
    young = 0
    for after_s in lived_s:
        pause_s = die(world, 2, after_s)
        young = 0 if after_s >= 600 else young + 1
        if young == 6:
            assert pause_s is None
            return
        assert pause_s is not None
        assert 0 <= pause_s <= 60


def test_with_as_few_machines_as_there_are_a_model_is_served_while_plans_change() -> None:
    world = World(wanted(counts={BIG: 1, SMALL: 2, BIG_DEMAND: 0, SMALL_DEMAND: 0}))
    world.settle()
    routers = []
    # The new pipeline needs both small machines.
    world.adopt((((SMALL, SMALL), "x"),))
    for _ in range(60):
        for action in world.todo():
            if action in world.todo():
                world.do(action)
        routers.append(world.served())
    assert world.served() == [3]
    assert len(world.alive) == 2
    gaps = [served for served in routers if not served]
    assert len(gaps) < 20


def test_a_plan_that_does_not_start_ends_nothing() -> None:
    world = started(wanted(counts={BIG: 1, SMALL: 3, BIG_DEMAND: 0, SMALL_DEMAND: 0}))
    world.broken = True
    # The second starts beside, and fails; the third waits for the machine of the pipeline that only the old plan has.
    world.adopt((((SMALL,), "x"), ((SMALL,), "x"), ((BIG,), "x")))
    world.settle()
    # The one that both plans have, and the other of the plan before.
    assert world.served() == [1, 2]


MISFORTUNES = ("notice", "lose", "engine", "shortage", "plenty", "restart", "wait", "adopt")


@pytest.mark.parametrize("name", ["hetplan", "both", "none", "skyserve", "parcae", "on-demand"])
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("few", [False, True])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_sequence_of_events_ends_with_every_pipeline_served_once(
    name: str, beside: bool, few: bool, data: st.DataObject
) -> None:
    # That policy rents nothing else in place of what is gone.
    counts = FEW | ({BIG_DEMAND: 5, SMALL_DEMAND: 5} if name == "on-demand" else {})
    world = World(wanted(name, stores=beside, beside=beside, counts=counts if few else None))
    for _ in range(data.draw(st.integers(1, 25))):
        todo = world.todo()
        for action in data.draw(st.permutations(todo))[: data.draw(st.integers(0, 4))]:
            if action in world.todo():
                world.do(action)
        alive = sorted(name for name, lives in world.alive.items() if lives)
        match data.draw(st.sampled_from(MISFORTUNES)):
            case "notice" if alive:
                world.learn(Noticed(data.draw(st.sampled_from(alive)), world.now_s + GRACE_S))
            case "lose" if alive:
                lost = data.draw(st.sampled_from(alive))
                world.alive[lost] = False
                world.learn(MachineLost(lost, "taken"))
            case "engine" if world.engines:
                key = data.draw(st.sampled_from(sorted(world.engines)))
                world.engines[key] = "dead"
                world.learn(Failed(key, "it ended"))
            case "shortage":
                world.empty |= {data.draw(st.sampled_from(sorted(OFFERS)))}
            case "plenty":
                world.empty = set()
            case "restart":
                world.state = ControllerState.from_json(world.state.model_dump_json())
            case "wait":
                world.now_s += 30
            case "adopt":
                world.adopt(data.draw(st.sampled_from(PLANS)))
    world.empty = set()
    world.now_s += 100
    world.settle()
    assert all(count == 1 for count in world.released.values())
    why = standing_still(world.desired, world.state, world.now_s)
    assert len(world.served()) == len(set(world.served()))
    left = {g.pipeline for g in unwanted(world.desired, world.state)}
    assert sorted([*world.served(), *why]) == sorted([*(slot.pipeline for slot in world.desired.slots), *left])
    if not few:
        assert all("starts failed" in reason or "soon after" in reason for reason in why.values())
    # Who is of a plan before stays where the plan in force cannot serve.
    assert not left or why
    assert sorted(world.router) == sorted(targets(world.state))
    assert sorted(world.engines) == sorted(world.router)
    held = {n for g in world.state.generations for n in g.machines} | {m.name for m in world.state.machines if m.spare}
    assert set(world.alive) == held
