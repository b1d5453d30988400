"""The store's socket: who may connect, a thread for each connection, requests in and answers out."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetplan.errors import HetplanError, InvalidInputError, StoreError
from hetplan.runtime.tensor_store.ledger import Lease
from hetplan.runtime.tensor_store.requests import (
    AttachRequest,
    BorrowRequest,
    LoadRequest,
    StatusRequest,
    parse_request,
)
from hetplan.runtime.tensor_store.store import TensorStore
from hetplan.runtime.tensor_store.wire import (
    MAX_FDS,
    FrameError,
    ReadCredentials,
    peer_credentials,
    receive_frame,
    send_frame,
)

OnEvent = Callable[[str, dict[str, Any]], None]

# sockaddr_un has 108 bytes, one for the end.
_MAX_PATH_BYTES = 107
_MAX_CONNECTIONS = 512
_BACKLOG = 128
_PAUSE_S = 0.1


class ListeningSocket:
    """A Unix socket in a folder of our own, and a lock beside it that says that we live.

    Parameters
    ----------
    path : Path
        At most 107 bytes. A folder that is missing is made; one that others may write to is refused.

    Raises
    ------
    InvalidInputError
        If the path cannot be used, or another store listens there.
    """

    def __init__(self, path: Path) -> None:
        path = path.absolute()
        length = len(os.fsencode(path))
        if length > _MAX_PATH_BYTES:
            raise InvalidInputError(
                f"--socket {path} has {length} bytes, a socket's path at most {_MAX_PATH_BYTES}. Choose a shorter one"
            )
        self.path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_own_folder(path.parent)
            self._lock = _locked(path)
            try:
                self.socket = _bound(path)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise InvalidInputError(f"cannot listen at {path}: {error.strerror}. Choose another --socket") from None

    def close(self) -> None:
        """Listen no more; the socket's file goes, the lock's stays, unlocked."""
        self.socket.close()
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


class Server:
    """Answers at a socket until it is stopped.

    Parameters
    ----------
    store : TensorStore
    listening : ListeningSocket
    on_event : callable
        Told of what went wrong, by name and values.
    read_credentials : callable
        How the other end's user is found out.
    first_request_s : float
        Who connects and has asked nothing after so long is cut off.
    frame_s : float
        So long a frame may take, either way, once it has begun.
    """

    def __init__(
        self,
        store: TensorStore,
        listening: ListeningSocket,
        on_event: OnEvent,
        *,
        read_credentials: ReadCredentials = peer_credentials,
        first_request_s: float = 10.0,
        frame_s: float = 30.0,
    ) -> None:
        self._store = store
        self._listening = listening
        self._on_event = on_event
        self._read_credentials = read_credentials
        self._first_request_s = first_request_s
        self._frame_s = frame_s
        self._places = threading.Semaphore(_MAX_CONNECTIONS)

    def run(self) -> None:
        """Take connections, for ever."""
        while True:
            try:
                connection, _ = self._listening.socket.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOBUFS, errno.ENOMEM):
                    raise
                self._on_event("connection_failed", {"error": os.strerror(error.errno)})
                time.sleep(_PAUSE_S)
                continue
            if not self._is_own(connection) or not self._is_given_a_thread(connection):
                connection.close()

    def _is_own(self, connection: socket.socket) -> bool:
        # The socket's mode lets nobody else in; neither would a mode that somebody changed. Root as well has to become
        # this user: a store hands out memory that is its user's, and takes orders from that user alone.
        try:
            uid = self._read_credentials(connection).uid
        except OSError:
            return False
        if uid != os.geteuid():
            self._on_event("peer_refused", {"uid": uid})
        return uid == os.geteuid()

    def _is_given_a_thread(self, connection: socket.socket) -> bool:
        if not self._places.acquire(blocking=False):
            self._on_event("connection_failed", {"error": f"more than {_MAX_CONNECTIONS} connections"})
            return False
        try:
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except RuntimeError as error:
            self._places.release()
            self._on_event("connection_failed", {"error": str(error)})
            return False
        return True

    def _serve(self, connection: socket.socket) -> None:
        conversation = _Conversation(self._store, connection)
        try:
            connection.settimeout(self._first_request_s)
            while received := receive_frame(connection, frame_s=self._frame_s):
                connection.settimeout(self._frame_s)
                self._answer(conversation, received[0])
                # A lease is as long as its engine lives, and says nothing meanwhile.
                connection.settimeout(None)
        except FrameError as error:
            with suppress(OSError):
                connection.settimeout(self._frame_s)
                send_frame(connection, _refusal("bad_frame", str(error)))
        except OSError:
            # It left, or was too slow.
            pass
        finally:
            connection.close()
            conversation.end()
            self._places.release()

    def _answer(self, conversation: _Conversation, message: dict[str, Any]) -> None:
        try:
            conversation.answer(message)
        except StoreError as error:
            send_frame(conversation.connection, _refusal(error.code, str(error)))
        except (OSError, FrameError):
            raise
        except Exception as error:
            # One request's fault is not the others'.
            said = str(error) if isinstance(error, HetplanError) else type(error).__name__
            self._on_event("request_failed", {"error": said})
            send_frame(conversation.connection, _refusal("internal", f"the store failed: {said}. Please report it"))


class _Conversation:
    """One connection, and the lease that it may have."""

    def __init__(self, store: TensorStore, connection: socket.socket) -> None:
        self.connection = connection
        self._store = store
        self._lease: Lease | None = None

    def answer(self, message: dict[str, Any]) -> None:
        """Do what is asked and say how it went."""
        request = parse_request(message)
        if isinstance(request, AttachRequest):
            self._attach(request)
            return
        if isinstance(request, BorrowRequest):
            said = self._store.borrow(request, self._lease)
        elif isinstance(request, LoadRequest):
            said = self._store.load(request)
        elif isinstance(request, StatusRequest):
            said = self._store.status()
        else:
            said = self._store.evict()
        send_frame(self.connection, {"ok": True, **said})

    def end(self) -> None:
        """Give back what was leased."""
        if self._lease is not None:
            self._store.release(self._lease)

    def _attach(self, request: AttachRequest) -> None:
        self._lease, parts, said = self._store.attach(request, self._lease)
        fds = [fd for part in parts if (fd := part.region.result().fd) is not None]
        answer = {"ok": True, **said, "parts": [part.said() for part in parts]}
        send_frame(self.connection, answer, fds[:MAX_FDS])
        for start in range(MAX_FDS, len(fds), MAX_FDS):
            more = fds[start : start + MAX_FDS]
            send_frame(self.connection, {"fds": len(more)}, more)


def _refusal(code: str, message: str) -> dict[str, Any]:
    return {"ok": False, "code": code, "message": message}


def _require_own_folder(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidInputError(
            f"{folder} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}; others could put a "
            f"socket of theirs there. Use a folder that user {os.geteuid()} alone may write to"
        )


def _locked(path: Path) -> int:
    """A lock that the kernel takes back when this process ends, however it ends."""
    lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise _taken(path) from None
    return lock


def _bound(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_symlink() or path.exists():
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise InvalidInputError(f"{path} is there and is no socket. Choose another --socket")
            # A lock says nothing about a socket of another program.
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller, suppress(ConnectionRefusedError):
                caller.connect(str(path))
                raise _taken(path)
            path.unlink()
        # Before it has a name, so that it never has another mode.
        os.fchmod(listening.fileno(), 0o600)
        listening.bind(str(path))
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def _taken(path: Path) -> InvalidInputError:
    return InvalidInputError(f"a store listens at {path} already. Stop it, or choose another --socket")
