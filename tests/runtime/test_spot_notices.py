"""Watchers against servers that answer as the clouds' metadata services do, and as they should not."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import gzip
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest
from aiohttp import web

from hetplan.errors import InvalidInputError, UnknownNameError
from hetplan.runtime.spot_notices import WATCHERS, Notice, Watcher, make_watcher

NOON = datetime.datetime(2026, 3, 1, 12, 0, tzinfo=datetime.UTC)
INSTANCE_ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
EVENTS = "/metadata/scheduledevents"
HANG_S = 60

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test in an event loop of its own."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


class Enough(Exception):
    """The rounds that a test wants are over."""


class Clock:
    """Time that passes only where the watcher sleeps; ``at[n]`` is done in the n-th sleep."""

    def __init__(self, rounds: int, at: dict[int, Callable[[], Any]] | None = None) -> None:
        self.time = NOON
        self.rounds = rounds
        self.at = at or {}
        self.slept: list[float] = []

    def now(self) -> datetime.datetime:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += datetime.timedelta(seconds=seconds)
        if len(self.slept) >= self.rounds:
            raise Enough
        done = self.at.get(len(self.slept), lambda: None)()
        if asyncio.iscoroutine(done):
            await done


class Service:
    """A metadata service: `replies` by path come first, then what the cloud answers."""

    def __init__(self) -> None:
        self.asked: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.replies: dict[str, Reply] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        self.bodies.append(await request.read())
        assert request.headers["Accept-Encoding"] == "identity"
        if request.path in self.replies:
            return await self.replies[request.path](request)
        return await self.answer(request)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError

    def paths(self) -> list[str]:
        return [request.path for request in self.asked]


class Aws(Service):
    """Session tokens that run out, and 404 until there is something to say."""

    path = INSTANCE_ACTION

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0
        self.valid: set[str] = set()
        self.action: Any = None
        self.rebalance: Any = None

    def give(self) -> None:
        self.action = {"action": "terminate", "time": "2026-03-01T12:02:00Z"}

    def good(self) -> str:
        return json.dumps({"action": "terminate", "time": "2026-03-01T12:02:00Z"})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/latest/api/token":
            assert request.method == "PUT"
            assert 1 <= int(request.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21_600
            self.tokens += 1
            token = f"AQAEAHsecret{self.tokens}=="
            self.valid.add(token)
            return web.Response(text=token)
        assert request.method == "GET"
        if request.headers.get("X-aws-ec2-metadata-token") not in self.valid:
            return web.Response(status=401, text="<html>Unauthorized</html>")
        content = {INSTANCE_ACTION: self.action, REBALANCE: self.rebalance}[request.path]
        if content is None:
            return web.Response(status=404, text="<html>Not Found</html>", content_type="text/html")
        return web.Response(text=json.dumps(content))


class Gcp(Service):
    """A value, with an ETag or without, and questions that wait until it changes."""

    path = PREEMPTED

    def __init__(self, *, etag: str | None = None) -> None:
        super().__init__()
        self.value = "FALSE"
        self.etag = etag
        self.flavor = "Google"
        self.waiting = asyncio.Event()
        self.changed = asyncio.Event()

    def give(self) -> None:
        self.value = "TRUE"
        self.etag = None if self.etag is None else "changed+/=&"
        self.changed.set()

    def good(self) -> str:
        return "TRUE"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403)
        if request.query.get("wait_for_change") == "true" and request.query["last_etag"] == self.etag:
            assert int(request.query["timeout_sec"]) > 0
            self.waiting.set()
            await self.changed.wait()
        headers = {"Metadata-Flavor": self.flavor}
        if self.etag is not None:
            headers["ETag"] = self.etag
        return web.Response(text=self.value, content_type="application/text", headers=headers)


class Azure(Service):
    """A list of events of all machines, and the name of this one."""

    path = EVENTS

    def __init__(self) -> None:
        super().__init__()
        self.incarnation: Any = 1
        self.events: Any = []

    def give(self) -> None:
        self.incarnation += 1
        self.events = [event()]

    def good(self) -> str:
        return json.dumps({"DocumentIncarnation": 7, "Events": [event()]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Metadata") != "true" or "api-version" not in request.query:
            return web.Response(status=400, text='{"error": "Bad request"}')
        if request.path == "/metadata/instance/compute/name":
            assert request.query["format"] == "text"
            return web.Response(text="gpu_0")
        if request.method == "POST":
            return web.Response(status=200)
        return web.Response(text=json.dumps({"DocumentIncarnation": self.incarnation, "Events": self.events}))


CLOUDS: dict[str, Callable[[], Any]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


def event(**changed: Any) -> dict[str, Any]:
    return {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["other_1", "gpu_0"],
        "EventStatus": "Scheduled",
        "NotBefore": "Sun, 01 Mar 2026 12:00:45 GMT",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    } | changed


@contextlib.asynccontextmanager
async def serving(handler: Reply, port: int = 0) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def read(watcher: Watcher) -> list[Notice]:
    """All notices until the clock has had enough."""
    found = []
    async with asyncio.timeout(HANG_S):
        with contextlib.suppress(Enough):
            async for notice in watcher.notices():
                found.append(notice)
    return found


async def watched(provider: str, service: Service, clock: Clock, **options: Any) -> tuple[list[Notice], Watcher]:
    # A busy machine is no slow service.
    options = {"timeout_s": HANG_S} | options
    async with serving(service.handle) as base_url:
        watcher = make_watcher(provider, base_url=base_url, now=clock.now, sleep=clock.sleep, **options)
        return await read(watcher), watcher


def interruption(provider: str, action: str, deadline_s: float | None, grace_s: float, at_s: float = 0) -> Notice:
    """What is expected, but for its id and source."""
    return Notice(
        kind="interruption",
        provider=provider,
        action=action,
        deadline=None if deadline_s is None else NOON + datetime.timedelta(seconds=deadline_s),
        grace_s=grace_s,
        observed_at=NOON + datetime.timedelta(seconds=at_s),
        event_id="any",
        source="any",
    )


def plain(notice: Notice) -> Notice:
    return notice.replace(event_id="any", source="any")


# What every cloud's watcher must do.

EXPECTED = {
    "aws": interruption("aws", "terminate", 120, 118, at_s=2),
    "gcp": interruption("gcp", "preempt", None, 30, at_s=2),
    "azure": interruption("azure", "preempt", 45, 43, at_s=2),
}


@pytest.mark.parametrize("provider", CLOUDS)
@in_loop
async def test_a_notice_is_handed_out_once_when_it_is_there(provider: str) -> None:
    service = CLOUDS[provider]()
    clock = Clock(rounds=6, at={2: service.give})
    found, watcher = await watched(provider, service, clock)
    assert [plain(notice) for notice in found] == [EXPECTED[provider]]
    assert found[0].source == service.path
    assert (watcher.errors, watcher.last_error) == (0, None)
    assert clock.slept == [1.0] * 6


@pytest.mark.parametrize("provider", CLOUDS)
@in_loop
async def test_nothing_is_read_from_the_proxy_of_the_environment(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    _, watcher = await watched(provider, CLOUDS[provider](), Clock(rounds=1))
    assert watcher.errors == 0


def text(body: str | bytes, status: int = 200, **headers: str) -> Callable[[str], Reply]:
    async def reply(request: web.Request) -> web.Response:
        content = body.encode() if isinstance(body, str) else body
        return web.Response(status=status, body=content, headers={"Metadata-Flavor": "Google", **headers})

    return lambda good: reply


def changed(change: Callable[[str], bytes], status: int = 200, **headers: str) -> Callable[[str], Reply]:
    """The good answer, spoilt."""
    return lambda good: text(change(good), status, **headers)(good)


def without_length(good: str) -> Reply:
    async def reply(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Metadata-Flavor": "Google"})
        await response.prepare(request)
        await response.write(good.encode())
        while True:
            await response.write(b" " * 4096)

    return reply


BROKEN = {
    "html": text("<html><body>Sign in to the network</body></html>"),
    "empty": text(""),
    "half a document": changed(lambda good: good[:-1].encode()),
    "a list": changed(lambda good: f"[{good}]".encode()),
    "a number": text("1"),
    "deep": text("[" * 60_000),
    "not utf-8": changed(lambda good: good.encode("utf-16")),
    "too long": changed(lambda good: good.encode() + b" " * 2**16),
    "endless": without_length,
    "compressed": changed(lambda good: gzip.compress(good.encode()), **{"Content-Encoding": "gzip"}),
    "redirect": changed(str.encode, 302, Location="/elsewhere"),
    "no content": text("", 204),
    "busy": changed(str.encode, 429),
    "fault": changed(str.encode, 500),
    "unavailable": changed(str.encode, 503),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("provider", CLOUDS)
@in_loop
async def test_a_broken_answer_is_an_error_and_the_next_good_one_counts(provider: str, broken: str) -> None:
    service = CLOUDS[provider]()
    service.replies[service.path] = BROKEN[broken](service.good())

    def mend() -> None:
        del service.replies[service.path]
        service.give()

    found, watcher = await watched(provider, service, Clock(rounds=5, at={3: mend}))
    assert watcher.errors == 3
    assert watcher.last_error is not None
    assert watcher.last_error.startswith(service.path)
    assert [notice.kind for notice in found] == ["interruption"]
    assert "/elsewhere" not in service.paths()


@pytest.mark.parametrize(
    "raw", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n", b"\0" * 99]
)
@pytest.mark.parametrize("provider", CLOUDS)
@in_loop
async def test_what_is_not_http_is_an_error(provider: str, raw: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        clock = Clock(rounds=2)
        watcher = make_watcher(provider, base_url=base_url, now=clock.now, sleep=clock.sleep)
        assert await read(watcher) == []
    assert watcher.errors >= 2


@pytest.mark.parametrize("provider", CLOUDS)
@in_loop
async def test_a_late_answer_is_an_error(provider: str) -> None:
    async def silent(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def trickling(request: web.Request) -> web.Response:
        response = web.StreamResponse(headers={"Metadata-Flavor": "Google"})
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.01)

    service = CLOUDS[provider]()
    for slow in (silent, trickling):
        service.replies[service.path] = slow
        found, watcher = await watched(provider, service, Clock(rounds=2), timeout_s=0.1)
        assert found == []
        assert watcher.errors >= 2
        assert "TimeoutError" in str(watcher.last_error)


@pytest.mark.parametrize("provider", CLOUDS)
@in_loop
async def test_a_service_that_is_not_there_is_asked_ever_more_slowly_until_it_is(provider: str) -> None:
    service = CLOUDS[provider]()
    service.give()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with contextlib.AsyncExitStack() as stack:
        clock = Clock(rounds=9, at={7: lambda: stack.enter_async_context(serving(service.handle, port))})
        watcher = make_watcher(provider, base_url=f"http://127.0.0.1:{port}/", now=clock.now, sleep=clock.sleep)
        assert len(await read(watcher)) == 1
    assert clock.slept == [1, 2, 4, 8, 10, 10, 10, 1, 1]
    assert watcher.errors in (7, 14)


@pytest.mark.parametrize("provider", CLOUDS)
@in_loop
async def test_a_reader_can_be_cancelled_while_a_question_is_asked(provider: str) -> None:
    asked, dropped = asyncio.Event(), asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            dropped.set()
        raise AssertionError

    service = CLOUDS[provider]()
    service.replies[service.path] = silent
    clock = Clock(rounds=9)
    async with asyncio.timeout(HANG_S), serving(service.handle) as base_url:
        watcher = make_watcher(provider, base_url=base_url, now=clock.now, sleep=clock.sleep, timeout_s=HANG_S)
        reader = asyncio.create_task(read(watcher))
        await asked.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await dropped.wait()
        assert watcher.errors == 0
        # It can be read again.
        del service.replies[service.path]
        service.give()
        assert len(await read(watcher)) == 1


# AWS


@in_loop
async def test_aws_a_rebalance_and_then_an_interruption_are_two_notices() -> None:
    service = Aws()

    def recommend() -> None:
        service.rebalance = {"noticeTime": "2026-03-01T12:00:01Z"}

    found, _ = await watched("aws", service, Clock(rounds=6, at={1: recommend, 4: service.give}))
    assert [(n.kind, n.action, n.deadline, n.grace_s) for n in found] == [
        ("rebalance", None, None, 120.0),
        ("interruption", "terminate", NOON + datetime.timedelta(seconds=120), 116.0),
    ]
    assert [n.source for n in found] == [REBALANCE, INSTANCE_ACTION]


@in_loop
async def test_aws_an_interruption_goes_before_a_rebalance_seen_with_it() -> None:
    service = Aws()
    service.give()
    service.rebalance = {"noticeTime": "2026-03-01T12:00:00Z"}
    found, _ = await watched("aws", service, Clock(rounds=2))
    assert [notice.kind for notice in found] == ["interruption", "rebalance"]


@pytest.mark.parametrize(
    ("action", "time", "deadline", "grace_s"),
    [
        ("stop", "2026-03-01T12:01:30Z", "2026-03-01T12:01:30+00:00", 90.0),
        ("hibernate", "2026-03-01T14:01:30+02:00", "2026-03-01T12:01:30+00:00", 90.0),
        # Its time is over: the machine goes at any moment.
        ("terminate", "2026-03-01T11:00:00Z", "2026-03-01T11:00:00+00:00", 0.0),
        # No cloud announces an interruption years ahead: it is one all the same, and two minutes are what is sure.
        ("terminate", "2062-03-01T12:00:00Z", "2062-03-01T12:00:00+00:00", 120.0),
    ],
)
@in_loop
async def test_aws_grace_is_what_is_left(action: str, time: str, deadline: str, grace_s: float) -> None:
    service = Aws()
    service.action = {"action": action, "time": time}
    ((notice,), _) = await watched("aws", service, Clock(rounds=3))
    assert notice.deadline is not None
    assert (notice.action, notice.deadline.isoformat(), notice.grace_s) == (action, deadline, grace_s)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"action": "terminate"},
        {"action": "terminate", "time": None},
        {"action": "terminate", "time": 1772366520},
        {"action": "terminate", "time": "2026-03-01T12:02:00"},
        {"action": "terminate", "time": "soon"},
        {"action": "terminate", "time": "0001-01-01T00:00:00+23:59"},
        {"action": "none", "time": "2026-03-01T12:02:00Z"},
        {"action": ["terminate"], "time": "2026-03-01T12:02:00Z"},
        {"time": "2026-03-01T12:02:00Z"},
    ],
)
@in_loop
async def test_aws_a_record_of_another_form_is_no_notice_and_hides_no_rebalance(record: Any) -> None:
    service = Aws()
    service.action, service.rebalance = record, {"noticeTime": "2026-03-01T12:00:00Z"}
    clock = Clock(rounds=3)
    found, watcher = await watched("aws", service, clock)
    assert [notice.kind for notice in found] == ["rebalance"]
    assert watcher.errors == 3
    assert clock.slept == [1.0] * 3


@in_loop
async def test_aws_one_token_serves_until_it_is_old() -> None:
    service = Aws()
    clock = Clock(rounds=8)

    def later(hours: float) -> None:
        clock.time += datetime.timedelta(hours=hours)

    # Six hours are the longest that a token lives.
    clock.at = {2: lambda: later(5.9), 4: lambda: later(0.1), 6: lambda: later(-3)}
    _, watcher = await watched("aws", service, clock)
    assert service.tokens == 3
    assert watcher.errors == 0


@in_loop
async def test_aws_a_refused_token_is_renewed_at_once() -> None:
    service = Aws()
    _, watcher = await watched("aws", service, Clock(rounds=4, at={2: service.valid.clear}))
    assert (service.tokens, watcher.errors) == (2, 0)


@in_loop
async def test_aws_a_service_that_refuses_new_tokens_is_an_error_that_tells_no_token() -> None:
    service = Aws()

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=401, text=request.headers["X-aws-ec2-metadata-token"])

    service.replies = {INSTANCE_ACTION: refuse, REBALANCE: refuse}
    found, watcher = await watched("aws", service, Clock(rounds=1))
    assert (found, watcher.errors) == ([], 2)
    # Each look tried once more with a new token, and no oftener.
    assert service.paths().count(INSTANCE_ACTION) == service.paths().count(REBALANCE) == 2
    assert "secret" not in str(watcher.last_error) + repr(watcher)


@pytest.mark.parametrize("token", ["", "<html>", "two words", "a\r\nHost: b", "é", "x" * 2000])
@in_loop
async def test_aws_what_is_no_token_is_sent_nowhere(token: str) -> None:
    service = Aws()
    service.replies["/latest/api/token"] = text(token)("")
    _, watcher = await watched("aws", service, Clock(rounds=1))
    assert set(service.paths()) == {"/latest/api/token"}
    assert watcher.last_error == "/latest/api/token: not a token"


# Google Cloud


@in_loop
async def test_gcp_waits_for_the_change_where_the_server_gives_an_etag() -> None:
    service = Gcp(etag="3f1a")
    clock = Clock(rounds=4)

    async def change() -> None:
        await service.waiting.wait()
        service.give()

    async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(change())
        found, watcher = await watched("gcp", service, clock)
        # The last question waits for a change of the new value, by its ETag, letter for letter.
        assert [request.query.get("last_etag") for request in service.asked] == [
            None,
            "3f1a",
            "changed+/=&",
            "changed+/=&",
        ]
    assert [plain(notice) for notice in found] == [interruption("gcp", "preempt", None, 30, at_s=1)]
    assert watcher.errors == 0


@in_loop
async def test_gcp_asks_plainly_after_an_error() -> None:
    service = Gcp(etag="3f1a")
    service.changed.set()

    def fail() -> None:
        service.replies[PREEMPTED] = text("FALSE", 503)("")

    clock = Clock(rounds=5, at={2: fail, 3: service.replies.clear})
    _, watcher = await watched("gcp", service, clock)
    assert ["wait_for_change" in request.query for request in service.asked] == [False, True, True, False, True]
    assert watcher.errors == 1


@pytest.mark.parametrize("flavor", ["", "google", "Amazon"])
@in_loop
async def test_gcp_a_server_that_is_not_googles_says_nothing(flavor: str) -> None:
    service = Gcp()
    service.give()
    service.flavor = flavor
    found, watcher = await watched("gcp", service, Clock(rounds=2))
    assert (found, watcher.errors) == ([], 2)
    assert "Metadata-Flavor" in str(watcher.last_error)


@pytest.mark.parametrize("value", ["true", "TRUE FALSE", "1", '"TRUE"'])
@in_loop
async def test_gcp_another_value_is_no_notice(value: str) -> None:
    service = Gcp()
    service.value = value
    found, watcher = await watched("gcp", service, Clock(rounds=2))
    assert (found, watcher.errors) == ([], 2)


# Azure


@in_loop
async def test_azure_takes_the_events_that_preempt_this_machine() -> None:
    service = Azure()
    service.events = [
        event(EventId="a", Resources=["gpu_1", "gpu_00"]),
        event(EventId="b", EventType="Reboot"),
        event(EventId="c", EventType="Freeze", Resources=["gpu_0"]),
        event(EventId="d"),
        event(EventId="e", Resources=["GPU_0"], NotBefore="Sun, 01 Mar 2026 12:01:00 GMT"),
        event(EventId="f", Resources=[]),
    ]
    found, watcher = await watched("azure", service, Clock(rounds=3))
    assert [(n.event_id, n.grace_s) for n in found] == [("d", 45.0), ("e", 60.0)]
    assert watcher.errors == 0
    # The name was asked for once, and nothing was acknowledged.
    assert service.paths().count("/metadata/instance/compute/name") == 1
    assert {request.method for request in service.asked} == {"GET"}


@in_loop
async def test_azure_a_given_name_is_not_asked_for() -> None:
    service = Azure()
    service.events = [event(Resources=["mine"])]
    found, _ = await watched("azure", service, Clock(rounds=2), vm_name="mine")
    assert len(found) == 1
    assert set(service.paths()) == {EVENTS}


@pytest.mark.parametrize("name", ["", "<html>", "two words", "x" * 200])
@in_loop
async def test_azure_matches_no_event_while_it_has_no_name(name: str) -> None:
    service = Azure()
    service.give()
    service.replies["/metadata/instance/compute/name"] = text(name)("")
    found, watcher = await watched("azure", service, Clock(rounds=4, at={2: service.replies.clear}))
    assert len(found) == 1
    assert watcher.errors == 2


@in_loop
async def test_azure_an_event_that_goes_on_is_one_notice() -> None:
    service = Azure()
    service.give()

    def start() -> None:
        service.incarnation += 1
        service.events = [event(EventStatus="Started", NotBefore="")]

    found, watcher = await watched("azure", service, Clock(rounds=4, at={2: start}))
    assert len(found) == 1
    assert watcher.errors == 0


@pytest.mark.parametrize(("status", "grace_s"), [("Started", 0.0), ("Scheduled", 30.0)])
@in_loop
async def test_azure_an_event_without_a_time(status: str, grace_s: float) -> None:
    service = Azure()
    service.events = [event(EventStatus=status, NotBefore="")]
    found, _ = await watched("azure", service, Clock(rounds=2))
    assert [plain(notice) for notice in found] == [interruption("azure", "preempt", None, grace_s)]


@in_loop
async def test_azure_an_unchanged_document_is_not_read_again() -> None:
    service = Azure()

    def slip_in() -> None:
        service.events = [event()]

    found, _ = await watched("azure", service, Clock(rounds=4, at={1: slip_in}))
    assert found == []


@pytest.mark.parametrize(
    "spoilt",
    [
        "an event",
        {},
        event(EventType=None),
        event(EventId=None),
        event(EventId=""),
        event(EventId=7),
        event(Resources="gpu_0"),
        event(Resources=["gpu_0", None]),
        event(NotBefore=None),
        event(NotBefore="2026-03-01T12:00:45Z"),
        event(NotBefore="Sun, 01 Mar 2026 12:00:45"),
        event(NotBefore="Sun, 01 Mar 2026 12:00:45 -0000"),
        event(NotBefore="Sun, 31 Feb 2026 12:00:45 GMT"),
        event(NotBefore="Sun, 01 Foo 2026 12:00:45 GMT"),
    ],
)
@in_loop
async def test_azure_a_broken_event_is_an_error_and_hides_no_other(spoilt: Any) -> None:
    service = Azure()
    service.events = [spoilt, event(EventId="good")]
    found, watcher = await watched("azure", service, Clock(rounds=2))
    assert [notice.event_id for notice in found] == ["good"]
    assert watcher.errors == 2


@pytest.mark.parametrize(
    "document", [{}, {"DocumentIncarnation": True, "Events": []}, {"DocumentIncarnation": 1, "Events": {}}]
)
@in_loop
async def test_azure_a_document_of_another_form_is_an_error(document: Any) -> None:
    service = Azure()
    service.replies[EVENTS] = text(json.dumps(document))("")
    found, watcher = await watched("azure", service, Clock(rounds=2))
    assert (found, watcher.errors) == ([], 2)


@in_loop
async def test_azure_acknowledges_when_asked() -> None:
    service = Azure()
    service.give()
    clock = Clock(rounds=2)
    async with serving(service.handle) as base_url:
        watcher = make_watcher("azure", base_url=base_url, now=clock.now, sleep=clock.sleep)
        (notice,) = await read(watcher)
        assert await watcher.acknowledge(notice)
    assert service.asked[-1].method == "POST"
    assert service.asked[-1].path == EVENTS
    assert service.asked[-1].query["api-version"] == "2020-07-01"
    assert json.loads(service.bodies[-1]) == {"StartRequests": [{"EventId": notice.event_id}]}
    # The service has gone.
    assert not await watcher.acknowledge(notice)
    assert watcher.errors == 1


@in_loop
async def test_only_azure_is_told_and_only_of_its_own_notices() -> None:
    notice = interruption("aws", "stop", 120, 120)
    assert not await make_watcher("aws").acknowledge(notice)
    with pytest.raises(InvalidInputError, match="from aws"):
        await make_watcher("azure").acknowledge(notice)


@in_loop
async def test_a_reader_that_stops_between_two_notices_finds_the_second_later() -> None:
    service = Azure()
    service.events = [event(EventId="a"), event(EventId="b")]
    clock = Clock(rounds=2)
    async with serving(service.handle) as base_url:
        watcher = make_watcher("azure", base_url=base_url, now=clock.now, sleep=clock.sleep)
        async with contextlib.aclosing(watcher.notices()) as notices:
            first = await anext(notices)
        assert [first.event_id, *(notice.event_id for notice in await read(watcher))] == ["a", "b"]


# Making watchers and notices


def test_every_cloud_has_a_watcher_at_its_own_address() -> None:
    assert set(WATCHERS) == set(CLOUDS)
    for provider, watcher in WATCHERS.items():
        assert watcher.provider == provider
        assert watcher.base_url == "http://169.254.169.254"
        assert make_watcher(provider).errors == 0


def test_an_unknown_provider_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="gcp"):
        make_watcher("gpc")


@pytest.mark.parametrize(
    "base_url",
    [
        "",
        "169.254.169.254",
        "ftp://169.254.169.254",
        "file:///etc/passwd",
        "http://",
        "http://:80",
        "http://[::1",
        "http://host:99999",
        "http://user@host",
        "http://user:hunter2@host",
        "http://host?x=hunter2",
        "http://host/?",
        "http://host/#hunter2",
        "http://host\n.evil",
        " http://host",
    ],
)
def test_another_kind_of_address_is_refused_and_not_repeated(base_url: str) -> None:
    with pytest.raises(InvalidInputError, match="base_url") as refused:
        make_watcher("aws", base_url=base_url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("provider", "options", "message"),
    [
        ("aws", {"interval_s": 0}, "interval_s is 0"),
        ("gcp", {"timeout_s": float("nan")}, "timeout_s is nan"),
        ("gcp", {"timeout_s": float("inf")}, "timeout_s is inf"),
        ("aws", {"vm_name": "gpu_0"}, "vm_name"),
        ("azure", {"vm_name": "a b"}, "vm_name"),
        ("aws", {"now": lambda: NOON.replace(tzinfo=None)}, "zone"),
    ],
)
def test_wrong_options_are_refused(provider: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make_watcher(provider, **options)


def test_a_sigterm_is_an_interruption_with_the_pods_grace() -> None:
    here = NOON.astimezone(datetime.timezone(datetime.timedelta(hours=2)))
    notice = Notice.from_sigterm(25, here)
    assert plain(notice) == interruption("kubernetes", "terminate", 25, 25)
    assert notice.source == "sigterm"
    assert Notice.from_json(notice.model_dump_json()) == notice


@pytest.mark.parametrize("grace_s", [-1, float("nan"), float("inf"), 1e300, 1e12])
def test_a_sigterm_has_a_grace_that_can_be(grace_s: float) -> None:
    with pytest.raises(InvalidInputError, match="grace_s"):
        Notice.from_sigterm(grace_s, NOON)


def test_a_sigterm_has_a_time_with_a_zone() -> None:
    with pytest.raises(InvalidInputError, match="observed_at"):
        Notice.from_sigterm(25, NOON.replace(tzinfo=None))
