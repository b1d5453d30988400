"""How far predictions are from the measurements in a table, or in all the tables of a folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetplan.calibration.tables import COLUMNS as KERNEL_COLUMNS
from hetplan.calibration.tables import KernelTables, read_kernel_tables
from hetplan.catalog.calibration import Calibration
from hetplan.catalog.steps import get_step_overheads
from hetplan.catalog.tables import gpu_name
from hetplan.errors import InvalidInputError, UnknownNameError
from hetplan.files import read_lines
from hetplan.scoring import layers
from hetplan.scoring.kernels import score_kernels
from hetplan.scoring.runs import MAX_TABLE_BYTES, OPTIONAL_COLUMNS, OWN_COLUMNS, form_of, read_runs
from hetplan.scoring.score import GroupScore, Scored, score_runs, summarise

LeftOut = dict[str, dict[str, int]]
Part = tuple[list[Scored], LeftOut]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class AccuracyReport:
    """What was scored.

    Attributes
    ----------
    groups : tuple of GroupScore
        Errors by group, with the worst rows and what was left out.
    scored : tuple of Scored
        Every row of these groups.
    passed_over : mapping of str to str
        Files of no known form, and why.
    """

    groups: tuple[GroupScore, ...]
    scored: tuple[Scored, ...]
    passed_over: Mapping[str, str]

    def document(self) -> dict[str, Any]:
        """All numbers as plain data; what is not known is None."""
        groups = [asdict(group) for group in self.groups]
        for row in (row for group in groups for row in group["worst"]):
            # Bookkeeping of the ranking.
            del row["peers"], row["is_time"]
        plain: dict[str, Any] = _plain({"groups": groups, "passed_over": self.passed_over})
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def score_path(
    path: Path,
    *,
    engine: str | None = None,
    calibrations: Mapping[str, Calibration] | None = None,
    worst: int = 3,
    only: str = "",
    on_progress: Progress | None = None,
) -> AccuracyReport:
    """Score a table, or all tables under a folder whose form is known by their header.

    Parameters
    ----------
    path : Path
        A CSV file, or a folder that is searched for them.
    engine : str, optional
        Whose step overheads to take for all runs, instead of each row's own. Kernels and layers have none.
    calibrations : mapping of str to Calibration, optional
        By GPU name, for runs and layers, instead of the shipped ones. Kernel tables are fitted by themselves.
    worst : int
        Worst rows to keep of each group.
    only : str
        Keep groups whose name contains this, in any case.
    on_progress : callable, optional
        Called with bytes of tables done and in all.

    Returns
    -------
    AccuracyReport

    Raises
    ------
    InvalidInputError
        If a table has a wrong value, or nothing of a known form could be scored.
    """
    if engine is not None:
        get_step_overheads(engine)
    if worst < 0:
        raise InvalidInputError(f"worst rows to show: 0 or more, got {worst}")
    files = sorted(path.rglob("*.csv")) if path.is_dir() else [path]
    passed_over: dict[str, str] = {}
    known: list[tuple[Path, int, Callable[[Progress], Part]]] = []
    tables: dict[tuple[str, Path], KernelTables] = {}
    for file in files:
        try:
            scorer = _scorer(file, engine, calibrations, tables)
        except _UnknownFormError as unknown:
            passed_over[str(file.relative_to(path) if file != path else file)] = str(unknown)
        else:
            known.append((file, file.stat().st_size, scorer))
    if not known:
        raise InvalidInputError(_nothing_known(path, passed_over))
    scored: list[Scored] = []
    left_out: LeftOut = {}
    done, total = 0, sum(size for _, size, _ in known)
    for _, size, scorer in known:

        def inside(rows: int, all_rows: int, done: int = done, size: int = size) -> None:
            if on_progress is not None:
                on_progress(done + size * rows // max(all_rows, 1), total)

        rows, missing = scorer(inside)
        scored += rows
        for group, reasons in missing.items():
            merged = left_out.setdefault(group, {})
            for reason, count in reasons.items():
                merged[reason] = merged.get(reason, 0) + count
        done += size
        inside(0, 1, done, 0)
    groups = [g for g in summarise(scored, left_out, worst=worst) if only.lower() in g.group.lower()]
    _check(path, only, groups, [*dict.fromkeys([row.group for row in scored] + list(left_out))])
    names = {group.group for group in groups}
    return AccuracyReport(tuple(groups), tuple(row for row in scored if row.group in names), passed_over)


_NO_FORM = "its columns are those of no known form"


class _UnknownFormError(Exception):
    """Why a file is passed over."""


def _scorer(
    path: Path,
    engine: str | None,
    calibrations: Mapping[str, Calibration] | None,
    tables: dict[tuple[str, Path], KernelTables],
) -> Callable[[Progress], Part]:
    """What scores a file, by its header; kernel tables tell their GPU by their name."""
    header = _header(path)
    kind = next((kind for kind, columns in KERNEL_COLUMNS.items() if set(columns) <= header), None)
    if kind is not None:
        gpu = _gpu_of(path, kind)

        def kernels(_: Progress) -> Part:
            key = (gpu, path.parent)
            try:
                if key not in tables:
                    tables[key] = read_kernel_tables(gpu, path.parent)
                return score_kernels(tables[key], kind, path.name)
            except ValueError as error:
                # Too few rows for a fit, or none that the hardware could have run.
                raise InvalidInputError(f"{path}: {error}") from None

        return kernels
    if set(layers.COLUMNS) <= header:
        return lambda _: layers.score_layers(path, calibrations)
    if form_of(header) is not None:
        return lambda on_progress: score_runs(
            read_runs(path), engine=engine, calibrations=calibrations, on_progress=on_progress
        )
    raise _UnknownFormError(_NO_FORM)


def _header(path: Path) -> set[str]:
    if not path.is_file():
        raise InvalidInputError(f"{path}: no such file or folder. Check the path")
    try:
        line = next(read_lines(path, MAX_TABLE_BYTES), "")
    except InvalidInputError as error:
        raise _UnknownFormError(str(error)) from None
    return {name.strip() for name in line.split(",")}


def _gpu_of(path: Path, kind: str) -> str:
    try:
        if path.stem.startswith(f"{kind}_"):
            return gpu_name(path.stem.removeprefix(f"{kind}_"))
    except UnknownNameError:
        pass
    raise _UnknownFormError(f"kernels of a GPU that the name does not tell: call it {kind}_<GPU>.csv")


def _nothing_known(path: Path, passed_over: Mapping[str, str]) -> str:
    if not passed_over:
        return f"{path}: no CSV file in it; give a table, or a folder that holds some"
    own = f"Own runs have the columns {','.join(OWN_COLUMNS)}; {', '.join(sorted(OPTIONAL_COLUMNS))} may be left out"
    if path.is_file():
        reason = next(iter(passed_over.values()))
        has = f". It has {', '.join(sorted(_header(path)))}" if reason == _NO_FORM else ""
        return f"{path}: {reason}{has}. {own}"
    listed = ", ".join(list(passed_over)[:5])
    return f"{path}: no table of a known form among {len(passed_over)} ({listed}). {own}"


def _check(path: Path, only: str, groups: list[GroupScore], known: list[str]) -> None:
    """Refuse a report without a single row."""
    if not known:
        raise InvalidInputError(f"{path}: the tables hold no rows")
    if not groups:
        raise InvalidInputError(f"no group's name contains {only!r}; there are: {'; '.join(known)}")
    if not any(group.rows for group in groups):
        reasons = "; ".join(f"{g.group}: {reason} ({n})" for g in groups for reason, n in g.left_out.items())
        raise InvalidInputError(f"{path}: no row could be scored. {reasons}")
