"""How fast and how well allocation problems are solved: python -m benchmarks.allocation [section ...].

Sections: exact, roots, heuristics, quality, large; all by default. In one process, after one small problem that warms
up; the large instance in a process of its own, whose peak memory it prints.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import hetplan as hp
from hetplan.problem.allocation import DecisionsName
from hetplan.solvers.allocation.milp import literal_model, relaxed_usd
from hetplan.solvers.base import Progress, get_allocation_solver
from hetplan.verification import examine_plan

GIB = 2**30
Sizes = tuple[int, int, int]
# The paper's Gurobi, on its machine.
GUROBI_S = {(6, 6, 10): "4.2", (10, 10, 10): "13.0", (15, 15, 10): "601", (20, 20, 20): "> 600"}


def problem(sizes: Sizes, seed: int, decisions: DecisionsName) -> hp.AllocationProblem:
    """A canonical instance."""
    query_types, models, tiers = sizes
    return hp.AllocationProblem.canonical(
        query_types=query_types, models=models, tiers=tiers, seed=seed, decisions=decisions
    )


def _solved(asked: hp.AllocationProblem, solver: str, limit_s: float, **options: float) -> tuple[hp.Plan, float]:
    began = time.perf_counter()
    plan = hp.optimize(asked, solver=solver, time_limit_s=limit_s, **options)
    return plan, time.perf_counter() - began


def exact() -> None:
    """To a gap of 0.1%, the bound confirmed by the checker."""
    aims: list[tuple[Sizes, DecisionsName, float | None, float]] = [
        ((6, 6, 10), "paper", 2.0, 60.0),
        ((10, 10, 10), "paper", 20.0, 60.0),
        ((15, 15, 10), "paper", 120.0, 120.0),
        ((20, 20, 20), "paper", None, 600.0),
        ((20, 20, 20), "default", 60.0, 60.0),
    ]
    print("\n## Branch and price to a gap of 0.1%\n")
    print("| size | decisions | seed | $ | bound | gap | s | aim, s | met | verified in s | paper's Gurobi, s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for sizes, decisions, aim_s, limit_s in aims:
        for seed in range(4):
            plan, taken = _solved(problem(sizes, seed, decisions), "milp", limit_s, gap=1e-3)
            began = time.perf_counter()
            violations, confirmed = examine_plan(plan)
            checked = time.perf_counter() - began
            gap = plan.gap or 0.0
            met = "" if aim_s is None else "yes" if gap <= 1e-3 and taken <= aim_s else "no"
            proof = f"{checked:.2f}" if confirmed and not violations else "not confirmed"
            known = GUROBI_S[sizes] if decisions == "paper" else ""
            aim = "" if aim_s is None else f"{aim_s:g}"
            print(
                f"| {sizes} | {decisions} | {seed} | {plan.objective:.3f} | {plan.bound:.3f} | {gap:.3%} | {taken:.2f} "
                f"| {aim} | {met} | {proof} | {known} |",
                flush=True,
            )


def roots() -> None:
    """Root bounds of the two formulations, before any branch."""
    print("\n## Root bounds: the paper's McCormick program and patterns by type\n")
    print("| size | seed | optimum | McCormick | % of it | s | patterns | % of it | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for sizes in ((6, 6, 10), (10, 10, 10)):
        for seed in range(4):
            asked = problem(sizes, seed, "paper")
            best = _solved(asked, "milp", 60.0)[0].objective
            began = time.perf_counter()
            literal = relaxed_usd(literal_model(asked))
            literal_s = time.perf_counter() - began
            # What is reported before the tree has a node is of the root.
            first: list[tuple[float, float]] = []

            def note(made: Progress, first: list[tuple[float, float]] = first) -> None:
                if made.bound is not None and made.message == "0 nodes":
                    first.append((made.bound, made.elapsed_s))

            hp.optimize(asked, solver="milp", time_limit_s=60.0, on_incumbent=note)
            root, root_s = max(first)
            print(
                f"| {sizes} | {seed} | {best:.3f} | {literal:.3f} | {literal / best:.1%} | {literal_s:.2f} "
                f"| {root:.3f} | {root / best:.1%} | {root_s:.2f} |",
                flush=True,
            )


def heuristics() -> None:
    """GH and AGH, their tables included, best of three."""
    print("\n## The paper's heuristics at (20, 20, 20), tables included, best of three (aim: 10 ms and 100 ms)\n")
    print("| decisions | seed | gh, ms | agh, ms | gh, $ | agh, $ |")
    print("|---|---|---|---|---|---|")
    for decisions in ("paper", "default"):
        for seed in range(4):
            asked = problem((20, 20, 20), seed, decisions)
            cells, costs = [], []
            for name in ("gh", "agh"):
                solver = get_allocation_solver(name)
                best = min(_seconds(lambda solver=solver, asked=asked: solver.solve(asked)) for _ in range(3))
                cells.append(f"{best * 1e3:.1f}")
                costs.append(f"{solver.solve(asked).assignment.usd:.2f}")
            print(f"| {decisions} | {seed} | {' | '.join([*cells, *costs])} |", flush=True)


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def quality() -> None:
    """The default solver in two seconds against the certified optimum."""
    print("\n## auto in 2 s, default decisions, against the certified optimum (aims: 1% and 3%)\n")
    print("| size | median | worst | all demand served where the optimum does | optimum certified to | met |")
    print("|---|---|---|---|---|---|")
    for sizes, aim in (((10, 10, 10), 0.01), ((20, 20, 20), 0.03)):
        above, served, gaps = [], True, []
        for seed in range(10):
            asked = problem(sizes, seed, "default")
            quick, _ = _solved(asked, "auto", 2.0)
            best, _ = _solved(asked, "milp", 120.0, gap=1e-3)
            above.append(quick.objective / best.objective - 1)
            gaps.append(best.gap or 0.0)
            served = served and quick.requests_per_s >= best.requests_per_s * (1 - 1e-9)
        met = "yes" if max(above) <= aim and served else "no"
        print(
            f"| {sizes} | {statistics.median(above):.2%} | {max(above):.2%} | {'yes' if served else 'no'} "
            f"| {max(gaps):.2%} | {met} |",
            flush=True,
        )


def large() -> None:
    """(100, 40, 60) in a process of its own."""
    print("\n## (100, 40, 60) in 60 s (aim: a plan with a bound, under 4 GiB)\n")
    print("| $ | bound | gap | s | peak, GiB |\n|---|---|---|---|---|", flush=True)
    subprocess.run([sys.executable, "-m", "benchmarks.allocation", "_large"], check=True)


def _large() -> None:
    plan, taken = _solved(problem((100, 40, 60), 0, "default"), "auto", 60.0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    print(f"| {plan.objective:.2f} | {plan.bound:.2f} | {plan.gap:.1%} | {taken:.1f} | {peak:.2f} |", flush=True)


SECTIONS = {f.__name__: f for f in (exact, roots, heuristics, quality, large)}


def allocation() -> None:
    """All sections."""
    for section in SECTIONS.values():
        section()


def main() -> None:
    """Those named on the command line, or all."""
    small = problem((4, 4, 5), 0, "default")
    examine_plan(hp.optimize(small))
    hp.optimize(small, solver="gh")
    for name in sys.argv[1:] or SECTIONS:
        (SECTIONS | {"_large": _large})[name]()


if __name__ == "__main__":
    main()
