"""What arrives: a trace as it was, requests at random times, bursts, days, or clients that wait for their answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.errors import InvalidInputError
from hetplan.workload.requests import TokenDistribution, Workload
from hetplan.workload.traces import Trace

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_MOST_REQUESTS = 20_000_000
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Requests in the order in which they come; N of them.

    Attributes
    ----------
    arrival_s : (N,) float
        Ascending. In a closed loop those of each client's first request, and for the others how long a client waits
        after an answer.
    input_tokens, output_tokens, cached_tokens : (N,) int
        Prompt, answer, and the part of the prompt that a prefix cache holds.
    query_type : (N,) int
        Index into ``query_types``.
    query_types : tuple of str
    clients : int
        Of a closed loop: each sends its next request when the last is answered. 0 where requests come by themselves.
    """

    arrival_s: FloatArray
    input_tokens: IntArray
    output_tokens: IntArray
    cached_tokens: IntArray
    query_type: IntArray
    query_types: tuple[str, ...]
    clients: int = 0

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    @classmethod
    def replay(cls, trace: Trace, *, speed: float = 1.0, prefix_cache_hit_rate: float = 0.0) -> Self:
        """A trace as it was, or faster.

        Parameters
        ----------
        trace : Trace
        speed : float
            2 lets it arrive in half the time; infinity sends everything at once.
        prefix_cache_hit_rate : float
            Share of each prompt that the prefix cache holds, in [0, 1).
        """
        if not speed > 0:
            raise InvalidInputError(f"speed is above 0, got {speed!r}")
        rate = _hit_rate(prefix_cache_hit_rate)
        prompt = trace.input_tokens
        arrival = np.zeros(len(trace)) if math.isinf(speed) else (trace.arrival_s - trace.arrival_s[0]) / speed
        return cls(
            arrival,
            prompt,
            trace.output_tokens,
            np.floor(prompt * rate).astype(np.int64),
            np.zeros(len(trace), dtype=np.int64),
            (trace.name,),
        )

    @classmethod
    def poisson(cls, workload: Workload, *, duration_s: float, seed: int = 0, burstiness: float = 1.0) -> Self:
        """Requests of a workload at random times.

        Parameters
        ----------
        workload : Workload
            Its query types need rates.
        duration_s : float
        seed : int
        burstiness : float
            Coefficient of variation of the times between requests, gamma distributed: 1 is Poisson, above it bursts.
        """
        _positive("duration_s", duration_s)
        _positive("burstiness", burstiness)
        return cls._drawn(workload, duration_s, seed, burstiness, None)

    @classmethod
    def diurnal(
        cls,
        workload: Workload,
        *,
        duration_s: float = _DAY_S,
        swing: float = 0.6,
        peak_s: float = 14 * 3600.0,
        seed: int = 0,
    ) -> Self:
        """Poisson requests whose rate goes up and down once a day, with the workload's rates as its mean.

        Parameters
        ----------
        swing : float
            Of the rate about its mean, 0 to 1: at its peak it is 1 + swing times the mean.
        peak_s : float
            When, in seconds after the start of the day.
        """
        _positive("duration_s", duration_s)
        if not 0 <= swing <= 1:
            raise InvalidInputError(f"swing is a number from 0 to 1, got {swing!r}")
        return cls._drawn(workload, duration_s, seed, 1.0, (swing, peak_s))

    @classmethod
    def closed_loop(
        cls,
        workload: Workload,
        *,
        clients: int,
        requests: int,
        ramp_s: float = 0.0,
        think_s: float = 0.0,
        seed: int = 0,
    ) -> Self:
        """Clients that each send the next request when the last is answered.

        Parameters
        ----------
        workload : Workload
        clients, requests : int
            Clients, and requests of all of them together.
        ramp_s : float
            Clients begin evenly over so many seconds; with 0 all at once.
        think_s : float
            Mean seconds between an answer and the client's next request, exponentially distributed. With neither this
            nor a ramp, requests of one length come and go together for ever, which real clients do not.
        seed : int
        """
        for name, count in (("clients", clients), ("requests", requests)):
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST_REQUESTS:
                raise InvalidInputError(f"{name} is a whole number from 1 to {_MOST_REQUESTS}, got {count!r}")
        generator = np.random.default_rng(seed)
        weights = np.array([q.requests_per_s or 1.0 for q in workload.query_types])
        kinds = generator.choice(len(weights), size=requests, p=weights / weights.sum())
        for name, seconds in (("ramp_s", ramp_s), ("think_s", think_s)):
            if not 0 <= seconds < math.inf:
                raise InvalidInputError(f"{name} is a number from 0, got {seconds!r}")
        first = generator.exponential(think_s, size=requests)
        first[:clients] = ramp_s * np.arange(min(clients, requests)) / clients
        return cls(first, *_lengths(workload, kinds, generator), clients=min(clients, requests))

    @classmethod
    def _drawn(
        cls,
        workload: Workload,
        duration_s: float,
        seed: int,
        burstiness: float,
        day: tuple[float, float] | None,
    ) -> Self:
        generator = np.random.default_rng(seed)
        arrivals, kinds = [], []
        for number, query in enumerate(workload.query_types):
            if query.requests_per_s is None:
                raise InvalidInputError(
                    f"query type {query.name!r} has no requests_per_s: state how many arrive, or use a closed loop"
                )
            swing, peak_s = day or (0.0, 0.0)
            rate = query.requests_per_s * (1 + swing)
            if rate * duration_s > _MOST_REQUESTS:
                raise InvalidInputError(
                    f"{rate * duration_s:.3g} requests of {query.name!r}; at most {_MOST_REQUESTS:,} are simulated. "
                    "Shorten duration_s"
                )
            times = _renewals(generator, rate, duration_s, burstiness)
            if day is not None:
                wave = 1 + swing * np.cos(2 * math.pi * (times - peak_s) / _DAY_S)
                times = times[generator.uniform(size=times.size) * (1 + swing) < wave]
            arrivals.append(times)
            kinds.append(np.full(times.size, number, dtype=np.int64))
        together = np.concatenate(arrivals)
        if not together.size:
            raise InvalidInputError(f"no request arrives in {duration_s:g} s; make it longer, or raise the rates")
        order = np.argsort(together, kind="stable")
        return cls(together[order], *_lengths(workload, np.concatenate(kinds)[order], generator))

    def head(self, requests: int) -> Self:
        """The first requests."""
        return type(self)(
            self.arrival_s[:requests],
            self.input_tokens[:requests],
            self.output_tokens[:requests],
            self.cached_tokens[:requests],
            self.query_type[:requests],
            self.query_types,
            self.clients,
        )


def as_traffic(given: Trace | Traffic) -> Traffic:
    """Traffic, or a trace replayed as it was."""
    if isinstance(given, Traffic):
        return given
    if isinstance(given, Trace):
        return Traffic.replay(given)
    raise InvalidInputError(f"a Trace or Traffic is simulated, got {type(given).__name__}")


def _renewals(generator: np.random.Generator, rate: float, duration_s: float, burstiness: float) -> FloatArray:
    """Arrival times below the duration, with gamma distributed times between them."""
    shape = 1 / burstiness**2
    parts: list[FloatArray] = []
    last = 0.0
    while last < duration_s:
        count = int(max((duration_s - last) * rate * 1.05, 16)) + 16
        gaps = generator.gamma(shape, 1 / (rate * shape), size=count)
        parts.append(last + np.cumsum(gaps))
        last = float(parts[-1][-1])
    times: FloatArray = np.concatenate(parts)
    return times[times < duration_s]


def _lengths(
    workload: Workload, kinds: ArrayLike, generator: np.random.Generator
) -> tuple[IntArray, IntArray, IntArray, IntArray, tuple[str, ...]]:
    """Prompt, answer, cached tokens and type of requests whose types are known."""
    which = np.asarray(kinds, dtype=np.int64)
    prompt, answer, cached = (np.zeros(which.size, dtype=np.int64) for _ in range(3))
    for number, query in enumerate(workload.query_types):
        own = np.flatnonzero(which == number)
        prompt[own] = _draw(query.input_tokens, own.size, generator)
        answer[own] = _draw(query.output_tokens, own.size, generator)
        cached[own] = np.floor(prompt[own] * query.prefix_cache_hit_rate).astype(np.int64)
    return prompt, answer, cached, which, tuple(query.name for query in workload.query_types)


def _draw(lengths: TokenDistribution, count: int, generator: np.random.Generator) -> IntArray:
    shares = np.asarray(lengths.shares)
    drawn = generator.choice(np.asarray(lengths.tokens), size=count, p=shares / shares.sum())
    whole: IntArray = np.maximum(np.rint(drawn), 1).astype(np.int64)
    return whole


def _hit_rate(rate: float) -> float:
    if not 0 <= rate < 1:
        raise InvalidInputError(f"prefix_cache_hit_rate is a number from 0 to below 1, got {rate!r}")
    return rate


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InvalidInputError(f"{name} is a number above 0, got {value!r}")
