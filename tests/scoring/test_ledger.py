"""The ledger of predictions and measurements."""

from __future__ import annotations

import datetime
import json
import stat
from pathlib import Path

import pytest

from hetplan.errors import InvalidInputError
from hetplan.scoring.ledger import append_to_ledger, read_ledger
from hetplan.scoring.score import Scored

TODAY = datetime.date(2026, 3, 1)
NOTHING = float("nan")
ROW = Scored("GEMM", "m=1 \u00b5", 1.0, 0.5, NOTHING, 1.1, NOTHING, NOTHING, "fit")


def test_rows_come_back_as_they_went_in(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    assert append_to_ledger(path, [ROW, ROW], date=TODAY, version="1.2") == 2
    assert append_to_ledger(path, [ROW], date=TODAY + datetime.timedelta(days=1), version="1.3") == 1
    entries, torn = read_ledger(path)
    assert torn == ()
    assert [(entry.date.day, entry.hetplan) for entry in entries] == [(1, "1.2"), (1, "1.2"), (2, "1.3")]
    first = entries[0]
    assert (first.group, first.label, first.measured, first.datasheet, first.ours) == (
        "GEMM",
        "m=1 \u00b5",
        1,
        0.5,
        1.1,
    )
    assert first.paper is None
    assert first.low is None
    assert first.source == "fit"
    assert all(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def test_a_new_ledger_is_its_owner_s_alone_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    append_to_ledger(path, [ROW], date=TODAY, version="1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    append_to_ledger(path, [ROW], date=TODAY, version="1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_torn_last_line_is_passed_over_and_costs_no_later_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    append_to_ledger(path, [ROW, ROW], date=TODAY, version="1")
    whole = path.read_bytes()
    for cut in (1, 2, len(whole) // 4):
        path.write_bytes(whole[:-cut])
        kept, torn = read_ledger(path)
        # Without its newline alone, a line is whole.
        assert (len(kept), torn) == ((2, ()) if cut == 1 else (1, (2,)))
        append_to_ledger(path, [ROW], date=TODAY, version="2")
        entries, torn = read_ledger(path)
        assert path.read_bytes().startswith(whole[:-cut])
        assert entries[: len(kept)] == kept
        assert entries[-1].hetplan == "2"
        assert len(entries) == len(kept) + 1


@pytest.mark.parametrize(
    "changes",
    [{"date": "yesterday"}, {"date": 3}, {"measured": None}, {"ours": "1"}, {"low": True}, {"group": 1}, {"x": 1}],
)
def test_a_line_that_is_no_entry_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    path = tmp_path / "ledger.jsonl"
    append_to_ledger(path, [ROW], date=TODAY, version="1")
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes) + "\n")
    with pytest.raises(InvalidInputError, match="line 2: not an entry"):
        read_ledger(path)


def test_a_ledger_that_cannot_be_written_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="Choose another ledger"):
        append_to_ledger(tmp_path / "no" / "ledger.jsonl", [ROW], date=TODAY, version="1")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_ledger(tmp_path / "none.jsonl")
