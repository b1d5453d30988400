"""Verbs about measurements. The command line adds them to its own; tables and bars go to stderr, as there."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from hetplan.scoring.accuracy import AccuracyReport
    from hetplan.scoring.score import GroupScore

# Kept apart from the scoring, which takes a second to import.
METHODS = ("datasheet", "paper", "ours")
Answer = Callable[[Callable[[], Any], bool], None]


def add_commands(
    app: typer.Typer, *, answer: Answer, console: Console, today: Callable[[], datetime.date], version: str
) -> None:
    """Add these verbs to the command line, which lends its way of answering, its console and its calendar."""

    @app.command()
    def accuracy(
        table: Annotated[Path, typer.Argument(help="CSV table of measurements, or a folder of them.")],
        ledger: Annotated[
            Path | None, typer.Option(help="Append predictions and measurements to this JSONL file.")
        ] = None,
        engine: Annotated[
            str | None, typer.Option(help="Step overheads of this engine, instead of each row's own.")
        ] = None,
        worst: Annotated[int, typer.Option(help="Worst rows to show of each group.")] = 3,
        only: Annotated[str, typer.Option(help="Groups whose name contains this.")] = "",
        as_json: Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on stdout.")] = False,
    ) -> None:
        """Score predictions against measured runs and kernels, beside the datasheet and the paper."""

        def run() -> dict[str, Any]:
            from hetplan.scoring.accuracy import score_path
            from hetplan.scoring.ledger import append_to_ledger

            with _progress(console) as on_progress:
                report = score_path(table, engine=engine, worst=worst, only=only, on_progress=on_progress)
            console.print(accuracy_tables(report))
            document = report.document()
            if ledger is not None:
                rows = append_to_ledger(ledger, report.scored, date=today(), version=version)
                console.print(f"{rows} rows appended to {ledger}")
                document["ledger"] = {"path": str(ledger), "rows": rows}
            return document

        answer(run, as_json)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar over the bytes of the tables; drawn on a terminal only."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("scoring"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("score", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def accuracy_tables(report: AccuracyReport) -> RenderableType:
    """A report as tables: errors by group, ranking, the worst rows, what was left out and passed over."""
    parts: list[RenderableType] = [_scores(report.groups)]
    ranked = [group for group in report.groups if group.pairs_ranked or group.ties]
    if ranked:
        parts += [Text(), _ranking(ranked)]
    worst = [group for group in report.groups if group.worst]
    if worst:
        parts += [Text(), _worst(worst)]
    for group in report.groups:
        if group.left_out:
            reasons = "; ".join(f"{count} {reason}" for reason, count in group.left_out.items())
            parts.append(Text(f"left out of {group.group}: {reasons}"))
    parts += [Text(f"passed over {name}: {reason}") for name, reason in report.passed_over.items()]
    return Group(*parts)


def _table(title: str, first: str, columns: Sequence[str]) -> Table:
    """A table with a column of text and columns of numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold", min_width=24)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.caption_justify = "left"
    return table


def _scores(groups: Sequence[GroupScore]) -> Table:
    columns = ("rows", *METHODS, "median", "bias", "inside", "band")
    table = _table("Mean absolute error, by three methods", "group", columns)
    for group in groups:
        table.add_row(
            group.group,
            str(group.rows),
            *(percent(group.mean_error[method]) for method in METHODS),
            percent(group.median_error["ours"]),
            percent(group.bias["ours"], sign="+"),
            percent(group.inside_band),
            "-" if math.isnan(group.half_width) else f"\u00b1{percent(group.half_width)}",
        )
    table.caption = (
        "median and bias (the median signed error) are ours, and so are inside (rows inside the 90% band) and band "
        "(its median half width)"
    )
    return table


def _ranking(groups: Sequence[GroupScore]) -> Table:
    table = _table("Pairs in the right order", "group", ("pairs", *METHODS, "ties"))
    for group in groups:
        right = (str(group.pairs_right[method]) for method in METHODS)
        table.add_row(group.group, str(group.pairs_ranked), *right, str(group.ties))
    table.caption = "Rows that differ in their number of GPUs alone, by what each GPU gives; ties are within 2%"
    return table


def _worst(groups: Sequence[GroupScore]) -> Table:
    table = _table("Worst rows", "row", ("measured", "ours", *(f"{method} is off" for method in METHODS)))
    for group in groups:
        table.add_row(Text(group.group, style="bold"))
        for row in group.worst:
            errors = (percent(row.error(method), sign="+") for method in METHODS)
            table.add_row(f"  {row.label}", f"{row.measured:.4g}", f"{row.ours:.4g}", *errors)
    table.caption = "Seconds, or output tokens a second for throughput"
    return table


def percent(fraction: float, *, sign: str = "") -> str:
    """``7.3%``; a dash for what is not known."""
    return "-" if math.isnan(fraction) else f"{fraction:{sign}.1%}"
