"""Waiting: what a request spends before it is served, and what all in flight make each other wait, in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hetplan.errors import InvalidInputError, UnsupportedFeatureError
from hetplan.estimator.base import Estimator, FloatArray, make_estimator
from hetplan.estimator.calibrated import CalibratedEstimator
from hetplan.estimator.pipeline import StageShape
from hetplan.estimator.prediction import shapes_of
from hetplan.estimator.prompt_queue import Delays, first_token_delays, immediate_delays, mixed, prompt_grid
from hetplan.estimator.rounds import Load, Rounds, kept_share, load_of, rounds_of, step_of
from hetplan.estimator.schedules import through
from hetplan.plan import Plan
from hetplan.problem.placement import PlacementProblem

LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
# Levels of the number in flight at which the queue of prompts is solved.
_LEVELS = 3


def mg1_wait_s(arrivals_per_s: ArrayLike, service_mean_s: ArrayLike, service_scv: ArrayLike) -> FloatArray:
    """Mean wait in a queue with one server, Poisson arrivals and any service times (Pollaczek-Khinchine).

    Parameters
    ----------
    arrivals_per_s : array_like
        Requests per second.
    service_mean_s : array_like
        Mean seconds of the server for a request.
    service_scv : array_like
        Squared coefficient of variation of those seconds, variance / mean**2: 0 where all take the same time (M/D/1),
        1 where they are exponential (M/M/1).

    Returns
    -------
    float array
        Mean seconds before service begins, of the arguments' broadcast shape.

    Raises
    ------
    InvalidInputError
        For negative or infinite arguments, shapes that do not broadcast, and a server that is not faster than what
        arrives: its queue grows for ever.

    Notes
    -----
    With utilisation rho = arrivals x mean: wait = rho / (1 - rho) x (1 + scv) / 2 x mean.

    Examples
    --------
    >>> float(mg1_wait_s(0.5, 1.0, 1.0)), float(mg1_wait_s(0.5, 1.0, 0.0))
    (1.0, 0.5)
    """
    given = {"arrivals_per_s": arrivals_per_s, "service_mean_s": service_mean_s, "service_scv": service_scv}
    try:
        arrivals, mean, scv = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in given.values()))
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{', '.join(given)} are numbers of one shape: {error}") from None
    for name, values in zip(given, (arrivals, mean, scv), strict=True):
        wrong = values[~(np.isfinite(values) & (values >= 0))]
        if wrong.size:
            raise InvalidInputError(f"{name} has {wrong.flat[0]:g}; finite numbers from 0 are needed")
    utilization = arrivals * mean
    if (utilization >= 1).any():
        worst = np.unravel_index(utilization.argmax(), utilization.shape)
        raise InvalidInputError(
            f"{arrivals[worst]:g} arrivals/s of {mean[worst]:g} s each keep a server {utilization[worst]:.4g} times "
            "busy, and below 1 is needed: the queue grows for ever. Add servers, or let less arrive"
        )
    return np.asarray(utilization / (1 - utilization) * (1 + scv) / 2 * mean, dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class SteadyState:
    """What requests of a pipeline meet under a rate, once it has settled.

    Attributes
    ----------
    requests_per_s : float
        What arrives.
    utilization : float
        What arrives over what is served when as many sequences as allowed are in flight; from 1 on the queue grows for
        ever, and every latency is infinite.
    in_flight : float
        Mean requests that are there.
    wait_share, wait_s : float
        Share of the requests that find all places taken, and the mean of their wait for one.
    first : Delays
        From a place to the first token.
    output_tokens, output_shares : (K,) float arrays
        Lengths of answers.
    tpot_s : float
        Mean seconds per output token.
    tpot_variance_s2 : (K,) float array
        Of the mean seconds per token of requests with so long an answer.
    """

    requests_per_s: float
    utilization: float
    in_flight: float
    wait_share: float
    wait_s: float
    first: Delays
    output_tokens: FloatArray
    output_shares: FloatArray
    tpot_s: float
    tpot_variance_s2: FloatArray

    def mean(self, name: str) -> float:
        """Mean of a latency: "ttft_s", "tpot_s" or "e2e_s"."""
        _check_latency(name)
        if self.utilization >= 1:
            return math.inf
        ttft = self.wait_share * self.wait_s + self.first.mean_s
        steps = self.output_tokens - 1
        if name == "ttft_s":
            return ttft
        if name == "tpot_s":
            return self.tpot_s * float(self.output_shares @ (steps > 0))
        return ttft + self.tpot_s * float(self.output_shares @ steps)

    def covered(self, name: str, seconds: float) -> float:
        """Share of the requests whose latency is at most ``seconds``."""
        _check_latency(name)
        if self.utilization >= 1:
            return 0.0
        if name == "ttft_s":
            return self.first.covered(seconds, wait_share=self.wait_share, wait_s=self.wait_s)
        steps = self.output_tokens - 1
        mean, variance = np.where(steps > 0, self.tpot_s, 0.0), np.where(steps > 0, self.tpot_variance_s2, 0.0)
        if name == "e2e_s":
            wait_variance = self.wait_s**2 * self.wait_share * (2 - self.wait_share)
            mean = self.mean("ttft_s") + steps * mean
            variance = self.first.variance_s2 + wait_variance + steps**2 * variance
        return float(self.output_shares @ _gamma_covered(mean, variance, seconds))

    def percentile(self, name: str, level: float) -> float:
        """A percentile of a latency: see `percentile_of`."""
        return percentile_of([self], name, level)


def percentile_of(states: Sequence[SteadyState], name: str, level: float) -> float:
    """A percentile of a latency over the requests of several pipelines.

    Parameters
    ----------
    states : sequence of SteadyState
        Each counts by its rate.
    name : "ttft_s", "tpot_s" or "e2e_s"
    level : float
        From 0 to below 1.

    Returns
    -------
    float
        Seconds; infinite where some pipeline gets more than it serves.
    """
    if not 0 <= level < 1:
        raise InvalidInputError(f"a percentile is a level from 0 to below 1, got {level!r}")
    if any(state.utilization >= 1 for state in states):
        return math.inf
    rate = math.fsum(state.requests_per_s for state in states)

    def missing(seconds: float) -> bool:
        return math.fsum(s.requests_per_s * s.covered(name, seconds) for s in states) / rate < level

    low, high = 0.0, max(*(state.mean(name) for state in states), 1e-9)
    while missing(high):
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if missing(middle) else (low, middle)
    return high


def steady_state(
    problem: PlacementProblem,
    estimator: Estimator,
    stages: Sequence[StageShape],
    *,
    requests_per_s: float,
    max_num_seqs: int,
    max_step_tokens: int,
) -> SteadyState:
    """TTFT, TPOT and end-to-end latency of a pipeline under Poisson arrivals, with continuous batching.

    Parameters
    ----------
    problem : PlacementProblem
        Whose workload says how long prompts and answers are.
    estimator : Estimator
        The calibrated one.
    stages : sequence of StageShape
    requests_per_s : float
        What arrives at the pipeline.
    max_num_seqs, max_step_tokens : int
        The engine's limits on sequences in flight and on tokens of a step.

    Returns
    -------
    SteadyState

    Raises
    ------
    UnsupportedFeatureError
        For an estimator that does not time steps of prompts and decoding together.
    InvalidInputError
        For a rate that is not above 0.

    Notes
    -----
    With n sequences in flight on S stages, A = min(n, S) micro-batches go round, a step of each at a time. A round of
    decoding takes D(n) = max(sum of the stages, A x the slowest stage). Prompts come at the rate lambda, into steps
    a = lambda T / A apart. While a step with prompts passes the stages, the others are behind it or wait for it at its
    end: it makes the round of all longer by its seconds in all stages, and only steps with prompts side by side do so
    at once. So a round takes the solution of

        ``T(n) = D(n) + (1 - exp(-a A)) c + p E[largest of A Poisson(a)]``,

    with c + p the seconds that one prompt adds to a step, and p those of each further one (c is below 0 where a prompt
    finds room beside weights that are read in any case). Prompts that differ count as fewer, longer ones of the same
    mean and variance.

    Sequences share the engine: each gets a token per round. With residence R(n) = first step + (answer - 1) T(n), the
    engine answers n / R(n) requests per second. For processor sharing with such a rate the number of requests there
    depends on the answers' mean alone:

        ``share(n) = share(0) x product over k <= n of lambda R(k) / k``,

    the last factor repeated where n exceeds the limit M: those beyond wait. A wait for a place is exponential with the
    mean 1 / (M / R(M) - lambda), less where answers vary less (Cosmetatos' M/D/c). The mean TPOT is T(n) as sequences
    meet it, by n share(n).

    TTFT: the wait for a place, and the delays of `first_token_delays` for three levels of n; who finds a micro-batch
    free starts at once. Steps of S micro-batches begin D / S apart, and one with prompts holds the next one up by their
    seconds in all stages.

    TPOT of a request with W steps has a gamma distribution. Its variance is that of the prompts in its steps, Poisson,
    lambda TPOT E[cost^2] / (1 - rho)^2 / W with rho the share of time that prompts take, and that of T(n) as sequences
    meet it, times f(W): what is left of it in a mean over W steps, when n forgets as answers of the given lengths end,
    stretched by its variance over its mean (1 without sharing). End-to-end is the sum of TTFT and W x TPOT, gamma by
    its two moments for each length of answer.

    Departures from the engine: sequences are of the mean context; KV cache is taken as enough for M; arrivals at copies
    of a pipeline, sent in turn, are more even than Poisson.
    """
    if not (math.isfinite(requests_per_s) and requests_per_s > 0):
        raise InvalidInputError(f"requests_per_s is a number above 0, got {requests_per_s!r}")
    if not isinstance(estimator, CalibratedEstimator):
        raise UnsupportedFeatureError(
            f"the estimator {estimator.name!r} times static batches only; percentiles need estimator='calibrated'"
        )
    load = load_of(problem)
    rounds = rounds_of(problem, estimator, stages, load, requests_per_s, max_num_seqs)
    counts = np.arange(1, max_num_seqs + 1, dtype=np.float64)
    residence_s = rounds.first_s + (load.mean_output - 1) * rounds.round_s
    utilization = requests_per_s * float(residence_s[-1]) / max_num_seqs
    if not utilization < 1:
        return _overloaded(load, requests_per_s, utilization)
    share = np.concatenate([[0.0], np.cumsum(np.log(requests_per_s * residence_s / counts))])
    share = np.exp(share - share.max())
    beyond = float(share[-1]) * utilization / (1 - utilization)
    total = float(share.sum()) + beyond
    share, beyond = share / total, beyond / total
    flying = float(share[1:] @ counts) + beyond * max_num_seqs
    # Whoever waits meets a full engine.
    met = share[1:] * counts
    met[-1] += beyond * max_num_seqs
    met /= met.sum()
    tpot_s = float(met @ rounds.round_s)
    spread = float(met @ (rounds.round_s - tpot_s) ** 2)
    second = float(share[1:] @ counts**2) + beyond * max_num_seqs**2
    stretch = max((second - flying**2) / flying, 0.1)
    usual = int(np.clip(round(flying), 1, max_num_seqs)) - 1
    cost_s, cost_s2 = rounds.cost_s[usual], rounds.cost_s2[usual]
    busy = min(requests_per_s * cost_s, 0.95)
    steps = np.maximum(load.output_tokens - 1, 1.0)
    variance = requests_per_s * tpot_s * cost_s2 / (1 - busy) ** 2 / steps + spread * kept_share(load, steps, stretch)
    return SteadyState(
        requests_per_s=requests_per_s,
        utilization=utilization,
        in_flight=float(share[1:] @ counts) + beyond * (max_num_seqs + 1 / (1 - utilization)),
        wait_share=float(share[-1]) + beyond,
        wait_s=_variability(load.output_scv, max_num_seqs, utilization)
        * float(residence_s[-1])
        / (max_num_seqs * (1 - utilization)),
        first=_first(problem, estimator, stages, load, requests_per_s, rounds, share, max_step_tokens),
        output_tokens=load.output_tokens,
        output_shares=load.output_shares,
        tpot_s=tpot_s,
        tpot_variance_s2=variance,
    )


def plan_steady_states(plan: Plan, requests_per_s: float | None = None) -> list[SteadyState]:
    """The steady state of each pipeline of a plan, copies together, requests sent in proportion to what each serves.

    Parameters
    ----------
    plan : Plan
    requests_per_s : float, optional
        What arrives at the plan; by default its workload's rate.

    Returns
    -------
    list of SteadyState
        With the rate of one copy; repeated for each copy, for `percentile_of`.

    Raises
    ------
    InvalidInputError
        If no rate is stated.
    """
    problem = plan.placement
    rate = problem.workload.requests_per_s if requests_per_s is None else requests_per_s
    if rate is None:
        raise InvalidInputError("percentiles depend on what arrives; give the workload requests_per_s")
    estimator = make_estimator(problem)
    pipelines = [pipeline for deployment in plan.deployments for pipeline in deployment.pipelines]
    served = math.fsum(p.count * p.predictions.requests_per_s.value for p in pipelines)
    found = []
    for pipeline in pipelines:
        state = steady_state(
            problem,
            estimator,
            shapes_of(problem, pipeline),
            requests_per_s=rate * pipeline.predictions.requests_per_s.value / served,
            max_num_seqs=pipeline.max_num_seqs,
            max_step_tokens=plan.max_num_batched_tokens(pipeline),
        )
        found += [state] * pipeline.count
    return found


def _overloaded(load: Load, requests_per_s: float, utilization: float) -> SteadyState:
    none = np.zeros(0)
    return SteadyState(
        requests_per_s=requests_per_s,
        utilization=utilization,
        in_flight=math.inf,
        wait_share=1.0,
        wait_s=math.inf,
        first=Delays(none, none, none),
        output_tokens=load.output_tokens,
        output_shares=load.output_shares,
        tpot_s=math.inf,
        tpot_variance_s2=np.zeros(load.output_tokens.size),
    )


def _variability(scv: float, servers: int, utilization: float) -> float:
    """What the wait for one of several servers is of the exponential one (Cosmetatos), by the variation of service."""
    more = (1 - utilization) * (servers - 1) * (math.sqrt(4 + 5 * servers) - 2) / (16 * utilization * servers)
    return (1 + scv) / 2 + max(1 - scv, 0.0) / 2 * min(more, 1.0)


# ---- first tokens


def _first(
    problem: PlacementProblem,
    estimator: CalibratedEstimator,
    stages: Sequence[StageShape],
    load: Load,
    requests_per_s: float,
    rounds: Rounds,
    share: FloatArray,
    max_step_tokens: int,
) -> Delays:
    """Of requests that have a place: at once where a micro-batch is free, otherwise with the next step."""
    grid = prompt_grid(load.prompt_tokens, load.prompt_shares)
    depth = len(stages)

    def passes(sequences: float) -> tuple[FloatArray, FloatArray]:
        """(S, CELLS) seconds in each stage, and of the step without prompts."""
        # As few prompts as there can be: what is longest takes longest.
        count = np.maximum(np.ceil(grid.tokens / float(load.prompt_tokens.max())), 1.0)
        work = step_of(load, count, np.maximum(grid.tokens, 1.0) / count, max(sequences, 1e-9))
        plain = through(problem, estimator, stages, step_of(load, 0.0, 0.0, np.array([max(sequences, 1e-9)])))
        each = np.maximum(through(problem, estimator, stages, work), plain)
        each[:, 0] = plain[:, 0]
        return each, plain

    free = float(share[:depth].sum())
    parts = [(free, immediate_delays(grid, passes(0.0)[0].sum(axis=0)))] if free > 0 else []
    counts, shares = np.arange(depth, len(share), dtype=np.float64), share[depth:]
    level = np.minimum((np.cumsum(shares) - shares / 2) / max(shares.sum(), 1e-300) * _LEVELS, _LEVELS - 1e-9)
    for number in range(_LEVELS):
        here = level.astype(np.int64) == number
        weight = float(shares[here].sum())
        if weight == 0:
            continue
        flying = float(shares[here] @ counts[here]) / weight
        usual = max(round(flying), 1) - 1
        each, plain = passes(flying / depth)
        round_s, decode_s = float(rounds.round_s[usual]), float(rounds.decode_s[usual])
        told = (round_s - decode_s) / (requests_per_s * round_s * float(rounds.cost_s[usual]))
        delays = first_token_delays(
            grid,
            requests_per_s=requests_per_s,
            step_s=decode_s / depth + told * (each - plain).sum(axis=0),
            pass_s=each.sum(axis=0),
            step_tokens=max(max_step_tokens - flying / depth, 1.0),
        )
        parts.append((weight, delays))
    total = math.fsum(weight for weight, _ in parts)
    return mixed([(weight / total, delays) for weight, delays in parts])


def _gamma_covered(mean: FloatArray, variance: FloatArray, seconds: float) -> FloatArray:
    """(K,) distribution functions of gamma variables at a point; a step where they do not vary."""
    from scipy.special import gammainc

    varies = (variance > 1e-12 * mean**2) & (mean > 0)
    shape = np.where(varies, mean**2 / np.where(varies, variance, 1.0), 1.0)
    scale = np.where(varies, variance / np.where(mean > 0, mean, 1.0), 1.0)
    return np.where(varies, gammainc(shape, max(seconds, 0.0) / scale), (seconds >= mean).astype(np.float64))


def _check_latency(name: str) -> None:
    if name not in LATENCIES:
        raise InvalidInputError(f"latency is one of {', '.join(LATENCIES)}, got {name!r}")
