"""Requests that nobody means well with, as bytes on a socket."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

KEY = "a-key-of-the-test"
ANSWER_S = 30
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = (COMPLETIONS, CHAT, "/v1/models", "/health", "/metrics")
PACKED = b"Content-Encoding: gzip"
# A header that no answer may carry: those who find it in one have made the router say it.
INJECTED = b"x-injected"

# What an answer may be; 503 and 504 say that no engine answers.
REFUSED = frozenset(range(400, 500))
ANSWERED = frozenset({200, 503, 504}) | REFUSED


@dataclass(frozen=True, slots=True)
class Attack:
    """What is sent, in pieces, and what may come back."""

    family: str
    pieces: tuple[bytes, ...]
    allowed: frozenset[int] = ANSWERED
    # Whether a connection that is closed without an answer will do.
    may_close: bool = False
    # The client leaves after so many bytes; None: it reads all.
    reads_bytes: int | None = None
    pause_s: float = 0.0


def request(
    path: str = COMPLETIONS,
    body: bytes = b"",
    *,
    method: str = "POST",
    headers: Iterable[bytes] = (),
    key: bytes | None = KEY.encode(),
    content_type: bytes | None = b"application/json",
    length: int | None = None,
) -> bytes:
    """One HTTP request that asks for the connection to be closed."""
    lines = [f"{method} {path} HTTP/1.1".encode("latin-1", "replace"), b"Host: 127.0.0.1", b"Connection: close"]
    lines += [b"Authorization: Bearer " + key] if key is not None else []
    lines += [b"Content-Type: " + content_type] if content_type is not None else []
    lines += [b"Content-Length: %d" % (len(body) if length is None else length)] if body or length is not None else []
    return b"\r\n".join([*lines, *headers, b"", body])


def asked(chance: random.Random, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A sound path and body, with some fields as given."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "temperature": 0, "stream": chance.random() < 0.5}
    if chance.random() < 0.5:
        return COMPLETIONS, body | {"prompt": [chance.randrange(1000), 7, 8]} | fields
    return CHAT, body | {"messages": [{"role": "user", "content": "w1 w2"}]} | fields


# ---- families


def broken_json(chance: random.Random) -> Attack:
    path, sound = asked(chance)
    text = bytearray(json.dumps(sound).encode())
    how = chance.randrange(4)
    if how == 0:
        return Attack("broken json", (request(path, bytes(text[: chance.randrange(1, len(text) - 1)])),), REFUSED)
    if how == 1:
        other = chance.choice([b"null", b"[]", b"3", b'"text"', b"true", b"{}", b"[{}]", b"", b"{} {}", b"nul", b"{]"])
        return Attack("broken json", (request(path, other),), REFUSED)
    for _ in range(chance.randrange(1, 6)):
        place = chance.randrange(len(text))
        if how == 2:
            text[place] = chance.randrange(256)
        else:
            del text[place]
    return Attack("broken json", (request(path, bytes(text)),))


def nested(chance: random.Random) -> Attack:
    path, sound = asked(chance)
    depth = chance.choice([50, 500, 1_000, 5_000, 100_000])
    opened, closed = chance.choice([(b"[", b"]"), (b'{"a":', b"}")])
    inner = opened * depth + b"1" + (closed * depth if chance.random() < 0.8 else b"")
    name = chance.choice(["prompt", "messages", "stop", "logit_bias", "stream_options", "unknown"])
    body = json.dumps(sound | {name: "HERE"}).encode().replace(b'"HERE"', inner)
    return Attack("nested", (request(path, chance.choice([body, inner])),))


NUMBERS = (
    b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b"1e308", b"-1", b"0", b"-0.0", b"0.5", b"1e-400",
    str(2**31).encode(), str(2**63).encode(), str(-(2**63) - 1).encode(), str(2**64).encode(), b"9" * 400, b"9" * 5_000,
    b'"16"', b"[16]", b"{}", b"true", b"null", b'""', b"1.0", b"16.5", b"0x10", b"1_000", b"+1", b"01",
)  # fmt: skip
NUMERIC = (
    "max_tokens", "max_completion_tokens", "n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs",
    "top_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "priority",
    "truncate_prompt_tokens", "prompt_logprobs",
)  # fmt: skip


def numbers(chance: random.Random) -> Attack:
    path, sound = asked(chance)
    for name in chance.sample(NUMERIC, chance.randrange(1, 3)):
        sound[name] = f"HERE{chance.randrange(len(NUMBERS))}"
    body = re.sub(rb'"HERE(\d+)"', lambda found: NUMBERS[int(found[1])], json.dumps(sound).encode())
    return Attack("numbers", (request(path, body),))


STRANGE: tuple[Any, ...] = (
    None, "", [], {}, [[]], [[1, 2], [3]], [""], ["a", "b"], [1, "a"], [1.5], [-1], [2**63], [2**200], [True], True, 3,
    -1.5, {"a": "b"}, "\x00", "\ud800", "a\ud800b", "\r\nX-Injected: 1\r\n", "a" * 100_000, [1] * 100_000,
    ["a"] * 1_000, "\u202e\ufeff", [{"role": "user"}], [{"role": 3, "content": 4}], [{"content": None}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}], [None], {"include_usage": "maybe"},
)  # fmt: skip
FIELDS = (
    "prompt", "messages", "model", "stop", "stream", "stream_options", "logit_bias", "user", "suffix", "echo", "tools",
    "tool_choice", "response_format", "return_token_ids", "ignore_eos", "stop_token_ids", "structured_outputs",
    "request_id", "kv_transfer_params", "prompt_embeds", "continue_final_message", "chat_template", "__proto__",
)  # fmt: skip


def types(chance: random.Random) -> Attack:
    path, sound = asked(chance)
    strange = {name: chance.choice(STRANGE) for name in chance.sample(FIELDS, chance.randrange(1, 4))}
    return Attack("types", (request(path, json.dumps(sound | strange).encode()),))


def invalid_utf8(chance: random.Random) -> Attack:
    path, sound = asked(chance)
    wrong = chance.choice([b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\x80", b"\x80"])
    body = json.dumps(sound | {"user": "HERE"}).encode().replace(b"HERE", wrong)
    return Attack("invalid utf-8", (request(path, body),))


def content_types(chance: random.Random) -> Attack:
    path, sound = asked(chance)
    text = json.dumps(sound)
    kind, body, headers = chance.choice(
        [
            (b"text/plain", text.encode(), []),
            (None, text.encode(), []),
            (b"application/x-www-form-urlencoded", b"model=tiny&prompt=a", []),
            (b"multipart/form-data; boundary=x", b"--x\r\n\r\n" + text.encode() + b"\r\n--x--", []),
            (b"multipart/form-data", text.encode(), []),
            (b"application/json; charset=utf-16", text.encode("utf-16"), []),
            (b"application/json; charset=no-such", text.encode(), []),
            (b"application/json; charset=\xff", text.encode(), []),
            (b"application/json; charset=idna", text.encode(), []),
            (b"application/json; charset=zlib_codec", text.encode(), []),
            (b"application/json" + b";a=b" * 500, text.encode(), []),
            (b"application/json", text.encode(), [PACKED]),
            (b"application/json", text.encode(), [b"Content-Encoding: deflate"]),
            (b"application/json", text.encode(), [b"Content-Encoding: br"]),
            (b"application/json", text.encode(), [b"Content-Encoding: no-such"]),
            (b"application/json", gzip.compress(text.encode()), [PACKED]),
            (b"application/json", gzip.compress(text.encode())[:-9], [PACKED]),
        ]
    )
    return Attack("content types", (request(path, body, content_type=kind, headers=headers),), may_close=True)


def keys(chance: random.Random) -> Attack:
    path, sound = asked(chance)
    wrong = chance.choice(
        [None, b"", b"wrong", KEY[:-1].encode(), KEY.encode() + b"x", KEY.upper().encode(), b"\xff\xfe", b"k" * 7_000]
    )
    headers = chance.choice([[], [b"X-Api-Key: " + KEY.encode()], [b"Cookie: key=" + KEY.encode()]])
    if wrong is None and chance.random() < 0.5:
        headers = [chance.choice([b"Authorization: Basic YTpi", b"Authorization:", b"Authorization: Bearer"])]
    if chance.random() < 0.3:
        return Attack("keys", (request("/v1/models", method="GET", key=wrong, headers=headers),), frozenset({401}))
    body = json.dumps(sound).encode()
    return Attack("keys", (request(path, body, key=wrong, headers=headers),), frozenset({401}))


def headers(chance: random.Random) -> Attack:
    path, sound = asked(chance, user="a\r\nX-Injected: 1")
    bad = chance.choice(
        [
            b"X-Request-Id: a\rX-Injected: 1",
            b"X-Request-Id: a\nX-Injected: 1",
            b"X-Request-Id: %0d%0aX-Injected:%201",
            b"X-Request-Id: a\x00b",
            b"X-Request-Id: \xe2\x98\x83\xff",
            b"X-Request-Id: " + b"a" * 7_000,
            b"X-Request-Id : a",
            b" X-Request-Id: folded",
            b"X-Request-Id: a\r\n X-Injected: 1",
            b"No-Colon",
            b": no name",
            b"N\x00ame: a",
            b"Host: elsewhere",
            b"Content-Length: 5",
            b"Content-Length: -1",
            b"Content-Length: 1e3",
            b"Content-Length: 99999999999999999999",
            b"Transfer-Encoding: chunked",
            b"Transfer-Encoding: gzip, chunked",
            b"Transfer-Encoding: no-such",
            b"Upgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13",
            b"Upgrade: h2c\r\nHTTP2-Settings: AAAA",
            b"Expect: 100-continue",
            b"Expect: everything",
            b"Range: bytes=0-1",
            b"Accept-Encoding: gzip, br, zstd, " + b"x" * 1_000,
            b"X-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Host: elsewhere",
            b"X-Long: " + b"a" * 100_000,
            b"\r\n".join(b"X-Many-%d: a" % n for n in range(2_000)),
        ]
    )
    whole = request(path, json.dumps(sound).encode(), headers=[bad])
    # Headers that cannot be parsed, or that announce another body, end in a refusal or in a close.
    return Attack("headers", (whole,), may_close=True)


def malformed_http(chance: random.Random) -> Attack:
    raw = chance.choice(
        [
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET / HTTP/1.1\n\n",
            b"get / http/1.1\r\n\r\n",
            b"GET  /  HTTP/1.1\r\n\r\n",
            b"\r\n\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(200),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"SSH-2.0-OpenSSH_9.6\r\n",
            chance.randbytes(chance.randrange(1, 2_000)) + b"\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n{}",
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2, 3\r\n\r\n{}",
            b"POST /v1/completions HTTP/1.0\r\n\r\n",
        ]
    )
    # Some of these wait for more; the client leaves then.
    return Attack("malformed http", (raw,), may_close=True, reads_bytes=12)


METHODS = ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "X", "M-SEARCH", "GE T")


def methods(chance: random.Random) -> Attack:
    path = chance.choice(PATHS)
    body = b"{}" if chance.random() < 0.3 else b""
    return Attack("methods", (request(path, body, method=chance.choice(METHODS)),), may_close=True)


TRICKS = (
    "/", "//", "/..", "/../../etc/passwd", "/v1/../../etc/passwd", "/v1/%2e%2e/%2e%2e/etc/passwd", "/v1/completions/",
    "//v1//completions", "/v1/completions/..", "/v1/completions%00", "/v1/completions?x=%00", "/v1/completions;a=b",
    "/v1/completions#x", "/V1/COMPLETIONS", "/v1/models/../completions", "/v1/models/tiny", "/v1/models/%ff", "/%zz",
    "/%", "/v1/%0d%0aX-Injected:%201", "http://elsewhere/v1/models", "https://[::1/v1/models", "http://127.0.0.1:1/",
    "*", "x", "/fail", "/sent", "/running", "/detokenize", "/tokenize", "/v1/chat/completions/render", "/docs",
    "/openapi.json/..", "/.git/config", "/v1/streams/cmpl-1", "/\xff\xfe", "/" + "a" * 7_000, "/" + "a/" * 3_000,
    "/" + "%41" * 2_000, "/?" + "a=b&" * 1_500,
)  # fmt: skip


def paths(chance: random.Random) -> Attack:
    path, method = chance.choice(TRICKS), chance.choice(["GET", "POST"])
    body = json.dumps(asked(chance)[1]).encode() if method == "POST" else b""
    return Attack("paths", (request(path, body, method=method),), may_close=True)


EVENT_IDS = (
    b"", b"0", b"-1", b"1", b"9" * 400, b"9" * 5_000, b"1e9", b"NaN", b"cmpl-1", b"cmpl-1:1", b"cmpl-1/99999999999",
    b"../..", b"\xff\xfe", b"%00", b"a:b:c", b":", b"cmpl-" + b"0" * 32 + b":0", b"cmpl-" + b"0" * 32 + b"-5", b"[1]",
    b"{}", b"\t",
)  # fmt: skip


def event_ids(chance: random.Random) -> Attack:
    path, sound = asked(chance)
    bad = [b"Last-Event-ID: " + chance.choice(EVENT_IDS) for _ in range(chance.choice([1, 1, 1, 2]))]
    if chance.random() < 0.3:
        return Attack("event ids", (request(path, method="GET", headers=bad),), may_close=True)
    return Attack("event ids", (request(path, json.dumps(sound | {"stream": True}).encode(), headers=bad),))


@cache
def huge_bodies() -> tuple[bytes, bytes]:
    """32 MB of a sound request, and one that is small until it is unpacked."""
    begins = json.dumps({"model": "tiny", "prompt": [1, 2], "max_tokens": 3}).encode()[:-1] + b', "user": "'
    return begins + b"a" * 8_000_000 + b'"}', gzip.compress(begins + b"a" * 100_000_000 + b'"}', 1)


def oversized(chance: random.Random) -> Attack:
    """Refused, often before all is sent, which the client sees as a reset."""
    how = chance.randrange(4)
    plain, bomb = huge_bodies()
    if how == 0:
        return Attack("oversized", (request(body=plain),), REFUSED, may_close=True)
    if how == 1:
        sound = json.dumps(asked(chance)[1]).encode()
        return Attack("oversized", (request(body=sound, length=10**12),), REFUSED, may_close=True, reads_bytes=12)
    if how == 2:
        return Attack("oversized", (request(body=bomb, headers=[PACKED]),), REFUSED, may_close=True)
    head = request(headers=[b"Transfer-Encoding: chunked"])
    return Attack(
        "oversized", (head, *[b"100000\r\n" + b" " * 2**20 + b"\r\n"] * 8, b"0\r\n\r\n"), REFUSED, may_close=True
    )


def leaves_early(chance: random.Random) -> Attack:
    """A client that goes away: before it asks, while it asks, before the answer, or in the middle of it."""
    tokens = chance.choice([1, 20, 2_000])
    path, sound = asked(chance, max_tokens=tokens)
    whole = request(path, json.dumps(sound).encode())
    how = chance.randrange(4)
    if how == 0:
        return Attack("leaves early", (whole[: chance.randrange(len(whole))],), may_close=True, reads_bytes=0)
    if how == 1:
        return Attack("leaves early", (whole,), may_close=True, reads_bytes=0)
    sound["stream"] = True
    whole = request(path, json.dumps(sound).encode())
    return Attack("leaves early", (whole,), may_close=True, reads_bytes=chance.choice([1, 200, 5_000, 50_000]))


def in_pieces(chance: random.Random) -> Attack:
    """A sound request, a few bytes at a time."""
    path, sound = asked(chance)
    whole = request(path, json.dumps(sound).encode())
    size = chance.choice([20, 60, 150])
    pieces = tuple(whole[n : n + size] for n in range(0, len(whole), size))
    return Attack("in pieces", pieces, frozenset({200}), pause_s=0.01)


FAMILIES: dict[Callable[[random.Random], Attack], int] = {
    broken_json: 700,
    nested: 300,
    numbers: 900,
    types: 900,
    invalid_utf8: 300,
    content_types: 500,
    keys: 500,
    headers: 700,
    malformed_http: 600,
    methods: 500,
    paths: 600,
    event_ids: 500,
    oversized: 40,
    in_pieces: 200,
    leaves_early: 2_400,
}


def attacks(seed: int, share: float = 1.0) -> list[Attack]:
    """All families in their shares, in a random order."""
    chance = random.Random(seed)
    found = [make(chance) for make, count in FAMILIES.items() for _ in range(round(count * share))]
    chance.shuffle(found)
    return found


# ---- sending


@dataclass(slots=True)
class Tally:
    """What came back."""

    sent: int = 0
    answers: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


async def send(port: int, attack: Attack, tally: Tally) -> None:
    """One attack on a connection of its own."""
    tally.sent += 1
    answer = b""
    try:
        async with asyncio.timeout(ANSWER_S):
            answer = await _exchange(port, attack)
    except TimeoutError:
        tally.faults.append(f"{attack.family}: no answer in {ANSWER_S} s to {b''.join(attack.pieces)[:300]!r}")
        return
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    status = int(answer[9:12]) if re.match(rb"HTTP/1\.[01] \d{3}", answer) else None
    tally.answers[attack.family, status] += 1
    wrong = (status is None and not attack.may_close) or (status is not None and status not in attack.allowed)
    if wrong or INJECTED in answer.partition(b"\r\n\r\n")[0].lower():
        said = b"".join(attack.pieces)[-300:]
        tally.faults.append(f"{attack.family}: {status} to ...{said!r}: {answer[:400]!r}")


async def _exchange(port: int, attack: Attack) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        with suppress(ConnectionError):
            for piece in attack.pieces:
                writer.write(piece)
                await writer.drain()
                if attack.pause_s:
                    await asyncio.sleep(attack.pause_s)
        with suppress(ConnectionError):
            if attack.reads_bytes is None:
                answer = await reader.read(-1)
            elif attack.reads_bytes:
                answer = await asyncio.wait_for(_some(reader, attack.reads_bytes), 1.0)
    except TimeoutError:
        pass
    finally:
        writer.transport.abort()
    return answer


async def _some(reader: asyncio.StreamReader, count: int) -> bytes:
    found = b""
    while len(found) < count and (more := await reader.read(count - len(found))):
        found += more
    return found


async def storm(port: int, hostile: list[Attack], at_once: int = 32) -> Tally:
    """All attacks, some at a time."""
    tally, queue = Tally(), iter(hostile)

    async def sender() -> None:
        for attack in queue:
            await send(port, attack, tally)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(sender())
    return tally


@dataclass(slots=True)
class SlowClients:
    """Clients that hold what they have been given: headers or bodies a byte at a time, answers that are never read."""

    port: int
    each: int
    # Fewer: each of their tokens is generated, and is in the journal.
    never_read: int
    opened: int = 0

    async def hold(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.each):
                group.create_task(self.trickle(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Slow: ", b"a"))
                group.create_task(self.trickle(request(body=b"", length=10**6), b" "))
            for _ in range(self.never_read):
                group.create_task(self.read_nothing())

    async def trickle(self, begins: bytes, goes_on: bytes) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.opened += 1
        try:
            writer.write(begins)
            while True:
                await asyncio.sleep(0.5)
                writer.write(goes_on)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    async def read_nothing(self) -> None:
        """Asks for more than the buffers on the way hold."""
        loop = asyncio.get_running_loop()
        body = json.dumps({"model": "tiny", "prompt": [1, 2], "max_tokens": 25_000, "stream": True}).encode()
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.setblocking(False)
            await loop.sock_connect(one, ("127.0.0.1", self.port))
            self.opened += 1
            await loop.sock_sendall(one, request(body=body))
            await asyncio.Event().wait()
