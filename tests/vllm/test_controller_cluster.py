"""A plan on real Ray nodes and processes of this host: a notice, a lost machine, a killed controller, the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from controller_cluster import FileRouter, end_machines, free_port, prepare, wait_for

from hetplan.errors import InvalidInputError
from hetplan.runtime.controller.processes import Detached
from hetplan.runtime.controller.ray_agents import RayAgents, ray_environment, require_token

SCRIPT = Path(__file__).with_name("controller_cluster.py")


class Running:
    """A controller as a process, over a head that outlives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.router = FileRouter(folder / "router.json")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = (self.folder / "controller.log").open("ab")
        with log:
            self.process = subprocess.Popen([sys.executable, SCRIPT, self.folder, "2", "1"], stdout=log, stderr=log)

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [e for e in map(json.loads, lines) if name is None or e["event"] == name]

    def state(self) -> dict[str, Any]:
        return json.loads((self.folder / "controller" / "state.json").read_text())

    def say(self) -> str:
        events = "\n".join(map(str, self.events()[-30:]))
        return f"{events}\n{(self.folder / 'controller.log').read_text()[-3000:]}"

    def generation(self, pipeline: int) -> int:
        """The generation that the router sends to, once nothing else of the pipeline is left."""
        state = self.state()
        found = [g["generation"] for g in state["generations"] if g["pipeline"] == pipeline]
        return found[0] if len(found) == 1 and [pipeline, found[0]] in state["targets"] else 0

    def machine(self, pipeline: int, rank: int) -> str:
        (found,) = (g for g in self.state()["generations"] if g["pipeline"] == pipeline)
        return found["machines"][rank]

    def serves(self) -> bool:
        for target in self.router.read()[0]:
            with urllib.request.urlopen(f"http://{target.address}:{target.port}/health", timeout=5) as answer:
                assert answer.status == 200
        return {t.pipeline for t in self.router.read()[0]} == {1, 2}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    # Short: Ray makes sockets in it.
    folder = Path(tempfile.mkdtemp(prefix="hc-", dir="/tmp"))
    before = dict(os.environ)
    (folder / "first_port").write_text(str(free_port() // 100 * 100 % 20_000 + 20_000))
    head = prepare(folder)
    found = Running(folder)
    try:
        head.start()
        wait_for(lambda: "Ray runtime started" in head.tail(), 60, head.tail)
        found.start()
        yield found
    finally:
        if found.process is not None:
            found.process.kill()
            found.process.wait()
        end_machines(folder)
        head.end()
        os.environ.clear()
        os.environ.update(before)


def test_a_plan_is_started_and_lives_through_a_notice_a_loss_and_a_killed_controller(running: Running) -> None:
    wait_for(lambda: len(running.router.read()[0]) == 2, 90, running.say)
    assert running.serves()
    assert len(running.state()["machines"]) == 3

    # A notice: another machine, a generation beside the old one, the shunt, and only then the end of the old one.
    first = running.machine(2, 0)
    (running.folder / f"notice-{first}").write_text("120")
    wait_for(lambda: running.generation(2) == 2, 60, running.say)
    assert running.serves()
    wait_for(lambda: any(e["machine"] == first for e in running.events("released")), 20, running.say)
    told = [e["event"] for e in running.events() if e.get("pipeline") == 2 and e.get("generation") in (1, 2)]
    assert told[told.index("leaving") - 1] == "engine_ready"
    shunt = next(e for e in running.events("shunt") if {"pipeline": 2, "generation": 2} in e["targets"])
    retired = next(e for e in running.events("retired") if e["pipeline"] == 2)
    assert shunt["at_s"] <= retired["at_s"]
    assert not [e for e in running.events("engine_failed") if e["pipeline"] == 2]

    # A killed machine: noticed by itself, replaced, and the other pipeline goes on.
    lost = running.machine(1, 1)
    guard = Detached(running.folder / "machines" / f"{lost}.log").pid()
    assert guard is not None
    os.kill(guard, signal.SIGTERM)
    time.sleep(0.2)
    os.kill(guard, signal.SIGTERM)
    wait_for(lambda: running.events("machine_lost"), 30, running.say)
    wait_for(lambda: running.generation(1) == 2, 60, running.say)
    assert running.serves()

    # A killed controller: engines serve on, and the next controller takes them over as they are.
    before = running.state()
    assert running.process is not None
    running.process.kill()
    running.process.wait()
    assert running.serves()
    lost = running.machine(2, 0)
    running.start()
    wait_for(lambda: any(e["restarted"] for e in running.events("controller_started")), 60, running.say)
    wait_for(lambda: running.router.read()[1] > before["revision"], 30, running.say)
    assert running.state()["generations"] == before["generations"]
    (running.folder / f"notice-{lost}").write_text("60")
    wait_for(lambda: running.generation(2) == 3, 60, running.say)

    # The end: engines, then machines.
    running.process.terminate()
    assert running.process.wait(60) == 0, running.say()
    assert running.state()["machines"] == []
    assert [Detached(log).pid() for log in (running.folder / "machines").glob("*.log")] == [None] * 6


def test_who_has_no_token_is_refused(running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import ray, sys\nfrom hetplan.runtime.controller import loopback_ray\nloopback_ray.bind()\n"
    code += "ray.init(address=sys.argv[1], _node_ip_address='127.0.0.1', logging_level='error')"
    wrong = tmp_path / "token"
    wrong.write_text("0" * 64)
    own = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
        "HOME": str(tmp_path),
    }
    address = (running.folder / "address").read_text()
    tried = [
        subprocess.Popen([sys.executable, "-c", code, address], env=own | more, stderr=subprocess.DEVNULL)
        for more in ({}, ray_environment(wrong), ray_environment(running.folder / "token"))
    ]
    assert [process.wait(60) for process in tried] == [1, 1, 0]


def test_nothing_is_done_without_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidInputError, match="RAY_AUTH_MODE"):
        RayAgents("127.0.0.1:6379", "fleet")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(InvalidInputError, match="RAY_AUTH_TOKEN_PATH"):
        require_token()
    readable = tmp_path / "token"
    readable.write_text("t")
    readable.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(readable))
    with pytest.raises(InvalidInputError, match="chmod 600"):
        require_token()
