"""Processes of a machine: kept, ended with all that they started, and gone when their keeper is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetplan.errors import InvalidInputError
from hetplan.runtime.controller.processes import Keeper

# Starts a grandchild in a session of its own, as engines start workers, and writes who they are.
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("family", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
KEEPER = """
import sys, time
from pathlib import Path
from hetplan.runtime.controller.processes import Keeper
keeper = Keeper()
keeper.start("family", [sys.executable, "-c", sys.argv[1]], {}, Path(sys.argv[2]))
time.sleep(600)
"""


def wait_for(found: Callable[[], object], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not found():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def family(log: Path) -> list[int]:
    wait_for(lambda: log.is_file() and "family" in log.read_text() and log.read_text().endswith("\n"))
    return [int(word) for word in log.read_text().split()[1:3]]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    kept = Keeper()
    yield kept
    kept.stop_all(0)


def test_a_keeper_that_is_killed_takes_children_and_grandchildren_along(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = subprocess.Popen([sys.executable, "-c", KEEPER, FAMILY, str(log)])
    try:
        pids = family(log)
        assert all(map(lives, pids))
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not any(map(lives, pids)), 2.0)


def test_what_a_process_leaves_behind_ends_with_it(keeper: Keeper, tmp_path: Path) -> None:
    log = tmp_path / "log"
    keeper.start("family", [sys.executable, "-c", FAMILY], {}, log)
    head, worker = family(log)
    os.kill(head, signal.SIGKILL)
    wait_for(lambda: keeper.states()["family"].returncode is not None and not lives(worker), 5.0)
    assert keeper.states()["family"].returncode == 128 + signal.SIGKILL


def test_a_guard_that_is_killed_takes_its_command_along(keeper: Keeper, tmp_path: Path) -> None:
    guard = keeper.start("sleep", ["sleep", "600"], {"PATH": os.environ["PATH"]}, tmp_path / "log").pid
    command: list[int] = []

    def started() -> bool:
        command[:] = [int(word) for word in Path(f"/proc/{guard}/task/{guard}/children").read_text().split()]
        return bool(command) and Path(f"/proc/{command[0]}/comm").read_text() == "sleep\n"

    wait_for(started)
    os.kill(guard, signal.SIGKILL)
    wait_for(lambda: not lives(command[0]), 2.0)


def test_stop_asks_first_and_kills_after_the_grace(keeper: Keeper, tmp_path: Path) -> None:
    polite = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
    deaf = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    for name, code in (("polite", polite), ("deaf", deaf)):
        keeper.start(
            name, [sys.executable, "-c", f"{code}print('up', flush=True)\ntime.sleep(600)"], {}, tmp_path / name
        )
        wait_for(lambda name=name: keeper.tail(name) == "up\n")
    assert keeper.stop("polite", 20.0).returncode == 3
    assert keeper.stop("deaf", 0.3).returncode == 128 + signal.SIGKILL
    assert keeper.stop("nobody", 1.0) is None


def test_asking_twice_starts_one(keeper: Keeper, tmp_path: Path) -> None:
    first = keeper.start("one", ["/bin/sleep", "600"], {}, tmp_path / "log")
    assert keeper.start("one", ["/bin/sleep", "600"], {}, tmp_path / "log") == first
    keeper.stop_all(1.0)
    assert keeper.start("one", ["/bin/sleep", "600"], {}, tmp_path / "log").pid != first.pid
    keeper.stop_all(0)


def test_words_reach_the_program_as_they_are_and_the_log_is_private(keeper: Keeper, tmp_path: Path) -> None:
    hostile = '$(touch x); "; rm -rf * | `id` \n -'
    keeper.start(
        "echo", [sys.executable, "-c", "import os,sys;print(sys.argv[1:],dict(os.environ))", hostile], {"A": hostile},
        tmp_path / "log",
    )  # fmt: skip
    wait_for(lambda: keeper.states()["echo"].returncode == 0)
    assert repr([hostile]) in keeper.tail("echo")
    assert repr(hostile) in keeper.tail("echo").partition("]")[2]
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_started_says_why(keeper: Keeper, tmp_path: Path) -> None:
    keeper.start("missing", ["/no/such/program"], {}, tmp_path / "log")
    wait_for(lambda: keeper.states()["missing"].returncode == 127)
    assert "No such file" in keeper.tail("missing")
    keeper.forget("missing")
    assert keeper.states() == {}
    with pytest.raises(InvalidInputError, match="no command"):
        keeper.start("empty", [], {}, tmp_path / "log")
