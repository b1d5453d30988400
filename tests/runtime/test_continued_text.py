"""Text around a cut, against an engine of bytes that is written out plainly: every token is one byte."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.runtime.router.text import ContinuedText, StopRule

# Characters of one, two, three and four bytes, bytes that begin or go on with a character and never end it.
ALPHABET = [b"a", b"b", b" ", "é".encode(), "€".encode(), "🙂".encode(), b"\xc3", b"\x80", b"\xff"]
END = 256


def decoded(ids: Sequence[int]) -> str:
    """Text of all tokens that complete a character: a tail that may still become one is left out."""
    for stop in range(len(ids), -1, -1):
        text = bytes(ids[:stop]).decode("utf-8", "replace")
        if not text.endswith("�"):
            return text
    return ""


class Engine:
    """Detokenizes and stops as an engine does, a chunk at a time."""

    def __init__(self, stop: StopRule, prompt: Sequence[int] = (), *, confused: bool = False) -> None:
        self.stop, self.ids, self.text, self.sent = stop, [], "", 0
        # What an engine makes of a prompt that ends within a character is not to be relied on.
        self.prompt = list(prompt) if confused else []

    def chunk(self, new: Sequence[int], *, last: bool) -> tuple[list[int], str, str | None, str | None]:
        for count, token in enumerate(new, 1):
            self.ids.append(token)
            before = len(self.text)
            if token != END:
                self.text = decoded([*self.prompt, *self.ids])
            if self.stop.strings and len(self.ids) > self.stop.min_tokens:
                found = self.stop.find(self.text, before)
                if found is not None:
                    string, start = found
                    end = start + len(string) if self.stop.included else start
                    return list(new[:count]), self._next(end), "stop", string
        reason = None
        if last:
            reason = "stop" if new and new[-1] == END else "length"
        held = 0 if last else self.stop.held_characters
        return list(new), self._next(len(self.text) - held), reason, None

    def _next(self, end: int) -> str:
        text = self.text[self.sent : max(end, self.sent)]
        self.sent += len(text)
        return text


def chunked(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    chunks, start = [], 0
    while start < len(ids):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(list(ids[start : start + size]))
        start += size
    return chunks


def answered(engine: Engine, chunks: Sequence[Sequence[int]]) -> tuple[list[int], str, str | None, str | None]:
    ids: list[int] = []
    text = ""
    for i, chunk in enumerate(chunks):
        got, part, reason, why = engine.chunk(chunk, last=i == len(chunks) - 1)
        ids += got
        text += part
        if reason is not None:
            return ids, text, reason, why
    return ids, text, None, None


@st.composite
def _answers(draw: st.DrawFn) -> list[int]:
    pieces = draw(st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=12))
    return [*b"".join(pieces), *([END] if draw(st.booleans()) else [])]


@settings(max_examples=400, deadline=None)
@given(
    ids=_answers(),
    stop=st.builds(
        StopRule,
        st.lists(st.sampled_from(["ab", "é€", "a", " a", "€a b", "\N{SLIGHTLY SMILING FACE}"]), max_size=2).map(tuple),
        st.booleans(),
        st.sampled_from([0, 3]),
    ),
    sizes=st.sampled_from([[1], [1, 2], [3], [2, 5]]),
    confused=st.booleans(),
)
def test_an_answer_cut_at_every_token_is_the_answer_that_was_not_cut(
    ids: list[int], stop: StopRule, sizes: list[int], confused: bool
) -> None:
    whole = answered(Engine(stop), chunked(ids, [1]))
    for cut in range(1, len(whole[0])):
        if whole[2] is not None and cut == len(whole[0]):
            continue
        got = asyncio.run(_cut(ids, stop, cut, sizes, confused=confused))
        assert got == whole, cut


async def _cut(
    ids: list[int], stop: StopRule, cut: int, sizes: list[int], *, confused: bool
) -> tuple[list[int], str, str | None, str | None]:
    first = Engine(stop)
    sent_ids: list[int] = []
    sent = ""
    for token in ids[:cut]:
        got, part, reason, _ = first.chunk([token], last=False)
        assert reason is None
        sent_ids += got
        sent += part

    async def decode(tokens: list[int]) -> str:
        return decoded([token for token in tokens if token != END])

    text = ContinuedText(decode, sent_ids, sent, stop)
    # After a cut the engine is not told of stop strings; the router looks for them.
    second = Engine(StopRule(included=stop.included), sent_ids, confused=confused)
    chunks = chunked(ids[cut:], sizes)
    for i, chunk in enumerate(chunks):
        got, part, reason, why = second.chunk(chunk, last=i == len(chunks) - 1)
        piece = await text.feed(got, part, reason, why)
        sent_ids += piece.token_ids
        sent += piece.text
        if piece.finish_reason is not None:
            return sent_ids, sent, piece.finish_reason, piece.stop_reason
    return sent_ids, sent, None, None


def test_a_stop_string_across_the_cut_is_found() -> None:
    async def decode(tokens: list[int]) -> str:
        return decoded(tokens)

    text = ContinuedText(decode, list(b"say st"), "say ", StopRule(("stop",)))
    piece = asyncio.run(text.feed(list(b"op it"), "op it", None, None))
    assert (bytes(piece.token_ids), piece.text, piece.finish_reason, piece.stop_reason) == (b"op", "", "stop", "stop")


def test_text_is_asked_for_only_until_the_engine_is_in_step() -> None:
    asked = []

    async def decode(tokens: list[int]) -> str:
        asked.append(len(tokens))
        return decoded(tokens)

    async def run() -> str:
        text = ContinuedText(decode, list("é".encode()[:1]), "", StopRule())
        parts = []
        for token, said in [(0xA9, ""), (ord("a"), "�a"), (ord("b"), "b"), (ord("c"), "c")]:
            parts.append((await text.feed([token], said, None, None)).text)
        return "".join(parts)

    assert asyncio.run(run()) == "éabc"
    assert asked == [2, 3, 4]


def test_a_stop_string_within_the_tokens_that_must_come_is_none_though_others_come_with_them() -> None:
    async def decode(tokens: list[int]) -> str:
        return decoded(tokens)

    text = ContinuedText(decode, list(b"x"), "x", StopRule(("a",), min_tokens=3))
    piece = asyncio.run(text.feed(list(b"abcab"), "abcab", None, None))
    assert (bytes(piece.token_ids), piece.text, piece.stop_reason) == (b"abca", "abc", "a")


def test_what_an_engine_repeats_after_a_cut_is_not_sent_again() -> None:
    """vLLM puts the prompt's text before the answer's where the prompt ends within a character; so does who goes on."""

    async def decode(tokens: list[int]) -> str:
        return decoded(tokens)

    async def run() -> str:
        text = ContinuedText(decode, [*b"(ab", 0xC3], "p�(ab", StopRule())
        chunks = [(0xA9, "p�(abé"), (ord("c"), "c")]
        return "".join([(await text.feed([token], said, None, None)).text for token, said in chunks])

    assert asyncio.run(run()) == "éc"
