"""Figures of a simulated run: latency over time, the pipelines' states and what the market had, money."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hetplan.estimator.queueing import LATENCIES
from hetplan.simulator.results import SimulationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STATES = {"serving": "#4c9f70", "initialising": "#e0b341", "dead": "#c2453d"}
_LABELS = {"ttft_s": "time to first token, s", "tpot_s": "time per output token, s", "e2e_s": "end to end, s"}
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


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
