"""What interruptions cost a pipeline of spot machines in the long run, in closed form."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from hetplan.base import Frozen
from hetplan.errors import InvalidInputError
from hetplan.problem.placement import Handling
from hetplan.units import SECONDS_PER_HOUR

__all__ = ["Handling", "InterruptionCost", "expected_excess_s", "interruption_cost", "usd_per_million_output_tokens"]

_NotNegative = Annotated[float, Field(ge=0)]


class InterruptionCost(Frozen):
    """What interruptions take from a pipeline and add to its bill, in the long run.

    Attributes
    ----------
    availability : float
        Share of the time in which it serves.
    interruptions_per_hour : float
        How often it is interrupted while it serves, in an hour of the clock.
    recomputed_tokens_per_hour : float
        Tokens whose cache is built again: prompts of requests that begin anew, or prompts and answers so far of those
        that are migrated.
    lost_output_tokens_per_hour : float
        Output that is missing, downtime apart: what was generated and thrown away, and what could have been generated
        while caches were built again.
    overlap_machine_s_per_hour : float
        Machine-seconds that are paid although another machine has the same place.
    overlap_fraction : float
        These as a share of the machine-seconds of the pipeline.
    """

    availability: Annotated[float, Field(ge=0, le=1)]
    interruptions_per_hour: _NotNegative
    recomputed_tokens_per_hour: _NotNegative
    lost_output_tokens_per_hour: _NotNegative
    overlap_machine_s_per_hour: _NotNegative
    overlap_fraction: _NotNegative


def interruption_cost(
    *,
    nodes: int,
    interruptions_per_hour: float,
    notice_s: float,
    start_s: float,
    start_deviation_s: float = 0.0,
    handling: Handling,
    prompt_tokens_in_flight: float,
    output_tokens_in_flight: float,
    prefill_tokens_per_s: float,
    output_tokens_per_s: float,
) -> InterruptionCost:
    """Long-run availability, lost work and overlap of a pipeline whose machines are taken at random.

    Parameters
    ----------
    nodes : int
        Machines of the pipeline; the loss of one stops it.
    interruptions_per_hour : float
        How often each machine is taken, as an `Offer` states it.
    notice_s : float
        Seconds of warning.
    start_s, start_deviation_s : float
        Mean and standard deviation of the seconds from renting a machine until its pipeline serves.
    handling : "none", "migration", "concurrent" or "both"
        What is done, as in ShuntServe's comparison: whether requests keep their tokens (migration, both), and whether
        the replacement starts at the notice beside the machine that will go (concurrent, both) or at the loss.
    prompt_tokens_in_flight, output_tokens_in_flight : float
        Tokens of the prompts, and of the answers so far, of all requests in flight at a usual moment.
    prefill_tokens_per_s, output_tokens_per_s : float
        How fast the pipeline builds caches, and generates when it is full.

    Returns
    -------
    InterruptionCost

    Raises
    ------
    InvalidInputError
        For a number out of range.

    Notes
    -----
    Interruptions of n machines are a Poisson process of rate ``L = n x interruptions_per_hour``. Each needs a
    replacement, which the pipeline lacks for a time D: the whole start S if it begins at the loss, what exceeds the
    notice, max(S - notice, 0), if it begins at the notice. Starts are independent and go on side by side, and machines
    can be lost during a start as well; so the number of machines that the pipeline lacks is that of customers in an
    M/G/infinity queue, and it serves when there is none. A cycle is an up time, 1/L on the mean, and a busy period of
    that queue, (exp(L E[D]) - 1)/L. By the renewal-reward theorem

        ``availability = (1/L) / (1/L + (exp(L E[D]) - 1)/L) = exp(-L E[D])``,

    whatever the distribution of S. E[D] takes S as normal (`expected_excess_s`).

    Requests in flight are met by an interruption that stops a pipeline that serves, and by one that is wholly covered
    by its notice (D = 0), a hand-over. Poisson arrivals see time averages, so the rate of both together is
    L x availability. Each costs the prompts (and, with migration, the answers so far) as tokens to read again, at the
    pipeline's prefill rate and instead of generating; without migration the answers so far are lost besides. A machine
    under notice and its replacement are both paid from the notice until the hand-over or the loss:
    E[min(S, notice)] = E[S] - E[max(S - notice, 0)] for each interruption.

    Departures from the market: losses come one by one and independently, where real ones come together; a
    replacement can always be rented; and the pipeline is always full.

    Examples
    --------
    >>> usual = dict(nodes=4, interruptions_per_hour=0.25, start_s=111.3, start_deviation_s=11, notice_s=120,
    ...              prompt_tokens_in_flight=20_000, output_tokens_in_flight=3_000, prefill_tokens_per_s=3_000,
    ...              output_tokens_per_s=300)
    >>> round(interruption_cost(handling="none", **usual).availability, 4)
    0.9696
    >>> round(interruption_cost(handling="both", **usual).availability, 4)
    0.9996
    """
    _check(nodes, interruptions_per_hour, notice_s, start_s, start_deviation_s)
    _check_rates(prompt_tokens_in_flight, output_tokens_in_flight, prefill_tokens_per_s, output_tokens_per_s)
    concurrent, keeps_tokens = handling in ("concurrent", "both"), handling in ("migration", "both")
    excess_s = expected_excess_s(start_s, start_deviation_s, notice_s)
    lacking_s = excess_s if concurrent else start_s
    per_hour = nodes * interruptions_per_hour
    availability = math.exp(-per_hour * lacking_s / SECONDS_PER_HOUR)
    met_per_hour = per_hour * availability
    recomputed = prompt_tokens_in_flight + (output_tokens_in_flight if keeps_tokens else 0.0)
    lost = recomputed / prefill_tokens_per_s * output_tokens_per_s
    if not keeps_tokens:
        lost += output_tokens_in_flight
    overlap_s = per_hour * (start_s - excess_s) if concurrent else 0.0
    return InterruptionCost(
        availability=availability,
        interruptions_per_hour=met_per_hour,
        recomputed_tokens_per_hour=met_per_hour * recomputed,
        lost_output_tokens_per_hour=met_per_hour * lost,
        overlap_machine_s_per_hour=max(overlap_s, 0.0),
        overlap_fraction=max(overlap_s, 0.0) / (nodes * SECONDS_PER_HOUR),
    )


def expected_excess_s(mean_s: float, deviation_s: float, limit_s: float) -> float:
    """Mean of what a normal time exceeds a limit by, zero where it does not: E[max(S - limit, 0)].

    Parameters
    ----------
    mean_s, deviation_s : float
        Of the time.
    limit_s : float
        The limit.

    Returns
    -------
    float
        Seconds.

    Examples
    --------
    >>> expected_excess_s(111.3, 0.0, 30.0), expected_excess_s(111.3, 0.0, 120.0)
    (81.3, 0.0)
    """
    over = mean_s - limit_s
    if deviation_s == 0:
        return max(over, 0.0)
    distance = over / deviation_s
    above = (1 + math.erf(distance / math.sqrt(2))) / 2
    return over * above + deviation_s * math.exp(-(distance**2) / 2) / math.sqrt(2 * math.pi)


def usd_per_million_output_tokens(
    cost: InterruptionCost, *, price_usd_per_hour: float, output_tokens_per_s: float
) -> float:
    """Dollars for a million output tokens, interruptions included.

    Parameters
    ----------
    cost : InterruptionCost
        Of the pipeline.
    price_usd_per_hour : float
        Of its machines, without overlap.
    output_tokens_per_s : float
        What it generates while it serves.

    Returns
    -------
    float
        Infinity if interruptions leave no output.

    Notes
    -----
    ``price (1 + overlap) / (output an hour x availability - lost output an hour)``.
    """
    generated = output_tokens_per_s * SECONDS_PER_HOUR * cost.availability - cost.lost_output_tokens_per_hour
    if generated <= 0:
        return math.inf
    return price_usd_per_hour * (1 + cost.overlap_fraction) / generated * 1e6


def _check(nodes: int, interruptions_per_hour: float, notice_s: float, start_s: float, deviation_s: float) -> None:
    if nodes < 1:
        raise InvalidInputError(f"nodes is {nodes}; a pipeline has at least one machine")
    times = {
        "interruptions_per_hour": interruptions_per_hour,
        "notice_s": notice_s,
        "start_s": start_s,
        "start_deviation_s": deviation_s,
    }
    for name, value in times.items():
        if not (math.isfinite(value) and value >= 0):
            raise InvalidInputError(f"{name} is {value}; give a finite number from 0")


def _check_rates(prompt_tokens: float, output_tokens: float, prefill_per_s: float, output_per_s: float) -> None:
    for name, value in (("prompt_tokens_in_flight", prompt_tokens), ("output_tokens_in_flight", output_tokens)):
        if not (math.isfinite(value) and value >= 0):
            raise InvalidInputError(f"{name} is {value}; give a finite number from 0")
    for name, value in (("prefill_tokens_per_s", prefill_per_s), ("output_tokens_per_s", output_per_s)):
        if not (math.isfinite(value) and value > 0):
            raise InvalidInputError(f"{name} is {value}; give a finite number above 0")
