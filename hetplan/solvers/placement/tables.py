"""The estimator as arrays: what a search loop reads instead of calling it.

An option is a way to use part of a machine: (pool, tensor-parallel degree). For each option the
tables hold seconds per layer kind and per stage end at each batch, and memory per layer kind and
per end. They are exact: a stage's time and memory add over its layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.catalog.hardware import InstanceType
from hetplan.estimator.base import PHASES, Estimator, FloatArray
from hetplan.problem.placement import PlacementProblem

IntArray = NDArray[np.int64]

# Stage ends as bits: role 0 in the middle, 1 first, 2 last, 3 both.
FIRST, LAST = 1, 2
_ROLES = range(4)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to use GPUs of a pool's machines: ``degree`` of them as one tensor-parallel group."""

    pool: int
    machine: InstanceType
    degree: int


@dataclass(frozen=True, slots=True)
class StageTables:
    """Everything a search needs, indexed by option (O), kind (K), role (4), phase (2) and batch (0..B).

    Attributes
    ----------
    prefix : (N + 1, K) int
        Layers of each kind before each layer, so that a range is a difference.
    layer_s : (O, 2, K, B + 1) float
        Seconds of one layer; batch 0 is unused.
    end_s : (O, 4, 2, B + 1) float
        Seconds of a stage apart from its layers.
    send_s : (sends, 2, B + 1) float
        Seconds of a boundary; ``send_index[sender pool, receiver pool, same node]`` finds the row. Infinite where a
        pipeline may not go from one to the other.
    room_bytes : (O, 4) int
        Memory of one GPU left for layers and KV cache.
    weight_bytes : (O, K) int
        Of one layer, with its part of what is kept for a second engine.
    sequence_bytes, longest_bytes : (O, K) float
        Per layer, of a typical sequence in flight and of the longest that must fit.
    end_sequence_bytes : (O, 4) float
        Of a typical sequence, beside the layers.
    batch_limit : (O,) int
        Most sequences in flight.
    """

    options: tuple[Option, ...]
    prefix: IntArray
    layer_s: FloatArray
    end_s: FloatArray
    send_s: FloatArray
    send_index: IntArray
    room_bytes: IntArray
    weight_bytes: IntArray
    sequence_bytes: FloatArray
    longest_bytes: FloatArray
    end_sequence_bytes: FloatArray
    batch_limit: IntArray

    @property
    def max_batch(self) -> int:
        return int(self.layer_s.shape[-1]) - 1


def stage_options(problem: PlacementProblem, pools: list[int], *, whole_nodes: bool) -> list[Option]:
    """The options of some pools: all valid degrees, or the whole node as one group only."""
    options = []
    for pool in pools:
        machine = problem.cluster.instance_type(problem.cluster.pools[pool].offer.instance_type)
        degrees = machine.valid_tensor_parallel(problem.model)
        if whole_nodes:
            degrees = [d for d in degrees if d == machine.gpu_count]
        options += [Option(pool, machine, degree) for degree in degrees]
    return options


def build_tables(
    problem: PlacementProblem, estimator: Estimator, options: list[Option], *, egress: bool = True
) -> StageTables:
    """Read the estimator into tables. O(options x kinds) estimator calls, each over all batches at once.

    Without ``egress`` no pipeline may send over a zone link that costs something.
    """
    model, work = problem.model, problem.workload
    kinds = range(len(model.layer_kinds))
    sample = [model.layer_pattern.index(k) if k in model.layer_pattern else 0 for k in kinds]
    count, kind_count = len(options), len(model.layer_kinds)
    typical = work.mean_input_tokens + work.mean_output_tokens
    longest = float(problem.longest_request_tokens)

    room = np.zeros((count, 4), dtype=np.int64)
    weights = np.zeros((count, kind_count), dtype=np.int64)
    sequence = np.zeros((count, kind_count))
    longest_bytes = np.zeros((count, kind_count))
    end_sequence = np.zeros((count, 4))
    limit = np.zeros(count, dtype=np.int64)
    for o, option in enumerate(options):
        limit[o] = estimator.batch_limit(option.machine)
        for role in _ROLES:
            first, last = bool(role & FIRST), bool(role & LAST)
            memory = estimator.stage_memory(
                model, option.machine, layers=(0, 0), tensor_parallel=option.degree, first=first, last=last
            )
            room[o, role] = memory.kv_cache_bytes
            end_sequence[o, role] = _sequence(problem, estimator, option, (0, 0), typical, last=last)
        empty = estimator.stage_memory(
            model, option.machine, layers=(0, 0), tensor_parallel=option.degree, first=False, last=False
        )
        longest_base = _sequence(problem, estimator, option, (0, 0), longest, last=False)
        for k in kinds:
            one = (sample[k], sample[k] + 1)
            held = estimator.stage_memory(
                model, option.machine, layers=one, tensor_parallel=option.degree, first=False, last=False
            )
            weights[o, k] = empty.kv_cache_bytes - held.kv_cache_bytes
            sequence[o, k] = _sequence(problem, estimator, option, one, typical, last=False) - end_sequence[o, 0]
            longest_bytes[o, k] = _sequence(problem, estimator, option, one, longest, last=False) - longest_base

    batches = _batch_axis(problem, options, room, weights, sequence, end_sequence, limit)
    layer_s = np.full((count, 2, kind_count, batches + 1), np.inf)
    end_s = np.full((count, 4, 2, batches + 1), np.inf)
    axis = np.arange(1, batches + 1, dtype=np.float64)
    tokens = (work.mean_prefill_tokens, work.mean_input_tokens)
    for o, option in enumerate(options):
        for p, phase in enumerate(PHASES):
            ends = []
            for role in _ROLES:
                seconds = estimator.stage_seconds(
                    model,
                    option.machine,
                    layers=[(0, 0)] if role else [(0, 0), *((s, s + 1) for s in sample)],
                    tensor_parallel=option.degree,
                    batch=axis,
                    input_tokens=tokens[p],
                    output_tokens=work.mean_output_tokens,
                    first=bool(role & FIRST),
                    last=bool(role & LAST),
                    phase=phase,
                )
                ends.append(seconds[0])
                end_s[o, role, p, 1:] = seconds[0]
                if role == 0:
                    layer_s[o, p, :, 1:] = seconds[1:] - seconds[0]
    send_s, send_index = _send_tables(problem, estimator, options, axis, egress=egress)
    prefix = np.array(model.kind_prefix, dtype=np.int64)
    return StageTables(
        options=tuple(options),
        prefix=prefix,
        layer_s=layer_s,
        end_s=end_s,
        send_s=send_s,
        send_index=send_index,
        room_bytes=room,
        weight_bytes=weights,
        sequence_bytes=sequence,
        longest_bytes=longest_bytes,
        end_sequence_bytes=end_sequence,
        batch_limit=limit,
    )


def _sequence(
    problem: PlacementProblem,
    estimator: Estimator,
    option: Option,
    layers: tuple[int, int],
    tokens: float,
    *,
    last: bool,
) -> float:
    return estimator.sequence_bytes(
        problem.model,
        option.machine,
        layers=layers,
        tensor_parallel=option.degree,
        tokens=tokens,
        input_tokens=problem.workload.mean_prefill_tokens,
        last=last,
    )


def _batch_axis(
    problem: PlacementProblem,
    options: list[Option],
    room: IntArray,
    weights: IntArray,
    sequence: FloatArray,
    end_sequence: FloatArray,
    limit: IntArray,
) -> int:
    """A batch that no pipeline exceeds; at least one, so that tables are never empty.

    A stage holds no more than with one layer alone, and a pipeline of all layers no more than all machines together.
    """
    if not options:
        return 1
    smallest = np.maximum(sequence.min(axis=1) + end_sequence.min(axis=1), 1.0)
    largest = (room.max(axis=1) - weights.min(axis=1)) / smallest
    most = float(np.minimum(np.maximum(largest, 0), limit).max())
    degrees = np.array([option.degree for option in options])[:, np.newaxis]
    counts = np.asarray(problem.model.kind_counts)
    per_sequence = float((sequence * degrees).min(axis=0) @ counts)
    if per_sequence > 0:
        all_weights = float((weights * degrees).min(axis=0) @ counts)
        all_room = 0.0
        for pool in {option.pool for option in options}:
            mine = [o for o, option in enumerate(options) if option.pool == pool]
            gpus = problem.cluster.pools[pool].count * options[mine[0]].machine.gpu_count
            all_room += gpus * max(int(room[mine].max()), 0)
        most = min(most, (all_room - all_weights) / per_sequence)
    return max(1, int(most))


def _send_tables(
    problem: PlacementProblem, estimator: Estimator, options: list[Option], axis: FloatArray, *, egress: bool
) -> tuple[FloatArray, IntArray]:
    """Boundary seconds for each pair of pools, and inside a node of each pool with several GPUs."""
    machines, cluster = {option.pool: option.machine for option in options}, problem.cluster
    offers, pools = [pool.offer for pool in cluster.pools], len(cluster.pools)
    index = np.full((pools, pools, 2), -1, dtype=np.int64)
    rows: list[FloatArray] = []
    seen: dict[tuple[object, ...], int] = {}
    # Pairs whose links are alike share a row: found by their value at the ends of the axis, then compared whole.
    alike: dict[tuple[float, ...], list[int]] = {}
    work = problem.workload
    tokens = (work.mean_prefill_tokens, work.mean_input_tokens)
    for a, sender in machines.items():
        for b, receiver in machines.items():
            crossed = cluster.zone_link(offers[a].place, offers[b].place)
            barred = not cluster.may_follow(offers[a], offers[b])
            if crossed is not None and crossed.egress_usd_per_gb > 0:
                barred = barred or not egress
            for same_node in (False, True):
                if same_node and (a != b or sender.gpu_count == 1):
                    continue
                between = None if crossed is None else crossed.link
                key = (same_node, sender.name, receiver.name, barred, between)
                if key not in seen:
                    row = np.full((2, axis.size + 1), np.inf)
                    for p, phase in enumerate(() if barred else PHASES):
                        row[p, 1:] = estimator.boundary_seconds(
                            problem.model,
                            sender,
                            receiver,
                            same_node=same_node,
                            batch=axis,
                            input_tokens=tokens[p],
                            output_tokens=work.mean_output_tokens,
                            phase=phase,
                            between=between,
                        )
                    same = alike.setdefault((*row[:, 1].tolist(), *row[:, -1].tolist()), [])
                    at = next((r for r in same if np.array_equal(rows[r], row)), len(rows))
                    if at == len(rows):
                        rows.append(row)
                        same.append(at)
                    seen[key] = at
                index[a, b, int(same_node)] = seen[key]
    stacked = np.stack(rows) if rows else np.zeros((1, 2, axis.size + 1))
    return stacked, index
