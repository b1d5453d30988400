"""Targets that come and go while a router runs: what clients see, what controllers are told, what a restart keeps."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_stream import recorded_stream, tokens_of
from router_client import COUNT, Client, Stream, routed
from router_process import free_port, run_router

from hetplan.errors import InvalidInputError, RouterError
from hetplan.runtime.router.admin import RouterAdmin
from hetplan.runtime.router.demand import BUCKET_S, BUCKETS, MAX_LINES, OTHER, Demand
from hetplan.runtime.router.membership import Kept, TargetsFile
from hetplan.runtime.router.settings import RouterSettings, RouteSettings, TargetSet, TargetSettings
from hetplan.runtime.router.targets import Target, Targets

KEY = "root"
QUICK = {"stall_s": 3.0, "health_timeout_s": 3.0, "health_interval_s": 0.1}


@pytest.fixture(scope="module")
def ports() -> Iterator[list[int]]:
    with ExitStack() as stack:
        yield [stack.enter_context(recorded_stream(tokens_per_s=50.0))[1] for _ in range(4)]


def at(pipeline: int, port: int, **more: Any) -> TargetSettings:
    return TargetSettings(pipeline=pipeline, address="127.0.0.1", port=port, **more)


def run(
    ports: list[int], scenario: Callable[[Client, RouterAdmin], Awaitable[None]], begin: int = 2, **options: Any
) -> None:
    async def whole() -> None:
        keys = {"admin_key": KEY}
        async with asyncio.timeout(60), routed(ports[:begin], keys=keys, **options) as client:
            await client.healthy(begin)
            async with RouterAdmin(client.url, KEY) as admin:
                await scenario(client, admin)

    asyncio.run(whole())


async def until(admin: RouterAdmin, *expected: tuple[int, str]) -> dict[str, Any]:
    """Wait until there are exactly these targets, by port and state."""
    while True:
        told = await admin.targets()
        if sorted((target["port"], target["state"]) for target in told["targets"]) == sorted(expected):
            return told
        await asyncio.sleep(0.05)


async def tokens(seen: list[Stream], count: int) -> None:
    while min(len(stream.tokens) for stream in seen) < count:
        await asyncio.sleep(0.02)


async def served(ports: list[int], session: aiohttp.ClientSession) -> list[int]:
    """How many requests each engine has been sent since it was asked last, probes apart."""
    counts = []
    for port in ports:
        async with session.get(f"http://127.0.0.1:{port}/sent") as reply:
            counts.append(len(await reply.json()))
    return counts


@asynccontextmanager
async def process_client(port: int) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        yield Client(f"http://127.0.0.1:{port}", session, cast(Any, None))


def test_forty_streams_while_all_engines_are_swapped_twice(ports: list[int], tmp_path: Path) -> None:
    """None is lost and none doubled, and each old engine is let go without having been taken for dead."""

    async def scenario(port: int) -> None:
        async with asyncio.timeout(60), process_client(port) as client, RouterAdmin(client.url, KEY) as admin:
            await client.healthy(2)
            prompts = [[number, 7, 7] for number in range(1, 41)]
            seen = [Stream() for _ in prompts]
            streams = [client.stream(p, s, max_tokens=300) for p, s in zip(prompts, seen, strict=True)]
            running = asyncio.gather(*streams)
            await tokens(seen, 20)
            told = await admin.set_targets([at(1, ports[2]), at(2, ports[3])], revision=0, grace_s=3.0)
            assert told["revision"] == 1
            assert len(told["targets"]) == 4
            told = await until(admin, (ports[2], "serving"), (ports[3], "serving"))
            # Beside the streams, the router asks for the text at their cuts.
            assert sum(target["running"] for target in told["targets"]) >= 40
            await tokens(seen, 120)
            # One of them after the other, without a grace.
            await admin.set_targets([at(1, ports[0]), at(2, ports[3])], revision=1, grace_s=0.0)
            await until(admin, (ports[0], "serving"), (ports[3], "serving"))
            assert not running.done()
            for prompt, stream in zip(prompts, await running, strict=True):
                stream.is_whole(prompt, 300)

    with run_router(tmp_path, ports[:2], admin_key=KEY, **QUICK) as (_, port):
        asyncio.run(scenario(port))
    events = [json.loads(line)["event"] for line in (tmp_path / "router.log").read_text().splitlines()]
    assert events.count("pipeline_gone") == 3
    assert "pipeline_lost" not in events


def test_without_a_grace_streams_end_where_they_are(ports: list[int]) -> None:
    async def scenario(client: Client, admin: RouterAdmin) -> None:
        seen = Stream()
        running = asyncio.create_task(client.stream([5, 5], seen))
        await tokens([seen], 10)
        await admin.set_targets([at(1, ports[1])])
        await until(admin, (ports[0], "leaving"), (ports[1], "serving"))
        # What comes goes to the new one.
        (await client.stream([6], max_tokens=5)).is_whole([6], 5)
        assert [target["running"] for target in (await admin.targets())["targets"]] == [1, 0]
        (await running).is_whole([5, 5])
        await until(admin, (ports[1], "serving"))
        assert "interruptions_total{" not in (await client.get("/metrics"))[1]

    run(ports, scenario, begin=1)


def test_a_target_that_left_comes_back_before_it_is_dropped(ports: list[int]) -> None:
    async def scenario(client: Client, admin: RouterAdmin) -> None:
        seen = Stream()
        running = asyncio.create_task(client.stream([5, 5], seen))
        await tokens([seen], 10)
        await admin.set_targets([at(1, ports[1])])
        await until(admin, (ports[0], "leaving"), (ports[1], "serving"))
        await admin.set_targets([at(1, ports[1]), at(2, ports[0])])
        told = await until(admin, (ports[0], "serving"), (ports[1], "serving"))
        assert [target["pipeline"] for target in told["targets"]] == [2, 1]
        (await running).is_whole([5, 5])
        await asyncio.sleep(0.3)
        assert len((await admin.targets())["targets"]) == 2

    run(ports, scenario, begin=1)


def test_a_target_that_is_never_healthy_is_never_used_and_the_old_one_goes_on(ports: list[int]) -> None:
    async def scenario(client: Client, admin: RouterAdmin) -> None:
        nobody = free_port()
        told = await admin.set_targets([at(1, nobody)], grace_s=0.0)
        assert [(target["state"], target["wanted"]) for target in told["targets"]] == [
            ("serving", False),
            ("starting", True),
        ]
        for number in range(1, 21):
            (await client.stream([number], max_tokens=3)).is_whole([number], 3)
        await until(admin, (ports[0], "serving"), (nobody, "starting"))
        # One that has never served is in nobody's way.
        await admin.set_targets([at(1, ports[1])])
        await until(admin, (ports[1], "serving"))
        await admin.set_targets([at(1, free_port())])
        told = await admin.set_targets([at(1, ports[1], weight=2.0)])
        assert [(target["port"], target["weight"]) for target in told["targets"] if target["wanted"]] == [
            (ports[1], 2.0)
        ]

    run(ports, scenario, begin=1)


def test_a_stream_without_another_home_stays_with_a_machine_that_goes(ports: list[int]) -> None:
    async def scenario(client: Client, admin: RouterAdmin) -> None:
        seen = Stream()
        running = asyncio.create_task(client.stream([5, 5], seen, max_tokens=200))
        await tokens([seen], 10)
        await admin.notice(1, 0.5)
        await asyncio.sleep(1.5)
        # It is long past the grace, and its tokens still come; a new pipeline then takes it over.
        assert len(seen.tokens) > 60
        await admin.set_targets([at(1, ports[1])], grace_s=0.0)
        await until(admin, (ports[1], "serving"))
        (await running).is_whole([5, 5], 200)

    run(ports, scenario, begin=1)


def test_shares_follow_weights_that_change(ports: list[int]) -> None:
    async def scenario(client: Client, admin: RouterAdmin) -> None:
        for weights in ((3.0, 1.0), (1.0, 4.0)):
            before = (await admin.targets())["revision"]
            targets = [at(n, port, weight=w) for n, (port, w) in enumerate(zip(ports, weights, strict=False), 1)]
            assert (await admin.set_targets(targets, revision=before))["revision"] == before + 1
            await served(ports[:2], client.session)
            limit = asyncio.Semaphore(20)

            async def one(number: int, limit: asyncio.Semaphore = limit) -> None:
                async with limit:
                    await client.stream([number], max_tokens=1)

            await asyncio.gather(*(one(number) for number in range(1, 401)))
            counts = await served(ports[:2], client.session)
            assert sum(counts) == 400
            assert counts[0] / 400 == pytest.approx(weights[0] / sum(weights), abs=0.05)

    run(ports, scenario)


def test_a_revision_that_is_not_the_present_one_is_refused(ports: list[int]) -> None:
    async def scenario(client: Client, admin: RouterAdmin) -> None:
        assert (await admin.set_targets([at(1, ports[0])], revision=0))["revision"] == 1
        with pytest.raises(RouterError, match="revision 0 is not the present one, 1") as caught:
            await admin.set_targets([at(1, ports[1])], revision=0)
        assert caught.value.status == 409
        assert (await admin.set_targets([at(1, ports[0])]))["revision"] == 2
        both = await asyncio.gather(
            *(admin.set_targets([at(1, ports[0])], revision=2) for _ in range(5)), return_exceptions=True
        )
        assert sum(isinstance(answer, RouterError) for answer in both) == 4

    run(ports, scenario)


def test_to_go_without_any_target_has_to_be_said(ports: list[int]) -> None:
    async def scenario(client: Client, admin: RouterAdmin) -> None:
        seen = Stream()
        running = asyncio.create_task(client.stream([5, 5], seen))
        await tokens([seen], 10)
        with pytest.raises(RouterError, match="'drain': true") as caught:
            await admin.set_targets([])
        assert caught.value.status == 409
        assert (await admin.targets())["revision"] == 0
        await admin.set_targets([], drain=True, grace_s=0.0)
        await until(admin, (ports[0], "leaving"))
        (await running).is_whole([5, 5])
        await until(admin)
        assert (await client.get("/health"))[0] == 503
        await admin.set_targets([at(1, ports[1])])
        (await client.stream([6], max_tokens=5)).is_whole([6], 5)

    run(ports, scenario, begin=1)


def test_routes_go_with_their_targets(ports: list[int]) -> None:
    async def scenario(client: Client, admin: RouterAdmin) -> None:
        big, small = at(1, ports[0], model="big"), at(2, ports[1], model="small")
        route = RouteSettings(query_type="code", model="big", fraction=1.0)
        assert (await admin.set_targets([big, small], routes=[route]))["routes"] == [route.model_dump()]
        await served(ports[:2], client.session)
        for _ in range(6):
            body = {"prompt": [1], "max_tokens": 1, "stream": True}
            async with client.session.post(
                f"{client.url}/v1/completions", json=body, headers={"X-Query-Type": "code"}
            ) as reply:
                await reply.read()
        assert await served(ports[:2], client.session) == [1, 0]
        with pytest.raises(RouterError, match="which no target serves") as caught:
            await admin.set_targets([small])
        assert caught.value.status == 400
        assert (await admin.set_targets([small], routes=[]))["routes"] == []

    run(ports, scenario)


HOSTILE: list[Any] = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"1",
    b"\xff\xfe",
    b'{"targets": NaN}',
    b"[" * 100_000,
    b'{"targets": ' + b"[" * 900 + b"]" * 900 + b"}",
    {},
    {"targets": {}},
    {"targets": [[]]},
    {"targets": [{"pipeline": 1}]},
    {"targets": [{"pipeline": 0, "address": "a", "port": 1}]},
    {"targets": [{"pipeline": 10**30, "address": "a", "port": 10**30}]},
    {"targets": [{"pipeline": 1, "address": "a/b", "port": 1}]},
    {"targets": [{"pipeline": 1, "address": "user@a", "port": 1}]},
    {"targets": [{"pipeline": 1, "address": "a\r\nX: y", "port": 1}]},
    {"targets": [{"pipeline": 1, "address": "a" * 300, "port": 1}]},
    {"targets": [{"pipeline": 1, "address": "a", "port": 1, "weight": -1}]},
    {"targets": [{"pipeline": 1, "address": "a", "port": 1, "key": 1}]},
    {"targets": [{"pipeline": 1, "address": "a", "port": 1}] * 2},
    {"targets": [{"pipeline": 1, "address": "a", "port": 1}], "grace_s": -1},
    {"targets": [{"pipeline": 1, "address": "a", "port": 1}], "grace_s": 1e300},
    {"targets": [{"pipeline": 1, "address": "a", "port": 1}], "revision": "x"},
    {"targets": [{"pipeline": 1, "address": "a", "port": 1}], "routes": [{"query_type": "a", "model": "b"}]},
    {"targets": [{"pipeline": n + 1, "address": f"a{n}", "port": 1} for n in range(5000)]},
]


def test_hostile_bodies_change_nothing_and_are_told_why(ports: list[int]) -> None:
    async def scenario(client: Client, admin: RouterAdmin) -> None:
        url, key = f"{client.url}/admin/targets", {"Authorization": f"Bearer {KEY}"}
        for body in HOSTILE:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {**key, "Content-Type": "application/json"}
            async with client.session.put(url, data=data, headers=headers) as reply:
                told = await reply.json()
                assert (reply.status, told["error"]["code"]) == (400, 400), data[:80]
                assert 0 < len(told["error"]["message"]) < 3000
        for data, kind, status in ((b" " * 5_000_000, "application/json", 413), (b"{}", "text/plain", 415)):
            async with client.session.put(url, data=BytesIO(data), headers={**key, "Content-Type": kind}) as reply:
                assert reply.status == status
        for window in ("x", "nan", "0", "-1", "1e9", "inf", ""):
            assert (await client.get(f"/admin/demand?window_s={window}", **key))[0] == 400
        for notice in ([], {"pipeline": True, "grace_s": 1}, {"pipeline": 1, "address": [], "grace_s": 1}):
            async with client.session.post(f"{client.url}/admin/notices", json=notice, headers=key) as reply:
                assert reply.status == 400
        told = await admin.targets()
        assert (told["revision"], [target["state"] for target in told["targets"]]) == (0, ["serving"] * 2)

    run(ports, scenario)


def test_the_administration_asks_for_its_key(ports: list[int]) -> None:
    async def scenario(client: Client, _: RouterAdmin) -> None:
        for key in ("wrong", "", "client"):
            async with RouterAdmin(client.url, key) as other:
                for asked in (other.targets(), other.demand(), other.set_targets([at(1, ports[1])])):
                    with pytest.raises(RouterError, match="no valid key") as caught:
                        await asked
                    assert caught.value.status == 401
        async with RouterAdmin(f"http://127.0.0.1:{free_port()}", KEY) as away:
            with pytest.raises(RouterError, match="does not answer") as caught:
                await away.targets()
            assert caught.value.status is None
        async with RouterAdmin(f"http://127.0.0.1:{ports[0]}", KEY) as engine:
            with pytest.raises(RouterError, match="no router's answer"):
                await engine.targets()

    run(ports, scenario)
    with pytest.raises(InvalidInputError, match="http://HOST:PORT"):
        RouterAdmin("10.0.0.1:8080", KEY)


def test_a_notice_says_which_of_two_engines_with_one_number(ports: list[int]) -> None:
    async def scenario(client: Client, admin: RouterAdmin) -> None:
        await admin.set_targets([at(1, ports[0]), at(1, ports[1])])
        await until(admin, (ports[0], "serving"), (ports[1], "serving"))
        with pytest.raises(RouterError, match="say which") as caught:
            await admin.notice(1, 5.0)
        assert caught.value.status == 409
        await admin.notice(1, 5.0, address=f"127.0.0.1:{ports[1]}")
        await until(admin, (ports[0], "serving"), (ports[1], "leaving"))
        await admin.notice(1, None, address=f"127.0.0.1:{ports[1]}")
        await until(admin, (ports[0], "serving"), (ports[1], "serving"))
        text = (await client.get("/metrics"))[1]
        for port in ports[:2]:
            labels = f'{{address="127.0.0.1:{port}",pipeline="pipeline-1"}}'
            assert f"hetplan_router_pipeline_serving{labels} 1.0" in text

    run(ports, scenario)


def test_a_restarted_router_goes_on_with_the_targets_that_were_put(ports: list[int], tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    kept = folder / "targets.json"
    seen = Stream()

    async def before(port: int) -> None:
        async with asyncio.timeout(60), process_client(port) as client, RouterAdmin(client.url, KEY) as admin:
            await admin.set_targets([at(7, ports[2])], grace_s=0.0)
            await until(admin, (ports[2], "serving"))
            asked = client.stream([8, 8], seen, request_id="mine")
            running = asyncio.create_task(asked)
            await tokens([seen], 30)
            # Another is about to take its place when the router goes.
            await admin.set_targets([at(7, free_port())], grace_s=0.0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def after(port: int) -> None:
        async with asyncio.timeout(60), process_client(port) as client, RouterAdmin(client.url, KEY) as admin:
            told = await admin.targets()
            assert told["revision"] == 2
            first = told["targets"][0]
            assert (first["port"], first["state"], first["wanted"]) == (ports[2], "serving", False)
            rest = await client.again("mine", len(seen.ids))
            assert seen.tokens + rest.tokens == tokens_of([8, 8], COUNT)
            await admin.set_targets([at(7, ports[3])], grace_s=0.0)
            await until(admin, (ports[3], "serving"))
            # What was removed is removed from the file as well.
            while len(Kept.from_json(kept.read_bytes()).leaving):
                await asyncio.sleep(0.05)

    options = {**QUICK, "journal_folder": str(folder)}
    with run_router(tmp_path, ports[:1], admin_key=KEY, **options) as (process, port):
        asyncio.run(before(port))
        process.kill()
    assert kept.stat().st_mode & 0o777 == 0o600
    with run_router(tmp_path, ports[:1], admin_key=KEY, **options) as (_, port):
        asyncio.run(after(port))
        lines = [json.loads(line) for line in (tmp_path / "router.log").read_text().splitlines()]
    restored = next(line for line in lines if line["event"] == "targets_restored")
    assert (restored["revision"], restored["instead_of"]) == (2, "router.json")


def test_a_file_of_targets_is_not_trusted(tmp_path: Path) -> None:
    file, path = TargetsFile(tmp_path), tmp_path / "targets.json"
    assert file.read() is None
    kept = Kept(revision=3, wanted=TargetSet(targets=(at(1, 9),)), routes=(), leaving=(at(1, 8),))
    file.write(kept)
    assert file.read() == kept
    path.chmod(0o644)
    with pytest.raises(InvalidInputError, match="mode 0600"):
        file.read()
    same = kept.model_dump(mode="json") | {"leaving": [at(1, 9).model_dump()]}
    for content in (b"", b"{}", b"\xff", b"[" * 10**6, b"null", json.dumps(same).encode(), b" " * (16 * 2**20 + 1)):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(InvalidInputError, match=r"Remove .*targets\.json to begin with"):
            file.read()
    path.unlink()
    path.symlink_to(tmp_path / "other")
    with pytest.raises(InvalidInputError, match="cannot read"):
        file.read()
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(InvalidInputError, match="mode 0600"):
        file.read()


def test_targets_that_cannot_be_kept_are_not_changed(ports: list[int], tmp_path: Path) -> None:
    folder = tmp_path / "journal"

    async def scenario(client: Client, admin: RouterAdmin) -> None:
        (folder / "targets.fresh").mkdir()
        with pytest.raises(RouterError, match="nothing has changed") as caught:
            await admin.set_targets([at(1, ports[1])])
        assert caught.value.status == 500
        assert (await admin.targets())["revision"] == 0
        (folder / "targets.fresh").rmdir()
        await admin.set_targets([at(1, ports[1])])

    run(ports, scenario, journal_folder=str(folder))


def test_demand_is_what_was_sent(ports: list[int]) -> None:
    async def scenario(client: Client, admin: RouterAdmin) -> None:
        async def send(count: int, prompt: int, answer: int, kind: dict[str, str], stream: bool) -> None:
            body = {"prompt": [7] * prompt, "max_tokens": answer, "stream": stream}
            for _ in range(count):
                async with client.session.post(f"{client.url}/v1/completions", json=body, headers=kind) as reply:
                    assert reply.status == 200
                    await reply.read()

        code = {"X-Query-Type": "code"}
        began = time.monotonic()
        await send(8, 5, 2, code, True)
        await send(2, 15, 8, code, False)
        await send(5, 100, 3, {}, True)
        chat = {"messages": [{"role": "user", "content": "w1 w2 w3"}], "max_tokens": 4}
        assert (await client.post(chat, "/v1/chat/completions", **{"X-Query-Type": "chat"}))[0] == 200
        seen = [Stream() for _ in range(3)]
        running = [asyncio.create_task(client.stream([9, 9], s)) for s in seen]
        await tokens(seen, 3)
        assert (await client.post({"prompt": [1]}, **code))[0] == 429
        told = await admin.demand(60.0)
        assert told["covered_s"] >= time.monotonic() - began - BUCKET_S
        lines = {line["query_type"]: line for line in told["demand"]}
        assert set(lines) == {"code", "chat", None}
        assert {line["model"] for line in told["demand"]} == {"tiny"}
        assert lines["code"]["requests_per_s"] == pytest.approx(11 / told["covered_s"])

        def numbers(kind: str | None) -> list[Any]:
            names = ("requests", "rejected", "ended", "in_flight", "mean_input_tokens", "mean_output_tokens")
            return [lines[kind][name] for name in (*names, "p90_input_tokens", "p90_output_tokens")]

        assert numbers("code") == [11, 1, 10, 0, 7.0, 3.2, 15, 8]
        assert numbers("chat") == [1, 0, 1, 0, 3.0, 4.0, 3, 4]
        assert numbers(None)[:6] == [8, 0, 5, 3, 100.0, 3.0]
        assert 100 <= lines[None]["p90_input_tokens"] <= 112
        text = (await client.get("/metrics"))[1]
        assert 'hetplan_router_demand_mean_output_tokens{model="tiny",query_type="code"} 3.2' in text
        assert 'hetplan_router_demand_in_flight{model="tiny",query_type=""} 3.0' in text
        await asyncio.gather(*running)

    run(ports, scenario, max_in_flight=3)


def test_the_ring_forgets_and_its_lines_are_bounded() -> None:
    now = 1000.0
    demand = Demand(lambda kind: kind == "routed", clock=lambda: now)
    for number in range(3 * MAX_LINES):
        demand.asked("m", f"kind-{number}")
    demand.asked("m", "routed")
    _, lines = demand.window(60.0)
    assert len(lines) == MAX_LINES + 2
    by_kind = {line.query_type: line.requests for line in lines}
    assert by_kind[OTHER] == 2 * MAX_LINES
    assert by_kind["routed"] == 1
    now += 60.0
    demand.asked("m", "kind-0")
    covered_s, lines = demand.window(30.0)
    assert [(line.query_type, line.requests) for line in lines] == [("kind-0", 1)]
    assert 25.0 <= covered_s <= 30.0
    now += BUCKETS * BUCKET_S
    assert demand.window(60.0)[1] == []
    demand.asked("m", "another")
    assert [line.query_type for line in demand.window(60.0)[1]] == ["another"]


ENGINES = [at(1 + n // 2 % 3, 1 + n, model="ab"[n // 6]) for n in range(12)]
STEPS = st.one_of(
    st.tuples(st.just("put"), st.sets(st.sampled_from(range(12)), min_size=1, max_size=5)),
    st.tuples(st.sampled_from(["found", "lost", "end"]), st.integers(0, 11)),
    st.tuples(st.just("begin"), st.sampled_from(["a", "b"])),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_any_targets_one_after_another_end_with_the_last(steps: list[tuple[str, Any]]) -> None:
    """And whenever a pipeline serves, a change leaves one that serves, also of each model that is still wanted."""

    async def whole() -> None:
        router = RouterSettings(model="a", targets=tuple(ENGINES[:2]))
        targets = Targets(router, cast(Any, None), lambda _name, _values: None)
        streams: list[tuple[str, Target]] = []
        last = {0, 1}
        targets.want(router.targets, ())

        def serving() -> set[str]:
            return {target.model for target in targets.all if target.state == "serving"}

        async def settle() -> None:
            targets.retire()
            for number, (model, home) in enumerate(streams):
                heir = targets.choose(model) if home.retired else None
                streams[number] = (model, heir or home)
            homes = {home for _, home in streams}
            for target in [target for target in targets.all if target.retired and target not in homes]:
                await targets.drop(target)
            assert homes <= set(targets.all)

        for what, value in steps:
            before = serving()
            there = targets.all[value % len(targets.all)] if isinstance(value, int) else None
            if what == "put":
                last = value
                targets.want([ENGINES[number] for number in sorted(value)], ())
            elif what == "found" and there is not None:
                targets.found(there)
            elif what == "lost" and there is not None:
                targets.lost(there, "test")
            elif what == "begin" and (home := targets.choose(value)) is not None:
                assert home.state == "serving"
                streams.append((value, home))
            elif what == "end" and streams:
                streams.pop(value % len(streams))
            await settle()
            assert {t.settings.port - 1 for t in targets.all if t.wanted} == last
            if what in ("put", "found"):
                assert serving() >= before & {ENGINES[number].model for number in last}
                assert bool(serving()) >= bool(before)
        for target in targets.all:
            if target.wanted:
                targets.found(target)
        await settle()
        assert all(target.state == "serving" for target in targets.all if target.wanted)
        streams.clear()
        await settle()
        assert {target.settings.port - 1 for target in targets.all} == last

    asyncio.run(whole())
