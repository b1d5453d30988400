"""The parts of column generation, each against something simpler."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from small_cases import case_of, times_of

from hetplan.estimator.base import make_estimator
from hetplan.solvers import threads
from hetplan.solvers.placement.centre import analytic_centre
from hetplan.solvers.placement.columns import Columns, price_of
from hetplan.solvers.placement.covering import machine_units, most_units


def columns_of(category: str, seed: int) -> Columns:
    problem = case_of(category, seed).problem
    return Columns(problem, make_estimator(problem))


def categories() -> list[str]:
    from small_cases import CATEGORIES

    free = [name for name in CATEGORIES if "limit" not in name and "cost" not in name and "token" not in name]
    return free[::5]


@pytest.mark.parametrize("category", categories())
def test_sets_looked_at_together_are_judged_as_one_by_one(category: str) -> None:
    with times_of(category):
        columns = columns_of(category, 0)
        sets = [m for m in itertools.product(*(range(n + 1) for n in columns.counts)) if any(m)]
        worth = {m: columns_of(category, 0).rate(m, tolerance=1e-6) for m in sets}
        # Around what they are worth, the largest first; never is one above its limit dropped.
        for share in (0.8, 0.98, 1.02, 1.3):
            asked = [m for m in sets if worth[m].upper > 0]
            limits = [share * worth[m].upper for m in asked]
            kept = set(columns_of(category, 0).sift(asked, limits, 1e-3))
            for m, limit in zip(asked, limits, strict=True):
                if worth[m].reached > limit * (1 + 2e-3):
                    assert m in kept


@pytest.mark.parametrize("category", categories())
def test_no_set_outweighs_the_bound_of_a_pricing(category: str) -> None:
    with times_of(category):
        columns = columns_of(category, 0)
        sets = [m for m in itertools.product(*(range(n + 1) for n in columns.counts)) if any(m)]
        worth = {m: columns.rate(m, tolerance=1e-6) for m in sets}
        rng = np.random.default_rng(1)
        single = np.maximum(
            [worth[tuple(int(i == p) for i in range(len(columns.counts)))].upper for p in range(len(columns.counts))],
            1e-3,
        )
        for _ in range(4):
            prices = single * rng.uniform(0.5, 2.0, len(single))
            best = max(min(known.reached, columns.cap) / price_of(m, prices) for m, known in worth.items())
            if best == 0:
                continue
            for share in (0.5, 0.99, 1.5):
                fresh = columns_of(category, 0)
                ratio, bound = fresh.best_ratio(
                    prices, least=share * best, most_found=20, tolerance=1e-3, deadline=float("inf")
                )
                assert bound >= best * (1 - 1e-9)
                assert ratio <= best * (1 + 1e-4)
                if share > 1:
                    assert ratio == 0.0
                    assert bound <= share * best * (1 + 2e-3)


def test_a_lean_count_is_no_less_than_a_full_one() -> None:
    for category in categories():
        with times_of(category):
            columns = columns_of(category, 1)
            for space in columns.spaces:
                arrays, counts = space.arrays, np.array([columns.counts[p] for p in space.pools])
                most_gpus, pools = int(arrays.gpus.max()), len(counts)
                held = np.empty((pools, 6, most_gpus + 1), np.int64)
                lean = np.empty((pools, 1, most_gpus + 1), np.int64)
                inner = np.empty((most_gpus + 1, most_gpus + 1), np.int64)
                anywhere = np.empty((pools, 0), np.int64)
                for node, stages, s in itertools.product((1, 2, 3), (1, 2, 4), (0.01, 0.1, 1.0)):
                    if arrays.high[node] < arrays.low[node]:
                        continue
                    machine_units(arrays, counts, anywhere, anywhere, node, stages, stages, s, s, 1.5 * s, held, inner)
                    most_units(arrays, counts, anywhere, node, stages, stages, s, s, 1.5 * s, lean, inner)
                    columns_held = min(stages, most_gpus)
                    full = held[:, :4, 1 : columns_held + 1].max(axis=1)
                    assert (lean[:, 0, 1 : columns_held + 1] >= full)[counts > 0].all()


def test_the_centre_of_a_triangle_is_in_its_middle() -> None:
    rows = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    limits = np.array([0.0, 0.0, -3.0])
    point = analytic_centre(rows, limits, np.ones(3), np.array([0.1, 2.5]))
    assert point == pytest.approx([1.0, 1.0], rel=1e-3)
    heavier = analytic_centre(rows, limits, np.array([1.0, 1.0, 4.0]), point)
    assert heavier == pytest.approx([0.5, 0.5], rel=1e-3)


def test_threads_keep_the_order_and_pass_on_errors() -> None:
    assert threads.each(lambda n: n * n, range(20)) == [n * n for n in range(20)]
    assert sorted(itertools.chain(*threads.dealt(list(range(7))))) == list(range(7))
    assert threads.dealt([]) == []
    with pytest.raises(ZeroDivisionError):
        threads.each(lambda n: 1 // n, [1, 0])
