"""Emitted scripts start real vLLM as they stand, and what they start does what the plan says."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time
from pathlib import Path

from conftest import launched
from environment import published_sources
from servers import Cluster, complete, refuses_connections, stream

import hetplan as hp
from hetplan.catalog.engines import get_engine

PROMPTS = [list(range(start, start + 20)) for start in (10, 50, 200, 300)]
TOKENS = 60


def test_scripts_of_a_plan_start_and_agree(
    pair: Cluster, uneven: hp.Plan, environment: Path, model: Path, tmp_path: Path
) -> None:
    """Two pipelines answer on both ports; an uneven one over two nodes gives the tokens of one process, and drains."""
    reference = [complete(8000, prompt, TOKENS) for prompt in PROMPTS]
    assert all(len(tokens) == TOKENS for tokens in reference)
    assert [complete(8001, prompt, TOKENS) for prompt in PROMPTS] == reference
    long = complete(8000, PROMPTS[0], 300)
    pair.stop()

    for cluster in launched(uneven, tmp_path / "out", environment, model):
        assert [complete(8000, prompt, TOKENS) for prompt in PROMPTS] == reference

        # SIGTERM: streams under way end whole, then the engine leaves.
        streams: list[list[int]] = [[], [], []]
        threads = [threading.Thread(target=stream, args=(8000, PROMPTS[0], 300, into)) for into in streams]
        for thread in threads:
            thread.start()
        while min(map(len, streams)) < 10:
            time.sleep(0.05)
        cluster.head().send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(180)
        assert streams == [long, long, long]
        assert refuses_connections(8000, within_s=60)


def test_every_flag_and_variable_is_known_to_the_engine_that_runs(environment: Path) -> None:
    shown = subprocess.run(
        [environment / "bin" / "vllm", "serve", "--help=all"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(Path.home())},
    ).stdout
    engine = get_engine("vllm-0.32")
    assert engine.checked == "run"
    for flag in engine.flags:
        assert re.search(rf"{re.escape(flag)}\b", shown), flag
    (source,) = (environment / "lib").glob("python3*/site-packages/vllm/envs.py")
    for variable in engine.variables:
        assert variable in source.read_text(encoding="utf-8"), variable


def test_every_flag_and_variable_stands_in_the_next_versions_wheel() -> None:
    engine = get_engine("vllm-0.33")
    assert engine.checked == "not run"
    sources = "\n".join(published_sources(engine.version).values())
    for flag in engine.flags:
        field = flag.removeprefix("--").replace("-", "_")
        assert f'"{flag}"' in sources or re.search(rf"^\s+{field}\s*:", sources, re.MULTILINE), flag
    for variable in engine.variables:
        assert variable in sources, variable
