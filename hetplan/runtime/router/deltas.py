"""Parts of answers that are put together and taken apart: chat messages, and logprobs of several tokens."""

from __future__ import annotations

from typing import Any

_TEXTS = ("content", "reasoning", "refusal")


class Diverged(Exception):
    """An answer that was generated again differs from what was sent."""


class ChatState:
    """A chat message as its deltas add up."""

    def __init__(self) -> None:
        self.role: str | None = None
        self.texts: dict[str, str] = {}
        self.calls: dict[int, dict[str, Any]] = {}

    def add(self, delta: dict[str, Any]) -> None:
        """Take one more delta."""
        self.role = delta.get("role") or self.role
        for name in _TEXTS:
            if isinstance(delta.get(name), str):
                self.texts[name] = self.texts.get(name, "") + delta[name]
        for call in delta.get("tool_calls") or []:
            known = self.calls.setdefault(
                call.get("index", 0), {"id": None, "type": "function", "name": None, "arguments": ""}
            )
            function = call.get("function") or {}
            known["id"] = known["id"] or call.get("id")
            known["name"] = known["name"] or function.get("name")
            known["arguments"] += function.get("arguments") or ""

    def beyond(self, sent: ChatState) -> dict[str, Any]:
        """The delta that leads from what was sent to this; empty while this is still within what was sent.

        Raises
        ------
        Diverged
            If neither is a beginning of the other.
        """
        delta: dict[str, Any] = {}
        if self.role and not sent.role:
            delta["role"] = self.role
        for name, text in self.texts.items():
            before = sent.texts.get(name)
            rest = text if before is None else _rest(text, before)
            if rest or before is None:
                delta[name] = rest
        calls = [call for index in sorted(self.calls) if (call := self._call_beyond(index, sent))]
        if calls:
            delta["tool_calls"] = calls
        return delta

    def _call_beyond(self, index: int, sent: ChatState) -> dict[str, Any] | None:
        call, before = self.calls[index], sent.calls.get(index)
        if before is None:
            function = {"name": call["name"], "arguments": call["arguments"]}
            return {"index": index, "id": call["id"], "type": call["type"], "function": function}
        if call["name"] and before["name"] and call["name"] != before["name"]:
            raise Diverged
        rest = _rest(call["arguments"], before["arguments"])
        return {"index": index, "function": {"arguments": rest}} if rest else None


def _rest(text: str, sent: str) -> str:
    if text.startswith(sent):
        return text[len(sent) :]
    if sent.startswith(text):
        return ""
    raise Diverged


def first_logprobs(logprobs: dict[str, Any], count: int) -> dict[str, Any]:
    """Logprobs of a chunk's first tokens, in the form of completions (parallel lists) or of chats (one list)."""
    return {name: value[:count] if isinstance(value, list) else value for name, value in logprobs.items()}


def last_logprobs(logprobs: dict[str, Any], count: int) -> dict[str, Any]:
    """Those of its last tokens; before a chunk's own tokens may stand those of a prompt that is echoed."""
    return {
        name: value[max(0, len(value) - count) :] if isinstance(value, list) else value
        for name, value in logprobs.items()
    }


def limit_top_logprobs(logprobs: dict[str, Any], count: int) -> None:
    """Leave so many of the likeliest tokens at each position of a chat's logprobs; engines that are sent token ids give
    the token itself where none is asked for, chats do not."""
    for position in logprobs.get("content") or []:
        if count >= 0:
            position["top_logprobs"] = position["top_logprobs"][:count]


def shift_offsets(logprobs: dict[str, Any], shift: int) -> int | None:
    """Move the text offsets of a completion's logprobs, in place; returns where the next token begins."""
    offsets, tokens = logprobs.get("text_offset"), logprobs.get("tokens")
    if not offsets or not tokens:
        return None
    if shift:
        offsets[:] = [offset + shift for offset in offsets]
    return int(offsets[-1]) + len(tokens[-1])
