"""Frames between a store and its clients, and who is at the other end. Stdlib only: engines import it.

A frame is a length (4 bytes, big-endian) and as many bytes of UTF-8 JSON, always an object. File descriptors come
along with the first byte of a frame (SCM_RIGHTS).
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

MAX_FRAME_BYTES = 16 * 2**20
# The kernel takes 253 (SCM_MAX_FD) at a time.
MAX_FDS = 64

_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")
_FD_BYTES = array.array("i").itemsize
_READ_BYTES = 2**20


class FrameError(ValueError):
    """What came is no frame: the connection cannot be used any more."""


class Credentials(NamedTuple):
    """Process, user and group at the other end of a socket, as the kernel knows them."""

    pid: int
    uid: int
    gid: int


ReadCredentials = Callable[[socket.socket], Credentials]


def peer_credentials(connection: socket.socket) -> Credentials:
    """Who connected, or who listens, at the time of the connection (SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Credentials(*_CREDENTIALS.unpack(raw))


def send_frame(connection: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one frame, with at most 64 file descriptors.

    Raises
    ------
    FrameError
        If the message is too long or has too many file descriptors; nothing is sent then.
    OSError
        If the other end is gone or too slow.
    """
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(
            f"a frame of {len(body):,} bytes; at most {MAX_FRAME_BYTES:,} are sent. Ask for less at a time"
        )
    if len(fds) > MAX_FDS:
        raise FrameError(f"{len(fds)} file descriptors in a frame; at most {MAX_FDS} are sent")
    frame = memoryview(_LENGTH.pack(len(body)) + body)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = connection.sendmsg([frame], rights)
    connection.sendall(frame[sent:])


def receive_frame(
    connection: socket.socket, *, with_fds: bool = False, frame_s: float | None = None
) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one frame; None where the other end has closed before it.

    The first byte may take as long as the socket's own time limit says, the rest ``frame_s``, or each read as long as
    the first. Without ``with_fds`` the kernel closes file descriptors that come along.

    Raises
    ------
    FrameError
        If it is longer than allowed, no JSON object, cut off, or has file descriptors that did not fit.
    OSError
        If the connection broke or a time limit passed.
    """
    frame = _Incoming(connection, with_fds)
    try:
        first = frame.read(1)
        if not first:
            return None
        if frame_s is not None:
            frame.deadline_s = time.monotonic() + frame_s
        (length,) = _LENGTH.unpack(first + frame.read_all(_LENGTH.size - 1))
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"a frame says it has {length:,} bytes; at most {MAX_FRAME_BYTES:,} are read")
        return _parsed(frame.read_all(length)), frame.fds
    except BaseException:
        close_all(frame.fds)
        raise


def close_all(fds: Sequence[int]) -> None:
    """Close file descriptors that nobody took."""
    for fd in fds:
        with suppress(OSError):
            os.close(fd)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise FrameError("a frame that is not JSON") from None
    if not isinstance(message, dict):
        raise FrameError("a frame that is not a JSON object")
    return message


class _Incoming:
    """A frame that is being read, and the file descriptors that came with it."""

    def __init__(self, connection: socket.socket, with_fds: bool) -> None:
        self._connection = connection
        self._with_fds = with_fds
        self.fds: list[int] = []
        self.deadline_s: float | None = None

    def read_all(self, count: int) -> bytes:
        """So many bytes, no fewer."""
        # It grows with what has come: a length alone takes no memory.
        content = bytearray()
        while len(content) < count:
            piece = self.read(min(count - len(content), _READ_BYTES))
            if not piece:
                raise FrameError(f"a frame ended after {len(content):,} of {count:,} bytes")
            content += piece
        return bytes(content)

    def read(self, count: int) -> bytes:
        """At most so many bytes; none at the end."""
        if self.deadline_s is not None:
            left_s = self.deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("a frame took too long")
            self._connection.settimeout(left_s)
        if not self._with_fds:
            return self._connection.recv(count)
        space = socket.CMSG_SPACE(MAX_FDS * _FD_BYTES)
        piece, ancillary, flags, _ = self._connection.recvmsg(count, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, raw in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self.fds.extend(array.array("i", raw[: len(raw) - len(raw) % _FD_BYTES]))
        if flags & socket.MSG_CTRUNC:
            raise FrameError(
                f"file descriptors of a frame did not arrive: more than {MAX_FDS}, or this process may open no more "
                "(raise `ulimit -n`)"
            )
        return piece
