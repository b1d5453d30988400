"""Every plan of a small cluster, by trying them: all sets of all pipelines, every split and every batch.

Of the estimator only the times and bytes of single stages are taken; what follows from them is computed here
again, and nothing comes from a solver. Every pipeline is tried with every batch, so times need no shape in it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetplan.catalog.engines import LimitName
from hetplan.catalog.hardware import InstanceType
from hetplan.catalog.offers import ZoneLink
from hetplan.estimator.base import PHASES, make_estimator
from hetplan.estimator.pipeline import StageShape
from hetplan.plan import StageMemory
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import PipelineChoice

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

# As the checker: a limit or a demand that a plan just reaches is kept.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Group:
    """A stage without its layers: ``node`` numbers the machines of the pipeline, ``place`` is where it stands."""

    machine: InstanceType
    degree: int
    node: int
    place: str = ""


@dataclass(frozen=True)
class BestPipeline:
    """The best of all pipelines on some machines: its worth, and how it is made."""

    value: float
    latencies: dict[str, float]
    machines: tuple[InstanceType, ...]
    stages: tuple[StageShape, ...]
    micro_batch: int
    egress_usd_per_hour: float


@dataclass(frozen=True)
class BestPlan:
    objective: float
    pipelines: tuple[PipelineChoice, ...]
    latencies: tuple[dict[str, float], ...]


class WholePlacements:
    """The plans of one problem.

    Parameters
    ----------
    problem : PlacementProblem
        With a ``max_num_seqs``, which bounds what is tried.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        assert problem.max_num_seqs is not None
        self.problem = problem
        self.estimator = make_estimator(problem)
        self.layers = problem.model.layer_count
        self.batches = np.arange(1.0, problem.max_num_seqs + 1)
        self._fits: dict[tuple[str, int], Counts] = {}
        self._seconds: dict[tuple[str, int], Floats] = {}
        self._sends: dict[tuple[str, str, bool, ZoneLink | None], Floats] = {}
        self._best: dict[tuple[tuple[str, str], ...], BestPipeline | None] = {}
        # The least latencies of any pipeline that has been tried, at any batch.
        self.least: dict[str, float] = {}

    def asked(self, problem: PlacementProblem) -> WholePlacements:
        """The same with other limits, another objective or another demand, none of which stages depend on."""
        other = WholePlacements(problem)
        other._fits, other._seconds, other._sends = self._fits, self._seconds, self._sends
        return other

    # ---- single stages

    def _stage_fits(self, machine: InstanceType, degree: int) -> Counts:
        """[start, stop] sequences in flight that a stage of these layers has memory for."""
        key = (machine.name, degree)
        if key not in self._fits:
            model, work, estimator = self.problem.model, self.problem.workload, self.estimator
            fits = np.zeros((self.layers + 1, self.layers + 1), dtype=np.int64)
            for start, stop in itertools.combinations(range(self.layers + 1), 2):
                first, last = start == 0, stop == self.layers
                memory = estimator.stage_memory(
                    model, machine, layers=(start, stop), tensor_parallel=degree, first=first, last=last
                )
                taken = memory.weight_bytes + memory.activation_bytes + memory.other_bytes
                # All of it is the KV cache's.
                left = memory.usable_bytes - taken - self._kept(machine, degree, start, stop, memory)
                longest, typical = (
                    estimator.sequence_bytes(
                        model,
                        machine,
                        layers=(start, stop),
                        tensor_parallel=degree,
                        tokens=tokens,
                        input_tokens=work.mean_prefill_tokens,
                        last=last,
                    )
                    for tokens in (
                        float(self.problem.longest_request_tokens),
                        work.mean_input_tokens + work.mean_output_tokens,
                    )
                )
                if left >= longest:
                    most = estimator.batch_limit(machine)
                    fits[start, stop] = min(most, left // typical) if typical > 0 else most
            self._fits[key] = fits
        return self._fits[key]

    def _kept(self, machine: InstanceType, degree: int, start: int, stop: int, memory: StageMemory) -> int:
        """Bytes for a second engine on the same weights: its own activations and context, and its first cache."""
        problem, model = self.problem, self.problem.model
        count = problem.handover_sequences
        if count == 0:
            return 0
        tokens = 16 * math.ceil(problem.longest_request_tokens / 16)
        cache = [
            count * math.ceil(model.layer_kv_bytes_per_sequence(kind, tokens, degree))
            + math.ceil(model.layer_kv_bytes_per_sequence(kind, 16, degree))
            for kind in model.layer_pattern
        ]
        weights = [int(model.layer_weight_bytes(kind, degree)) for kind in model.layer_pattern]
        more = problem.handover_layers * (max(weights) + max(cache))
        return memory.activation_bytes + memory.other_bytes + sum(cache[start:stop]) + more

    def _stage_seconds(self, machine: InstanceType, degree: int) -> Floats:
        """[phase, start, stop, batch] seconds of a stage of these layers, without its send."""
        key = (machine.name, degree)
        if key not in self._seconds:
            work, size = self.problem.workload, self.layers + 1
            seconds = np.full((2, size, size, self.batches.size), np.nan)
            tokens = (work.mean_prefill_tokens, work.mean_input_tokens)
            ranges = list(itertools.combinations(range(size), 2))
            for first, last in itertools.product((True, False), repeat=2):
                asked = np.array([r for r in ranges if (r[0] == 0, r[1] == self.layers) == (first, last)])
                for number, phase in enumerate(PHASES):
                    if asked.size:
                        seconds[number, asked[:, 0], asked[:, 1]] = self.estimator.stage_seconds(
                            self.problem.model,
                            machine,
                            layers=asked,
                            tensor_parallel=degree,
                            batch=self.batches,
                            input_tokens=tokens[number],
                            output_tokens=work.mean_output_tokens,
                            first=first,
                            last=last,
                            phase=phase,
                        )
            self._seconds[key] = seconds
        return self._seconds[key]

    def _link(self, one: str, other: str) -> ZoneLink | None:
        """The zone link between two places: the one whose ends name most."""
        wanted = [
            link
            for link in self.problem.cluster.zone_links
            for a, b in (link.ends, link.ends[::-1])
            if one != other and f"{one}/".startswith(f"{a}/") and f"{other}/".startswith(f"{b}/")
        ]
        return max(wanted, key=lambda link: len("".join(link.ends)), default=None)

    def _joined(self, one: str, other: str) -> bool:
        regions = {"/".join(place.split("/")[:2]) for place in (one, other)}
        return len(regions) == 1 or self._link(one, other) is not None

    def _egress(self, row: Sequence[Group], rate: float) -> float:
        """Dollars an hour of what a row of groups sends over zone links."""
        links = [self._link(a.place, b.place) for a, b in itertools.pairwise(row)]
        work, model = self.problem.workload, self.problem.model
        tokens = work.mean_prefill_tokens + self.estimator.decode_steps(work.mean_output_tokens)
        sent = tokens * model.hidden_size * model.residual_streams * 2
        return sum(link.egress_usd_per_gb for link in links if link is not None) * sent * rate * 3600 / 1e9

    def _send_seconds(self, sender: Group, receiver: Group) -> Floats:
        """[phase, batch] seconds of a send to the next stage."""
        same_node, link = sender.node == receiver.node, self._link(sender.place, receiver.place)
        key = (sender.machine.name, receiver.machine.name, same_node, link)
        if key not in self._sends:
            work = self.problem.workload
            tokens = (work.mean_prefill_tokens, work.mean_input_tokens)
            self._sends[key] = np.stack(
                [
                    self.estimator.boundary_seconds(
                        self.problem.model,
                        sender.machine,
                        receiver.machine,
                        same_node=same_node,
                        batch=self.batches,
                        input_tokens=tokens[number],
                        output_tokens=work.mean_output_tokens,
                        phase=phase,
                        between=None if link is None else link.link,
                    )
                    for number, phase in enumerate(PHASES)
                ]
            )
        return self._sends[key]

    # ---- pipelines

    def ways(self, machine: InstanceType) -> list[tuple[int, ...]]:
        """Every row of tensor-parallel groups that a machine can hold; GPUs may stay idle."""
        degrees = machine.valid_tensor_parallel(self.problem.model)
        return [
            way
            for size in range(1, min(machine.gpu_count, self.layers) + 1)
            for way in itertools.product(degrees, repeat=size)
            if sum(way) <= machine.gpu_count
        ]

    def _rows(self, machines: Sequence[InstanceType], places: Sequence[str]) -> Iterator[list[Group]]:
        """Every row of groups on all of these machines, whose stages stand side by side."""
        names = {machine.name: machine for machine in machines}
        standing = [(machine.name, place) for machine, place in zip(machines, places, strict=True)]
        for order in sorted(set(itertools.permutations(standing))):
            if not all(self._joined(a, b) for (_, a), (_, b) in itertools.pairwise(order)):
                continue
            for chosen in itertools.product(*(self.ways(names[name]) for name, _ in order)):
                if sum(map(len, chosen)) <= self.layers and self._engine_takes([names[n] for n, _ in order], chosen):
                    yield [
                        Group(names[name], degree, node, place)
                        for node, ((name, place), way) in enumerate(zip(order, chosen, strict=True))
                        for degree in way
                    ]

    def _engine_takes(self, machines: Sequence[InstanceType], ways: Sequence[tuple[int, ...]]) -> bool:
        limits = () if self.problem.engine is None else self.problem.engine.limits
        wanted = self.problem.model.compute_dtype
        paper = self.problem.estimator == "paper"
        found: dict[LimitName, set[Any]] = {
            "one-tensor-parallel-degree": {degree for way in ways for degree in way},
            "equal-gpus-per-node": {sum(way) for way in ways},
            "consecutive-stages-per-node": set(),
            "one-dtype": {wanted if paper else machine.gpu.runs_as(wanted) for machine in machines},
        }
        return all(len(found[limit]) <= 1 for limit in limits)

    def best_pipeline(
        self, machines: Sequence[InstanceType], places: Sequence[str] | None = None
    ) -> BestPipeline | None:
        """The best pipeline on all of these machines; None when nothing fits or every one breaks a hard limit.

        ``places``: where each machine stands, by default all in one place.
        """
        places = [""] * len(machines) if places is None else places
        key = tuple(sorted((machine.name, place) for machine, place in zip(machines, places, strict=True)))
        if key not in self._best:
            best: BestPipeline | None = None
            for row in self._rows(machines, places):
                found = self._best_of_row(row)
                if found is not None and (best is None or found.value > best.value):
                    best = found
            self._best[key] = best
        return self._best[key]

    def _best_of_row(self, row: list[Group]) -> BestPipeline | None:
        """The best split of the layers over a row of groups, and the best batch, of all of them at once."""
        count = len(row)
        cuts = np.array(list(itertools.combinations(range(1, self.layers), count - 1)), dtype=np.int64)
        cuts = cuts.reshape(math.comb(self.layers - 1, count - 1), count - 1)
        edges = np.pad(cuts, ((0, 0), (1, 1)))
        edges[:, -1] = self.layers
        spans = [(edges[:, i], edges[:, i + 1]) for i in range(count)]
        fits = np.min([self._stage_fits(g.machine, g.degree)[s] for g, s in zip(row, spans, strict=True)], axis=0)
        sharing = count if self.estimator.micro_batches else 1
        allowed = self.batches[None, :] * sharing <= fits[:, None]
        if not allowed.any():
            return None
        # [stage, phase, split, batch]
        seconds = np.stack(
            [self._stage_seconds(g.machine, g.degree)[:, s[0], s[1]] for g, s in zip(row, spans, strict=True)]
        )
        for number, (sender, receiver) in enumerate(itertools.pairwise(row)):
            seconds[number] += self._send_seconds(sender, receiver)[:, None, :]
        slowest = seconds.max(axis=0)
        together = slowest[0] + slowest[1]
        if self.estimator.micro_batches:
            latency = seconds.sum(axis=(0, 1))
            first_token = np.repeat(seconds[:, 0, :, :1].sum(axis=0), self.batches.size, axis=1)
        else:
            latency, first_token = together, slowest[0]
        steps = self.estimator.decode_steps(self.problem.workload.mean_output_tokens)
        if steps > 0:
            per_token = (latency - first_token) / steps
        else:
            first_token, per_token = latency, np.zeros_like(latency)
        latencies = {"ttft_s": first_token, "tpot_s": per_token, "e2e_s": latency}
        for name, values in latencies.items():
            self.least[name] = min(self.least.get(name, math.inf), float(values[allowed].min()))
        value = np.where(allowed, self._worth(self.batches / together, latencies), -np.inf)
        split, batch = np.unravel_index(np.argmax(value), value.shape)
        if value[split, batch] == -np.inf:
            return None
        nodes = {group.node: group.machine for group in row}
        return BestPipeline(
            value=float(value[split, batch]),
            latencies={name: float(values[split, batch]) for name, values in latencies.items()},
            machines=tuple(nodes[node] for node in sorted(nodes)),
            stages=tuple(
                StageShape((int(s[0][split]), int(s[1][split])), group.machine, group.degree, group.node, group.place)
                for group, s in zip(row, spans, strict=True)
            ),
            micro_batch=int(self.batches[batch]),
            egress_usd_per_hour=self._egress(row, float(self.batches[batch] / together[split, batch])),
        )

    def _worth(self, rate: Floats, latencies: dict[str, Floats]) -> Floats:
        """Requests/s less the penalty of eq. 7; minus infinity beyond a hard limit."""
        slo = self.problem.slo
        if slo is None:
            return rate
        late = np.max([latencies[name] / limit for name, limit in slo.limits().items()], axis=0) - 1
        if slo.hard:
            return np.where(late <= TOLERANCE, rate, -np.inf)
        return np.asarray(rate * (1 - self.problem.latency_penalty * np.maximum(late, 0)))

    # ---- plans

    def pipelines(self) -> dict[tuple[int, ...], BestPipeline]:
        """The best pipeline by the machines that it takes of each pool, where it is worth something."""
        pools, cluster = self.problem.cluster.pools, self.problem.cluster
        found = {}
        for used in itertools.product(*(range(pool.count + 1) for pool in pools)):
            taken = [pool for pool, count in zip(pools, used, strict=True) for _ in range(count)]
            if 0 < len(taken) <= self.layers:
                machines = [cluster.instance_type(pool.offer.instance_type) for pool in taken]
                best = self.best_pipeline(machines, [pool.offer.place for pool in taken])
                if best is not None and best.value > 0:
                    found[used] = best
        return found

    def _sets(
        self, chosen: tuple[tuple[int, ...], ...], left: tuple[int, ...], choices: list[tuple[int, ...]]
    ) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Every multiset of pipelines that the machines allow, the empty one included."""
        yield chosen
        for number, used in enumerate(choices):
            after = tuple(have - take for have, take in zip(left, used, strict=True))
            if min(after) >= 0:
                yield from self._sets((*chosen, used), after, choices[number:])

    def best_plan(self) -> BestPlan | None:
        """The best of all plans; None when none is worth anything or none keeps the limits."""
        problem = self.problem
        prices = [pool.offer.billed_usd_per_hour for pool in problem.cluster.pools]
        pipelines = self.pipelines()
        demand = problem.workload.requests_per_s or 0.0
        best: tuple[float, tuple[tuple[int, ...], ...]] | None = None
        for plan in self._sets((), tuple(pool.count for pool in problem.cluster.pools), list(pipelines)):
            if not plan:
                continue
            value = math.fsum(pipelines[used].value for used in plan)
            cost = math.fsum(count * price for used in plan for count, price in zip(used, prices, strict=True))
            cost += math.fsum(pipelines[used].egress_usd_per_hour for used in plan)
            # What is made as large as possible.
            if problem.objective == "throughput":
                score = value
            elif problem.objective == "throughput_per_cost":
                score = value / cost
            else:
                assert problem.objective == "cost"
                if value < demand * (1 - TOLERANCE):
                    continue
                score = -cost
            if best is None or score > best[0]:
                best = score, plan
        if best is None:
            return None
        return BestPlan(
            objective=-best[0] if problem.objective == "cost" else best[0],
            pipelines=tuple(self._choice(used, pipelines[used]) for used in best[1]),
            latencies=tuple(pipelines[used].latencies for used in best[1]),
        )

    def _choice(self, used: tuple[int, ...], pipeline: BestPipeline) -> PipelineChoice:
        """The pipeline with an offer for each of its machines."""
        left = Counter(
            {pool.offer.name: count for pool, count in zip(self.problem.cluster.pools, used, strict=True) if count}
        )
        standing = {p.offer.name: (p.offer.instance_type, p.offer.place) for p in self.problem.cluster.pools}
        places = {stage.node: stage.place for stage in pipeline.stages}
        offers = []
        for node, machine in enumerate(pipeline.machines):
            wanted = (machine.name, places[node])
            offer = next(name for name in sorted(left) if left[name] and standing[name] == wanted)
            left[offer] -= 1
            offers.append(offer)
        return PipelineChoice(pipeline.stages, tuple(offers), pipeline.micro_batch, pipeline.egress_usd_per_hour)
