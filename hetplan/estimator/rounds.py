"""Rounds of continuous batching: what all sequences in flight take for a token each, under the prompts that arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.estimator.base import FloatArray
from hetplan.estimator.calibrated import CalibratedEstimator, StepWork, step_work
from hetplan.estimator.pipeline import StageShape
from hetplan.estimator.schedules import through
from hetplan.problem.placement import PlacementProblem

# Counts of sequences at which steps are timed; between them times are drawn straight.
_COUNTS = 32
_ITERATIONS = 500
# Rounds that prompts make so much longer never end.
_MOST_GROWTH, _FOREVER_S = 1e3, 1e9
# Groups of prompts of like length whose steps are timed.
_GROUPS = 8
# Prompts of one step beyond which all are taken as their mean.
_MOST_PROMPTS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Lengths over all query types: prompts without what the prefix cache holds, answers, contexts."""

    prompt_tokens: FloatArray
    prompt_shares: FloatArray
    prompt_context: float
    output_tokens: FloatArray
    output_shares: FloatArray
    decode_context: float

    @property
    def mean_prompt(self) -> float:
        return float(self.prompt_tokens @ self.prompt_shares)

    @property
    def mean_output(self) -> float:
        return float(self.output_tokens @ self.output_shares)

    @property
    def output_scv(self) -> float:
        """Squared coefficient of variation of answers."""
        return float(self.output_tokens**2 @ self.output_shares) / self.mean_output**2 - 1


def load_of(problem: PlacementProblem) -> Load:
    """The lengths of a problem's workload."""
    queries = problem.workload.query_types
    rates = np.array([query.requests_per_s or 1.0 for query in queries])
    prompts, prompt_shares, outputs, output_shares = [], [], [], []
    cached = context = weight = 0.0
    for query, part in zip(queries, rates / rates.sum(), strict=True):
        prompt, answer = np.array(query.input_tokens.tokens), np.maximum(np.array(query.output_tokens.tokens), 1.0)
        shares = np.array(query.output_tokens.shares)
        prompts.append(np.maximum(prompt * (1 - query.prefix_cache_hit_rate), 1.0))
        prompt_shares.append(part * np.array(query.input_tokens.shares))
        outputs.append(answer)
        output_shares.append(part * shares)
        mean = query.input_tokens.mean
        cached += part * mean * query.prefix_cache_hit_rate
        # A sequence counts by how long it is there.
        context += part * float(shares @ (answer * (mean + answer / 2)))
        weight += part * float(shares @ answer)
    return Load(
        np.concatenate(prompts),
        np.concatenate(prompt_shares),
        cached,
        np.concatenate(outputs),
        np.concatenate(output_shares),
        context / weight,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Rounds:
    """(M,) by sequences in flight: seconds of a round, of a way with one's own prompt, and what a prompt costs others.

    ``cost_s2`` is the mean square of the last.
    """

    round_s: FloatArray
    decode_s: FloatArray
    first_s: FloatArray
    cost_s: FloatArray
    cost_s2: FloatArray


def rounds_of(
    problem: PlacementProblem,
    estimator: CalibratedEstimator,
    stages: Sequence[StageShape],
    load: Load,
    requests_per_s: float,
    max_num_seqs: int,
) -> Rounds:
    """Rounds of a pipeline for every number of sequences in flight; see `hetplan.estimator.queueing.steady_state`."""
    counts = np.unique(np.rint(np.geomspace(1, max_num_seqs, _COUNTS)))
    batches = np.minimum(counts, len(stages))
    plain = through(problem, estimator, stages, step_of(load, 0.0, 0.0, counts / batches))
    decode = np.maximum(plain.sum(axis=0), batches * plain.max(axis=0))
    groups = _grouped(load)
    alone = [through(problem, estimator, stages, step_of(load, 1.0, tokens, counts / batches)) for tokens, _ in groups]
    beside = [
        through(problem, estimator, stages, step_of(load, 2.0, (tokens + load.mean_prompt) / 2, counts / batches))
        for tokens, _ in groups
    ]
    shares = np.array([share for _, share in groups])
    cost = np.stack([(one - plain).sum(axis=0) for one in alone])
    mean, square = shares @ cost, shares @ cost**2
    each = shares @ np.stack([(two - one).sum(axis=0) for one, two in zip(alone, beside, strict=True)])
    # Prompts that differ are taken as fewer, longer ones, which vary as much.
    spread = np.maximum(square / mean**2, 1.0)
    seconds = decode.copy()
    for _ in range(_ITERATIONS):
        apart = requests_per_s * seconds / batches
        added = (mean - each) * -np.expm1(-apart * batches) + each * spread * _most_of(apart / spread, batches)
        following = np.minimum(decode + added, _FOREVER_S)
        if np.allclose(following, seconds, rtol=1e-9, atol=0.0):
            break
        seconds = following
    seconds = np.where(seconds < decode * _MOST_GROWTH, seconds, np.inf)
    every = np.arange(1, max_num_seqs + 1)
    return Rounds(*(np.interp(every, counts, row) for row in (seconds, decode, plain.sum(axis=0) + mean, mean, square)))


def _most_of(mean: FloatArray, count: FloatArray) -> FloatArray:
    """(M,) mean of the largest of ``count`` Poisson variables."""
    from scipy.special import gammaincc

    values = np.arange(_MOST_PROMPTS)[:, np.newaxis]
    # P(X <= k) is the regularised gamma function Q(k + 1, mean).
    largest = (1 - gammaincc(values + 1, mean) ** count).sum(axis=0)
    return np.where(count > 1, np.maximum(largest, mean), mean)


def _grouped(load: Load) -> list[tuple[float, float]]:
    """Prompt lengths with their shares, neighbours taken together."""
    order = np.argsort(load.prompt_tokens)
    tokens, shares = load.prompt_tokens[order], load.prompt_shares[order]
    group = np.minimum((np.cumsum(shares) - shares / 2) * _GROUPS, _GROUPS - 1e-9).astype(np.int64)
    found = []
    for number in np.unique(group):
        here = group == number
        share = float(shares[here].sum())
        found.append((float(tokens[here] @ shares[here]) / share, share))
    return found


def step_of(
    load: Load, prompts: FloatArray | float, tokens: FloatArray | float, sequences: FloatArray | float
) -> StepWork:
    """Steps of so many prompts of so many tokens each, beside sequences that decode."""
    return step_work(
        prompts=prompts,
        prompt_tokens=tokens,
        prompt_context=load.prompt_context,
        sequences=sequences,
        context=load.decode_context,
    )


def kept_share(load: Load, steps: FloatArray, stretch: float) -> FloatArray:
    """(K,) how much of the variance of the number in flight is left in a mean over so many steps.

    The number forgets what it was as those who were there go: by the rest of an answer that is met under way.
    """
    window = steps[:, np.newaxis]
    lengths = np.maximum(load.output_tokens - 1, 1.0) * max(stretch, 1.0)
    part = np.minimum(lengths / window, 1.0)
    area = lengths * (part - part**2 / 2) - window * (part**2 / 2 - part**3 / 3)
    return np.asarray(2 * (area @ load.output_shares) / float(lengths @ load.output_shares))
