"""Closed loops that others measured, beside the simulator's."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from hetplan.errors import InvalidInputError
from hetplan.scoring.closed_loops import (
    INFERENCEMAX,
    ONE_WAITS,
    PLAIN,
    ClosedLoop,
    read_closed_loops,
    simulate_closed_loop,
)

HEADER = "id,backend,model_path,system,precision,isl,osl,concurrency,tp_size,pp_size,ttft_ms,tpot_ms"
ROW = "mine,trtllm,meta-llama/Llama-3.1-8B-Instruct,h100_sxm,unspecified,1024,128,8,1,1,190.9,7.94"


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "loops.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def loop(tmp_path: Path) -> ClosedLoop:
    (found,) = read_closed_loops(write(tmp_path, HEADER, ROW))
    return found


def test_a_row_is_read_with_its_clients(tmp_path: Path, loop: ClosedLoop) -> None:
    assert (loop.slots, loop.ttft_s, loop.tpot_s) == (8, pytest.approx(0.1909), pytest.approx(0.00794))
    assert loop.clients is ONE_WAITS
    others = read_closed_loops(
        write(tmp_path, HEADER, ROW.replace("mine,trtllm", "2026_04_06_x,vllm"), ROW.replace("mine,trtllm", "x,sglang"))
    )
    assert [one.clients for one in others] == [INFERENCEMAX, PLAIN]


def test_other_tables_and_bad_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no known table"):
        read_closed_loops(write(tmp_path, "a,b", "1,2"))
    with pytest.raises(InvalidInputError, match="line 2"):
        read_closed_loops(write(tmp_path, HEADER, ROW.replace("190.9", "fast")))


def test_a_client_that_waits_for_a_slot_waits_as_long_as_one_takes_to_come_free(loop: ClosedLoop) -> None:
    """One more client than slots: the first token comes later by an answer's time over the slots."""
    plain = simulate_closed_loop(loop, PLAIN)
    waits = simulate_closed_loop(loop, ONE_WAITS)
    answer_s = plain[1] * (loop.run.output_tokens - 1)
    assert waits[0] - plain[0] > 0
    assert waits[0] < plain[0] + 2 * answer_s / loop.slots
    assert waits[1] == pytest.approx(plain[1], rel=0.2)


def test_requests_that_no_cache_holds_have_no_latency(tmp_path: Path) -> None:
    row = ROW.replace("Llama-3.1-8B-Instruct", "Llama-3.1-70B").replace(",8,1,1,", ",8,2,1,").replace("1024", "120000")
    (huge,) = read_closed_loops(write(tmp_path, HEADER, row))
    assert all(math.isnan(value) for value in simulate_closed_loop(huge))


def test_measured_loops_are_met_within_ten_and_twenty_five_percent(data_dir: Path) -> None:
    """Every third H100 row: median errors of TPOT and TTFT, each with the clients of its source."""
    loops = read_closed_loops(data_dir / "aiconfigurator" / "e2e_online_silicon.csv")
    some = [one for one in loops if one.run.gpu == "H100-SXM5-80GB"][::3]
    assert len(some) == 74
    simulated = np.array([simulate_closed_loop(one) for one in some])
    measured = np.array([(one.ttft_s, one.tpot_s) for one in some])
    ttft, tpot = np.median(np.abs(simulated / measured - 1), axis=0)
    assert tpot <= 0.10
    assert ttft <= 0.25
