"""Algorithm 1 of ShuntServe as the paper writes it, in plain Python: what the fast search is compared with.

DP[l][s] keeps the best k partial pipelines that place the first l layers on s stages; a stage takes a whole
machine as one tensor-parallel group. Two partial pipelines on the same multiset of machines count as one, and
the better stays. Pipelines are extracted one after another, each from the machines that are left.

Times and bytes come from an estimator and are looked up once per machine and batch; nothing else is shared
with the rest of the library. With ``formulas`` not even that: each candidate's throughput is Table 2 evaluated anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from table2 import Table2

from hetplan.catalog.hardware import InstanceType
from hetplan.estimator.base import Estimator, Phase, make_estimator
from hetplan.problem.placement import PlacementProblem

# Seconds of a phase by batch; place 0 is unused.
Seconds = list[float]
PlacedStage = tuple[str, int, int]

PHASES: tuple[Phase, Phase] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers on a machine, with the seconds of one layer and of the stage's end, by batch."""

    machine: int
    start: int
    stop: int
    layers: int
    layer_prefill: Seconds
    end_prefill: Seconds
    layer_decode: Seconds
    end_decode: Seconds


@dataclass(frozen=True, slots=True)
class Candidate:
    """A partial pipeline: its stages, the sends between them, and what it is worth."""

    stages: tuple[Stage, ...]
    sends: tuple[tuple[Seconds, Seconds], ...]
    capacity: int
    used: tuple[int, ...]
    cost: float
    throughput: float
    score: float


class Machines:
    """What the algorithm asks of each machine of a cluster, each answer computed once."""

    def __init__(self, problem: PlacementProblem) -> None:
        model = problem.model
        if len(model.layer_kinds) != 1:
            raise ValueError(f"{model.name} has {len(model.layer_kinds)} kinds of layers; the paper's models have one")
        self.problem = problem
        self.estimator: Estimator = make_estimator(problem)
        self.layer_count = model.layer_count
        attention = model.layer_kinds[0].attention
        self.pools = [
            pool
            for pool in problem.cluster.pools
            if _degree_fits(
                attention.heads, attention.kv_heads, problem.cluster.instance_type(pool.offer.instance_type).gpu_count
            )
        ]
        self.types: list[InstanceType] = [
            problem.cluster.instance_type(pool.offer.instance_type) for pool in self.pools
        ]
        self.prices = [pool.offer.billed_usd_per_hour for pool in self.pools]
        self._capacities: dict[tuple[int, int, bool, bool], int] = {}
        self._largest: dict[int, int] = {}
        self._times: dict[tuple[int, bool, bool], tuple[Seconds, Seconds, Seconds, Seconds]] = {}
        self._sends: dict[tuple[int, int], tuple[Seconds, Seconds]] = {}

    def capacity(self, machine: int, layers: int, first: bool, last: bool) -> int:
        """Sequences that fit a stage; none when the longest request does not."""
        key = (machine, layers, first, last)
        if key not in self._capacities:
            self._capacities[key] = self._fit(machine, layers, first, last)
        return self._capacities[key]

    def _fit(self, machine: int, layers: int, first: bool, last: bool) -> int:
        problem, estimator, kind = self.problem, self.estimator, self.types[machine]
        work, degree, span = problem.workload, kind.gpu_count, (0, layers)
        memory = estimator.stage_memory(
            problem.model, kind, layers=span, tensor_parallel=degree, first=first, last=last
        )
        typical, longest = (
            estimator.sequence_bytes(
                problem.model,
                kind,
                layers=span,
                tensor_parallel=degree,
                tokens=tokens,
                input_tokens=work.mean_prefill_tokens,
                last=last,
            )
            for tokens in (work.mean_input_tokens + work.mean_output_tokens, float(problem.longest_request_tokens))
        )
        if memory.kv_cache_bytes < longest:
            return 0
        return min(estimator.batch_limit(kind), int(memory.kv_cache_bytes // typical))

    def stage(self, machine: int, start: int, stop: int) -> Stage:
        """A stage with its times: seconds of one layer, and of what its role adds, in both phases."""
        first, last = start == 0, stop == self.layer_count
        key = (machine, first, last)
        if key not in self._times:
            batches = self._batches(machine)
            self._times[key] = (
                *self._stage_seconds(machine, "prefill", batches, first, last),
                *self._stage_seconds(machine, "decode", batches, first, last),
            )
        return Stage(machine, start, stop, stop - start, *self._times[key])

    def _stage_seconds(
        self, machine: int, phase: Phase, batches: list[int], first: bool, last: bool
    ) -> tuple[Seconds, Seconds]:
        work, kind = self.problem.workload, self.types[machine]

        def seconds(layers: int, first: bool, last: bool) -> Seconds:
            row = self.estimator.stage_seconds(
                self.problem.model,
                kind,
                layers=(0, layers),
                tensor_parallel=kind.gpu_count,
                batch=batches,
                input_tokens=work.mean_prefill_tokens if phase == "prefill" else work.mean_input_tokens,
                output_tokens=work.mean_output_tokens,
                first=first,
                last=last,
                phase=phase,
            )[0]
            return [0.0, *row.tolist()]

        bare = seconds(0, False, False)
        layer = [with_layer - without for with_layer, without in zip(seconds(1, False, False), bare, strict=True)]
        return layer, seconds(0, first, last)

    def _batches(self, machine: int) -> list[int]:
        """Every batch that a stage on this machine may have: a single layer leaves most room."""
        if machine not in self._largest:
            roles = [(first, last) for first in (False, True) for last in (False, True)]
            self._largest[machine] = max(1, *(self.capacity(machine, 1, *role) for role in roles))
        return list(range(1, self._largest[machine] + 1))

    def send(self, sender: int, receiver: int) -> tuple[Seconds, Seconds]:
        """Seconds of both phases' sends from one machine to the next."""
        key = (sender, receiver)
        if key not in self._sends:
            work = self.problem.workload
            prefill, decode = (
                self.estimator.boundary_seconds(
                    self.problem.model,
                    self.types[sender],
                    self.types[receiver],
                    same_node=False,
                    batch=min(self._batches(sender), self._batches(receiver), key=len),
                    input_tokens=work.mean_prefill_tokens if phase == "prefill" else work.mean_input_tokens,
                    output_tokens=work.mean_output_tokens,
                    phase=phase,
                ).tolist()
                for phase in PHASES
            )
            self._sends[key] = ([0.0, *prefill], [0.0, *decode])
        return self._sends[key]


def _degree_fits(heads: int, kv_heads: int, degree: int) -> bool:
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


def throughput(stages: tuple[Stage, ...], sends: tuple[tuple[Seconds, Seconds], ...], batch: int) -> float:
    """Eqs. 4 and 5: the batch over the slowest prefill plus the slowest decode, a send counted where it starts."""
    slowest_prefill = slowest_decode = 0.0
    for stage, (send_prefill, send_decode) in zip(stages, sends, strict=False):
        prefill = stage.layers * stage.layer_prefill[batch] + stage.end_prefill[batch] + send_prefill[batch]
        decode = stage.layers * stage.layer_decode[batch] + stage.end_decode[batch] + send_decode[batch]
        slowest_prefill = max(slowest_prefill, prefill)
        slowest_decode = max(slowest_decode, decode)
    final = stages[-1]
    prefill = final.layers * final.layer_prefill[batch] + final.end_prefill[batch]
    decode = final.layers * final.layer_decode[batch] + final.end_decode[batch]
    return batch / (max(slowest_prefill, prefill) + max(slowest_decode, decode))


def insert(kept: list[Candidate], candidate: Candidate, k: int) -> None:
    """Keep the best k, one of each multiset of machines; on a tie the earlier one goes first."""
    for place, other in enumerate(kept):
        if other.used == candidate.used:
            if candidate.score > other.score:
                kept[place] = candidate
                kept.sort(key=_worst_last)
            return
    if len(kept) < k:
        kept.append(candidate)
    elif candidate.score > kept[-1].score:
        kept[-1] = candidate
    kept.sort(key=_worst_last)


def _worst_last(candidate: Candidate) -> float:
    return -candidate.score


def literal_pipeline(
    machines: Machines, stock: list[int], k: int, formulas: Table2 | None = None
) -> tuple[Candidate | None, int]:
    """The pipeline that Algorithm 1 finds for the machines in stock, and how many candidates it evaluated."""
    total, micro_batches = machines.layer_count, machines.estimator.micro_batches
    usable = [machine for machine, count in enumerate(stock) if count > 0]
    start = Candidate((), (), 2**62, (0,) * len(stock), 0.0, 0.0, 0.0)
    best: list[dict[int, list[Candidate]]] = [{0: [start]}, *({} for _ in range(total))]
    evaluations = 0
    for layers in range(1, total + 1):
        for before in range(layers):
            new = {machine: machines.stage(machine, before, layers) for machine in usable}
            room = {
                machine: machines.capacity(machine, layers - before, before == 0, layers == total) for machine in usable
            }
            for count, parents in best[before].items():
                kept = best[layers].setdefault(count + 1, [])
                for parent in parents:
                    for machine in usable:
                        if parent.used[machine] == stock[machine]:
                            continue
                        evaluations += 1
                        capacity = min(parent.capacity, room[machine])
                        batch = capacity // (count + 1) if micro_batches else capacity
                        if batch < 1:
                            continue
                        stages = (*parent.stages, new[machine])
                        sends = parent.sends
                        if parent.stages:
                            sends = (*sends, machines.send(parent.stages[-1].machine, machine))
                        if formulas is None:
                            rate = throughput(stages, sends, batch)
                        else:
                            shape = [(machines.types[stage.machine], stage.layers) for stage in stages]
                            rate = formulas.throughput(shape, batch, layers == total)
                        used = (*parent.used[:machine], parent.used[machine] + 1, *parent.used[machine + 1 :])
                        cost = parent.cost + machines.prices[machine]
                        insert(kept, Candidate(stages, sends, capacity, used, cost, rate, rate / cost), k)
    winner: Candidate | None = None
    for count in sorted(best[total]):
        for candidate in best[total][count]:
            if winner is None or candidate.score > winner.score:
                winner = candidate
    return winner, evaluations


def literal_cluster(
    problem: PlacementProblem, k: int, *, formulas: bool = False
) -> tuple[list[tuple[list[PlacedStage], float]], int]:
    """Pipelines extracted one after another until no further one fits.

    Returns
    -------
    pipelines : list of (stages, throughput)
        Each stage as (machine name, first layer, end of its layers).
    evaluations : int
        Candidates whose batch was computed.
    """
    machines = Machines(problem)
    table2 = Table2(problem) if formulas else None
    stock = [pool.count for pool in machines.pools]
    pipelines: list[tuple[list[PlacedStage], float]] = []
    evaluations = 0
    while True:
        found, more = literal_pipeline(machines, stock, k, table2)
        evaluations += more
        if found is None:
            return pipelines, evaluations
        stages = [(machines.types[stage.machine].name, stage.start, stage.stop) for stage in found.stages]
        pipelines.append((stages, found.throughput))
        stock = [count - used for count, used in zip(stock, found.used, strict=True)]
