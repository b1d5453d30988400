"""The verbs that run: what they refuse, and that a router started from the shell answers, tells and drains."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetplan.cli import app
from hetplan.runtime.router.settings import RouterSettings

CONFIG = {"model": "tiny", "targets": [{"pipeline": 1, "address": "127.0.0.1", "port": 1}]}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "router.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_it_listens_beyond_loopback_only_with_a_key(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETPLAN_API_KEY", raising=False)
    result = CliRunner().invoke(app, ["router", str(config), "--host", "0.0.0.0", "--port", "0"])
    assert result.exit_code == 2
    assert "HETPLAN_API_KEY is not set" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"targets": []}, "targets"),
        ({"stall_s": 0}, "stall_s"),
        ({"unknown": 1}, "unknown"),
        ({"targets": [{"pipeline": 1, "address": "${NOT_SET_HERE}", "port": 1}]}, "NOT_SET_HERE is not set"),
        ({"targets": [{"pipeline": 1, "address": "http://a/b", "port": 1}]}, "not a host name"),
        ({"targets": [{"pipeline": 1, "address": "a@b", "port": 1}]}, "not a host name"),
        ({"targets": [{"pipeline": n, "address": "a", "port": 1} for n in (1, 2)]}, "two targets at a:1"),
        ({"routes": [{"query_type": "a", "model": "b", "fraction": 1}]}, "no target serves"),
        ({"routes": [{"query_type": "a", "model": "tiny", "fraction": 0}]}, "send nothing anywhere"),
    ],
)
def test_a_wrong_file_is_explained(config: Path, change: dict[str, object], told: str) -> None:
    config.write_text(json.dumps({**CONFIG, **change}))
    result = CliRunner().invoke(app, ["router", str(config), "--port", "0"])
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())


def test_files_that_are_none_are_explained(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for path, told in ((tmp_path / "none.json", "cannot read"), (broken, "is not JSON")):
        result = CliRunner().invoke(app, ["router", str(path)])
        assert (result.exit_code, told in " ".join(result.output.split())) == (2, True)


def test_addresses_come_from_the_environment(config: Path) -> None:
    targets = [
        {"pipeline": 1, "address": "${HEAD}", "port": 8000},
        {"pipeline": 2, "address": "${TAIL:-127.0.0.1}", "port": 8001},
        {"pipeline": 3, "address": "fd00::1", "port": 8002},
    ]
    config.write_text(json.dumps({**CONFIG, "targets": targets}))
    urls = [target.url for target in RouterSettings.load(config, {"HEAD": "10.0.0.7"}).targets]
    assert urls == ["http://10.0.0.7:8000", "http://127.0.0.1:8001", "http://[fd00::1]:8002"]


def test_fsync_needs_a_journal_and_notices_need_a_key(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETPLAN_ADMIN_KEY", raising=False)
    result = CliRunner().invoke(app, ["router", str(config), "--fsync", "--port", "0"])
    assert (result.exit_code, "--journal" in result.output) == (2, True)
    result = CliRunner().invoke(app, ["notices", "aws", "--pipeline", "1"])
    assert (result.exit_code, "HETPLAN_ADMIN_KEY" in result.output) == (2, True)


def test_a_port_that_is_taken_is_explained(config: Path) -> None:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        result = CliRunner().invoke(app, ["router", str(config), "--port", str(port)])
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in " ".join(result.output.split())


def test_a_router_from_the_shell_says_where_it_listens_and_leaves_on_sigterm(config: Path) -> None:
    command = [sys.executable, "-m", "hetplan", "router", str(config), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = json.loads(process.stderr.readline())
        assert (told["event"], told["pipelines"], told["host"]) == ("listening", 1, "127.0.0.1")
        end = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{told['port']}/health", timeout=10)
            except urllib.error.HTTPError as error:
                content = json.load(error)
                break
            except urllib.error.URLError:
                assert time.monotonic() < end
        assert (content["status"], content["pipelines"][0]["healthy"]) == ("down", False)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert json.loads(process.stderr.readlines()[-1])["event"] == "draining"
