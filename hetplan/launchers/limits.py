"""Whether an engine runs a pipeline: each limit of its profile, by name."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from hetplan.catalog.engines import ENGINES, LIMITS, PLUGIN_ENGINE, EngineProfile, LimitName
from hetplan.errors import UnsupportedFeatureError
from hetplan.plan import Pipeline


class EngineLimitError(UnsupportedFeatureError):
    """An engine cannot run a pipeline; ``.limit`` is the limit's name."""

    def __init__(self, limit: LimitName, engine: str, found: str) -> None:
        self.limit = limit
        self._parts = (limit, engine, found)
        lifted = limit not in ENGINES[PLUGIN_ENGINE].limits
        super().__init__(
            f"{engine} cannot run this plan: {limit}: {LIMITS[limit]}; {found}. Plan with engine={engine!r}"
            + (f", or launch with engine={PLUGIN_ENGINE!r}, whose plugin lifts the limit" if lifted else "")
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self._parts)


def _degrees(pipeline: Pipeline) -> str | None:
    degrees = [stage.tensor_parallel for stage in pipeline.stages]
    return None if len(set(degrees)) == 1 else f"the stages have degrees {degrees}"


def _gpus(pipeline: Pipeline) -> str | None:
    counts = [0] * len(pipeline.nodes)
    for stage in pipeline.stages:
        counts[stage.node] += stage.tensor_parallel
    return None if len(set(counts)) == 1 else f"the nodes give {counts} GPUs"


def _consecutive(pipeline: Pipeline) -> str | None:
    nodes = [stage.node for stage in pipeline.stages]
    changes = 1 + sum(a != b for a, b in pairwise(nodes))
    return None if changes == len(set(nodes)) else f"the stages lie on nodes {nodes}"


def _dtypes(pipeline: Pipeline) -> str | None:
    dtypes = [stage.compute_dtype for stage in pipeline.stages]
    return None if len(set(dtypes)) == 1 else f"the stages compute in {dtypes}"


_CHECKS: dict[LimitName, Callable[[Pipeline], str | None]] = {
    "one-tensor-parallel-degree": _degrees,
    "equal-gpus-per-node": _gpus,
    "consecutive-stages-per-node": _consecutive,
    "one-dtype": _dtypes,
}


def refuse_beyond(engine: EngineProfile, pipeline: Pipeline) -> None:
    """Raise `EngineLimitError` at the first limit that the pipeline breaks."""
    for limit in engine.limits:
        found = _CHECKS[limit](pipeline)
        if found is not None:
            raise EngineLimitError(limit, engine.name, found)


def keeps_all_limits(pipeline: Pipeline) -> bool:
    """Whether every engine runs it, without a plugin."""
    return all(check(pipeline) is None for check in _CHECKS.values())
