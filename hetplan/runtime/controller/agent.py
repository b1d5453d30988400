"""What runs on each machine: it starts and ends the store and the engines there, and says how they are.

`NodeAgent` knows nothing of Ray. What is asked and answered is JSON, so that nothing of ours is unpickled anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetplan.errors import HetplanError, InvalidInputError, StoreError
from hetplan.runtime.controller.notices import seconds_left
from hetplan.runtime.controller.processes import Keeper
from hetplan.runtime.spot_notices.notice import Notice
from hetplan.runtime.tensor_store.client import connect

_STORE_START_S = 60.0
# Ray sets these for its own workers; engines are to see the machine as it is, and no token.
_RAYS_OWN = ("RAY_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


class NodeAgent:
    """One machine's agent. May be called from several threads.

    Parameters
    ----------
    config : bytes
        JSON: ``machine`` (its name), ``fleet`` (the name of all), ``notices`` (null, or ``provider`` and ``base_url``
        of the metadata service that is watched).
    """

    def __init__(self, config: bytes) -> None:
        asked = json.loads(config)
        self.machine = str(asked["machine"])
        self._folder = own_folder() / str(asked["fleet"]) / self.machine
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._keeper = Keeper()
        self._notices: list[Notice] = []
        self._watched = ""
        if asked.get("notices") is not None:
            threading.Thread(target=self._watch, args=(asked["notices"],), daemon=True).start()

    def call(self, request: bytes) -> bytes:
        """Do what is asked; a refusal is an answer with ``error``."""
        try:
            asked = json.loads(request)
            operation = _OPERATIONS.get(asked.pop("op", None)) if isinstance(asked, dict) else None
            if operation is None:
                raise InvalidInputError(f"ask for one of {', '.join(sorted(_OPERATIONS))}")
            return json.dumps(operation(self, **asked)).encode()
        except (HetplanError, OSError, TypeError, ValueError) as error:
            return json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()

    def _hello(self) -> dict[str, Any]:
        return {"machine": self.machine, "pid": os.getpid(), "socket": str(self._folder / "store.sock")}

    def _start(self, name: str, argv: list[str], variables: dict[str, str]) -> dict[str, Any]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_RAYS_OWN)}
        state = self._keeper.start(name, argv, inherited | variables, self._folder / f"{name}.log")
        return {"pid": state.pid}

    def _stop(self, name: str, grace_s: float) -> dict[str, Any]:
        state = self._keeper.stop(name, grace_s)
        self._keeper.forget(name)
        return {"returncode": None if state is None else state.returncode}

    def _tail(self, name: str) -> dict[str, Any]:
        return {"text": self._keeper.tail(name)}

    def _load(self, model: str, loads: list[dict[str, Any]]) -> dict[str, Any]:
        """Have the store load weights; it may have been started just before."""
        end = time.monotonic() + _STORE_START_S
        while True:
            try:
                store = connect(self._folder / "store.sock", timeout_s=None)
                break
            except StoreError:
                store_state = self._keeper.states().get("store")
                ended = store_state is None or store_state.returncode is not None
                if ended or time.monotonic() > end:
                    raise InvalidInputError(f"the store did not start: {self._keeper.tail('store')[-500:]}") from None
                time.sleep(0.05)
        total = {"fetched_bytes": 0, "reused_bytes": 0, "held_bytes": 0}
        with store:
            for load in loads:
                brought = store.load(model=model, **{**load, "layers": tuple(load["layers"])})
                total = {name: total[name] + int(brought[name]) for name in total}
        return total

    def _status(self) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.UTC)
        return {
            "processes": {n: {"pid": s.pid, "returncode": s.returncode} for n, s in self._keeper.states().items()},
            "memory": _memory(),
            "store": self._store_status(),
            "notices": [
                {"seconds_left": seconds_left(n, now), "provider": n.provider, "event_id": n.event_id}
                for n in list(self._notices)
            ],
            "watcher": self._watched,
        }

    def _store_status(self) -> dict[str, Any] | None:
        state = self._keeper.states().get("store")
        if state is None or state.returncode is not None:
            return None
        try:
            with connect(self._folder / "store.sock", timeout_s=5.0) as store:
                found = store.status()
        except StoreError as error:
            return {"error": error.code}
        return {"devices": found["devices"], "leases": found["leases"], "parts": len(found["parts"])}

    def _end(self, grace_s: float = 0.0) -> dict[str, Any]:
        self._keeper.stop_all(grace_s)
        return {}

    def _watch(self, asked: dict[str, Any]) -> None:
        from hetplan.runtime.spot_notices import make_watcher

        async def read() -> None:
            watcher = make_watcher(asked["provider"], base_url=asked.get("base_url"))
            async for notice in watcher.notices():
                if notice.kind == "interruption":
                    self._notices.append(notice)

        try:
            asyncio.run(read())
        except HetplanError as error:
            self._watched = str(error)


_OPERATIONS: dict[Any, Callable[..., dict[str, Any]]] = {
    "hello": NodeAgent._hello,
    "start": NodeAgent._start,
    "stop": NodeAgent._stop,
    "tail": NodeAgent._tail,
    "load": NodeAgent._load,
    "status": NodeAgent._status,
    "end": NodeAgent._end,
}


def own_folder() -> Path:
    """A folder of this user's alone, with a path short enough for sockets."""
    own = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(own) / "hetplan" if own else Path(tempfile.gettempdir()) / f"hetplan-{os.geteuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or folder.is_symlink():
        raise InvalidInputError(f"{folder} is not this user's alone; remove it or set XDG_RUNTIME_DIR")
    return folder


def _memory() -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found["total_bytes" if name == "MemTotal" else "available_bytes"] = int(rest.split()[0]) * 1024
    return found
