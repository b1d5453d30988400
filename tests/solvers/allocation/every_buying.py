"""Every buying of a small allocation problem, each with its best shares: a solver that can't be clever.

Coefficients are computed here from the problem's own fields, one configuration at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from hetplan.problem.allocation import AllocationProblem
from hetplan.solvers.allocation.assignment import Assignment
from hetplan.solvers.allocation.options import Options

Floats = NDArray[np.float64]
_TIGHT = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}


@dataclass(frozen=True)
class Bought:
    """One configuration: what a replica costs and, by type, what all of the type would take of it."""

    model: int
    tier: int
    tensor_parallel: int
    pipeline_parallel: int
    rent_usd: float
    delay_s: list[float]
    ttft_s: list[float]
    load: list[float]
    cache: list[float]

    @property
    def pair(self) -> tuple[int, int]:
        return self.model, self.tier


def bought_configurations(problem: AllocationProblem) -> list[Bought]:
    """Every configuration whose weights fit."""
    queries = problem.query_types
    if problem.configurations:
        return [
            Bought(
                c.model,
                c.tier,
                c.tensor_parallel,
                c.pipeline_parallel,
                c.usd_per_hour * problem.horizon_hours,
                list(c.delay_s),
                list(c.ttft_s),
                [q.requests_per_hour / most for q, most in zip(queries, c.capacity_per_hour, strict=True)],
                [0.0] * len(queries),
            )
            for c in problem.configurations
        ]
    found = []
    for j, model in enumerate(problem.models):
        for k, tier in enumerate(problem.tiers):
            for n in problem.tensor_parallel:
                for m in problem.pipeline_parallel:
                    gpus = n * m
                    held = model.weight_gb * (tier.weight_scale if problem.decisions.weights == "scaled" else 1)
                    free_gb = tier.memory_gb - held / gpus
                    if free_gb <= 0:
                        continue
                    delay, ttft, load, cache = [], [], [], []
                    for q in queries:
                        tokens = q.input_tokens + q.output_tokens
                        token_s = q.slowness * model.weight_gb * tier.weight_scale / tier.bandwidth_gb_per_s
                        hop_s = model.activation_bytes_per_token / 1e9 / tier.link_gb_per_s + tier.link_latency_s
                        delay.append(token_s * tokens / n + m * hop_s * q.output_tokens)
                        ttft.append(token_s * q.input_tokens / n)
                        tflop_per_hour = model.gflop_per_token / 1000 * tokens * q.requests_per_hour
                        load.append(tflop_per_hour / (problem.utilization * 3600 * tier.tflops * gpus))
                        request_gb = model.kv_bytes_per_token / 1e9 * tokens
                        if problem.decisions.kv_memory == "littles_law":
                            requests = q.requests_per_hour / 3600 * delay[-1]
                        else:
                            requests = request_gb / tier.bandwidth_gb_per_s
                        cache.append(request_gb * requests / gpus / free_gb)
                    rent = problem.horizon_hours * tier.usd_per_hour * gpus
                    found.append(Bought(j, k, n, m, rent, delay, ttft, load, cache))
    return found


@dataclass
class _Program:
    """Rows of ``<=`` and ``=`` over columns, for scipy."""

    costs: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    at_most: list[tuple[dict[int, float], float]] = field(default_factory=list)
    equal: list[tuple[dict[int, float], float]] = field(default_factory=list)

    def column(self, cost: float, upper: float, whole: bool = False) -> int:
        self.costs.append(cost)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.costs) - 1

    def _matrix(self, rows: Sequence[tuple[dict[int, float], float]]) -> tuple[Floats, Floats]:
        matrix = np.zeros((len(rows), len(self.costs)))
        for r, (terms, _) in enumerate(rows):
            for column, value in terms.items():
                matrix[r, column] += value
        return matrix, np.array([limit for _, limit in rows])

    def linear(self, fixed: dict[int, float] | None = None) -> tuple[float, Floats] | None:
        """The optimum with some columns fixed, the others free to be parts."""
        a, b = self._matrix(self.at_most)
        c, d = self._matrix(self.equal)
        bounds = [(fixed[n], fixed[n]) if fixed and n in fixed else (0.0, upper) for n, upper in enumerate(self.upper)]
        # Dollars of each request come to 1e8: more than the tolerances are for.
        scale = max(self.costs)
        costs = np.array(self.costs) / scale
        found = linprog(costs, a, b, c, d, bounds, method="highs", options=_TIGHT)
        assert found.status in (0, 2), found.message
        return (float(found.fun) * scale, np.array(found.x)) if found.status == 0 else None

    def best(self) -> tuple[float, Floats] | None:
        """The optimum."""
        if not any(self.whole):
            return self.linear()
        a, b = self._matrix(self.at_most)
        c, d = self._matrix(self.equal)
        found = milp(
            np.array(self.costs) / max(self.costs),
            integrality=np.array(self.whole, dtype=int),
            bounds=Bounds(np.zeros(len(self.upper)), np.array(self.upper)),
            constraints=[LinearConstraint(a, -np.inf, b), LinearConstraint(c, d, d)],
            options={"mip_rel_gap": 0.0},
        )
        if found.x is None:
            assert found.status == 2, found.message
            return None
        # Once more without the solver's tolerance on whole columns.
        return self.linear({n: float(round(found.x[n])) for n, whole in enumerate(self.whole) if whole})


def best_shares(
    problem: AllocationProblem, buying: Sequence[tuple[Bought, int]], below_usd: float = math.inf
) -> float | None:
    """What the best answer with certain replicas costs; None where there is none below a number of dollars."""
    decisions, queries = problem.decisions, problem.query_types
    usd_per_gb = problem.storage_usd_per_gb_hour * problem.horizon_hours
    program = _Program()
    pairs = sorted({c.pair for c, _ in buying})
    paid = sum(c.rent_usd * count for c, count in buying)
    stored_gb = 0.0
    if decisions.model_storage == "once":
        stored_gb = sum(problem.models[j].weight_gb for j, _ in pairs)
        paid += stored_gb * usd_per_gb
    budget: dict[int, float] = {}
    storage: dict[int, float] = {}
    shares: dict[tuple[int, int], int] = {}
    for i, q in enumerate(queries):
        times = q.requests_per_hour * problem.horizon_hours if decisions.penalties == "per_request" else 1.0
        gb = q.storage_kb_per_token * 1000 / 1e9 * (q.input_tokens + q.output_tokens) * q.requests_per_hour
        dropped = program.column(q.unserved_usd * times, q.max_unserved)
        demand, delay, ttft, error = {dropped: 1.0}, {}, {}, {}
        for number, (c, _) in enumerate(buying):
            first = 0.0 if q.ttft_limit_s is None else c.ttft_s[i] / q.ttft_limit_s
            late = c.delay_s[i] / q.delay_limit_s
            if decisions.delay == "each" and max(first, late) > 1 + 1e-9:
                continue
            part = program.column(gb * usd_per_gb + q.delay_usd_per_ms * 1000 * times * c.delay_s[i], 1.0)
            shares[i, number] = part
            demand[part], delay[part], ttft[part] = 1.0, late, first
            error[part] = q.errors[c.model] * problem.tiers[c.tier].error_factor / q.error_limit
            budget[part], storage[part] = gb * usd_per_gb, gb
        program.equal.append((demand, 1.0))
        for name, row in (("delay", delay), ("ttft", ttft), ("error", error)):
            if name == "error" or decisions.delay == "average":
                if decisions.slo_on == "served":
                    row[dropped] = 1.0
                program.at_most.append((row, 1.0))
        if decisions.model_storage == "per_query_type":
            for pair in pairs:
                copy_gb = problem.models[pair[0]].weight_gb
                copy = program.column(copy_gb * usd_per_gb, 1.0, whole=True)
                budget[copy], storage[copy] = copy_gb * usd_per_gb, copy_gb
                used = {shares[i, n]: 1.0 for n, (c, _) in enumerate(buying) if c.pair == pair and (i, n) in shares}
                program.at_most.append((used | {copy: -1.0}, 0.0))
    for number, (c, count) in enumerate(buying):
        for values in (c.load, c.cache):
            row = {part: values[i] for (i, n), part in shares.items() if n == number}
            program.at_most.append((row, float(count)))
    scaled = {n: usd / problem.budget_usd for n, usd in budget.items()}
    program.at_most.append((scaled, 1 - paid / problem.budget_usd))
    scaled = {n: gb / problem.storage_capacity_gb for n, gb in storage.items()}
    program.at_most.append((scaled, 1 - stored_gb / problem.storage_capacity_gb))
    relaxed = program.linear()
    if relaxed is None or paid + relaxed[0] >= below_usd:
        return None
    found = program.best()
    return None if found is None else paid + found[0]


def buyings(problem: AllocationProblem) -> Iterator[list[tuple[Bought, int]]]:
    """Every set of replicas that the budget pays for, with the decided number of each."""
    configurations = bought_configurations(problem)
    many = problem.decisions.replicas == "many"

    def further(number: int, left_usd: float) -> Iterator[list[tuple[Bought, int]]]:
        if number == len(configurations):
            yield []
            return
        c = configurations[number]
        for count in range(math.floor(left_usd / c.rent_usd + 1e-9) + 1 if many else 2):
            if count * c.rent_usd > left_usd * (1 + 1e-12):
                break
            for rest in further(number + 1, left_usd - count * c.rent_usd):
                if not many and count and any(other.pair == c.pair for other, _ in rest):
                    continue
                yield [(c, count), *rest] if count else rest

    yield from further(0, problem.budget_usd)


def least_usd(problem: AllocationProblem) -> float | None:
    """What the best plan costs, by trying every buying; None where there is no plan."""
    least = math.inf
    every = [(sum(c.rent_usd * count for c, count in buying), buying) for buying in buyings(problem)]
    for rent, buying in sorted(every, key=lambda item: item[0]):
        if rent >= least:
            break
        found = best_shares(problem, buying, least)
        if found is not None:
            least = min(least, found)
    return least if math.isfinite(least) else None


def broken_limits(problem: AllocationProblem, options: Options, found: Assignment, rounding: float = 1e-9) -> list[str]:
    """Which limits an assignment breaks, and whether its dollars are wrong."""
    decisions, queries = problem.decisions, problem.query_types
    by_degrees = {(c.model, c.tier, c.tensor_parallel, c.pipeline_parallel): c for c in bought_configurations(problem)}
    degrees = zip(options.model, options.tier, options.tensor_parallel, options.pipeline_parallel, strict=True)
    configurations = [by_degrees[tuple(int(value) for value in key)] for key in degrees]
    broken = []

    def check(what: str, value: float, limit: float) -> None:
        if value > limit + rounding * max(1.0, abs(limit)):
            broken.append(f"{what}: {value!r} of {limit!r}")

    usd_per_gb = problem.storage_usd_per_gb_hour * problem.horizon_hours
    rent = gb = other_usd = 0.0
    by_pair: dict[tuple[int, int], int] = {}
    for number, c in enumerate(configurations):
        count = int(found.replicas[number])
        rent += count * c.rent_usd
        by_pair[c.pair] = by_pair.get(c.pair, 0) + count
        for i in range(len(queries)):
            x = float(found.shares[i, number])
            check(f"share of {i} on {number} is not negative", -x, 0.0)
            if x > 0 and not count:
                broken.append(f"{i} is served by {number}, which is not bought")
        for what, values in (("load", c.load), ("cache", c.cache)):
            check(
                f"{what} of {number}",
                sum(v * float(x) for v, x in zip(values, found.shares[:, number], strict=True)),
                count,
            )
    if decisions.replicas == "one":
        for pair, count in by_pair.items():
            check(f"configurations of {pair}", count, 1)
    if decisions.model_storage == "once":
        gb += sum(problem.models[j].weight_gb for (j, _), count in by_pair.items() if count)
    for i, q in enumerate(queries):
        times = q.requests_per_hour * problem.horizon_hours if decisions.penalties == "per_request" else 1.0
        shares = [float(x) for x in found.shares[i]]
        served = sum(shares)
        check(f"served of {i}", served, 1.0)
        check(f"unserved of {i}", 1 - served, q.max_unserved)
        used = [(x, c) for x, c in zip(shares, configurations, strict=True) if x > 0]
        limit = served if decisions.slo_on == "served" else 1.0
        late = [(x, c.delay_s[i] / q.delay_limit_s) for x, c in used]
        first = [(x, 0.0 if q.ttft_limit_s is None else c.ttft_s[i] / q.ttft_limit_s) for x, c in used]
        for what, values in (("delay", late), ("first token", first)):
            if decisions.delay == "each":
                check(f"{what} of {i}", max((v for _, v in values), default=0.0), 1.0)
            else:
                check(f"{what} of {i}", sum(x * v for x, v in values), limit)
        errors = [(x, q.errors[c.model] * problem.tiers[c.tier].error_factor / q.error_limit) for x, c in used]
        check(f"error of {i}", sum(x * v for x, v in errors), limit)
        if decisions.model_storage == "per_query_type":
            gb += sum(problem.models[j].weight_gb for j, _ in {c.pair for _, c in used})
        tokens_gb = q.storage_kb_per_token * 1000 / 1e9 * (q.input_tokens + q.output_tokens) * q.requests_per_hour
        gb += tokens_gb * served
        other_usd += sum(q.delay_usd_per_ms * 1000 * times * x * c.delay_s[i] for x, c in used)
        other_usd += q.unserved_usd * times * max(1 - served, 0.0)
    check("storage", gb / problem.storage_capacity_gb, 1.0)
    check("budget", (rent + gb * usd_per_gb) / problem.budget_usd, 1.0)
    total = rent + gb * usd_per_gb + other_usd
    if not math.isclose(total, found.usd, rel_tol=1e-9, abs_tol=1e-6):
        broken.append(f"costs {total!r}, not {found.usd!r}")
    return broken
