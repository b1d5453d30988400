"""The router as a process: its socket, its limits on open files, its drain."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_runner import GracefulExit

from hetplan.errors import InvalidInputError
from hetplan.runtime.router.app import OnEvent, Router
from hetplan.runtime.router.settings import RouterSettings

_BACKLOG = 1024
_KEEP_ALIVE_S = 75.0
_COLLECTOR = (10_000, 50, 50)


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
    runner = web.AppRunner(
        router.application(),
        handle_signals=True,
        handler_cancellation=True,
        access_log=None,
        logger=_Events(on_event),
        shutdown_timeout=settings.drain_s,
        keepalive_timeout=_KEEP_ALIVE_S,
    )
    loop = _event_loop()
    try:
        loop.run_until_complete(_start(runner, listening))
        on_event("listening", {"host": host, "port": listening.getsockname()[1], "pipelines": router.pipelines})
        # The collector holds up all streams while it looks at everything. What was imported stays, and what the journal
        # holds is no garbage: it looks at the young often and at the old seldom.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_COLLECTOR)
        loop.run_forever()
    except (GracefulExit, KeyboardInterrupt):
        pass
    finally:
        loop.run_until_complete(runner.cleanup())
        loop.close()


def _event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed: a chunk takes half the time."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _start(runner: web.AppRunner, listening: socket.socket) -> None:
    await runner.setup()
    await web.SockSite(runner, listening, backlog=_BACKLOG).start()


class _Events:
    """What aiohttp would log of its connections, as counts of kinds: its messages hold what clients sent."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event

    def debug(self, *_: object, **__: object) -> None:
        """Nothing."""

    info = warning = debug

    def error(self, message: object, *_: object, exc_info: object = None, **__: object) -> None:
        """A connection's fault; one that a client left is none."""
        if isinstance(exc_info, BaseException) and not isinstance(exc_info, ConnectionError | HttpProcessingError):
            self._on_event("connection_failed", {"error": type(exc_info).__name__})

    exception = critical = error


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise InvalidInputError(f"cannot listen on {host}:{port}: {error.strerror}. Choose another --port") from None
    return listening


def _raise_file_limit() -> None:
    """Each stream takes two sockets: use what the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
