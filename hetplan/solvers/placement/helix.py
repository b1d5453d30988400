"""Helix (Mei et al., ASPLOS 2025): placement as a mixed-integer maximum-flow program over machines.

| symbol | here |
|---|---|
| c_i, compute node | a machine, `flow.Node` |
| L, layers of the model | model.layer_count |
| s_i, first layer of a node | start, an integer column |
| b_i^j, the node holds j layers | hold[j], binary columns |
| e_i = s_i + sum_j j b_i^j | end of `flow.Placed` |
| T_j, node throughput with j layers | `flow.Node.rates`, requests/s |
| f_ij, flow of a connection | flow, a column per edge |
| d_ij, the connection may carry flow | valid, a binary column per edge |
| S_ij, capacity of a connection | `flow.link_rate`, requests/s |

Departures. Helix serves a flow graph: a request takes a path of its own, and an edge i -> j is valid where
s_j <= e_i < e_j, so that layers held twice are skipped. A plan has disjoint pipelines instead. So an edge is valid
where s_j = e_i only; the flow's widest path of machines becomes a pipeline, again among the machines left; what is
left holds the program once more; and machines that only shared a neighbour's flow join the pipeline that gains
most. Each pipeline's layers are then shared out anew for its own least slowest stage, within all of its memory, while
the program gives weights at most ``weight_share`` of it (all of it, where nothing fits otherwise). Only such a plan
counts; the program's own flow is reported among the parameters.

The rate of a node is that of its slowest run of j layers, with the batch that its memory leaves to a pipeline of
equal nodes; embedding and head count in proportion to the layers. A machine is one tensor-parallel group of all its
GPUs, or of the largest degree that the model allows and then several stages. Helix prunes edges of large clusters;
here HiGHS stops at its node or time limit and keeps the best placement, which begins as even pipelines of like
machines, and a program takes so many machines only. A plan of even pipelines, also one of each type with all of its
memory, stands where the flow's is no better. Helix knows throughput alone: for the other objectives pipelines are
chosen among those of most flow.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from hetplan.errors import InvalidInputError, NoSolutionError
from hetplan.estimator.base import make_estimator
from hetplan.plan import Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import OnIncumbent, PipelineChoice, Progress, Solution, check_count, check_time_limit
from hetplan.solvers.placement.bound import refuse_infeasible
from hetplan.solvers.placement.chain import Chains, Group, MachineSet, as_asked, machine_sets
from hetplan.solvers.placement.choice import better, cost_of, objective_of
from hetplan.solvers.placement.flow import Node, Placed, even_placement, nodes_of, paths, place
from hetplan.solvers.placement.tables import stage_options

# Share of the time that one program may take, so that what its flow leaves over has some too.
_SHARE_OF_TIME = 0.6
# Where pipelines come from, in the order tried.
_Placement = Literal["even", "whole", "flow"]
_PLACEMENTS: dict[_Placement, str] = {
    "even": "even ones of like machines",
    "whole": "one of each type",
    "flow": "from the program's flow",
}
# Edges grow with the square: machines beyond these wait for the next program.
_MOST_NODES = 24


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """A chain of machines of one set, the pools in order, with its choice and value."""

    allowed: MachineSet
    pools: tuple[int, ...]
    choice: PipelineChoice
    value: float


class Helix:
    """Helix's placement, cut into pipelines.

    Parameters
    ----------
    weight_share : float
        Most of a GPU's memory, beside what the engine takes, that the program gives to weights.
    max_nodes : int
        Branch-and-bound nodes of one program: a limit that is the same on every machine.
    """

    name: ClassVar[str] = "helix"

    def __init__(self, weight_share: float = 0.5, max_nodes: int = 1000) -> None:
        if isinstance(weight_share, bool) or not isinstance(weight_share, (int, float)) or not 0 < weight_share <= 1:
            raise InvalidInputError(f"weight_share is a number above 0 and up to 1, got {weight_share!r}")
        self.weight_share = float(weight_share)
        self.max_nodes = check_count(max_nodes, "max_nodes", most=1_000_000)

    def solve(
        self,
        problem: PlacementProblem,
        *,
        time_limit_s: float = 60.0,
        seed: int = 0,
        warm_start: Plan | None = None,
        on_incumbent: OnIncumbent | None = None,
    ) -> Solution:
        """Even pipelines first, then those of the flow; see `hetplan.solvers.base.Solver`."""
        began = time.monotonic()
        deadline = began + check_time_limit(time_limit_s)
        problem.refuse_unsupported()
        estimator = make_estimator(problem)
        if not stage_options(problem, list(range(len(problem.cluster.pools))), whole_nodes=False):
            refuse_infeasible(problem, estimator)
        run = _Run(Chains(problem, estimator), self, deadline, seed)
        best: Solution | None = None
        for kind, said in _PLACEMENTS.items():
            if best is not None and run.late():
                break
            found = _solution(problem, run.pipelines(kind))
            if found is not None and better(problem, found.objective, None if best is None else best.objective):
                best = found
                if on_incumbent is not None:
                    message = f"{len(found.pipelines)} pipelines, {said}"
                    on_incumbent(Progress(time.monotonic() - began, found.objective, None, message))
        if best is None:
            refuse_infeasible(problem, estimator)
            raise NoSolutionError(
                f"helix found no plan for {problem.model.name} on this cluster, and no limit rules one out. "
                "Try solver='auto', a larger weight_share, or more machines"
            )
        parameters = {
            "weight_share": self.weight_share,
            "max_nodes": self.max_nodes,
            "flow_requests_per_s": run.flow,
        }
        return replace(best, parameters=parameters)


def _solution(problem: PlacementProblem, pipelines: Sequence[_Pipeline]) -> Solution | None:
    costs = [cost_of(problem, [one.choice]) for one in pipelines]
    kept = [pipelines[i] for i in as_asked(problem, costs, [one.value for one in pipelines])]
    if not kept:
        return None
    choices = tuple(one.choice for one in kept)
    return Solution(pipelines=choices, objective=objective_of(problem, choices, [one.value for one in kept]))


class _Run:
    """Pipelines of all machines: of even placements alone, or of the program's flow, which is kept."""

    def __init__(self, chains: Chains, solver: Helix, deadline: float, seed: int) -> None:
        self.chains, self.solver, self.deadline, self.seed = chains, solver, deadline, seed
        self.problem = chains.problem
        self.sets = [one for one in machine_sets(self.problem) if self._whole(one)]
        self.whole = [pool.count for pool in self.problem.cluster.pools]
        self.left = list(self.whole)
        self.flow: float | None = None
        self._known: dict[tuple[int, tuple[int, ...]], _Pipeline | None] = {}
        self._solved: dict[tuple[Node, ...], tuple[float, list[Placed]]] = {}

    def _whole(self, allowed: MachineSet) -> bool:
        """Whether some machine is as few groups as the model allows: always so where degrees may differ."""
        if "one-tensor-parallel-degree" not in self.problem.limits:
            return True
        largest = {
            gpus: max(d for d in self.problem.model.valid_tensor_parallel(gpus) if gpus % d == 0)
            for gpus in allowed.gpus.values()
        }
        return any(allowed.degrees[pool] == (largest[gpus],) for pool, gpus in allowed.gpus.items())

    def late(self) -> bool:
        return time.monotonic() >= self.deadline

    def pipelines(self, kind: _Placement) -> list[_Pipeline]:
        """Round after round from the machines left, the best set of machines first."""
        self.left = list(self.whole)
        done: list[_Pipeline] = []
        while True:
            rounds = [self._of_set(allowed, kind) for allowed in self.sets]
            found = max(rounds, key=lambda one: math.fsum(p.value for p in one), default=[])
            if not found:
                break
            for one in found:
                for pool in one.pools:
                    self.left[pool] -= 1
            done += found
        return self._joined(done)

    def _of_set(self, allowed: MachineSet, kind: _Placement) -> list[_Pipeline]:
        layers = self.chains.layer_count
        shares = (1.0,) if kind == "whole" else (self.solver.weight_share, 1.0)
        for share in dict.fromkeys(shares):
            nodes = nodes_of(self.chains, allowed, self.left, share)
            if sum(node.most for node in nodes) < layers:
                continue
            placed = even_placement(nodes, layers, whole=kind == "whole")
            if kind == "flow" and not self.late():
                placed = self._placed(_some(nodes, layers)) or placed
            found = [self._pipeline(allowed, tuple(p.node.pool for p in path)) for path in paths(self.chains, placed)]
            useful = [one for one in found if one is not None]
            if useful:
                return useful
        return []

    def _placed(self, nodes: Sequence[Node]) -> list[Placed]:
        # A round that takes no machine of a set leaves its program as it was.
        key = tuple(nodes)
        if key not in self._solved:
            self._solved[key] = place(
                self.chains,
                nodes,
                start=even_placement(nodes, self.chains.layer_count),
                time_limit_s=(self.deadline - time.monotonic()) * _SHARE_OF_TIME,
                max_nodes=self.solver.max_nodes,
                seed=self.seed,
            )
        flow, placed = self._solved[key]
        if placed and self.left == self.whole:
            self.flow = max(flow, self.flow or 0.0)
        return placed

    def _pipeline(self, allowed: MachineSet, pools: tuple[int, ...]) -> _Pipeline | None:
        key = (self.sets.index(allowed), pools)
        if key not in self._known:
            groups = [
                Group(self.chains.option[pool, degree], number)
                for number, pool in enumerate(pools)
                for degree in [max(allowed.degrees[pool])] * (allowed.gpus[pool] // max(allowed.degrees[pool]))
            ]
            cuts, value = self.chains.balanced(groups)
            choice = self.chains.choice(groups, cuts, pools) if value > 0 else None
            self._known[key] = None if choice is None else _Pipeline(allowed, pools, *choice)
        return self._known[key]

    def _joined(self, done: list[_Pipeline]) -> list[_Pipeline]:
        """Machines left over join the pipeline that gains most, at the place where it does."""
        wanted = {"throughput": math.inf, "throughput_per_cost": 0.0}.get(
            self.problem.objective, self.problem.workload.requests_per_s or 0.0
        )
        while math.fsum(one.value for one in done) < wanted and not self.late():
            best: tuple[float, int, int, _Pipeline] | None = None
            for number, pool, wider in self._wider(done):
                gain = wider.value - done[number].value
                if gain > (1e-9 if best is None else best[0]):
                    best = (gain, number, pool, wider)
            if best is None:
                break
            _, number, pool, done[number] = best
            self.left[pool] -= 1
        return done

    def _wider(self, done: Sequence[_Pipeline]) -> Iterator[tuple[int, int, _Pipeline]]:
        """Each pipeline with one more machine, wherever it may stand, while there is time."""
        for number, one in enumerate(done):
            for pool in one.allowed.gpus:
                for at in range(len(one.pools) + 1) if self.left[pool] else ():
                    if self.late():
                        return
                    wider = self._pipeline(one.allowed, (*one.pools[:at], pool, *one.pools[at:]))
                    if wider is not None:
                        yield number, pool, wider


def _some(nodes: Sequence[Node], layers: int) -> list[Node]:
    """At most so many machines as one program takes, some of every pool, enough for the model; the rest comes later."""
    if len(nodes) <= _MOST_NODES:
        return list(nodes)
    turns: Counter[int] = Counter()
    order = []
    for number, node in enumerate(nodes):
        turns[node.pool] += 1
        order.append((turns[node.pool], number))
    some: list[int] = []
    for _, number in sorted(order):
        if len(some) >= _MOST_NODES and sum(nodes[i].most for i in some) >= layers:
            break
        some.append(number)
    return [nodes[i] for i in sorted(some)]
