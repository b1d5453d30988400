"""The base of every type that crosses a file: frozen, no unknown keys, errors that name the field."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from hetplan.errors import InvalidInputError

_SHOWN_VALUE_LENGTH = 80


class Frozen(BaseModel):
    """An immutable record. Bad values raise `InvalidInputError` naming field, value and limit."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=False, protected_namespaces=()
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(error, type(self).__name__) from None

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read one record from JSON text, with errors that name the field."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise explain(error, cls.__name__) from None

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Read one record from plain data, with errors that name the field."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise explain(error, cls.__name__) from None

    def replace(self, **values: Any) -> Self:
        """A copy with some fields changed, checked again."""
        present = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**(present | values))


def explain(error: ValidationError, subject: str) -> InvalidInputError:
    """Turn pydantic's report into one line per fault: where, what was given, what is allowed."""
    lines = []
    faults = error.errors(include_url=False)
    if len(faults) > 1:
        # "too short after validation" only repeats that an item was refused.
        faults = [fault for fault in faults if fault["type"] != "too_short"] or faults
    for fault in faults:
        cause = fault.get("ctx", {}).get("error")
        where = ".".join([subject, *(str(part) for part in fault["loc"])])
        if isinstance(cause, InvalidInputError) and cause.record is not None:
            # A record inside this one has explained itself: its own name gives way to its place in this one.
            lines += [where + line.removeprefix(cause.record) for line in str(cause).splitlines()]
            continue
        if isinstance(cause, InvalidInputError):
            if len(faults) == 1:
                return cause
            lines.append(f"{where}: {cause}")
            continue
        message = fault["msg"].removeprefix("Value error, ")
        given = repr(fault["input"])
        if fault["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown key; remove it or check its spelling")
        elif fault["type"] == "missing":
            lines.append(f"{where}: missing; give a value")
        elif len(given) <= _SHOWN_VALUE_LENGTH:
            lines.append(f"{where}: {message} (got {given})")
        else:
            lines.append(f"{where}: {message}")
    failure = InvalidInputError("\n".join(lines))
    failure.record = subject
    return failure
