"""What is missing is said before anything is started, and why an engine ended is said by its first error."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import hetplan as hp
from hetplan.catalog.engines import get_engine
from hetplan.errors import InvalidInputError
from hetplan.launchers.vllm import Node, nodes_of
from hetplan.runtime.controller.causes import cause_of
from hetplan.runtime.controller.preflight import check_engine, check_model, check_ports

ENGINE = get_engine("vllm-0.32")


def nodes(machine: str) -> list[Node]:
    plan = hp.optimize(
        model="qwen3-0.6b",
        cluster=hp.Cluster.from_counts({machine: 1}, region="here", market="owned", provider="local"),
        workload=hp.Workload(input_tokens=20, output_tokens=60),
        engine="vllm-0.32",
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
    )
    return nodes_of(plan, ENGINE)


def program(folder: Path, *packages: str) -> str:
    """A stand-in for vLLM beside a Python that has these packages, such as vllm-0.32.0."""
    site = folder / "site"
    for package in packages:
        name, _, version = package.partition("-")
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    found = folder / "vllm"
    found.write_text("#!/bin/sh\n")
    for file in (python, found):
        file.chmod(0o700)
    return str(found)


def refused(words: str) -> object:
    return pytest.raises(InvalidInputError, match=re.escape(words))


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with refused("--vllm /path/to/bin/vllm"):
        check_engine([str(tmp_path / "vllm")], ENGINE, [])


@pytest.mark.parametrize(
    ("packages", "said"),
    [
        ((), "has no vllm"),
        (("vllm-0.31.2",), "is vLLM 0.31.2, and the plan is for 0.32.0"),
        (("vllm-0.32.0+cpu",), "pip install --no-deps hetplan"),
        (("vllm-0.32.1", "hetplan-0.1.0"), None),
    ],
)
def test_an_engine_of_another_version_or_without_the_plugin_is_refused(
    packages: tuple[str, ...], said: str | None, tmp_path: Path
) -> None:
    needed = [replace(node, staged=True) for node in nodes("local-cpu")]
    words = [program(tmp_path, *packages)]
    if said is None:
        check_engine(words, ENGINE, needed)
    else:
        with refused(said):  # type: ignore[attr-defined]
            check_engine(words, ENGINE, needed)


def test_a_program_without_a_python_beside_it_is_taken_as_it_is(tmp_path: Path) -> None:
    found = tmp_path / "container"
    found.write_text("#!/bin/sh\n")
    found.chmod(0o700)
    check_engine([str(found)], ENGINE, nodes("local-cpu"))


def test_a_path_is_a_checkpoint_and_an_id_is_left_to_the_engine(tmp_path: Path) -> None:
    check_model("meta-llama/Llama-3.1-8B")
    with refused("config.json"):
        check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        with refused(f"port {port}"):
            check_ports([port])
    check_ports([port])


LOG = """
(APIServer pid=11) INFO 12-01 01:02:54 [api_server.py:10] starting
(Worker_PP0 pid=13) ERROR 12-01 01:02:55 [multiproc_executor.py:8] WorkerProc failed to start.
(Worker_PP0 pid=13) ERROR 12-01 01:02:55 [multiproc_executor.py:8] Traceback (most recent call last):
(Worker_PP0 pid=13) ERROR 12-01 01:02:55 [multiproc_executor.py:8]   File "loader.py", line 2, in load
(Worker_PP0 pid=13) ERROR 12-01 01:02:55 [multiproc_executor.py:8] RuntimeError: Cannot find any model weights with `/m`
(EngineCore pid=12) ERROR 12-01 01:02:56 [core.py:9] RuntimeError: Engine core initialization failed.
(APIServer pid=11) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_the_first_error_of_a_log_is_the_cause() -> None:
    assert cause_of(LOG) == "RuntimeError: Cannot find any model weights with `/m`"
    assert cause_of("vllm: No such file or directory") == "vllm: No such file or directory"
    assert cause_of("") == ""
    assert cause_of(LOG.splitlines()[-1]).startswith("RuntimeError: Engine core initialization failed")
    assert (
        cause_of("vllm serve: error: unrecognized arguments: --x") == "vllm serve: error: unrecognized arguments: --x"
    )


def test_serve_says_it_and_starts_nothing(tmp_path: Path) -> None:
    plan = hp.optimize(
        model="qwen3-0.6b",
        cluster=hp.Cluster.from_counts({"local-cpu": 1}, region="here", market="owned", provider="local"),
        workload=hp.Workload(input_tokens=20, output_tokens=60),
        engine="vllm-0.32",
        max_model_len=1024,
    )
    plan.save(tmp_path / "plan.json")
    command = [
        sys.executable,
        "-m",
        "hetplan",
        "serve",
        str(tmp_path / "plan.json"),
        "--state",
        str(tmp_path / "state"),
    ]
    done = subprocess.run([*command, "--vllm", "no-such-vllm"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "no program 'no-such-vllm'" in " ".join(done.stderr.split())
    assert not (tmp_path / "state").exists()
