"""Whether another plan is asked for, and whether it is worth switching to; pure.

Readings are smoothed. What has left a band around what was planned for, for several readings, is planned for anew: with
the mean of those readings, but for the first, in which the old demand may have its part. Chance alone does not count as
leaving: a rate must also have moved by twice the standard deviation of such a count.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hetplan.catalog.offers import Offer
from hetplan.errors import RouterError
from hetplan.runtime.controller.serving import Load, Serving
from hetplan.units import SECONDS_PER_HOUR

Key = tuple[str, str | None]
Demand = Mapping[Key, Load]
# Fewer answers than these say little of their lengths.
_LEAST_ENDED = 20
# A rate that is not met by so much is not met.
_SHORT = 0.01


@dataclass(frozen=True, slots=True)
class Band:
    """When demand has moved: by more than ``change`` of what was planned for, for so many readings.

    ``smoothing`` is the part of the latest reading in the smoothed one.
    """

    change: float = 0.2
    readings: int = 2
    smoothing: float = 0.5


@dataclass(frozen=True, slots=True)
class Reading:
    """What the router says of the seconds that it covers."""

    covered_s: float
    demand: Demand


@dataclass(frozen=True, slots=True)
class Watched:
    """What is planned for, what is asked for, and the readings since that has left the band."""

    planned: Demand
    smooth: Demand = field(default_factory=dict)
    held: tuple[Reading, ...] = ()


@dataclass(frozen=True, slots=True)
class Resolved:
    """What may be served instead, and what it saves under the demand by its own problem, where that tells."""

    serving: Serving
    saved_usd_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class Worth:
    """What another plan gains over a horizon, and what switching to it costs, in one unit."""

    unit: Literal["usd", "requests"]
    gain: float
    cost: float
    horizon_s: float

    @property
    def switches(self) -> bool:
        """Whether it is worth it."""
        return self.gain > self.cost


def planned(serving: Serving) -> Demand:
    """What it was planned for."""
    return {(load.model, load.query_type): load for load in serving.planned}


def keys_of(serving: Serving) -> frozenset[Key]:
    """What is told apart: what plans tell apart. Anybody may name a query type."""
    known = planned(serving)
    return frozenset(known) | {(model, None) for model in serving.models if all(key[0] != model for key in known)}


def read(answer: Mapping[str, Any], keys: Collection[Key]) -> Reading:
    """The router's answer, with query types that are not told apart counted to their model, if it is.

    Raises
    ------
    RouterError
        If it makes no sense.
    """
    try:
        lines: dict[Key, list[tuple[float, int, float, float]]] = {key: [] for key in keys}
        for line in answer["demand"]:
            key = (str(line["model"]), line["query_type"])
            key = key if key in lines else (key[0], None)
            if key in lines:
                inputs, outputs = float(line["mean_input_tokens"] or 0), float(line["mean_output_tokens"] or 0)
                lines[key].append((float(line["requests_per_s"]), int(line["ended"]), inputs, outputs))
        return Reading(float(answer["covered_s"]), {key: _together(key, found) for key, found in lines.items()})
    except (KeyError, TypeError, ValueError) as error:
        raise RouterError(f"the router's answer makes no sense: {error!r}") from None


def watch(watched: Watched, reading: Reading, band: Band) -> tuple[Watched, Demand | None]:
    """What is known after a reading, and the demand to plan for where another plan is to be asked for."""
    smooth = {key: _mixed(watched.smooth.get(key, load), load, band.smoothing) for key, load in reading.demand.items()}
    # Where nothing was planned for, what is seen first is what later ones are compared with.
    base = {key: watched.planned.get(key, load) for key, load in smooth.items()}
    # The reading itself is outside too: what swings around what was planned for leaves no trace.
    if not any(
        _has_moved(base[key], load, reading.covered_s, band.change)
        and _has_moved(base[key], reading.demand[key], reading.covered_s, band.change)
        for key, load in smooth.items()
    ):
        return Watched(base, smooth), None
    held = (*watched.held, reading)
    if len(held) < band.readings:
        return Watched(base, smooth, held), None
    counted = held[1:] or held
    found = {
        key: _filled(_mean([one.demand[key] for one in counted if key in one.demand]), base[key]) for key in smooth
    }
    return Watched(found, found), found


def worth(
    old: Serving, found: Resolved, demand: Demand, started: Iterable[Offer], *, horizon_s: float, start_s: float
) -> Worth:
    """Whether a plan is worth switching to.

    What an allocation saves is said by its problem, delays and what is turned away included. Otherwise, where less is
    asked for than both serve, and the plans are to be cheap, the gain is in dollars; otherwise in
    requests served. Machines that are started run beside the old ones for ``start_s``; that is the cost, in requests by
    what one costs under the new plan. Rates of plans are those that they state, by the tokens they were made for.

    Parameters
    ----------
    old : Serving
    found : Resolved
    demand : mapping
    started : iterable of Offer
        Of each machine of the pipelines that the new one has and the old one has not.
    horizon_s : float
        Seconds that the new one is expected to hold.
    start_s : float
        Seconds until a machine that is rented serves.
    """
    new = found.serving
    double_usd = sum(offer.billed_usd_per_hour for offer in started) * start_s / SECONDS_PER_HOUR
    if found.saved_usd_per_hour is not None:
        return Worth("usd", found.saved_usd_per_hour * horizon_s / SECONDS_PER_HOUR, double_usd, horizon_s)
    asked = sum(load.requests_per_s for load in demand.values())
    before, after = _served_per_s(old, demand), _served_per_s(new, demand)
    cheap = any(plan.placement.objective != "throughput" for plan in new.plans)
    if cheap and before >= asked * (1 - _SHORT) and after >= asked * (1 - _SHORT):
        saved = sum(p.cost_usd_per_hour for p in old.plans) - sum(p.cost_usd_per_hour for p in new.plans)
        return Worth("usd", saved * horizon_s / SECONDS_PER_HOUR, double_usd, horizon_s)
    usd_per_s = sum(plan.cost_usd_per_hour for plan in new.plans) / SECONDS_PER_HOUR
    cost = 0.0 if usd_per_s == 0 else double_usd * after / usd_per_s
    return Worth("requests", (after - before) * horizon_s, cost, horizon_s)


def _served_per_s(serving: Serving, demand: Demand) -> float:
    """Requests a second that are served of what is asked for."""
    total = 0.0
    for model in serving.models:
        loads = [load for key, load in demand.items() if key[0] == model]
        asked = sum(load.requests_per_s for load in loads)
        measured = _mean_tokens(loads)
        rate = 0.0
        for plan in serving.plans:
            if plan.placement.model.name == model:
                workload = plan.placement.workload
                tokens = workload.mean_input_tokens + workload.mean_output_tokens
                rate += plan.requests_per_s * (1.0 if not measured else tokens / measured)
        total += min(asked, rate)
    return total


def _mean_tokens(loads: Sequence[Load]) -> float:
    """Tokens of a request, weighed by the rates; 0 where nothing is known."""
    known = [load for load in loads if load.mean_input_tokens is not None and load.mean_output_tokens is not None]
    rate = sum(load.requests_per_s for load in known)
    if not rate:
        return 0.0
    return (
        sum(one.requests_per_s * ((one.mean_input_tokens or 0) + (one.mean_output_tokens or 0)) for one in known) / rate
    )


def _together(key: Key, lines: Sequence[tuple[float, int, float, float]]) -> Load:
    ended = sum(line[1] for line in lines)
    means = [
        sum(line[1] * line[place] for line in lines) / ended if ended >= _LEAST_ENDED else None for place in (2, 3)
    ]
    rate = sum(line[0] for line in lines)
    return Load(
        model=key[0], query_type=key[1], requests_per_s=rate, mean_input_tokens=means[0], mean_output_tokens=means[1]
    )


def _mixed(old: Load, new: Load, share: float) -> Load:
    return Load(
        model=new.model,
        query_type=new.query_type,
        requests_per_s=(1 - share) * old.requests_per_s + share * new.requests_per_s,
        mean_input_tokens=_between(old.mean_input_tokens, new.mean_input_tokens, share),
        mean_output_tokens=_between(old.mean_output_tokens, new.mean_output_tokens, share),
    )


def _between(old: float | None, new: float | None, share: float) -> float | None:
    if old is None or new is None:
        return old if new is None else new
    return (1 - share) * old + share * new


def _mean(loads: Sequence[Load]) -> Load:
    found = loads[0]
    for count, load in enumerate(loads[1:], start=2):
        found = _mixed(found, load, 1 / count)
    return found


def _filled(load: Load, base: Load) -> Load:
    """With the tokens that were planned for where nothing ended."""
    return load.replace(
        mean_input_tokens=base.mean_input_tokens if load.mean_input_tokens is None else load.mean_input_tokens,
        mean_output_tokens=base.mean_output_tokens if load.mean_output_tokens is None else load.mean_output_tokens,
    )


def _has_moved(base: Load, now: Load, covered_s: float, change: float) -> bool:
    moved = abs(now.requests_per_s - base.requests_per_s)
    chance = 2 * math.sqrt(max(now.requests_per_s, base.requests_per_s) / max(covered_s, 1.0))
    if moved > change * base.requests_per_s and moved > chance:
        return True
    pairs = ((base.mean_input_tokens, now.mean_input_tokens), (base.mean_output_tokens, now.mean_output_tokens))
    return any(b is not None and n is not None and abs(n - b) > change * b for b, n in pairs)
