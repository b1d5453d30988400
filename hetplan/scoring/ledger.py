"""A ledger of predictions beside measurements: JSON lines, one for each scored row, only ever appended to."""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from hetplan.errors import InvalidInputError
from hetplan.files import read_lines
from hetplan.scoring.score import Scored
from hetplan.units import GB

_NUMBERS = ("measured", "datasheet", "paper", "ours", "low", "high")
MAX_LEDGER_BYTES = 4 * GB


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One scored row: seconds, or output tokens a second where the group is a throughput.

    A method without a prediction, or a row without a band, has None there.
    """

    date: datetime.date
    hetplan: str
    group: str
    label: str
    measured: float
    datasheet: float | None
    paper: float | None
    ours: float | None
    low: float | None
    high: float | None
    source: str


class Ledger(NamedTuple):
    """Entries in the order they were written, and the numbers of lines that a cut-off write left unreadable."""

    entries: tuple[LedgerEntry, ...]
    torn_lines: tuple[int, ...]


def append_to_ledger(path: str | Path, rows: Iterable[Scored], *, date: datetime.date, version: str) -> int:
    """Add scored rows at the end.

    Parameters
    ----------
    path : path
        Made when missing, readable and writable by its owner alone: it tells what somebody runs.
    rows : iterable of Scored
    date : date
        Of the scoring.
    version : str
        Of hetplan.

    Returns
    -------
    int
        Rows written.

    Raises
    ------
    InvalidInputError
        If the file cannot be written.
    """
    lines = [_line(row, date, version) for row in rows]
    try:
        # a+: every write goes to the end, whatever another process has added meanwhile.
        with open(path, "a+b", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                # A write that was cut off keeps its line to itself.
                lines[:1] = [("" if file.read(1) == b"\n" else "\n") + line for line in lines[:1]]
            file.write("".join(lines).encode())
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror}. Choose another ledger") from None
    return len(lines)


def _line(row: Scored, date: datetime.date, version: str) -> str:
    numbers = {name: float(getattr(row, name)) for name in _NUMBERS}
    entry = {
        "date": date.isoformat(),
        "hetplan": version,
        "group": row.group,
        "label": row.label,
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        "source": row.source,
    }
    # ASCII: a line that is cut off anywhere is still text.
    return json.dumps(entry) + "\n"


def read_ledger(path: str | Path) -> Ledger:
    """Read a ledger; lines that a cut-off write left incomplete are passed over and named.

    Raises
    ------
    InvalidInputError
        If the file cannot be read, or a line is complete JSON but no entry.
    """
    entries: list[LedgerEntry] = []
    torn: list[int] = []
    for number, line in enumerate(read_lines(path, MAX_LEDGER_BYTES), start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            torn.append(number)
            continue
        try:
            entries.append(_entry(content))
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"{path}, line {number}: not an entry of a ledger: {error}") from None
    return Ledger(tuple(entries), tuple(torn))


def _entry(content: Any) -> LedgerEntry:
    names = [field.name for field in fields(LedgerEntry)]
    if not isinstance(content, dict) or set(content) != set(names):
        raise ValueError(f"it holds {', '.join(names)}")
    for name in _NUMBERS:
        value = content[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number and (value is not None or name == "measured"):
            raise ValueError(f"{name} is {value!r}; a number")
    texts = ("hetplan", "group", "label", "source")
    if not all(isinstance(content[name], str) for name in texts):
        raise ValueError(f"{', '.join(texts)} are text")
    return LedgerEntry(**(content | {"date": datetime.date.fromisoformat(content["date"])}))
