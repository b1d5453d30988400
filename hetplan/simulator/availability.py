"""How many machines of each pool can be had over time, and which windows of it are worst.

A pool is named by a string: an instance type in a place. The file form is CSV with the header
``time_s,pool,available``: from that time on the pool has that many machines.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.errors import InvalidInputError, UnknownNameError
from hetplan.files import stream_csv_rows
from hetplan.units import MIB

__all__ = ["MAX_AVAILABILITY_BYTES", "Availability", "Change", "Window", "window_scores", "worst_window"]

# Two million changes: a hundred pools that change every minute for two weeks.
MAX_AVAILABILITY_BYTES = 64 * MIB

_COLUMNS = ("time_s", "pool", "available")
# Times and counts of a pool, from 0 on.
_Steps = tuple[NDArray[np.float64], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Change:
    """At ``time_s`` the pool goes from ``before`` machines to ``after``."""

    time_s: float
    pool: str
    before: int
    after: int


class Availability:
    """Machines of each pool over time: step functions that hold from each of their times on.

    Parameters
    ----------
    steps : mapping of str to (times_s, counts)
        For each pool the times in seconds, ascending from 0, and the machines available from then on.
    duration_s : float
        The end, in seconds. What is available last stays so beyond it.

    Raises
    ------
    InvalidInputError
        If there is no pool, or a pool's times or counts are not such.

    Examples
    --------
    >>> market = Availability({"g6.12xlarge": ([0, 600], [3, 1])}, duration_s=3000)
    >>> market.count("g6.12xlarge", 599.0), market.count("g6.12xlarge", 600.0)
    (3, 1)
    """

    __slots__ = ("_steps", "duration_s")

    def __init__(self, steps: Mapping[str, tuple[ArrayLike, ArrayLike]], duration_s: float) -> None:
        if not steps:
            raise InvalidInputError("availability of no pool; give at least one")
        if not (math.isfinite(duration_s) and duration_s > 0):
            raise InvalidInputError(f"duration_s is {duration_s}; give a finite number above 0")
        self.duration_s = float(duration_s)
        self._steps = {pool: _checked(pool, *steps[pool], duration_s) for pool in sorted(steps)}

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the pools, sorted."""
        return tuple(self._steps)

    def steps(self, pool: str) -> _Steps:
        """Times in seconds, from 0, and counts of a pool; each count differs from the one before."""
        try:
            return self._steps[pool]
        except KeyError:
            raise UnknownNameError("pool", pool, self._steps) from None

    def count(self, pool: str, time_s: float) -> int:
        """Machines of the pool at a time from 0 on."""
        if not time_s >= 0:
            raise InvalidInputError(f"time_s is {time_s}; availability begins at 0")
        times, counts = self.steps(pool)
        return int(counts[np.searchsorted(times, time_s, side="right") - 1])

    def changes(self) -> Iterator[Change]:
        """Every change of a count, in the order of time; at one time in the order of the pools' names."""
        times, rows, before, after = self._changes()
        names = self.pools
        for time, row, old, new in zip(times.tolist(), rows.tolist(), before.tolist(), after.tolist(), strict=True):
            yield Change(time, names[row], old, new)

    def _changes(self) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Times, indices of pools, counts before and after."""
        pieces = [
            (times[1:], np.full(times.size - 1, row), counts[:-1], counts[1:])
            for row, (times, counts) in enumerate(self._steps.values())
        ]
        times, rows, before, after = (np.concatenate(column) for column in zip(*pieces, strict=True))
        order = np.argsort(times, kind="stable")
        return times[order], rows[order], before[order], after[order]

    def window(self, start_s: float, stop_s: float) -> Availability:
        """The part from ``start_s`` to before ``stop_s``, with its own clock from 0."""
        if not 0 <= start_s < stop_s <= self.duration_s:
            raise InvalidInputError(
                f"a window from {start_s} to {stop_s} s; it must lie within 0 and {self.duration_s:g} s"
            )
        cut = {}
        for pool, (times, counts) in self._steps.items():
            first = int(np.searchsorted(times, start_s, side="right")) - 1
            last = int(np.searchsorted(times, stop_s, side="left"))
            cut[pool] = (np.maximum(times[first:last] - start_s, 0.0), counts[first:last])
        return Availability(cut, stop_s - start_s)

    @classmethod
    def read(cls, path: str | Path) -> Availability:
        """Availability from a CSV file, which ends at the latest time in it.

        Parameters
        ----------
        path : str or Path
            Columns ``time_s`` (seconds from 0), ``pool`` (a name) and ``available`` (machines from then on). A
            pool's rows stand in the order of time, the first at 0.

        Returns
        -------
        Availability

        Raises
        ------
        InvalidInputError
            If the file cannot be read or is larger than 64 MiB, or for a bad row, with its line and column.
        """
        steps: dict[str, tuple[list[float], list[int]]] = {}
        for line, row in stream_csv_rows(path, _COLUMNS, max_bytes=MAX_AVAILABILITY_BYTES):
            where = f"{path}, line {line}"
            if not row["pool"]:
                raise InvalidInputError(f"{where}, column pool: empty; give the pool a name")
            times, counts = steps.setdefault(row["pool"], ([], []))
            time = _time_s(row["time_s"], f"{where}, column time_s")
            if not times and time != 0:
                raise InvalidInputError(
                    f"{where}, column time_s: {row['pool']} begins at {time:g}; say what is available from 0"
                )
            if times and time <= times[-1]:
                raise InvalidInputError(
                    f"{where}, column time_s: {time:g} is not after the pool's row before, {times[-1]:g}; sort the rows"
                )
            times.append(time)
            counts.append(_machines(row["available"], f"{where}, column available"))
        latest = max((times[-1] for times, _ in steps.values()), default=0.0)
        if latest == 0:
            raise InvalidInputError(f"{path}: holds no time after 0; end it with a row at the last moment observed")
        return cls(steps, latest)

    def write(self, path: str | Path) -> None:
        """Write the CSV file that `read` takes; each pool ends with a row at ``duration_s``.

        Raises
        ------
        InvalidInputError
            If the file cannot be written.
        """
        try:
            with Path(path).open("w", encoding="utf-8", newline="") as file:
                rows = csv.writer(file, lineterminator="\n")
                rows.writerow(_COLUMNS)
                for pool, (times, counts) in self._steps.items():
                    points = list(zip(times.tolist(), counts.tolist(), strict=True))
                    if times[-1] < self.duration_s:
                        points.append((self.duration_s, points[-1][1]))
                    rows.writerows((repr(time), pool, count) for time, count in points)
        except OSError as error:
            raise InvalidInputError(f"{path}: cannot be written: {error}. Check the path") from None


def _checked(pool: str, times_s: ArrayLike, counts: ArrayLike, duration_s: float) -> _Steps:
    times, machines = np.array(times_s, dtype=np.float64), np.array(counts)
    if times.ndim != 1 or times.size == 0 or times[0] != 0:
        raise InvalidInputError(f"the times of {pool} must begin at 0: say what is available then")
    late = np.flatnonzero(~(np.diff(times) > 0))
    if late.size:
        at = late[0] + 1
        raise InvalidInputError(f"{pool}: time {times[at]} does not come after {times[at - 1]}; sort the times")
    if times[-1] > duration_s:
        raise InvalidInputError(f"{pool} changes at {times[-1]}, after duration_s={duration_s}; raise it")
    if machines.shape != times.shape or machines.dtype.kind not in "iu" or (machines < 0).any():
        raise InvalidInputError(f"{pool}: give {times.size} whole numbers of machines from 0, one per time")
    changed = np.concatenate(([True], np.diff(machines.astype(np.int64)) != 0))
    steps = times[changed], machines[changed].astype(np.int64)
    for array in steps:
        array.setflags(write=False)
    return steps


def _time_s(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise InvalidInputError(f"{where}: {text!r} is not a number of seconds from 0. Correct it or drop the row")
    return value


def _machines(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidInputError(f"{where}: {text!r} is not a whole number from 0. Correct it or drop the row")
    return int(text)


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of an availability: its changes, the machines they touch, and their product, the score."""

    start_s: float
    stop_s: float
    event_count: int
    machine_count: int

    @property
    def score(self) -> int:
        """Changes times machines that came or went."""
        return self.event_count * self.machine_count


def window_scores(
    availability: Availability, *, width_s: float = 3000.0, step_s: float = 300.0
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Changes in every window of one width.

    Parameters
    ----------
    availability : Availability
        At least one window long.
    width_s, step_s : float
        Length of a window and the distance of their starts, in seconds. The defaults are the fault study of
        ShuntServe: 50 minutes; 1,701 windows over six days are about five minutes apart.

    Returns
    -------
    start_s : (W,) float array
        Start of each window.
    event_count : (W,) integer array
        Changes of a pool's count in it. A window with none is quiet.
    machine_count : (W,) integer array
        Machines that came or went.

    Raises
    ------
    InvalidInputError
        If a width or step is not above 0 or the availability is shorter than a window.
    """
    if not (width_s > 0 and step_s > 0 and math.isfinite(step_s)):
        raise InvalidInputError(f"width_s={width_s}, step_s={step_s}: give numbers above 0")
    if width_s > availability.duration_s:
        raise InvalidInputError(
            f"width_s is {width_s:g}, but the availability lasts {availability.duration_s:g} s; give a shorter window"
        )
    starts = np.arange(0.0, availability.duration_s - width_s + step_s / 2, step_s)
    starts = starts[starts + width_s <= availability.duration_s]
    times, _, before, after = availability._changes()
    machines = np.concatenate(([0], np.cumsum(np.abs(after - before))))
    # As `window` cuts: what changes at the very start has already happened.
    first = np.searchsorted(times, starts, side="right")
    last = np.maximum(np.searchsorted(times, starts + width_s, side="left"), first)
    return starts, (last - first).astype(np.int64), machines[last] - machines[first]


def worst_window(availability: Availability, *, width_s: float = 3000.0, step_s: float = 300.0) -> Window:
    """The window with the highest score, changes times machines affected; the first of several.

    Parameters
    ----------
    availability : Availability
        At least one window long.
    width_s, step_s : float
        As for `window_scores`.

    Returns
    -------
    Window
        Cut it out with ``availability.window(window.start_s, window.stop_s)``.

    Raises
    ------
    InvalidInputError
        As `window_scores`.

    Notes
    -----
    ShuntServe, section 7.2, scores a window by "the frequency of availability change events and the magnitude of
    instances affected by each event"; their product is taken here, which is 0 exactly for a quiet window, as there.

    Examples
    --------
    >>> steps = {"a": ([0, 100, 7000, 7100], [4, 3, 1, 4])}
    >>> worst_window(Availability(steps, duration_s=12_000))
    Window(start_s=4200.0, stop_s=7200.0, event_count=2, machine_count=5)
    """
    starts, events, machines = window_scores(availability, width_s=width_s, step_s=step_s)
    worst = int(np.argmax(events * machines))
    start = float(starts[worst])
    return Window(start, start + width_s, int(events[worst]), int(machines[worst]))
