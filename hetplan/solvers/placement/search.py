"""The best pipeline on given machines within limits on latency, by branch and bound over batches and stages.

A box holds the pipelines of micro-batches b in [b1, b2] and of at most D stages, D in [D1, D2]. Stages are placed one
after another: what is left to place is a state (layers placed, machines opened, GPUs left on the last one, stages
left). From each state, dynamic programming finds the least that the rest of a pipeline takes: of its slowest prefill,
of its slowest decode, of the slowest of both together, and of each sum that a limit is on. What the first stage takes
at least bounds the box, as does the value to beat: no stage takes longer than one request in that time allows, less
the penalty for sums that none goes below.

A box of one b and one D is searched for good: labels hold what the stages so far take, a label that is nowhere better
than another in its state is dropped, and so is one that cannot beat the best with the least that the rest takes.

In paper mode, where a request waits for the slowest stages alone, nothing is summed and stages are not counted.

Nothing is assumed of how times depend on the batch: over an interval the least of each table entry counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from hetplan.estimator.base import Estimator, FloatArray
from hetplan.estimator.pipeline import StageShape, pipeline_rates
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.placement.choice import LIMIT_TOLERANCE, value_of
from hetplan.solvers.placement.tables import FIRST, LAST, IntArray, StageTables
from hetplan.workload.requests import Slo

# Values this close are the same: sums in another order differ in their last digits.
_SAME = 1e-11
_SAME_SUM = 1e-13
_NO_CAP_S = 1e300
# Boxes that are bounded this closely are searched whole, if few labels do; others are split.
_CLOSE = 1.03
_FEW_LABELS = 20_000
# States held in memory at once: about 1 GB with one limit.
_MOST_STATES = 3 * 10**7


@dataclass(frozen=True, slots=True)
class Found:
    """A pipeline, or none.

    Attributes
    ----------
    value : float
        Requests/s after the penalty; 0 without a pipeline.
    stages : tuple of (int, int, int, int)
        Option of the tables, first layer, end layer and machine (its place in ``pools``) of each stage; empty where no
        pipeline is worth more than asked.
    micro_batch : int
        0 without a pipeline.
    complete : bool
        Whether no pipeline on these machines is worth more: than this one or, without one, than asked.
    """

    value: float
    stages: tuple[tuple[int, int, int, int], ...]
    micro_batch: int
    complete: bool


def best_under_limits(
    problem: PlacementProblem,
    tables: StageTables,
    estimator: Estimator,
    pools: tuple[int, ...],
    gpus: Mapping[int, int],
    fixed_stages: Mapping[int, int],
    options: Mapping[int, Sequence[int]],
    *,
    at_least: float,
    most_labels: int,
) -> Found:
    """The pipeline of highest value on some machines, at its best batch, of a problem with latency limits.

    Parameters
    ----------
    problem : PlacementProblem
        With an ``slo``.
    tables : StageTables
        Of the problem and ``estimator``.
    pools : tuple of int
        Pool of each machine. Some machines may stay out.
    gpus : mapping of int to int
        By pool, the GPUs that a machine grants.
    fixed_stages : mapping of int to int
        By pool, the stages that each machine in use must have, which then fill all GPUs granted; 0 leaves it free.
    options : mapping of int to sequence of int
        By pool, the options of ``tables`` that it may use.
    at_least : float
        Values up to this are of no interest; not negative.
    most_labels : int
        States and labels that are looked at before the search ends as it stands.

    Returns
    -------
    Found
        Without stages when no pipeline is worth more than ``at_least``, or none was found.

    Raises
    ------
    ValueError
        If the problem has no limits, or ``at_least`` is negative.
    """
    if problem.slo is None:
        raise ValueError("the problem has no slo; without one the slowest stages alone decide: use best_rate")
    if at_least < 0:
        raise ValueError(f"at_least must be 0 or more, got {at_least}")
    search = _Search(problem, problem.slo, tables, estimator, pools, gpus, fixed_stages, options)
    return search.run(at_least, most_labels)


class _Space(NamedTuple):
    """Where stages may stand. Machines that are alike form a group; G groups, U sets of opened machines, V slots.

    A slot is a machine of a group with some GPUs left (and stages left to fix); a move places a stage there.
    """

    counts: IntArray  # (G,) machines
    stride: IntArray  # (G,): opening a machine adds this to the set's number
    opened: IntArray  # (U, G)
    machines: IntArray  # (U,): their sum
    slot_group: IntArray  # (V,)
    fresh_slot: IntArray  # (G,)
    first_move: IntArray  # (V + 1,)
    moves: IntArray  # (moves, 3): option, slot of a next stage on the machine or -1, whether the machine may be left
    send_row: IntArray  # (G, G + 1): to a machine of each group; last, to the same machine


class _Worth(NamedTuple):
    """How the value follows from what a pipeline takes."""

    hard: bool
    penalty: float
    from_slowest: FloatArray  # (3,): excess per second of the slowest prefill, decode, and of both; else of sums
    micro_batches: bool


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _worth(how: _Worth, batch: int, x: float, y: float, both: float, worst: float) -> float:
    """Requests/s less the penalty; -1 beyond a hard limit. ``worst``: the largest of the sums, each over its limit."""
    if not how.micro_batches:
        worst = how.from_slowest[0] * x
        worst = batch * max(worst, how.from_slowest[1] * y, how.from_slowest[2] * both)
    if how.hard:
        return -1.0 if worst - 1.0 > LIMIT_TOLERANCE else 1.0 / both
    return (1.0 - how.penalty * max(worst - 1.0, 0.0)) / both


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _least_left(
    space: _Space, stage: FloatArray, send: FloatArray, depth: int, step: int, cap: float, least: FloatArray
) -> int:
    """Fill ``least`` (N + 1, U, V, depth + 1, C + 1): what the rest of a pipeline takes at least, from each state.

    ``stage`` (O, N + 1, N + 1, C) and ``send`` (rows, C) hold prefill, decode, then what is summed; infinite where a
    stage does not fit. The last column of ``least`` is of prefill and decode together. Stages take ``cap`` at most.
    """
    layers, width, groups = stage.shape[1] - 1, send.shape[1], space.counts.size
    least[:] = np.inf
    cost = np.empty(width)
    states = 0
    for start in range(layers - 1, -1, -1):
        for u in range(1, space.machines.size):
            before = space.machines[u] - 1
            most = depth - before * step
            if before > start or (start == 0 and before > 0) or most < 1:
                continue
            for slot in range(space.slot_group.size):
                group = space.slot_group[slot]
                if space.opened[u, group] == 0 or (start == 0 and slot != space.fresh_slot[group]):
                    continue
                states += most
                mine = least[start, u, slot]
                for move in range(space.first_move[slot], space.first_move[slot + 1]):
                    option, inside, leaves = space.moves[move, 0], space.moves[move, 1], space.moves[move, 2]
                    if leaves and stage[option, start, layers, 0] + stage[option, start, layers, 1] <= cap:
                        last = stage[option, start, layers]
                        for r in range(1, most + 1):
                            for c in range(width):
                                mine[r, c] = min(mine[r, c], last[c])
                            mine[r, width] = min(mine[r, width], last[0] + last[1])
                    for stop in range(start + 1, layers):
                        base = stage[option, start, stop]
                        # More layers take no less.
                        if not base[0] + base[1] <= cap:
                            break
                        for to in range(groups + 1):
                            if to == groups:
                                if inside < 0:
                                    continue
                                theirs = least[stop, u, inside]
                            else:
                                if not leaves or space.opened[u, to] == space.counts[to]:
                                    continue
                                theirs = least[stop, u + space.stride[to], space.fresh_slot[to]]
                            # More stages left take no more.
                            if most - step < 1 or theirs[most - step, 0] == np.inf:
                                continue
                            row = space.send_row[group, to]
                            for c in range(width):
                                cost[c] = base[c] + send[row, c]
                            both = cost[0] + cost[1]
                            if not both <= cap:
                                continue
                            for r in range(1 + step, most + 1):
                                rest = theirs[r - step]
                                if rest[0] == np.inf:
                                    continue
                                mine[r, 0] = min(mine[r, 0], max(cost[0], rest[0]))
                                mine[r, 1] = min(mine[r, 1], max(cost[1], rest[1]))
                                for c in range(2, width):
                                    mine[r, c] = min(mine[r, c], cost[c] + rest[c])
                                mine[r, width] = min(mine[r, width], max(both, rest[width]))
    return states


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _walk(
    space: _Space,
    stage: FloatArray,
    send: FloatArray,
    depth: int,
    step: int,
    cap: float,
    least: FloatArray,
    group: int,
    column: int,
) -> IntArray:
    """A pipeline that begins on a group and takes the least of a column from 2 on: as `_Search._assess` reads it."""
    layers, width, groups = stage.shape[1] - 1, send.shape[1], space.counts.size
    path = np.zeros((layers, 4), np.int64)
    u, slot, start, r, placed = space.stride[group], space.fresh_slot[group], 0, depth, 0
    while start < layers:
        group = space.slot_group[slot]
        fewest = np.inf
        to_u = to_slot = to_stop = to_option = -1
        for move in range(space.first_move[slot], space.first_move[slot + 1]):
            option, inside, leaves = space.moves[move, 0], space.moves[move, 1], space.moves[move, 2]
            for stop in range(start + 1, layers + 1):
                for to in range(groups + 1):
                    x, y = stage[option, start, stop, 0], stage[option, start, stop, 1]
                    amount = stage[option, start, stop, column] if column < width else 0.0
                    next_u, next_slot, rest = u, slot, 0.0
                    if stop < layers:
                        if r - step < 1:
                            continue
                        if to == groups:
                            if inside < 0:
                                continue
                            next_slot = inside
                        else:
                            if not leaves or space.opened[u, to] == space.counts[to]:
                                continue
                            next_u, next_slot = u + space.stride[to], space.fresh_slot[to]
                        row = space.send_row[group, to]
                        x += send[row, 0]
                        y += send[row, 1]
                        if column < width:
                            amount += send[row, column]
                        rest = least[stop, next_u, next_slot, r - step, column]
                    elif not leaves or to < groups:
                        continue
                    if not x + y <= cap:
                        continue
                    amount = amount + rest if column < width else max(x + y, rest)
                    if amount < fewest:
                        fewest, to_u, to_slot, to_stop, to_option = amount, next_u, next_slot, stop, option
        if to_option < 0:
            return path[:0]
        # A machine is opened by the stage that stands on a fresh slot.
        where = group + groups if slot == space.fresh_slot[group] else group
        path[placed, 0], path[placed, 1], path[placed, 2], path[placed, 3] = to_option, start, to_stop, where
        u, slot, start, r, placed = to_u, to_slot, to_stop, r - step, placed + 1
    return path[:placed]


@njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _search_labels(
    space: _Space,
    how: _Worth,
    stage: FloatArray,
    send: FloatArray,
    batch: int,
    depth: int,
    step: int,
    cap: float,
    least: FloatArray,
    at_least: float,
    most_labels: int,
) -> tuple[float, IntArray, int, bool]:
    """The pipeline of highest worth above ``at_least``: its worth and path, labels made, and whether all were."""
    layers, width, groups = stage.shape[1] - 1, send.shape[1], space.counts.size
    sets, slots = space.machines.size, space.slot_group.size
    size = 1024
    taken = np.empty((size, width))
    # Of each label its parent, the option of the stage before it, its slot, layer, stages left; the next of its state.
    made = np.empty((size, 6), np.int64)
    head = np.empty((layers, sets, slots), np.int64)
    head[:] = -1
    count = 0
    best, best_label, best_option = at_least, -1, -1
    for group in range(groups):
        slot = space.fresh_slot[group]
        taken[count] = 0.0
        made[count, 0], made[count, 1], made[count, 2] = -1, -1, slot
        made[count, 3], made[count, 4], made[count, 5] = 0, depth, -1
        head[0, space.stride[group], slot] = count
        count += 1
    new = np.empty(width)
    for start in range(layers):
        for u in range(1, sets):
            if space.machines[u] - 1 > start:
                continue
            for slot in range(slots):
                label = head[start, u, slot]
                group = space.slot_group[slot]
                while label >= 0:
                    left = made[label, 4]
                    mine = taken[label]
                    bound = least[start, u, slot, left]
                    x, y = max(mine[0], bound[0]), max(mine[1], bound[1])
                    worst = 0.0
                    for c in range(2, width):
                        worst = max(worst, mine[c] + bound[c])
                    if _worth(how, batch, x, y, max(x + y, bound[width]), worst) <= best * (1.0 + _SAME):
                        label = made[label, 5]
                        continue
                    for move in range(space.first_move[slot], space.first_move[slot + 1]):
                        option, inside, leaves = space.moves[move, 0], space.moves[move, 1], space.moves[move, 2]
                        last = stage[option, start, layers]
                        if leaves and last[0] + last[1] <= cap:
                            x, y = max(mine[0], last[0]), max(mine[1], last[1])
                            worst = 0.0
                            for c in range(2, width):
                                worst = max(worst, mine[c] + last[c])
                            value = _worth(how, batch, x, y, x + y, worst)
                            if value > best * (1.0 + _SAME):
                                best, best_label, best_option = value, label, option
                        if left - step < 1:
                            continue
                        for stop in range(start + 1, layers):
                            base = stage[option, start, stop]
                            if not base[0] + base[1] <= cap:
                                break
                            for to in range(groups + 1):
                                next_u, next_slot = u, inside
                                if to == groups:
                                    if inside < 0:
                                        continue
                                else:
                                    if not leaves or space.opened[u, to] == space.counts[to]:
                                        continue
                                    next_u, next_slot = u + space.stride[to], space.fresh_slot[to]
                                row = space.send_row[group, to]
                                bound = least[stop, next_u, next_slot, left - step]
                                new[0] = max(mine[0], base[0] + send[row, 0])
                                new[1] = max(mine[1], base[1] + send[row, 1])
                                x, y = max(new[0], bound[0]), max(new[1], bound[1])
                                if x == np.inf:
                                    continue
                                worst = 0.0
                                for c in range(2, width):
                                    new[c] = mine[c] + base[c] + send[row, c]
                                    worst = max(worst, new[c] + bound[c])
                                both = max(x + y, bound[width])
                                if _worth(how, batch, x, y, both, worst) <= best * (1.0 + _SAME):
                                    continue
                                # Is it nowhere better than another; which are nowhere better than it?
                                dominated = False
                                other, previous = head[stop, next_u, next_slot], -1
                                while other >= 0:
                                    theirs = taken[other]
                                    no_worse = made[other, 4] >= left - step
                                    no_better = made[other, 4] <= left - step
                                    for c in range(width):
                                        no_worse = no_worse and theirs[c] <= new[c] * (1.0 + _SAME_SUM)
                                        no_better = no_better and theirs[c] >= new[c]
                                    if no_worse:
                                        dominated = True
                                        break
                                    if no_better:
                                        if previous < 0:
                                            head[stop, next_u, next_slot] = made[other, 5]
                                        else:
                                            made[previous, 5] = made[other, 5]
                                    else:
                                        previous = other
                                    other = made[other, 5]
                                if dominated:
                                    continue
                                if count == most_labels:
                                    return best, np.empty((0, 4), np.int64), count, False
                                if count == size:
                                    taken, made = np.concatenate((taken, taken)), np.concatenate((made, made))
                                    size *= 2
                                for c in range(width):
                                    taken[count, c] = new[c]
                                made[count, 0], made[count, 1], made[count, 2] = label, option, next_slot
                                made[count, 3], made[count, 4] = stop, left - step
                                made[count, 5] = head[stop, next_u, next_slot]
                                head[stop, next_u, next_slot] = count
                                count += 1
                    label = made[label, 5]
    path = np.zeros((layers, 4), np.int64)
    label, option, stop, at = best_label, best_option, layers, layers
    while label >= 0:
        at -= 1
        slot, start = made[label, 2], made[label, 3]
        group = space.slot_group[slot]
        where = group + groups if slot == space.fresh_slot[group] else group
        path[at, 0], path[at, 1], path[at, 2], path[at, 3] = option, start, stop, where
        option, stop, label = made[label, 1], start, made[label, 0]
    return best, path[at:], count, True


@dataclass(frozen=True, slots=True)
class _Box:
    """Micro-batches and most stages of pipelines; the penalty leaves them ``share`` of their rate at most."""

    batches: tuple[int, int]
    stages: tuple[int, int]
    share: float

    @property
    def single(self) -> bool:
        return self.batches[0] == self.batches[1] and self.stages[0] == self.stages[1]

    def halves(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Batches and stages of the two halves, split where the box is widest."""
        (b1, b2), (d1, d2) = self.batches, self.stages
        if b2 * d1 >= d2 * b1:
            middle = int((b1 * b2) ** 0.5)
            return [((b1, middle), self.stages), ((middle + 1, b2), self.stages)]
        middle = (d1 + d2) // 2
        return [(self.batches, (d1, middle)), (self.batches, (middle + 1, d2))]


class _Search:
    """One search: its tables, the best pipeline so far, and how much was looked at."""

    def __init__(
        self,
        problem: PlacementProblem,
        slo: Slo,
        tables: StageTables,
        estimator: Estimator,
        pools: tuple[int, ...],
        gpus: Mapping[int, int],
        fixed_stages: Mapping[int, int],
        options: Mapping[int, Sequence[int]],
    ) -> None:
        self.problem, self.tables, self.estimator, self.pools = problem, tables, estimator, pools
        self.micro_batches = estimator.micro_batches
        # Machines of one type that grant the same are alike, whatever they cost and, but for links between places,
        # wherever they stand.
        alike: dict[tuple[str, int, int, tuple[int, ...], str], list[int]] = {}
        cluster = problem.cluster
        for machine, pool in enumerate(pools):
            degrees = tuple(sorted({tables.options[o].degree for o in options[pool]} & set(range(gpus[pool] + 1))))
            if degrees:
                name = tables.options[options[pool][0]].machine.name
                place = cluster.pools[pool].offer.place if cluster.zone_links else ""
                alike.setdefault((name, gpus[pool], fixed_stages[pool], degrees, place), []).append(machine)
        self.groups = list(alike.values())
        self.option_of = {(pool, tables.options[o].degree): o for pool in set(pools) for o in options[pool]}
        self.used: list[int] = []
        most_stages = self._lay_out([(key[1], key[2], key[3]) for key in alike])
        self.most_stages = min(most_stages, problem.model.layer_count) if self.micro_batches else min(most_stages, 1)
        self.best, self.path, self.batch, self.looked_at = 0.0, np.empty((0, 4), np.int64), 0, 0
        if self.used:
            self._read_seconds(slo)
            self._count_sequences()

    # ---- tables

    def _lay_out(self, kinds: list[tuple[int, int, tuple[int, ...]]]) -> int:
        """Make the slots and moves of groups of (GPUs, stages to have, degrees). Returns the most stages of all."""
        # Each machine in use holds a layer at least.
        counts = [min(len(machines), len(self.tables.prefix) - 1) for machines in self.groups]
        self.sets = int(np.prod([count + 1 for count in counts], dtype=np.float64))
        slot_group: list[int] = []
        fresh, first_move, moves, most_stages = [], [0], [], 0
        for group, (gpus, fixed, degrees) in enumerate(kinds):
            first_option = len(self.used)
            self.used += [self.option_of[self._pool_of(group), degree] for degree in degrees]
            # GPUs left, stages placed (where their number matters).
            slots = [(gpus, 0)]
            base = len(slot_group)
            fresh.append(base)
            for left, placed in slots:
                slot_group.append(group)
                for number, degree in enumerate(degrees):
                    after = (left - degree, placed + 1 if fixed else 0)
                    if after[0] < 0:
                        continue
                    inside = after[0] >= degrees[0] and (not fixed or after[1] < fixed)
                    leaves = not fixed or after == (0, fixed)
                    if inside and after not in slots:
                        slots.append(after)
                    moves.append((first_option + number, base + slots.index(after) if inside else -1, int(leaves)))
                first_move.append(len(moves))
            most_stages += counts[group] * (fixed or gpus // degrees[0])
        self._layout = (counts, slot_group, fresh, first_move, moves)
        return most_stages

    def _pool_of(self, group: int) -> int:
        return self.pools[self.groups[group][0]]

    def _make_space(self) -> _Space:
        counts, slot_group, fresh, first_move, moves = self._layout
        stride = np.cumprod([1, *(count + 1 for count in counts[:-1])])
        opened = np.arange(self.sets)[:, np.newaxis] // stride % (np.array(counts) + 1)
        pools = [self._pool_of(group) for group in range(len(counts))]
        rows = np.empty((len(pools), len(pools) + 1), dtype=np.int64)
        rows[:, :-1] = self.tables.send_index[np.ix_(pools, pools)][..., 0]
        rows[:, -1] = self.tables.send_index[pools, pools, 1]
        return _Space(
            counts=np.array(counts),
            stride=stride,
            opened=opened,
            machines=opened.sum(axis=1),
            slot_group=np.array(slot_group),
            fresh_slot=np.array(fresh),
            first_move=np.array(first_move),
            moves=np.array(moves),
            send_row=rows,
        )

    def _read_seconds(self, slo: Slo) -> None:
        """Seconds per request of both phases, then what counts towards each limit over that limit, at each batch."""
        t = self.tables
        steps = self.estimator.decode_steps(self.problem.workload.mean_output_tokens)
        # What a second counts: of prefill, of decode, of the prefill of one sequence. In paper mode: of the slowest
        # prefill, of the slowest decode, of both.
        sums, from_slowest = [], np.zeros(3)
        for name, limit in slo.limits().items():
            if name == "e2e_s" or (name == "ttft_s" and steps <= 0):
                sums.append((1 / limit, 1 / limit, 0.0))
                from_slowest[2] = max(from_slowest[2], 1 / limit)
            elif name == "ttft_s":
                sums.append((0.0, 0.0, 1 / limit))
                from_slowest[0] = 1 / limit
            elif steps > 0:
                per_step = 1 / (limit * steps)
                sums.append((per_step, per_step, -per_step))
                from_slowest[1] = per_step
        self.how = _Worth(slo.hard, self.problem.latency_penalty, from_slowest, self.micro_batches)
        axis = np.arange(1, t.max_batch + 1)

        def columns(prefill: FloatArray, decode: FloatArray) -> FloatArray:
            """(C, ..., B) from (..., B) seconds."""
            made = [prefill / axis, decode / axis]
            if self.micro_batches:
                made += [a * prefill + b * decode + c * prefill[..., :1] for a, b, c in sums]
            return np.stack(made)

        layer, end = t.layer_s[self.used, :, :, 1:], t.end_s[self.used, :, :, 1:]
        self.layer = columns(layer[:, 0], layer[:, 1])
        self.end = columns(end[:, :, 0], end[:, :, 1])
        with np.errstate(invalid="ignore"):
            send = columns(t.send_s[:, 0, 1:], t.send_s[:, 1, 1:])
        # Where there is no way from one to the other, whatever is counted of it is infinite.
        self.send = np.where(np.isnan(send), np.inf, send)

    def _count_sequences(self) -> None:
        """(O, N + 1, N + 1) sequences in flight that fit a stage of an option that holds a range of layers."""
        t, used = self.tables, self.used
        layers = len(t.prefix) - 1
        edges = np.arange(layers + 1)
        self.windows = t.prefix[np.newaxis] - t.prefix[:, np.newaxis]
        self.roles = FIRST * (edges == 0)[:, np.newaxis] + LAST * (edges == layers)[np.newaxis]
        end = t.end_sequence_bytes[used][:, self.roles]
        free = t.room_bytes[used][:, self.roles] - np.moveaxis(self.windows @ t.weight_bytes[used].T, -1, 0)
        typical = np.moveaxis(self.windows @ t.sequence_bytes[used].T, -1, 0) + end
        longest = np.moveaxis(self.windows @ t.longest_bytes[used].T, -1, 0) + end
        limit = t.batch_limit[used][:, np.newaxis, np.newaxis]
        fit = np.where(typical > 0, free // np.where(typical > 0, typical, 1.0), limit)
        possible = (free > 0) & (free >= longest) & (edges[:, np.newaxis] < edges)
        self.sequences = np.where(possible, np.minimum(fit, limit), 0)

    def _least_of(self, box: _Box) -> tuple[FloatArray, FloatArray]:
        """(O, N + 1, N + 1, C) of stages and (rows, C) of sends: the least in the box."""
        (b1, b2), d1 = box.batches, box.stages[0]
        layer, end, send = (
            np.moveaxis(values[..., b1 - 1 : b2].min(axis=-1), 0, -1) for values in (self.layer, self.end, self.send)
        )
        # (N + 1, N + 1, K) windows by (O, K, C) layers.
        stage = np.moveaxis(np.tensordot(self.windows, layer, axes=(2, 1)), 2, 0) + end[:, self.roles]
        stage[self.sequences < b1 * (d1 if self.micro_batches else 1)] = np.inf
        return np.ascontiguousarray(stage), np.ascontiguousarray(send)

    # ---- the search

    def run(self, at_least: float, most_labels: int) -> Found:
        """Search all boxes, the most promising first."""
        self.best = at_least
        complete = not self.used or self._run(most_labels)
        if not len(self.path):
            return Found(0.0, (), 0, complete)
        stages = self._stages()
        shapes = []
        for option, first, end, machine in stages:
            one = self.tables.options[option]
            place = self.problem.cluster.pools[one.pool].offer.place
            shapes.append(StageShape((first, end), one.machine, one.degree, machine, place))
        rates = pipeline_rates(self.problem, self.estimator, shapes, self.batch)
        return Found(float(value_of(self.problem, rates)[0]), stages, self.batch, complete)

    def _run(self, most_labels: int) -> bool:
        most_batch = min(self.tables.max_batch, int(self.sequences.max()))
        if most_batch < 1:
            return True
        states = float(self.sequences.shape[1]) * self.sets * len(self._layout[1]) * (self.most_stages + 1)
        if states > min(most_labels, _MOST_STATES):
            return False
        self.space = self._make_space()
        boxes: list[tuple[float, int, _Box]] = []
        made = 0

        def consider(batches: tuple[int, int], stages: tuple[int, int], share: float, most: float) -> None:
            nonlocal made
            bound, box = self._bound(_Box(batches, stages, share))
            if self._beats(bound):
                made += 1
                heapq.heappush(boxes, (-min(bound, most), made, box))

        consider((1, most_batch), (1, self.most_stages), 1.0, np.inf)
        while boxes:
            top, _, box = heapq.heappop(boxes)
            bound = -top
            if not self._beats(bound):
                return True
            if self.looked_at >= most_labels:
                return False
            if box.single or bound <= self.best * _CLOSE:
                allowed = most_labels - self.looked_at
                worth, done = self._search_box(box, allowed if box.single else min(allowed, _FEW_LABELS))
                if box.single and not done:
                    return False
                if box.single or (done and not self._beats(worth)):
                    continue
                if done:
                    bound = min(bound, worth)
            for batches, stages in box.halves():
                consider(batches, stages, box.share, bound)
        return True

    def _beats(self, value: float) -> bool:
        return value > self.best * (1.0 + _SAME)

    def _cap(self, share: float) -> float:
        """Seconds per request that no stage of a better pipeline exceeds."""
        return min(share / self.best, _NO_CAP_S) if self.best > 0 else _NO_CAP_S

    def _left_in(self, box: _Box, stage: FloatArray, send: FloatArray, cap: float) -> FloatArray:
        depth = box.stages[1]
        shape = (stage.shape[1], self.sets, self.space.slot_group.size, depth + 1, send.shape[1] + 1)
        least = np.empty(shape)
        self.looked_at += _least_left(self.space, stage, send, depth, int(self.micro_batches), cap, least)
        return least

    def _bound(self, box: _Box) -> tuple[float, _Box]:
        """What no pipeline of a box exceeds, and the box with its share of the rate that is left at most.

        The pipelines that take the least are assessed on the way.
        """
        stage, send = self._least_of(box)
        depth, step, cap = box.stages[1], int(self.micro_batches), self._cap(box.share)
        least = self._left_in(box, stage, send, cap)
        bound = share = 0.0
        for group in range(len(self.groups)):
            x, y, *sums, both = least[0, self.space.stride[group], self.space.fresh_slot[group], depth].tolist()
            if x == np.inf:
                continue
            slowest = max(x + y, both)
            here = float(_worth(self.how, box.batches[0], x, y, slowest, max(sums, default=0.0)))
            bound, share = max(bound, here), max(share, here * slowest)
            for column in range(2, send.shape[1] + 1):
                self._assess(_walk(self.space, stage, send, depth, step, cap, least, group, column))
        return bound, _Box(box.batches, box.stages, min(box.share, share))

    def _search_box(self, box: _Box, most_labels: int) -> tuple[float, bool]:
        """The most that a pipeline is worth with the least seconds of the box, and whether labels sufficed."""
        stage, send = self._least_of(box)
        cap, depth, step = self._cap(box.share), box.stages[1], int(self.micro_batches)
        least = self._left_in(box, stage, send, cap)
        worth, path, labels, done = _search_labels(
            self.space, self.how, stage, send, box.batches[0], depth, step, cap, least, self.best, most_labels
        )
        self.looked_at += labels
        self._assess(path)
        return worth, done

    def _assess(self, path: IntArray) -> None:
        """Keep a pipeline at its best batch if it is the best so far.

        ``path`` (S, 4): option, first and end layer of each stage, and its group, G more where it opens a machine.
        """
        if not len(path):
            return
        option, first, end = path[:, 0], path[:, 1], path[:, 2]
        fit = int(self.sequences[option, first, end].min()) // (len(path) if self.micro_batches else 1)
        fit = min(fit, self.tables.max_batch)
        if fit < 1:
            return
        taken = (self.layer[:, option, :, :fit] * self.windows[first, end][np.newaxis, :, :, np.newaxis]).sum(axis=2)
        taken += self.end[:, option, self.roles[first, end], :fit]
        groups = len(self.groups)
        to = np.where(path[1:, 3] >= groups, path[1:, 3] - groups, groups)
        taken[:, :-1] += self.send[:, self.space.send_row[path[:-1, 3] % groups, to], :fit]
        slowest = taken[:2].max(axis=1)
        worst = taken[2:].sum(axis=1).max(axis=0) if len(taken) > 2 else np.zeros(fit)
        if not self.micro_batches:
            ratios = self.how.from_slowest[:, np.newaxis] * np.stack([*slowest, slowest.sum(axis=0)])
            worst = np.arange(1, fit + 1) * ratios.max(axis=0)
        value = 1 / slowest.sum(axis=0)
        if self.how.hard:
            value[worst - 1.0 > LIMIT_TOLERANCE] = -np.inf
        else:
            value *= 1.0 - self.how.penalty * np.maximum(worst - 1.0, 0.0)
        batch = int(np.argmax(value))
        if self._beats(float(value[batch])):
            self.best, self.path, self.batch = float(value[batch]), path.copy(), batch + 1

    def _stages(self) -> tuple[tuple[int, int, int, int], ...]:
        """The best pipeline's stages, with the machines numbered as given and the options of their own pools."""
        groups = len(self.groups)
        unused = [list(machines) for machines in self.groups]
        machine, made = -1, []
        for option, first, end, where in self.path.tolist():
            if where >= groups:
                machine = unused[where - groups].pop(0)
            degree = self.tables.options[self.used[option]].degree
            made.append((self.option_of[self.pools[machine], degree], first, end, machine))
        return tuple(made)
