"""What `hetplan status` tells of a plan that is served, with and without its router."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from recorded_stream import recorded_stream
from router_process import run_router
from typer.testing import CliRunner

import hetplan as hp
from hetplan.cli import app
from hetplan.errors import InvalidInputError
from hetplan.runtime.controller.serving import Serving, ServingFiles
from hetplan.runtime.controller.state import SERVINGS, ControllerState, Generation, Machine, Origin, SlotState, save
from hetplan.runtime.controller.status import KEY, read_status, say_router

NOW_S = 1_000_000.0


@pytest.fixture(scope="module")
def plan() -> hp.Plan:
    return hp.optimize(
        model="qwen3-0.6b",
        cluster={"local-cpu": 1},
        market="owned",
        provider="local",
        region="here",
        workload=hp.Workload(input_tokens=20, output_tokens=60),
        engine="hetplan",
        max_model_len=1024,
        solver="dp-beam",
    )


def of(plan: hp.Plan) -> ControllerState:
    """One pipeline is wanted."""
    serving = Serving.of(plan).fingerprint
    origin = Origin(serving=serving, plan=0, number=1, model="qwen3-0.6b", weight=1.0, started_as="a" * 64)
    slots = (SlotState(pipeline=1, origin=origin),)
    return ControllerState(given=serving, serving=serving, servings=(serving,), slots=slots)


def saved(folder: Path, plan: hp.Plan, port: int = 8000) -> Path:
    """A state in which the plan's one pipeline serves, its machine is under notice, and a replacement boots."""
    ServingFiles(folder / SERVINGS).write(Serving.of(plan))
    machines = (
        Machine(name="m-1", offer="spot", phase="ready", address="127.0.0.1", deadline_s=NOW_S + 90),
        Machine(name="m-2", offer="spot", phase="booting"),
    )
    generations = (
        Generation(pipeline=1, generation=1, machines=("m-1",), port=port, phase="serving", started=True, loaded=(0,)),
        Generation(pipeline=1, generation=2, machines=(None,), port=8001),
    )
    state = of(plan).replace(machines=machines, generations=generations, targets=((1, 1),))
    save(state, folder / "state.json")
    return folder


def test_pipelines_machines_and_notices(plan: hp.Plan, tmp_path: Path) -> None:
    found = asyncio.run(read_status(saved(tmp_path / "state", plan), clock=lambda: NOW_S))
    old, new = found["pipelines"]
    assert (old["phase"], new["phase"]) == ("serving", "starting")
    stages = plan.deployments[0].pipelines[0].stages
    assert [stage["layers"] for stage in old["stages"]] == [list(stage.layers) for stage in stages]
    assert {(stage["machine"], stage["weights"]) for stage in old["stages"]} == {("m-1", True)}
    assert {(stage["machine"], stage["weights"]) for stage in new["stages"]} == {(None, False)}
    assert [machine["taken_in_s"] for machine in found["machines"]] == [90.0, None]
    assert found["router"] == {"url": None, "answers": False, "why": "it was not started yet"}
    assert found["demand"] is None


def test_a_pipeline_without_engines_says_why(plan: hp.Plan, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state", plan)
    state = of(plan)
    state = state.with_slot(state.slot(1).replace(failures=3, why="no such model"))
    save(state, folder / "state.json")
    (only,) = asyncio.run(read_status(folder))["pipelines"]
    assert (only["phase"], only["why"]) == ("missing", "no such model")


def test_the_router_adds_what_is_in_flight(plan: hp.Plan, tmp_path: Path) -> None:
    with recorded_stream() as (_, engine), run_router(tmp_path, [engine], admin_key="root") as (_, port):
        folder = saved(tmp_path / "state", plan, port=engine)
        say_router(folder, f"http://127.0.0.1:{port}")
        (folder / KEY).write_text("root", encoding="utf-8")
        found = asyncio.run(read_status(folder))
        assert found["router"]["answers"]
        old, new = found["pipelines"]
        assert (old["router"], old["running"], old["weight"]) == ("serving", 0, 1.0)
        assert (new["router"], new["running"]) == (None, None)
        refused = asyncio.run(read_status(folder, key="wrong"))
    assert not refused["router"]["answers"]
    assert "401" in refused["router"]["why"] or "403" in refused["router"]["why"]
    gone = asyncio.run(read_status(folder))
    assert "does not answer" in gone["router"]["why"]


def test_on_the_command_line(plan: hp.Plan, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state", plan)
    done = CliRunner().invoke(app, ["status", str(folder), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["models"] == ["qwen3-0.6b"]
    shown = CliRunner().invoke(app, ["status", str(folder)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for word in ("serving", "m-1", "no machine", "booting"):
        assert word in shown.output


def test_a_folder_that_nothing_is_served_from(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="nothing is served from"):
        asyncio.run(read_status(tmp_path))
    assert CliRunner().invoke(app, ["status", str(tmp_path)]).exit_code == 2
