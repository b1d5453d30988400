"""Interruptions that a controller lived through, read from its events: what they say of a start's phases."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hetplan.base import Frozen
from hetplan.errors import InvalidInputError
from hetplan.simulator.start_times import StartTimes

__all__ = ["InterruptionTimeline", "interruption_timelines", "measured_start_times", "read_events"]

_BEGINNINGS = ("notice", "machine_lost")


class InterruptionTimeline(Frozen):
    """One interruption, from the notice or the loss until the router had the new engines.

    Attributes
    ----------
    kind : "notice" or "loss"
        How it began.
    machine : str
        The one that went.
    begun_s : float
        On the controller's clock, seconds since 1970. All times below are seconds since then.
    grace_s : float or None
        How long the notice gave.
    pipeline, generation : int
        What was started in its place.
    rented_s : float
        A machine was asked for; 0 where none was.
    node_ready_s : float
        The last new machine could run something.
    store_loaded_s : float
        The last machine held its weights.
    engine_ready_s : float
        The new engines answered.
    shunt_s : float
        The router sent to them.
    """

    kind: Literal["notice", "loss"]
    machine: str
    begun_s: float
    grace_s: float | None
    pipeline: int
    generation: int
    rented_s: float
    node_ready_s: float
    store_loaded_s: float
    engine_ready_s: float
    shunt_s: float

    @property
    def ends_s(self) -> dict[str, float]:
        """Seconds from its beginning to each phase's end, named as `StartTimes.expected_ends_s` does."""
        return {
            "node_ready": self.node_ready_s,
            "store_loaded": self.store_loaded_s,
            "engine_ready": self.engine_ready_s,
            "shunt": self.shunt_s,
        }


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Events as `hetplan serve` writes them on stderr: a JSON object a line.

    Parameters
    ----------
    path : path
        Lines that are not events, such as warnings of other programs, are left out.

    Returns
    -------
    list of dict

    Raises
    ------
    InvalidInputError
        If the file cannot be read.
    """
    try:
        lines = Path(path).read_text("utf-8", "replace").splitlines()
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror}") from None
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event and "at_s" in event:
            found.append(event)
    return found


def interruption_timelines(events: Iterable[Mapping[str, Any]]) -> tuple[InterruptionTimeline, ...]:
    """The interruptions that ended in a shunt, in their order.

    Parameters
    ----------
    events : iterable of dict
        Of a controller: ``event``, ``at_s`` and what the event has, as `read_events` gives them.

    Returns
    -------
    tuple of InterruptionTimeline

    Notes
    -----
    A machine that is lost while the interruption that its notice began goes on belongs to that one. An interruption
    whose pipeline is interrupted again before its shunt counts from its own beginning to the common shunt.
    """
    told = sorted(events, key=lambda event: float(event["at_s"]))
    found: list[InterruptionTimeline] = []
    for place, event in enumerate(told):
        if event["event"] not in _BEGINNINGS or _noticed_before(told[:place], event, found):
            continue
        timeline = _timeline(told, place)
        if timeline is not None:
            found.append(timeline)
    return tuple(found)


def measured_start_times(events: Iterable[Mapping[str, Any]]) -> StartTimes:
    """A controller's own start times, for a simulation of the cluster that it keeps.

    Parameters
    ----------
    events : iterable of dict
        As for `interruption_timelines`; interruptions for which a machine was rented count.

    Returns
    -------
    StartTimes
        Means and sample deviations of the phases: from renting to the machine, to the weights, to the engines.

    Raises
    ------
    InvalidInputError
        If there is no such interruption.
    """
    lived = [one for one in interruption_timelines(events) if one.node_ready_s > 0]
    if not lived:
        raise InvalidInputError("no interruption with a new machine came to its end in these events; give more of them")
    boot = _mean_and_deviation([one.node_ready_s - one.rented_s for one in lived])
    load = _mean_and_deviation([one.store_loaded_s - one.node_ready_s for one in lived])
    engine = _mean_and_deviation([one.engine_ready_s - one.store_loaded_s for one in lived])
    return StartTimes(
        node_ready_s=boot[0],
        node_ready_deviation_s=boot[1],
        store_load_s=load[0],
        store_load_deviation_s=load[1],
        engine_init_s=engine[0],
        engine_init_deviation_s=engine[1],
    )


def _noticed_before(
    before: Sequence[Mapping[str, Any]], event: Mapping[str, Any], found: Sequence[InterruptionTimeline]
) -> bool:
    """Whether this is the end of a machine whose notice has begun an interruption."""
    if event["event"] == "notice":
        return any(e["event"] == "notice" and e["machine"] == event["machine"] for e in before)
    return any(one.machine == event["machine"] for one in found)


def _timeline(told: Sequence[Mapping[str, Any]], place: int) -> InterruptionTimeline | None:
    event = told[place]
    before, after, begun_s = told[:place], told[place:], float(event["at_s"])
    on = [g for g in before if g["event"] == "generation" and event["machine"] in g["machines"]]
    if not on:
        return None
    pipeline, old = int(on[-1]["pipeline"]), int(on[-1]["generation"])
    shunt = next((e for e in after if e["event"] == "shunt" and _newer(e, pipeline, old) is not None), None)
    if shunt is None:
        return None
    new = _newer(shunt, pipeline, old) or old
    mine = [e for e in told if e.get("pipeline") == pipeline and e.get("generation") == new]
    ready = _last(mine, "engine_ready")
    if ready is None:
        return None
    begun = next((e for e in mine if e["event"] == "generation"), None)
    machines = set() if begun is None else set(filter(None, begun["machines"]))
    until = [e for e in after if float(e["at_s"]) <= ready]
    joined = [e for e in until if not machines or e.get("machine") in machines]
    node_ready = _last(joined, "node_ready") or begun_s
    rented = next((float(e["at_s"]) for e in joined if e["event"] == "renting"), begun_s)
    # A store that is started again later brings the same weights again.
    loaded = _last([e for e in mine if float(e["at_s"]) <= ready], "store_loaded") or node_ready
    return InterruptionTimeline(
        kind="notice" if event["event"] == "notice" else "loss",
        machine=str(event["machine"]),
        begun_s=begun_s,
        grace_s=float(event["grace_s"]) if "grace_s" in event else None,
        pipeline=pipeline,
        generation=new,
        rented_s=rented - begun_s,
        node_ready_s=node_ready - begun_s,
        store_loaded_s=max(loaded, node_ready) - begun_s,
        engine_ready_s=ready - begun_s,
        shunt_s=float(shunt["at_s"]) - begun_s,
    )


def _newer(shunt: Mapping[str, Any], pipeline: int, old: int) -> int | None:
    """The generation of a pipeline that a shunt names, if it is newer than the old one."""
    named = [int(t["generation"]) for t in shunt["targets"] if int(t["pipeline"]) == pipeline]
    return next((generation for generation in named if generation > old), None)


def _last(events: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return max((float(e["at_s"]) for e in events if e["event"] == name), default=None)


def _mean_and_deviation(seconds: Sequence[float]) -> tuple[float, float]:
    values = np.maximum(np.array(seconds), 0.0)
    return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0
