"""A controller in memory: stand-in machines, agents and router; plans change while it serves, and it is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import hetplan as hp
from hetplan.catalog.engines import get_engine
from hetplan.errors import InvalidInputError
from hetplan.policies import policy
from hetplan.runtime.controller import controller as loop
from hetplan.runtime.controller.controller import Controller
from hetplan.runtime.controller.demand import Demand, Resolved
from hetplan.runtime.controller.fleet import Fleet
from hetplan.runtime.controller.programs import Programs
from hetplan.runtime.controller.provider import MachineState, NoMachineError
from hetplan.runtime.controller.ray_agents import AgentGoneError
from hetplan.runtime.controller.router import RouterTarget
from hetplan.runtime.controller.serving import Load, Serving, ServingFiles
from hetplan.runtime.router.settings import RouteSettings
from hetplan.solvers.base import PipelineChoice, Solution
from hetplan.solvers.build import build_plan

MODEL = "qwen3-0.6b"


def plan_of(*pipelines: int, machines: int = 8, rate: float | None = None, model: str = MODEL) -> hp.Plan:
    """A pipeline for each number of machines of this host."""
    from hetplan.api import make_problem
    from hetplan.estimator.base import make_estimator
    from hetplan.estimator.pipeline import StageShape, pipeline_rates

    problem = make_problem(
        model=model,
        cluster={"local-cpu": machines},
        market="owned",
        provider="local",
        region="here",
        workload=hp.Workload(input_tokens=20, output_tokens=60, requests_per_s=rate),
        engine="vllm-0.32",
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
    )
    machine, estimator, layers = problem.cluster.instance_types[0], make_estimator(problem), problem.model.layer_count
    (pool,) = problem.cluster.pools
    choices, total = [], 0.0
    for stages in pipelines:
        cuts = [layers * i // stages for i in range(stages + 1)]
        shapes = tuple(StageShape((cuts[i], cuts[i + 1]), machine, 1, i) for i in range(stages))
        choices.append(PipelineChoice(shapes, (pool.offer.name,) * stages, 4))
        total += float(pipeline_rates(problem, estimator, shapes, 4).requests_per_s[0])
    return build_plan(problem, Solution(pipelines=tuple(choices), objective=total), solver="even", seed=0)


@dataclass
class World:
    """What outlives a controller: machines, the processes on each, what the router was told."""

    machines: set[str] = field(default_factory=set)
    running: dict[str, set[str]] = field(default_factory=dict)
    told: list[tuple[tuple[RouterTarget, ...], tuple[RouteSettings, ...]]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    room: int = 100
    demand_answer: dict[str, Any] = field(default_factory=lambda: {"covered_s": 595.0, "demand": []})
    ports: dict[int, str] = field(default_factory=dict)

    # A provider.
    def request(self, name: str, offer: hp.Offer) -> None:
        if name not in self.machines and len(self.machines) >= self.room:
            raise NoMachineError("none left")
        self.machines.add(name)

    def state(self, name: str) -> MachineState:
        return MachineState("ready", "127.0.0.1") if name in self.machines else MachineState("failed", reason="gone")

    def release(self, name: str) -> None:
        assert not self.running.get(name), f"{name} is given back under {self.running[name]}"
        self.machines.discard(name)

    # Agents.
    async def begin(self, name: str, settings: dict[str, Any]) -> str | None:
        self.running.setdefault(name, set())
        return "127.0.0.1"

    async def end(self, name: str) -> None:
        self.running.pop(name, None)

    async def call(self, machine: str, request: dict[str, Any], *, timeout_s: float | None = 30.0) -> dict[str, Any]:
        await asyncio.sleep(0)
        if machine not in self.running:
            raise AgentGoneError(machine, "it has ended")
        here = self.running[machine]
        match request["op"]:
            case "status":
                return {"notices": [], "processes": {name: {"returncode": None} for name in here}}
            case "hello":
                return {"socket": f"/run/{machine}"}
            case "start":
                here.add(request["name"])
                self.started.append(request["name"])
            case "stop":
                targets = self.told[-1][0] if self.told else ()
                ports = [int(a.removeprefix("--port=")) for a in self.argv_ports(request["name"])]
                assert not {t.port for t in targets} & set(ports), f"{request['name']} is ended while it is a target"
                here.discard(request["name"])
                self.ended.append(request["name"])
            case "end":
                here.clear()
        return {}

    def argv_ports(self, engine: str) -> list[str]:
        return [f"--port={port}" for port, name in self.ports.items() if name == engine]

    # A router.
    async def set_targets(
        self, targets: Sequence[RouterTarget], routes: Sequence[RouteSettings], *, grace_s: float | None = None
    ) -> int:
        self.told.append((tuple(targets), tuple(routes)))
        return len(self.told)

    async def targets(self) -> tuple[tuple[RouterTarget, ...], int]:
        return (self.told[-1][0] if self.told else ()), len(self.told)

    async def demand(self, window_s: float) -> dict[str, Any]:
        return self.demand_answer

    def served(self) -> list[int]:
        return sorted(t.pipeline for t in self.told[-1][0]) if self.told else []


@pytest.fixture(autouse=True)
def engines_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_answers", lambda url: True)


def controller_of(
    world: World, folder: Path, serving: Serving, events: list[tuple[str, dict[str, Any]]] | None = None, **more: Any
) -> Controller:
    seen = [] if events is None else events

    def tell(name: str, values: dict[str, Any]) -> None:
        seen.append((name, values))
        if name == "engines_started":
            world.ports[values["port"]] = f"engine-{values['pipeline']}-{values['generation']}"

    fleet = Fleet(lambda plan: Programs(plan, get_engine("vllm-0.32")), policy("both"), start_s=60.0)
    return Controller(
        serving,
        fleet,
        folder,
        provider=world,
        agents=world,
        router=world,
        on_event=tell,
        interval_s=0.01,
        **more,
    )


async def until(happened: Callable[[], bool], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not happened():
            await asyncio.sleep(0.01)


def rests(controller: Controller, pipelines: int) -> bool:
    state = controller.state
    return (
        len(state.generations) == len(state.targets) == pipelines
        and {g.phase for g in state.generations} == {"serving"}
        and all(m.phase == "ready" for m in state.machines)
        and state.told == state.serving
    )


def test_pipelines_that_both_plans_have_run_on_and_others_are_replaced_beside(tmp_path: Path) -> None:
    first, second = Serving.of(plan_of(1, 2)), Serving.of(plan_of(1, 1, 3))
    world, events = World(), []

    async def live() -> None:
        controller = controller_of(world, tmp_path, first, events)
        running = asyncio.create_task(controller.run())
        await until(lambda: rests(controller, 2))
        assert world.served() == [1, 2]
        before = len(world.told)
        controller.adopt(second)
        await until(lambda: rests(controller, 3))
        # The pipeline of one machine is in both: it was started once, and keeps its number.
        assert world.started.count("engine-2-1") == 1
        assert world.served() == [2, 3, 4]
        assert set(world.ended) == {"engine-1-1"}
        assert all({t.pipeline for t in targets} >= {2} for targets, _ in world.told[before:])
        controller.stop()
        await running

    asyncio.run(live())
    told = [values for name, values in events if name in ("adopting", "adopted")]
    assert len(told) == 2
    assert all(told[0][name] for name in ("kept", "added", "removed"))


def test_where_machines_are_few_pipelines_are_replaced_in_turn(tmp_path: Path) -> None:
    first, second = Serving.of(plan_of(1, 1, machines=2)), Serving.of(plan_of(2, machines=2))
    world = World(room=2)

    async def live() -> None:
        controller = controller_of(world, tmp_path, first)
        running = asyncio.create_task(controller.run())
        await until(lambda: rests(controller, 2))
        before = len(world.told)
        controller.adopt(second)
        await until(lambda: rests(controller, 1))
        # Its two machines are those of the two before: one of these serves as long as it can.
        assert [len(targets) for targets, _ in world.told[before:]][-3:] == [1, 0, 1]
        assert len(world.machines) == 2
        controller.adopt(first)
        await until(lambda: rests(controller, 2))
        controller.stop()
        await running

    asyncio.run(live())


def test_a_controller_that_is_killed_between_any_two_saves_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Serving.of(plan_of(1, 2)), Serving.of(plan_of(1, 3))
    genuine = loop.save

    async def live(folder: Path, kill_at: int) -> bool:
        """Whether there were so many saves."""
        world, saves = World(), count(1)
        controller = controller_of(world, folder, first)
        running = asyncio.create_task(controller.run())
        await until(lambda: rests(controller, 2))

        def save(state: Any, path: Path) -> None:
            if next(saves) == kill_at:
                raise KeyboardInterrupt
            genuine(state, path)

        before = len(world.told)
        monkeypatch.setattr(loop, "save", save)
        killed = False
        try:
            controller.adopt(second)
        except KeyboardInterrupt:
            killed = True
        dead: list[BaseException] = []
        controller_become = controller._become

        def become(state: Any) -> None:
            try:
                controller_become(state)
            except KeyboardInterrupt as error:
                dead.append(error)
                controller.stop()
                raise asyncio.CancelledError from None

        controller._become = become  # type: ignore[method-assign]
        await until(lambda: killed or bool(dead) or rests(controller, 2) or running.done())
        killed = killed or bool(dead)
        controller.stop()
        await asyncio.gather(running, return_exceptions=True)
        monkeypatch.setattr(loop, "save", genuine)
        again = controller_of(world, folder, first)
        goes_on = asyncio.create_task(again.run())
        if again.state.serving == first.fingerprint:
            again.adopt(second)
        await until(lambda: rests(again, 2) and world.served() == [2, 3])
        assert all({t.pipeline for t in targets} >= {2} for targets, _ in world.told[before:])
        assert world.started.count("engine-2-1") == 1
        again.stop()
        await goes_on
        return killed

    for kill_at in range(1, 100):
        if not asyncio.run(live(tmp_path / str(kill_at), kill_at)):
            break
    assert kill_at > 6


def test_two_models_are_served_with_their_routes(tmp_path: Path) -> None:
    plans = (plan_of(1), plan_of(1, model="qwen3-1.7b"))
    routes = tuple(RouteSettings(query_type="chat", model=m, fraction=0.5) for m in ("qwen3-0.6b", "qwen3-1.7b"))
    world = World()

    async def live() -> None:
        controller = controller_of(world, tmp_path, Serving(plans=plans, routes=routes))
        running = asyncio.create_task(controller.run())
        await until(lambda: rests(controller, 2))
        controller.adopt(Serving(plans=plans, routes=(routes[0],)))
        await until(lambda: world.told[-1][1] == (routes[0],))
        controller.stop()
        await running

    asyncio.run(live())
    for targets, told in world.told:
        assert {route.model for route in told} <= {t.model for t in targets}
    assert ({t.model for t in world.told[-2][0]}, world.told[-2][1]) == ({"qwen3-0.6b", "qwen3-1.7b"}, routes)
    assert len(world.started) == 2


def test_demand_that_has_moved_is_planned_for_where_that_is_worth_it(tmp_path: Path) -> None:
    first, larger = Serving.of(plan_of(1, rate=0.01)), plan_of(1, 1, rate=0.01)
    world, events, asked = World(), [], []

    def resolve(serving: Serving, demand: Demand) -> Resolved:
        asked.append(demand)
        return Resolved(Serving(plans=(larger,), planned=tuple(demand.values())))

    async def live() -> None:
        more = {"resolve": resolve, "resolve_every_s": 0.05}
        controller = controller_of(world, tmp_path, first, events, **more)
        running = asyncio.create_task(controller.run())
        await until(lambda: rests(controller, 1))
        load = Load(model=MODEL, requests_per_s=first.plans[0].requests_per_s * 1.5).model_dump()
        world.demand_answer = {"covered_s": 595.0, "demand": [load | {"ended": 0}]}
        await until(lambda: rests(controller, 2))
        await asyncio.sleep(0.5)
        controller.stop()
        await running

    asyncio.run(live())
    assert len(asked) == 1
    (adopting,) = [values for name, values in events if name == "adopting"]
    assert adopting["unit"] == "requests"
    assert adopting["gain"] > adopting["cost"]


def test_a_plan_over_the_machines_that_are_left_stands_in_and_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, smaller = Serving.of(plan_of(2, machines=2)), Serving.of(plan_of(1, machines=1))
    world, events, now_s = World(room=1), [], [1000.0]

    async def live() -> None:
        controller = controller_of(world, tmp_path, first, events, clock=lambda: now_s[0])
        running = asyncio.create_task(controller.run())
        await until(lambda: any(name == "no_machine" for name, _ in events))
        controller.adopt(smaller, stands_in=True)
        await until(lambda: rests(controller, 1))
        assert controller.state.returns_to == first.fingerprint
        world.room = 2
        now_s[0] += 2 * loop._RETURN_EVERY_S
        await until(lambda: controller.state.serving == first.fingerprint and rests(controller, 1))
        assert controller.state.returns_to is None
        controller.stop()
        await running

    asyncio.run(live())
    assert len(world.machines) == 2


def test_plans_are_read_under_their_fingerprints_only(tmp_path: Path) -> None:
    files, serving = ServingFiles(tmp_path), Serving.of(plan_of(1))
    files.write(serving)
    assert files.read(serving.fingerprint).fingerprint == serving.fingerprint
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(InvalidInputError, match="no fingerprint"):
        files.read("../state")
    path.write_text(path.read_text().replace("0.6b", "1.7b"))
    with pytest.raises(InvalidInputError, match="does not hold what it is named for"):
        files.read(serving.fingerprint)


def test_the_state_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"schema_name": "hetplan.controller/1", "plan_fingerprint": "f"}')
    with pytest.raises(hp.SchemaVersionError, match="has schema 'hetplan"):
        controller_of(World(), tmp_path, Serving.of(plan_of(1)))


def test_a_folder_of_another_plan_is_taken_when_nothing_of_it_is_left(tmp_path: Path) -> None:
    first, second = Serving.of(plan_of(1)), Serving.of(plan_of(1, 1))

    async def live() -> None:
        world = World()
        controller = controller_of(world, tmp_path, first)
        running = asyncio.create_task(controller.run())
        await until(lambda: rests(controller, 1))
        with pytest.raises(InvalidInputError, match="of which machines are left"):
            controller_of(world, tmp_path, second)
        # As `serve` does, whose router has ended before.
        world.told.append(((), ()))
        controller.drain()
        await running
        other = controller_of(world, tmp_path, second)
        running = asyncio.create_task(other.run())
        await until(lambda: rests(other, 2))
        other.stop()
        await running

    asyncio.run(live())


def test_what_was_left_alone_is_tried_again_after_a_restart(tmp_path: Path) -> None:
    serving = Serving.of(plan_of(1))

    async def live() -> None:
        world = World()
        controller = controller_of(world, tmp_path, serving)
        (slot,) = controller.state.slots
        assert controller.given_up() == {}
        controller._become(controller.state.with_slot(slot.replace(failures=3, why="3 starts failed")))
        assert controller.given_up() == {1: "3 starts failed"}
        running = asyncio.create_task(controller.run())
        await asyncio.sleep(0.3)
        assert controller.state.generations == ()
        controller.stop()
        await running
        again = controller_of(world, tmp_path, serving)
        running = asyncio.create_task(again.run())
        await until(lambda: rests(again, 1))
        again.stop()
        await running

    asyncio.run(live())
