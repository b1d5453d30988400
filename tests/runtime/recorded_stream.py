"""A recorded stream in place of an engine: answers as vLLM 0.32 does, with tokens known beforehand and times kept.

``python tests/runtime/recorded_stream.py --tokens-per-s 20`` prints its port. The token at a position of a sequence
depends on the sequence's first prompt token, its number, and on the position alone, so that a stream resumed from its
prompt and what it has emitted goes on with the same tokens, and a lost or doubled one shows. ``GET /sent`` gives when
each token was sent, by sequence number, on CLOCK_MONOTONIC, which processes share.

``POST /fail {"kind": ...}`` strikes every stream that runs:

============= ========================================================================================
kind          what a client sees
============= ========================================================================================
eof           the answer ends in good order, without a reason to finish and without ``[DONE]``
close         the connection is closed in the middle of the answer, as when the process is killed
reset         the connection is reset
error_event   an event with an error and ``[DONE]``, as when vLLM's engine core has died
stall         nothing more, while the connection stays
http500       a reset; from now on requests are answered 500 and ``/health`` 503, as by a dead engine
none          nothing; requests are answered again
============= ========================================================================================
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

VOCABULARY = 50_000
KINDS = ("eof", "close", "reset", "error_event", "stall", "http500", "none")
# vLLM's own default for completions.
MAX_TOKENS = 16
RENDERED_AS = "chat"


def token_at(sequence: int, position: int) -> int:
    """The token at a position of a sequence, its prompt counted."""
    return zlib.crc32(b"%d:%d" % (sequence, position)) % VOCABULARY


def tokens_of(prompt: Sequence[int], count: int) -> list[int]:
    """What follows a prompt."""
    return [token_at(prompt[0], len(prompt) + n) for n in range(count)]


def text_of(tokens: Sequence[int]) -> str:
    """One word a token."""
    return "".join(f" w{token}" for token in tokens)


def tokenize(text: str) -> list[int]:
    """A token a word, inverse to `text_of` on its words."""
    named = (word[1:] if word[:1] == "w" and word[1:].isdecimal() and word.isascii() else None for word in text.split())
    return [
        int(number) if number and len(number) < 10 else zlib.crc32(word.encode("utf-8", "replace")) % VOCABULARY
        for number, word in zip(named, text.split(), strict=True)
    ]


@dataclass(eq=False, slots=True)
class Stream:
    """An answer under way."""

    failure: str | None = None
    waiting: asyncio.Future[None] | None = None

    async def wait_until(self, at_s: float) -> None:
        """Until a time of the loop's clock, or until the stream is struck."""
        loop = asyncio.get_running_loop()
        self.waiting = loop.create_future()
        timer = loop.call_at(at_s, self.wake) if at_s < math.inf else None
        try:
            await self.waiting
        finally:
            self.waiting = None
            if timer is not None:
                timer.cancel()

    def strike(self, kind: str) -> None:
        self.failure = kind
        self.wake()

    def wake(self) -> None:
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)


@dataclass(slots=True)
class RecordedStream:
    """The engine's stand-in."""

    model: str
    tokens_per_s: float
    first_token_s: float
    max_model_len: int
    api_key: str | None = None
    broken: bool = False
    streams: set[Stream] = field(default_factory=set)
    sent_ns: dict[int, list[int]] = field(default_factory=dict)
    served: int = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**28, middlewares=[self.guard])
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/v1/models", self.models),
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions/render", self.render),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.post("/fail", self.fail),
                web.get("/sent", self.sent),
                web.get("/running", self.running),
            ]
        )
        return app

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """The key, and what a dead engine answers."""
        if not request.path.startswith("/v1/"):
            answer: web.StreamResponse = await handler(request)
            return answer
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.broken:
            return refusal(500, "InternalServerError", "EngineCore encountered an issue.")
        try:
            answer = await handler(request)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            return refusal(400, "BadRequestError", str(error))
        return answer

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.broken else 200)

    async def models(self, _: web.Request) -> web.Response:
        card = {
            "id": self.model,
            "object": "model",
            "created": 1_760_000_000,
            "owned_by": "vllm",
            "root": self.model,
            "parent": None,
            "max_model_len": self.max_model_len,
            "permission": [],
        }
        return web.json_response({"object": "list", "data": [card]})

    async def tokenize(self, request: web.Request) -> web.Response:
        tokens = tokenize((await request.json())["prompt"])
        return web.json_response({"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens})

    async def detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": text_of((await request.json())["tokens"])})

    async def render(self, request: web.Request) -> web.Response:
        body = await request.json()
        said = [message.get("content") for message in body["messages"]]
        tokens = tokenize(" ".join(text if isinstance(text, str) else RENDERED_AS for text in said) or RENDERED_AS)
        wanted = body.get("max_completion_tokens") or body.get("max_tokens")
        if len(tokens) + (wanted or 1) > self.max_model_len:
            raise ValueError(f"{len(tokens)} tokens of prompt and {wanted} more are over {self.max_model_len}")
        sampling: dict[str, Any] = {"n": 1, "temperature": body.get("temperature", 1.0), "seed": body.get("seed")}
        sampling["max_tokens"] = self.max_model_len - len(tokens) if wanted is None else wanted
        rendered = {"request_id": f"chatcmpl-{self.number()}", "token_ids": tokens, "features": None}
        return web.json_response({**rendered, "sampling_params": sampling, "model": self.model, "stream": False})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, count = self.asked(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        stream = Stream()
        self.streams.add(stream)
        try:
            await self.answer(stream, response, body, prompt, count)
        except ConnectionError:
            pass
        finally:
            self.streams.discard(stream)
        if stream.failure in ("close", "reset", "http500") and request.transport is not None:
            if stream.failure != "close":
                opened: socket.socket = request.transport.get_extra_info("socket")
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.transport.abort()
        return response

    def asked(self, body: dict[str, Any]) -> tuple[list[int], int]:
        """Prompt and tokens to generate, when an engine would take them."""
        prompt, count = body["prompt"], body.get("max_tokens", MAX_TOKENS)
        if body.get("stream") is not True or body.get("n", 1) not in (1, None):
            raise ValueError("this stand-in gives streams of one choice only")
        if body.get("model", self.model) != self.model:
            raise ValueError(f"The model `{body['model']}` does not exist.")
        if not isinstance(body.get("stream_options") or {}, dict):
            raise ValueError("stream_options must be an object")
        tokens = tokenize(prompt) if isinstance(prompt, str) else prompt
        if not isinstance(tokens, list) or not tokens or not all(type(t) is int and 0 <= t < 2**63 for t in tokens):
            raise ValueError("prompt must be text or a list of token ids")
        count = MAX_TOKENS if count is None else count
        if type(count) is not int or count < 1:
            raise ValueError(f"max_tokens must be at least 1, got {count}.")
        if len(tokens) + count > self.max_model_len:
            raise ValueError(f"{len(tokens)} tokens of prompt and {count} more are over {self.max_model_len}")
        return tokens, count

    async def answer(
        self, stream: Stream, response: web.StreamResponse, body: dict[str, Any], prompt: list[int], count: int
    ) -> None:
        """Tokens at absolute times: one that was late delays none after it."""
        now, write, clock = asyncio.get_running_loop().time, response.write, time.monotonic_ns
        sequence, step_s = prompt[0], 1 / self.tokens_per_s if self.tokens_per_s else math.inf
        sent_ns = self.sent_ns.setdefault(sequence, [])
        made, ids, logprobs = int(time.time()), bool(body.get("return_token_ids")), body.get("logprobs") is not None
        head = f'"id":"cmpl-{self.number():032x}","object":"text_completion","created":{made},"model":"{self.model}"'
        began_s, offset = now() + self.first_token_s, 0
        for number in range(count):
            due_s = began_s + number * step_s if number or step_s < math.inf else math.inf
            if due_s > now():
                await stream.wait_until(due_s)
            elif not number % 64:
                await asyncio.sleep(0)
            while stream.failure == "stall":
                await stream.wait_until(math.inf)
            if stream.failure == "error_event":
                await write(b"data: " + ENGINE_DIED + b"\n\ndata: [DONE]\n\n")
            if stream.failure is not None:
                return
            token = token_at(sequence, len(prompt) + number)
            choice = (
                f'"index":0,"text":" w{token}","logprobs":{logprob(token, offset) if logprobs else "null"},'
                f'"finish_reason":{LENGTH if number == count - 1 else "null"},"stop_reason":null,'
                f'"prompt_token_ids":{json.dumps(prompt) if ids and not number else "null"},'
                f'"token_ids":{[token] if ids else "null"}'
            )
            offset += len(f" w{token}")
            chunk = f'data: {{{head},"choices":[{{{choice}}}]}}\n\n'.encode()
            sent_ns.append(clock())
            await write(chunk)
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
            await write(f'data: {{{head},"choices":[],"usage":{json.dumps(usage)}}}\n\n'.encode())
        await write(b"data: [DONE]\n\n")

    def number(self) -> int:
        """A number for an answer's name."""
        self.served += 1
        return self.served

    async def fail(self, request: web.Request) -> web.Response:
        kind = (await request.json())["kind"]
        if kind not in KINDS:
            return refusal(400, "BadRequestError", f"no kind {kind!r}; there are {', '.join(KINDS)}")
        self.broken = kind == "http500"
        struck = list(self.streams) if kind != "none" else []
        for stream in struck:
            stream.strike(kind)
        return web.json_response({"struck": len(struck)})

    async def sent(self, _: web.Request) -> web.Response:
        """Times by sequence, and forget them."""
        times, self.sent_ns = self.sent_ns, {}
        return web.json_response({str(sequence): sent_ns for sequence, sent_ns in times.items()})

    async def running(self, _: web.Request) -> web.Response:
        return web.json_response({"running": len(self.streams)})


LENGTH = '"length"'
ENGINE_DIED = json.dumps(
    {
        "error": {
            "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
    }
).encode()


def logprob(token: int, offset: int) -> str:
    """A token's logprobs, all alike."""
    word = f" w{token}"
    return json.dumps(
        {"text_offset": [offset], "token_logprobs": [-0.5], "tokens": [word], "top_logprobs": [{word: -0.5}]}
    )


def refusal(status: int, kind: str, message: str) -> web.Response:
    """vLLM's errors."""
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status
    )


@contextmanager
def recorded_stream(
    *, tokens_per_s: float = 20.0, model: str = "tiny", max_model_len: int = 2**17, api_key: str | None = None
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process of its own, and its port."""
    command = [sys.executable, str(Path(__file__).resolve()), "--model", model]
    command += ["--tokens-per-s", str(tokens_per_s), "--max-model-len", str(max_model_len)]
    environment = {name: value for name, value in os.environ.items() if name != "HETPLAN_API_KEY"}
    environment |= {"HETPLAN_API_KEY": api_key} if api_key else {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


async def serve(stand_in: RecordedStream, host: str, port: int) -> None:
    """Until killed."""
    runner = web.AppRunner(stand_in.app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, host, port, backlog=4096)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tokens-per-s", type=float, default=20.0, help="of each stream; 0: none ever, inf: at once")
    parser.add_argument("--first-token-s", type=float, default=0.0)
    parser.add_argument("--max-model-len", type=int, default=2**17)
    asked = parser.parse_args()
    stand_in = RecordedStream(
        model=asked.model,
        tokens_per_s=asked.tokens_per_s,
        first_token_s=asked.first_token_s,
        max_model_len=asked.max_model_len,
        api_key=os.environ.get("HETPLAN_API_KEY") or None,
    )
    asyncio.run(serve(stand_in, asked.host, asked.port))


if __name__ == "__main__":
    main()
