"""A manifest is what it says, or it is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from store_process import make_shards, rows_of

from hetplan.errors import InvalidInputError
from hetplan.runtime.tensor_store import manifest as module
from hetplan.runtime.tensor_store.manifest import FILE, Manifest, TensorShard
from hetplan.runtime.tensor_store.parts import part_layouts

ROW = {
    "name": "model.layers.0.mlp.weight",
    "layer": 0,
    "tensor_parallel": 1,
    "rank": 0,
    "dtype": "float32",
    "shape": [2, 3],
    "bytes": 24,
    "sha256": "a" * 64,
}
HEAD = {"model": "meta/tiny-llama", "engine": "vllm-0.32.0", "config_sha256": "c" * 64, "layers": 1}
NAMES = ["../up", "/etc/passwd", "a/../b", "a..b", "..", ".", "a\nb", "a\n", "a\0b", "a b", "a/b/c", "", "ä", "x" * 600]


def content(**changes: Any) -> dict[str, Any]:
    """What a file holds, with a fingerprint that fits whatever is in it."""
    made = {"schema": "hetplan.shards/1", **HEAD, "tensors": [ROW], **changes}
    canonical = json.dumps(made, sort_keys=True, separators=(",", ":")).encode()
    return {**made, "fingerprint": hashlib.sha256(canonical).hexdigest()}


def parse(values: dict[str, Any]) -> Manifest:
    return Manifest.parse(json.dumps(values).encode(), "here")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    made = make_shards(tmp_path / "shards")
    path = tmp_path / "shards" / FILE
    assert Manifest.parse(path.read_bytes(), "here") == made
    assert [file.name for file in path.parent.iterdir() if file.is_file()] == [FILE]
    written = json.loads(path.read_text())
    fingerprint = written.pop("fingerprint")
    canonical = json.dumps(written, sort_keys=True, separators=(",", ":")).encode()
    assert hashlib.sha256(canonical).hexdigest() == fingerprint == made.fingerprint


def test_rows_may_be_records_or_plain_data() -> None:
    assert Manifest.of(**HEAD, tensors=[ROW]) == Manifest.of(**HEAD, tensors=[TensorShard(**ROW)]) == parse(content())


@pytest.mark.parametrize(
    "field",
    [{"model": "other"}, {"engine": "vllm-0.33.0"}, {"config_sha256": "d" * 64}, {"layers": 2}, {"tensors": [ROW] * 0}],
)
def test_any_change_is_noticed(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        parse({**content(), **field})


@pytest.mark.parametrize("name", NAMES)
def test_hostile_names(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"here: .*name"):
        parse(content(tensors=[ROW | {"name": name}]))
    with pytest.raises(InvalidInputError, match=r"here: .*(model|name)"):
        parse(content(model=name))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sha256": "A" * 64}, "sha256"),
        ({"sha256": "a" * 63}, "sha256"),
        ({"sha256": "../" + "a" * 61}, "sha256"),
        ({"sha256": "a" * 64 + "\n"}, "sha256"),
        ({"bytes": 20}, "20 bytes, but float32 [2, 3] has 24"),
        ({"dtype": "float31"}, "no dtype 'float31'"),
        ({"dtype": "bfloat16"}, "has 12"),
        ({"shape": [-2, -3]}, "shape"),
        ({"shape": [2**61]}, "shape"),
        ({"shape": [2.0, 3]}, "shape"),
        ({"rank": 1}, "rank 1 of 1"),
        ({"rank": True, "tensor_parallel": 2}, "rank"),
        ({"rank": "0"}, "rank"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"layer": 1}, "layer 1 of 1"),
        ({"layer": -1}, "layer"),
        ({"more": 1}, "unknown key"),
    ],
)
def test_rows_that_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        parse(content(tensors=[ROW | change]))
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tensors": [ROW, ROW]}, "twice at tensor_parallel 1, rank 0"),
        ({"tensors": [ROW, ROW | {"name": "b", "shape": [3], "bytes": 12}]}, "with the same sha256"),
        ({"tensors": []}, "tensors"),
        ({"engine": "vllm"}, "engine"),
        ({"engine": "../vllm-0.32.0"}, "engine"),
        ({"config_sha256": "c"}, "config_sha256"),
        ({"layers": 0}, "layers"),
        ({"schema": "hetplan.shards/2"}, "schema"),
        ({"more": 1}, "unknown key"),
    ],
)
def test_manifests_that_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        parse(content(**change))
    assert told in str(refused.value)


def test_a_wrong_fingerprint_says_both() -> None:
    right = content()["fingerprint"]
    with pytest.raises(InvalidInputError, match=f"fingerprint {right}, not {'f' * 64}"):
        parse({**content(), "fingerprint": "f" * 64})


def test_a_manifest_has_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(InvalidInputError, match="more than 100 bytes"):
        parse(content())
    with pytest.raises(InvalidInputError, match="at most 100 are read"):
        Manifest.of(**HEAD, tensors=[ROW]).write(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff"])
def test_files_that_are_none(text: bytes) -> None:
    with pytest.raises(InvalidInputError, match="here"):
        Manifest.parse(text, "here")


def test_tensors_of_a_part_lie_apart_and_aligned(tmp_path: Path) -> None:
    made = make_shards(tmp_path / "shards", layers=2)
    layouts = part_layouts(made)
    # Two ranks of degree 2 and one of degree 1, each with two layers and three tensors outside.
    assert len(layouts) == 3 * 5
    assert sum(len(layout.tensors) for layout in layouts.values()) == len(made.tensors)
    for layout in layouts.values():
        ends = 0
        for shard, offset in zip(layout.tensors, layout.offsets, strict=True):
            assert offset % 64 == 0
            assert offset >= ends
            ends = offset + shard.bytes
        assert layout.bytes >= ends
    assert {row.name for row in rows_of(made)} >= {row.name for layout in layouts.values() for row in layout.tensors}


def test_a_tensor_may_be_empty() -> None:
    empty = ROW | {"shape": [0, 3], "bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    (layout,) = part_layouts(Manifest.of(**HEAD, tensors=[empty])).values()
    assert layout.bytes == 64
