"""Traces: what the reader accepts, and what the published trace must say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hetplan.errors import InvalidInputError
from hetplan.workload.traces import Trace, read_azure_trace


def test_the_azure_conversation_trace_as_the_paper_uses_it(data_dir: Path) -> None:
    trace = read_azure_trace(data_dir / "azure_llm_trace" / "conv.csv", max_input_tokens=2048)
    assert len(trace) == 16_663
    assert round(trace.mean_input_tokens) == 763
    assert round(trace.mean_output_tokens) == 232
    assert len(trace.head(5 * 60)) == 1_309
    assert len(trace.head(20 * 60)) == 5_299
    assert len(read_azure_trace(data_dir / "azure_llm_trace" / "conv.csv")) == 19_366


def test_the_published_form_reads_as_the_plain_one(tmp_path: Path) -> None:
    published, plain = tmp_path / "published.csv", tmp_path / "plain.csv"
    published.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-16 18:15:49.6805900,879,55\n"
    )
    plain.write_text("arrival_s,input_tokens,output_tokens\n0,374,44\n3,879,55\n4.314579,396,109\n")
    first, second = read_azure_trace(published), read_azure_trace(plain)
    np.testing.assert_allclose(first.arrival_s, second.arrival_s, atol=2e-6)
    assert first.input_tokens.tolist() == second.input_tokens.tolist() == [374, 879, 396]
    assert first.output_tokens.tolist() == second.output_tokens.tolist()
    assert (first.name, first.source) == ("published", str(published))
    # The clock starts at the first request, also when that one is dropped.
    assert read_azure_trace(published, max_input_tokens=373 + 24).arrival_s[-1] == pytest.approx(4.314579, abs=2e-6)


def test_head_stretch_and_rate() -> None:
    trace = Trace("t", "test", [0.0, 1.0, 2.0, 4.0], [10, 20, 30, 40], [1, 2, 3, 4])
    assert len(trace.head(2.0)) == 2
    assert trace.head(2.5).input_tokens.tolist() == [10, 20, 30]
    assert trace.requests_per_s == pytest.approx(0.75)
    assert trace.stretched(2).requests_per_s == pytest.approx(0.375)
    assert trace.stretched(2).duration_s == 8
    assert Trace("t", "test", [3.0], [1], [1]).requests_per_s is None
    with pytest.raises(ValueError, match="read-only"):
        trace.arrival_s[0] = 1.0
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InvalidInputError):
            trace.stretched(bad)
    with pytest.raises(InvalidInputError):
        trace.head(0)
    with pytest.raises(InvalidInputError, match="no request in its first 1 s"):
        Trace("t", "test", [3.0], [1], [1]).head(1)


def test_the_given_arrays_stay_the_callers() -> None:
    arrivals = np.array([0.0, 1.0])
    trace = Trace("t", "test", arrivals, [1, 2], [1, 2])
    arrivals[1] = 9.0
    assert trace.arrival_s[1] == 1.0


@pytest.mark.parametrize(
    ("arrivals", "prompts", "words"),
    [
        ([], [], "holds no requests"),
        ([0.0, float("nan")], [1, 1], r"arrival_s\[1\]"),
        ([-1.0, 0.0], [1, 1], r"arrival_s\[0\]"),
        ([1.0, 0.0], [1, 1], r"arrival_s\[1\] is earlier"),
        ([0.0, 1.0], [1, 0], r"input_tokens\[1\] is 0"),
        ([0.0, 1.0], [1], "one per arrival"),
        ([0.0, 1.0], [1.5, 2.0], "whole numbers"),
    ],
)
def test_a_trace_out_of_range_is_refused(arrivals: list[float], prompts: list[int], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        Trace("t", "test", arrivals, prompts, [1] * len(arrivals))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("x,1,1", "line 3, column arrival_s: 'x'"),
        ("nan,1,1", "line 3, column arrival_s: 'nan'"),
        ("-1,1,1", "line 3, column arrival_s: '-1'"),
        ("1,0,1", "line 3, column input_tokens: '0'"),
        ("1,1,-2", "line 3, column output_tokens: '-2'"),
        ("1,1.5,1", "line 3, column input_tokens: '1.5'"),
        ("1,,1", "line 3, column input_tokens: ''"),
        ("1,1", "line 3: 2 values for 3 columns"),
    ],
)
def test_errors_name_line_and_column(tmp_path: Path, row: str, words: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"arrival_s,input_tokens,output_tokens\n0,1,1\n{row}\n")
    with pytest.raises(InvalidInputError) as caught:
        read_azure_trace(path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no requests"),
        ("arrival_s,input_tokens,output_tokens\n", "holds no requests"),
        ("arrival_s,input_tokens\n0,1\n", "the header must be"),
        ("time,input,output\n0,1,1\n", "unknown column"),
        ("arrival_s,input_tokens,output_tokens\n0,100,1\n", "every prompt is longer than max_input_tokens=50"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2, column TIMESTAMP: 'yesterday'"),
    ],
)
def test_files_without_usable_requests_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        read_azure_trace(path, max_input_tokens=50)
    assert words in str(caught.value)
