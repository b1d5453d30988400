"""A stream on its way to one client: events as they come, comments while none do, an end to who takes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from hetplan.runtime.router.answers import KEEP_ALIVE, Stream
from hetplan.runtime.router.journal import Entry
from hetplan.runtime.router.settings import RouterSettings


class Listener:
    """Sends a request's events to one client.

    Parameters
    ----------
    request : aiohttp.web.Request
    entry : Entry
    stream : Stream
        From the first event that the client has not.
    settings : RouterSettings
    synced : callable
        Awaited before events are sent: they are then as safe as was asked for.
    """

    def __init__(
        self,
        request: web.Request,
        entry: Entry,
        stream: Stream,
        settings: RouterSettings,
        synced: Callable[[], Awaitable[None]],
    ) -> None:
        self._request, self._entry, self._stream = request, entry, stream
        self._settings, self._synced = settings, synced
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                "X-Request-Id": entry.request_id,
            }
        )
        self._written_at = time.monotonic()
        # When the write that is under way began, if one is.
        self._writing_since: float | None = None
        self._task: asyncio.Task[object] | None = None
        # One clock a connection: a timeout around each event would cost more than the event.
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, on_first: Callable[[], None]) -> bool:
        """Send all events; False where the request ended with an error before anything was sent.

        Parameters
        ----------
        on_first : callable
            Told when the first event is there.
        """
        entry, stream = self._entry, self._stream
        self._task = asyncio.current_task()
        self._tick()
        try:
            while True:
                if stream.sent < len(entry.events):
                    on_first()
                    data = stream.next()
                    await self._synced()
                    await self._write(data)
                elif entry.ended:
                    break
                elif time.monotonic() - self._written_at >= self._settings.keepalive_s:
                    await self._write(KEEP_ALIVE)
                else:
                    entry.changed.clear()
                    await entry.changed.wait()
            if entry.error is not None and not self.response.prepared:
                return False
            await self._synced()
            await self._write(stream.end())
            self._writing_since = time.monotonic()
            await self.response.write_eof()
        finally:
            if self._timer is not None:
                self._timer.cancel()
        return True

    async def _write(self, data: bytes) -> None:
        self._written_at = self._writing_since = time.monotonic()
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(data)
        self._writing_since = None

    def _tick(self) -> None:
        """Wake the stream for a comment, or end it where its client takes nothing."""
        now, settings = time.monotonic(), self._settings
        if self._writing_since is not None and now - self._writing_since > settings.slow_client_s:
            if self._task is not None:
                self._task.cancel()
            return
        if now - self._written_at >= settings.keepalive_s:
            self._entry.changed.set()
        pause = min(settings.keepalive_s, settings.slow_client_s) / 4
        self._timer = asyncio.get_running_loop().call_later(pause, self._tick)
