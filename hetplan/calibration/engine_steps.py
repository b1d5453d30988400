"""What a step of vLLM costs on this machine beside its kernels: whole steps of small decoders, less the kernels.

The decoders are so narrow that their kernels are the smaller part, and differ in layers, which tells what a layer
costs from what a step does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetplan.calibration.vllm_decoder import Decoder, DecoderTiming
from hetplan.catalog.calibration import Calibration
from hetplan.catalog.model import ModelSpec
from hetplan.catalog.steps import StepOverheads, get_step_overheads
from hetplan.catalog.tables import default_instance_type
from hetplan.errors import InvalidInputError
from hetplan.estimator.base import FloatArray
from hetplan.estimator.calibrated import CalibratedEstimator, step_work
from hetplan.estimator.replica import make_replica

ENGINE = "vllm"
_NARROW = {"hidden_size": 256, "intermediate_size": 704, "heads": 4, "kv_heads": 2, "vocabulary_size": 2000}
SMALL_DECODERS = (
    Decoder.from_dict(_NARROW | {"layers": 2, "repeats": 5}),
    Decoder.from_dict(_NARROW | {"layers": 12}),
)


def fit_step_overheads(calibration: Calibration, timings: Sequence[DecoderTiming]) -> StepOverheads:
    """Seconds of a step, of a layer and of a prefill beside the kernels of a calibration.

    Parameters
    ----------
    calibration : Calibration
        Of the machine that the timings were made on.
    timings : sequence of DecoderTiming
        Decoders of two numbers of layers at least.

    Raises
    ------
    InvalidInputError
        If all decoders have the same number of layers.
    """
    layers = np.array([timing.decoder.layers for timing in timings], dtype=np.float64)
    if len(set(layers.tolist())) < 2:
        raise InvalidInputError(
            "what a layer costs shows in decoders of different numbers of layers; time two at least"
        )
    usual = get_step_overheads(ENGINE)
    none = usual.replace(step_s=0.0, layer_s=0.0, prefill_step_s=0.0, prefill_layer_s=0.0)
    bare = calibration.replace(step_overheads=(none,))
    kernels = np.array([kernel_seconds(bare, timing.decoder) for timing in timings])
    prefill = np.array([timing.prefill.median_s for timing in timings])
    decode = np.array([timing.decode.median_s for timing in timings])
    step_s, layer_s = _not_negative(layers, decode - kernels[:, 1], decode)
    # Of what a prefill takes more, only what the layers do not add is the engine's: the rest grows with tokens.
    prefill_step_s, _ = _not_negative(layers, prefill - kernels[:, 0] - step_s - layers * layer_s, prefill)
    return none.replace(
        step_s=step_s,
        layer_s=layer_s,
        prefill_step_s=prefill_step_s,
        source=f"{len(timings)} small decoders timed on this machine, less their kernels",
    )


def kernel_seconds(calibration: Calibration, decoder: Decoder) -> tuple[float, float]:
    """What a calibration predicts of a prefill and of a decode step at the mean context of the timing."""
    model = ModelSpec.from_config(decoder.hugging_face())
    machine = default_instance_type(calibration.gpu)
    replica = make_replica(
        model,
        machine,
        calibration,
        tensor_parallel=1,
        pipeline_parallel=1,
        schedule="static",
        engine=ENGINE,
        estimator="calibrated",
        gpu_memory_utilization=0.9,
    )
    estimator = CalibratedEstimator(replica.problem)
    whole = (0, model.layer_count)
    context = decoder.input_tokens + decoder.output_tokens / 2
    prompts = step_work(prompts=decoder.batch, prompt_tokens=decoder.input_tokens)
    tokens = step_work(sequences=decoder.batch, context=context)
    prefill, decode = (estimator.stage_step_s(model, machine, whole, 1, work) for work in (prompts, tokens))
    return float(prefill[0]), float(decode[0])


def _not_negative(layers: FloatArray, left: FloatArray, scale: FloatArray) -> tuple[float, float]:
    from scipy.optimize import nnls

    terms = np.stack([np.ones_like(layers), layers], axis=1)
    step_s, layer_s = nnls(terms / scale[:, None], left / scale)[0]
    return float(step_s), float(layer_s)
