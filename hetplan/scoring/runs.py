"""Measured runs of whole replicas: the project's own table form, and the forms that others publish."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hetplan.base import Frozen
from hetplan.catalog.dtypes import Dtype
from hetplan.catalog.models import get_model
from hetplan.catalog.tables import get_gpu
from hetplan.errors import InvalidInputError
from hetplan.files import parse_csv, read_text
from hetplan.units import MIB

Metric = Literal["ttft_s", "tpot_s", "latency_s", "output_tokens_per_s"]
Schedule = Literal["static", "in_flight", "closed_loop"]
Row = dict[str, str]
Reader = Callable[[str, int, Row], Iterator["MeasuredRun"]]

# Measured tables are larger than configuration files.
MAX_TABLE_BYTES = 64 * MIB

OWN_COLUMNS = [
    "gpu",
    "model",
    "tensor_parallel",
    "pipeline_parallel",
    "batch",
    "input_tokens",
    "output_tokens",
    "schedule",
    "engine",
    "weight_dtype",
    "kv_dtype",
    "metric",
    "value",
]
OPTIONAL_COLUMNS = frozenset({"engine", "weight_dtype", "kv_dtype", "pipeline_parallel"})


class MeasuredRun(Frozen):
    """One figure of one run, SI units. ``group`` is what it is scored with, ``excluded`` why it is not scored."""

    table: str
    line: int
    group: str
    gpu: str
    model: str
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    batch: Annotated[float, Field(ge=1)]
    input_tokens: Annotated[float, Field(gt=0)]
    output_tokens: Annotated[float, Field(gt=0)]
    schedule: Schedule
    engine: str | None = None
    weight_dtype: Dtype | None = None
    kv_dtype: Dtype | None = None
    metric: Metric
    value: Annotated[float, Field(gt=0)]
    excluded: str | None = None


def form_of(header: Collection[str]) -> Reader | None:
    """What reads the rows of a table with these columns; None where no form is known."""
    return next((reader for columns, reader in _FORMS if columns <= set(header)), None)


def read_runs(path: Path) -> list[MeasuredRun]:
    """The runs of a table whose form is known by its header.

    Raises
    ------
    InvalidInputError
        If the form is unknown; the columns of the project's own form are listed. If a value is wrong; the line is
        named.
    """
    text = read_text(path, MAX_TABLE_BYTES)
    header = [name.strip() for name in text.split("\n", 1)[0].split(",")]
    reader = form_of(header)
    if reader is None:
        raise InvalidInputError(
            f"{path}: no known table of measured runs has the columns {', '.join(sorted(header))}. "
            f"Own runs: {','.join(OWN_COLUMNS)}; {', '.join(sorted(OPTIONAL_COLUMNS))} may be left out"
        )
    found: list[MeasuredRun] = []
    for line, row in parse_csv(text, str(path), sorted(set(header))):
        try:
            found += reader(path.name, line, row)
        except ValueError as error:
            raise InvalidInputError(f"{path}, line {line}: {error}") from None
    return found


# --- the project's own form -------------------------------------------------------------------------------------------


def _own(table: str, line: int, row: Row) -> Iterator[MeasuredRun]:
    given = {name: row[name] for name in OWN_COLUMNS if row.get(name, "")}
    label = f"{table}: {row['schedule']} {row['metric']}"
    yield MeasuredRun.from_dict({"table": table, "line": line, "group": label, **given})


# --- forms that others publish ----------------------------------------------------------------------------------------

# TensorRT-LLM's performance overview; Llama 1 and 2 share their shapes, 3 and 3.1 too. Its in-flight runs of Mistral 7B
# at 20,000 tokens are as fast as Llama 8B's: they used no sliding window, as v0.3 has none.
_TRTLLM_MODELS = {
    "GPT-J 6B": "gpt-j-6b",
    "LLaMA 7B": "llama-2-7b",
    "LLaMA 70B": "llama-2-70b",
    "Mistral 7B": "mistral-7b",
    "LLaMA v3 70B": "llama-3.1-70b",
    "LLaMA v3.1 70B": "llama-3.1-70b",
    "LLaMA v3.1 8B": "llama-3.1-8b",
}
_TRTLLM_GPUS = {"A100": "A100-SXM4-80GB", "A100-SXM": "A100-SXM4-80GB", "A100-PCIE": "A100-PCIE-80GB"}
_SILICON_SYSTEMS = {"h100_sxm": "H100-SXM5-80GB", "h200_sxm": "H200-SXM-141GB", "a100_sxm": "A100-SXM4-80GB"}
_SPLITWISE_GPUS = {"a100-80gb": "A100-SXM4-80GB", "h100-80gb": "H100-SXM5-80GB"}

# In-flight runs state no batch: what the KV cache holds at this share of memory.
IN_FLIGHT_MEMORY_SHARE = 0.9
IN_FLIGHT_MIN_BATCH = 32


def _trtllm_static(table: str, line: int, row: Row) -> Iterator[MeasuredRun]:
    eight = row["precision"] == "FP8"
    first_token = row["metric"] == "ttft_ms"
    degree = int(row["tp"])
    excluded = None
    if row["gpu"] == "L40S" and degree > 1:
        excluded = "L40S in groups: the collectives table is another host's, without peer-to-peer beyond pairs"
    yield MeasuredRun(
        table=table,
        line=line,
        group="TTFT at batch 1 (TensorRT-LLM 0.9)" if first_token else "static throughput (TensorRT-LLM 0.9)",
        gpu=_TRTLLM_GPUS.get(row["gpu"], row["gpu"]),
        model=_known(_TRTLLM_MODELS, row["model"]),
        tensor_parallel=degree,
        batch=int(row["batch"]),
        input_tokens=int(row["isl"]),
        output_tokens=int(row["osl"]),
        schedule="static",
        engine=f"tensorrt-llm-{row['trtllm_version'].rsplit('.', 1)[0]}",
        weight_dtype="fp8" if eight else None,
        kv_dtype="fp8" if eight else None,
        metric="ttft_s" if first_token else "output_tokens_per_s",
        value=float(row["value"]) * (1e-3 if first_token else 1),
        excluded=excluded,
    )


def in_flight_batch(gpu: str, model: str, degree: int, tokens: int, *, eight_bits: bool) -> int:
    """Sequences of so many tokens that fit the KV cache at 0.9 of the memory; activations left out."""
    dtype: Dtype | None = "fp8" if eight_bits else None
    spec = get_model(model).with_dtypes(weight_dtype=dtype, kv_dtype=dtype)
    left = IN_FLIGHT_MEMORY_SHARE * get_gpu(gpu).memory_bytes - spec.weight_bytes / degree
    return int(left / spec.kv_bytes_per_token(degree) / tokens)


def _trtllm_in_flight(table: str, line: int, row: Row) -> Iterator[MeasuredRun]:
    eight, degree = row["precision"] == "FP8", int(row["tp"])
    gpu = _TRTLLM_GPUS.get(row["gpu"], {"H100": "H100-SXM5-80GB"}.get(row["gpu"], row["gpu"]))
    model = _known(_TRTLLM_MODELS | {"Mistral 7B": "mistral-7b-v0.3"}, row["model"])
    batch = in_flight_batch(gpu, model, degree, int(row["isl"]) + int(row["osl"]), eight_bits=eight)
    excluded = None
    sort = "TP1" if degree == 1 else "TP2 to TP8"
    if gpu == "A100-PCIE-80GB":
        sort = "A100 PCIe, TP1, from A100 SXM's calibration"
    if batch < IN_FLIGHT_MIN_BATCH:
        excluded = f"fewer than {IN_FLIGHT_MIN_BATCH} sequences in flight: the batch is not known well enough"
    elif gpu == "A100-PCIE-80GB" and degree > 1:
        excluded = "A100 PCIe in groups: its host's collectives were not measured"
    yield MeasuredRun(
        table=table,
        line=line,
        group=f"in-flight throughput (TensorRT-LLM 0.14), {sort}",
        gpu=gpu,
        model=model,
        tensor_parallel=degree,
        batch=max(1, batch),
        input_tokens=int(row["isl"]),
        output_tokens=int(row["osl"]),
        schedule="in_flight",
        engine=f"tensorrt-llm-{row['trtllm_version'].rsplit('.', 1)[0]}",
        weight_dtype="fp8" if eight else None,
        kv_dtype="fp8" if eight else None,
        metric="output_tokens_per_s",
        value=float(row["value"]),
        excluded=excluded,
    )


def _silicon(table: str, line: int, row: Row) -> Iterator[MeasuredRun]:
    """Closed loops: the mean TPOT of a whole replica. TTFT is left out: it holds the queue of the start."""
    engines = {"trtllm": "tensorrt-llm-1.0", "vllm": "vllm", "sglang": "sglang"}
    system = row["system"]
    outlier = row["model_path"] == "nvidia/Llama-3.1-8B-Instruct-FP8"
    eight = row["precision"].startswith("fp8")
    known = "H100" if system == "h100_sxm" else "H200, from H100's calibration"
    yield MeasuredRun(
        table=table,
        line=line,
        group=f"closed-loop TPOT, {'Llama-3.1-8B-FP8 (outliers)' if outlier else known}",
        gpu=_known(_SILICON_SYSTEMS, system),
        model=_silicon_model(row["model_path"]),
        tensor_parallel=int(row["tp_size"]),
        pipeline_parallel=int(row["pp_size"]),
        batch=int(row["concurrency"]),
        input_tokens=int(row["isl"]),
        output_tokens=int(row["osl"]),
        schedule="closed_loop",
        engine=_known(engines, row["backend"]),
        weight_dtype="fp8" if eight else None,
        metric="tpot_s",
        value=float(row["tpot_ms"]) * 1e-3,
    )


def _silicon_model(path: str) -> str:
    return path.rsplit("/", maxsplit=1)[-1].lower().removesuffix("-fp8").removesuffix("-instruct")


def _splitwise(table: str, line: int, row: Row) -> Iterator[MeasuredRun]:
    shared = {
        "table": table,
        "line": line,
        "gpu": _known(_SPLITWISE_GPUS, row["gpu"]),
        "model": {"llama2-70b": "llama-2-70b"}.get(row["model"], row["model"]),
        "tensor_parallel": int(row["tp"]),
        "batch": int(row["batch"]),
        "input_tokens": int(row["isl"]),
        "output_tokens": int(row["osl"]),
        "schedule": "static",
        "engine": "vllm-2023",
    }
    several = row["batch"] == "64" and row["tp"] == "2"
    yield MeasuredRun(**shared, group="static TPOT (vLLM of 2023)", metric="tpot_s", value=float(row["tpot_ms"]) * 1e-3)
    yield MeasuredRun(
        **shared,
        group="static TTFT (vLLM of 2023)",
        metric="ttft_s",
        value=float(row["prefill_ms"]) * 1e-3,
        excluded="the prompt was split over several passes" if several else None,
    )


def _known(names: dict[str, str], name: str) -> str:
    if name not in names:
        raise InvalidInputError(f"{name!r} is not known; known: {', '.join(names)}")
    return names[name]


_FORMS: list[tuple[frozenset[str], Reader]] = [
    (frozenset(OWN_COLUMNS) - OPTIONAL_COLUMNS, _own),
    (
        frozenset(["trtllm_version", "gpu", "precision", "model", "batch", "tp", "isl", "osl", "metric", "value"]),
        _trtllm_static,
    ),
    (
        frozenset(["trtllm_version", "gpu", "precision", "model", "tp", "isl", "osl", "metric", "value"]),
        _trtllm_in_flight,
    ),
    (
        frozenset(
            [
                "backend",
                "model_path",
                "system",
                "precision",
                "isl",
                "osl",
                "concurrency",
                "tp_size",
                "pp_size",
                "ttft_ms",
                "tpot_ms",
            ]
        ),
        _silicon,
    ),
    (frozenset(["model", "gpu", "tp", "isl", "batch", "osl", "prefill_ms", "tpot_ms", "e2e_ms"]), _splitwise),
]
