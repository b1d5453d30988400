"""Keys by identity, for caches of frozen records: comparing whole specs costs more than a prediction."""

from __future__ import annotations

from typing import Any


class Same:
    """A record as a key: equal to itself alone. Holding it keeps the record, so that its identity stays its own."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value
