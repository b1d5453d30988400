"""Models by name: the configurations of well-known models, without their weights.

A short name such as ``llama-3.1-70b`` or a Hugging Face id, in any case, gives the `ModelSpec` that
the model's own config.json gives. The rows are in data/models.json, each with its source. Ids of one
row differ at most in the keys that are listed beside the id.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from hetplan.catalog.config_reader import read_config
from hetplan.catalog.model import ModelSpec
from hetplan.errors import UnknownNameError

__all__ = ["MODELS", "get_model", "hugging_face_id", "list_models"]


def get_model(name: str) -> ModelSpec:
    """A model by short name, Hugging Face id, or path.

    Parameters
    ----------
    name : str
        A short name (``"llama-3.1-70b"``), a Hugging Face id (``"Qwen/Qwen3-32B"``), both in any case,
        or a path to a config.json or to a folder that holds one.

    Returns
    -------
    ModelSpec

    Raises
    ------
    UnknownNameError
        If it is neither; the nearest names are listed.
    InvalidInputError
        If it is a path to something that is not a usable configuration.

    Examples
    --------
    >>> get_model("llama-3.1-8b").parameter_count
    8030261248
    """
    names = _names()
    key = names.get(name.lower())
    if key is not None:
        return _catalogued(*key)
    if name and Path(name).exists():
        return read_config(name)
    raise _unknown(name)


def hugging_face_id(name: str) -> str:
    """The Hugging Face id that engines load a catalogued model by.

    Parameters
    ----------
    name : str
        A short name, which gives the row's first id, or an id in any case.

    Returns
    -------
    str

    Raises
    ------
    UnknownNameError
        If the catalogue does not have it.

    Examples
    --------
    >>> hugging_face_id("qwen3-32b")
    'Qwen/Qwen3-32B'
    """
    key = _names().get(name.lower())
    if key is None:
        raise _unknown(name)
    ids: list[str] = list(_rows()[key[0]]["hf_ids"])
    return next((hf_id for hf_id in ids if hf_id.lower() == name.lower()), ids[0])


def _unknown(name: str) -> UnknownNameError:
    rows = _rows()
    known = [*rows, *(hf_id for row in rows.values() for hf_id in row["hf_ids"])]
    return UnknownNameError("model", name, known, hint="Or give the path of its config.json.")


def list_models() -> tuple[str, ...]:
    """Short names of all catalogued models, sorted.

    Returns
    -------
    tuple of str
    """
    return tuple(sorted(_rows()))


class _Models(Mapping[str, ModelSpec]):
    """Short name -> ModelSpec, each read when first asked for."""

    def __getitem__(self, name: str) -> ModelSpec:
        if name not in _rows():
            raise KeyError(name)
        return _catalogued(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(list_models())

    def __len__(self) -> int:
        return len(_rows())


MODELS: Mapping[str, ModelSpec] = _Models()


@cache
def _rows() -> dict[str, dict[str, Any]]:
    text = resources.files("hetplan.catalog").joinpath("data/models.json").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = json.loads(text)
    return rows


@cache
def _names() -> dict[str, tuple[str, str | None]]:
    """Lower-case name -> its row, and the id whose keys differ from the row's."""
    names: dict[str, tuple[str, str | None]] = {}
    for short, row in _rows().items():
        names[short] = (short, None)
        for hf_id, changes in row["hf_ids"].items():
            names[hf_id.lower()] = (short, hf_id if changes else None)
    return names


@cache
def _catalogued(short: str, hf_id: str | None) -> ModelSpec:
    row = _rows()[short]
    changes = row["hf_ids"][hf_id] if hf_id else {}
    return read_config(row["config"] | changes, name=hf_id or short, source=row["source"])
