"""The verbs of the tensor store. The command line adds them to its own."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli_router import write_event
from hetplan.errors import InvalidInputError
from hetplan.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

Answer = Callable[[Callable[[], Any], bool], None]
Socket = Annotated[Path, typer.Option(help="Unix socket of the store.")]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on stdout.")]


def add_store(app: typer.Typer, *, answer: Answer, console: Console) -> None:
    """Add these verbs to the command line, which lends its way of answering."""
    verbs = typer.Typer(no_args_is_help=True, help="A node's weights, held once and shared by its engines.")
    app.add_typer(verbs, name="store")

    @verbs.command()
    def serve(
        socket: Socket,
        shards: Annotated[list[str], typer.Option(help="Folder, http(s) or s3 address with a manifest; repeat.")],
        allow_host: Annotated[
            list[str] | None, typer.Option(help="Host, or s3://BUCKET, that weights may come from; repeat.")
        ] = None,
        memory: Annotated[
            str | None, typer.Option(help="What each device may hold, such as '200 GiB'; by default no limit.")
        ] = None,
        device: Annotated[list[str] | None, typer.Option(help="cpu, or a GPU such as cuda:0; repeat. cpu.")] = None,
        threads: Annotated[int, typer.Option(min=1, max=256, help="Threads that fetch and check.")] = 8,
    ) -> None:
        """Hold weights for the engines of this node until SIGTERM or Ctrl-C.

        Secrets of S3 come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN.
        Events are written on stderr, a JSON object a line.
        """

        def run() -> None:
            from hetplan.runtime.tensor_store.service import serve

            signal.signal(signal.SIGTERM, signal.default_int_handler)
            with suppress(KeyboardInterrupt):
                serve(
                    socket,
                    shards,
                    on_event=write_event,
                    allow_hosts=allow_host or (),
                    memory_bytes=_bytes(memory),
                    devices=device or ("cpu",),
                    threads=threads,
                )

        answer(run, False)

    @verbs.command()
    def status(socket: Socket, as_json: Json = False) -> None:
        """What a store holds, for whom, and what is free."""

        def run() -> dict[str, Any]:
            from hetplan.runtime.tensor_store.client import connect

            with connect(socket) as store:
                found = store.status()
            for line in _status_lines(found):
                console.print(line)
            return found

        answer(run, as_json)

    @verbs.command()
    def load(
        socket: Socket,
        model: Annotated[str, typer.Option(help="Model, as its manifest calls it.")],
        layers: Annotated[str, typer.Option(help="START:STOP, the second not included.")],
        tensor_parallel: Annotated[int, typer.Option(min=1, help="Degree.")] = 1,
        rank: Annotated[list[int] | None, typer.Option(min=0, help="Rank; repeat. All of the degree.")] = None,
        first: Annotated[bool, typer.Option("--first", help="Also the embedding.")] = False,
        last: Annotated[bool, typer.Option("--last", help="Also the final norm and the head.")] = False,
        device: Annotated[str, typer.Option(help="cpu, or a GPU such as cuda:0.")] = "cpu",
        fingerprint: Annotated[
            str | None, typer.Option(help="Of the manifest, where there are several of the model.")
        ] = None,
        as_json: Json = False,
    ) -> None:
        """Load weights before the engine that needs them comes."""

        def run() -> dict[str, Any]:
            from hetplan.runtime.tensor_store.client import connect

            with connect(socket, timeout_s=None) as store:
                brought = store.load(
                    model=model,
                    tensor_parallel=tensor_parallel,
                    ranks=rank or list(range(tensor_parallel)),
                    layers=_layers(layers),
                    first=first,
                    last=last,
                    device=device,
                    fingerprint=fingerprint,
                )
            console.print(
                f"{format_bytes(brought['fetched_bytes'])} fetched, {format_bytes(brought['reused_bytes'])} copied "
                f"from other parts, {format_bytes(brought['held_bytes'])} there before"
            )
            return brought

        answer(run, as_json)

    @verbs.command()
    def evict(socket: Socket, as_json: Json = False) -> None:
        """Free the weights that no engine has a lease on."""

        def run() -> dict[str, Any]:
            from hetplan.runtime.tensor_store.client import connect

            with connect(socket) as store:
                freed = store.evict()
            console.print(f"{format_bytes(freed['freed_bytes'])} freed")
            return freed

        answer(run, as_json)


def _bytes(text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise InvalidInputError(f"--memory: {error}") from None


def _layers(text: str) -> tuple[int, int]:
    start, separator, stop = text.partition(":")
    if not separator or not all(part.isascii() and part.isdigit() for part in (start, stop)):
        raise InvalidInputError(f"--layers takes START:STOP, such as 0:16; got {text!r}")
    return int(start), int(stop)


def _status_lines(found: dict[str, Any]) -> list[str]:
    lines = [f"{m['model']}: {m['layers']} layers for {m['engine']}, from {m['source']}" for m in found["models"]]
    for device, account in found["devices"].items():
        free = account["free_bytes"]
        lines.append(
            f"{device}: {format_bytes(account['weights_bytes'])} of weights, "
            f"{format_bytes(account['held_bytes'])} held, {format_bytes(account['borrowed_bytes'])} borrowed, "
            + ("no limit" if free is None else f"{format_bytes(free)} free")
        )
    lines += [
        f"lease of {lease['holder']['what']} (pid {lease['holder']['pid']}): "
        f"{lease['parts']} parts on {lease['device']}, "
        f"{format_bytes(lease['hold_bytes'])} held, {format_bytes(lease['borrowed_bytes'])} borrowed"
        for lease in found["leases"]
    ]
    parts = found["parts"]
    lines.append(
        f"{len(parts)} parts, {format_bytes(sum(part['bytes'] for part in parts))}; so far "
        f"{format_bytes(found['fetched_bytes'])} fetched, {format_bytes(found['reused_bytes'])} copied from other parts"
    )
    return lines
