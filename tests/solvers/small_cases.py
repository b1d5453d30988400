"""Random small placement problems by category, and estimators whose times zigzag over the batch."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
from builders import TINY_LLAMA, TINY_MIXTURE, make_cluster, make_gpu, make_machine, make_pool, problem_of
from numpy.typing import ArrayLike, NDArray
from whole_placements import BestPlan, WholePlacements

import hetplan as hp
from hetplan.catalog.engines import EngineProfile, get_engine
from hetplan.catalog.hardware import InstanceType, Link
from hetplan.catalog.offers import Cluster, Market, Pool, ZoneLink
from hetplan.estimator.base import batch_array
from hetplan.estimator.calibrated import CalibratedEstimator
from hetplan.estimator.paper import PaperEstimator
from hetplan.problem.placement import EstimatorName, Objective, PlacementProblem
from hetplan.units import GIB

Floats = NDArray[np.float64]

# ---- estimators


def _zigzag(batch: ArrayLike, *name: object) -> Floats:
    """A factor from 0.4 to 2.4 for each batch, without any order, the same for the same name.

    The least is of one sequence: its own prefill takes no longer than any batch's, or times per token were negative.
    """
    sequences = np.asarray(batch, dtype=np.float64)
    seed = zlib.crc32(repr(name).encode()) % 1000
    wave = np.sin(12.9898 * sequences + 78.233 * seed) * 43758.5453
    return np.where(sequences <= 1, 0.4, 0.4 + 2 * (wave - np.floor(wave)))


class ZigzagMixin:
    """Multiplies every time of single layers, ends and sends by a factor of its own at each batch."""

    def layer_seconds(self, model: hp.ModelSpec, kind: int, instance_type: InstanceType, **load: Any) -> Floats:
        name = (instance_type.name, kind, load["tensor_parallel"], load["phase"])
        seconds: Floats = super().layer_seconds(model, kind, instance_type, **load)  # type: ignore[misc]
        # Degrees that suit one kind of layer and not another, so that machines are cut into unlike groups.
        scale = 10 ** (zlib.crc32(repr(name[:3]).encode()) % 1000 / 500 - 1)
        return seconds * scale * _zigzag(load["batch"], *name)

    def end_seconds(self, model: hp.ModelSpec, instance_type: InstanceType, **load: Any) -> Floats:
        name = (instance_type.name, load["first"], load["last"], load["phase"])
        seconds: Floats = super().end_seconds(model, instance_type, **load)  # type: ignore[misc]
        return seconds * _zigzag(load["batch"], *name)

    def boundary_seconds(
        self, model: hp.ModelSpec, sender: InstanceType, receiver: InstanceType, **load: Any
    ) -> Floats:
        name = (sender.name, receiver.name, load["same_node"], load["phase"])
        seconds: Floats = super().boundary_seconds(model, sender, receiver, **load)  # type: ignore[misc]
        return seconds * _zigzag(batch_array(load["batch"]), *name)


class ZigzagCalibrated(ZigzagMixin, CalibratedEstimator):
    """The calibrated estimator with zigzag times."""


class ZigzagPaper(ZigzagMixin, PaperEstimator):
    """The paper's estimator with zigzag times."""


@contextmanager
def zigzag_times() -> Iterator[None]:
    """Everybody who makes an estimator, the checker included, gets one with zigzag times."""
    with (
        patch("hetplan.estimator.calibrated.CalibratedEstimator", ZigzagCalibrated),
        patch("hetplan.estimator.paper.PaperEstimator", ZigzagPaper),
    ):
        yield


# ---- what problems are made of


def _between(rng: np.random.Generator, low: float, high: float) -> float:
    """Of all orders of magnitude alike."""
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))


def _shape(rng: np.random.Generator) -> dict[str, Any]:
    hidden = int(rng.choice([1024, 2048, 4096]))
    return {
        "hidden_size": hidden,
        "intermediate_size": int(hidden * rng.choice([2, 3, 4])),
        "num_attention_heads": 8,
        "num_key_value_heads": int(rng.choice([2, 4, 8])),
        "head_dim": hidden // 8,
        "num_hidden_layers": int(rng.choice([2, 3, 4, 5, 6, 6])),
        "vocab_size": int(rng.choice([4000, 8000, 32_000])),
        "max_position_embeddings": 8192,
        "tie_word_embeddings": bool(rng.integers(2)),
        "torch_dtype": "bfloat16",
    }


def llama(rng: np.random.Generator) -> hp.ModelSpec:
    return hp.ModelSpec.from_config(TINY_LLAMA | _shape(rng), name="llama")


def latent_mixture(rng: np.random.Generator) -> hp.ModelSpec:
    """Latent attention; dense layers, then experts."""
    layers = int(rng.integers(3, 7))
    shape = _shape(rng)
    own = {
        "num_hidden_layers": layers, "first_k_dense_replace": int(rng.integers(1, layers)),
        "hidden_size": shape["hidden_size"], "intermediate_size": shape["intermediate_size"],
        "moe_intermediate_size": int(rng.choice([256, 512])), "vocab_size": shape["vocab_size"],
        "tie_word_embeddings": shape["tie_word_embeddings"],
    }  # fmt: skip
    return hp.ModelSpec.from_config(TINY_MIXTURE | own, name="latent-mixture")


def experts(rng: np.random.Generator) -> hp.ModelSpec:
    """Experts in every layer, or in every other one."""
    shape = _shape(rng) | {"num_experts_per_tok": 2}
    if rng.integers(2):
        own = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
        return hp.ModelSpec.from_config(shape | own, name="experts")
    own = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
        "moe_intermediate_size": shape["intermediate_size"] // 4, "decoder_sparse_step": 2, "mlp_only_layers": [],
    }  # fmt: skip
    return hp.ModelSpec.from_config(shape | own, name="some-experts")


def windows(rng: np.random.Generator) -> hp.ModelSpec:
    """Layers that slide among layers that do not, in any order; some with heads of another size."""
    shape = _shape(rng)
    layers = shape["num_hidden_layers"]
    types = [str(rng.choice(["sliding_attention", "full_attention"])) for _ in range(layers)]
    window = int(rng.choice([64, 128, 256]))
    families: list[dict[str, Any]] = [
        {
            "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4,
            "num_experts_per_tok": 2, "sliding_window": window, "layer_types": types,
        },
        {
            "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "sliding_window": window,
            "layer_types": types, "global_head_dim": shape["head_dim"] * 2, "hidden_act": "gelu_pytorch_tanh",
        },
        {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True,
            "sliding_window": window, "max_window_layers": int(rng.integers(1, layers)), "hidden_act": "silu",
        },
    ]  # fmt: skip
    return hp.ModelSpec.from_config(shape | families[int(rng.integers(3))], name="windows")


def hybrid(rng: np.random.Generator) -> hp.ModelSpec:
    """Layers of a state, of attention and of an MLP alone, in any order: unlike in weights, cache and time."""
    shape = _shape(rng)
    pattern = "".join(str(rng.choice(list("M*-"))) for _ in range(shape["num_hidden_layers"] - 1)) + "*"
    own = {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": pattern,
        "mamba_num_heads": 16, "mamba_head_dim": shape["hidden_size"] // 8, "n_groups": 4, "ssm_state_size": 128,
        "mlp_hidden_act": "relu2",
    }  # fmt: skip
    return hp.ModelSpec.from_config(shape | own, name="hybrid")


def any_model(rng: np.random.Generator) -> hp.ModelSpec:
    makers = [llama, latent_mixture, experts, windows, hybrid]
    return makers[int(rng.integers(len(makers)))](rng)


def read_by_paper(rng: np.random.Generator) -> hp.ModelSpec:
    """What the paper's table has rows for."""
    return (llama, experts)[int(rng.integers(2))](rng)


def _workload(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "input_tokens": float(rng.integers(50, 2000)),
        "output_tokens": float(rng.integers(2, 500)),
        "prefix_cache_hit_rate": float(rng.choice([0.0, 0.0, 0.4])),
    }


@dataclass(frozen=True)
class Kind:
    """How the problems of a category are drawn."""

    model: Callable[[np.random.Generator], hp.ModelSpec] = any_model
    machines: tuple[int, int] = (2, 4)
    gpus: tuple[int, ...] = (1, 1, 2)
    most_gpus: int = 6
    pools: tuple[int, int] = (1, 3)
    unequal_networks: bool = True
    regions: int = 1
    # Zone links between neighbours, or zones of the first region as well.
    links: bool = False
    zones: int = 0
    markets: tuple[Market, ...] = ("on_demand",)
    objective: Objective = "throughput"
    slo: str | None = None
    estimator: EstimatorName = "calibrated"
    engine: str | EngineProfile | None = None
    # Room for a second engine, in some of the problems for more layers as well.
    handover: bool = False
    zigzag: bool = False
    # Only problems whose best plan cuts a machine into groups of unlike degrees.
    unlike_degrees: bool = False
    work: str = "one"
    infeasible: str | None = None


def _overhead_bytes(kind: Kind, model: hp.ModelSpec, grouped: bool, sequences: int) -> float:
    """Memory that neither weights nor KV cache have; a group of several GPUs takes more, if there is to be one."""
    if kind.estimator == "paper":
        return 0.0
    engine = (0.55 if grouped else 0.13) * GIB
    one = engine + 38.2 * sequences * model.vocabulary_size + 256 * 2 * 8 * model.hidden_size
    return one * (2 if kind.handover else 1)


def _cluster(rng: np.random.Generator, kind: Kind, model: hp.ModelSpec, work: hp.Workload, sequences: int) -> Cluster:
    """Machines whose memory is about what a part of the model needs."""
    count = int(rng.integers(kind.machines[0], kind.machines[1] + 1))
    pool_count = min(count, int(rng.integers(kind.pools[0], kind.pools[1] + 1)))
    counts = np.ones(pool_count, dtype=np.int64)
    for _ in range(count - pool_count):
        counts[rng.integers(pool_count)] += 1
    tokens = work.mean_input_tokens + work.mean_output_tokens
    # Of one sequence.
    cache = sum(n * model.layer_kv_bytes_per_sequence(k, tokens, 1) for k, n in enumerate(model.kind_counts))
    need = model.weight_bytes + _between(rng, 2, 2 * sequences) * cache
    made: list[tuple[InstanceType, Pool]] = []
    left = kind.most_gpus
    for number, machines in enumerate(counts.tolist()):
        # Another market or region of the same machine, sometimes.
        if made and rng.random() < (0.5 if kind.regions > 1 or len(kind.markets) > 1 else 0.0):
            machine = made[int(rng.integers(len(made)))][0]
        else:
            room = left - (pool_count - 1 - number)
            gpus = max([g for g in kind.gpus if g * machines <= room] or [1])
            gpus = int(rng.choice([g for g in kind.gpus if g <= gpus] or [1]))
            share = _between(rng, 0.2, 1.0) / (1 if gpus == 1 else _between(rng, 1, gpus))
            grouped = gpus > 1 and rng.random() < 0.5
            if kind.infeasible == "memory":
                share, grouped = 0.6 / model.layer_count / kind.most_gpus, False
            usable = _overhead_bytes(kind, model, grouped, sequences) + share * need
            half = "fp16" if kind.engine and rng.random() < 0.3 else "bf16"
            gpu = make_gpu(
                f"gpu-{number}",
                memory_gib=usable / 0.895 / GIB,
                gb_per_s=_between(rng, 100, 1000),
                dense_flops={half: _between(rng, 20, 300) * 1e12},
                native_dtypes=(half,),
            )
            machine = make_machine(f"box-{number}", gpu=gpu, gpu_count=gpus, pcie=_between(rng, 2e9, 50e9))
            if kind.unequal_networks:
                slow = Link(latency_s=_between(rng, 5e-6, 2e-3), bytes_per_s=_between(rng, 5e7, 25e9))
                machine = machine.replace(inter_node_link=slow)
        left -= machine.gpu_count * machines
        market: Market = kind.markets[int(rng.integers(len(kind.markets)))]
        pool = make_pool(
            machine,
            machines,
            usd=None if market == "owned" else round(_between(rng, 0.2, 5), 2),
            market=market,
            region=["here", "there", "yonder"][int(rng.integers(kind.regions))],
            zone=f"z{int(rng.integers(kind.zones))}" if kind.zones else None,
        )
        if all(pool.offer.name != other.offer.name for _, other in made):
            made.append((machine, pool))
    cluster = make_cluster(*made)
    return cluster.replace(zone_links=_links(rng, kind, cluster)) if kind.links else cluster


def _links(rng: np.random.Generator, kind: Kind, cluster: Cluster) -> list[ZoneLink]:
    """Links that join regions one after another, not each with each; some between zones, which go before those."""
    regions = [f"own/{name}" for name in ("here", "there", "yonder")]
    ends = [*pairwise(regions)]
    if kind.zones:
        ends += [(f"{regions[0]}/z0", f"{other}/z1") for other in regions[:2]]
    places = [pool.offer.place for pool in cluster.pools]

    def stands(end: str) -> bool:
        return any(f"{place}/".startswith(f"{end}/") for place in places)

    return [
        ZoneLink(
            ends=pair,
            link=Link(latency_s=_between(rng, 1e-5, 0.02), bytes_per_s=_between(rng, 1e7, 25e9)),
            egress_usd_per_gb=float(rng.choice([0.0, 0.02])) if kind.objective == "throughput" else 0.0,
        )
        for pair in ends
        if stands(pair[0]) and stands(pair[1])
    ]


def _draw(rng: np.random.Generator, kind: Kind) -> PlacementProblem:
    """A problem before its demand and its limits."""
    model = kind.model(rng)
    if kind.work == "several":
        queries = [{"name": f"q{i}", "requests_per_s": float(rng.uniform(0.1, 2)), **_workload(rng)} for i in range(2)]
        work = hp.Workload(query_types=queries)
    else:
        lengths = _workload(rng) | ({"output_tokens": 1.0} if kind.work == "first token" else {})
        work = hp.Workload(**lengths, requests_per_s=1.0 if kind.objective == "cost" else None)
    sequences = int(rng.integers(4, 25))
    options: dict[str, Any] = {}
    if kind.handover:
        options |= {"handover_sequences": int(rng.integers(1, 4)), "handover_layers": int(rng.integers(2))}
    if rng.random() < 0.3:
        options["max_model_len"] = int(min(8192, work.max_tokens * rng.uniform(1, 3)))
    return problem_of(
        model,
        _cluster(rng, kind, model, work, sequences),
        work,
        objective=kind.objective,
        estimator=kind.estimator,
        engine=kind.engine,
        max_num_seqs=sequences,
        max_num_batched_tokens=256,
        **options,
    )


def _with_demand(rng: np.random.Generator, kind: Kind, problem: PlacementProblem, most: BestPlan) -> PlacementProblem:
    """A rate that some plans reach, just reach, or, for a case that is to be infeasible, just do not."""
    share = float(rng.choice([rng.uniform(0.05, 0.95), rng.uniform(0.3, 0.99), 1 - 1e-6, 1.0]))
    if kind.infeasible == "demand":
        share = float(rng.choice([1 + 1e-6, 1.3]))
    query = problem.workload.query_types[0].replace(requests_per_s=share * most.objective)
    return problem.replace(workload=hp.Workload(query_types=[query]))


def _with_limits(
    rng: np.random.Generator, kind: Kind, problem: PlacementProblem, best: BestPlan, least: dict[str, float]
) -> PlacementProblem:
    """Limits between the least latency there is and that of the best plan, where they bind."""
    if kind.infeasible == "limit":
        return problem.replace(slo=hp.Slo(e2e_s=0.99 * least["e2e_s"]))
    if kind.infeasible == "worth":
        # Every pipeline takes more than twice as long as it should, and each excess costs all of its worth.
        return problem.replace(slo=hp.Slo(e2e_s=0.4 * least["e2e_s"], hard=False), latency_penalty=1.0)
    names = list(least)
    chosen = [names[int(i)] for i in rng.choice(3, size=int(rng.integers(1, 3)), replace=False)]
    limits = {}
    for name in chosen:
        reached = float(rng.choice([latencies[name] for latencies in best.latencies]))
        way = float(rng.choice([rng.uniform(0, 1), rng.uniform(0.3, 1.1), 1.0, 1 - 1e-6]))
        # Nothing decodes where the first token is the last: no time per token to limit.
        if reached > 0:
            limits[name] = least[name] * (reached / least[name]) ** way
    if not limits:
        limits = {"e2e_s": least["e2e_s"] * 1.2}
    if kind.slo == "hard":
        return problem.replace(slo=hp.Slo(**limits))
    penalty = _between(rng, 0.05, 20)
    return problem.replace(slo=hp.Slo(**limits, hard=False), latency_penalty=penalty)


def _complete(
    rng: np.random.Generator, kind: Kind, problem: PlacementProblem
) -> tuple[PlacementProblem, BestPlan | None] | None:
    """The problem with limits and demand that matter to it, and its best plan; None when it has none before them."""
    plans = WholePlacements(problem.replace(objective="throughput"))
    if kind.slo is not None:
        best = plans.best_plan()
        if best is None:
            return None
        problem = _with_limits(rng, kind, problem, best, plans.least)
    if kind.objective == "cost" and kind.infeasible != "limit":
        best = plans.asked(problem.replace(objective="throughput")).best_plan()
        if best is None:
            return None
        problem = _with_demand(rng, kind, problem, best)
    return problem, plans.asked(problem).best_plan()


# ---- categories

_MARKETS: tuple[Market, ...] = ("on_demand", "spot", "owned")
_RENTED: tuple[Market, ...] = ("on_demand", "spot")
_NODES = (1, 2, 3, 4)

_ONE_DEGREE = get_engine("vllm-0.32").replace(name="vllm-one-degree", limits=("one-tensor-parallel-degree",))
CATEGORIES: dict[str, Kind] = {
    "one pool": Kind(model=llama, pools=(1, 1), machines=(1, 4)),
    "equal networks": Kind(model=llama, unequal_networks=False),
    "unequal networks": Kind(model=llama, machines=(3, 4), gpus=(1,), pools=(2, 3)),
    "nodes of several GPUs": Kind(model=llama, machines=(1, 3), gpus=(2, 3, 4), most_gpus=7),
    "latent mixture": Kind(model=latent_mixture),
    "experts": Kind(model=experts),
    "windows": Kind(model=windows),
    "hybrid layers": Kind(model=hybrid),
    "unlike layers in nodes": Kind(machines=(1, 3), gpus=(2, 3, 4), most_gpus=7),
    "per cost": Kind(objective="throughput_per_cost", markets=_RENTED),
    "cost": Kind(objective="cost", markets=_RENTED),
    "owned": Kind(markets=_MARKETS),
    "owned, cost": Kind(objective="cost", markets=_MARKETS),
    "two regions": Kind(regions=2, machines=(3, 4), pools=(2, 3)),
    "two regions, cost": Kind(objective="cost", regions=2, machines=(3, 4), pools=(2, 3), markets=_RENTED),
    "soft limit": Kind(slo="soft"),
    "soft limit, per cost": Kind(slo="soft", objective="throughput_per_cost", markets=_RENTED),
    "hard limit": Kind(slo="hard"),
    "hard limit, per cost": Kind(slo="hard", objective="throughput_per_cost"),
    "hard limit, cost": Kind(slo="hard", objective="cost"),
    "paper": Kind(model=read_by_paper, estimator="paper", gpus=_NODES),
    "paper, soft limit": Kind(model=read_by_paper, estimator="paper", slo="soft"),
    "paper, hard limit": Kind(model=read_by_paper, estimator="paper", slo="hard"),
    "paper, cost": Kind(model=read_by_paper, estimator="paper", objective="cost", markets=_RENTED),
    "engine": Kind(engine="vllm-0.32", gpus=_NODES, machines=(2, 3)),
    "engine, per cost": Kind(engine="vllm-0.32", objective="throughput_per_cost", markets=_RENTED),
    "engine, cost": Kind(engine="vllm-0.32", objective="cost", gpus=_NODES, machines=(2, 3)),
    "zigzag": Kind(zigzag=True),
    "zigzag in nodes": Kind(zigzag=True, gpus=_NODES, machines=(1, 2)),
    "zigzag, hard limit": Kind(zigzag=True, slo="hard"),
    "zigzag, soft limit": Kind(zigzag=True, slo="soft"),
    "zigzag, cost": Kind(zigzag=True, objective="cost"),
    "zigzag, paper": Kind(zigzag=True, estimator="paper", model=read_by_paper),
    "zigzag, unlike degrees": Kind(
        model=hybrid, zigzag=True, unlike_degrees=True, gpus=(4,), machines=(1, 2), most_gpus=5
    ),
    "paper, unlike degrees": Kind(
        model=read_by_paper, estimator="paper", unlike_degrees=True, gpus=(4,), machines=(1, 2), most_gpus=5
    ),
    "first token only": Kind(work="first token", slo="hard"),
    "several query types": Kind(work="several"),
    "infeasible memory": Kind(infeasible="memory"),
    "infeasible demand": Kind(infeasible="demand", objective="cost"),
    "infeasible limit": Kind(infeasible="limit", slo="hard"),
    "infeasible limit, cost": Kind(infeasible="limit", slo="hard", objective="cost"),
    "worthless": Kind(infeasible="worth", slo="soft"),
    "linked regions": Kind(regions=2, links=True, machines=(3, 4), pools=(2, 3)),
    "linked one after another": Kind(model=llama, regions=3, links=True, machines=(3, 4), gpus=(1,), pools=(3, 3)),
    "linked zones": Kind(regions=2, zones=2, links=True, machines=(3, 4), pools=(3, 3)),
    "linked regions, cost": Kind(
        objective="cost", regions=2, links=True, machines=(3, 4), pools=(2, 3), markets=_RENTED
    ),
    "linked regions, per cost": Kind(
        objective="throughput_per_cost", regions=2, links=True, machines=(3, 4), pools=(2, 3), markets=_RENTED
    ),
    "linked regions, hard limit": Kind(slo="hard", regions=3, links=True, machines=(3, 4), pools=(2, 3)),
    "linked regions, soft limit": Kind(slo="soft", regions=3, links=True, machines=(3, 4), pools=(2, 3)),
    "linked regions, paper": Kind(model=read_by_paper, estimator="paper", regions=2, links=True, pools=(2, 3)),
    "linked regions, engine": Kind(engine="vllm-0.32", regions=2, links=True, machines=(2, 3), pools=(2, 3)),
    "linked regions, zigzag": Kind(zigzag=True, regions=2, links=True, machines=(3, 4), pools=(2, 3)),
    # Each limit by itself: those of the plugin, and one that no engine has alone.
    "plugin": Kind(engine="hetplan", gpus=_NODES, machines=(2, 3)),
    "plugin, cost": Kind(engine="hetplan", objective="cost", gpus=_NODES, machines=(2, 3)),
    "plugin, unlike degrees": Kind(
        model=hybrid, engine="hetplan", zigzag=True, unlike_degrees=True, gpus=(4,), machines=(1, 2), most_gpus=5
    ),
    "linked regions, plugin": Kind(engine="hetplan", regions=2, links=True, machines=(2, 3), pools=(2, 3)),
    "one degree": Kind(engine=_ONE_DEGREE, gpus=_NODES, machines=(2, 3)),
    "handover": Kind(handover=True, gpus=_NODES, machines=(2, 3)),
    "handover, plugin": Kind(handover=True, engine="hetplan", gpus=_NODES, machines=(2, 3)),
    "handover, cost": Kind(handover=True, objective="cost"),
    "handover, hard limit": Kind(handover=True, slo="hard"),
    "handover, paper": Kind(handover=True, model=read_by_paper, estimator="paper"),
    "paper, engine": Kind(model=read_by_paper, estimator="paper", engine="vllm-0.32", gpus=_NODES),
}  # fmt: skip
SEEDS = 12
_MOST_DRAWS = 500
CASES = [(category, seed) for category in CATEGORIES for seed in range(SEEDS)]


@dataclass(frozen=True)
class Case:
    """A problem, and the best of all its plans if there is one."""

    kind: Kind
    problem: PlacementProblem
    best: BestPlan | None


@contextmanager
def times_of(category: str) -> Iterator[None]:
    """The estimators of a category's cases."""
    if CATEGORIES[category].zigzag:
        with zigzag_times():
            yield
    else:
        yield


@cache
def case_of(category: str, seed: int) -> Case:
    """The case of a category and seed; one that is to have a plan is drawn until it has."""
    kind = CATEGORIES[category]
    rng = np.random.default_rng([list(CATEGORIES).index(category), seed])
    with times_of(category):
        for _ in range(_MOST_DRAWS):
            drawn = _complete(rng, kind, _draw(rng, kind))
            if drawn is not None and _wanted(kind, drawn[1]):
                return Case(kind, *drawn)
    raise AssertionError(f"no case of {category!r} in {_MOST_DRAWS} draws")


def _wanted(kind: Kind, best: BestPlan | None) -> bool:
    """Whether a problem with this best plan belongs to a category."""
    if best is None:
        return kind.infeasible is not None
    if kind.unlike_degrees:
        return any(
            len({stage.tensor_parallel for stage in pipeline.stages if stage.node == node}) > 1
            for pipeline in best.pipelines
            for node in range(len(pipeline.offers))
        )
    return kind.infeasible is None
