"""Bringing tensors: in ranges, by several threads, straight to where they stay, where they are hashed."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial

from hetplan.errors import StoreError
from hetplan.runtime.tensor_store.manifest import TensorShard, file_of
from hetplan.runtime.tensor_store.sources import Source, explained
from hetplan.units import MIB

RANGE_BYTES = 8 * MIB

Wanted = tuple[TensorShard, memoryview]


class Fetcher:
    """Threads that bring tensors.

    Parameters
    ----------
    threads : int

    Attributes
    ----------
    fetched_bytes : int
        What has come so far, good or not.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fetch")
        self._lock = threading.Lock()
        self.fetched_bytes = 0

    def bring(self, source: Source, wanted: Sequence[Wanted], model: str) -> None:
        """Fill each view with its tensor's bytes, and check them.

        Raises
        ------
        StoreError
            ``missing_shard``, ``truncated``, ``too_long``, ``corrupted``, ``refused_host`` or ``unreachable``. No
            thread writes any more then.
        """
        self._all(
            [
                partial(self._range, source, shard, view, start, f"{_said(shard)} of {model}")
                for shard, view in wanted
                for start in range(0, shard.bytes, RANGE_BYTES)
            ]
        )
        self._all([partial(_require_hash, source, shard, view, f"{_said(shard)} of {model}") for shard, view in wanted])

    def close(self) -> None:
        """Take no more work; what has begun ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _all(self, tasks: Sequence[Callable[[], None]]) -> None:
        futures = [self._pool.submit(task) for task in tasks]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
        wait(futures)
        for future in futures:
            if not future.cancelled():
                future.result()

    def _range(self, source: Source, shard: TensorShard, view: memoryview, start: int, what: str) -> None:
        stop = min(start + RANGE_BYTES, shard.bytes)
        # One byte more at the end would only come from a file that is too long.
        asked = stop + 1 if stop == shard.bytes else stop
        file = file_of(shard.sha256)
        with view[start:stop] as place, explained(f"{what}: {source.location}/{file}"):
            length = source.read(file, start, asked, place)
        with self._lock:
            self.fetched_bytes += length
        if length > stop - start:
            raise StoreError(
                "too_long", f"{what}: {source.location}/{file} has more than {shard.bytes} bytes. Make the shards again"
            )
        if length < stop - start:
            raise StoreError(
                "truncated",
                f"{what}: {source.location}/{file} ends at or before byte {start + length} of {shard.bytes}. "
                "Copy it again",
            )


def _require_hash(source: Source, shard: TensorShard, view: memoryview, what: str) -> None:
    found = hashlib.sha256(view).hexdigest()
    if found != shard.sha256:
        raise StoreError(
            "corrupted",
            f"{what}: {source.location}/{file_of(shard.sha256)} has sha256 {found}, not {shard.sha256}. Copy it again",
        )


def _said(shard: TensorShard) -> str:
    where = "outside the layers" if shard.layer is None else f"layer {shard.layer}"
    return f"{where}, {shard.name} (rank {shard.rank} of {shard.tensor_parallel})"
