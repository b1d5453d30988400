"""``hetplan accuracy`` as a user meets it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hetplan import cli
from hetplan.scoring.ledger import read_ledger
from hetplan.scoring.runs import OWN_COLUMNS

Run = Callable[..., tuple[int, str, str]]
FINE, OUR_FAULT, BAD_INPUT = range(3)
HEADER = ",".join(OWN_COLUMNS)
RUNS = [
    "H100,llama-3.1-8b,1,1,8,1024,128,static,,,,output_tokens_per_s,900",
    "H100,llama-3.1-8b,2,1,8,1024,128,static,,,,output_tokens_per_s,1400",
    "H100,llama-3.1-8b,1,1,8,1024,128,static,,,,ttft_s,0.2",
]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``hetplan ARGUMENTS``: exit code, stdout, stderr with line breaks taken out."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hetplan", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(leaving.value.code or 0), out, " ".join(err.split())

    return call


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "mine.csv"
    path.parent.mkdir()
    path.write_text("\n".join([HEADER, *RUNS]) + "\n", encoding="utf-8")
    return path


def test_a_table_is_scored_by_three_methods(run: Run, table: Path) -> None:
    code, out, err = run("accuracy", table)
    assert (code, out) == (FINE, "")
    assert all(word in err for word in ("datasheet", "paper", "ours", "median", "bias", "inside", "Worst rows"))
    assert "mine.csv: static" in err


def test_json_is_one_document_with_all_numbers(run: Run, table: Path) -> None:
    code, out, _ = run("accuracy", table, "--json", "--worst", "1")
    assert code == FINE
    assert out.count("\n") == 1
    document = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    rate, first = document["groups"]
    assert (rate["rows"], rate["pairs_ranked"] + rate["ties"], first["rows"]) == (2, 1, 1)
    for group in (rate, first):
        assert len(group["worst"]) == 1
        for measure in ("mean_error", "median_error", "bias"):
            assert set(group[measure]) == {"datasheet", "paper", "ours"}
    one = first["worst"][0]
    assert one["measured"] == 0.2
    assert abs(one["ours"] / 0.2 - 1) == pytest.approx(first["mean_error"]["ours"])


def test_the_ledger_gets_every_row_of_the_groups_asked_for(run: Run, table: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    assert run("accuracy", table, "--ledger", ledger)[0] == FINE
    code, out, err = run("accuracy", table, "--ledger", ledger, "--only", "TTFT", "--json")
    assert code == FINE
    assert "1 rows appended" in err
    assert json.loads(out)["ledger"] == {"path": str(ledger), "rows": 1}
    entries, _ = read_ledger(ledger)
    assert sorted(entry.measured for entry in entries[:3]) == [0.2, 900, 1400]
    assert [entry.measured for entry in entries[3:]] == [0.2]
    assert all(entry.low is not None and entry.low < (entry.ours or 0) for entry in entries)


def test_another_engine_changes_what_is_predicted(run: Run, table: Path) -> None:
    ours = [json.loads(run("accuracy", table, "--json", *more)[1])["groups"][0]["worst"][0]["ours"]
            for more in ((), ("--engine", "vllm-2023"))]  # fmt: skip
    assert ours[0] != ours[1]
    code, _, err = run("accuracy", table, "--engine", "no-such")
    assert code == BAD_INPUT
    assert "no-such" in err


def test_a_folder_is_searched_and_unknown_files_are_passed_over(run: Run, table: Path) -> None:
    (table.parent / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    (table.parent / "gemm_mine.csv").write_text("engine,dtype,m,n,k,latency_us\n", encoding="utf-8")
    (table.parent / "note.txt").write_text("no table", encoding="utf-8")
    code, out, err = run("accuracy", table.parent.parent, "--json")
    assert code == FINE
    document = json.loads(out)
    assert len(document["groups"]) == 2
    assert set(document["passed_over"]) == {"runs/other.csv", "runs/gemm_mine.csv"}
    assert "call it gemm_<GPU>.csv" in document["passed_over"]["runs/gemm_mine.csv"]
    assert "passed over runs/other.csv" in err


def test_nothing_known_is_an_input_error(run: Run, tmp_path: Path) -> None:
    assert run("accuracy", tmp_path / "none.csv")[0] == BAD_INPUT
    code, _, err = run("accuracy", tmp_path)
    assert code == BAD_INPUT
    assert "no CSV file" in err
    unknown = tmp_path / "other.csv"
    unknown.write_text("a,b\n1,2\n", encoding="utf-8")
    for path in (unknown, tmp_path):
        code, out, err = run("accuracy", path, "--json")
        assert code == BAD_INPUT
        said = json.loads(out)["error"]["message"]
        assert HEADER in said
        assert err == ""
    assert "a, b" in json.loads(run("accuracy", unknown, "--json")[1])["error"]["message"]


def test_rows_that_cannot_be_scored_are_an_error_only_when_all_of_them(run: Run, table: Path) -> None:
    strange = RUNS[0].replace("llama-3.1-8b", "no-such-model")
    table.write_text("\n".join([HEADER, *RUNS, strange]) + "\n", encoding="utf-8")
    code, _, err = run("accuracy", table)
    assert code == FINE
    assert "no-such-model" in err
    table.write_text("\n".join([HEADER, strange]) + "\n", encoding="utf-8")
    code, _, err = run("accuracy", table)
    assert code == BAD_INPUT
    assert "no row could be scored" in err


def test_options_out_of_range_are_refused(run: Run, table: Path) -> None:
    code, _, err = run("accuracy", table, "--worst", "-1")
    assert (code, "0 or more" in err) == (BAD_INPUT, True)
    code, _, err = run("accuracy", table, "--only", "decode")
    assert code == BAD_INPUT
    assert "no group's name contains 'decode'" in err


def test_all_of_the_measured_data_in_one_command(run: Run, data_dir: Path) -> None:
    code, out, _ = run("accuracy", data_dir, "--json", "--worst", "0")
    assert code == FINE
    document = json.loads(out)
    assert len(document["groups"]) >= 50
    assert "azure_llm_trace/conv.csv" in document["passed_over"]
