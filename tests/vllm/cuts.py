"""A network that breaks: a proxy in front of an engine that cuts answers at a token, and what came of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
from aiohttp import web

from hetplan.runtime.router.app import Router
from hetplan.runtime.router.settings import RouterSettings, TargetSettings

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_GENERATION = frozenset({*PATHS.values(), "/inference/v1/generate"})
# While one is found to be back, a request that was cut does not wait for it.
_PIPELINES = 4
# What an engine sends when one of its workers dies.
_DEAD_WORKER = {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}

# A connection that breaks, or an engine that says that it died.
Kind = Literal["connection", "error event"]


@dataclass
class Cuts:
    """What befalls the requests of one cache salt: the first is cut after so many tokens, then the second."""

    after_tokens: list[int]
    kind: Kind = "connection"
    # Token ids that were let through of each request that was cut, and the paths of all requests.
    passed: list[list[int]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    # Token ids that each request came with, none where it came as text.
    contexts: list[list[int]] = field(default_factory=list)


class BreakingNetwork:
    """A proxy in front of an engine, on some ports: as many pipelines as a router sees them."""

    def __init__(self, engine: int) -> None:
        self._engine = f"http://127.0.0.1:{engine}"
        self.cuts: dict[str, Cuts] = {}
        self.ports: list[int] = []
        self._session: aiohttp.ClientSession

    @asynccontextmanager
    async def running(self) -> AsyncIterator[BreakingNetwork]:
        application = web.Application(client_max_size=2**24)
        application.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
        await runner.setup()
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as self._session:
            try:
                for _ in range(_PIPELINES):
                    await web.TCPSite(runner, "127.0.0.1", 0).start()
                self.ports = [address[1] for address in runner.addresses]
                yield self
            finally:
                await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            # Asked all the time; the engine itself has no need to be.
            return web.Response()
        body = await request.read()
        cuts = None
        if request.path in _GENERATION:
            cuts = self.cuts.get(json.loads(body).get("cache_salt") or "")
        after = None
        if cuts is not None:
            cuts.asked.append(request.path)
            context = json.loads(body).get("token_ids") or json.loads(body).get("prompt")
            cuts.contexts.append(context if isinstance(context, list) else [])
            after = cuts.after_tokens.pop(0) if cuts.after_tokens else None
        headers = {"Content-Type": request.content_type}
        async with self._session.request(
            request.method, self._engine + request.path, data=body, headers=headers
        ) as got:
            response = web.StreamResponse(status=got.status, headers={"Content-Type": got.content_type})
            if after is None or got.status != 200:
                await response.prepare(request)
                async for part in got.content.iter_any():
                    await response.write(part)
                return response
            assert cuts is not None
            if got.content_type == "application/json":
                return await self._cut_whole(request, response, await got.read(), after, cuts)
            await response.prepare(request)
            passed: list[int] = []
            async for event in got.content:
                if not event.startswith(b"data: {"):
                    continue
                token_ids, last = _tokens(json.loads(event[6:]))
                # At least this many tokens: an engine may send two at a time. The last is never let through.
                if len(passed) >= after or last:
                    break
                await response.write(event + b"\n")
                passed += token_ids
            cuts.passed.append(passed)
            if cuts.kind == "connection":
                return _broken(request, response)
            await response.write(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(_DEAD_WORKER).encode())
            return response

    async def _cut_whole(
        self, request: web.Request, response: web.StreamResponse, body: bytes, after: int, cuts: Cuts
    ) -> web.StreamResponse:
        """An answer in one piece, of which nothing or a part comes through."""
        cuts.passed.append([])
        if cuts.kind == "error event":
            return web.json_response(_DEAD_WORKER, status=500)
        if after:
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
        return _broken(request, response)


def _tokens(content: dict[str, Any]) -> tuple[list[int], bool]:
    choices = content["choices"]
    token_ids = [token for choice in choices for token in choice.get("token_ids") or []]
    return token_ids, any(choice.get("finish_reason") for choice in choices)


def _broken(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Close the connection in the middle of an answer; what was written is sent."""
    assert request.transport is not None
    request.transport.close()
    return response


@asynccontextmanager
async def routed(network: BreakingNetwork, model: str) -> AsyncIterator[str]:
    """A router in front of the network; its address."""
    settings = RouterSettings(
        model=model,
        targets=tuple(
            TargetSettings(pipeline=i, address="127.0.0.1", port=port) for i, port in enumerate(network.ports, 1)
        ),
        health_interval_s=0.1,
        # Nothing is meant to stall here but this machine.
        health_timeout_s=60.0,
        stall_s=120.0,
        prefill_tokens=10**6,
    )
    failed: list[dict[str, Any]] = []
    router = Router(settings, on_event=lambda name, values: failed.append(values) if name == "failed" else None)
    runner = web.AppRunner(router.application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
    assert failed == []


@dataclass
class Answered:
    """What a client got: the status, and the answer or the chunks of a stream, put together to an answer."""

    status: int
    content: dict[str, Any]
    chunks: list[dict[str, Any]] = field(default_factory=list)
    event_ids: list[int] = field(default_factory=list)

    def token_ids(self, choice: int = 0) -> list[int]:
        ids: list[int] = self.content["choices"][choice]["token_ids"]
        return ids


async def asked(session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> Answered:
    """Send a request and take in its answer."""
    async with session.post(url + path, json=body) as reply:
        if reply.status != 200 or reply.content_type == "application/json":
            return Answered(reply.status, await reply.json())
        lines = (await reply.text()).split("\n")
    data = [line[6:] for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(part) for part in data[:-1]]
    ids = [int(line[4:]) for line in lines if line.startswith("id: ")]
    return Answered(200, put_together(chunks), chunks, ids)


def put_together(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Chunks of a stream as one answer, in the order of its choices."""
    choices: dict[int, dict[str, Any]] = {}
    answer: dict[str, Any] = {"choices": []}
    for chunk in chunks:
        if "error" in chunk:
            answer["error"] = chunk["error"]
            continue
        if chunk.get("prompt_token_ids") is not None:
            answer.setdefault("prompt_token_ids", chunk["prompt_token_ids"])
        if not chunk["choices"]:
            answer["usage"] = chunk["usage"]
        for choice in chunk["choices"]:
            _add(choices.setdefault(choice["index"], {"index": choice["index"]}), choice)
    answer["choices"] = [choices[index] for index in sorted(choices)]
    return answer


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if value is None or name == "index":
            continue
        known = whole.get(name)
        if name == "tool_calls":
            calls = whole.setdefault(name, [])
            for call in value:
                while len(calls) <= call["index"]:
                    calls.append({})
                _add(calls[call["index"]], call)
        elif isinstance(value, dict):
            _add(whole.setdefault(name, {}), value)
        elif known is None or name in ("role", "id", "type", "name", "finish_reason", "stop_reason"):
            whole[name] = value if not isinstance(value, list) else list(value)
        else:
            whole[name] = known + value


def differences(got: Any, expected: Any, where: str = "") -> Iterator[str]:
    """Where an answer is not as expected; names and times differ always, logprobs by rounding."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for name in sorted({*expected, *got}):
            # None and absent say the same.
            if name not in ("id", "created", "model", "system_fingerprint"):
                yield from differences(got.get(name), expected.get(name), f"{where}.{name}")
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for i, (one, other) in enumerate(zip(got, expected, strict=True)):
            yield from differences(one, other, f"{where}[{i}]")
    elif isinstance(expected, float) and isinstance(got, int | float):
        if abs(got - expected) > 1e-3:
            yield f"{where}: {got} for {expected}"
    elif got != expected:
        yield f"{where}: {got!r} for {expected!r}"


async def at_a_time(count: int, *tasks: Any) -> list[Any]:
    """Results of coroutines, so many of which run at any time."""
    places = asyncio.Semaphore(count)

    async def run(task: Any) -> Any:
        async with places:
            return await task

    return await asyncio.gather(*map(run, tasks))
