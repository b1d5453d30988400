"""Allocation problems in files: tables of CSV, and one JSON or YAML document."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hetplan.base import Frozen
from hetplan.errors import InvalidInputError, nearest_names
from hetplan.files import MAX_BYTES, read_csv_rows, read_json, read_yaml, yaml_text
from hetplan.problem.allocation import AllocationProblem, Configuration, QueryDemand, ServedModel, Tier
from hetplan.units import GB, KB, MIB, format_bytes

Record = TypeVar("Record", bound=Frozen)

MAX_JSON_BYTES = 64 * MIB
_MAX_CSV_BYTES = 16 * MIB
_YAML_ENDINGS = (".yaml", ".yml")

# Of each table: the columns it needs and may have; and the fields with a column for each model or query type.
_QUERY_NEEDS = (
    "name", "input_tokens", "output_tokens", "requests_per_hour", "delay_limit_s", "error_limit", "delay_usd_per_ms",
    "unserved_usd",
)  # fmt: skip
_QUERY_MAY = ("ttft_limit_s", "storage_kb_per_token", "slowness", "max_unserved")
_MODEL_NEEDS = ("name", "weight_gb", "kv_bytes_per_token", "gflop_per_token")
_MODEL_MAY = ("activation_bytes_per_token", "layers")
_TIER_NEEDS = ("name", "gpu", "memory_gb", "bandwidth_gb_per_s", "tflops", "usd_per_hour")
_TIER_MAY = ("weight_dtype", "weight_scale", "error_factor", "link_gb_per_s", "link_latency_s")
_CONFIGURATION_NEEDS = ("model", "tier", "tensor_parallel", "pipeline_parallel", "machines", "usd_per_hour")
_CONFIGURATION_EACH = ("delay_s", "ttft_s", "capacity_per_hour")


def from_tables(folder: Path, *, budget_usd: float, **fields: Any) -> AllocationProblem:
    """See `AllocationProblem.from_tables`."""
    known = set(AllocationProblem.model_fields) - {"kind", "query_types", "models", "tiers", "configurations"}
    for name in fields:
        if name not in known:
            near = ", ".join(nearest_names(name, known)) or ", ".join(sorted(known))
            raise InvalidInputError(f"from_tables has no {name!r}. Nearest: {near}")
    models = list(_records(ServedModel, folder / "models.csv", _MODEL_NEEDS, _MODEL_MAY))
    names = [model.name for model in models]
    queries = list(_records(QueryDemand, folder / "query_types.csv", _QUERY_NEEDS, _QUERY_MAY, each={"errors": names}))
    tiers = list(_records(Tier, folder / "tiers.csv", _TIER_NEEDS, _TIER_MAY))
    given: list[Configuration] = []
    if (folder / "configurations.csv").exists():
        each = {field: [query.name for query in queries] for field in _CONFIGURATION_EACH}
        indices = {"model": names, "tier": [tier.name for tier in tiers]}
        given = list(
            _records(Configuration, folder / "configurations.csv", _CONFIGURATION_NEEDS, (), each=each, indices=indices)
        )
    if "storage_capacity_gb" not in fields:
        traffic = math.fsum(q.storage_kb_per_token * KB / GB * q.tokens * q.requests_per_hour for q in queries)
        copies = len(tiers) * len(queries)
        fields["storage_capacity_gb"] = traffic + math.fsum(model.weight_gb for model in models) * copies
    return AllocationProblem(
        query_types=tuple(queries),
        models=tuple(models),
        tiers=tuple(tiers),
        configurations=tuple(given),
        budget_usd=budget_usd,
        **{"storage_usd_per_gb_hour": 0.0, **fields},
    )


def _records(
    kind: type[Record],
    path: Path,
    needs: Sequence[str],
    may: Sequence[str],
    *,
    each: Mapping[str, Sequence[str]] | None = None,
    indices: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Record]:
    """The rows of a table as records.

    ``each`` gives the fields that have a column for each of some names, ``indices`` those where a name stands for its
    place in a list.
    """
    each, indices = each or {}, indices or {}
    columns = [f"{field}:{name}" for field, names in each.items() for name in names]
    seen: dict[str, int] = {}
    for line, row in read_csv_rows(path, (*needs, *columns), may, max_bytes=_MAX_CSV_BYTES):
        where = f"{path}, line {line}"
        values: dict[str, Any] = {name: row[name] for name in (*needs, *may) if row.get(name)}
        for field, names in indices.items():
            if row[field] not in names:
                near = ", ".join(nearest_names(row[field], names)) or ", ".join(names)
                raise InvalidInputError(f"{where}, column {field}: no {field} {row[field]!r}. Nearest: {near}")
            values[field] = names.index(row[field])
        for field, names in each.items():
            values[field] = tuple(row[f"{field}:{name}"] for name in names)
        try:
            one = kind.from_dict(values)
        except InvalidInputError as error:
            raise InvalidInputError("\n".join(_located(str(error), where, kind.__name__, each))) from None
        # A row is known by its name; configurations, which have none, by their line.
        name = row.get("name", str(line))
        if name in seen:
            raise InvalidInputError(f"{where}, column name: {name!r} is in line {seen[name]} already; rename one")
        seen[name] = line
        yield one
    if not seen:
        raise InvalidInputError(f"{path}: no rows below the header; give at least one")


def _located(said: str, where: str, kind: str, each: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Lines such as ``QueryDemand.errors.2: ...`` with the file, line and column in front."""
    for line in said.splitlines():
        field, _, problem = line.removeprefix(f"{kind}.").partition(": ")
        name, _, number = field.partition(".")
        if name in each and number.isdecimal():
            field = f"{name}:{each[name][int(number)]}"
        yield f"{where}, column {field}: {problem}"


def save(problem: AllocationProblem, path: Path) -> None:
    """See `AllocationProblem.save`."""
    ending = path.suffix.lower()
    if ending == ".json":
        text = problem.model_dump_json(indent=1) + "\n"
    elif ending in _YAML_ENDINGS:
        text = yaml_text(problem.model_dump(mode="json", exclude_defaults=True) | {"kind": problem.kind})
        size = len(text.encode("utf-8"))
        if size > MAX_BYTES:
            raise InvalidInputError(
                f"{path}: {format_bytes(size)} as YAML, of which at most {format_bytes(MAX_BYTES)} are read. Save it "
                "as .json"
            )
    else:
        raise InvalidInputError(f"{path}: a problem is saved as .json, .yaml or .yml; choose one")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be written: {error.strerror}. Check the path") from None


def load(path: Path) -> AllocationProblem:
    """See `AllocationProblem.load`."""
    content = read_document(path)
    if content.get("kind", "allocation") != "allocation":
        raise InvalidInputError(f"{path}: kind is {content['kind']!r}; an allocation problem has kind: allocation")
    return from_content(content, path)


def read_document(path: Path) -> dict[str, Any]:
    """The content of a JSON or YAML file."""
    return read_json(path, MAX_JSON_BYTES) if path.suffix.lower() == ".json" else read_yaml(path)


def from_content(content: Mapping[str, Any], path: Path) -> AllocationProblem:
    """A whole problem from a file's content, with errors that name the file."""
    try:
        return AllocationProblem.from_dict(dict(content))
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None
