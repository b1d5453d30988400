"""Every exception that hetplan raises on purpose.

::

    HetplanError
    |-- InvalidInputError (also ValueError)      bad value, file or option          exit code 2
    |   |-- UnknownNameError                     no such model, GPU, instance ...   exit code 2
    |   |-- UnsupportedModelError                a config.json with parts not modelled
    |   |-- UnsupportedFeatureError              a documented thing that is not there yet
    |   `-- SchemaVersionError                   a file written for another schema
    |-- InfeasibleError                          no plan can exist; .reasons says why      exit code 3
    |-- NoSolutionError                          none found, none ruled out                exit code 5
    |-- RouterError                              refused by a router, or it is gone             exit code 2
    `-- StoreError                               refused by a tensor store, or it is gone      exit code 2
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "HetplanError",
    "InfeasibleError",
    "InvalidInputError",
    "NoSolutionError",
    "Reason",
    "RouterError",
    "SchemaVersionError",
    "StoreError",
    "UnknownNameError",
    "UnsupportedFeatureError",
    "UnsupportedModelError",
]


class HetplanError(Exception):
    """Base of all hetplan errors."""


class InvalidInputError(HetplanError, ValueError):
    """A value, file or option is wrong. The message gives the value, the limit and the next step.

    Where a record of some type has wrong fields, ``record`` is the type's name, and each line of the message begins
    with it.
    """

    record: str | None = None


class UnknownNameError(InvalidInputError):
    """A name is not in the catalogue.

    Parameters
    ----------
    kind : str
        What was looked up, such as ``"GPU"``.
    name : str
        The name as given.
    known : iterable of str
        The names that would have worked; the nearest are listed.
    hint : str, optional
        What to do when none of them is meant.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        self.kind = kind
        self.name = name
        known = tuple(known)
        self.nearest = nearest_names(name, known)
        self._known = known
        self._hint = hint
        listed = ", ".join(self.nearest) or "none is known"
        super().__init__(f"unknown {kind} {name!r}. Nearest: {listed}." + (f" {hint}" if hint else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.kind, self.name, self._known, self._hint))


class UnsupportedModelError(InvalidInputError):
    """A model configuration has parts that are not modelled; ``.features`` names them."""

    def __init__(self, model: str, features: Sequence[str]) -> None:
        self.model = model
        self.features = tuple(features)
        super().__init__(f"{model}: not modelled: {'; '.join(self.features)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.model, self.features))


class UnsupportedFeatureError(InvalidInputError):
    """A documented option that this version does not answer yet."""


class SchemaVersionError(InvalidInputError):
    """A file has another schema version than the one this hetplan reads."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why no plan exists: one limit, and how far it is missed.

    Attributes
    ----------
    constraint : str
        The limit's name, such as ``"memory"`` or ``"tensor_parallel"``.
    subject : str
        What it applies to: a model, an instance type, the cluster.
    needed, available : float
        Both in ``unit``.
    unit : str
        Unit of the two numbers.
    """

    constraint: str
    subject: str
    needed: float
    available: float
    unit: str

    def __str__(self) -> str:
        return (
            f"{self.constraint}: {self.subject} needs {self.needed:,.4g} {self.unit}, "
            f"{self.available:,.4g} {self.unit} available"
        )


class InfeasibleError(HetplanError):
    """No plan satisfies the problem. ``.reasons`` lists each limit with the shortfall."""

    def __init__(self, message: str, reasons: Sequence[Reason]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (str(self), self.reasons))


class NoSolutionError(HetplanError):
    """The search ended without a plan and without a proof that none exists."""


class RouterError(HetplanError):
    """A router refused what it was asked, or did not answer. ``.status`` is its answer's, None where there was none."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (str(self), self.status))


class StoreError(HetplanError):
    """A tensor store refused a request, or cannot be reached.

    Parameters
    ----------
    code : str
        What happened, for programs: ``"no_room"``, ``"corrupted"``, ``"store_gone"`` and so on.
    message : str
        The same for people, with the values.
    """

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.code, str(self)))


def nearest_names(name: str, known: Iterable[str], limit: int = 5) -> tuple[str, ...]:
    """The known names closest to ``name``, best first: containing it, then by edit distance."""
    names = sorted(set(known))
    lowered = name.lower()
    inside = [n for n in names if lowered and lowered in n.lower()]
    by_lower = {n.lower(): n for n in names}
    close = [by_lower[n] for n in difflib.get_close_matches(lowered, by_lower, n=limit, cutoff=0.4)]
    return tuple(dict.fromkeys([*inside, *close]))[:limit]
