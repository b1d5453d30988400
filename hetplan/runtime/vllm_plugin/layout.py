"""What HETPLAN_LAYOUT says: the stages of a pipeline, each with its own tensor parallelism, and where they run.

Ranks are numbered along the pipeline: stage by stage, within a stage by tensor-parallel rank. A node holds the ranks
of stages that follow one another.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby, pairwise
from typing import Any

VARIABLE = "HETPLAN_LAYOUT"
_MAX_CHARACTERS = 1 << 20
_REQUIRED = {"layers", "tensor_parallel", "node", "kv_cache_bytes"}
_OPTIONAL = {"start_kv_cache_bytes", "hold_bytes"}


class LayoutError(ValueError):
    """HETPLAN_LAYOUT cannot be run."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage. Bytes are of each of its ranks.

    ``kv_cache_bytes`` is the whole cache, ``start_kv_cache_bytes`` what an engine can start with beside another on the
    same device, ``hold_bytes`` what it needs besides weights and cache.
    """

    layers: tuple[int, int]
    tensor_parallel: int
    node: int
    kv_cache_bytes: int
    start_kv_cache_bytes: int
    hold_bytes: int
    first_rank: int

    @property
    def ranks(self) -> list[int]:
        return list(range(self.first_rank, self.first_rank + self.tensor_parallel))


@dataclass(frozen=True, slots=True)
class Layout:
    """The stages of a pipeline."""

    stages: tuple[Stage, ...]

    @property
    def world_size(self) -> int:
        return sum(stage.tensor_parallel for stage in self.stages)

    @property
    def leaders(self) -> list[int]:
        """The first rank of each stage: it speaks for the stage to its neighbours."""
        return [stage.first_rank for stage in self.stages]

    @property
    def node_sizes(self) -> list[int]:
        """How many ranks each node holds, by node."""
        return [
            sum(stage.tensor_parallel for stage in stages)
            for _, stages in groupby(self.stages, key=lambda stage: stage.node)
        ]

    @property
    def degrees_differ(self) -> bool:
        return len({stage.tensor_parallel for stage in self.stages}) > 1

    def stage_of(self, rank: int) -> int:
        """The number of the stage that a rank works in."""
        return next(i for i, stage in enumerate(self.stages) if rank in stage.ranks)

    def node_of(self, rank: int) -> int:
        return self.stages[self.stage_of(rank)].node

    def first_rank_of(self, node: int) -> int:
        return sum(self.node_sizes[:node])


@cache
def read_layout() -> Layout | None:
    """The layout in the environment; None without one.

    Raises
    ------
    LayoutError
        If it is not the JSON of stages that follow one another; the message says where.
    """
    text = os.environ.get(VARIABLE)
    return None if not text else parse_layout(text)


def parse_layout(text: str) -> Layout:
    """Read a layout; see `read_layout`."""
    if len(text) > _MAX_CHARACTERS:
        raise LayoutError(f"{VARIABLE} has {len(text)} characters; the limit is {_MAX_CHARACTERS}")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise LayoutError(f"{VARIABLE} is not JSON: {error}") from None
    rows = content.get("stages") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise LayoutError(f'{VARIABLE} needs {{"stages": [...]}} with at least one stage')
    parsed = [_fields(i, row) for i, row in enumerate(rows)]
    starts = [0, *accumulate(fields["tensor_parallel"] for fields in parsed)]
    stages = tuple(Stage(**fields, first_rank=start) for fields, start in zip(parsed, starts, strict=False))
    if stages[0].layers[0] != 0 or stages[0].node != 0:
        raise LayoutError(f"{VARIABLE}: the first stage begins at layer 0 on node 0, not {stages[0]}")
    for i, (a, b) in enumerate(pairwise(stages), start=1):
        if b.layers[0] != a.layers[1]:
            raise LayoutError(
                f"{VARIABLE}: stage {i} begins at layer {b.layers[0]}; the one before ends at {a.layers[1]}"
            )
        if b.node not in (a.node, a.node + 1):
            raise LayoutError(f"{VARIABLE}: stage {i} is on node {b.node}, the one before on {a.node}; nodes follow on")
    return Layout(stages)


def _fields(number: int, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict) or not _REQUIRED <= row.keys() <= _REQUIRED | _OPTIONAL:
        raise LayoutError(f"{VARIABLE}: stage {number} needs {sorted(_REQUIRED)} and may have {sorted(_OPTIONAL)}")
    layers = row["layers"]
    if not (isinstance(layers, list) and len(layers) == 2 and all(map(_count, layers)) and layers[0] < layers[1]):
        raise LayoutError(f"{VARIABLE}: stage {number} has layers {layers!r}; give [start, stop]")
    for name in row.keys() - {"layers"}:
        least = 1 if name in ("tensor_parallel", "kv_cache_bytes") else 0
        if not _count(row[name]) or row[name] < least:
            raise LayoutError(f"{VARIABLE}: stage {number} has {name} {row[name]!r}; give a whole number from {least}")
    return {
        "start_kv_cache_bytes": row["kv_cache_bytes"],
        "hold_bytes": 0,
        **row,
        "layers": (layers[0], layers[1]),
    }


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
