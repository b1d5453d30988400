"""Problems written as YAML: the arguments of `hetplan.optimize`, with paths relative to the file."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hetplan.catalog.calibration import Calibration
from hetplan.catalog.clusters import cluster_from_dict, cluster_from_file
from hetplan.catalog.model import ModelSpec
from hetplan.errors import InvalidInputError, nearest_names
from hetplan.problem.allocation import AllocationProblem, Decisions
from hetplan.problem.allocation_files import from_content, read_document
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
    "handover_sequences",
    "handover_layers",
    "handling",
)
_KEYS = ("model", "cluster", "workload", "slo", "calibrations", *_PLAIN_KEYS)
# Beside an allocation problem: how it is solved.
_SOLVING_KEYS = ("solver", "solver_options", "time_limit_s", "seed")


def read_problem_file(path: str | Path) -> dict[str, Any]:
    """Read a problem file.

    Parameters
    ----------
    path : path
        YAML with the keys ``model``, ``cluster``, ``workload`` and, optionally, ``slo``, ``calibrations`` and any
        option of `hetplan.optimize`. ``model`` is a name or a path to a config.json; ``cluster`` a path to a cluster
        file or its content; ``workload`` its fields, or ``trace`` (a path) with ``max_input_tokens``;
        ``calibrations`` a list of paths to calibration files.
        With ``kind: allocation`` an allocation problem and how it is solved: the arguments of
        `AllocationProblem.from_catalog`; or ``tables`` (a path) and the arguments of `AllocationProblem.from_tables`;
        or all of the problem, as `AllocationProblem.save` writes it.

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
    content = read_document(file)
    if content.get("kind") == "allocation":
        return _allocation(content, file)
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


def _allocation(content: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Keyword arguments for `hetplan.optimize` of an allocation problem in one of its three forms."""
    arguments = {key: content[key] for key in _SOLVING_KEYS if key in content}
    rest = {key: value for key, value in content.items() if key not in _SOLVING_KEYS}
    if "tables" in rest or "cluster" in rest:
        rest.pop("kind")
        # Errors of tables name their own file and line.
        try:
            make = _from_tables if "tables" in rest else _from_catalog
            return {"problem": make(rest, file), **arguments}
        except InvalidInputError as error:
            if not str(error).startswith(str(file.parent)):
                error.args = (f"{file}: {error}",)
            raise
    return {"problem": from_content(rest, file), **arguments}


def _from_tables(given: dict[str, Any], file: Path) -> AllocationProblem:
    folder = given.pop("tables")
    if not isinstance(folder, str):
        raise InvalidInputError(f"tables is the path of a folder, got {folder!r}")
    _refuse_keys(given, {"budget_usd"}, set(AllocationProblem.model_fields))
    return AllocationProblem.from_tables(file.parent / folder, **given)


def _from_catalog(given: dict[str, Any], file: Path) -> AllocationProblem:
    parameters = inspect.signature(AllocationProblem.from_catalog).parameters
    known = set(parameters) - {"estimator"}
    needed = {name for name in known if parameters[name].default is inspect.Parameter.empty}
    _refuse_keys(given, needed, known)
    for name in ("models", "query_types"):
        if not isinstance(given[name], list):
            raise InvalidInputError(f"{name} is a list, got {given[name]!r}")
    cluster = given["cluster"]
    counts = isinstance(cluster, Mapping) and not any(isinstance(v, (Mapping, list)) for v in cluster.values())
    given["cluster"] = cluster if counts else _cluster(cluster, file)
    given["models"] = [_named_model(one, file) for one in given["models"]]
    if isinstance(given.get("decisions"), Mapping):
        given["decisions"] = Decisions.from_dict(given["decisions"])
    return AllocationProblem.from_catalog(**given)


def _named_model(value: object, file: Path) -> Any:
    """A name stays one, as error rates are keyed by it."""
    return value if isinstance(value, str) and not (file.parent / value).exists() else _model(value, file)


def _refuse_keys(given: Mapping[str, Any], needed: set[str], known: set[str]) -> None:
    for key in given:
        if key not in known:
            near = ", ".join(nearest_names(key, known)) or ", ".join(sorted(known))
            raise InvalidInputError(f"unknown key {key!r}. Nearest: {near}")
    missing = sorted(needed - set(given))
    if missing:
        raise InvalidInputError(f"no {missing[0]!r}; give one")
