"""The verbs of the tensor store, from a shell."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_process import ROOT, attach, drop, make_shards
from typer.testing import CliRunner

from hetplan.cli import app
from hetplan.runtime.tensor_store.client import connect


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hetplan-store-") as made:
        yield Path(made)


def ask(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["store", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_serve_load_status_evict_and_the_end(folder: Path) -> None:
    manifest = make_shards(folder / "shards", layers=2)
    socket = folder / "store.sock"
    command = [sys.executable, "-m", "hetplan", "store", "serve", "--socket", str(socket)]
    options = ["--shards", str(folder / "shards"), "--memory", "1 MiB", "--threads", "2"]
    with subprocess.Popen([*command, *options], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = json.loads(process.stderr.readline())
            assert (said["event"], said["socket"], said["models"]) == ("listening", str(socket), ["tiny-llama"])
            wanted = ["--socket", str(socket), "--model", "tiny-llama", "--layers", "0:2"]
            brought = ask("load", *wanted, "--tensor-parallel", "2", "--first", "--last")
            # Both ranks' halves of the two layers and of embedding and head, and the norms once.
            assert brought == {"fetched_bytes": 80_000 + 16_000 + 1_204, "reused_bytes": 1_204, "held_bytes": 0}
            with connect(socket) as store:
                drop(attach(store, manifest, hold_bytes=5_000, what="an engine"))
                status = ask("status", "--socket", str(socket))
                assert status["devices"]["cpu"]["held_bytes"] == 5_000
                text = CliRunner().invoke(app, ["store", "status", "--socket", str(socket)]).stderr
                assert "lease of an engine" in text
                assert "tiny-llama: 2 layers for vllm-0.32.0" in text
                assert ask("evict", "--socket", str(socket))["freed_bytes"] > 90_000
                process.send_signal(signal.SIGTERM)
                assert process.wait(10) == 0
                assert not store.lives()
            assert process.stderr.read() == ""
            assert not socket.exists()
        finally:
            process.kill()


def test_ctrl_c_ends_it_while_it_waits(folder: Path) -> None:
    make_shards(folder / "shards", layers=1)
    command = [sys.executable, "-m", "hetplan", "store", "serve", "--socket", str(folder / "store.sock")]
    # As in a terminal, also where the tests themselves run in the background, where shells have this signal ignored.
    with subprocess.Popen(
        [*command, "--shards", str(folder / "shards")],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        try:
            assert process.stderr is not None
            process.stderr.readline()
            start = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
            assert time.monotonic() - start < 10
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "--socket", "SOCKET", "--shards", "missing"], "missing/manifest.json is not there"),
        (["serve", "--socket", "SOCKET", "--shards", "http://weights.example"], "weights.example is not on the list"),
        (["serve", "--socket", "SOCKET", "--shards", "s3://weights/a"], "--allow-host s3://weights"),
        (["serve", "--socket", "SOCKET", "--shards", "x", "--memory", "much"], "--memory: not a size"),
        (["load", "--socket", "SOCKET", "--model", "m", "--layers", "3"], "no store listens at"),
        (["status", "--socket", "SOCKET"], "Start one with `hetplan store serve"),
        (["evict", "--socket", "SOCKET"], "no store listens at"),
    ],
)
def test_what_cannot_be_is_explained(folder: Path, arguments: list[str], told: str) -> None:
    named = [str(folder / "store.sock") if argument == "SOCKET" else argument for argument in arguments]
    result = CliRunner().invoke(app, ["store", *named])
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())


def test_layers_are_a_range(folder: Path) -> None:
    from hetplan.cli_store import _layers
    from hetplan.errors import InvalidInputError

    assert _layers("0:16") == (0, 16)
    for text in ("3", "a:b", "1:", "-1:2", "1:2:3"):
        with pytest.raises(InvalidInputError, match="START:STOP"):
            _layers(text)


def test_a_missing_package_names_the_extra(folder: Path) -> None:
    blocked = """
import sys
sys.modules["aiohttp"] = None
from hetplan.cli import main
where = ["--shards", "http://localhost:1", "--allow-host", "localhost"]
sys.argv = ["hetplan", "store", "serve", "--socket", sys.argv[1], *where]
main()
"""
    command = [sys.executable, "-c", blocked, str(folder / "store.sock")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'hetplan[store]'" in " ".join(done.stderr.split())


def test_the_engines_half_needs_the_standard_library_alone() -> None:
    code = """
import sys
before = set(sys.modules)
import hetplan.runtime.tensor_store.client
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(sorted(loaded))
import hetplan.runtime.tensor_store.cuda
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "['hetplan']\nFalse\n", done.stderr
