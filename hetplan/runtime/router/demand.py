"""What is asked for lately, by model and query type: a ring of buckets, of at most 1.6 kB each for a line.

There are no more lines than `MAX_LINES`, beside those of models alone and of routes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

BUCKET_S = 5.0
BUCKETS = 120
# The present bucket fills while it is read.
MAX_WINDOW_S = BUCKET_S * (BUCKETS - 1)
# Lines by model and query type that are kept apart; those of routes have theirs beside, as anybody may name a type.
MAX_LINES = 64
OTHER = "(other)"
# Sizes that are counted together: each token alone to 16, then eight of them to a doubling, to 2**24 and beyond.
_PARTS = 8
_SIZES = 2 * _PARTS + _PARTS * 20 + 1


class Sizes:
    """How often answers or prompts were so long: exact to 15 tokens, beyond within an eighth."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = np.zeros(_SIZES, np.uint32)

    def add(self, tokens: int) -> None:
        """One more of so many tokens."""
        place = tokens
        if tokens >= 2 * _PARTS:
            shift = tokens.bit_length() - _PARTS.bit_length()
            place = min(_PARTS * (shift + 1) + (tokens >> shift) - _PARTS, _SIZES - 1)
        self.counts[place] += 1

    @staticmethod
    def longest(place: int) -> int:
        """The most tokens that are counted at a place."""
        if place < 2 * _PARTS:
            return place
        shift, part = divmod(place - _PARTS, _PARTS)
        return ((part + _PARTS + 1) << shift) - 1


@dataclass(slots=True)
class _Cell:
    """What a line has in one bucket."""

    number: int = -1
    asked: int = 0
    rejected: int = 0
    ended: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    inputs: Sizes = field(default_factory=Sizes)
    outputs: Sizes = field(default_factory=Sizes)


@dataclass(frozen=True, slots=True)
class Line:
    """What was asked of a model by a query type in a window.

    ``requests`` are those that came, ``rejected`` those of them that found no room or no pipeline in time. Tokens are
    of those that ended in the window; the p90 is exact to 15 tokens, and at most an eighth too much beyond.
    """

    model: str
    query_type: str | None
    requests: int = 0
    rejected: int = 0
    ended: int = 0
    requests_per_s: float = 0.0
    mean_input_tokens: float | None = None
    mean_output_tokens: float | None = None
    p90_input_tokens: int | None = None
    p90_output_tokens: int | None = None


class Demand:
    """The ring.

    Parameters
    ----------
    keeps_apart : callable
        Whether a query type has a line of its own, whatever else is named.
    clock : callable
        Seconds that only grow.

    Examples
    --------
    >>> now = 0.0
    >>> demand = Demand(clock=lambda: now)
    >>> demand.asked("llama", "chat")
    >>> demand.ended("llama", "chat", 12, 300)
    >>> now = 10.0
    >>> covered_s, lines = demand.window(60.0)
    >>> covered_s, lines[0].requests_per_s, lines[0].mean_output_tokens
    (10.0, 0.1, 300.0)
    """

    def __init__(
        self,
        keeps_apart: Callable[[str], bool] = lambda _query_type: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._began = clock, clock()
        self._rings: dict[tuple[str, str | None], list[_Cell | None]] = {}
        self._keeps_apart = keeps_apart
        self._swept = -1

    def asked(self, model: str, query_type: str | None) -> None:
        """A request came."""
        self._cell(model, query_type).asked += 1

    def rejected(self, model: str, query_type: str | None) -> None:
        """One that came found no room, or no pipeline in time."""
        self._cell(model, query_type).rejected += 1

    def ended(self, model: str, query_type: str | None, input_tokens: int, output_tokens: int) -> None:
        """One was answered."""
        cell = self._cell(model, query_type)
        cell.ended += 1
        cell.input_tokens += input_tokens
        cell.output_tokens += output_tokens
        cell.inputs.add(input_tokens)
        cell.outputs.add(output_tokens)

    def line_of(self, model: str, query_type: str | None) -> tuple[str, str | None]:
        """The line that such a request is counted in."""
        return (model, query_type) if (model, query_type) in self._rings else (model, OTHER)

    def window(self, window_s: float) -> tuple[float, list[Line]]:
        """Each line's numbers in the present bucket and whole ones before it, and the seconds that these cover."""
        now = self._clock()
        last = int(now // BUCKET_S)
        first = last - min(BUCKETS - 1, math.ceil(window_s / BUCKET_S)) + 1
        covered_s = max(now - max(first * BUCKET_S, self._began), 1e-9)
        lines = []
        for (model, query_type), ring in list(self._rings.items()):
            cells = [cell for cell in ring if cell is not None and first <= cell.number <= last]
            if cells:
                lines.append(_line(model, query_type, cells, covered_s))
        return covered_s, lines

    def _cell(self, model: str, query_type: str | None) -> _Cell:
        number = int(self._clock() // BUCKET_S)
        ring = self._rings.get((model, query_type)) or self._ring(model, query_type, number)
        cell = ring[number % BUCKETS]
        if cell is None or cell.number != number:
            cell = ring[number % BUCKETS] = _Cell(number)
        return cell

    def _ring(self, model: str, query_type: str | None, number: int) -> list[_Cell | None]:
        key = (model, query_type)
        if query_type is not None and len(self._rings) >= MAX_LINES and not self._keeps_apart(query_type):
            if self._swept != number:
                self._swept = number
                for old, ring in list(self._rings.items()):
                    if all(cell is None or cell.number <= number - BUCKETS for cell in ring):
                        del self._rings[old]
            if len(self._rings) >= MAX_LINES:
                key = (model, OTHER)
        return self._rings.setdefault(key, [None] * BUCKETS)


def _line(model: str, query_type: str | None, cells: list[_Cell], covered_s: float) -> Line:
    asked, ended = sum(cell.asked for cell in cells), sum(cell.ended for cell in cells)
    return Line(
        model,
        query_type,
        asked,
        sum(cell.rejected for cell in cells),
        ended,
        asked / covered_s,
        sum(cell.input_tokens for cell in cells) / ended if ended else None,
        sum(cell.output_tokens for cell in cells) / ended if ended else None,
        _p90(cell.inputs for cell in cells),
        _p90(cell.outputs for cell in cells),
    )


def _p90(sizes: Iterator[Sizes]) -> int | None:
    seen = np.cumsum(np.sum([one.counts for one in sizes], axis=0))
    if not seen[-1]:
        return None
    return Sizes.longest(int(np.searchsorted(seen, math.ceil(0.9 * int(seen[-1])))))
