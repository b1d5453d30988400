"""The Grafana dashboard asks for what a router counts, and for nothing else."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path

from recorded_stream import recorded_stream
from router_process import run_router

FILE = Path(__file__).resolve().parents[2] / "examples" / "grafana" / "router.json"


def metrics(port: int) -> set[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    # Those of tables appear with their first row, others with their first event.
    return set(re.findall(r"^# TYPE (hetplan_router_\w+)", text, re.MULTILINE))


def test_each_metric_of_the_dashboard_is_a_routers(tmp_path: Path) -> None:
    panels = json.loads(FILE.read_text(encoding="utf-8"))["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"hetplan_router_\w+", target["expr"])
    }
    with recorded_stream() as (_, engine), run_router(tmp_path, [engine]) as (_, port):
        body = json.dumps({"prompt": [1, 2], "max_tokens": 3}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        end = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(request, timeout=10).read()
                break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.2)
        known = metrics(port)
    assert asked <= known | {f"{name}_bucket" for name in known}
    # Grafana keeps panels apart by these.
    assert len({panel["id"] for panel in panels}) == len(panels)
