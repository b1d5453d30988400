"""Helix's flow over machines: their rates, the program that places layers on them, the pipelines in its flow.

Symbols and departures are in `hetplan.solvers.placement.helix`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.solvers.highs import Milp, maximise
from hetplan.solvers.placement.chain import Chains, MachineSet
from hetplan.solvers.placement.tables import FIRST, LAST


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the flow: its pool, its groups, and requests/s by the number of layers held (0: cannot)."""

    pool: int
    degree: int
    groups: int
    rates: tuple[float, ...]

    @property
    def most(self) -> int:
        """Most layers it holds."""
        return max((k for k, rate in enumerate(self.rates) if rate > 0), default=0)


@dataclass(frozen=True, slots=True)
class Placed:
    """A node with the layers from ``start`` to ``end``."""

    node: Node
    start: int
    end: int

    @property
    def rate(self) -> float:
        """Requests/s that it can pass on."""
        return self.node.rates[self.end - self.start]


def nodes_of(chains: Chains, allowed: MachineSet, left: Sequence[int], weight_share: float) -> list[Node]:
    """The machines left of a set with their rates; those that hold no layer are left out."""
    nodes = []
    for pool in sorted(allowed.gpus):
        degree = max(allowed.degrees[pool])
        groups = allowed.gpus[pool] // degree
        node = Node(pool, degree, groups, _rates(chains, chains.option[pool, degree], groups, weight_share))
        nodes += [node] * left[pool] if node.most else []
    return nodes


def _rates(chains: Chains, option: int, groups: int, weight_share: float) -> tuple[float, ...]:
    """By the number of layers held; asked for in every round, and the same in each."""
    key = (option, groups, weight_share)
    if key not in chains.rates:
        chains.rates[key] = tuple(_rate(chains, option, groups, k, weight_share) for k in range(chains.layer_count + 1))
    return chains.rates[key]


def _rate(chains: Chains, option: int, groups: int, layers: int, weight_share: float) -> float:
    """Requests/s of a machine that holds some layers: those of its slowest group with its slowest run of layers."""
    if layers < groups:
        return 0.0
    t, own = chains.tables, -(-layers // groups)
    counts = np.unique(t.prefix[own:] - t.prefix[:-own], axis=0)
    if float((counts @ t.weight_bytes[option]).max()) > weight_share * t.room_bytes[option, 0]:
        return 0.0
    options, roles = np.full(len(counts), option), np.zeros(len(counts), dtype=np.int64)
    fit = float(chains.fitting(options, counts, roles).min())
    stages = -(-chains.layer_count // own)
    most = int(fit) // stages if chains.estimator.micro_batches else int(fit)
    batches = chains.grid[chains.grid <= most]
    if not batches.size:
        return 0.0
    seconds = np.einsum("pkb,nk->nb", t.layer_s[option][..., batches], counts).max(axis=0)
    alone, both = (t.end_s[option, role][:, batches].sum(axis=0) for role in (0, FIRST | LAST))
    seconds += alone + (both - alone) * own / chains.layer_count
    return float((batches / seconds).max())


def link_rate(chains: Chains, sender: int, receiver: int) -> float:
    """Requests/s that pass between machines of two pools."""
    t = chains.tables
    seconds = t.send_s[t.send_index[sender, receiver, 0]][:, chains.grid].sum(axis=0)
    return float((chains.grid / np.maximum(seconds, 1e-12)).max())


def even_placement(nodes: Sequence[Node], layer_count: int, *, whole: bool = False) -> list[Placed]:
    """Pipelines of like machines, as long as gives most requests/s; the rest in one line, each with its most layers.

    ``whole`` makes one pipeline of each type instead, where it holds the model.
    """
    placed: list[Placed] = []
    rest: list[Node] = []
    for node, count in Counter(nodes).items():
        ways = [(count // m * node.rates[-(-layer_count // m)], -m) for m in range(1, min(count, layer_count) + 1)]
        rate, length = ways[-1] if whole and ways[-1][0] > 0 else max(ways)
        used = count // -length * -length if rate > 0 else 0
        cuts = [layer_count * i // -length for i in range(-length + 1)]
        placed += [Placed(node, cuts[i % -length], cuts[i % -length + 1]) for i in range(used)]
        rest += [node] * (count - used)
    at = 0
    for node in rest if sum(node.most for node in rest) >= layer_count else ():
        if at < layer_count:
            held = min(node.most, layer_count - at)
            if node.rates[held] == 0:
                continue
            placed.append(Placed(node, at, at + held))
            at += held
    return placed


def place(
    chains: Chains,
    nodes: Sequence[Node],
    *,
    start: Sequence[Placed] = (),
    time_limit_s: float,
    max_nodes: int | None = None,
    seed: int = 0,
) -> tuple[float, list[Placed]]:
    """Helix's program: the flow, and the nodes that carry some; nothing where HiGHS finds no placement in time."""
    layers, many = chains.layer_count, range(len(nodes))
    milp = Milp()
    begin = [milp.column(0, layers, integer=True) for _ in nodes]
    hold = [{k: milp.column(0, 1, integer=True) for k, rate in enumerate(node.rates) if rate > 0} for node in nodes]
    inner = [(i, j) for i in many for j in many if i != j]
    source, sink = -1, len(nodes)
    edges = [*((source, i) for i in many), *((i, sink) for i in many), *inner]
    most = [max(node.rates) for node in nodes]
    capacity = {
        (i, j): min(
            *(most[n] for n in (i, j) if 0 <= n < sink),
            *([link_rate(chains, nodes[i].pool, nodes[j].pool)] if (i, j) in set(inner) else [math.inf]),
        )
        for i, j in edges
    }
    flow = {edge: milp.column(0, capacity[edge], gain=float(edge[0] == source)) for edge in edges}
    valid = {edge: milp.column(0, 1, integer=True) for edge in edges}
    for i in many:
        held = [(column, float(k)) for k, column in hold[i].items()]
        into = [(flow[edge], 1.0) for edge in edges if edge[1] == i]
        milp.row([(column, 1.0) for column in hold[i].values()], least=1, most=1)
        milp.row([(begin[i], 1.0), *held], most=layers)
        milp.row([*into, *((flow[edge], -1.0) for edge in edges if edge[0] == i)], least=0, most=0)
        milp.row([*into, *((column, -nodes[i].rates[k]) for k, column in hold[i].items())], most=0)
        milp.row([(begin[i], 1.0), (valid[source, i], layers)], most=layers)
        milp.row([(begin[i], 1.0), *held, (valid[i, sink], -layers)], least=0)
        if i + 1 < sink and nodes[i + 1] == nodes[i]:
            # Like machines are interchangeable: one order of them is enough.
            milp.row([(begin[i], 1.0), (begin[i + 1], -1.0)], most=0)
    for edge in edges:
        milp.row([(flow[edge], 1.0), (valid[edge], -capacity[edge])], most=0)
    for i, j in inner:
        gap = [(begin[i], 1.0), *((column, float(k)) for k, column in hold[i].items()), (begin[j], -1.0)]
        milp.row([*gap, (valid[i, j], layers)], most=layers)
        milp.row([*gap, (valid[i, j], -layers)], least=-layers)
    # No placement passes more layers a second than its machines do.
    rows = [max(k * rate for k, rate in enumerate(node.rates)) for node in nodes]
    milp.row([(flow[source, i], 1.0) for i in many], most=math.fsum(rows) / layers)
    found = maximise(
        milp, time_limit_s=time_limit_s, max_nodes=max_nodes, seed=seed, start=_start(nodes, start, begin, hold, valid)
    )
    if found.values is None or not found.objective:
        return 0.0, []
    values = found.values
    placed = []
    for i in many:
        if sum(values[flow[edge]] for edge in edges if edge[1] == i) > 1e-9:
            first = round(values[begin[i]])
            placed.append(Placed(nodes[i], first, first + max(hold[i], key=lambda k: values[hold[i][k]])))
    return found.objective, placed


def _start(
    nodes: Sequence[Node],
    placed: Sequence[Placed],
    begin: Sequence[int],
    hold: Sequence[dict[int, int]],
    valid: dict[tuple[int, int], int],
) -> dict[int, float]:
    """A placement as values of the integer columns; nodes without a place keep their fewest layers at the end."""
    waiting = sorted(placed, key=lambda one: one.start)
    spots: list[tuple[int, int]] = []
    layers = max((one.end for one in placed), default=0)
    for node in nodes:
        mine = next((one for one in waiting if one.node == node), None)
        if mine is not None:
            waiting.remove(mine)
            spots.append((mine.start, mine.end))
        else:
            spots.append((layers - min(k for k, rate in enumerate(node.rates) if rate > 0), layers))
    values: dict[int, float] = {}
    for i, (first, end) in enumerate(spots):
        values[begin[i]] = first
        values |= {column: float(k == end - first) for k, column in hold[i].items()}
    for (i, j), column in valid.items():
        before = 0 if i < 0 else spots[i][1]
        values[column] = float(before == (layers if j == len(nodes) else spots[j][0]))
    return values


def paths(chains: Chains, placed: Sequence[Placed]) -> list[list[Placed]]:
    """Disjoint chains of a placement from the first layer to the last, the widest first."""
    left = sorted(placed, key=lambda one: (one.start, one.end, one.node.pool))
    found: list[list[Placed]] = []
    while True:
        # Where a chain ends -> its width, its machines.
        reached: dict[int, list[tuple[float, list[int]]]] = {0: [(math.inf, [])]}
        for number, one in enumerate(left):
            ways = []
            for width, path in reached.get(one.start, []):
                link = link_rate(chains, left[path[-1]].node.pool, one.node.pool) if path else math.inf
                ways.append((min(width, link, one.rate), [*path, number]))
            if ways:
                reached.setdefault(one.end, []).append(max(ways, key=lambda way: way[0]))
        whole = reached.get(chains.layer_count, [])
        if not whole:
            return found
        _, path = max(whole, key=lambda way: way[0])
        found.append([left[i] for i in path])
        left = [one for i, one in enumerate(left) if i not in path]
