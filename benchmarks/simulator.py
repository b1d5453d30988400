"""How fast the simulator is, and how near to measured closed loops: python -m benchmarks.simulator [section ...].

Sections: compiling, hour, day, growth, measured; all by default. Traces and measured rows are read from the folder that
HETPLAN_DATA names; sections that need them say so where it is missing. What is timed runs in a process of its own that
has run a small fleet before, so that compiling is not in it; its peak memory is the whole process's.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import hetplan as hp
from benchmarks.clusters import GPUS_24, WORKLOAD
from benchmarks.placement import GIB, ROOT, _peak_bytes
from hetplan.catalog.models import get_model
from hetplan.catalog.tables import default_instance_type, get_calibration, get_gpu
from hetplan.estimator.replica import make_replica
from hetplan.scoring.closed_loops import PLAIN, ClosedLoop, read_closed_loops, simulate_closed_loop
from hetplan.simulator.engine import DONE
from hetplan.simulator.fleet import Fleet, Routing, kind_of_replica, kinds_of
from hetplan.simulator.traffic import Traffic
from hetplan.workload.traces import read_trace

DAY_S = 86_400.0
DAY_REQUESTS = 1_000_000
REPLICAS = 100
ROUTINGS: tuple[Routing, ...] = ("round_robin", "least_loaded")
HOUR_BAR_S, DAY_BAR_S, MEMORY_BAR = 10.0, 180.0, GIB
TPOT_BAR, TTFT_BAR = 0.10, 0.25


# ---- what is run


def data() -> Path | None:
    """The folder of traces and measured rows."""
    named = os.environ.get("HETPLAN_DATA")
    return Path(named) if named else None


def azure_hour(limit: int = 2048) -> hp.Trace:
    """The Azure conversation trace without prompts that are longer."""
    folder = data()
    if folder is None:
        raise SystemExit("set HETPLAN_DATA to the folder that holds azure_llm_trace/conv.csv")
    return read_trace(folder / "azure_llm_trace" / "conv.csv", max_input_tokens=limit)


def fleet_of(plan: hp.Plan, traffic: Traffic, routing: Routing = "round_robin", log_steps: int = 0) -> Fleet:
    """A plan's replicas, all of them there."""
    fleet = Fleet(kinds_of(plan), traffic, routing=routing, log_steps=log_steps)
    for kind, pipeline in enumerate(p for deployment in plan.deployments for p in deployment.pipelines):
        for _ in range(pipeline.count):
            fleet.add(kind)
    return fleet


def plan_24() -> hp.Plan:
    """Llama-3.1-70B on 24 GPUs, by Algorithm 1."""
    return hp.optimize(model="llama-3.1-70b", cluster=GPUS_24, workload=WORKLOAD, solver="dp-beam")


def plan_of(replicas: int) -> hp.Plan:
    """As many replicas of Llama-3.1-8B, an L40S each."""
    plan = hp.optimize(model="llama-3.1-8b", cluster={"g6e.xlarge": replicas}, workload=WORKLOAD, solver="dp-beam")
    assert sum(p.count for p in plan.deployments[0].pipelines) == replicas
    return plan


def warm_up() -> float:
    """Compile the simulator on a small fleet; the seconds."""
    gpu = get_gpu("L40S")
    replica = make_replica(
        get_model("llama-3.1-8b"),
        default_instance_type(gpu),
        get_calibration(gpu),
        tensor_parallel=1,
        pipeline_parallel=1,
        schedule="in_flight",
        engine="vllm",
        estimator="calibrated",
        gpu_memory_utilization=0.9,
    )
    load = hp.Workload(input_tokens=300, output_tokens=60, requests_per_s=1.0)
    kind = kind_of_replica(replica, load, max_num_seqs=64)
    began = time.perf_counter()
    for routing in ROUTINGS:
        fleet = Fleet([kind], Traffic.poisson(load, duration_s=60, seed=0), routing=routing)
        fleet.add(0)
        fleet.advance(math.inf)
    return time.perf_counter() - began


def timed(make: Callable[[], Fleet], times: int) -> tuple[float, float, Fleet]:
    """Best seconds to build the fleet, step tables included, and best to run it to its drain."""
    builds, runs = [], []
    for _ in range(times):
        began = time.perf_counter()
        fleet = make()
        builds.append(time.perf_counter() - began)
        began = time.perf_counter()
        fleet.advance(math.inf)
        runs.append(time.perf_counter() - began)
    assert (fleet.requests["status"] == DONE).all()
    return min(builds), min(runs), fleet


def figures(build_s: float, run_s: float, fleet: Fleet) -> dict[str, float]:
    """What a table shows of a run."""
    return {
        "build_s": build_s,
        "run_s": run_s,
        "requests": len(fleet.requests),
        "steps": int(fleet.replicas["steps"].sum()),
        "tokens": int(fleet.replicas["tokens"].sum()),
        "simulated_s": fleet.now_s,
        "peak_bytes": _peak_bytes(),
    }


def run_hour() -> dict[str, float]:
    """The Azure hour on the 24-GPU plan."""
    plan, traffic = plan_24(), Traffic.replay(azure_hour())
    found = figures(*timed(lambda: fleet_of(plan, traffic), 3))
    logged = fleet_of(plan, traffic, log_steps=2_000_000)
    logged.advance(math.inf)
    return found | {"events": len(logged.log) + len(traffic)}


def run_day(routing: Routing) -> dict[str, float]:
    """A day of a million requests on a hundred replicas."""
    load = hp.Workload.from_trace(azure_hour())
    (query,) = load.query_types
    load = load.replace(query_types=(query.replace(requests_per_s=DAY_REQUESTS / DAY_S),))
    traffic = Traffic.diurnal(load, seed=0)
    plan = plan_of(REPLICAS)
    return figures(*timed(lambda: fleet_of(plan, traffic, routing), 1))


def run_growth(routing: Routing, requests: int, replicas: int) -> dict[str, float]:
    """So many requests, one a second for each replica."""
    lengths = np.random.default_rng(0)
    load = hp.Workload(
        input_tokens=hp.TokenDistribution.from_samples(lengths.gamma(1.0, 763, 2000).clip(1, 2048).round()),
        output_tokens=hp.TokenDistribution.from_samples(lengths.gamma(2.0, 116, 2000).clip(2, 1000).round()),
        requests_per_s=float(replicas),
    )
    traffic = Traffic.poisson(load, duration_s=1.2 * requests / replicas, seed=0).head(requests)
    plan = plan_of(replicas)
    return figures(*timed(lambda: fleet_of(plan, traffic, routing), 3))


CASES: dict[str, Callable[..., dict[str, float]]] = {"hour": run_hour, "day": run_day, "growth": run_growth}


def case(name: str, *arguments: Any) -> dict[str, Any]:
    """A case in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.simulator", "--case", json.dumps([name, *arguments])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- tables


def yes(met: bool) -> str:
    """Whether a bar is met."""
    return "yes" if met else "no"


def compiling() -> None:
    """The first run with an empty compile cache, then with the cache."""
    print("\n## Compiling the simulator: a small fleet, imports left out\n")
    code = "from benchmarks.simulator import warm_up; print(warm_up())"
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        taken = [
            float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True,
                                 capture_output=True, text=True).stdout)
            for _ in range(2)
        ]  # fmt: skip
    print(f"empty cache {taken[0]:.1f} s, with the cache {taken[1]:.1f} s", flush=True)


def hour() -> None:
    """The Azure hour, to its drain."""
    print(f"\n## The Azure conversation hour, Llama-3.1-70B on 24 GPUs, best of 3 (bars: {HOUR_BAR_S:g} s, 1 GiB)\n")
    print("| requests | engine steps | events | build, s | run, s | events/s | peak, GiB | met |")
    print("|---|---|---|---|---|---|---|---|")
    found = case("hour")
    met = found["build_s"] + found["run_s"] < HOUR_BAR_S and found["peak_bytes"] <= MEMORY_BAR
    print(
        f"| {found['requests']:,} | {found['steps']:,} | {found['events']:,} | {found['build_s']:.2f} "
        f"| {found['run_s']:.2f} | {found['events'] / found['run_s']:,.0f} | {found['peak_bytes'] / GIB:.2f} "
        f"| {yes(met)} |",
        flush=True,
    )


def day() -> None:
    """A day of a million requests."""
    print(f"\n## A day of a million requests on {REPLICAS} replicas of Llama-3.1-8B (bar: {DAY_BAR_S:g} s)\n")
    print("| routing | requests | engine steps | build, s | run, s | requests/s | peak, GiB | met |")
    print("|---|---|---|---|---|---|---|---|")
    for routing in ROUTINGS:
        found = case("day", routing)
        print(
            f"| {routing} | {found['requests']:,} | {found['steps']:,} | {found['build_s']:.2f} | {found['run_s']:.1f} "
            f"| {found['requests'] / found['run_s']:,.0f} | {found['peak_bytes'] / GIB:.2f} "
            f"| {yes(found['build_s'] + found['run_s'] < DAY_BAR_S)} |",
            flush=True,
        )


def growth() -> None:
    """Requests doubled four times, then replicas; each replica gets one request a second."""
    print("\n## Growth, run alone, best of 3; one request a second for each replica\n")
    print("| routing | doubled | " + " | ".join(f"x{2**n}" for n in range(5)) + " | ratios |")
    print("|---|---|---|---|---|---|---|---|")
    for routing in ROUTINGS:
        for label, sizes in (
            ("requests, from 12,500 on 25 replicas", [(12_500 * 2**n, 25) for n in range(5)]),
            ("replicas, from 25, 50,000 requests", [(50_000, 25 * 2**n) for n in range(5)]),
        ):
            taken = [case("growth", routing, *size)["run_s"] for size in sizes]
            ratios = ", ".join(f"{b / a:.2f}" for a, b in pairwise(taken))
            print(f"| {routing} | {label} | " + " | ".join(f"{s:.2f} s" for s in taken) + f" | {ratios} |", flush=True)


def measured() -> None:
    """Measured closed loops beside simulated ones, each with the clients of its source and with plain ones."""
    folder = data()
    if folder is None:
        print("\nmeasured closed loops: set HETPLAN_DATA")
        return
    loops = read_closed_loops(folder / "aiconfigurator" / "e2e_online_silicon.csv")
    print(f"\n## Measured closed loops (bars on H100: TPOT {TPOT_BAR:.0%}, TTFT {TTFT_BAR:.0%}, median errors)\n")
    seen: list[str] = []
    for loop in loops:
        if loop.clients.name not in seen:
            seen.append(loop.clients.name)
            print(f"- clients '{loop.clients.name}': {loop.clients.source}")
    print(
        "\n| rows | clients | count | TTFT: median error | bias | TPOT: median error | bias "
        "| TTFT, plain clients | bias | TPOT, plain clients | met |\n|" + "---|" * 11,
        flush=True,
    )
    began = time.perf_counter()
    own = {loop.run.line: simulate_closed_loop(loop) for loop in loops}
    plain = {
        loop.run.line: own[loop.run.line] if loop.clients is PLAIN else simulate_closed_loop(loop, PLAIN)
        for loop in loops
    }
    for label, some in groups(loops).items():
        facts = np.array([(loop.ttft_s, loop.tpot_s) for loop in some])
        errors = np.array([own[loop.run.line] for loop in some]) / facts - 1
        simple = np.array([plain[loop.run.line] for loop in some]) / facts - 1
        whole = ~np.isnan(errors).any(axis=1)
        errors, simple = errors[whole], simple[whole]
        (ttft, tpot), (ttft_bias, tpot_bias) = np.median(np.abs(errors), axis=0), np.median(errors, axis=0)
        ttft_plain, tpot_plain = np.median(np.abs(simple), axis=0)
        met = yes(tpot <= TPOT_BAR and ttft <= TTFT_BAR) if label.startswith("H100") else ""
        clients = ", ".join(dict.fromkeys(loop.clients.name for loop in some))
        refused = f" ({len(some) - whole.sum()} refused)" if not whole.all() else ""
        print(
            f"| {label} | {clients} | {len(some)}{refused} | {ttft:.1%} | {ttft_bias:+.1%} | {tpot:.1%} "
            f"| {tpot_bias:+.1%} | {ttft_plain:.1%} | {np.median(simple[:, 0]):+.1%} | {tpot_plain:.1%} | {met} |",
            flush=True,
        )
    print(
        f"\n{time.perf_counter() - began:.0f} s. Two overheads of each engine were learnt from the TPOT of such rows, "
        "none from their TTFT."
    )


def groups(loops: list[ClosedLoop]) -> dict[str, list[ClosedLoop]]:
    """All H100 rows, then by engine and model; H200's and the outliers apart."""
    found: dict[str, list[ClosedLoop]] = {"H100": []}
    for loop in loops:
        gpu, model = loop.run.gpu.split("-")[0], loop.run.model.removeprefix("llama-3.1-")
        outlier = "outliers" in loop.run.group
        eight = ", FP8 weights" if loop.run.weight_dtype == "fp8" else ""
        label = "8B FP8, vLLM on H200 (outliers)" if outlier else f"{gpu}, {loop.backend}, {model.upper()}{eight}"
        if gpu == "H100":
            found["H100"].append(loop)
        found.setdefault(label, []).append(loop)
    return found


SECTIONS: dict[str, Callable[[], None]] = {f.__name__: f for f in (compiling, hour, day, growth, measured)}


def simulator() -> None:
    """All sections."""
    for name, section in SECTIONS.items():
        if name in ("hour", "day") and data() is None:
            print(f"\n{name}: set HETPLAN_DATA")
            continue
        section()


def main() -> None:
    """Those named on the command line, or all; or, in its own process, one case."""
    if sys.argv[1:2] == ["--case"]:
        name, *arguments = json.loads(sys.argv[2])
        warm_up()
        print(json.dumps(CASES[name](*arguments)))
        return
    unknown = [name for name in sys.argv[1:] if name not in SECTIONS]
    if unknown:
        raise SystemExit(f"no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if not sys.argv[1:]:
        simulator()
    for name in sys.argv[1:]:
        SECTIONS[name]()


if __name__ == "__main__":
    main()
