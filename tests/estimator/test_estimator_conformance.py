"""What every estimator promises to solvers, to the checker and to a simulator, whatever the model and the machine."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from builders import problem_of

import hetplan as hp
from hetplan.catalog.hardware import InstanceType, Link
from hetplan.estimator.base import PHASES, Estimator, make_estimator
from hetplan.plan import Stage

# The last four: a state in place of a KV cache, layers without attention, sparse and compressed attention.
OTHERS = ["qwen3.5-122b-a10b", "nemotron-3-nano-30b-a3b", "glm-5.3", "deepseek-v4-flash-fp8"]
MODELS = ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", *OTHERS]
MACHINES = {"g6.12xlarge": (1, 4), "g6e.xlarge": (1,), "p5.48xlarge": (8,)}
# The paper's Table 2 has rows for grouped attention with an MLP only.
PAIRS = [("calibrated", m) for m in MODELS] + [("paper", m) for m in MODELS[:2]]
CASES = [(e, m, name, degree) for e, m in PAIRS for name, degrees in MACHINES.items() for degree in degrees]
TOKENS: dict[str, float] = {"input_tokens": 763, "output_tokens": 232}
BATCH = [1, 2, 3, 8, 64, 256]

pytestmark = pytest.mark.parametrize(("name", "model", "machine", "degree"), CASES)


@cache
def scene(name: str, model: str, machine: str) -> tuple[Estimator, hp.ModelSpec, InstanceType]:
    problem = problem_of(model, {machine: 2}, estimator=name)
    return make_estimator(problem), problem.model, problem.cluster.instance_types[0]


def seconds(name: str, model: str, machine: str, degree: int, **changes: Any) -> Any:
    estimator, spec, host = scene(name, model, machine)
    arguments: dict[str, Any] = {
        "layers": (0, 4), "tensor_parallel": degree, "batch": BATCH, "first": False, "last": False, "phase": "decode",
        **TOKENS,
    }  # fmt: skip
    return estimator.stage_seconds(spec, host, **(arguments | changes))


def stage(spec: hp.ModelSpec, host: InstanceType, degree: int, layers: tuple[int, int]) -> Stage:
    return Stage(
        layers=layers, node=0, instance_type=host.name, gpu_indices=tuple(range(degree)), tensor_parallel=degree,
        compute_dtype="bf16", weight_bytes=0, activation_bytes=0, kv_cache_bytes=0,
    )  # fmt: skip


@pytest.mark.parametrize("phase", PHASES)
def test_shape_is_ranges_by_batches(name: str, model: str, machine: str, degree: int, phase: str) -> None:
    ranges = np.array([(0, 1), (0, 5), (3, 20)])
    result = seconds(name, model, machine, degree, layers=ranges, phase=phase)
    assert result.shape == (3, len(BATCH))
    assert result.dtype == np.float64
    assert seconds(name, model, machine, degree, layers=(2, 3), batch=5, phase=phase).shape == (1, 1)


@pytest.mark.parametrize("phase", PHASES)
def test_times_are_positive_and_finite(name: str, model: str, machine: str, degree: int, phase: str) -> None:
    _, spec, _ = scene(name, model, machine)
    for first, last in ((False, False), (True, False), (False, True), (True, True)):
        result = seconds(
            name, model, machine, degree, layers=(0, spec.layer_count), first=first, last=last, phase=phase
        )
        assert np.all(np.isfinite(result))
        assert np.all(result > 0)


@pytest.mark.parametrize("phase", PHASES)
def test_time_adds_over_layers(name: str, model: str, machine: str, degree: int, phase: str) -> None:
    """With kinds of layers mixed: [0, n) is [0, a) and [a, n), once the ends are counted once."""
    _, spec, _ = scene(name, model, machine)
    n = spec.layer_count
    whole = seconds(name, model, machine, degree, layers=(0, n), phase=phase)
    none = seconds(name, model, machine, degree, layers=(0, 0), phase=phase)
    for cut in (1, 3, n // 2, n - 1):
        left = seconds(name, model, machine, degree, layers=(0, cut), phase=phase)
        right = seconds(name, model, machine, degree, layers=(cut, n), phase=phase)
        np.testing.assert_allclose(left + right - none, whole, rtol=1e-12)


@pytest.mark.parametrize("phase", PHASES)
def test_no_layers_leave_the_ends(name: str, model: str, machine: str, degree: int, phase: str) -> None:
    """The same at any place; zero in the middle of the paper's pipeline; never negative."""
    for first, last in ((False, False), (True, False), (False, True)):
        ends = [
            seconds(name, model, machine, degree, layers=(at, at), first=first, last=last, phase=phase)
            for at in (0, 2, 7)
        ]
        assert np.array_equal(ends[0], ends[1])
        assert np.array_equal(ends[0], ends[2])
        assert np.all(ends[0] >= 0)
        more = seconds(name, model, machine, degree, layers=(0, 1), first=first, last=last, phase=phase)
        assert np.all(more > ends[0])


def test_counts_stand_for_ranges_where_layers_are_alike(name: str, model: str, machine: str, degree: int) -> None:
    _, spec, _ = scene(name, model, machine)
    counts = np.array([1, 4, 10])
    if len(spec.layer_kinds) > 1:
        with pytest.raises(hp.InvalidInputError, match="kinds of layers"):
            seconds(name, model, machine, degree, layers=counts)
        return
    by_range = seconds(name, model, machine, degree, layers=np.array([(5, 6), (2, 6), (0, 10)]))
    np.testing.assert_array_equal(seconds(name, model, machine, degree, layers=counts), by_range)


def test_decode_grows_with_the_context(name: str, model: str, machine: str, degree: int) -> None:
    """Over all layers: those with a window, a state or no attention grow no more."""
    _, spec, _ = scene(name, model, machine)
    layers = (0, spec.layer_count)
    results = [
        seconds(name, model, machine, degree, layers=layers, input_tokens=tokens) for tokens in (100, 1_000, 10_000)
    ]
    assert np.all(results[0] < results[1])
    assert np.all(results[1] < results[2])


def test_decode_grows_with_the_answer(name: str, model: str, machine: str, degree: int) -> None:
    results = [seconds(name, model, machine, degree, output_tokens=tokens) for tokens in (2, 20, 200)]
    assert np.all(results[0] < results[1])
    assert np.all(results[1] < results[2])


def test_prefill_grows_faster_than_its_tokens_once_attention_counts(
    name: str, model: str, machine: str, degree: int
) -> None:
    _, spec, _ = scene(name, model, machine)
    layers = (0, spec.layer_count)
    short, long = (
        seconds(name, model, machine, degree, layers=layers, input_tokens=tokens, phase="prefill", batch=4)
        for tokens in (8_000, 32_000)
    )
    assert long.item() > 4 * short.item()


def test_the_first_token_comes_from_prefill_or_the_table_says_otherwise(
    name: str, model: str, machine: str, degree: int
) -> None:
    """One output token: nothing to decode, except in the paper, which sums t = 1..S_out."""
    one = seconds(name, model, machine, degree, output_tokens=1, first=True, last=True)
    estimator, _, _ = scene(name, model, machine)
    assert estimator.decode_steps(1) == (1 if name == "paper" else 0)
    assert np.all(one > 0) if name == "paper" else np.all(one == 0)


@pytest.mark.parametrize("ends", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("prompt", [1, 763, 5_000])
def test_a_prompt_alone_is_one_step(
    name: str, model: str, machine: str, degree: int, prompt: int, ends: tuple[bool, bool]
) -> None:
    estimator, spec, host = scene(name, model, machine)
    first, last = ends
    layers = (0 if first else 1, spec.layer_count if last else spec.layer_count - 1)
    alone = seconds(
        name, model, machine, degree, layers=layers, batch=1, input_tokens=prompt, first=first, last=last,
        phase="prefill",
    )  # fmt: skip
    step = estimator.step_seconds(
        spec, stage(spec, host, degree, layers), prefill_tokens=prompt, prefill_context=0, decode_sequences=0,
        decode_context=0,
    )  # fmt: skip
    assert step == pytest.approx(alone.item(), rel=1e-12)


@pytest.mark.parametrize("sequences", [1, 200])
def test_decode_is_its_steps_at_the_mean_context(
    name: str, model: str, machine: str, degree: int, sequences: int
) -> None:
    """Steps t = 1..n over S_in + t tokens cost as much as n steps at their mean: time is linear in the context."""
    estimator, spec, host = scene(name, model, machine)
    answer = 25
    steps = estimator.decode_steps(answer)
    whole = seconds(
        name,
        model,
        machine,
        degree,
        layers=(0, spec.layer_count),
        batch=sequences,
        output_tokens=answer,
        first=True,
        last=True,
    ).item()
    each = [
        estimator.step_seconds(
            spec, stage(spec, host, degree, (0, spec.layer_count)), prefill_tokens=0, prefill_context=0,
            decode_sequences=sequences, decode_context=TOKENS["input_tokens"] + t,
        )
        for t in range(1, round(steps) + 1)
    ]  # fmt: skip
    assert sum(each) == pytest.approx(whole, rel=1e-3)


def test_a_mixed_step_costs_no_less_than_its_parts_and_no_more_than_their_sum(
    name: str, model: str, machine: str, degree: int
) -> None:
    estimator, spec, host = scene(name, model, machine)
    where = stage(spec, host, degree, (0, spec.layer_count))

    def step(prompt: int, sequences: int) -> float:
        return estimator.step_seconds(
            spec, where, prefill_tokens=prompt, prefill_context=0, decode_sequences=sequences, decode_context=900
        )

    both, prompt, decode = step(512, 32), step(512, 0), step(0, 32)
    assert max(prompt, decode) <= both <= (prompt + decode) * (1 + 1e-12)
    assert step(0, 0) == 0.0


def test_a_step_of_a_machine_that_the_problem_lacks_is_refused(
    name: str, model: str, machine: str, degree: int
) -> None:
    estimator, spec, host = scene(name, model, machine)
    foreign = stage(spec, host, degree, (0, 1)).replace(instance_type="dgx-1")
    with pytest.raises(hp.InvalidInputError, match="dgx-1"):
        estimator.step_seconds(
            spec, foreign, prefill_tokens=1, prefill_context=0, decode_sequences=1, decode_context=10
        )


@pytest.mark.parametrize(
    "batch",
    [0, -1, np.nan, np.inf, [], [[1, 2]], [1, 0, 3]],
    ids=["zero", "negative", "nan", "inf", "empty", "2d", "hole"],
)
def test_a_bad_batch_is_refused(name: str, model: str, machine: str, degree: int, batch: Any) -> None:
    with pytest.raises(hp.InvalidInputError, match="batch"):
        seconds(name, model, machine, degree, batch=batch)


@pytest.mark.parametrize("layers", [(0, 1000), (-1, 2), (3, 2)], ids=["beyond", "negative", "backwards"])
def test_a_bad_range_is_refused(name: str, model: str, machine: str, degree: int, layers: tuple[int, int]) -> None:
    with pytest.raises(hp.InvalidInputError, match="layer ranges"):
        seconds(name, model, machine, degree, layers=layers)


def test_memory_and_sequences_add_over_layers_and_are_what_is_left(
    name: str, model: str, machine: str, degree: int
) -> None:
    estimator, spec, host = scene(name, model, machine)

    def memory(layers: tuple[int, int]) -> Any:
        return estimator.stage_memory(spec, host, layers=layers, tensor_parallel=degree, first=False, last=False)

    def sequence(layers: tuple[int, int], tokens: float = 995) -> float:
        return estimator.sequence_bytes(
            spec, host, layers=layers, tensor_parallel=degree, tokens=tokens, input_tokens=763, last=False
        )

    none, left, right, whole = (memory(r) for r in ((0, 0), (0, 3), (3, 9), (0, 9)))
    weights = left.weight_bytes + right.weight_bytes - none.weight_bytes
    assert weights == pytest.approx(whole.weight_bytes, rel=1e-9)
    assert whole.kv_cache_bytes < none.kv_cache_bytes
    assert 0 < whole.usable_bytes <= host.gpu.memory_bytes
    assert sequence((0, 3)) + sequence((3, 9)) - sequence((0, 0)) == pytest.approx(sequence((0, 9)))
    assert sequence((0, 9), 2_000) > sequence((0, 9), 1_000) > 0
    assert estimator.batch_limit(host) >= 1


def test_the_bytes_that_are_sent_are_those_whose_sends_are_timed(
    name: str, model: str, machine: str, degree: int
) -> None:
    estimator, spec, host = scene(name, model, machine)
    # So slow that nothing else counts.
    way = Link(latency_s=0.0, bytes_per_s=1.0)
    both = [
        estimator.boundary_seconds(
            spec,
            host,
            host,
            same_node=False,
            batch=1,
            phase=phase,
            between=way,
            **TOKENS,  # type: ignore[arg-type]
        ).item()
        for phase in PHASES
    ]
    assert estimator.sent_bytes(spec, **TOKENS) == pytest.approx(sum(both), rel=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", PHASES)
def test_sends_cost_time_and_grow_with_the_batch(name: str, model: str, machine: str, degree: int, phase: str) -> None:
    estimator, spec, host = scene(name, model, machine)
    for same_node in (False, True) if host.gpu_count > 1 else (False,):
        sent = estimator.boundary_seconds(
            spec,
            host,
            host,
            same_node=same_node,
            batch=BATCH,
            phase=phase,
            **TOKENS,  # type: ignore[arg-type]
        )
        assert sent.shape == (len(BATCH),)
        assert np.all(np.isfinite(sent))
        assert np.all(sent > 0)
        assert np.all(np.diff(sent) > 0)
