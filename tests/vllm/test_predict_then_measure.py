"""Calibrate this CPU, predict decoders that the calibration has not seen, then time them in real vLLM."""

from __future__ import annotations

from pathlib import Path

from calibrated import DECODERS, error, variables

from hetplan.calibration.engine_steps import kernel_seconds
from hetplan.calibration.vllm_decoder import Decoder, time_decoders
from hetplan.catalog.calibration import Calibration

# Others use the machine; benchmarks/predict_then_measure.py prints what a quiet one shows.
SLACK = 2.0


def test_the_calibration_says_what_it_was_measured_on(calibration: Calibration, tmp_path: Path) -> None:
    assert calibration.gpu == "local-cpu"
    assert calibration.engine is not None
    assert calibration.engine.startswith("vllm")
    (overheads,) = calibration.step_overheads
    assert overheads.engine == "vllm"
    # Eager steps of Python: never free, never a second.
    assert 1e-5 < overheads.step_s + overheads.layer_s < 1
    calibration.save(tmp_path / "cpu.json")
    assert Calibration.load(tmp_path / "cpu.json") == calibration


def test_steps_that_were_predicted_take_that_long(environment: Path, calibration: Calibration) -> None:
    predicted = [kernel_seconds(calibration, decoder) for decoder in DECODERS]
    timings = time_decoders(DECODERS, python=environment / "bin" / "python", environment=variables())
    ratios = []
    for (prefill, decode), timing in zip(predicted, timings, strict=True):
        for phase, seconds, step in (("prefill", prefill, timing.prefill), ("decode", decode, timing.decode)):
            print(f"{_name(timing.decoder)} {phase}: {error(seconds, step.median_s)}")
            # The fastest step is what a machine that does nothing else would take.
            ratios.append((seconds / step.median_s, seconds / step.fastest_s))
    # Too short against the fastest, or too long against the median: neither is the machine's noise.
    assert all(to_fastest > 1 / SLACK and to_median < SLACK for to_median, to_fastest in ratios), ratios


def _name(decoder: Decoder) -> str:
    return f"hidden {decoder.hidden_size}, {decoder.layers} layers, batch {decoder.batch}"
