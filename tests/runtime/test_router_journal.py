"""The journal: what was written before it was sent is there after a restart; bounds, rights, torn files."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetplan.errors import InvalidInputError
from hetplan.runtime.router import journal as journal_module
from hetplan.runtime.router.journal import Entry, Event, Journal, JournalFullError

BODY = {"prompt": "a secret\nof two lines", "stream": True}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(journal: Journal, request_id: str = "one") -> Entry:
    entry = Entry(request_id, "completions", dict(BODY), "owner", 17, 4)
    journal.open(entry)
    return entry


def on_disk(folder: Path, clock: Clock | None = None) -> Journal:
    return Journal(2**30, 100.0, folder=folder, clock=clock or Clock())


def test_a_restart_finds_what_was_written(tmp_path: Path) -> None:
    journal = on_disk(tmp_path / "journal")
    entry = opened(journal)
    journal.set_prompt(entry, 0, [1, 2, 3])
    events = [
        Event(0, [4], "é", {"tokens": ["é"]}),
        Event(1, [5, 6], "", None, "stop", "END"),
        Event(0, [], "", None, "length", None, {"content": "x"}),
    ]
    for event in events:
        journal.append(entry, event)
    done = opened(journal, "two")
    journal.end(done, error=(502, "lost"))
    whole = opened(journal, "three")
    journal.end(whole, answer={"choices": []})
    chat = opened(journal, "four")
    journal.set_rendered(chat, {"token_ids": [9, 9], "sampling_params": {"max_tokens": 3}})

    # Nothing was closed: the process was killed.
    again = on_disk(tmp_path / "journal")
    found = again.get("one")
    assert found is not None
    assert (found.body, found.owner, found.created, found.seed) == (BODY, "owner", 17, 4)
    assert (found.prompts, found.events, found.ended) == ([[1, 2, 3]], events, False)
    two, three, four = again.get("two"), again.get("three"), again.get("four")
    assert two is not None
    assert two.ended
    assert two.error == (502, "lost")
    assert three is not None
    assert three.answer == {"choices": []}
    assert four is not None
    assert four.rendered == {"token_ids": [9, 9], "sampling_params": {"max_tokens": 3}}
    assert four.prompts == [[9, 9]]
    # And it goes on where it was, over another restart.
    again.append(found, Event(0, [7], "z"))
    last = on_disk(tmp_path / "journal").get("one")
    assert last is not None
    assert last.events == [*events, Event(0, [7], "z")]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), cut=st.booleans(), bit=st.integers(0, 7))
def test_a_file_cut_or_damaged_anywhere_gives_a_beginning(tmp_path: Path, place: float, cut: bool, bit: int) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    journal = on_disk(folder)
    entry = opened(journal)
    events = [Event(0, [token], chr(97 + token)) for token in range(5)]
    for event in events:
        journal.append(entry, event)
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    if cut:
        path.write_bytes(bytes(content[:at]))
    else:
        content[at] ^= 1 << bit
        path.write_bytes(bytes(content))
    found = on_disk(folder).get("one")
    if found is not None:
        assert found.events == events[: len(found.events)]


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    opened(on_disk(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    folder.chmod(0o755)
    with pytest.raises(InvalidInputError, match="chmod 700"):
        on_disk(folder)


def test_a_link_in_place_of_a_segment_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir(mode=0o700)
    (tmp_path / "other").write_text("x")
    (folder / "segment-000000000001.journal").symlink_to(tmp_path / "other")
    with pytest.raises(InvalidInputError, match="cannot read"):
        on_disk(folder)


def test_ended_requests_are_forgotten_first_and_running_ones_never() -> None:
    clock = Clock()
    journal = Journal(50_000, 100.0, clock=clock)
    running = opened(journal, "running")
    ended = opened(journal, "ended")
    journal.end(ended)
    journal.detach(ended)
    clock.now += 1
    left = opened(journal, "left")
    journal.detach(left)
    opened(journal, "more")
    assert journal.get("ended") is ended
    with pytest.raises(JournalFullError, match="running requests"):
        [opened(journal, f"more-{number}") for number in range(100)]
    assert len(journal) > 5
    assert journal.get("ended") is None
    assert journal.get("left") is None
    assert journal.get("running") is running
    assert journal.bytes <= 50_000


def test_retention_forgets_requests_and_removes_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 500)
    clock = Clock()
    journal = on_disk(tmp_path / "journal", clock)
    kept = opened(journal, "kept")
    gone = [opened(journal, f"gone-{number}") for number in range(20)]
    for entry in gone:
        journal.append(entry, Event(0, list(range(30)), "text"))
        journal.end(entry)
        journal.detach(entry)
    before = len(list((tmp_path / "journal").iterdir()))
    assert before > 3
    clock.now += 99
    journal.sweep()
    assert len(journal) == 21
    clock.now += 2
    journal.sweep()
    assert len(journal) == 1
    assert len(list((tmp_path / "journal").iterdir())) <= 2
    again = on_disk(tmp_path / "journal", clock)
    assert again.get("kept") is not None
    assert kept.events == []
    # What shared a file with it may come back with it, to be forgotten anew.
    clock.now += 101
    again.attach(kept)
    again.sweep()
    assert len(again) == 1


def test_a_full_disk_does_not_stop_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = on_disk(tmp_path / "journal")
    entry = opened(journal)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    journal.append(entry, Event(0, [1], "a"))
    assert (entry.events, journal.disk_errors) == ([Event(0, [1], "a")], 1)


def test_one_write_out_serves_all_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (calls.append(fd), real(fd))[1])
    journal = Journal(2**30, 100.0, folder=tmp_path / "journal", fsync=True)

    async def run() -> None:
        entry = opened(journal)
        for token in range(200):
            journal.append(entry, Event(0, [token], "a"))
        await asyncio.gather(*(journal.synced() for _ in range(200)))

    asyncio.run(run())
    assert 1 <= len(calls) <= 3
    journal.close()


def test_a_segment_may_end_while_it_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write-out ends well, and what was said to be on the disk is in the files."""
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 300)
    written: list[int] = []
    real = os.fdatasync

    def slow(file: int) -> None:
        time.sleep(0.002)
        real(file)
        written.append(os.fstat(file).st_ino)

    monkeypatch.setattr(os, "fdatasync", slow)
    clock = Clock()
    journal = Journal(2**30, 100.0, folder=tmp_path / "journal", fsync=True, clock=clock)

    async def one(number: int) -> None:
        entry = opened(journal, f"r{number}")
        for token in range(20):
            journal.append(entry, Event(0, [token], "x"))
            await journal.synced()

    async def aged() -> None:
        for _ in range(10):
            await asyncio.sleep(0.01)
            clock.now += 60.0
            journal.sweep()

    async def left() -> None:
        """One who began a write-out and leaves lets the others wait for it."""
        for number in range(20):
            asked = asyncio.create_task(one(100 + number))
            await asyncio.sleep(0.003)
            asked.cancel()

    async def whole() -> None:
        await asyncio.gather(*(one(number) for number in range(10)), aged(), left())
        await asyncio.sleep(0.1)

    asyncio.run(whole())
    assert journal.disk_errors == 0
    files = {path.stat().st_ino for path in (tmp_path / "journal").iterdir()}
    assert files <= set(written)
    again = on_disk(tmp_path / "journal")
    for number in range(10):
        found = again.get(f"r{number}")
        assert found is not None
        assert [event.token_ids for event in found.events] == [[token] for token in range(20)]
