"""What an operator wants to know of a plan that is served: read from the state's folder and asked of the router."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetplan.errors import InvalidInputError, RouterError
from hetplan.plan import Pipeline
from hetplan.runtime.controller.serving import Serving, ServingFiles
from hetplan.runtime.controller.state import SERVINGS, ControllerState, Generation, Machine, Origin, load
from hetplan.runtime.router.admin import RouterAdmin

ROUTER, KEY = "router-address", "admin-key"
_DEMAND_S = 60.0


async def read_status(folder: Path, key: str | None = None, clock: Callable[[], float] = time.time) -> dict[str, Any]:
    """Pipelines with their stages, machines with their notices, streams in flight, and what is asked for.

    Parameters
    ----------
    folder : Path
        The state's folder of `hetplan serve`.
    key : str, optional
        The router's key for administration; by default the one in the folder.
    clock : callable
        Seconds since 1970.

    Returns
    -------
    dict
        ``models``, ``serving`` (and ``returns_to``, where that stands in), ``draining``, ``pipelines``, ``machines``,
        ``counters``, ``router`` and ``demand``; what the router does not say, as it cannot be reached, is None.

    Raises
    ------
    InvalidInputError
        If nothing is served from the folder, or what lies there is damaged.
    """
    state = load(folder / "state.json")
    if state is None:
        raise InvalidInputError(f"nothing is served from {folder}; give the --state of `hetplan serve`")
    files = ServingFiles(folder / SERVINGS)
    servings = {fingerprint: files.read(fingerprint) for fingerprint in state.servings}
    router, told, demand = await _asked(folder, key)
    return {
        "models": list(servings[state.serving].models),
        "serving": state.serving,
        "returns_to": state.returns_to,
        "draining": state.draining,
        "pipelines": _pipelines(servings, state, told),
        "machines": [_machine(machine, clock()) for machine in state.machines],
        "counters": state.counters.model_dump(),
        "router": router,
        "demand": demand,
    }


def say_router(folder: Path, url: str) -> None:
    """Write where the router listens."""
    (folder / ROUTER).write_text(url, encoding="utf-8")


async def _asked(
    folder: Path, key: str | None
) -> tuple[dict[str, Any], dict[tuple[str, int], dict[str, Any]], list[dict[str, Any]] | None]:
    """What the router says of itself, of each engine by address and port, and of what is asked for."""
    try:
        url = (folder / ROUTER).read_text("utf-8").strip()
        key = key or (folder / KEY).read_text("utf-8").strip()
    except OSError:
        return {"url": None, "answers": False, "why": "it was not started yet"}, {}, None
    try:
        async with RouterAdmin(url, key, timeout_s=5.0) as router:
            targets, demand = await router.targets(), await router.demand(_DEMAND_S)
        told = {(str(target["address"]), int(target["port"])): target for target in targets["targets"]}
        said = {"url": url, "answers": True, "revision": targets["revision"]}
        return said, told, [*demand["demand"]]
    except RouterError as error:
        return {"url": url, "answers": False, "why": str(error)}, {}, None


def _pipelines(
    servings: dict[str, Serving], state: ControllerState, told: dict[tuple[str, int], dict[str, Any]]
) -> list[dict[str, Any]]:
    found = []
    for slot in state.slots:
        if slot.origin is None:
            continue
        about = {"model": slot.origin.model, "wanted": slot.origin.serving == state.serving}
        pipeline = _pipeline(servings, slot.origin)
        here = [generation for generation in state.generations if generation.pipeline == slot.pipeline]
        found += [about | _generation(pipeline, generation, state, told) for generation in here]
        if not here:
            why = slot.why or "it waits for machines"
            missing: dict[str, Any] = {
                "pipeline": slot.pipeline,
                "generation": None,
                "phase": "missing",
                "why": why,
                "stages": [],
            }
            found.append(about | missing)
    return found


def _pipeline(servings: dict[str, Serving], origin: Origin) -> Pipeline:
    plan = servings[origin.serving].plans[origin.plan]
    copies = [p for deployment in plan.deployments for p in deployment.pipelines for _ in range(p.count)]
    return copies[origin.number - 1]


def _generation(
    pipeline: Pipeline, generation: Generation, state: ControllerState, told: dict[tuple[str, int], dict[str, Any]]
) -> dict[str, Any]:
    order = list(dict.fromkeys(stage.node for stage in pipeline.stages))
    machine_of = dict(zip(order, generation.machines, strict=True))
    head = None if generation.machines[0] is None else state.machine(generation.machines[0])
    target = {} if head is None or head.address is None else told.get((head.address, generation.port), {})
    return {
        "pipeline": generation.pipeline,
        "generation": generation.generation,
        "phase": generation.phase,
        "why": generation.why,
        "port": generation.port,
        "router": target.get("state"),
        "running": target.get("running"),
        "weight": target.get("weight"),
        "stages": [
            {
                "layers": list(stage.layers),
                "tensor_parallel": stage.tensor_parallel,
                "machine": machine_of[stage.node],
                "weights": order.index(stage.node) in generation.loaded,
            }
            for stage in pipeline.stages
        ],
    }


def _machine(machine: Machine, now_s: float) -> dict[str, Any]:
    return {
        "machine": machine.name,
        "offer": machine.offer,
        "phase": "lost" if machine.lost else machine.phase,
        "address": machine.address,
        "taken_in_s": None if machine.deadline_s is None else max(0.0, machine.deadline_s - now_s),
        "why": machine.why,
    }
