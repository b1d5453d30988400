"""What clients are sent: chunks of a stream, whole answers, errors; in OpenAI's form, as vLLM writes it."""

from __future__ import annotations

from typing import Any

import orjson

from hetplan.runtime.router.deltas import ChatState
from hetplan.runtime.router.journal import Entry, Event
from hetplan.runtime.router.requests import Work

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting for a pipeline or a token\n\n"
_KINDS = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError"}


def error_content(status: int, message: str, param: str | None = None) -> bytes:
    """An error as a JSON document."""
    kind = _KINDS.get(status, "InvalidRequestError" if status < 500 else "ServerError")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})


def usage_of(entry: Entry) -> dict[str, Any]:
    """Tokens of prompts, counted once each, and of answers."""
    counts = {event.choice: event.reasoning_tokens for event in entry.events if event.reasoning_tokens is not None}
    completion = sum(len(event.token_ids) for event in entry.events)
    return _usage(sum(map(len, entry.prompts)), completion, sum(counts.values()) if counts else None)


def _usage(prompt: int, completion: int, reasoning: int | None) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "completion_tokens_details": None if reasoning is None else {"reasoning_tokens": reasoning},
    }


class Stream:
    """Events of a request as server-sent events; an event's id is how many there were with it.

    Parameters
    ----------
    entry : Entry
    work : Work
    model : str
        The name that the client sees.
    start : int
        Events that the client has already.
    """

    def __init__(self, entry: Entry, work: Work, model: str, start: int = 0) -> None:
        self._entry, self._work = entry, work
        kind = "text_completion" if work.endpoint == "completions" else "chat.completion.chunk"
        self._head = {"id": entry.request_id, "object": kind, "created": entry.created, "model": model}
        self._counts: dict[int, int] = {}
        self.sent = 0
        while self.sent < min(start, len(entry.events)):
            event = entry.events[self.sent]
            self._counts[event.choice] = self._counts.get(event.choice, 0) + len(event.token_ids)
            self.sent += 1

    def next(self) -> bytes:
        """All events that were not sent yet."""
        parts = []
        while self.sent < len(self._entry.events):
            event = self._entry.events[self.sent]
            self.sent += 1
            first = event.choice not in self._counts
            before = self._counts.get(event.choice, 0)
            self._counts[event.choice] = before + len(event.token_ids)
            if self._work.endpoint == "completions":
                content = self._completion(event, first)
            else:
                has_role = bool((event.delta or {}).get("role"))
                if first and not has_role:
                    role = self._with_usage(self._with_prompt(self._role(event)), event, before)
                    parts.append(b"data: %s\n\n" % orjson.dumps(role))
                content = self._chat(event)
                if has_role:
                    content = self._with_prompt(content)
            content = self._with_usage(content, event, before + len(event.token_ids))
            parts.append(b"id: %d\ndata: %s\n\n" % (self.sent, orjson.dumps(content)))
        return b"".join(parts)

    def end(self) -> bytes:
        """What follows the last event."""
        if self._entry.error is not None:
            return b"data: %s\n\n" % error_content(*self._entry.error) + DONE
        if not self._work.include_usage:
            return DONE
        content = {**self._head, "choices": [], "usage": usage_of(self._entry)}
        return b"data: %s\n\n" % orjson.dumps(content) + DONE

    def _completion(self, event: Event, first: bool) -> dict[str, Any]:
        wanted = self._work.return_token_ids
        with_prompt = first and (wanted or self._work.echo)
        choice = {
            "index": event.choice,
            "text": event.text,
            "logprobs": event.logprobs,
            "finish_reason": event.finish_reason,
            "stop_reason": event.stop_reason,
            "prompt_token_ids": self._entry.prompts[event.choice // self._work.n] if with_prompt else None,
            "token_ids": event.token_ids if wanted else None,
        }
        return {**self._head, "choices": [choice]}

    def _role(self, event: Event) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": event.choice, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head, "choices": [choice]}

    def _with_prompt(self, content: dict[str, Any]) -> dict[str, Any]:
        if self._work.return_token_ids and self._entry.prompts:
            content["prompt_token_ids"] = self._entry.prompts[0]
        return content

    def _with_usage(self, content: dict[str, Any], event: Event, completion: int) -> dict[str, Any]:
        """With the tokens of the choice until here, and of the prompt that it answers."""
        if self._work.continuous_usage:
            prompt = len(self._entry.prompts[event.choice // self._work.n])
            content["usage"] = _usage(prompt, completion, event.reasoning_tokens)
        return content

    def _chat(self, event: Event) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": event.choice,
            "delta": {"content": event.text} if event.delta is None else event.delta,
            "logprobs": event.logprobs,
            "finish_reason": event.finish_reason,
        }
        if event.finish_reason is not None:
            choice["stop_reason"] = event.stop_reason
        if self._work.return_token_ids:
            choice["token_ids"] = event.token_ids
        if event.delta is not None and self._work.body.get("include_reasoning") is False:
            # As engines do: token ids and logprobs would tell what was thought.
            choice["delta"] = {name: value for name, value in event.delta.items() if name != "reasoning"}
            choice |= {"logprobs": None, "token_ids": None}
        return {**self._head, "choices": [choice]}


def whole_answer(entry: Entry, work: Work, model: str) -> bytes:
    """The answer to a request that does not stream."""
    completions = work.endpoint == "completions"
    head = {
        "id": entry.request_id,
        "object": "text_completion" if completions else "chat.completion",
        "created": entry.created,
        "model": model,
        "service_tier": None,
        "system_fingerprint": None,
    }
    if entry.answer is not None:
        return orjson.dumps(entry.answer | {"id": entry.request_id, "model": model})
    choices = []
    for index in range(work.choices):
        events = [event for event in entry.events if event.choice == index]
        ids = [token for event in events for token in event.token_ids]
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": _joined([event.logprobs for event in events if event.logprobs is not None]),
            "finish_reason": events[-1].finish_reason,
            "stop_reason": events[-1].stop_reason,
            "token_ids": ids if work.return_token_ids else None,
        }
        text = "".join(event.text for event in events)
        if completions:
            choice["text"] = text
            choice["prompt_token_ids"] = entry.prompts[index // work.n] if work.return_token_ids else None
        else:
            choice["message"] = _message(events, text)
        choices.append(choice)
    content: dict[str, Any] = {**head, "choices": choices, "usage": usage_of(entry)}
    if not completions and work.return_token_ids and entry.prompts:
        content["prompt_token_ids"] = entry.prompts[0]
    return orjson.dumps(content)


def _message(events: list[Event], text: str) -> dict[str, Any]:
    state = ChatState()
    for event in events:
        state.add(event.delta or {})
    message = {"role": "assistant", "content": text or state.texts.get("content", "")}
    return message | dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Logprobs of chunks as those of one answer."""
    if not parts:
        return None
    joined: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, list):
                joined.setdefault(name, []).extend(value)
            else:
                joined.setdefault(name, value)
    return joined
