"""HexGen's pipeline of one group of machines: degrees by dynamic programming, layers by memory, then perturbed.

Symbols and departures are in `hetplan.solvers.placement.hexgen`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.estimator.base import FloatArray
from hetplan.solvers.placement.chain import Chains, Group, MachineSet
from hetplan.solvers.placement.tables import IntArray

# Layouts of a group whose layer split is perturbed.
_REFINED = 3
# Pipelines longer than this are tried only where a group has more machines.
_LONGEST = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """A group's pipeline: value, groups and cuts of its chain, the pool of each machine."""

    value: float
    groups: list[Group]
    cuts: IntArray
    pools: list[int]


def best_layout(
    chains: Chains,
    sets: Sequence[MachineSet],
    machines: Sequence[int],
    generator: np.random.Generator,
    perturbations: int,
) -> Layout | None:
    """The best pipeline of so many machines of each pool, all of them; None when there is none.

    It lies in one of the sets of pools that may stand together.
    """
    forward = [pool for pool, count in enumerate(machines) for _ in range(count)]
    best: Layout | None = None
    for allowed in sets:
        if not set(forward) <= allowed.gpus.keys() or len(forward) > chains.layer_count:
            continue
        found = []
        # The ends of a pipeline carry more than layers: either end may be the better one for the embedding or the head.
        for pools in (forward, forward[::-1])[: 2 if len(set(forward)) > 1 else 1]:
            for groups in _layouts(chains, allowed, pools):
                cuts = _proportional(chains, groups)
                found.append(Layout(chains.value(groups, cuts), groups, cuts, pools))
        found.sort(key=lambda one: -one.value)
        for one in found[:_REFINED]:
            refined = _perturbed(chains, one, generator, perturbations)
            if refined.value > (0.0 if best is None else best.value):
                best = refined
    return best


def _layouts(chains: Chains, allowed: MachineSet, pools: list[int]) -> Iterator[list[Group]]:
    """For each number of stages, the degrees of least slowest stage when layers follow memory."""
    splits = {pool: _splits(allowed.gpus[pool], allowed.degrees[pool]) for pool in set(pools)}
    most = sum(max(map(len, splits[pool])) for pool in pools)
    longest = min(most, chains.layer_count, max(_LONGEST, len(pools)))
    seconds = _seconds_by_stages(
        chains, {(pool, d) for pool in splits for s in splits[pool] for d in s}, pools, longest
    )
    for stages in range(len(pools), longest + 1):
        # Stages so far -> slowest of them, and the split of each machine so far.
        reached: dict[int, tuple[float, list[tuple[int, ...]]]] = {0: (0.0, [])}
        for number, pool in enumerate(pools):
            following: dict[int, tuple[float, list[tuple[int, ...]]]] = {}
            for before, (slowest, path) in reached.items():
                for split in splits[pool]:
                    after = before + len(split)
                    if after + len(pools) - number - 1 > stages:
                        continue
                    here = max(slowest, *(float(seconds[pool, degree][stages]) for degree in split))
                    if after not in following or here < following[after][0]:
                        following[after] = (here, [*path, split])
            reached = following
        if stages in reached:
            yield [
                Group(chains.option[pool, degree], node)
                for node, (pool, split) in enumerate(zip(pools, reached[stages][1], strict=True))
                for degree in split
            ]


def _splits(gpus: int, degrees: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Ways to cut a machine into groups that leave as few GPUs idle as possible."""
    ways: list[tuple[int, ...]] = [()]
    done = []
    while ways:
        way = ways.pop()
        wider = [(*way, d) for d in degrees if sum(way) + d <= gpus and (not way or d <= way[-1])]
        ways += wider
        done.append(way)
    used = max(map(sum, done))
    return sorted(way for way in done if way and sum(way) == used)


def _seconds_by_stages(
    chains: Chains, used: set[tuple[int, int]], pools: list[int], longest: int
) -> dict[tuple[int, int], FloatArray]:
    """(pool, degree) -> (stages + 1,) seconds per request of a group whose share of layers is its share of memory."""
    t, kinds = chains.tables, np.asarray(chains.problem.model.kind_counts, dtype=np.float64)
    largest = {pool: max(degree for p, degree in used if p == pool) for pool in set(pools)}
    whole = {pool: chains.problem.cluster.pools[pool].offer.instance_type for pool in largest}
    memory = math.fsum(
        t.room_bytes[chains.option[pool, largest[pool]], 0]
        * chains.problem.cluster.instance_type(whole[pool]).gpu_count
        for pool in pools
    )
    result = {}
    for pool, degree in sorted(used):
        option = chains.option[pool, degree]
        counts = kinds * (t.room_bytes[option, 0] * degree / memory)
        both = np.einsum("pkb,k->b", t.layer_s[option][..., chains.grid], counts) + t.end_s[option, 0][
            :, chains.grid
        ].sum(axis=0)
        least = np.minimum.accumulate(both / chains.grid)
        fit = float(chains.fitting(np.array([option]), counts[np.newaxis], np.array([0]))[0])
        each = [1.0, *(fit / s if chains.estimator.micro_batches else fit for s in range(1, longest + 1))]
        # A share that is a little too small by this estimate is still tried.
        at = np.searchsorted(chains.grid, np.maximum(each, 1.0), side="right") - 1
        result[pool, degree] = least[at]
    return result


def _proportional(chains: Chains, groups: list[Group]) -> IntArray:
    """Cuts that share out the bytes of the layers as the groups share the memory; at least one layer each."""
    t, layers, stages = chains.tables, chains.layer_count, len(groups)
    options = np.array([group.option for group in groups])
    degrees = np.array([t.options[o].degree for o in options.tolist()])
    memory = np.maximum(t.room_bytes[options, 0], 1) * degrees
    shares = np.cumsum(memory) / memory.sum()
    each = t.weight_bytes[options[0]] + t.longest_bytes[options[0]]
    held = t.prefix @ each
    cuts = np.searchsorted(held / held[-1], shares[:-1] - 1e-12)
    at = np.arange(1, stages)
    cuts = np.maximum.accumulate(np.maximum(cuts, at) - at) + at
    cuts = np.minimum(cuts, layers - stages + at)
    return np.array([0, *cuts.tolist(), layers], dtype=np.int64)


def _perturbed(chains: Chains, layout: Layout, generator: np.random.Generator, perturbations: int) -> Layout:
    """Move single layers between random stages while that is no worse."""
    stages, value, sizes = len(layout.groups), layout.value, np.diff(layout.cuts)
    if stages == 1:
        return layout
    for donor, step in generator.integers([0, 1], [stages, stages], size=(perturbations, 2)).tolist():
        if sizes[donor] == 1:
            continue
        moved = sizes.copy()
        moved[donor] -= 1
        moved[(donor + step) % stages] += 1
        here = chains.value(layout.groups, np.concatenate([[0], np.cumsum(moved)]))
        if here >= value:
            value, sizes = here, moved
    return Layout(value, layout.groups, np.concatenate([[0], np.cumsum(sizes)]), layout.pools)
