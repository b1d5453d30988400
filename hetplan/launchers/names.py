"""Names from plans, fit to become arguments, file names or neither."""

from __future__ import annotations

import shlex

from hetplan.errors import InvalidInputError

_MAX_LENGTH = 512


def argument(value: str, what: str) -> str:
    """A value fit to be a command-line argument.

    Raises
    ------
    InvalidInputError
        If it is empty, too long, begins with a dash or holds control characters.
    """
    if not value or len(value) > _MAX_LENGTH:
        raise InvalidInputError(f"{what} has {len(value)} characters; 1 to {_MAX_LENGTH} can be launched")
    if value.startswith("-"):
        raise InvalidInputError(f"{what} {value!r} begins with a dash and would be read as an option; rename it")
    if not value.isprintable():
        raise InvalidInputError(f"{what} {value!r} holds control characters; remove them")
    return value


def node_name(value: str) -> str:
    """A node's or machine's name: as `argument`, and without slashes."""
    argument(value, "node name")
    if "/" in value or "\\" in value:
        raise InvalidInputError(f"node name {value!r} holds a slash; rename it")
    return value


def quoted(value: str) -> str:
    """A value as one word of a shell."""
    return shlex.quote(value)


def comment(value: str) -> str:
    """A value as part of a one-line comment: printable characters only."""
    return "".join(c if c.isprintable() else "?" for c in value)
