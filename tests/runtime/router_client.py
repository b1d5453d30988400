"""A router in this process, and what its clients see, token by token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from recorded_stream import text_of, tokens_of

from hetplan.runtime.router.app import Router
from hetplan.runtime.router.settings import RouterSettings

RATE = 50.0
# Three seconds of a stream; failures come after its first tokens.
COUNT = 150


@dataclass
class Client:
    """A client of a router that runs in this process."""

    url: str
    session: aiohttp.ClientSession
    router: Router
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    async def post(self, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, headers=headers) as reply:
            return reply.status, json.loads(await reply.read())

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=headers) as reply:
            content = await reply.read()
            return reply.status, json.loads(content) if reply.content_type == "application/json" else content.decode()

    async def stream(self, prompt: list[int], seen: Stream | None = None, **more: Any) -> Stream:
        headers = {"X-Request-Id": more.pop("request_id")} if "request_id" in more else {}
        body = {"prompt": prompt, "max_tokens": COUNT, "stream": True, "return_token_ids": True, **more}
        seen = Stream() if seen is None else seen
        async with self.session.post(f"{self.url}/v1/completions", json=body, headers=headers) as reply:
            await seen.read(reply)
        return seen

    async def again(self, request_id: str, held: int) -> Stream:
        seen = Stream()
        path = f"{self.url}/v1/requests/{request_id}"
        async with self.session.get(path, headers={"Last-Event-ID": str(held)}) as reply:
            await seen.read(reply)
        return seen

    async def fail(self, port: int, kind: str) -> int:
        async with self.session.post(f"http://127.0.0.1:{port}/fail", json={"kind": kind}) as reply:
            return int((await reply.json())["struck"])

    async def healthy(self, count: int) -> None:
        while True:
            pipelines = (await self.get("/health"))[1]["pipelines"]
            if sum(pipeline["healthy"] for pipeline in pipelines) >= count:
                return
            await asyncio.sleep(0.05)


@dataclass
class Stream:
    """What a client saw."""

    status: int = 0
    ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    errors: list[Any] = field(default_factory=list)
    usage: Any = None
    comments: int = 0
    done: bool = False

    async def read(self, reply: aiohttp.ClientResponse) -> None:
        self.status = reply.status
        if reply.status != 200:
            self.errors.append(await reply.json())
            return
        async for line in reply.content:
            if line.startswith(b":"):
                self.comments += 1
            elif line.startswith(b"id: "):
                self.ids.append(int(line[4:]))
            elif line.startswith(b"data: [DONE]"):
                self.done = True
            elif line.startswith(b"data: "):
                content = json.loads(line[6:])
                self.usage = content.get("usage") or self.usage
                if "error" in content:
                    self.errors.append(content)
                for choice in content.get("choices") or []:
                    self.tokens += choice.get("token_ids") or []
                    self.text += choice.get("text", "")
                    self.finish = choice.get("finish_reason") or self.finish

    def is_whole(self, prompt: list[int], count: int = COUNT) -> None:
        assert (self.status, self.errors) == (200, [])
        assert self.tokens == tokens_of(prompt, count)
        assert self.text == text_of(self.tokens)
        assert self.ids == list(range(1, len(self.ids) + 1))
        assert (self.finish, self.done) == ("length", True)


@asynccontextmanager
async def routed(ports: list[int], *, keys: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Client]:
    targets = [{"pipeline": i, "address": "127.0.0.1", "port": port} for i, port in enumerate(ports, 1)]
    quick = {"stall_s": 1.0, "health_timeout_s": 1.0, "health_interval_s": 0.1, "keepalive_s": 0.2}
    events: list[tuple[str, dict[str, Any]]] = []
    settings = RouterSettings.from_dict({"model": "tiny", "targets": targets, **quick, **options})
    router = Router(settings, on_event=lambda name, values: events.append((name, values)), **(keys or {}))
    runner = web.AppRunner(router.application(), handler_cancellation=True, shutdown_timeout=10.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Client(f"http://127.0.0.1:{runner.addresses[0][1]}", session, router, events)
    finally:
        await runner.cleanup()
