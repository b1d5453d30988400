"""A small trace sent to real vLLM on this CPU, and the same trace simulated with this CPU's calibration."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from conftest import local_plan
from environment import small_model
from servers import Cluster, token_times

import hetplan as hp
from hetplan.catalog.calibration import Calibration

PORT = 8400
MEMORY_SHARE = 0.15
REQUESTS, RATE = 40, 0.8
# Lengths that differ, so that steps mix prompts and decoding.
PROMPTS, ANSWERS = (16, 96), (8, 48)


class Lived(NamedTuple):
    """Seconds of each request: measured by a client, and simulated."""

    measured_ttft_s: np.ndarray
    simulated_ttft_s: np.ndarray
    measured_tpot_s: np.ndarray
    simulated_tpot_s: np.ndarray

    def ratio(self, name: str) -> float:
        """Simulated over measured mean of "ttft" or "tpot"."""
        return float(getattr(self, f"simulated_{name}_s").mean() / getattr(self, f"measured_{name}_s").mean())


def live_through(environment: Path, calibration: Calibration, folder: Path, *, seed: int = 0) -> Lived:
    """Start an engine by its launch script, send the trace, and simulate it."""
    model = small_model(environment)
    generator = np.random.default_rng(seed)
    prompt, answer = (generator.integers(low, high + 1, size=REQUESTS) for low, high in (PROMPTS, ANSWERS))
    arrival = np.cumsum(generator.exponential(1 / RATE, size=REQUESTS))
    arrival -= arrival[0]
    trace = hp.Trace("small", "drawn", arrival, prompt, answer)
    workload = hp.Workload(input_tokens=float(prompt.mean()), output_tokens=float(answer.mean()))
    plan = local_plan(
        model, [[8]], workload=workload, calibrations={"local-cpu": calibration}, memory_share=MEMORY_SHARE
    )
    hp.launch(plan, out=folder, model=str(model), first_port=PORT)
    cluster = Cluster(folder, environment)
    try:
        cluster.start()
        token_times(PORT, [5] * 16, 8, model.name)
        began = time.perf_counter() + 0.5

        def send(i: int) -> tuple[float, list[float]]:
            time.sleep(max(began + float(arrival[i]) - time.perf_counter(), 0.0))
            sent = time.perf_counter()
            # Prompts that share nothing: the prefix cache must not answer for the engine.
            ids = np.random.default_rng(i).integers(0, 256, size=int(prompt[i])).tolist()
            return sent, token_times(PORT, ids, int(answer[i]), model.name)

        with ThreadPoolExecutor(REQUESTS) as pool:
            found = list(pool.map(send, range(REQUESTS)))
    finally:
        cluster.stop()
    run = hp.simulate(plan, trace)
    counts = [len(times) for _, times in found]
    if counts != answer.tolist():
        raise RuntimeError(f"asked for {answer.tolist()} tokens, got {counts}")
    return Lived(
        measured_ttft_s=np.array([times[0] - sent for sent, times in found]),
        simulated_ttft_s=run.latency("ttft_s"),
        measured_tpot_s=np.array([(times[-1] - times[0]) / (len(times) - 1) for _, times in found]),
        simulated_tpot_s=run.latency("tpot_s"),
    )
