"""A spot market as a renter meets it: grants, notices, losses, returns."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.errors import InvalidInputError, UnknownNameError
from hetplan.policies import Loss, MarketEvent, Notice, Return
from hetplan.simulator.availability import Availability
from hetplan.simulator.market import Market, interruptions


def one_pool(*steps: tuple[float, int], duration_s: float = 3000.0) -> Availability:
    times, counts = zip(*steps, strict=True)
    return Availability({"a": (times, counts)}, duration_s)


def test_a_drop_is_announced_and_then_takes_its_machine() -> None:
    market = Market(one_pool((0, 2), (600, 1)), notice_s=120, seed=0)
    nodes = market.acquire("a", 5)
    assert nodes == ["a/0", "a/1"]
    assert market.free("a") == 0
    assert market.next_change_s() == 480
    assert [market.next_change_s(t) for t in (0, 479, 480, 600)] == [480, 480, 600, math.inf]
    (notice,) = market.advance(480)
    assert isinstance(notice, Notice)
    assert (notice.time_s, notice.grace_s, notice.deadline_s) == (480, 120, 600)
    assert market.deadline_s(notice.node) == 600
    assert market.advance(599.9) == []
    assert len(market.nodes("a")) == 2
    assert market.advance(700) == [Loss(600, "a", notice.node)]
    assert market.now_s == 700
    assert len(market.nodes("a")) == 1
    assert market.next_change_s() == math.inf


def test_a_drop_that_leaves_enough_touches_nobody() -> None:
    market = Market(one_pool((0, 3), (600, 1)), notice_s=30, seed=0)
    market.acquire("a", 1)
    assert market.advance(3000) == []


def test_without_notice_machines_are_lost_at_once() -> None:
    market = Market(one_pool((0, 1), (600, 0)), notice_s=0, seed=0, held={"a": 1})
    assert market.advance(3000) == [Notice(600, "a", "a/0", 0), Loss(600, "a", "a/0")]


def test_a_drop_just_after_the_start_is_announced_at_the_start() -> None:
    market = Market(one_pool((0, 2), (50, 0)), notice_s=120, seed=0, held={"a": 2})
    assert market.next_change_s() == 0
    assert market.advance(0) == [Notice(0, "a", "a/0", 50), Notice(0, "a", "a/1", 50)]


def test_a_shrinking_pool_grants_what_it_will_still_have() -> None:
    market = Market(one_pool((0, 3), (600, 1), (900, 3)), notice_s=120, seed=0)
    assert market.free("a") == 3
    market.advance(479)
    assert market.free("a") == 3
    market.advance(480)
    assert market.free("a") == 1
    assert market.acquire("a", 3) == ["a/0"]
    assert market.advance(900) == [Return(900, "a", 2)]


def test_machines_come_back_as_new_ones() -> None:
    market = Market(one_pool((0, 1), (100, 0), (200, 1)), notice_s=10, seed=0, held={"a": 1})
    events = market.advance(300)
    assert events == [Notice(90, "a", "a/0", 10), Loss(100, "a", "a/0"), Return(200, "a", 1)]
    assert market.acquire("a", 1) == ["a/1"]


def test_a_return_that_is_gone_within_the_notice_is_none() -> None:
    market = Market(one_pool((0, 0), (100, 1), (110, 0), (500, 1)), notice_s=30, seed=0)
    assert market.advance(3000) == [Return(500, "a", 1)]


def test_a_machine_given_back_is_not_lost() -> None:
    market = Market(one_pool((0, 1), (600, 0)), notice_s=120, seed=0, held={"a": 1})
    market.advance(480)
    market.release("a", "a/0")
    assert market.advance(3000) == []
    with pytest.raises(UnknownNameError):
        market.release("a", "a/0")
    with pytest.raises(UnknownNameError):
        market.deadline_s("a/0")


def test_more_than_there_is_cannot_be_held_from_before() -> None:
    assert Market(one_pool((0, 1)), notice_s=0, seed=0, held={"a": 4}).nodes("a") == ("a/0",)


def test_each_pool_has_its_own_notice() -> None:
    market = Market(
        Availability({"a": ([0, 600], [1, 0]), "b": ([0, 600], [1, 0])}, 700),
        notice_s={"a": 120, "b": 30},
        seed=0,
        held={"a": 1, "b": 1},
    )
    events = market.advance(700)
    assert [(type(e).__name__, e.pool, e.time_s) for e in events] == [
        ("Notice", "a", 480), ("Notice", "b", 570), ("Loss", "a", 600), ("Loss", "b", 600),
    ]  # fmt: skip


def test_wrong_questions_are_refused() -> None:
    market = Market(one_pool((0, 1)), notice_s=0, seed=0)
    with pytest.raises(UnknownNameError):
        market.acquire("b", 1)
    with pytest.raises(InvalidInputError):
        market.acquire("a", -1)
    market.advance(10)
    with pytest.raises(InvalidInputError, match="already"):
        market.advance(5)
    for notice in (-1.0, math.nan, {"b": 3.0}):
        with pytest.raises(InvalidInputError, match="pool a"):
            Market(one_pool((0, 1)), notice_s=notice, seed=0)


@st.composite
def markets(draw: st.DrawFn) -> tuple[Availability, dict[str, float]]:
    steps, notice = {}, {}
    for pool in ("a", "b")[: draw(st.integers(1, 2))]:
        # Tenths: sums of them are not exact.
        times = [0, *sorted(draw(st.sets(st.integers(1, 1000), max_size=10)))]
        counts = draw(st.lists(st.integers(0, 4), min_size=len(times), max_size=len(times)))
        steps[pool] = ([t / 10 for t in times], counts)
        notice[pool] = draw(st.sampled_from([0.0, 0.1, 3.0, 12.3, 200.0]))
    return Availability(steps, 100.0), notice


class Renter:
    """Rents and gives back at random, keeps books, and checks them against the market after each step."""

    def __init__(self, availability: Availability, notice_s: dict[str, float], seed: int, data: st.DataObject) -> None:
        self.availability = availability
        self.data = data
        self.market = Market(availability, notice_s=notice_s, seed=seed, held=dict.fromkeys(availability.pools, 2))
        self.warned: dict[str, float] = {}
        self.gone: set[str] = set()
        self.events: list[MarketEvent] = []

    def take(self, events: list[MarketEvent]) -> None:
        for event in events:
            assert not self.events or event.time_s >= self.events[-1].time_s
            self.events.append(event)
            if isinstance(event, Notice):
                assert event.node not in self.warned
                assert event.node not in self.gone
                self.warned[event.node] = event.time_s + event.grace_s
            elif isinstance(event, Loss):
                assert self.warned.pop(event.node) == pytest.approx(event.time_s)
                self.gone.add(event.node)
            else:
                assert event.count > 0

    def act(self) -> None:
        for pool in self.availability.pools:
            want = self.data.draw(st.integers(-1, 3))
            before = self.market.free(pool)
            nodes = self.market.nodes(pool)
            if want >= 0:
                assert len(self.market.acquire(pool, want)) == min(want, before)
            elif nodes:
                node = self.data.draw(st.sampled_from(nodes))
                self.market.release(pool, node)
                self.warned.pop(node, None)
                self.gone.add(node)
            assert len(self.market.nodes(pool)) <= self.availability.count(pool, self.market.now_s)

    def run(self) -> None:
        while (moment := self.market.next_change_s()) < math.inf:
            if self.data.draw(st.booleans()):
                between = (self.market.now_s + moment) / 2
                if between < moment:
                    assert self.market.advance(between) == []
                    self.act()
            self.take(self.market.advance(moment))
            self.act()
        assert self.warned == {}


@settings(max_examples=40, deadline=None)
@given(markets(), st.integers(0, 3), st.data())
def test_no_more_is_held_than_there_is_and_each_notice_ends_in_one_loss(
    case: tuple[Availability, dict[str, float]], seed: int, data: st.DataObject
) -> None:
    Renter(*case, seed, data).run()


@settings(max_examples=40, deadline=None)
@given(markets(), st.integers(0, 3))
def test_the_same_seed_gives_the_same_events(case: tuple[Availability, dict[str, float]], seed: int) -> None:
    availability, notice = case
    wanted = dict.fromkeys(availability.pools, 3)
    events = interruptions(availability, wanted, notice_s=notice, seed=seed)
    assert events == interruptions(availability, wanted, notice_s=notice, seed=seed)


def test_a_renter_who_rents_again_holds_what_there_is() -> None:
    availability = one_pool((0, 3), (500, 1), (800, 2), (1500, 4), (2000, 0))
    events = interruptions(availability, {"a": 3}, notice_s=30, seed=1)
    assert [type(e).__name__ for e in events] == [
        "Notice", "Notice", "Loss", "Loss", "Return", "Return", "Notice", "Notice", "Notice", "Loss", "Loss", "Loss",
    ]  # fmt: skip


def test_which_machine_is_taken_depends_on_the_seed() -> None:
    lost = {interruptions(one_pool((0, 3), (500, 2)), {"a": 3}, notice_s=0, seed=s)[0] for s in range(20)}
    assert len(lost) == 3
