"""Kills of every part that `hetplan serve` keeps running, under streams: what is lost, and how soon all is back."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hetplan.units import format_bytes

if TYPE_CHECKING:
    from disturbance import Clients, Lived
    from served import Controlled, Kind

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "vllm"))

TIMES = 5
CLIENTS, PROMPTS = 6, 24
# All kinds are killed equally often, until this is over.
AT_MOST_S = 3000.0
_BACK_S = 300.0


@dataclass
class Killed:
    """One kill: how long until all was whole again, and the longest that a client had no token."""

    kind: str
    which: str
    back_s: float
    longest_gap_s: float


@dataclass
class Soak:
    """A run: its kills, when there was no router, and the memory of each part after each kill."""

    kills: list[Killed] = field(default_factory=list)
    outages: list[tuple[float, float]] = field(default_factory=list)
    rss_bytes: list[dict[str, int]] = field(default_factory=list)


def kills() -> None:
    """Each kind HETPLAN_KILLS times, 5 by default, in an order drawn with HETPLAN_SEED."""
    from environment import BRISK, shards_of, tiny_model, vllm_environment
    from served import KINDS, Controlled, wait_until_whole
    from staging import staged_plan

    seed, times = int(os.environ.get("HETPLAN_SEED", "0")), int(os.environ.get("HETPLAN_KILLS", str(TIMES)))
    rng = np.random.default_rng(seed)
    order = rng.permutation([kind for kind in KINDS for _ in range(times)]).tolist()
    environment = vllm_environment()
    model = tiny_model(environment)
    plan = staged_plan(model, [(3, 1, 0), (5, 1, 1)], memory_share=0.15, handover_sequences=CLIENTS, spot=True)
    variables = BRISK | {"VLLM_NO_USAGE_STATS": "1", "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    print(f"\n## {len(order)} kills of what `hetplan serve` runs, {CLIENTS} clients, seed {seed}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="hk-", dir="/tmp") as folder:
        shards = shards_of(environment, model, 1, 2)
        served = Controlled(Path(folder), plan, model, shards, environment / "bin" / "vllm", variables)
        try:
            served.start()
            wait_until_whole(served, _BACK_S)
            soak, lived = asyncio.run(_disturb(served, order, rng, seed))
            ended = served.drain(120)
        finally:
            served.end()
    _say(soak, lived)
    if ended or lived.errors or lived.compared()[1] or lived.lost_tokens or lived.doubled_tokens:
        raise SystemExit("a stream was broken" if not ended else f"`hetplan serve` ended with {ended}")


async def _disturb(served: Controlled, order: list[Kind], rng: np.random.Generator, seed: int) -> tuple[Soak, Lived]:
    import aiohttp
    from disturbance import Clients, Lived, drawn_prompts, undisturbed

    prompts = drawn_prompts(seed, PROMPTS)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_BACK_S)
    soak = Soak()
    print("| kill | kind | of | whole again after, s | longest gap, s |\n|---|---|---|---|---|", flush=True)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        alone = await undisturbed(session, served, prompts)
        clients = Clients(session, served, prompts, CLIENTS)
        running = asyncio.create_task(clients.run())
        began = time.monotonic()
        try:
            soak.rss_bytes.append(served.rss_bytes())
            for kind in order:
                if time.monotonic() - began > AT_MOST_S:
                    print(f"over {AT_MOST_S:.0f} s: the rest is left out")
                    break
                await asyncio.sleep(float(rng.uniform(1.0, 3.0)))
                await _kill_one(served, clients, kind, rng, soak)
            clients.leaving = True
            await asyncio.wait_for(running, _BACK_S)
        except (AssertionError, TimeoutError):
            print(served.say(), file=sys.stderr)
            raise
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    print(f"\n{len(soak.kills)} kills in {time.monotonic() - began:.0f} s")
    return soak, Lived([], clients.streams, soak.outages, alone)


async def _kill_one(served: Controlled, clients: Clients, kind: Kind, rng: np.random.Generator, soak: Soak) -> None:
    while (before := _identity(served)) is None or not await asyncio.to_thread(served.is_whole):
        # What has failed by itself meanwhile is no part of this kill.
        await asyncio.sleep(0.2)
    killed_s, began = time.time(), time.monotonic()
    which = await asyncio.to_thread(served.kill, kind, rng)

    def back() -> bool:
        if not served.is_whole():
            return False
        if kind == "controller":
            return served.started_s() > killed_s
        now = _identity(served)
        return now is not None and now[kind] != before[kind]

    while not await asyncio.to_thread(back):
        assert time.monotonic() - began < _BACK_S, f"not whole {_BACK_S} s after the kill of {kind} {which}"
        await asyncio.sleep(0.2)
    whole = time.monotonic()
    hit = clients.running()
    while not all(s.ended or s.errors or (s.times and s.times[-1] > whole) for s in hit):
        assert time.monotonic() - began < _BACK_S, f"streams do not go on after the kill of {kind} {which}"
        await asyncio.sleep(0.1)
    if kind == "router":
        soak.outages.append((began, time.monotonic()))
    gaps = [gap for stream in clients.streams for gap in stream.gaps(began, time.monotonic())]
    killed = Killed(kind, which, whole - began, max(gaps, default=0.0))
    soak.kills.append(killed)
    soak.rss_bytes.append(served.rss_bytes())
    print(f"| {len(soak.kills)} | {kind} | {which} | {killed.back_s:.1f} | {killed.longest_gap_s:.2f} |", flush=True)


def _identity(served: Controlled) -> dict[str, Any] | None:
    """What is another one once a killed part has come back; None while there are two generations, or none."""
    generations = served.state()["generations"]
    if len(generations) != 1:
        return None
    (generation,) = generations
    machines, router = generation["machines"], served.router()
    return {
        "node": machines,
        "agent": machines,
        "store": [served.store(machine) for machine in machines],
        "engine": generation["generation"],
        "router": router,
    }


def _say(soak: Soak, lived: Lived) -> None:
    print("\n| kind | kills | whole again after, median s | longest s | longest gap, s |\n|---|---|---|---|---|")
    for kind in dict.fromkeys(killed.kind for killed in soak.kills):
        mine = [killed for killed in soak.kills if killed.kind == kind]
        back = [killed.back_s for killed in mine]
        gap_s = max(killed.longest_gap_s for killed in mine)
        print(f"| {kind} | {len(mine)} | {np.median(back):.1f} | {max(back):.1f} | {gap_s:.2f} |")
    print("\n| resident memory of | at the start | at the end | most |\n|---|---|---|---|")
    for part, bytes_at_start in soak.rss_bytes[0].items():
        later = [rss[part] for rss in soak.rss_bytes if part in rss]
        print(f"| {part} | {format_bytes(bytes_at_start)} | {format_bytes(later[-1])} | {format_bytes(max(later))} |")
    positions, differences = lived.compared()
    print(
        f"\n{len(lived.streams)} streams, {lived.tokens:,} tokens: {lived.lost_tokens} lost, {lived.doubled_tokens} "
        f"doubled, {len(lived.errors)} errors, {lived.reconnects} reconnects; {positions:,} positions compared to an "
        f"undisturbed run, {len(differences)} differ"
    )
    for fault in [*lived.errors, *differences]:
        print(f"- {fault}")
