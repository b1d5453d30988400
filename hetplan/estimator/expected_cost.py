"""What a plan's output costs in the long run, interruptions included, by the closed form of one pipeline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hetplan.estimator.base import Estimator
from hetplan.estimator.interruption import InterruptionCost, interruption_cost
from hetplan.estimator.pipeline import StageShape, pipeline_times
from hetplan.problem.placement import PlacementProblem
from hetplan.units import MILLION, SECONDS_PER_HOUR


@dataclass(frozen=True, slots=True)
class ExpectedPipeline:
    """A pipeline in the long run.

    Attributes
    ----------
    availability : float
        Share of the time in which it serves.
    output_tokens_per_s : float
        What it generates on the mean over all time; not below 0.
    usd_per_hour : float
        Of its machines and of those beside them at hand-overs, and of what it sends.
    """

    availability: float
    output_tokens_per_s: float
    usd_per_hour: float


def expected_pipeline(
    problem: PlacementProblem,
    estimator: Estimator,
    stages: Sequence[StageShape],
    offers: Sequence[str],
    *,
    micro_batch: int,
    requests_per_s: float,
    egress_usd_per_hour: float = 0.0,
) -> ExpectedPipeline:
    """A pipeline's output and bill when its spot machines are taken at the rates of their offers.

    Parameters
    ----------
    problem : PlacementProblem
        With ``handling`` and the times of a start.
    estimator : Estimator
    stages : sequence of StageShape
    offers : sequence of str
        Of each of its machines.
    micro_batch : int
        Sequences in a stage at a time.
    requests_per_s : float
        What it serves while it runs, kept full.
    egress_usd_per_hour : float
        Of what it sends then.

    Returns
    -------
    ExpectedPipeline

    Notes
    -----
    `interruption_cost` for the machines of each offer; a pipeline serves when none of them is lacking, so that
    availabilities multiply, and the rates of what interrupts a pipeline that serves go down by the others'. It is full:
    all sequences in flight hold a mean prompt and half a mean answer, prompts are read again at the pace of the slowest
    stage. A machine that is paid twice is paid at its own offer's price.
    """
    work = problem.workload
    in_flight = micro_batch * (len(stages) if estimator.micro_batches else 1)
    slowest_s = float(pipeline_times(problem, estimator, stages, micro_batch).prefill.max())
    tokens_per_s = requests_per_s * work.mean_output_tokens
    pools = {pool.offer.name: pool.offer for pool in problem.cluster.pools}
    costs: list[InterruptionCost] = []
    usd = egress_usd_per_hour
    for name, nodes in sorted(Counter(offers).items()):
        offer = pools[name]
        cost = interruption_cost(
            nodes=nodes,
            interruptions_per_hour=offer.expected_interruptions_per_hour,
            notice_s=offer.notice_s or 0.0,
            start_s=problem.start_s,
            start_deviation_s=problem.start_deviation_s,
            handling=problem.handling,
            prompt_tokens_in_flight=in_flight * work.mean_prefill_tokens,
            output_tokens_in_flight=in_flight * work.mean_output_tokens / 2,
            prefill_tokens_per_s=micro_batch * work.mean_prefill_tokens / slowest_s,
            output_tokens_per_s=tokens_per_s,
        )
        usd += nodes * offer.billed_usd_per_hour * (1 + cost.overlap_fraction)
        costs.append(cost)
    availability = math.prod(cost.availability for cost in costs)
    lost = 0.0
    if availability > 0:
        lost = math.fsum(cost.lost_output_tokens_per_hour / cost.availability for cost in costs) * availability
    return ExpectedPipeline(
        availability=availability,
        output_tokens_per_s=max(tokens_per_s * availability - lost / SECONDS_PER_HOUR, 0.0),
        usd_per_hour=usd,
    )


def expected_usd_per_million(problem: PlacementProblem, pipelines: Sequence[ExpectedPipeline]) -> float:
    """Dollars for a million output tokens of a plan, interruptions included.

    Parameters
    ----------
    problem : PlacementProblem
    pipelines : sequence of ExpectedPipeline
        Each copy.

    Returns
    -------
    float
        Over what its workload asks for, where a rate is stated, otherwise over all that it generates; infinite where it
        generates less than is asked for, or nothing.
    """
    tokens = math.fsum(one.output_tokens_per_s for one in pipelines)
    rate = problem.workload.requests_per_s
    if rate is not None:
        wanted = rate * problem.workload.mean_output_tokens
        tokens = wanted if tokens >= wanted * (1 - 1e-9) else 0.0
    if tokens <= 0:
        return math.inf
    return math.fsum(one.usd_per_hour for one in pipelines) / SECONDS_PER_HOUR / tokens * MILLION
