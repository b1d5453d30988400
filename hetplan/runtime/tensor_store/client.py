"""The engine's side of a store: attach, borrow, map. Stdlib only: it runs in the engine's own environment."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import socket
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

from hetplan.errors import StoreError
from hetplan.runtime.tensor_store.wire import (
    FrameError,
    ReadCredentials,
    close_all,
    peer_credentials,
    receive_frame,
    send_frame,
)

__all__ = ["Attached", "Mapping", "Part", "Store", "StoreError", "TensorPlace", "connect"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class TensorPlace(NamedTuple):
    """Where a tensor lies in its part."""

    offset: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that came in one piece: a layer's, or one outside the layers.

    Attributes
    ----------
    kind : str
        ``"memfd"``: ``fd`` is sealed memory, to be mapped. ``"cuda"``: ``handle`` is for `cuda.open_handle`.
    bytes : int
        Of the whole part.
    tensors : dict of str to TensorPlace
    fd : int or None
        Yours to close. `Mapping` keeps one of its own.
    handle : dict or None
    """

    kind: str
    bytes: int
    tensors: dict[str, TensorPlace]
    fd: int | None = None
    handle: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Attached:
    """What an attach brought, and what of it the store had to fetch, had in another part, or held already."""

    fingerprint: str
    parts: tuple[Part, ...]
    fetched_bytes: int
    reused_bytes: int
    held_bytes: int


class Mapping:
    """A memfd part in this process's memory, shared with everyone who has it until it is written to.

    It can be written: the pages that are become this process's own, all others stay shared. It outlives the store.

    Parameters
    ----------
    part : Part
        Of kind ``"memfd"``. Its ``fd`` may be closed afterwards.
    """

    def __init__(self, part: Part) -> None:
        if part.fd is None:
            raise ValueError(f"a part of kind {part.kind!r} has no file descriptor to map")
        self.part = part
        self.memory = mmap.mmap(part.fd, part.bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def tensor(self, name: str) -> memoryview:
        """The bytes of one tensor, in place."""
        place = self.part.tensors[name]
        return memoryview(self.memory)[place.offset : place.offset + place.bytes]

    def protect(self) -> None:
        """Make the mapping read-only, for good: who writes to it from now on is killed (SIGSEGV).

        Raises
        ------
        OSError
            If the kernel refuses.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        start = ctypes.c_char.from_buffer(self.memory)
        length = ctypes.c_size_t(self.part.bytes)
        if libc.mprotect(ctypes.c_void_p(ctypes.addressof(start)), length, mmap.PROT_READ) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"mprotect: {os.strerror(number)}")


class Store:
    """A connection to a store. From the first attach on it is a lease, which ends when it is closed.

    Requests may come from several threads; they are sent one after another. See `connect`.
    """

    def __init__(self, connection: socket.socket, path: str) -> None:
        self._connection = connection
        self._path = path
        self._lock = threading.Lock()

    def attach(
        self,
        *,
        model: str,
        engine: str,
        config_sha256: str,
        tensor_parallel: int,
        rank: int,
        tensors: list[str],
        device: str = "cpu",
        hold_bytes: int = 0,
        what: str = "engine",
        fingerprint: str | None = None,
    ) -> Attached:
        """Have the parts loaded that these tensors lie in, and take a lease on them.

        Parameters
        ----------
        model, engine, config_sha256 : str
            Which shards, such as those of ``"vllm-0.32.0"``: what was made for another engine or config is refused.
        tensor_parallel, rank : int
        tensors : list of str
            Whole layers come: each one that a name lies in.
        device : str
            ``"cpu"``, or a GPU that the store serves, such as ``"cuda:0"``.
        hold_bytes : int
            What this process needs beside weights and cache.
        what : str
            How this process is called where the store says who holds what.
        fingerprint : str, optional
            Of the manifest, where only that one will do.

        Raises
        ------
        StoreError
            If the store refuses, or is gone.
        """
        request = {
            "op": "attach",
            "model": model,
            "engine": engine,
            "config_sha256": config_sha256,
            "fingerprint": fingerprint,
            "tensor_parallel": tensor_parallel,
            "rank": rank,
            "tensors": list(tensors),
            "device": device,
            "hold_bytes": hold_bytes,
            "holder": {"pid": os.getpid(), "what": what},
        }
        with self._lock:
            answer, fds = self._ask(request)
            try:
                listed = answer["parts"]
                expected = sum(part["kind"] == "memfd" for part in listed)
                while len(fds) < expected:
                    more, further = self._receive()
                    fds += further
                    if not further or more.get("fds") != len(further):
                        break
                if len(fds) != expected:
                    raise FrameError(f"{len(fds)} of {expected} file descriptors came")
                return _attached(answer, fds)
            except (FrameError, KeyError, TypeError, ValueError) as error:
                close_all(fds)
                self._lose(f"its answer makes no sense ({error})")
            except BaseException:
                close_all(fds)
                raise

    def borrow(self, at_least: int, at_most: int) -> int:
        """Set what this lease borrows for its KV cache, and say how many bytes were granted.

        Parameters
        ----------
        at_least, at_most : int
            Bytes, all in all: ask again to grow or to give back.

        Raises
        ------
        StoreError
            With code ``"no_room"`` if less than ``at_least`` is free; the loan stays as it was.
        """
        return int(self._request({"op": "borrow", "at_least": at_least, "at_most": at_most})["granted"])

    def load(
        self,
        *,
        model: str,
        tensor_parallel: int,
        ranks: list[int],
        layers: tuple[int, int],
        first: bool = False,
        last: bool = False,
        device: str = "cpu",
        fingerprint: str | None = None,
    ) -> dict[str, Any]:
        """Have parts loaded before engines come; says ``fetched_bytes``, ``reused_bytes`` and ``held_bytes``.

        Parameters
        ----------
        model : str
        tensor_parallel : int
        ranks : list of int
        layers : (int, int)
            Start, and one past the end.
        first, last : bool
            Also what is before the layers (embedding), and behind (final norm, head).
        device : str
        fingerprint : str, optional
            Of the manifest, where the store has several of the model.

        Raises
        ------
        StoreError
            If the store refuses, or is gone.
        """
        request = {
            "op": "load",
            "model": model,
            "fingerprint": fingerprint,
            "tensor_parallel": tensor_parallel,
            "ranks": list(ranks),
            "layers": list(layers),
            "first": first,
            "last": last,
            "device": device,
        }
        return self._request(request)

    def status(self) -> dict[str, Any]:
        """Models, parts, memory per device, leases, and the bytes fetched and reused so far."""
        return self._request({"op": "status"})

    def evict(self) -> dict[str, Any]:
        """Free the parts that nobody has a lease on; says ``freed_bytes``."""
        return self._request({"op": "evict"})

    def lives(self) -> bool:
        """Whether the store is still there, without waiting and without asking it."""
        if self._connection.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._connection, select.POLLIN | select.POLLRDHUP)
        gone = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
        return not any(events & gone for _, events in poll.poll(0))

    def close(self) -> None:
        """End the lease. What is mapped stays mapped, but the store takes its memory for free."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            answer, fds = self._ask(message)
        close_all(fds)
        return {name: value for name, value in answer.items() if name != "ok"}

    def _ask(self, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        try:
            send_frame(self._connection, message)
        except OSError as error:
            self._lose(str(error))
        except FrameError as error:
            raise StoreError("bad_request", str(error)) from None
        answer, fds = self._receive()
        if answer.get("ok") is not True:
            close_all(fds)
            raise StoreError(str(answer.get("code")), str(answer.get("message")))
        return answer, fds

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        try:
            received = receive_frame(self._connection, with_fds=True)
        except (OSError, FrameError) as error:
            self._lose(str(error))
        if received is None:
            self._lose("it closed the connection")
        return received

    def _lose(self, why: str) -> NoReturn:
        # After a lost or half-read answer the next one would be taken for it.
        self._connection.close()
        raise StoreError(
            "store_gone", f"the store at {self._path} is gone: {why}. Connect again when it is back"
        ) from None


def connect(
    path: str | os.PathLike[str],
    *,
    timeout_s: float | None = 600.0,
    read_credentials: ReadCredentials = peer_credentials,
) -> Store:
    """Connect to the store that listens at a Unix socket.

    Parameters
    ----------
    path : path
    timeout_s : float or None
        How long an answer may take; loading a large model takes minutes.
    read_credentials : callable
        How the other end's user is found out.

    Returns
    -------
    Store

    Raises
    ------
    StoreError
        With code ``"store_gone"`` if nobody listens, ``"foreign_store"`` if it runs as another user.
    """
    name = os.fspath(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(name)
        uid = read_credentials(connection).uid
        if uid != os.geteuid():
            raise StoreError(
                "foreign_store",
                f"the store at {name} runs as user {uid}, this process as {os.geteuid()}; weights are taken from one's "
                "own store only. Start both as one user",
            )
    except OSError as error:
        connection.close()
        raise StoreError(
            "store_gone", f"no store listens at {name}: {error}. Start one with `hetplan store serve --socket {name}`"
        ) from None
    except BaseException:
        connection.close()
        raise
    return Store(connection, name)


def _attached(answer: dict[str, Any], fds: list[int]) -> Attached:
    waiting = iter(fds)
    parts = []
    for listed in answer["parts"]:
        fd = next(waiting) if listed["kind"] == "memfd" else None
        size = int(listed["bytes"])
        tensors = {name: TensorPlace(o, b, d, tuple(s)) for name, (o, b, d, s) in listed["tensors"].items()}
        if fd is not None and (os.fstat(fd).st_size != size or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS):
            raise ValueError(f"a part of {size:,} bytes is not sealed memory of that size")
        if any(place.offset < 0 or place.bytes < 0 or place.offset + place.bytes > size for place in tensors.values()):
            raise ValueError(f"a tensor lies outside its part of {size:,} bytes")
        parts.append(Part(listed["kind"], size, tensors, fd, listed.get("handle")))
    return Attached(
        answer["fingerprint"], tuple(parts), answer["fetched_bytes"], answer["reused_bytes"], answer["held_bytes"]
    )
