"""Interruptions read from a controller's events, and the start times that they give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetplan.errors import InvalidInputError
from hetplan.report_simulation import interruption_figure
from hetplan.simulator.start_times import StartTimes
from hetplan.simulator.timelines import interruption_timelines, measured_start_times, read_events


def told(at_s: float, event: str, **values: Any) -> dict[str, Any]:
    return {"event": event, "at_s": at_s, **values}


def lived(begun_s: float, old: int, boot_s: float, load_s: float, start_s: float) -> list[dict[str, Any]]:
    """A notice for m-{old}, half a second until a machine is asked for, and a shunt a fifth of one after the start."""
    new, there_s = old + 1, begun_s + 0.5 + boot_s
    named = {"pipeline": 1, "generation": new}
    ready_s = there_s + load_s + start_s
    return [
        told(begun_s, "notice", machine=f"m-{old}", grace_s=120.0),
        told(begun_s + 0.1, "generation", **named, machines=["m-0", f"m-{new}"], port=8000),
        told(begun_s + 0.5, "renting", machine=f"m-{new}", offer="o"),
        told(begun_s + 0.6, "store_loaded", **named, machine="m-0", seconds=0.1),
        told(there_s, "node_ready", machine=f"m-{new}", address="127.0.0.1", seconds=boot_s),
        told(there_s + load_s, "store_loaded", **named, machine=f"m-{new}", seconds=load_s),
        told(there_s + load_s, "engines_started", **named, port=8000),
        told(ready_s, "engine_ready", **named, seconds=start_s),
        told(ready_s + 0.2, "shunt", revision=new, targets=[named]),
        told(ready_s + 5.0, "retired", pipeline=1, generation=old, seconds=4.0),
    ]


EVENTS = Path(__file__).resolve().parents[2] / "examples" / "serve-events.jsonl"
FIRST = [told(0.0, "generation", pipeline=1, generation=1, machines=["m-0", "m-1"], port=8000)]


def test_phases_end_when_events_say() -> None:
    (one,) = interruption_timelines([*FIRST, *lived(100.0, 1, 6.0, 1.0, 20.0)])
    assert (one.kind, one.machine, one.grace_s, one.generation) == ("notice", "m-1", 120.0, 2)
    assert one.ends_s == pytest.approx({"node_ready": 6.5, "store_loaded": 7.5, "engine_ready": 27.5, "shunt": 27.7})


def test_start_times_are_those_of_the_phases() -> None:
    events = [*FIRST, *lived(100.0, 1, 6.0, 1.0, 20.0), *lived(200.0, 2, 8.0, 2.0, 26.0)]
    starts = measured_start_times(events)
    assert (starts.node_ready_s, starts.store_load_s, starts.engine_init_s) == pytest.approx((7.0, 1.5, 23.0))
    assert starts.engine_init_deviation_s == pytest.approx(18**0.5)
    assert starts.expected_ends_s()["shunt"] == pytest.approx(31.5)


def test_one_interruption_has_no_deviation() -> None:
    starts = measured_start_times([*FIRST, *lived(100.0, 1, 6.0, 1.0, 20.0)])
    assert (starts.node_ready_deviation_s, starts.engine_init_deviation_s) == (0.0, 0.0)


def test_a_machine_that_goes_after_its_notice_is_one_interruption() -> None:
    events = [*FIRST, *lived(100.0, 1, 40.0, 1.0, 20.0), told(130.0, "machine_lost", machine="m-1", offer="o", why="")]
    (one,) = interruption_timelines(events)
    assert one.kind == "notice"


def test_a_loss_without_a_notice_is_one_too() -> None:
    events = lived(100.0, 1, 6.0, 1.0, 20.0)
    events[0] = told(100.0, "machine_lost", machine="m-1", offer="o", why="")
    (one,) = interruption_timelines([*FIRST, *events])
    assert (one.kind, one.grace_s) == ("loss", None)


def test_another_pipelines_events_are_left_out() -> None:
    other = {"pipeline": 2, "generation": 2}
    events = [
        *FIRST,
        *lived(100.0, 1, 6.0, 1.0, 20.0),
        told(101.0, "node_ready", machine="m-9", address="127.0.0.1", seconds=1.0),
        told(102.0, "shunt", revision=9, targets=[{"pipeline": 1, "generation": 1}, other]),
        told(125.0, "engine_ready", **other, seconds=1.0),
    ]
    (one,) = interruption_timelines(events)
    assert one.engine_ready_s == pytest.approx(27.5)


def test_what_has_not_ended_is_not_counted() -> None:
    events = [*FIRST, *lived(100.0, 1, 6.0, 1.0, 20.0)[:-2]]
    assert interruption_timelines(events) == ()
    with pytest.raises(InvalidInputError, match="give more"):
        measured_start_times(events)


def test_events_are_read_from_what_serve_writes(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = [*FIRST, *lived(100.0, 1, 6.0, 1.0, 20.0)]
    path.write_text("a warning of Ray\n" + "\n".join(map(json.dumps, events)) + '\n{"event": "draining"}\n{"half')
    assert read_events(path) == events
    with pytest.raises(InvalidInputError, match="cannot read"):
        read_events(tmp_path / "none")


def test_weights_that_load_beside_the_start_do_not_add_to_it() -> None:
    starts = StartTimes(node_ready_s=5, node_ready_deviation_s=0, store_load_s=3, store_load_deviation_s=0,
                        engine_init_s=20, engine_init_deviation_s=0)  # fmt: skip
    assert starts.expected_ends_s() == {"node_ready": 5, "store_loaded": 8, "engine_ready": 28, "shunt": 28}
    assert starts.expected_ends_s(together=True)["shunt"] == 25


@pytest.mark.parametrize(("grace_s", "shown"), [(None, False), (30.0, True), (1000.0, False)])
def test_the_figure_shows_both_and_the_end_of_the_machine(grace_s: float | None, shown: bool) -> None:
    events = [*FIRST, *lived(100.0, 1, 6.0, 1.0, 20.0)]
    (one,) = interruption_timelines(events)
    figure = interruption_figure(one.replace(grace_s=grace_s), measured_start_times(events))
    (axes,) = figure.axes
    assert len(axes.patches) == 6
    labels = axes.get_legend_handles_labels()[1]
    assert {"measured", "predicted"} <= set(labels)
    assert ("machine is taken" in labels) is shown
    said = [text.get_text() for text in axes.texts]
    assert "20.0 s, predicted 20.0 s" in said
    assert "at 27.7 s, predicted 27.0 s" in said


def test_recorded_interruptions_of_a_real_cluster() -> None:
    """Four notices of 120 s under a controller over Ray with vLLM; one machine of two is replaced each time."""
    events = read_events(EVENTS)
    found = interruption_timelines(events)
    assert [(one.kind, one.machine, one.generation) for one in found] == [
        ("notice", "m-2", 2),
        ("notice", "m-3", 3),
        ("notice", "m-4", 4),
        ("notice", "m-5", 5),
    ]
    for one in found:
        assert 0 <= one.rented_s <= one.node_ready_s <= one.store_loaded_s <= one.engine_ready_s <= one.shunt_s
    # What the controller itself says of the phases, from its own beginnings of them.
    said = {name: [e["seconds"] for e in events if e["event"] == name][-4:] for name in ("node_ready", "engine_ready")}
    starts = measured_start_times(events)
    assert starts.node_ready_s == pytest.approx(sum(said["node_ready"]) / 4, rel=0.02)
    assert starts.engine_init_s == pytest.approx(sum(said["engine_ready"]) / 4, rel=0.02)
