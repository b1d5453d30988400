"""Shipped config.json files load with the parameter count that transformers gives, or are refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hetplan.catalog.config_reader import read_config
from hetplan.catalog.model import ModelSpec
from hetplan.catalog.models import get_model, list_models
from hetplan.errors import UnsupportedModelError

HERE = Path(__file__).parent
EXPECTED: dict[str, dict[str, Any]] = json.loads((HERE / "expected_parameters.json").read_text())
DATA = Path(os.environ.get("HETPLAN_DATA", HERE.parents[1].parent / "shared" / "data"))
FOLDER = DATA / "model_configs"


@pytest.fixture(scope="module")
def folder() -> Path:
    if not FOLDER.is_dir():
        reason = f"no model configurations in {FOLDER}; set HETPLAN_DATA to the data folder"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return FOLDER


def assert_counted(spec: ModelSpec, row: dict[str, Any]) -> None:
    """As many parameters as transformers counts, or as published where it has no class."""
    if "published" in row:
        assert spec.parameter_count == pytest.approx(row["published"], abs=row["rounding"])
    else:
        assert spec.parameter_count == row["parameters"]


def test_at_least_forty_models_are_counted_by_transformers() -> None:
    read = [row for row in EXPECTED["configurations"].values() if "counted" in row] + [*EXPECTED["catalogue"].values()]
    assert len({row["parameters"] for row in read if row["counted"].startswith("transformers")}) >= 40


def test_every_file_of_the_folder_is_listed(folder: Path) -> None:
    files = {p.name for p in folder.glob("*_config.json") if not p.name.endswith("_hf_quant_config.json")}
    assert files == set(EXPECTED["configurations"])


@pytest.mark.parametrize("name", sorted(EXPECTED["configurations"]))
def test_configuration_is_exact_or_refused_by_name(folder: Path, name: str) -> None:
    row = EXPECTED["configurations"][name]
    if "refused" in row:
        with pytest.raises(UnsupportedModelError) as refusal:
            read_config(folder / name)
        assert set(row["refused"]) <= set(refusal.value.features)
        assert name in str(refusal.value)
        return
    spec = read_config(folder / name)
    assert_counted(spec, row)
    assert spec.name == name.removesuffix("_config.json").replace("--", "/")


@pytest.mark.parametrize("name", sorted(EXPECTED["catalogue"]))
def test_catalogued_model_is_exact(name: str) -> None:
    assert_counted(get_model(name), EXPECTED["catalogue"][name])


def test_every_catalogued_model_is_listed() -> None:
    assert set(list_models()) == set(EXPECTED["catalogue"])


@pytest.mark.parametrize("name", sorted(EXPECTED["variants"]))
def test_variant_is_exact(name: str) -> None:
    row = EXPECTED["variants"][name]
    assert read_config(row["config"]).parameter_count == row["parameters"]


def test_only_the_language_model_of_a_wrapper_is_read(folder: Path) -> None:
    spec = read_config(folder / "nvidia--Kimi-K2.6-NVFP4_config.json")
    assert spec.architecture == "DeepseekV3ForCausalLM"
    assert "language model only (text_config of KimiK25ForConditionalGeneration)" in spec.source


def test_ignored_modules_keep_16_bits(folder: Path) -> None:
    """NVFP4 Kimi-K2.6 leaves layer 0, attention and the shared experts alone."""
    spec = read_config(folder / "nvidia--Kimi-K2.6-NVFP4_config.json")
    assert (spec.weight_dtype, spec.compute_dtype, spec.kv_dtype, spec.base_dtype) == ("fp4", "fp4", "fp8", "bf16")
    first, rest = (spec.layer_kinds[spec.layer_pattern[layer]] for layer in (0, 1))
    assert not any(matrix.quantized for matrix in first.linears)
    quantized = {matrix.name for matrix in rest.linears if matrix.quantized}
    assert quantized == {"experts.gate_proj", "experts.up_proj", "experts.down_proj"}


def test_matrices_of_one_layer_may_differ(folder: Path) -> None:
    """NVFP4 DeepSeek-V3.1 quantises the attention's output projection only."""
    spec = read_config(folder / "nvidia--DeepSeek-V3.1-NVFP4_config.json")
    attention = {m.name: m.quantized for m in spec.layer_kinds[0].linears if m.name.endswith(("_a_proj", "_b_proj"))}
    assert attention == dict.fromkeys(("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj"), False)
    assert {m.name: m.quantized for m in spec.layer_kinds[0].linears}["o_proj"]


def test_quantisation_is_found_beside_the_file(folder: Path) -> None:
    spec = read_config(folder / "nvidia--Llama-3.1-70B-Instruct-FP8_config.json")
    assert (spec.weight_dtype, spec.kv_dtype, spec.compute_dtype) == ("fp8", "fp8", "fp8")
    assert spec.weight_bytes / 2**30 == pytest.approx(67.67, abs=0.005)


@pytest.mark.parametrize(
    ("quantization", "checkpoint_bytes"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1_029_173_256_720),  # Kimi-K2-Instruct
        (
            {  # Kimi-K2-Thinking
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
                        "input_activations": None,
                    }
                },
                "ignore": [
                    "lm_head",
                    "re:.*self_attn.*",
                    "re:.*shared_experts.*",
                    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
                ],
            },
            594_205_920_512,
        ),
    ],
)
def test_size_of_published_kimi_checkpoints(folder: Path, quantization: dict[str, Any], checkpoint_bytes: int) -> None:
    """Bytes of all tensors in the published files' headers, which hold router corrections in 32 bits."""
    text = json.loads((folder / "nvidia--Kimi-K2.6-NVFP4_config.json").read_text())["text_config"]
    spec = read_config(text | {"quantization_config": quantization})
    assert spec.weight_bytes == pytest.approx(checkpoint_bytes, rel=2e-6)


def test_size_of_the_published_gpt_oss_checkpoint(folder: Path) -> None:
    spec = read_config(folder / "openai--gpt-oss-120b_config.json")
    assert spec.weight_bytes == 65_248_815_744


def test_windows_of_gpt_oss_alternate(folder: Path) -> None:
    spec = read_config(folder / "openai--gpt-oss-20b_config.json")
    windows = [spec.layer_kinds[kind].attention.window_tokens for kind in spec.layer_pattern]
    assert windows == [128, None] * 12
