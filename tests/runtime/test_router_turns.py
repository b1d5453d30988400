"""Turns by shares: after any number of requests each model has had its share of them, to within one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetplan.runtime.router.turns import Turns


@settings(deadline=None, max_examples=60)
@given(weights=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=8), count=st.integers(1, 400))
@example(weights=[0.1724280496572661, 0.5574119740707526, 0.27015997627198124], count=400)
@example(weights=[1e-6, 1.0], count=400)
@example(weights=[1 / 3, 1 / 3, 1 / 3], count=400)
@example(weights=[0.5] * 8, count=400)
def test_after_every_request_the_shares_hold_within_one(weights: list[float], count: int) -> None:
    turns = Turns({str(number): weight for number, weight in enumerate(weights)})
    shares = {str(number): weight / sum(weights) for number, weight in enumerate(weights)}
    had: Counter[str] = Counter()
    for number in range(1, count + 1):
        had[turns.next()] += 1
        for name, share in shares.items():
            assert abs(had[name] / number - share) < 1 / number


@pytest.mark.parametrize("share", [0.333, 0.75])
def test_two_models_are_never_more_than_half_a_request_off(share: float) -> None:
    turns, had = Turns({"one": share, "other": 1 - share}), 0
    for number in range(1, 1001):
        had += turns.next() == "one"
        assert abs(had - number * share) <= 0.5 + 1e-6
