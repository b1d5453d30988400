"""The store itself, without its socket: which parts are loaded, for whom, and how they get here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from hetplan.errors import StoreError
from hetplan.runtime.tensor_store.fetch import Fetcher, Wanted
from hetplan.runtime.tensor_store.ledger import Lease, Ledger
from hetplan.runtime.tensor_store.manifest import Manifest
from hetplan.runtime.tensor_store.parts import PartKey, PartLayout, part_keys, part_layouts
from hetplan.runtime.tensor_store.regions import Region, make_region
from hetplan.runtime.tensor_store.requests import AttachRequest, BorrowRequest, LoadRequest
from hetplan.runtime.tensor_store.sources import Source

_SHOWN_NAMES = 5


class _Abandoned(Exception):
    """Whoever was to load a part gave up before it began."""


@dataclass(slots=True)
class Brought:
    """Bytes of the parts of one request, by where they were."""

    fetched_bytes: int = 0
    reused_bytes: int = 0
    held_bytes: int = 0

    def said(self) -> dict[str, int]:
        """As an answer says it."""
        return {
            "fetched_bytes": self.fetched_bytes,
            "reused_bytes": self.reused_bytes,
            "held_bytes": self.held_bytes,
        }


@dataclass(slots=True, eq=False)
class LoadedPart:
    """A part that is loaded, or on its way.

    Attributes
    ----------
    layout : PartLayout
    device : str
    users : set
        Leases, and requests that load or copy: while there are any it stays.
    used : int
        When it last got or lost a user, as a count of such events.
    region : Future of Region
    """

    layout: PartLayout
    device: str
    users: set[object] = field(default_factory=set)
    used: int = 0
    region: Future[Region] = field(default_factory=Future)

    @property
    def idle(self) -> bool:
        """Whether it may be evicted."""
        return not self.users and self.region.done()

    def said(self) -> dict[str, Any]:
        """How a client maps it."""
        tensors = {
            shard.name: [offset, shard.bytes, shard.dtype, list(shard.shape)]
            for shard, offset in zip(self.layout.tensors, self.layout.offsets, strict=True)
        }
        return {**self.region.result().description(), "bytes": self.layout.bytes, "tensors": tensors}


@dataclass(frozen=True, slots=True)
class _Model:
    source: Source
    manifest: Manifest
    layouts: Mapping[PartKey, PartLayout]


class TensorStore:
    """Parts in memory, each loaded once, and the accounts of who has them. Its methods may be called by any thread.

    Parameters
    ----------
    shards : sequence of (Source, Manifest)
        Of one fingerprint the first is used.
    budgets_bytes : mapping of str to int or None
        What each served device may hold; None is no limit.
    fetcher : Fetcher
    """

    def __init__(
        self, shards: Sequence[tuple[Source, Manifest]], budgets_bytes: Mapping[str, int | None], fetcher: Fetcher
    ) -> None:
        self._models: dict[str, _Model] = {}
        for source, manifest in shards:
            self._models.setdefault(manifest.fingerprint, _Model(source, manifest, part_layouts(manifest)))
        self._fetcher = fetcher
        self._lock = threading.Lock()
        self._ledger = Ledger(budgets_bytes)
        self._parts: dict[tuple[str, PartKey], LoadedPart] = {}
        self._events = 0
        self._reused_bytes = 0

    def models(self) -> list[str]:
        """Names of the models that it has shards of."""
        return sorted({model.manifest.model for model in self._models.values()})

    def attach(self, request: AttachRequest, lease: Lease | None) -> tuple[Lease, list[LoadedPart], dict[str, Any]]:
        """Load what an engine asks for, and give it a lease, or more to the one it has.

        Returns
        -------
        (Lease, list of LoadedPart, dict)
            The dict is the answer without the parts.

        Raises
        ------
        StoreError
            If it is refused; a lease is then as it was before.
        """
        model = self._model(request.model, request.fingerprint, request.engine, request.config_sha256)
        keys = _keys_of(model, request)
        self._ledger.require_device(request.device)
        if lease is not None and lease.device != request.device:
            raise StoreError(
                "bad_request", f"this lease is on {lease.device}, not {request.device}; connect again for that"
            )
        taken = lease or Lease(request.holder.pid, request.holder.what, request.device)
        parts, brought = self._take(model, keys, request.device, taken, hold_bytes=request.hold_bytes)
        return taken, parts, {"fingerprint": model.manifest.fingerprint, **brought.said()}

    def load(self, request: LoadRequest) -> dict[str, Any]:
        """Load parts before engines come."""
        model = self._model(request.model, request.fingerprint)
        start, stop = request.layers
        if not start <= stop <= model.manifest.layers:
            raise StoreError("bad_request", f"layers {start} to {stop}: {request.model} has {model.manifest.layers}")
        for rank in request.ranks:
            _require_shards(model, request.tensor_parallel, rank)
        self._ledger.require_device(request.device)
        keys = part_keys(
            model.layouts,
            tensor_parallel=request.tensor_parallel,
            ranks=set(request.ranks),
            layers=request.layers,
            first=request.first,
            last=request.last,
        )
        user = object()
        try:
            _, brought = self._take(model, keys, request.device, user)
        finally:
            with self._lock:
                self._leave(user)
        return brought.said()

    def borrow(self, request: BorrowRequest, lease: Lease | None) -> dict[str, Any]:
        """Set what a lease borrows."""
        if lease is None:
            raise StoreError("no_lease", "only who has attached can borrow; attach first")
        with self._lock:
            return {"granted": self._ledger.borrow(lease, request.at_least_bytes, request.at_most_bytes)}

    def release(self, lease: Lease) -> None:
        """End a lease: its memory is free again, its parts stay loaded."""
        with self._lock:
            self._ledger.leases.remove(lease)
            self._leave(lease)

    def evict(self) -> dict[str, Any]:
        """Free every part without a lease."""
        with self._lock:
            return {"freed_bytes": sum(self._drop(part) for part in list(self._parts.values()) if part.idle)}

    def close(self) -> None:
        """Fetch no more. The memory goes with the process."""
        self._fetcher.close()

    def status(self) -> dict[str, Any]:
        """What there is, who has it, and what came so far."""
        with self._lock:
            loaded = [part for part in self._parts.values() if part.region.done()]
            return {
                "models": [
                    {
                        **model.manifest.model_dump(
                            include={"model", "engine", "config_sha256", "layers", "fingerprint"}
                        ),
                        "source": model.source.location,
                    }
                    for model in self._models.values()
                ],
                "parts": [
                    {
                        **part.layout.key._asdict(),
                        "model": self._models[part.layout.key.fingerprint].manifest.model,
                        "device": part.device,
                        "bytes": part.layout.bytes,
                        "leases": sum(isinstance(user, Lease) for user in part.users),
                    }
                    for part in loaded
                ],
                "devices": {device: self._ledger.status(device) for device in self._ledger.budgets_bytes},
                "leases": [
                    {
                        "holder": {"pid": lease.pid, "what": lease.what},
                        "device": lease.device,
                        "hold_bytes": lease.hold_bytes,
                        "borrowed_bytes": lease.borrowed_bytes,
                        "parts": sum(lease in part.users for part in loaded),
                    }
                    for lease in self._ledger.leases
                ],
                "fetched_bytes": self._fetcher.fetched_bytes,
                "reused_bytes": self._reused_bytes,
            }

    # Finding

    def _model(
        self, name: str, fingerprint: str | None, engine: str | None = None, config_sha256: str | None = None
    ) -> _Model:
        """The one model that fits; refused with what was asked and what there is."""
        found = [model for model in self._models.values() if model.manifest.model == name]
        if not found:
            raise StoreError("unknown_model", f"no shards of {name!r} here, only of {', '.join(self.models())}")
        wanted: tuple[tuple[str, str, str | None, Callable[[Manifest], str]], ...] = (
            ("wrong_engine", "engine", engine, lambda m: m.engine),
            ("wrong_config", "config_sha256", config_sha256, lambda m: m.config_sha256),
            ("wrong_fingerprint", "fingerprint", fingerprint, lambda m: m.fingerprint),
        )
        for code, what, value, of in wanted:
            if value is None:
                continue
            there = ", ".join(sorted({of(model.manifest) for model in found}))
            found = [model for model in found if of(model.manifest) == value]
            if not found:
                raise StoreError(code, f"the shards of {name} have {what} {there}, not {value}. Make them again for it")
        if len(found) > 1:
            there = ", ".join(model.manifest.fingerprint for model in found)
            raise StoreError("bad_request", f"several shards of {name} fit; name a fingerprint: {there}")
        return found[0]

    # Loading

    def _take(
        self, model: _Model, keys: Sequence[PartKey], device: str, user: object, hold_bytes: int = 0
    ) -> tuple[list[LoadedPart], Brought]:
        """Make ``user`` one of each part's users; parts that are missing are loaded, by whoever came first."""
        brought = Brought()
        with self._lock:
            before = {key for key, part in self._parts.items() if user in part.users}
            held_before = user.hold_bytes if isinstance(user, Lease) else 0
            mine, others = self._claim(model, keys, device, user, hold_bytes - held_before)
            new = isinstance(user, Lease) and user not in self._ledger.leases
            if isinstance(user, Lease):
                user.hold_bytes = hold_bytes
                if new:
                    self._ledger.leases.append(user)
        try:
            while True:
                self._load_all(model, mine, brought)
                abandoned = [part for part in others if isinstance(part.region.exception(), _Abandoned)]
                for part in others:
                    if part not in abandoned:
                        part.region.result()
                        brought.held_bytes += part.layout.bytes
                if not abandoned:
                    break
                with self._lock:
                    mine, others = self._claim(model, [part.layout.key for part in abandoned], device, user, 0)
            with self._lock:
                return [self._parts[device, key] for key in keys], brought
        except BaseException:
            with self._lock:
                self._leave(user, but=before)
                if isinstance(user, Lease):
                    user.hold_bytes = held_before
                    if new:
                        self._ledger.leases.remove(user)
            raise

    def _claim(
        self, model: _Model, keys: Sequence[PartKey], device: str, user: object, hold_bytes: int
    ) -> tuple[list[LoadedPart], list[LoadedPart]]:
        """Under the lock: parts that this user loads, for which there is room, and parts that are there already."""
        there = [self._parts[device, key] for key in keys if (device, key) in self._parts]
        missing = [model.layouts[key] for key in keys if (device, key) not in self._parts]
        asked = sum(layout.bytes for layout in missing) + max(hold_bytes, 0)
        self._make_room(device, asked, keep=there)
        mine = [LoadedPart(layout, device) for layout in missing]
        for part in mine:
            self._parts[device, part.layout.key] = part
            self._ledger.weights_bytes[device] += part.layout.bytes
        self._events += 1
        for part in (*mine, *there):
            part.users.add(user)
            part.used = self._events
        return mine, there

    def _make_room(self, device: str, asked: int, keep: Sequence[LoadedPart]) -> None:
        """Evict parts that nobody uses, those first that were used longest ago; refuse where that is not enough."""
        missing = self._ledger.missing_bytes(device, asked)
        idle = sorted(
            (part for part in self._parts.values() if part.idle and part.device == device and part not in keep),
            key=lambda part: part.used,
        )
        if missing > sum(part.layout.bytes for part in idle):
            raise self._ledger.no_room(device, f"for {asked}", self._ledger.free_bytes(device) or 0)
        for part in idle:
            if missing <= 0:
                break
            missing -= self._drop(part)

    def _load_all(self, model: _Model, parts: list[LoadedPart], brought: Brought) -> None:
        """Load parts one after another, each by all threads, so that a later one can copy what an earlier one has."""
        waiting = list(parts)
        try:
            while waiting:
                self._load(model, waiting[0], brought)
                waiting.pop(0)
        except BaseException as error:
            with self._lock:
                for part in waiting:
                    self._forget(part)
            for part in waiting:
                part.region.set_exception(error if part is waiting[0] else _Abandoned())
            raise

    def _load(self, model: _Model, part: LoadedPart, brought: Brought) -> None:
        region = make_region(part.device, part.layout.bytes)
        copying = object()
        try:
            loaded = self._loaded_contents(part, copying)
            fetched, reused = self._fill(model, part.layout, region, loaded)
            region.seal()
        except BaseException:
            region.close()
            raise
        finally:
            with self._lock:
                self._leave(copying)
        with self._lock:
            self._reused_bytes += reused
        brought.fetched_bytes += fetched
        brought.reused_bytes += reused
        part.region.set_result(region)

    def _fill(
        self, model: _Model, layout: PartLayout, region: Region, loaded: Mapping[str, tuple[Region, int]]
    ) -> tuple[int, int]:
        """Copy what is loaded elsewhere, fetch the rest, each content once; bytes fetched and reused."""
        copied, again = [], []
        with ExitStack() as landings:
            wanted: list[Wanted] = []
            for shard, offset in zip(layout.tensors, layout.offsets, strict=True):
                if shard.sha256 in loaded:
                    copied.append(shard)
                    region.copy(offset, shard.bytes, *loaded[shard.sha256])
                elif layout.contents[shard.sha256] == offset:
                    wanted.append((shard, landings.enter_context(region.landing(offset, shard.bytes))))
                else:
                    again.append((shard, offset))
            self._fetcher.bring(model.source, wanted, model.manifest.model)
        for shard, offset in again:
            copied.append(shard)
            region.copy(offset, shard.bytes, region, layout.contents[shard.sha256])
        return sum(shard.bytes for shard, _ in wanted), sum(shard.bytes for shard in copied)

    def _loaded_contents(self, part: LoadedPart, user: object) -> dict[str, tuple[Region, int]]:
        """Which of a part's contents are loaded on its device, and where; ``user`` keeps them there."""
        found: dict[str, tuple[Region, int]] = {}
        with self._lock:
            for other in self._parts.values():
                if other.device != part.device or not other.region.done():
                    continue
                for sha256 in (part.layout.contents.keys() & other.layout.contents.keys()) - found.keys():
                    found[sha256] = (other.region.result(), other.layout.contents[sha256])
                    other.users.add(user)
        return found

    # Letting go

    def _leave(self, user: object, but: Collection[tuple[str, PartKey]] = ()) -> None:
        self._events += 1
        for key, part in self._parts.items():
            if user in part.users and key not in but:
                part.users.discard(user)
                part.used = self._events

    def _drop(self, part: LoadedPart) -> int:
        self._forget(part)
        part.region.result().close()
        return part.layout.bytes

    def _forget(self, part: LoadedPart) -> None:
        del self._parts[part.device, part.layout.key]
        self._ledger.weights_bytes[part.device] -= part.layout.bytes


def _keys_of(model: _Model, request: AttachRequest) -> list[PartKey]:
    """The parts that the asked tensors lie in, in the order of the manifest."""
    _require_shards(model, request.tensor_parallel, request.rank)
    by_name = {
        shard.name: key
        for key, layout in model.layouts.items()
        if (key.tensor_parallel, key.rank) == (request.tensor_parallel, request.rank)
        for shard in layout.tensors
    }
    unknown = [name for name in request.tensors if name not in by_name]
    if unknown:
        more = f" and {len(unknown) - _SHOWN_NAMES} more" if len(unknown) > _SHOWN_NAMES else ""
        raise StoreError(
            "unknown_tensors", f"the shards of {request.model} have no {', '.join(unknown[:_SHOWN_NAMES])}{more}"
        )
    wanted = {by_name[name] for name in request.tensors}
    return [key for key in model.layouts if key in wanted]


def _require_shards(model: _Model, tensor_parallel: int, rank: int) -> None:
    if not any((key.tensor_parallel, key.rank) == (tensor_parallel, rank) for key in model.layouts):
        degrees = sorted({key.tensor_parallel for key in model.layouts})
        raise StoreError(
            "unknown_shards",
            f"no shards of {model.manifest.model} for rank {rank} of tensor_parallel {tensor_parallel}, only for "
            f"tensor_parallel {', '.join(map(str, degrees))}. Make them for that degree",
        )
