"""From a cloud's metadata service to a router: the notice is told until the router has it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

from hetplan.errors import InvalidInputError, UnknownNameError
from hetplan.runtime.router.app import Router
from hetplan.runtime.router.settings import RouterSettings
from hetplan.runtime.spot_notices import make_watcher
from hetplan.runtime.spot_notices.forward import _forward, forward_notices


@asynccontextmanager
async def served(application: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def metadata() -> web.Application:
    """As AWS answers a machine that is taken in two minutes."""

    async def token(_: web.Request) -> web.Response:
        return web.Response(text="token")

    async def action(_: web.Request) -> web.Response:
        at = (datetime.now(UTC) + timedelta(minutes=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
        return web.Response(text=json.dumps({"action": "terminate", "time": at}))

    application = web.Application()
    application.router.add_put("/latest/api/token", token)
    application.router.add_get("/latest/meta-data/spot/instance-action", action)
    return application


def router() -> Router:
    targets = [{"pipeline": n, "address": "127.0.0.1", "port": n} for n in (1, 2)]
    return Router(RouterSettings.from_dict({"model": "tiny", "targets": targets}), admin_key="root")


async def told(url: str, key: str, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> list[Any]:
    """Events of a watcher until it knows what became of its first notice."""
    events: list[Any] = []
    done = asyncio.Event()

    def on_event(name: str, values: dict[str, Any]) -> None:
        events.append((name, values))
        if name != "notice":
            done.set()

    async with served(metadata()) as base_url:
        watching = asyncio.create_task(_forward(make_watcher("aws", base_url=base_url), 2, url, key, on_event, sleep))
        await asyncio.wait_for(done.wait(), 30)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return events


def test_a_notice_marks_its_pipeline() -> None:
    async def run() -> None:
        one = router()
        async with served(one.application()) as url:
            events = await told(url, "root")
        assert [name for name, _ in events] == ["notice", "told"]
        assert events[0][1]["pipeline"] == 2
        assert 100 < events[0][1]["grace_s"] <= 120
        assert [target.leaving for target in one._tools.targets.all] == [False, True]

    asyncio.run(run())


def test_a_router_that_is_away_is_asked_again() -> None:
    async def run() -> None:
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            await asyncio.sleep(0)

        events = await told("http://127.0.0.1:1", "root", sleep)
        assert events[-1][0] == "not_told"
        assert "does not answer" in events[-1][1]["reason"]
        # For as long as the machine is there.
        assert len(slept) >= 100

    asyncio.run(run())


def test_a_wrong_key_is_said_at_once() -> None:
    async def run() -> None:
        async with served(router().application()) as url:
            events = await told(url, "wrong")
        assert events[-1][0] == "not_told"
        assert "was answered 401: no valid key" in events[-1][1]["reason"]

    asyncio.run(run())


def test_wrong_addresses_and_clouds_are_refused() -> None:
    common: dict[str, Any] = {"pipeline": 1, "key": "k", "base_url": None, "on_event": lambda *_: None}
    with pytest.raises(InvalidInputError, match="http://HOST:PORT"):
        forward_notices("aws", router="10.0.0.1:8080", **common)
    with pytest.raises(UnknownNameError):
        forward_notices("ovh", router="http://10.0.0.1:8080", **common)
