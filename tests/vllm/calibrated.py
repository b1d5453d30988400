"""Calibrating this CPU for vLLM, and decoders to predict and then to time."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from environment import ROOT

from hetplan.calibration.engine_steps import SMALL_DECODERS, fit_step_overheads
from hetplan.calibration.fit_run import fit_run
from hetplan.calibration.raw_run import CalibrationRun
from hetplan.calibration.vllm_decoder import Decoder, time_decoders
from hetplan.catalog.calibration import Calibration

_MEASURE = """
import sys
from hetplan.calibration.measure import measure

run = measure("cpu", dtypes=["fp32"], engine="vllm", point_limit_s=float(sys.argv[1]))
sys.stdout.write("\\n" + run.model_dump_json() + "\\n")
"""
POINT_LIMIT_S = 0.1
# fp32: without AVX-512 a CPU multiplies 16-bit numbers after converting them.
NARROW = {"hidden_size": 512, "intermediate_size": 1408, "layers": 8, "heads": 8, "kv_heads": 4}
WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "layers": 8, "heads": 16, "kv_heads": 8}
DECODERS = tuple(
    Decoder.from_dict(shape | {"batch": batch}) for shape, batch in ((NARROW, 1), (NARROW, 8), (WIDE, 1), (WIDE, 4))
)


class Calibrated(NamedTuple):
    """This machine's calibration, what it took, and the part that went into whole steps of small decoders."""

    calibration: Calibration
    seconds: float
    steps_s: float


def variables() -> dict[str, str]:
    """What lets vLLM's Python import this checkout."""
    return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def calibrate_this_cpu(environment: Path) -> Calibrated:
    """Measure and fit, starts of the interpreters included."""
    python = environment / "bin" / "python"
    began = time.perf_counter()
    done = subprocess.run(
        [python, "-c", _MEASURE, str(POINT_LIMIT_S)],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | variables(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    kernels = fit_run(CalibrationRun.from_json(done.stdout.splitlines()[-1]))
    steps_began = time.perf_counter()
    timings = time_decoders(SMALL_DECODERS, python=python, environment=variables())
    calibration = kernels.replace(step_overheads=(fit_step_overheads(kernels, timings),))
    now = time.perf_counter()
    return Calibrated(calibration, now - began, now - steps_began)


def error(predicted: float, measured: float) -> str:
    """As printed: +12% for a prediction that is too long."""
    return f"{predicted / measured - 1:+.0%}"
