"""Runs one command and leaves nothing of it behind: started by path, stdlib only.

``guard.py LIFELINE LOG ARGV...``: LIFELINE is the number of a pipe's reading end, or ``-``. When its other end closes,
so when whoever held it has died, everything below is killed. SIGTERM is passed on to the command; a second one kills
everything. When the command ends, what it has left behind is killed, and the guard ends as the command did.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Iterator

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_BROKEN = 127


def main(lifeline: str, log: str, *argv: str) -> int:
    """Run the command until it ends; returns what the guard ends with."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Orphans below become children of this process, so that none escapes by a session of its own.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # 0600, and nobody's link.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    output = os.open(log, flags, 0o600)
    own, command = os.getpid(), os.fork()
    if command == 0:
        _become(libc, own, output, argv)
    watched = [woken] if lifeline == "-" else [woken, int(lifeline)]
    passed = 0
    while True:
        ready, _, _ = select.select(watched, [], [])
        if woken in ready:
            os.read(woken, 4096)
        if len(watched) > 1 and watched[1] in ready and not os.read(watched[1], 1):
            return _kill_all()
        ended = _reap(command)
        if ended is not None:
            _kill_all()
            return ended
        if len(asked) > 1:
            return _kill_all()
        if len(asked) > passed:
            passed = len(asked)
            os.kill(command, signal.SIGTERM)


def _become(libc: ctypes.CDLL, guard: int, output: int, argv: tuple[str, ...]) -> None:
    """In the child: the command, in a session of its own, that dies with its guard."""
    try:
        os.setsid()
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:
            os._exit(_BROKEN)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.execvp(argv[0], argv)  # noqa: S606 - a list from the controller, never a shell
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(_BROKEN)


def _reap(command: int) -> int | None:
    """Collect what has ended; how the command did, if it has."""
    ended = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        if pid == command:
            code = os.waitstatus_to_exitcode(status)
            ended = code if code >= 0 else 128 - code


def _kill_all() -> int:
    """Kill everything below until nothing is left."""
    while True:
        for pid in _descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return 128 + signal.SIGKILL


def _descendants(root: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                    # The command's name, in brackets, may hold anything.
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry))
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        waiting += below
        yield from below


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
