"""Helix's table of single decoder layers, on machines of one to four GPUs, against the estimators' layers.

The table states neither how its prompt tokens fall into prompts, nor the context of its decodes, nor its hosts:

- its times grow no faster than its prompt tokens, up to 7,500 of them, so they are several prompts;
- every row is scored under two assumptions, in groups of their own: prompts and contexts of 512 tokens, and those of
  the requests that Helix serves (Azure's conversations, prompts to 2,048 tokens: 763 tokens, and 879 in the middle of
  an answer of 232). Where KV is most of the time (the 30B model has no grouped KV heads), A100 and T4 alike show a
  context near the second;
- its machines are Google Cloud's: A100 is the 40 GB part, and pairs of L4 and T4 have no peer-to-peer, so they are
  taken to be as fast as the default PCIe host's groups beyond pairs, whose GPUs have none either.

Engine steps are not in the table, so no engine's overheads matter but the time to launch a layer's prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hetplan.catalog.calibration import Calibration
from hetplan.catalog.hardware import InstanceType
from hetplan.catalog.model import ModelSpec
from hetplan.catalog.models import get_model
from hetplan.catalog.tables import datasheet_calibration, default_instance_type, get_calibration, get_gpu
from hetplan.errors import InvalidInputError
from hetplan.estimator.bands import band_around
from hetplan.estimator.base import Estimator, FloatArray, LayerwiseEstimator
from hetplan.estimator.calibrated import CalibratedEstimator, step_work
from hetplan.estimator.replica import Replica, make_replica
from hetplan.files import read_csv_rows
from hetplan.problem.placement import EstimatorName
from hetplan.scoring.score import Scored, count_left_out

COLUMNS = ("model", "gpu", "tp", "phase", "tokens_or_requests", "layer_ms")
GPUS = {"A100": "A100-SXM4-40GB", "L4": "L4", "T4": "T4"}
MODELS = {"llama1_30b": "llama-1-30b", "llama2_70b": "llama-2-70b"}


class Assumed(NamedTuple):
    """What the table does not say: tokens of a prompt, and cached before a decoded token."""

    prompt_tokens: float
    context_tokens: float


ASSUMPTIONS = (Assumed(512, 512), Assumed(763, 763 + 232 / 2))

# Llama 1 paper, table 2; the family's vocabulary, positions and MLP width are those of its checkpoints.
_LLAMA_1_30B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 6656,
    "intermediate_size": 17920,
    "num_hidden_layers": 60,
    "num_attention_heads": 52,
    "num_key_value_heads": 52,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
}


class _Row(NamedTuple):
    line: int
    tokens: float
    seconds: float


def score_layers(
    path: Path, calibrations: Mapping[str, Calibration] | None = None
) -> tuple[list[Scored], dict[str, dict[str, int]]]:
    """Score a table of single layers.

    Parameters
    ----------
    path : Path
        CSV with the columns model, gpu, tp, phase, tokens_or_requests and layer_ms.
    calibrations : mapping of str to Calibration, optional
        By GPU name, instead of the shipped ones.

    Returns
    -------
    scored : list of Scored
        The shipped calibrations of L4 and T4 rest on some of these rows: the longest prompts and one decode on
        single GPUs. They are scored as well.
    left_out : dict of str to dict of str to int

    Raises
    ------
    InvalidInputError
        For a model, GPU, phase or number that is not known, naming the line.
    """
    alike: dict[tuple[str, str, int, str], list[_Row]] = {}
    left_out: dict[str, dict[str, int]] = {}
    for line, row in read_csv_rows(path, COLUMNS):
        try:
            key = (_known(MODELS, row["model"]), _known(GPUS, row["gpu"]), int(row["tp"]), row["phase"])
            if key[3] not in ("prefill", "decode"):
                raise InvalidInputError(f"phase is prefill or decode, not {key[3]!r}")
            found = _Row(line, float(row["tokens_or_requests"]), float(row["layer_ms"]) * 1e-3)
            if not (found.tokens > 0 and found.seconds >= 0):
                raise InvalidInputError("tokens_or_requests and layer_ms must be positive numbers")
        except ValueError as error:
            raise InvalidInputError(f"{path}, line {line}: {error}") from None
        if found.seconds == 0:
            for assumed in ASSUMPTIONS:
                count_left_out(left_out, _group(key, assumed), "rounded to 0 ms at source: no relative error")
        else:
            alike.setdefault(key, []).append(found)
    scored = []
    for key, rows in alike.items():
        for assumed in ASSUMPTIONS:
            scored += _score_alike(path.name, key, rows, calibrations or {}, assumed)
    return scored, left_out


def _known(names: Mapping[str, str], name: str) -> str:
    if name not in names:
        raise InvalidInputError(f"{name!r} is not known; known: {', '.join(names)}")
    return names[name]


def _group(key: tuple[str, str, int, str], assumed: Assumed) -> str:
    model, gpu, _, phase = key
    prefill = phase == "prefill"
    load = f"prompts of {assumed.prompt_tokens:g} tokens" if prefill else f"context {assumed.context_tokens:g} tokens"
    return f"Helix layer, {gpu}, {model}, {phase}, {load}"


@cache
def _spec(name: str) -> ModelSpec:
    return ModelSpec.from_config(_LLAMA_1_30B, name=name) if name == "llama-1-30b" else get_model(name)


def _host(gpu: str) -> InstanceType:
    """The default host, pairs without peer-to-peer where it is a PCIe host."""
    host = default_instance_type(gpu)
    if not host.name.startswith("default-pcie"):
        return host
    beyond = host.intra_node_links[4]
    pair = beyond.replace(source=f"pair without peer-to-peer, as four: {beyond.source}")
    return host.replace(name=f"{host.name} without peer-to-peer", intra_node_links=host.intra_node_links | {2: pair})


def _score_alike(
    table: str, key: tuple[str, str, int, str], rows: list[_Row], own: Mapping[str, Calibration], assumed: Assumed
) -> list[Scored]:
    """Rows of one model, machine and phase."""
    model, gpu, degree, phase = key
    spec, host = _spec(model), _host(gpu)
    shipped = own.get(gpu) or get_calibration(gpu)

    def replica(calibration: Calibration, estimator: EstimatorName) -> Replica:
        return make_replica(
            spec, host, calibration, tensor_parallel=degree, pipeline_parallel=1, schedule="static", engine=None,
            estimator=estimator, gpu_memory_utilization=1.0,
        )  # fmt: skip

    loads = np.array([row.tokens for row in rows])
    ours = replica(shipped, "calibrated")
    columns = {
        "datasheet": _roofline(
            replica(datasheet_calibration(get_gpu(gpu)), "paper").estimator, key, spec, host, loads, assumed
        ),
        "paper": _roofline(replica(shipped, "paper").estimator, key, spec, host, loads, assumed),
        "ours": _fitted(ours.estimator, key, spec, host, loads, assumed),
    }
    scored = []
    for at, row in enumerate(rows):
        values = {name: float(column[at]) for name, column in columns.items()}
        low, high, _ = band_around("ttft_s" if phase == "prefill" else "tpot_s", values["ours"], ours.quality)
        unit = "tokens" if phase == "prefill" else "requests"
        scored.append(
            Scored(
                group=_group(key, assumed),
                label=f"{table}:{row.line} {model} {gpu} TP{degree} {phase} {row.tokens:g} {unit}",
                measured=row.seconds,
                **values,
                low=low,
                high=high,
                source=ours.source,
                peers=(*key[:2], phase, row.tokens, assumed),
                gpus=degree,
                is_time=True,
            )
        )
    return scored


def _prompts(tokens: FloatArray, assumed: Assumed) -> FloatArray:
    return np.maximum(1.0, tokens / assumed.prompt_tokens)


def _fitted(
    estimator: Estimator,
    key: tuple[str, str, int, str],
    spec: ModelSpec,
    host: InstanceType,
    loads: FloatArray,
    assumed: Assumed,
) -> FloatArray:
    if not isinstance(estimator, CalibratedEstimator):
        raise TypeError(f"{type(estimator).__name__} has no steps")
    if key[3] == "prefill":
        prompts = _prompts(loads, assumed)
        work = step_work(prompts=prompts, prompt_tokens=loads / prompts)
    else:
        work = step_work(sequences=loads, context=assumed.context_tokens)
    return estimator.layer_step_s(spec, 0, host, key[2], work)


def _roofline(
    estimator: Estimator,
    key: tuple[str, str, int, str],
    spec: ModelSpec,
    host: InstanceType,
    loads: FloatArray,
    assumed: Assumed,
) -> FloatArray:
    """Table 2's layer: a batch of prompts, or one step at the context."""
    if not isinstance(estimator, LayerwiseEstimator):
        raise TypeError(f"{type(estimator).__name__} has no layers")
    seconds = []
    for tokens in loads.tolist():
        prompts = float(_prompts(np.array(tokens), assumed)) if key[3] == "prefill" else tokens
        found = estimator.layer_seconds(
            spec,
            0,
            host,
            tensor_parallel=key[2],
            batch=np.array([prompts]),
            input_tokens=tokens / prompts if key[3] == "prefill" else assumed.context_tokens - 1,
            output_tokens=1.0,
            phase="prefill" if key[3] == "prefill" else "decode",
        )
        seconds.append(float(found[0]))
    return np.array(seconds)
