"""Shards of a small model, servers that hand them out, and a tensor store in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hetplan.runtime.tensor_store.client import Attached, Mapping, Store, connect
from hetplan.runtime.tensor_store.manifest import Manifest, TensorShard, file_of

ROOT = Path(__file__).resolve().parents[2]
READY_S = 30
MODEL = "tiny-llama"
ENGINE = "vllm-0.32.0"
CONFIG = "c" * 64


def make_shards(
    folder: Path, *, layers: int = 4, weight_bytes: int = 40_000, model: str = MODEL, seed: int = 0, **changes: Any
) -> Manifest:
    """A model at degrees 1 and 2: weights that are split, and norms that all ranks hold alike."""
    draw = random.Random(f"{model} {seed}")
    (folder / "tensors").mkdir(parents=True)
    rows: list[dict[str, Any]] = []

    def add(name: str, layer: int | None, content: bytes, split: bool) -> None:
        for degree in (1, 2):
            for rank in range(degree):
                size = len(content) // degree if split else len(content)
                shard = content[rank * size : (rank + 1) * size] if split else content
                sha256 = hashlib.sha256(shard).hexdigest()
                (folder / file_of(sha256)).write_bytes(shard)
                rows.append(
                    {
                        "name": name,
                        "layer": layer,
                        "tensor_parallel": degree,
                        "rank": rank,
                        "dtype": "float32",
                        "shape": [size // 4],
                        "bytes": size,
                        "sha256": sha256,
                    }
                )

    add("model.embed_tokens.weight", None, draw.randbytes(8_000), split=True)
    for layer in range(layers):
        add(f"model.layers.{layer}.mlp.weight", layer, draw.randbytes(weight_bytes), split=True)
        add(f"model.layers.{layer}.norm.weight", layer, draw.randbytes(400), split=False)
    add("model.norm.weight", None, draw.randbytes(404), split=False)
    add("lm_head.weight", None, draw.randbytes(8_000), split=True)
    manifest = Manifest.of(
        **{"model": model, "engine": ENGINE, "config_sha256": CONFIG, "layers": layers, "tensors": rows, **changes}
    )
    manifest.write(folder)
    return manifest


def rows_of(manifest: Manifest, tensor_parallel: int = 1, rank: int = 0) -> list[TensorShard]:
    """What one rank holds."""
    return [row for row in manifest.tensors if (row.tensor_parallel, row.rank) == (tensor_parallel, rank)]


def names_of(manifest: Manifest, start: int, stop: int) -> list[str]:
    """Names of the tensors of some layers."""
    return [row.name for row in rows_of(manifest) if row.layer is not None and start <= row.layer < stop]


def attach(store: Store, manifest: Manifest, names: list[str] | None = None, **changes: Any) -> Attached:
    """Attach as rank 0 of 1, unless told otherwise, to all tensors."""
    values = {
        "model": manifest.model,
        "engine": manifest.engine,
        "config_sha256": manifest.config_sha256,
        "tensor_parallel": 1,
        "rank": 0,
        "tensors": [row.name for row in rows_of(manifest)] if names is None else names,
        **changes,
    }
    return store.attach(**values)


def require_intact(attached: Attached, manifest: Manifest, tensor_parallel: int = 1, rank: int = 0) -> set[str]:
    """Map all parts and compare each tensor's hash with the manifest's; the names."""
    known = {row.name: row for row in rows_of(manifest, tensor_parallel, rank)}
    seen = set()
    for part in attached.parts:
        mapping = Mapping(part)
        for name, place in part.tensors.items():
            assert place.offset % 64 == 0
            assert (place.bytes, place.dtype, place.shape) == (known[name].bytes, "float32", known[name].shape)
            assert hashlib.sha256(mapping.tensor(name)).hexdigest() == known[name].sha256
            seen.add(name)
    return seen


def drop(attached: Attached) -> None:
    """Close what an attach brought."""
    for part in attached.parts:
        if part.fd is not None:
            os.close(part.fd)


@dataclass
class RunningStore:
    """A store's process and its socket."""

    process: subprocess.Popen[bytes]
    socket: Path
    log: Path

    def connect(self, **options: Any) -> Store:
        return connect(self.socket, **options)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@contextmanager
def run_store(
    *sources: str | Path, prelude: str = "", secrets: dict[str, str] | None = None, **options: Any
) -> Iterator[RunningStore]:
    """A store; ``prelude`` is code before it starts, whose ``extra`` are further options of `serve`."""
    with tempfile.TemporaryDirectory(prefix="hetplan-store-") as folder:
        socket, log = Path(folder) / "s" / "store.sock", Path(folder) / "store.log"
        code = f"""
import json, sys
from hetplan.runtime.tensor_store.service import serve
extra = {{}}
{prelude}
def on_event(name, values):
    print(json.dumps({{"event": name, **values}}), flush=True)
serve({str(socket)!r}, {[str(source) for source in sources]!r}, on_event=on_event, **{options!r}, **extra)
"""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with (
            log.open("wb") as said,
            subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=ROOT,
                env=environment | (secrets or {}),
                stdout=said,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            try:
                wait_until(lambda: '"listening"' in log.read_text() or process.poll() is not None, READY_S)
                if process.poll() is not None:
                    raise RuntimeError(log.read_text(errors="replace")[-3000:])
                yield RunningStore(process, socket, log)
            finally:
                process.kill()


def wait_until(true: Any, limit_s: float = 10.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.02)


@dataclass
class Served:
    """A folder behind HTTP, and what was asked of it."""

    port: int
    bytes_by_file: dict[str, int] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    without_ranges: bool = False
    cuts: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tensor_bytes(self) -> int:
        """Bytes of tensors sent so far."""
        return sum(count for name, count in self.bytes_by_file.items() if name.startswith("tensors/"))


@contextmanager
def run_http(folder: Path) -> Iterator[Served]:
    """A server of files with ranges, which counts what it sends."""
    served = Served(0)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            name = self.path.lstrip("/")
            if name in served.redirects:
                self._send(302, b"", {"Location": served.redirects[name]})
                return
            path = folder / name
            if not path.is_file():
                self._send(404, b"none")
                return
            size = path.stat().st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if asked is None or served.without_ranges:
                self._send(200, path.read_bytes())
                return
            start, stop = int(asked[1]), min(int(asked[2]) + 1, size)
            if start >= size:
                self._send(416, b"")
                return
            with lock:
                served.bytes_by_file[name] = served.bytes_by_file.get(name, 0) + stop - start
            with path.open("rb") as file:
                file.seek(start)
                content = file.read(stop - start)
            with lock:
                cut, served.cuts = served.cuts > 0, max(served.cuts - 1, 0)
            sent = content[: len(content) // 2] if cut else content
            headers = {"Content-Range": f"bytes {start}-{stop - 1}/{size}", "Content-Length": str(len(content))}
            self._send(206, sent, headers)
            self.close_connection = cut

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                self.wfile.write(body)
            except ConnectionError:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()
