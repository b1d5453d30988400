"""Whose turn it is, by shares that hold at every moment and not only in the long run."""

from __future__ import annotations

import math
from collections.abc import Mapping

# Owed shares that are equal but for rounding.
_ROUNDING = 1e-9


class Turns:
    """Turns by shares, as a schedule that never is a whole turn ahead or behind for anyone.

    Parameters
    ----------
    shares : mapping of str to float
        Above 0, in proportion to which turns are given.

    Notes
    -----
    Tijdeman's algorithm for the chairman assignment problem [1]_: of n that are owed at least 1 / (2 n - 2) of a turn,
    the one that would soonest be owed 1 - 1 / (2 n - 2) more. After any number of turns each has had its share of them
    within 1 - 1 / (2 n - 2) < 1. The smooth weighted turns of other routers, where the one that is owed most is next,
    are half a turn off with two, as these, and more than a whole one with four.

    .. [1] R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980), 323-330.

    Examples
    --------
    >>> turns = Turns({"large": 1, "small": 3})
    >>> [turns.next() for _ in range(4)]
    ['small', 'large', 'small', 'small']
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        total = math.fsum(shares.values())
        self._shares = {name: share / total for name, share in shares.items()}
        self._owed = dict.fromkeys(shares, 0.0)
        self._least = 1 / (2 * len(shares) - 2) if len(shares) > 1 else 0.0

    def next(self) -> str:
        """Who is next."""
        owed = {name: self._owed[name] + share for name, share in self._shares.items()}
        due = [name for name, much in owed.items() if much >= self._least - _ROUNDING]
        chosen = min(due, key=lambda name: (1 - self._least - owed[name]) / self._shares[name])
        owed[chosen] -= 1
        self._owed = owed
        return chosen
