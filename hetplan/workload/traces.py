"""Traces of real traffic: when each request arrived and how long its prompt and answer were."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.errors import InvalidInputError
from hetplan.files import read_csv_rows
from hetplan.units import MIB

MAX_TRACE_BYTES = 256 * MIB

_PLAIN = ("arrival_s", "input_tokens", "output_tokens")
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order of their arrival.

    Parameters
    ----------
    name, source : str
        What to call it, and where it comes from.
    arrival_s : (N,) array
        Seconds since the start of the trace, ascending.
    input_tokens, output_tokens : (N,) integer array
        Lengths of prompt and answer, at least one.

    Raises
    ------
    InvalidInputError
        If the arrays differ in length, hold no request, or hold a value out of range.

    Examples
    --------
    >>> trace = Trace("two", "example", [0.0, 4.0], [100, 300], [20, 40])
    >>> trace.mean_input_tokens, trace.requests_per_s
    (200.0, 0.25)
    """

    name: str
    source: str
    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]

    def __init__(
        self, name: str, source: str, arrival_s: ArrayLike, input_tokens: ArrayLike, output_tokens: ArrayLike
    ) -> None:
        arrival = np.array(arrival_s, dtype=np.float64)
        lengths = {
            label: np.array(tokens)
            for label, tokens in (("input_tokens", input_tokens), ("output_tokens", output_tokens))
        }
        if arrival.ndim != 1 or arrival.size == 0:
            raise InvalidInputError(f"trace {name!r} holds no requests; give at least one arrival")
        wrong = np.flatnonzero(~(np.isfinite(arrival) & (arrival >= 0)))
        if wrong.size:
            raise InvalidInputError(f"arrival_s[{wrong[0]}] is {arrival[wrong[0]]}; give seconds from 0")
        late = np.flatnonzero(np.diff(arrival) < 0)
        if late.size:
            raise InvalidInputError(f"arrival_s[{late[0] + 1}] is earlier than the one before; sort the requests")
        for label, tokens in lengths.items():
            if tokens.shape != arrival.shape or tokens.dtype.kind not in "iu":
                raise InvalidInputError(f"{label} must hold {arrival.size} whole numbers, one per arrival")
            few = np.flatnonzero(tokens < 1)
            if few.size:
                raise InvalidInputError(f"{label}[{few[0]}] is {tokens[few[0]]}; a request has at least one token")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "source", source)
        for label, values in {"arrival_s": arrival, **lengths}.items():
            kept = values if label == "arrival_s" else values.astype(np.int64)
            kept.setflags(write=False)
            object.__setattr__(self, label, kept)

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    @property
    def mean_input_tokens(self) -> float:
        return float(self.input_tokens.mean())

    @property
    def mean_output_tokens(self) -> float:
        return float(self.output_tokens.mean())

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0])

    @property
    def requests_per_s(self) -> float | None:
        """Mean arrival rate; None when all requests arrive at once."""
        return None if self.duration_s == 0 else (len(self) - 1) / self.duration_s

    def head(self, seconds: float) -> Trace:
        """The requests that arrive in the first ``seconds`` of the trace."""
        if not seconds > 0:
            raise InvalidInputError(f"head of {seconds} s: give a time above 0")
        count = int(np.searchsorted(self.arrival_s, seconds, side="left"))
        if count == 0:
            raise InvalidInputError(
                f"trace {self.name!r} has no request in its first {seconds:g} s; its first is at {self.arrival_s[0]:g}"
            )
        return Trace(
            self.name, self.source, self.arrival_s[:count], self.input_tokens[:count], self.output_tokens[:count]
        )

    def stretched(self, factor: float) -> Trace:
        """The same requests with every arrival time multiplied by ``factor``: 2 halves the rate."""
        if not (math.isfinite(factor) and factor > 0):
            raise InvalidInputError(f"stretched by {factor}: give a finite factor above 0")
        return Trace(self.name, self.source, self.arrival_s * factor, self.input_tokens, self.output_tokens)


def read_azure_trace(path: str | Path, max_input_tokens: int | None = None) -> Trace:
    """A trace in the form of the Azure LLM inference traces.

    Parameters
    ----------
    path : str or Path
        CSV with the columns ``arrival_s, input_tokens, output_tokens`` (seconds since the start), or the
        published form ``TIMESTAMP, ContextTokens, GeneratedTokens``, whose clock starts at its first request.
        Rows are sorted by arrival; equal arrivals keep their order.
    max_input_tokens : int, optional
        Drop requests with a longer prompt.

    Raises
    ------
    InvalidInputError
        For a value that is missing, not a number, negative, or zero tokens, with its line and column; or when
        nothing is left.
    """
    if max_input_tokens is not None and max_input_tokens < 1:
        raise InvalidInputError(f"max_input_tokens is {max_input_tokens}; give at least 1, or None to keep all")
    requests: list[tuple[float, int, int]] = []
    # Either form's columns are optional here, so that one pass reads both; _columns insists on one form.
    for line, row in read_csv_rows(path, (), (*_PLAIN, *_AZURE), max_bytes=MAX_TRACE_BYTES):
        arrival, prompt, answer = _columns(row, str(path))
        where = f"{path}, line {line}, column"
        time = (
            _number(row[arrival], f"{where} {arrival}", float, 0)
            if arrival == _PLAIN[0]
            else _timestamp_s(row[arrival], f"{where} {arrival}")
        )
        tokens = (_number(row[column], f"{where} {column}", int, 1) for column in (prompt, answer))
        requests.append((time, next(tokens), next(tokens)))
    if not requests:
        raise InvalidInputError(f"{path}: holds no requests; give at least one row")
    requests.sort(key=lambda request: request[0])
    start = requests[0][0] if arrival == _AZURE[0] else 0.0
    kept = [r for r in requests if max_input_tokens is None or r[1] <= max_input_tokens]
    if not kept:
        raise InvalidInputError(f"{path}: every prompt is longer than max_input_tokens={max_input_tokens}; raise it")
    arrivals, prompts, answers = zip(*kept, strict=True)
    return Trace(Path(path).stem, str(path), np.array(arrivals) - start, prompts, answers)


def _columns(row: dict[str, str], source: str) -> tuple[str, str, str]:
    for form in (_PLAIN, _AZURE):
        if row.keys() == set(form):
            return form
    raise InvalidInputError(f"{source}, line 1: the header must be {','.join(_PLAIN)} or {','.join(_AZURE)}")


def _number(text: str, where: str, kind: Callable[[str], _Number], least: int) -> _Number:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not math.isfinite(value) or value < least:
        wanted = "a whole number" if kind is int else "a number"
        raise InvalidInputError(f"{where}: {text!r} is not {wanted} from {least}. Correct it or drop the row")
    return value


def _timestamp_s(text: str, where: str) -> float:
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInputError(f"{where}: {text!r} is not a time such as 2023-11-16 18:15:46.680590") from None
    # Without a zone the trace's clock is taken as UTC, so that no local clock change moves requests.
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
