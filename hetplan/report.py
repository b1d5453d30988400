"""Plans for people: tables for terminals and notebooks, and figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetplan.estimator.base import make_estimator
from hetplan.estimator.pipeline import pipeline_times
from hetplan.estimator.prediction import ReplicaPrediction, shapes_of
from hetplan.plan import Plan, Prediction
from hetplan.problem.allocation import AllocationProblem
from hetplan.solvers.compare import Comparison
from hetplan.units import GIB, format_seconds, format_share

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plan_tables(plan: Plan) -> RenderableType:
    """A plan as tables: totals, then each pipeline with its stages, memory and predictions.

    Of an allocation problem: totals, the deployments, and where each query type is sent.
    """
    if isinstance(plan.problem, AllocationProblem):
        return _allocation_tables(plan, plan.problem)
    total = _totals(f"Plan for {plan.placement.model.name}", plan, f"estimator {plan.placement.estimator}")
    parts: list[RenderableType] = [total]
    for deployment in plan.deployments:
        for number, pipeline in enumerate(deployment.pipelines, start=1):
            p = pipeline.predictions
            copies = f" x {pipeline.count}" if pipeline.count > 1 else ""
            table = Table(
                title=f"Pipeline {number}{copies}: {with_band(p.requests_per_s, 'req/s')}, "
                f"{pipeline.cost_usd_per_hour:.4f} $/h",
                title_justify="left",
            )
            for name in ("layers", "instance", "node", "GPUs", "TP", "dtype"):
                table.add_column(name, no_wrap=name == "instance")
            kept = any(stage.reserved_bytes for stage in pipeline.stages)
            for name in ("weights", "activ.", "KV", *(["kept"] if kept else [])):
                table.add_column(name, justify="right")
            for stage in pipeline.stages:
                memory = [stage.weight_bytes, stage.activation_bytes, stage.kv_cache_bytes]
                memory += [stage.reserved_bytes] if kept else []
                table.add_row(
                    f"{stage.layers[0]}-{stage.layers[1] - 1} ({stage.layer_count})",
                    stage.instance_type,
                    str(stage.node),
                    _ranges(stage.gpu_indices),
                    str(stage.tensor_parallel),
                    stage.compute_dtype,
                    *(f"{size / GIB:.1f}" for size in memory),
                )
            table.caption = (
                f"TTFT {seconds_with_band(p.ttft_s)}, TPOT {seconds_with_band(p.tpot_s)}, "
                f"{pipeline.max_num_seqs} sequences in flight, {pipeline.micro_batch} a stage. Memory in GiB per GPU"
                f"{', kept for a second engine in the last column' if kept else ''}."
            )
            table.caption_justify = "left"
            parts += [Text(), table, Text(p.requests_per_s.source, style="dim")]
    return Group(*parts)


def _totals(title: str, plan: Plan, made_by: str) -> Table:
    total = Table(title=title, show_header=False, title_justify="left")
    total.add_column(style="bold")
    total.add_column()
    total.add_row("throughput", f"{plan.requests_per_s:.3f} req/s")
    total.add_row("cost", f"{plan.cost_usd_per_hour:.4f} $/h")
    if plan.egress_usd_per_hour:
        total.add_row("of it egress", f"{plan.egress_usd_per_hour:.4f} $/h")
    total.add_row("output tokens", f"{plan.usd_per_million_output_tokens:.3f} $ per million")
    total.add_row("objective", f"{plan.objective_name} = {plan.objective:.6g} ({plan.status})")
    if plan.bound is not None and plan.gap is not None:
        total.add_row("proven bound", f"{plan.bound:.6g}, gap {plan.gap:.1%}")
    total.add_row("solver", f"{plan.provenance.solver}, {made_by}")
    return total


def _allocation_tables(plan: Plan, problem: AllocationProblem) -> RenderableType:
    source = "estimated delays" if problem.configurations else "the paper's formulas"
    total = _totals(f"Plan for {len(problem.query_types)} query types", plan, source)
    rent = plan.cost_usd_per_hour * problem.horizon_hours
    total.add_row("rent", f"{rent:.2f} $ in {problem.horizon_hours:g} h, budget {problem.budget_usd:.2f} $")
    bought = Table(title="Deployments", title_justify="left")
    for name in ("", "model", "machines"):
        bought.add_column(name, no_wrap=True)
    for name in ("copies", "TP", "PP", "$/h", "req/s", "delay", "TTFT"):
        bought.add_column(name, justify="right")
    for number, deployment in enumerate(plan.deployments, start=1):
        for pipeline in deployment.pipelines:
            p, machines = pipeline.predictions, len(pipeline.nodes)
            bought.add_row(
                f"D{number}",
                deployment.model,
                pipeline.stages[0].instance_type + (f" x {machines}" if machines > 1 else ""),
                str(pipeline.count),
                str(pipeline.stages[0].tensor_parallel),
                str(len(pipeline.stages)),
                f"{pipeline.count * pipeline.cost_usd_per_hour:.4f}",
                f"{pipeline.count * p.requests_per_s.value:.3f}",
                format_seconds(p.latency_s.value),
                format_seconds(p.ttft_s.value),
            )
    bought.caption = "$/h and req/s of all copies; mean delay and TTFT of what is sent there."
    bought.caption_justify = "left"
    sent = Table(title="Routes", title_justify="left")
    sent.add_column("query type", overflow="fold")
    for number in range(1, len(plan.deployments) + 1):
        sent.add_column(f"D{number}", justify="right")
    sent.add_column("unserved", justify="right")
    for query in problem.query_types:
        shares = [0.0] * len(plan.deployments)
        for route in plan.routes:
            if route.query_type == query.name:
                shares[route.deployment] += route.fraction
        unserved = max(1.0 - sum(shares), 0.0)
        # What is left of a sum of fractions is no traffic.
        sent.add_row(query.name, *(_share(share) for share in shares), _share(unserved if unserved > 1e-9 else 0.0))
    return Group(total, Text(), bought, Text(), sent)


def _share(fraction: float) -> str:
    return format_share(fraction) if fraction > 0 else ""


def comparison_table(comparison: Comparison) -> Table:
    """Solvers side by side: rate, cost, tokens, latency, time to solve, distance from the best proven bound."""
    bound = comparison.bound
    said = "" if bound is None else f", proven bound {bound:.6g}"
    table = Table(title=f"Objective {comparison.objective_name}{said}", title_justify="left")
    table.add_column("solver", no_wrap=True)
    for name in ("req/s", "$/h", "$/1M tokens", "TTFT", "TPOT", "solved in", "gap"):
        table.add_column(name, justify="right")
    table.add_column("pipelines")
    for row in comparison.rows:
        if row.plan is None:
            table.add_row(row.solver, *[""] * 7, row.failure)
            continue
        pipelines = [p for d in row.plan.deployments for p in d.pipelines]
        slowest = [max(getattr(p.predictions, name).value for p in pipelines) for name in ("ttft_s", "tpot_s")]
        gap = comparison.gap(row)
        table.add_row(
            row.solver,
            f"{row.plan.requests_per_s:.3f}",
            f"{row.plan.cost_usd_per_hour:.2f}",
            f"{row.plan.usd_per_million_output_tokens:.3f}",
            *(format_seconds(value) for value in slowest),
            format_seconds(row.elapsed_s),
            "" if gap is None else f"{gap:.1%}",
            ", ".join(f"{p.predictions.requests_per_s.value:.2f}" for p in pipelines for _ in range(p.count)),
        )
    return table


def comparison_figure(comparison: Comparison) -> Figure:
    """Requests/s of each solver's plan with the sum of its pipelines' bands, and dollars per million tokens."""
    from matplotlib.figure import Figure as NewFigure

    rows = [(row.solver, row.plan) for row in comparison.rows if row.plan is not None]
    names = [name for name, _ in rows]
    values = np.array([plan.requests_per_s for _, plan in rows])
    bands = np.array([_summed_band(plan) for _, plan in rows]).reshape(-1, 2)
    places = np.arange(len(rows))
    figure = NewFigure(figsize=(9, 1.2 + 0.4 * len(rows)), layout="constrained")
    rate, cost = figure.subplots(1, 2, sharey=True)
    rate.barh(places, values, color="#4477aa")
    rate.errorbar(values, places, xerr=[values - bands[:, 0], bands[:, 1] - values], fmt="none", ecolor="#222222", lw=1)
    rate.set_yticks(places, names, fontsize=8)
    rate.invert_yaxis()
    rate.set_xlabel("requests/s, with 90% band")
    cost.barh(places, [plan.usd_per_million_output_tokens for _, plan in rows], color="#ddaa33")
    cost.set_xlabel("$ per million output tokens")
    if comparison.bound is not None and comparison.objective_name == "throughput":
        rate.axvline(comparison.bound, color="#aa3377", lw=1, ls="--", label="proven bound")
        rate.legend(fontsize=8)
    return figure


def _summed_band(plan: Plan) -> tuple[float, float]:
    rates = [(p.count, p.predictions.requests_per_s) for d in plan.deployments for p in d.pipelines]
    return sum(n * r.low for n, r in rates), sum(n * r.high for n, r in rates)


def _ranges(numbers: tuple[int, ...]) -> str:
    """``0-3`` for 0,1,2,3; a list where the numbers do not follow one another."""
    if len(numbers) > 1 and numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


def with_band(prediction: Prediction, unit: str) -> str:
    """``3.1 req/s (2.7-3.4)``."""
    return f"{prediction.value:.3f} {unit} ({prediction.low:.3f}-{prediction.high:.3f})"


def seconds_with_band(prediction: Prediction) -> str:
    """``1.2 s (0.9 s-1.5 s)``."""
    low, high = format_seconds(prediction.low), format_seconds(prediction.high)
    return f"{format_seconds(prediction.value)} ({low}-{high})"


def replica_table(prediction: ReplicaPrediction) -> RenderableType:
    """A replica's prediction as a table with bands."""
    table = Table("quantity", "value", "low", "high")
    for name in ("ttft_s", "tpot_s", "latency_s"):
        low, high, _ = prediction.band[name]
        table.add_row(name, *(format_seconds(v) for v in (getattr(prediction, name), low, high)))
    low, high, level = prediction.band["output_tokens_per_s"]
    table.add_row("output_tokens_per_s", *(f"{v:,.1f}" for v in (prediction.output_tokens_per_s, low, high)))
    table.caption = f"{level:.0%} bands. {prediction.source}"
    return table


def stage_times_figure(plan: Plan) -> Figure:
    """Seconds of a micro-batch in each stage of each pipeline, prefill and decode: the slowest stage limits."""
    from matplotlib.figure import Figure as NewFigure

    problem = plan.placement
    estimator = make_estimator(problem)
    pipelines = [pipeline for deployment in plan.deployments for pipeline in deployment.pipelines]
    heights = [1.2 + 0.3 * len(pipeline.stages) for pipeline in pipelines]
    figure = NewFigure(figsize=(8, sum(heights)), layout="constrained")
    axes = np.atleast_1d(figure.subplots(len(pipelines), 1, height_ratios=heights))
    for number, (axis, pipeline) in enumerate(zip(axes, pipelines, strict=True), start=1):
        times = pipeline_times(problem, estimator, shapes_of(problem, pipeline), pipeline.micro_batch)
        prefill, decode = times.prefill[:, 0], times.decode[:, 0]
        labels = [f"{s.instance_type} TP{s.tensor_parallel}, {s.layer_count} layers" for s in pipeline.stages]
        rows = np.arange(len(labels))
        axis.barh(rows, prefill, color="#4477aa", label="prefill")
        axis.barh(rows, decode, left=prefill, color="#ddaa33", label="decode")
        axis.set_yticks(rows, labels, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(
            f"pipeline {number}: {pipeline.predictions.requests_per_s.value:.2f} req/s", loc="left", fontsize=10
        )
        axis.set_xlabel(f"seconds per micro-batch of {pipeline.micro_batch}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=8)
    return figure
