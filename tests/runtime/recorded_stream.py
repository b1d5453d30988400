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
stall         nothing more, while the connection stays; nor do requests that come get a token, and ``/health`` is well
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
from collections.abc import Awaitable, Callable, Iterator, Sequence
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


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was taken."""

    prompt: list[int]
    count: int
    ids: bool
    logprobs: bool
    include_usage: bool

    @property
    def usage(self) -> dict[str, int]:
        before = len(self.prompt)
        return {"prompt_tokens": before, "completion_tokens": self.count, "total_tokens": before + self.count}

    def finish(self, number: int) -> str:
        """Why it ends, as JSON."""
        return '"length"' if number == self.count - 1 else "null"


@dataclass(slots=True)
class RecordedStream:
    """The engine's stand-in."""

    model: str
    tokens_per_s: float
    first_token_s: float
    max_model_len: int
    max_new_tokens: int | None = None
    api_key: str | None = None
    broken: bool = False
    stalled: bool = False
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
                web.post("/inference/v1/generate", self.generate),
                web.post("/v1/chat/completions/derender", self.derender),
                web.post("/v1/completions/derender", self.derender),
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
        if not request.path.startswith(("/v1/", "/inference/")):
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

    async def derender(self, request: web.Request) -> web.Response:
        """Text of token ids."""
        body = await request.json()
        answers = body.get("generate_responses") or [body["generate_response"]]
        choices = [{"index": 0, "text": text_of(answer["choices"][0]["token_ids"])} for answer in answers]
        return web.json_response({"choices": choices})

    async def render(self, request: web.Request) -> web.Response:
        body = await request.json()
        said = [message.get("content") for message in body["messages"]]
        tokens = tokenize(" ".join(text if isinstance(text, str) else RENDERED_AS for text in said) or RENDERED_AS)
        wanted = body.get("max_completion_tokens") or body.get("max_tokens")
        if len(tokens) + (wanted or 1) > self.max_model_len:
            raise ValueError(f"{len(tokens)} tokens of prompt and {wanted} more are over {self.max_model_len}")
        sampling: dict[str, Any] = {"n": 1, "temperature": body.get("temperature", 1.0), "seed": body.get("seed")}
        sampling["logprobs"] = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
        sampling["max_tokens"] = wanted or min(self.max_new_tokens or math.inf, self.max_model_len - len(tokens))
        rendered = {"request_id": f"chatcmpl-{self.number()}", "token_ids": tokens, "features": None}
        return web.json_response({**rendered, "sampling_params": sampling, "model": self.model, "stream": False})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        asked = self.asked(body, tokenize(prompt) if isinstance(prompt, str) else prompt, body)
        if not body.get("stream"):
            return await self.whole(body, asked)
        name = f'"id":"cmpl-{self.number():032x}","object":"text_completion","created":{int(time.time())}'
        head, offset = f'{{{name},"model":"{self.model}",', 0

        def chunk(number: int, token: int) -> str:
            nonlocal offset
            word, first = f" w{token}", not number
            shown = json.dumps(completion_logprobs(word, offset)) if asked.logprobs else "null"
            offset += len(word)
            return (
                f'{head}"choices":[{{"index":0,"text":"{word}","logprobs":{shown},'
                f'"finish_reason":{asked.finish(number)},"stop_reason":null,'
                f'"prompt_token_ids":{json.dumps(asked.prompt) if asked.ids and first else "null"},'
                f'"token_ids":{[token] if asked.ids else "null"}}}]}}'
            )

        usage = f'{head}"choices":[],"usage":{json.dumps(asked.usage)}}}'
        return await self.stream(request, asked, chunk, usage)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """From a rendered request."""
        body = await request.json()
        asked = self.asked(body, body["token_ids"], body["sampling_params"])
        if not body.get("stream") or body.get("output_mode") != "text":
            raise ValueError("this stand-in generates streams with output_mode 'text' only")
        head = f'{{"request_id":"generate-tokens-{self.number()}",'

        def chunk(number: int, token: int) -> str:
            word = f" w{token}"
            shown = json.dumps({"content": [chat_logprob(word)]}) if asked.logprobs else "null"
            prompt = f'"prompt_token_ids":{json.dumps(asked.prompt)},' if asked.ids and not number else ""
            return (
                f'{head}"usage":null,{prompt}"output_mode":"text","choices":[{{"index":0,'
                f'"finish_reason":{asked.finish(number)},"stop_reason":null,"token_ids":[{token}],'
                f'"routed_experts":null,"sampling_mask":null,"weight_versions":null,'
                f'"text":"{word}","logprobs":{shown}}}]}}'
            )

        usage = f'{head}"usage":{json.dumps(asked.usage)},"output_mode":"text","choices":[]}}'
        return await self.stream(request, asked, chunk, usage)

    def asked(self, body: dict[str, Any], prompt: Any, sampling: dict[str, Any]) -> Asked:
        """What is wanted, when an engine would take it."""
        count, options = sampling.get("max_tokens", MAX_TOKENS), body.get("stream_options") or {}
        if sampling.get("n", 1) not in (1, None):
            raise ValueError("this stand-in gives one choice only")
        if body.get("model", self.model) not in (self.model, None):
            raise ValueError(f"The model `{body['model']}` does not exist.")
        if not isinstance(prompt, list) or not prompt or not all(type(t) is int and 0 <= t < 2**63 for t in prompt):
            raise ValueError("the prompt must be text or a list of token ids")
        count = MAX_TOKENS if count is None else count
        if type(count) is not int or count < 1:
            raise ValueError(f"max_tokens must be at least 1, got {count}.")
        if len(prompt) + count > self.max_model_len:
            raise ValueError(f"{len(prompt)} tokens of prompt and {count} more are over {self.max_model_len}")
        return Asked(
            prompt=prompt,
            count=count,
            ids=bool(body.get("return_token_ids")),
            logprobs=sampling.get("logprobs") is not None,
            include_usage=bool(options.get("include_usage")),
        )

    async def whole(self, body: dict[str, Any], asked: Asked) -> web.Response:
        """An answer that is not streamed, made at once."""
        if self.stalled:
            await asyncio.Event().wait()
        tokens = tokens_of(asked.prompt, asked.count)
        choice = {"index": 0, "text": text_of(tokens), "logprobs": None, "finish_reason": "length", "stop_reason": None}
        choice |= {"token_ids": tokens, "prompt_token_ids": asked.prompt} if asked.ids else {}
        named = {"id": f"cmpl-{self.number():032x}", "object": "text_completion", "created": int(time.time())}
        return web.json_response({**named, "model": self.model, "choices": [choice], "usage": asked.usage})

    async def stream(
        self, request: web.Request, asked: Asked, chunk: Callable[[int, int], str], usage: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        stream = Stream("stall" if self.stalled else None)
        self.streams.add(stream)
        try:
            await response.prepare(request)
            if await self.send(stream, asked, response.write, chunk):
                last = [f"data: {usage}\n\n"] if asked.include_usage else []
                await response.write("".join([*last, "data: [DONE]\n\n"]).encode())
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

    async def send(
        self, stream: Stream, asked: Asked, write: Callable[[bytes], Awaitable[None]], chunk: Callable[[int, int], str]
    ) -> bool:
        """Tokens at absolute times, so that one that was late delays none after it; False when it was struck."""
        now, clock = asyncio.get_running_loop().time, time.monotonic_ns
        sequence, before = asked.prompt[0], len(asked.prompt)
        sent_ns = self.sent_ns.setdefault(sequence, [])
        began_s = now() + self.first_token_s
        for number in range(asked.count):
            due_s = began_s + number / self.tokens_per_s if self.tokens_per_s else math.inf
            if due_s > now():
                await stream.wait_until(due_s)
            elif not number % 64:
                await asyncio.sleep(0)
            while stream.failure == "stall":
                await stream.wait_until(math.inf)
            if stream.failure == "error_event":
                await write(b"data: " + ENGINE_DIED + b"\n\ndata: [DONE]\n\n")
            if stream.failure is not None:
                return False
            event = f"data: {chunk(number, token_at(sequence, before + number))}\n\n".encode()
            sent_ns.append(clock())
            await write(event)
        return True

    def number(self) -> int:
        """A number for an answer's name."""
        self.served += 1
        return self.served

    async def fail(self, request: web.Request) -> web.Response:
        kind = (await request.json())["kind"]
        if kind not in KINDS:
            return refusal(400, "BadRequestError", f"no kind {kind!r}; there are {', '.join(KINDS)}")
        self.broken, self.stalled = kind == "http500", kind == "stall"
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


def completion_logprobs(word: str, offset: int) -> dict[str, Any]:
    """All tokens are alike."""
    return {"text_offset": [offset], "token_logprobs": [-0.5], "tokens": [word], "top_logprobs": [{word: -0.5}]}


def chat_logprob(word: str) -> dict[str, Any]:
    """The same, in a chat's words."""
    one = {"token": word, "logprob": -0.5, "bytes": list(word.encode())}
    return one | {"top_logprobs": [one]}


def refusal(status: int, kind: str, message: str) -> web.Response:
    """vLLM's errors."""
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status
    )


@contextmanager
def recorded_stream(
    *,
    tokens_per_s: float = 20.0,
    model: str = "tiny",
    max_model_len: int = 2**17,
    max_new_tokens: int | None = None,
    api_key: str | None = None,
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process of its own, and its port."""
    command = [sys.executable, str(Path(__file__).resolve()), "--model", model]
    command += ["--tokens-per-s", str(tokens_per_s), "--max-model-len", str(max_model_len)]
    command += ["--max-new-tokens", str(max_new_tokens)] if max_new_tokens is not None else []
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    environment |= {"VLLM_API_KEY": api_key} if api_key else {}
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
    parser.add_argument("--max-new-tokens", type=int, help="of a chat that names no limit; the model's room by default")
    asked = parser.parse_args()
    stand_in = RecordedStream(
        model=asked.model,
        tokens_per_s=asked.tokens_per_s,
        first_token_s=asked.first_token_s,
        max_model_len=asked.max_model_len,
        max_new_tokens=asked.max_new_tokens,
        api_key=os.environ.get("VLLM_API_KEY") or None,
    )
    asyncio.run(serve(stand_in, asked.host, asked.port))


if __name__ == "__main__":
    main()
