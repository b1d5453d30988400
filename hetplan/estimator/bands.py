"""How wrong a prediction may be, and what it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hetplan.catalog.calibration import Calibration
from hetplan.catalog.hardware import InstanceType
from hetplan.estimator.communication import all_reduce_for
from hetplan.estimator.rates import compute_rate
from hetplan.problem.placement import PlacementProblem

BAND_LEVEL = 0.9

Basis = Literal["fitted", "borrowed", "rates", "datasheet", "paper"]

# Measured over predicted time, 5% and 95% quantiles by what a prediction rests on and what it predicts, learnt by
# calibration/learn_bands.py from runs of others that were held out: each GPU with its own calibration points, and with
# engine overheads learnt without it. "fitted": TPOT was held out on H100 alone and is given the spread of TTFT and
# throughput half way. "borrowed": H200 with H100's kernels. "rates" and "datasheet" are wider than their rows say,
# by the 15 to 20% that GEMMs lose when the usual shares come from other GPUs only (calibration/learn_gemm.py).
TIME_BANDS: dict[tuple[Basis, str], tuple[float, float]] = {
    ("fitted", "ttft_s"): (0.79, 1.25),
    ("fitted", "tpot_s"): (0.85, 1.17),
    ("fitted", "request"): (0.83, 1.23),
    ("borrowed", "ttft_s"): (0.75, 1.36),
    ("borrowed", "tpot_s"): (0.78, 1.36),
    ("borrowed", "request"): (0.78, 1.36),
    ("rates", "ttft_s"): (0.72, 1.45),
    ("rates", "tpot_s"): (0.78, 1.40),
    ("rates", "request"): (0.78, 1.42),
    ("datasheet", "ttft_s"): (0.70, 1.75),
    ("datasheet", "tpot_s"): (0.72, 1.70),
    ("datasheet", "request"): (0.72, 1.75),
    ("paper", "ttft_s"): (0.96, 2.66),
    ("paper", "tpot_s"): (1.0, 1.90),
    ("paper", "request"): (0.99, 1.99),
}
# A group whose collectives were never measured on this host may lose more. A guess: no source has runs of such a group
# beside a calibrated one.
_UNMEASURED_GROUP = 1.25
_RATES = frozenset({"requests_per_s", "output_tokens_per_s"})


@dataclass(frozen=True, slots=True)
class Quality:
    """What a prediction rests on: the weakest part decides."""

    basis: Basis
    groups_measured: bool


def band_around(name: str, value: float, quality: Quality) -> tuple[float, float, float]:
    """(low, high, level) around a predicted time or rate."""
    low, high = TIME_BANDS[quality.basis, name if name in ("ttft_s", "tpot_s") else "request"]
    if not quality.groups_measured:
        high *= _UNMEASURED_GROUP
    if name in _RATES:
        low, high = 1 / high, 1 / low
    return value * low, value * high, BAND_LEVEL


def quality_of(problem: PlacementProblem, estimator: str, stages: Sequence[tuple[InstanceType, int]]) -> Quality:
    """The quality of predictions about (machine, tensor-parallel degree) stages."""
    measured = all(degree == 1 or _group_measured(problem, machine, degree) for machine, degree in stages)
    if estimator == "paper":
        return Quality("paper", measured)
    order: tuple[Basis, ...] = ("fitted", "borrowed", "rates", "datasheet")
    weakest = max((_basis(problem.calibration(m.gpu.name)) for m, _ in stages), key=order.index)
    return Quality(weakest, measured)


def _basis(calibration: Calibration) -> Basis:
    if calibration.gemms and calibration.prefill_attention is not None and calibration.decode_attention is not None:
        return "borrowed" if calibration.memory_bytes_per_s.source == "assumed" else "fitted"
    compute = [calibration.compute_flops[d].source for d in ("bf16", "fp16") if d in calibration.compute_flops]
    weak = {"datasheet", "assumed"} & {calibration.memory_bytes_per_s.source, *compute}
    return "datasheet" if weak else "rates"


def _group_measured(problem: PlacementProblem, machine: InstanceType, degree: int) -> bool:
    return all_reduce_for(machine, degree, problem.calibration(machine.gpu.name)).curve is not None


def describe_source(problem: PlacementProblem, estimator: str, stages: Sequence[tuple[InstanceType, int]]) -> str:
    """What a prediction rests on: the estimator, each GPU's calibration, the engine, links that nobody measured."""
    parts = [f"estimator {estimator}"]
    machines = {machine.gpu.name: machine for machine, _ in stages}
    wanted = problem.model.base_dtype
    for name, machine in machines.items():
        calibration = problem.calibration(name)
        native = machine.gpu.runs_as(wanted) if estimator != "paper" else wanted
        parts.append(_calibration_source(problem, calibration, machine, estimator))
        if wanted != native:
            parts.append(f"{name} runs {wanted} as {native}")
    if estimator != "paper":
        parts.append(f"steps as {problem.step_overheads.engine}")
    unmeasured = {(m.name, d) for m, d in stages if d > 1 and not _group_measured(problem, m, d)}
    if unmeasured:
        named = ", ".join(f"TP{degree} on {name}" for name, degree in sorted(unmeasured))
        parts.append(f"{named} never measured")
    return "; ".join(parts)


def _calibration_source(
    problem: PlacementProblem, calibration: Calibration, machine: InstanceType, estimator: str
) -> str:
    name = calibration.gpu
    if calibration.measured_on is not None:
        return f"{name} calibrated {calibration.measured_on:%Y-%m}"
    if estimator != "paper" and _basis(calibration) in ("fitted", "borrowed"):
        return f"{name} kernels {calibration.gemms[0].source}"
    native = machine.gpu.runs_as(problem.model.base_dtype) if estimator != "paper" else problem.model.base_dtype
    compute, memory = compute_rate(calibration, machine.gpu, native), calibration.memory_bytes_per_s
    if compute.source == memory.source == "datasheet":
        return f"{name} not calibrated, datasheet rates"
    if compute.source == memory.source:
        return f"{name}: {compute.source} rates"
    return f"{name}: {native} compute {compute.source}, memory bandwidth {memory.source}"
