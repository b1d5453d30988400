"""The verb that sets solvers side by side. The command line adds it to its own verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hetplan.errors import InvalidInputError, UnsupportedFeatureError

if TYPE_CHECKING:
    from hetplan.solvers.compare import Comparison

Answer = Callable[[Callable[[], Any], bool], None]


def add_compare(app: typer.Typer, *, answer: Answer, console: Console) -> None:
    """Add this verb to the command line, which lends its way of answering and its console."""

    @app.command()
    def compare(
        problem: Annotated[Path, typer.Argument(help="Problem file (YAML).")],
        solver: Annotated[list[str] | None, typer.Option(help="Solver; repeat for several. All.")] = None,
        time_limit: Annotated[float, typer.Option(help="Seconds of each solver.")] = 60.0,
        seed: Annotated[int, typer.Option(help="Seed of random choices.")] = 0,
        figure: Annotated[Path | None, typer.Option(help="Draw the comparison to this PNG, SVG or PDF file.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on stdout.")] = False,
    ) -> None:
        """Run every solver on one problem: rate, cost, latency, time to solve, distance from the best bound."""

        def run() -> dict[str, Any]:
            from hetplan.api import compare as compare_all
            from hetplan.api import make_problem
            from hetplan.problem.files import read_problem_file
            from hetplan.report import comparison_figure, comparison_table

            asked = read_problem_file(problem)
            if "problem" in asked:
                raise UnsupportedFeatureError(
                    f"{problem} is an allocation problem, and compare sets the solvers of placement problems side by "
                    "side. Run `hetplan optimize` with --solver milp, gh, agh and auto"
                )
            for name in ("solver", "solver_options", "time_limit_s", "seed"):
                asked.pop(name, None)
            with _progress(console) as on_progress:
                found = compare_all(
                    make_problem(**asked), solvers=solver or None, time_limit_s=time_limit, seed=seed,
                    on_progress=on_progress,
                )  # fmt: skip
            console.print(comparison_table(found))
            if figure is not None:
                try:
                    comparison_figure(found).savefig(figure, dpi=150)
                except (OSError, ValueError) as error:
                    raise InvalidInputError(f"cannot draw to {figure}: {error}") from None
            return _document(found)

        answer(run, as_json)


def _document(found: Comparison) -> dict[str, Any]:
    rows = []
    for row in found.rows:
        entry: dict[str, Any] = {"solver": row.solver, "elapsed_s": row.elapsed_s, "failure": row.failure}
        if row.plan is not None:
            names = ("requests_per_s", "cost_usd_per_hour", "usd_per_million_output_tokens", "objective", "bound")
            entry |= {name: getattr(row.plan, name) for name in names}
            entry["gap"] = found.gap(row)
        rows.append(entry)
    return {"objective_name": found.objective_name, "bound": found.bound, "solvers": rows}


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int, str], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def on_progress(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name)

        yield on_progress
