"""Targets that come and go while the router runs: what was put last, what has to leave, a file that remembers both."""

from __future__ import annotations

import asyncio
import math
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hetplan.base import Frozen
from hetplan.errors import InvalidInputError
from hetplan.runtime.router.handover import Handover
from hetplan.runtime.router.sequence import Sequence
from hetplan.runtime.router.settings import (
    RouterSettings,
    RouteSettings,
    TargetSet,
    TargetSettings,
    each_has_its_own_address,
    routes_lead_somewhere,
)
from hetplan.runtime.router.targets import Target, Targets

_MAX_FILE_BYTES = 16 * 2**20
_LOOK_S = 0.1


class OutdatedRevisionError(Exception):
    """Somebody else has put targets meanwhile."""


class NothingServesError(Exception):
    """None of the targets put serves or starts."""


class Kept(Frozen):
    """What the file holds: the set that was put last, and those that had still to leave when it was written."""

    revision: Annotated[int, Field(ge=0)]
    wanted: TargetSet
    routes: tuple[RouteSettings, ...]
    leaving: tuple[TargetSettings, ...]


class TargetsFile:
    """The file in a folder that only this user can read, which the journal has seen to.

    Parameters
    ----------
    folder : Path
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "targets.json"

    def write(self, kept: Kept) -> None:
        """Keep a set; what was kept before is there until this is."""
        fresh = self._path.with_suffix(".fresh")
        fresh.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(fresh, flags, 0o600), "wb") as file:
            file.write(kept.model_dump_json().encode())
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def read(self) -> Kept | None:
        """What was kept; None where nothing was.

        Raises
        ------
        InvalidInputError
            If it does not hold what `write` writes, or others can read or write it.
        """
        path = self._path
        next_step = f"Remove {path} to begin with the targets of router.json"
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
                    raise InvalidInputError(f"{path} is not a file of mode 0600 that belongs to this user. {next_step}")
                content = file.read(_MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InvalidInputError(f"cannot read {path}: {error.strerror}. {next_step}") from None
        if len(content) > _MAX_FILE_BYTES:
            raise InvalidInputError(f"{path} has more than {_MAX_FILE_BYTES} bytes. {next_step}")
        try:
            kept = Kept.from_json(content)
            each_has_its_own_address((*kept.leaving, *kept.wanted.targets))
        except ValueError as error:
            raise InvalidInputError(f"{path} does not hold targets: {str(error)[:1000]}. {next_step}") from None
        return kept


class Membership:
    """Which targets there are.

    Parameters
    ----------
    settings : RouterSettings
        With the targets to begin with, where none are kept.
    targets : Targets
    handover : Handover
    running : callable
        The sequences that run on a target.
    file : TargetsFile, optional
        Keeps what is put; without one a restarted router begins with its router.json again.
    kept : Kept, optional
        What the file holds.
    on_event : callable
    """

    def __init__(
        self,
        settings: RouterSettings,
        targets: Targets,
        handover: Handover,
        running: Callable[[Target], list[Sequence]],
        file: TargetsFile | None,
        kept: Kept | None,
        on_event: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._settings, self._targets, self._handover = settings, targets, handover
        self._running, self._file, self._on_event = running, file, on_event
        self._lock = asyncio.Lock()
        self._leaving: dict[Target, asyncio.Task[None]] = {}
        self.revision = 0
        self._wanted = TargetSet(targets=settings.targets)
        if kept is None:
            targets.want(settings.targets, settings.routes)
        else:
            self.revision, self._wanted = kept.revision, kept.wanted
            targets.want((*kept.leaving, *kept.wanted.targets), kept.routes)
            targets.want(kept.wanted.targets, kept.routes)
            for target in targets.all:
                if not target.wanted:
                    # It served when the router went; one that has yet to start would be dropped at once.
                    target.lost_at = targets.now()
            told = {"revision": kept.revision, "targets": len(kept.wanted.targets), "leaving": len(kept.leaving)}
            on_event("targets_restored", told | {"instead_of": "router.json"})
        targets.on_serving = self._settle
        self._settle()

    async def put(self, wanted: TargetSet) -> None:
        """These are the targets from now on.

        Raises
        ------
        OutdatedRevisionError
            If it follows another revision than the present one.
        NothingServesError
            If no target of it serves or starts, and it does not say ``drain``.
        InvalidInputError
            If a route leads nowhere.
        OSError
            If it cannot be kept.

        In each case nothing has changed.
        """
        async with self._lock:
            if wanted.revision is not None and wanted.revision != self.revision:
                raise OutdatedRevisionError(
                    f"revision {wanted.revision} is not the present one, {self.revision}; look at the targets again"
                )
            known = {target.url: target for target in self._targets.all}
            there = [known.get(target.url) for target in wanted.targets]
            if not wanted.drain and not any(
                target is None or (not target.leaving and (target.healthy or target.lost_at is None))
                for target in there
            ):
                raise NothingServesError(
                    "no target of these serves or starts; add one that does, or say 'drain': true to go without"
                )
            routes = self._targets.routes if wanted.routes is None else wanted.routes
            try:
                routes_lead_somewhere(routes, {self._settings.model_of(target) for target in wanted.targets})
            except ValueError as error:
                raise InvalidInputError(f"{error}; give the routes that go with these targets") from None
            urls = {target.url for target in wanted.targets}
            others = [target.settings for target in self._targets.all if target.url not in urls]
            await self._keep(Kept(revision=self.revision + 1, wanted=wanted, routes=routes, leaving=tuple(others)))
            self.revision, self._wanted = self.revision + 1, wanted
            self._targets.want(wanted.targets, routes)
            for target in [target for target in self._leaving if target.wanted]:
                self._leaving.pop(target).cancel()
                self._handover.recall(target)
            added = sum(target is None for target in there)
            told = {"revision": self.revision, "targets": len(there), "added": added, "leaving": len(others)}
            self._on_event("targets_put", told)
            self._settle()

    async def stop(self) -> None:
        """Give up what is under way; the file remembers what has still to leave."""
        tasks = list(self._leaving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _settle(self) -> None:
        """Let those leave whose place is taken."""
        for target in self._targets.retire(drain=self._wanted.drain):
            task = asyncio.create_task(self._leave(target, self._wanted.grace_s))
            self._leaving[target] = task

    async def _leave(self, target: Target, grace_s: float | None) -> None:
        """Move a target's streams, and forget it when the last has gone.

        Answers that are asked for whole cannot be moved: after the grace the target does not wait for them. They are
        asked for anew elsewhere if its engine goes.
        """
        end = math.inf
        if grace_s is not None:
            end = time.monotonic() + grace_s
            self._handover.move(target, grace_s, self._running(target))
        while self._running(target) or (target.in_flight and time.monotonic() < end):
            await asyncio.sleep(_LOOK_S)
        async with self._lock:
            if target.wanted:
                return
            del self._leaving[target]
            self._handover.recall(target)
            await self._targets.drop(target)
            others = tuple(target.settings for target in self._targets.all if not target.wanted)
            kept = Kept(revision=self.revision, wanted=self._wanted, routes=self._targets.routes, leaving=others)
            try:
                await self._keep(kept)
            except OSError as error:
                self._on_event("targets_not_kept", {"error": type(error).__name__})

    async def _keep(self, kept: Kept) -> None:
        if self._file is not None:
            await asyncio.to_thread(self._file.write, kept)
