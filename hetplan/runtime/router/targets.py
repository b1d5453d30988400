"""Which pipelines there are and which live, and whose turn it is: health, weighted turns, waiting for one to come back.

An engine is known by its address and port. `Targets.want` says which there are to be: a new one is used once its probe
finds it healthy, and one that is left out goes on until another takes its place (`Targets.retire`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import orjson

from hetplan.runtime.router.settings import RouterSettings, RouteSettings, TargetSettings
from hetplan.runtime.router.turns import Turns

_MAX_ANSWER_BYTES = 256 * 2**20


State = Literal["starting", "serving", "leaving", "lost"]


@dataclass(slots=True, eq=False)
class Target:
    """A pipeline as the router sees it.

    ``leaving`` is set by a spot notice, ``retired`` where another has taken its place: running streams may stay, new
    ones go elsewhere. One that is no longer ``wanted`` is used like any other until it is retired.
    """

    settings: TargetSettings
    model: str
    wanted: bool = True
    retired: bool = False
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
    lost_at: float | None = None
    # What `state` was when somebody last looked, and the time of day since when.
    noted: State = "starting"
    since: float = field(default_factory=time.time)
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
        return self.state == "serving" and (limit is None or self.in_flight < limit)

    @property
    def state(self) -> State:
        """What it is to new requests: only one that serves is sent any."""
        if self.leaving or self.retired:
            return "leaving"
        if self.healthy:
            return "serving"
        return "starting" if self.lost_at is None else "lost"

    @property
    def named(self) -> dict[str, Any]:
        """What events call it: two engines may have one number, while one takes the other's place."""
        return {"pipeline": self.settings.pipeline, "address": f"{self.settings.address}:{self.settings.port}"}


async def whole(reply: aiohttp.ClientResponse, most_bytes: int = _MAX_ANSWER_BYTES) -> bytes:
    """The body of an answer, within a limit; ValueError beyond it."""
    parts, size = [], 0
    while part := await reply.content.readany():
        parts.append(part)
        size += len(part)
        if size > most_bytes:
            raise ValueError(f"an answer of more than {most_bytes} bytes")
    return b"".join(parts)


class TooLongError(Exception):
    """No pipeline, living or not, takes so many tokens."""


class NoTargetError(Exception):
    """No pipeline lived within the time that a request may wait."""


class Targets:
    """The pipelines of a router; none until `want` has named them.

    Parameters
    ----------
    settings : RouterSettings
    session : aiohttp.ClientSession
        Sends the engines' key, if any, with each request.
    on_event : callable
        Told of what operators want to know: a pipeline that is lost or back.
    clock : callable
        Seconds that only grow.
    """

    def __init__(
        self,
        settings: RouterSettings,
        session: aiohttp.ClientSession,
        on_event: Callable[[str, dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._session = settings, session
        self._on_event, self._clock = on_event, clock
        self.all: list[Target] = []
        self.routes: tuple[RouteSettings, ...] = ()
        # Called when a target begins to serve.
        self.on_serving: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()
        self._probes: dict[Target, asyncio.Task[None]] | None = None
        self._route_turns: dict[str, Turns] = {}

    def start(self) -> None:
        """Begin to look after the targets' health."""
        self._probes = {target: asyncio.create_task(self._watch(target)) for target in self.all}

    async def stop(self) -> None:
        """Stop looking."""
        probes = list((self._probes or {}).values())
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    def want(self, targets: Iterable[TargetSettings], routes: tuple[RouteSettings, ...]) -> None:
        """These are the targets from now on: what is new is begun, what changed is changed, the others may be retired.

        Routes hold at once.
        """
        self.routes, self._route_turns = routes, {}
        known = {target.url: target for target in self.all}
        for settings in targets:
            target, model = known.pop(settings.url, None), self._settings.model_of(settings)
            if target is None:
                target = Target(settings, model)
                self.all.append(target)
                if self._probes is not None:
                    self._probes[target] = asyncio.create_task(self._watch(target))
            else:
                target.settings, target.model, target.wanted, target.retired = settings, model, True, False
                self._note(target)
        for target in known.values():
            target.wanted = False
        self._changed.set()

    def retire(self, *, drain: bool = False) -> list[Target]:
        """Retire those that are not wanted and whose place is taken; returns them.

        The place of a target is taken when a wanted one with its number serves, where there is such a one, and a wanted
        one with its model, where there is such a one; where there is neither, when any wanted one serves. One that has
        never served has no place. With ``drain`` all that are not wanted are retired.
        """
        retired = []
        wanted = [target for target in self.all if target.wanted]
        for target in self.all:
            if target.wanted or target.retired:
                continue
            groups = [
                [heir for heir in wanted if heir.settings.pipeline == target.settings.pipeline],
                [heir for heir in wanted if heir.model == target.model],
            ]
            groups = [group for group in groups if group] or [wanted]
            placeless = drain or target.state == "starting"
            if placeless or all(any(heir.state == "serving" for heir in group) for group in groups):
                target.retired = True
                self._leaves(target)
                retired.append(target)
        return retired

    async def drop(self, target: Target) -> None:
        """Forget a retired target."""
        self.all.remove(target)
        probe = None if self._probes is None else self._probes.pop(target)
        if probe is not None:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
        self._on_event("pipeline_gone", target.named)

    def models(self) -> list[str]:
        """Names that a client may ask for: the plan's, and what the engines call them."""
        there = [target for target in self.all if not target.retired]
        names = dict.fromkeys(target.model for target in there)
        names |= dict.fromkeys(target.served_model for target in there if target.served_model)
        return list(names)

    def planned(self, model: str | None) -> str:
        """What the plan calls the model of a request."""
        names = (target.model for target in self.all if model in target.names)
        return self._settings.model if model is None else next(names, model)

    def routed(self, model: str | None, query_type: str | None) -> str | None:
        """The model for a request: the one it names, or by the routes of its query type, in turn by their shares.

        Returns None where any model will do, and raises `KeyError` for a model that nobody serves.
        """
        if model is not None and model not in self.models():
            raise KeyError(model)
        shares = {r.model: r.fraction for r in self.routes if r.query_type == query_type and r.fraction > 0}
        if model in shares or not shares or (model is not None and model != self._settings.model):
            return model
        assert query_type is not None  # noqa: S101
        if query_type not in self._route_turns:
            self._route_turns[query_type] = Turns(shares)
        return self._route_turns[query_type].next()

    def choose(
        self, model: str | None, *, tokens: int = 0, avoid: Iterable[Target] = (), paced_tokens: int = 0
    ) -> Target | None:
        """The next target in smooth weighted turns, of those that live and have room for ``tokens``.

        Those to avoid are taken only where there is no other. With ``paced_tokens``, prompt tokens of a migrated
        request, targets that are busy with such prompts are left out.
        """
        live = self.candidates(model, tokens=tokens, paced_tokens=paced_tokens)
        avoided = set(avoid)
        candidates = [target for target in live if target not in avoided] or live
        if not candidates:
            return None
        for target in candidates:
            target.turn += target.settings.weight
        chosen = max(candidates, key=lambda target: target.turn)
        chosen.turn -= sum(target.settings.weight for target in candidates)
        return chosen

    def candidates(self, model: str | None, *, tokens: int = 0, paced_tokens: int = 0) -> list[Target]:
        """Those that `choose` has the choice of."""
        budget = self._settings.prefill_tokens
        return [
            target
            for target in self.all
            if target.open
            and (model is None or model in target.names)
            and (target.max_model_len is None or tokens <= target.max_model_len)
            and (not paced_tokens or not target.paced_tokens or target.paced_tokens + paced_tokens <= budget)
        ]

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
        there = [target for target in self.all if not target.retired]
        lengths = [target.max_model_len for target in there if model is None or model in target.names]
        longest = max((length for length in lengths if length is not None), default=tokens)
        if None not in lengths and tokens > longest:
            raise TooLongError(f"prompt and answer have {tokens} tokens; the pipelines take {longest}. Send less")
        end = self._clock() + self._settings.max_wait_s
        avoided = tuple(avoid)
        while (target := self.choose(model, tokens=tokens, avoid=avoided, paced_tokens=paced_tokens)) is None:
            left = end - self._clock()
            if left <= 0:
                raise NoTargetError(f"no pipeline answered within {self._settings.max_wait_s:g} s")
            await self.change(min(left, 1.0))
        return target

    async def change(self, timeout_s: float) -> None:
        """Return when a target may have become free, or after a while."""
        self._changed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    def leaves(self, target: Target) -> None:
        """A notice: nothing new goes to this target."""
        target.leaving = True
        self._leaves(target)

    def _leaves(self, target: Target) -> None:
        self._note(target)
        self._on_event("pipeline_leaves", target.named)

    def stays(self, target: Target) -> None:
        """A notice is taken back."""
        target.leaving = False
        self._note(target)
        self._changed.set()
        if target.state == "serving":
            self.on_serving()

    def lost(self, target: Target, reason: str) -> None:
        """A stream found the target dead: nothing new goes there until a probe finds it healthy again."""
        if target.healthy:
            target.healthy = False
            target.lost_at = self._clock()
            self._note(target)
            self._on_event("pipeline_lost", {**target.named, "reason": reason})

    def found(self, target: Target) -> None:
        """A target is healthy, and no notice that it had before it was lost is of account."""
        target.failures = 0
        if not target.healthy:
            target.healthy, target.leaving = True, False
            self._note(target)
            self._on_event("pipeline_ready", target.named)
            self._changed.set()
            self.on_serving()

    def _note(self, target: Target) -> None:
        if target.noted != target.state:
            target.noted, target.since = target.state, time.time()

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
                self.found(target)
            else:
                target.failures += 1
                # One probe may be lost on a busy machine; a refused connection says it all.
                if target.failures > 1 or error == "refused":
                    self.lost(target, error)
            await asyncio.sleep(self._settings.health_interval_s)

    async def _probe(self, target: Target) -> str | None:
        """What is wrong with a target, if anything."""
        timeout_s = self._settings.health_timeout_s
        try:
            status, _ = await self._ask(target, "/health", timeout_s)
            if status != 200:
                return f"/health answers {status}"
            # What it serves may have changed with it: asked again whenever it comes back.
            if target.healthy and target.served_model is not None:
                return None
            status, content = await self._ask(target, "/v1/models", timeout_s)
            if status != 200:
                return f"/v1/models answers {status}"
            first = orjson.loads(content)["data"][0]
            if not isinstance(first["id"], str):
                return "does not answer as an engine does"
            target.served_model = first["id"]
            length = first.get("max_model_len")
            target.max_model_len = length if isinstance(length, int) and length > 0 else None
            target.renders, target.parses_chat = await self._abilities(target)
            if not target.renders:
                self._on_event(
                    "pipeline_does_not_render", {**target.named, "next_step": "start it with --enable-scale-out"}
                )
            if target.lost_at is None or target.last_heard <= target.lost_at:
                await self._generates(target)
        except aiohttp.ClientConnectorError:
            return "refused"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return type(error).__name__
        except (ValueError, LookupError, TypeError):
            return "does not answer as an engine does"
        return None

    async def _ask(
        self, target: Target, path: str, timeout_s: float, body: dict[str, Any] | None = None
    ) -> tuple[int, bytes]:
        """Status and content of an engine's answer to a probe."""
        async with self._session.request(
            "GET" if body is None else "POST",
            target.url + path,
            json=body,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            allow_redirects=False,
        ) as reply:
            return reply.status, await whole(reply)

    async def _generates(self, target: Target) -> None:
        """Ask for one token: /health does not see an engine that hangs behind its server.

        After two, as a prompt of one can end an engine with vLLM's ExampleConnector.
        """
        body = {"model": target.served_model, "prompt": [1, 1], "max_tokens": 1}
        # As long as a first token may take: an engine that is full lets it wait behind others.
        status, content = await self._ask(target, "/v1/completions", self._settings.first_token_s, body)
        if status != 200 or "choices" not in orjson.loads(content):
            raise ValueError(f"no token: {status}")

    async def _abilities(self, target: Target) -> tuple[bool, bool]:
        """Whether an engine turns token ids into text, and whether it has a parser for tools or reasoning.

        An engine with a parser refuses to make a message of token ids without the chat that they answer: only it can
        tell what is content.
        """
        body = {
            "model": target.served_model,
            "generate_response": {"choices": [{"index": 0, "token_ids": [0], "finish_reason": "stop"}]},
        }
        status, content = await self._ask(
            target, "/v1/chat/completions/derender", self._settings.health_timeout_s, body
        )
        return status not in (403, 404, 405), b"chat_request is required" in content
