"""Output and bill of a pipeline whose machines are taken at random, worked out again from single machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from hetplan.catalog.offers import Offer
from hetplan.problem.placement import PlacementProblem
from hetplan.units import SECONDS_PER_HOUR


@dataclass(frozen=True, slots=True)
class LongRun:
    """Output tokens an hour, and dollars an hour."""

    tokens_per_hour: float
    usd_per_hour: float


def long_run(
    problem: PlacementProblem,
    offers: Sequence[Offer],
    *,
    sequences: int,
    micro_batch: int,
    slowest_prefill_s: float,
    requests_per_s: float,
    egress_usd_per_hour: float,
) -> LongRun:
    """A pipeline in the long run, machine by machine.

    Each machine is lacking for a time D after it is taken; with Poisson losses none is with the probability
    exp(-rate E[D]). What then interrupts it costs prompts (and answers, where they are kept) that are read again, and
    answers that are thrown away; machines under notice are paid beside their replacements.
    """
    work = problem.workload
    early = problem.handling in {"concurrent", "both"}
    kept = problem.handling in {"migration", "both"}
    answers = sequences * work.mean_output_tokens / 2
    again = sequences * work.mean_prefill_tokens + (answers if kept else 0.0)
    tokens_per_s = requests_per_s * work.mean_output_tokens
    read_s = again * slowest_prefill_s / (micro_batch * work.mean_prefill_tokens)
    each = read_s * tokens_per_s + (0.0 if kept else answers)
    lacking = taken = usd = 0.0
    for offer in offers:
        price = offer.price_usd_per_hour or 0.0
        usd += price
        rate = offer.interruptions_per_hour or 0.0
        if offer.market != "spot" or rate == 0:
            continue
        late = _mean_excess(problem.start_s, problem.start_deviation_s, offer.notice_s or 0.0)
        taken += rate
        lacking += rate / SECONDS_PER_HOUR * (late if early else problem.start_s)
        if early:
            usd += price * rate / SECONDS_PER_HOUR * max(problem.start_s - late, 0.0)
    serving = math.exp(-lacking)
    tokens = serving * (tokens_per_s * SECONDS_PER_HOUR - taken * each)
    return LongRun(max(tokens, 0.0), usd + egress_usd_per_hour)


def _mean_excess(mean: float, deviation: float, limit: float) -> float:
    """E[max(X - limit, 0)] of a normal X, by its integral in standard units."""
    if deviation == 0:
        return max(mean - limit, 0.0)
    normal = NormalDist()
    at = (limit - mean) / deviation
    return deviation * (normal.pdf(at) - at * (1 - normal.cdf(at)))
