"""The verb that makes shards. The command line adds it to its own verbs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.errors import InvalidInputError
from hetplan.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

Answer = Callable[[Callable[[], Any], bool], None]


def add_shard(app: typer.Typer, *, answer: Answer, console: Console) -> None:
    """Add this verb to the command line, which lends its way of answering."""

    @app.command()
    def shard(
        checkpoint: Annotated[Path, typer.Argument(help="Folder with config.json and .safetensors files.")],
        out: Annotated[Path, typer.Option(help="A new or empty folder.")],
        tensor_parallel: Annotated[str, typer.Option(help="Degrees, such as 1,2,4.")] = "1",
        model: Annotated[
            str | None, typer.Option(help="Name at the store, which is the plan's; by default the folder's.")
        ] = None,
        dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32, or auto.")] = "auto",
        python: Annotated[
            Path | None, typer.Option(help="Interpreter of vLLM's environment; by default beside vllm on the path.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on stdout.")] = False,
    ) -> None:
        """Write a checkpoint as shards for the tensor store: what each rank of each degree holds, file by file."""

        def said(progress: dict[str, Any]) -> None:
            console.print(
                f"degree {progress['tensor_parallel']}, rank {progress['rank']}: {format_bytes(progress['bytes'])}"
            )

        def run() -> dict[str, Any]:
            from hetplan.runtime.tensor_store.sharding import make_shards

            made = make_shards(
                checkpoint,
                out,
                tensor_parallel=_degrees(tensor_parallel),
                model=model,
                dtype=dtype,
                python=python,
                on_progress=said,
            )
            files = {tensor.sha256: tensor.bytes for tensor in made.tensors}
            console.print(
                f"{made.model} for {made.engine}: {len(made.tensors)} tensors in {len(files)} files, "
                f"{format_bytes(sum(files.values()))}, fingerprint {made.fingerprint}"
            )
            return {
                "model": made.model,
                "engine": made.engine,
                "fingerprint": made.fingerprint,
                "tensors": len(made.tensors),
                "files": len(files),
                "bytes": sum(files.values()),
            }

        answer(run, as_json)


def _degrees(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise InvalidInputError(f"--tensor-parallel takes degrees such as 1,2,4; got {text!r}")
    return tuple(map(int, parts))
