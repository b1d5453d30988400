"""The router between clients and engines that fail on demand: what each client sees, token by token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from recorded_stream import recorded_stream, text_of, tokens_of
from router_client import COUNT, RATE, Client, Stream, routed

KINDS = ("eof", "close", "reset", "error_event", "http500", "stall")


@pytest.fixture(scope="module")
def ports() -> Iterator[list[int]]:
    with recorded_stream(tokens_per_s=RATE) as (_, one), recorded_stream(tokens_per_s=RATE) as (_, two):
        yield [one, two]


def counted(content: Any) -> tuple[int, int, int]:
    usage = content["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def run(ports: list[int], scenario: Callable[[Client], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), routed(ports, **options) as client:
            for port in ports:
                await client.fail(port, "none")
            await client.healthy(len(ports))
            await scenario(client)
            for port in ports:
                await client.fail(port, "none")

    asyncio.run(whole())


@pytest.mark.parametrize("kind", KINDS)
def test_streams_outlive_an_engine(ports: list[int], kind: str) -> None:
    async def scenario(client: Client) -> None:
        prompts = [[number, 7, 7] for number in range(1, 9)]
        seen = [Stream() for _ in prompts]
        streams = [client.stream(prompt, s) for prompt, s in zip(prompts, seen, strict=True)]
        running = asyncio.gather(*streams)
        while min(len(s.tokens) for s in seen) < 20:
            await asyncio.sleep(0.01)
        assert await client.fail(ports[0], kind) >= 1
        for prompt, stream in zip(prompts, await running, strict=True):
            stream.is_whole(prompt)
        lost = [values for name, values in client.events if name == "pipeline_lost"]
        assert lost[0]["pipeline"] == 1

    run(ports, scenario)


def test_each_engine_in_turn_and_none_for_a_while(ports: list[int]) -> None:
    async def scenario(client: Client) -> None:
        seen = Stream()
        running = asyncio.create_task(client.stream([5, 5], seen))
        for count, port in ((20, 0), (20, 1), (40, 0), (40, 1)):
            while len(seen.tokens) < count:
                await asyncio.sleep(0.01)
            if count == 40:
                await client.fail(ports[port], "http500")
            else:
                await client.fail(ports[port], "close")
        await asyncio.sleep(0.5)
        assert not running.done()
        assert (await client.get("/health"))[0] == 503
        await client.fail(ports[1], "none")
        (await running).is_whole([5, 5])
        assert seen.comments > 0

    run(ports, scenario)


def test_nobody_comes_back_and_the_client_is_told(ports: list[int]) -> None:
    async def scenario(client: Client) -> None:
        await client.fail(ports[0], "http500")
        while (await client.get("/health"))[0] == 200:
            await asyncio.sleep(0.05)
        seen = await client.stream([5, 5])
        assert seen.errors[0]["error"]["code"] == 503
        assert seen.comments > 0
        status, answer = await client.post({"prompt": [5], "max_tokens": 3})
        assert (status, answer["error"]["code"]) == (503, 503)

    run(ports[:1], scenario, max_wait_s=0.6)


def test_what_kills_engines_fails_alone(ports: list[int]) -> None:
    """Two attempts that die without a token end a request, before it has killed every engine."""

    async def scenario(client: Client) -> None:
        for port in ports:
            await client.fail(port, "stall")
        asked = asyncio.create_task(client.stream([9]))
        left = list(ports)
        while left:
            for port in list(left):
                async with client.session.get(f"http://127.0.0.1:{port}/running") as reply:
                    if (await reply.json())["running"]:
                        await client.fail(port, "close")
                        left.remove(port)
            await asyncio.sleep(0.01)
        seen = await asked
        assert seen.errors[0]["error"]["code"] == 502
        assert "in a row" in seen.errors[0]["error"]["message"]
        (await client.stream([8])).is_whole([8])

    run(ports, scenario)


def test_a_client_comes_back_for_the_rest(ports: list[int]) -> None:
    async def scenario(client: Client) -> None:
        seen = Stream()
        running = asyncio.create_task(client.stream([6, 6], seen, request_id="mine"))
        while len(seen.tokens) < 30:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        while client.router._runs:
            await asyncio.sleep(0.01)
        # It had a few more than it knows of: it says what it holds, and gets the rest once.
        held = 25
        rest = await client.again("mine", held)
        assert rest.ids == list(range(held + 1, COUNT + 1))
        assert seen.tokens[:held] + rest.tokens == tokens_of([6, 6], COUNT)
        assert rest.done
        # After the end too, for a while; as often as it likes.
        last = await client.again("mine", COUNT - 1)
        assert (last.tokens, last.finish, last.done) == (tokens_of([6, 6], COUNT)[-1:], "length", True)
        status, answer = await client.get("/v1/requests/mine", **{"Last-Event-ID": "151"})
        assert status == 400
        assert "0 to 150" in answer["error"]["message"]
        assert (await client.get("/v1/requests/other"))[0] == 404
        status, answer = await client.post({"prompt": [6]}, **{"X-Request-Id": "mine"})
        assert status == 409

    run(ports, scenario)


def test_a_second_connection_takes_the_stream_over(ports: list[int]) -> None:
    async def scenario(client: Client) -> None:
        seen = Stream()
        first = asyncio.create_task(client.stream([6, 6], seen, request_id="mine"))
        while len(seen.tokens) < 30:
            await asyncio.sleep(0.01)
        rest = await client.again("mine", len(seen.tokens))
        assert rest.finish == "length"
        await asyncio.gather(first, return_exceptions=True)
        assert rest.tokens == tokens_of([6, 6], COUNT)[rest.ids[0] - 1 :]
        assert not seen.done

    run(ports, scenario)


def test_a_router_that_was_killed_goes_on_from_its_journal(ports: list[int], tmp_path: Path) -> None:
    folder = str(tmp_path / "journal")
    seen, whole = Stream(), Stream()

    async def before(client: Client) -> None:
        one = asyncio.create_task(client.stream([8, 8], seen, request_id="mine"))
        two = asyncio.create_task(client.stream([9, 9], whole, request_id="other", max_tokens=20))
        while len(seen.tokens) < 50:
            await asyncio.sleep(0.01)
        await two
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)

    async def after(client: Client) -> None:
        rest = await client.again("mine", len(seen.ids))
        assert seen.tokens + rest.tokens == tokens_of([8, 8], COUNT)
        assert seen.ids + rest.ids == list(range(1, COUNT + 1))
        again = await client.again("other", 0)
        again.is_whole([9, 9], 20)

    run(ports, before, journal_folder=folder)
    run(ports, after, journal_folder=folder, journal_fsync=True)


def test_a_client_that_leaves_frees_its_engine(ports: list[int]) -> None:
    async def running(client: Client) -> int:
        total = 0
        for port in ports:
            async with client.session.get(f"http://127.0.0.1:{port}/running") as reply:
                total += (await reply.json())["running"]
        return total

    async def scenario(client: Client) -> None:
        seen = [Stream() for _ in range(10)]
        tasks = [asyncio.create_task(client.stream([i + 1], s)) for i, s in enumerate(seen)]
        while min(len(s.tokens) for s in seen) < 10:
            await asyncio.sleep(0.01)
        assert await running(client) == 10
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while await running(client):
            await asyncio.sleep(0.05)
        assert client.router._runs == {}

    run(ports, scenario)


def test_a_notice_moves_streams_and_nothing_is_lost(ports: list[int]) -> None:
    async def scenario(client: Client) -> None:
        prompts = [[number, 3] for number in range(1, 7)]
        seen = [Stream() for _ in prompts]
        streams = [client.stream(p, s) for p, s in zip(prompts, seen, strict=True)]
        running = asyncio.gather(*streams)
        while min(len(s.tokens) for s in seen) < 20:
            await asyncio.sleep(0.01)
        admin = {"Authorization": "Bearer root"}
        body = {"pipeline": 1, "grace_s": 2.2}
        assert (await client.post(body, "/admin/notices"))[0] == 401
        status, counts = await client.post(body, "/admin/notices", **admin)
        assert (status, counts["recompute"], counts["transfer"]) == (200, 3, 0)
        while (health := (await client.get("/health"))[1]["pipelines"])[0]["in_flight"]:
            await asyncio.sleep(0.05)
        assert [pipeline["leaving"] for pipeline in health] == [True, False]
        assert not running.done()
        for prompt, stream in zip(prompts, await running, strict=True):
            stream.is_whole(prompt)
        assert all(name != "pipeline_lost" for name, _ in client.events)
        # The notice is taken back.
        assert (await client.post({"pipeline": 1, "grace_s": None}, "/admin/notices", **admin))[0] == 200
        assert (await client.post({"pipeline": 7, "grace_s": 1}, "/admin/notices", **admin))[0] == 400
        assert (await client.post({"pipeline": 1, "grace_s": "soon"}, "/admin/notices", **admin))[0] == 400

    run(ports, scenario, keys={"admin_key": "root"})


def test_turns_follow_weights_and_routes(ports: list[int]) -> None:
    async def scenario(client: Client) -> None:
        choose = client.router._tools.targets
        picks = [choose.choose(None) for _ in range(40)]
        assert [p.settings.pipeline for p in picks if p is not None].count(1) == 30
        # No target comes up twice in a row more often than its weight asks for.
        assert {p.settings.pipeline for p in picks[:4] if p is not None} == {1, 2}

    run(
        ports,
        scenario,
        targets=[
            {"pipeline": 1, "address": "127.0.0.1", "port": ports[0], "weight": 3.0},
            {"pipeline": 2, "address": "127.0.0.1", "port": ports[1], "weight": 1.0},
        ],
    )


def test_query_types_are_sent_by_their_routes(ports: list[int]) -> None:
    async def scenario(client: Client) -> None:
        targets = client.router._tools.targets
        shares = [targets.routed(None, "code") for _ in range(40)]
        assert (shares.count("big"), shares.count("small")) == (10, 30)
        assert targets.routed("big", "code") == "big"
        assert targets.routed(None, "other") is None
        with pytest.raises(KeyError):
            targets.routed("unknown", None)
        status, answer = await client.post({"prompt": [1], "model": "unknown"})
        assert status == 404
        assert "big" in answer["error"]["message"]

    run(
        ports,
        scenario,
        targets=[
            {"pipeline": 1, "address": "127.0.0.1", "port": ports[0], "model": "big"},
            {"pipeline": 2, "address": "127.0.0.1", "port": ports[1], "model": "small"},
        ],
        routes=[
            {"query_type": "code", "model": "big", "fraction": 0.25},
            {"query_type": "code", "model": "small", "fraction": 0.75},
        ],
    )


def test_keys_are_asked_for_and_requests_belong_to_theirs(ports: list[int]) -> None:
    async def scenario(client: Client) -> None:
        one, two = {"Authorization": "Bearer one"}, {"Authorization": "bearer two"}
        body = {"prompt": [1], "max_tokens": 2}
        for wrong in ({}, {"Authorization": "Bearer three"}, {"Authorization": "one"}, {"Authorization": "Basic one"}):
            status, answer = await client.post(body, **wrong)
            assert (status, answer["error"]["code"]) == (401, 401)
        assert (await client.post(body, **one, **{"X-Request-Id": "a"}))[0] == 200
        assert (await client.post(body, **two))[0] == 200
        assert (await client.get("/v1/requests/a", **one))[0] == 200
        assert (await client.get("/v1/requests/a", **two))[0] == 404
        assert (await client.get("/v1/models"))[0] == 401
        assert (await client.get("/health"))[0] == 200
        assert (await client.get("/v1/models", **one))[0] == 200
        # Without its own key the administration is closed, whatever a client's key is.
        assert (await client.post({"pipeline": 1, "grace_s": 1}, "/admin/notices", **one))[0] == 401

    run(ports, scenario, keys={"api_keys": ("one", "two")})


def test_too_many_and_too_much_are_refused_with_the_limit(ports: list[int]) -> None:
    async def scenario(client: Client) -> None:
        seen = [Stream() for _ in range(3)]
        tasks = [asyncio.create_task(client.stream([i + 1], s)) for i, s in enumerate(seen)]
        while min(len(s.tokens) for s in seen) < 1:
            await asyncio.sleep(0.01)
        status, answer = await client.post({"prompt": [1]})
        assert (status, answer["error"]["type"]) == (429, "RateLimitError")
        await asyncio.gather(*tasks)
        status, answer = await client.post({"prompt": "x" * 5000})
        assert (status, "2048" in answer["error"]["message"]) == (413, True)
        status, answer = await client.post({"prompt": [1] * 300, "best_of": 4})
        assert (status, answer["error"]["param"]) == (400, "best_of")

    run(ports, scenario, max_in_flight=3, max_body_bytes=2048)


def test_an_engines_refusal_reaches_the_client(ports: list[int]) -> None:
    async def scenario(client: Client) -> None:
        status, answer = await client.post({"prompt": [1], "max_tokens": 10**6})
        assert status == 400
        assert "are over" in answer["error"]["message"]
        seen = await client.stream([1], max_tokens=10**6)
        assert seen.status == 400
        assert (await client.post({"prompt": [1], "max_tokens": 3}))[0] == 200

    run(ports, scenario)


def test_choices_come_side_by_side_and_are_put_together(ports: list[int]) -> None:
    async def scenario(client: Client) -> None:
        body = {"prompt": [[4, 4], [5, 5]], "n": 2, "max_tokens": 30, "return_token_ids": True, "logprobs": 1}
        running = asyncio.create_task(client.post(body))
        await asyncio.sleep(0.15)
        await client.fail(ports[0], "close")
        status, answer = await running
        assert status == 200
        choices = answer["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        for choice, prompt in zip(choices, [[4, 4], [4, 4], [5, 5], [5, 5]], strict=True):
            assert choice["token_ids"] == tokens_of(prompt, 30)
            offsets = choice["logprobs"]["text_offset"]
            words = choice["logprobs"]["tokens"]
            assert offsets == [len("".join(words[:i])) for i in range(30)]
        assert counted(answer) == (4, 120, 124)

    run(ports, scenario)


def test_a_chat_is_rendered_once_and_goes_on(ports: list[int]) -> None:
    async def scenario(client: Client) -> None:
        body = {
            "messages": [{"role": "user", "content": "w12 w13"}],
            "max_tokens": 60,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        seen: list[Any] = []
        async with client.session.post(f"{client.url}/v1/chat/completions", json=body) as reply:
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    seen.append(json.loads(line[6:]))
                    if len(seen) == 20:
                        for port in ports:
                            await client.fail(port, "close")
        assert seen[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in seen[:-1])
        assert text == text_of(tokens_of([12, 13], 60))
        assert counted(seen[-1]) == (2, 60, 62)
        status, answer = await client.post({**body, "stream": False, "stream_options": None}, "/v1/chat/completions")
        message = answer["choices"][0]["message"]
        assert (status, message["role"], message["content"]) == (200, "assistant", text)

    run(ports, scenario)


def test_draining_lets_running_streams_end_and_takes_no_new_one(ports: list[int]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            async with routed(ports) as client:
                client.session = session
                await client.healthy(2)
                seen = Stream()
                running = asyncio.create_task(client.stream([2, 2], seen))
                while len(seen.tokens) < 10:
                    await asyncio.sleep(0.01)
            (await running).is_whole([2, 2])
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.post({"prompt": [1]})

    asyncio.run(whole())


def test_nothing_of_a_request_is_in_metrics_or_events(ports: list[int]) -> None:
    async def scenario(client: Client) -> None:
        secret = "w777 my secret"
        status, answer = await client.post({"prompt": secret, "max_tokens": 3})
        assert status == 200
        status, text = await client.get("/metrics")
        assert 'hetplan_router_requests_total{endpoint="completions",outcome="ok"} 1.0' in text
        told = text + json.dumps(client.events)
        assert "secret" not in told
        assert answer["choices"][0]["text"].strip() not in told

    run(ports, scenario)
