"""Drawings of Figures 2(a) to 2(f) for docs/allocation_studies.md, from the rows of the studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parent / "figures"

Rows = Mapping[Any, Mapping[str, Any]]

COLORS = {"exact": "#4477aa", "GH": "#ddaa33", "AGH": "#aa3377"}
PARTS = {"rent_usd": "#4477aa", "stored_usd": "#66ccee", "storage_usd": "#ccbb44", "delay_usd": "#ee6677"}
_DPI = 120
# Dollars at which the colours are named.
_TICKS = (100, 300, 1000, 3000)


def stress_figure(
    placed: Mapping[int, Rows], anywhere: Mapping[int, Rows], names: Mapping[str, str], stresses: Sequence[float]
) -> Path:
    """2(a) cost and 2(b) violations against inflation, 2(c) what is paid beside unserved traffic.

    Parameters
    ----------
    placed, anywhere : mapping
        Seed -> rows of `stress_study` by (solver, stress): types stay where the plan sends them, or go anywhere.
    names : mapping
        Solver -> name.
    stresses : sequence of float
    """
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    cost, violated, parts = figure.subplots(1, 3, width_ratios=(1, 1, 1.25))
    for axis, column, factor in ((cost, "mean_usd", 1.0), (violated, "violation_rate", 100.0)):
        for runs, line, said in ((placed, "-", ""), (anywhere, "--", ", sent anywhere")):
            for solver, name in names.items():
                values = [
                    factor * fmean(float(run[solver, stress][column]) for run in runs.values()) for stress in stresses
                ]
                axis.plot(stresses, values, line, marker="o", ms=4, color=COLORS[name], label=name + said)
        axis.set_xticks(stresses, [f"x{stress:g}" for stress in stresses])
        axis.set_xlabel("factor on delays and errors")
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    cost.set_title("2(a): cost, mean of seeds and scenarios", fontsize=10)
    cost.set_ylabel("$")
    violated.set_title("2(b): types with over 1% unserved", fontsize=10)
    violated.set_ylabel("%")
    places = [(stress, solver) for stress in stresses for solver in names]
    # A gap between two factors.
    at = np.arange(len(places)) + np.repeat(np.arange(len(stresses)), len(names)) * 0.6
    below = np.zeros(len(places))
    for column, color in PARTS.items():
        values = np.array(
            [fmean(float(run[solver, stress][column]) for run in placed.values()) for stress, solver in places]
        )
        label = {"rent_usd": "rent", "stored_usd": "weights", "storage_usd": "storage", "delay_usd": "delay"}[column]
        parts.bar(at, values, 0.85, bottom=below, color=color, label=label)
        below += values
    parts.set_xticks(at, [f"{names[solver]}\nx{stress:g}" for stress, solver in places], fontsize=8)
    parts.set_title("2(c): what is paid beside unserved traffic", fontsize=10)
    parts.set_ylabel("$")
    parts.set_ylim(top=1.3 * float(below.max()))
    parts.legend(fontsize=8, ncols=4, loc="upper center")
    figure.legend(*cost.get_legend_handles_labels(), loc="outside lower left", ncols=6, fontsize=8)
    return _saved(figure, "allocation-stress.png")


def sweep_figure(
    runs: Mapping[tuple[str, str, int], Rows],
    axes_of: Mapping[str, tuple[str, str]],
    factors: Sequence[float],
    seeds: Sequence[int],
) -> Path:
    """2(d) to 2(f): AGH's cost over pairs of factors, median of the seeds.

    Parameters
    ----------
    runs : mapping
        (figure, solver, seed) -> rows of `sweep` by the two factors.
    axes_of : mapping
        Figure -> what the rows and the columns are factors on.
    factors : sequence of float
    seeds : sequence of int
    """
    figure = Figure(figsize=(12, 4), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(axes_of))
    tables = {
        name: np.array(
            [
                [median(float(runs[name, "agh", seed][a, b]["nominal_usd"]) for seed in seeds) for b in factors]
                for a in factors
            ]
        )
        for name in axes_of
    }
    every = np.concatenate([table.ravel() for table in tables.values()])
    norm = LogNorm(float(every.min()), float(every.max()))
    for axis, (name, (rows, columns)) in zip(panels, axes_of.items(), strict=True):
        image = axis.imshow(tables[name], norm=norm, cmap="cividis", origin="lower", aspect="auto")
        for (a, b), usd in np.ndenumerate(tables[name]):
            ink = "white" if norm(usd) < 0.55 else "black"
            axis.text(b, a, f"{usd:,.0f}", ha="center", va="center", color=ink, fontsize=9)
        axis.set_xticks(range(len(factors)), [f"x{factor:g}" for factor in factors])
        axis.set_yticks(range(len(factors)), [f"x{factor:g}" for factor in factors])
        axis.set_xlabel(columns.replace("_", " "))
        axis.set_ylabel(rows.replace("_", " "))
        axis.set_title(f"2({name}): {rows} and {columns}".replace("_", " "), fontsize=10)
    bar = figure.colorbar(image, ax=list(panels), label="AGH's cost, $, median of the seeds", ticks=_TICKS, format="%d")
    bar.minorticks_off()
    return _saved(figure, "allocation-sweeps.png")


def _saved(figure: Figure, name: str) -> Path:
    FOLDER.mkdir(exist_ok=True)
    # Without the version of matplotlib, the same figure is the same file.
    figure.savefig(FOLDER / name, dpi=_DPI, metadata={"Software": None})
    return FOLDER / name
