"""What is counted, for Prometheus. Labels are of few values; nothing of a request's content is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True, slots=True)
class Table:
    """A gauge with labels: its rows are the labels' values and the gauge's own."""

    name: str
    about: str
    labels: tuple[str, ...]
    rows: Sequence[tuple[tuple[str, ...], float]]


class _Tables(Collector):
    def __init__(self, read: Callable[[], Iterable[Table]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Nothing yet: there is no target when it is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of them as they are now."""
        for table in self._read():
            family = GaugeMetricFamily(f"hetplan_router_{table.name}", table.about, labels=table.labels)
            for labels, value in table.rows:
                family.add_metric(labels, value)
            yield family


class Metrics:
    """The router's counters and gauges, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "hetplan_router_requests_total",
            "Requests by endpoint and how they ended",
            ["endpoint", "outcome"],
            registry=self.registry,
        )
        self._tokens = Counter("hetplan_router_tokens_total", "Tokens taken from engines", registry=self.registry)
        self._interrupted = Counter(
            "hetplan_router_interruptions_total", "Attempts that died, by reason", ["reason"], registry=self.registry
        )
        self._resumed = Histogram(
            "hetplan_router_resume_seconds",
            "From sending an interrupted request to another pipeline to its next token",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._recomputed = Counter(
            "hetplan_router_recomputed_tokens_total", "Tokens sent again as prompts", registry=self.registry
        )
        self._first_token = Histogram(
            "hetplan_router_first_token_seconds",
            "From a request to its first token",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def gauge(self, name: str, about: str, read: Callable[[], float]) -> None:
        """A value that is read when it is asked for."""
        Gauge(f"hetplan_router_{name}", about, registry=self.registry).set_function(read)

    def tables(self, read: Callable[[], Iterable[Table]]) -> None:
        """Values with labels that come and go, read when they are asked for."""
        self.registry.register(_Tables(read))

    def ended(self, endpoint: str, outcome: str) -> None:
        """A request is over."""
        self._requests.labels(endpoint, outcome).inc()

    def tokens(self, count: int) -> None:
        """Tokens came."""
        self._tokens.inc(count)

    def interrupted(self, reason: str) -> None:
        """An attempt died."""
        self._interrupted.labels(reason).inc()

    def resumed(self, seconds: float, tokens: int) -> None:
        """An interrupted request has a new token."""
        self._resumed.observe(seconds)
        self._recomputed.inc(tokens)

    def first_token(self, seconds: float) -> None:
        """A request has its first token."""
        self._first_token.observe(seconds)

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
