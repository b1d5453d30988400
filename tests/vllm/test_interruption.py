"""Machines that go, with and without a notice, under a controller over Ray: no client loses or doubles a token."""

from __future__ import annotations

from pathlib import Path

import pytest
from environment import shards_of
from interruption import CLIENTS, TOKENS, Lived, live_through

# Asked is a fifth; others use this machine too.
WAIT_RATIO, SLACK = 0.2, 2.0


@pytest.fixture(scope="module")
def lived(environment: Path, model: Path) -> Lived:
    found = live_through(environment, model, shards_of(environment, model, 1, 2), grace_s=120.0)
    print(f"\n{found.summary()}")
    return found


def test_no_token_is_lost_or_doubled(lived: Lived) -> None:
    assert lived.errors == []
    assert len(lived.answers) > 2 * CLIENTS
    assert len(lived.alone) == TOKENS
    assert all(answer.ids == lived.alone for answer in lived.answers)


def test_the_new_engines_start_beside_the_old(lived: Lived) -> None:
    """Ready, then told to the router, and only then the old ones end; what both run on keeps its weights."""
    names = [event["event"] for event in lived.events]
    notice = names.index("notice") if "notice" in names else names.index("renting", names.index("shunt"))
    ready, shunt, retired = (names.index(name, notice) for name in ("engine_ready", "shunt", "retired"))
    assert ready < shunt < retired
    begin_s, end_s = lived.spans_s["notice"]
    brought = [e for e in lived.events if e["event"] == "store_loaded" and begin_s <= e["at_s"] <= end_s]
    # The first machine holds its three layers already; only the new one fetches.
    assert sorted(e["fetched_bytes"] > 0 for e in brought) == [False, True]


def test_with_a_notice_clients_wait_a_fraction_of_a_restart(lived: Lived) -> None:
    """A loss without a notice is a restart: the pipeline is gone until its engines have started again."""
    assert lived.longest_wait_s("notice") <= SLACK * WAIT_RATIO * lived.longest_wait_s("loss")
