"""Which pipelines live, and whose turn it is: health, weighted turns, waiting for one to come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from hetplan.runtime.router.settings import RouterSettings, TargetSettings

_MAX_ANSWER_BYTES = 256 * 2**20


@dataclass(slots=True, eq=False)
class Target:
    """A pipeline as the router sees it.

    ``leaving`` is set by a spot notice: running streams may stay, new ones go elsewhere.
    """

    settings: TargetSettings
    model: str
    name: str
    served_model: str | None = None
    max_model_len: int | None = None
    # What an engine without --enable-scale-out does not do: token ids of a chat, and text of token ids.
    renders: bool = False
    parses_chat: bool = False
    healthy: bool = False
    leaving: bool = False
    # Failed probes since the last good one, when the target last sent a token to anyone, and when it was lost.
    failures: int = 0
    last_heard: float = 0.0
    lost_at: float = 0.0
    in_flight: int = 0
    decoding: int = 0
    # Prompt tokens of migrated requests that have not had a new token.
    paced_tokens: int = 0
    turn: float = 0.0

    @property
    def url(self) -> str:
        return self.settings.url

    @property
    def names(self) -> tuple[str | None, ...]:
        """What its model is called, by the plan and by the engine."""
        return self.model, self.served_model

    @property
    def open(self) -> bool:
        """True where a new stream may be sent."""
        limit = self.settings.max_in_flight
        return self.healthy and not self.leaving and (limit is None or self.in_flight < limit)


async def whole(reply: aiohttp.ClientResponse) -> bytes:
    """The body of an engine's answer, within a limit."""
    parts, size = [], 0
    while part := await reply.content.readany():
        parts.append(part)
        size += len(part)
        if size > _MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
    return b"".join(parts)


class TooLongError(Exception):
    """No pipeline, living or not, takes so many tokens."""


class NoTargetError(Exception):
    """No pipeline lived within the time that a request may wait."""


class Targets:
    """The pipelines of a router.

    Parameters
    ----------
    settings : RouterSettings
    session : aiohttp.ClientSession
    headers : dict
        Sent with each request to an engine; holds the engines' key, if any.
    on_event : callable
        Told of what operators want to know: a pipeline that is lost or back.
    clock : callable
        Seconds that only grow.
    """

    def __init__(
        self,
        settings: RouterSettings,
        session: aiohttp.ClientSession,
        headers: dict[str, str],
        on_event: Callable[[str, dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._session, self._headers = settings, session, headers
        self._on_event, self._clock = on_event, clock
        self.all = [
            Target(target, settings.model_of(target), f"pipeline-{target.pipeline}") for target in settings.targets
        ]
        self._changed = asyncio.Event()
        self._probes: list[asyncio.Task[None]] = []
        self._route_turns: dict[tuple[str, str], float] = {}

    def start(self) -> None:
        """Begin to look after the targets' health."""
        self._probes = [asyncio.create_task(self._watch(target)) for target in self.all]

    async def stop(self) -> None:
        """Stop looking."""
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)

    def models(self) -> list[str]:
        """Names that a client may ask for: the plan's, and what the engines call them."""
        names = dict.fromkeys(target.model for target in self.all)
        names |= dict.fromkeys(target.served_model for target in self.all if target.served_model)
        return list(names)

    def routed(self, model: str | None, query_type: str | None) -> str | None:
        """The model for a request: the one it names, or by the routes of its query type, in turn by their shares.

        Returns None where any model will do, and raises `KeyError` for a model that nobody serves.
        """
        if model is not None and model not in self.models():
            raise KeyError(model)
        shares = {r.model: r.fraction for r in self._settings.routes if r.query_type == query_type and r.fraction > 0}
        if model in shares or not shares or (model is not None and model != self._settings.model):
            return model
        assert query_type is not None  # noqa: S101
        turns = {name: self._route_turns.get((query_type, name), 0.0) + share for name, share in shares.items()}
        chosen = max(turns, key=lambda name: turns[name])
        turns[chosen] -= sum(shares.values())
        self._route_turns |= {(query_type, name): turn for name, turn in turns.items()}
        return chosen

    def choose(
        self, model: str | None, *, tokens: int = 0, avoid: Iterable[Target] = (), paced_tokens: int = 0
    ) -> Target | None:
        """The next target in smooth weighted turns, of those that live and have room for ``tokens``.

        Those to avoid are taken only where there is no other. With ``paced_tokens``, prompt tokens of a migrated
        request, targets that are busy with such prompts are left out.
        """
        budget = self._settings.prefill_tokens
        live = [
            target
            for target in self.all
            if target.open
            and (model is None or model in target.names)
            and (target.max_model_len is None or tokens <= target.max_model_len)
            and (not paced_tokens or not target.paced_tokens or target.paced_tokens + paced_tokens <= budget)
        ]
        avoided = set(avoid)
        candidates = [target for target in live if target not in avoided] or live
        if not candidates:
            return None
        for target in candidates:
            target.turn += target.settings.weight
        chosen = max(candidates, key=lambda target: target.turn)
        chosen.turn -= sum(target.settings.weight for target in candidates)
        return chosen

    async def wait(
        self, model: str | None, *, tokens: int = 0, avoid: Iterable[Target] = (), paced_tokens: int = 0
    ) -> Target:
        """As `choose`, waiting for a target where none lives.

        Raises
        ------
        NoTargetError
            After ``max_wait_s``.
        TooLongError
            If no target takes so many tokens, living or not.
        """
        lengths = [target.max_model_len for target in self.all if model is None or model in target.names]
        longest = max((length for length in lengths if length is not None), default=tokens)
        if None not in lengths and tokens > longest:
            raise TooLongError(f"prompt and answer have {tokens} tokens; the pipelines take {longest}. Send less")
        end = self._clock() + self._settings.max_wait_s
        avoided = tuple(avoid)
        while (target := self.choose(model, tokens=tokens, avoid=avoided, paced_tokens=paced_tokens)) is None:
            left = end - self._clock()
            if left <= 0:
                raise NoTargetError(f"no pipeline answered within {self._settings.max_wait_s:g} s")
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
            except TimeoutError:
                continue
        return target

    def leaves(self, target: Target) -> None:
        """A notice: nothing new goes to this target."""
        target.leaving = True
        self._on_event("pipeline_leaves", {"pipeline": target.settings.pipeline})

    def lost(self, target: Target, reason: str) -> None:
        """A stream found the target dead: nothing new goes there until a probe finds it healthy again."""
        if target.healthy:
            target.healthy = False
            target.lost_at = self._clock()
            self._on_event("pipeline_lost", {"pipeline": target.settings.pipeline, "reason": reason})

    def now(self) -> float:
        """The time by the router's clock, s."""
        return self._clock()

    def freed(self) -> None:
        """A stream ended: one that waits may have its place."""
        self._changed.set()

    def heard(self, target: Target) -> None:
        """A target sent tokens to someone."""
        target.last_heard = self._clock()

    async def _watch(self, target: Target) -> None:
        while True:
            error = await self._probe(target)
            if error is None:
                target.failures = 0
                if not target.healthy:
                    target.healthy, target.leaving = True, False
                    self._on_event("pipeline_ready", {"pipeline": target.settings.pipeline})
                    self._changed.set()
            else:
                target.failures += 1
                # One probe may be lost on a busy machine; a refused connection says it all.
                if target.failures > 1 or error == "refused":
                    self.lost(target, error)
            await asyncio.sleep(self._settings.health_interval_s)

    async def _probe(self, target: Target) -> str | None:
        """What is wrong with a target, if anything."""
        timeout = aiohttp.ClientTimeout(total=self._settings.health_timeout_s)
        try:
            async with self._session.get(
                f"{target.url}/health", headers=self._headers, timeout=timeout, allow_redirects=False
            ) as reply:
                if reply.status != 200:
                    return f"/health answers {reply.status}"
            # What it serves may have changed with it: asked again whenever it comes back.
            if target.healthy and target.served_model is not None:
                return None
            async with self._session.get(
                f"{target.url}/v1/models", headers=self._headers, timeout=timeout, allow_redirects=False
            ) as reply:
                if reply.status != 200:
                    return f"/v1/models answers {reply.status}"
                content = orjson.loads(await whole(reply))
            first = content["data"][0]
            if not isinstance(first["id"], str):
                return "does not answer as an engine does"
            target.served_model = first["id"]
            length = first.get("max_model_len")
            target.max_model_len = length if isinstance(length, int) and length > 0 else None
            target.renders, target.parses_chat = await self._abilities(target, timeout)
            if not target.renders:
                self._on_event(
                    "pipeline_does_not_render",
                    {"pipeline": target.settings.pipeline, "next_step": "start it with --enable-scale-out"},
                )
            if target.last_heard <= target.lost_at:
                await self._generates(target)
        except aiohttp.ClientConnectorError:
            return "refused"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return type(error).__name__
        except (ValueError, LookupError, TypeError):
            return "does not answer as an engine does"
        return None

    async def _generates(self, target: Target) -> None:
        """Ask for one token: /health does not see an engine that hangs behind its server.

        After two, as a prompt of one can end an engine with vLLM's ExampleConnector.
        """
        body = {"model": target.served_model, "prompt": [1, 1], "max_tokens": 1}
        # As long as a first token may take: an engine that is full lets it wait behind others.
        timeout = aiohttp.ClientTimeout(total=self._settings.first_token_s)
        async with self._session.post(
            f"{target.url}/v1/completions", json=body, headers=self._headers, timeout=timeout, allow_redirects=False
        ) as reply:
            if reply.status != 200 or "choices" not in orjson.loads(await whole(reply)):
                raise ValueError(f"no token: {reply.status}")

    async def _abilities(self, target: Target, timeout: aiohttp.ClientTimeout) -> tuple[bool, bool]:
        """Whether an engine turns token ids into text, and whether it has a parser for tools or reasoning.

        An engine with a parser refuses to make a message of token ids without the chat that they answer: only it can
        tell what is content.
        """
        body = {
            "model": target.served_model,
            "generate_response": {"choices": [{"index": 0, "token_ids": [0], "finish_reason": "stop"}]},
        }
        async with self._session.post(
            f"{target.url}/v1/chat/completions/derender", json=body, headers=self._headers, timeout=timeout
        ) as reply:
            content = await whole(reply)
            return reply.status not in (403, 404, 405), b"chat_request is required" in content
