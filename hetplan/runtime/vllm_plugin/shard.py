"""Writes a model's weights as the engine lays them out: one raw file per tensor, degree and rank.

Run in vLLM's environment, ``python -m hetplan.runtime.vllm_plugin.shard``; `hetplan shard` does so and writes the
manifest. vLLM's own code merges, cuts and pads the checkpoint's tensors, as rank r of n of a group that is not there,
so that the files hold what that rank would hold before it prepares kernels. Tensors are written layer by layer, and
their memory is given back: about two layers are held at a time.

Files are named by their sha256: what all ranks hold alike is written once.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hetplan.runtime.vllm_plugin import VERSIONS, installed_version
from hetplan.runtime.vllm_plugin.identity import ROWS, config_sha256, layer_of

TENSORS = "tensors"


class ShardError(RuntimeError):
    """The checkpoint cannot be written as shards."""


def main() -> None:
    """Write shards into a folder; progress as JSON lines on stdout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--tensor-parallel", required=True, type=int, nargs="+")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    try:
        write_shards(given.checkpoint, given.out, given.tensor_parallel, given.dtype)
    except (ShardError, ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


def write_shards(checkpoint: str, out: Path, degrees: list[int], dtype: str) -> None:
    """Write a folder ``tensors`` and ``rows.json``.

    Raises
    ------
    ShardError
        If this vLLM is not known, or tensors of the model are in no file of the checkpoint.
    """
    version = installed_version()
    if version not in VERSIONS:
        raise ShardError(f"shards are laid out as vLLM {', '.join(VERSIONS)} does; found {version or 'none'}")
    (out / TENSORS).mkdir(parents=True, exist_ok=True)
    files = _checkpoint_tensors(Path(checkpoint))
    rows: list[dict[str, Any]] = []
    config = _engine_config(checkpoint, dtype)
    with _one_process(config):
        for degree in degrees:
            for rank in range(degree):
                with _as_rank(config, rank, degree):
                    written = _write_rank(config, files, out, rank, degree)
                rows += written
                _say(tensor_parallel=degree, rank=rank, bytes=sum(row["bytes"] for row in written))
    model = config.model_config
    content = {
        "engine": f"vllm-{version}",
        "config_sha256": config_sha256(model.hf_config),
        "layers": model.get_total_num_hidden_layers(),
        "tensors": rows,
    }
    (out / ROWS).write_text(json.dumps(content), encoding="utf-8")


def _engine_config(checkpoint: str, dtype: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=checkpoint, dtype=dtype, enforce_eager=True).create_engine_config()


@contextmanager
def _one_process(config: Any) -> Iterator[None]:
    """vLLM's groups of one rank, over a file that nobody else knows."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        yield


@contextmanager
def _as_rank(config: Any, rank: int, degree: int) -> Iterator[None]:
    """Modules are built, and weights cut, as for one rank of a group; nothing is ever sent to the others."""
    from vllm.distributed import parallel_state

    group = parallel_state._TP
    pretended = copy.copy(group)
    pretended.rank, pretended.rank_in_group = rank, rank
    pretended.world_size, pretended.ranks = degree, list(range(degree))
    parallel_state._TP = pretended
    config.parallel_config.tensor_parallel_size = degree
    # Attention layers of one name may stand in the context once.
    config.compilation_config.static_forward_context.clear()
    try:
        yield
    finally:
        parallel_state._TP = group
        config.parallel_config.tensor_parallel_size = 1


def _write_rank(config: Any, files: dict[str, Path], out: Path, rank: int, degree: int) -> list[dict[str, Any]]:
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    model_config = config.model_config
    with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
        # Memory of parameters is not touched, so not taken, before weights are loaded into it.
        model = initialize_model(vllm_config=config, model_config=model_config)
    rows: list[dict[str, Any]] = []
    waiting: dict[int | None, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        waiting.setdefault(layer_of(name), []).append((name, tensor))
    parameters = {name for name, _ in model.named_parameters()}

    def write(layer: int | None) -> None:
        for name, tensor in waiting.pop(layer, ()):
            rows.append(_write_tensor(out, name, layer, tensor, rank, degree))
            if layer is not None and name in parameters:
                tensor.data = tensor.new_empty(0)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        before: int | None = None
        for name in sorted(files, key=_loading_order):
            layer = layer_of(name)
            if layer != before and before is not None:
                write(before)
            before = layer
            yield name, _read_tensor(files[name], name)

    with set_default_torch_dtype(model_config.dtype):
        loaded = model.load_weights(weights())
    for layer in list(waiting):
        write(layer)
    missing = sorted(parameters - loaded) if loaded is not None else []
    if missing:
        raise ShardError(f"the checkpoint has nothing for {', '.join(missing[:5])} ({len(missing)} tensors)")
    return rows


def _loading_order(name: str) -> tuple[str, int, str]:
    """By the outermost module, as vLLM loads them one after the other; within it by layer."""
    layer = layer_of(name)
    return name.partition(".")[0], -1 if layer is None else layer, name


def _write_tensor(
    out: Path, name: str, layer: int | None, tensor: torch.Tensor, rank: int, degree: int
) -> dict[str, Any]:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.sha256(raw).hexdigest()
    path = out / TENSORS / f"{digest}.bin"
    if not path.exists():
        part = path.with_suffix(".part")
        raw.tofile(part)
        os.replace(part, path)
    return {
        "name": name,
        "layer": layer,
        "tensor_parallel": degree,
        "rank": rank,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "bytes": raw.nbytes,
        "sha256": digest,
    }


def _checkpoint_tensors(folder: Path) -> dict[str, Path]:
    """Which safetensors file holds each tensor of a checkpoint."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        wrong = [file for file in names.values() if not re.fullmatch(r"[\w.-]+\.safetensors", file)]
        if wrong:
            raise ShardError(f"{index} names {wrong[0]!r}; files stand beside the index and end in .safetensors")
        return {name: folder / file for name, file in names.items()}
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    if not found:
        raise ShardError(f"{folder} holds no .safetensors files; give the folder of a checkpoint")
    return found


def _read_tensor(path: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
