"""Caches that move between two real engines through a shared folder: the same tokens, fewer of them computed."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from caches import MODEL, SOURCE, TARGET, gained, prompt, resumed, say, send, started, tokens_by_source
from servers import Cluster, complete

from hetplan.runtime.kv_transfer import Sent, SharedStorage, TransferError
from hetplan.runtime.recovery import RecoveryCosts, TransferCost
from hetplan.runtime.router.app import Router
from hetplan.runtime.router.settings import RouterSettings

# vLLM's block on a CPU; layers of the model; its bytes: keys and values of four heads of 32 in fp32.
BLOCK, LAYERS, BYTES_PER_TOKEN = 128, 8, 8 * 2 * 4 * 32 * 4


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def shared(
    storage: Path, environment: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("shared") / "out"
    yield from started(folder, environment, model, {}, kv_connector="ExampleConnector", kv_storage=storage)


@pytest.mark.parametrize(("prompt_tokens", "cut"), [(300, 90), (700, 120)])
def test_a_sent_cache_is_read_and_the_answer_goes_on(
    shared: Cluster, storage: Path, prompt_tokens: int, cut: int
) -> None:
    transfer = SharedStorage(storage, BLOCK, LAYERS)
    ids = prompt(prompt_tokens, seed=prompt_tokens)
    whole = complete(SOURCE, ids, 200)
    so_far = ids + whole[:cut]
    sent = send(transfer, so_far)
    assert sent.tokens == (len(so_far) - 1) // BLOCK * BLOCK
    # Bytes of the cache, and a small header in each layer's file.
    assert sent.bytes is not None
    assert 0 <= sent.bytes - sent.tokens * BYTES_PER_TOKEN <= LAYERS * 200
    before = tokens_by_source(TARGET)
    rest, seconds = resumed(so_far, 200 - cut, sent.params)
    assert rest == whole[cut:]
    assert gained(before, "external_kv_transfer") == sent.tokens
    assert gained(before, "local_compute") == len(so_far) - sent.tokens
    say(f"{len(so_far)} tokens: {sent.bytes} bytes sent in {sent.seconds:.3f} s, {200 - cut} more in {seconds:.3f} s")
    asyncio.run(transfer.forget(so_far))
    assert rest[:20] == resumed(so_far, 20, None)[0]


def test_many_caches_at_once(shared: Cluster, storage: Path) -> None:
    transfer = SharedStorage(storage, BLOCK, LAYERS)
    prompts = [prompt(400, seed=index) for index in range(4)]
    wholes = [complete(SOURCE, ids, 40) for ids in prompts]
    running = [ids + whole[:20] for ids, whole in zip(prompts, wholes, strict=True)]

    async def all_sent() -> list[Sent]:
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{SOURCE}"
            sends = [transfer.send(session, url, ids, model=MODEL, timeout_s=60.0) for ids in running]
            return await asyncio.gather(*sends)

    before = tokens_by_source(TARGET)
    assert [sent.tokens for sent in asyncio.run(all_sent())] == [384] * 4
    for ids, whole in zip(running, wholes, strict=True):
        assert resumed(ids, 20, None)[0] == whole[20:]
    assert gained(before, "external_kv_transfer") == 4 * 384


def test_a_part_is_written_anew(shared: Cluster, storage: Path) -> None:
    """A writer that died in the middle leaves a part, which would end the engine that reads it."""
    transfer = SharedStorage(storage, BLOCK, LAYERS)
    ids = prompt(500, seed=5)
    whole = complete(SOURCE, ids, 60)
    so_far = ids + whole[:30]
    known = set(storage.iterdir())
    send(transfer, so_far)
    (folder,) = set(storage.iterdir()) - known
    files = sorted(folder.iterdir())
    files[0].unlink()
    os.truncate(files[1], files[1].stat().st_size // 2)
    assert send(transfer, so_far).tokens == 512
    assert resumed(so_far, 30, None)[0] == whole[30:]


def test_changed_bytes_are_not_noticed(shared: Cluster, storage: Path) -> None:
    """vLLM's example has no checksum: who may write in the folder may change answers. A limit that is documented."""
    transfer = SharedStorage(storage, BLOCK, LAYERS)
    ids = prompt(600, seed=6)
    whole = complete(SOURCE, ids, 80)
    so_far = ids + whole[:50]
    known = set(storage.iterdir())
    sent = send(transfer, so_far)
    (folder,) = set(storage.iterdir()) - known
    for file in folder.iterdir():
        content = file.read_bytes()
        start = 8 + struct.unpack("<Q", content[:8])[0]
        numbers = struct.unpack(f"<{(len(content) - start) // 4}f", content[start:])
        file.write_bytes(content[:start] + struct.pack(f"<{len(numbers)}f", *reversed(numbers)))
    assert send(transfer, so_far).bytes == sent.bytes
    assert resumed(so_far, 30, None)[0] != whole[50:]


def test_a_source_without_the_connector_sends_nothing(shared: Cluster, tmp_path: Path) -> None:
    """It answers, but writes elsewhere than asked."""
    with pytest.raises(TransferError, match="did not write all 256 tokens of all 8 layers"):
        send(SharedStorage(tmp_path, BLOCK, LAYERS), prompt(300, seed=9))


def slow_engines(transfer: TransferCost | None = None) -> RecoveryCosts:
    """A second a token, and five to compute a thousand anew."""
    return RecoveryCosts(
        context_tokens=(100, 1000),
        recompute_s=(0.5, 5.0),
        recompute_source="test",
        step_s=1.0,
        step_source="test",
        transfer=transfer,
    )


def test_a_notice_to_the_router_sends_the_cache_of_a_running_stream(
    shared: Cluster, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predicted to be quicker than computing it anew, the cache goes along; the client sees the answer go on."""
    # Six blocks and a few tokens, so that no token at which the notice may come is one above whole blocks.
    ids = prompt(6 * BLOCK + 10, seed=11)
    whole = complete(SOURCE, ids, 200)

    async def run() -> tuple[list[int], dict[str, int]]:
        targets = [{"pipeline": n, "address": "127.0.0.1", "port": port} for n, port in ((1, SOURCE), (2, TARGET))]
        link = {"layers": LAYERS, "block_tokens": BLOCK, "cache_bytes_per_token": BYTES_PER_TOKEN, "bytes_per_s": 1e12}
        settings = {"kv_transfer": {"storage": str(storage), "latency_s": 0.0, **link}, "model": MODEL}
        router = Router(RouterSettings.from_dict({"targets": targets, **settings}), admin_key="root")
        runner = web.AppRunner(router.application(), handler_cancellation=True)
        await runner.setup()
        # Not those of this host, whose engines may be done before the notice is dealt with.
        monkeypatch.setattr(router._tools.costs, "costs", slow_engines)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        tokens: list[int] = []
        counts: dict[str, int] = {}
        try:
            async with aiohttp.ClientSession() as session:
                while True:
                    async with session.get(f"{url}/health") as told:
                        if (await told.json())["status"] == "ok":
                            break
                    await asyncio.sleep(0.2)
                body = {"prompt": ids, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
                body |= {"stream": True, "return_token_ids": True}
                async with session.post(f"{url}/v1/completions", json=body) as reply:
                    async for line in reply.content:
                        if line.startswith(b"data: {"):
                            tokens += json.loads(line[6:])["choices"][0]["token_ids"]
                            if len(tokens) > 20 and not counts:
                                on = next(t for t in router._tools.targets.all if t.in_flight)
                                notice = {"pipeline": on.settings.pipeline, "grace_s": 4.0}
                                key = {"Authorization": "Bearer root"}
                                async with session.post(f"{url}/admin/notices", json=notice, headers=key) as done:
                                    counts.update(await done.json())
        finally:
            await runner.cleanup()
        return tokens, counts

    before = {port: tokens_by_source(port).get("external_kv_transfer", 0.0) for port in (SOURCE, TARGET)}
    tokens, counts = asyncio.run(run())
    assert tokens == whole
    assert (counts["stay"], counts["recompute"], counts["transfer"]) == (0, 0, 1)
    loaded = {port: tokens_by_source(port).get("external_kv_transfer", 0.0) - before[port] for port in before}
    say(f"tokens read from the other engine's cache: {max(loaded.values()):.0f} of {len(ids) + 20} and more")
    assert max(loaded.values()) >= 6 * BLOCK
