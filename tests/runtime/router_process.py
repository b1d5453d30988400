"""The router in a process of its own."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
READY_S = 30
KEYS = ("HETPLAN_API_KEY", "HETPLAN_ADMIN_KEY", "VLLM_API_KEY")


@contextmanager
def run_router(
    folder: Path,
    ports: Sequence[int],
    *,
    api_key: str | None = None,
    admin_key: str | None = None,
    model: str = "tiny",
    **options: Any,
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A router before engines on this machine, and its port; what it says goes to ``folder / "router.log"``."""
    targets = [
        {"pipeline": number, "address": "127.0.0.1", "port": port, "weight": 1.0}
        for number, port in enumerate(ports, start=1)
    ]
    config = folder / "router.json"
    config.write_text(json.dumps({"model": model, "targets": targets, **options}), encoding="utf-8")
    with run_router_of(config, folder / "router.log", api_key=api_key, admin_key=admin_key) as router:
        yield router


@contextmanager
def run_router_of(
    config: Path, log: Path, *, api_key: str | None = None, admin_key: str | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A router as a router.json says, and its port; what it says goes to ``log``."""
    port = free_port()
    command = [sys.executable, "-m", "hetplan", "router", str(config), "--host", "127.0.0.1", "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if name not in KEYS}
    environment |= {"HETPLAN_API_KEY": api_key} if api_key else {}
    environment |= {"HETPLAN_ADMIN_KEY": admin_key} if admin_key else {}
    with (
        log.open("wb") as said,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT) as process,
    ):
        try:
            end = time.monotonic() + READY_S
            while not healthy(port):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the router is not ready: {log.read_text(errors='replace')[-3000:]}")
                time.sleep(0.1)
            yield process, port
        finally:
            process.kill()


def healthy(port: int) -> bool:
    """Whether /health answers 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def memory_bytes(pid: int, what: str = "VmRSS") -> int:
    """What a process holds (VmRSS), or has held at most (VmHWM)."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = re.search(rf"^{what}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
