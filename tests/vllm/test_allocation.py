"""An allocation plan on real vLLM: two models and three query types, sent by the plan's shares."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
from allocated import KINDS, SMALL, TINY, Figures, measure, predicted_ttft_s, problem, send
from environment import PATIENT, small_model, tiny_model
from servers import Cluster

import hetplan as hp
from tests.runtime.router_process import run_router_of

PORT = 21_700
KEY = "root"
COUNT = 600
# Part of the time that the small model is busy: waiting for one's turn is not what is tested.
LOAD, MOST_PER_S = 0.5, 12.0
# A guess, for the engines that are measured then: the tiny model is the faster one.
GUESS = {SMALL: [Figures(0.2, 1.0, 5.0)] * 3, TINY: [Figures(0.05, 0.2, 20.0)] * 3}


def planned(plan: hp.Plan) -> dict[tuple[str, str], float]:
    return {(route.query_type, plan.deployments[route.deployment].model): route.fraction for route in plan.routes}


def scripts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*.sh")}


def answered(port: int) -> int:
    """Requests that an engine has finished, by its own count."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return round(sum(map(float, re.findall(r"^vllm:request_success_total\{[^}]*\} (\S+)$", text, re.MULTILINE))))


def asked(port: int) -> dict[tuple[str, str], int]:
    """Requests by type and model, by the router's count."""
    url = f"http://127.0.0.1:{port}/admin/demand?window_s=590"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {KEY}"})) as answer:
        lines = json.load(answer)["demand"]
    return {(line["query_type"], line["model"]): line["requests"] for line in lines}


def test_types_are_served_by_the_models_at_the_plan_s_shares(environment: Path, tmp_path: Path) -> None:
    began = time.perf_counter()
    folders = {SMALL: small_model(environment), TINY: tiny_model(environment)}
    models, loaded = list(folders.values()), {name: str(folder) for name, folder in folders.items()}

    # The engines that are measured are those that serve: what the plan says of them does not change with the figures.
    first, out = tmp_path / "measured", tmp_path / "out"
    hp.launch(hp.optimize(problem(models, GUESS, 5.0), solver="milp"), out=first, model=loaded, first_port=PORT)
    cluster = Cluster(first, environment, PATIENT)
    try:
        cluster.start()
        ready = time.perf_counter()
        print(f"engines ready after {ready - began:.0f} s")
        targets = json.loads((first / "router.json").read_text())["targets"]
        ports = {target["model"]: target["port"] for target in targets}
        for _ in range(3):
            measured = measure({model: f"http://127.0.0.1:{port}" for model, port in ports.items()})
            # What else the host does may have hidden which is the faster one.
            if all(tiny.delay_s < small.delay_s for tiny, small in zip(measured[TINY], measured[SMALL], strict=True)):
                break
        for model, figures in measured.items():
            print(model, *(f"{k.name} TTFT {f.ttft_s * 1e3:.0f} ms" for k, f in zip(KINDS, figures, strict=True)))

        busy_s = sum(
            kind.part * (1 - kind.tiny_share) / figures.requests_per_s
            for kind, figures in zip(KINDS, measured[SMALL], strict=True)
        )
        rate = min(LOAD / busy_s, MOST_PER_S)
        plan = hp.optimize(problem(models, measured, rate), solver="milp")
        assert hp.verify(plan) == []
        assert all(hp.verify(one) == [] for one in hp.placement_plans(plan))
        shares = planned(plan)
        assert [shares[kind.name, TINY] for kind in KINDS] == pytest.approx([1 / 3, 3 / 4, 1])
        hp.launch(plan, out=out, model=loaded, first_port=PORT)
        assert scripts(out) == scripts(first)

        with run_router_of(out / "router.json", tmp_path / "router.log", admin_key=KEY) as (_, port):
            cluster_ready(port, len(ports))
            before = {model: answered(engine) for model, engine in ports.items()}
            sent = time.perf_counter()
            firsts = send(f"http://127.0.0.1:{port}", COUNT, rate)
            ended = time.perf_counter()
            counts = asked(port)
            served = {model: answered(engine) - before[model] for model, engine in ports.items()}
    finally:
        cluster.stop()

    predicted = predicted_ttft_s(plan)
    for kind in KINDS:
        times = firsts[kind.name]
        assert len(times) == round(kind.part * COUNT)
        mean = sum(times) / len(times)
        print(
            f"{kind.name}: {len(times)} requests, TTFT {mean * 1e3:.0f} ms, predicted {predicted[kind.name] * 1e3:.0f} "
            f"ms, measured / predicted {mean / predicted[kind.name]:.2f}"
        )
        for model in folders:
            share = counts.get((kind.name, model), 0) / len(times)
            print(f"  {model}: {share:.4f}, planned {shares.get((kind.name, model), 0.0):.4f}")
            assert abs(share - shares.get((kind.name, model), 0.0)) < 0.01
    # What the router counted is what each engine answered.
    assert served == {model: sum(n for (_, to), n in counts.items() if to == model) for model in folders}
    print(
        f"{rate:.1f} requests/s; engines ready after {ready - began:.0f} s, measured and planned after "
        f"{sent - began:.0f} s, answered after {ended - began:.0f} s"
    )


def cluster_ready(port: int, pipelines: int) -> None:
    """Return when the router has found so many pipelines healthy."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            if sum(one["healthy"] for one in json.load(answer)["pipelines"]) == pipelines:
                return
        time.sleep(0.2)
    raise AssertionError("the router did not find all pipelines")
