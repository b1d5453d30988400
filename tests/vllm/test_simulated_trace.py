"""What the simulator says of a trace, and what real vLLM on this CPU does with it."""

from __future__ import annotations

from pathlib import Path

from lived_through import live_through

from hetplan.catalog.calibration import Calibration

# A quarter is asked for and printed (benchmarks/predict_then_measure.py); a test of times allows a factor.
FACTOR = 2.0


# Timings are of a machine that others use: one quiet round is enough.
ROUNDS = 3


def test_a_trace_takes_as_long_as_simulated(environment: Path, calibration: Calibration, tmp_path: Path) -> None:
    within = False
    for number in range(ROUNDS):
        lived = live_through(environment, calibration, tmp_path / f"out-{number}")
        ratios = {name: lived.ratio(name) for name in ("ttft", "tpot")}
        print("simulated over measured: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
        within = all(1 / FACTOR < ratio < FACTOR for ratio in ratios.values())
        if within:
            break
    assert within
