"""Figures of a simulated run: latency over time, the pipelines' states and what the market had, money."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hetplan.estimator.queueing import LATENCIES
from hetplan.simulator.results import SimulationResult
from hetplan.simulator.start_times import StartTimes
from hetplan.simulator.timelines import InterruptionTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STATES = {"serving": "#4c9f70", "initialising": "#e0b341", "dead": "#c2453d"}
_LABELS = {"ttft_s": "time to first token, s", "tpot_s": "time per output token, s", "e2e_s": "end to end, s"}
# Of an interruption: what ends each phase, and what is done until then.
_PHASES = {"node_ready": "machine boots", "store_loaded": "weights load", "engine_ready": "engines start"}
_MEASURED, _PREDICTED = "#4c72b0", "#c9b27c"
_MARKETS = {"spot": "#4c72b0", "on_demand": "#dd8452", "owned": "#8c8c8c"}


def latency_figure(runs: Mapping[str, SimulationResult], *, name: str = "e2e_s", window_s: float = 300.0) -> Figure:
    """A latency over time, a trailing mean for each run.

    Parameters
    ----------
    runs : mapping of str to SimulationResult
        By what to call them.
    name : "ttft_s", "tpot_s" or "e2e_s"
    window_s : float
        Width of the trailing mean.
    """
    figure, axes = _new(8.0, 3.6)
    for label, run in runs.items():
        times, means = run.mean_latency_over_time(name, window_s=window_s)
        axes.plot(times / 60, means, label=label, linewidth=1.6)
    axes.set_xlabel("minutes")
    axes.set_ylabel(f"{_LABELS[name]}\n(mean of {window_s / 60:g} min)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, ncols=2)
    return figure


def timeline_figure(run: SimulationResult) -> Figure:
    """What each pipeline did when, above the machines that each spot pool had."""
    names = sorted({span.pipeline for span in run.spans})
    pools = list(run.availability)
    figure, axes = _new(8.0, 0.9 + 0.42 * len(names) + 0.5 * len(pools))
    for row, name in enumerate(reversed(names)):
        for span in run.spans:
            if span.pipeline == name and span.start_s < run.end_s:
                width = min(span.end_s, run.end_s) - span.start_s
                axes.barh(len(pools) + row, width / 60, left=span.start_s / 60, height=0.7, color=_STATES[span.state])
    for row, pool in enumerate(reversed(pools)):
        times, counts = run.availability[pool]
        ends = np.append(times[1:], run.end_s)
        most = max(int(counts.max()), 1)
        axes.stairs(
            row - 0.35 + 0.7 * counts / most, np.append(times, ends[-1]) / 60, baseline=row - 0.35, fill=True,
            color="#9db4c0",
        )  # fmt: skip
    for event in run.happenings:
        if event.kind in ("notice", "loss"):
            style = ":" if event.kind == "notice" else "-"
            axes.axvline(event.time_s / 60, color="#444444", linewidth=0.7, linestyle=style, zorder=0)
    axes.set_yticks(range(len(pools) + len(names)), [*(f"{p} (spot)" for p in reversed(pools)), *reversed(names)])
    axes.set_xlim(0, run.end_s / 60)
    axes.set_xlabel("minutes (dotted: notice, line: loss)")
    handles = [axes.barh([0], [0], color=colour, label=state) for state, colour in _STATES.items()]
    figure.legend(handles=handles, frameon=False, ncols=len(handles), loc="outside upper center")
    return figure


def interruption_figure(lived: InterruptionTimeline, starts: StartTimes) -> Figure:
    """An interruption that a controller lived through beside what start times predict of it.

    Parameters
    ----------
    lived : InterruptionTimeline
        As `interruption_timelines` reads it from events.
    starts : StartTimes
        Such as `measured_start_times` gives for earlier interruptions. Their deviations are drawn as bars' whiskers.
    """
    figure, axes = _new(8.0, 3.2)
    measured, predicted = lived.ends_s, starts.expected_ends_s()
    deviations = (starts.node_ready_deviation_s, starts.store_load_deviation_s, starts.engine_init_deviation_s)
    rows = range(len(_PHASES), 0, -1)
    begins = [0.0, 0.0]
    for row, name, deviation_s in zip(rows, _PHASES, deviations, strict=True):
        ends = (measured[name], predicted[name])
        for begin, end, up, colour in zip(begins, ends, (0.19, -0.19), (_MEASURED, _PREDICTED), strict=True):
            axes.barh(row + up, end - begin, left=begin, height=0.34, color=colour)
        axes.errorbar(ends[1], row - 0.19, xerr=deviation_s, color="#666666", capsize=2, linewidth=1)
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        _beside(axes, max(ends[0], ends[1] + deviation_s), row, f"{lengths[0]:.1f} s, predicted {lengths[1]:.1f} s")
        begins = list(ends)
    for up, name, colour in ((0.19, "measured", _MEASURED), (-0.19, "predicted", _PREDICTED)):
        at_s = (measured if up > 0 else predicted)["shunt"]
        axes.plot(at_s, up, marker="D", markersize=7, color=colour, linestyle="none", label=name)
    _beside(
        axes,
        max(measured["shunt"], predicted["shunt"]),
        0,
        f"at {measured['shunt']:.1f} s, predicted {predicted['shunt']:.1f} s",
    )
    axes.set_yticks([0, *rows], ["router sends to them", *_PHASES.values()])
    most_s = max(*measured.values(), *predicted.values())
    if lived.grace_s is not None and lived.grace_s < 1.5 * most_s:
        axes.axvline(lived.grace_s, color="#c2453d", linestyle=":", linewidth=1.2, label="machine is taken")
    axes.set_xlim(0, 1.55 * most_s)
    axes.set_xlabel(f"seconds since the {lived.kind}")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles=handles, labels=labels, frameon=False, ncols=len(labels), loc="outside upper center")
    return figure


def cost_figure(runs: Mapping[str, SimulationResult]) -> Figure:
    """Dollars of each run, spot and on-demand apart, and per million output tokens."""
    figure, axes = _new(max(4.0, 1.0 + 0.9 * len(runs)), 3.4)
    below = np.zeros(len(runs))
    markets = list(dict.fromkeys(m for run in runs.values() for m in run.cost_by_market_usd))
    for market in markets:
        heights = np.array([run.cost_by_market_usd.get(market, 0.0) for run in runs.values()])
        axes.bar(list(runs), heights, bottom=below, label=market.replace("_", " "), color=_MARKETS[market], width=0.6)
        below += heights
    for x, (run, top) in enumerate(zip(runs.values(), below.tolist(), strict=True)):
        axes.text(x, top, f"{run.usd_per_million_output_tokens:.1f}", ha="center", va="bottom", fontsize=8)
    axes.set_ylabel("dollars\n(above: $ per million output tokens)")
    axes.tick_params(axis="x", rotation=30)
    axes.legend(frameon=False)
    return figure


def percentile_figure(runs: Mapping[str, SimulationResult]) -> Figure:
    """Shares of requests answered within a time, for all three latencies."""
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(9.0, 3.2), layout="constrained")
    all_axes = figure.subplots(1, len(LATENCIES))
    levels = np.linspace(0, 1, 201)
    for axes, name in zip(all_axes, LATENCIES, strict=True):
        for label, run in runs.items():
            axes.plot(run.percentile(name, levels), levels, label=label, linewidth=1.5)
        axes.set_xlabel(_LABELS[name])
        axes.set_xscale("log")
        _plain(axes)
    all_axes[0].set_ylabel("share of requests")
    all_axes[-1].legend(frameon=False, fontsize=8)
    return figure


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    _plain(axes)
    return figure, axes


def _beside(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), xytext=(8, 0), textcoords="offset points", va="center", fontsize=8)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
