"""How wrong a prediction may be, and what it rests on."""

from __future__ import annotations

from collections.abc import Sequence

from hetplan.catalog.calibration import Calibration
from hetplan.catalog.hardware import InstanceType
from hetplan.estimator.memory import compute_rate
from hetplan.problem.placement import PlacementProblem

BAND_LEVEL = 0.9

# Measured over predicted time, 5% and 95% quantiles, learnt by calibration/learn_bands.py from 1,022 static
# batches that others measured on A100, H100 and L40S, sources weighing alike. The same rows predicted with
# datasheet rates give 1.22 to 2.22: a band holds its own prediction, so the low end is 1 there.
_MEASURED_TIME = (0.97, 1.85)
_DATASHEET_TIME = (1.0, 2.22)
_RATES = frozenset({"requests_per_s", "output_tokens_per_s"})


def band_around(
    name: str, value: float, estimator: str, calibrations: Sequence[Calibration]
) -> tuple[float, float, float]:
    """(low, high, level) around a predicted time or rate; wider when a rate is a datasheet value."""
    unmeasured = any(_unmeasured(c) for c in calibrations)
    low, high = _DATASHEET_TIME if unmeasured else _MEASURED_TIME
    if name in _RATES:
        low, high = 1 / high, 1 / low
    return value * low, value * high, BAND_LEVEL


def _unmeasured(calibration: Calibration) -> bool:
    """True when the 16-bit compute rate or the memory bandwidth is a vendor's or assumed."""
    compute = [calibration.compute_flops[d].source for d in ("bf16", "fp16") if d in calibration.compute_flops]
    return bool({"datasheet", "assumed"} & {calibration.memory_bytes_per_s.source, *compute})


def describe_source(problem: PlacementProblem, estimator: str, stages: Sequence[tuple[InstanceType, int]]) -> str:
    """What a prediction rests on: the estimator, each GPU's calibration, links that nobody measured."""
    parts = [f"estimator {estimator}"]
    machines = {machine.gpu.name: machine for machine, _ in stages}
    wanted = problem.model.base_dtype
    for name, machine in machines.items():
        calibration = problem.calibration(name)
        native = machine.gpu.runs_as(wanted) if estimator != "paper" else wanted
        compute, memory = compute_rate(calibration, machine.gpu, native), calibration.memory_bytes_per_s
        if calibration.measured_on is not None:
            parts.append(f"{name} calibrated {calibration.measured_on:%Y-%m}")
        elif compute.source == memory.source == "datasheet":
            parts.append(f"{name} not calibrated, datasheet rates")
        elif compute.source == memory.source:
            parts.append(f"{name}: {compute.source} rates")
        else:
            parts.append(f"{name}: {native} compute {compute.source}, memory bandwidth {memory.source}")
        if wanted != native:
            parts.append(f"{name} runs {wanted} as {native}")
    groups = sorted({(machine, degree) for machine, degree in ((m.name, d) for m, d in stages) if degree > 1})
    if groups:
        parts.append("all-reduce never measured on " + ", ".join(f"{name} TP{degree}" for name, degree in groups))
    return "; ".join(parts)
