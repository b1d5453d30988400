"""What is counted, for Prometheus. Labels are of few values; nothing of a request's content is in them."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


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

    def pipeline_gauge(self, name: str, about: str, readers: dict[str, Callable[[], float]]) -> None:
        """The same for each pipeline."""
        gauge = Gauge(f"hetplan_router_{name}", about, ["pipeline"], registry=self.registry)
        for pipeline, read in readers.items():
            gauge.labels(pipeline).set_function(read)

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
