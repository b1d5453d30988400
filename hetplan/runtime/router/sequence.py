"""The chain of attempts behind one answer: continued or replayed on another engine until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from hetplan.runtime.recovery import ObservedCosts
from hetplan.runtime.router.deltas import (
    ChatState,
    Diverged,
    first_logprobs,
    last_logprobs,
    limit_top_logprobs,
    shift_offsets,
)
from hetplan.runtime.router.demand import Demand
from hetplan.runtime.router.engine import Attempt, Chunk, Engines, InterruptedAttempt, Transport
from hetplan.runtime.router.fields import Handling
from hetplan.runtime.router.journal import Entry, Event, Journal
from hetplan.runtime.router.metrics import Metrics
from hetplan.runtime.router.requests import Work, chat_body, first_body, next_body, rest_of_tokens
from hetplan.runtime.router.targets import Target, Targets
from hetplan.runtime.router.text import ContinuedText

# Attempts that an engine took and that died without a new token, one after another, before the request fails alone: it
# may be what kills them.
MAX_FRUITLESS = 2
# Token ids before an answer that tell a tokenizer what it stands behind.
_PROMPT_TAIL = 16
_DECODE_TIMEOUT_S = 10.0


class LostRequestError(Exception):
    """A request that cannot be answered; the message is for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


# Sends a sequence's cache; gives what the next engine has to be told, and what to call once it has it.
Handover = Callable[["Sequence"], Awaitable[tuple[dict[str, Any] | None, Callable[[], Any] | None]]]


@dataclass(slots=True)
class Tools:
    """What sequences work with."""

    targets: Targets
    engines: Engines
    journal: Journal
    metrics: Metrics
    costs: ObservedCosts
    demand: Demand
    on_event: Callable[[str, dict[str, Any]], None]


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request.

    Attributes
    ----------
    epoch : int
        Attempts so far. What comes from an attempt that is not the last is dropped.
    attempt : Attempt or None
        The one that runs, for who wants to move it.
    """

    tools: Tools
    entry: Entry
    work: Work
    choice: int
    transport: Transport
    rendered: Mapping[str, Any] | None
    model: str | None
    epoch: int = 0
    attempt: Attempt | None = None
    avoided: Target | None = None
    # Where to go next, and how the cache gets there, when a notice moves this sequence.
    preferred: Target | None = None
    handover: Handover | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    chat: ChatState = field(default_factory=ChatState)
    echoed: bool = False
    finished: bool = False
    offset: int = 0

    def __post_init__(self) -> None:
        # Engines leave the prompt's text out where its token ids are asked for.
        self.echoed = not self.work.echo or self.work.return_token_ids
        for event in self.entry.events:
            if event.choice == self.choice:
                self._note(event)

    @property
    def group(self) -> int:
        """Which of the request's prompts this answers."""
        return self.choice // self.work.n

    @property
    def context_tokens(self) -> int:
        """Tokens that an engine has to hold to go on."""
        prompt = self._prompt()
        return (len(prompt) if isinstance(prompt, list) else 0) + len(self.token_ids)

    @property
    def remaining_tokens(self) -> int | None:
        """The most tokens that are still to come, where that is known."""
        return rest_of_tokens(self.work, self.rendered, self.token_ids)

    async def run(self) -> None:
        """Generate until the end.

        Raises
        ------
        LostRequestError
            If two attempts in a row died without a new token, or an answer could not be generated again as it was.
        EngineRefusedError
            If an engine refuses the request.
        NoTargetError
            If no pipeline came back in time.
        """
        fruitless = 0
        while not self.finished:
            if self.token_ids and self.transport != "chat" and self.remaining_tokens == 0:
                # The engine died between the last token and saying so.
                self._emit(Event(self.choice, [], "", finish_reason="length"))
                return
            resumed = self.epoch > 0 or bool(self.token_ids)
            paced = self.context_tokens if resumed else 0
            told, after = None, None
            if self.handover is not None:
                told, after = await self.handover(self)
                self.handover = None
            target = self.preferred
            self.preferred = None
            if target is None or not target.open:
                target = await self.tools.targets.wait(
                    self.model,
                    tokens=self.context_tokens + 1,
                    avoid=() if self.avoided is None else (self.avoided,),
                    paced_tokens=paced,
                )
            had = len(self.token_ids)
            self.epoch += 1
            try:
                await self._attempt(target, self.epoch, paced, told)
            except InterruptedAttempt as interruption:
                self.avoided = target
                self.tools.metrics.interrupted(interruption.reason)
                if interruption.reason not in ("notice", "aborted", "diverged"):
                    self.tools.targets.lost(target, interruption.reason)
                grown = len(self.token_ids) > had
                # A notice is no death: what it moves was moved by the router.
                died = interruption.accepted and interruption.reason != "notice"
                fruitless = 0 if grown else fruitless + died
                if fruitless >= MAX_FRUITLESS:
                    raise LostRequestError(
                        502, f"{MAX_FRUITLESS} pipelines in a row lost this request without a new token of it"
                    ) from None
            finally:
                if after is not None:
                    await after()

    @property
    def continues(self) -> bool:
        """True where an answer goes on from its token ids, False where it is generated again."""
        return self.work.handling is not Handling.REPLAYED and self.transport != "chat"

    def context(self) -> list[int]:
        """Token ids of the prompt and of the answer so far."""
        return self._known_prompt() + self.token_ids

    async def _attempt(self, target: Target, epoch: int, paced: int, told: dict[str, Any] | None) -> None:
        replayed = not self.continues
        if self.transport == "chat":
            body = chat_body(self.work, self.choice, seed=self.entry.seed)
        elif not self.token_ids or replayed:
            body = first_body(self.work, self.choice, self._prompt(), seed=self.entry.seed, rendered=self.rendered)
            if self._known_prompt() and self.rendered is None:
                for name in ("truncate_prompt_tokens", "truncation_side", "suffix"):
                    body.pop(name, None)
        else:
            body = next_body(
                self.work,
                self.choice,
                self._known_prompt(),
                self.token_ids,
                seed=self.entry.seed,
                rendered=self.rendered,
            )
        body["model"] = target.served_model
        if told is not None:
            body["kv_transfer_params"] = told
        self.attempt = attempt = self.tools.engines.attempt(target)
        take = self._taker(target, replayed)
        started = self.tools.targets.now()
        heard: float | None = None
        target.paced_tokens += paced
        try:
            async with aclosing(self.tools.engines.stream(attempt, self.transport, body)) as chunks:
                async for chunk in chunks:
                    if epoch != self.epoch:
                        return
                    now = self.tools.targets.now()
                    if heard is None:
                        self.tools.costs.prefill(self.context_tokens, now - started)
                    elif chunk.token_ids:
                        self.tools.costs.step((now - heard) / len(chunk.token_ids))
                    heard = now
                    if paced:
                        target.paced_tokens -= paced
                        self.tools.metrics.resumed(now - started, paced)
                        self.tools.targets.freed()
                        paced = 0
                    if self.transport == "generate" and chunk.logprobs is not None:
                        limit_top_logprobs(chunk.logprobs, self.work.body.get("top_logprobs") or 0)
                    await self._begin(chunk, target)
                    await take(chunk)
                    if self.finished:
                        return
        except Diverged:
            raise InterruptedAttempt("diverged", accepted=True) from None
        finally:
            target.paced_tokens -= paced
            self.attempt = None

    def _taker(self, target: Target, replayed: bool) -> Callable[[Chunk], Any]:
        if self.transport == "chat":
            return _ChatReplay(self).take
        if not self.token_ids:
            return self._take
        if replayed:
            return _Replay(self).take
        return _Continuation(self, target).take

    async def _begin(self, chunk: Chunk, target: Target) -> None:
        """What comes before the first token: the prompt's token ids, and its text where it is echoed."""
        if chunk.prompt_token_ids and not self._known_prompt():
            self.tools.journal.set_prompt(self.entry, self.group, chunk.prompt_token_ids)
        if not self.echoed:
            prompt = self.work.prompts[self.group]
            if not isinstance(prompt, str):
                answer = await self.tools.engines.ask(
                    target, "/detokenize", {"model": target.served_model, "tokens": prompt}, _DECODE_TIMEOUT_S
                )
                prompt = str(answer["prompt"])
            self._emit(Event(self.choice, [], prompt))

    async def _take(self, chunk: Chunk) -> None:
        if chunk.token_ids or chunk.text or chunk.finish_reason is not None:
            self._emit(
                Event(self.choice, chunk.token_ids, chunk.text, chunk.logprobs, chunk.finish_reason, chunk.stop_reason)
            )

    def _emit(self, event: Event) -> None:
        self._note(event)
        self.tools.journal.append(self.entry, event)
        self.tools.metrics.tokens(len(event.token_ids))

    def _note(self, event: Event) -> None:
        if not self.echoed:
            self.echoed = True
            return
        self.token_ids += event.token_ids
        self.text += event.text
        if event.delta is not None:
            self.chat.add(event.delta)
        if event.logprobs is not None:
            self.offset = shift_offsets(event.logprobs, 0) or self.offset
        self.finished = event.finish_reason is not None

    def _known_prompt(self) -> list[int]:
        prompts = self.entry.prompts
        return prompts[self.group] if self.group < len(prompts) else []

    def _prompt(self) -> Any:
        return self._known_prompt() or self.work.prompts[self.group]

    async def decode(self, target: Target, token_ids: list[int]) -> str | None:
        """Text of this answer's token ids, by an engine; None where it does not do that."""
        if not target.renders:
            return None
        body: dict[str, Any] = {
            "model": target.served_model,
            "generate_responses": [
                {"choices": [{"index": 0, "token_ids": token_ids, "finish_reason": None}]},
            ],
            "prompt_token_ids": [self._known_prompt()[-_PROMPT_TAIL:] or None],
        }
        if self.work.body.get("skip_special_tokens") is False:
            body["completion_request"] = {"prompt": [1], "skip_special_tokens": False}
        answer = await self.tools.engines.ask(target, "/v1/completions/derender", body, _DECODE_TIMEOUT_S)
        try:
            return str(answer["choices"][0]["text"])
        except (LookupError, TypeError):
            raise InterruptedAttempt("broken_answer", accepted=True) from None


class _Continuation:
    """Chunks of an engine that was given what was emitted as a prompt."""

    def __init__(self, sequence: Sequence, target: Target) -> None:
        work = sequence.work
        self._sequence = sequence
        self._shift = sequence.offset
        self._text = ContinuedText(
            lambda ids: sequence.decode(target, ids),
            sequence.token_ids,
            sequence.text,
            work.stop,
        )

    async def take(self, chunk: Chunk) -> None:
        piece = await self._text.feed(chunk.token_ids, chunk.text, chunk.finish_reason, chunk.stop_reason)
        if not piece.token_ids and not piece.text and piece.finish_reason is None:
            return
        logprobs = chunk.logprobs
        if logprobs is not None:
            logprobs = first_logprobs(logprobs, len(piece.token_ids))
            shift_offsets(logprobs, self._shift)
        self._sequence._emit(
            Event(self._sequence.choice, piece.token_ids, piece.text, logprobs, piece.finish_reason, piece.stop_reason)
        )


class _Replay:
    """Chunks of an engine that generates an answer again: what was sent is compared, the rest is sent."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._sent = len(sequence.token_ids)
        self._seen = 0
        self._text = ""

    async def take(self, chunk: Chunk) -> None:
        sequence = self._sequence
        start, self._seen = self._seen, self._seen + len(chunk.token_ids)
        self._text += chunk.text
        known = sequence.token_ids[start : min(self._seen, self._sent)] if start < self._sent else []
        if chunk.token_ids[: len(known)] != known:
            raise Diverged
        if self._seen <= self._sent and chunk.finish_reason is None:
            return
        if self._seen < self._sent or not self._text.startswith(sequence.text):
            raise Diverged
        logprobs = chunk.logprobs
        if logprobs is not None and known:
            logprobs = last_logprobs(logprobs, len(chunk.token_ids) - len(known))
        sequence._emit(
            Event(
                sequence.choice,
                chunk.token_ids[len(known) :],
                self._text[len(sequence.text) :],
                logprobs,
                chunk.finish_reason,
                chunk.stop_reason,
            )
        )


class _ChatReplay:
    """Messages of an engine's own chat parser, also when it answers again: what goes beyond what was sent is sent."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._state = ChatState()
        self._sent = len(sequence.token_ids)
        self._seen = 0

    async def take(self, chunk: Chunk) -> None:
        sequence = self._sequence
        start, self._seen = self._seen, self._seen + len(chunk.token_ids)
        known = sequence.token_ids[start : min(self._seen, self._sent)]
        if chunk.token_ids[: len(known)] != known:
            raise Diverged
        self._state.add(chunk.delta or {})
        delta = self._state.beyond(sequence.chat)
        fresh = chunk.token_ids[max(0, self._sent - start) :]
        if not fresh and not delta and chunk.finish_reason is None:
            return
        logprobs = chunk.logprobs
        if logprobs is not None and len(fresh) < len(chunk.token_ids):
            logprobs = last_logprobs(logprobs, len(fresh))
        reason, why = chunk.finish_reason, chunk.stop_reason
        sequence._emit(Event(sequence.choice, fresh, "", logprobs, reason, why, delta, chunk.reasoning_tokens))


async def run_all(sequences: list[Sequence]) -> None:
    """Run the choices of a request side by side; when one fails, none goes on."""
    left = [sequence for sequence in sequences if not sequence.finished]
    if len(left) == 1:
        await left[0].run()
        return
    tasks = [asyncio.create_task(sequence.run()) for sequence in left]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
