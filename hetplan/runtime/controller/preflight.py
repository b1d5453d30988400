"""What is looked at before a plan is served, so that one learns at once what is missing and what to do."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hetplan.catalog.engines import EngineProfile
from hetplan.errors import InvalidInputError
from hetplan.launchers.vllm import Node

# Asked of the Python beside the engine's program, which imports neither.
_ASK = """
import json
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
print(json.dumps([version("vllm"), version("hetplan")]))
"""
_ASK_S = 30.0


class Installed(NamedTuple):
    """Versions of the engine and of the plugin where the engine runs; None where one is not installed."""

    vllm: str | None
    plugin: str | None


def check_engine(program: Sequence[str], engine: EngineProfile, nodes: Sequence[Node]) -> None:
    """The engine is there, of the plan's version, and has the plugin where the plan needs it.

    Raises
    ------
    InvalidInputError
        It names what is missing. A program of another name, or without a Python beside it, is taken as it is: a
        container's, for one.
    """
    found = shutil.which(program[0])
    if found is None:
        raise InvalidInputError(
            f"there is no program {program[0]!r} to start engines with. Install vLLM (pip install "
            f"vllm=={engine.version}, in an environment of its own if you like), or say where it is: "
            "--vllm /path/to/bin/vllm"
        )
    installed = _installed(Path(found))
    if installed is None:
        return
    if installed.vllm is None:
        raise InvalidInputError(f"{found} is not vLLM's: the Python beside it has no vllm; give --vllm another path")
    if installed.vllm.split(".")[:2] != engine.version.split(".")[:2]:
        raise InvalidInputError(
            f"{found} is vLLM {installed.vllm}, and the plan is for {engine.version} ({engine.name}). Install "
            f"vllm=={engine.version}, or plan with the engine that you have"
        )
    if installed.plugin is None and any(_needs_plugin(node, nodes) for node in nodes):
        raise InvalidInputError(
            f"the plan needs hetplan's plugin beside {found}: vLLM by itself does not run its stages, or not on a CPU. "
            f"Install hetplan there: {Path(found).parent / 'python'} -m pip install --no-deps hetplan"
        )


def check_model(source: str) -> None:
    """What the engine loads, where it is a path, is a folder with a config.json.

    Raises
    ------
    InvalidInputError
        If it is not.
    """
    if not source.startswith(("/", "./", "../", "~")):
        return
    folder = Path(source).expanduser()
    if not (folder / "config.json").is_file():
        raise InvalidInputError(
            f"there is no {folder / 'config.json'}: --model takes the folder of a checkpoint, or a Hugging Face id"
        )


def check_ports(ports: Sequence[int]) -> None:
    """Nothing listens on these ports of loopback.

    Raises
    ------
    InvalidInputError
        It names the first that is taken.
    """
    for port in ports:
        with socket.socket() as asked:
            asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                asked.bind(("127.0.0.1", port))
            except OSError as error:
                raise InvalidInputError(
                    f"port {port} of 127.0.0.1 cannot be had ({error.strerror}): end what listens there, or give "
                    "another --port or --first-port"
                ) from None


def _needs_plugin(node: Node, nodes: Sequence[Node]) -> bool:
    """A CPU's pipelines of more than one stage need it, whatever the stages are."""
    stages = sum(len(other.stages) for other in nodes if other.pipeline == node.pipeline)
    return node.staged or (node.local and stages > 1)


def _installed(program: Path) -> Installed | None:
    python = program.parent / "python"
    if program.name != "vllm" or not python.exists():
        return None
    try:
        # It lies beside the program that is started anyway.
        done = subprocess.run(  # noqa: S603
            [python, "-c", _ASK], capture_output=True, timeout=_ASK_S, check=True, text=True
        )
        vllm, plugin = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return Installed(vllm, plugin)
