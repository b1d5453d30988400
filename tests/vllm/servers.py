"""Starting emitted scripts and talking to what they start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

READY_S = 420


@dataclass
class Cluster:
    """Processes of one launch folder, each in a session of its own."""

    folder: Path
    environment: Path
    variables: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        self.begin()
        self.wait()

    def begin(self) -> None:
        """Start every engine's script, and wait for none."""
        for script in sorted(self.folder.glob("pipeline-*.sh")):
            if not script.name.endswith("-store.sh"):
                self.run(script.name)

    def wait(self) -> None:
        """Return when every pipeline answers."""
        done = subprocess.run(
            [self.folder / "wait-ready.sh"],
            cwd=self.folder,
            env=self._environment() | {"HETPLAN_READY_TIMEOUT_S": str(READY_S)},
            capture_output=True,
            text=True,
            check=False,
            timeout=READY_S + 60,
        )
        if done.returncode:
            logs = "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in self.folder.parent.glob("*.log"))
            raise RuntimeError(f"not ready: {done.stderr}\n{logs}")

    def run(self, script: str) -> None:
        """Start one machine's script."""
        with (self.folder.parent / f"{self.folder.name}-{script.removesuffix('.sh')}.log").open("ab") as log:
            self.processes[script] = subprocess.Popen(
                [self.folder / script],
                cwd=self.folder,
                env=self._environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        path = f"{self.environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"PATH": path, "VLLM_NO_USAGE_STATS": "1"} | self.variables

    def log(self, script: str) -> str:
        """What a script has said so far."""
        return (self.folder.parent / f"{self.folder.name}-{script.removesuffix('.sh')}.log").read_text(
            "utf-8", "replace"
        )

    def head(self, pipeline: int = 1) -> subprocess.Popen[bytes]:
        return self.processes[f"pipeline-{pipeline}-node-0.sh"]

    def stop(self) -> None:
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def complete(port: int, prompt: Sequence[int], tokens: int, *, model: str = "tiny-llama-2") -> list[int]:
    """Greedy tokens for a prompt of token ids."""
    with _post(port, prompt, tokens, stream=False, model=model) as answer:
        content = json.load(answer)
    ids: list[int] = content["choices"][0]["token_ids"]
    return ids


def stream(port: int, prompt: Sequence[int], tokens: int, into: list[int]) -> None:
    """The same, streamed into a list as it comes."""
    with _post(port, prompt, tokens, stream=True) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                into += json.loads(line[6:])["choices"][0].get("token_ids") or []


def token_times(port: int, prompt: Sequence[int], tokens: int, model: str) -> list[float]:
    """When each token of an answer came, on `time.perf_counter`."""
    times: list[float] = []
    with _post(port, prompt, tokens, stream=True, model=model) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                times += [now] * len(json.loads(line[6:])["choices"][0].get("token_ids") or [])
    return times


def _post(port: int, prompt: Sequence[int], tokens: int, *, stream: bool, model: str = "tiny-llama-2") -> Any:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=180)


def refuses_connections(port: int, within_s: float) -> bool:
    """True once nobody answers on a port any more."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
        except urllib.error.URLError:
            return True
        time.sleep(0.5)
    return False
