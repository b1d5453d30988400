"""The verb that runs the router. The command line adds it to its own verbs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from hetplan.errors import InvalidInputError

Answer = Callable[[Callable[[], Any], bool], None]

_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def add_router(app: typer.Typer, *, answer: Answer) -> None:
    """Add this verb to the command line, which lends its way of answering."""

    @app.command()
    def router(
        config: Annotated[Path, typer.Argument(help="router.json of a launch folder.")],
        host: Annotated[str, typer.Option(help="Address to listen on; loopback unless told.")] = "127.0.0.1",
        port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on.")] = 8080,
        journal: Annotated[
            Path | None, typer.Option(help="Keep the journal in this folder too, so that a restart loses no stream.")
        ] = None,
        fsync: Annotated[bool, typer.Option(help="Each token reaches the disk before it is sent.")] = False,
        without_key: Annotated[
            bool, typer.Option("--without-key", help="Listen beyond loopback without HETPLAN_API_KEY.")
        ] = False,
    ) -> None:
        """Serve a plan's pipelines at one OpenAI-compatible address; streams outlive an engine.

        Keys come from the environment: HETPLAN_API_KEY (clients, several with commas), HETPLAN_ADMIN_KEY (notices,
        targets, demand), VLLM_API_KEY (engines).
        SIGTERM drains. Events are written on stderr, a JSON object a line.
        """

        def run() -> None:
            try:
                from hetplan.runtime.router.service import serve
            except ModuleNotFoundError as error:
                raise InvalidInputError(f"the router needs {error.name}; pip install 'hetplan[router]'") from None
            from hetplan.runtime.router.settings import RouterSettings

            keys = tuple(key.strip() for key in os.environ.get("HETPLAN_API_KEY", "").split(",") if key.strip())
            if host not in _LOOPBACK and not keys and not without_key:
                raise InvalidInputError(
                    f"--host {host} lets others in and HETPLAN_API_KEY is not set; set it, or say --without-key"
                )
            settings = RouterSettings.load(config)
            if journal is not None:
                settings = settings.replace(journal_folder=str(journal))
            if fsync:
                settings = settings.replace(journal_fsync=True)
            if settings.journal_fsync and settings.journal_folder is None:
                raise InvalidInputError("--fsync is about a journal on disk; give its folder with --journal")
            serve(
                settings,
                host=host,
                port=port,
                api_keys=keys,
                admin_key=os.environ.get("HETPLAN_ADMIN_KEY") or None,
                engine_key=os.environ.get("VLLM_API_KEY") or None,
                on_event=write_event,
            )

        answer(run, False)

    @app.command()
    def notices(
        provider: Annotated[str, typer.Argument(help="aws, gcp or azure: whose machine this is.")],
        pipeline: Annotated[int, typer.Option(min=1, help="The pipeline that this machine is part of.")],
        router: Annotated[str, typer.Option(help="Address of the router.")] = "http://127.0.0.1:8080",
        base_url: Annotated[
            str | None, typer.Option(help="Address of the metadata service; by default the provider's own.")
        ] = None,
    ) -> None:
        """Watch a spot machine for the notice that it will be taken away, and tell the router.

        Runs on the machine itself. HETPLAN_ADMIN_KEY holds the router's key for notices. Each notice is written on
        stderr, a JSON object a line.
        """

        def run() -> None:
            from hetplan.runtime.spot_notices.forward import forward_notices

            key = os.environ.get("HETPLAN_ADMIN_KEY")
            if not key:
                raise InvalidInputError("HETPLAN_ADMIN_KEY is not set; set it as it is for the router")
            with suppress(KeyboardInterrupt):
                forward_notices(
                    provider, pipeline=pipeline, router=router, key=key, base_url=base_url, on_event=write_event
                )

        answer(run, False)


def write_event(name: str, values: dict[str, Any]) -> None:
    """A service's event, as a line of JSON on stderr."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    typer.echo(json.dumps({"at": at, "event": name, **values}), err=True)
