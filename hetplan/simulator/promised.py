"""Percentiles that a plan's requests live through: what a promise of one is checked by."""

from __future__ import annotations

import math

import numpy as np

from hetplan.errors import InvalidInputError
from hetplan.estimator.queueing import LATENCIES, plan_steady_states
from hetplan.plan import Plan
from hetplan.simulator.engine import DONE
from hetplan.simulator.simulate import simulate_plan
from hetplan.simulator.traffic import Traffic

# Requests that are looked at, at least: so many of them are beyond the percentile.
_LEAST, _BEYOND, _MOST = 2_000, 60, 20_000
# The run begins empty and ends empty: the share of its time at each end that is left out, and how much longer than a
# request's time it is.
_END, _LONGER = 0.2, 8.0


def simulated_latencies(plan: Plan, level: float, *, seed: int = 0) -> dict[str, float]:
    """A percentile of each latency over Poisson requests of the plan's own workload.

    Parameters
    ----------
    plan : Plan
        Whose workload has a rate.
    level : float
        Of the percentile, between 0 and 1.
    seed : int
        Of the arrivals and lengths.

    Returns
    -------
    dict
        Seconds of "ttft_s", "tpot_s" and "e2e_s"; infinite where so many requests are refused, or more arrives than is
        served. ``requests``: how many were looked at.

    Raises
    ------
    InvalidInputError
        If the workload has no rate.

    Notes
    -----
    The run is long enough for 60 requests beyond the percentile and 2,000 in all, and for eight times a request's time;
    those that come in its first and last fifth are not looked at.
    """
    workload = plan.placement.workload
    if workload.requests_per_s is None:
        raise InvalidInputError("percentiles depend on what arrives; give the workload requests_per_s")
    states = plan_steady_states(plan)
    if any(state.utilization >= 1 for state in states):
        return dict.fromkeys(LATENCIES, math.inf) | {"requests": 0}
    wanted = min(max(_LEAST, _BEYOND / min(level, 1 - level)), _MOST)
    longest_s = max(state.mean("e2e_s") for state in states)
    duration_s = max(wanted / workload.requests_per_s / (1 - 2 * _END), _LONGER * longest_s)
    run = simulate_plan(plan, Traffic.poisson(workload, duration_s=duration_s, seed=seed))
    arrival = run.table["arrival_s"]
    settled = (arrival >= _END * duration_s) & (arrival <= (1 - _END) * duration_s)
    lost = run.table["status"] != DONE
    found = {}
    for name in LATENCIES:
        seconds = np.where(lost, math.inf, run.latency(name))[settled]
        found[name] = float(np.quantile(seconds, level, method="inverted_cdf"))
    return found | {"requests": int(settled.sum())}
