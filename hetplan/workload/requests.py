"""Request classes with their token distributions and rates, and the promises made to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from hetplan.base import Frozen
from hetplan.errors import InvalidInputError

if TYPE_CHECKING:
    from hetplan.workload.traces import Trace

Positive = Annotated[float, Field(gt=0)]
_HISTOGRAM_BINS = 64


class Slo(Frozen):
    """Latency promises: limits in seconds on the mean, or on a percentile of all requests at the workload's rate.

    A hard limit is never broken by a returned plan; a soft one lowers the objective by
    ``latency_penalty`` times the relative excess (eq. 7 of ShuntServe).
    """

    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    e2e_s: Positive | None = None
    percentile: Annotated[float, Field(gt=0, lt=1)] | None = None
    hard: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ttft_s is None and self.tpot_s is None and self.e2e_s is None:
            raise ValueError("an Slo limits nothing; give ttft_s, tpot_s or e2e_s")
        return self

    def limits(self) -> dict[str, float]:
        """The limits that are set, by name."""
        named = {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "e2e_s": self.e2e_s}
        return {name: limit for name, limit in named.items() if limit is not None}


class TokenDistribution(Frozen):
    """How long prompts or answers are: token counts and their shares, which sum to one.

    A plain number stands for a distribution of that one length.
    """

    tokens: Annotated[tuple[Positive, ...], Field(min_length=1)]
    shares: Annotated[tuple[Positive, ...], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {"tokens": (value,), "shares": (1.0,)}
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.tokens) != len(self.shares):
            raise ValueError(f"{len(self.tokens)} token counts but {len(self.shares)} shares; give one share each")
        total = sum(self.shares)
        if abs(total - 1) > 1e-6:
            raise ValueError(f"shares sum to {total:g}; they must sum to 1")
        return self

    @classmethod
    def from_samples(cls, samples: Iterable[float]) -> TokenDistribution:
        """A histogram of at most 64 equally filled bins and the longest sample; it keeps the mean and the maximum."""
        ordered = sorted(samples)
        if not ordered:
            raise InvalidInputError("no samples: a token distribution needs at least one request")
        count = len(ordered)
        bins = min(_HISTOGRAM_BINS, count)
        edges = [*((count - 1) * i // bins for i in range(bins + 1)), count]
        tokens: dict[float, float] = {}
        for start, stop in pairwise(edges):
            if start == stop:
                continue
            centre = sum(ordered[start:stop]) / (stop - start)
            tokens[centre] = tokens.get(centre, 0.0) + (stop - start) / count
        return cls(tokens=tuple(tokens), shares=tuple(tokens.values()))

    @property
    def mean(self) -> float:
        return sum(t * s for t, s in zip(self.tokens, self.shares, strict=True))

    @property
    def maximum(self) -> float:
        return max(self.tokens)

    def quantile(self, level: float) -> float:
        """The smallest count that covers a share ``level`` of the requests."""
        covered = 0.0
        for tokens, share in sorted(zip(self.tokens, self.shares, strict=True)):
            covered += share
            if covered >= level - 1e-9:
                return tokens
        return self.maximum


class QueryType(Frozen):
    """One class of requests. ``requests_per_s`` None: as many as the plan can serve."""

    name: str = "default"
    requests_per_s: Positive | None = None
    input_tokens: TokenDistribution
    output_tokens: TokenDistribution
    prefix_cache_hit_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    slo: Slo | None = None


class Workload(Frozen):
    """What arrives: one or several request classes.

    Parameters
    ----------
    input_tokens, output_tokens : number or TokenDistribution
        Of the only class, when there is one.
    requests_per_s : float, optional
        Its rate; None asks for the most that can be served.
    prefix_cache_hit_rate : float
        Share of the prompt found in the prefix cache, in [0, 1).
    query_types : tuple of QueryType
        Several classes, each with its rate; instead of the parameters above.

    Examples
    --------
    >>> Workload(input_tokens=763, output_tokens=232).mean_input_tokens
    763.0
    """

    query_types: Annotated[tuple[QueryType, ...], Field(min_length=1)]

    def __init__(
        self,
        *,
        input_tokens: TokenDistribution | float | None = None,
        output_tokens: TokenDistribution | float | None = None,
        requests_per_s: float | None = None,
        prefix_cache_hit_rate: float = 0.0,
        query_types: Sequence[QueryType | Mapping[str, Any]] | None = None,
        **unknown: Any,
    ) -> None:
        one = {"input_tokens": input_tokens, "output_tokens": output_tokens, "requests_per_s": requests_per_s}
        given = {name: value for name, value in one.items() if value is not None} | unknown
        if prefix_cache_hit_rate != 0.0:
            given["prefix_cache_hit_rate"] = prefix_cache_hit_rate
        if query_types is None:
            missing = [name for name in ("input_tokens", "output_tokens") if name not in given]
            if missing:
                raise InvalidInputError(
                    f"a Workload needs {' and '.join(missing)} (or query_types); give numbers of tokens"
                )
            super().__init__(**given)
        else:
            super().__init__(query_types=tuple(query_types), **given)

    @model_validator(mode="before")
    @classmethod
    def _one_class(cls, values: Any) -> Any:
        if isinstance(values, dict) and "query_types" not in values:
            return {"query_types": (values,)}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [q.name for q in self.query_types]
        if len(set(names)) != len(names):
            raise ValueError(f"two query types are called {next(n for n in names if names.count(n) > 1)!r}; rename one")
        if len(names) > 1 and any(q.requests_per_s is None for q in self.query_types):
            raise ValueError("several query types need a requests_per_s each, to weigh them")
        return self

    @classmethod
    def from_trace(cls, trace: Trace, *, prefix_cache_hit_rate: float = 0.0) -> Workload:
        """One class with the trace's rate and its distributions of lengths."""
        return cls(
            query_types=(
                QueryType(
                    name=trace.name,
                    requests_per_s=trace.requests_per_s,
                    input_tokens=TokenDistribution.from_samples(trace.input_tokens.tolist()),
                    output_tokens=TokenDistribution.from_samples(trace.output_tokens.tolist()),
                    prefix_cache_hit_rate=prefix_cache_hit_rate,
                ),
            )
        )

    @property
    def requests_per_s(self) -> float | None:
        """Rate of all classes together; None when none is stated."""
        rates = [q.requests_per_s for q in self.query_types]
        return None if rates[0] is None else sum(r for r in rates if r is not None)

    def _mean(self, values: Iterable[float]) -> float:
        total = self.requests_per_s
        if total is None:
            return next(iter(values))
        return sum(v * (q.requests_per_s or 0.0) for v, q in zip(values, self.query_types, strict=True)) / total

    @cached_property
    def mean_input_tokens(self) -> float:
        return self._mean(q.input_tokens.mean for q in self.query_types)

    @cached_property
    def mean_output_tokens(self) -> float:
        return self._mean(q.output_tokens.mean for q in self.query_types)

    @cached_property
    def mean_prefill_tokens(self) -> float:
        """Prompt tokens that are computed: those the prefix cache does not hold."""
        return self._mean(q.input_tokens.mean * (1 - q.prefix_cache_hit_rate) for q in self.query_types)

    @cached_property
    def max_tokens(self) -> int:
        """Longest prompt plus longest answer of any class, in tokens."""
        longest = max(q.input_tokens.maximum + q.output_tokens.maximum for q in self.query_types)
        return int(-(-longest // 1))
