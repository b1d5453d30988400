"""Table 2 and eq. 1 of ShuntServe against numbers worked out by hand, and against the table step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from builders import make_cluster, make_machine, make_pool, problem_of, tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st

import hetplan as hp
from hetplan.estimator.base import make_estimator
from hetplan.estimator.operations import (
    FeedForward,
    decode_work,
    expected_experts,
    feed_forwards,
    logits_work,
    prefill_work,
)

OPERATIONS = ["QKV projection", "attention", "output projection", "up and gate projection", "down projection"]

# B = 1, S_in = 2, S_out = 2, H = 4, H_kv = 2, H_ffn = 8, V = 10, D_TP = 2, row by row with pencil and paper.
BY_HAND = {
    "prefill": {"flops": [64, 32, 32, 128, 64], "elements": [24, 8, 12, 40, 24]},
    "decode": {"flops": [64, 56, 32, 128, 64], "elements": [40, 18, 20, 72, 40]},
}
ONE = np.ones(1)


def gated(size: int) -> list[FeedForward]:
    return [FeedForward(intermediate_size=size, up_matrices=2, experts=1, active=1)]


@pytest.mark.parametrize("quantity", ["flops", "elements"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_rows_by_hand(phase: str, quantity: str) -> None:
    rows = prefill_work(4, 2, gated(8), ONE, 2, 2) if phase == "prefill" else decode_work(4, 2, gated(8), ONE, 2, 2, 2)
    assert [getattr(row, quantity).item() for row in rows] == BY_HAND[phase][quantity]


def test_logits_by_hand() -> None:
    prefill = logits_work(4, 10, rows_per_sequence=2, steps=1, batch=ONE, tensor_parallel=2)
    decode = logits_work(4, 10, rows_per_sequence=1, steps=2, batch=ONE, tensor_parallel=2)
    assert (prefill.flops.item(), prefill.elements.item()) == (80, 28)
    assert (decode.flops.item(), decode.elements.item()) == (80, 48)


@dataclass(frozen=True)
class Shape:
    """The symbols of the table."""

    b: int
    s_in: int
    s_out: int
    h: int
    kv: int
    f: int
    d: int


def table2(phase: str, x: Shape) -> list[tuple[float, float]]:
    """(FLOPs, elements) of each row, decode added up step by step."""
    b, s, h, kv, f, d = x.b, x.s_in, x.h, x.kv, x.f, x.d
    if phase == "prefill":
        return [
            (b * (2 * s * h**2 + 4 * s * h * kv) / d, b * s * h + (h**2 + 2 * h * kv) / d),
            (4 * b * s**2 * h / d, (b * s * h + 2 * b * s * kv) / d),
            (2 * b * s * h**2 / d, (b * s * h + h**2) / d),
            (4 * b * s * h * f / d, b * s * h + 2 * h * f / d),
            (2 * b * s * h * f / d, (b * s * f + h * f) / d),
        ]
    rows = [(0.0, 0.0)] * 5
    for t in range(1, x.s_out + 1):
        step = [
            (b * (2 * h**2 + 4 * h * kv) / d, b * h + (h**2 + 2 * h * kv) / d),
            (b * 4 * (s + t) * h / d, (b * h + 2 * b * (s + t) * kv) / d),
            (2 * b * h**2 / d, (b * h + h**2) / d),
            (4 * b * h * f / d, b * h + 2 * h * f / d),
            (2 * b * h * f / d, (b * f + h * f) / d),
        ]
        rows = [(a + c, e + g) for (a, e), (c, g) in zip(rows, step, strict=True)]
    return rows


SHAPES = st.builds(
    Shape,
    b=st.integers(1, 256),
    s_in=st.integers(1, 4096),
    s_out=st.integers(1, 40),
    h=st.integers(1, 64).map(lambda n: 128 * n),
    kv=st.integers(1, 16).map(lambda n: 64 * n),
    f=st.integers(1, 64).map(lambda n: 256 * n),
    d=st.sampled_from([1, 2, 3, 4, 8]),
)


@given(shape=SHAPES, phase=st.sampled_from(["prefill", "decode"]))
@settings(max_examples=150, deadline=None)
def test_rows_are_those_of_the_table(shape: Shape, phase: str) -> None:
    where = (shape.h, shape.kv, gated(shape.f), np.array([float(shape.b)]), shape.s_in)
    rows = prefill_work(*where, shape.d) if phase == "prefill" else decode_work(*where, shape.s_out, shape.d)
    for name, row, (flops, elements) in zip(OPERATIONS, rows, table2(phase, shape), strict=True):
        assert row.flops.item() == pytest.approx(flops, rel=1e-12), name
        assert row.elements.item() == pytest.approx(elements, rel=1e-12), name


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_stage_is_the_sum_over_operations_of_the_slower_of_computing_and_scanning(phase: str, degree: int) -> None:
    """Eqs. 1 and 2 for a whole layer, with rates that make some rows bound by one and some by the other."""
    machine = make_machine(gpu_count=4)
    spec = tiny_llama()
    problem = problem_of(spec, make_cluster((machine, make_pool(machine))), estimator="paper")
    calibration = problem.calibrations[0]
    flops, bandwidth = calibration.compute_flops["bf16"].value, calibration.memory_bytes_per_s.value
    batches = [1, 7, 64]
    seconds = make_estimator(problem).stage_seconds(
        spec, machine, layers=(1, 3), tensor_parallel=degree, batch=batches, input_tokens=100, output_tokens=30,
        first=False, last=False, phase=phase,  # type: ignore[arg-type]
    )  # fmt: skip
    link = machine.group_link(4)
    for column, b in enumerate(batches):
        rows = table2(phase, Shape(b, 100, 30, 1024, 4 * 128, 2816, degree))
        layer = sum(max(f / flops, 2 * e / bandwidth) for f, e in rows)
        tokens, steps = (b * 100, 1) if phase == "prefill" else (b, 30)
        layer += steps * 4 * (link.latency_s + tokens * 1024 * 2 / (degree * link.bytes_per_s)) * (degree - 1)
        assert seconds[0, column] == pytest.approx(2 * layer)
    bound_by = [
        f / flops > 2 * e / bandwidth
        for b in batches
        for f, e in table2(phase, Shape(b, 100, 30, 1024, 512, 2816, degree))
    ]
    assert any(bound_by) or phase == "decode"
    assert not all(bound_by)


def test_logits_belong_to_the_last_stage_only() -> None:
    machine = make_machine()
    spec = tiny_llama()
    problem = problem_of(spec, make_cluster((machine, make_pool(machine))), estimator="paper")
    calibration = problem.calibrations[0]
    flops, bandwidth = calibration.compute_flops["bf16"].value, calibration.memory_bytes_per_s.value
    shared = {"layers": (0, 2), "tensor_parallel": 1, "batch": 3, "input_tokens": 50, "output_tokens": 20}
    estimator = make_estimator(problem)
    for phase, rows, steps in (("prefill", 3 * 50, 1), ("decode", 3, 20)):
        ends = [
            estimator.stage_seconds(spec, machine, first=first, last=last, phase=phase, **shared).item()  # type: ignore[arg-type]
            for first, last in ((False, False), (True, False), (False, True), (True, True))
        ]
        logits = steps * max(2 * rows * 1024 * 32_000 / flops, 2 * (rows * 1024 + 1024 * 32_000) / bandwidth)
        assert ends[1] == pytest.approx(ends[0])
        assert ends[2] - ends[0] == pytest.approx(logits)
        assert ends[3] == pytest.approx(ends[2])


# ---- mixtures of experts, an extension of the table


@given(experts=st.integers(2, 256), data=st.data(), tokens=st.floats(1, 1e6))
@settings(max_examples=200, deadline=None)
def test_expected_experts_lie_between_one_token_s_and_all(experts: int, data: st.DataObject, tokens: float) -> None:
    active = data.draw(st.integers(1, experts - 1))
    touched = expected_experts(experts, active, np.array([tokens])).item()
    assert active * (1 - 1e-9) <= touched <= min(experts, active * tokens) * (1 + 1e-9)
    more = expected_experts(experts, active, np.array([tokens + 1])).item()
    assert more >= touched * (1 - 1e-12)


def test_expected_experts_by_hand() -> None:
    """8 experts, 2 a token: one token touches 2; two touch 8 (1 - (6/8)^2) = 3.5."""
    assert expected_experts(8, 2, np.array([1.0, 2.0])).tolist() == pytest.approx([2.0, 3.5])
    assert expected_experts(1, 1, np.array([1.0, 500.0])).tolist() == [1.0, 1.0]


def test_a_mixture_pays_for_the_experts_it_uses() -> None:
    spec = hp.ModelSpec.get("qwen3-30b-a3b")
    (mlp,) = feed_forwards(spec, spec.layer_kinds[0])
    assert (mlp.intermediate_size, mlp.up_matrices, mlp.experts, mlp.active) == (768, 2, 128, 8)
    up, down = decode_work(2048, 512, [mlp], np.array([1.0]), 100, 1, 1)[3:]
    assert up.flops.item() == 2 * 2 * 2048 * 768 * 8
    assert up.elements.item() == pytest.approx(2048 + 8 * 2 * 2048 * 768)
    assert down.flops.item() == 2 * 2048 * 768 * 8


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v2-lite"])
def test_what_the_table_does_not_know_is_refused(model: str) -> None:
    with pytest.raises(hp.UnsupportedModelError, match="calibrated"):
        hp.optimize(
            model=model,
            cluster={"p5en.48xlarge": 2},
            workload=hp.Workload(input_tokens=763, output_tokens=232),
            estimator="paper",
        )
