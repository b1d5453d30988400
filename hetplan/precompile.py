"""Compile the searches and the checker once per installation: ``python -m hetplan.precompile``, one to two minutes.

Without it the first ``optimize`` takes some 20 s longer, the first of a large inventory 40 s more, the first of an
allocation problem 50 s, the first ``simulate`` 20 s, and the first ``verify`` of a plan whose bound is proven by prices
another 40 s.
"""

from __future__ import annotations

import multiprocessing
import sys
import time

from hetplan import api
from hetplan.problem.allocation import AllocationProblem
from hetplan.simulator.traffic import Traffic
from hetplan.workload.requests import Workload

_WORKLOAD = Workload(input_tokens=763, output_tokens=232)
# The last has more sets of machines than are enumerated.
_SMALL = {"g6.12xlarge": 1, "g5.12xlarge": 1}
_LARGE = {"g6.xlarge": 40, "g5.xlarge": 40}


def compile_search_and_check() -> None:
    """A small inventory, planned and checked."""
    api.verify(api.optimize(model="llama-3.1-8b", cluster=_SMALL, workload=_WORKLOAD))


def compile_column_generation() -> None:
    """A larger one, planned."""
    api.optimize(model="llama-3.1-8b", cluster=_LARGE, workload=_WORKLOAD, solver="exact", gap=0.02, time_limit_s=300.0)


def compile_allocation() -> None:
    """A small allocation problem, planned by all solvers and checked."""
    problem = AllocationProblem.canonical(query_types=4, models=4, tiers=5, seed=0)
    api.verify(api.optimize(problem, solver="auto", time_limit_s=300.0))
    api.optimize(problem, solver="gh")


def compile_simulator() -> None:
    """A moment of traffic on a small plan."""
    plan = api.optimize(model="llama-3.1-8b", cluster={"g6.xlarge": 1}, workload=_WORKLOAD, solver="dp-beam")
    api.simulate(plan, Traffic.closed_loop(_WORKLOAD, clients=2, requests=4))


def main() -> None:
    """Compile in several processes, as one compiles one function at a time."""
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    others = {
        "large inventories": context.Process(target=compile_column_generation),
        "allocation problems": context.Process(target=compile_allocation),
        "simulation": context.Process(target=compile_simulator),
    }
    for other in others.values():
        other.start()
    compile_search_and_check()
    for what, other in others.items():
        other.join()
        if other.exitcode:
            sys.stderr.write(f"{what} compile when they are first planned\n")
    sys.stderr.write(f"compiled in {time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
