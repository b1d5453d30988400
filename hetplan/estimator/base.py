"""The estimator protocol, and what every estimator that adds over layers shares.

A stage's time is the sum of its layers' times, by layer kind, plus what its ends add (embedding,
LM head, engine step). Solvers assume nothing else: they read `layer_seconds` and `end_seconds` as
tables, and bound an interval of batches by the minimum over the table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.catalog.hardware import InstanceType, Link
from hetplan.catalog.model import ModelSpec
from hetplan.errors import InvalidInputError
from hetplan.estimator.identity import Same
from hetplan.plan import Stage, StageMemory
from hetplan.problem.placement import PlacementProblem

FloatArray = NDArray[np.float64]
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, Phase] = ("prefill", "decode")


class Estimator(Protocol):
    """What solvers, the checker and the simulator ask of an estimator.

    ``layers`` is one (start, stop) range, an (L, 2) array of ranges, or, for a model whose layers
    are all alike, an (L,) array of layer counts. ``batch`` is (B,) sequences in the stage at once.
    """

    name: ClassVar[str]
    micro_batches: ClassVar[bool]

    def stage_seconds(
        self,
        model: ModelSpec,
        instance_type: InstanceType,
        *,
        layers: ArrayLike,
        tensor_parallel: int,
        batch: ArrayLike,
        input_tokens: float,
        output_tokens: float,
        first: bool,
        last: bool,
        phase: Phase,
    ) -> FloatArray:
        """(L, B) seconds that a phase of a static batch spends in the stage, sends apart."""
        ...

    def step_seconds(
        self,
        model: ModelSpec,
        stage: Stage,
        *,
        prefill_tokens: float,
        prefill_context: float,
        decode_sequences: float,
        decode_context: float,
    ) -> float:
        """Seconds of one engine iteration that mixes prefill and decode, sends apart."""
        ...

    def stage_memory(
        self,
        model: ModelSpec,
        instance_type: InstanceType,
        *,
        layers: tuple[int, int],
        tensor_parallel: int,
        first: bool,
        last: bool,
    ) -> StageMemory:
        """Memory of one GPU of the stage."""
        ...

    def sequence_bytes(
        self,
        model: ModelSpec,
        instance_type: InstanceType,
        *,
        layers: tuple[int, int],
        tensor_parallel: int,
        tokens: float,
        input_tokens: float,
        last: bool,
    ) -> float:
        """Bytes that one more sequence of ``tokens`` in flight takes on one GPU of the stage."""
        ...

    def boundary_seconds(
        self,
        model: ModelSpec,
        sender: InstanceType,
        receiver: InstanceType,
        *,
        same_node: bool,
        batch: ArrayLike,
        input_tokens: float,
        output_tokens: float,
        phase: Phase,
        between: Link | None = None,
    ) -> FloatArray:
        """(B,) seconds that a phase spends sending activations to the next stage.

        ``between``: what the send passes besides both machines' networks, where a zone link is on its way.
        """
        ...

    def sent_bytes(self, model: ModelSpec, *, input_tokens: float, output_tokens: float) -> float:
        """Bytes that one request, both its phases, sends from a stage to the next."""
        ...

    def decode_steps(self, output_tokens: float) -> float:
        """Engine steps of the decode phase of one request."""
        ...

    def batch_limit(self, instance_type: InstanceType) -> int:
        """Most sequences in flight that an engine on this machine takes."""
        ...


class LayerwiseEstimator(ABC):
    """Everything of the protocol that follows from times per layer kind and times per end."""

    name: ClassVar[str]

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self._machines = {t.name: t for t in problem.cluster.instance_types}
        # Stages of one pipeline are asked one after another about the same batches, and many are alike.
        self._asked: FloatArray | None = None
        self._answers: dict[tuple[object, ...], FloatArray] = {}

    @abstractmethod
    def layer_seconds(
        self,
        model: ModelSpec,
        kind: int,
        instance_type: InstanceType,
        *,
        tensor_parallel: int,
        batch: FloatArray,
        input_tokens: float,
        output_tokens: float,
        phase: Phase,
    ) -> FloatArray:
        """(B,) seconds of one layer of a kind."""

    @abstractmethod
    def end_seconds(
        self,
        model: ModelSpec,
        instance_type: InstanceType,
        *,
        tensor_parallel: int,
        batch: FloatArray,
        input_tokens: float,
        output_tokens: float,
        first: bool,
        last: bool,
        phase: Phase,
    ) -> FloatArray:
        """(B,) seconds of a stage that do not depend on its layers."""

    def stage_seconds(
        self,
        model: ModelSpec,
        instance_type: InstanceType,
        *,
        layers: ArrayLike,
        tensor_parallel: int,
        batch: ArrayLike,
        input_tokens: float,
        output_tokens: float,
        first: bool,
        last: bool,
        phase: Phase,
    ) -> FloatArray:
        """(L, B) seconds: layer counts by kind times seconds by kind, plus the ends."""
        sequences = batch_array(batch)
        counts = kind_counts(model, layers)
        shared: dict[str, Any] = {
            "tensor_parallel": tensor_parallel,
            "batch": sequences,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "phase": phase,
        }
        if self._asked is None or not np.array_equal(self._asked, sequences):
            self._asked, self._answers = sequences.copy(), {}
        load = (Same(model), Same(instance_type), tensor_parallel, input_tokens, output_tokens, phase)
        key: tuple[object, ...] = (*load, first, last)
        if key not in self._answers:
            self._answers[key] = self.end_seconds(model, instance_type, first=first, last=last, **shared)
        total = np.repeat(self._answers[key][np.newaxis, :], len(counts), axis=0)
        for kind in range(len(model.layer_kinds)):
            if counts[:, kind].any():
                key = (*load, kind)
                if key not in self._answers:
                    self._answers[key] = self.layer_seconds(model, kind, instance_type, **shared)
                total += counts[:, kind, np.newaxis] * self._answers[key]
        return total

    def machine(self, stage: Stage) -> InstanceType:
        """The instance type of a stage of a plan of this problem."""
        try:
            return self._machines[stage.instance_type]
        except KeyError:
            raise InvalidInputError(
                f"the stage runs on {stage.instance_type!r}, which the problem's cluster lacks "
                f"(it has {', '.join(self._machines)})"
            ) from None


def batch_array(batch: ArrayLike) -> FloatArray:
    """Batch sizes as (B,) floats; refuses empty, non-finite and non-positive ones."""
    sequences = np.atleast_1d(np.asarray(batch, dtype=np.float64))
    # NaN fails the first comparison.
    if sequences.ndim != 1 or sequences.size == 0 or not sequences.min() > 0 or sequences.max() == np.inf:
        raise InvalidInputError(f"batch must be positive numbers in one dimension, got {batch!r}")
    return sequences


def kind_counts(model: ModelSpec, layers: ArrayLike) -> NDArray[np.int64]:
    """(L, K) layers of each kind in each range; ``layers`` as in `Estimator`."""
    if isinstance(layers, tuple) and len(layers) == 2:
        layers = [layers]
    given = np.asarray(layers, dtype=np.int64)
    if given.ndim == 1:
        if len(model.layer_kinds) > 1:
            raise InvalidInputError(
                f"{model.name} has {len(model.layer_kinds)} kinds of layers: give (start, stop) ranges, not counts"
            )
        given = np.stack([np.zeros_like(given), given], axis=1)
    ranges = given.tolist()
    if any(not 0 <= low <= high <= model.layer_count for low, high in ranges):
        raise InvalidInputError(f"layer ranges must lie in 0..{model.layer_count}, start <= stop; got {ranges}")
    return np.array([model.kind_counts_in(low, high) for low, high in ranges], dtype=np.int64)


def sum_over_layers(model: ModelSpec, layers: tuple[int, int], per_kind: Sequence[float]) -> float:
    """Total of a per-kind value over a range of layers."""
    counts = model.kind_counts_in(*layers)
    return sum(n * value for n, value in zip(counts, per_kind, strict=True))


def make_estimator(problem: PlacementProblem) -> Estimator:
    """The estimator that a problem names, over the problem's own calibrations."""
    from hetplan.estimator.calibrated import CalibratedEstimator
    from hetplan.estimator.paper import PaperEstimator

    return PaperEstimator(problem) if problem.estimator == "paper" else CalibratedEstimator(problem)
