"""The text around a cut: characters whose bytes lie on both sides, and stop strings that do.

An engine that continues an answer takes what was emitted for a prompt. It cannot know which characters of it were not
complete, nor which text was held back because it could be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[list[int]], Awaitable[str | None]]


@dataclass(slots=True, frozen=True)
class StopRule:
    """Stop strings as an engine applies them: not before ``min_tokens``, included in the text or not."""

    strings: tuple[str, ...] = ()
    included: bool = False
    min_tokens: int = 0

    @property
    def held_characters(self) -> int:
        """Characters at the end of a text that may be the beginning of a stop string."""
        return 0 if self.included or not self.strings else max(map(len, self.strings)) - 1

    def find(self, text: str, checked: int) -> tuple[str, int] | None:
        """The stop string that is complete first in ``text`` beyond ``checked`` characters, and where it begins."""
        found = []
        for order, string in enumerate(self.strings):
            start = text.find(string, max(0, checked - len(string) + 1))
            if start >= 0:
                found.append((start + len(string), order, string, start))
        if not found:
            return None
        _, _, string, start = min(found)
        return string, start


@dataclass(slots=True, frozen=True)
class Piece:
    """What may be sent of a chunk."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


class ContinuedText:
    """Text of one answer after a cut.

    Parameters
    ----------
    decode : callable
        Text of an answer's token ids, without what is not complete; an engine does it. None where it does not: then the
        text of the engine that continues is taken as it is.
    token_ids : list of int
        Emitted before the cut.
    sent : str
        Text that was sent of them.
    stop : StopRule
    """

    def __init__(self, decode: Decode, token_ids: Sequence[int], sent: str, stop: StopRule) -> None:
        self._decode, self._stop = decode, stop
        self._ids = list(token_ids)
        self._full: str | None = None
        self._sent = sent
        self._sent_length = len(sent)
        # True once the engine's own text has been seen to be right: it then stands on whole characters again.
        self._in_step = False

    async def feed(
        self, token_ids: list[int], text: str, finish_reason: str | None, stop_reason: int | str | None
    ) -> Piece:
        """Take a chunk of the engine that continues, and say what of it goes to the client."""
        if self._full is None:
            whole = await self._decode(self._ids) if self._stop.strings and self._ids else self._sent
            self._full = whole if whole is not None and whole.startswith(self._sent) else self._sent
        before = self._full
        earlier = len(self._ids)
        # A token that ends an answer is no text of it.
        silent = finish_reason == "stop" and bool(token_ids) and not self._stop.included
        shown = token_ids[:-1] if silent else token_ids
        if not self._in_step:
            whole = await self._decode(self._ids + shown) if self._ids or shown else ""
            if whole is not None and not whole.startswith(before):
                # The first engine wrote bytes that are no characters in its own way, or the prompt before them: what
                # is new is then told by the same decoder. A chunk's own text may repeat all that was sent.
                before_decoded = await self._decode(self._ids) if self._ids else ""
            else:
                before_decoded = before
            if whole is not None and before_decoded is not None and whole.startswith(before_decoded):
                right = whole[len(before_decoded) :]
                self._in_step = bool(text) and right == text
                text = right
        self._ids += token_ids
        self._full = before + text
        if self._stop.strings and len(self._ids) > self._stop.min_tokens:
            found = self._stop.find(self._full, await self._checked(earlier, len(before)))
            if found is not None:
                string, start = found
                kept = await self._kept(token_ids, earlier, start + len(string))
                end = start + len(string) if self._stop.included else start
                return self._piece(token_ids[:kept], end, "stop", string)
        finished = finish_reason is not None
        end = len(self._full) - (0 if finished else self._stop.held_characters)
        return self._piece(token_ids, end, finish_reason, stop_reason)

    def _piece(self, token_ids: list[int], end: int, finish_reason: str | None, stop_reason: int | str | None) -> Piece:
        assert self._full is not None  # noqa: S101
        text = self._full[self._sent_length : max(end, self._sent_length)]
        self._sent_length += len(text)
        return Piece(token_ids, text, finish_reason, stop_reason)

    async def _checked(self, earlier: int, length: int) -> int:
        """Characters in which a stop string may no longer end: before this chunk, or of the tokens that must come."""
        least = self._stop.min_tokens
        if not earlier < least < len(self._ids):
            return length
        text = await self._decode(self._ids[:least])
        return length if text is None else max(length, len(text))

    async def _kept(self, token_ids: list[int], earlier: int, end: int) -> int:
        """How many tokens of a chunk an engine would have emitted: up to the one that completes the stop string."""
        for count in range(1, len(token_ids)):
            text = await self._decode(self._ids[: earlier + count])
            if text is not None and len(text) >= end:
                return count
        return len(token_ids)
