"""Two models on this host that answer three query types: measured alone, allocated, and loaded by type."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import hetplan as hp
from hetplan.catalog.local import LOCAL_MACHINE, PROVIDER
from hetplan.catalog.offers import Pool
from hetplan.problem.allocation_catalog import ReplicaEstimator
from hetplan.units import MIB, SECONDS_PER_HOUR

FloatArray = NDArray[np.float64]

SMALL, TINY = "small-llama-2", "tiny-llama-2"
ERRORS = {SMALL: 0.02, TINY: 0.08}
# The small model and a cache of some 60 sequences: engines start sooner the less they are to hold.
MACHINE = LOCAL_MACHINE.replace(gpu=LOCAL_MACHINE.gpu.replace(memory_bytes=680 * MIB))
UTILIZATION = 0.7
# By which a type is measured: so many clients, each so many requests to every engine.
CLIENTS, REQUESTS = 2, 8
_ID_RANGE = range(10, 250)


@dataclass(frozen=True)
class Kind:
    """A query type: its tokens, its part of all requests, and the most errors, which force a share of the small one."""

    name: str
    input_tokens: int
    output_tokens: int
    part: float
    error_limit: float

    @property
    def tiny_share(self) -> float:
        """As much to the tiny model as its errors allow, for it is faster."""
        return min((self.error_limit - ERRORS[SMALL]) / (ERRORS[TINY] - ERRORS[SMALL]), 1.0)


KINDS = (
    Kind("chat", 32, 3, 0.25, 0.04),
    Kind("code", 64, 4, 0.25, 0.065),
    Kind("label", 16, 2, 0.5, 0.1),
)


class Figures(NamedTuple):
    """What was measured of a type on an engine, means; requests/s one after another."""

    ttft_s: float
    delay_s: float
    requests_per_s: float


Measured = Mapping[str, Sequence[Figures]]


def problem(models: Sequence[Path], measured: Measured, requests_per_s: float) -> hp.AllocationProblem:
    """Two models, three types, one tier: this host, with delays that were measured on it."""
    offer = hp.Offer(
        instance_type=MACHINE.name, provider=PROVIDER, region="here", market="owned", price_usd_per_hour=0.1,
        source="test",
    )  # fmt: skip
    queries: list[dict[str, Any]] = [
        {
            "name": kind.name,
            "input_tokens": kind.input_tokens,
            "output_tokens": kind.output_tokens,
            "requests_per_hour": kind.part * requests_per_s * SECONDS_PER_HOUR,
            "delay_limit_s": 60.0,
            "error_limit": kind.error_limit,
            "delay_usd_per_ms": 1.0,
            "unserved_usd": 1e6,
            "errors": ERRORS,
        }
        for kind in KINDS
    ]
    return hp.AllocationProblem.from_catalog(
        query_types=queries,
        models=models,
        cluster=hp.Cluster(instance_types=(MACHINE,), pools=(Pool(offer=offer, count=1),)),
        estimator=_as_measured(measured),
        budget_usd=1000.0,
        utilization=UTILIZATION,
        tensor_parallel=(1,),
        pipeline_parallel=(1,),
    )


def _as_measured(measured: Measured) -> ReplicaEstimator:
    def estimate(
        model: hp.ModelSpec,
        machine: hp.InstanceType,
        *,
        tensor_parallel: int,
        pipeline_parallel: int,
        input_tokens: FloatArray,
        output_tokens: FloatArray,
        utilization: float,
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        figures = measured[model.name]
        return (
            np.array([one.delay_s for one in figures]),
            np.array([one.ttft_s for one in figures]),
            np.array([one.requests_per_s * SECONDS_PER_HOUR for one in figures]),
        )

    return estimate


def predicted_ttft_s(plan: hp.Plan) -> dict[str, float]:
    """Mean time to first token of each type over where the plan sends it."""
    assert isinstance(plan.problem, hp.AllocationProblem)
    means = {}
    for number, kind in enumerate(KINDS):
        routes = [route for route in plan.routes if route.query_type == kind.name]
        ttfts = [_ttft_s(plan, plan.deployments[route.deployment].model, number) for route in routes]
        fractions = [route.fraction for route in routes]
        means[kind.name] = float(np.average(ttfts, weights=fractions))
    return means


def _ttft_s(plan: hp.Plan, model: str, number: int) -> float:
    assert isinstance(plan.problem, hp.AllocationProblem)
    problem = plan.problem
    return next(c.ttft_s[number] for c in problem.configurations if problem.models[c.model].name == model)


# ---- requests


def ask(url: str, kind: Kind, ids: random.Random, model: str | None = None) -> tuple[float, float]:
    """Seconds to the first token and to the last of a request of a type; the model that is named, or any."""
    body = {
        "prompt": [ids.choice(_ID_RANGE) for _ in range(kind.input_tokens)],
        "max_tokens": kind.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    } | ({} if model is None else {"model": model})
    headers = {"Content-Type": "application/json", "X-Query-Type": kind.name}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    began, first = time.perf_counter(), None
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {") and first is None:
                first = time.perf_counter() - began
    assert first is not None
    return first, time.perf_counter() - began


def stream_ids(url: str, kind: Kind) -> tuple[str, list[int]]:
    """The model that answered a type's one prompt, and its tokens as they were streamed."""
    body = {
        "prompt": list(_ID_RANGE[: kind.input_tokens]),
        "max_tokens": kind.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    headers = {"Content-Type": "application/json", "X-Query-Type": kind.name}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    model, ids = "", []
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                model = event["model"]
                ids += event["choices"][0].get("token_ids") or []
    return model, ids


def measure(urls: Mapping[str, str]) -> dict[str, list[Figures]]:
    """Every type on every model's engine, by clients that ask all in turn: what disturbs one disturbs the others."""
    pairs = [(model, kind) for kind in KINDS for model in urls]

    def client(number: int) -> list[list[tuple[float, float]]]:
        ids = random.Random(number)
        return [[ask(urls[model], kind, ids, model) for model, kind in pairs] for _ in range(REQUESTS)]

    for model, kind in pairs:
        ask(urls[model], kind, random.Random(-1), model)
    with ThreadPoolExecutor(CLIENTS) as pool:
        times = np.array([turn for turns in pool.map(client, range(CLIENTS)) for turn in turns])
    figures: dict[str, list[Figures]] = {model: [] for model in urls}
    for (model, _), (ttft_s, delay_s) in zip(pairs, times.mean(axis=0).tolist(), strict=True):
        figures[model].append(Figures(ttft_s, delay_s, 1 / delay_s))
    return figures


def send(url: str, count: int, requests_per_s: float, seed: int = 0) -> dict[str, list[float]]:
    """Seconds to first tokens, by type, of so many requests that come at random times, each type at its part."""
    source = random.Random(seed)
    kinds = [kind for kind in KINDS for _ in range(round(kind.part * count))]
    source.shuffle(kinds)
    times = sorted(source.uniform(0, count / requests_per_s) for _ in kinds)
    firsts: dict[str, list[float]] = {kind.name: [] for kind in KINDS}
    lock = threading.Lock()

    def one(number: int) -> None:
        first, _ = ask(url, kinds[number], random.Random(number))
        with lock:
            firsts[kinds[number].name].append(first)

    _at(times, one)
    return firsts


def _at(times: Sequence[float], do: Callable[[int], None]) -> None:
    """Each at its time, at most 32 under way."""
    began = time.perf_counter()
    with ThreadPoolExecutor(32) as pool:
        under_way = []
        for number, due in enumerate(times):
            time.sleep(max(0.0, due - (time.perf_counter() - began)))
            under_way.append(pool.submit(do, number))
        for future in under_way:
            future.result()
