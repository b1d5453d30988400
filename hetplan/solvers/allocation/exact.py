"""The allocation problem to a proven gap, by branch and price (`branching`).

=============================  ======================================================================================
spec's strong formulation      here
=============================  ======================================================================================
option o = (j, k, n, m)        `Options`
w_o, x_io, z_ijk, u_i          replicas, shares, copies of weights, the unserved share
Dantzig-Wolfe by type          `patterns`: supports of at most three options, mean delay and error inside
pricing, bound, fixing         `master`, `pricer`: options join as they are found, prices of rows bound the problem
=============================  ======================================================================================

The paper's own model, (5a) to (5k) with McCormick envelopes, is `milp.literal_model`.
"""

from __future__ import annotations

import math
import time
from typing import ClassVar

import numpy as np

from hetplan.errors import InfeasibleError, InvalidInputError, NoSolutionError
from hetplan.plan import BoundNode, Certificate, Plan, RowPrices
from hetplan.problem.allocation import AllocationProblem
from hetplan.solvers.allocation.adaptive import adaptive_assignment
from hetplan.solvers.allocation.assignment import Assignment, assign
from hetplan.solvers.allocation.branching import Node, Tree
from hetplan.solvers.allocation.options import SLACK, FloatArray, IntArray, Options, make_options
from hetplan.solvers.allocation.pricer import Prices
from hetplan.solvers.base import AllocationSolution, OnIncumbent, Progress, check_time_limit

# Digits of a price that a certificate keeps: what is lost is far below the gap that counts as none.
_DIGITS = 11
# What is spared must not exceed what is paid: below it by more than digits that are lost.
_BELOW = 1 - 1e-9
# Seconds for the best shares on what a heuristic bought.
_SHARES_S = 0.5


class Exact:
    """Branch and price until plan and bound meet.

    Parameters
    ----------
    gap : float
        Relative distance of plan and bound at which the search ends.
    """

    name: ClassVar[str] = "milp"

    def __init__(self, gap: float = 1e-6) -> None:
        if isinstance(gap, bool) or not isinstance(gap, (int, float)) or not 0 <= gap < 1:
            raise InvalidInputError(f"gap is a number from 0 to below 1, got {gap!r}")
        self.gap = float(gap)

    def solve(
        self,
        problem: AllocationProblem,
        *,
        time_limit_s: float = 60.0,
        seed: int = 0,
        warm_start: Plan | None = None,
        on_incumbent: OnIncumbent | None = None,
    ) -> AllocationSolution:
        """The best answer found, with its bound and certificate; see `hetplan.solvers.base.Solver`."""
        began = time.monotonic()
        deadline = began + check_time_limit(time_limit_s)
        options = make_options(problem)
        return search(options, self.gap, began, deadline, on_incumbent, first_answer(options, seed))


def search(
    options: Options,
    gap: float,
    began: float,
    deadline: float,
    on_incumbent: OnIncumbent | None,
    first: Assignment | None = None,
) -> AllocationSolution:
    """Branch and price from an answer that is known, if any.

    Raises
    ------
    InfeasibleError
        If no answer keeps all limits.
    NoSolutionError
        If none was found and none ruled out.
    """

    def report(usd: float | None, bound: float) -> None:
        if on_incumbent is not None:
            shown = bound if math.isfinite(bound) else None
            on_incumbent(Progress(time.monotonic() - began, usd, shown, f"{tree.nodes} nodes"))

    tree = Tree(options, gap, deadline, report, best=first)
    tree.search()
    if tree.best is None:
        if tree.infeasible:
            raise InfeasibleError(
                "no allocation serves what must be served within all limits; hetplan.optimize says how far they must "
                "move",
                [],
            )
        raise NoSolutionError(
            "no allocation that keeps all limits was found in time, and none is ruled out. Allow more time"
        )
    bound, certificate = None, None
    if tree.root is not None and math.isfinite(tree.bound):
        bound = min(tree.bound, tree.best.usd)
        certificate = Certificate(kind="tree", nodes=tuple(_nodes(options, tree.root)))
    return AllocationSolution(options, tree.best, bound, certificate, {"gap": gap})


def first_answer(options: Options, seed: int) -> Assignment | None:
    """What the adaptive heuristic buys, with the best shares on it; None where that leaves out too much."""
    found = adaptive_assignment(options, seed=seed)
    bought = {int(n): int(found.replicas[n]) for n in np.flatnonzero(found.replicas)}
    best = assign(options, bought, time_limit_s=_SHARES_S) if bought else None
    unserved = 1 - found.shares.sum(axis=1)
    if best is None and (unserved <= options.max_unserved + SLACK).all():
        best = found
    return best


# ---- the certificate


def _nodes(options: Options, root: Node) -> list[BoundNode]:
    """The tree as the plan carries it: each node above its parts."""
    order: list[Node] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += node.parts
    number = {id(node): index for index, node in enumerate(order)}
    nodes = []
    for node in order:
        needed = not node.parts or bool(node.closed)
        nodes.append(
            BoundNode(
                prices=_row_prices(options, node) if needed else None,
                closed=tuple(options.number[node.closed].tolist()) if node.parts else (),
                replicas=None if node.replicas is None else (int(options.number[node.replicas[0]]), node.replicas[1]),
                copied=None if node.copy is None else (node.copy[0], int(options.number[node.copy[1]])),
                parts=tuple(number[id(part)] for part in node.parts),
            )
        )
    return nodes


def _row_prices(options: Options, node: Node) -> RowPrices:
    prices: Prices = node.prices
    o = options
    allowed = np.flatnonzero(node.within.most > 0)
    tiers = len(o.problem.tiers)
    pairs = {int(p): (int(o.model[n]) * tiers + int(o.tier[n])) for n, p in enumerate(o.pair.tolist())}
    paid = np.argwhere(node.within.paid & (prices.copy > 0))
    return RowPrices(
        link=tuple(
            (int(o.number[n]), _rounded(prices.link[:, n])) for n in allowed.tolist() if prices.link[:, n].any()
        ),
        spared=tuple((i, int(o.number[n]), _one(prices.copy[i, n] * _BELOW)) for i, n in paid.tolist()),
        pair_link=tuple(
            (pairs[p], _rounded(prices.pair_link[:, p])) for p in range(o.pairs) if prices.pair_link[:, p].any()
        ),
        load=_listed(o.number, prices.load, allowed),
        cache=_listed(o.number, prices.cache, allowed),
        ttft=_listed(np.arange(len(prices.ttft)), prices.ttft, np.arange(len(prices.ttft))),
        unserved=_listed(np.arange(len(prices.unserved)), prices.unserved, np.arange(len(prices.unserved))),
        budget=_one(prices.budget),
        storage=_one(prices.storage),
    )


def _one(value: float) -> float:
    return float(f"{max(float(value), 0.0):.{_DIGITS}g}")


def _rounded(values: FloatArray) -> tuple[float, ...]:
    return tuple(_one(value) for value in values.tolist())


def _listed(numbers: IntArray, values: FloatArray, some: IntArray) -> tuple[tuple[int, float], ...]:
    return tuple((int(numbers[n]), _one(values[n])) for n in some.tolist() if values[n] > 0)
