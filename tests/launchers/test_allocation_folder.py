"""Launch folders of allocation plans: every deployment in one, and a router.json with the plan's shares."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hetplan as hp
from hetplan import cli
from hetplan.runtime.router.settings import RouterSettings

SMALL, LARGE = "llama-3.1-8b", "qwen2.5-32b"
CHAT = {
    "name": "chat", "input_tokens": 763, "output_tokens": 232, "requests_per_hour": 9000, "delay_limit_s": 60,
    "error_limit": 0.04, "delay_usd_per_ms": 1e-4, "unserved_usd": 5000, "errors": {SMALL: 0.05, LARGE: 0.02},
}  # fmt: skip
LABEL = CHAT | {"name": "label", "output_tokens": 20, "error_limit": 0.1, "requests_per_hour": 60_000}
CLUSTER = {"g6.xlarge": 1, "g6.12xlarge": 1, "g6e.xlarge": 1}
FIRST_PORT = 9100


@cache
def allocation() -> hp.Plan:
    """A large model on four L4 for a third of the chats, and replicas of a small one."""
    problem = hp.AllocationProblem.from_catalog(
        query_types=[CHAT, LABEL], models=[SMALL, LARGE], cluster=CLUSTER, budget_usd=5000, tensor_parallel=(1, 2, 4)
    )
    return hp.optimize(problem, solver="auto", time_limit_s=10)


@cache
def split() -> hp.Plan:
    """One model on two kinds of machines."""
    problem = hp.AllocationProblem.from_catalog(
        query_types=[LABEL | {"errors": {SMALL: 0.01}, "requests_per_hour": 60_000}],
        models=[SMALL],
        cluster={"g6.xlarge": 1, "g5.xlarge": 1},
        budget_usd=5000,
        pipeline_parallel=(1,),
    )
    return hp.optimize(problem, solver="auto", time_limit_s=10)


def launched(plan: hp.Plan, out: Path, **options: Any) -> tuple[dict[str, str], dict[str, Any]]:
    paths = hp.launch(plan, out=out, **({"first_port": FIRST_PORT} | options))
    files = {path.name: path.read_text(encoding="utf-8") for path in paths}
    return files, json.loads(files["router.json"])


def test_pipelines_and_ports_are_numbered_through_all_deployments(tmp_path: Path) -> None:
    plan = allocation()
    assert {deployment.model for deployment in plan.deployments} == {SMALL, LARGE}
    files, router = launched(plan, tmp_path / "out")
    count = sum(deployment.pipelines[0].count for deployment in plan.deployments)
    assert count > 2
    targets = router["targets"]
    assert [target["pipeline"] for target in targets] == list(range(1, count + 1))
    assert [target["port"] for target in targets] == list(range(FIRST_PORT, FIRST_PORT + count))
    expected = [d.model for d in plan.deployments for _ in range(d.pipelines[0].count)]
    assert [target["model"] for target in targets] == expected
    for target in targets:
        script = files[f"pipeline-{target['pipeline']}-node-0.sh"]
        assert f"--port={target['port']}\n" in script
        assert f"--served-model-name={target['model']}\n" in script
    ready = files["wait-ready.sh"]
    assert re.findall(r":(\d+)/health", ready) == [str(target["port"]) for target in targets]
    assert hp.Plan.from_json(files["plan.json"]) == plan


def test_each_script_says_what_its_placement_plan_says(tmp_path: Path) -> None:
    plan = allocation()
    files, router = launched(plan, tmp_path / "out")
    numbers = {model: [t["pipeline"] for t in router["targets"] if t["model"] == model] for model in (SMALL, LARGE)}
    for one in hp.placement_plans(plan):
        (pipeline,) = one.deployments[0].pipelines
        script = files[f"pipeline-{numbers[one.placement.model.name][0]}-node-0.sh"]
        assert f"--tensor-parallel-size={pipeline.stages[0].tensor_parallel}\n" in script
        assert f"--pipeline-parallel-size={len(pipeline.stages)}\n" in script
        assert f"--max-model-len={pipeline.max_model_len}\n" in script
        assert f"--kv-cache-memory-bytes={min(s.kv_cache_bytes for s in pipeline.stages)}\n" in script


def test_router_json_holds_the_plan_s_shares_and_is_read_by_the_router(tmp_path: Path) -> None:
    plan = allocation()
    files, router = launched(plan, tmp_path / "out")
    given = {(r["query_type"], r["model"]): r["fraction"] for r in router["routes"]}
    planned: dict[tuple[str, str], float] = {}
    for route in plan.routes:
        key = (route.query_type, plan.deployments[route.deployment].model)
        planned[key] = planned.get(key, 0.0) + route.fraction
    assert given == pytest.approx(planned)
    assert given["chat", LARGE] == pytest.approx(1 / 3, abs=1e-6)
    environment = dict.fromkeys(re.findall(r"\$\{(HETPLAN_PIPELINE_\w+)\}", files["router.json"]), "10.0.0.7")
    settings = RouterSettings.load(tmp_path / "out" / "router.json", environment)
    assert {route.model for route in settings.routes} == {settings.model_of(target) for target in settings.targets}


def test_one_model_on_two_tiers_is_one_route_and_weights_are_what_each_is_sent(tmp_path: Path) -> None:
    plan = split()
    assert [deployment.model for deployment in plan.deployments] == [SMALL, SMALL]
    _, router = launched(plan, tmp_path / "out")
    (route,) = router["routes"]
    assert (route["query_type"], route["model"], route["fraction"]) == ("label", SMALL, pytest.approx(1.0))
    rates = [p.predictions.requests_per_s.value for d in plan.deployments for p in d.pipelines for _ in range(p.count)]
    assert [target["weight"] for target in router["targets"]] == rates
    assert sum(rates) == pytest.approx(60_000 / 3600)


def test_each_model_loads_what_is_said_for_it(tmp_path: Path) -> None:
    files, router = launched(allocation(), tmp_path / "out", model={SMALL: "/models/small"})
    variables = set()
    for target in router["targets"]:
        script = files[f"pipeline-{target['pipeline']}-node-0.sh"]
        assert ("model=/models/small\n" in script) == (target["model"] == SMALL)
        (variable,) = re.findall(r'model="\$\{(HETPLAN_MODEL_\d):-\$model\}"', script)
        variables.add((target["model"], variable))
        assert variable in files["README.md"]
    assert len(variables) == len({variable for _, variable in variables}) == 2
    assert "X-Query-Type" in files["README.md"]


def test_what_is_of_one_model_is_refused_for_several(tmp_path: Path) -> None:
    plan = allocation()
    with pytest.raises(hp.InvalidInputError, match=r"'/models/one' is one, and the plan has .*--model"):
        hp.launch(plan, out=tmp_path / "out", model="/models/one")
    with pytest.raises(hp.UnknownNameError, match=r"unknown model of the plan 'llama-3.1-9b'"):
        hp.launch(plan, out=tmp_path / "out", model={"llama-3.1-9b": "/models/one"})
    with pytest.raises(hp.InvalidInputError, match=r"a store's shards are of one model.*placement_plans"):
        hp.launch(plan, out=tmp_path / "out", engine="hetplan", store="s3://shards/one")
    with pytest.raises(hp.InvalidInputError, match=r"caches are handed over between pipelines of one deployment"):
        hp.launch(plan, out=tmp_path / "out", kv_connector="NixlConnector")
    assert not (tmp_path / "out").exists()


def test_a_plan_of_the_paper_s_tiers_says_what_it_lacks(tmp_path: Path) -> None:
    paper = hp.optimize(hp.AllocationProblem.canonical(query_types=6, models=6, tiers=10, seed=0), solver="agh")
    with pytest.raises(hp.InvalidInputError, match=r"no configurations.*from_catalog"):
        hp.launch(paper, out=tmp_path / "out")


def test_the_command_line_launches_an_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    allocation().save(plan)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["hetplan", "launch", str(plan), "--out", str(out), *arguments])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        return int(leaving.value.code or 0)

    assert run("--model", "/models/one", "--model", f"{SMALL}=/models/small") == 2
    assert "Say NAME=PATH" in " ".join(capsys.readouterr().err.split())
    assert run("--model", f"{SMALL}=/models/small", "--model", f"{LARGE}=/models/large", "--json") == 0
    assert json.loads(capsys.readouterr().out)["written"] is True
    scripts = "".join(path.read_text() for path in out.glob("pipeline-*-node-0.sh"))
    assert "model=/models/small\n" in scripts
    assert "model=/models/large\n" in scripts
