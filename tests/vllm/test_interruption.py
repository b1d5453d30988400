"""Machines that go, with and without a notice, under a controller over Ray: no client loses or doubles a token."""

from __future__ import annotations

from pathlib import Path

import pytest
from environment import shards_of
from interruption import CLIENTS, TOKENS, Interruption, Lived, live_through

# Asked is a fifth; others use this machine too.
WAIT_RATIO, SLACK = 0.2, 2.0
IN_TIME, TOO_SHORT, LOSS, RESTART = "notice of 120 s", "notice of 30 s", "loss", "stop, then start"
# What takes the place of a machine with a short notice is not even there when it goes.
INTERRUPTIONS = (
    Interruption(IN_TIME, "notice", grace_s=120.0),
    Interruption(TOO_SHORT, "notice", grace_s=30.0, boot_s=40.0),
    Interruption(LOSS, "loss", rank=0),
    Interruption(RESTART, "restart"),
)


@pytest.fixture(scope="module")
def lived(environment: Path, model: Path) -> Lived:
    """One start of a cluster and its engines for all that is done to them."""
    found = live_through(environment, model, shards_of(environment, model, 1, 2), INTERRUPTIONS)
    print(f"\n{found.summary()}")
    return found


def test_no_token_is_lost_or_doubled(lived: Lived) -> None:
    assert lived.errors == []
    assert len(lived.answers) > 2 * CLIENTS
    assert len(lived.alone) == TOKENS
    assert all(answer.ids == lived.alone for answer in lived.answers)


def test_the_new_engines_start_beside_the_old(lived: Lived) -> None:
    """Ready, then told to the router, and only then the old ones end; what both run on keeps its weights."""
    names = [event["event"] for event in lived.within(IN_TIME)]
    assert names.index("engine_ready") < names.index("shunt") < names.index("retired") < names.index("released")
    brought = [event for event in lived.within(IN_TIME) if event["event"] == "store_loaded"]
    # The first machine holds its three layers already; only the new one fetches.
    assert sorted(event["fetched_bytes"] > 0 for event in brought) == [False, True]
    # Given back before it was taken.
    assert "machine_lost" not in names


def test_with_a_notice_clients_wait_a_fraction_of_a_restart(lived: Lived) -> None:
    assert lived.longest_wait_s(IN_TIME) <= SLACK * WAIT_RATIO * lived.longest_wait_s(RESTART)


def test_where_engines_cannot_start_in_time_streams_wait_for_them(lived: Lived) -> None:
    """The machine is taken with the old engines on it. What streams had is computed again by the new ones."""
    taken, ready = lived.at_s(TOO_SHORT, "machine_lost"), lived.at_s(TOO_SHORT, "engine_ready")
    assert taken is not None
    assert ready is not None
    assert 30.0 <= taken < ready
    assert lived.at_s(TOO_SHORT, "machine_lost", machine=lived.machines[TOO_SHORT]) == taken
    waits = [answer.longest_wait_s(*lived.spans_s[TOO_SHORT]) for answer in lived.answers]
    # From the end of the old engines to the beginning of the new; streams in flight have all waited it out.
    assert sum(wait >= (ready - taken) / SLACK for wait in waits) == CLIENTS


def test_a_lost_machine_is_replaced(lived: Lived) -> None:
    names = [event["event"] for event in lived.within(LOSS)]
    assert names.index("machine_lost") < names.index("node_ready") < names.index("engine_ready")
    lost = next(event for event in lived.within(LOSS) if event["event"] == "machine_lost")
    assert lost["machine"] == lived.machines[LOSS]
