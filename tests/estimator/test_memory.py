"""Memory of a stage against what an engine logged, and what must hold for any stage."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from builders import make_cluster, make_gpu, make_machine, make_pool, problem_of, tiny_llama

import hetplan as hp
from hetplan.catalog.calibration import Quantity
from hetplan.catalog.tables import get_calibration, get_gpu
from hetplan.estimator.base import make_estimator
from hetplan.estimator.memory import engine_defaults
from hetplan.estimator.rates import compute_rate
from hetplan.plan import StageMemory
from hetplan.units import GIB

# How the catalogue calls the models of the table.
LOGGED = {
    "openai/gpt-oss-20b": ("gpt-oss-20b", None),
    "openai/gpt-oss-120b": ("gpt-oss-120b", None),
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": ("llama-3.3-70b", "fp8"),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama-3.1-8b", None),
    "Qwen/Qwen3-0.6B": ("qwen3-0.6b", None),
}


def whole_model(spec: hp.ModelSpec, machine: str, degree: int, **options: Any) -> StageMemory:
    problem = problem_of(spec, {machine: 1}, **options)
    return make_estimator(problem).stage_memory(
        spec,
        problem.cluster.instance_types[0],
        layers=(0, spec.layer_count),
        tensor_parallel=degree,
        first=True,
        last=True,
    )


@pytest.mark.parametrize("model", LOGGED)
def test_memory_is_what_the_engine_logged(model: str, data_dir: Path) -> None:
    with (data_dir / "vllm_memory.csv").open(encoding="utf-8", newline="") as file:
        (row,) = [row for row in csv.DictReader(file) if row["model"] == model]
    name, dtype = LOGGED[model]
    # What was used in all, over what there is. One row states 0.9 and adds up to 0.95: at 0.9 it had not started.
    parts = ("weights_gib", "activation_peak_gib", "non_torch_gib", "kv_cache_gib")
    share = sum(float(row[part]) for part in parts) / float(row["gpu_total_gib"])
    assert share == pytest.approx(0.95 if name == "gpt-oss-120b" else float(row["gpu_memory_utilization"]), abs=0.001)
    spec = hp.ModelSpec.get(name).with_dtypes(weight_dtype=dtype)  # type: ignore[arg-type]
    memory = whole_model(
        spec,
        "p5.48xlarge",
        int(row["tensor_parallel"]),
        gpu_memory_utilization=round(share, 2),
        max_model_len=int(row["max_model_len"]),
    )
    assert memory.weight_bytes / GIB == pytest.approx(float(row["weights_gib"]), rel=0.01)
    assert memory.kv_cache_bytes / GIB == pytest.approx(float(row["kv_cache_gib"]), rel=0.05, abs=1.0)
    assert memory.activation_bytes / GIB == pytest.approx(float(row["activation_peak_gib"]), rel=0.1)
    assert memory.other_bytes / GIB == pytest.approx(float(row["non_torch_gib"]), abs=0.02)
    assert memory.usable_bytes / GIB == pytest.approx(share * float(row["gpu_total_gib"]), rel=0.001)
    assert memory.kv_cache_bytes > 0


# ---- any stage


@pytest.mark.parametrize("estimator", ["calibrated", "paper"])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_stages_of_a_model_hold_it_once(estimator: str, degree: int) -> None:
    spec = tiny_llama(num_hidden_layers=6)
    machine = make_machine(gpu_count=4)
    problem = problem_of(spec, make_cluster((machine, make_pool(machine))), estimator=estimator)
    chosen = make_estimator(problem)

    def weights(layers: tuple[int, int], *, first: bool, last: bool) -> int:
        return chosen.stage_memory(
            spec, machine, layers=layers, tensor_parallel=degree, first=first, last=last
        ).weight_bytes

    parts = weights((0, 2), first=True, last=False) + weights((2, 5), first=False, last=False)
    parts += weights((5, 6), first=False, last=True)
    assert parts == pytest.approx(weights((0, 6), first=True, last=True), abs=8)
    whole = degree * weights((0, 6), first=True, last=True)
    # The paper places neither the embedding nor the head; norms are whole on every GPU.
    placed = spec.weight_bytes - (spec.embedding_bytes() + spec.head_bytes() if estimator == "paper" else 0)
    assert whole == pytest.approx(placed, rel=1e-3)


@pytest.mark.parametrize("utilization", [0.1, 0.5, 0.9, 1.0])
def test_the_engine_never_uses_more_than_its_share(utilization: float) -> None:
    spec = tiny_llama()
    memory = whole_model(spec, "g6.xlarge", 1, gpu_memory_utilization=utilization)
    assert memory.usable_bytes <= utilization * get_gpu("L4").memory_bytes
    total = memory.weight_bytes + memory.activation_bytes + memory.other_bytes + memory.kv_cache_bytes
    assert total == memory.usable_bytes


def test_larger_steps_and_more_sequences_take_more_activations() -> None:
    spec = hp.ModelSpec.get("llama-3.2-1b")
    small = whole_model(spec, "g6.xlarge", 1, max_num_batched_tokens=512, max_num_seqs=8)
    steps = whole_model(spec, "g6.xlarge", 1, max_num_batched_tokens=16_384, max_num_seqs=8)
    sequences = whole_model(spec, "g6.xlarge", 1, max_num_batched_tokens=512, max_num_seqs=512)
    assert small.activation_bytes < steps.activation_bytes
    assert small.activation_bytes < sequences.activation_bytes
    assert small.weight_bytes == steps.weight_bytes == sequences.weight_bytes


def test_only_groups_pay_for_collectives() -> None:
    spec = tiny_llama()
    assert whole_model(spec, "g6.12xlarge", 1).other_bytes < whole_model(spec, "g6.12xlarge", 2).other_bytes
    assert whole_model(spec, "g6.12xlarge", 2).other_bytes == whole_model(spec, "g6.12xlarge", 4).other_bytes


@pytest.mark.parametrize(
    ("gpu", "sequences", "tokens"),
    [("H100", 1024, 8192), ("H200", 1024, 8192), ("A100-80GB", 256, 2048), ("L4", 256, 2048), ("L40S", 256, 2048)],
)
def test_batch_limits_of_the_engine(gpu: str, sequences: int, tokens: int) -> None:
    defaults = engine_defaults(get_gpu(gpu))
    assert (defaults.max_num_seqs, defaults.max_num_batched_tokens) == (sequences, tokens)


@pytest.mark.parametrize("window", [128, 1024])
def test_a_sliding_window_bounds_the_cache_of_a_sequence(window: int) -> None:
    spec = hp.ModelSpec.from_config(
        {
            "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 1024,
            "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
            "vocab_size": 32_000, "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "sliding_window": window,
        }
    )  # fmt: skip
    per_token = spec.kv_bytes_per_token()
    for tokens in (window // 2, window, 4 * window):
        kept = sum(spec.layer_kv_bytes_per_sequence(kind, tokens) for kind in spec.layer_pattern)
        assert kept == min(tokens, window) * per_token


# ---- rates


def rated(**rates: float) -> hp.Calibration:
    content = get_calibration("L4").model_dump(mode="json")
    content["compute_flops"] = {
        name: {"value": value, "source": "measured", "reference": "test"} for name, value in rates.items()
    }
    return hp.Calibration.from_dict(content)


def test_a_calibrated_rate_is_taken_as_it_is() -> None:
    gpu = make_gpu(dense_flops={"bf16": 100e12, "fp8": 200e12}, native_dtypes=("bf16", "fp8"))
    assert compute_rate(rated(bf16=60e12, fp8=90e12), gpu, "fp8").value == 90e12


@pytest.mark.parametrize("known", ["bf16", "fp16"])
def test_a_missing_rate_is_scaled_by_the_datasheet_and_says_so(known: str) -> None:
    gpu = make_gpu(dense_flops={known: 100e12, "fp8": 200e12}, native_dtypes=(known, "fp8"))
    rate: Quantity = compute_rate(rated(**{known: 60e12}), gpu, "fp8")
    assert rate.value == pytest.approx(120e12)
    assert rate.source == "assumed"


def test_the_two_16_bit_types_stand_in_for_one_another() -> None:
    gpu = make_gpu(dense_flops={"fp16": 65e12}, native_dtypes=("fp16",))
    assert compute_rate(rated(bf16=60e12), gpu, "fp16").value == 60e12
    assert compute_rate(rated(fp16=60e12), gpu, "bf16").value == 60e12


@pytest.mark.parametrize("estimator", ["calibrated", "paper"])
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(("sequences", "layers"), [(1, 0), (3, 0), (2, 2)])
def test_a_second_engine_takes_its_room_from_the_cache(
    estimator: Any, degree: int, sequences: int, layers: int
) -> None:
    """Activations and context once more, a cache for so many of the longest requests, and weights that may move."""
    spec = tiny_llama()
    alone = whole_model(spec, "g6.12xlarge", degree, estimator=estimator, max_model_len=1000)
    kept = whole_model(
        spec, "g6.12xlarge", degree, estimator=estimator, max_model_len=1000,
        handover_sequences=sequences, handover_layers=layers,
    )  # fmt: skip
    # A thousand tokens lie in 63 blocks of 16, and one block stays empty.
    of_a_layer = (sequences * 63 * 16 + 16) * spec.kv_bytes_per_token(degree) / spec.layer_count
    assert kept.start_kv_cache_bytes == of_a_layer * spec.layer_count
    needed = alone.activation_bytes + alone.other_bytes + kept.start_kv_cache_bytes
    needed += layers * (int(spec.layer_weight_bytes(0, degree)) + of_a_layer)
    assert kept.reserved_bytes == needed
    assert kept.kv_cache_bytes == alone.kv_cache_bytes - needed
    assert kept.replace(reserved_bytes=0, start_kv_cache_bytes=0) == alone


def test_blocks_are_larger_on_a_cpu() -> None:
    spec = tiny_llama()
    here = {"market": "owned", "provider": "local", "region": "here"}
    kept = whole_model(spec, "local-cpu", 1, max_model_len=1000, handover_sequences=1, **here)
    assert kept.start_kv_cache_bytes == (1024 + 128) * spec.kv_bytes_per_token()


def test_layers_of_nobody_are_refused() -> None:
    with pytest.raises(hp.InvalidInputError, match="handover_sequences 0 keeps no room"):
        whole_model(tiny_llama(), "g6.xlarge", 1, handover_layers=1)
