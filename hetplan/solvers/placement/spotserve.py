"""SpotServe (ASPLOS'24): another parallel configuration whenever the inventory changes, moving the least weights.

| paper | here |
|---|---|
| (D, P, M): data, pipeline, tensor parallelism | copies, stages, tensor-parallel degree of a `_Configuration` |
| phi(C), l_req(C): throughput, latency of a request | ``value`` of all copies, ``latency_s`` |
| V_a, V_t: devices, positions in the topology | `_OldMachine`, `_Slot` |
| edge weight: reusable context | ``_reused_bytes``: weights of the layers that machine and position share |
| Kuhn-Munkres | ``scipy.optimize.linear_sum_assignment`` |

Departures. Instances are homogeneous in the paper: here each pool has a configuration of its own. The paper takes the
least latency that keeps up with the arrival rate; here the objective decides, then latency. A batch is chosen with
each configuration. Devices are machines, not GPUs in two steps: a tensor-parallel group lies in one machine, inside
which weights move over its own links. A plan holds no running requests, so KV caches do not count; neither does the
order in which layers migrate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from scipy.optimize import linear_sum_assignment

from hetplan.errors import InvalidInputError, NoSolutionError
from hetplan.estimator.base import Estimator, make_estimator
from hetplan.estimator.pipeline import StageShape, even_layers, pipeline_rates
from hetplan.plan import Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import OnIncumbent, PipelineChoice, Progress, Solution, check_time_limit
from hetplan.solvers.placement.bound import refuse_infeasible
from hetplan.solvers.placement.choice import better, choose_batch, cost_of, objective_of

# (start, stop) of consecutive layers, and whether the embedding and the head belong to them.
_Part = tuple[int, int, bool, bool]


@dataclass(frozen=True, slots=True)
class _Configuration:
    """One pipeline shape of a pool, ``copies`` times."""

    pool: int
    copies: int
    choice: PipelineChoice
    value_each: float
    rate_each: float
    latency_s: float

    @property
    def value(self) -> float:
        return self.copies * self.value_each

    @property
    def rate(self) -> float:
        return self.copies * self.rate_each

    def describe(self) -> str:
        stages = self.choice.stages
        return f"{self.choice.offers[0]}: {self.copies} x {len(stages)} x {stages[0].tensor_parallel}"


@dataclass(frozen=True, slots=True)
class _OldMachine:
    """A machine of the plan before, and what it holds."""

    offer: str
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Slot:
    """A machine's place in the new plan: its stages and their parts."""

    offer: str
    stages: tuple[tuple[StageShape, _Part], ...]


class SpotServe:
    """The best (D, P, M) of each pool; with a plan from before, machines take the places that move least.

    The machines of the plan before are numbered from 0: pipeline by pipeline, copy by copy, node by node. The new
    plan's, in the same order, appear in the solution's parameters: ``machines`` gives the old number of each or "new",
    ``reused_weight_bytes`` what they hold already, ``moved_weight_bytes`` the rest.

    Parameters
    ----------
    lost_machines : sequence of int
        Machines of the plan before that are gone. Where the cluster has fewer than the others, the last are gone too.
    """

    name: ClassVar[str] = "spotserve"

    def __init__(self, lost_machines: Sequence[int] = ()) -> None:
        listed = lost_machines if isinstance(lost_machines, (list, tuple)) else [lost_machines]
        if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in listed):
            raise InvalidInputError(f"lost_machines lists numbers of machines from 0, got {lost_machines!r}")
        self.lost_machines = tuple(sorted(set(listed)))

    def solve(
        self,
        problem: PlacementProblem,
        *,
        time_limit_s: float = 60.0,
        seed: int = 0,
        warm_start: Plan | None = None,
        on_incumbent: OnIncumbent | None = None,
    ) -> Solution:
        """Configure each pool, then map machines; see `hetplan.solvers.base.Solver`."""
        began = time.monotonic()
        deadline = began + check_time_limit(time_limit_s)
        problem.refuse_unsupported()
        before = self._machines_before(warm_start)
        estimator = make_estimator(problem)
        known: dict[tuple[int, int], _Configuration] = {}
        chosen: list[_Configuration] = []
        objective: float | None = None
        for pool, stages, degree in _shapes(problem):
            if chosen and time.monotonic() > deadline:
                break
            found = _configuration(problem, estimator, pool, stages, degree)
            if found is None:
                continue
            key = (pool, len(found.choice.offers))
            if key in known and _rank(found) <= _rank(known[key]):
                continue
            known[key] = found
            asked = _as_asked(problem, list(known.values()))
            if asked and better(problem, reached := objective_of(problem, *_copies(asked)), objective):
                chosen, objective = asked, reached
                if on_incumbent is not None:
                    said = f"{len(chosen)} pools configured"
                    on_incumbent(Progress(time.monotonic() - began, objective, None, said))
        if objective is None:
            refuse_infeasible(problem, estimator)
            if known:
                raise NoSolutionError(
                    f"{problem.model.name} is asked for {problem.workload.requests_per_s:g} req/s; one configuration "
                    "a pool does not serve that. Use solver='auto', add machines or lower requests_per_s"
                )
            raise NoSolutionError(
                f"no even pipeline of one machine type serves {problem.model.name} as asked. "
                "Use solver='auto', which mixes types"
            )
        pipelines, _ = _copies(chosen)
        parameters: dict[str, str | int | float | bool | None] = {
            "configurations": "; ".join(one.describe() for one in chosen)
        }
        if warm_start is not None:
            same = warm_start.placement.model == problem.model
            survivors = {n: machine for n, machine in enumerate(before) if n not in self.lost_machines}
            parameters |= _migration(problem, estimator, pipelines, survivors, same_weights=same)
            parameters["lost_machines"] = ",".join(map(str, self.lost_machines))
        return Solution(pipelines=tuple(pipelines), objective=objective, parameters=parameters)

    def _machines_before(self, warm_start: Plan | None) -> list[_OldMachine]:
        machines = [] if warm_start is None else _old_machines(warm_start)
        if self.lost_machines and self.lost_machines[-1] >= len(machines):
            held = f"has {len(machines)}" if warm_start is not None else "is not given; pass it as warm_start"
            raise InvalidInputError(f"lost_machines names machine {self.lost_machines[-1]}; the plan before {held}")
        return machines


# ---- configurations


def _shapes(problem: PlacementProblem) -> list[tuple[int, int, int]]:
    """(pool, stages, degree) of every pipeline shape, those of the fewest stages first."""
    shapes = []
    for index, pool in enumerate(problem.cluster.pools):
        machine = problem.cluster.instance_type(pool.offer.instance_type)
        for degree in machine.valid_tensor_parallel(problem.model):
            most = min(machine.gpu_count // degree * pool.count, problem.model.layer_count)
            shapes += [(index, stages, degree) for stages in range(1, most + 1)]
    return sorted(shapes, key=lambda shape: shape[1:])


def _configuration(
    problem: PlacementProblem, estimator: Estimator, index: int, stages: int, degree: int
) -> _Configuration | None:
    """As many copies of an even pipeline as the pool holds; its stages spread evenly over the fewest machines."""
    pool = problem.cluster.pools[index]
    machine = problem.cluster.instance_type(pool.offer.instance_type)
    machines = -(-stages * degree // machine.gpu_count)
    if "equal-gpus-per-node" in problem.limits and stages % machines:
        return None
    shapes, start = [], 0
    for number, size in enumerate(even_layers(problem.model.layer_count, stages)):
        shapes.append(StageShape((start, start + size), machine, degree, number * machines // stages))
        start += size
    found = choose_batch(problem, estimator, tuple(shapes), (pool.offer.name,) * machines)
    if found is None or found[1] <= 0:
        return None
    rates = pipeline_rates(problem, estimator, shapes, found[0].micro_batch)
    return _Configuration(
        index, pool.count // machines, *found, float(rates.requests_per_s[0]), float(rates.latency_s[0])
    )


def _rank(one: _Configuration) -> tuple[float, float]:
    """More value first, then less latency."""
    return one.value, -one.latency_s


def _as_asked(problem: PlacementProblem, known: list[_Configuration]) -> list[_Configuration]:
    """One configuration per pool: the most throughput, the best per cost alone, or the cheapest that suffice.

    In the order of a plan's pipelines, by which its machines are numbered.
    """
    if problem.objective == "cost":
        chosen = _cover(problem, known)
    elif problem.objective == "throughput_per_cost":
        single = [replace(one, copies=1) for one in known]
        chosen = [max(single, key=lambda one: (one.value / _cost(problem, one), -one.latency_s))]
    else:
        chosen = [
            max((one for one in known if one.pool == pool), key=_rank) for pool in sorted({o.pool for o in known})
        ]
    return sorted(chosen, key=lambda one: -one.rate)


def _cover(problem: PlacementProblem, known: list[_Configuration]) -> list[_Configuration]:
    """Whole pools of the least cost per request; the plan is finished at each step by the cheapest that suffices."""
    wanted = problem.workload.requests_per_s or 0.0
    options = [replace(one, copies=copies) for one in known for copies in range(1, one.copies + 1)]
    placed: list[_Configuration] = []
    plans: list[list[_Configuration]] = []
    while options:
        rest = wanted - sum(one.value for one in placed)
        enough = [one for one in options if one.value >= rest]
        if enough:
            plans.append([*placed, min(enough, key=lambda one: (_cost(problem, one), -one.value, one.latency_s))])
        cheapest = min(options, key=lambda one: (_cost(problem, one) / one.value, -one.value))
        placed.append(cheapest)
        options = [one for one in options if one.pool != cheapest.pool]
        if sum(one.value for one in placed) >= wanted:
            plans.append(placed)
            break
    return min(plans, key=lambda plan: sum(_cost(problem, one) for one in plan), default=[])


def _copies(chosen: list[_Configuration]) -> tuple[list[PipelineChoice], list[float]]:
    every = [one for one in chosen for _ in range(one.copies)]
    return [one.choice for one in every], [one.value_each for one in every]


def _cost(problem: PlacementProblem, one: _Configuration) -> float:
    return one.copies * cost_of(problem, [one.choice])


# ---- which machine takes which place


def _migration(
    problem: PlacementProblem,
    estimator: Estimator,
    pipelines: list[PipelineChoice],
    survivors: dict[int, _OldMachine],
    *,
    same_weights: bool,
) -> dict[str, str | int]:
    """What a plan's parameters say of machines and bytes. Weights of another model or format are of no use."""

    known: dict[tuple[str, int, _Part], int] = {}

    def weight_bytes(stage: StageShape, part: _Part) -> int:
        start, stop, first, last = part
        key = (stage.machine.name, stage.tensor_parallel, part)
        if key not in known:
            memory = estimator.stage_memory(
                problem.model, stage.machine, layers=(start, stop), tensor_parallel=stage.tensor_parallel,
                first=first, last=last,
            )  # fmt: skip
            known[key] = memory.weight_bytes * stage.tensor_parallel
        return known[key]

    def reused_bytes(slot: _Slot, old: _OldMachine) -> int:
        if not same_weights:
            return 0
        return sum(weight_bytes(stage, _shared(part, other)) for stage, part in slot.stages for other in old.parts)

    slots = [slot for choice in pipelines for slot in _slots(problem, choice)]
    whole = sum(weight_bytes(stage, part) for slot in slots for stage, part in slot.stages)
    machines, reused = ["new"] * len(slots), 0
    for pool in problem.cluster.pools:
        mine = [n for n, slot in enumerate(slots) if slot.offer == pool.offer.name]
        olds = [n for n, old in survivors.items() if old.offer == pool.offer.name][: pool.count]
        # Machines that hold nothing complete the pool.
        gain = np.zeros((len(mine), pool.count), dtype=np.int64)
        # Copies of a pipeline have equal places: asked once for each.
        rows_of: dict[tuple[_Part, ...], list[int]] = {}
        for row, n in enumerate(mine):
            place = tuple(part for _, part in slots[n].stages)
            if place not in rows_of:
                rows_of[place] = [reused_bytes(slots[n], survivors[old]) for old in olds]
            gain[row, : len(olds)] = rows_of[place]
        # Among mappings of equal bytes, machines keep their numbers.
        kept = np.zeros_like(gain)
        kept[:, : len(olds)] = np.equal.outer(mine, olds)
        rows, columns = linear_sum_assignment(gain * (len(mine) + 1) + kept, maximize=True)
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            if column < len(olds):
                machines[mine[row]] = str(olds[column])
        reused += int(gain[rows, columns].sum())
    return {"machines": ",".join(machines), "reused_weight_bytes": reused, "moved_weight_bytes": whole - reused}


def _shared(one: _Part, other: _Part) -> _Part:
    """What two parts have in common; an empty range where no layer."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return start, max(start, stop), one[2] and other[2], one[3] and other[3]


def _slots(problem: PlacementProblem, choice: PipelineChoice) -> list[_Slot]:
    count = problem.model.layer_count
    placed = [(s, (*s.layers, s.layers[0] == 0, s.layers[1] == count)) for s in choice.stages]
    return [
        _Slot(offer, tuple((stage, part) for stage, part in placed if stage.node == node))
        for node, offer in enumerate(choice.offers)
    ]


def _old_machines(plan: Plan) -> list[_OldMachine]:
    """The machines of a plan: pipeline by pipeline, copy by copy, node by node."""
    count = plan.placement.model.layer_count
    machines: list[_OldMachine] = []
    for deployment in plan.deployments:
        for pipeline in deployment.pipelines:
            one = []
            for node, offer in enumerate(pipeline.nodes):
                held = [stage.layers for stage in pipeline.stages if stage.node == node]
                one.append(_OldMachine(offer, tuple((a, b, a == 0, b == count) for a, b in held)))
            machines += one * pipeline.count
    return machines
