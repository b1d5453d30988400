"""`hetplan serve` refuses what it cannot do before it starts anything."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hetplan as hp
from hetplan.cli import app


def serve(*words: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hetplan", "serve", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    return " ".join(done.stderr.split())


def test_a_plan_of_other_machines_is_refused_before_anything_starts(tmp_path: Path) -> None:
    plan = hp.optimize(
        model="llama-3.1-8b", cluster={"g6.12xlarge": 1}, workload=hp.Workload(input_tokens=763, output_tokens=232)
    )
    plan.save(tmp_path / "plan.json")
    said = serve(tmp_path / "plan.json", "--state", tmp_path / "state")
    assert "machines of this host only" in said
    assert not (tmp_path / "state").exists()


def test_without_ray_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["serve", str(tmp_path / "plan.json")])
    assert done.exit_code == 2
    assert "hetplan[runtime]" in done.output
