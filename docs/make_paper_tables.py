"""Rewrite the tables of docs/paper.md by running the solvers: ``python docs/make_paper_tables.py``.

Tables stand between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``. Figures of the paper are constants
here; everything else is computed. Seconds are of this machine and change from run to run; nothing else does.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import hetplan as hp
from hetplan.catalog.calibration import Calibration, Quantity
from hetplan.catalog.tables import get_calibration

PAGE = Path(__file__).resolve().parent / "paper.md"
CLUSTER = {"g6.12xlarge": 3, "g5.12xlarge": 2, "g6e.xlarge": 4}
WORKLOAD = hp.Workload(input_tokens=763, output_tokens=232)
MODELS = {"Llama-3.1-70B": "llama-3.1-70b", "Qwen3-32B": "qwen3-32b"}
WINDOW_HOURS = 50 / 60

# ShuntServe, sections 7.1.1 (measured) and 7.1.4 (estimated, optimiser seconds).
PAPER_ESTIMATED = {"Llama-3.1-70B": {1: 2.382, 3: 2.830, 11: 2.830}, "Qwen3-32B": {1: 9.424, 3: 9.424, 11: 9.424}}
PAPER_SECONDS = {"Llama-3.1-70B": {1: "15.90", 11: "about 94"}, "Qwen3-32B": {1: "11.49", 11: "about 75"}}
PAPER_MEASURED = {"Llama-3.1-70B": (1.53, 1.07), "Qwen3-32B": (4.59, 4.39)}
# Offline throughput, by the solver that stands for the system; "dp-beam" stands for ShuntServe, "even" for vLLM.
PAPER_RIVALS: dict[str, dict[str, float]] = {
    "Llama-3.1-70B": {"dp-beam": 1.53, "hexgen": 1.31, "alpaserve": 1.08, "even": 1.07},
    "Qwen3-32B": {"dp-beam": 4.59, "even": 4.39, "alpaserve": 4.14, "hexgen": 3.39},
}
ALL_SOLVERS = ("exact", "dp-beam", "hexgen", "alpaserve", "helix", "spotserve", "even")
PAPER_PIPELINES = {"Llama-3.1-70B": 2, "Qwen3-32B": 4}

SEARCHES: list[tuple[str, dict[str, Any]]] = [
    ("even", {"solver": "even"}),
    ('"paper", k = 1', {"solver": "dp-beam", "search": "paper", "beam_width": 1}),
    ('"paper", k = 3', {"solver": "dp-beam", "search": "paper", "beam_width": 3}),
    ('"paper", k = 11', {"solver": "dp-beam", "search": "paper", "beam_width": 11}),
    ('"default", k = 3', {"solver": "dp-beam", "search": "default", "beam_width": 3}),
    ('"default", k = 11', {"solver": "dp-beam", "search": "default", "beam_width": 11}),
]


def plan(model: str, estimator: str, **options: Any) -> hp.Plan:
    """The plan of one row; the paper's search keeps its own objective."""
    paper = options.get("search") == "paper"
    options.setdefault("objective", "throughput_per_cost" if paper else "throughput")
    return hp.optimize(model=model, cluster=CLUSTER, workload=WORKLOAD, estimator=estimator, **options)


def rates(made: hp.Plan) -> list[float]:
    """Requests/s of every pipeline, copies apart, the best first."""
    return [
        pipeline.predictions.requests_per_s.value
        for deployment in made.deployments
        for pipeline in deployment.pipelines
        for _ in range(pipeline.count)
    ]


def seconds(run: Callable[[], object]) -> float:
    """Median of three runs."""
    spent = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        spent.append(time.perf_counter() - began)
    return median(spent)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def estimated() -> str:
    """Both estimators x all searches, a table for each model."""
    parts = []
    for title, model in MODELS.items():
        rows = []
        for estimator in ("paper", "calibrated"):
            for search, options in SEARCHES:
                made = plan(model, estimator, **options)
                each = rates(made)
                given = PAPER_ESTIMATED[title].get(options.get("beam_width", 0))
                literal = estimator == "paper" and options.get("search") == "paper"
                rows.append(
                    [
                        estimator,
                        search,
                        f"{sum(each):.3f}",
                        str(len(each)),
                        ", ".join(f"{rate:.2f}" for rate in each),
                        f"{made.cost_usd_per_hour:.2f}",
                        f"{given:.3f}" if literal and given is not None else "",
                    ]
                )
        head = ["estimator", "search", "req/s", "pipelines", "req/s of each", "$/h", "paper's estimate"]
        parts.append(f"{title}, where the paper has {PAPER_PIPELINES[title]} pipelines:\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def measured() -> str:
    """Estimates with their bands beside what the paper measured."""
    rows = []
    ratios = []
    for title, model in MODELS.items():
        shunt, vllm = PAPER_MEASURED[title]
        ours = []
        for label, options, value in (
            ("ShuntServe", {"solver": "dp-beam", "search": "paper", "beam_width": 3}, shunt),
            ("vLLM, even", {"solver": "even"}, vllm),
        ):
            made = plan(model, "calibrated", **options)
            ours.append(made.requests_per_s)
            predictions = [(p.count, p.predictions.requests_per_s) for d in made.deployments for p in d.pipelines]
            low = sum(count * prediction.low for count, prediction in predictions)
            high = sum(count * prediction.high for count, prediction in predictions)
            rows.append(
                [
                    title,
                    label,
                    f"{value:.2f}",
                    f"{made.requests_per_s:.3f}",
                    f"{low:.2f}-{high:.2f}",
                    f"{made.requests_per_s / value:.2f}",
                ]
            )
        ratios.append(f"{shunt / vllm:.2f} for {title} as measured, {ours[0] / ours[1]:.2f} as estimated")
    head = ["model", "system", "paper measured, req/s", "ours, calibrated", "sum of bands", "ours / measured"]
    return table(head, rows) + "\n\nThe paper's placement over even pipelines: " + "; ".join(ratios) + "."


def bounds() -> str:
    """The default solver with its bound."""
    rows = []
    for title, model in MODELS.items():
        made = plan(model, "calibrated")
        faults = hp.verify(made)
        rows.append(
            [
                title,
                f"{made.requests_per_s:.3f}",
                f"{made.bound or 0:.3f}",
                f"{made.gap or 0:.1%}",
                str(len(rates(made))),
                f"{made.cost_usd_per_hour:.2f}",
                str(len(faults)),
            ]
        )
    return table(["model", "req/s", "proven bound", "gap", "pipelines", "$/h", "violations found by verify"], rows)


def solvers() -> str:
    """Every solver on the paper's cluster, beside the paper's measured order."""
    rows = []
    for title, model in MODELS.items():
        made: dict[str, dict[str, hp.Plan | None]] = {}
        for solver in ALL_SOLVERS:
            made[solver] = {}
            for estimator in ("paper", "calibrated"):
                try:
                    options = {"beam_width": 3} if solver == "dp-beam" else {}
                    made[solver][estimator] = hp.optimize(
                        model=model,
                        cluster=CLUSTER,
                        workload=WORKLOAD,
                        estimator=estimator,
                        solver=solver,
                        time_limit_s=30,
                        **options,
                    )
                except (hp.NoSolutionError, hp.InfeasibleError):
                    made[solver][estimator] = None
        best = {e: max(p.requests_per_s for m in made.values() if (p := m[e])) for e in ("paper", "calibrated")}
        for solver, plans in made.items():
            measured_ = PAPER_RIVALS[title].get(solver)
            row = [title, solver, "" if measured_ is None else f"{measured_:.2f}"]
            for estimator, found in plans.items():
                row.append("no plan" if found is None else f"{found.requests_per_s:.3f}")
                row.append("" if found is None else f"{100 * (found.requests_per_s / best[estimator] - 1):+.1f}%")
            rows.append(row)
    estimates = ['estimator "paper"', "to the best", 'estimator "calibrated"', "to the best"]
    head = ["model", "solver", "paper measured", *estimates]
    return table(head, rows)


def times() -> str:
    """Seconds of the optimiser."""
    rows = []
    for title, model in MODELS.items():
        for search, options in SEARCHES:
            spent = [f"{seconds(lambda e=e: plan(model, e, **options)):.2f}" for e in ("paper", "calibrated")]  # noqa: B023
            given = PAPER_SECONDS[title].get(options["beam_width"], "") if options.get("search") == "paper" else ""
            rows.append([title, search, *spent, given])
    head = ["model", "search", 'estimator "paper", s', 'estimator "calibrated", s', "paper, s"]
    cores = f"{platform.machine()}, Python {platform.python_version()}"
    return table(head, rows) + f"\n\nMedian of three calls of `optimize` after one to compile; {cores}."


def scaled(calibration: Calibration, compute: float, memory: float) -> Calibration:
    """The same calibration with other rates, marked as assumed."""

    def times_(quantity: Quantity, factor: float) -> Quantity:
        return Quantity(value=quantity.value * factor, source="assumed", reference="scaled for a what-if")

    return calibration.replace(
        compute_flops={dtype: times_(rate, compute) for dtype, rate in calibration.compute_flops.items()},
        memory_bytes_per_s=times_(calibration.memory_bytes_per_s, memory),
    )


def what_if() -> str:
    """How far unknowns move the literal figure."""
    slower = {"A10G": scaled(get_calibration("A10G"), 55 / 121, 248 / 300)}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("as shipped", {}),
        ("A10G as far below its datasheet as the L4 (55 of 121 TFLOP/s, 248 of 300 GB/s)", {"calibrations": slower}),
        ("at most 32 sequences in flight in a pipeline", {"max_num_seqs": 32}),
        ("at most 16 sequences in flight in a pipeline", {"max_num_seqs": 16}),
    ]
    rows = []
    for label, options in cases:
        row = [label]
        for model in MODELS.values():
            each = rates(plan(model, "paper", solver="dp-beam", search="paper", beam_width=3, **options))
            row.append(f"{sum(each):.3f} ({len(each)} pipelines, best {each[0]:.3f})")
        rows.append(row)
    rows.append(["paper", *(f"{PAPER_ESTIMATED[t][3]:.3f} ({PAPER_PIPELINES[t]} pipelines)" for t in MODELS)])
    return table(["assumption", *MODELS], rows)


def cost() -> str:
    """What the cluster costs for the paper's 50-minute window."""
    cluster = hp.Cluster.from_counts(CLUSTER, region="us-west-2")
    rows = [
        [pool.offer.instance_type, str(pool.count), f"{pool.offer.billed_usd_per_hour:.4f}"] for pool in cluster.pools
    ]
    total = cluster.price_usd_per_hour
    said = f"All of it: {total:.4f} dollars an hour, {total * WINDOW_HOURS:.2f} for 50 minutes; the paper says 27.16."
    return table(["machine", "count", "$/h each"], rows) + f"\n\n{said}"


TABLES = {
    "cost": cost,
    "estimated": estimated,
    "what-if": what_if,
    "measured": measured,
    "bounds": bounds,
    "solvers": solvers,
    "times": times,
}


def replace_block(page: Path, name: str, content: str) -> None:
    """Put a table between its two marks in a page."""
    text = page.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{page.name} has no place for the table {name!r}")
    page.write_text(pattern.sub(lambda found: f"{found[1]}\n{content}\n\n{found[2]}", text), encoding="utf-8")


def main() -> None:
    """Run the script."""
    for options in (SEARCHES[1][1], SEARCHES[4][1]):
        plan("llama-3.2-1b", "calibrated", **options)
    for name, make in TABLES.items():
        replace_block(PAGE, name, make())


if __name__ == "__main__":
    main()
