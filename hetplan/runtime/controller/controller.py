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
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from hetplan.catalog.offers import Offer
from hetplan.errors import HetplanError, InvalidInputError, RouterError
from hetplan.runtime.controller.adopting import adopt, unwanted
from hetplan.runtime.controller.causes import cause_of
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
from hetplan.runtime.controller.demand import Band, Demand, Resolved, Watched, keys_of, planned, read, watch, worth
from hetplan.runtime.controller.fleet import Fleet
from hetplan.runtime.controller.programs import Program, Programs
from hetplan.runtime.controller.provider import MachineProvider, NoMachineError
from hetplan.runtime.controller.ray_agents import AgentGoneError, Agents
from hetplan.runtime.controller.router import RouterClient, RouterTarget
from hetplan.runtime.controller.serving import Serving, ServingFiles, changes, routes_over
from hetplan.runtime.controller.state import SERVINGS, ControllerState, Generation, Machine, load, save

OnEvent = Callable[[str, dict[str, Any]], None]
# Given what is served, and how many machines of each offer can be had.
Replanner = Callable[[Serving, Mapping[str, int]], Serving | None]
# Given what is served, and what is asked for.
Resolver = Callable[[Serving, Demand], Resolved | None]

_BOOT_S = 900.0
_START_S = 1800.0
_LAST_RANKS_S = 5.0
_STATUS_S, _MISSES = 4.0, 4
_REPLAN_EVERY_S, _RETURN_EVERY_S = 300.0, 600.0
_SHORTEST_WINDOW_S, _LONGEST_WINDOW_S = 5.0, 595.0
_CHECK_ROUTER_EVERY_S = 2.0
_STORE_EVERY_S = 5.0
_LONGEST_PAUSE_S = 30.0


class Controller:
    """Keeps plans served.

    Parameters
    ----------
    serving : Serving
        What is to be served.
    fleet : Fleet
        How it is.
    folder : path
        Where its state is kept, and what is served.
    provider : MachineProvider
    agents : Agents
    router : RouterClient
    on_event : callable
        Told ``name`` and values of everything that happens, with ``at_s``, the clock.
    replan : callable, optional
        Called in a thread when machines are missing that cannot be had; what it returns is served meanwhile.
    resolve : callable, optional
        Called in a thread when demand has moved; what it returns is served if it is worth it.
    resolve_every_s : float
        Between two looks at the demand; 0 never looks.
    band : Band
        When demand has moved.
    horizon_s : float
        How long a plan is expected to hold, for what it is worth.
    notices : dict, optional
        The metadata service that agents watch: ``provider`` and ``base_url``.
    clock : callable
        Seconds since 1970.
    interval_s : float
        Between two looks.

    Raises
    ------
    InvalidInputError
        If the folder holds the state of another plan of which machines are left, or plans that are not there any more.
    """

    def __init__(
        self,
        serving: Serving,
        fleet: Fleet,
        folder: Path,
        *,
        provider: MachineProvider,
        agents: Agents,
        router: RouterClient,
        on_event: OnEvent,
        replan: Replanner | None = None,
        resolve: Resolver | None = None,
        resolve_every_s: float = 0.0,
        band: Band | None = None,
        horizon_s: float = 3600.0,
        notices: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
        interval_s: float = 0.5,
    ) -> None:
        self._fleet = fleet
        self._provider, self._agents, self._router = provider, agents, router
        self._on_event, self._replan, self._notices = on_event, replan, notices
        self._resolve, self._resolve_every_s = resolve, resolve_every_s
        self._band, self._horizon_s = band or Band(), horizon_s
        self._clock, self._interval_s = clock, interval_s
        self._path, self._files = folder / "state.json", ServingFiles(folder / SERVINGS)
        found = load(self._path)
        if found is not None and found.given != serving.fingerprint and not found.machines and not found.generations:
            # Of another plan, of which nothing is left.
            found = None
        if found is not None and found.given != serving.fingerprint:
            raise InvalidInputError(
                f"{self._path} is of another plan ({found.given[:12]}), of which machines are left; give that plan, "
                "or another folder"
            )
        self._restarted = found is not None
        self._servings = {serving.fingerprint: serving}
        if found is None:
            # What is served can be found again before it is named.
            self._files.write(serving)
            fresh = ControllerState(given=serving.fingerprint, serving=serving.fingerprint)
            found = adopt(fresh, serving.fingerprint, fleet.pipelines(serving))
        for fingerprint in found.servings:
            if fingerprint not in self._servings:
                self._servings[fingerprint] = self._files.read(fingerprint)
        self.state = found
        self._desired = fleet.desired(found, self._servings)
        self._adopted_at_s: float | None = None
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
            # And whoever starts it again wants another try of what was left alone.
            tried = [s.replace(failures=0, deaths=0, not_before_s=None) for s in self.state.slots]
            self._become(self.state.replace(told=None, slots=tuple(tried)))
        watching = asyncio.create_task(self._watch_demand())
        try:
            while not self._stopping:
                self._wake.clear()
                await self._look()
                self._return()
                self._decide()
                if self.state.draining and not self.state.machines and not self.state.generations:
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._interval_s)
        finally:
            for task in (watching, *self._tasks.values()):
                task.cancel()
            await asyncio.gather(watching, *self._tasks.values(), return_exceptions=True)

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

    def adopt(self, serving: Serving, *, why: str = "asked for", stands_in: bool = False, **figures: Any) -> None:
        """Serve this from now on; pipelines that are served already go on as they are.

        Others are started beside those that they replace where machines allow, else in turn. It is on disk when this
        returns.

        Parameters
        ----------
        serving : Serving
        why : str
            For the event ``adopting``, as are ``figures``.
        stands_in : bool
            What is served now is returned to when machines can be had again.

        Raises
        ------
        InvalidInputError
            If everything is being ended, or it cannot be served.
        """
        if self.state.draining:
            raise InvalidInputError("everything is being ended; start the controller anew to serve another plan")
        before = self._servings[self.state.serving]
        if serving.fingerprint == before.fingerprint:
            return
        pipelines = self._fleet.pipelines(serving)
        self._files.write(serving)
        self._servings[serving.fingerprint] = serving
        state = adopt(self.state, serving.fingerprint, pipelines, stands_in=stands_in)
        state = state.replace(servings=self._needed(state))
        self._tell("adopting", why=why, serving=serving.fingerprint, **changes(before, serving), **figures)
        self._adopted_at_s = self._clock()
        self._become(state)
        self._files.keep({*self.state.servings, self.state.given})
        self._wake.set()

    def standing_still(self) -> dict[int, str]:
        """Pipelines that nothing serves, and why."""
        return standing_still(self._desired, self.state, self._clock())

    def given_up(self) -> dict[int, str]:
        """Every pipeline and why it is left alone, where that is all of them and nothing runs; empty otherwise."""
        slots = [self.state.slot(slot.pipeline) for slot in self._desired.slots]
        if self.state.generations or not all(self._desired.given_up(slot) for slot in slots):
            return {}
        return {slot.pipeline: slot.why for slot in slots}

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
        programs, number = self._programs(generation.pipeline)
        node = programs.nodes(number, generation.port)[generation.machines.index(machine)]
        with contextlib.suppress(HetplanError, TimeoutError):
            program = programs.start_store(node, await self._socket(machine))
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
            self._learn(Failed(generation.key, f"the engine on {machine} {ended}: {cause_of(said)}"))

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
                self._become(self.state.replace(told=None))

    async def _watch_demand(self) -> None:
        """Look at what is asked for, and serve another plan where that is worth it."""
        if self._resolve is None or self._resolve_every_s <= 0:
            return
        known = Watched({})
        of = None
        window_s = min(max(self._resolve_every_s, _SHORTEST_WINDOW_S), _LONGEST_WINDOW_S)
        while True:
            await asyncio.sleep(self._resolve_every_s)
            serving = self._servings[self.state.serving]
            if of != serving.fingerprint:
                known, of = Watched(planned(serving)), serving.fingerprint
            if self.state.draining or self.state.returns_to is not None:
                continue
            try:
                reading = read(await self._router.demand(window_s), keys_of(serving))
                # A router that was just started has seen a part only.
                if reading.covered_s < window_s / 2:
                    continue
                known, moved = watch(known, reading, self._band)
                if moved is not None:
                    await self._resolve_for(self._resolve, serving, moved)
            except (HetplanError, OSError, TimeoutError) as error:
                self._tell("failed", action="Resolve", error=str(error)[:500], again_in_s=self._resolve_every_s)

    async def _resolve_for(self, resolve: Resolver, serving: Serving, demand: Demand) -> None:
        self._tell("resolving", demand=[load.model_dump() for load in demand.values()])
        resolved = await asyncio.to_thread(resolve, serving, demand)
        if resolved is None or resolved.serving.fingerprint == serving.fingerprint:
            self._tell("resolved", adopted=False, why="there is no other plan")
            return
        if self.state.serving != serving.fingerprint:
            self._tell("resolved", adopted=False, why="another plan was adopted meanwhile")
            return
        found = resolved.serving
        value = worth(
            serving, resolved, demand, self._started(found), horizon_s=self._horizon_s, start_s=self._fleet.start_s
        )
        figures: dict[str, Any] = {
            "unit": value.unit,
            "gain": value.gain,
            "cost": value.cost,
            "horizon_s": value.horizon_s,
        }
        if value.switches:
            self.adopt(found, why="demand has moved", **figures)
        else:
            self._tell("resolved", adopted=False, why="it is not worth switching to", **figures)

    def _started(self, serving: Serving) -> list[Offer]:
        """The offer of each machine of pipelines that would be started for it."""
        there = [s.origin.started_as for s in self.state.slots if s.origin is not None]
        found: list[Offer] = []
        for origin in self._fleet.pipelines(serving):
            if origin.started_as in there:
                there.remove(origin.started_as)
            else:
                found += self._fleet.offers_of(serving, origin)
        return found

    # What is done.

    def _return(self) -> None:
        """Serve again what another plan stands in for, when machines can be had again."""
        back = self.state.returns_to
        if back is None or self.state.draining:
            return
        began_s = self._since.setdefault(("return", back), self._clock())
        short = [o for o, until_s in self.state.short_until_s if until_s > self._clock()]
        if self._clock() < began_s + _RETURN_EVERY_S or any(
            self._fleet.has_offer(self._servings[back], offer) for offer in short
        ):
            return
        self._since["return", back] = self._clock()
        self.adopt(self._servings[back], why="machines may be had again")

    def _needed(self, state: ControllerState) -> tuple[str, ...]:
        """Servings that something is still of."""
        origins = {slot.origin.serving for slot in state.slots if slot.origin is not None}
        held = {machine.offer for machine in state.machines}
        return tuple(
            fingerprint
            for fingerprint in state.servings
            if fingerprint in {state.serving, state.given, state.returns_to, *origins}
            or any(self._fleet.has_offer(self._servings[fingerprint], offer) for offer in held)
        )

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
        self._tell_adopted()
        for action in (*actions(self._desired, state, now_s), *replans):
            self._begin(action)

    def _tell_adopted(self) -> None:
        if self._adopted_at_s is None or unwanted(self._desired, self.state) or self.standing_still():
            return
        self._tell("adopted", serving=self.state.serving, seconds=self._clock() - self._adopted_at_s)
        self._adopted_at_s = None

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
        offer = self._desired.offers.get(action.offer)
        if offer is None:
            # Of a plan that is not there any more.
            return
        self._since.setdefault(("boot", action.machine), self._clock())
        self._tell("renting", machine=action.machine, offer=action.offer)
        try:
            await asyncio.to_thread(self._provider.request, action.machine, offer)
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
        programs, number = self._programs(generation.pipeline)
        node = programs.nodes(number, generation.port)[action.rank]
        store = programs.start_store(node, await self._socket(action.machine))
        if store is not None:
            await self._agents.call(action.machine, _start("store", store))
            try:
                brought = await self._agents.call(action.machine, programs.load(node), timeout_s=None)
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
        programs, number = self._programs(generation.pipeline)
        nodes = programs.nodes(number, generation.port)
        for machine, node in zip(machines, nodes, strict=True):
            program = programs.start_engine(node, addresses, await self._socket(machine.name))
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
        routes = routes_over(self._servings[action.serving].routes, {target.model for target in listed})
        revision = await self._router.set_targets(listed, routes, grace_s=action.grace_s)
        self._tell(
            "shunt",
            revision=revision,
            targets=[{"pipeline": p, "generation": g} for p, g in action.targets],
        )
        self._learn(Targeted(action.targets, revision, action.serving))

    async def _ask_for_plan(self, why: str) -> None:
        if self._replan is None or self._clock() < self._since.get(("replan",), 0.0) + _REPLAN_EVERY_S:
            return
        self._since["replan",] = self._clock()
        self._tell("replanning", why=why)
        serving = self._servings[self.state.returns_to or self.state.serving]
        found = await asyncio.to_thread(self._replan, serving, self._can_be_had(serving))
        self._tell("replanned", requests_per_s=None if found is None else sum(p.requests_per_s for p in found.plans))
        if found is not None and not self.state.draining:
            self.adopt(found, why=why, stands_in=True)

    def _can_be_had(self, serving: Serving) -> dict[str, int]:
        """How many machines of each of its offers there may be now."""
        short = {offer for offer, until_s in self.state.short_until_s if until_s > self._clock()}
        found = {}
        for offer, count in self._fleet.counts(serving).items():
            held = sum(m.offer == offer and m.stays and m.phase == "ready" for m in self.state.machines)
            found[offer] = min(held, count) if offer in short else count
        return found

    # Small things.

    def _targets(self, keys: tuple[tuple[int, int], ...]) -> list[RouterTarget]:
        found = []
        for key in keys:
            generation = next((g for g in self.state.generations if g.key == key), None)
            head = None if generation is None else self.state.machine(generation.machines[0] or "")
            origin = self.state.slot(key[0]).origin
            if generation is not None and head is not None and origin is not None:
                found.append(RouterTarget(key[0], head.address or "", generation.port, origin.weight, origin.model))
        return found

    def _programs(self, pipeline: int) -> tuple[Programs, int]:
        """Those of a pipeline's plan, and its number there."""
        origin = self.state.slot(pipeline).origin
        if origin is None:
            raise InvalidInputError(f"pipeline {pipeline} is of no plan")
        return self._fleet.programs(self._servings[origin.serving], origin.plan), origin.number

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
            wanted = (state.serving, state.servings) != (self.state.serving, self.state.servings)
            self.state = state
            if wanted:
                self._desired = self._fleet.desired(state, self._servings)

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
