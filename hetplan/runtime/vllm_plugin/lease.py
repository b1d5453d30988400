"""This process's lease at its node's tensor store."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hetplan.runtime.tensor_store.client import Store, connect

SOCKET, MODEL, FINGERPRINT = "HETPLAN_STORE", "HETPLAN_STORE_MODEL", "HETPLAN_STORE_FINGERPRINT"


@dataclass(slots=True)
class Lease:
    """A connection to the store, for as long as this process lives: the store takes its end for the process's."""

    store: Store
    model: str
    fingerprint: str | None


_lease: Lease | None = None


def lease() -> Lease:
    """The lease of this process, opened on first use.

    Raises
    ------
    RuntimeError
        If the environment names no store or no model.
    StoreError
        If no store listens there, or another user's.
    """
    global _lease  # noqa: PLW0603
    if _lease is None:
        path, model = os.environ.get(SOCKET), os.environ.get(MODEL)
        if not path or not model:
            raise RuntimeError(
                f"--load-format=hetplan needs {SOCKET} (the store's socket) and {MODEL} (its name for it)"
            )
        _lease = Lease(connect(path), model, os.environ.get(FINGERPRINT) or None)
    return _lease


def asked_for() -> bool:
    """Whether the environment names a store."""
    return bool(os.environ.get(SOCKET))
