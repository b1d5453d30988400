"""What the simulator says of a trace, and what real vLLM on this CPU does with it."""

from __future__ import annotations

from pathlib import Path

from lived_through import live_through

from hetplan.catalog.calibration import Calibration

# A quarter is what a quiet machine shows (benchmarks/predict_then_measure.py prints it); others use this one.
WITHIN, SLACK = 0.25, 2.0


def test_a_trace_takes_as_long_as_simulated(environment: Path, calibration: Calibration, tmp_path: Path) -> None:
    lived = live_through(environment, calibration, tmp_path / "out")
    for name in ("ttft", "tpot"):
        print(f"{name}: simulated over measured {lived.ratio(name):.2f}")
    assert all(1 / (1 + SLACK * WITHIN) < lived.ratio(name) < 1 + SLACK * WITHIN for name in ("ttft", "tpot"))
