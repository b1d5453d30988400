"""Two-stage evaluation of an allocation (over 500 lines: half of them say what comes in and goes out).

What is bought stays; delays, errors and arrivals are drawn; shares follow.

=============================  ======================================================================================
paper (12)                     here
=============================  ======================================================================================
y*, w*                         ``Placement.replicas`` of the options that are bought
z*                             ``Placement.placed``: which type may use which option (``reroute``)
d, e, lambda with a tilde      `draw`: factors on a type's delay and error on an option, and on its arrivals
P^a                            `Operations`: the linear program in shares
C1, C2                         ``rent_usd``, ``stored_usd``
C3, C4, C5                     ``storage_usd``, ``delay_usd``, ``unserved_usd``, an entry for each scenario
P_viol                         ``violation_rate``
=============================  ======================================================================================

Where it departs, or says what the paper does not:

- The problem's `Decisions` hold: limits on the mean of what is served or of all, on the mix or on each option,
  penalties for the horizon or for each request (then they grow with arrivals), and the memory of requests in flight
  where Little's law is asked for, which grows with arrivals and with delays.
- As in (12), neither budget nor storage capacity limits the second stage, and all of a type may be left unserved
  whatever ``max_unserved`` says: what was bought cannot refuse a scenario.
- z is of a model on a tier: a type that is sent to one of its options may use all of them.
- Time to first token is drawn as the delay it is a part of.
- What is drawn belongs to a configuration of the problem and a type, not to a plan: all plans of a problem with the
  same seed meet the same scenarios, and a wider spread stretches the same draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import InvalidInputError, NoSolutionError
from hetplan.plan import Deployment, Plan
from hetplan.problem.allocation import AllocationProblem
from hetplan.solvers.allocation.options import SLACK, FloatArray, IntArray, Options, make_options
from hetplan.solvers.base import AllocationSolution, check_count
from hetplan.solvers.highs import GrowingLinear

Reroute = Literal["placed", "any"]
OnScenario = Callable[[int, int], None]

# Unserved share of a type that counts as a violation, and standard deviations of a 95% interval.
VIOLATED = 0.01
_DEVIATIONS = 1.96
# Streams of random numbers, one for each thing drawn.
_DELAYS, _ERRORS, _ARRIVALS = range(3)
_MOST_SCENARIOS = 1_000_000
# Of one column in the program of a scenario.
_MOST_COST = 1e5


@dataclass(frozen=True, slots=True)
class Placement:
    """What stays in the second stage; I query types, B options that are bought.

    Attributes
    ----------
    options : Options
        Those that are bought, by the number of their configuration.
    replicas : (B,) int
    placed : (I, B) bool
        Whether a type may be sent to an option.
    rent_usd, stored_usd : float
        Over the horizon: rent, and stored weights.
    """

    options: Options
    replicas: IntArray
    placed: NDArray[np.bool_]
    rent_usd: float
    stored_usd: float

    @property
    def fixed_usd(self) -> float:
        """Rent and stored weights."""
        return self.rent_usd + self.stored_usd

    @property
    def key(self) -> tuple[bytes, bytes, bytes]:
        """The same of two placements of a problem that are the same."""
        return self.options.number.tobytes(), self.replicas.tobytes(), self.placed.tobytes()


@dataclass(frozen=True, slots=True)
class Operated:
    """The second stage of one scenario, in dollars over the horizon.

    Attributes
    ----------
    shares : (I, B) float
    unserved : (I,) float
    storage_usd, delay_usd, unserved_usd : float
    type_prices : (4, I) float
        What one unit more of a type's row would add to delay and unserved cost: its demand, and its limits on error,
        delay and first token.
    option_prices : (2, B) float
        The same of an option's load and cache.
    """

    shares: FloatArray
    unserved: FloatArray
    storage_usd: float
    delay_usd: float
    unserved_usd: float
    type_prices: FloatArray
    option_prices: FloatArray

    @property
    def usd(self) -> float:
        """Storage, delay and unserved traffic."""
        return self.storage_usd + self.delay_usd + self.unserved_usd


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """What an allocation costs over scenarios; S scenarios, I query types.

    Attributes
    ----------
    rent_usd, stored_usd : float
        The same in every scenario.
    storage_usd, delay_usd, unserved_usd : (S,) float
    unserved : (S, I) float
        Share of each type that is not served.
    """

    rent_usd: float
    stored_usd: float
    storage_usd: FloatArray
    delay_usd: FloatArray
    unserved_usd: FloatArray
    unserved: FloatArray

    @property
    def usd(self) -> FloatArray:
        """(S,) all costs of each scenario."""
        usd: FloatArray = self.rent_usd + self.stored_usd + self.storage_usd + self.delay_usd + self.unserved_usd
        return usd

    @property
    def mean_usd(self) -> float:
        """Mean cost over the scenarios (C^a)."""
        return float(self.usd.mean())

    @property
    def half_width_usd(self) -> float:
        """Half the width of the 95% interval of the mean cost, by the normal distribution; infinite for one."""
        return _half_width(self.usd)

    @property
    def violations(self) -> FloatArray:
        """(S,) share of the types that are violated in each scenario."""
        shares: FloatArray = (self.unserved > VIOLATED).mean(axis=1)
        return shares

    @property
    def violation_rate(self) -> float:
        """Share of (scenario, type) of which more than 1% is unserved (P_viol)."""
        return float(self.violations.mean())

    @property
    def half_width_violation_rate(self) -> float:
        """Half the width of the 95% interval of the violation rate."""
        return _half_width(self.violations)


def evaluate(
    plan: Plan | AllocationSolution | Placement,
    *,
    scenarios: int = 500,
    seed: int = 0,
    delay_spread: float = 0.25,
    error_spread: float = 0.25,
    arrival_spread: float = 0.20,
    stress: float = 1.0,
    reroute: Reroute = "placed",
    on_progress: OnScenario | None = None,
) -> ScenarioResult:
    """Keep what a plan buys, draw scenarios, and find the best shares in each.

    Parameters
    ----------
    plan : Plan, AllocationSolution or Placement
        Of an allocation problem.
    scenarios : int
    seed : int
        Of the draws, which are the same for every plan of a problem.
    delay_spread, error_spread, arrival_spread : float
        How far a factor may be from 1, from 0 to below 1; uniform.
    stress : float
        Factor on every delay and error.
    reroute : "placed" or "any"
        Types may use the models on tiers that the plan sends them to, or all that is bought. A Placement says itself.
    on_progress : callable, optional
        Called with scenarios done and scenarios in all.

    Returns
    -------
    ScenarioResult

    Raises
    ------
    InvalidInputError
        For values out of range, or a plan of another kind of problem.

    Notes
    -----
    Problem (12) of the paper.

    Examples
    --------
    >>> import hetplan as hp
    >>> from hetplan.problem.allocation import AllocationProblem
    >>> plan = hp.optimize(AllocationProblem.canonical(seed=1), solver="milp")
    >>> round(evaluate(plan, scenarios=20).rent_usd, 2) == round(24 * plan.cost_usd_per_hour, 2)
    True
    """
    scenarios = check_count(scenarios, "scenarios", _MOST_SCENARIOS)
    for name, spread in (
        ("delay_spread", delay_spread), ("error_spread", error_spread), ("arrival_spread", arrival_spread),
    ):  # fmt: skip
        if not _is_number(spread) or not 0 <= spread < 1:
            raise InvalidInputError(f"{name} is a number from 0 to below 1, got {spread!r}")
    if not _is_number(stress) or not 0 < stress < math.inf:
        raise InvalidInputError(f"stress is a number above 0, got {stress!r}")
    if isinstance(plan, Placement) and reroute != "placed":
        raise InvalidInputError(f"a Placement says itself who may use what: leave out reroute={reroute!r}")
    placement = plan if isinstance(plan, Placement) else placement_of(plan, reroute=reroute)
    types, numbers = len(placement.placed), placement.options.number
    drawn = draw_factors(
        numbers,
        types,
        scenarios=scenarios,
        seed=seed,
        delay_spread=delay_spread,
        error_spread=error_spread,
        arrival_spread=arrival_spread,
        stress=stress,
    )
    operations = Operations(placement)
    dollars = np.zeros((3, scenarios))
    unserved = np.zeros((scenarios, types))
    for s in range(scenarios):
        found = operations.solve(drawn.arrivals[s], drawn.delays[s], drawn.errors[s])
        dollars[:, s] = found.storage_usd, found.delay_usd, found.unserved_usd
        unserved[s] = found.unserved
        if on_progress is not None:
            on_progress(s + 1, scenarios)
    return ScenarioResult(placement.rent_usd, placement.stored_usd, dollars[0], dollars[1], dollars[2], unserved)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Factors of S scenarios: on arrivals (S, I), and on delays and errors (S, I, options)."""

    arrivals: FloatArray
    delays: FloatArray
    errors: FloatArray


def draw_factors(
    numbers: IntArray,
    types: int,
    *,
    scenarios: int,
    seed: int,
    delay_spread: float,
    error_spread: float,
    arrival_spread: float,
    stress: float,
) -> Drawn:
    """The scenarios of a seed, for configurations by their number; arguments as of `evaluate`."""
    return Drawn(
        arrivals=1 + arrival_spread * draw(_ARRIVALS, np.zeros(1, dtype=np.int64), types, scenarios, seed)[:, :, 0],
        delays=stress * (1 + delay_spread * draw(_DELAYS, numbers, types, scenarios, seed)),
        errors=stress * (1 + error_spread * draw(_ERRORS, numbers, types, scenarios, seed)),
    )


def draw(stream: int, numbers: IntArray, types: int, scenarios: int, seed: int) -> FloatArray:
    """(scenarios, types, numbers) uniform from -1 to 1, those of a number being its own whatever stands beside it."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InvalidInputError(f"seed is a whole number from 0, got {seed!r}")
    drawn = np.zeros((scenarios, types, len(numbers)))
    for at, number in enumerate(numbers.tolist()):
        own = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream, number)))
        drawn[:, :, at] = own.uniform(-1.0, 1.0, (scenarios, types))
    return drawn


# ---- what stays


def placement_of(found: Plan | AllocationSolution, *, reroute: Reroute = "placed") -> Placement:
    """What a plan or a solver's answer buys, and which type may use it.

    Raises
    ------
    InvalidInputError
        If the plan does not answer an allocation problem, or names a configuration that the problem has not.
    """
    if reroute not in get_args(Reroute):
        raise InvalidInputError(f"reroute is 'placed' or 'any', got {reroute!r}")
    if isinstance(found, AllocationSolution):
        problem = found.options.problem
        bought, sent = sent_where(found)
    else:
        if not isinstance(found.problem, AllocationProblem):
            raise InvalidInputError(
                "scenarios are drawn for plans of allocation problems, and this one places a model on given machines. "
                "Make an AllocationProblem, and optimize it"
            )
        problem = found.problem
        numbers: list[int] = []
        for deployment in found.deployments:
            numbers.append(_configuration(problem, deployment, numbers))
        counts = [deployment.pipelines[0].count for deployment in found.deployments]
        bought = dict(zip(numbers, counts, strict=True))
        types = {query.name: i for i, query in enumerate(problem.query_types)}
        sent = {(types[route.query_type], numbers[route.deployment]) for route in found.routes if route.fraction > 0}
    return make_placement(make_options(problem, prune=False), bought, sent, reroute=reroute)


def sent_where(found: AllocationSolution) -> tuple[dict[int, int], set[tuple[int, int]]]:
    """What an answer buys, by configuration number, and the pairs of type and number where some of it is sent."""
    options, answer = found.options, found.assignment
    bought = {int(options.number[n]): int(answer.replicas[n]) for n in np.flatnonzero(answer.replicas)}
    return bought, {(int(i), int(options.number[n])) for i, n in np.argwhere(answer.shares > 0)}


def make_placement(
    options: Options, bought: dict[int, int], sent: set[tuple[int, int]], *, reroute: Reroute = "placed"
) -> Placement:
    """A placement from replicas by configuration number, and pairs of type and number where some of it is sent.

    Parameters
    ----------
    options : Options
        All of the problem, none pruned.
    """
    at = {int(number): n for n, number in enumerate(options.number.tolist())}
    missing = sorted(set(bought) - set(at))
    if missing:
        raise InvalidInputError(f"configuration {missing[0]} is bought, and its weights do not fit the problem's tier")
    chosen = np.array([at[number] for number in sorted(bought)], dtype=np.int64)
    own = options.subset(chosen)
    replicas = np.array([bought[number] for number in sorted(bought)], dtype=np.int64)
    types = len(options.unserved_usd)
    of_pair = np.zeros((types, options.pairs), dtype=bool)
    for i, number in sent:
        of_pair[i, options.pair[at[number]]] = True
    if reroute == "any":
        of_pair[:, own.pair] = True
    if own.stored_per_type:
        stored = float((of_pair * options.pair_usd).sum())
    else:
        stored = float(options.pair_usd[np.unique(own.pair)].sum())
    return Placement(own, replicas, of_pair[:, own.pair], float(own.rent_usd @ replicas), stored)


def _configuration(problem: AllocationProblem, deployment: Deployment, taken: list[int]) -> int:
    """The number of the configuration that a deployment is of."""
    pipeline = deployment.pipelines[0]
    degrees = (pipeline.stages[0].tensor_parallel, len(pipeline.stages))
    models = [model.name for model in problem.models]
    model = models.index(deployment.model) if deployment.model in models else -1
    if not problem.configurations:
        name = pipeline.nodes[0].rpartition(" x")[0]
        tiers = [tier.name for tier in problem.tiers]
        every = [(n, m) for n in problem.tensor_parallel for m in problem.pipeline_parallel]
        if model >= 0 and name in tiers and degrees in every:
            return (model * len(tiers) + tiers.index(name)) * len(every) + every.index(degrees)
    # Two of one model on one tier may differ in price alone.
    rent = pipeline.cost_usd_per_hour
    for number, one in enumerate(problem.configurations):
        tier = problem.tiers[one.tier]
        node = tier.name if tier.offer is None else tier.offer.name
        if (
            number not in taken
            and (one.model, one.tensor_parallel, one.pipeline_parallel) == (model, *degrees)
            and (node,) * one.machines == pipeline.nodes
            and math.isclose(one.usd_per_hour, rent, rel_tol=1e-9, abs_tol=1e-9)
        ):
            return number
    raise InvalidInputError(
        f"the plan has {deployment.model} on {pipeline.nodes[0]} with TP {degrees[0]}, PP {degrees[1]}, which is no "
        "configuration of its problem. Check it with hetplan.verify"
    )


# ---- the second stage


class Operations:
    """The best shares on what is bought, found again and again with other delays, errors and arrivals.

    Parameters
    ----------
    placement : Placement
    """

    def __init__(self, placement: Placement) -> None:
        o = self._options = placement.options
        self._placement = placement
        decisions = o.problem.decisions
        types, bought = placement.placed.shape
        self._each = decisions.delay == "each"
        self._per_request = decisions.penalties == "per_request"
        self._type, self._at = np.nonzero(placement.placed)
        count = len(self._type)
        # Rows: demand, error, delay, first token of each type; load and cache of each option.
        self._error, self._delay, self._first, self._load, self._cache = (
            types, 2 * types, 3 * types, 4 * types, 4 * types + bought,
        )  # fmt: skip
        no_limit = math.inf
        mean = no_limit if self._each else 1.0
        first = no_limit if o.ttft is None else mean
        memory = placement.replicas.astype(float) if decisions.kv_memory == "littles_law" else np.full(bought, no_limit)
        most = np.concatenate([np.repeat([1.0, 1.0, mean, first], types), placement.replicas, memory])
        least = np.full(len(most), -no_limit)
        least[:types] = 1.0
        self._linear = GrowingLinear()
        self._linear.add_rows(least, most)
        entries: list[tuple[int, float]] = []
        starts = []
        for i, b in zip(self._type.tolist(), self._at.tolist(), strict=True):
            starts.append(len(entries))
            entries += [(i, 1.0), *((row, 1.0) for row in self._rows(i, b))]
        for i in range(types):
            starts.append(len(entries))
            entries.append((i, 1.0))
            if o.served:
                entries += [(row + i, 1.0) for row in (self._error, self._delay, self._first)]
        rows, values = zip(*entries, strict=True)
        self._linear.add_columns(
            np.zeros(count + types), np.ones(count + types), np.array(starts), np.array(rows), np.array(values)
        )
        # Delay alone: what a type costs on an option, beside the storage of its traffic.
        self._delay_usd = (o.unit_usd - o.storage_usd[:, None])[self._type, self._at]

    def _rows(self, i: int, b: int) -> tuple[int, ...]:
        return (self._error + i, self._delay + i, self._first + i, self._load + b, self._cache + b)

    def solve(
        self, arrivals: FloatArray, delays: FloatArray | None = None, errors: FloatArray | None = None
    ) -> Operated:
        """The least delay and unserved cost.

        Parameters
        ----------
        arrivals : (I,) float array
            Factors on the requests of each type.
        delays, errors : (I, B) float array, optional
            Factors on each type's delay and error on each option; 1 by default.

        Raises
        ------
        NoSolutionError
            If the program is lost to rounding.
        """
        o, i, b = self._options, self._type, self._at
        slower = np.ones(len(i)) if delays is None else delays[i, b]
        wronger = np.ones(len(i)) if errors is None else errors[i, b]
        more = arrivals[i]
        late = o.delay[i, b] * slower
        first = np.zeros(len(i)) if o.ttft is None else o.ttft[i, b] * slower
        table = np.stack(
            [o.error[i, b] * wronger, late, first, o.load[i, b] * more, o.cache[i, b] * more * slower], axis=1
        )
        times = arrivals if self._per_request else np.ones(len(arrivals))
        delay_usd = self._delay_usd * slower * times[i]
        unserved_usd = o.unserved_usd * times
        for column, (query, option, values) in enumerate(zip(i.tolist(), b.tolist(), table.tolist(), strict=True)):
            for row, value in zip(self._rows(query, option), values, strict=True):
                self._linear.set_coefficient(row, column, value)
            if self._each:
                allowed = late[column] <= 1 + SLACK and first[column] <= 1 + SLACK
                self._linear.set_bounds(column, 0.0, 1.0 if allowed else 0.0)
        columns = np.arange(len(i) + len(arrivals))
        costs = np.concatenate([delay_usd, unserved_usd])
        # Dollars of each request come to more than a solver's tolerances are for.
        scale = max(1.0, float(costs.max()) / _MOST_COST)
        self._linear.set_costs(columns, costs / scale)
        found = self._linear.solve()
        if found is None:
            raise NoSolutionError(
                "the best shares of a scenario were lost to rounding: everything may be left unserved, so there are "
                "some. Bring the problem's limits nearer to each other in size"
            )
        parts = np.clip(found.values, 0.0, 1.0)
        shares = np.zeros(o.delay.shape)
        shares[i, b] = parts[: len(i)]
        unserved = parts[len(i) :]
        return Operated(
            shares=shares,
            unserved=unserved,
            storage_usd=float((o.storage_usd * arrivals) @ shares.sum(axis=1)),
            delay_usd=float(delay_usd @ parts[: len(i)]),
            unserved_usd=float(unserved_usd @ unserved),
            type_prices=scale * found.prices[: self._load].reshape(4, -1),
            option_prices=scale * found.prices[self._load :].reshape(2, -1),
        )


def _half_width(values: FloatArray) -> float:
    if len(values) < 2:
        return math.inf
    return float(_DEVIATIONS * values.std(ddof=1) / math.sqrt(len(values)))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
