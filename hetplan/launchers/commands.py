"""What a machine runs, as words: some are known only where it runs.

One source for the scripts of the target "shell", where such a word reads a variable, and for the controller, which
knows the addresses and starts programs without a shell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetplan.launchers.stores import ShardSource
from hetplan.launchers.vllm import Node, StoreMemory

# What scripts call the model and the socket; addresses have the names that their `Node` says.
MODEL, SOCKET = "model", "HETPLAN_STORE"


@dataclass(frozen=True, slots=True)
class Known:
    """A word that ends in a value known only where it is run, by name."""

    name: str
    prefix: str = ""


Word = str | Known


@dataclass(frozen=True, slots=True)
class Command:
    """A program's arguments, without the program, and the variables that it needs beside those that are there."""

    arguments: tuple[str, ...]
    variables: dict[str, str]


def engine_words(node: Node) -> list[Word]:
    """Arguments of ``vllm serve`` on a machine."""
    words: list[Word] = [Known(MODEL)]
    if node.rank == 0:
        words.append(Known(node.address, "--host="))
    if any(a.startswith("--nnodes=") for a in node.arguments):
        words.append(Known(node.head_address, "--master-addr="))
    return words + list(node.arguments)


def engine_variables(node: Node) -> dict[str, Word]:
    """Environment of ``vllm serve`` on a machine."""
    variables: dict[str, Word] = {"VLLM_HOST_IP": Known(node.address), **node.variables}
    if node.store is not None:
        variables[SOCKET] = Known(SOCKET)
    if "VLLM_NIXL_SIDE_CHANNEL_PORT" in node.variables:
        variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = Known(node.address)
    return variables


def store_words(store: StoreMemory, source: ShardSource) -> list[Word]:
    """Arguments of ``hetplan store serve`` on a machine."""
    return [
        Known(SOCKET, "--socket="),
        f"--shards={source.shards}",
        *([] if source.allowed_host is None else [f"--allow-host={source.allowed_host}"]),
        *(f"--device={device}" for device in store.devices),
        f"--memory={store.device_bytes}",
    ]


def engine_command(node: Node, *, model: str, addresses: Mapping[str, str], socket: str | None = None) -> Command:
    """What ``vllm serve`` is started with on a machine.

    Parameters
    ----------
    node : Node
    model : str
        Path or Hugging Face id that the engine loads.
    addresses : mapping
        Private addresses of the pipeline's machines, by the names that its nodes give them.
    socket : str, optional
        Of the machine's store, where it has one.

    Raises
    ------
    KeyError
        If something that the command needs is not given.
    """
    known = _known(model, addresses, socket)
    return Command(
        tuple(_text(word, known) for word in engine_words(node)),
        {name: _text(word, known) for name, word in engine_variables(node).items()},
    )


def store_command(store: StoreMemory, source: ShardSource, *, socket: str) -> Command:
    """What ``hetplan store serve`` is started with on a machine."""
    known = {SOCKET: socket}
    return Command(tuple(_text(word, known) for word in store_words(store, source)), {})


def store_loads(node: Node, layers: int) -> list[dict[str, object]]:
    """What a machine's store is asked to load for a pipeline: arguments of the store's client, without the model.

    Parameters
    ----------
    node : Node
    layers : int
        Of the whole model.
    """
    loads: list[dict[str, object]] = []
    gpu = 0
    for stage in node.stages:
        asked = {
            "tensor_parallel": stage.tensor_parallel,
            "layers": list(stage.layers),
            "first": stage.layers[0] == 0,
            "last": stage.layers[1] == layers,
        }
        if node.local:
            loads.append({**asked, "ranks": list(range(stage.tensor_parallel)), "device": "cpu"})
        else:
            # Ranks take the machine's GPUs in order.
            ranks = range(stage.tensor_parallel)
            loads += [{**asked, "ranks": [rank], "device": f"cuda:{gpu + rank}"} for rank in ranks]
        gpu += stage.tensor_parallel
    return loads


def _known(model: str, addresses: Mapping[str, str], socket: str | None) -> dict[str, str]:
    return {**addresses, MODEL: model} | ({} if socket is None else {SOCKET: socket})


def _text(word: Word, known: Mapping[str, str]) -> str:
    return word if isinstance(word, str) else word.prefix + known[word.name]
