"""What the router remembers of each request: what was asked, the prompt's token ids, and every event before it is sent.

In memory, bounded. With a folder also on disk, in segments of checksummed JSON lines (mode 0600, in a folder of mode
0700), so that a router that was killed goes on where it was. What a request holds is in no log and in no metric.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from hetplan.errors import InvalidInputError
from hetplan.runtime.router.fields import Endpoint
from hetplan.units import MIB

SEGMENT_BYTES = 64 * MIB
_SEGMENT_NAME = re.compile(r"segment-(\d{12})\.journal")
_MAX_LINE_BYTES = 256 * MIB
# What the objects around an event's content take in memory.
_EVENT_BYTES = 400
_ENTRY_BYTES = 4000


@dataclass(slots=True)
class Event:
    """One step of an answer: new tokens of a choice with their text, or its end.

    ``delta`` holds what a chat's parser made of the text, where the engine has one; ``reasoning_tokens`` how many of
    the choice's tokens until here were thoughts.
    """

    choice: int
    token_ids: list[int]
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    delta: dict[str, Any] | None = None
    reasoning_tokens: int | None = None

    def packed(self) -> list[Any]:
        """The event as plain data."""
        return [
            self.choice,
            self.token_ids,
            self.text,
            self.logprobs,
            self.finish_reason,
            self.stop_reason,
            self.delta,
            self.reasoning_tokens,
        ]


@dataclass(slots=True, eq=False)
class Entry:
    """A request and what was answered so far.

    ``prompts`` holds the token ids of each prompt, empty until an engine has given them; ``rendered`` is what an engine
    made of a chat. ``error`` is the status and message that ended the request, if it did not end well. ``answer`` is
    one that came whole.
    """

    request_id: str
    endpoint: Endpoint
    body: dict[str, Any]
    owner: str
    created: int
    seed: int
    query_type: str | None = None
    prompts: list[list[int]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    ended: bool = False
    error: tuple[int, str] | None = None
    answer: dict[str, Any] | None = None
    rendered: dict[str, Any] | None = None
    bytes: int = _ENTRY_BYTES
    touched: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def hold_prompt(self, sequence: int, token_ids: list[int]) -> int:
        """Take a prompt's token ids; returns the bytes that they add."""
        while len(self.prompts) <= sequence:
            self.prompts.append([])
        self.prompts[sequence] = token_ids
        return self._grown(8 * len(token_ids))

    def hold_rendered(self, rendered: dict[str, Any], length: int) -> int:
        """Take what an engine made of a chat, so many bytes as JSON; returns the bytes that it adds."""
        self.rendered = rendered
        self.prompts = [rendered["token_ids"]]
        return self._grown(2 * length)

    def hold_event(self, event: Event) -> int:
        """Take an event; returns the bytes that it adds."""
        self.events.append(event)
        return self._grown(_EVENT_BYTES + 8 * len(event.token_ids) + 2 * len(event.text))

    def _grown(self, count: int) -> int:
        self.bytes += count
        return count


class JournalFullError(Exception):
    """Everything the journal holds is of running requests, and there is no room for more."""


class Journal:
    """Entries by request id.

    Parameters
    ----------
    max_bytes : int
        Bound of what is held in memory; ended requests go first, then those without a client.
    retention_s : float
        How long a request is kept after it ended or lost its client.
    folder : path, optional
        Where the journal is kept on disk too.
    fsync : bool
        `synced` returns when what was appended is on the disk itself.
    clock : callable
        Seconds; for tests.
    """

    def __init__(
        self,
        max_bytes: int,
        retention_s: float,
        *,
        folder: str | Path | None = None,
        fsync: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_bytes, self._retention_s, self._clock = max_bytes, retention_s, clock
        self._entries: dict[str, Entry] = {}
        self._active: set[str] = set()
        self.bytes = 0
        self.disk_errors = 0
        self._log = None if folder is None else SegmentLog(Path(folder), fsync=fsync, clock=clock)
        if self._log is not None:
            for entry in replayed(self._log.read()):
                entry.touched = clock()
                self._entries[entry.request_id] = entry
                self.bytes += entry.bytes

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request_id: str) -> Entry | None:
        """The entry of a request that is still remembered."""
        return self._entries.get(request_id)

    def open(self, entry: Entry) -> None:
        """Remember a new request.

        Raises
        ------
        JournalFullError
            If there is no room, and nothing that could be forgotten.
        """
        told = [entry.request_id, entry.endpoint, entry.body, entry.owner, entry.created, entry.seed, entry.query_type]
        content = orjson.dumps(told)
        entry.bytes += 2 * len(content)
        self._make_room(entry.bytes)
        self._entries[entry.request_id] = entry
        self._active.add(entry.request_id)
        self.bytes += entry.bytes
        self._write(entry, b"open", content)

    def attach(self, entry: Entry) -> None:
        """A client is there: the entry is not forgotten."""
        self._active.add(entry.request_id)

    def detach(self, entry: Entry) -> None:
        """No client and no work: the entry is kept for a while."""
        self._active.discard(entry.request_id)
        entry.touched = self._clock()

    def set_prompt(self, entry: Entry, sequence: int, token_ids: list[int]) -> None:
        """Remember the token ids of a sequence's prompt."""
        self.bytes += entry.hold_prompt(sequence, token_ids)
        if self._log is not None:
            self._write(entry, b"prompt", orjson.dumps([entry.request_id, sequence, token_ids]))

    def set_rendered(self, entry: Entry, rendered: dict[str, Any]) -> None:
        """Remember what an engine made of a chat; its token ids are the prompt of all its choices."""
        content = orjson.dumps([entry.request_id, rendered])
        self.bytes += entry.hold_rendered(rendered, len(content))
        self._write(entry, b"rendered", content)

    def append(self, entry: Entry, event: Event) -> None:
        """Remember an event; it may be sent afterwards."""
        self.bytes += entry.hold_event(event)
        if self._log is not None:
            self._write(entry, b"event", orjson.dumps([entry.request_id, len(entry.events), *event.packed()]))
        entry.changed.set()

    def end(self, entry: Entry, *, error: tuple[int, str] | None = None, answer: dict[str, Any] | None = None) -> None:
        """Remember that a request is over, and an answer that came whole."""
        entry.ended, entry.error, entry.answer = True, error, answer
        self._write(entry, b"end", orjson.dumps([entry.request_id, error, answer]))
        entry.changed.set()

    async def synced(self) -> None:
        """Return when everything appended so far is as safe as was asked for."""
        if self._log is not None and self._log.fsync:
            try:
                await self._log.synced()
            except OSError:
                self.disk_errors += 1

    def sweep(self) -> None:
        """Forget what is older than the retention."""
        limit = self._clock() - self._retention_s
        for entry in [e for e in self._entries.values() if e.request_id not in self._active and e.touched <= limit]:
            self._forget(entry)
        if self._log is not None:
            try:
                self._log.roll_by_age(self._retention_s)
            except OSError:
                self.disk_errors += 1

    def close(self) -> None:
        """Close the files."""
        if self._log is not None:
            self._log.close()

    def _make_room(self, count: int) -> None:
        if self.bytes + count <= self._max_bytes:
            return
        idle = [entry for entry in self._entries.values() if entry.request_id not in self._active]
        for entry in sorted(idle, key=lambda e: (not e.ended, e.touched)):
            self._forget(entry)
            if self.bytes + count <= self._max_bytes:
                return
        raise JournalFullError(
            f"the journal holds {self.bytes} bytes of running requests; its limit is {self._max_bytes}"
        )

    def _forget(self, entry: Entry) -> None:
        self._entries.pop(entry.request_id, None)
        self.bytes -= entry.bytes
        if self._log is not None:
            try:
                self._log.forget(entry.request_id)
            except OSError:
                self.disk_errors += 1

    def _write(self, entry: Entry, kind: bytes, content: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.append(entry.request_id, kind, content)
        except OSError:
            # Streams go on from memory; the count is in the metrics and in /health.
            self.disk_errors += 1


class SegmentLog:
    """Append-only files; one is removed when all the requests in it are forgotten.

    A line is a CRC-32 in hex, the kind and JSON. A line that is cut off or does not check ends its segment: the process
    died while it wrote it, so that nothing of it was sent.
    """

    def __init__(self, folder: Path, *, fsync: bool, clock: Callable[[], float]) -> None:
        self.fsync, self._folder, self._clock = fsync, folder, clock
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_mode & 0o077:
                raise InvalidInputError(f"{folder} can be read by others; prompts would be too. chmod 700 {folder}")
            numbers = [int(m[1]) for p in folder.iterdir() if (m := _SEGMENT_NAME.fullmatch(p.name))]
        except OSError as error:
            raise InvalidInputError(
                f"cannot keep a journal in {folder}: {error.strerror}. Choose another folder"
            ) from None
        self._segments: dict[int, set[str]] = {number: set() for number in sorted(numbers)}
        self._file: int | None = None
        self._current = 0
        self._size = 0
        self._started = clock()
        self._write_out: asyncio.Future[None] | None = None
        self._written = self._on_disk = 0

    def read(self) -> Iterator[tuple[bytes, list[Any]]]:
        """All records of all segments, in the order in which they were written."""
        for number, names in self._segments.items():
            for kind, content in _records(self._path(number)):
                names.add(content[0])
                yield kind, content
        for number in [n for n, names in self._segments.items() if not names]:
            self._drop(number)

    def append(self, request_id: str, kind: bytes, content: bytes) -> None:
        """Write one record."""
        if self._file is None or self._size > SEGMENT_BYTES:
            self._roll()
        assert self._file is not None  # noqa: S101
        record = b"%s %s" % (kind, content)
        line = b"%08x %s\n" % (zlib.crc32(record), record)
        view = memoryview(line)
        while view:
            view = view[os.write(self._file, view) :]
        self._size += len(line)
        self._written += 1
        self._segments[self._current].add(request_id)

    async def synced(self) -> None:
        """Return when every record written before this call is on the disk: one write-out serves all who wait."""
        target = self._written
        while self._on_disk < target and self._file is not None:
            if self._write_out is None:
                # A copy, as the segment may be ended meanwhile, and its number be given to another file.
                self._write_out = asyncio.ensure_future(self._written_out(os.dup(self._file), self._written))
            # Whoever began it may leave; the others still wait for it.
            await asyncio.shield(self._write_out)

    async def _written_out(self, file: int, upto: int) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, _sync_and_close, file)
            self._on_disk = max(self._on_disk, upto)
        finally:
            self._write_out = None

    def forget(self, request_id: str) -> None:
        """A request is of no more interest; segments that only held such are removed."""
        for number, names in list(self._segments.items()):
            names.discard(request_id)
            if not names and number != self._current:
                self._drop(number)

    def roll_by_age(self, age_s: float) -> None:
        """Begin a new segment when the present one is older, so that old content can be removed."""
        if self._file is not None and self._clock() - self._started > age_s:
            number = self._current
            self.close()
            self._current = -1
            if not self._segments[number]:
                self._drop(number)

    def close(self) -> None:
        """End the present segment; what was asked to be on the disk is there then."""
        if self._file is not None:
            file, self._file = self._file, None
            if self.fsync:
                _sync_and_close(file)
                self._on_disk = self._written
            else:
                os.close(file)

    def _roll(self) -> None:
        self.close()
        number = max(self._segments, default=0) + 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self._path(number), flags, 0o600)
        self._segments[number] = set()
        self._current, self._size, self._started = number, 0, self._clock()

    def _path(self, number: int) -> Path:
        return self._folder / f"segment-{number:012d}.journal"

    def _drop(self, number: int) -> None:
        del self._segments[number]
        self._path(number).unlink(missing_ok=True)


def replayed(records: Iterator[tuple[bytes, list[Any]]]) -> list[Entry]:
    """Entries as the records of a log leave them."""
    entries: dict[str, Entry] = {}
    for kind, content in records:
        request_id, *rest = content
        if kind == b"open":
            entries[request_id] = Entry(request_id, *rest)
            continue
        entry = entries.get(request_id)
        if entry is None:
            continue
        if kind == b"prompt":
            sequence, token_ids = rest
            entry.hold_prompt(sequence, token_ids)
        elif kind == b"rendered":
            entry.hold_rendered(rest[0], len(orjson.dumps(content)))
        elif kind == b"event":
            count, *packed = rest
            event = Event(*packed)
            if count != len(entry.events) + 1:
                # A damaged file in between: what comes after a gap is not known.
                continue
            entry.hold_event(event)
        elif kind == b"end":
            error, entry.answer = rest
            entry.ended, entry.error = True, None if error is None else (error[0], error[1])
    return list(entries.values())


def _sync_and_close(file: int) -> None:
    try:
        os.fdatasync(file)
    finally:
        os.close(file)


def _records(path: Path) -> Iterator[tuple[bytes, list[Any]]]:
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror}. Remove it or choose another folder") from None
    with file:
        while line := file.readline(_MAX_LINE_BYTES):
            crc, _, record = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or crc != b"%08x" % zlib.crc32(record):
                return
            kind, _, content = record.partition(b" ")
            yield kind, orjson.loads(content)
