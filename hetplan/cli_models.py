"""Paths and ids of models, as they are given on the command line."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hetplan.errors import InvalidInputError


def models_given(given: Sequence[str], models: Collection[str]) -> str | dict[str, str] | None:
    """What engines load: one path or id as it stands, or each by the name of one of the plan's models."""
    named = {name: path for name, is_named, path in (one.partition("=") for one in given) if is_named}
    if len(given) == 1 and not named.keys() & set(models):
        return given[0]
    if len(named) < len(given):
        raise InvalidInputError(
            f"--model is given {len(given)} times: {', '.join(given)}. Say NAME=PATH in each, every name once"
        )
    return named or None
