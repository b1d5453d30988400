"""Availability over time: reading, cutting, scoring windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.errors import InvalidInputError, UnknownNameError
from hetplan.simulator import availability as module
from hetplan.simulator.availability import Availability, Change, window_scores, worst_window


@st.composite
def availabilities(draw: st.DrawFn) -> Availability:
    duration = draw(st.integers(10, 200))
    steps = {}
    for pool in draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True)):
        times = [0, *sorted(draw(st.sets(st.integers(1, duration), max_size=8)))]
        counts = draw(st.lists(st.integers(0, 5), min_size=len(times), max_size=len(times)))
        steps[pool] = (times, counts)
    return Availability(steps, duration)


def test_counts_hold_from_each_time_on() -> None:
    market = Availability({"a": ([0, 10, 20], [2, 0, 5])}, 30)
    assert [market.count("a", t) for t in (0, 9.9, 10, 19.9, 20, 99)] == [2, 2, 0, 0, 5, 5]
    assert list(market.changes()) == [Change(10, "a", 2, 0), Change(20, "a", 0, 5)]


def test_a_step_that_changes_nothing_is_no_change() -> None:
    market = Availability({"a": ([0, 10, 20], [2, 2, 1])}, 30)
    assert list(market.changes()) == [Change(20, "a", 2, 1)]


@settings(max_examples=40, deadline=None)
@given(availabilities())
def test_changes_come_in_order_and_rebuild_the_counts(market: Availability) -> None:
    counts = {pool: market.count(pool, 0) for pool in market.pools}
    seen = 0.0
    for change in market.changes():
        assert change.time_s >= seen
        seen = change.time_s
        assert counts[change.pool] == change.before != change.after
        counts[change.pool] = change.after
    assert counts == {pool: market.count(pool, market.duration_s) for pool in market.pools}


@settings(max_examples=40, deadline=None)
@given(availabilities(), st.data())
def test_a_window_is_the_same_market_with_its_own_clock(market: Availability, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, int(market.duration_s) - 1))
    stop = data.draw(st.integers(start + 1, int(market.duration_s)))
    part = market.window(start, stop)
    assert part.duration_s == stop - start
    for t in np.arange(0, stop - start, 0.5):
        assert [part.count(p, t) for p in part.pools] == [market.count(p, start + t) for p in market.pools]


@settings(max_examples=40, deadline=None)
@given(availabilities())
def test_a_file_gives_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, market: Availability) -> None:
    path = tmp_path_factory.mktemp("market") / "market.csv"
    market.write(path)
    again = Availability.read(path)
    assert again.pools == market.pools
    assert again.duration_s == market.duration_s
    assert list(again.changes()) == list(market.changes())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("time,pool,available\n", "line 1: no column 'time_s'"),
        ("time_s,pool,available\n0,a,-1\n", "line 2, column available: '-1' is not a whole number"),
        ("time_s,pool,available\n0,a,1.5\n", "line 2, column available: '1.5'"),
        ("time_s,pool,available\n0,a,1\nnan,a,1\n", "line 3, column time_s: 'nan'"),
        ("time_s,pool,available\n0,a,1\nlate,a,1\n", "line 3, column time_s: 'late'"),
        ("time_s,pool,available\n5,a,1\n", "line 2, column time_s: a begins at 5"),
        ("time_s,pool,available\n0,a,1\n9,a,2\n9,a,3\n", "line 4, column time_s: 9 is not after"),
        ("time_s,pool,available\n0,,1\n", "line 2, column pool: empty"),
        ("time_s,pool,available\n0,a,1\n", "holds no time after 0"),
        ("time_s,pool,available\n", "holds no time after 0"),
        ("time_s,pool,available\n0,a\n", "line 2: 2 values for 3 columns"),
    ],
)
def test_a_bad_file_names_line_and_column(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "market.csv"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=r"market\.csv") as raised:
        Availability.read(path)
    assert told in str(raised.value)


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be written"):
        Availability({"a": ([0], [1])}, 10).write(tmp_path / "none" / "market.csv")


def test_a_huge_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "market.csv"
    path.write_text("time_s,pool,available\n0,a,1\n9,a,2\n")
    monkeypatch.setattr(module, "MAX_AVAILABILITY_BYTES", 30)
    with pytest.raises(InvalidInputError, match="larger than the limit"):
        Availability.read(path)


@pytest.mark.parametrize(
    ("steps", "duration"),
    [
        ({}, 10),
        ({"a": ([0], [1])}, 0),
        ({"a": ([0], [1])}, float("inf")),
        ({"a": ([1], [1])}, 10),
        ({"a": ([], [])}, 10),
        ({"a": ([0, 5, 5], [1, 2, 3])}, 10),
        ({"a": ([0, float("nan")], [1, 2])}, 10),
        ({"a": ([0, 11], [1, 2])}, 10),
        ({"a": ([0, 5], [1])}, 10),
        ({"a": ([0, 5], [1, -1])}, 10),
        ({"a": ([0, 5], [1, 0.5])}, 10),
    ],
)
def test_wrong_steps_are_refused(steps: dict[str, tuple[list[float], list[float]]], duration: float) -> None:
    with pytest.raises(InvalidInputError):
        Availability(steps, duration)


def test_a_question_outside_is_refused() -> None:
    market = Availability({"a": ([0], [1])}, 10)
    with pytest.raises(UnknownNameError):
        market.count("b", 0)
    with pytest.raises(InvalidInputError):
        market.count("a", -1)
    for start, stop in ((-1, 5), (5, 5), (5, 11)):
        with pytest.raises(InvalidInputError):
            market.window(start, stop)


@settings(max_examples=40, deadline=None)
@given(availabilities(), st.integers(1, 10), st.integers(1, 5))
def test_scores_of_windows_count_what_the_windows_hold(market: Availability, width: int, step: int) -> None:
    starts, events, machines = window_scores(market, width_s=width, step_s=step)
    assert starts.tolist() == [s for s in range(0, int(market.duration_s), step) if s + width <= market.duration_s]
    for start, event, machine in zip(starts, events, machines, strict=True):
        changes = list(market.window(start, start + width).changes())
        assert event == len(changes)
        assert machine == sum(abs(c.after - c.before) for c in changes)
    worst = worst_window(market, width_s=width, step_s=step)
    assert worst.score == (events * machines).max()
    assert worst.start_s == starts[np.argmax(events * machines)]


def test_windows_of_six_days_are_as_many_as_the_paper_says() -> None:
    """1,701 windows of 50 minutes: five minutes apart, over a day's quarter less than six days."""
    starts, _, _ = window_scores(Availability({"a": ([0], [1])}, 8550 * 60.0))
    assert starts.size == 1701


def test_a_window_longer_than_the_market_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="shorter window"):
        worst_window(Availability({"a": ([0], [1])}, 10), width_s=11)
    with pytest.raises(InvalidInputError, match="above 0"):
        worst_window(Availability({"a": ([0], [1])}, 10), width_s=5, step_s=0)
