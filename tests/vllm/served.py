"""A plan that `hetplan serve` keeps on machines of this host: what runs there, how it is killed, and how it is."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from controller_cluster import end_machines, free_port

import hetplan as hp
from hetplan.runtime.controller.agent import own_folder
from hetplan.runtime.controller.processes import GUARD, Detached

Kind = Literal["node", "agent", "store", "engine", "router", "controller"]
KINDS: tuple[Kind, ...] = ("node", "agent", "store", "engine", "router", "controller")
FIRST_PORT = 8600


class Running(NamedTuple):
    """A process under its guard: what it is of, the guard, who started that, and the process itself."""

    log: Path
    guard: int
    starter: int
    process: int


class Controlled:
    """`hetplan serve` as a process, and all that it has started, found by their command lines.

    Parameters
    ----------
    folder : path
        For the state, the plan and the events.
    plan : Plan
        One pipeline.
    model, shards : path
    vllm : path
        The program.
    variables : mapping
        For engines.
    """

    def __init__(
        self, folder: Path, plan: hp.Plan, model: Path, shards: Path, vllm: Path, variables: Mapping[str, str]
    ) -> None:
        self.folder, self.state_folder, self.model = folder, folder / "state", model.name
        self.events_path = folder / "events.jsonl"
        plan.save(folder / "plan.json")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = " ".join(shlex.quote(f"{name}={value}") for name, value in variables.items())
        self._command = [sys.executable, "-m", "hetplan", "serve", str(folder / "plan.json"), f"--model={model}"]
        self._command += [f"--store={shards}", f"--state={self.state_folder}", f"--port={port}", "--policy=both"]
        self._command += [f"--first-port={FIRST_PORT}", f"--vllm=env {words} {shlex.quote(str(vllm))}"]
        fleet = f"fleet-{hashlib.sha256(str(self.state_folder).encode()).hexdigest()[:12]}"
        self.fleet_folder = own_folder() / fleet
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.events_path.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)

    def engine_url(self, pipeline: int) -> str:
        (generation,) = (g for g in self.state()["generations"] if g["pipeline"] == pipeline)
        return f"http://127.0.0.1:{generation['port']}"

    def state(self) -> dict[str, Any]:
        """What the controller has written down; empty before it has."""
        try:
            found: dict[str, Any] = json.loads((self.state_folder / "state.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def machines(self) -> list[str]:
        """Of the only generation, by rank."""
        (generation,) = self.state()["generations"]
        return list(generation["machines"])

    def store(self, machine: str) -> Running | None:
        return self._running(self.fleet_folder / machine / "store.log")

    def engine(self, machine: str, generation: Mapping[str, Any] | None = None) -> Running | None:
        """Of a generation on it, by default of the only one."""
        if generation is None:
            (generation,) = self.state()["generations"]
        name = f"engine-{generation['pipeline']}-{generation['generation']}.log"
        return self._running(self.fleet_folder / machine / name)

    def router(self) -> Running | None:
        return self._running(self.state_folder / "router" / "router.log")

    def rss_bytes(self) -> dict[str, int]:
        """Resident memory of each part; the larger of two stores or agents."""
        found: dict[str, int] = {}
        if self.process is not None:
            found["controller"] = _rss_bytes(self.process.pid)
        router = self.router()
        if router is not None:
            found["router"] = _rss_bytes(router.process)
        names = [machine["name"] for machine in self.state()["machines"]]
        stores = [store for store in map(self.store, names) if store is not None]
        if stores:
            found["agents"] = max(_rss_bytes(store.starter) for store in stores)
            found["stores"] = max(_rss_bytes(store.process) for store in stores)
        return found

    def is_whole(self) -> bool:
        """One generation, which the router has and whose engines answer, and a store on each of its machines."""
        state = self.state()
        generations, targets = state.get("generations", []), state.get("targets")
        if len(generations) != 1 or targets != [[g["pipeline"], g["generation"]] for g in generations]:
            return False
        machines = generations[0]["machines"]
        if generations[0]["phase"] != "serving" or {m["name"] for m in state["machines"]} != set(machines):
            return False
        if self.process is None or self.process.poll() is not None or self.router() is None:
            return False
        # The state that was read: what it says now may be another.
        if any(self.store(m) is None or self.engine(m, generations[0]) is None for m in machines):
            return False
        health = _json(f"{self.url}/health")
        return health is not None and all(pipeline["healthy"] for pipeline in health["pipelines"])

    def kill(self, kind: Kind, rng: np.random.Generator) -> str:
        """Kill one of a kind; which it was. A killed controller is started again at once, as its service would be."""
        machine = str(rng.choice(self.machines()))
        if kind == "controller":
            assert self.process is not None
            self.process.kill()
            self.process.wait(30)
            self.start()
            return ""
        if kind == "router":
            return _kill(self.router(), "")
        if kind == "node":
            # The raylet and all that runs on the machine, at once.
            Detached(self.state_folder / "machines" / f"{machine}.log").end(0.0)
            return machine
        if kind == "agent":
            store = self.store(machine)
            assert store is not None
            os.kill(store.starter, signal.SIGKILL)
            return machine
        return _kill(self.store(machine) if kind == "store" else self.engine(machine), machine)

    def started_s(self) -> float:
        """When the controller that runs says that it has started; 0 before."""
        said = re.findall(r'"event": "controller_started", "at_s": ([\d.]+)', self.events_path.read_text())
        return float(said[-1]) if said else 0.0

    def drain(self, within_s: float) -> int:
        """End it all in peace; what the command ends with."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(within_s)

    def end(self) -> None:
        """Leave nothing behind."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        end_machines(self.state_folder)
        Detached(self.state_folder / "router" / "router.log").end(0.0)
        Detached(self.fleet_folder / "head.log").end(1.0)

    def say(self) -> str:
        return self.events_path.read_text("utf-8", "replace")[-6000:]

    def _running(self, log: Path) -> Running | None:
        return next((found for found in _guarded() if found.log == log), None)


def wait_until_whole(served: Controlled, within_s: float) -> None:
    end = time.monotonic() + within_s
    while not served.is_whole():
        assert time.monotonic() < end, f"not whole within {within_s} s\n{served.say()}"
        time.sleep(0.2)


def _guarded() -> Iterator[Running]:
    """All processes that run under guards of this user."""
    commands: dict[int, list[bytes]] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                commands[int(entry.name)] = (entry / "cmdline").read_bytes().split(b"\0")
                # The command's name, in brackets, may hold spaces.
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    guard = os.fsencode(GUARD)
    for pid, words in commands.items():
        if len(words) > 5 and words[3] == guard:
            below = [child for child, parent in parents.items() if parent == pid]
            if below:
                yield Running(Path(os.fsdecode(words[5])), pid, parents[pid], min(below))


def _kill(running: Running | None, which: str) -> str:
    assert running is not None
    os.kill(running.process, signal.SIGKILL)
    return which


def _rss_bytes(pid: int) -> int:
    said = Path(f"/proc/{pid}/status").read_text()
    (kib,) = re.findall(r"VmRSS:\s+(\d+) kB", said)
    return int(kib) * 1024


def _json(url: str) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (urllib.error.URLError, OSError, ValueError):
        return None
