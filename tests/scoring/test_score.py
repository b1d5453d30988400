"""The arithmetic of scores, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from hetplan.scoring.runs import MeasuredRun
from hetplan.scoring.score import Scored, rank_pairs, score_runs, summarise

NOTHING = float("nan")


def row(measured: float, ours: float, *, low: float = 0.0, high: float = 0.0, gpus: int = 1) -> Scored:
    return Scored(
        group="a", label=f"{measured:g}", measured=measured, datasheet=measured / 2, paper=2 * measured, ours=ours,
        low=low, high=high, source="s", peers=("x",), gpus=gpus,
    )  # fmt: skip


def run(**changes: object) -> MeasuredRun:
    values = {
        "table": "t.csv", "line": 2, "group": "a", "gpu": "H100", "model": "llama-3.1-8b", "batch": 8,
        "input_tokens": 1000, "output_tokens": 100, "schedule": "static", "metric": "tpot_s", "value": 0.01,
    }  # fmt: skip
    return MeasuredRun.from_dict(values | changes)


def test_mean_median_and_bias_of_three_rows() -> None:
    # Errors of +10, -20 and +60%.
    rows = [row(1, 1.1, low=0.9, high=1.3), row(10, 8, low=9, high=9.5), row(5, 8, low=4, high=12)]
    (group,) = summarise(rows, {}, worst=2)
    assert group.rows == 3
    assert math.isclose(group.mean_error["ours"], 0.3)
    assert math.isclose(group.median_error["ours"], 0.2)
    assert math.isclose(group.bias["ours"], 0.1)
    assert math.isclose(group.mean_error["datasheet"], 0.5)
    assert math.isclose(group.bias["datasheet"], -0.5)
    assert math.isclose(group.mean_error["paper"], 1.0)
    assert math.isclose(group.inside_band, 2 / 3)
    # Half widths over the prediction: 0.2/1.1, 0.25/8, 4/8.
    assert math.isclose(group.half_width, 0.2 / 1.1)
    assert [one.label for one in group.worst] == ["5", "10"]


def test_rows_without_a_band_have_no_share_inside_it() -> None:
    (group,) = summarise([row(1, 1.1, low=NOTHING, high=NOTHING)], {})
    assert math.isclose(group.mean_error["ours"], 0.1)
    assert math.isnan(group.inside_band)
    assert math.isnan(group.half_width)


def test_pairs_are_ranked_by_what_a_gpu_gives_and_near_ones_tie() -> None:
    # Rates per GPU: 10, 9 and 9.1. Ours: 10, 11, 8.
    rows = [row(10, 10, gpus=1), row(18, 22, gpus=2), row(36.4, 32, gpus=4)]
    pairs, right, ties = rank_pairs(rows)
    assert (pairs, ties) == (2, 1)
    assert right["ours"] == 1
    assert right["datasheet"] == right["paper"] == 2


def test_times_rank_the_other_way_round() -> None:
    # One GPU takes 1 s, two take 0.4 s: two give more each, 1.25 against 1. Ours says 0.6 s, so that one gives more.
    rows = [replace(one, is_time=True) for one in (row(1, 1, gpus=1), row(0.4, 0.6, gpus=2))]
    pairs, right, ties = rank_pairs(rows)
    assert (pairs, right["ours"], right["paper"], ties) == (1, 0, 1, 0)


def test_rows_of_one_size_or_of_other_peers_are_no_pair() -> None:
    assert rank_pairs([row(1, 1), row(2, 2)])[0] == 0
    assert rank_pairs([row(1, 1), replace(row(2, 2, gpus=2), peers=("y",))])[0] == 0
    assert rank_pairs([replace(row(1, 1), peers=None), replace(row(2, 2, gpus=2), peers=None)])[0] == 0


def test_runs_that_differ_in_more_than_gpus_are_not_compared() -> None:
    scored, _ = score_runs([run(), run(tensor_parallel=2, batch=16)])
    assert rank_pairs(scored)[0] == 0
    scored, _ = score_runs([run(), run(tensor_parallel=2)])
    assert rank_pairs(scored)[0] == 1


def test_what_is_excluded_is_counted_by_reason() -> None:
    runs = [run(), run(excluded="too warm"), run(excluded="too warm"), run(model="no-such-model")]
    done: list[tuple[int, int]] = []
    scored, left_out = score_runs(runs, on_progress=lambda rows, total: done.append((rows, total)))
    assert len(scored) == 1
    assert left_out["a"]["too warm"] == 2
    assert sum(left_out["a"].values()) == 3
    assert done[-1] == (4, 4)
    (group,) = summarise(scored, left_out)
    assert (group.rows, sum(group.left_out.values())) == (1, 3)


def test_a_run_that_does_not_fit_the_memory_is_left_out() -> None:
    scored, left_out = score_runs([run(model="llama-3.1-70b", gpu="L4")])
    assert not scored
    assert list(left_out["a"].values()) == [1]


def test_a_group_without_rows_keeps_its_reasons() -> None:
    (group,) = summarise([], {"b": {"too warm": 2}})
    assert (group.group, group.rows, dict(group.left_out)) == ("b", 0, {"too warm": 2})
    assert math.isnan(group.mean_error["ours"])


@pytest.mark.parametrize("metric", ["ttft_s", "tpot_s", "latency_s", "output_tokens_per_s"])
def test_every_metric_is_predicted_by_every_method(metric: str, tmp_path: Path) -> None:
    ((one,), _) = score_runs([run(metric=metric)])
    assert all(math.isfinite(getattr(one, method)) for method in ("datasheet", "paper", "ours", "low", "high"))
    assert one.is_time == (metric != "output_tokens_per_s")
