"""Traces of real traffic: when each request arrived and how long its prompt and answer were.

`read_trace` recognises a file's form by its first line; the readers beside it take one form each:

| form | first line |
|---|---|
| plain | ``arrival_s,input_tokens,output_tokens`` |
| Azure 2023 and 2024 | ``TIMESTAMP,ContextTokens,GeneratedTokens`` |
| BurstGPT | ``Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`` |
| JSON Lines | ``{"timestamp": 0.5, "input_length": 763, "output_length": 232}`` |

`write_vllm_trace` writes the last one as ``vllm bench serve --dataset-name timed_trace`` replays it.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.errors import InvalidInputError
from hetplan.files import read_lines, stream_csv_rows
from hetplan.units import GIB

__all__ = [
    "MAX_TRACE_BYTES",
    "Trace",
    "read_azure_trace",
    "read_burstgpt_trace",
    "read_jsonl_trace",
    "read_trace",
    "write_vllm_trace",
]

# A week of the larger Azure service is 1.2 GB.
MAX_TRACE_BYTES = 2 * GIB

_PLAIN = ("arrival_s", "input_tokens", "output_tokens")
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
_BURSTGPT_OTHERS = ("Model", "Total tokens", "Log Type", "Session ID", "Elapsed time")
# Spellings of the JSON Lines forms: ours, vLLM's timed traces and benchmark logs, Mooncake's.
_JSONL_SECONDS = ("timestamp_s", "arrival_s")
_JSONL_INPUT = ("input_tokens", "input_length", "input_len", "prompt_len", "prompt_tokens")
_JSONL_OUTPUT = ("output_tokens", "output_length", "output_len", "completion_tokens")
# Tokens behind one hash unless --timed-trace-chunk-hash-size says otherwise (vllm/benchmarks/datasets, vLLM 0.32).
_VLLM_CHUNK_TOKENS = 16

Failures = Literal["drop", "refuse"]
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
    dropped_count : int
        Rows of the file that are not among the requests because they failed.

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
    dropped_count: int

    def __init__(
        self,
        name: str,
        source: str,
        arrival_s: ArrayLike,
        input_tokens: ArrayLike,
        output_tokens: ArrayLike,
        dropped_count: int = 0,
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
        object.__setattr__(self, "dropped_count", dropped_count)
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
        return Trace(
            self.name,
            self.source,
            self.arrival_s * factor,
            self.input_tokens,
            self.output_tokens,
            self.dropped_count,
        )


def read_trace(path: str | Path, max_input_tokens: int | None = None) -> Trace:
    """A trace in any of the known forms, recognised by its first line.

    Parameters
    ----------
    path : str or Path
        A file in one of the forms of this module.
    max_input_tokens : int, optional
        Drop requests with a longer prompt.

    Returns
    -------
    Trace

    Raises
    ------
    InvalidInputError
        If the first line is of no known form, or as the form's own reader.

    See Also
    --------
    read_azure_trace, read_burstgpt_trace, read_jsonl_trace : With the options of each form.
    """
    first = next(read_lines(path, MAX_TRACE_BYTES), "").strip()
    if first.startswith("{"):
        return read_jsonl_trace(path, max_input_tokens)
    if set(_BURSTGPT) <= {name.strip() for name in first.split(",")}:
        return read_burstgpt_trace(path, max_input_tokens)
    return read_azure_trace(path, max_input_tokens)


def read_azure_trace(path: str | Path, max_input_tokens: int | None = None) -> Trace:
    """A trace in the form of the Azure LLM inference traces of 2023 and 2024.

    Parameters
    ----------
    path : str or Path
        CSV with the columns ``arrival_s, input_tokens, output_tokens`` (seconds since the start), or the
        published form ``TIMESTAMP, ContextTokens, GeneratedTokens``, whose clock starts at its first request.
        A time without a zone is UTC; digits beyond microseconds are cut. Rows are sorted by arrival; equal
        arrivals keep their order. A week-long file is read row by row.
    max_input_tokens : int, optional
        Drop requests with a longer prompt.

    Returns
    -------
    Trace

    Raises
    ------
    InvalidInputError
        For a value that is missing, not a number, negative, or zero tokens, with its line and column; or when
        nothing is left.
    """
    # Either form's columns are optional here, so that one pass reads both; _columns insists on one form.
    rows = stream_csv_rows(path, (), (*_PLAIN, *_AZURE), max_bytes=MAX_TRACE_BYTES)
    first = next(rows, None)
    if first is None:
        raise InvalidInputError(f"{path}: holds no requests; give at least one row")
    arrival, prompt, answer = _columns(first[1], str(path))
    published = arrival == _AZURE[0]

    def requests() -> Iterator[_Request]:
        for line, row in itertools.chain([first], rows):
            where = f"{path}, line {line}, column"
            if published:
                time = _timestamp_s(row[arrival], f"{where} {arrival}")
            else:
                time = _number(row[arrival], f"{where} {arrival}", float, 0)
            yield (
                time,
                _number(row[prompt], f"{where} {prompt}", int, 1),
                _number(row[answer], f"{where} {answer}", int, 1),
            )

    return _trace(path, requests(), max_input_tokens, from_first=published)


def read_burstgpt_trace(path: str | Path, max_input_tokens: int | None = None, *, failures: Failures = "drop") -> Trace:
    """A trace in the form of BurstGPT, releases 1 and 2.

    Parameters
    ----------
    path : str or Path
        CSV with at least the columns ``Timestamp`` (seconds), ``Request tokens`` and ``Response tokens``.
    max_input_tokens : int, optional
        Drop requests with a longer prompt.
    failures : {"drop", "refuse"}
        What to do with rows of zero response tokens, which are calls that failed: leave them out and count
        them in `Trace.dropped_count`, or raise.

    Returns
    -------
    Trace
        ``source`` says how many rows were dropped, too.

    Raises
    ------
    InvalidInputError
        For a value out of range, with its line and column; for a failure, when told to; or when nothing is left.
    """
    if failures not in ("drop", "refuse"):
        raise InvalidInputError(f"failures is 'drop' or 'refuse', got {failures!r}")
    arrival, prompt, answer = _BURSTGPT
    dropped = 0

    def requests() -> Iterator[_Request]:
        nonlocal dropped
        for line, row in stream_csv_rows(path, _BURSTGPT, _BURSTGPT_OTHERS, max_bytes=MAX_TRACE_BYTES):
            where = f"{path}, line {line}, column"
            output = _number(row[answer], f"{where} {answer}", int, 0)
            if output == 0:
                if failures == "refuse":
                    raise InvalidInputError(f"{where} {answer}: a failed call. Use failures='drop' to leave it out")
                dropped += 1
                continue
            time = _number(row[arrival], f"{where} {arrival}", float, 0)
            yield time, _number(row[prompt], f"{where} {prompt}", int, 1), output

    trace = _trace(path, requests(), max_input_tokens, from_first=False)
    if not dropped:
        return trace
    source = f"{trace.source} ({dropped:,} failed calls dropped)"
    return Trace(trace.name, source, trace.arrival_s, trace.input_tokens, trace.output_tokens, dropped)


def read_jsonl_trace(
    path: str | Path, max_input_tokens: int | None = None, *, seconds_per_timestamp: float = 1.0
) -> Trace:
    """A trace with one JSON object a line.

    Parameters
    ----------
    path : str or Path
        Each object has a time (``timestamp_s`` or ``arrival_s`` in seconds, or ``timestamp``), a prompt length
        (``input_tokens``, ``input_length``, ``input_len``, ``prompt_len`` or ``prompt_tokens``) and an answer
        length (``output_tokens``, ``output_length``, ``output_len`` or ``completion_tokens``). Other keys are
        ignored.
    max_input_tokens : int, optional
        Drop requests with a longer prompt.
    seconds_per_timestamp : float
        What one unit of ``timestamp`` is; 0.001 for the Mooncake traces, which give milliseconds.

    Returns
    -------
    Trace

    Raises
    ------
    InvalidInputError
        For a line that is not such an object, with its number and key; or when nothing is left.
    """
    if not (math.isfinite(seconds_per_timestamp) and seconds_per_timestamp > 0):
        raise InvalidInputError(f"seconds_per_timestamp is {seconds_per_timestamp}; give a finite number above 0")

    def requests() -> Iterator[_Request]:
        for line, text in enumerate(read_lines(path, MAX_TRACE_BYTES), start=1):
            if not text.strip():
                continue
            where = f"{path}, line {line}"
            row = _json_object(text, where)
            if "timestamp" in row and not any(key in row for key in _JSONL_SECONDS):
                time = _entry(row, ("timestamp",), where, float, 0) * seconds_per_timestamp
            else:
                time = _entry(row, _JSONL_SECONDS, where, float, 0)
            yield time, _entry(row, _JSONL_INPUT, where, int, 1), _entry(row, _JSONL_OUTPUT, where, int, 1)

    return _trace(path, requests(), max_input_tokens, from_first=False)


def write_vllm_trace(trace: Trace, path: str | Path, *, chunk_tokens: int = _VLLM_CHUNK_TOKENS) -> None:
    """Write a trace for ``vllm bench serve --dataset-name timed_trace``.

    Parameters
    ----------
    trace : Trace
        Its first request is sent at once, the others at their distance from it.
    path : str or Path
        File to write: one ``{"timestamp": s, "input_length": n, "output_length": m, "hash_ids": [...]}`` a line.
    chunk_tokens : int
        Tokens that stand behind each hash. With another number than vLLM's default of 16 the file is smaller;
        run it with ``--timed-trace-chunk-hash-size`` set to the same.

    Raises
    ------
    InvalidInputError
        If ``chunk_tokens`` is less than 1, or the file cannot be written.

    Notes
    -----
    vLLM 0.32 makes each prompt of the hashes alone: a line without enough of them would be sent with a shorter
    prompt. Hashes are never repeated here, so no prompt shares a prefix with another. Give ``--num-prompts
    len(trace)``: the default replays the first 1,000. Read it back with `read_jsonl_trace`.
    """
    if chunk_tokens < 1:
        raise InvalidInputError(f"chunk_tokens is {chunk_tokens}; give at least 1")
    hashes = itertools.count()
    start = trace.arrival_s[0]
    columns = (trace.arrival_s - start, trace.input_tokens, trace.output_tokens)
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            for arrival, prompt, answer in zip(*(column.tolist() for column in columns), strict=True):
                entry = {
                    "timestamp": round(arrival, 6),
                    "input_length": prompt,
                    "output_length": answer,
                    "hash_ids": list(itertools.islice(hashes, -(-prompt // chunk_tokens))),
                }
                file.write(json.dumps(entry, separators=(",", ":")) + "\n")
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be written: {error}. Check the path") from None


_Request = tuple[float, int, int]


def _trace(path: str | Path, requests: Iterable[_Request], max_input_tokens: int | None, *, from_first: bool) -> Trace:
    """Requests in any order as a trace; ``from_first`` starts the clock at the first, dropped or not."""
    if max_input_tokens is not None and max_input_tokens < 1:
        raise InvalidInputError(f"max_input_tokens is {max_input_tokens}; give at least 1, or None to keep all")
    arrivals, prompts, answers = array("d"), array("q"), array("q")
    for arrival, prompt, answer in requests:
        arrivals.append(arrival)
        prompts.append(prompt)
        answers.append(answer)
    if not arrivals:
        raise InvalidInputError(f"{path}: holds no requests; give at least one row")
    times, lengths = np.array(arrivals), np.array(prompts)
    order = np.argsort(times, kind="stable")
    start = times[order[0]] if from_first else 0.0
    if max_input_tokens is not None:
        order = order[lengths[order] <= max_input_tokens]
    if not order.size:
        raise InvalidInputError(f"{path}: every prompt is longer than max_input_tokens={max_input_tokens}; raise it")
    return Trace(Path(path).stem, str(path), times[order] - start, lengths[order], np.array(answers)[order])


def _columns(row: Mapping[str, str], source: str) -> tuple[str, str, str]:
    for form in (_PLAIN, _AZURE):
        if row.keys() == set(form):
            return form
    raise InvalidInputError(
        f"{source}, line 1: the header must be {','.join(_PLAIN)}, {','.join(_AZURE)} or BurstGPT's"
    )


def _number(text: str, where: str, kind: Callable[[str], _Number], least: int) -> _Number:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not _in_range(value, least):
        raise _not_a_number(text, where, kind, least)
    return value


def _entry(
    row: Mapping[str, Any], keys: tuple[str, ...], where: str, kind: Callable[[Any], _Number], least: int
) -> _Number:
    """The number under the one of ``keys`` that is there."""
    found = [key for key in keys if key in row]
    if len(found) != 1:
        told = f"several of {', '.join(found)}; keep one" if found else f"no key {' or '.join(keys)}"
        raise InvalidInputError(f"{where}: {told}")
    value = row[found[0]]
    allowed = int if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not _in_range(value, least):
        raise _not_a_number(value, f"{where}, key {found[0]}", kind, least)
    return kind(value)


def _in_range(value: float, least: int) -> bool:
    # Beyond 2**63 neither array holds it, and no request is that long.
    return least <= value < 2**63 and math.isfinite(value)


def _not_a_number(value: object, where: str, kind: object, least: int) -> InvalidInputError:
    wanted = "a whole number" if kind is int else "a number"
    return InvalidInputError(f"{where}: {value!r} is not {wanted} from {least}. Correct it or drop the row")


def _json_object(text: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where}: not readable as JSON: {error}") from None
    if not isinstance(row, dict):
        raise InvalidInputError(f"{where}: a JSON object is needed, got {type(row).__name__}")
    return row


def _timestamp_s(text: str, where: str) -> float:
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInputError(f"{where}: {text!r} is not a time such as 2023-11-16 18:15:46.680590") from None
    # Without a zone the trace's clock is taken as UTC, so that no local clock change moves requests.
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
