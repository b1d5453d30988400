"""The router as a process: its socket, its limits on open files, its drain."""

from __future__ import annotations

import gc
import resource
import socket

from aiohttp import web

from hetplan.errors import InvalidInputError
from hetplan.runtime.router.app import OnEvent, Router
from hetplan.runtime.router.settings import RouterSettings

_BACKLOG = 1024


def serve(
    settings: RouterSettings,
    *,
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    admin_key: str | None,
    engine_key: str | None,
    on_event: OnEvent,
) -> None:
    """Run a router until SIGTERM or Ctrl-C; running requests may then finish for ``drain_s``.

    Raises
    ------
    InvalidInputError
        If the address cannot be listened on, or the journal's folder cannot be used.
    """
    _raise_file_limit()
    router = Router(settings, api_keys=api_keys, admin_key=admin_key, engine_key=engine_key, on_event=on_event)
    listening = _listening(host, port)
    on_event("listening", {"host": host, "port": listening.getsockname()[1], "pipelines": len(settings.targets)})
    # What was imported stays: the collector need not look at it again, which would hold up all streams.
    gc.collect()
    gc.freeze()
    web.run_app(
        router.application(),
        sock=listening,
        access_log=None,
        print=lambda *_: None,
        handler_cancellation=True,
        shutdown_timeout=settings.drain_s,
        keepalive_timeout=75.0,
    )


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        raise InvalidInputError(f"cannot listen on {host}:{port}: {error.strerror}. Choose another --port") from None
    return listening


def _raise_file_limit() -> None:
    """Each stream takes two sockets: use what the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
