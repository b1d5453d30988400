"""A request until it is answered: rendered, generated or asked whole; what becomes of it stands in the journal."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetplan.runtime.router.answers import usage_of
from hetplan.runtime.router.engine import PATHS, EngineRefusedError, InterruptedAttempt, Transport
from hetplan.runtime.router.fields import Handling
from hetplan.runtime.router.journal import Entry
from hetplan.runtime.router.requests import Work, whole_body
from hetplan.runtime.router.sequence import MAX_FRUITLESS, LostRequestError, Sequence, Tools, run_all
from hetplan.runtime.router.settings import RouterSettings
from hetplan.runtime.router.targets import NoTargetError, Target, TooLongError

_RENDER_TIMEOUT_S = 60.0
# What engines do in their own chats only, not where they are sent token ids.
_OWN_CHAT = frozenset({"tools", "tool_choice", "return_tokens_as_token_ids", "logprob_token_ids"})


@dataclass(slots=True, eq=False)
class Run:
    """A request that is being worked on or listened to."""

    entry: Entry
    work: Work
    sequences: list[Sequence] = field(default_factory=list)
    producer: asyncio.Task[None] | None = None
    listener: asyncio.Task[Any] | None = None


class Producer:
    """Works on requests.

    Parameters
    ----------
    tools : Tools
    settings : RouterSettings
    """

    def __init__(self, tools: Tools, settings: RouterSettings) -> None:
        self._tools, self._settings = tools, settings

    async def produce(self, run: Run) -> None:
        """Work on a request until it is answered, or cannot be."""
        entry = run.entry
        outcome, error = "ok", None
        try:
            async with asyncio.timeout(self._settings.request_s):
                await self._answer(run)
        except EngineRefusedError as refused:
            outcome, error = "refused", (refused.status, refused.message)
        except TooLongError as refused:
            outcome, error = "refused", (400, str(refused))
        except NoTargetError as lost:
            outcome, error = "no_pipeline", (503, f"{lost}; send it again later")
        except LostRequestError as lost:
            outcome, error = "lost", (lost.status, str(lost))
        except TimeoutError:
            outcome, error = "too_long", (504, f"not answered within {self._settings.request_s:g} s")
        except asyncio.CancelledError:
            self._tools.metrics.ended(entry.endpoint, "left")
            raise
        except Exception as fault:
            outcome, error = "failed", (500, "the router failed; its events say where")
            # Not what the exception says: it may hold a part of the request.
            self._tools.on_event("failed", {"request_id": entry.request_id, "error": _where(fault)})
        self._tools.metrics.ended(entry.endpoint, outcome)
        model = self._tools.targets.planned(entry.body.get("model"))
        if outcome == "ok":
            used = usage_of(entry) if entry.answer is None else entry.answer.get("usage") or {}
            counts = [used.get(name) or 0 for name in ("prompt_tokens", "completion_tokens")]
            self._tools.demand.ended(model, entry.query_type, *counts)
        elif outcome == "no_pipeline":
            self._tools.demand.rejected(model, entry.query_type)
        self._tools.journal.end(entry, error=error, answer=entry.answer)

    async def _answer(self, run: Run) -> None:
        entry, work = run.entry, run.work
        model = entry.body.get("model")
        transport = await self._transport(run, model)
        at_once = transport == "chat" or work.handling in (Handling.WHOLE, Handling.REPLAYED)
        if not work.stream and not entry.events and at_once:
            path = PATHS["completions" if entry.endpoint == "completions" else "chat"]
            entry.answer = await self._asked(model, path, whole_body(work), self._settings.request_s)
            return
        if transport == "generate" and entry.rendered is None:
            await self._render(run, model)
        choices = range(work.choices)
        run.sequences = [Sequence(self._tools, entry, work, i, transport, entry.rendered, model) for i in choices]
        await run_all(run.sequences)

    async def _transport(self, run: Run, model: str | None) -> Transport:
        """How engines are asked; what was begun one way goes on so, also after a restart."""
        if run.entry.endpoint == "completions":
            return "completions"
        if run.entry.rendered is not None:
            return "generate"
        if run.entry.events:
            return "chat"
        target = await self._tools.targets.wait(model)
        own = target.parses_chat or not target.renders or not _OWN_CHAT.isdisjoint(run.work.rows)
        return "chat" if own else "generate"

    async def _render(self, run: Run, model: str | None) -> None:
        rendered = await self._asked(model, "/v1/chat/completions/render", whole_body(run.work), _RENDER_TIMEOUT_S)
        if not isinstance(rendered.get("token_ids"), list) or not isinstance(rendered.get("sampling_params"), dict):
            raise LostRequestError(502, "an engine rendered the chat to something that is not token ids")
        if rendered.get("features"):
            raise EngineRefusedError(400, "a message holds a part that is no text; only text is token ids")
        self._tools.journal.set_rendered(run.entry, rendered)

    async def _asked(self, model: str | None, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """What an engine answers at once, asked of another when it dies."""
        avoided: list[Target] = []
        fruitless = 0
        while True:
            target = await self._tools.targets.wait(model, avoid=avoided)
            try:
                return await self._tools.engines.ask(target, path, body | {"model": target.served_model}, timeout_s)
            except InterruptedAttempt as interruption:
                self._tools.metrics.interrupted(interruption.reason)
                self._tools.targets.lost(target, interruption.reason)
                avoided = [target]
                fruitless += interruption.accepted
                if fruitless >= MAX_FRUITLESS:
                    raise LostRequestError(502, f"{MAX_FRUITLESS} pipelines in a row lost this request") from None


def _where(fault: Exception) -> str:
    """An exception's kind, and the line that it came from."""
    frames = traceback.extract_tb(fault.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(fault).__name__}{place}"
