"""Two engines of one model side by side: with weights of their own, or attached to a store."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from servers import READY_S
from staging import NodeStore, store_command, total_pss_bytes, weights_pss_bytes

from hetplan.runtime.tensor_store.client import connect
from hetplan.units import MIB


class Pair(NamedTuple):
    """Two engines of a large model: all their memory, that of the weights, and how long weights took to come."""

    pss_bytes: int
    weights_pss_bytes: int
    load_s: list[float]


# An engine in one process, as vLLM's own class makes it: less beside its weights than a server's three processes.
_ENGINE = """
import sys
from vllm import LLM, SamplingParams
options = dict(load_format="hetplan", worker_cls="hetplan.runtime.vllm_plugin.worker.StagedCpuWorker")
engine = LLM(model=sys.argv[1], dtype="float32", max_model_len=256, max_num_seqs=16, enforce_eager=True,
             kv_cache_memory_bytes=int(sys.argv[2]), **(options if sys.argv[3] == "store" else {}))
asked = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
engine.generate([{"prompt_token_ids": list(range(10, 30))}], asked, use_tqdm=False)
print("READY", flush=True)
sys.stdin.read()
"""
_ENGINE_CACHE_BYTES = 48 * MIB


def run_pair(environment: Path, folder: Path, model: Path, shards: Path | None) -> Pair:
    folder.mkdir()
    variables = dict.fromkeys(("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "OMP_NUM_THREADS"), "1")
    variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    layout = {"layers": [0, 8], "tensor_parallel": 1, "node": 0, "kv_cache_bytes": _ENGINE_CACHE_BYTES}
    engines, sessions = [], set()
    socket = folder / "s" / "store"
    with ExitStack() as stack:
        if shards is not None:
            store = stack.enter_context(NodeStore(socket, store_command(shards, socket)))
            assert store.process is not None
            sessions.add(store.process.pid)
            with connect(socket) as loader:
                loader.load(model=model.name, tensor_parallel=1, ranks=[0], layers=(0, 8), first=True, last=True)
            variables |= {"HETPLAN_STORE": str(socket), "HETPLAN_STORE_MODEL": model.name}
            variables["HETPLAN_LAYOUT"] = json.dumps({"stages": [layout]})
        how = "own" if shards is None else "store"
        for number in range(2):
            log = stack.enter_context((folder / f"{number}.log").open("wb"))
            engine = subprocess.Popen(
                [environment / "bin" / "python", "-c", _ENGINE, model, str(_ENGINE_CACHE_BYTES), how],
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            # Leaving it closes its input, at which the engine ends.
            stack.enter_context(engine)
            stack.callback(engine.kill)
            engines.append(engine)
            sessions.add(engine.pid)
        logs = [wait_until_ready(engine, folder / f"{number}.log") for number, engine in enumerate(engines)]
        said = r"Loading weights took ([\d.]+) seconds" if shards is None else r"attached .* MB in ([\d.]+) s"
        return Pair(
            total_pss_bytes(sessions),
            weights_pss_bytes(sessions),
            [float(found) for log in logs for found in re.findall(said, log)],
        )


def wait_until_ready(engine: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + READY_S
    while True:
        said = log.read_text("utf-8", "replace")
        if "READY" in said:
            return said
        assert engine.poll() is None, said[-3000:]
        assert time.monotonic() < end, said[-3000:]
        time.sleep(0.5)
