"""Problems written as YAML: the arguments of `hetplan.optimize`, with paths relative to the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hetplan.catalog.calibration import Calibration
from hetplan.catalog.clusters import cluster_from_dict, cluster_from_file
from hetplan.catalog.model import ModelSpec
from hetplan.errors import InvalidInputError, nearest_names
from hetplan.files import read_yaml
from hetplan.workload.requests import Slo, Workload
from hetplan.workload.traces import read_trace

# Keys that pass to `optimize` as they are; it checks their values.
_PLAIN_KEYS = (
    "objective",
    "solver",
    "solver_options",
    "estimator",
    "time_limit_s",
    "seed",
    "latency_penalty",
    "engine",
    "max_model_len",
    "weight_dtype",
    "kv_dtype",
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_num_batched_tokens",
)
_KEYS = ("model", "cluster", "workload", "slo", "calibrations", *_PLAIN_KEYS)


def read_problem_file(path: str | Path) -> dict[str, Any]:
    """Read a problem file.

    Parameters
    ----------
    path : path
        YAML with the keys ``model``, ``cluster``, ``workload`` and, optionally, ``slo``, ``calibrations`` and any
        option of `hetplan.optimize`. ``model`` is a name or a path to a config.json; ``cluster`` a path to a cluster
        file or its content; ``workload`` its fields, or ``trace`` (a path) with ``max_input_tokens``;
        ``calibrations`` a list of paths to calibration files.

    Returns
    -------
    dict
        Keyword arguments for `hetplan.optimize`.

    Raises
    ------
    InvalidInputError
        For unknown or missing keys and bad values.
    """
    file = Path(path)
    content = read_yaml(file)
    for key in content:
        if key not in _KEYS:
            near = ", ".join(nearest_names(key, _KEYS)) or ", ".join(_KEYS)
            raise InvalidInputError(f"{path}: unknown key {key!r}. Nearest: {near}")
    for key in ("model", "cluster", "workload"):
        if key not in content:
            raise InvalidInputError(f"{path}: no {key!r}; a problem needs model, cluster and workload")
    arguments: dict[str, Any] = {key: content[key] for key in _PLAIN_KEYS if key in content}
    arguments["model"] = _model(content["model"], file)
    arguments["cluster"] = _cluster(content["cluster"], file)
    arguments["workload"] = _workload(content["workload"], file)
    if content.get("slo") is not None:
        arguments["slo"] = Slo.from_dict(content["slo"])
    if content.get("calibrations") is not None:
        paths = content["calibrations"]
        if not isinstance(paths, list) or not all(isinstance(name, str) for name in paths):
            raise InvalidInputError(f"{path}: calibrations is a list of paths, got {paths!r}")
        arguments["calibrations"] = read_calibrations(file.parent / name for name in paths)
    return arguments


def read_calibrations(paths: Iterable[str | Path]) -> dict[str, Calibration]:
    """Calibration files by GPU.

    Raises
    ------
    InvalidInputError
        If one cannot be read or was changed, or two are of the same GPU.
    SchemaVersionError
        If one has another schema version.
    """
    found: dict[str, Calibration] = {}
    for path in paths:
        calibration = Calibration.load(path)
        if calibration.gpu in found:
            raise InvalidInputError(f"{path}: a second calibration of {calibration.gpu}; give one for each GPU")
        found[calibration.gpu] = calibration
    return found


def _model(value: object, file: Path) -> ModelSpec:
    if isinstance(value, Mapping):
        return ModelSpec.from_config(value)
    if not isinstance(value, str):
        raise InvalidInputError(f"{file}: model is a name, a path or a configuration, got {value!r}")
    beside = file.parent / value
    return ModelSpec.from_config(beside) if beside.exists() else ModelSpec.get(value)


def _cluster(value: object, file: Path) -> Any:
    if isinstance(value, str):
        return cluster_from_file(file.parent / value)
    if not isinstance(value, Mapping):
        raise InvalidInputError(f"{file}: cluster is a path or a mapping with machines or offers, got {value!r}")
    return cluster_from_dict(value)


def _workload(value: object, file: Path) -> Workload:
    if not isinstance(value, Mapping):
        raise InvalidInputError(f"{file}: workload is a mapping with input_tokens and output_tokens, or trace")
    if "trace" not in value:
        return Workload.from_dict(dict(value))
    unknown = set(value) - {"trace", "max_input_tokens", "prefix_cache_hit_rate", "requests_per_s"}
    if unknown:
        raise InvalidInputError(f"{file}: workload with a trace has no {sorted(unknown)[0]!r}")
    trace = read_trace(file.parent / str(value["trace"]), max_input_tokens=value.get("max_input_tokens"))
    workload = Workload.from_trace(trace, prefix_cache_hit_rate=value.get("prefix_cache_hit_rate", 0.0))
    if "requests_per_s" in value:
        (one,) = workload.query_types
        workload = Workload(query_types=[one.replace(requests_per_s=value["requests_per_s"])])
    return workload
