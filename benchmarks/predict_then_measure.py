"""How far predictions of real vLLM on this CPU are off: calibrate, predict, then measure, three times over."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "vllm"))

ROUNDS = 3


def predict_then_measure() -> None:
    """Prefill and decode steps of two decoders in vLLM; the calibration has seen neither."""
    from calibrated import DECODERS, calibrate_this_cpu, error, variables
    from environment import vllm_environment
    from lived_through import live_through

    from hetplan.calibration.engine_steps import kernel_seconds
    from hetplan.calibration.vllm_decoder import time_decoders

    environment = vllm_environment()
    print("\n## predict, then measure: vLLM on this CPU, fp32, prompts of 128 tokens, one thread\n")
    print("| round | hidden | layers | batch | step | predicted s | measured s | error | fastest s | spread |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    ratios: dict[tuple[int, int, str], list[float]] = {}
    taken = []
    for number in range(1, ROUNDS + 1):
        calibration, seconds, steps_s = calibrate_this_cpu(environment)
        taken.append((seconds, steps_s))
        predicted = [kernel_seconds(calibration, decoder) for decoder in DECODERS]
        timings = time_decoders(DECODERS, python=environment / "bin" / "python", environment=variables())
        for pair, timing in zip(predicted, timings, strict=True):
            decoder = timing.decoder
            for phase, value, step in zip(("prefill", "decode"), pair, (timing.prefill, timing.decode), strict=True):
                ratios.setdefault((decoder.hidden_size, decoder.batch, phase), []).append(value / step.median_s)
                print(
                    f"| {number} | {decoder.hidden_size} | {decoder.layers} | {decoder.batch} | {phase} "
                    f"| {value:.4f} | {step.median_s:.4f} | {error(value, step.median_s)} | {step.fastest_s:.4f} "
                    f"| {step.relative_spread:.0%} |",
                    flush=True,
                )
    print("\nMedian error of the rounds:")
    for (hidden, batch, phase), found in ratios.items():
        print(f"- hidden {hidden}, batch {batch}, {phase}: {median(found) - 1:+.0%}")
    print("\nA small trace against the server, simulated over measured means:")
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            lived = live_through(environment, calibration, Path(folder) / "out", seed=number)
        print(f"- round {number + 1}: TTFT {lived.ratio('ttft'):.2f}, TPOT {lived.ratio('tpot'):.2f}", flush=True)
    for seconds, steps_s in taken:
        print(f"calibration: {seconds:.0f} s, of which {steps_s:.0f} s for whole steps (the paper: 204 to 500 s a GPU)")
