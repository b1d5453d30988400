"""How long it takes until a rented machine serves: booting, loading weights, starting engines."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from pydantic import Field

from hetplan.base import Frozen
from hetplan.errors import InvalidInputError

__all__ = ["StartDraw", "StartTimes"]

_Seconds = Annotated[float, Field(ge=0)]


class StartDraw(Frozen):
    """One start, in seconds: the machine boots, then weights are loaded and engines started.

    Attributes
    ----------
    node_ready_s : float
        From renting the machine until it can run something.
    store_load_s : float
        Loading its part of the weights.
    engine_init_s : float
        Starting the engines of its pipeline, on all the pipeline's machines.
    """

    node_ready_s: _Seconds
    store_load_s: _Seconds
    engine_init_s: _Seconds

    @property
    def together_s(self) -> float:
        """Until it serves when weights load into a store beside the engines' start."""
        return self.node_ready_s + max(self.store_load_s, self.engine_init_s)

    @property
    def one_by_one_s(self) -> float:
        """Until it serves when the engine loads the weights itself and then goes on with its start."""
        return self.node_ready_s + self.store_load_s + self.engine_init_s


class StartTimes(Frozen):
    """Means and standard deviations of the phases of a start, in seconds.

    Attributes
    ----------
    node_ready_s, node_ready_deviation_s : float
        From renting a machine until it can run something.
    store_load_s, store_load_deviation_s : float
        Loading a machine's part of the weights from remote storage.
    engine_init_s, engine_init_deviation_s : float
        Starting the engines of a pipeline.
    load_bytes_per_s : float, optional
        Where given, loading takes a part's bytes by this instead, with the same relative deviation.

    Notes
    -----
    The defaults are section 7.2.4 and figure 16 of ShuntServe, for Llama-3.1-70B on AWS. Its store loads while the
    engines start, so a start takes the first phase and the longer of the other two. The means give 41.55 + 64.51 =
    106.06 s, the paper states about 111.3 s: the mean of a maximum is more than the maximum of the means. For
    independent normal phases it is 68.60 s (`expected_together_s`: 110.15 s in all), and the rest is within the error
    of a mean of twenty runs.

    Phases are drawn from gamma distributions of these means and deviations, independently: no time is below zero.

    Examples
    --------
    >>> round(StartTimes().expected_together_s(), 2)
    110.15
    """

    node_ready_s: _Seconds = 41.55
    node_ready_deviation_s: _Seconds = 7.54
    store_load_s: _Seconds = 61.85
    store_load_deviation_s: _Seconds = 9.59
    engine_init_s: _Seconds = 64.51
    engine_init_deviation_s: _Seconds = 9.25
    load_bytes_per_s: Annotated[float, Field(gt=0)] | None = None

    def draw(self, rng: np.random.Generator, *, weight_bytes: int | None = None) -> StartDraw:
        """The times of one start.

        Parameters
        ----------
        rng : numpy.random.Generator
            Where the randomness comes from.
        weight_bytes : int, optional
            The most bytes that one machine loads; needed where ``load_bytes_per_s`` is given, of no effect elsewhere.

        Returns
        -------
        StartDraw

        Raises
        ------
        InvalidInputError
            If ``load_bytes_per_s`` is given and ``weight_bytes`` is not.
        """
        load, deviation = self._load_s(weight_bytes)
        return StartDraw(
            node_ready_s=_gamma(rng, self.node_ready_s, self.node_ready_deviation_s),
            store_load_s=_gamma(rng, load, deviation),
            engine_init_s=_gamma(rng, self.engine_init_s, self.engine_init_deviation_s),
        )

    def expected_together_s(self, *, weight_bytes: int | None = None) -> float:
        """Mean seconds until a machine serves, loading beside the engines' start.

        Clark's mean of the larger of two normal variables stands in for the gamma ones.
        """
        load, load_deviation = self._load_s(weight_bytes)
        engine = self.engine_init_s
        spread = math.hypot(load_deviation, self.engine_init_deviation_s)
        if spread == 0:
            return self.node_ready_s + max(load, engine)
        distance = (load - engine) / spread
        below = (1 + math.erf(distance / math.sqrt(2))) / 2
        density = math.exp(-(distance**2) / 2) / math.sqrt(2 * math.pi)
        return self.node_ready_s + load * below + engine * (1 - below) + spread * density

    def expected_one_by_one_s(self, *, weight_bytes: int | None = None) -> float:
        """Mean seconds until a machine serves when the engine loads the weights and then goes on with its start."""
        return self.node_ready_s + self._load_s(weight_bytes)[0] + self.engine_init_s

    def expected_ends_s(self, *, together: bool = False, weight_bytes: int | None = None) -> dict[str, float]:
        """Mean seconds from renting a machine to the end of each phase of a start.

        Parameters
        ----------
        together : bool
            Weights load beside the engines' start; else the engines start when the weights are there.
        weight_bytes : int, optional
            As for `draw`.

        Returns
        -------
        dict
            "node_ready", "store_loaded", "engine_ready" and "shunt": the router is told as soon as the engines answer.
        """
        loaded = self.node_ready_s + self._load_s(weight_bytes)[0]
        expected = self.expected_together_s if together else self.expected_one_by_one_s
        ready = expected(weight_bytes=weight_bytes)
        return {"node_ready": self.node_ready_s, "store_loaded": loaded, "engine_ready": ready, "shunt": ready}

    def _load_s(self, weight_bytes: int | None) -> tuple[float, float]:
        if self.load_bytes_per_s is None:
            return self.store_load_s, self.store_load_deviation_s
        if weight_bytes is None:
            raise InvalidInputError(f"load_bytes_per_s is {self.load_bytes_per_s:g}: give weight_bytes to load")
        load = weight_bytes / self.load_bytes_per_s
        relative = self.store_load_deviation_s / self.store_load_s if self.store_load_s else 0.0
        return load, load * relative


def _gamma(rng: np.random.Generator, mean_s: float, deviation_s: float) -> float:
    if mean_s == 0 or deviation_s == 0:
        return mean_s
    shape = (mean_s / deviation_s) ** 2
    return float(rng.gamma(shape, mean_s / shape))
