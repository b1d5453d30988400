"""Which copies of weights to store where every query type pays for its own: one program over all training scenarios.

What is bought is chosen already. Copies are whole, shares are of each scenario and, once more, of nothing drawn, where
all of the problem's limits hold: the extensive form of the two stages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hetplan.solvers.allocation.options import SLACK, FloatArray
from hetplan.solvers.allocation.training import Buying, Training
from hetplan.solvers.highs import Milp, maximise, maximise_linear

Terms = list[tuple[int, float]]
# Relative distance to the best copies at which the search for them ends.
_GAP = 1e-6
_HALF = 0.5


def choose_copies(
    training: Training, full: Buying, *, limit_usd: float, below_usd: float, time_limit_s: float
) -> Buying | None:
    """What is bought with its best copies; None where none costs less than a number of dollars.

    Parameters
    ----------
    training : Training
    full : Buying
        With all copies that it may have.
    limit_usd : float
        Most that it may cost with nothing drawn.
    below_usd : float
        What its scenarios must cost less than.
    time_limit_s : float
    """
    o, robust = training.options, training.robust
    program = Milp()
    copies = sorted(full.copies)
    column = {copy: program.column(0.0, 1.0, integer=True) for copy in copies}
    rent_usd = float(o.rent_usd[full.numbers] @ full.counts)
    stored = [(column[copy], float(o.pair_usd[copy[1]])) for copy in copies]
    _add_planned(program, training, full, column, limit_usd)
    drawn = training.drawn
    with_cache = o.problem.decisions.kv_memory == "littles_law"
    costs = [
        stored + _add_shares(program, training, full, column, factors, with_cache=with_cache).cost
        for factors in zip(drawn.arrivals, drawn.delays, drawn.errors, strict=True)
    ]
    total: Terms = []
    if robust.objective == "expected_cost":
        total = [(at, usd / len(costs)) for terms in costs for at, usd in terms]
    else:
        # The mean of the worst: a level, and what exceeds it.
        level = program.column(0.0, math.inf)
        total.append((level, 1.0))
        for terms in costs:
            beyond = program.column(0.0, math.inf)
            program.row([*terms, (level, -1.0), (beyond, -1.0)], most=0.0)
            total.append((beyond, 1 / ((1 - robust.cvar_level) * len(costs))))
    for at, usd in total:
        program.gains[at] -= usd
    if math.isfinite(below_usd):
        program.row(total, most=below_usd - rent_usd)
        if maximise_linear(program) is None:
            return None
    found = maximise(program, time_limit_s=time_limit_s, gap=_GAP).values
    if found is None:
        return None
    return training.make(dict(full.replicas), [copy for copy in copies if found[column[copy]] > _HALF])


@dataclass(frozen=True, slots=True)
class _Shares:
    """Columns of one scenario: what they cost, the unserved share of each type, and each share with its type."""

    cost: Terms
    left: list[int]
    parts: list[tuple[int, int]]


def _add_shares(
    program: Milp,
    training: Training,
    full: Buying,
    column: Mapping[tuple[int, int], int],
    factors: tuple[FloatArray, FloatArray, FloatArray],
    *,
    with_cache: bool,
) -> _Shares:
    """Shares under factors on arrivals, delays and errors, within promises, compute and memory."""
    o, decisions = training.options, training.options.problem.decisions
    arrivals, delays, errors = factors
    numbers = full.numbers.tolist()
    times = arrivals if decisions.penalties == "per_request" else np.ones(len(arrivals))
    made = _Shares([], [], [])
    load: dict[int, Terms] = {number: [] for number in numbers}
    cache: dict[int, Terms] = {number: [] for number in numbers}
    for i in range(len(arrivals)):
        left = program.column(0.0, 1.0)
        made.left.append(left)
        made.cost.append((left, float(o.unserved_usd[i] * times[i])))
        demand: Terms = [(left, 1.0)]
        of_served: Terms = [(left, 1.0)] if o.served else []
        error, delay, first = list(of_served), list(of_served), list(of_served)
        for number in numbers:
            late = float(o.delay[i, number] * delays[i, number])
            soon = 0.0 if o.ttft is None else float(o.ttft[i, number] * delays[i, number])
            copy = column.get((i, int(o.pair[number])))
            if copy is None or (decisions.delay == "each" and max(late, soon) > 1 + SLACK):
                continue
            part = program.column(0.0, 1.0)
            made.parts.append((part, i))
            delay_usd = float((o.unit_usd[i, number] - o.storage_usd[i]) * delays[i, number] * times[i])
            made.cost.append((part, delay_usd + float(o.storage_usd[i] * arrivals[i])))
            program.row([(part, 1.0), (copy, -1.0)], most=0.0)
            demand.append((part, 1.0))
            error.append((part, float(o.error[i, number] * errors[i, number])))
            delay.append((part, late))
            first.append((part, soon))
            load[number].append((part, float(o.load[i, number] * arrivals[i])))
            cache[number].append((part, float(o.cache[i, number] * arrivals[i] * delays[i, number])))
        program.row(demand, least=1.0, most=1.0)
        program.row(error, most=1.0)
        if decisions.delay == "average":
            program.row(delay, most=1.0)
            if o.ttft is not None:
                program.row(first, most=1.0)
    for number, count in full.replicas:
        program.row(load[number], most=float(count))
        if with_cache:
            program.row(cache[number], most=float(count))
    return made


def _add_planned(
    program: Milp, training: Training, full: Buying, column: Mapping[tuple[int, int], int], limit_usd: float
) -> None:
    """Shares with nothing drawn, within all limits of the problem and that on what they cost."""
    o, problem = training.options, training.options.problem
    nothing = (np.ones(len(o.unserved_usd)), np.ones_like(o.most), np.ones_like(o.most))
    planned = _add_shares(program, training, full, column, nothing, with_cache=True)
    for i, left in enumerate(planned.left):
        program.upper[left] = float(o.max_unserved[i])
    rent_usd = float(o.rent_usd[full.numbers] @ full.counts)
    stored = [(at, float(o.pair_usd[pair])) for (_, pair), at in column.items()]
    kept = [(at, float(o.pair_gb[pair]) / problem.storage_capacity_gb) for (_, pair), at in column.items()]
    traffic_usd = [(part, float(o.storage_usd[i]) / problem.budget_usd) for part, i in planned.parts]
    traffic_gb = [(part, float(o.storage_gb[i]) / problem.storage_capacity_gb) for part, i in planned.parts]
    program.row([*stored, *planned.cost], most=limit_usd - rent_usd)
    program.row(
        [*((at, usd / problem.budget_usd) for at, usd in stored), *traffic_usd], most=1 - rent_usd / problem.budget_usd
    )
    program.row([*kept, *traffic_gb], most=1.0)
