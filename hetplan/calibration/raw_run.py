"""Raw calibration runs: the device they were made on, and a file that takes each point as it is measured.

The file is JSON lines: a header, then one point a line. A run that was cut short is continued from its file, on the
same device with the same software only.
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hetplan import __version__
from hetplan.base import Frozen
from hetplan.calibration.lattice import Key, Kind, point_key
from hetplan.catalog.calibration import CalibrationPoint
from hetplan.catalog.dtypes import Dtype
from hetplan.errors import InvalidInputError, SchemaVersionError
from hetplan.files import read_text
from hetplan.units import MIB

SCHEMA: Literal["hetplan.raw_calibration/1"] = "hetplan.raw_calibration/1"
_MOST_BYTES = 16 * MIB
# What two devices must share for their points to be of one run.
IDENTITY = ("kind", "name", "driver", "engine", "threads", "isa_flags")

Timed = Literal["graph", "stream", "clock"]


class DeviceFacts(Frozen):
    """What was measured.

    ``engine`` is the software that ran the operations ("torch 2.13.0+cpu"), ``driver`` a GPU's. ``cache_bytes`` is the
    last cache before memory. ``gpu_count`` is of the whole node. A CPU also has physical
    ``cores``, the ``threads`` that torch used, and those of its instructions that decide how fast it multiplies.
    """

    kind: Kind
    name: str
    driver: str | None = None
    engine: str
    dtypes: tuple[Dtype, ...]
    memory_bytes: Annotated[int, Field(gt=0)]
    cache_bytes: Annotated[int, Field(ge=0)]
    gpu_count: Annotated[int, Field(ge=0)] = 0
    cores: Annotated[int, Field(ge=1)] | None = None
    threads: Annotated[int, Field(ge=1)] | None = None
    isa_flags: tuple[str, ...] = ()


class RawHeader(Frozen):
    """First line of a raw run."""

    schema_version: Literal["hetplan.raw_calibration/1"] = SCHEMA
    hetplan: str
    device: DeviceFacts
    measured_on: datetime.date | None = None


class RawPoint(Frozen):
    """One line of a raw run: a point, and what timed it.

    ``timed``: graph (device events around a replayed CUDA graph), stream (device events around calls) or clock (the
    process's own clock).
    """

    point: CalibrationPoint
    timed: Timed


class CalibrationRun(Frozen):
    """What a calibration run found.

    ``skipped`` says what was not measured and why; ``remaining`` lists what the time limit left, to be continued from
    the raw file. ``elapsed_s`` is of this call alone.
    """

    device: DeviceFacts
    points: tuple[CalibrationPoint, ...]
    skipped: tuple[str, ...] = ()
    remaining: tuple[str, ...] = ()
    elapsed_s: Annotated[float, Field(ge=0)]
    measured_on: datetime.date | None = None


class RawRun:
    """Points of a run, kept in memory and, where there is a path, in a file that is written line by line.

    Parameters
    ----------
    device : DeviceFacts
    path : str or path, optional
        A new file, or one that an earlier run on this device has left.
    today : date, optional
        Written into a new file; an older file keeps its own.

    Raises
    ------
    InvalidInputError
        If the file is of another device, driver or torch, is not a raw run, or cannot be written.
    SchemaVersionError
        If it has another schema version.
    """

    def __init__(self, device: DeviceFacts, path: str | Path | None, today: datetime.date | None = None) -> None:
        self.header = RawHeader(hetplan=__version__, device=device, measured_on=today)
        self.points: list[CalibrationPoint] = []
        self._path = None if path is None else Path(path)
        if self._path is None:
            return
        kept = _whole_lines(self._path) if self._path.exists() else ""
        if kept:
            self._resume(kept, self._path)
        else:
            _write(self._path, self.header.model_dump_json() + "\n", "w")

    @property
    def keys(self) -> set[Key]:
        """The points that are there."""
        return {point_key(point.operation, point.dtype, point.shape) for point in self.points}

    def add(self, point: CalibrationPoint, timed: Timed) -> None:
        """Take a point, on disk before it counts."""
        if self._path is not None:
            _write(self._path, RawPoint(point=point, timed=timed).model_dump_json() + "\n", "a")
        self.points.append(point)

    def _resume(self, kept: str, path: Path) -> None:
        header, points = _parse(kept, str(path))
        for name in IDENTITY:
            there, here = getattr(header.device, name), getattr(self.header.device, name)
            if there != here:
                raise InvalidInputError(
                    f"{path} was measured with {name} {_shown(there)}, here it is {_shown(here)}: points of two "
                    "are never mixed. Continue it where it began, or give a new raw_path"
                )
        self.header, self.points = header, points
        _truncate(path, len(kept.encode("utf-8")))


def _write(path: Path, text: str, mode: Literal["w", "a"]) -> None:
    try:
        with path.open(mode, encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror}. Choose another raw_path") from None


def _truncate(path: Path, size_bytes: int) -> None:
    try:
        os.truncate(path, size_bytes)
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror}. Choose another raw_path") from None


def read_raw_run(path: str | Path) -> tuple[RawHeader, list[CalibrationPoint]]:
    """Header and points of a raw file; a last line that was cut off is left out.

    Raises
    ------
    InvalidInputError
        If the file cannot be read or is not a raw run, naming the line.
    SchemaVersionError
        If it has another schema version.
    """
    return _parse(_whole_lines(Path(path)), str(path))


def _whole_lines(path: Path) -> str:
    """The text up to the last line end: a run killed while it wrote leaves a torn line behind."""
    text = read_text(path, _MOST_BYTES)
    whole = text[: text.rfind("\n") + 1]
    if text and not whole and not '{"schema_version":"hetplan.raw'.startswith(text[:30]):
        raise InvalidInputError(f"{path}: not a raw calibration run. Give a new raw_path")
    return whole


def _parse(text: str, source: str) -> tuple[RawHeader, list[CalibrationPoint]]:
    lines = text.splitlines()
    if not lines:
        raise InvalidInputError(f"{source}: empty; a raw calibration run begins with a header line")
    first = _record(lines[0], f"{source}, line 1")
    if first.get("schema_version") != SCHEMA:
        raise SchemaVersionError(
            f"{source} has schema {first.get('schema_version')!r}; this hetplan reads {SCHEMA!r}. Give a new raw_path"
        )
    header = RawHeader.from_json(lines[0])
    points: dict[Key, CalibrationPoint] = {}
    for number, line in enumerate(lines[1:], start=2):
        where = f"{source}, line {number}"
        _record(line, where)
        try:
            point = RawPoint.from_json(line).point
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}: {error}") from None
        points[point_key(point.operation, point.dtype, point.shape)] = point
    return header, list(points.values())


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise InvalidInputError(
            f"{where}: not a line of a raw calibration run. Remove the line, or give a new raw_path"
        )
    return record


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
