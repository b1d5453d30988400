"""The accounts of a node's memory: loaded weights, what engines hold beside them, and what they borrow for caches.

The books only; nothing is allocated here. The store calls it under its own lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetplan.errors import StoreError


@dataclass(slots=True, eq=False)
class Lease:
    """What one connection has: a place among those who hold parts, and an account.

    Attributes
    ----------
    pid : int
    what : str
        What the holder calls itself.
    device : str
    hold_bytes : int
        What its process needs beside weights and cache.
    borrowed_bytes : int
        Its cache.
    """

    pid: int
    what: str
    device: str
    hold_bytes: int = 0
    borrowed_bytes: int = 0

    def said(self) -> str:
        """Who, and how much, for a message."""
        return f"{self.what} (pid {self.pid}): {self.hold_bytes} held, {self.borrowed_bytes} borrowed"


@dataclass(slots=True)
class Ledger:
    """Who has how much of each device.

    Attributes
    ----------
    budgets_bytes : mapping of str to int or None
        By device; None is no limit.
    weights_bytes : dict of str to int
        Of parts that are loaded or being loaded.
    leases : list of Lease
    """

    budgets_bytes: Mapping[str, int | None]
    weights_bytes: dict[str, int] = field(init=False)
    leases: list[Lease] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weights_bytes = dict.fromkeys(self.budgets_bytes, 0)

    def require_device(self, device: str) -> None:
        """Refuse a device that this store does not serve."""
        if device not in self.budgets_bytes:
            served = ", ".join(self.budgets_bytes)
            raise StoreError("unknown_device", f"this store serves {served}, not {device}. Start one with --device")

    def free_bytes(self, device: str) -> int | None:
        """What is left of a device's budget; None without one."""
        budget = self.budgets_bytes[device]
        return None if budget is None else budget - self.weights_bytes[device] - sum(self._leased(device))

    def missing_bytes(self, device: str, asked: int) -> int:
        """How much more would have to be free for so much."""
        free = self.free_bytes(device)
        return 0 if free is None else max(asked - free, 0)

    def borrow(self, lease: Lease, at_least: int, at_most: int) -> int:
        """Set a lease's loan to as much as is free, within two limits; what was granted.

        Raises
        ------
        StoreError
            With code ``"no_room"`` if there is less than ``at_least``; the loan stays as it was.
        """
        free = self.free_bytes(lease.device)
        granted = at_most if free is None else min(at_most, free + lease.borrowed_bytes)
        if granted < at_least:
            raise self.no_room(lease.device, f"to borrow {at_least} to {at_most}", granted, but=lease)
        lease.borrowed_bytes = granted
        return granted

    def no_room(self, device: str, asked: str, free: int, but: Lease | None = None) -> StoreError:
        """The refusal, with who has what."""
        others = [lease.said() for lease in self.leases if lease.device == device and lease is not but]
        return StoreError(
            "no_room",
            f"no room on {device} {asked} bytes: {free} of {self.budgets_bytes[device]} are free. Weights have "
            f"{self.weights_bytes[device]}; {'; '.join(others) or 'nobody else has a lease'}. Wait until a lease ends, "
            "evict weights without one, or give the store more with --memory",
        )

    def status(self, device: str) -> dict[str, Any]:
        """A device's account."""
        held, borrowed = self._leased(device)
        return {
            "budget_bytes": self.budgets_bytes[device],
            "weights_bytes": self.weights_bytes[device],
            "held_bytes": held,
            "borrowed_bytes": borrowed,
            "free_bytes": self.free_bytes(device),
        }

    def _leased(self, device: str) -> tuple[int, int]:
        here = [lease for lease in self.leases if lease.device == device]
        return sum(lease.hold_bytes for lease in here), sum(lease.borrowed_bytes for lease in here)
