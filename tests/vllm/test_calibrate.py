"""A calibration run with real torch on this CPU, and with vLLM's own linear layers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hetplan.calibration.lattice import OPERATIONS

_MEASURE = """
import sys
from hetplan.calibration.measure import measure

raw, engine, *operations = sys.argv[1:]
run = measure("cpu", dtypes=["fp32"], operations=operations, raw_path=raw, engine=engine, point_limit_s=0.02)
sys.stdout.write("\\n" + run.model_dump_json() + "\\n")
"""


# vLLM's own are the linear layers; the rest is torch's either way.
MEASURED = {"torch": OPERATIONS, "vllm": ("gemm", "gemv")}


def calibrate(environment: Path, raw: Path, engine: str) -> dict[str, Any]:
    done = subprocess.run(
        [environment / "bin" / "python", "-c", _MEASURE, raw, engine, *MEASURED[engine]],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # vLLM may write to stdout as it is imported.
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_this_cpu_is_measured_and_a_second_run_has_nothing_to_do(
    environment: Path, tmp_path: Path, engine: str
) -> None:
    raw = tmp_path / "raw.jsonl"
    found = calibrate(environment, raw, engine)
    device = found["device"]
    assert device["kind"] == "cpu"
    assert device["name"]
    assert device["engine"].startswith(engine)
    assert "torch 2." in device["engine"]
    assert device["threads"] == 1
    assert (found["skipped"], found["remaining"]) == ([], [])

    points = found["points"]
    assert {p["operation"] for p in points} == set(MEASURED[engine])
    for point in points:
        shape = point["shape"]
        if point["operation"] in ("gemm", "gemv"):
            # Wide enough for any CPU, narrow enough to catch a wrong unit or count of calls.
            assert 1e7 < 2 * shape["m"] * shape["n"] * shape["k"] / point["seconds"] < 1e13, point
        if point["operation"] == "gemv":
            assert 1e7 < 4 * shape["n"] * shape["k"] / point["seconds"] < 1e12, point
    by_rows = {
        p["shape"]["m"]: p["seconds"] for p in points if (p["shape"].get("n"), p["shape"].get("k")) == (1024, 1024)
    }
    # A hundred times the work is never done in twice the time, however busy the machine is.
    assert by_rows[512] > 2 * by_rows[2]

    before = raw.read_bytes()
    again = calibrate(environment, raw, engine)
    assert again["points"] == points
    assert raw.read_bytes() == before
