"""What an allocation problem asks of an estimator: delay, first token and capacity of a replica in steady traffic."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hetplan.catalog.calibration import Calibration
from hetplan.catalog.hardware import InstanceType
from hetplan.catalog.model import ModelSpec
from hetplan.catalog.tables import get_calibration
from hetplan.estimator.base import FloatArray
from hetplan.estimator.queueing import mg1_wait_s
from hetplan.estimator.replica import Replica, make_replica
from hetplan.problem.placement import EstimatorName
from hetplan.units import SECONDS_PER_HOUR

# Batches tried for each query type, from 1 to what fits; between two of them, times are interpolated.
_BATCHES = 48


def estimate_replica(
    model: ModelSpec,
    machine: InstanceType,
    *,
    tensor_parallel: int,
    pipeline_parallel: int,
    input_tokens: FloatArray,
    output_tokens: FloatArray,
    utilization: float,
    engine: str | None = None,
    calibrations: Mapping[str, Calibration] | None = None,
    service_scv: float = 1.0,
    estimator: EstimatorName = "calibrated",
) -> tuple[FloatArray, FloatArray, FloatArray] | None:
    """Delay, time to first token and capacity of a replica, for each query type alone.

    The default estimator of `hetplan.AllocationProblem.from_catalog`.

    Parameters
    ----------
    model : ModelSpec
    machine : InstanceType
    tensor_parallel, pipeline_parallel : int
        Stages fill one machine after the other.
    input_tokens, output_tokens : (I,) float array
        Of each query type.
    utilization : float
        Share of the capacity that arrives, below 1.
    engine : str, optional
        Whose step overheads; by default those of `hetplan.predict`'s schedule "in_flight".
    calibrations : mapping of str to Calibration, optional
        Own ones by GPU name.
    service_scv : float
        Squared coefficient of variation of the replica's seconds per request; 1 is that of exponential lengths.
    estimator : "calibrated" or "paper"

    Returns
    -------
    delay_s, ttft_s : (I,) float array
        Means at that utilisation, the wait included.
    capacity_per_hour : (I,) float array
        Requests of the type alone that a replica answers when it is kept full.
        None in place of all three where weights or one request of some type do not fit.

    Raises
    ------
    InvalidInputError
        For a degree that the model or the machine does not allow, and a utilisation outside 0 to 1.

    Notes
    -----
    X(b) is the request rate of the schedule "in_flight" with b sequences, T(b) and F(b) its latency and time to first
    token, N what fits in memory. The capacity is mu = X(N). At utilisation rho the sequences in flight are those that
    keep up with the arrivals: b* with X(b*) = rho mu (1 where already one does). Then, with the replica as one server
    that is busy 1 / mu for each request::

        wait  = rho / (1 - rho) x (1 + scv) / 2 / mu        (M/G/1)
        ttft  = F(b*) + wait
        delay = T(b*) + wait
    """
    own = (calibrations or {}).get(machine.gpu.name)
    replica = make_replica(
        model,
        machine,
        own or get_calibration(machine.gpu),
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        schedule="in_flight",
        engine=engine,
        estimator=estimator,
        gpu_memory_utilization=None,
    )
    fits = replica.sequences_that_fit(input_tokens + output_tokens)
    if (fits < 1).any():
        return None
    # One array operation for all types: (I, _BATCHES) batches, the last of each row what fits.
    batches = np.maximum(np.exp(np.log(fits)[:, None] * np.linspace(0.0, 1.0, _BATCHES)), 1.0)
    batches[:, -1] = fits
    rate, latency, first = _at(replica, batches, input_tokens, output_tokens)
    per_s = rate[:, -1]
    wait = mg1_wait_s(utilization * per_s, 1 / per_s, service_scv)
    delay, ttft = np.empty_like(per_s), np.empty_like(per_s)
    for i, needed in enumerate(utilization * per_s):
        # The rate need not grow steadily with the batch: the first that keeps up.
        above = int(np.argmax(rate[i] >= needed))
        below = max(above - 1, 0)
        step = rate[i, above] - rate[i, below]
        part = (needed - rate[i, below]) / step if step > 0 else 1.0
        delay[i] = latency[i, below] + part * (latency[i, above] - latency[i, below])
        ttft[i] = first[i, below] + part * (first[i, above] - first[i, below])
    return delay + wait, ttft + wait, per_s * SECONDS_PER_HOUR


def _at(
    replica: Replica, batches: FloatArray, input_tokens: FloatArray, output_tokens: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(I, B) requests/s, latency and time to first token with so many sequences in flight."""
    prompts = np.broadcast_to(input_tokens[:, None], batches.shape)
    answers = np.broadcast_to(output_tokens[:, None], batches.shape)
    times = replica.times(batches.ravel(), prompts.ravel(), answers.ravel())
    rate = times.output_tokens_per_s.reshape(batches.shape) / answers
    return rate, times.latency_s.reshape(batches.shape), times.ttft_s.reshape(batches.shape)
