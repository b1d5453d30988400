"""What an estimate must say: both readings of TPOT, hard limits kept, doubts named, dense rates only."""

from __future__ import annotations

import itertools

import pytest
from builders import WORKLOAD, make_cluster, make_gpu, make_machine, make_pool, verified

import hetplan as hp
from hetplan.catalog.tables import get_calibration, get_gpu, list_gpus
from hetplan.solvers.base import solver_names

OUTPUT_TOKENS = [1, 2, 100, 232]


def test_both_readings_of_tpot() -> None:
    """TTFT 500 ms, 20 ms between tokens, 100 tokens: 20.0 ms without the first token, 24.8 ms with it."""
    ttft_s, between_s, tokens = 0.5, 0.02, 100
    latency_s = ttft_s + (tokens - 1) * between_s
    assert (latency_s - ttft_s) / (tokens - 1) == pytest.approx(0.0200)
    assert latency_s / tokens == pytest.approx(0.0248)


@pytest.mark.parametrize("output_tokens", OUTPUT_TOKENS)
@pytest.mark.parametrize("batch", [1, 16])
def test_a_replica_names_both_readings(output_tokens: int, batch: int) -> None:
    p = hp.predict("llama-3.1-8b", "L4", batch=batch, output_tokens=output_tokens)
    assert p.tpot_including_first_s == pytest.approx(p.latency_s / output_tokens)
    assert p.latency_s == pytest.approx(p.ttft_s + (output_tokens - 1) * p.tpot_s)
    assert p.output_tokens_per_s == pytest.approx(batch * output_tokens / p.latency_s)


@pytest.mark.parametrize("solver", solver_names())
@pytest.mark.parametrize("output_tokens", OUTPUT_TOKENS)
def test_a_plan_spreads_the_rest_over_the_tokens_after_the_first(solver: str, output_tokens: int) -> None:
    workload = hp.Workload(input_tokens=763, output_tokens=output_tokens)
    plan = verified(hp.optimize(model="llama-3.2-1b", cluster={"g6.xlarge": 2}, workload=workload, solver=solver))
    for pipeline in plan.deployments[0].pipelines:
        p = pipeline.predictions
        assert p.latency_s.value == pytest.approx(p.ttft_s.value + (output_tokens - 1) * p.tpot_s.value)


# ---- hard limits


def loosest(objective: str, solver: str) -> dict[str, float]:
    """The slowest latencies of the plan without limits."""
    plan = hp.optimize(
        model="llama-3.1-8b",
        cluster=MIXED,
        workload=RATED,
        objective=objective,
        solver=solver,  # type: ignore[arg-type]
    )
    predictions = [p.predictions for p in plan.deployments[0].pipelines]
    return {
        "ttft_s": max(p.ttft_s.value for p in predictions),
        "tpot_s": max(p.tpot_s.value for p in predictions),
        "e2e_s": max(p.latency_s.value for p in predictions),
    }


MIXED = {"g6.xlarge": 2, "g6e.xlarge": 1}
RATED = hp.Workload(input_tokens=763, output_tokens=232, requests_per_s=1.0)
OBJECTIVES = ["throughput", "throughput_per_cost", "cost"]


@pytest.mark.parametrize("limit", ["ttft_s", "tpot_s", "e2e_s"])
@pytest.mark.parametrize(("objective", "solver"), list(itertools.product(OBJECTIVES, solver_names())))
def test_no_returned_plan_breaks_a_hard_limit(objective: str, solver: str, limit: str) -> None:
    """At any tightness: either the limit is kept by every pipeline, or there is no plan."""
    start = loosest(objective, solver)[limit]
    outcomes = []
    for factor in (1.0, 0.6, 0.1, 0.001):
        slo = hp.Slo(**{limit: start * factor}, hard=True)
        try:
            plan = verified(
                hp.optimize(
                    model="llama-3.1-8b",
                    cluster=MIXED,
                    workload=RATED,
                    objective=objective,  # type: ignore[arg-type]
                    solver=solver,
                    slo=slo,
                )
            )
        except (hp.InfeasibleError, hp.NoSolutionError) as error:
            outcomes.append(type(error))
            continue
        outcomes.append(hp.Plan)
        for pipeline in plan.deployments[0].pipelines:
            p = pipeline.predictions
            got = {"ttft_s": p.ttft_s.value, "tpot_s": p.tpot_s.value, "e2e_s": p.latency_s.value}
            assert got[limit] <= start * factor * (1 + 1e-9)
    assert outcomes[0] is hp.Plan, "the plan without a limit keeps the limit that it reaches"
    assert outcomes[-1] is hp.InfeasibleError, "nothing is a thousand times faster, and that is proven"


def test_an_impossible_limit_states_both_sides() -> None:
    with pytest.raises(hp.InfeasibleError, match=r"tpot_s <= 0\.001 s, at least") as refusal:
        hp.optimize(model="llama-3.1-8b", cluster=MIXED, workload=WORKLOAD, slo=hp.Slo(tpot_s=0.001))
    (reason,) = refusal.value.reasons
    assert (reason.constraint, reason.available, reason.unit) == ("tpot_s", 0.001, "s")
    assert reason.needed > 0.001


@pytest.mark.parametrize("slo", [hp.Slo(tpot_s=0.1, percentile=0.9), hp.Slo(ttft_s=1.0, percentile=0.5, hard=False)])
@pytest.mark.parametrize("solver", solver_names())
def test_a_percentile_needs_a_rate(slo: hp.Slo, solver: str) -> None:
    with pytest.raises(hp.InvalidInputError, match="give the workload requests_per_s"):
        hp.optimize(
            model="llama-3.2-1b",
            cluster={"g6.xlarge": 1},
            workload=WORKLOAD,
            slo=slo,
            latency_penalty=1.0,
            solver=solver,
        )


# ---- what an estimate rests on


def calibrated(gpu: str) -> bool:
    calibration = get_calibration(gpu)
    rates = [calibration.memory_bytes_per_s, *(calibration.compute_flops[d] for d in ("bf16", "fp16")
             if d in calibration.compute_flops)]  # fmt: skip
    return all(rate.source not in ("datasheet", "assumed") for rate in rates)


def relative_width(band: tuple[float, float, float]) -> float:
    return band[1] / band[0]


@pytest.mark.parametrize("gpu", list_gpus())
def test_an_uncalibrated_gpu_says_so_and_has_a_wider_band(gpu: str) -> None:
    p = hp.predict("llama-3.2-1b", gpu)
    surest = hp.predict("llama-3.2-1b", "H100")
    if calibrated(gpu):
        assert "not calibrated" not in p.source
        # Scalars alone are worth less than fitted kernels.
        fitted = bool(get_calibration(gpu).gemms)
        assert (relative_width(p.band["tpot_s"]) == pytest.approx(relative_width(surest.band["tpot_s"]))) == fitted
    else:
        assert "datasheet" in p.source or "assumed" in p.source
        assert relative_width(p.band["tpot_s"]) > relative_width(surest.band["tpot_s"])
    assert get_gpu(gpu).name in p.source


@pytest.mark.parametrize("name", ["ttft_s", "tpot_s", "latency_s", "output_tokens_per_s"])
@pytest.mark.parametrize("gpu", ["H100", "RTX4090"])
def test_a_band_holds_its_value_and_states_its_level(gpu: str, name: str) -> None:
    p = hp.predict("llama-3.2-1b", gpu)
    low, high, level = p.band[name]
    assert 0 < low <= getattr(p, name) <= high
    assert low < high
    assert 0.5 <= level < 1


def test_an_own_gpu_has_datasheet_rates_and_the_plan_says_so() -> None:
    own = make_machine(gpu=make_gpu("Own9000", memory_gib=24))
    cluster = make_cluster((own, make_pool(own)))
    plan = verified(hp.optimize(model="llama-3.2-1b", cluster=cluster, workload=WORKLOAD))
    (pipeline,) = plan.deployments[0].pipelines
    assert "Own9000 not calibrated, datasheet rates" in pipeline.predictions.tpot_s.source
    assert "Own9000 not calibrated" in str(plan)


def test_one_uncalibrated_stage_widens_the_band_of_the_whole_pipeline() -> None:
    sure = hp.predict("llama-3.1-8b", "L40S", pipeline_parallel=1)
    width = relative_width(sure.band["tpot_s"])
    own = make_machine(gpu=make_gpu("Own9000", memory_gib=10))
    known = make_machine("known", gpu=get_gpu("L40S").replace(memory_bytes=10 * 2**30), gpu_count=1)
    cluster = make_cluster((own, make_pool(own)), (known, make_pool(known, 1)))
    plan = verified(hp.optimize(model="llama-3.1-8b", cluster=cluster, workload=WORKLOAD))
    for pipeline in plan.deployments[0].pipelines:
        assert {stage.instance_type for stage in pipeline.stages} == {"box", "known"}
        p = pipeline.predictions.tpot_s
        assert p.high / p.low > width


@pytest.mark.parametrize("model", ["llama-3.2-1b", "qwen3-0.6b"])
def test_t4_runs_bf16_as_fp16_and_says_so(model: str) -> None:
    p = hp.predict(model, "T4")
    assert "T4 runs bf16 as fp16" in p.source
    plan = verified(hp.optimize(model=model, cluster={"g4dn.xlarge": 1}, workload=WORKLOAD))
    (pipeline,) = plan.deployments[0].pipelines
    assert {stage.compute_dtype for stage in pipeline.stages} == {"fp16"}
    assert "T4 runs bf16 as fp16" in str(plan)


@pytest.mark.parametrize("gpu", ["L4", "A100-SXM"])
def test_a_gpu_with_bf16_does_not_pretend(gpu: str) -> None:
    assert "runs bf16 as" not in hp.predict("llama-3.2-1b", gpu).source


@pytest.mark.parametrize(("gpu", "fp8_native"), [("A100-SXM", False), ("T4", False), ("L40S", True), ("H100", True)])
def test_fp8_is_weight_only_where_it_is_not_native(gpu: str, fp8_native: bool) -> None:
    """Prefill is bound by computing: FP8 speeds it up only where the GPU multiplies FP8."""
    half = hp.predict("llama-3.2-1b", gpu, batch=16, input_tokens=2000)
    fp8 = hp.predict("llama-3.2-1b", gpu, batch=16, input_tokens=2000, weight_dtype="fp8")
    ratio = half.ttft_s / fp8.ttft_s
    assert (1.1 < ratio < 2.1) if fp8_native else ratio == pytest.approx(1, abs=0.05)
    # Decode reads the weights, which are half as large either way.
    assert fp8.tpot_s < half.tpot_s


@pytest.mark.parametrize("gpu", list_gpus())
def test_rates_are_dense(gpu: str) -> None:
    rates = get_gpu(gpu).dense_flops
    half = max(rates.get("fp16", 0.0), rates.get("bf16", 0.0))
    # Datasheets round each figure apart: 733 / 362.05 on the L40S.
    assert rates.get("fp8", 0.0) <= 2.05 * half
    # GeForce boards halve the 16-bit rate with fp32 accumulation; int8 always accumulates in int32.
    assert rates.get("int8", 0.0) <= (4.1 if gpu.startswith("RTX4090") else 2.05) * half


@pytest.mark.parametrize(("gpu", "dtype", "tflops"), [("L40S", "fp8", 733), ("H100-PCIE-80GB", "fp16", 756.5)])
def test_published_dense_rates(gpu: str, dtype: str, tflops: float) -> None:
    assert get_gpu(gpu).dense_flops[dtype] == pytest.approx(tflops * 1e12, rel=0.001)  # type: ignore[index]


@pytest.mark.parametrize(("half", "eight", "allowed"), [(362, 733, True), (362, 1466, False), (756.5, 3026, False)])
def test_a_sparse_rate_is_refused(half: float, eight: float, allowed: bool) -> None:
    rates = {"dense_flops": {"bf16": half * 1e12, "fp8": eight * 1e12}, "native_dtypes": ("bf16", "fp8")}
    if allowed:
        assert make_gpu(**rates).dense_flops["fp8"] == eight * 1e12
    else:
        with pytest.raises(hp.InvalidInputError, match="sparse"):
            make_gpu(**rates)


# ---- lengths


def test_a_length_beyond_the_model_is_refused() -> None:
    with pytest.raises(hp.InvalidInputError, match=r"handles 40,960 tokens"):
        hp.optimize(model="qwen3-0.6b", cluster={"g6e.xlarge": 1}, workload=WORKLOAD, max_model_len=50_000)


@pytest.mark.parametrize("solver", solver_names())
@pytest.mark.parametrize("max_model_len", [995, 4_000, 30_000])
def test_the_kv_cache_of_every_stage_holds_the_longest_request(solver: str, max_model_len: int) -> None:
    plan = verified(
        hp.optimize(
            model="qwen3-0.6b",
            cluster={"g6.xlarge": 2},
            workload=WORKLOAD,
            solver=solver,
            max_model_len=max_model_len,
        )
    )
    spec = plan.problem.model
    for pipeline in plan.deployments[0].pipelines:
        assert pipeline.max_model_len == max_model_len
        for stage in pipeline.stages:
            share = stage.layer_count / spec.layer_count
            assert stage.kv_cache_bytes >= max_model_len * spec.kv_bytes_per_token(stage.tensor_parallel) * share


def test_a_length_below_the_workload_is_refused() -> None:
    with pytest.raises(hp.InvalidInputError, match="max_model_len"):
        hp.optimize(model="llama-3.2-1b", cluster={"g6.xlarge": 1}, workload=WORKLOAD, max_model_len=100)
