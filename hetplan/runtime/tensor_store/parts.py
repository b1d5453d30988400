"""Parts, loaded and handed out as one piece: a layer of one rank, or one of its tensors outside the layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hetplan.runtime.tensor_store.manifest import Manifest, TensorShard

# What vector instructions and GPU copies want, and a cache line.
ALIGNMENT_BYTES = 64


class PartKey(NamedTuple):
    """Which part: ``name`` is that of a tensor outside the layers, None for a layer."""

    fingerprint: str
    tensor_parallel: int
    rank: int
    layer: int | None
    name: str | None


@dataclass(frozen=True, slots=True, eq=False)
class PartLayout:
    """A part, and where its tensors lie in it.

    Attributes
    ----------
    key : PartKey
    tensors : tuple of TensorShard
    offsets : tuple of int
    contents : dict of str to int
        Where bytes of a sha256 lie.
    bytes : int
    """

    key: PartKey
    tensors: tuple[TensorShard, ...]
    offsets: tuple[int, ...]
    contents: dict[str, int]
    bytes: int


def part_layouts(manifest: Manifest) -> dict[PartKey, PartLayout]:
    """All parts of a model, in the order of its manifest."""
    rows: dict[PartKey, list[TensorShard]] = {}
    for shard in manifest.tensors:
        name = shard.name if shard.layer is None else None
        key = PartKey(manifest.fingerprint, shard.tensor_parallel, shard.rank, shard.layer, name)
        rows.setdefault(key, []).append(shard)
    return {key: _layout(key, shards) for key, shards in rows.items()}


def part_keys(
    keys: Iterable[PartKey],
    *,
    tensor_parallel: int,
    ranks: Collection[int],
    layers: tuple[int, int],
    first: bool,
    last: bool,
) -> list[PartKey]:
    """The parts of some ranks of a stage: its layers, and what is before the first or behind the last.

    An embedding is before the layers; without a head of its own a model uses it behind them as well.
    """
    here = [key for key in keys if key.tensor_parallel == tensor_parallel and key.rank in ranks]
    headless = not any("lm_head" in (key.name or "") for key in here)

    def belongs(key: PartKey) -> bool:
        if key.name is None:
            return key.layer is not None and layers[0] <= key.layer < layers[1]
        embedding = "embed" in key.name
        return (first and embedding) or (last and (headless or not embedding))

    return [key for key in here if belongs(key)]


def _layout(key: PartKey, shards: list[TensorShard]) -> PartLayout:
    offsets = []
    contents: dict[str, int] = {}
    end = 0
    for shard in shards:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets.append(start)
        contents.setdefault(shard.sha256, start)
        end = start + shard.bytes
    # Memory of no bytes cannot be mapped, and a tensor may have none.
    return PartLayout(key, tuple(shards), tuple(offsets), contents, max(end, ALIGNMENT_BYTES))
