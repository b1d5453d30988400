"""Stages with their own tensor parallelism, on one machine and on machines of unlike size: the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import launched, local_plan
from environment import PATIENT
from servers import READY_S, Cluster, complete
from staging import blocks_at_start, planned_blocks, staged_plan

import hetplan as hp

PROMPTS = [list(range(start, start + 20)) for start in (10, 50, 200, 300)]
TOKENS = 60

# Layers, degree and machine of each stage.
LAYOUTS = {
    "2,1-on-one": [(3, 2, 0), (5, 1, 0)],
    "1,2-on-two": [(5, 1, 0), (3, 2, 1)],
    "1,1,2-on-two": [(2, 1, 0), (3, 1, 0), (3, 2, 1)],
    "1,2,1-on-one-and-three": [(4, 1, 0), (1, 2, 1), (3, 1, 1)],
}


@pytest.fixture(scope="module")
def expected(environment: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[int]]]:
    """What stock vLLM in one process answers."""
    for cluster in launched(local_plan(model, [[8]]), tmp_path_factory.mktemp("one") / "out", environment, model):
        yield [complete(8000, prompt, TOKENS) for prompt in PROMPTS]
        cluster.stop()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_staged_pipeline_answers_as_one_process(
    layout: str, expected: list[list[int]], environment: Path, model: Path, tmp_path: Path
) -> None:
    plan = staged_plan(model, LAYOUTS[layout])
    out = tmp_path / "out"
    hp.launch(plan, out=out, model=str(model), first_port=8040)
    cluster = Cluster(out, environment, PATIENT)
    try:
        cluster.start()
        answers = [complete(8040, prompt, TOKENS) for prompt in PROMPTS]
        blocks = blocks_at_start(8040)
    finally:
        cluster.stop()
    assert answers == expected
    assert blocks == planned_blocks(plan)


def test_a_plan_that_stock_vllm_runs_is_started_on_it(model: Path, tmp_path: Path) -> None:
    hp.launch(staged_plan(model, [(3, 1, 0), (5, 1, 1)]), out=tmp_path / "out", model=str(model))
    script = (tmp_path / "out" / "pipeline-1-node-0.sh").read_text("utf-8")
    assert "hetplan.runtime" not in script
    assert "HETPLAN_LAYOUT" not in script


def test_a_layout_that_cannot_be_run_is_refused_by_name(environment: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hp.launch(staged_plan(model, LAYOUTS["2,1-on-one"]), out=out, model=str(model), first_port=8040)
    script = out / "pipeline-1-node-0.sh"
    script.write_text(script.read_text("utf-8").replace('"layers":[3,8]', '"layers":[4,8]'), encoding="utf-8")
    cluster = Cluster(out, environment, PATIENT)
    try:
        cluster.begin()
        assert cluster.head().wait(READY_S) != 0
    finally:
        cluster.stop()
    assert "stage 1 begins at layer 4; the one before ends at 3" in cluster.log(script.name)
