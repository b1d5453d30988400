"""The compiled replicas: equal to the slow ones, and lawful on anything."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.simulator import engine
from hetplan.simulator.clock import make_clock
from hetplan.simulator.fleet import Fleet, Limits, Routing
from hetplan.simulator.traffic import Traffic
from tests.simulator.slow_replicas import Job, Replica, run
from tests.simulator.small_clocks import straight_tables

SHAPES = [(1, 4, 32, 24), (1, 8, 64, 12), (2, 6, 32, 20), (3, 8, 16, 16)]


def traffic_of(rows: list[tuple[float, int, int, int]]) -> Traffic:
    ordered = sorted(rows)
    arrival, prompt, answer, cached = (np.array(column) for column in zip(*ordered, strict=True))
    return Traffic(
        arrival.astype(float),
        prompt.astype(np.int64),
        answer.astype(np.int64),
        np.minimum(cached, prompt - 1).astype(np.int64),
        np.zeros(len(rows), dtype=np.int64),
        ("all",),
    )


def fleet_of(shape: tuple[int, int, int, int], replicas: int, traffic: Traffic, routing: Routing) -> Fleet:
    stages, sequences, step_tokens, blocks = shape
    tables = straight_tables(stages=stages, max_step_tokens=step_tokens, max_num_seqs=sequences, send_s=0.002)
    fleet = Fleet.of_tables(
        [tables] * replicas,
        [Limits(sequences, step_tokens, blocks * engine.BLOCK_TOKENS)] * replicas,
        traffic,
        routing=routing,
    )
    for number in range(replicas):
        fleet.add(number, weight=[1.0 + number])
    return fleet


ROWS = st.lists(
    st.tuples(
        st.floats(0, 2).map(lambda t: round(t, 3)),
        st.integers(1, 90),
        st.integers(1, 60),
        st.sampled_from([0, 0, 16, 40]),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=120, deadline=None)
@given(rows=ROWS, shape=st.sampled_from(SHAPES), replicas=st.integers(1, 3), least_loaded=st.booleans())
def test_equal_to_one_step_at_a_time(
    rows: list[tuple[float, int, int, int]], shape: tuple[int, int, int, int], replicas: int, least_loaded: bool
) -> None:
    traffic = traffic_of(rows)
    fleet = fleet_of(shape, replicas, traffic, "least_loaded" if least_loaded else "round_robin")
    fleet.advance(math.inf)
    stages, sequences, step_tokens, blocks = shape
    clock, _ = make_clock(
        [straight_tables(stages=stages, max_step_tokens=step_tokens, max_num_seqs=sequences, send_s=0.002)]
    )
    jobs = [
        Job(i, *values)
        for i, values in enumerate(
            zip(
                traffic.arrival_s.tolist(),
                traffic.input_tokens.tolist(),
                traffic.output_tokens.tolist(),
                traffic.cached_tokens.tolist(),
                strict=True,
            )
        )
    ]
    slow = [Replica(clock, 0, stages, sequences, step_tokens, blocks) for _ in range(replicas)]
    run(slow, [1.0 + n for n in range(replicas)], jobs, least_loaded=least_loaded)
    found = fleet.requests
    for i, job in enumerate(jobs):
        if job.refused:
            assert found["status"][i] == engine.REFUSED
            continue
        assert found["status"][i] == engine.DONE
        assert found["first_s"][i] == pytest.approx(job.first_s, rel=1e-9, abs=1e-9)
        assert found["finish_s"][i] == pytest.approx(job.finish_s, rel=1e-9, abs=1e-9)
        assert found["preemptions"][i] == job.preemptions


def lawful(fleet: Fleet) -> None:
    a, row = fleet.requests, fleet.replicas
    assert (row["free"] >= 0).all()
    for r in range(len(row)):
        held = a["blocks"][(a["replica"] == r) & (a["status"] == engine.RUNNING)].sum()
        assert row["free"][r] + held == row["blocks"][r]
    assert (a["emitted"] <= a["answer"]).all()
    assert (a["emitted"][a["status"] == engine.DONE] == a["answer"][a["status"] == engine.DONE]).all()


@settings(max_examples=60, deadline=None)
@given(
    rows=ROWS,
    shape=st.sampled_from(SHAPES),
    cuts=st.lists(st.floats(0.01, 3), min_size=1, max_size=6),
    keep=st.booleans(),
)
def test_laws_hold_at_any_time_and_through_losses(
    rows: list[tuple[float, int, int, int]], shape: tuple[int, int, int, int], cuts: list[float], keep: bool
) -> None:
    """Each request ends exactly once with the tokens that it asked for; no block is lost; time goes forward."""
    traffic = traffic_of(rows)
    fleet = fleet_of(shape, 2, traffic, "round_robin")
    before = 0.0
    for number, cut in enumerate(sorted(cuts)):
        fleet.advance(cut)
        assert fleet.now_s >= before
        before = fleet.now_s
        lawful(fleet)
        if number % 2 == 0:
            lost = fleet.stop(number // 2 % 2)
            a = fleet.requests
            if not keep:
                a["emitted"][lost] = 0
                a["first_s"][lost] = math.nan
            a["computed"][lost] = 0
            fleet.submit(lost, np.full(len(lost), fleet.now_s + 0.1))
            fleet.add(number // 2 % 2, weight=[1.0])
            fleet.open_held()
            lawful(fleet)
    fleet.advance(math.inf)
    lawful(fleet)
    a = fleet.requests
    assert fleet.idle
    assert np.isin(a["status"], (engine.DONE, engine.REFUSED)).all()
    done = a["status"] == engine.DONE
    assert (a["finish_s"][done] >= a["first_s"][done]).all()
    assert (a["first_s"][done] > a["arrival_s"][done]).all()
    assert (fleet.replicas["free"] == fleet.replicas["blocks"]).all()


def test_the_same_seed_gives_the_same_bytes() -> None:
    rows = [(0.1 * i, 20 + i, 10 + i % 7, 0) for i in range(40)]
    tables = []
    for _ in range(2):
        fleet = fleet_of(SHAPES[2], 3, traffic_of(rows), "round_robin")
        fleet.advance(math.inf)
        tables.append(fleet.requests.tobytes())
    assert tables[0] == tables[1]


def test_a_closed_loop_never_has_more_than_its_clients() -> None:
    traffic = Traffic(
        np.zeros(30), np.full(30, 20), np.full(30, 10), np.zeros(30, np.int64), np.zeros(30, np.int64), ("all",), 4
    )
    fleet = fleet_of(SHAPES[1], 2, traffic, "least_loaded")
    fleet.advance(math.inf)
    a = fleet.requests
    assert (a["status"] == engine.DONE).all()
    for t in a["arrival_s"] + 1e-6:
        assert ((a["arrival_s"] <= t) & (a["finish_s"] > t)).sum() <= 4


def test_what_no_replica_takes_waits_and_goes_on() -> None:
    fleet = fleet_of(SHAPES[0], 1, traffic_of([(0.0, 10, 5, 0), (1.0, 10, 5, 0)]), "round_robin")
    fleet.close(0)
    fleet.advance(5.0)
    assert fleet.held
    fleet.add(0, weight=[1.0])
    fleet.open_held()
    fleet.advance(math.inf)
    assert (fleet.requests["first_s"] > 5.0).all()
    assert not fleet.held
