"""What an engine is told of its stages, read without vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetplan.runtime import vllm_plugin
from hetplan.runtime.vllm_plugin.identity import layer_of
from hetplan.runtime.vllm_plugin.layout import LayoutError, parse_layout


def stage(layers: Any, degree: Any = 1, node: Any = 0, **other: Any) -> dict[str, Any]:
    return {"layers": layers, "tensor_parallel": degree, "node": node, "kv_cache_bytes": 100} | other


def text(*stages: dict[str, Any]) -> str:
    return json.dumps({"stages": stages})


def test_ranks_are_numbered_along_the_pipeline() -> None:
    layout = parse_layout(text(stage([0, 3], 2), stage([3, 4], 1), stage([4, 9], 4, node=1)))
    assert layout.world_size == 7
    assert layout.leaders == [0, 2, 3]
    assert layout.node_sizes == [3, 4]
    assert [layout.stage_of(rank) for rank in range(7)] == [0, 0, 1, 2, 2, 2, 2]
    assert [layout.node_of(rank) for rank in range(7)] == [0, 0, 0, 1, 1, 1, 1]
    assert [layout.first_rank_of(node) for node in range(2)] == [0, 3]


def test_an_engine_starts_with_its_whole_cache_unless_told() -> None:
    plain, told = parse_layout(text(stage([0, 3]), stage([3, 4], start_kv_cache_bytes=10, hold_bytes=5))).stages
    assert (plain.start_kv_cache_bytes, plain.hold_bytes) == (100, 0)
    assert (told.start_kv_cache_bytes, told.hold_bytes) == (10, 5)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", '{"stages": [...]}'),
        ('{"stages": []}', "at least one stage"),
        (text({"layers": [0, 1]}), "stage 0 needs"),
        (text(stage([0, 1], surprise=1)), "stage 0 needs"),
        (text(stage([1, 2])), "begins at layer 0"),
        (text(stage([0, 2], node=1)), "on node 0"),
        (text(stage([0, 2]), stage([3, 4])), "stage 1 begins at layer 3; the one before ends at 2"),
        (text(stage([0, 2]), stage([2, 4], node=2)), "stage 1 is on node 2, the one before on 0"),
        (text(stage([0, 2], node=0), stage([2, 4], node=1), stage([4, 5], node=0)), "stage 2 is on node 0"),
        (text(stage([2, 2])), "give [start, stop]"),
        (text(stage([0, "2"])), "give [start, stop]"),
        (text(stage([0, 2], 0)), "tensor_parallel 0; give a whole number from 1"),
        (text(stage([0, 2], True)), "tensor_parallel True"),
        (text(stage([0, 2], 1.5)), "tensor_parallel 1.5"),
        (text(stage([0, 2], kv_cache_bytes=-1)), "kv_cache_bytes -1"),
        (" " * (1 << 20) + "{}", "the limit is 1048576"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(content: str, said: str) -> None:
    with pytest.raises(LayoutError) as refused:
        parse_layout(content)
    assert said in str(refused.value)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.booleans()), min_size=1, max_size=8))
def test_each_rank_has_one_stage_and_each_node_its_ranks(shapes: list[tuple[int, int, bool]]) -> None:
    stages, start, node = [], 0, 0
    for number, (layers, degree, new_node) in enumerate(shapes):
        node += new_node and number > 0
        stages.append(stage([start, start + layers], degree, node))
        start += layers
    layout = parse_layout(text(*stages))
    ranks = range(layout.world_size)
    assert [rank for one in layout.stages for rank in one.ranks] == list(ranks)
    assert sum(layout.node_sizes) == layout.world_size
    for number, size in enumerate(layout.node_sizes):
        first = layout.first_rank_of(number)
        assert {layout.node_of(rank) for rank in range(first, first + size)} == {number}


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.self_attn.qkv_proj.weight", 12),
        ("language_model.model.layers.0.mlp.down_proj.weight", 0),
        ("layers.3.norm.weight", 3),
        ("model.embed_tokens.weight", None),
        ("lm_head.weight", None),
        ("model.sublayers.3.weight", None),
    ],
)
def test_the_layer_of_a_tensor_is_in_its_name(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


@pytest.mark.parametrize("version", ["0.33.0", ""])
def test_the_plugin_refuses_versions_that_it_does_not_know(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where something is asked of it: elsewhere it leaves vLLM alone."""
    monkeypatch.setattr(vllm_plugin, "installed_version", lambda: version)
    for name in ("HETPLAN_LAYOUT", "HETPLAN_STORE"):
        monkeypatch.delenv(name, raising=False)
    vllm_plugin.register()
    monkeypatch.setenv("HETPLAN_STORE", "/run/store")
    with pytest.raises(RuntimeError, match=rf"HETPLAN_STORE need.* knows vLLM 0\.32\.0; found {version or 'none'}"):
        vllm_plugin.register()
