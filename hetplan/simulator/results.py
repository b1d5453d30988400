"""What a simulation found: each request, latencies and goodput, money, and the timeline."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.errors import InvalidInputError
from hetplan.estimator.queueing import LATENCIES
from hetplan.simulator.engine import DONE, REFUSED, STEP, Table
from hetplan.units import MILLION
from hetplan.workload.requests import Slo

if TYPE_CHECKING:
    from pandas import DataFrame

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that befell the fleet: a notice, a loss, a start, a hand-over, a new plan."""

    time_s: float
    kind: str
    subject: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """A pipeline in one state, from a time to a time."""

    pipeline: str
    state: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    """A simulated run.

    Attributes
    ----------
    end_s : float
        When the last request was answered, or the machines were given back.
    cost_usd : float
        Of all machines, as they are billed, to the end.
    cost_by_market_usd : mapping
    query_types : tuple of str
    spans : tuple of Span
        What each pipeline did when.
    happenings : tuple of Happening
        In the order of time.
    availability : mapping of str to (times_s, machines)
        Of each spot pool: what could be had.
    replica_names : tuple of str
    busy_s : (R,) float
        Of each replica: seconds in which it had something to do.

    Examples
    --------
    >>> import hetplan as hp
    >>> plan = hp.optimize(model="llama-3.1-8b", cluster={"g6.xlarge": 1},
    ...                    workload=hp.Workload(input_tokens=500, output_tokens=50), solver="dp-beam")
    >>> load = hp.Workload(input_tokens=500, output_tokens=50, requests_per_s=0.5)
    >>> result = hp.simulate(plan, hp.Traffic.poisson(load, duration_s=60, seed=1))
    >>> len(result.requests) > 0 and result.percentile("ttft_s", 0.9) > 0
    True
    """

    end_s: float
    cost_usd: float
    query_types: tuple[str, ...]
    table: Table = field(repr=False)
    cost_by_market_usd: Mapping[str, float] = field(default_factory=dict)
    spans: tuple[Span, ...] = field(default=(), repr=False)
    happenings: tuple[Happening, ...] = field(default=(), repr=False)
    availability: Mapping[str, tuple[FloatArray, NDArray[np.int64]]] = field(default_factory=dict, repr=False)
    replica_names: tuple[str, ...] = ()
    busy_s: FloatArray = field(default_factory=lambda: np.zeros(0), repr=False)
    steps: Table = field(default_factory=lambda: np.zeros(0, dtype=STEP), repr=False)

    # ---- requests

    @property
    def requests(self) -> DataFrame:
        """A row for each request.

        Returns
        -------
        pandas.DataFrame
            ``arrival_s``, ``query_type``, ``input_tokens``, ``output_tokens``, ``status`` ("done", "refused",
            "unfinished"), ``replica``, ``started_s``, ``first_token_s``, ``finish_s``, ``ttft_s``, ``tpot_s`` (without
            the first token), ``e2e_s``, ``preemptions``, ``moves``, ``recomputed_tokens``. Times are seconds since the
            start; NaN of what did not happen.
        """
        import pandas as pd

        t = self.table
        status = np.where(t["status"] == DONE, "done", np.where(t["status"] == REFUSED, "refused", "unfinished"))
        return pd.DataFrame(
            {
                "arrival_s": t["arrival_s"],
                "query_type": np.array(self.query_types, dtype=object)[t["query_type"]],
                "input_tokens": t["prompt"],
                "output_tokens": t["answer"],
                "status": status,
                "replica": t["replica"],
                "started_s": t["started_s"],
                "first_token_s": t["first_s"],
                "finish_s": np.where(t["status"] == DONE, t["finish_s"], math.nan),
                **{name: self.latency(name) for name in LATENCIES},
                "preemptions": t["preemptions"],
                "moves": t["moves"],
                "recomputed_tokens": t["recomputed"],
            }
        )

    def latency(self, name: str) -> FloatArray:
        """(N,) seconds of each request: "ttft_s", "tpot_s" or "e2e_s"; NaN of requests that were not answered."""
        t = self.table
        done = t["status"] == DONE
        if name == "ttft_s":
            found = t["first_s"] - t["arrival_s"]
        elif name == "tpot_s":
            found = (t["finish_s"] - t["first_s"]) / np.maximum(t["answer"] - 1, 1)
        elif name == "e2e_s":
            found = t["finish_s"] - t["arrival_s"]
        else:
            raise InvalidInputError(f"latency is one of {', '.join(LATENCIES)}, got {name!r}")
        return np.where(done, found, math.nan)

    def percentile(self, name: str, level: ArrayLike) -> float | FloatArray:
        """A percentile of a latency over the requests that were answered.

        Parameters
        ----------
        name : "ttft_s", "tpot_s" or "e2e_s"
        level : float or array_like
            From 0 to 1.

        Returns
        -------
        float, or array of the shape of ``level``
            Seconds; NaN where nothing was answered.
        """
        levels = np.asarray(level, dtype=np.float64)
        if not ((levels >= 0) & (levels <= 1)).all():
            raise InvalidInputError(f"a percentile is a level from 0 to 1, got {level!r}")
        values = self.latency(name)
        values = values[~np.isnan(values)]
        if not values.size:
            return float("nan") if levels.ndim == 0 else np.full(levels.shape, math.nan)
        found = np.quantile(values, levels)
        return float(found) if levels.ndim == 0 else np.asarray(found)

    @property
    def answered(self) -> int:
        """Requests that were answered whole."""
        return int((self.table["status"] == DONE).sum())

    @property
    def refused(self) -> int:
        """Requests that no replica can hold."""
        return int((self.table["status"] == REFUSED).sum())

    @property
    def requests_per_s(self) -> float:
        """Answered requests per second up to the end."""
        return self.answered / self.end_s if self.end_s > 0 else math.nan

    @property
    def output_tokens(self) -> int:
        """Tokens of the answers."""
        return int(self.table["answer"][self.table["status"] == DONE].sum())

    @property
    def recomputed_tokens(self) -> int:
        """Tokens whose keys and values were computed more than once: preemptions, moves and restarts."""
        return int(self.table["recomputed"].sum())

    @property
    def usd_per_million_output_tokens(self) -> float:
        """What the machines cost over the tokens of the answers."""
        return self.cost_usd / self.output_tokens * MILLION if self.output_tokens else math.inf

    def goodput_per_s(self, slo: Slo) -> float:
        """Requests per second that were answered within every limit of an SLO, whatever its percentile."""
        kept = self.table["status"] == DONE
        for name, limit in slo.limits().items():
            kept &= np.nan_to_num(self.latency(name), nan=math.inf) <= limit
        return float(kept.sum() / self.end_s) if self.end_s > 0 else math.nan

    @property
    def downtime_s(self) -> float:
        """Seconds that pipelines did not serve, summed over pipelines."""
        return sum(
            min(s.end_s, self.end_s) - s.start_s for s in self.spans if s.state != "serving" and s.start_s < self.end_s
        )

    def mean_latency_over_time(self, name: str, *, window_s: float = 300.0) -> tuple[FloatArray, FloatArray]:
        """A trailing mean of a latency by the time of the answer.

        Parameters
        ----------
        name : "ttft_s", "tpot_s" or "e2e_s"
        window_s : float

        Returns
        -------
        time_s, mean_s : (N,) float arrays
            At each answer, over those of the ``window_s`` before it.
        """
        values, ends = self.latency(name), self.table["finish_s"]
        done = np.flatnonzero(~np.isnan(values))
        order = done[np.argsort(ends[done], kind="stable")]
        times, sums = ends[order], np.concatenate([[0.0], np.cumsum(values[order])])
        first = np.searchsorted(times, times - window_s, side="right")
        last = np.arange(1, times.size + 1)
        return times, (sums[last] - sums[first]) / (last - first)

    def __str__(self) -> str:
        parts = [
            f"{self.answered:,} of {len(self.table):,} requests answered in {self.end_s:.1f} s "
            f"({self.requests_per_s:.3f} req/s), ${self.cost_usd:.2f}, "
            f"{self.usd_per_million_output_tokens:.3f} $ per million output tokens"
        ]
        if self.refused:
            parts.append(f"{self.refused:,} refused: longer than the KV cache of the replica they came to")
        for name in LATENCIES:
            p50, p90, p99 = np.asarray(self.percentile(name, [0.5, 0.9, 0.99])).tolist()
            parts.append(f"{name.removesuffix('_s').upper():5} P50 {p50:.3f} s, P90 {p90:.3f} s, P99 {p99:.3f} s")
        lost = self.downtime_s
        parts.append(
            f"{int(self.table['preemptions'].sum()):,} preemptions, {int(self.table['moves'].sum()):,} moves, "
            f"{self.recomputed_tokens:,} tokens computed again" + (f", pipelines down for {lost:.0f} s" if lost else "")
        )
        return "\n".join(parts)

    # ---- timeline

    def write_chrome_trace(self, path: str | Path) -> None:
        """Write the logged steps, the pipelines' states and what happened, for chrome://tracing or Perfetto.

        Raises
        ------
        InvalidInputError
            If the file cannot be written.
        """
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}}
            for number, name in enumerate(self.replica_names)
        ]
        for step in self.steps.tolist() if self.steps.size else []:
            start_s, end_s, replica, prompt, sequences, count = step
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": replica,
                    "ts": start_s * MILLION,
                    "dur": (end_s - start_s) * MILLION,
                    "name": "prefill" if prompt else "decode",
                    "args": {"prompt_tokens": prompt, "sequences": sequences, "steps": count},
                }
            )
        names = sorted({span.pipeline for span in self.spans})
        events += [
            {"ph": "X", "pid": 1, "tid": names.index(s.pipeline), "ts": s.start_s * MILLION,
             "dur": (min(s.end_s, self.end_s) - s.start_s) * MILLION, "name": s.state, "args": {"pipeline": s.pipeline}}
            for s in self.spans if s.start_s < self.end_s
        ]  # fmt: skip
        events += [
            {"ph": "i", "s": "g", "pid": 1, "tid": 0, "ts": h.time_s * MILLION, "name": f"{h.kind} {h.subject}",
             "args": {"detail": h.detail}}
            for h in self.happenings
        ]  # fmt: skip
        try:
            Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
        except OSError as error:
            raise InvalidInputError(f"{path}: cannot be written: {error}. Check the path") from None
