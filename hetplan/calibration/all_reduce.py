"""All-reduce between processes of this node: starts a process for each rank and reads what the first one measured."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hetplan.calibration.lattice import Kind, Task
from hetplan.calibration.measure import Timing
from hetplan.errors import UnsupportedFeatureError

WORKER = "hetplan.calibration.all_reduce_worker"
# Importing torch and forming a group takes a minute on a slow disk.
START_LIMIT_S = 180.0
_POLL_S = 0.05
_TAIL = 600


def time_all_reduce(
    kind: Kind, tasks: Sequence[Task], limit_s: float, *, start_limit_s: float = START_LIMIT_S
) -> list[Timing]:
    """Time messages of one group size and dtype.

    Parameters
    ----------
    kind : str
        GPUs 0, 1, 2 ... over NCCL or RCCL; on a CPU, processes over gloo.
    tasks : sequence of Task
    limit_s : float
        Seconds of samples of each message.
    start_limit_s : float
        Seconds that the processes may take besides, until they are ended.

    Raises
    ------
    UnsupportedFeatureError
        If a process fails or the time is over; the message ends with what it last wrote.
    """
    ranks = tasks[0].shape["tensor_parallel"]
    # mkdtemp's folder is its owner's alone: whoever can write the store can join the group.
    with tempfile.TemporaryDirectory(prefix="hetplan-") as name, ExitStack() as stack:
        folder = Path(name)
        started = []
        for rank in range(ranks):
            argv = [
                *(sys.executable, "-m", WORKER, "--kind", kind, "--dtype", tasks[0].dtype),
                *("--rank", str(rank), "--ranks", str(ranks), "--store", str(folder / "store")),
                *("--limit-s", str(limit_s)),
                *(str(task.shape["message_bytes"]) for task in tasks),
            ]
            out = stack.enter_context((folder / f"out-{rank}").open("wb"))
            errors = stack.enter_context((folder / f"errors-{rank}").open("wb"))
            process = subprocess.Popen(  # noqa: S603 (this package's own module, no shell)
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=_environment()
            )
            stack.callback(_end, process)
            started.append(process)
        _wait(started, folder, start_limit_s + 3 * len(tasks) * limit_s)
        lines = (folder / "out-0").read_text(encoding="utf-8").splitlines()
    timings = [Timing(**json.loads(line)) for line in lines]
    if len(timings) != len(tasks):
        raise UnsupportedFeatureError(f"all-reduce of {ranks}: {len(timings)} answers for {len(tasks)} messages")
    return timings


def _wait(started: list[subprocess.Popen[bytes]], folder: Path, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in started]
        for rank, code in enumerate(codes):
            if code:
                tail = (folder / f"errors-{rank}").read_text(encoding="utf-8", errors="replace").strip()[-_TAIL:]
                raise UnsupportedFeatureError(f"all-reduce: rank {rank} of {len(codes)} ended with {code}: {tail}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end:
            raise UnsupportedFeatureError(f"all-reduce: {len(codes)} ranks did not end within {limit_s:.0f} s")
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _environment() -> dict[str, str]:
    """Loopback only, and this package wherever the parent has it from."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    return os.environ | {
        "PYTHONPATH": path,
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": "1",
    }
