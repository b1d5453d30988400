"""Waiting: what a request spends before it is served. Means so far; percentiles come later."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hetplan.errors import InvalidInputError
from hetplan.estimator.base import FloatArray


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
