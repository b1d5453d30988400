"""Measured runs as users and others write them down."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hetplan.errors import InvalidInputError
from hetplan.scoring.runs import OWN_COLUMNS, read_runs
from hetplan.scoring.score import score_runs

HEADER = ",".join(OWN_COLUMNS)
RUN = "H100,llama-3.1-8b,1,1,8,1024,128,closed_loop,,,,tpot_s,0.0078"


def write(tmp_path: Path, *lines: str, name: str = "mine.csv") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_own_runs_are_read_and_scored(tmp_path: Path) -> None:
    (run,) = read_runs(write(tmp_path, HEADER, RUN))
    assert (run.table, run.line, run.gpu, run.batch, run.metric, run.value) == (
        "mine.csv", 2, "H100", 8, "tpot_s", 0.0078,
    )  # fmt: skip
    assert run.engine is None
    assert run.weight_dtype is None
    scored, left_out = score_runs([run])
    assert not left_out
    assert scored[0].low < scored[0].ours < scored[0].high
    # A decode step of an 8B model reads 15 GB: no method may be below that at the datasheet's bandwidth.
    assert all(getattr(scored[0], method) > 15e9 / 3.36e12 for method in ("datasheet", "paper", "ours"))
    assert "closed_loop" in scored[0].group


def test_columns_that_have_a_default_may_be_left_out_and_others_added(tmp_path: Path) -> None:
    header = "note,gpu,model,tensor_parallel,batch,input_tokens,output_tokens,schedule,metric,value"
    (run,) = read_runs(write(tmp_path, header, "mine,L40S,llama-3.1-8b,1,4,500,100,static,ttft_s,0.3"))
    assert (run.gpu, run.pipeline_parallel, run.value) == ("L40S", 1, 0.3)


def test_an_unknown_header_is_refused_with_the_columns_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as refused:
        read_runs(write(tmp_path, "when,what", "1,2"))
    assert "what, when" in str(refused.value)
    assert HEADER in str(refused.value)


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ("0.0078", "fast", "value"),
        ("0.0078", "-1", "value"),
        ("tpot_s", "tpot", "metric"),
        ("closed_loop", "x", "sched"),
    ],
)
def test_a_bad_value_names_its_line(tmp_path: Path, good: str, bad: str, said: str) -> None:
    path = write(tmp_path, HEADER, RUN, RUN.replace(good, bad))
    with pytest.raises(InvalidInputError, match=f"line 3: .*{said}"):
        read_runs(path)


def test_a_bad_value_of_a_published_table_names_its_line_too(tmp_path: Path) -> None:
    header = "model,gpu,tp,isl,batch,osl,prefill_ms,tpot_ms,e2e_ms"
    path = write(tmp_path, header, "llama2-70b,h100-80gb,8,128,1,128,50,20,2600", "llama2-70b,h100,8,128,1,128,5,2,9")
    with pytest.raises(InvalidInputError, match="line 3: 'h100' is not known; known: a100-80gb, h100-80gb"):
        read_runs(path)
    path = write(tmp_path, header, "llama2-70b,h100-80gb,8,128,1,128,many,20,2600")
    with pytest.raises(InvalidInputError, match=r"line 2: .*many"):
        read_runs(path)


def test_milliseconds_of_published_tables_become_seconds(tmp_path: Path) -> None:
    header = "model,gpu,tp,isl,batch,osl,prefill_ms,tpot_ms,e2e_ms"
    tpot, ttft = read_runs(write(tmp_path, header, "llama2-70b,h100-80gb,2,128,64,128,50,20,2600"))
    assert (tpot.metric, ttft.metric) == ("tpot_s", "ttft_s")
    assert math.isclose(tpot.value, 0.02)
    assert math.isclose(ttft.value, 0.05)
    assert tpot.excluded is None
    assert ttft.excluded == "the prompt was split over several passes"
