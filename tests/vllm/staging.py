"""Plans with stages of their own, the stores beside their engines, and the memory that both take."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import hetplan as hp
from hetplan.api import make_problem
from hetplan.estimator.base import make_estimator
from hetplan.estimator.pipeline import StageShape, pipeline_rates
from hetplan.runtime.tensor_store.client import StoreError, connect
from hetplan.solvers.base import PipelineChoice, Solution
from hetplan.solvers.build import build_plan

HETPLAN = Path(sys.executable).parent / "hetplan"
GPUS_A_MACHINE = 4


def store_command(shards: Path, socket: Path) -> list[str | Path]:
    """A store started by hand, with no limit on memory."""
    return [HETPLAN, "store", "serve", "--socket", socket, "--shards", shards]


class StageAsked(NamedTuple):
    """How many layers, on how many processes, on which machine."""

    layers: int
    tensor_parallel: int
    node: int


def staged_plan(
    model: Path,
    stages: Sequence[tuple[int, int, int]],
    *,
    memory_share: float = 0.25,
    handover_sequences: int = 0,
    spot: bool = False,
) -> hp.Plan:
    """One pipeline of stages (layers, degree, machine) on local machines of four processes each, owned or spot."""
    asked = [StageAsked(*stage) for stage in stages]
    machines = asked[-1].node + 1
    problem = make_problem(
        model=model,
        cluster={"local-cpu": machines},
        market="owned",
        provider="local",
        region="here",
        workload=hp.Workload(input_tokens=20, output_tokens=60),
        engine="hetplan",
        max_model_len=1024,
        gpu_memory_utilization=memory_share,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        handover_sequences=handover_sequences,
    )
    machine = problem.cluster.instance_types[0].replace(gpu_count=GPUS_A_MACHINE)
    problem = problem.replace(cluster=problem.cluster.replace(instance_types=(machine,)))
    if spot:
        (pool,) = problem.cluster.pools
        offer = pool.offer.replace(market="spot", price_usd_per_hour=0.1, notice_s=120.0)
        problem = problem.replace(cluster=problem.cluster.replace(pools=(pool.replace(offer=offer),)))
    estimator = make_estimator(problem)
    ends = [sum(stage.layers for stage in asked[: i + 1]) for i in range(len(asked))]
    shapes = tuple(
        StageShape((stop - stage.layers, stop), machine, stage.tensor_parallel, stage.node)
        for stage, stop in zip(asked, ends, strict=True)
    )
    offers = (problem.cluster.pools[0].offer.name,) * machines
    rate = float(pipeline_rates(problem, estimator, shapes, 4).requests_per_s[0])
    solution = Solution(pipelines=(PipelineChoice(shapes, offers, 4),), objective=rate)
    plan = build_plan(problem, solution, solver="even", seed=0)
    assert hp.verify(plan) == []
    return plan


def planned_blocks(plan: hp.Plan) -> int:
    """Blocks of KV cache by the planner's rule: the stage that can hold the fewest decides."""
    model = plan.placement.model
    block = 128
    return min(
        stage.kv_cache_bytes
        // sum(
            round(model.layer_kv_bytes_per_sequence(model.layer_pattern[layer], block, stage.tensor_parallel))
            for layer in range(*stage.layers)
        )
        for stage in plan.deployments[0].pipelines[0].stages
    )


def blocks_at_start(port: int) -> int:
    """Blocks of KV cache with which an engine says that it has started."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        said = answer.read().decode()
    (blocks,) = re.findall(r'^vllm:cache_config_info\{.*num_gpu_blocks="(\d+)"', said, re.MULTILINE)
    return int(blocks)


@dataclass
class NodeStore:
    """A store, started by its script in a launch folder, or by hand."""

    socket: Path
    command: Sequence[str | Path]
    variables: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, folder: Path, socket: Path, node: int = 0) -> NodeStore:
        """The store of a machine of a launch folder's first pipeline."""
        variables = {"HETPLAN_STORE": str(socket), "HETPLAN": str(HETPLAN)}
        return cls(socket, [folder / f"pipeline-1-node-{node}-store.sh"], variables)

    def start(self) -> None:
        self.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = self.socket.with_suffix(".log").open("ab")
        with log:
            self.process = subprocess.Popen(
                self.command, env=os.environ | self.variables, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + 60
        while True:
            try:
                self.status()
                return
            except StoreError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(self.socket.with_suffix(".log").read_text("utf-8")) from None
                time.sleep(0.1)

    def status(self) -> dict[str, Any]:
        with connect(self.socket, timeout_s=30) as store:
            return store.status()

    def kill(self) -> None:
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def __enter__(self) -> NodeStore:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def processes_of(sessions: Collection[int]) -> list[int]:
    """All processes of sessions: engines and stores are each started in one of their own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                # The command's name, in brackets, may hold spaces.
                if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) in sessions:
                    found.append(int(entry.name))
    return found


def total_pss_bytes(sessions: Collection[int]) -> int:
    """Memory of all processes of sessions, each shared page counted once among those that share it."""
    return sum(_pss_bytes(Path(f"/proc/{pid}/smaps_rollup")) for pid in processes_of(sessions))


def weights_pss_bytes(sessions: Collection[int]) -> int:
    """Of that, the pages of the store's memory."""
    return sum(_pss_bytes(Path(f"/proc/{pid}/smaps"), "memfd:hetplan-weights") for pid in processes_of(sessions))


def _pss_bytes(path: Path, name: str | None = None) -> int:
    total, counts = 0, name is None
    with suppress(OSError):
        for line in path.read_text().splitlines():
            if name is not None and re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                counts = name in line
            elif counts and line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total
