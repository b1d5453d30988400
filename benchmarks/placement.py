"""The exact search for placements: time, proven gap and memory, each case in a process of its own.

``python -m benchmarks placement`` runs everything and draws docs/figures/exact-search.png;
``python -m benchmarks.placement small fleet --figure out.png`` runs some sections.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import hetplan as hp
from benchmarks.clusters import GPUS_24, GPUS_76, WORKLOAD
from hetplan.catalog.tables import get_instance_type, list_offers
from hetplan.verification import examine_plan

ROOT = Path(__file__).resolve().parent.parent
FIGURE = ROOT / "docs" / "figures" / "exact-search.png"
GIB = 2**30

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen3-32b", "mixtral-8x22b", "deepseek-v3")
LOST = "p5.48xlarge"

# Multiples of its time limit after which a search is stopped from outside.
PATIENCE = 3
# Seconds for importing, compiling and the tiny problems; an empty compile cache takes most of them.
WARM_UP_S = 600.0
# A check may take this many times as long as the search.
CHECK_RATIO = 10
# Copies of the 76 GPUs in the figure, and the gap that is asked for.
COPIES = (1, 2, 4, 8, 16)
FIGURE_GAP = 0.02

Made = TypeVar("Made")


@dataclass(frozen=True)
class Case:
    """A search to time; ``check`` times the plan's verification too, ``lose`` plans again without one such machine."""

    model: str
    machines: Mapping[str, int]
    gap: float = 0.0
    limit_s: float = 60.0
    runs: int = 1
    check: bool = False
    lose: str | None = None

    @property
    def gpus(self) -> int:
        """GPUs of all machines."""
        return sum(count * get_instance_type(name).gpu_count for name, count in self.machines.items())


@dataclass
class Search:
    """What a search came to, and in how many seconds."""

    s: float
    requests_per_s: float
    bound: float
    gap: float
    status: str

    def cells(self) -> str:
        """Seconds, requests/s, bound and gap."""
        return f"{self.s:.2f} | {self.requests_per_s:.3f} | {self.bound:.3f} | {self.gap:.2%}"


@dataclass
class Outcome:
    """What the process of a case sent before it ended; ``failed`` says how, where it did not end well."""

    failed: str = ""
    search: Search | None = None
    idle_bytes: int = 0
    peak_bytes: int = 0
    check_s: float | None = None
    proven: str | None = None
    violations: list[str] = field(default_factory=list)
    cold: list[Search] = field(default_factory=list)
    warm: list[Search] = field(default_factory=list)


# --- the process of a case -------------------------------------------------------------------------------------------


def run_case(case: Case) -> None:
    """Search, and write what is found, a line of JSON at a time, so that a later crash takes nothing along."""
    _within(WARM_UP_S, _warm_up)
    _send(idle_bytes=_peak_bytes())
    try:
        found = [_search(case, case.machines) for _ in range(case.runs)]
        search, plan = min(found, key=lambda one: one[0].s)
        _send(search=asdict(search), peak_bytes=_peak_bytes())
        if case.check:
            _check(case, plan, search.s)
        if case.lose is not None:
            _plan_again(case, plan)
    except hp.HetplanError as error:
        _send(failed=f"{type(error).__name__}: {error}")


def _warm_up() -> None:
    """Both searches, of all sets of machines and by column generation, and the check."""
    for machines in ({"g6.xlarge": 2}, {"g6.xlarge": 40, "g5.xlarge": 40}):
        examine_plan(_optimize("llama-3.1-8b", machines, gap=0.05, limit_s=60.0))


def _optimize(
    model: str, machines: Mapping[str, int], *, gap: float, limit_s: float, warm_start: hp.Plan | None = None
) -> hp.Plan:
    return hp.optimize(
        model=model,
        cluster=dict(machines),
        workload=WORKLOAD,
        solver="exact",
        gap=gap,
        time_limit_s=limit_s,
        warm_start=warm_start,
    )


def _search(case: Case, machines: Mapping[str, int], warm_start: hp.Plan | None = None) -> tuple[Search, hp.Plan]:
    def search() -> hp.Plan:
        return _optimize(case.model, machines, gap=case.gap, limit_s=case.limit_s, warm_start=warm_start)

    began = time.perf_counter()
    plan = _within(PATIENCE * case.limit_s, search)
    taken = time.perf_counter() - began
    bound, gap = (float("inf") if value is None else value for value in (plan.bound, plan.gap))
    return Search(taken, plan.requests_per_s, bound, gap, plan.status), plan


def _check(case: Case, plan: hp.Plan, search_s: float) -> None:
    best = float("inf")
    for _ in range(case.runs):
        began = time.perf_counter()
        limit_s = max(60.0, PATIENCE * CHECK_RATIO * search_s)
        violations, proven = _within(limit_s, lambda: examine_plan(plan))
        best = min(best, time.perf_counter() - began)
    _send(check_s=best, violations=[str(one) for one in violations], proven=proven, peak_bytes=_peak_bytes())


def _plan_again(case: Case, plan: hp.Plan) -> None:
    """Without one machine, from nothing and from the old plan; in turns, as the machine's speed changes."""
    fewer = {name: count - (name == case.lose) for name, count in case.machines.items()}
    fewer = {name: count for name, count in fewer.items() if count}
    cold: list[Search] = []
    warm: list[Search] = []
    for _ in range(2):
        cold.append(_search(case, fewer)[0])
        warm.append(_search(case, fewer, plan)[0])
        _send(cold=[asdict(one) for one in cold], warm=[asdict(one) for one in warm], peak_bytes=_peak_bytes())


def _within(limit_s: float, run: Callable[[], Made]) -> Made:
    """Run, and end this process when it takes longer: a thread outside Python's lock watches compiled code too."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    try:
        return run()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _peak_bytes() -> int:
    """Most memory that this process held at a time."""
    status = Path("/proc/self/status")
    if status.exists():
        # Unlike getrusage's, this figure does not begin with that of the process that started this one.
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _send(**found: object) -> None:
    print(json.dumps(found), flush=True)


# --- the process that prints -----------------------------------------------------------------------------------------

_measured: dict[str, tuple[Case, Outcome]] = {}


def measure(case: Case) -> Outcome:
    """The outcome of a case, which is run once however many tables show it."""
    key = json.dumps(asdict(case))
    if key not in _measured:
        command = [sys.executable, "-m", "benchmarks.placement", "--case", key]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        found: dict[str, Any] = {}
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                found |= json.loads(line)
        for name in ("cold", "warm"):
            found[name] = [Search(**one) for one in found.get(name, [])]
        if found.get("search"):
            found["search"] = Search(**found["search"])
        if done.returncode:
            found["failed"] = _reason(done)
        _measured[key] = case, Outcome(**found)
    return _measured[key][1]


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """How a process ended, from what it left."""
    lines = done.stderr.strip().splitlines() or [""]
    late = [line for line in lines if line.startswith("Timeout (")]
    if late:
        return f"still running after {late[0].removeprefix('Timeout (').split(')')[0].split('.')[0]}"
    return f"killed by signal {-done.returncode}" if done.returncode < 0 else lines[-1]


def _failed(outcome: Outcome) -> str:
    return f"failed: {outcome.failed.replace('|', '/')}"


def _table(*heads: str) -> None:
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)


def _row(case: Case, *cells: object) -> None:
    print(f"| {case.gpus:,} | {case.model} | {' | '.join(map(str, cells))} |", flush=True)


def _yes(met: bool) -> str:
    return "yes" if met else "no"


def _small_case(model: str) -> Case:
    return Case(model, GPUS_24, runs=3, check=model == "llama-3.1-70b")


def _medium_case(model: str, limit_s: float) -> Case:
    return Case(model, GPUS_76, gap=0.01, limit_s=limit_s, check=limit_s == 10 and model == "llama-3.1-70b")


def _copies_case(model: str, copies: int) -> Case:
    return Case(model, {name: copies * count for name, count in GPUS_76.items()}, gap=FIGURE_GAP)


def fleet_machines() -> dict[str, int]:
    """About 5,000 GPUs of 30 types, drawn with seed 0 of those that AWS rents in us-west-2.

    Llama-3.1-70B runs on 40 machines of any one of those types alone, so that none has to be left out.
    """
    names = sorted(
        {offer.instance_type for offer in list_offers(region="us-west-2", market="on_demand", provider="aws")}
    )
    rng = np.random.default_rng(0)
    chosen = sorted(rng.choice(names, 30, replace=False).tolist())
    shares = rng.integers(1, 11, len(chosen))
    sizes = np.array([get_instance_type(name).gpu_count for name in chosen])
    counts = np.maximum(1, np.rint(shares * 5000 / (shares @ sizes))).astype(int)
    return dict(zip(chosen, counts.tolist(), strict=True))


def _fleet_case() -> Case:
    # The last half second goes beyond a limit.
    return Case("llama-3.1-70b", fleet_machines(), gap=0.05, limit_s=59.0)


def small() -> None:
    """24 GPUs to the optimum."""
    print("\n## Exact search, 24 GPUs: to the optimum (aim: 1 s)\n")
    _table("GPUs", "model", "s", "req/s", "bound", "gap", "status", "aim met")
    for model in ("llama-3.1-70b", "qwen3-32b"):
        case = _small_case(model)
        outcome = measure(case)
        found = outcome.search
        if found is None:
            _row(case, _failed(outcome), *[""] * 5)
        else:
            _row(case, found.cells(), found.status, _yes(found.status == "optimal" and found.s <= 1))


def medium() -> None:
    """76 GPUs to 1%."""
    print("\n## Exact search, 76 GPUs: to a gap of 1% (aim: in 10 s)\n")
    _table("GPUs", "model", "limit s", "s", "req/s", "bound", "gap", "aim met")
    for limit_s in (10.0, 60.0):
        for model in MODELS:
            _gap_row(_medium_case(model, limit_s), 0.01, 10.0, f"{limit_s:.0f}")


def large() -> None:
    """304 GPUs to 2%."""
    print("\n## Exact search, 304 GPUs: four of each of the 76's machines (aim: 2% in 60 s)\n")
    _table("GPUs", "model", "s", "req/s", "bound", "gap", "aim met")
    for model in ("llama-3.1-70b", "qwen3-32b"):
        _gap_row(_copies_case(model, 4), 0.02, 60.0)


def fleet() -> None:
    """5,000 GPUs to 5%."""
    case = _fleet_case()
    machines, kinds = sum(case.machines.values()), len(case.machines)
    print(f"\n## Exact search, {case.gpus:,} GPUs in {machines:,} machines of {kinds} types (aim: 5% in 60 s)\n")
    _table("GPUs", "model", "s", "req/s", "bound", "gap", "aim met")
    _gap_row(case, 0.05, 60.0)


def _gap_row(case: Case, aim_gap: float, aim_s: float, *before: str) -> None:
    outcome = measure(case)
    found = outcome.search
    if found is None:
        _row(case, *before, _failed(outcome), *[""] * 4)
    else:
        _row(case, *before, found.cells(), _yes(found.gap <= aim_gap and found.s <= aim_s))


def again() -> None:
    """304 GPUs without one machine, from nothing and from the old plan."""
    print(f"\n## Exact search, 304 GPUs: again without one {LOST} (best of two in turns; aim: a fifth of the time)\n")
    _table("GPUs", "model", "start", "s", "req/s", "bound", "gap", "ratio", "aim met")
    whole = _copies_case("qwen3-32b", 4)
    case = Case(whole.model, whole.machines, whole.gap, whole.limit_s, lose=LOST)
    outcome = measure(case)
    fewer = Case(whole.model, whole.machines | {LOST: whole.machines[LOST] - 1})
    if outcome.failed:
        _row(fewer, "", _failed(outcome), *[""] * 5)
    if not outcome.warm:
        return
    cold, warm = (min(found, key=lambda one: one.s) for found in (outcome.cold, outcome.warm))
    ratio = warm.s / cold.s
    _row(fewer, "nothing", cold.cells(), "", "")
    _row(fewer, "the old plan", warm.cells(), f"{ratio:.2f}", _yes(ratio <= 0.2 and warm.gap <= case.gap))


def check() -> None:
    """Verification beside the search."""
    print(f"\n## Checking a plan and its bound beside finding it (aim: at most {CHECK_RATIO} times as long)\n")
    _table("GPUs", "model", "search s", "check s", "ratio", "violations", "aim met")
    for case in (_small_case("llama-3.1-70b"), _medium_case("llama-3.1-70b", 10.0)):
        outcome = measure(case)
        found, taken = outcome.search, outcome.check_s
        if found is None or taken is None:
            _row(case, "" if found is None else f"{found.s:.2f}", _failed(outcome), *[""] * 3)
            continue
        ratio = taken / found.s
        said = ", ".join(outcome.violations).replace("|", "/") or "none"
        sound = not outcome.violations and outcome.proven is not None
        _row(case, f"{found.s:.2f}", f"{taken:.2f}", f"{ratio:.1f}", said, _yes(sound and ratio <= CHECK_RATIO))


def memory() -> None:
    """Most memory of the processes so far; of the fleet's where there is none."""
    if not _measured:
        measure(_fleet_case())
    print("\n## Memory of the process, the largest of each size (aim: 2 GiB)\n")
    _table("GPUs", "model", "before the search, GiB", "most, GiB", "aim met")
    largest: dict[int, tuple[Case, Outcome]] = {}
    for case, outcome in _measured.values():
        if case.gpus not in largest or outcome.peak_bytes > largest[case.gpus][1].peak_bytes:
            largest[case.gpus] = case, outcome
    for _, (case, outcome) in sorted(largest.items()):
        if outcome.peak_bytes == 0:
            _row(case, f"{outcome.idle_bytes / GIB:.2f}", _failed(outcome), "")
            continue
        _row(
            case,
            f"{outcome.idle_bytes / GIB:.2f}",
            f"{outcome.peak_bytes / GIB:.2f}",
            _yes(outcome.peak_bytes <= 2 * GIB),
        )


def figure(path: Path = FIGURE) -> None:
    """Time to the gap against GPUs."""
    print(f"\n## Exact search, qwen3-32b: time to a gap of {FIGURE_GAP:.0%}\n")
    _table("GPUs", "model", "s", "req/s", "bound", "gap", "reached")
    cases = [Case("qwen3-32b", GPUS_24, gap=FIGURE_GAP, runs=3)]
    cases += [_copies_case("qwen3-32b", copies) for copies in COPIES]
    reached, missed = [], []
    for case in cases:
        _gap_row(case, FIGURE_GAP, float("inf"))
        found = measure(case).search
        if found is not None:
            (reached if found.gap <= FIGURE_GAP else missed).append((case.gpus, found.s, found.gap))
    _draw(path, reached, missed, cases[0].limit_s)
    print(f"\nDrawn: {path.name}", flush=True)


def _draw(
    path: Path, reached: list[tuple[int, float, float]], missed: list[tuple[int, float, float]], limit_s: float
) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    picture, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    points = sorted(reached + missed)
    axes.plot([gpus for gpus, _, _ in points], [s for _, s, _ in points], color="C0", linewidth=1.2, zorder=1)
    for some, face, label in (
        (reached, "C0", f"gap of {FIGURE_GAP:.0%} proven"),
        (missed, "white", "not reached in the time"),
    ):
        if some:
            axes.scatter(
                [gpus for gpus, _, _ in some],
                [s for _, s, _ in some],
                facecolor=face,
                edgecolor="C0",
                label=label,
                zorder=2,
            )
    axes.axhline(limit_s, color="0.6", linestyle="--", linewidth=1, label=f"time limit, {limit_s:.0f} s", zorder=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for gpus, s, gap in points:
        said = f"{s:.2g} s" if gap <= FIGURE_GAP else f"{gap:.1%}"
        axes.annotate(said, (gpus, s), textcoords="offset points", xytext=(7, -14), fontsize=8)
    axes.set_xticks([gpus for gpus, _, _ in points])
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    seconds = [s for _, s, _ in points]
    axes.set_ylim(0.4 * min(seconds, default=1.0), 1.8 * max([limit_s, *seconds]))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.1)
    axes.set_xlabel("GPUs (24 as in the paper; 76 in 15 machine types, and multiples of them)")
    axes.set_ylabel("seconds")
    axes.set_title(f"Qwen3-32B, solver='exact', gap={FIGURE_GAP:g}", fontsize=10)
    axes.grid(color="0.9", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(picture)


SECTIONS: dict[str, Callable[[], None]] = {
    made.__name__: made for made in (small, medium, large, fleet, again, check, figure, memory)
}


def placement() -> None:
    """The exact search: all sections."""
    print(
        f"\nOn {os.cpu_count()} cores, tables included, warm; one run each, the best of three for 24 GPUs.", flush=True
    )
    for made in SECTIONS.values():
        made()


def main() -> None:
    """All sections or some; or, in its own process, one case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(SECTIONS))
    parser.add_argument("--figure", type=Path, default=FIGURE, metavar="PATH", help="where the figure goes")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case is not None:
        run_case(Case(**json.loads(given.case)))
        return
    unknown = [name for name in given.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    for name in given.sections or SECTIONS:
        if name == "figure":
            figure(given.figure)
        else:
            SECTIONS[name]()


if __name__ == "__main__":
    main()
