"""Algorithm 1 of ShuntServe: dynamic programming over layers and stages with a beam, pipelines one after another.

| symbol | here |
|---|---|
| k | beam_width |
| N_L | model.layer_count |
| DP[l][s] | score, path, ... of `beam.beam_search`, indexed [layers placed, stages, rank] |
| I | pools of the cluster with the degrees of `tables.stage_options` |
| gamma, SLO | latency_penalty, slo |

Departures: with ``search="paper"`` none (whole machines as one group, best throughput per cost first, then
the leftovers). ``search="default"`` lets the GPUs of a machine form several stages of any valid degree, one after
another, extracts by throughput per cost and by throughput and keeps the better plan, then picks each pipeline's best
batch.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from hetplan.catalog.dtypes import Dtype
from hetplan.errors import InvalidInputError, NoSolutionError
from hetplan.estimator.base import Estimator, FloatArray, make_estimator
from hetplan.estimator.pipeline import StageShape
from hetplan.plan import Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import OnIncumbent, PipelineChoice, Progress, Solution, check_count, check_time_limit
from hetplan.solvers.placement.beam import beam_search, pack_seconds
from hetplan.solvers.placement.bound import refuse_infeasible
from hetplan.solvers.placement.choice import LIMIT_TOLERANCE, better, choose_batch, cost_of, objective_of
from hetplan.solvers.placement.tables import IntArray, Option, StageTables, build_tables, stage_options

_NO_CAP = 2**31 - 1
# No published use goes beyond 128; memory grows with layers x stages x width.
_WIDEST = 4096
# Batches at which the beam is run again when latency is limited: a smaller batch is faster.
_LATENCY_CAPS = (_NO_CAP, 128, 32, 8, 2, 1)
# Priced by what the hardware could be sold for, so that owned machines do not count as free when pipelines
# compete for them: dollars an hour per byte/s of memory bandwidth, near an L4's on-demand price.
_OWNED_USD_PER_HOUR_PER_BANDWIDTH = 2.5e-12


@dataclass(frozen=True, slots=True)
class _Region:
    """The tables of the pools that a pipeline may mix, and their seconds packed for the search."""

    tables: StageTables
    packed: tuple[FloatArray, FloatArray]
    gpus_per_node: int | None = None


@dataclass(slots=True)
class _Extracted:
    """Pipelines chosen so far and the machines that are left."""

    pipelines: list[PipelineChoice]
    values: list[float]
    left: list[int]


class DpBeam:
    """The paper's optimiser.

    Parameters
    ----------
    beam_width : int
        Partial pipelines kept per (layers, stages): the paper's k.
    search : "default" or "paper"
        "paper" is Algorithm 1 to the letter.
    max_stages : int, optional
        Longest pipeline tried; by default 16, in paper search as many as there are machines.
    """

    name: ClassVar[str] = "dp-beam"

    def __init__(
        self, beam_width: int = 3, search: Literal["default", "paper"] = "default", max_stages: int | None = None
    ) -> None:
        if search not in ("default", "paper"):
            raise InvalidInputError(f"search is 'default' or 'paper', got {search!r}")
        self.beam_width = check_count(beam_width, "beam_width", most=_WIDEST)
        self.search = search
        self.max_stages = None if max_stages is None else check_count(max_stages, "max_stages")

    def solve(
        self,
        problem: PlacementProblem,
        *,
        time_limit_s: float = 60.0,
        seed: int = 0,
        warm_start: Plan | None = None,
        on_incumbent: OnIncumbent | None = None,
    ) -> Solution:
        """Extract pipelines until the machines, or the demand, run out; see `hetplan.solvers.base.Solver`."""
        began = time.monotonic()
        deadline = began + check_time_limit(time_limit_s)
        problem.refuse_unsupported()
        estimator = make_estimator(problem)
        paper = self.search == "paper"
        regions = _regions(problem, estimator, whole_nodes=paper)

        best: Solution | None = None
        short: float | None = None
        scores = (True,) if paper or problem.objective != "throughput" else (True, False)
        for per_cost in scores:
            if best is not None and time.monotonic() > deadline:
                break
            extracted = self._extract(problem, estimator, regions, per_cost, deadline)
            if not extracted.pipelines:
                continue
            if problem.objective == "cost":
                _trim(problem, extracted)
                self._cheapen_last(problem, estimator, regions, extracted)
            if problem.objective == "throughput_per_cost" and not paper:
                _keep_best_ratio(problem, extracted)
            if problem.objective == "cost" and sum(extracted.values) < (problem.workload.requests_per_s or 0.0):
                short = max(short or 0.0, sum(extracted.values))
                continue
            objective = objective_of(problem, extracted.pipelines, extracted.values)
            if better(problem, objective, None if best is None else best.objective):
                best = Solution(
                    pipelines=tuple(extracted.pipelines),
                    objective=objective,
                    parameters={"beam_width": self.beam_width, "search": self.search, "max_stages": self.max_stages},
                )
                if on_incumbent is not None:
                    said = f"{len(best.pipelines)} pipelines"
                    on_incumbent(Progress(time.monotonic() - began, objective, None, said))
        if best is None:
            refuse_infeasible(problem, estimator)
            if short is not None:
                raise NoSolutionError(
                    f"{problem.model.name} is asked for {problem.workload.requests_per_s:g} req/s; "
                    f"the best plan found on this cluster serves {short:.4g}. Add machines or lower requests_per_s"
                )
            if not regions:
                raise NoSolutionError(
                    f"{problem.model.name} runs on no whole machine of this cluster as one tensor-parallel group"
                    f"{' within the limits of ' + problem.engine.name if problem.engine else ''}. Use search='default'"
                )
            raise NoSolutionError(
                f"dp-beam found no plan for {problem.model.name} on this cluster, and no limit rules one out. "
                "Try solver='auto', a wider beam, or more machines"
            )
        return best

    def _extract(
        self,
        problem: PlacementProblem,
        estimator: Estimator,
        regions: Sequence[_Region],
        per_cost: bool,
        deadline: float,
    ) -> _Extracted:
        """Best pipeline first, then the best of what is left, in whichever region it lies."""
        done = _Extracted([], [], [pool.count for pool in problem.cluster.pools])
        wanted = problem.workload.requests_per_s if problem.objective == "cost" else None
        while wanted is None or sum(done.values) < wanted:
            if done.pipelines and time.monotonic() > deadline:
                break
            found = [self._best_pipeline(problem, estimator, t, per_cost, done.left) for t in regions]
            # A soft limit broken by far makes a pipeline worth nothing.
            candidates = [one for one in found if one is not None and one[1] > 0]
            if not candidates:
                break
            choice, value = max(candidates, key=lambda one: _score(problem, one, per_cost))
            done.pipelines.append(choice)
            done.values.append(value)
            names = [pool.offer.name for pool in problem.cluster.pools]
            for offer in choice.offers:
                done.left[names.index(offer)] -= 1
        return done

    def _cheapen_last(
        self, problem: PlacementProblem, estimator: Estimator, regions: Sequence[_Region], extracted: _Extracted
    ) -> None:
        """Replace the last pipeline by the cheapest of one machine type that still meets the demand."""
        pools = problem.cluster.pools
        names = [pool.offer.name for pool in pools]
        rest = (problem.workload.requests_per_s or 0.0) - sum(extracted.values[:-1])
        spare = list(extracted.left)
        for offer in extracted.pipelines[-1].offers:
            spare[names.index(offer)] += 1
        best = cost_of(problem, extracted.pipelines[-1:])
        for index, pool in enumerate(pools):
            for count in range(1, spare[index] + 1):
                if count * pool.offer.billed_usd_per_hour >= best:
                    break
                left = [count if other == index else 0 for other in range(len(pools))]
                found = [self._best_pipeline(problem, estimator, t, False, left) for t in regions]
                enough = [one for one in found if one is not None and one[1] >= rest]
                if enough:
                    extracted.pipelines[-1], extracted.values[-1] = enough[0]
                    best = cost_of(problem, extracted.pipelines[-1:])
                    break

    def _best_pipeline(
        self, problem: PlacementProblem, estimator: Estimator, region: _Region, per_cost: bool, left: list[int]
    ) -> tuple[PipelineChoice, float] | None:
        """The beam's pipeline on the machines left, at its best batch; under latency limits, over several caps."""
        limited = problem.slo is not None and (problem.slo.hard or problem.latency_penalty > 0)
        best: tuple[PipelineChoice, float] | None = None
        for cap in _LATENCY_CAPS if limited else (_NO_CAP,):
            shapes = self._search(problem, estimator, region, per_cost, left, cap)
            if shapes is None:
                continue
            choice = choose_batch(problem, estimator, *shapes)
            if choice is None:
                continue
            if best is None or _score(problem, choice, per_cost) > _score(problem, best, per_cost):
                best = choice
        return best

    def _search(
        self,
        problem: PlacementProblem,
        estimator: Estimator,
        region: _Region,
        per_cost: bool,
        left: list[int],
        batch_cap: int,
    ) -> tuple[tuple[StageShape, ...], tuple[str, ...]] | None:
        tables, packed = region.tables, region.packed
        options = tables.options
        pools = problem.cluster.pools
        machines = {option.pool: option.machine for option in options}
        granted = {p: region.gpus_per_node or machine.gpu_count for p, machine in machines.items()}
        gpus = np.array([granted.get(p, 0) for p in range(len(pools))], dtype=np.int64)
        whole = self.search == "paper"
        most = sum(left[p] * (1 if whole else granted[p]) for p in machines)
        if most == 0:
            return None
        limit = self.max_stages or (most if whole else 16)
        stages = max(1, min(most, limit, problem.model.layer_count))
        slo = problem.slo
        limits = {} if slo is None else {name: at * (1 + LIMIT_TOLERANCE) for name, at in slo.limits().items()}
        penalty = 0.0 if slo is None else (math.inf if slo.hard else problem.latency_penalty)
        score, found, _ = beam_search(
            self.beam_width,
            stages,
            per_cost,
            estimator.micro_batches,
            region.gpus_per_node is not None,
            batch_cap,
            tables.prefix,
            np.array([option.pool for option in options], dtype=np.int64),
            np.array([option.degree for option in options], dtype=np.int64),
            np.array(left, dtype=np.int64),
            gpus,
            _prices(problem),
            *packed,
            tables.send_index,
            tables.room_bytes,
            tables.weight_bytes,
            tables.sequence_bytes,
            tables.longest_bytes,
            tables.end_sequence_bytes,
            tables.batch_limit,
            _option_hashes(len(options)),
            penalty,
            limits.get("ttft_s", math.inf),
            limits.get("tpot_s", math.inf),
            limits.get("e2e_s", math.inf),
            estimator.decode_steps(problem.workload.mean_output_tokens),
        )
        if score == -math.inf:
            return None
        return _shapes(problem, tables, found, granted)


def _shapes(
    problem: PlacementProblem, tables: StageTables, found: IntArray, granted: dict[int, int]
) -> tuple[tuple[StageShape, ...], tuple[str, ...]]:
    """Stages with the machines they open: a stage joins the last machine where it is of its pool and fits."""
    stops = [*found[1:, 1].tolist(), problem.model.layer_count]
    nodes: list[int] = []
    free = 0
    stages = []
    for (index, start), stop in zip(found.tolist(), stops, strict=True):
        option = tables.options[index]
        if not nodes or nodes[-1] != option.pool or free < option.degree:
            nodes.append(option.pool)
            free = granted[option.pool]
        free -= option.degree
        place = problem.cluster.pools[option.pool].offer.place
        stages.append(StageShape((start, stop), option.machine, option.degree, len(nodes) - 1, place))
    return tuple(stages), tuple(problem.cluster.pools[pool].offer.name for pool in nodes)


def _regions(problem: PlacementProblem, estimator: Estimator, *, whole_nodes: bool) -> list[_Region]:
    """What pipelines may be made of: one entry per region, and within an engine's limits per way to keep them.

    Regions that zone links join have one together as well.
    """
    regions = []
    alone = _pools_by_region(problem)
    for pools in [*alone, *(group for group in problem.cluster.pool_groups() if group not in alone)]:
        options = stage_options(problem, pools, whole_nodes=whole_nodes)
        for chosen, gpus in _within_limits(problem, options):
            tables = build_tables(problem, estimator, chosen)
            regions.append(_Region(tables, pack_seconds(tables), gpus))
    return regions


def _within_limits(problem: PlacementProblem, options: list[Option]) -> list[tuple[list[Option], int | None]]:
    """Sets of options from which every pipeline keeps the engine's limits, with the GPUs that each node grants.

    For each limit that there is, one number of GPUs per node, one degree and one number format; without any all options
    are one set.
    """
    limits = problem.limits
    sizes = {o.machine.gpu_count for o in options} | {o.degree for o in options}
    counts: list[int | None] = [*sorted(sizes)] if "equal-gpus-per-node" in limits else [None]
    degrees: list[int | None] = (
        [*sorted({o.degree for o in options})] if "one-tensor-parallel-degree" in limits else [None]
    )
    formats: list[Dtype | None] = (
        [*sorted({problem.compute_dtype(o.machine.gpu) for o in options})] if "one-dtype" in limits else [None]
    )
    sets: list[tuple[list[Option], int | None]] = []
    for gpus, degree, dtype in itertools.product(counts, degrees, formats):
        if gpus is not None and degree is not None and gpus % degree:
            continue
        chosen = [
            o
            for o in options
            if degree in (None, o.degree)
            and (gpus is None or o.machine.gpu_count >= gpus)
            and dtype in (None, problem.compute_dtype(o.machine.gpu))
        ]
        if chosen:
            sets.append((chosen, gpus))
    return sets


def _pools_by_region(problem: PlacementProblem) -> list[list[int]]:
    """Pools of one provider and region."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, pool in enumerate(problem.cluster.pools):
        groups.setdefault((pool.offer.provider, pool.offer.region), []).append(index)
    return list(groups.values())


def _prices(problem: PlacementProblem) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What a machine of each pool counts for when pipelines compete: its price, or a stand-in when owned."""
    prices = []
    for pool in problem.cluster.pools:
        machine = problem.cluster.instance_type(pool.offer.instance_type)
        worth = machine.gpu_count * machine.gpu.bandwidth_bytes_per_s * _OWNED_USD_PER_HOUR_PER_BANDWIDTH
        prices.append(pool.offer.billed_usd_per_hour or worth)
    return np.array(prices)


def _score(problem: PlacementProblem, one: tuple[PipelineChoice, float], per_cost: bool) -> float:
    choice, value = one
    if not per_cost:
        return value
    names = {pool.offer.name: price for pool, price in zip(problem.cluster.pools, _prices(problem), strict=True)}
    return float(value / (sum(names[offer] for offer in choice.offers) + choice.egress_usd_per_hour))


def _trim(problem: PlacementProblem, extracted: _Extracted) -> None:
    """Drop the dearest pipelines that the demand does not need."""
    wanted = problem.workload.requests_per_s or 0.0
    order = sorted(range(len(extracted.pipelines)), key=lambda i: -cost_of(problem, [extracted.pipelines[i]]))
    for index in order:
        rest = sum(v for i, v in enumerate(extracted.values) if i != index)
        if rest >= wanted and len(extracted.pipelines) > 1:
            extracted.values[index] = 0.0
    kept = [i for i, value in enumerate(extracted.values) if value > 0.0]
    extracted.pipelines = [extracted.pipelines[i] for i in kept]
    extracted.values = [extracted.values[i] for i in kept]


def _keep_best_ratio(problem: PlacementProblem, extracted: _Extracted) -> None:
    """Throughput per cost of a plan is highest with its best pipeline alone."""
    ratios = [v / cost_of(problem, [p]) for p, v in zip(extracted.pipelines, extracted.values, strict=True)]
    best = int(np.argmax(ratios))
    extracted.pipelines, extracted.values = [extracted.pipelines[best]], [extracted.values[best]]


def _option_hashes(count: int) -> IntArray:
    """A number per option whose sums tell multisets apart (62-bit, so a clash is not to be expected)."""
    generator = np.random.default_rng(20260618)
    return generator.integers(1, 2**62, size=count, dtype=np.int64)
