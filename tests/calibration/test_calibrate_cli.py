"""`hetplan calibrate`, and the calibrations that `predict`, `optimize` and problem files take."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetplan.catalog.calibration import Calibration
from hetplan.cli import Exit, app
from hetplan.estimator.gemm import gemm_seconds
from hetplan.estimator.usual import usual_gemm

L4_FLOPS, L4_BYTES_PER_S = 90e12, 280e9


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    fit = usual_gemm(L4_FLOPS, L4_BYTES_PER_S, sm_count=58)
    lines = ["engine,dtype,m,n,k,latency_us"]
    for m in (1, 16, 256, 4096):
        for n, k in ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336)):
            lines.append(f"vllm,bfloat16,{m},{n},{k},{1e6 * float(gemm_seconds(fit, m, n, k)):.4f}")
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "gemm_L4.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def called(*argv: object, code: Exit = Exit.FINE) -> Any:
    result = CliRunner().invoke(app, [*map(str, argv), "--json"], catch_exceptions=False)
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout)


def test_tables_become_a_file_that_says_what_it_holds(tables: Path, tmp_path: Path) -> None:
    out = tmp_path / "own" / "l4.json"
    document = called("calibrate", "--from-tables", tables, "--gpu", "l4", "--out", out)
    written = Calibration.load(out)
    assert (document["gpu"], document["path"]) == ("L4", str(out))
    assert document["sha256"] == written.sha256
    assert document["engine"] == "vllm"
    assert document["gemms"] == ["bf16"]
    assert document["attention"] == []
    assert document["elapsed_s"] > 0
    assert document["memory_bytes_per_s"]["value"] == pytest.approx(0.79 * L4_BYTES_PER_S, rel=0.05)

    shown = CliRunner().invoke(
        app, ["calibrate", "--from-tables", str(tables), "--gpu", "L4", "--out", str(out), "--force"]
    )
    assert shown.exit_code == 0
    assert shown.stdout == ""
    assert written.sha256 in shown.stderr
    assert "204-500 s" in shown.stderr


def test_a_file_that_is_there_is_not_overwritten(tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert called("calibrate", "--from-tables", tables, "--gpu", "L4")["path"] == "calibrations/L4.json"
    before = Path("calibrations/L4.json").read_bytes()
    refused = called("calibrate", "--from-tables", tables, "--gpu", "L4", code=Exit.BAD_INPUT)
    assert "--force" in refused["error"]["message"]
    assert Path("calibrations/L4.json").read_bytes() == before
    called("calibrate", "--from-tables", tables, "--gpu", "L4", "--force")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--gpu", "L4", "--device", "cpu"), "leave out --device"),
        ((), "--gpu NAME"),
        (("--gpu", "Q900"), "Q900"),
        (("--gpu", "L4", "--engine", "trtllm"), "no kernels of engine 'trtllm'"),
        (("--gpu", "H100"), "no table of H100"),
    ],
)
def test_what_does_not_go_with_tables_is_refused(
    tables: Path, tmp_path: Path, argv: tuple[str, ...], said: str
) -> None:
    out = tmp_path / "never.json"
    refused = called("calibrate", "--from-tables", tables, "--out", out, *argv, code=Exit.BAD_INPUT)
    assert said in refused["error"]["message"]
    assert not out.exists()


def test_unknown_engines_and_a_missing_torch_are_told_before_anything_is_measured(tmp_path: Path) -> None:
    refused = called("calibrate", "--engine", "trtllm", "--out", tmp_path / "a.json", code=Exit.BAD_INPUT)
    assert "trtllm" in refused["error"]["message"]
    if importlib.util.find_spec("torch") is None:
        refused = called("calibrate", "--out", tmp_path / "a.json", code=Exit.BAD_INPUT)
        assert "hetplan[calibrate]" in refused["error"]["message"]


def test_predictions_and_plans_take_own_calibrations(tables: Path, tmp_path: Path) -> None:
    out = tmp_path / "l4.json"
    called("calibrate", "--from-tables", tables, "--gpu", "L4", "--out", out)
    usual = called("predict", "llama-3.1-8b", "L4")
    own = called("predict", "llama-3.1-8b", "L4", "--calibration", out)
    assert own["tpot_s"] != usual["tpot_s"]
    refused = called("predict", "llama-3.1-8b", "T4", "--calibration", out, code=Exit.BAD_INPUT)
    assert "no calibration of T4" in refused["error"]["message"]

    sha256 = Calibration.load(out).sha256
    machines = ("optimize", "--model", "llama-3.1-8b", "--machine", "g6.xlarge=2", "--time-limit", "5")
    plan = called(*machines, "--calibration", out)
    assert plan["problem"]["calibration_sha256"]["L4"] == sha256

    problem = tmp_path / "problem.yaml"
    problem.write_text(
        "model: llama-3.1-8b\n"
        "cluster: {region: us-west-2, machines: {g6.xlarge: 2}}\n"
        "workload: {input_tokens: 763, output_tokens: 232}\n"
        "calibrations: [l4.json]\n",
        encoding="utf-8",
    )
    from_file = called("optimize", problem, "--time-limit", "5")
    assert from_file["problem"]["calibration_sha256"]["L4"] == sha256
    assert from_file["requests_per_s"] == pytest.approx(plan["requests_per_s"])

    refused = called(*machines, "--calibration", out, "--calibration", out, code=Exit.BAD_INPUT)
    assert "a second calibration of L4" in refused["error"]["message"]
    problem.write_text(problem.read_text(encoding="utf-8").replace("[l4.json]", "l4.json"), encoding="utf-8")
    assert "list of paths" in called("optimize", problem, code=Exit.BAD_INPUT)["error"]["message"]
    problem.write_text(problem.read_text(encoding="utf-8").replace("l4.json", "[gone.json]"), encoding="utf-8")
    assert "gone.json" in called("optimize", problem, code=Exit.BAD_INPUT)["error"]["message"]
