"""Many streams from one process, each token's arrival by CLOCK_MONOTONIC: cheap, so that it is not what is measured.

``python -m benchmarks.stream_client '{"port": 8080, "streams": 100, ...}'`` prints what came, as JSON. Answers are not
parsed: each token's text is one word, ``" w17"``, which nothing else in an answer looks like, so they are counted.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import sys
import time
from dataclasses import dataclass
from typing import Any

WORD = b'" w'
DONE = b"data: [DONE]"
# The last bytes of a chunked answer.
ENDED = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Load:
    """Streams that start over some seconds and are dropped after others; ``tokens_per_s`` is the engine's rate."""

    port: int
    streams: int
    tokens_per_s: float
    tokens: int
    starts_over_s: float
    drop_after_s: float
    first_sequence: int = 0
    api_key: str | None = None
    model: str = "tiny"

    def request(self, sequence: int) -> bytes:
        """Whole, as sent."""
        body = json.dumps(
            {
                "model": self.model,
                "prompt": [sequence, 1, 2, 3],
                "max_tokens": self.tokens,
                "temperature": 0,
                "stream": True,
            }
        ).encode()
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body


class Reader(asyncio.Protocol):
    """One stream: when each of its tokens came."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.arrived_ns: list[int] = []
        self.status = 0
        self.ended = asyncio.get_running_loop().create_future()
        self.last = b""
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: Any) -> None:
        """Ask."""
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Count the words, also one that two reads share."""
        now = time.monotonic_ns()
        if not self.status:
            self.status = int(data[9:12])
        count = data.count(WORD) + (WORD in self.last + data[:2])
        self.arrived_ns += [now] * count
        self.last = data[-2:]
        if DONE in data or data.endswith(ENDED) or self.status != 200:
            self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Over."""
        self.end()

    def end(self) -> None:
        """Wake who waits for the end."""
        if not self.ended.done():
            self.ended.set_result(None)


def starts_s(load: Load) -> list[float]:
    """Evenly spread, and so that the tokens of all streams are evenly spread over one another's intervals."""
    if load.streams == 1 or not load.tokens_per_s:
        return [n * load.starts_over_s / load.streams for n in range(load.streams)]
    # Of the multiples of an interval's share, the one nearest to the wish that visits every share of the interval.
    share_s = 1 / load.tokens_per_s / load.streams
    wish = max(1, round(load.starts_over_s / load.streams / share_s))
    step = next(
        n for far in range(load.streams) for n in (wish + far, wish - far) if n > 0 and math.gcd(n, load.streams) == 1
    )
    return [n * step * share_s for n in range(load.streams)]


async def run(load: Load) -> dict[str, Any]:
    """Open, read, drop; arrivals by sequence and the statuses that were not 200."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    readers: dict[int, Reader] = {}

    async def one(sequence: int, at_s: float) -> None:
        await asyncio.sleep(began + at_s - loop.time())
        reader = readers[sequence] = Reader(load.request(sequence))
        transport, _ = await loop.create_connection(lambda: reader, "127.0.0.1", load.port)
        try:
            async with asyncio.timeout_at(began + load.drop_after_s):
                await reader.ended
        except TimeoutError:
            pass
        transport.abort()

    sequences = range(load.first_sequence, load.first_sequence + load.streams)
    await asyncio.gather(*map(one, sequences, starts_s(load)))
    return {
        "arrived_ns": {str(sequence): reader.arrived_ns for sequence, reader in readers.items()},
        "refused": [reader.status for reader in readers.values() if reader.status not in (0, 200)],
    }


def main() -> None:
    """One load, as JSON on the command line."""
    load = Load(**json.loads(sys.argv[1]))
    gc.freeze()
    json.dump(asyncio.run(run(load)), sys.stdout)


if __name__ == "__main__":
    main()
