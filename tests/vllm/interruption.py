"""A pipeline of two machines on Ray nodes of this host: machines are announced to go, taken and lost, streams go on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import aiohttp
from controller_cluster import end_machines, free_port, prepare, wait_for
from environment import BRISK
from servers import READY_S
from staging import staged_plan

from hetplan.catalog.engines import get_engine
from hetplan.catalog.offers import Offer
from hetplan.launchers.stores import shard_source
from hetplan.policies import policy
from hetplan.runtime.controller.controller import Controller
from hetplan.runtime.controller.fleet import Fleet
from hetplan.runtime.controller.processes import Detached
from hetplan.runtime.controller.programs import Programs
from hetplan.runtime.controller.provider import LocalProvider
from hetplan.runtime.controller.ray_agents import RayAgents
from hetplan.runtime.controller.router_process import RouterProcess
from hetplan.runtime.controller.serving import Serving

PROMPT = list(range(10, 30))
TOKENS, CLIENTS = 600, 4
KEY = "interruption"
# Streams get this long to go on once a newer generation is all there is.
_SETTLE_S = 5.0
_PHASES = ("renting", "node_ready", "store_loaded", "engines_started", "engine_ready", "machine_lost", "shunt")


@dataclass(frozen=True)
class Interruption:
    """What is done to a pipeline.

    "notice": the machine of ``rank`` is announced to go and taken after ``grace_s``. "loss": it is taken at once.
    "restart": its engines are ended, and started again on the machines that they had. A machine that takes its place
    boots for ``boot_s`` longer than a Ray node of this host.
    """

    name: str
    how: Literal["notice", "loss", "restart"]
    rank: int = 1
    grace_s: float = 0.0
    boot_s: float = 0.0


@dataclass
class Answer:
    """One stream: when it was asked for, its tokens, and when each came."""

    asked_s: float
    ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def longest_wait_s(self, begin_s: float, end_s: float) -> float:
        """The longest that nothing came, of waits that end in a span of time; the wait for the first token counts."""
        times = [self.asked_s, *self.times_s]
        waits = [b - a for a, b in pairwise(times) if begin_s <= b <= end_s]
        return max(waits, default=0.0)


@dataclass
class Lived:
    """What clients saw, and when what happened. ``machines``: the one that each interruption was about."""

    alone: list[int]
    answers: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    spans_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    machines: dict[str, str] = field(default_factory=dict)
    leaving: bool = False

    def longest_wait_s(self, name: str) -> float:
        return max(answer.longest_wait_s(*self.spans_s[name]) for answer in self.answers)

    def within(self, name: str) -> list[dict[str, Any]]:
        """Events of an interruption, in their order."""
        begin_s, end_s = self.spans_s[name]
        return [event for event in self.events if begin_s <= event["at_s"] <= end_s]

    def at_s(self, name: str, event: str, **values: Any) -> float | None:
        """Seconds from the interruption to the last event of that name and values."""
        found = [e["at_s"] for e in self.within(name) if e["event"] == event and values.items() <= e.items()]
        return found[-1] - self.spans_s[name][0] if found else None

    def summary(self) -> str:
        same = sum(answer.ids == self.alone for answer in self.answers)
        lines = [f"{len(self.answers)} streams of {TOKENS} tokens, {same} as alone, {len(self.errors)} errors"]
        for name, (begin_s, _) in self.spans_s.items():
            ends = {e["event"]: e["at_s"] - begin_s for e in self.within(name) if e["event"] in _PHASES}
            said = ", ".join(f"{event} {seconds:.1f} s" for event, seconds in ends.items())
            lines.append(f"{name}: longest wait {self.longest_wait_s(name):.2f} s; {said}")
        return "\n".join(lines)


class TakingProvider(LocalProvider):
    """Machines of this host that are taken when they were announced to be, and that boot for as long as asked."""

    def __init__(self, address: str, folder: Path) -> None:
        super().__init__(address, folder)
        self.boot_s = 0.0
        self._there_s: dict[str, float] = {}
        self._taking: list[threading.Timer] = []

    def request(self, name: str, offer: Offer) -> None:
        self._there_s.setdefault(name, time.monotonic() + self.boot_s)
        time.sleep(max(0.0, self._there_s[name] - time.monotonic()))
        super().request(name, offer)

    def take(self, name: str, after_s: float) -> None:
        """The raylet and all that it runs are killed at once, unless they have been given back."""
        timer = threading.Timer(after_s, self.release, (name,))
        timer.daemon = True
        timer.start()
        self._taking.append(timer)

    def end(self) -> None:
        """Take nothing any more."""
        for timer in self._taking:
            timer.cancel()


def live_through(
    environment: Path,
    model: Path,
    shards: Path,
    interruptions: Sequence[Interruption],
    *,
    on_event: Callable[[dict[str, Any]], None] = lambda _event: None,
) -> Lived:
    """Start a pipeline and clients, interrupt it by one after the other, end it."""
    folder = Path(tempfile.mkdtemp(prefix="hi-", dir="/tmp"))
    before = dict(os.environ)
    head = prepare(folder)
    agents = provider = None
    try:
        head.start()
        wait_for(lambda: "Ray runtime started" in head.tail(), 60, head.tail)
        plan = staged_plan(model, [(3, 1, 0), (5, 1, 1)], memory_share=0.15, handover_sequences=CLIENTS, spot=True)
        engine, address = get_engine("hetplan"), (folder / "address").read_text()
        path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        programs = Programs(
            plan,
            engine,
            model=str(model),
            source=shard_source(str(shards), engine),
            vllm=(str(environment / "bin" / "vllm"), "serve"),
            variables=BRISK | {"VLLM_NO_USAGE_STATS": "1", "PATH": path},
        )
        fleet = Fleet(lambda _: programs, policy("both"), first_port=8140, drain_s=20.0)
        agents = RayAgents(address, folder.name)
        agents.connect()
        port = free_port()
        router = RouterProcess(folder / "router", plan.placement.model.name, host="127.0.0.1", port=port, key=KEY)
        lived = Lived([])

        def tell(name: str, values: dict[str, Any]) -> None:
            lived.events.append({"event": name, **values})
            on_event(lived.events[-1])

        provider = TakingProvider(address, folder / "machines")
        controller = Controller(
            Serving.of(plan),
            fleet,
            folder / "controller",
            provider=provider,
            agents=agents,
            router=router,
            on_event=tell,
        )
        asyncio.run(
            _live(lived, controller, router, port, _Interrupter(lived, controller, provider, agents), interruptions)
        )
    finally:
        if provider is not None:
            provider.end()
        if agents is not None:
            agents.disconnect()
        end_machines(folder)
        Detached(folder / "router" / "router.log").end(1.0)
        head.end()
        os.environ.clear()
        os.environ.update(before)
    # What a failure has left is kept.
    shutil.rmtree(folder, ignore_errors=True)
    return lived


async def _live(
    lived: Lived,
    controller: Controller,
    router: RouterProcess,
    port: int,
    interrupter: _Interrupter,
    interruptions: Sequence[Interruption],
) -> None:
    running = asyncio.create_task(controller.run())
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as session:
        await _until(lambda: bool(controller.state.targets), READY_S, lived)
        await _until_served(session)
        lived.alone = (await _ask(session)).ids
        clients = [asyncio.create_task(_keep_asking(session, lived)) for _ in range(CLIENTS)]
        await asyncio.sleep(2)
        for interruption in interruptions:
            await interrupter.interrupt(interruption)
        lived.leaving = True
        await asyncio.wait_for(asyncio.gather(*clients), READY_S)
    await router.end(5)
    controller.drain()
    await asyncio.wait_for(running, 120)


@dataclass
class _Interrupter:
    lived: Lived
    controller: Controller
    provider: TakingProvider
    agents: RayAgents

    async def interrupt(self, asked: Interruption) -> None:
        """Interrupt, and wait until a newer generation is all there is and streams have had time to go on."""
        (old,) = self.controller.state.generations
        machine = old.machines[asked.rank]
        assert machine is not None
        self.provider.boot_s = asked.boot_s
        begin_s = time.time()
        if asked.how == "notice":
            self.controller.notice(machine, asked.grace_s)
            self.provider.take(machine, asked.grace_s)
        elif asked.how == "loss":
            self.provider.take(machine, 0.0)
        else:
            stop = {"op": "stop", "name": f"engine-{old.pipeline}-{old.generation}", "grace_s": 0.0}
            for name in filter(None, old.machines):
                # The controller finds that they have ended.
                await self.agents.call(name, dict(stop))
        following = (old.pipeline, old.generation + 1)

        def over() -> bool:
            state = self.controller.state
            return state.targets == (following,) and [g.key for g in state.generations] == [following]

        await _until(over, READY_S, self.lived)
        await asyncio.sleep(_SETTLE_S)
        self.lived.spans_s[asked.name] = (begin_s, time.time())
        self.lived.machines[asked.name] = machine


async def _until(found: Callable[[], bool], within_s: float, lived: Lived) -> None:
    end = time.monotonic() + within_s
    while not found():
        assert time.monotonic() < end, f"did not happen in {within_s} s: {lived.events[-20:]}"
        await asyncio.sleep(0.1)


async def _until_served(session: aiohttp.ClientSession) -> None:
    for _ in range(300):
        with suppress(aiohttp.ClientError):
            async with session.get("/health") as reply:
                if reply.status == 200:
                    return
        await asyncio.sleep(0.1)
    raise AssertionError("the router serves nothing")


async def _keep_asking(session: aiohttp.ClientSession, lived: Lived) -> None:
    while not lived.leaving:
        try:
            lived.answers.append(await _ask(session))
        except (aiohttp.ClientError, AssertionError, ValueError, KeyError) as error:
            lived.errors.append(repr(error))
            await asyncio.sleep(0.5)


async def _ask(session: aiohttp.ClientSession) -> Answer:
    answer = Answer(time.time())
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "stream": True}
    async with session.post("/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if line.startswith(b"data: {"):
                ids = json.loads(line[6:])["choices"][0].get("token_ids") or []
                answer.ids += ids
                answer.times_s += [time.time()] * len(ids)
    return answer
