"""Streams through a real router while engines, stage workers and the router are killed, and what their clients saw."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import aiohttp
import numpy as np
from conftest import local_plan
from servers import READY_S, Cluster

import hetplan as hp

Kind = Literal["engine", "stage_worker", "router", "both", "stall"]
KINDS: tuple[Kind, ...] = ("engine", "stage_worker", "router", "both", "stall")
# Those after which a pipeline is gone: a client that asked it directly knows, and can ask again.
PIPELINE_KINDS: tuple[Kind, ...] = ("engine", "stage_worker", "both")

STREAMS = 40
# A kill that hits fewer streams in the midst of an answer would show little.
LEAST_DECODING = 5
# One process, and two stages on two "nodes", so that a stage worker can be killed alone.
SPLITS = [[8], [3, 5]]
SPLIT_PIPELINE = 2
FIRST_PORT = 8200
# Each pipeline can hold all streams: the one that is left has to.
MEMORY_SHARE = 0.08
# Below this the two best tokens are as good as equal: sums in another order, as in another batch, may swap them.
CLOSE_MARGIN = 1e-4
# What the client that has no router had of its answer when its pipeline was killed.
CONTROL_TOKENS, CONTROL_LENGTH = 50, 800
# Tighter than the defaults, so that a test need not wait for them.
ROUTER_SETTINGS = {"stall_s": 5.0, "health_timeout_s": 2.5, "keepalive_s": 2.0}
# How long the first node may take to find out that the second is gone.
_FOLLOWS_S = 15.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids and how many are to follow."""

    token_ids: list[int]
    max_tokens: int


@dataclass(slots=True)
class Stream:
    """One answer as its client received it."""

    request_id: str
    number: int
    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    events: int = 0
    finish_reason: str | None = None
    ended: bool = False
    reconnects: int = 0
    lost_connections: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def decoding(self) -> bool:
        return bool(self.token_ids) and not self.ended

    def gaps(self, start: float, end: float) -> list[float]:
        """Times between tokens that lie, at least in part, between two moments."""
        return [b - a for a, b in pairwise(self.times) if b > start and a < end]


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """An answer of one engine by itself, and by how much each token was the best."""

    token_ids: list[int]
    text: str
    margins: list[float]


@dataclass(slots=True)
class Kill:
    """What was killed, when, and what became of it. ``streams`` is how many it hit for certain.

    ``pipeline`` is None for the router. ``longest_gap_s`` is of all streams until all was well again: which of them
    were on the killed pipeline only the router knows. ``retry_s`` is how long a client without a router had no
    new token.
    """

    kind: Kind
    pipeline: int | None
    at: float
    streams: int
    recovered_at: float = float("nan")
    longest_gap_s: float = float("nan")
    retry_s: float | None = None

    @property
    def recovered_s(self) -> float:
        return self.recovered_at - self.at

    @property
    def ratio(self) -> float | None:
        """The longest gap to what a client without a router waited after the same kill."""
        return None if self.retry_s is None else self.longest_gap_s / self.retry_s


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a stream left the undisturbed answer although its best token was clearly the best there."""

    request_id: str
    position: int
    margin: float


@dataclass(slots=True)
class Lived:
    """A run: its kills, its streams, the router's outages, and the undisturbed answers."""

    kills: list[Kill]
    streams: list[Stream]
    outages: list[tuple[float, float]]
    undisturbed: list[Undisturbed]

    @property
    def tokens(self) -> int:
        return sum(len(stream.token_ids) for stream in self.streams)

    @property
    def lost_tokens(self) -> int:
        return sum(max(0, s.prompt.max_tokens - len(s.token_ids)) for s in self.streams)

    @property
    def doubled_tokens(self) -> int:
        return sum(max(0, len(s.token_ids) - s.prompt.max_tokens) for s in self.streams)

    @property
    def errors(self) -> list[str]:
        """Everything a client saw that is not a token, but for connections that were lost with the router."""
        found = [f"{stream.request_id}: {error}" for stream in self.streams for error in stream.errors]
        for stream in self.streams:
            if not stream.ended or stream.finish_reason != "length":
                found.append(f"{stream.request_id}: ended {stream.ended}, finish reason {stream.finish_reason}")
            for at in stream.lost_connections:
                if not any(start <= at <= end for start, end in self.outages):
                    found.append(f"{stream.request_id}: connection lost while the router lived")
        return found

    @property
    def reconnects(self) -> int:
        return sum(stream.reconnects for stream in self.streams)

    def compared(self) -> tuple[int, list[Difference]]:
        """Positions that have to be equal to the undisturbed answer, and where they are not."""
        positions, differences = 0, []
        for stream in self.streams:
            expected = self.undisturbed[stream.number]
            for i, margin in enumerate(expected.margins):
                if margin < CLOSE_MARGIN:
                    break
                if i >= len(stream.token_ids):
                    break
                positions += 1
                if stream.token_ids[i] != expected.token_ids[i]:
                    differences.append(Difference(stream.request_id, i, margin))
                    break
        return positions, differences

    @property
    def share_without_close_margin(self) -> float:
        """Of the streams, those that have to be equal to the undisturbed answer to their end."""
        clear = [min(answer.margins) >= CLOSE_MARGIN for answer in self.undisturbed]
        return sum(clear[stream.number] for stream in self.streams) / len(self.streams)

    @property
    def different_texts(self) -> list[str]:
        """Streams with the undisturbed answer's tokens and another text."""
        return [
            stream.request_id
            for stream in self.streams
            if stream.token_ids == self.undisturbed[stream.number].token_ids
            and stream.text != self.undisturbed[stream.number].text
        ]

    def longest_gap_s(self, *kinds: Kind) -> float:
        """The longest that a client waited for a token after a kill of these kinds."""
        return max((kill.longest_gap_s for kill in self.kills if kill.kind in kinds), default=float("nan"))

    @property
    def retries_s(self) -> list[float]:
        """What clients without a router waited."""
        return [kill.retry_s for kill in self.kills if kill.retry_s is not None]

    def summary(self) -> str:
        positions, differences = self.compared()
        return (
            f"{len(self.kills)} kills, {len(self.streams)} streams, {self.tokens:,} tokens: {self.lost_tokens} lost, "
            f"{self.doubled_tokens} doubled, {len(self.errors)} errors seen, {self.reconnects} reconnects\n"
            f"{self.share_without_close_margin:.1%} of the streams have no position with a margin under "
            f"{CLOSE_MARGIN:g}; {positions:,} positions compared, {len(differences)} differ; "
            f"{len(self.different_texts)} texts differ\n"
            f"longest gap after a kill {self.longest_gap_s(*PIPELINE_KINDS):.2f} s, a stall "
            f"{self.longest_gap_s('stall'):.2f} s, a kill of the router {self.longest_gap_s('router'):.2f} s; "
            f"restart-and-retry {', '.join(f'{seconds:.1f}' for seconds in self.retries_s)} s"
        )


def drawn_prompts(seed: int, count: int) -> list[Prompt]:
    """Prompts that share nothing, of several lengths; answers long enough to be hit in their midst."""
    rng = np.random.default_rng(seed)
    return [
        Prompt(rng.integers(0, 500, int(rng.integers(8, 200))).tolist(), int(rng.integers(150, 301)))
        for _ in range(count)
    ]


class Served(Protocol):
    """What clients need to know: the router's address, the model's name, and each pipeline's own address."""

    url: str
    model: str

    def engine_url(self, pipeline: int) -> str: ...


class Stand:
    """Two pipelines from a launch folder and a router before them; each can be killed and started again."""

    def __init__(self, environment: Path, model: Path, folder: Path, variables: dict[str, str]) -> None:
        self.folder, self.model = folder / "out", model.name
        plan = local_plan(model, SPLITS, memory_share=MEMORY_SHARE, in_flight=STREAMS)
        hp.launch(plan, out=self.folder, model=str(model), first_port=FIRST_PORT)
        config = self.folder / "router.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | ROUTER_SETTINGS))
        self.cluster = Cluster(self.folder, environment, variables)
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.router: subprocess.Popen[bytes] | None = None
        self.pipelines = range(1, len(SPLITS) + 1)

    def engine_url(self, pipeline: int) -> str:
        return f"http://127.0.0.1:{FIRST_PORT + pipeline - 1}"

    def start(self) -> None:
        self.cluster.start()
        self.start_router()

    def start_router(self) -> None:
        command = [sys.executable, "-m", "hetplan", "router", self.folder / "router.json"]
        command += ["--journal", self.folder.parent / "journal", "--port", str(self.port)]
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
        with (self.folder.parent / "router.log").open("ab") as log:
            self.router = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def kill_router(self) -> None:
        assert self.router is not None
        self.router.kill()
        self.router.wait(30)

    def send(self, signal_number: int, pipeline: int, node: int | None = None) -> None:
        """A signal to every process of a pipeline, or of one of its nodes."""
        for script in self._scripts(pipeline):
            if node is None or script == f"pipeline-{pipeline}-node-{node}.sh":
                with suppress(ProcessLookupError):
                    os.killpg(self.cluster.processes[script].pid, signal_number)

    async def restart(self, pipeline: int) -> None:
        """Start a pipeline's scripts again when nothing of it is left."""
        self.send(signal.SIGKILL, pipeline)
        for script in self._scripts(pipeline):
            process = self.cluster.processes[script]
            await asyncio.to_thread(process.wait, 30)
            # Its children as well: they may hold its port.
            await _until(lambda process=process: _now(_is_gone(process.pid)), within_s=30)
        for script in self._scripts(pipeline):
            self.cluster.run(script)

    def has_ended(self, pipeline: int) -> bool:
        return self.cluster.head(pipeline).poll() is not None

    def stop(self) -> None:
        if self.router is not None:
            self.kill_router()
        self.cluster.stop()

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in sorted(self.folder.parent.glob("*.log")))

    def _scripts(self, pipeline: int) -> list[str]:
        return sorted(script for script in self.cluster.processes if script.startswith(f"pipeline-{pipeline}-"))


@contextmanager
def standing(environment: Path, model: Path, folder: Path, variables: dict[str, str] | None = None) -> Iterator[Stand]:
    """A stand that runs, its engines with some variables."""
    stand = Stand(environment, model, folder, variables or {})
    try:
        stand.start()
        yield stand
    finally:
        stand.stop()


def disturb(
    stand: Stand,
    kinds: Sequence[Kind],
    *,
    seed: int,
    prompts: int,
    on_kill: Callable[[Kill], None] = lambda _kill: None,
) -> Lived:
    """Kill one thing after the other while streams run; each prompt is asked again when all have been."""
    drawn = drawn_prompts(seed, prompts)
    return asyncio.run(_disturb(stand, kinds, drawn, np.random.default_rng(seed), on_kill))


async def _disturb(
    stand: Stand,
    kinds: Sequence[Kind],
    prompts: list[Prompt],
    rng: np.random.Generator,
    on_kill: Callable[[Kill], None],
) -> Lived:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        alone = await undisturbed(session, stand, prompts)
        clients = Clients(session, stand, prompts)
        killer = Killer(session, stand, clients, rng, on_kill)
        running = asyncio.create_task(clients.run())
        try:
            for kind in kinds:
                await killer.kill(kind)
            clients.leaving = True
            await asyncio.wait_for(running, READY_S)
        except TimeoutError:
            raise RuntimeError(f"nothing went on for {READY_S} s\n{stand.logs()}") from None
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    return Lived(killer.kills, clients.streams, killer.outages, alone)


class Clients:
    """So many clients, each of which asks a prompt, reads the answer to its end, and asks the next."""

    def __init__(
        self, session: aiohttp.ClientSession, stand: Served, prompts: list[Prompt], count: int = STREAMS
    ) -> None:
        self._session, self._stand, self._prompts, self._count = session, stand, prompts, count
        self.streams: list[Stream] = []
        self.leaving = False

    async def run(self) -> None:
        """Ask until `leaving`, and read what was asked to its end."""
        await asyncio.gather(*(self._client() for _ in range(self._count)))

    def running(self) -> list[Stream]:
        return [stream for stream in self.streams if not stream.ended and not stream.errors]

    def decoding(self) -> list[Stream]:
        return [stream for stream in self.running() if stream.decoding]

    async def _client(self) -> None:
        while not self.leaving:
            number = len(self.streams)
            which = number % len(self._prompts)
            stream = Stream(f"stream-{number}", which, self._prompts[which])
            self.streams.append(stream)
            await self._follow(stream)

    async def _follow(self, stream: Stream) -> None:
        """Ask, and take the stream up again wherever its connection was lost."""
        known = False
        while not stream.ended and not stream.errors:
            try:
                async with self._taken_up(stream) if known else self._asked(stream) as reply:
                    if known and reply.status == 404 and not stream.events:
                        # The router was killed before it had written the request down.
                        known = False
                        continue
                    stream.reconnects += known
                    known = True
                    if reply.status != 200:
                        stream.errors.append(f"status {reply.status}: {(await reply.text())[:200]}")
                        return
                    await _received(stream, reply)
                    if not stream.ended:
                        stream.lost_connections.append(time.monotonic())
            except (aiohttp.ClientError, OSError, TimeoutError):
                stream.lost_connections.append(time.monotonic())
                known = True
                await asyncio.sleep(_POLL_S)

    def _asked(self, stream: Stream) -> Any:
        body = _body(self._stand.model, stream.prompt) | {"stream": True}
        headers = {"X-Request-Id": stream.request_id}
        return self._session.post(f"{self._stand.url}/v1/completions", json=body, headers=headers)

    def _taken_up(self, stream: Stream) -> Any:
        headers = {"Last-Event-ID": str(stream.events)}
        return self._session.get(f"{self._stand.url}/v1/requests/{stream.request_id}", headers=headers)


async def _received(stream: Stream, reply: aiohttp.ClientResponse) -> None:
    """Note what comes until the stream or its connection ends."""
    async for event_id, data in _events(reply):
        if data == b"[DONE]":
            stream.ended = True
            return
        content = json.loads(data)
        if "error" in content:
            stream.errors.append(f"event: {content['error']}")
            return
        if event_id != str(stream.events + 1):
            stream.errors.append(f"event {event_id} follows event {stream.events}")
            return
        stream.events += 1
        (choice,) = content["choices"]
        stream.token_ids += choice["token_ids"]
        stream.times += [time.monotonic()] * len(choice["token_ids"])
        stream.text += choice["text"]
        stream.finish_reason = choice["finish_reason"]


async def _events(reply: aiohttp.ClientResponse) -> AsyncGenerator[tuple[str | None, bytes], None]:
    """Server-sent events that came whole: id and data."""
    event_id, data = None, None
    async for line in reply.content:
        name, _, value = line.rstrip(b"\r\n").partition(b":")
        if name == b"id":
            event_id = value.strip().decode()
        elif name == b"data":
            data = value.strip()
        elif not line.strip() and data is not None:
            yield event_id, data
            event_id, data = None, None


def _body(model: str, prompt: Prompt) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt.token_ids,
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def undisturbed(session: aiohttp.ClientSession, stand: Served, prompts: list[Prompt]) -> list[Undisturbed]:
    """The answers of the first pipeline by itself, no router between."""

    async def answer(prompt: Prompt) -> Undisturbed:
        body = _body(stand.model, prompt) | {"logprobs": 2, "return_tokens_as_token_ids": True, "stream": True}
        token_ids, text, margins = [], "", []
        async with session.post(f"{stand.engine_url(1)}/v1/completions", json=body) as reply:
            reply.raise_for_status()
            async for _, data in _events(reply):
                if data == b"[DONE]":
                    break
                (choice,) = json.loads(data)["choices"]
                token_ids += choice["token_ids"]
                text += choice["text"]
                for logprobs in choice["logprobs"]["top_logprobs"]:
                    best, second = sorted(logprobs.values(), reverse=True)[:2]
                    margins.append(best - second)
        if not len(token_ids) == len(margins) == prompt.max_tokens:
            raise RuntimeError(f"asked for {prompt.max_tokens} tokens, got {len(token_ids)}, {len(margins)} margins")
        return Undisturbed(token_ids, text, margins)

    return list(await asyncio.gather(*map(answer, prompts)))


class Killer:
    """Kills, starts again what it killed, and waits until the router finds everything well."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        stand: Stand,
        clients: Clients,
        rng: np.random.Generator,
        on_kill: Callable[[Kill], None],
    ) -> None:
        self._session, self._stand, self._clients, self._rng = session, stand, clients, rng
        self._on_kill = on_kill
        self.kills: list[Kill] = []
        self.outages: list[tuple[float, float]] = []

    async def kill(self, kind: Kind) -> None:
        """One disturbance: a kill, or two for "both"."""
        await _until(self._all_healthy)
        await asyncio.sleep(float(self._rng.uniform(1.0, 5.0)))
        if kind == "router":
            await self._kill_router()
        elif kind == "stage_worker":
            await self._kill_pipeline(kind, SPLIT_PIPELINE, node=1)
        elif kind == "stall":
            await self._stall(int(self._rng.choice(self._stand.pipelines)))
        elif kind == "both":
            for pipeline in self._rng.permutation(self._stand.pipelines):
                await self._kill_pipeline(kind, int(pipeline))
        else:
            await self._kill_pipeline(kind, int(self._rng.choice(self._stand.pipelines)))

    async def _kill_router(self) -> None:
        await _until(lambda: _now(len(self._clients.decoding()) >= LEAST_DECODING))
        kill = self._begun("router", None, len(self._clients.decoding()))
        await asyncio.to_thread(self._stand.kill_router)
        self._stand.start_router()
        hit = self._clients.decoding()
        await _until(lambda: _now(all(s.ended or s.errors or s.times[-1] > kill.at for s in hit)))
        await _until(self._answers)
        self.outages.append((kill.at, time.monotonic()))
        await self._recovered(kill)

    async def _kill_pipeline(self, kind: Kind, pipeline: int, node: int | None = None) -> None:
        control = Control(self._session, self._stand, pipeline)
        retrying = asyncio.create_task(control.run())
        try:
            await _until(lambda: _now(len(control.token_ids) >= CONTROL_TOKENS))
            kill = self._begun(kind, pipeline, await self._decoding_on(pipeline))
            self._stand.send(signal.SIGKILL, pipeline, node)
            if node is not None:
                # The other node finds out by itself, and so does the router.
                with suppress(TimeoutError):
                    await _until(lambda: _now(self._stand.has_ended(pipeline)), within_s=_FOLLOWS_S)
            await self._stand.restart(pipeline)
            await _until(lambda: self._engine_answers(pipeline))
            kill.retry_s = await asyncio.wait_for(retrying, READY_S) - kill.at
            await self._recovered(kill)
        finally:
            retrying.cancel()
            await asyncio.gather(retrying, return_exceptions=True)

    async def _stall(self, pipeline: int) -> None:
        kill = self._begun("stall", pipeline, await self._decoding_on(pipeline))
        self._stand.send(signal.SIGSTOP, pipeline)
        hit = self._clients.decoding()
        await _until(lambda: self._is_healthy(pipeline, False))
        await _until(lambda: _now(all(s.ended or s.errors or s.times[-1] > kill.at + 1.0 for s in hit)))
        self._stand.send(signal.SIGCONT, pipeline)
        # What it still had to say of streams that went on elsewhere may come now.
        await asyncio.sleep(1.0)
        await self._stand.restart(pipeline)
        await _until(lambda: self._engine_answers(pipeline))
        await self._recovered(kill)

    def _begun(self, kind: Kind, pipeline: int | None, streams: int) -> Kill:
        kill = Kill(kind, pipeline, time.monotonic(), streams)
        self.kills.append(kill)
        return kill

    async def _recovered(self, kill: Kill) -> None:
        await _until(self._all_healthy)
        kill.recovered_at = time.monotonic()
        gaps = [gap for s in self._clients.streams for gap in s.gaps(kill.at, kill.recovered_at)]
        kill.longest_gap_s = max(gaps)
        self._on_kill(kill)

    async def _decoding_on(self, pipeline: int) -> int:
        """Wait until a pipeline has enough streams in the midst of their answers; how many for certain."""
        found = 0

        async def enough() -> bool:
            nonlocal found
            health = await self._health()
            if health is None:
                return False
            on = next(p["in_flight"] for p in health["pipelines"] if p["pipeline"] == pipeline)
            # Those without a first token may all be on this one.
            found = on - (len(self._clients.running()) - len(self._clients.decoding()))
            return found >= LEAST_DECODING

        await _until(enough)
        return found

    async def _health(self) -> dict[str, Any] | None:
        return await self._json(f"{self._stand.url}/health")

    async def _answers(self) -> bool:
        return await self._health() is not None

    async def _all_healthy(self) -> bool:
        health = await self._health()
        return health is not None and all(pipeline["healthy"] for pipeline in health["pipelines"])

    async def _is_healthy(self, pipeline: int, expected: bool) -> bool:
        health = await self._health()
        return health is not None and any(
            p["pipeline"] == pipeline and p["healthy"] is expected for p in health["pipelines"]
        )

    async def _engine_answers(self, pipeline: int) -> bool:
        if self._stand.has_ended(pipeline):
            raise RuntimeError(f"pipeline {pipeline} ended while it started\n{self._stand.logs()}")
        return await _is_up(self._session, self._stand.engine_url(pipeline))

    async def _json(self, url: str) -> dict[str, Any] | None:
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as reply:
                content: dict[str, Any] = await reply.json()
                return content
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None


class Control:
    """A client that asks a pipeline itself: when that is killed, it waits for its restart and asks anew."""

    def __init__(self, session: aiohttp.ClientSession, stand: Stand, pipeline: int) -> None:
        self._session, self._url, self._model = session, stand.engine_url(pipeline), stand.model
        self._prompt = Prompt(list(range(100, 120)), CONTROL_LENGTH)
        self.token_ids: list[int] = []

    async def run(self) -> float:
        """When the first token came that it had not had before its pipeline was killed."""
        await self._ask(self.token_ids, len(self.token_ids) + CONTROL_LENGTH)
        while True:
            await asyncio.sleep(_POLL_S)
            if await _is_up(self._session, self._url):
                again: list[int] = []
                await self._ask(again, len(self.token_ids) + 1)
                if len(again) > len(self.token_ids):
                    return time.monotonic()

    async def _ask(self, into: list[int], enough: int) -> None:
        """Read tokens until there are enough, or the pipeline is gone."""
        body = _body(self._model, self._prompt) | {"stream": True}
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self._session.post(f"{self._url}/v1/completions", json=body) as reply:
                if reply.status != 200:
                    return
                async for _, data in _events(reply):
                    if data == b"[DONE]":
                        return
                    content = json.loads(data)
                    if "error" in content:
                        return
                    into += content["choices"][0]["token_ids"]
                    if len(into) >= enough:
                        return


async def _is_up(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=5)) as reply:
            return reply.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


async def _until(condition: Callable[[], Awaitable[bool]], within_s: float = READY_S) -> None:
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(_POLL_S)


def _is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


async def _now(value: bool) -> bool:
    return value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
