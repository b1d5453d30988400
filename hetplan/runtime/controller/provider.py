"""Who rents machines: what every provider has, and one that makes them on this machine.

Machines are known by the controller's own names. Asking twice for one name gives one machine, and a controller that
was killed between asking and noting it down asks again.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from hetplan.catalog.offers import Offer
from hetplan.errors import HetplanError
from hetplan.runtime.controller.processes import Detached
from hetplan.runtime.controller.ray_agents import LOOPBACK, raylet_command, require_token, resource_of

_TRIES, _JOINS_S = 3, 20.0
_JOINED = "Ray runtime started"


class NoMachineError(HetplanError):
    """There is no machine of an offer now."""


class MachineState(NamedTuple):
    """Of a machine that was asked for: its address once it is ready, the reason where it failed or is gone."""

    status: Literal["pending", "ready", "failed"]
    address: str | None = None
    reason: str = ""


class MachineProvider(Protocol):
    """What every provider has. Methods block; the controller calls them from threads."""

    def request(self, name: str, offer: Offer) -> None:
        """Rent a machine. Raises `NoMachineError` where there is none."""
        ...

    def state(self, name: str) -> MachineState:
        """How a machine is that was asked for."""
        ...

    def release(self, name: str) -> None:
        """Give it back; one that is not there is none of its business."""
        ...


class LocalProvider:
    """Machines that are Ray nodes on the loopback address, each with a resource of its own.

    They outlive the controller, as rented machines do.

    Parameters
    ----------
    address : str
        Of the cluster's head.
    folder : path
        For their logs, by which they are found again.
    """

    def __init__(self, address: str, folder: Path) -> None:
        require_token()
        self._address, self._folder = address, folder
        self._starting = threading.Lock()

    def request(self, name: str, offer: Offer) -> None:
        if self._machine(name).pid() is not None:
            return
        if offer.provider != "local":
            raise NoMachineError(f"{offer.name} is not on this machine; give its own provider")
        command = raylet_command(
            head=False, address=self._address, resources={resource_of(name): 1.0}, folder=self._folder
        )
        machine = self._machine(name)
        # One at a time: nodes that start together on one host at times wait for the head in vain.
        with self._starting:
            for _ in range(_TRIES):
                before = machine.tail()
                machine.start(command, os.environ)
                end = time.monotonic() + _JOINS_S
                while machine.pid() is not None and time.monotonic() < end:
                    if _JOINED in machine.tail().removeprefix(before):
                        return
                    time.sleep(0.1)
                machine.end(0.0)
        raise NoMachineError(f"Ray did not start on this host: {machine.tail()[-300:].strip()}")

    def state(self, name: str) -> MachineState:
        machine = self._machine(name)
        if machine.pid() is not None:
            return MachineState("ready", LOOPBACK)
        return MachineState("failed", reason=machine.tail()[-300:].strip() or "it has ended")

    def release(self, name: str) -> None:
        # As a cloud does it: at once. What was to be ended in peace has been.
        self._machine(name).end(0.0)

    def _machine(self, name: str) -> Detached:
        return Detached(self._folder / f"{name}.log")
