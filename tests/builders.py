"""Small models, machines and problems that several test files share. Own hardware has no shipped calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hetplan as hp
from hetplan.api import make_problem
from hetplan.catalog.hardware import GpuSpec, InstanceType, Link
from hetplan.catalog.offers import Cluster, Market, Offer, Pool
from hetplan.problem.placement import PlacementProblem
from hetplan.units import GIB

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
# Latent attention, two dense layers, then experts: two kinds of layers.
TINY_MIXTURE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 512,
    "intermediate_size": 1408, "moe_intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 8, "kv_lora_rank": 64, "q_lora_rank": None, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 2, "moe_layer_freq": 1, "vocab_size": 8000, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "hidden_act": "silu", "n_group": 1, "topk_group": 1,
    "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
}  # fmt: skip
WORKLOAD = hp.Workload(input_tokens=763, output_tokens=232)


def tiny_llama(**changes: Any) -> hp.ModelSpec:
    """A dense model of a few small layers."""
    return hp.ModelSpec.from_config(TINY_LLAMA | changes, name="tiny")


def make_gpu(
    name: str = "X1", *, memory_gib: float = 8, gb_per_s: float = 300, tflops: float = 60, **changes: Any
) -> GpuSpec:
    """A GPU that multiplies bf16."""
    values: dict[str, Any] = {
        "name": name,
        "vendor": "own",
        "memory_bytes": int(memory_gib * GIB),
        "bandwidth_bytes_per_s": gb_per_s * 1e9,
        "dense_flops": {"bf16": tflops * 1e12},
        "native_dtypes": ("bf16",),
        "source": "test",
    }
    return GpuSpec(**(values | changes))


def make_machine(
    name: str = "box", *, gpu: GpuSpec | None = None, gpu_count: int = 1, pcie: float = 10e9, network: float = 3e9
) -> InstanceType:
    """A machine whose GPUs talk over one link in groups of any size."""
    sizes = [size for size in (2, 4, 8) if size <= gpu_count]
    if gpu_count > 1 and gpu_count not in sizes:
        sizes.append(gpu_count)
    return InstanceType(
        name=name,
        provider="own",
        gpu=gpu or make_gpu(),
        gpu_count=gpu_count,
        intra_node_links={size: Link(latency_s=10e-6, bytes_per_s=pcie) for size in sizes},
        inter_node_link=Link(latency_s=50e-6, bytes_per_s=network),
        source="test",
    )


def make_pool(
    machine: InstanceType,
    count: int = 1,
    *,
    usd: float | None = 1.0,
    region: str = "here",
    market: Market = "on_demand",
    **changes: Any,
) -> Pool:
    """Some machines of one price."""
    offer = Offer(
        instance_type=machine.name,
        provider=machine.provider,
        region=region,
        market=market,
        price_usd_per_hour=usd,
        source="test",
        **changes,
    )
    return Pool(offer=offer, count=count)


def make_cluster(*machines: tuple[InstanceType, Pool]) -> Cluster:
    """A cluster of pools; machines that share a type name it once."""
    types = {machine.name: machine for machine, _ in machines}
    return Cluster(instance_types=tuple(types.values()), pools=tuple(pool for _, pool in machines))


def problem_of(
    model: hp.ModelSpec | str,
    cluster: Cluster | Mapping[str, Any],
    workload: hp.Workload = WORKLOAD,
    **options: Any,
) -> PlacementProblem:
    """A problem with the calibrations that the catalogue, or a datasheet, gives its GPUs."""
    return make_problem(model=model, cluster=cluster, workload=workload, **options)


def verified(plan: hp.Plan) -> hp.Plan:
    """The plan, once the checker finds nothing wrong with it."""
    violations = [str(violation) for violation in hp.verify(plan)]
    assert violations == []
    return plan
