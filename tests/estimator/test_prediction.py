"""`hetplan.predict` and `hetplan.estimate`: one replica as described, and a plan under another workload."""

from __future__ import annotations

from typing import Any

import pytest
from builders import WORKLOAD, make_machine, tiny_llama, verified

import hetplan as hp
from hetplan.catalog.tables import get_calibration, get_gpu

# ---- one replica


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("estimator", ["calibrated", "paper"])
def test_a_replica_s_figures_belong_together(batch: int, estimator: Any) -> None:
    p = hp.predict("llama-3.1-8b", "L40S", batch=batch, estimator=estimator)
    steps = 232 if estimator == "paper" else 231
    assert p.latency_s == pytest.approx(p.ttft_s + steps * p.tpot_s)
    assert p.output_tokens_per_s == pytest.approx(batch * 232 / p.latency_s)
    assert f"estimator {estimator}" in p.source
    assert set(p.band) == {"ttft_s", "tpot_s", "latency_s", "output_tokens_per_s"}


def test_more_sequences_share_the_weights() -> None:
    predictions = [hp.predict("llama-3.1-8b", "L40S", batch=batch) for batch in (1, 4, 16, 64)]
    rates = [p.output_tokens_per_s for p in predictions]
    steps = [p.tpot_s for p in predictions]
    assert rates == sorted(rates)
    assert steps == sorted(steps)


def test_a_group_is_faster_than_one_gpu_on_a_fast_link() -> None:
    one, eight = (hp.predict("llama-3.1-70b", "H200", tensor_parallel=degree) for degree in (2, 8))
    assert eight.tpot_s < one.tpot_s
    assert eight.max_batch > one.max_batch


def test_stages_one_after_another_do_not_speed_up_a_batch() -> None:
    one, two = (hp.predict("llama-3.1-8b", "L40S", pipeline_parallel=stages) for stages in (1, 2))
    assert two.latency_s >= one.latency_s
    assert two.max_batch > one.max_batch


def test_decode_is_no_faster_than_reading_the_weights() -> None:
    """An independent floor: every step reads every weight once over the memory's bandwidth."""
    for name in ("llama-3.1-8b", "qwen3-32b", "llama-3.1-70b"):
        spec = hp.ModelSpec.get(name)
        floor = (spec.weight_bytes - spec.embedding_bytes()) / 4 / get_gpu("H100").bandwidth_bytes_per_s
        assert hp.predict(name, "H100", tensor_parallel=4, batch=1).tpot_s > floor


def test_prefill_is_no_faster_than_the_peak() -> None:
    for gpu in ("H100", "L40S", "L4", "A100-SXM"):
        p = hp.predict("llama-3.1-8b", gpu, batch=1, input_tokens=2048)
        layers = 8.03e9 - 2 * 128_256 * 4096
        assert p.ttft_s > 2 * layers * 2048 / max(get_gpu(gpu).dense_flops[d] for d in ("bf16", "fp16"))  # type: ignore[index]


def test_the_host_is_named() -> None:
    assert "host g6.12xlarge" in hp.predict("llama-3.1-8b", "L4", instance_type="g6.12xlarge").source
    assert "nvlink" in hp.predict("llama-3.1-8b", "H100").source
    assert "default-pcie-host" in hp.predict("llama-3.1-8b", "L4").source


def test_more_tokens_than_the_model_was_made_for_are_timed_and_said() -> None:
    """Benchmarks run such requests, and a plan refuses them."""
    p = hp.predict("gpt-j-6b", "H100", batch=120, input_tokens=128, output_tokens=2048, weight_dtype="fp8")
    assert "2,176 tokens, where gpt-j-6b was made for 2,048" in p.source
    assert "made for" not in hp.predict("gpt-j-6b", "H100", input_tokens=128, output_tokens=128).source


def test_a_batch_beyond_the_kv_cache_says_so() -> None:
    p = hp.predict("llama-3.1-8b", "L4", batch=200)
    assert p.max_batch < 200
    assert f"200 sequences exceed the KV cache, which holds {p.max_batch}" in p.source


def test_an_own_calibration_is_used() -> None:
    shipped = get_calibration("L4")
    faster = shipped.replace(memory_bytes_per_s=shipped.memory_bytes_per_s.replace(value=1e12))
    assert hp.predict("llama-3.2-1b", "L4", calibration=faster).tpot_s < hp.predict("llama-3.2-1b", "L4").tpot_s


@pytest.mark.parametrize("gpu", ["L4", "l4", "H100", "h200-sxm", "A100-80GB"])
def test_aliases_in_any_case(gpu: str) -> None:
    assert hp.predict("llama-3.2-1b", gpu).tpot_s > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpu": "H1000"}, "unknown GPU 'H1000'"),
        ({"gpu": "A100"}, "ambiguous"),
        ({"model": "llama-9"}, "unknown model"),
        ({"tensor_parallel": 3}, r"valid: \[1, 2, 4, 8\]"),
        ({"tensor_parallel": 16}, "has 8 GPUs"),
        ({"tensor_parallel": 0}, "tensor_parallel=0"),
        ({"pipeline_parallel": 0}, "pipeline_parallel"),
        ({"pipeline_parallel": 33}, "1 to 32"),
        ({"batch": 0}, "batch"),
        ({"batch": float("nan")}, "batch"),
        ({"input_tokens": 0}, "input_tokens"),
        ({"output_tokens": -1}, "output_tokens"),
        ({"input_tokens": float("nan")}, "input_tokens"),
        ({"weight_dtype": "int3"}, "unknown number format 'int3'"),
        ({"kv_dtype": "fp1"}, "unknown number format 'fp1'"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"schedule": "lifo"}, "schedule"),
        ({"estimator": "oracle"}, "estimator"),
        ({"instance_type": "g6.13xlarge"}, "unknown instance type"),
    ],
)
def test_bad_input_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "H100"}
    with pytest.raises(hp.InvalidInputError, match=said):
        hp.predict(**(arguments | changes))


@pytest.mark.parametrize(
    "changes", [{"batch": "x"}, {"batch": 2.5}, {"tensor_parallel": "2"}, {"pipeline_parallel": 1.5}]
)
def test_a_count_of_the_wrong_type_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(hp.InvalidInputError, match=next(iter(changes))):
        hp.predict("llama-3.1-8b", "H100", **changes)


@pytest.mark.parametrize("engine", ["vllm", "vllm-0.32", "hetplan", "tensorrt-llm-0.14", "trtllm-1.0"])
def test_an_engine_by_name_and_version(engine: str) -> None:
    source = hp.predict("llama-3.1-8b", "H100", engine=engine).source
    vllm = engine.startswith("vllm") or engine == "hetplan"
    assert f"steps as {'vllm' if vllm else engine.replace('trtllm', 'tensorrt-llm')}" in source


def test_an_unknown_engine_is_refused_by_name() -> None:
    with pytest.raises(hp.UnknownNameError, match=r"engine 'llama\.cpp'.*vllm"):
        hp.predict("llama-3.1-8b", "H100", engine="llama.cpp")


@pytest.mark.parametrize("gpu", ["H100", "no-such-gpu"])
def test_a_gpu_that_the_machine_lacks_is_refused(gpu: str) -> None:
    with pytest.raises(hp.InvalidInputError, match=r"g6\.12xlarge|no-such-gpu"):
        hp.predict("llama-3.1-8b", gpu, instance_type="g6.12xlarge")


def test_a_model_that_does_not_fit_states_the_shortfall() -> None:
    with pytest.raises(hp.InfeasibleError, match=r"GiB short") as refusal:
        hp.predict("llama-3.1-70b", "L4", tensor_parallel=4)
    (reason,) = refusal.value.reasons
    assert reason.needed > reason.available > 15
    assert reason.unit == "GiB"


def test_an_own_machine_of_a_catalogued_gpu() -> None:
    rack = make_machine("rack", gpu=get_gpu("L40S"), gpu_count=2)
    p = hp.predict(tiny_llama(), "L40S", tensor_parallel=2, instance_type=rack)
    assert "host rack" in p.source


# ---- a plan under a workload


@pytest.fixture(scope="module")
def plan() -> hp.Plan:
    return verified(hp.optimize(model="llama-3.1-8b", cluster={"g6.xlarge": 3, "g6e.xlarge": 1}, workload=WORKLOAD))


def test_under_its_own_workload_a_plan_does_what_it_says(plan: hp.Plan) -> None:
    estimate = hp.estimate(plan)
    assert estimate.requests_per_s == pytest.approx(plan.requests_per_s)
    assert estimate.cost_usd_per_hour == plan.cost_usd_per_hour
    assert estimate.usd_per_million_output_tokens == pytest.approx(plan.usd_per_million_output_tokens)
    assert estimate.output_tokens_per_s == pytest.approx(plan.requests_per_s * 232)
    assert estimate.pipelines == tuple(p.predictions for p in plan.deployments[0].pipelines)


def test_copies_count(plan: hp.Plan) -> None:
    """Three like machines, three like pipelines: one entry, three times the rate."""
    three = verified(hp.optimize(model="llama-3.2-1b", cluster={"g6.xlarge": 3}, workload=WORKLOAD, solver="dp-beam"))
    rates = [p.count * p.predictions.requests_per_s.value for p in three.deployments[0].pipelines]
    assert hp.estimate(three).requests_per_s == pytest.approx(sum(rates))


@pytest.mark.parametrize(("tokens", "faster"), [((200, 50), True), ((763, 100), True)])
def test_lighter_requests_are_served_faster(plan: hp.Plan, tokens: tuple[int, int], faster: bool) -> None:
    lighter = hp.estimate(plan, hp.Workload(input_tokens=tokens[0], output_tokens=tokens[1]))
    assert (lighter.requests_per_s > plan.requests_per_s) == faster


def test_a_request_beyond_max_model_len_is_not_served(plan: hp.Plan) -> None:
    """The plan's engines start with max_model_len = 995: they refuse a longer request."""
    assert {p.max_model_len for p in plan.deployments[0].pipelines} == {995}
    with pytest.raises(hp.InfeasibleError, match="995"):
        hp.estimate(plan, hp.Workload(input_tokens=2_000, output_tokens=300))


def test_other_requests_do_not_move_what_is_kept_for_a_second_engine() -> None:
    """The room was made for requests of 4,096 tokens, and stays that large for shorter ones."""
    plan = hp.optimize(
        model="llama-3.1-8b", cluster={"g6.xlarge": 1}, workload=WORKLOAD, max_model_len=4096, handover_sequences=2
    )
    (pipeline,) = plan.deployments[0].pipelines
    assert pipeline.max_num_seqs < 64, "memory is what limits this plan"
    same = hp.Workload(input_tokens=WORKLOAD.mean_input_tokens, output_tokens=WORKLOAD.mean_output_tokens)
    assert hp.estimate(plan, same).requests_per_s == pytest.approx(plan.requests_per_s)


def test_a_plan_for_a_demand_can_be_asked_about_other_lengths() -> None:
    demand = hp.Workload(input_tokens=763, output_tokens=232, requests_per_s=1)
    cheapest = hp.optimize(model="llama-3.2-1b", cluster={"g6.xlarge": 2}, workload=demand, objective="cost")
    assert hp.estimate(cheapest, hp.Workload(input_tokens=100, output_tokens=100)).requests_per_s > 1


def test_an_estimate_depends_on_the_plan_s_snapshot_alone(plan: hp.Plan, tmp_path: Any) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert hp.estimate(hp.Plan.load(path)) == hp.estimate(plan)
