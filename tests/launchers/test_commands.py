"""What a script runs and what is started without a shell are the same words and variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hetplan as hp
from hetplan.catalog.engines import ENGINES
from hetplan.launchers.commands import engine_command, store_command, store_loads
from hetplan.launchers.stores import shard_source
from hetplan.launchers.vllm import nodes_of

SAY = "#!{python}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
SHARDS = "https://weights.example/a'b c"


def test_scripts_and_commands_are_the_same(tmp_path: Path) -> None:
    plan = hp.optimize(
        model="qwen2.5-32b",
        cluster={"g6e.xlarge": 1, "g5.12xlarge": 1},
        workload=hp.Workload(input_tokens=763, output_tokens=232),
        engine="hetplan",
    )
    engine = ENGINES["hetplan"]
    source = shard_source("/shards/it's $HOME", engine)
    assert source is not None
    hp.launch(plan, out=tmp_path / "out", store=source.shards, model="/models/a b")
    program = tmp_path / "say"
    program.write_text(SAY.format(python=sys.executable))
    program.chmod(0o700)
    nodes = nodes_of(plan, engine, source=source)
    addresses = {node.address: f"10.0.0.{node.rank + 1}" for node in nodes}
    own = {"PATH": os.environ["PATH"], "HETPLAN_STORE": "/run/s.sock", "HETPLAN_VLLM": str(program)}
    for node in nodes:
        given = own | addresses | {"HETPLAN": str(program)}
        done = subprocess.run([tmp_path / "out" / node.script], env=given, capture_output=True, text=True, check=True)
        (verb, *words), variables = json.loads(done.stdout)
        command = engine_command(node, model="/models/a b", addresses=addresses, socket="/run/s.sock")
        assert (verb, tuple(words)) == ("serve", command.arguments)
        assert command.variables.items() <= variables.items()
        assert {n for n in variables if n.startswith(("VLLM", "HETPLAN_LAYOUT"))} <= command.variables.keys()
        assert node.store is not None
        done = subprocess.run(
            [tmp_path / "out" / node.store_script], env=given, capture_output=True, text=True, check=True
        )
        assert json.loads(done.stdout)[0] == [
            *("store", "serve"),
            *store_command(node.store, source, socket="/run/s.sock").arguments,
        ]


def test_every_layer_is_loaded_once_by_each_of_its_ranks() -> None:
    plan = hp.optimize(
        model="qwen2.5-32b",
        cluster={"g6e.xlarge": 1, "g5.12xlarge": 1},
        workload=hp.Workload(input_tokens=763, output_tokens=232),
        engine="hetplan",
    )
    layers = plan.placement.model.layer_count
    engine = ENGINES["hetplan"]
    nodes = nodes_of(plan, engine, source=shard_source("/shards", engine))
    for node in nodes:
        assert node.store is not None
        assert [load["device"] for load in store_loads(node, layers)] == list(node.store.devices)
    loads = [load for node in nodes for load in store_loads(node, layers)]
    held = sorted({layer for load in loads for layer in range(*load["layers"])})
    assert held == list(range(layers))
    assert next(load["first"] for load in loads) is True
    assert [load["last"] for load in loads][-1] is True
