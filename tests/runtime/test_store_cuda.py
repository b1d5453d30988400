"""A part on a GPU reaches another process as it is."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest
from store_process import ROOT

from hetplan.runtime.tensor_store.regions import make_region

try:
    import torch
except ModuleNotFoundError:
    torch = None

OPENS = """
import hashlib, json, sys
import torch
from hetplan.runtime.tensor_store.cuda import open_handle
storage = open_handle(json.loads(sys.stdin.read()))
held = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
print(hashlib.sha256(held[:1_000_000].cpu().numpy().tobytes()).hexdigest())
"""


# Defined only where it can run: a test that is skipped on every machine but one says nothing on the others.
if torch is not None and torch.cuda.is_available():

    @pytest.mark.gpu
    def test_bytes_reach_another_process_over_ipc() -> None:
        content = bytes(range(250)) * 4_000
        first, second = make_region("cuda:0", 1_000_064), make_region("cuda:0", 1_000_064)
        with first.landing(0, len(content)) as view:
            view[:] = content
        first.seal()
        second.copy(0, len(content), first, 0)
        second.seal()
        for region in (first, second):
            description = region.description()
            assert description["kind"] == "cuda"
            done = subprocess.run(
                [sys.executable, "-c", OPENS],
                cwd=ROOT,
                input=json.dumps(description["handle"]),
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.stdout.strip() == hashlib.sha256(content).hexdigest(), done.stderr
            region.close()

    @pytest.mark.gpu
    def test_what_fails_on_its_way_is_not_copied() -> None:
        region, copied = make_region("cuda:0", 64), make_region("cuda:0", 64)

        def land(content: bytes, error: Exception | None = None) -> None:
            with region.landing(0, 64) as view:
                view[:] = content
                if error is not None:
                    raise error

        land(b"a" * 64)
        with pytest.raises(ValueError, match="wrong"):
            land(b"b" * 64, ValueError("wrong"))
        copied.copy(0, 64, region, 0)
        copied.seal()
        assert bytes(copied._bytes.cpu().numpy()) == b"a" * 64
