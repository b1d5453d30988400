"""A machine's agent without Ray: what it is asked and answers, the notices that it hears of; and the state's file."""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hetplan.errors import InvalidInputError
from hetplan.runtime.controller import state as states
from hetplan.runtime.controller.agent import NodeAgent
from hetplan.runtime.controller.state import ControllerState, Machine


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeAgent]:
    tmp_path.chmod(0o700)
    (tmp_path / "hetplan").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = NodeAgent(json.dumps({"machine": "m-1", "fleet": "f"}).encode())
    yield found
    ask(found, op="end")


def ask(agent: NodeAgent, **request: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(agent.call(json.dumps(request).encode()))
    return answer


def wait_for(found: Any) -> None:
    end = time.monotonic() + 20
    while not found():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_processes_are_started_watched_and_ended(agent: NodeAgent) -> None:
    code = "import json, os, time; print(json.dumps(dict(os.environ)), flush=True); time.sleep(600)"
    ask(agent, op="start", name="engine", argv=[sys.executable, "-c", code], variables={"OWN": "1"})
    wait_for(lambda: ask(agent, op="tail", name="engine")["text"].endswith("\n"))
    seen = json.loads(ask(agent, op="tail", name="engine")["text"])
    assert seen["OWN"] == "1"
    assert not {name for name in seen if name.startswith(("RAY_", "CUDA_VISIBLE_DEVICES"))}
    status = ask(agent, op="status")
    assert status["processes"]["engine"]["returncode"] is None
    assert 0 < status["memory"]["available_bytes"] < status["memory"]["total_bytes"]
    assert ask(agent, op="stop", name="engine", grace_s=5.0)["returncode"] == 128 + 15
    assert ask(agent, op="status")["processes"] == {}


@pytest.mark.parametrize(
    "request_",
    [b"", b"[]", b"{}", b'{"op": "no"}', b'{"op": "start"}', b'{"op": "__init__"}', b'{"op": []}', b"\x80\x04."],
)
def test_what_makes_no_sense_is_refused(agent: NodeAgent, request_: bytes) -> None:
    assert "error" in json.loads(agent.call(request_))


def test_a_store_that_does_not_start_is_told(agent: NodeAgent) -> None:
    ask(agent, op="start", name="store", argv=[sys.executable, "-c", "print('no shards'); exit(2)"], variables={})
    assert "no shards" in ask(agent, op="load", model="m", loads=[])["error"]


class Metadata(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        self._answer(200, b"token")

    def do_GET(self) -> None:
        if self.path != "/latest/meta-data/spot/instance-action":
            return self._answer(404, b"")
        at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=100)
        return self._answer(200, json.dumps({"action": "terminate", "time": f"{at:%Y-%m-%dT%H:%M:%SZ}"}).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_notices_of_the_metadata_service_are_handed_on(agent: NodeAgent) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        notices = {"provider": "aws", "base_url": f"http://127.0.0.1:{server.server_port}"}
        watching = NodeAgent(json.dumps({"machine": "m-2", "fleet": "f", "notices": notices}).encode())
        wait_for(lambda: ask(watching, op="status")["notices"])
        server.shutdown()
    notice = ask(watching, op="status")["notices"][0]
    assert 60 < notice["seconds_left"] <= 100
    assert notice["provider"] == "aws"


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hetplan").mkdir()
    (tmp_path / "hetplan").chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(InvalidInputError, match="alone"):
        NodeAgent(b'{"machine": "m-1", "fleet": "f"}')


def test_the_state_is_private_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.json"
    assert states.load(path) is None
    state = ControllerState(given="f" * 64, serving="f" * 64, machines=(Machine(name="m-1", offer="o"),))
    states.save(state, path)
    assert states.load(path) == state
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["state.json"]
    path.write_text(path.read_text()[:-20])
    with pytest.raises(InvalidInputError):
        states.load(path)
