"""Tables of what stages take, asked of the estimator.

One space of pipelines for each engine setting and each region, or regions that zone links join.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hetplan.catalog.hardware import InstanceType
from hetplan.catalog.offers import Cluster
from hetplan.estimator.base import PHASES, Estimator, Phase
from hetplan.plan import StageMemory
from hetplan.problem.placement import PlacementProblem
from hetplan.verification.box_search import BOX_COLUMNS
from hetplan.verification.certificate import covered_degrees
from hetplan.verification.tables import (
    FIRST_INSIDE,
    FIRST_OUTSIDE,
    LAST,
    MIDDLE_INSIDE,
    MIDDLE_OUTSIDE,
    ONLY,
    ROLE_COUNT,
    FloatArray,
    IntArray,
    Tables,
)

_OUTSIDE = (MIDDLE_OUTSIDE, FIRST_OUTSIDE)
_ENDS: dict[int, tuple[bool, bool]] = {
    MIDDLE_INSIDE: (False, False),
    MIDDLE_OUTSIDE: (False, False),
    FIRST_INSIDE: (True, False),
    FIRST_OUTSIDE: (True, False),
    LAST: (False, True),
    ONLY: (True, True),
}
# Layer kinds that end within so many layers of the start do not count towards a model's units.
_SHORT_PREFIX = 8
# Tables of other machines are built again after so many: some megabytes each.
_MOST_TABLES = 64


@dataclass(frozen=True, slots=True)
class Setting:
    """Pipelines of one place: pools by their number in the cluster, and what an engine makes equal in a pipeline.

    ``gpus``: most GPUs of a machine that are used; ``stages``: of each machine, 0 for any number.
    """

    pools: tuple[int, ...]
    degrees: tuple[int, ...] | None = None
    gpus: int | None = None
    stages: int = 0


def settings(problem: PlacementProblem) -> Iterator[Setting]:
    """Spaces of pipelines that together hold every pipeline that a plan of the problem may have."""
    pools, machines = problem.cluster.pools, {t.name: t for t in problem.cluster.instance_types}
    types = [machines[pool.offer.instance_type] for pool in pools]
    places: dict[tuple[str, ...], list[int]] = {}
    region_of = _joined_regions(problem.cluster)
    limits = problem.limits
    for number, (pool, machine) in enumerate(zip(pools, types, strict=True)):
        place: tuple[str, ...] = (region_of[pool.offer.provider, pool.offer.region],)
        if "one-dtype" in limits and problem.estimator != "paper":
            place += (machine.gpu.runs_as(problem.model.compute_dtype),)
        places.setdefault(place, []).append(number)
    for members in places.values():
        degrees = {number: covered_degrees(problem.model, types[number]) for number in members}
        known = sorted({degree for each in degrees.values() for degree in each})
        granted = sorted({gpus for number in members for gpus in range(1, types[number].gpu_count + 1)})
        for gpus in granted if "equal-gpus-per-node" in limits else [None]:
            for degree in known if "one-tensor-parallel-degree" in limits else [None]:
                if gpus is not None and degree is not None and gpus % degree:
                    continue
                usable = tuple(
                    number
                    for number in members
                    if (gpus is None or types[number].gpu_count >= gpus)
                    and (degree is None or degree in degrees[number])
                )
                if usable:
                    yield Setting(
                        pools=usable,
                        degrees=None if degree is None else (degree,),
                        gpus=gpus,
                        stages=gpus // degree if gpus is not None and degree is not None else 0,
                    )


def _joined_regions(cluster: Cluster) -> dict[tuple[str, str], str]:
    """A name for each region (provider, region), the same for those that zone links join, one after another."""
    name = {(p.offer.provider, p.offer.region): f"{p.offer.provider}/{p.offer.region}" for p in cluster.pools}
    for link in cluster.zone_links:
        # An end is a region, or a zone of one.
        ends = {name[r] for r in name for end in link.ends if f"{end}/".startswith(f"{r[0]}/{r[1]}/")}
        name = {region: min(ends) if known in ends else known for region, known in name.items()}
    return name


@dataclass(frozen=True, slots=True)
class _Kind:
    """Machines that are alike to those that send to them: of a type, and in a place where zone links make it matter."""

    name: str
    place: str
    machine: InstanceType = field(compare=False)


@dataclass(frozen=True, slots=True)
class _Option:
    kind: int
    machine: InstanceType
    degree: int


@dataclass
class StageTimes:
    """Seconds and bytes of every option of a problem, asked once."""

    problem: PlacementProblem
    estimator: Estimator
    _options: dict[tuple[str, int], _OptionTimes] = field(default_factory=dict)
    _sends: dict[tuple[_Kind, _Kind, bool], FloatArray] = field(default_factory=dict)
    _trees: dict[tuple[str, int, bytes], FloatArray] = field(default_factory=dict)

    @cached_property
    def most_batch(self) -> int:
        """No stage holds more sequences than this in any option."""
        machines = {t.name: t for t in self.problem.cluster.instance_types}
        most = 1
        for name in {pool.offer.instance_type for pool in self.problem.cluster.pools}:
            for degree in covered_degrees(self.problem.model, machines[name]):
                most = max(most, self._largest(machines[name], degree))
        return most

    @cached_property
    def batches(self) -> FloatArray:
        return np.arange(1, self.most_batch + 1, dtype=np.float64)

    def _bytes(
        self, machine: InstanceType, degree: int, layers: tuple[int, int], first: bool, last: bool, tokens: float
    ) -> tuple[StageMemory, float]:
        work = self.problem.workload
        memory = self.estimator.stage_memory(
            self.problem.model, machine, layers=layers, tensor_parallel=degree, first=first, last=last
        )
        sequence = self.estimator.sequence_bytes(
            self.problem.model,
            machine,
            layers=layers,
            tensor_parallel=degree,
            tokens=tokens,
            input_tokens=work.mean_prefill_tokens,
            last=last,
        )
        return memory, sequence

    @cached_property
    def kind_layers(self) -> list[int]:
        """For each kind of layer that the model has, the first layer of it."""
        pattern = self.problem.model.layer_pattern
        return [pattern.index(kind) for kind in sorted(set(pattern))]

    @property
    def typical_tokens(self) -> float:
        return self.problem.workload.mean_input_tokens + self.problem.workload.mean_output_tokens

    @property
    def longest_tokens(self) -> float:
        problem = self.problem
        if problem.max_model_len is not None:
            return float(problem.max_model_len)
        queries = problem.workload.query_types
        return float(math.ceil(max(q.input_tokens.maximum + q.output_tokens.maximum for q in queries)))

    def _largest(self, machine: InstanceType, degree: int) -> int:
        limit = self.estimator.batch_limit(machine)
        most = 0
        for first, last in {*_ENDS.values()}:
            for layer in self.kind_layers:
                memory, one = self._bytes(machine, degree, (layer, layer + 1), first, last, self.typical_tokens)
                fits = limit if one <= 0 else int(max(0, memory.kv_cache_bytes) * (1 + 1e-9) // one)
                most = max(most, min(limit, fits))
        return most

    def option(self, machine: InstanceType, degree: int) -> _OptionTimes:
        key = (machine.name, degree)
        if key not in self._options:
            self._options[key] = self._ask(machine, degree)
        return self._options[key]

    def _seconds(self, machine: InstanceType, degree: int, phase: Phase, first: bool, last: bool) -> FloatArray:
        """(1 + K, B) seconds of a stage without layers and, between the ends, of one with a layer of each kind."""
        work = self.problem.workload
        ranges = [(0, 0)] if first or last else [(0, 0), *((layer, layer + 1) for layer in self.kind_layers)]
        return self.estimator.stage_seconds(
            self.problem.model,
            machine,
            layers=np.array(ranges),
            tensor_parallel=degree,
            batch=self.batches,
            input_tokens=work.mean_prefill_tokens if phase == "prefill" else work.mean_input_tokens,
            output_tokens=work.mean_output_tokens,
            first=first,
            last=last,
            phase=phase,
        )

    def _ask(self, machine: InstanceType, degree: int) -> _OptionTimes:
        kinds, count = len(self.kind_layers), self.most_batch
        layer_s, base_s = np.empty((2, kinds, count)), np.empty((2, 4, count))
        for p, phase in enumerate(PHASES):
            for e, (first, last) in enumerate(_FOUR_ENDS):
                rows = self._seconds(machine, degree, phase, first, last)
                base_s[p, e] = rows[0]
                if not first and not last:
                    layer_s[p] = rows[1:] - rows[0]
        typical, longest = self.typical_tokens, self.longest_tokens
        empty = {ends: self._bytes(machine, degree, (0, 0), *ends, typical) for ends in _FOUR_ENDS}
        empty_long = {ends: self._bytes(machine, degree, (0, 0), *ends, longest)[1] for ends in _FOUR_ENDS}
        bare, bare_long = (False, False), empty_long[False, False]
        single = [self._bytes(machine, degree, (i, i + 1), *bare, typical) for i in self.kind_layers]
        single_long = [self._bytes(machine, degree, (i, i + 1), *bare, longest)[1] for i in self.kind_layers]
        weights = np.array([empty[bare][0].kv_cache_bytes - memory.kv_cache_bytes for memory, _ in single], dtype=float)
        of_ends = [empty[_ENDS[role]] for role in range(ROLE_COUNT)]
        long_of_ends = [empty_long[_ENDS[role]] for role in range(ROLE_COUNT)]
        return _OptionTimes(
            layer_s=layer_s,
            base_s=base_s,
            layer_bytes=np.stack(
                [
                    weights,
                    [one - empty[bare][1] for _, one in single],
                    weights + [one - bare_long for one in single_long],
                ]
            ),
            room_bytes=np.array(
                [
                    [memory.kv_cache_bytes for memory, _ in of_ends],
                    [one for _, one in of_ends],
                    [
                        memory.kv_cache_bytes - longest
                        for (memory, _), longest in zip(of_ends, long_of_ends, strict=True)
                    ],
                ],
                dtype=float,
            ),
        )

    def outside(self, sender: _Kind, receivers: Sequence[_Kind]) -> FloatArray:
        """(2, B) seconds of a micro-batch's sends to the best of ``receivers`` on another node."""
        sends = [self.send(sender, receiver, same_node=False) for receiver in receivers]
        return np.min(sends, axis=0) if sends else np.full((2, self.most_batch), np.inf)

    def beyond_best(self, sender: _Kind, receivers: Sequence[_Kind], receiver: _Kind) -> FloatArray:
        """(2, V) seconds per request that a send to a receiver takes beyond the best; infinite if it is none."""
        send = self.send(sender, receiver, same_node=False)
        if receiver not in receivers or not np.isfinite(send).all():
            return np.full((2, 2 * self.leaves), np.inf)
        return self.minima((send - self.outside(sender, receivers)) / self.batches)

    def tree(self, sender: _Kind, degree: int, receivers: Sequence[_Kind]) -> FloatArray:
        """(2, K + R, V): an option's least times when its node sends to the best of ``receivers``."""
        outside, machine = self.outside(sender, receivers), sender.machine
        key = (machine.name, degree, outside.tobytes())
        if key not in self._trees:
            inside = np.full((2, self.most_batch), np.inf)
            if machine.gpu_count > 1:
                inside = self.send(sender, sender, same_node=True)
            asked = self.option(machine, degree)
            base_s = asked.base_s[:, _END_OF_ROLE]
            for role, send in (
                (MIDDLE_INSIDE, inside),
                (FIRST_INSIDE, inside),
                (MIDDLE_OUTSIDE, outside),
                (FIRST_OUTSIDE, outside),
            ):
                base_s[:, role] += send
            self._trees[key] = self.minima(np.concatenate([asked.layer_s, base_s], axis=1) / self.batches)
        return self._trees[key]

    @property
    def leaves(self) -> int:
        return 1 << max(0, (self.most_batch - 1).bit_length())

    def minima(self, values: FloatArray) -> FloatArray:
        """(..., B) by batch -> (..., 2 leaves): the least over each node of the tree of batches."""
        tree = np.full((*values.shape[:-1], 2 * self.leaves), np.inf)
        tree[..., self.leaves : self.leaves + self.most_batch] = values
        size = self.leaves
        while size > 1:
            pairs = tree[..., size : 2 * size]
            size //= 2
            tree[..., size : 2 * size] = np.minimum(pairs[..., 0::2], pairs[..., 1::2])
        return tree

    @cached_property
    def _region_of(self) -> dict[str, tuple[str, str]]:
        """The region of each place."""
        return {p.offer.place: (p.offer.provider, p.offer.region) for p in self.problem.cluster.pools}

    def send(self, sender: _Kind, receiver: _Kind, *, same_node: bool) -> FloatArray:
        """(2, B) seconds of a micro-batch's sends in each phase; infinite where a pipeline may not go."""
        key = (sender, receiver, same_node)
        if key not in self._sends:
            work, cluster = self.problem.workload, self.problem.cluster
            crossed = cluster.zone_link(sender.place, receiver.place)
            if cluster.zone_links and crossed is None:
                regions = self._region_of[sender.place], self._region_of[receiver.place]
                if regions[0] != regions[1]:
                    self._sends[key] = np.full((2, self.most_batch), np.inf)
                    return self._sends[key]
            self._sends[key] = np.stack(
                [
                    self.estimator.boundary_seconds(
                        self.problem.model,
                        sender.machine,
                        receiver.machine,
                        same_node=same_node,
                        batch=self.batches,
                        input_tokens=work.mean_prefill_tokens if phase == "prefill" else work.mean_input_tokens,
                        output_tokens=work.mean_output_tokens,
                        phase=phase,
                        between=None if crossed is None else crossed.link,
                    )
                    for phase in PHASES
                ]
            )
        return self._sends[key]


_FOUR_ENDS = ((False, False), (True, False), (False, True), (True, True))
_END_OF_ROLE = np.array([_FOUR_ENDS.index(_ENDS[role]) for role in range(ROLE_COUNT)])


@dataclass(frozen=True, slots=True)
class _OptionTimes:
    """Of one option, by role without sends (middle, first, last, only): seconds of whole batches, and bytes."""

    layer_s: FloatArray  # (2, K, B)
    base_s: FloatArray  # (2, 4, B)
    layer_bytes: FloatArray  # (3, K): of a layer, of a sequence in it, of both with the longest request
    room_bytes: FloatArray  # (3, R): for layers and sequences, of a sequence beside the layers', for the longest


class Space:
    """The pipelines of a setting, ready to be searched with all of its machines or with some of them."""

    def __init__(self, times: StageTimes, setting: Setting) -> None:
        self.times, self.setting = times, setting
        problem = times.problem
        machines = {t.name: t for t in problem.cluster.instance_types}
        self.pool_machine = {n: machines[problem.cluster.pools[n].offer.instance_type] for n in setting.pools}
        pools, linked = problem.cluster.pools, bool(problem.cluster.zone_links)
        self.pool_kind = {
            n: _Kind(machine.name, pools[n].offer.place if linked else "", machine)
            for n, machine in self.pool_machine.items()
        }
        self._known: dict[tuple[tuple[_Kind, bool], ...], Tables] = {}

    def tables(self, counts: Mapping[int, int]) -> tuple[Tables, IntArray]:
        """Tables of the kinds of machines among ``counts`` (pool to machines), and the kind of each of its pools."""
        by_kind: dict[_Kind, int] = {}
        for pool, count in counts.items():
            kind = self.pool_kind[pool]
            by_kind[kind] = by_kind.get(kind, 0) + count
        kinds = sorted(by_kind, key=lambda kind: (kind.name, kind.place))
        key = tuple((kind, by_kind[kind] > 1) for kind in kinds)
        if key not in self._known:
            if len(self._known) >= _MOST_TABLES:
                self._known.clear()
            self._known[key] = self._build(key)
        return self._known[key], np.array([kinds.index(self.pool_kind[pool]) for pool in counts])

    def _build(self, types: tuple[tuple[_Kind, bool], ...]) -> Tables:
        times, problem, setting = self.times, self.times.problem, self.setting
        kinds = [kind for kind, _ in types]
        options = [
            _Option(number, kind.machine, degree)
            for number, kind in enumerate(kinds)
            for degree in covered_degrees(problem.model, kind.machine)
            if (setting.degrees is None or degree in setting.degrees)
            and (setting.gpus is None or degree <= setting.gpus)
        ]
        asked = [times.option(option.machine, option.degree) for option in options]
        receivers = [[other for other, more in types if other is not kind or more] for kind in kinds]
        trees = [times.tree(kinds[option.kind], option.degree, receivers[option.kind]) for option in options]
        seconds = np.stack(trees, axis=1)
        extra_s = np.stack(
            [
                np.stack([times.beyond_best(kind, receivers[n], other) for other in kinds], axis=1)
                for n, kind in enumerate(kinds)
            ],
            axis=1,
        )
        barred = [not np.isfinite(times.send(a, b, same_node=False)).all() for a in kinds for b in kinds]
        layers_before = self._layers_before()
        slo, steps = problem.slo, times.estimator.decode_steps(problem.workload.mean_output_tokens)
        limits = np.full(3, np.inf)
        if slo is not None:
            for name, limit in slo.limits().items():
                limits[("e2e_s", "ttft_s", "tpot_s").index(name)] = limit
        floors_s = np.zeros((3, 5, seconds.shape[-1]))
        if slo is not None:
            whole = seconds[..., times.leaves : times.leaves + times.most_batch] * times.batches
            floors_s = times.minima(_latency_floors(whole, layers_before[-1, :-1], steps))
        demand = problem.workload.requests_per_s if problem.objective == "cost" else None
        return Tables(
            seconds=seconds,
            bytes=np.stack([np.concatenate([entry.layer_bytes, entry.room_bytes], axis=1) for entry in asked], axis=1),
            extra_s=extra_s,
            options=np.array([(option.kind, option.degree) for option in options]),
            types=np.array(
                [
                    (
                        min(kind.machine.gpu_count, setting.gpus or kind.machine.gpu_count),
                        times.estimator.batch_limit(kind.machine),
                    )
                    for kind in kinds
                ]
            ),
            layers_before=layers_before,
            floors_s=floors_s,
            limits_s=limits,
            leaves=times.leaves,
            ordered=layers_before.shape[1] > 2 or bool(np.any(extra_s[np.isfinite(extra_s)] > 0)) or any(barred),
            stages_per_machine=setting.stages,
            hard=slo is not None and slo.hard,
            penalty=float(problem.latency_penalty),
            micro_batches=bool(times.estimator.micro_batches),
            decode_steps=float(steps),
            demand=math.inf if demand is None else float(demand),
        )

    def _layers_before(self) -> IntArray:
        """Layers of each kind, and units, before each layer; a short prefix of a kind of its own has no units."""
        pattern = np.array(self.times.problem.model.layer_pattern)
        kinds = [pattern[layer] for layer in self.times.kind_layers]
        held = np.stack([pattern == kind for kind in kinds], axis=1)
        counted = [
            not (np.flatnonzero(held[:, k])[-1] < min(_SHORT_PREFIX, len(pattern) - 1)) for k in range(len(kinds))
        ]
        if len(kinds) == 1 or not any(counted):
            counted = [True] * len(kinds)
        start = np.zeros((1, len(kinds)), dtype=np.int64)
        before = np.concatenate([start, np.cumsum(held, axis=0)]).astype(np.int64)
        units = before @ np.array(counted, dtype=np.int64)
        return np.concatenate([before, units[:, np.newaxis]], axis=1)

    def first_box(self, tables: Tables, counts: Mapping[int, int]) -> FloatArray:
        """The box of all pipelines on these machines."""
        layers, kinds = tables.layers_before.shape[0] - 1, tables.layers_before.shape[1] - 1
        gpus = sum(count * min(self.pool_machine[p].gpu_count, self.setting.gpus or 64) for p, count in counts.items())
        single = tables.seconds[..., tables.leaves : tables.leaves + self.times.most_batch]
        whole_s = np.einsum("pokb,k->pob", single[:, :, :kinds], tables.layers_before[-1, :-1].astype(np.float64))
        ends, bases_s = _largest_finite(whole_s), _largest_finite(single[:, :, kinds:])
        extra_s = _largest_finite(tables.extra_s[..., tables.leaves : tables.leaves + self.times.most_batch])
        box = np.zeros(BOX_COLUMNS)
        box[:] = (1, 1, self.times.most_batch, 1, min(layers, gpus), 0.0, 0.0, 0.0, 0.0, math.inf)
        box[6], box[8] = ((ends[p] + bases_s[p] + extra_s[p]) * (1 + 1e-9) for p in range(2))
        return box


def _largest_finite(values: FloatArray) -> list[float]:
    """The largest finite value of each phase."""
    return [float(np.max(np.where(np.isfinite(rows), rows, 0.0))) for rows in values]


def _latency_floors(seconds: FloatArray, counts: IntArray, steps: float) -> FloatArray:
    """Least e2e, ttft and tpot of all layers, and of a middle, first, last and only stage beside them, by batch.

    Each layer and each stage is where it takes least: a request passes all of them.
    """
    layer_s, base_s = seconds[:, :, : len(counts)], seconds[:, :, len(counts) :]
    per_layer: list[FloatArray] = []
    per_base: list[FloatArray] = []
    for times, kept in ((layer_s, per_layer), (base_s, per_base)):
        whole, one = times[0] + times[1], times[0, ..., :1]
        with np.errstate(invalid="ignore"):
            rest = np.where(np.isfinite(whole), whole - one, np.inf)
        first = np.broadcast_to(one, whole.shape)
        if steps > 0:
            kept += [whole.min(axis=0), first.min(axis=0), rest.min(axis=0) / steps]
        else:
            kept += [whole.min(axis=0), whole.min(axis=0), np.zeros_like(whole).min(axis=0)]
    layers = np.einsum("mkb,k->mb", np.stack(per_layer), counts.astype(np.float64))
    roles = np.stack(per_base)
    middle = np.minimum(roles[:, MIDDLE_INSIDE], roles[:, MIDDLE_OUTSIDE])
    first_stage = np.minimum(roles[:, FIRST_INSIDE], roles[:, FIRST_OUTSIDE])
    return np.stack([layers, middle, first_stage, roles[:, LAST], roles[:, ONLY]], axis=1)
