"""Two engines that share caches, and what is asked of them."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from conftest import local_plan
from servers import Cluster

import hetplan as hp
from hetplan.runtime.kv_transfer import KvTransfer, Sent

SOURCE, TARGET = 18_100, 18_101
MODEL = "tiny-llama-2"


def started(
    folder: Path, environment: Path, model: Path, variables: dict[str, str], **options: Any
) -> Iterator[Cluster]:
    """Two pipelines that share caches."""
    plan = local_plan(model, [[8], [8]])
    hp.launch(plan, out=folder, model=str(model), first_port=SOURCE, **options)
    cluster = Cluster(folder, environment, variables)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def prompt(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(250), k=tokens)


def send(transfer: KvTransfer, token_ids: list[int]) -> Sent:
    async def sending() -> Sent:
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{SOURCE}"
            return await transfer.send(session, url, token_ids, model=MODEL, timeout_s=60.0)

    return asyncio.run(sending())


def resumed(token_ids: list[int], tokens: int, params: dict[str, Any] | None) -> tuple[list[int], float]:
    """Greedy tokens of the target, and the seconds they took."""
    body = {"model": MODEL, "prompt": token_ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True} | ({} if params is None else {"kv_transfer_params": params})
    request = urllib.request.Request(
        f"http://127.0.0.1:{TARGET}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=180) as answer:
        ids: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return ids, time.perf_counter() - start


def tokens_by_source(port: int) -> dict[str, float]:
    """Prompt tokens that an engine computed, and those that it got from elsewhere."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    rows = [line for line in lines if line.startswith("vllm:prompt_tokens_by_source_total{")]
    return {row.split('source="')[1].split('"')[0]: float(row.rsplit(" ", 1)[1]) for row in rows}


def gained(before: dict[str, float], source: str) -> float:
    return tokens_by_source(TARGET).get(source, 0.0) - before.get(source, 0.0)


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
