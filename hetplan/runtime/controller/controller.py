"""The loop that makes the world as `decide` says: it looks, folds what it sees into the state, and acts.

Each action runs as a task of its own and may be carried out twice; what came of it is a fact. The state is on disk
before anything is done because of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from hetplan.errors import HetplanError, InvalidInputError, RouterError
from hetplan.plan import Plan
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
    Replan,
    Requested,
    SetTargets,
    Start,
    Started,
    Targeted,
    actions,
    advance,
    fold,
    standing_still,
)
from hetplan.runtime.controller.desired import Desired
from hetplan.runtime.controller.programs import Program, Programs
from hetplan.runtime.controller.provider import MachineProvider, NoMachineError
from hetplan.runtime.controller.ray_agents import AgentGoneError, Agents
from hetplan.runtime.controller.router import RouterClient, RouterTarget
from hetplan.runtime.controller.state import ControllerState, Generation, Machine, load, save

OnEvent = Callable[[str, dict[str, Any]], None]
# Given the plan's problem and the plan.
Replanner = Callable[[Any, Plan], Plan | None]

_BOOT_S = 900.0
_START_S = 1800.0
_LAST_RANKS_S = 5.0
_STATUS_S, _MISSES = 4.0, 4
_REPLAN_EVERY_S = 300.0
_CHECK_ROUTER_EVERY_S = 2.0
_STORE_EVERY_S = 5.0
_LONGEST_PAUSE_S = 30.0


class Controller:
    """Keeps a plan served.

    Parameters
    ----------
    programs : Programs
    desired : Desired
    folder : path
        Where its state is kept.
    provider : MachineProvider
    agents : Agents
    router : RouterClient
    on_event : callable
        Told ``name`` and values of everything that happens, with ``at_s``, the clock.
    replan : callable, optional
        Given the problem and the plan when machines are missing that cannot be had; what it returns is reported.
    notices : dict, optional
        The metadata service that agents watch: ``provider`` and ``base_url``.
    clock : callable
        Seconds since 1970.
    interval_s : float
        Between two looks.

    Raises
    ------
    InvalidInputError
        If the folder holds the state of another plan.
    """

    def __init__(
        self,
        programs: Programs,
        desired: Desired,
        folder: Path,
        *,
        provider: MachineProvider,
        agents: Agents,
        router: RouterClient,
        on_event: OnEvent,
        replan: Replanner | None = None,
        notices: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
        interval_s: float = 0.5,
    ) -> None:
        self._programs, self._desired = programs, desired
        self._provider, self._agents, self._router = provider, agents, router
        self._on_event, self._replan, self._notices = on_event, replan, notices
        self._clock, self._interval_s = clock, interval_s
        self._path = folder / "state.json"
        fingerprint = programs.fingerprint
        found = load(self._path)
        if found is not None and found.plan_fingerprint != fingerprint:
            raise InvalidInputError(
                f"{self._path} is of another plan ({found.plan_fingerprint[:12]}); give that plan, or another folder"
            )
        self.state = found or ControllerState(plan_fingerprint=fingerprint)
        self._restarted = found is not None
        self._tasks: dict[tuple[Any, ...], asyncio.Task[None]] = {}
        self._retry: dict[tuple[Any, ...], tuple[int, float]] = {}
        self._since: dict[tuple[Any, ...], float] = {}
        self._misses: dict[str, int] = {}
        self._sockets: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._stopping = False

    async def run(self) -> None:
        """Keep the plan served until `stop`, or until everything has ended after `drain`."""
        self._tell("controller_started", restarted=self._restarted, machines=len(self.state.machines))
        if self.state.draining:
            self._become(self.state.replace(draining=False))
        if self._restarted:
            # Whatever the router was told meanwhile, it is told what serves now.
            self._become(self.state.replace(targets=()))
        try:
            while not self._stopping:
                self._wake.clear()
                await self._look()
                self._decide()
                if self.state.draining and not self.state.machines and not self.state.generations:
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._interval_s)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def stop(self) -> None:
        """Leave everything as it is and end the loop; another controller goes on from the state."""
        self._stopping = True
        self._wake.set()

    def drain(self) -> None:
        """End all engines, give all machines back, and end the loop then."""
        self._become(self.state.replace(draining=True))
        self._wake.set()

    def notice(self, machine: str, grace_s: float) -> None:
        """A machine will be taken."""
        self._learn(Noticed(machine, self._clock() + grace_s))
        self._wake.set()

    def standing_still(self) -> dict[int, str]:
        """Pipelines that nothing serves, and why."""
        return standing_still(self._desired, self.state)

    # What is seen.

    async def _look(self) -> None:
        ready = [m for m in self.state.machines if m.phase == "ready" and not m.lost]
        await asyncio.gather(*(self._look_at(machine) for machine in ready))
        await self._check_router()

    async def _look_at(self, machine: Machine) -> None:
        name = machine.name
        try:
            if (seen := await asyncio.to_thread(self._provider.state, name)).status == "failed":
                return self._lose(name, seen.reason)
            status = await self._agents.call(name, {"op": "status"}, timeout_s=_STATUS_S)
        except AgentGoneError as error:
            return self._lose(name, str(error))
        except (TimeoutError, HetplanError, OSError) as error:
            self._misses[name] = self._misses.get(name, 0) + 1
            if self._misses[name] >= _MISSES:
                self._lose(name, f"its agent does not answer: {error}")
            return None
        self._misses.pop(name, None)
        for notice in status["notices"]:
            deadline_s = self._clock() + notice["seconds_left"]
            if machine.deadline_s is None:
                self._learn(Noticed(name, deadline_s))
        await self._look_at_store(name, status["processes"])
        await self._look_at_processes(name, status["processes"])
        return None

    async def _look_at_store(self, machine: str, processes: dict[str, dict[str, Any]]) -> None:
        """A store that has ended is started again, empty: engines go on with what they map, which it cannot count.

        It is filled when the next engines start there.
        """
        store = processes.get("store")
        generation = next((g for g in self.state.generations if machine in g.machines), None)
        if store is None or store["returncode"] is None or generation is None:
            return
        if self._clock() - self._since.get(("store", machine), 0.0) < _STORE_EVERY_S:
            return
        self._since["store", machine] = self._clock()
        nodes = self._programs.nodes(generation.pipeline, generation.port)
        node = nodes[generation.machines.index(machine)]
        with contextlib.suppress(HetplanError, TimeoutError):
            program = self._programs.start_store(node, await self._socket(machine))
            if program is not None:
                await self._agents.call(machine, _start("store", program))
                self._tell("store_restarted", machine=machine, ended_with=store["returncode"])

    async def _look_at_processes(self, machine: str, processes: dict[str, dict[str, Any]]) -> None:
        for generation in self.state.generations:
            if generation.phase == "leaving" or not generation.started or machine not in generation.machines:
                continue
            process = processes.get(_engine(generation))
            if process is not None and process["returncode"] is None:
                continue
            said = ""
            with contextlib.suppress(HetplanError, TimeoutError):
                said = (await self._agents.call(machine, {"op": "tail", "name": _engine(generation)}))["text"]
            ended = "was never started" if process is None else f"ended with {process['returncode']}"
            self._learn(Failed(generation.key, f"the engine on {machine} {ended}: {said[-300:].strip()}"))

    async def _check_router(self) -> None:
        """A router that was started anew, or told something else by someone else, is told again."""
        if not self.state.targets or self.state.draining:
            return
        if self._clock() - self._since.setdefault(("router",), self._clock()) < _CHECK_ROUTER_EVERY_S:
            return
        self._since["router",] = self._clock()
        with contextlib.suppress(RouterError):
            listed, _ = await self._router.targets()
            ours = {(t.address, t.port) for t in self._targets(self.state.targets)}
            if {(t.address, t.port) for t in listed} != ours:
                self._become(self.state.replace(targets=()))

    # What is done.

    def _decide(self) -> None:
        now_s = self._clock()
        state, replans = advance(self._desired, self.state, now_s)
        for old in self.state.generations:
            new = next((g for g in state.generations if g.key == old.key), None)
            if new is not None and new.phase == "leaving" and old.phase != "leaving":
                self._tell("leaving", **_named(new), failed=new.failed, why=new.why)
        for fresh in state.generations:
            if all(g.key != fresh.key for g in self.state.generations):
                self._tell("generation", **_named(fresh), machines=list(fresh.machines), port=fresh.port)
        self._become(state)
        for action in (*actions(self._desired, state, now_s), *replans):
            self._begin(action)

    def _begin(self, action: Action) -> None:
        key = _key(action)
        running = self._tasks.get(key)
        if running is not None and not running.done():
            return
        failures, not_before_s = self._retry.get(key, (0, 0.0))
        if self._clock() < not_before_s:
            return
        self._tasks[key] = asyncio.create_task(self._carry_out(action, key, failures))
        if not isinstance(action, Await | Probe):
            # Those are asked again at the next look; that at once would keep a core busy until the answer is yes.
            self._tasks[key].add_done_callback(lambda _: self._wake.set())

    async def _carry_out(self, action: Action, key: tuple[Any, ...], failures: int) -> None:
        try:
            await self._do(action)
        except AgentGoneError as error:
            self._lose(error.machine, str(error))
        except (HetplanError, OSError, TimeoutError) as error:
            pause_s = min(_LONGEST_PAUSE_S, 2.0**failures)
            self._retry[key] = (failures + 1, self._clock() + pause_s)
            self._tell("failed", action=type(action).__name__, error=str(error)[:500], again_in_s=pause_s)
        else:
            self._retry.pop(key, None)

    def _do(self, action: Action) -> Coroutine[Any, Any, None]:
        match action:
            case Rent():
                return self._rent(action)
            case Await(name):
                return self._await(name)
            case Release(name):
                return self._release(name)
            case Load():
                return self._load(action)
            case Start(key):
                return self._start(key)
            case Probe(key):
                return self._probe(key)
            case End():
                return self._end(action)
            case SetTargets():
                return self._set_targets(action)
            case Replan(why):
                return self._ask_for_plan(why)

    async def _rent(self, action: Rent) -> None:
        self._since.setdefault(("boot", action.machine), self._clock())
        self._tell("renting", machine=action.machine, offer=action.offer)
        try:
            await asyncio.to_thread(self._provider.request, action.machine, self._desired.offers[action.offer])
        except NoMachineError as error:
            self._tell("no_machine", machine=action.machine, offer=action.offer, why=str(error))
            self._learn(NoMachine(action.machine, str(error)))
        else:
            self._learn(Requested(action.machine))

    async def _await(self, name: str) -> None:
        began_s = self._since.setdefault(("boot", name), self._clock())
        found = await asyncio.to_thread(self._provider.state, name)
        why = found.reason if found.status == "failed" else ""
        if not why and self._clock() - began_s > _BOOT_S:
            why = f"it did not start within {_BOOT_S:.0f} s"
        if why:
            self._tell("no_machine", machine=name, why=why)
            self._learn(NoMachine(name, why))
        elif found.status == "ready":
            address = await self._agents.begin(name, {"notices": self._notices})
            if address is not None:
                self._tell("node_ready", machine=name, address=address, seconds=self._clock() - began_s)
                self._learn(MachineReady(name, address))

    async def _release(self, name: str) -> None:
        machine = self.state.machine(name)
        if machine is not None and machine.phase == "releasing" and not machine.lost:
            with contextlib.suppress(HetplanError, TimeoutError):
                await self._agents.call(name, {"op": "end", "grace_s": 2.0})
        with contextlib.suppress(HetplanError, TimeoutError):
            await self._agents.end(name)
        await asyncio.to_thread(self._provider.release, name)
        self._sockets.pop(name, None)
        self._tell("released", machine=name)
        self._learn(Released(name))

    async def _load(self, action: Load) -> None:
        began_s = self._clock()
        generation = self._generation(action.key)
        node = self._programs.nodes(generation.pipeline, generation.port)[action.rank]
        store = self._programs.start_store(node, await self._socket(action.machine))
        if store is not None:
            await self._agents.call(action.machine, _start("store", store))
            try:
                brought = await self._agents.call(action.machine, self._programs.load(node), timeout_s=None)
            except InvalidInputError as error:
                self._learn(Failed(action.key, str(error)))
                return
            self._tell(
                "store_loaded",
                **_named(generation),
                machine=action.machine,
                seconds=self._clock() - began_s,
                **brought,
            )
        self._learn(Loaded(action.key, action.rank))

    async def _start(self, key: tuple[int, int]) -> None:
        generation = self._generation(key)
        machines = [m for m in map(self.state.machine, filter(None, generation.machines)) if m is not None]
        addresses = [machine.address or "" for machine in machines]
        nodes = self._programs.nodes(generation.pipeline, generation.port)
        for machine, node in zip(machines, nodes, strict=True):
            program = self._programs.start_engine(node, addresses, await self._socket(machine.name))
            await self._agents.call(machine.name, _start(_engine(generation), program))
        self._since["engine", key] = self._clock()
        self._tell("engines_started", **_named(generation), port=generation.port)
        self._learn(Started(key))

    async def _probe(self, key: tuple[int, int]) -> None:
        generation = self._generation(key)
        began_s = self._since.setdefault(("engine", key), self._clock())
        head = self._targets((key,))[0]
        if await asyncio.to_thread(_answers, f"http://{_host(head.address)}:{head.port}/health"):
            self._tell("engine_ready", **_named(generation), seconds=self._clock() - began_s)
            self._learn(Healthy(key))
        elif self._clock() - began_s > _START_S:
            self._learn(Failed(key, f"it did not answer within {_START_S:.0f} s"))

    async def _end(self, action: End) -> None:
        generation = self._generation(action.key)
        began_s = self._clock()
        # The first rank takes requests: it ends them in peace, and the others with it.
        for rank, name in enumerate(generation.machines):
            machine = None if name is None else self.state.machine(name)
            if machine is None or machine.lost or machine.phase != "ready":
                continue
            grace_s = action.grace_s if rank == 0 else min(action.grace_s, _LAST_RANKS_S)
            request = {"op": "stop", "name": _engine(generation), "grace_s": grace_s}
            try:
                await self._agents.call(machine.name, request, timeout_s=grace_s + 30.0)
            except AgentGoneError as error:
                self._lose(machine.name, str(error))
        if generation.started:
            self._tell("retired", **_named(generation), seconds=self._clock() - began_s)
        self._learn(Ended(action.key))

    async def _set_targets(self, action: SetTargets) -> None:
        listed = self._targets(action.targets)
        revision = await self._router.set_targets(listed, grace_s=action.grace_s)
        self._tell(
            "shunt",
            revision=revision,
            targets=[{"pipeline": p, "generation": g} for p, g in action.targets],
        )
        self._learn(Targeted(action.targets, revision))

    async def _ask_for_plan(self, why: str) -> None:
        if self._replan is None or self._clock() < self._since.get(("replan",), 0.0) + _REPLAN_EVERY_S:
            return
        self._since["replan",] = self._clock()
        self._tell("replanning", why=why)
        plan = self._programs.plan
        found = await asyncio.to_thread(self._replan, plan.placement, plan)
        self._tell("replanned", requests_per_s=None if found is None else found.requests_per_s)

    # Small things.

    def _targets(self, keys: tuple[tuple[int, int], ...]) -> list[RouterTarget]:
        found = []
        for key in keys:
            generation = next((g for g in self.state.generations if g.key == key), None)
            head = None if generation is None else self.state.machine(generation.machines[0] or "")
            slot = self._desired.slot(key[0])
            if generation is not None and head is not None:
                weight = 1.0 if slot is None else slot.weight
                found.append(RouterTarget(key[0], head.address or "", generation.port, weight))
        return found

    def _generation(self, key: tuple[int, int]) -> Generation:
        return next(g for g in self.state.generations if g.key == key)

    async def _socket(self, machine: str) -> str:
        if machine not in self._sockets:
            self._sockets[machine] = (await self._agents.call(machine, {"op": "hello"}))["socket"]
        return self._sockets[machine]

    def _lose(self, machine: str, why: str) -> None:
        known = self.state.machine(machine)
        if known is not None and not known.lost and known.phase != "releasing":
            self._tell("machine_lost", machine=machine, offer=known.offer, why=why)
            self._learn(MachineLost(machine, why))

    def _learn(self, fact: Fact) -> None:
        if isinstance(fact, Noticed):
            grace_s = fact.deadline_s - self._clock()
            self._tell("notice", machine=fact.machine, grace_s=grace_s)
        elif isinstance(fact, Failed):
            self._tell("engine_failed", pipeline=fact.key[0], generation=fact.key[1], why=fact.why)
        self._become(fold(self._desired, self.state, fact, self._clock()))

    def _become(self, state: ControllerState) -> None:
        if state != self.state:
            save(state, self._path)
            self.state = state

    def _tell(self, name: str, **values: Any) -> None:
        self._on_event(name, {"at_s": self._clock(), **values})


def _key(action: Action) -> tuple[Any, ...]:
    match action:
        case Rent(name, _) | Await(name) | Release(name):
            return (type(action), name)
        case Load(key, rank, _):
            return (Load, key, rank)
        case Start(key) | Probe(key) | End(key, _):
            return (type(action), key)
        case _:
            # One at a time: what the router is told last is the latest.
            return (type(action),)


def _named(generation: Generation) -> dict[str, Any]:
    return {"pipeline": generation.pipeline, "generation": generation.generation}


def _engine(generation: Generation) -> str:
    return f"engine-{generation.pipeline}-{generation.generation}"


def _start(name: str, program: Program) -> dict[str, Any]:
    return {"op": "start", "name": name, "argv": program.argv, "variables": program.variables}


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=3.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False
