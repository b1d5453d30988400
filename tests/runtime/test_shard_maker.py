"""What `hetplan shard` refuses before it starts the engine's code, and how it tells that this failed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetplan.cli import app
from hetplan.errors import InvalidInputError
from hetplan.runtime.tensor_store.sharding import make_shards


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


def program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_a_folder_without_a_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"holds no config\.json"):
        make_shards(tmp_path, tmp_path / "out")


def test_a_full_folder_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="not an empty folder"):
        make_shards(checkpoint, checkpoint)
    assert [path.name for path in checkpoint.iterdir()] == ["config.json"]


@pytest.mark.parametrize("degrees", [(), (0,), (1, 65)])
def test_degrees_have_limits(degrees: tuple[int, ...], checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="from 1 to 64"):
        make_shards(checkpoint, tmp_path / "out", tensor_parallel=degrees)


def test_a_dtype_is_one_of_vllms(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="bfloat16"):
        make_shards(checkpoint, tmp_path / "out", dtype="fp8")


def test_no_vllm_says_where_it_was_looked_for(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("HETPLAN_VLLM", raising=False)
    with pytest.raises(InvalidInputError, match="'vllm' is not on the path"):
        make_shards(checkpoint, tmp_path / "out")


def test_the_engines_last_words_are_passed_on(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter is the one beside vllm, and gets no shell's words."""
    program(tmp_path, "vllm", "exit 0")
    program(
        tmp_path, "python", 'printf "%s\\n" "$@" > ' + str(tmp_path / "seen") + '; echo "error: no such thing"; exit 1'
    )
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("HETPLAN_VLLM", raising=False)
    out = tmp_path / "a folder; touch x"
    with pytest.raises(InvalidInputError, match="no such thing"):
        make_shards(checkpoint, out, tensor_parallel=(2, 1))
    seen = (tmp_path / "seen").read_text("utf-8").splitlines()
    assert seen[:2] == ["-m", "hetplan.runtime.vllm_plugin.shard"]
    assert f"--out={out}" in seen
    assert seen[-3:] == ["--tensor-parallel", "1", "2"]


@pytest.mark.parametrize("degrees", ["one", "1,,2", "-1", "1;2"])
def test_the_command_line_reads_degrees(degrees: str, checkpoint: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["shard", str(checkpoint), "--out", str(tmp_path / "out"), f"--tensor-parallel={degrees}"]
    )
    assert done.exit_code == 2
    assert "takes degrees such as 1,2,4" in done.output
