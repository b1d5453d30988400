"""What each policy decides in situations written out, and the choices of moves against brute force."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.errors import InvalidInputError, UnknownNameError
from hetplan.policies import (
    POLICIES,
    Actions,
    Adaptive,
    Event,
    InFlight,
    Loss,
    Node,
    Notice,
    Parcae,
    PipelineView,
    PoolView,
    Request,
    Return,
    Situation,
    SkyServe,
    Tick,
    choose_move,
    on_demand_floor,
    policy,
    predicted_count,
    share_link,
)

# Two pools of one instance type in two zones, and one of another type.
EAST = PoolView("east", "g6", spot_free=1, on_demand_free=9, spot_usd_per_hour=2.0, on_demand_usd_per_hour=5.0)
WEST = PoolView("west", "g6", spot_free=1, on_demand_free=9, spot_usd_per_hour=2.5, on_demand_usd_per_hour=5.5)
OTHER = PoolView("other", "g5", spot_free=9, on_demand_free=9, spot_usd_per_hour=1.0, on_demand_usd_per_hour=3.0)
NONE_FREE = {"spot_free": 0, "on_demand_free": 0}

A1, A2 = Node("a1", "east", "spot"), Node("a2", "other", "spot")
B1 = Node("b1", "west", "spot")
NOTICE = Notice(1000.0, "east", "a1", 120.0)
LOSS = Loss(1000.0, "east", "a1")
BACK = Return(1000.0, "east", 1)
TICK = Tick(1000.0)
# Ends within the grace; short context; long context.
FLIGHT = InFlight(
    context_tokens=np.array([800.0, 900.0, 60_000.0]),
    remaining_tokens=np.array([100.0, 5000.0, 5000.0]),
    recompute_s=np.array([0.2, 0.2, 7.6]),
    transfer_s=np.array([0.3, 0.3, 6.9]),
    step_s=0.1,
)


def pools(east: dict[str, Any] | None = None, west: dict[str, Any] | None = None) -> dict[str, PoolView]:
    return {
        "east": dataclasses.replace(EAST, **(east or {})),
        "west": dataclasses.replace(WEST, **(west or {})),
        "other": OTHER,
    }


def noticed(**changed: Any) -> Situation:
    """Two pipelines serve; a machine of the first is under notice."""
    first = PipelineView("first", (dataclasses.replace(A1, deadline_s=1120.0), A2), "serving")
    values = {"pipelines": (first, PipelineView("second", (B1,), "serving")), "touched": "first", "in_flight": FLIGHT}
    return situation(**(values | changed))


def lost(**changed: Any) -> Situation:
    """The machine is gone and not replaced."""
    values = {"pipelines": (PipelineView("first", (A2,), "dead", ("east",)), PipelineView("second", (B1,), "serving"))}
    return situation(**(values | {"touched": "first", "in_flight": FLIGHT} | changed))


def stood_in(**changed: Any) -> Situation:
    """An on-demand machine stands in the first pipeline, and all serve."""
    first = PipelineView("first", (Node("d1", "east", "on_demand"), A2), "serving")
    return situation(**({"pipelines": (first, PipelineView("second", (B1,), "serving"))} | changed))


def whole(**changed: Any) -> Situation:
    first = PipelineView("first", (A1, A2), "serving")
    return situation(**({"pipelines": (first, PipelineView("second", (B1,), "serving"))} | changed))


def situation(**values: Any) -> Situation:
    return Situation(**({"time_s": 1000.0, "pools": pools(), "start_s": 111.3} | values))


SPOT = Request("east", "spot", "first")
WEST_SPOT = Request("west", "spot", "first")
ON_DEMAND = Request("east", "on_demand", "first")
RESTART, RECOMPUTE = ("restart",) * 3, ("recompute",) * 3
NOBODY = pools(NONE_FREE, NONE_FREE)
NO_SPOT = pools({"spot_free": 0}, {"spot_free": 0})

TABLE: list[tuple[str, Situation, Event, Actions]] = [
    # ShuntServe's baselines: what happens at a notice, and at a loss.
    ("none", noticed(), NOTICE, Actions()),
    ("none", lost(), LOSS, Actions((SPOT,), moves=RESTART)),
    ("none", lost(pools=NO_SPOT), LOSS, Actions((ON_DEMAND,), moves=RESTART)),
    ("none", lost(pools=NOBODY), LOSS, Actions(moves=RESTART)),
    ("none", lost(touched=None, in_flight=InFlight()), BACK, Actions((SPOT,))),
    ("none", whole(), TICK, Actions()),
    ("migration", stood_in(), BACK, Actions()),
    ("migration", noticed(), NOTICE, Actions()),
    ("migration", lost(), LOSS, Actions((SPOT,), moves=RECOMPUTE)),
    ("concurrent", noticed(), NOTICE, Actions((SPOT,), start_concurrently=True, moves=RESTART)),
    ("concurrent", lost(), LOSS, Actions((SPOT,), moves=RESTART)),
    ("both", noticed(), NOTICE, Actions((SPOT,), start_concurrently=True, moves=RECOMPUTE)),
    ("both", noticed(pools=pools({"spot_free": 0})), NOTICE, Actions((WEST_SPOT,), True, RECOMPUTE)),
    ("both", noticed(pools=NO_SPOT), NOTICE, Actions((ON_DEMAND,), True, RECOMPUTE)),
    ("both", noticed(pools=NOBODY), NOTICE, Actions(moves=RECOMPUTE)),
    ("both", noticed(touched=None, in_flight=InFlight()), NOTICE, Actions()),
    # On order already: nothing is missing.
    ("both", noticed(), LOSS, Actions(moves=RECOMPUTE)),
    ("on-demand", lost(), LOSS, Actions((ON_DEMAND,), moves=RESTART)),
    ("on-demand", stood_in(), BACK, Actions()),
    # SkyServe: notices are not used; on-demand stands in until spot is ready; spares are held.
    ("skyserve", noticed(), NOTICE, Actions()),
    (
        "skyserve",
        lost(),
        LOSS,
        Actions((ON_DEMAND, Request("east", "spot"), Request("west", "spot")), moves=RESTART),
    ),
    (
        "skyserve",
        lost(pools=pools({"interrupted": True})),
        LOSS,
        Actions((ON_DEMAND, Request("west", "spot"), Request("east", "spot")), moves=RESTART),
    ),
    (
        "skyserve",
        lost(spares=(Node("s1", "west", "spot"),), pools=pools({"spot_free": 0})),
        LOSS,
        Actions((WEST_SPOT, Request("west", "spot")), moves=RESTART),
    ),
    (
        "skyserve",
        lost(pools=pools({"on_demand_free": 0}, {"on_demand_free": 0})),
        LOSS,
        Actions((SPOT, Request("west", "spot")), moves=RESTART),
    ),
    ("skyserve", stood_in(pools=NO_SPOT), TICK, Actions()),
    (
        "skyserve",
        stood_in(spares=(Node("s1", "west", "spot"), Node("s2", "west", "spot"))),
        TICK,
        Actions((WEST_SPOT,), start_concurrently=True, return_to_spot=("d1",)),
    ),
    # Parcae: spot only, prepared by prediction, the plan made anew when there is none.
    (
        "parcae",
        noticed(),
        NOTICE,
        Actions((SPOT,), start_concurrently=True, moves=("recompute", "recompute", "transfer")),
    ),
    ("parcae", noticed(pools=NO_SPOT), NOTICE, Actions(moves=("recompute", "recompute", "transfer"), replan=True)),
    (
        "parcae",
        noticed(spares=(Node("s1", "west", "spot"),)),
        NOTICE,
        Actions((WEST_SPOT,), start_concurrently=True, moves=("recompute", "recompute", "transfer")),
    ),
    ("parcae", noticed(touched=None, in_flight=InFlight()), NOTICE, Actions()),
    ("parcae", lost(pools=NO_SPOT), LOSS, Actions(moves=RECOMPUTE, replan=True)),
    ("parcae", lost(), LOSS, Actions((SPOT,), moves=RECOMPUTE)),
    ("parcae", whole(pools=pools({"history": (3, 3, 3)})), TICK, Actions()),
    ("parcae", whole(pools=pools({"history": (3, 2, 1, 0)})), TICK, Actions((Request("west", "spot"),))),
    (
        "parcae",
        whole(pools=pools({"history": (3, 2, 1, 0)}), spares=(Node("s1", "west", "spot"),)),
        TICK,
        Actions(),
    ),
    ("parcae", whole(reduced=True), BACK, Actions(replan=True)),
    ("parcae", whole(reduced=True), TICK, Actions()),
    # Ours. The replacement is in time: requests stay that end before it takes over. The other pipeline takes caches.
    (
        "hetplan",
        noticed(),
        NOTICE,
        Actions((SPOT,), start_concurrently=True, moves=("stay", "recompute", "transfer")),
    ),
    (
        "hetplan",
        noticed(
            pipelines=(PipelineView("first", (dataclasses.replace(A1, deadline_s=1120.0), A2), "serving"),),
            start_s=115.0,
        ),
        NOTICE,
        Actions((SPOT,), start_concurrently=True, moves=("stay", "recompute", "recompute")),
    ),
    ("hetplan", noticed(pools=NO_SPOT), NOTICE, Actions((ON_DEMAND,), True, ("stay", "recompute", "transfer"))),
    ("hetplan", noticed(pools=NOBODY), NOTICE, Actions(moves=("stay", "recompute", "transfer"), replan=True)),
    ("hetplan", noticed(touched=None, in_flight=InFlight()), NOTICE, Actions()),
    # Five seconds are enough for little, and another pipeline takes the new requests.
    (
        "hetplan",
        noticed(in_flight=dataclasses.replace(FLIGHT, recompute_s=np.array([5.0, 5.0, 7.6]))),
        Notice(1000.0, "east", "a1", 5.0),
        Actions((SPOT,), True, ("transfer", "transfer", "recompute"), drain=True),
    ),
    # An hour of downtime is worth 1 (idle) + 3 + 5 (on demand) dollars: more than a machine, unless spot is soon back.
    ("hetplan", lost(pools=NO_SPOT), LOSS, Actions((ON_DEMAND,), moves=RECOMPUTE)),
    ("hetplan", lost(pools=NOBODY), LOSS, Actions(moves=RECOMPUTE, replan=True)),
    (
        "hetplan",
        lost(pools=pools({"spot_free": 0, "expected_return_s": 60.0}, {"spot_free": 0})),
        LOSS,
        Actions(moves=RECOMPUTE),
    ),
    ("hetplan", lost(), LOSS, Actions((SPOT,), moves=RECOMPUTE)),
    ("hetplan", whole(reduced=True), BACK, Actions(replan=True)),
    ("hetplan", stood_in(), BACK, Actions((SPOT,), start_concurrently=True, return_to_spot=("d1",))),
    ("hetplan", stood_in(pools=NO_SPOT), BACK, Actions()),
    ("hetplan", stood_in(pools=pools({"spot_usd_per_hour": 5.0})), BACK, Actions()),
    ("hetplan", whole(), TICK, Actions()),
]


@pytest.mark.parametrize(
    ("name", "case", "event", "actions"),
    TABLE,
    ids=[f"{i}-{row[0]}-{type(row[2]).__name__}" for i, row in enumerate(TABLE)],
)
def test_decisions(name: str, case: Situation, event: Event, actions: Actions) -> None:
    assert policy(name).decide(case, event) == actions


def test_every_policy_is_in_the_table() -> None:
    assert {row[0] for row in TABLE} == set(POLICIES)


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_asks_for_more_than_there_is(name: str) -> None:
    """Two pipelines lack a machine of a kind of which one is left in each market."""
    one_left = pools({"on_demand_free": 1}, NONE_FREE)
    lacking = tuple(PipelineView(p, (A2,), "dead", ("east",)) for p in ("first", "second"))
    for event in (LOSS, BACK, TICK):
        asked = policy(name).decide(situation(pipelines=lacking, pools=one_left, touched="first"), event)
        for pool, market in (("east", "spot"), ("east", "on_demand"), ("west", "spot"), ("west", "on_demand")):
            free = one_left[pool].spot_free if market == "spot" else one_left[pool].on_demand_free
            assert sum((r.pool, r.market) == (pool, market) for r in asked.request_replacements) <= free


@pytest.mark.parametrize("name", POLICIES)
def test_a_decision_leaves_nothing_behind(name: str) -> None:
    chosen = policy(name)
    assert chosen.decide(noticed(), NOTICE) == chosen.decide(noticed(), NOTICE)
    assert chosen.decide(lost(), LOSS) == chosen.decide(lost(), LOSS)
    assert set(inspect.signature(type(chosen)).parameters) == set(vars(chosen))


def test_downtime_that_costs_more_than_the_machine_rents_it() -> None:
    assert Adaptive(downtime_usd_per_hour=3.9).decide(lost(pools=NO_SPOT), LOSS).request_replacements == ()
    assert Adaptive(downtime_usd_per_hour=4.1).decide(lost(pools=NO_SPOT), LOSS).request_replacements == (ON_DEMAND,)
    # Spot is back in a minute: ten times the price of downtime would not pay for a start and a lease.
    soon = pools({"spot_free": 0, "expected_return_s": 60.0}, {"spot_free": 0})
    # (1 + x) 60 > 5 (60 + 111.3)
    assert Adaptive(downtime_usd_per_hour=13.2).decide(lost(pools=soon), LOSS).request_replacements == ()
    assert Adaptive(downtime_usd_per_hour=13.4).decide(lost(pools=soon), LOSS).request_replacements == (ON_DEMAND,)


@pytest.mark.parametrize(
    ("name", "actions"),
    [
        ("on-demand", Actions()),
        ("none", Actions((SPOT,), return_to_spot=("d1",))),
        ("both", Actions((SPOT,), start_concurrently=True, return_to_spot=("d1",))),
    ],
)
def test_shuntserves_may_give_on_demand_machines_back(name: str, actions: Actions) -> None:
    assert policy(name, return_to_spot=True).decide(stood_in(), BACK) == actions


def test_a_floor_keeps_the_first_pipelines_on_demand() -> None:
    # Half of the pipelines have to serve all the time: (0.99 - 0.98) / 0.02.
    floor = Adaptive(availability=0.99)
    assert floor.decide(lost(spot_availability=0.98), LOSS).request_replacements == (ON_DEMAND,)
    assert floor.decide(lost(spot_availability=0.995), LOSS).request_replacements == (SPOT,)
    assert floor.decide(stood_in(spot_availability=0.98), BACK) == Actions()
    assert floor.decide(stood_in(spot_availability=0.995), BACK).return_to_spot == ("d1",)


@given(st.floats(0.01, 0.99), st.floats(0, 1), st.integers(0, 20))
def test_the_floor_is_the_least_that_reaches_the_availability(wanted: float, spot: float, pipelines: int) -> None:
    def mean(on_demand: int) -> float:
        return (on_demand + (pipelines - on_demand) * spot) / pipelines if pipelines else 1.0

    least = on_demand_floor(wanted, spot, pipelines)
    assert 0 <= least <= pipelines
    if pipelines:
        assert mean(least) >= wanted - 1e-9
    if least:
        assert mean(least - 1) < wanted


def test_predictions_stay_within_what_was_seen() -> None:
    assert predicted_count((4,), 5) == 4
    assert predicted_count((4, 4, 4, 4), 12) == 4
    assert predicted_count((4, 3, 2), 12) == 2
    assert predicted_count((0, 1, 2), 12) == 2


def test_names_and_parameters() -> None:
    with pytest.raises(UnknownNameError, match="hetplan"):
        policy("hetplam")
    for wrong in (
        lambda: SkyServe(extra_spot=-1),
        lambda: Parcae(horizon=0),
        lambda: Adaptive(downtime_usd_per_hour=-1),
        lambda: Adaptive(downtime_usd_per_hour=math.nan),
        lambda: Adaptive(availability=1.0),
    ):
        with pytest.raises(InvalidInputError):
            wrong()


SECONDS = st.floats(0, 50, allow_nan=False)


@st.composite
def requests(draw: st.DrawFn, most: int) -> tuple[np.ndarray, ...]:
    size = draw(st.integers(0, most))

    def row(of: st.SearchStrategy[float]) -> np.ndarray:
        return np.array(draw(st.lists(of, min_size=size, max_size=size)))

    return row(st.integers(1, 100_000)), row(st.integers(0, 500)), row(SECONDS), row(SECONDS | st.just(math.inf))


@settings(deadline=None)
@given(requests(6), SECONDS, st.floats(0, 1))
def test_the_choice_is_the_best_of_all(rows: tuple[np.ndarray, ...], grace: float, step: float) -> None:
    """Seconds that a request loses: none if it stays to its end; a move that does not end in time loses without end."""
    context, remaining, recompute, transfer = rows
    chosen = choose_move(context, remaining, grace, recompute, transfer, step).tolist()
    lost = {
        "stay": np.where(remaining * step <= grace, 0.0, math.inf),
        "recompute": recompute,
        "transfer": np.where(transfer <= grace, transfer, math.inf),
    }
    for index, move in enumerate(chosen):
        assert lost[move][index] <= min(seconds[index] for seconds in lost.values())


@settings(deadline=None, max_examples=60)
@given(requests(7), SECONDS)
def test_the_link_is_shared_at_least_half_as_well_as_can_be(rows: tuple[np.ndarray, ...], grace: float) -> None:
    _, _, recompute, transfer = rows
    size = recompute.size
    moves = np.where(transfer < recompute, "transfer", "recompute")
    shared = share_link(moves, recompute, transfer, grace)
    sent = shared == "transfer"
    assert not (sent & (moves != "transfer")).any()
    assert transfer[sent].sum() <= grace * (1 + 1e-9)
    best = 0.0
    for subset in itertools.product([False, True], repeat=size):
        taken = np.array(subset, dtype=bool)
        if transfer[taken].sum() <= grace:
            best = max(best, float((recompute[taken] - transfer[taken]).sum()))
    assert (recompute[sent] - transfer[sent]).sum() >= best / 2 - 1e-9


def test_transfers_that_all_fit_are_all_kept() -> None:
    moves = np.array(["transfer", "stay", "transfer"])
    assert share_link(moves, [9, 9, 9], [2, 2, 3], 5.0).tolist() == ["transfer", "stay", "transfer"]
    assert share_link(moves, [9, 9, 9], [2, 2, 3], 4.9).tolist() == ["transfer", "stay", "recompute"]


def test_one_long_cache_is_sent_before_a_short_one_that_would_leave_no_room() -> None:
    both = np.array(["transfer"] * 2)
    assert share_link(both, [2.9, 30], [0.9, 10], 10.0).tolist() == ["recompute", "transfer"]


@pytest.mark.parametrize(
    "changed",
    [
        {"context_tokens": [0.0]},
        {"remaining_tokens": [-1.0]},
        {"recompute_s": [1.0, 2.0]},
        {"transfer_s": [math.nan]},
        {"grace_left_s": -1.0},
        {"step_s": math.nan},
    ],
)
def test_moves_of_wrong_requests_are_refused(changed: dict[str, Any]) -> None:
    values: dict[str, Any] = {
        "context_tokens": [1.0], "remaining_tokens": [1.0], "grace_left_s": 1.0,
        "recompute_s": [1.0], "transfer_s": [1.0], "step_s": 1.0,
    }  # fmt: skip
    with pytest.raises(InvalidInputError):
        choose_move(**(values | changed))
