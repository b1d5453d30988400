"""Processes of one machine: started, watched, ended, and gone when their keeper is gone. Stdlib only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetplan.errors import InvalidInputError

GUARD = Path(__file__).with_name("guard.py")
_TAIL_BYTES = 32_768


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Of one process: its guard's number, and what it ended with; None while it runs."""

    pid: int
    returncode: int | None


@dataclass(slots=True)
class _Kept:
    guard: subprocess.Popen[bytes]
    lifeline: int
    log: Path

    def let_go(self) -> None:
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1


def guarded(argv: Sequence[str], log: Path, lifeline: int | None) -> list[str]:
    """A command under its guard, which kills everything below it when ``lifeline`` closes."""
    # Isolated: nothing of the environment or the folder decides what the guard imports.
    return [sys.executable, "-I", "-S", str(GUARD), "-" if lifeline is None else str(lifeline), str(log), *argv]


class Keeper:
    """Keeps named processes. When this process dies, however it dies, they and all that they started are killed.

    Each runs under a guard (``guard.py``) that holds a pipe from here. May be used from several threads.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()

    def start(self, name: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> ProcessState:
        """Start a process; what runs under that name already stays, so that asking twice starts one.

        Parameters
        ----------
        name : str
        argv : sequence of str
            The program and its arguments; there is no shell.
        environment : mapping
            All of it.
        log : path
            What it says is appended here.

        Raises
        ------
        InvalidInputError
            If ``argv`` is empty.
        """
        if not argv:
            raise InvalidInputError(f"{name} has no command; give a program and its arguments")
        with self._lock:
            kept = self._kept.get(name)
            if kept is not None and kept.guard.poll() is None:
                return ProcessState(kept.guard.pid, None)
            if kept is not None:
                kept.let_go()
            log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            theirs, ours = os.pipe2(os.O_CLOEXEC)
            try:
                guard = subprocess.Popen(  # noqa: S603 - a list from the controller, never a shell
                    guarded(argv, log, theirs),
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
            except BaseException:
                os.close(ours)
                raise
            finally:
                os.close(theirs)
            self._kept[name] = _Kept(guard, ours, log)
            return ProcessState(guard.pid, None)

    def stop(self, name: str, grace_s: float) -> ProcessState | None:
        """SIGTERM, and after the grace SIGKILL for it and all that it started; None for a name that is not kept."""
        with self._lock:
            kept = self._kept.get(name)
        if kept is None:
            return None
        if kept.guard.poll() is None and grace_s > 0:
            kept.guard.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                kept.guard.wait(grace_s)
        with self._lock:
            kept.let_go()
        kept.guard.wait()
        return ProcessState(kept.guard.pid, kept.guard.returncode)

    def states(self) -> dict[str, ProcessState]:
        """All that were started, by name."""
        with self._lock:
            return {name: ProcessState(kept.guard.pid, kept.guard.poll()) for name, kept in self._kept.items()}

    def tail(self, name: str, size: int = _TAIL_BYTES) -> str:
        """The end of what a process has said; empty for a name that is not kept."""
        with self._lock:
            kept = self._kept.get(name)
        return "" if kept is None else _tail(kept.log, size)

    def forget(self, name: str) -> None:
        """No longer list a process that has ended."""
        with self._lock:
            kept = self._kept.get(name)
            if kept is not None and kept.guard.poll() is not None:
                kept.let_go()
                del self._kept[name]

    def stop_all(self, grace_s: float) -> None:
        """End all of them at once."""
        end = time.monotonic() + grace_s
        with self._lock:
            names, guards = list(self._kept), [kept.guard for kept in self._kept.values()]
        if grace_s > 0:
            for guard in guards:
                if guard.poll() is None:
                    guard.terminate()
            while time.monotonic() < end and any(guard.poll() is None for guard in guards):
                time.sleep(0.05)
        for name in names:
            self.stop(name, 0)


class Detached:
    """A process that outlives whoever started it, as a rented machine does; it is found again by its log's path.

    Parameters
    ----------
    log : path
        Absolute, and of this process alone.
    """

    def __init__(self, log: Path) -> None:
        self.log = log.absolute()

    def start(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it, unless it runs."""
        if self.pid() is not None:
            return
        self.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = guarded(argv, self.log, None)
        # In between stands a process that ends at once, so that nobody has to wait for the guard.
        code = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
        subprocess.run(  # noqa: S603 - as above
            [sys.executable, "-I", "-S", "-c", code, *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            start_new_session=True,
        )

    def pid(self) -> int | None:
        """Its guard's number while it runs."""
        wanted = [b"-I", b"-S", os.fsencode(GUARD), b"-", os.fsencode(self.log)]
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                    mine = Path(f"/proc/{entry}").stat().st_uid == os.geteuid()
                except OSError:
                    continue
                if mine and words[1:6] == wanted:
                    return int(entry)
        return None

    def end(self, grace_s: float) -> None:
        """SIGTERM, and after the grace SIGKILL for it and all that it started."""
        pid = self.pid()
        end = time.monotonic() + grace_s
        while pid is not None and self.pid() == pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            while time.monotonic() < end and self.pid() == pid:
                time.sleep(0.05)
            # The next SIGTERM kills.
            end = time.monotonic() + 0.5

    def tail(self, size: int = _TAIL_BYTES) -> str:
        """The end of what it has said."""
        return _tail(self.log, size)


def _tail(log: Path, size: int) -> str:
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - size))
        return file.read().decode("utf-8", "replace")
