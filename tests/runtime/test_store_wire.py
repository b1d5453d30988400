"""Frames, and what a store makes of peers that are malformed, silent, or somebody else's."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_process import ROOT, RunningStore, attach, drop, make_shards, run_store, wait_until

from hetplan.errors import InvalidInputError, StoreError
from hetplan.runtime.tensor_store.client import connect
from hetplan.runtime.tensor_store.manifest import Manifest
from hetplan.runtime.tensor_store.server import ListeningSocket
from hetplan.runtime.tensor_store.wire import (
    MAX_FDS,
    MAX_FRAME_BYTES,
    Credentials,
    FrameError,
    close_all,
    peer_credentials,
    receive_frame,
    send_frame,
)

STRANGER = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

# Sockets and threads on a busy machine: no single example may be held to a time.
quick = settings(deadline=None, max_examples=40)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
messages = st.dictionaries(st.text(), values, max_size=6)


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, two:
        one.settimeout(10)
        two.settimeout(10)
        yield one, two


# ---- frames


@quick
@given(st.lists(st.tuples(messages, st.integers(0, 5)), min_size=1, max_size=5))
def test_frames_arrive_as_sent_with_their_descriptors(sent: list[tuple[dict[str, Any], int]]) -> None:
    with pair() as (one, two), tempfile.TemporaryFile() as file:
        for message, count in sent:
            send_frame(one, message, [file.fileno()] * count)
        one.close()
        for message, count in sent:
            received = receive_frame(two, with_fds=True)
            assert received is not None
            assert received[0] == message
            assert len(received[1]) == count
            for fd in received[1]:
                assert os.path.samestat(os.fstat(fd), os.fstat(file.fileno()))
                assert not os.get_inheritable(fd)
            close_all(received[1])
        assert receive_frame(two) is None


@quick
@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_refused(content: bytes) -> None:
    with pair() as (one, two):
        one.sendall(content)
        one.close()
        try:
            received = receive_frame(two)
        except FrameError:
            return
        if received is None:
            assert content == b""
        else:
            assert isinstance(received[0], dict)


@quick
@given(messages, st.data())
def test_a_frame_may_come_in_pieces(message: dict[str, Any], data: st.DataObject) -> None:
    body = json.dumps(message).encode()
    frame = struct.pack(">I", len(body)) + body
    cut = data.draw(st.integers(0, len(frame)))
    with pair() as (one, two):
        sender = threading.Thread(target=lambda: (one.sendall(frame[:cut]), one.sendall(frame[cut:])))
        sender.start()
        received = receive_frame(two, frame_s=10)
        sender.join()
        assert received == (message, [])


def test_limits_of_a_frame() -> None:
    with pair() as (one, two):
        with pytest.raises(FrameError, match="16,777,216"):
            send_frame(one, {"text": "x" * MAX_FRAME_BYTES})
        with pytest.raises(FrameError, match="65 file descriptors"):
            send_frame(one, {}, [0] * (MAX_FDS + 1))
        one.sendall(struct.pack(">I", MAX_FRAME_BYTES + 1))
        with pytest.raises(FrameError, match="16,777,217 bytes"):
            receive_frame(two)


def test_descriptors_that_nobody_wants_are_not_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pair() as (one, two), tempfile.TemporaryFile() as file:
        send_frame(one, {}, [file.fileno()] * MAX_FDS)
        assert receive_frame(two) == ({}, [])
        body = b"no json"
        header = struct.pack(">I", len(body))
        socket.send_fds(one, [header + body], [file.fileno()] * 3)
        with pytest.raises(FrameError):
            receive_frame(two, with_fds=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_frame_that_drips_is_given_up() -> None:
    with pair() as (one, two):
        stop = threading.Event()

        def drip() -> None:
            one.sendall(struct.pack(">I", 1000))
            while not stop.wait(0.05):
                one.sendall(b" ")

        sender = threading.Thread(target=drip)
        sender.start()
        try:
            with pytest.raises(TimeoutError):
                receive_frame(two, frame_s=0.3)
        finally:
            stop.set()
            sender.join()


# ---- a store among bad peers


@pytest.fixture
def shards(tmp_path: Path) -> tuple[Path, Manifest]:
    folder = tmp_path / "shards"
    return folder, make_shards(folder, layers=1)


def raw(running: RunningStore) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect(str(running.socket))
    return connection


def test_bad_frames_and_bad_requests_hurt_nobody_else(shards: tuple[Path, Manifest]) -> None:
    folder, manifest = shards
    with run_store(folder) as running, running.connect() as bystander:
        drop(attach(bystander, manifest))
        for content in (
            struct.pack(">I", 0xFFFFFFFF),
            struct.pack(">I", 5) + b"hello",
            struct.pack(">I", 2) + b"[]",
            struct.pack(">I", 100_000) + b"[" * 100_000,
            struct.pack(">I", 1) + b"\xff",
            struct.pack(">I", 50) + b"{}",
        ):
            with raw(running) as bad:
                bad.sendall(content)
                bad.shutdown(socket.SHUT_WR)
                received = receive_frame(bad)
                assert received is not None
                assert received[0]["code"] == "bad_frame"
                assert receive_frame(bad) is None
        with raw(running) as bad:
            for message in (
                {},
                {"op": "none"},
                {"op": ["attach"]},
                {"op": "status", "more": 1},
                {"op": "borrow", "at_least": -1, "at_most": 5},
                {"op": "borrow", "at_least": 5, "at_most": 1},
                {"op": "borrow", "at_least": "1", "at_most": 5},
                {"op": "borrow", "at_least": True, "at_most": 5},
                {"op": "borrow", "at_least": 1, "at_most": 10**30},
                {"op": "load", "model": "../up", "tensor_parallel": 1, "ranks": [0], "layers": [0, 1]},
                {"op": "load", "model": "tiny-llama", "tensor_parallel": 1, "ranks": [0], "layers": [1, 0]},
                {"op": "load", "model": "tiny-llama", "tensor_parallel": 0, "ranks": [0], "layers": [0, 1]},
                {"op": "load", "model": "tiny-llama", "tensor_parallel": 1, "ranks": [], "layers": [0, 1]},
                {"op": "attach", "model": "tiny-llama"},
            ):
                send_frame(bad, message)
                received = receive_frame(bad)
                assert received is not None
                assert received[0]["code"] == "bad_request", message
            # Descriptors that it did not ask for are closed, not kept.
            store_files = Path(f"/proc/{running.process.pid}/fd")
            before = len(list(store_files.iterdir()))
            send_frame(bad, {"op": "status"}, [bad.fileno()] * MAX_FDS)
            received = receive_frame(bad)
            assert received is not None
            assert received[0]["ok"] is True
            assert len(list(store_files.iterdir())) == before
        assert len(bystander.status()["leases"]) == 1
        assert [event["event"] for event in running.events()] == ["listening"]


def test_silent_and_slow_peers_are_cut_off_and_leases_are_not(shards: tuple[Path, Manifest]) -> None:
    folder, manifest = shards
    with (
        run_store(folder, first_request_s=0.3, frame_s=0.3) as running,
        running.connect() as store,
        raw(running) as silent,
        raw(running) as slow,
    ):
        slow.sendall(struct.pack(">I", 1000) + b"{")
        drop(attach(store, manifest))
        assert receive_frame(silent) is None
        assert receive_frame(slow) is None
        assert store.lives()
        assert len(store.status()["leases"]) == 1


def test_who_does_not_read_its_answer_is_cut_off(shards: tuple[Path, Manifest]) -> None:
    folder, manifest = shards
    with run_store(folder, frame_s=0.3) as running, running.connect() as store:
        with raw(running) as deaf:
            deaf.settimeout(0.1)
            request = json.dumps({"op": "status"}).encode()
            frames = (struct.pack(">I", len(request)) + request) * 100_000
            # Until neither end has room: the store writes answers that nobody takes.
            with pytest.raises((TimeoutError, BrokenPipeError, ConnectionResetError)):
                deaf.sendall(frames)
            drop(attach(store, manifest))
        assert len(store.status()["leases"]) == 1


# ---- whose socket


STRANGE_CLIENT = f"""
import os, sys
from hetplan.errors import StoreError
from hetplan.runtime.tensor_store.client import connect
os.setgid({STRANGER}); os.setuid({STRANGER})
# It does not look whose store it is.
from hetplan.runtime.tensor_store.wire import Credentials
store = connect(sys.argv[1], timeout_s=10, read_credentials=lambda connection: Credentials(0, {STRANGER}, 0))
try:
    print(store.status())
except StoreError as error:
    print(error.code)
"""


@as_root
def test_another_user_is_refused_by_the_kernels_word(shards: tuple[Path, Manifest]) -> None:
    folder, _ = shards
    with run_store(folder) as running:
        for path in (running.socket.parent, running.socket.parent.parent):
            path.chmod(0o755)
        assert running.socket.stat().st_mode & 0o777 == 0o600
        running.socket.chmod(0o666)
        command = [sys.executable, "-c", STRANGE_CLIENT, str(running.socket)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.stdout == "store_gone\n", done.stderr
        assert running.events()[1:] == [{"event": "peer_refused", "uid": STRANGER}]
        with running.connect() as store:
            assert store.status()["leases"] == []


def test_a_store_refuses_whom_it_does_not_know(shards: tuple[Path, Manifest]) -> None:
    prelude = """
from hetplan.runtime.tensor_store.wire import Credentials
extra["read_credentials"] = lambda connection: Credentials(1, 12345, 1)
"""
    with run_store(shards[0], prelude=prelude) as running, running.connect() as store:
        with pytest.raises(StoreError) as refused:
            store.status()
        assert refused.value.code == "store_gone"
        wait_until(lambda: len(running.events()) > 1)
        assert running.events()[1] == {"event": "peer_refused", "uid": 12345}


def test_a_client_refuses_a_store_of_somebody_else(shards: tuple[Path, Manifest]) -> None:
    with run_store(shards[0]) as running:
        with pytest.raises(StoreError, match=f"runs as user {os.geteuid() + 1}") as refused:
            running.connect(read_credentials=lambda _: Credentials(1, os.geteuid() + 1, 1))
        assert refused.value.code == "foreign_store"


STRANGE_STORE = f"""
import os, socket, sys, time
os.setgid({STRANGER}); os.setuid({STRANGER})
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
print("listening", flush=True)
time.sleep(600)
"""


@as_root
def test_a_client_refuses_a_foreign_store_by_the_kernels_word() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, STRANGER, STRANGER)
        path = f"{folder}/store.sock"
        command = [sys.executable, "-c", STRANGE_STORE, path]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"listening\n"
                with pytest.raises(StoreError, match=f"user {STRANGER}") as refused:
                    connect(path)
                assert refused.value.code == "foreign_store"
            finally:
                process.kill()


def test_credentials_are_of_the_process_at_the_other_end() -> None:
    with pair() as (one, _):
        assert peer_credentials(one) == (os.getpid(), os.geteuid(), os.getegid())


# ---- the socket itself


def test_a_living_store_keeps_its_socket_and_a_dead_ones_is_replaced(shards: tuple[Path, Manifest]) -> None:
    with run_store(shards[0]) as running:
        with pytest.raises(InvalidInputError, match="a store listens at"):
            ListeningSocket(running.socket)
        running.process.kill()
        running.process.wait()
        assert running.socket.exists()
        ListeningSocket(running.socket).close()
        assert not running.socket.exists()


def test_a_socket_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(InvalidInputError, match="listens at"):
            ListeningSocket(path)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InvalidInputError, match="no socket"):
        ListeningSocket(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_folders_and_paths_that_will_not_do(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(InvalidInputError, match="mode 777"):
        ListeningSocket(shared / "store.sock")
    with pytest.raises(InvalidInputError, match="at most 107"):
        ListeningSocket(tmp_path / ("x" * 100) / "store.sock")
    if os.geteuid() == 0:
        foreign = tmp_path / "foreign"
        foreign.mkdir()
        os.chown(foreign, STRANGER, STRANGER)
        with pytest.raises(InvalidInputError, match=f"user {STRANGER}"):
            ListeningSocket(foreign / "store.sock")
    made = tmp_path / "made"
    listening = ListeningSocket(made / "store.sock")
    try:
        assert made.stat().st_mode & 0o777 == 0o700
        assert (made / "store.sock").stat().st_mode & 0o777 == 0o600
    finally:
        listening.close()
