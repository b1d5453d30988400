"""`hetplan serve` with an allocation plan on real vLLM: served, asked for more, planned anew, ended by Ctrl-C."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allocated import KINDS, SMALL, TINY, Figures, Kind, problem, stream_ids
from environment import PATIENT, small_model, tiny_model

import hetplan as hp

PORT, ENGINES = 21_800, 21_810
URL = f"http://127.0.0.1:{PORT}"
LOOKS_S = 8.0
# So slow that a few requests a second take a second engine of the tiny model.
FIGURES = {SMALL: [Figures(0.2, 1.0, 2.0)] * 3, TINY: [Figures(0.05, 0.2, 3.0)] * 3}
RATE_PER_S, LABELS_PER_S = 1.0, 2.5
LABEL = KINDS[2]


@dataclass
class Served:
    """A server's process and what it says."""

    process: subprocess.Popen[str]
    state: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{"):
                self.events.append(json.loads(line))
            else:
                self.said.append(line)

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def until(self, found: Callable[[], bool], within_s: float) -> None:
        end = time.monotonic() + within_s
        while not found():
            assert self.process.poll() is None, self.said[-5:]
            assert time.monotonic() < end, self.events[-20:]
            time.sleep(0.1)

    def status(self) -> dict[str, Any]:
        words = [sys.executable, "-m", "hetplan", "status", str(self.state), "--json"]
        return dict(json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout))


@contextmanager
def serving(environment: Path, folder: Path, plan: hp.Plan, models: dict[str, Path]) -> Iterator[Served]:
    plan.save(folder / "plan.json")
    vllm = folder / "vllm"
    vllm.write_text(f'#!/bin/sh\nPYTHONPATH={PATIENT["PYTHONPATH"]} exec {environment}/bin/vllm "$@"\n')
    vllm.chmod(0o700)
    words = [sys.executable, "-m", "hetplan", "serve", str(folder / "plan.json"), f"--vllm={shlex.quote(str(vllm))}"]
    words += [f"--model={name}={path}" for name, path in models.items()]
    words += [f"--state={folder / 'state'}", f"--port={PORT}", f"--first-port={ENGINES}", f"--resolve-every={LOOKS_S}"]
    process = subprocess.Popen(
        words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )
    served = Served(process, folder / "state")
    listening = threading.Thread(target=served.listen, daemon=True)
    listening.start()
    try:
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(150)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        listening.join(10)
        if process.stderr is not None:
            process.stderr.close()


class Clients:
    """Requests of each type at a steady pace, each a stream whose tokens are kept."""

    def __init__(self) -> None:
        self.pace = {kind.name: kind.part * RATE_PER_S for kind in KINDS}
        self.streams: Counter[str] = Counter()
        self.odd: list[str] = []
        self._first: dict[tuple[str, str], list[int]] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._keep, args=(kind,), daemon=True) for kind in KINDS]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _keep(self, kind: Kind) -> None:
        asking: list[threading.Thread] = []
        while not self._over.wait(1 / self.pace[kind.name]):
            asking = [one for one in asking if one.is_alive()]
            asking.append(threading.Thread(target=self._ask, args=(kind,), daemon=True))
            asking[-1].start()
        for one in asking:
            one.join(60)

    def _ask(self, kind: Kind) -> None:
        try:
            model, ids = stream_ids(URL, kind)
        except (OSError, ValueError, KeyError) as error:
            model, ids = "none", [hash(repr(error))]
        with self._lock:
            self.streams[kind.name] += 1
            # One prompt for a type: each model answers it in one way.
            if self._first.setdefault((kind.name, model), ids) != ids or len(ids) != kind.output_tokens:
                self.odd.append(f"{kind.name} of {model}: {ids}")


def test_a_shift_of_demand_is_planned_for_and_served_without_a_dropped_stream(
    environment: Path, tmp_path: Path
) -> None:
    models = {SMALL: small_model(environment), TINY: tiny_model(environment)}
    plan = hp.optimize(problem(list(models.values()), FIGURES, RATE_PER_S), solver="milp")
    assert Counter({d.model: d.pipelines[0].count for d in plan.deployments}) == {SMALL: 1, TINY: 1}
    began = time.monotonic()
    with serving(environment, tmp_path, plan, models) as served:
        served.until(lambda: len(served.of("engine_ready")) == 2 and len(served.of("shunt")) >= 1, 420)
        served.until(lambda: {t["pipeline"] for t in served.of("shunt")[-1]["targets"]} == {1, 2}, 30)
        ready_s = time.monotonic() - began
        with Clients() as clients:
            time.sleep(4 * LOOKS_S)
            assert served.of("resolving") == []
            found = served.status()
            assert [one["router"] for one in found["pipelines"]] == ["serving", "serving"]
            assert {line["query_type"] for line in found["demand"]} == {kind.name for kind in KINDS}
            shifted = time.monotonic()
            clients.pace[LABEL.name] = LABELS_PER_S
            served.until(lambda: bool(served.of("adopting")), 8 * LOOKS_S)
            adopted_s = time.monotonic() - shifted
            served.until(lambda: _rests(served), 420)
            applied_s = time.monotonic() - shifted
            time.sleep(LOOKS_S)
        (adopting,) = served.of("adopting")
        assert adopting["gain"] > adopting["cost"]
        pipelines = Counter(one["model"] for one in served.status()["pipelines"] if one["phase"] == "serving")
        assert pipelines[TINY] == 2, pipelines
        assert pipelines[SMALL] == 1, pipelines
        assert clients.odd == []
        print(
            f"ready after {ready_s:.0f} s; {sum(clients.streams.values())} streams, none lost or changed; demand "
            f"shifted, planned anew after {adopted_s:.0f} s, served after {applied_s:.0f} s, gain "
            f"{adopting['gain']:.2f} for {adopting['cost']:.2f} {adopting['unit']}"
        )
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(150) == 0
    assert served.of("ended")


def _rests(served: Served) -> bool:
    """All engines that the router has are those of the plan, and nothing leaves."""
    state = json.loads((served.state / "state.json").read_text())
    wanted = {slot["pipeline"] for slot in state["slots"] if slot["origin"]["serving"] == state["serving"]}
    phases = Counter(generation["phase"] for generation in state["generations"])
    return phases == {"serving": len(wanted)} and {key[0] for key in state["targets"]} == wanted and len(wanted) > 2
