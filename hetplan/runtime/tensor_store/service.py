"""The store as a process: its sources, its limits, its end."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path

from hetplan.errors import InvalidInputError
from hetplan.runtime.tensor_store.fetch import Fetcher
from hetplan.runtime.tensor_store.hosts import HostRules, Resolve, resolve
from hetplan.runtime.tensor_store.server import ListeningSocket, OnEvent, Server
from hetplan.runtime.tensor_store.sources import open_source, read_manifest
from hetplan.runtime.tensor_store.store import TensorStore
from hetplan.runtime.tensor_store.wire import ReadCredentials, peer_credentials


def serve(
    socket_path: str | Path,
    sources: Sequence[str],
    *,
    on_event: OnEvent,
    allow_hosts: Sequence[str] = (),
    memory_bytes: int | None = None,
    devices: Sequence[str] = ("cpu",),
    threads: int = 8,
    first_request_s: float = 10.0,
    frame_s: float = 30.0,
    resolve: Resolve = resolve,
    read_credentials: ReadCredentials = peer_credentials,
) -> None:
    """Run a store until KeyboardInterrupt.

    Parameters
    ----------
    socket_path : path
    sources : sequence of str
        Folders and addresses with a manifest each.
    on_event : callable
        Told ``listening`` with the socket and the models, and what goes wrong.
    allow_hosts : sequence of str
        Hosts that weights may come from, and ``s3://bucket``.
    memory_bytes : int, optional
        What each device may hold; by default without limit.
    devices : sequence of str
    threads : int
        That fetch and check.
    first_request_s, frame_s : float
        See `Server`.
    resolve, read_credentials : callable
        See `HostRules` and `Server`.

    Raises
    ------
    InvalidInputError
        If the socket cannot be listened at, or a manifest is wrong.
    StoreError
        If a source is not allowed or cannot be read.
    """
    _raise_file_limit()
    rules = HostRules(allow_hosts, resolve)
    opened = [open_source(location, rules, threads) for location in sources]
    shards = [(source, read_manifest(source)) for source in opened]
    if not shards:
        raise InvalidInputError(
            "a store without shards has nothing to serve; give a folder or an address with --shards"
        )
    store = TensorStore(shards, dict.fromkeys(devices, memory_bytes), Fetcher(threads))
    listening = ListeningSocket(Path(socket_path))
    try:
        server = Server(
            store,
            listening,
            on_event,
            read_credentials=read_credentials,
            first_request_s=first_request_s,
            frame_s=frame_s,
        )
        on_event("listening", {"socket": str(listening.path), "models": store.models(), "devices": list(devices)})
        server.run()
    finally:
        listening.close()
        store.close()


def _raise_file_limit() -> None:
    """Each part takes a file descriptor: use what the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
