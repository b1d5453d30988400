"""The verb that lives through traffic with a plan. The command line adds it to its own verbs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hetplan.errors import InvalidInputError

if TYPE_CHECKING:
    from hetplan.plan import Plan
    from hetplan.simulator.availability import Availability
    from hetplan.simulator.results import SimulationResult
    from hetplan.simulator.traffic import Traffic

Answer = Callable[[Callable[[], Any], bool], None]


def add_simulate(app: typer.Typer, *, answer: Answer, console: Console) -> None:
    """Add this verb to the command line, which lends its way of answering and its console."""

    @app.command()
    def simulate(
        plan: Annotated[Path, typer.Argument(help="Plan file.")],
        trace: Annotated[Path | None, typer.Option(help="Trace to replay; by default Poisson at --rate.")] = None,
        max_input_tokens: Annotated[int | None, typer.Option(help="Drop longer prompts of the trace.")] = None,
        speed: Annotated[float, typer.Option(help="Of the trace: 2 is twice as fast, 0.5 half as fast.")] = 1.0,
        rate: Annotated[float | None, typer.Option(help="Requests/s of the plan's workload, without a trace.")] = None,
        duration: Annotated[float, typer.Option(help="Seconds of --rate.")] = 600.0,
        burstiness: Annotated[float, typer.Option(help="Of --rate: 1 is Poisson, more comes in bursts.")] = 1.0,
        spot: Annotated[Path | None, typer.Option(help="Spot machines over time: CSV time_s,pool,available.")] = None,
        spot_seed: Annotated[int | None, typer.Option(help="Make up a spot market from a seed instead.")] = None,
        policy: Annotated[
            str, typer.Option(help="on-demand, none, migration, concurrent, both, skyserve, parcae or hetplan.")
        ] = "hetplan",
        routing: Annotated[str, typer.Option(help="round_robin or least_loaded.")] = "round_robin",
        seed: Annotated[int, typer.Option(help="Seed of traffic, start times and losses.")] = 0,
        requests: Annotated[Path | None, typer.Option(help="Write a row for each request to this CSV file.")] = None,
        chrome_trace: Annotated[
            Path | None, typer.Option(help="Write a timeline for chrome://tracing or Perfetto.")
        ] = None,
        figure: Annotated[
            Path | None, typer.Option(help="Draw the timeline on a spot market, else latencies, to this file.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on stdout.")] = False,
    ) -> None:
        """Live through traffic with a plan, on machines that stay or on a spot market."""

        def run() -> dict[str, Any]:
            from hetplan.api import simulate as simulate_plan
            from hetplan.plan import Plan

            asked = Plan.load(plan)
            traffic = _traffic(asked, trace, max_input_tokens, speed, rate, duration, burstiness, seed)
            market = _market(asked, spot, spot_seed, float(traffic.arrival_s[-1]))
            with _progress(console) as on_progress:
                found = simulate_plan(
                    asked, traffic, spot=market, policy=policy, routing=routing,  # type: ignore[arg-type]
                    seed=seed, log_steps=_LOGGED if chrome_trace is not None else 0, on_progress=on_progress,
                )  # fmt: skip
            console.print(str(found))
            if requests is not None:
                _write(lambda: found.requests.to_csv(requests, index=False), requests)
            if chrome_trace is not None:
                found.write_chrome_trace(chrome_trace)
            if figure is not None:
                _draw(found, figure)
            return _document(found)

        answer(run, as_json)


_LOGGED = 200_000


def _traffic(
    plan: Plan,
    trace: Path | None,
    max_input_tokens: int | None,
    speed: float,
    rate: float | None,
    duration_s: float,
    burstiness: float,
    seed: int,
) -> Traffic:
    from hetplan.simulator.traffic import Traffic
    from hetplan.workload.requests import Workload
    from hetplan.workload.traces import read_trace

    if trace is not None:
        if rate is not None:
            raise InvalidInputError("--trace says what arrives, and --rate as well: leave one out")
        return Traffic.replay(read_trace(trace, max_input_tokens), speed=speed)
    workload = plan.placement.workload
    if rate is not None:
        total = workload.requests_per_s
        workload = Workload(
            query_types=[
                q.replace(requests_per_s=rate * (1.0 if total is None else (q.requests_per_s or 0.0) / total))
                for q in workload.query_types
            ]
        )
    elif workload.requests_per_s is None:
        raise InvalidInputError("the plan's workload states no rate: give --rate, or a --trace")
    return Traffic.poisson(workload, duration_s=duration_s, seed=seed, burstiness=burstiness)


def _market(plan: Plan, file: Path | None, seed: int | None, duration_s: float) -> Availability | None:
    from hetplan.simulator.availability import Availability
    from hetplan.simulator.spot import spot_market

    if file is not None:
        if seed is not None:
            raise InvalidInputError("--spot says what is available, and --spot-seed as well: leave one out")
        return Availability.read(file)
    if seed is None:
        return None
    counts: dict[str, int] = {}
    for pool in plan.placement.cluster.pools:
        counts[pool.offer.instance_type] = counts.get(pool.offer.instance_type, 0) + pool.count
    return spot_market(counts, max(duration_s, 1.0), seed=seed)


def _document(found: SimulationResult) -> dict[str, Any]:
    from hetplan.estimator.queueing import LATENCIES

    levels = (0.5, 0.9, 0.99)
    return {
        "requests": len(found.table),
        "answered": found.answered,
        "refused": found.refused,
        "end_s": found.end_s,
        "requests_per_s": found.requests_per_s,
        "cost_usd": found.cost_usd,
        "cost_by_market_usd": dict(found.cost_by_market_usd),
        "usd_per_million_output_tokens": found.usd_per_million_output_tokens if found.output_tokens else None,
        "latency": {
            name: {f"p{100 * level:g}": _number(found.percentile(name, level)) for level in levels}
            for name in LATENCIES
        },
        "recomputed_tokens": found.recomputed_tokens,
        "preemptions": int(found.table["preemptions"].sum()),
        "moves": int(found.table["moves"].sum()),
        "downtime_s": found.downtime_s,
        "happenings": [
            {"time_s": h.time_s, "kind": h.kind, "subject": h.subject, "detail": h.detail} for h in found.happenings
        ],
    }


def _number(value: Any) -> float | None:
    return None if math.isnan(value) else float(value)


def _draw(found: SimulationResult, path: Path) -> None:
    from hetplan.report_simulation import percentile_figure, timeline_figure

    drawn = timeline_figure(found) if found.spans else percentile_figure({"simulated": found})
    _write(lambda: drawn.savefig(path, dpi=150), path)


def _write(write: Callable[[], object], path: Path) -> None:
    try:
        write()
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path}: cannot be written: {error}. Check the path") from None


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, nothing elsewhere."""
    if not console.is_terminal:
        yield None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=None)

        def on_progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield on_progress
