"""The pipelines of one region and engine setting: the best on given machines, and the best for the price of any.

What a set of machines is worth at most, and in the relaxation of `covering` reaches, is computed as far as it is asked.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hetplan.estimator.base import Estimator, FloatArray
from hetplan.estimator.pipeline import StageShape
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers import threads
from hetplan.solvers.base import PipelineChoice
from hetplan.solvers.placement.arranging import arrange
from hetplan.solvers.placement.chain import MachineSet
from hetplan.solvers.placement.covering import Covering, make_covering
from hetplan.solvers.placement.pricing import dear_sets, row_of
from hetplan.solvers.placement.rates import best_rate, outweighing
from hetplan.solvers.placement.search import best_under_limits
from hetplan.solvers.placement.tables import IntArray, StageTables

Machines = tuple[int, ...]
# Estimators remember what they were asked, one thread at a time.
ESTIMATING = threading.Lock()

# Sets that a space remembers while it prices; a power of two.
_REMEMBERED = 1 << 16
# Boxes that no search on given machines gets to.
MOST_BOXES = 10_000_000
# Where an order of machines is looked for near to what the relaxation reaches: shares of its batch, times its seconds.
_BATCHES_NEAR = (1.0, 0.96, 1.04, 0.9, 1.1)
_FURTHEST, _STEP = 1.3, 2e-3
_SECONDS_NEAR = 0.3
_FOREVER = 1e6
# Sums in another order differ by less than this.
_ROUNDING = 1e-11
# No machine is free, so that all are worth a finite number of times their price.
_NEXT_TO_FREE = 1e-30
# Ratios so many times the target are far from a bound.
_FAR = 1.1
# Sets that each thread rates, the most hopeful, before the others are sifted: where there are many machines more are
# listed, and sifting takes longer.
_FIRST_RATED, _FIRST_OF_MANY, _MANY_MACHINES = 2, 4, 40
# Plain boxes that a thread looks at before the boxes are dealt out again.
_WORK = 1500.0
# Such rounds after which sets that were listed are looked at, few as they are.
_ROUNDS = 3
# Sets that a pricing lists before it looks at them, at first and at most, and the share of its tolerance for that.
_FIRST_LISTED, _MOST_LISTED, _SHARE = 32, 512, 0.25
# Sets that are sifted together.
_TOGETHER = 256


class _Listed:
    """Sets that a search lists, each once, with what it may be worth per price."""

    def __init__(self, pools: int, keys: IntArray) -> None:
        self.sets: list[IntArray] = []
        self.ratios: list[float] = []
        self._keys = keys
        self._rows: dict[int, int] = {}

    def add(self, sets: IntArray, ratios: FloatArray) -> None:
        for local, key, ratio in zip(sets, (sets @ self._keys).tolist(), ratios.tolist(), strict=True):
            row = self._rows.setdefault(key, len(self.sets))
            if row == len(self.sets):
                self.sets.append(local)
                self.ratios.append(ratio)
            else:
                self.ratios[row] = max(self.ratios[row], ratio)

    def most(self) -> float:
        return max(self.ratios, default=0.0)


class Space:
    """The pipelines of one engine setting in one region, or in regions that zone links join."""

    def __init__(
        self, problem: PlacementProblem, estimator: Estimator, tables: StageTables, machines: MachineSet
    ) -> None:
        options = [
            o for o, option in enumerate(tables.options) if option.degree in machines.degrees.get(option.pool, ())
        ]
        self.problem, self.estimator, self.tables, self.machines = problem, estimator, tables, machines
        self.covering: Covering = make_covering(
            problem, tables, machines.gpus, options, micro_batches=estimator.micro_batches
        )
        self.arrays, self.order = self.covering.arrays, self.covering.seconds
        self.pools: list[int] = self.covering.pools.tolist()
        self._layers = problem.model.layer_count
        self._keys = np.random.default_rng(0).integers(1, 2**40, len(self.pools))
        self._known, self._room = np.zeros((_REMEMBERED, 2)), _REMEMBERED // 2

    def holds(self, machines: Machines) -> bool:
        """Whether all machines may stand in pipelines of this space."""
        return sum(machines[pool] for pool in self.pools) == sum(machines)

    def _most_stages(self, machines: Machines) -> int:
        return min(self._layers, int(self.covering.gpus @ self._local(machines)))

    def _local(self, machines: Machines) -> IntArray:
        return np.array([machines[pool] for pool in self.pools], dtype=np.int64)

    def rate(
        self,
        machines: Machines,
        *,
        least: float,
        tolerance: float,
        ordered: bool = False,
        most_boxes: int = MOST_BOXES,
    ) -> tuple[float, float, tuple[int, int, float, float]]:
        """Rate reached (0: none above ``least``), bound, and (batch, stages, x, y) of `best_rate`."""
        counts = self._local(machines)
        each = np.repeat(np.arange(counts.size), counts)
        most = self._most_stages(machines)
        found = best_rate(self.arrays, self.order, each, most, least, tolerance, most_boxes, ordered)
        return found[0], found[1], found[2:6]

    def outweighing(self, sets: Sequence[Machines], least: FloatArray, tolerance: float) -> NDArray[np.bool_]:
        """Which sets may be worth more than ``least``; see `rates.outweighing`."""
        return self._outweighing(np.array(sets, dtype=np.int64)[:, self.pools], least, tolerance)

    def _outweighing(self, local: IntArray, least: FloatArray, tolerance: float) -> NDArray[np.bool_]:
        most = min(self._layers, int((local @ self.covering.gpus).max()))
        # Sets that are about as fast are looked at in the same boxes.
        order = np.argsort(-least)
        parts = np.array_split(order, max(min(threads.count(), len(order) // 2), -(-len(order) // _TOGETHER), 1))
        answers = threads.each(
            lambda part: outweighing(self.arrays, local[part], least[part], most, tolerance, MOST_BOXES)[0], parts
        )
        dear = np.zeros(len(order), dtype=np.bool_)
        for part, answer in zip(parts, answers, strict=True):
            dear[part] = answer
        return dear

    def place(self, machines: Machines, at: tuple[int, int, float, float]) -> PipelineChoice | None:
        """A pipeline within what `rate` found; None where machines do not stand so in any order."""
        batch, stages, x, y = at
        if not self.estimator.micro_batches:
            # Sequences in flight do not depend on them.
            stages = self._most_stages(machines)
        placed, _, _ = arrange(
            self.arrays, self.order, self._local(machines), batch, stages,
            x * (1 + _ROUNDING), y * (1 + _ROUNDING), (x + y) * (1 + _ROUNDING),
        )  # fmt: skip
        return None if len(placed) == 0 else self._arranged(placed, batch)

    def stands(self, machines: Machines) -> bool:
        """Whether the machines hold all layers in any order, one sequence in a micro-batch, however long it takes."""
        most = self._most_stages(machines)
        return any(
            len(arrange(self.arrays, self.order, self._local(machines), 1, stages, _FOREVER, _FOREVER, 2 * _FOREVER)[0])
            for stages in (range(1, most + 1) if self.estimator.micro_batches else [most])
        )

    def order_near(self, machines: Machines, at: tuple[int, int, float, float]) -> PipelineChoice | None:
        """A pipeline near to what the relaxation reaches, where no order of the machines reaches it."""
        best, best_s, began = None, math.inf, time.monotonic()
        batch, stages, x, y = at
        most, local = self._most_stages(machines), self._local(machines)
        for b in dict.fromkeys(max(1, round(batch * share)) for share in _BATCHES_NEAR):
            for depth in dict.fromkeys(min(most, max(1, stages + more)) for more in (0, -1, 1)):
                low, high = 1.0, min(_FURTHEST, best_s / (x + y))
                while high - low > _STEP:
                    # Many machines have many orders.
                    if time.monotonic() - began > _SECONDS_NEAR:
                        return best
                    times = 0.5 * (low + high)
                    placed, own_x, own_y = arrange(
                        self.arrays, self.order, local, b, depth if self.estimator.micro_batches else most,
                        x * times, y * times, (x + y) * times,
                    )  # fmt: skip
                    if len(placed) == 0:
                        low = times
                        continue
                    high = times
                    if own_x + own_y < best_s:
                        best, best_s = self._arranged(placed, b), own_x + own_y
        return best

    def choice(self, placed: Iterable[Sequence[int]], batch: int) -> PipelineChoice:
        """A pipeline from (option of the tables, first layer, end layer, machine) of each stage."""
        numbers: dict[int, int] = {}
        stages, offers = [], []
        for option, first, end, machine in placed:
            one = self.tables.options[option]
            if machine not in numbers:
                numbers[machine] = len(numbers)
                offers.append(self.problem.cluster.pools[one.pool].offer.name)
            place = self.problem.cluster.pools[one.pool].offer.place
            stages.append(StageShape((first, end), one.machine, one.degree, numbers[machine], place))
        return PipelineChoice(tuple(stages), tuple(offers), batch)

    def _arranged(self, placed: IntArray, batch: int) -> PipelineChoice:
        """What `arrange` placed, whose options are the covering's."""
        return self.choice([(int(self.covering.option[o]), *rest) for o, *rest in placed.tolist()], batch)

    def search(self, machines: Machines, least: float, most_labels: int) -> tuple[PipelineChoice | None, float, bool]:
        """The best pipeline within latency limits that is worth more than ``least``, and whether that is proven."""
        pools = tuple(pool for pool in self.pools for _ in range(machines[pool]))
        fixed = dict(zip(self.pools, self.covering.fixed_stages.tolist(), strict=True))
        mine = {pool: self.covering.option[self.covering.first_option[i] : self.covering.first_option[i + 1]].tolist()
                for i, pool in enumerate(self.pools)}  # fmt: skip
        with ESTIMATING:
            found = best_under_limits(
                self.problem, self.tables, self.estimator, pools, self.machines.gpus, fixed, mine,
                at_least=least, most_labels=most_labels,
            )  # fmt: skip
        if not found.stages:
            return None, 0.0, found.complete
        return self.choice(found.stages, found.micro_batch), found.value, found.complete

    def best_ratio(
        self,
        prices: FloatArray,
        counts: Machines,
        *,
        least: float,
        most_found: int,
        tolerance: float,
        useful: float,
        cap: float,
        deadline: float,
    ) -> tuple[float, float, list[tuple[Machines, float, float]]]:
        """Most worth per price above ``least``: reached and bound; and the sets: (set, rate reached, bound).

        A bound is ``least`` and the tolerance when nothing more is found; above ``useful`` none is looked for. Ends
        when ``most_found`` sets are found.
        """
        own, target = np.maximum(prices[self.pools], _NEXT_TO_FREE), least * (1 + tolerance)
        have, most = self._local(counts), self._most_stages(counts)
        found: list[tuple[Machines, float, float]] = []
        ratio, bound, listed = 0.0, target, _FIRST_LISTED
        boxes, pending = np.zeros((0, 9)), _Listed(len(self.pools), self._keys)
        begun, rounds, total, most_rounds = False, 0, 0, math.inf

        def search(part: FloatArray) -> tuple[IntArray, FloatArray, FloatArray]:
            return dear_sets(
                self.arrays, have, own, self._keys, self._known, part, listed, most, target, cap, _WORK,
            )  # fmt: skip

        while not begun or len(boxes):
            if seconds_left(deadline) <= 0 or total > most_rounds:
                return ratio, max(bound, pending.most(), boxes[:, 0].max() if begun else math.inf), found
            # The most hopeful boxes are dealt out in turn.
            boxes = boxes[np.argsort(-boxes[:, 8])]
            hands = [boxes[hand] for hand in threads.dealt(list(range(len(boxes))))] if begun else [boxes]
            results = threads.each(search, hands)
            boxes, begun = np.concatenate([left for _, _, left in results]), True
            for sets, ratios, _ in results:
                pending.add(sets, ratios)
            rounds, total = rounds + 1, total + 1
            if len(boxes) and (not pending.sets or (len(pending.sets) < listed and rounds < _ROUNDS)):
                continue
            rounds, enough = 0, min(_FAR * target, useful / (1 + tolerance))
            reached, upper = self._look_at(pending, own, target, tolerance, most_found, enough, cap, deadline, found)
            ratio, bound, listed = max(ratio, reached), max(bound, upper), min(2 * listed, _MOST_LISTED)
            pending = _Listed(len(self.pools), self._keys)
            if ratio > enough:
                return ratio, max(bound, boxes[:, 0].max(initial=0.0)), found
            if found and math.isinf(most_rounds):
                # These are little above the target; that nothing is above them may be proven in about the same time.
                most_rounds, most_found = 2 * total + _ROUNDS, 2 * most_found
                target = max(target, ratio * (1 + tolerance))
        return ratio, max(bound, target), found

    def _look_at(
        self,
        listed: _Listed,
        own: FloatArray,
        target: float,
        tolerance: float,
        most_found: int,
        enough: float,
        cap: float,
        deadline: float,
        found: list[tuple[Machines, float, float]],
    ) -> tuple[float, float]:
        """Rates listed sets until some are worth more than the target: the most worth per price reached, and a bound.

        Ends when that is more than ``enough``. Adds to ``found``.
        """
        if not listed.sets:
            return 0.0, target
        sets, ratios = np.array(listed.sets), np.array(listed.ratios)
        paid, share, ratio, bound = sets @ own, _SHARE * tolerance, 0.0, target
        limits = target * (1 - share) * paid
        # Where rounding pays for anything, no machines may be among the sets.
        order = [number for number in np.argsort(-ratios).tolist() if paid[number] > 0]
        width = threads.count()
        # Where the most hopeful are worth enough, no others are asked for.
        many = sum(pool.count for pool in self.problem.cluster.pools) >= _MANY_MACHINES
        sifted = (_FIRST_OF_MANY if many else _FIRST_RATED) * width
        first = 0
        while first < len(order):
            if len(found) >= most_found or (first >= sifted and ratio > enough) or seconds_left(deadline) <= 0:
                bound = max(bound, float(ratios[order[first:]].max()))
                break
            if first == sifted:
                rest = np.array(order[first:], dtype=np.int64)
                dear = self._outweighing(sets[rest], limits[rest], share)
                for number in rest[~dear].tolist():
                    self._know(sets[number], target * float(paid[number]))
                order[first:] = rest[dear].tolist()
            part = order[first : first + width]
            # So finely that sets of no interest are proven to be worth the target at most.
            fine = share if first < sifted else 2 * share
            rates = threads.each(
                lambda one: self.rate(self._machines(sets[one[0]]), least=float(limits[one[0]]), tolerance=one[1]),
                [(number, fine) for number in part],
            )
            for number, (rate, upper, _) in zip(part, rates, strict=True):
                price = float(paid[number])
                # But for rounding, which `program.MARGIN` makes up for.
                most = min(upper, target * price) if upper <= target * price * (1 + _ROUNDING) else upper
                self._know(sets[number], most)
                ratio = max(ratio, min(cap, rate) / price)
                bound = max(bound, min(cap, most) / price)
                if rate > 0:
                    found.append((self._machines(sets[number]), rate, upper))
            first += width
        return ratio, bound

    def _know(self, local: IntArray, upper: float) -> None:
        """Remember a bound on a set's rate, while there is room."""
        key = int(local @ self._keys)
        row = row_of(self._known, key)
        if self._known[row, 0] != 0.0:
            self._known[row, 1] = min(self._known[row, 1], upper)
        elif self._room > 0:
            self._room -= 1
            self._known[row] = key, upper

    def _machines(self, local: IntArray) -> Machines:
        machines = [0] * len(self.problem.cluster.pools)
        for pool, count in zip(self.pools, local.tolist(), strict=True):
            machines[pool] = count
        return tuple(machines)


def seconds_left(deadline: float) -> float:
    """Until a reading of `time.monotonic`; 0 after it."""
    return max(0.0, deadline - time.monotonic())
