"""A pipeline of two machines on Ray nodes of this host: one is announced to go, another is lost, streams go on."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from controller_cluster import end_machines, free_port, prepare, wait_for
from environment import PATIENT
from servers import READY_S
from staging import staged_plan

from hetplan.catalog.engines import get_engine
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
PHASES = ("node_ready", "store_loaded", "engines_started", "engine_ready", "shunt", "retired")


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
    """What clients saw, and when what happened."""

    alone: list[int]
    answers: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    spans_s: dict[str, tuple[float, float]] = field(default_factory=dict)

    def longest_wait_s(self, kind: str) -> float:
        return max(answer.longest_wait_s(*self.spans_s[kind]) for answer in self.answers)

    def timeline(self, kind: str) -> dict[str, float]:
        """Seconds from the interruption to each phase's end."""
        begin_s, end_s = self.spans_s[kind]
        return {
            event["event"]: event["at_s"] - begin_s
            for event in self.events
            if event["event"] in PHASES and begin_s <= event["at_s"] <= end_s
        }

    def summary(self) -> str:
        same = sum(answer.ids == self.alone for answer in self.answers)
        lines = [f"{len(self.answers)} streams of {TOKENS} tokens, {same} as alone, {len(self.errors)} errors"]
        for kind in self.spans_s:
            phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.timeline(kind).items())
            lines.append(f"{kind}: longest wait {self.longest_wait_s(kind):.2f} s; {phases}")
        return "\n".join(lines)


def live_through(environment: Path, model: Path, shards: Path, *, grace_s: float) -> Lived:
    """Start it, warn of the second machine, kill the first without a warning, end it."""
    folder = Path(tempfile.mkdtemp(prefix="hi-", dir="/tmp"))
    before = dict(os.environ)
    head = prepare(folder)
    agents = None
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
            variables=PATIENT | {"VLLM_NO_USAGE_STATS": "1", "PATH": path},
        )
        fleet = Fleet(lambda _: programs, policy("both"), first_port=8140, drain_s=20.0)
        agents = RayAgents(address, folder.name)
        agents.connect()
        port = free_port()
        router = RouterProcess(folder / "router", plan.placement.model.name, host="127.0.0.1", port=port, key=KEY)
        lived = Lived([])

        def tell(name: str, values: dict[str, Any]) -> None:
            lived.events.append({"event": name, "at_s": time.time(), **values})

        controller = Controller(
            Serving.of(plan),
            fleet,
            folder / "controller",
            provider=LocalProvider(address, folder / "machines"),
            agents=agents,
            router=router,
            on_event=tell,
        )
        asyncio.run(_live(lived, controller, router, port, grace_s, folder / "machines"))
        return lived
    finally:
        if agents is not None:
            agents.disconnect()
        end_machines(folder)
        Detached(folder / "router" / "router.log").end(1.0)
        head.end()
        os.environ.clear()
        os.environ.update(before)


async def _live(
    lived: Lived, controller: Controller, router: RouterProcess, port: int, grace_s: float, machines: Path
) -> None:
    running = asyncio.create_task(controller.run())
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as session:
        await _until(lambda: bool(controller.state.targets), READY_S, lived)
        await _until_served(session)
        lived.alone = (await _ask(session)).ids
        clients = [asyncio.create_task(_keep_asking(session, lived)) for _ in range(CLIENTS)]
        await asyncio.sleep(2)
        await _interrupt("notice", lived, controller, lambda: controller.notice(_machine(controller, 1), grace_s))
        await asyncio.sleep(5)
        await _interrupt("loss", lived, controller, lambda: _kill(machines / f"{_machine(controller, 0)}.log"))
        await asyncio.sleep(5)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    await router.end(5)
    controller.drain()
    await asyncio.wait_for(running, 120)


async def _interrupt(kind: str, lived: Lived, controller: Controller, begin: Callable[[], None]) -> None:
    """Interrupt, and wait until a newer generation is all there is and streams have had time to go on."""
    (old,) = controller.state.generations
    begin_s = time.time()
    begin()
    following = (old.pipeline, old.generation + 1)

    def over() -> bool:
        return controller.state.targets == (following,) and [g.key for g in controller.state.generations] == [following]

    await _until(over, READY_S, lived)
    await asyncio.sleep(15)
    lived.spans_s[kind] = (begin_s, time.time())


def _machine(controller: Controller, rank: int) -> str:
    (generation,) = controller.state.generations
    name = generation.machines[rank]
    assert name is not None
    return name


def _kill(log: Path) -> None:
    """The raylet and all that it runs, at once."""
    Detached(log).end(0.0)


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
    while True:
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
