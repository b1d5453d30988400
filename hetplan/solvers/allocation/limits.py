"""The limits of an allocation problem as things that can be moved, of one query type or of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.problem.allocation import AllocationProblem, QueryDemand
from hetplan.solvers.allocation.options import Options, make_options

BUDGET, STORAGE, UNSERVED = "budget_usd", "storage_capacity_gb", "max_unserved"
EVERY_TYPE = "all query types"
# A budget that is no limit.
_NO_LIMIT_USD = 1e300


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit that can be moved up, and the value from which on it does not matter any more.

    ``factor``: the value is a factor on the limits of all types.
    """

    constraint: str
    subject: str
    unit: str
    available: float
    most: float
    moved: Callable[[AllocationProblem, float], AllocationProblem]
    factor: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """Limits of a kind: each alone, and all of them together."""

    each: tuple[Limit, ...]
    together: Limit


def kinds_of(problem: AllocationProblem) -> list[Kind]:
    """Budget, storage, delay, time to first token, error and, last, what may be left unserved."""
    free = make_options(problem.replace(budget_usd=_NO_LIMIT_USD))
    asked = [i for i, q in enumerate(problem.query_types) if q.max_unserved < 1]
    budget = Limit(
        BUDGET,
        "rent and storage",
        "$",
        problem.budget_usd,
        max(_whole_usd(free), 2 * problem.budget_usd),
        lambda p, value: p.replace(budget_usd=value),
    )
    copies = len(problem.query_types) if free.stored_per_type else 1
    everything_gb = float(copies * free.pair_gb.sum() + free.storage_gb.sum())
    storage = Limit(
        STORAGE,
        "weights and traffic",
        "GB",
        problem.storage_capacity_gb,
        max(everything_gb, 2 * problem.storage_capacity_gb),
        lambda p, value: p.replace(storage_capacity_gb=value),
    )
    kinds = [Kind((budget,), budget), Kind((storage,), storage)]
    shares = {"delay_limit_s": free.delay, "ttft_limit_s": free.ttft, "error_limit": free.error}
    for name, of_limit in shares.items():
        limited = [i for i in asked if getattr(problem.query_types[i], name) is not None]
        if of_limit is not None and of_limit.size and limited:
            # The largest share of a limit that any option takes.
            factors = np.maximum(of_limit[limited].max(axis=1), 2.0).tolist()
            kinds.append(_of_types(problem, name, dict(zip(limited, factors, strict=True))))
    return [*kinds, _unserved(problem, asked)]


def _of_types(problem: AllocationProblem, name: str, factors: dict[int, float]) -> Kind:
    unit = "s" if name.endswith("_s") else "errors per request"
    each = []
    for i, factor in factors.items():
        now = float(getattr(problem.query_types[i], name))
        each.append(
            Limit(
                name,
                problem.query_types[i].name,
                unit,
                now,
                now * factor,
                lambda p, value, i=i: _changed(p, {i: {name: value}}),  # type: ignore[misc]
            )
        )
    together = Limit(
        name,
        EVERY_TYPE,
        "times the limit",
        1.0,
        max(factors.values()),
        lambda p, value: _changed(p, {i: {name: value * getattr(p.query_types[i], name)} for i in factors}),
        factor=True,
    )
    return Kind(tuple(each), together)


def _unserved(problem: AllocationProblem, asked: Sequence[int]) -> Kind:
    each = tuple(
        Limit(
            UNSERVED,
            problem.query_types[i].name,
            "of its traffic",
            problem.query_types[i].max_unserved,
            1.0,
            lambda p, value, i=i: _changed(p, {i: {UNSERVED: value}}),  # type: ignore[misc]
        )
        for i in asked
    )
    together = Limit(
        UNSERVED,
        EVERY_TYPE,
        "of their traffic",
        min(problem.query_types[i].max_unserved for i in asked),
        1.0,
        lambda p, value: _changed(p, {i: {UNSERVED: max(value, p.query_types[i].max_unserved)} for i in asked}),
    )
    return Kind(each, together)


def _changed(problem: AllocationProblem, fields: dict[int, dict[str, float]]) -> AllocationProblem:
    """Some fields of some query types replaced."""
    queries: list[QueryDemand] = list(problem.query_types)
    for i, values in fields.items():
        queries[i] = queries[i].replace(**values)
    return problem.replace(query_types=tuple(queries))


def _whole_usd(options: Options) -> float:
    """What all replicas that can be of use cost, with all weights and traffic stored."""
    copies = len(options.unserved_usd) if options.stored_per_type else 1
    used = (options.most > 0).any(axis=0)
    rent = float((options.rent_usd * options.most_replicas())[used].sum())
    return rent + float(copies * options.pair_usd.sum() + options.storage_usd.sum())
