"""Sending a running request's cache to another engine, through vLLM's own KV connectors.

The request is ended on its source first. `KvTransfer.send` then asks the source for one token after all ids so far
(prompt and answer), which makes the source write the cache of these ids or hold it ready; most of it is in its prefix
cache, so this computes little. The same ids then go to the target, with ``Sent.params`` as ``kv_transfer_params``.
If anything fails, the ids go to the target without: it computes the cache anew, and the answer is the same.

``kv_transfer_params`` of a client must never reach an engine. They name the host and port that an engine connects to
and the blocks that it reads, and vLLM checks neither: blocks of one request were taken for another's, gave wrong
tokens, and stayed in the prefix cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Protocol

import aiohttp
from pydantic import Field

from hetplan.base import Frozen
from hetplan.errors import HetplanError, InvalidInputError

# A safetensors header of one tensor takes about a hundred bytes.
_MAX_HEADER_BYTES = 65_536
# One token, usage and transfer parameters; block ids of a long context take a few hundred kilobytes.
_MAX_ANSWER_BYTES = 16 * 2**20


class TransferError(HetplanError):
    """A cache was not sent; recompute it."""


class Sent(Frozen):
    """What `KvTransfer.send` did.

    ``tokens`` of the ids need not be computed on the target, ``bytes`` were written (None where the connector does not
    say), ``seconds`` it took. ``params`` go with the resubmission as ``kv_transfer_params``; None for none.
    """

    tokens: int = Field(ge=0)
    bytes: int | None
    seconds: float = Field(ge=0)
    params: dict[str, Any] | None = None


class KvTransfer(Protocol):
    """A way to send caches."""

    name: ClassVar[str]

    async def send(
        self,
        session: aiohttp.ClientSession,
        source_url: str,
        token_ids: Sequence[int],
        *,
        model: str,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Sent:
        """Have the source make the cache of ``token_ids`` ready for another engine.

        Parameters
        ----------
        session : aiohttp.ClientSession
        source_url : str
            Base address of the engine that has the cache, such as ``http://10.0.0.7:8000``.
        token_ids : sequence of int
            Prompt and answer so far: exactly what will be resubmitted.
        model : str
            The name that the source serves.
        timeout_s : float
            Seconds after which the send is given up.
        headers : mapping, optional
            Such as the engine's key.

        Raises
        ------
        TransferError
            If the cache was not sent, for whatever reason.
        """
        ...

    async def forget(self, token_ids: Sequence[int]) -> None:
        """Remove what `send` left behind; call it once the target gave a token, or the request is over."""
        ...


class SharedStorage:
    """vLLM's ExampleConnector: files in a folder that both engines and this process see.

    It is vLLM's example of a connector, and fit for trials only. Found on vLLM 0.32.0, and what is done here about it:

    - It finds a cache by the whole block-aligned prompt, so the target must get exactly the ids that were sent.
    - One length in every block (1 token above a multiple) is written under one name and looked for under another: such
      ids are refused before anything is written. If the store holds the prompt less one block, that length kills an
      engine, whoever sends it; so does a prompt of one token.
    - It finds a cache as soon as its folder exists. An engine that meets one with a missing, short or cut file dies of
      it. Folders are therefore checked before and after a send, and removed where they are not whole.
    - A source that is still writing when `send` gives up can leave a part behind, which nobody sees. Give it time.
    - A prompt that was prefilled in chunks is written short. Engines need ``--no-enable-chunked-prefill``, or any
      client's long prompt leaves a folder that kills the next engine that reads it.
    - Every prompt of every request is written, and nothing is ever removed but by `forget`.
    - Bytes are not checked: a changed number gives wrong tokens without a word. Names are hashes of token ids alone:
      two models, or two ranks of a tensor-parallel stage, overwrite each other. One folder belongs to one model in one
      number format without tensor parallelism, and only its engines may write there.

    Parameters
    ----------
    storage : Path
        The engines' ``shared_storage_path``: absolute, and not writable by everybody.
    block_tokens : int
        The engines' block size: 16 on GPUs and 128 on CPUs unless it was set.
    layers : int
        Layers of the model that have a cache, each a file.
    clock : callable
        Seconds, for ``Sent.seconds``.

    Raises
    ------
    InvalidInputError
        If the path is relative, is no folder, or everybody may write there.
    """

    name: ClassVar[str] = "ExampleConnector"

    def __init__(
        self, storage: Path, block_tokens: int, layers: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if not storage.is_absolute() or not storage.is_dir():
            raise InvalidInputError(f"storage {str(storage)!r} is not the absolute path of a folder; make one")
        if storage.stat().st_mode & 0o002:
            raise InvalidInputError(f"everybody may write in {storage}, and so change answers; chmod o-w it")
        if block_tokens < 1 or layers < 1:
            raise InvalidInputError(f"block_tokens={block_tokens}, layers={layers}: both are at least 1")
        self._storage, self._block_tokens, self._layers, self._clock = storage, block_tokens, layers, clock

    async def send(
        self,
        session: aiohttp.ClientSession,
        source_url: str,
        token_ids: Sequence[int],
        *,
        model: str,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Sent:
        """See `KvTransfer.send`; ids whose cache is there already are not sent again."""
        start = self._clock()
        kept = self._written_tokens(len(token_ids))
        if kept == 0 or kept != self._written_tokens(len(token_ids) - 1):
            raise TransferError(
                f"{len(token_ids)} tokens in blocks of {self._block_tokens} cannot be sent: ExampleConnector needs "
                "more than one block, and not one token above whole blocks. Recompute"
            )
        folder = self._folder(token_ids)
        # The source too would read what is there, and die of a part.
        written = await asyncio.to_thread(self._whole_bytes, folder, kept)
        if written is None:
            await asyncio.to_thread(_remove, folder)
            body = _one_token(token_ids, model)
            try:
                await _post(session, source_url, body, timeout_s, headers)
            finally:
                written = await asyncio.to_thread(self._whole_bytes, folder, kept)
                if written is None:
                    await asyncio.to_thread(_remove, folder)
        if written is None:
            raise TransferError(
                f"{source_url} did not write all {kept} tokens of all {self._layers} layers. Check that it runs with "
                "ExampleConnector, this folder and --no-enable-chunked-prefill. Recompute"
            )
        return Sent(tokens=kept, bytes=written, seconds=self._clock() - start)

    async def forget(self, token_ids: Sequence[int]) -> None:
        """See `KvTransfer.forget`. Not before the target's first token: it would die of a folder that goes."""
        await asyncio.to_thread(_remove, self._folder(token_ids))

    def _written_tokens(self, tokens: int) -> int:
        """Whole blocks before the last token, which the connector leaves to be computed."""
        return max(tokens - 1, 0) // self._block_tokens * self._block_tokens

    def _folder(self, token_ids: Sequence[int]) -> Path:
        """Where the connector puts the cache of these ids: a hash of the 64-bit ids, as it makes it."""
        content = array("q", token_ids[: self._written_tokens(len(token_ids))]).tobytes()
        try:
            digest = hashlib.md5(content, usedforsecurity=False)
        except ValueError:
            # Where MD5 is forbidden vLLM takes the other, too.
            digest = hashlib.sha256(content, usedforsecurity=False)
        return self._storage / digest.hexdigest()

    def _whole_bytes(self, folder: Path, tokens: int) -> int | None:
        """Bytes of a folder that has every layer of so many tokens, each file to its last byte; else None."""
        try:
            files = sorted(folder.iterdir())
            shapes = [_tensor(file) for file in files]
            whole = len(files) == self._layers and len(set(shapes)) == 1 and shapes[0][1][0] == tokens
            return sum(file.stat().st_size for file in files) if whole else None
        except (OSError, ValueError, LookupError, TypeError):
            return None


class Nixl:
    """vLLM's NixlConnector: the target reads the source's memory itself, over whatever link UCX finds.

    `send` only makes the source keep the blocks; the target pulls them when it gets ``Sent.params``, and frees them
    there. All tokens move, none need be recomputed. If nobody comes, the source frees them after
    ``kv_lease_duration`` (30 s unless set), so send when the target is known.

    Engines need ``"kv_load_failure_policy": "recompute"`` in their ``--kv-transfer-config``: a target whose source is
    gone then computes the cache itself (by default it ends the request with an error), and
    ``VLLM_NIXL_SIDE_CHANNEL_HOST`` set to an address that targets reach, only they: the channel asks for no key.

    Has run here between two engines on one CPU machine. Has not run between GPUs or machines, with tensor parallelism
    or with pipelines: those need a GPU.
    """

    name: ClassVar[str] = "NixlConnector"

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    async def send(
        self,
        session: aiohttp.ClientSession,
        source_url: str,
        token_ids: Sequence[int],
        *,
        model: str,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Sent:
        """See `KvTransfer.send`; ``seconds`` does not hold the pull, which is part of the target's first token."""
        start = self._clock()
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        body = _one_token(token_ids, model) | {"kv_transfer_params": asked}
        answer = await _post(session, source_url, body, timeout_s, headers)
        params = answer.get("kv_transfer_params")
        if not isinstance(params, dict) or not params.get("do_remote_prefill") or not params.get("remote_block_ids"):
            raise TransferError(
                f"{source_url} holds no blocks to read. Check that it runs with NixlConnector. Recompute"
            )
        held = params.get("remote_num_tokens")
        if not isinstance(held, int) or held < 0:
            raise TransferError(f"{source_url} says that it holds {held!r} tokens. Recompute")
        return Sent(tokens=min(held, len(token_ids)), bytes=None, seconds=self._clock() - start, params=params)

    async def forget(self, token_ids: Sequence[int]) -> None:
        """Nothing to do: the target frees the blocks, or the source when its lease ends."""


def _one_token(token_ids: Sequence[int], model: str) -> dict[str, Any]:
    """The request that makes a source write: all ids, one more token."""
    return {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0, "stream": False}


async def _post(
    session: aiohttp.ClientSession,
    source_url: str,
    body: Mapping[str, Any],
    timeout_s: float,
    headers: Mapping[str, str] | None,
) -> dict[str, Any]:
    try:
        async with session.post(
            f"{source_url.rstrip('/')}/v1/completions",
            json=body,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            allow_redirects=False,
        ) as response:
            content = await _limited(response)
            if response.status != 200:
                raise TransferError(f"{source_url} answered {response.status} instead of sending. Recompute")
    except TimeoutError:
        raise TransferError(f"{source_url} did not send within {timeout_s:g} s. Recompute") from None
    except aiohttp.ClientError as error:
        raise TransferError(f"{source_url} did not send: {type(error).__name__}. Recompute") from None
    try:
        answer = json.loads(content)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise TransferError(f"{source_url} did not answer with a JSON object. Recompute")
    return answer


async def _limited(response: aiohttp.ClientResponse) -> bytes:
    """The body, up to the limit: an answer that is longer is not one."""
    content = bytearray()
    async for part in response.content.iter_any():
        content += part
        if len(content) > _MAX_ANSWER_BYTES:
            raise TransferError(f"an answer of more than {_MAX_ANSWER_BYTES} bytes. Recompute")
    return bytes(content)


def _tensor(file: Path) -> tuple[str, tuple[int, ...]]:
    """Type and shape of a file's only tensor, ``kv_cache``, whose bytes fill the file."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError("not a header")
        header = json.loads(opened.read(length))
    tensor = header["kv_cache"]
    if 8 + length + tensor["data_offsets"][1] != file.stat().st_size:
        raise ValueError("cut off")
    return tensor["dtype"], tuple(tensor["shape"])


def _remove(folder: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
