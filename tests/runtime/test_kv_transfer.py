"""What is refused before an engine is asked, and what happens to caches that lie in a shared folder already."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
from pathlib import Path

import aiohttp
import pytest

from hetplan.errors import InvalidInputError
from hetplan.runtime.kv_transfer import KvTransfer, Nixl, Sent, SharedStorage, TransferError

BLOCK, LAYERS = 16, 3
# Nothing listens there.
NOBODY = "http://127.0.0.1:9"
IDS = list(range(100, 140))


def send(transfer: KvTransfer, token_ids: list[int]) -> Sent:
    async def sending() -> Sent:
        async with aiohttp.ClientSession() as session:
            return await transfer.send(session, NOBODY, token_ids, model="m", timeout_s=5.0)

    return asyncio.run(sending())


def written(storage: Path, token_ids: list[int], *, tokens: int = 32, layers: int = LAYERS, cut: int = 0) -> Path:
    """A folder as the connector writes it for forty ids, or a part of one."""
    folder = storage / hashlib.md5(struct.pack("<32q", *token_ids[:32])).hexdigest()
    folder.mkdir()
    size = tokens * 2 * 4
    header = json.dumps({"kv_cache": {"dtype": "F32", "shape": [tokens, 2], "data_offsets": [0, size]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(size)
    for layer in range(layers):
        (folder / f"layer.{layer}.safetensors").write_bytes(content[: len(content) - cut])
    return folder


def test_a_cache_that_is_whole_is_not_sent_again(tmp_path: Path) -> None:
    folder = written(tmp_path, IDS)
    sent = send(SharedStorage(tmp_path, BLOCK, LAYERS), IDS)
    assert (sent.tokens, sent.params) == (32, None)
    assert sent.bytes == sum(file.stat().st_size for file in folder.iterdir())


@pytest.mark.parametrize("part", [{"layers": 2}, {"tokens": 16}, {"cut": 1}, {"cut": 300}, {"layers": 0}])
def test_a_part_of_a_cache_is_removed_before_an_engine_dies_of_it(tmp_path: Path, part: dict[str, int]) -> None:
    folder = written(tmp_path, IDS, **part)
    with pytest.raises(TransferError, match="did not send"):
        send(SharedStorage(tmp_path, BLOCK, LAYERS), IDS)
    assert not folder.exists()


def test_what_was_sent_is_forgotten(tmp_path: Path) -> None:
    folder = written(tmp_path, IDS)
    transfer = SharedStorage(tmp_path, BLOCK, LAYERS)
    asyncio.run(transfer.forget(IDS))
    assert not folder.exists()
    asyncio.run(transfer.forget(IDS))


@pytest.mark.parametrize("count", [0, 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 5 * BLOCK + 1])
def test_lengths_that_the_connector_writes_and_does_not_find_are_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(TransferError, match=f"{count} tokens in blocks of 16 cannot be sent"):
        send(SharedStorage(tmp_path, BLOCK, LAYERS), list(range(count)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("transfer", ["shared", "nixl"])
def test_a_source_that_is_gone_is_a_transfer_error(tmp_path: Path, transfer: str) -> None:
    with pytest.raises(TransferError, match=r"http://127.0.0.1:9 did not send: .*Recompute"):
        send(Nixl() if transfer == "nixl" else SharedStorage(tmp_path, BLOCK, LAYERS), IDS)


def test_a_folder_that_is_not_safe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="absolute path"):
        SharedStorage(Path("relative"), BLOCK, LAYERS)
    with pytest.raises(InvalidInputError, match="absolute path"):
        SharedStorage(tmp_path / "absent", BLOCK, LAYERS)
    with pytest.raises(InvalidInputError, match="at least 1"):
        SharedStorage(tmp_path, 0, LAYERS)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(InvalidInputError, match="everybody may write"):
        SharedStorage(open_to_all, BLOCK, LAYERS)
