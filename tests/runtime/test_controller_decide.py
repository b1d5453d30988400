"""Whatever happens to machines, engines and controller, every pipeline ends up served once, or says why not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.catalog.offers import Offer
from hetplan.policies import policy
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
from hetplan.runtime.controller.state import ControllerState

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
SLOTS = (Slot(1, (BIG, SMALL)), Slot(2, (SMALL,)))


def wanted(name: str = "hetplan", *, stores: bool = True, beside: bool = True, **options: float) -> Desired:
    return Desired(
        SLOTS, OFFERS, policy(name, **options), stores=stores, beside=beside, start_s=60.0, retry_s=60.0, ports=50
    )


@dataclass
class World:
    """A provider, machines, engines and a router, and a controller that is asked step by step."""

    desired: Desired
    state: ControllerState = field(default_factory=lambda: ControllerState(plan_fingerprint="f"))
    now_s: float = 1000.0
    empty: set[str] = field(default_factory=set)
    alive: dict[str, bool] = field(default_factory=dict)
    engines: dict[tuple[int, int], str] = field(default_factory=dict)
    router: tuple[tuple[int, int], ...] = ()
    released: Counter[str] = field(default_factory=Counter)
    confirmed: set[tuple[int, int]] = field(default_factory=set)
    broken: bool = False

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
            case SetTargets(new, _):
                assert all(self.engines.get(key) == "healthy" or not self.whole(key) for key in new)
                self.router = new
                self.confirmed |= set(new)
                self.learn(Targeted(new, self.state.revision + 1))

    def generation(self, key: tuple[int, int]):
        return next(g for g in self.state.generations if g.key == key)

    def whole(self, key: tuple[int, int]) -> bool:
        return all(self.alive.get(name) for name in self.generation(key).machines) and key in self.engines

    def may_end(self, key: tuple[int, int]) -> None:
        """A generation that answers is ended only when the router has had a newer one of its pipeline."""
        if self.engines.get(key) != "healthy" or not self.whole(key) or self.state.draining:
            return
        assert key not in self.router
        wanted = {slot.pipeline for slot in self.desired.slots}
        if key[0] not in wanted:
            assert wanted <= {pipeline for pipeline, _ in self.router}
            return
        # It may have failed since: what has begun to end is not taken back.
        others = [k for k in self.confirmed if k[0] == key[0] and k[1] > key[1]]
        assert others or self.generation(key).failed, f"the only generation of pipeline {key[0]} is ended"

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
    why = standing_still(world.desired, world.state)
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
    world.desired = Desired(
        (Slot(3, (SMALL, SMALL)),), OFFERS, policy("hetplan"), stores=True, beside=True, start_s=60.0, ports=50
    )
    world.settle()
    assert world.served() == [3]
    assert len(world.alive) == 2


MISFORTUNES = ("notice", "lose", "engine", "shortage", "plenty", "restart", "wait")


@pytest.mark.parametrize("name", ["hetplan", "both", "none", "skyserve", "parcae", "on-demand"])
@pytest.mark.parametrize("beside", [True, False])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_sequence_of_events_ends_with_every_pipeline_served_once(
    name: str, beside: bool, data: st.DataObject
) -> None:
    world = World(wanted(name, stores=beside, beside=beside))
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
    world.empty = set()
    world.now_s += 100
    world.settle()
    assert all(count == 1 for count in world.released.values())
    why = standing_still(world.desired, world.state)
    assert len(world.served()) == len(set(world.served()))
    assert sorted([*world.served(), *why]) == [1, 2]
    assert all("starts failed" in reason for reason in why.values())
    assert sorted(world.router) == sorted(targets(world.state))
    assert sorted(world.engines) == sorted(world.router)
    held = {n for g in world.state.generations for n in g.machines} | {m.name for m in world.state.machines if m.spare}
    assert set(world.alive) == held
