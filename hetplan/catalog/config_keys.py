"""Reading JSON strictly, and taking typed values out of it with errors that name file, key, value and limit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hetplan.errors import InvalidInputError
from hetplan.units import MIB, format_bytes

MAX_CONFIG_BYTES = 4 * MIB
MAX_INDEX_BYTES = 64 * MIB  # an index lists every tensor: DeepSeek-V3's has 9 MB
MAX_SIZE = 2**31 - 1
_SHOWN_LENGTH = 60
_T = TypeVar("_T")


def read_json_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON object; duplicate keys, NaN and oversized files are refused.

    Infinity is let through: shipped configurations hold it in keys that are not read here.
    """
    try:
        if not path.is_file():
            raise InvalidInputError(f"{path}: no such file. Give a config.json, or a folder that holds one")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise InvalidInputError(f"{path}: larger than {format_bytes(max_bytes)}; is it a configuration?")
        values = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_unique, parse_constant=_constant)
    except InvalidInputError:
        raise
    except RecursionError:
        raise InvalidInputError(f"{path}: nested too deeply to be a configuration") from None
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidInputError(f"{path}: a JSON object is needed at the top, got {type(values).__name__}")
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"key {twice[0]!r} appears twice in one object; remove one")
    return values


def _constant(text: str) -> float:
    if text == "NaN":
        raise ValueError("NaN is not a number that a configuration can hold")
    return float(text)


def shown(value: object) -> str:
    """A value as an error message shows it, cut when long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "..."


class Keys:
    """Typed access to one JSON object. A null value counts as absent, as transformers treats it."""

    def __init__(self, values: Mapping[str, Any], where: str, architecture: str) -> None:
        self.values = values
        self.where = where
        self.architecture = architecture

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def fault(self, key: str, value: object, limit: str) -> InvalidInputError:
        return InvalidInputError(f"{self.where}: {key} = {shown(value)}: {limit}")

    def optional_count(self, *spellings: str, minimum: int = 1, maximum: int = MAX_SIZE) -> int | None:
        """The whole number under any of the spellings; they must agree when several are there."""
        found: dict[str, int] = {}
        for key in spellings:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
                raise self.fault(key, value, f"a whole number from {minimum} to {maximum} is needed")
            found[key] = value
        if len(set(found.values())) > 1:
            raise InvalidInputError(f"{self.where}: spellings of one value disagree: {found}; keep the right one")
        return next(iter(found.values()), None)

    def count(self, *spellings: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """As `optional_count`; without a default, absence is an error that names the key."""
        value = self.optional_count(*spellings, minimum=minimum, maximum=maximum)
        if value is not None:
            return value
        if default is None:
            others = f" (or {', '.join(spellings[1:])})" if len(spellings) > 1 else ""
            raise InvalidInputError(
                f"{self.where}: missing key {spellings[0]!r}{others}, needed by {self.architecture}"
            )
        return default

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(key, value, "true or false is needed")
        return value

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fault(key, value, "a string is needed")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        return self._list(key, () if value is None else value, str, "a list of strings is needed")

    def counts(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        return self._list(key, () if value is None else value, int, "a list of whole numbers is needed")

    def section(self, key: str) -> Mapping[str, Any] | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.fault(key, value, "a JSON object is needed")
        return value

    def _list(self, key: str, value: object, kind: type[_T], limit: str) -> tuple[_T, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.fault(key, value, limit)
        for item in value:
            if not isinstance(item, kind) or isinstance(item, bool):
                raise self.fault(key, item, limit)
        return tuple(value)
