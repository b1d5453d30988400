"""The router lives through ten thousand requests that nobody means well with, and does not grow."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import schemathesis
from hostile_requests import ANSWERED, KEY, SlowClients, Tally, attacks, storm
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.runtime.recorded_stream import recorded_stream, tokens_of
from tests.runtime.router_process import healthy, memory_bytes, run_router

MIB = 2**20
TOTAL = 10_000
SLOW_CLIENTS, NEVER_READ = 30, 2
# Of each operation in the router's own document, sound and broken: with a body, without.
GENERATED = {"post": 25, "get": 8, "put": 8}


@dataclass(frozen=True, slots=True)
class Served:
    """A router with a key before one engine."""

    process: Popen[bytes]
    port: int
    engine_port: int

    def ask(self, prompt: list[int], tokens: int) -> list[int]:
        """Tokens of a sound stream."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "stream": True, "return_token_ids": True}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        found: list[int] = []
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60
        ) as told:
            for line in told:
                if line.startswith(b"data: {"):
                    content: dict[str, Any] = json.loads(line[6:])
                    found += content["choices"][0]["token_ids"] or [] if content["choices"] else []
        return found

    def engine_rests(self, within_s: float) -> bool:
        """Whether the engine has no stream any more, within some seconds."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.engine_port}/running", timeout=30) as told:
                if not json.load(told)["running"]:
                    return True
            time.sleep(0.2)
        return False

    def storm(self, number: int) -> Tally:
        """A half of the raw attacks, beside clients that hold what they have been given."""

        async def both() -> Tally:
            slow = SlowClients(self.port, SLOW_CLIENTS, NEVER_READ)
            holding = asyncio.create_task(slow.hold())
            tally = await storm(self.port, attacks(number, share=0.5))
            assert not holding.done()
            assert await asyncio.to_thread(self.ask, [number, 1], 10) == tokens_of([number, 1], 10)
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            assert slow.opened == 2 * SLOW_CLIENTS + NEVER_READ
            tally.sent += slow.opened
            return tally

        return asyncio.run(both())

    def generate(self, number: int, tally: Tally) -> None:
        """What schemathesis makes of the router's OpenAPI document."""
        schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{self.port}/openapi.json")
        for found in schema.get_all_operations():
            operation = found.ok()
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

                def check(case: schemathesis.Case) -> None:
                    answer = case.call(headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
                    tally.sent += 1
                    if answer.status_code not in ANSWERED:
                        request = case.as_curl_command()[:1000]
                        tally.faults.append(f"{request}: {answer.status_code} {answer.text[:300]}")

                limits = settings(
                    max_examples=GENERATED[operation.method.lower()],
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                    deadline=None,
                    database=None,
                )
                seed(number)(limits(given(case=operation.as_strategy(generation_mode=mode))(check)))()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("router")
    with (
        recorded_stream(tokens_per_s=float("inf"), max_model_len=2**15, max_new_tokens=16) as (_, engine_port),
        run_router(folder, [engine_port], api_key=KEY, retention_s=2, max_body_bytes=4 * MIB) as (process, port),
    ):
        yield Served(process, port, engine_port)


@pytest.mark.slow
def test_ten_thousand_hostile_requests(served: Served) -> None:
    sent, held_bytes = 0, []
    for number in (1, 2):
        tally = served.storm(number)
        served.generate(number, tally)
        sent += tally.sent
        assert not tally.faults, f"{len(tally.faults)} faults:\n" + "\n".join(tally.faults[:20])
        assert served.process.poll() is None
        assert served.engine_rests(20), "streams go on at the engine after their clients have left"
        held_bytes.append(memory_bytes(served.process.pid))
    assert healthy(served.port)
    assert served.ask([5, 6], 100) == tokens_of([5, 6], 100)
    assert held_bytes[1] <= 1.2 * held_bytes[0] + 20 * MIB, [f"{held / MIB:.0f} MiB" for held in held_bytes]
    assert sent >= TOTAL
