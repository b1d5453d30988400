"""Caches that one engine reads out of another's memory: every token moves, and a source that dies costs time only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from caches import SOURCE, TARGET, gained, prompt, resumed, say, send, started, tokens_by_source
from environment import nixl_packages
from servers import Cluster, complete

from hetplan.runtime.kv_transfer import Nixl


@pytest.fixture(scope="module")
def nixl(environment: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    variables = {"PYTHONPATH": str(nixl_packages(environment))}
    folder = tmp_path_factory.mktemp("nixl") / "out"
    yield from started(folder, environment, model, variables, kv_connector="NixlConnector")


def test_nixl_moves_every_token(nixl: Cluster) -> None:
    ids = prompt(500, seed=1)
    whole = complete(SOURCE, ids, 60)
    so_far = ids + whole[:30]
    sent = send(Nixl(), so_far)
    assert sent.tokens == len(so_far)
    before = tokens_by_source(TARGET)
    rest, seconds = resumed(so_far, 30, sent.params)
    assert rest == whole[30:]
    assert gained(before, "external_kv_transfer") == len(so_far)
    assert gained(before, "local_compute") == 0
    say(f"{len(so_far)} tokens: held after {sent.seconds:.3f} s, 30 more in {seconds:.3f} s")


def test_a_nixl_source_that_dies_costs_time_only(nixl: Cluster) -> None:
    """Last, as it ends the source."""
    ids = prompt(500, seed=2)
    whole = complete(SOURCE, ids, 60)
    so_far = ids + whole[:30]
    sent = send(Nixl(), so_far)
    os.killpg(nixl.head(1).pid, 9)
    nixl.head(1).wait(30)
    rest, seconds = resumed(so_far, 30, sent.params)
    assert rest == whole[30:]
    say(f"source gone: {seconds:.3f} s")
