"""A plan for machines of this host, a stand-in engine and a stand-in router, and a controller over real Ray nodes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hetplan as hp
from hetplan.api import make_problem
from hetplan.catalog.engines import ENGINES
from hetplan.catalog.offers import Pool
from hetplan.estimator.base import make_estimator
from hetplan.estimator.pipeline import StageShape, pipeline_rates
from hetplan.policies import policy
from hetplan.runtime.controller.controller import Controller
from hetplan.runtime.controller.fleet import Fleet
from hetplan.runtime.controller.processes import Detached
from hetplan.runtime.controller.programs import Programs
from hetplan.runtime.controller.provider import LocalProvider
from hetplan.runtime.controller.ray_agents import LoopbackHead, RayAgents, make_token, ray_environment
from hetplan.runtime.controller.router import RouterTarget
from hetplan.runtime.controller.serving import Serving
from hetplan.runtime.router.settings import RouteSettings
from hetplan.solvers.base import PipelineChoice, Solution
from hetplan.solvers.build import build_plan

# Answers /health after a moment, as `vllm serve` does after a minute; other ranks only wait.
ENGINE = """
import http.server, os, sys, time
options = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--") and "=" in a)
assert "RAY_AUTH_TOKEN_PATH" not in os.environ
if "--headless" in sys.argv:
    time.sleep(3600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
time.sleep(0.3)
http.server.ThreadingHTTPServer((options["host"], int(options["port"])), Handler).serve_forever()
"""


def spot_plan(pipelines: Sequence[int]) -> hp.Plan:
    """A pipeline for each number of machines, all of them spot machines of this host."""
    problem = make_problem(
        model="qwen3-0.6b",
        cluster={"local-cpu": sum(pipelines)},
        market="owned",
        provider="local",
        region="here",
        workload=hp.Workload(input_tokens=20, output_tokens=60),
        engine="vllm-0.32",
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
    )
    (pool,) = problem.cluster.pools
    offer = pool.offer.replace(market="spot", price_usd_per_hour=0.1, notice_s=120.0)
    problem = problem.replace(cluster=problem.cluster.replace(pools=(Pool(offer=offer, count=pool.count),)))
    machine, estimator = problem.cluster.instance_types[0], make_estimator(problem)
    layers = problem.model.layer_count
    choices, total = [], 0.0
    for count in pipelines:
        cuts = [layers * i // count for i in range(count + 1)]
        shapes = tuple(StageShape((cuts[i], cuts[i + 1]), machine, 1, i) for i in range(count))
        choices.append(PipelineChoice(shapes, (offer.name,) * count, 4))
        total += float(pipeline_rates(problem, estimator, shapes, 4).requests_per_s[0])
    return build_plan(problem, Solution(pipelines=tuple(choices), objective=total), solver="even", seed=0)


class FileRouter:
    """Takes targets and keeps them in a file, as a router outlives the controller."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def set_targets(
        self, targets: Sequence[RouterTarget], routes: Sequence[RouteSettings], *, grace_s: float | None = None
    ) -> int:
        revision = self.read()[1] + 1
        self.path.write_text(json.dumps([list(targets), revision]))
        return revision

    async def targets(self) -> tuple[tuple[RouterTarget, ...], int]:
        return self.read()

    async def demand(self, window_s: float) -> dict[str, Any]:
        return {"covered_s": window_s, "demand": []}

    def read(self) -> tuple[tuple[RouterTarget, ...], int]:
        if not self.path.exists():
            return (), 0
        targets, revision = json.loads(self.path.read_text())
        return tuple(RouterTarget(*t) for t in targets), revision


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def prepare(folder: Path) -> LoopbackHead:
    """A head with a token, ready to be joined."""
    make_token(folder / "token")
    os.environ.update(ray_environment(folder / "token"))
    address = folder / "address"
    if not address.exists():
        address.write_text(f"127.0.0.1:{free_port()}")
    return LoopbackHead(folder, address.read_text())


def controller_of(
    folder: Path, pipelines: Sequence[int], on_event: Callable[[str, dict[str, Any]], None]
) -> Controller:
    address = (folder / "address").read_text()
    engine = folder / "engine.py"
    engine.write_text(ENGINE)
    plan = spot_plan(pipelines)
    fleet = Fleet(
        lambda plan: Programs(plan, ENGINES["vllm-0.32"], vllm=(sys.executable, str(engine))),
        policy("both"),
        first_port=int((folder / "first_port").read_text()),
        drain_s=5.0,
    )
    agents = RayAgents(address, f"fleet-{folder.name}")
    agents.connect()
    return Controller(
        Serving.of(plan),
        fleet,
        folder / "controller",
        provider=LocalProvider(address, folder / "machines"),
        agents=agents,
        router=FileRouter(folder / "router.json"),
        on_event=on_event,
        interval_s=0.2,
    )


def end_machines(folder: Path) -> None:
    for log in (folder / "machines").glob("*.log"):
        Detached(log).end(0.0)


def main(folder: Path, *pipelines: str) -> None:
    """Run a controller until SIGTERM, with events as lines in a file."""
    prepare(folder)
    events = (folder / "events.jsonl").open("a")

    def tell(name: str, values: dict[str, Any]) -> None:
        events.write(json.dumps({"event": name, **values}) + "\n")
        events.flush()

    controller = controller_of(folder, [int(p) for p in pipelines], tell)

    async def run() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, controller.drain)
        noticed: set[str] = set()

        async def read_notices() -> None:
            while True:
                for path in folder.glob("notice-*"):
                    if path.name not in noticed:
                        noticed.add(path.name)
                        controller.notice(path.name.removeprefix("notice-"), float(path.read_text()))
                await asyncio.sleep(0.1)

        reading = asyncio.create_task(read_notices())
        await controller.run()
        reading.cancel()

    asyncio.run(run())


def wait_for(found: Callable[[], Any], within_s: float, say: Callable[[], str] = str) -> Any:
    end = time.monotonic() + within_s
    while not (value := found()):
        assert time.monotonic() < end, f"did not happen in {within_s} s\n{say()}"
        time.sleep(0.1)
    return value


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
