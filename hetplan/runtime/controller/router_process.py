"""The router as a process of this machine: started with its first targets, and told of others."""

from __future__ import annotations

import json
import os
import sys
from asyncio import sleep, to_thread
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetplan.errors import RouterError
from hetplan.runtime.controller.processes import Detached
from hetplan.runtime.controller.router import HttpRouter, RouterTarget
from hetplan.runtime.router.settings import RouteSettings

_STARTS_S = 30.0


class RouterProcess:
    """See `RouterClient`. It outlives the controller, so that streams go on while that is started anew.

    Parameters
    ----------
    folder : path
        For its settings, log and journal.
    model : str
        What clients get who name none.
    host, port : str and int
        Where it listens.
    key : str
        For its administration.
    """

    def __init__(self, folder: Path, model: str, *, host: str, port: int, key: str) -> None:
        self._folder, self._model, self._host, self._port, self._key = folder, model, host, port, key
        self._process = Detached(folder / "router.log")
        self._ends = False
        self._http = HttpRouter(f"http://{host}:{port}", key)

    async def set_targets(
        self, targets: Sequence[RouterTarget], routes: Sequence[RouteSettings], *, grace_s: float | None = None
    ) -> int:
        if self._ends:
            raise RouterError("the router is being ended")
        if not await self.runs():
            if not targets:
                return 0
            await to_thread(self._start, targets, routes)
            await self._answers()
        return await self._http.set_targets(targets, routes, grace_s=grace_s)

    async def targets(self) -> tuple[tuple[RouterTarget, ...], int]:
        if self._ends:
            raise RouterError("the router is being ended")
        if not await self.runs():
            return (), 0
        return await self._http.targets()

    async def demand(self, window_s: float) -> dict[str, Any]:
        if self._ends or not await self.runs():
            raise RouterError("the router does not run")
        return await self._http.demand(window_s)

    async def runs(self) -> bool:
        """Whether it does."""
        return await to_thread(self._process.pid) is not None

    async def end(self, grace_s: float) -> None:
        """Have it take nothing new and end when its streams have, at the latest after the grace."""
        self._ends = True
        await to_thread(self._process.end, grace_s)

    def _start(self, targets: Sequence[RouterTarget], routes: Sequence[RouteSettings]) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings = self._folder / "router.json"
        content = {
            "model": self._model,
            "targets": [target._asdict() for target in targets],
            "routes": [route.model_dump() for route in routes],
        }
        settings.write_text(json.dumps(content), "utf-8")
        command = [*(sys.executable, "-m", "hetplan", "router", str(settings)), f"--host={self._host}"]
        command += [f"--port={self._port}", f"--journal={self._folder / 'journal'}"]
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._process.start(command, {**own, "HETPLAN_ADMIN_KEY": self._key})

    async def _answers(self) -> None:
        for _ in range(int(_STARTS_S / 0.2)):
            await sleep(0.2)
            if not await self.runs():
                break
            try:
                await self._http.targets()
            except RouterError as error:
                if error.status is None:
                    continue
                raise
            return
        raise RouterError(f"the router did not start: {self._process.tail()[-500:].strip()}")
