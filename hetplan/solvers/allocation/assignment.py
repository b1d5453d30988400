"""Who is sent where: the best shares on options that are open, and the compact program with the choice of options.

The compact program is the strong form: a share needs as much of an option as the largest share of the type that one
replica can serve, and a pair's weights are stored once, or once for each type, as decided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.solvers.allocation.options import FloatArray, IntArray, Options
from hetplan.solvers.highs import Milp, maximise, maximise_linear

# A share below this is none.
NEXT_TO_NOTHING = 1e-9
# The share that keeps a type's way to a configuration open, where a plan says which it may use: next to no traffic, and
# within what limits are checked to. It is kept wherever it is worth so many times what serving or dropping all costs.
STANDBY = 1e-6
_WORTH = 1e3
_GAP = 1e-7


@dataclass(frozen=True, slots=True)
class Assignment:
    """A whole answer: replicas (O,), shares (I, O), and what it costs over the horizon."""

    replicas: IntArray
    shares: FloatArray
    usd: float


def total_usd(options: Options, replicas: IntArray, shares: FloatArray) -> float:
    """The objective of a whole answer, term by term."""
    o = options
    unserved = np.maximum(1.0 - shares.sum(axis=1), 0.0)
    usd_per_gb = o.problem.storage_usd_per_gb_hour * o.problem.horizon_hours
    stored = stored_weights_gb(o, replicas, shares) * usd_per_gb
    return float(o.rent_usd @ replicas) + stored + float((o.unit_usd * shares).sum() + o.unserved_usd @ unserved)


def stored_weights_gb(options: Options, replicas: IntArray, shares: FloatArray) -> float:
    """Of each pair of model and tier that is bought, or of each type a copy for each pair that it uses."""
    o = options
    if not o.stored_per_type:
        return float(o.pair_gb[np.unique(o.pair[replicas > 0])].sum())
    queries, numbers = np.nonzero(shares > NEXT_TO_NOTHING)
    copies = np.unique(queries * o.pairs + o.pair[numbers])
    return float(o.pair_gb[copies % o.pairs].sum()) if len(copies) else 0.0


def placed_pairs(options: Options, placed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """(I, P) pairs of which a type uses some option, from (I, O) whether it uses the option."""
    of_pair = np.zeros((len(placed), options.pairs), dtype=bool)
    queries, numbers = np.nonzero(placed)
    of_pair[queries, options.pair[numbers]] = True
    return of_pair


def assign(options: Options, replicas: Mapping[int, int], *, time_limit_s: float = math.inf) -> Assignment | None:
    """The best shares on some replicas of some options, all of which are paid for; None where there are none.

    Parameters
    ----------
    options : Options
    replicas : mapping
        Option -> replicas.
    time_limit_s : float
        For the choice of copies, where weights are stored for each type.
    """
    return choose(options, list(replicas), time_limit_s=time_limit_s, bought=replicas)


def choose(
    options: Options,
    numbers: Sequence[int],
    *,
    time_limit_s: float,
    gap: float = _GAP,
    bought: Mapping[int, int] | None = None,
    placed: NDArray[np.bool_] | None = None,
) -> Assignment | None:
    """The best whole answer with some of the options; None where there is none or none was found.

    Parameters
    ----------
    options : Options
    numbers : sequence of int
        Options that may be used.
    time_limit_s, gap : float
        Of the search.
    bought : mapping, optional
        Replicas that are chosen already.
    placed : (I, O) bool array, optional
        With ``bought``: a type uses just these options, each with `STANDBY` or more where the limits leave room for it.
    """
    o, problem = options, options.problem
    numbers = sorted(numbers)
    most = o.most_replicas()
    standby_usd = _WORTH * float(max(o.unserved_usd.max(), o.unit_usd.max(initial=0.0)))
    program = Milp()
    integer = False
    budget: list[tuple[int, float]] = []
    storage: list[tuple[int, float]] = []
    budget_left, storage_left, paid = 1.0, 1.0, 0.0
    replica_of: dict[int, int] = {}
    of_pair: dict[int, list[int]] = {}
    for number in numbers:
        of_pair.setdefault(int(o.pair[number]), []).append(number)
    if bought is None:
        integer = True
        for number in numbers:
            rent = float(o.rent_usd[number])
            whole = program.column(0.0, float(most[number]), gain=-rent, integer=True)
            replica_of[number] = whole
            budget.append((whole, rent / problem.budget_usd))
    else:
        paid += sum(float(o.rent_usd[n]) * count for n, count in bought.items())
    if placed is not None and o.stored_per_type:
        copies = np.argwhere(placed_pairs(o, placed))[:, 1]
        paid += float(o.pair_usd[copies].sum())
        storage_left -= float(o.pair_gb[copies].sum()) / problem.storage_capacity_gb
    for pair, members in of_pair.items() if not o.stored_per_type else ():
        usd, gb = float(o.pair_usd[pair]), float(o.pair_gb[pair])
        if bought is not None:
            paid += usd
            storage_left -= gb / problem.storage_capacity_gb
            continue
        stored = program.column(0.0, 1.0, gain=-usd, integer=True)
        budget.append((stored, usd / problem.budget_usd))
        storage.append((stored, gb / problem.storage_capacity_gb))
        for number in members:
            program.row([(replica_of[number], 1.0), (stored, -float(most[number]))], most=0.0)
    if bought is not None:
        budget_left -= paid / problem.budget_usd
    if not o.many and bought is None:
        for members in of_pair.values():
            if len(members) > 1:
                program.row([(replica_of[number], 1.0) for number in members], most=1.0)
    load: dict[int, list[tuple[int, float]]] = {number: [] for number in numbers}
    cache: dict[int, list[tuple[int, float]]] = {number: [] for number in numbers}
    share_of: list[tuple[int, int, int]] = []
    for i in range(len(o.unserved_usd)):
        usable = [n for n in numbers if (o.most[i, n] > 0 if placed is None else placed[i, n])]
        left = program.column(0.0, float(o.max_unserved[i]), gain=-float(o.unserved_usd[i]))
        demand, delays, errors, firsts = [(left, 1.0)], [], [], []
        if o.served:
            delays, errors, firsts = [(left, 1.0)], [(left, 1.0)], [(left, 1.0)]
        for number in usable:
            part = program.column(0.0, 1.0, gain=-float(o.unit_usd[i, number]))
            if placed is not None:
                open_way = program.column(0.0, STANDBY, gain=standby_usd)
                program.row([(part, 1.0), (open_way, -1.0)], least=0.0)
            share_of.append((i, number, part))
            demand.append((part, 1.0))
            delays.append((part, float(o.delay[i, number])))
            errors.append((part, float(o.error[i, number])))
            if o.ttft is not None:
                firsts.append((part, float(o.ttft[i, number])))
            load[number].append((part, float(o.load[i, number])))
            cache[number].append((part, float(o.cache[i, number])))
            budget.append((part, float(o.storage_usd[i]) / problem.budget_usd))
            storage.append((part, float(o.storage_gb[i]) / problem.storage_capacity_gb))
            if bought is None:
                program.row([(part, 1.0), (replica_of[number], -float(o.most[i, number]))], most=0.0)
            if o.stored_per_type and placed is None:
                integer = True
                usd, gb = float(o.pair_usd[o.pair[number]]), float(o.pair_gb[o.pair[number]])
                copy = program.column(0.0, 1.0, gain=-usd, integer=True)
                budget.append((copy, usd / problem.budget_usd))
                storage.append((copy, gb / problem.storage_capacity_gb))
                program.row([(part, 1.0), (copy, -min(1.0, float(o.most[i, number]) * float(most[number])))], most=0.0)
        program.row(demand, least=1.0, most=1.0)
        if problem.decisions.delay == "average":
            program.row(delays, most=1.0)
            if o.ttft is not None and float(o.ttft[i].max(initial=0.0)) > 0:
                program.row(firsts, most=1.0)
        program.row(errors, most=1.0)
    for number in numbers:
        for terms in (load[number], cache[number]):
            if bought is None:
                program.row([*terms, (replica_of[number], -1.0)], most=0.0)
            else:
                program.row(terms, most=float(bought[number]))
    program.row(budget, most=budget_left)
    program.row(storage, most=storage_left)
    if integer:
        found = maximise(program, time_limit_s=time_limit_s, gap=gap).values
    else:
        linear = maximise_linear(program)
        found = None if linear is None else linear.values
    if found is None:
        return None
    replicas = np.zeros(o.count, dtype=np.int64)
    for number in numbers:
        replicas[number] = bought[number] if bought is not None else round(found[replica_of[number]])
    shares = np.zeros(o.most.shape)
    for i, number, part in share_of:
        if found[part] > NEXT_TO_NOTHING and replicas[number] > 0:
            shares[i, number] = found[part]
    return Assignment(replicas, shares, total_usd(o, replicas, shares))
