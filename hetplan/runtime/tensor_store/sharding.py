"""Makes shards of a checkpoint: the engine's own code lays the weights out, in the engine's environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hetplan.errors import InvalidInputError
from hetplan.runtime.tensor_store.manifest import Manifest
from hetplan.runtime.vllm_plugin.identity import ROWS

_MAX_DEGREE = 64
_DTYPES = ("auto", "bfloat16", "float16", "float32")
# What vLLM wants to know of the network, though nothing is sent.
_ALONE = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
_LAST_WORDS = 2000


def make_shards(
    checkpoint: str | Path,
    out: str | Path,
    *,
    tensor_parallel: Sequence[int] = (1,),
    model: str | None = None,
    dtype: str = "auto",
    python: str | Path | None = None,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> Manifest:
    """Write a model's shards and their manifest.

    Parameters
    ----------
    checkpoint : path
        Folder with config.json and .safetensors files.
    out : path
        A new or empty folder.
    tensor_parallel : sequence of int
        Degrees; each is written for all of its ranks.
    model : str, optional
        Name of the model at the store; by default the checkpoint folder's. `hetplan launch` uses the plan's.
    dtype : str
        "bfloat16", "float16", "float32", or "auto" for what vLLM would take.
    python : path, optional
        Interpreter of vLLM's environment; by default the one beside ``vllm`` (or HETPLAN_VLLM) on the path.
    on_progress : callable, optional
        Called for each rank written, with ``tensor_parallel``, ``rank`` and ``bytes``.

    Returns
    -------
    Manifest

    Raises
    ------
    InvalidInputError
        If an argument cannot be used, no vLLM is found, or vLLM cannot lay the checkpoint out.
    """
    source, folder = Path(checkpoint).absolute(), Path(out).absolute()
    if not (source / "config.json").is_file():
        raise InvalidInputError(f"{checkpoint} holds no config.json; give the folder of a checkpoint")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInputError(f"{out} exists and is not an empty folder; choose another or empty it")
    degrees = sorted(set(tensor_parallel))
    if not degrees or degrees[0] < 1 or degrees[-1] > _MAX_DEGREE:
        raise InvalidInputError(f"tensor_parallel is {list(tensor_parallel)}; give degrees from 1 to {_MAX_DEGREE}")
    if dtype not in _DTYPES:
        raise InvalidInputError(f"dtype is {dtype!r}; one of {', '.join(_DTYPES)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"cannot write {out}: {error.strerror}. Choose another folder") from None
    command = [str(_interpreter(python)), "-m", "hetplan.runtime.vllm_plugin.shard"]
    command += [f"--checkpoint={source}", f"--out={folder}", f"--dtype={dtype}", "--tensor-parallel"]
    _run([*command, *map(str, degrees)], on_progress)
    rows = folder / ROWS
    manifest = Manifest.of(model=model or source.name, **json.loads(rows.read_text(encoding="utf-8")))
    manifest.write(folder)
    rows.unlink()
    return manifest


def _interpreter(given: str | Path | None) -> Path:
    if given is not None:
        if not Path(given).is_file():
            raise InvalidInputError(f"python {str(given)!r} is no file; give the interpreter of vLLM's environment")
        return Path(given)
    name = os.environ.get("HETPLAN_VLLM", "vllm")
    found = shutil.which(name)
    beside = Path(found).parent / "python" if found else None
    if beside is None or not beside.exists():
        raise InvalidInputError(
            f"no vLLM: {name!r} is not on the path with a python beside it. Activate its environment, or give "
            "--python=.../bin/python of it; hetplan must be installed there (pip install --no-deps hetplan)"
        )
    return beside


def _run(command: list[str], on_progress: Callable[[dict[str, Any]], None] | None) -> None:
    # A list of words, no shell: an interpreter that the caller chose, absolute paths, and names from fixed lists.
    with subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_ALONE | dict(os.environ)
    ) as process:
        said: list[str] = []
        for line in process.stdout or ():
            if line.startswith('{"tensor_parallel"') and on_progress is not None:
                on_progress(json.loads(line))
            said = [*said[-40:], line]
    if process.returncode:
        errors = [line.strip() for line in said if line.startswith("error: ")]
        reason = errors[-1] if errors else "".join(said)[-_LAST_WORDS:]
        raise InvalidInputError(f"vLLM could not lay the checkpoint out: {reason}")
