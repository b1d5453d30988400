"""One attempt on one engine: a request posted, its stream read chunk by chunk, its death told apart from its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import orjson

from hetplan.runtime.router.settings import RouterSettings
from hetplan.runtime.router.targets import Target, Targets, whole

_MAX_EVENT_BYTES = 64 * 2**20
# Statuses by which an engine, or what stands before it, says that it cannot now: another may.
_NOT_NOW = frozenset({401, 408, 425, 429})

Transport = Literal["completions", "generate", "chat"]
PATHS: dict[str, str] = {
    "completions": "/v1/completions",
    "generate": "/inference/v1/generate",
    "chat": "/v1/chat/completions",
}


class InterruptedAttempt(Exception):
    """The engine was lost, or gave up this request. ``reason`` is one of a few words, fit for a metric.

    ``accepted`` is true where the engine had taken the request.
    """

    def __init__(self, reason: str, *, accepted: bool) -> None:
        super().__init__(reason)
        self.reason, self.accepted = reason, accepted


class EngineRefusedError(Exception):
    """The engine takes the request for wrong: what it says goes to the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass(slots=True, frozen=True)
class Chunk:
    """What an engine sent at a time for the one choice it was asked for."""

    token_ids: list[int]
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | None
    delta: dict[str, Any] | None
    # Of the whole answer until here, where a parser of thoughts counts them.
    reasoning_tokens: int | None = None


@dataclass(slots=True, eq=False)
class Attempt:
    """A running attempt, as others see it: `leave` ends it from outside."""

    target: Target
    started: float
    reason: str | None = None
    _end: Callable[[], object] | None = None

    def leave(self, reason: str) -> None:
        """Give the engine up: the attempt is interrupted for this reason."""
        if self.reason is None:
            self.reason = reason
            if self._end is not None:
                self._end()


class Engines:
    """Requests to engines.

    Parameters
    ----------
    settings : RouterSettings
    session : aiohttp.ClientSession
        Sends the engines' key, if any, with each request.
    targets : Targets
    """

    def __init__(self, settings: RouterSettings, session: aiohttp.ClientSession, targets: Targets) -> None:
        self._settings, self._session, self._targets = settings, session, targets
        self._running: set[Attempt] = set()
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for engines that fell silent."""
        self._watcher = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop looking."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    def attempt(self, target: Target) -> Attempt:
        """An attempt on a target, to be streamed."""
        return Attempt(target, self._targets.now())

    async def stream(self, attempt: Attempt, transport: Transport, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """Chunks of an attempt until its last, which has a finish reason.

        Raises
        ------
        InterruptedAttempt
            If the connection, the engine or the request dies before.
        EngineRefusedError
            If the engine refuses the request itself.
        """
        target = attempt.target
        accepted = decoding = False
        target.in_flight += 1
        reply: aiohttp.ClientResponse | None = None
        try:
            self._running.add(attempt)
            posting = asyncio.ensure_future(self._post(target, PATHS[transport], body))
            attempt._end = posting.cancel
            reply = await posting
            content = reply.content
            attempt._end = lambda: content.set_exception(TimeoutError())
            if reply.status != 200:
                raise await _refusal(reply)
            accepted = True
            async with aclosing(_events(content)) as events:
                async for data in events:
                    chunk = _parsed(data, started=decoding)
                    self._targets.heard(target)
                    if not decoding:
                        decoding = True
                        target.decoding += 1
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
            raise InterruptedAttempt("ended_early", accepted=True)
        except asyncio.CancelledError:
            if attempt.reason is None:
                raise
            raise InterruptedAttempt(attempt.reason, accepted=False) from None
        except TimeoutError:
            raise InterruptedAttempt(attempt.reason or "timeout", accepted=accepted) from None
        except aiohttp.ClientConnectorError:
            raise InterruptedAttempt("refused", accepted=False) from None
        except (aiohttp.ClientError, OSError):
            raise InterruptedAttempt("connection_lost", accepted=accepted) from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise InterruptedAttempt("broken_answer", accepted=accepted) from None
        finally:
            self._running.discard(attempt)
            attempt._end = None
            if reply is not None:
                reply.close()
            target.in_flight -= 1
            target.decoding -= decoding
            self._targets.freed()

    async def ask(self, target: Target, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The JSON object that an engine answers.

        Raises
        ------
        InterruptedAttempt
            If there is none.
        EngineRefusedError
            If the engine refuses the request itself.
        """
        target.in_flight += 1
        try:
            async with asyncio.timeout(timeout_s), await self._post(target, path, body) as reply:
                if reply.status != 200:
                    raise await _refusal(reply)
                content = orjson.loads(await whole(reply))
            if not isinstance(content, dict):
                raise InterruptedAttempt("broken_answer", accepted=True)
        except TimeoutError:
            raise InterruptedAttempt("stalled", accepted=True) from None
        except aiohttp.ClientConnectorError:
            raise InterruptedAttempt("refused", accepted=False) from None
        except (aiohttp.ClientError, OSError):
            raise InterruptedAttempt("connection_lost", accepted=True) from None
        except ValueError:
            raise InterruptedAttempt("broken_answer", accepted=True) from None
        finally:
            target.in_flight -= 1
            self._targets.freed()
        return content

    async def _post(self, target: Target, path: str, body: dict[str, Any]) -> aiohttp.ClientResponse:
        return await self._session.post(
            target.url + path,
            data=orjson.dumps(body),
            headers={"Content-Type": "application/json"},
            allow_redirects=False,
        )

    async def _watch(self) -> None:
        """End attempts whose target fell silent; it has to show that it generates before it is used again."""
        settings = self._settings
        while True:
            await asyncio.sleep(min(settings.stall_s, settings.health_timeout_s) / 4)
            now = self._targets.now()
            for attempt in list(self._running):
                target = attempt.target
                limit = settings.stall_s if target.decoding else settings.first_token_s
                if not target.healthy:
                    limit = min(limit, 2 * settings.health_timeout_s)
                if now - max(target.last_heard, attempt.started) > limit:
                    attempt.leave("stalled")


async def _refusal(reply: aiohttp.ClientResponse) -> Exception:
    if reply.status >= 500 or reply.status in _NOT_NOW or reply.status < 400:
        return InterruptedAttempt(f"status_{reply.status}", accepted=False)
    message = f"the engine answered {reply.status}"
    try:
        content = orjson.loads(await whole(reply))
        told = content["error"]["message"] if "error" in content else content["message"]
        message = told if isinstance(told, str) else message
    except (ValueError, LookupError, TypeError):
        pass
    return EngineRefusedError(reply.status, message)


async def _events(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """The data of server-sent events; engines send each in one line."""
    left = b""
    while part := await content.readany():
        lines = (left + part).split(b"\n")
        left = lines.pop()
        if len(left) > _MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {_MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                # The end of a stream proves nothing: an engine that died says so too.
                if data != b"[DONE]":
                    yield data


def _parsed(data: bytes, *, started: bool) -> Chunk:
    content = orjson.loads(data)
    if "error" in content:
        error = content["error"]
        code = error.get("code")
        if not started and isinstance(code, int) and 400 <= code < 500 and code not in _NOT_NOW:
            raise EngineRefusedError(code, str(error.get("message")))
        raise InterruptedAttempt("error_event", accepted=True)
    if not content["choices"]:
        return Chunk([], "", None, None, None, None, None)
    choice = content["choices"][0]
    if choice.get("finish_reason") in ("abort", "error"):
        raise InterruptedAttempt("aborted", accepted=True)
    details = (content.get("usage") or {}).get("completion_tokens_details") or {}
    return Chunk(
        choice.get("token_ids") or [],
        choice.get("text") or "",
        choice.get("logprobs"),
        choice.get("finish_reason"),
        choice.get("stop_reason"),
        choice.get("prompt_token_ids") or content.get("prompt_token_ids"),
        choice.get("delta"),
        details.get("reasoning_tokens"),
    )
