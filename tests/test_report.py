"""Plans for people: tables that fit a terminal and figures that draw."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from builders import WORKLOAD, verified
from rich.cells import cell_len
from rich.console import Console, RenderableType

import hetplan as hp
from hetplan.report import plan_tables, replica_table, seconds_with_band, stage_times_figure, with_band

PLANS: dict[str, dict[str, Any]] = {
    "one machine": {"model": "llama-3.2-1b", "cluster": {"g6.xlarge": 1}},
    "mixed": {"model": "llama-3.1-70b", "cluster": {"g6.12xlarge": 2, "g5.12xlarge": 1, "g6e.xlarge": 4}},
    "copies": {"model": "llama-3.1-8b", "cluster": {"g6e.xlarge": 3}, "solver": "dp-beam"},
    "eight GPUs a node": {"model": "llama-3.1-70b", "cluster": {"p5.48xlarge": 1}, "solver": "even"},
    "long names": {"model": "qwen2.5-14b", "cluster": {"g4dn.12xlarge": 2, "g6.48xlarge": 1}},
}


@pytest.fixture(scope="module", params=PLANS)
def plan(request: pytest.FixtureRequest) -> hp.Plan:
    return verified(hp.optimize(workload=WORKLOAD, **PLANS[request.param]))


def rendered(table: RenderableType, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_plan_fits_the_terminal(plan: hp.Plan, width: int) -> None:
    text = rendered(plan_tables(plan), width)
    assert max(cell_len(line) for line in text.splitlines()) <= width


@pytest.mark.parametrize("width", [80, 100, 200])
def test_nothing_is_cut_off(plan: hp.Plan, width: int) -> None:
    assert "…" not in rendered(plan_tables(plan), width)


@pytest.mark.parametrize("width", [80, 200])
def test_a_plan_s_figures_are_all_there(plan: hp.Plan, width: int) -> None:
    text = rendered(plan_tables(plan), width)
    flowing = " ".join(text.split())
    assert plan.problem.model.name in text
    assert f"{plan.requests_per_s:.3f} req/s" in text
    assert f"{plan.cost_usd_per_hour:.4f} $/h" in text
    assert plan.status in text
    if plan.bound is not None:
        assert f"{plan.bound:.6g}" in text
        assert "gap" in text
    for pipeline in plan.deployments[0].pipelines:
        assert f"{pipeline.max_num_seqs} sequences" in flowing
        for stage in pipeline.stages:
            assert stage.instance_type in text
            assert f"{stage.layers[0]}-{stage.layers[1] - 1}" in text


def test_copies_are_counted_once_with_their_number() -> None:
    plan = hp.optimize(workload=WORKLOAD, **PLANS["copies"])
    (pipeline,) = plan.deployments[0].pipelines
    assert pipeline.count == 3
    assert "Pipeline 1 x 3" in rendered(plan_tables(plan), 100)


def test_doubts_are_shown(plan: hp.Plan) -> None:
    flowing = " ".join(rendered(plan_tables(plan), 200).split())
    for pipeline in plan.deployments[0].pipelines:
        assert pipeline.predictions.requests_per_s.source.split("; ")[1] in flowing


@pytest.mark.parametrize("width", [80, 120])
def test_a_replica_fits_the_terminal(width: int) -> None:
    prediction = hp.predict("llama-3.1-70b", "A100-PCIE-80GB", tensor_parallel=4, weight_dtype="fp8")
    text = rendered(replica_table(prediction), width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert all(name in text for name in ("ttft_s", "tpot_s", "latency_s", "output_tokens_per_s", "90% bands"))


def test_bands_read_as_ranges(plan: hp.Plan) -> None:
    predictions = plan.deployments[0].pipelines[0].predictions
    rate = predictions.requests_per_s
    assert with_band(rate, "req/s") == f"{rate.value:.3f} req/s ({rate.low:.3f}-{rate.high:.3f})"
    assert seconds_with_band(predictions.ttft_s).count("s") == 3


def test_a_figure_draws_every_stage(plan: hp.Plan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = stage_times_figure(plan)
    pipelines = plan.deployments[0].pipelines
    assert len(figure.axes) == len(pipelines)
    for axis, pipeline in zip(figure.axes, pipelines, strict=True):
        # Prefill and decode of each stage; the longest bars are what limits the pipeline.
        assert len(axis.patches) == 2 * len(pipeline.stages)
        lengths = [bar.get_width() for bar in axis.patches]
        prefill, decode = lengths[: len(pipeline.stages)], lengths[len(pipeline.stages) :]
        limit = pipeline.micro_batch / (max(prefill) + max(decode))
        assert limit == pytest.approx(pipeline.predictions.requests_per_s.value)
    path = tmp_path / "stages.png"
    figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")
