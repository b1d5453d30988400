"""Traces: what the reader accepts, and what the published trace must say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetplan.errors import InvalidInputError
from hetplan.workload.traces import (
    Trace,
    read_azure_trace,
    read_burstgpt_trace,
    read_jsonl_trace,
    read_trace,
    write_vllm_trace,
)


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


# ---- Azure 2024


def test_times_with_a_zone_and_any_number_of_digits(tmp_path: Path) -> None:
    """The files of 2024 have an offset, and no fraction on a whole second; those of 2023 have seven digits."""
    path = tmp_path / "code_1week.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:01+00:00,2399,6\n"
        "2024-05-10 02:00:01.5000000+02:00,76,15\n"
    )
    trace = read_trace(path)
    np.testing.assert_allclose(trace.arrival_s, [0, 0.99007, 1.49007], atol=2e-6)
    assert trace.output_tokens.tolist() == [5, 6, 15]
    assert len(trace.head(1.0)) == 2


# ---- BurstGPT

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,276,693,API log
1106,ChatGPT,0,0,0,Conversation log
1129,ChatGPT,1305,0,1305,Conversation log
"""


def test_burstgpt_drops_failed_calls_and_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "BurstGPT_1.csv"
    path.write_text(BURSTGPT)
    trace = read_burstgpt_trace(path)
    assert trace.arrival_s.tolist() == [5, 45, 118]
    assert trace.input_tokens.tolist() == [472, 1087, 417]
    assert trace.output_tokens.tolist() == [18, 230, 276]
    assert trace.dropped_count == 2
    assert trace.source == f"{path} (2 failed calls dropped)"
    assert trace.stretched(2).dropped_count == 2
    assert len(read_trace(path, max_input_tokens=500)) == 2


def test_burstgpt_refuses_failed_calls_when_told_to(tmp_path: Path) -> None:
    path = tmp_path / "BurstGPT_1.csv"
    path.write_text(BURSTGPT)
    with pytest.raises(InvalidInputError, match="line 5, column Response tokens: a failed call"):
        read_burstgpt_trace(path, failures="refuse")
    with pytest.raises(InvalidInputError, match="failures is 'drop' or 'refuse', got 'keep'"):
        read_burstgpt_trace(path, failures="keep")  # type: ignore[arg-type]
    path.write_text("".join(BURSTGPT.splitlines(keepends=True)[:1] + BURSTGPT.splitlines(keepends=True)[4:]))
    with pytest.raises(InvalidInputError, match="holds no requests"):
        read_burstgpt_trace(path)


def test_burstgpt_of_the_second_release(tmp_path: Path) -> None:
    path = tmp_path / "BurstGPT_3.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "0.25,7,3.5,GPT-4,100,20,120,Conversation log\n"
    )
    trace = read_trace(path)
    assert (trace.arrival_s.tolist(), trace.dropped_count) == ([0.25], 0)
    path.write_text("Timestamp,Request tokens,Response tokens\n1,0,5\n")
    with pytest.raises(InvalidInputError, match="line 2, column Request tokens: '0'"):
        read_trace(path)


# ---- JSON Lines


@pytest.mark.parametrize(
    "row",
    [
        {"timestamp_s": 1.5, "input_tokens": 20, "output_tokens": 3},
        {"arrival_s": 1.5, "input_len": 20, "output_len": 3},
        {"timestamp": 1.5, "prompt_len": 20, "output_tokens": 3, "model": "any"},
        {"timestamp": 1.5, "input_length": 20, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 1.5, "prompt_tokens": 20, "completion_tokens": 3},
    ],
)
def test_spellings_of_json_lines(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(row) + "\n\n")
    trace = read_trace(path)
    assert (trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([1.5], [20], [3])


def test_json_lines_in_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text('{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46]}\n')
    assert read_jsonl_trace(path, seconds_per_timestamp=0.001).arrival_s.tolist() == [pytest.approx(27.482)]
    with pytest.raises(InvalidInputError, match="seconds_per_timestamp is 0"):
        read_jsonl_trace(path, seconds_per_timestamp=0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"timestamp": 1, "input_tokens": 1}', "line 2: no key output_tokens or output_length"),
        ('{"input_tokens": 1, "output_tokens": 1}', "line 2: no key timestamp_s or arrival_s"),
        ('{"timestamp": 1, "input_tokens": 1, "prompt_len": 1, "output_tokens": 1}', "several of input_tokens, prompt"),
        ('{"timestamp": "1", "input_tokens": 1, "output_tokens": 1}', "line 2, key timestamp: '1' is not a number"),
        ('{"timestamp": NaN, "input_tokens": 1, "output_tokens": 1}', "line 2, key timestamp: nan"),
        ('{"timestamp": 1, "input_tokens": 1.5, "output_tokens": 1}', "key input_tokens: 1.5 is not a whole number"),
        ('{"timestamp": 1, "input_tokens": true, "output_tokens": 1}', "key input_tokens: True"),
        ('{"timestamp": 1, "input_tokens": 1, "output_tokens": 0}', "key output_tokens: 0"),
        ('{"timestamp": 1, "input_tokens": 1' + "0" * 400 + ', "output_tokens": 1}', "is not a whole number"),
        ("[1]", "line 2: a JSON object is needed, got list"),
        ("{", "line 2: not readable as JSON"),
        ("[" * 100_000, "line 2: not readable as JSON"),
    ],
)
def test_errors_of_json_lines_name_line_and_key(tmp_path: Path, row: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_tokens": 1, "output_tokens": 1}\n' + row + "\n")
    with pytest.raises(InvalidInputError) as caught:
        read_trace(path)
    assert words in str(caught.value)


def test_a_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_trace(tmp_path / "absent.csv")
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\xff")
    with pytest.raises(InvalidInputError, match="line 1: not UTF-8"):
        read_trace(path)


# ---- for vllm bench serve


def vllm_prompt_tokens(entry: dict[str, Any], chunk_tokens: int) -> int:
    """Length of the prompt that vLLM 0.32's TimedTrace makes: hashes, each worth a chunk, up to the input length."""
    return min(int(entry["input_length"]), chunk_tokens * len(entry["hash_ids"]))


@pytest.mark.parametrize("chunk_tokens", [16, 512])
def test_vllm_replays_prompts_of_the_right_length(tmp_path: Path, chunk_tokens: int) -> None:
    trace = Trace("t", "test", [2.0, 2.5, 9.125], [1, 763, 1024], [7, 232, 1])
    path = tmp_path / "timed.jsonl"
    write_vllm_trace(trace, path, chunk_tokens=chunk_tokens)
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [vllm_prompt_tokens(entry, chunk_tokens) for entry in entries] == [1, 763, 1024]
    assert [entry["timestamp"] for entry in entries] == [0, 0.5, 7.125]  # sent at once, then at their distance
    hashes = [number for entry in entries for number in entry["hash_ids"]]
    assert len(set(hashes)) == len(hashes)  # no prefix is shared
    again = read_trace(path)
    assert again.arrival_s.tolist() == [0, 0.5, 7.125]
    assert again.input_tokens.tolist() == trace.input_tokens.tolist()
    assert again.output_tokens.tolist() == trace.output_tokens.tolist()


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    trace = Trace("t", "test", [0.0], [1], [1])
    with pytest.raises(InvalidInputError, match="chunk_tokens is 0"):
        write_vllm_trace(trace, tmp_path / "t.jsonl", chunk_tokens=0)
    with pytest.raises(InvalidInputError, match="cannot be written"):
        write_vllm_trace(trace, tmp_path / "absent" / "t.jsonl")
