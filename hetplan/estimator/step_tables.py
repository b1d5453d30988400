"""Engine steps as tables, for whoever asks for millions of them: the simulator.

A step holds prompts (new tokens after cached ones) and sequences that decode one token each. What a layer does to each
token is tabulated for every count of tokens, attention on grids between which values are drawn straight: contexts 5%
apart for decoding (every count of sequences stands in the table), and prompts by their count, mean length (10% apart)
and mean context. Prompts of a step that differ are taken as equal ones with as many pairs of query and key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetplan.catalog.hardware import InstanceType
from hetplan.errors import UnsupportedFeatureError
from hetplan.estimator.base import Estimator, FloatArray
from hetplan.estimator.calibrated import CalibratedEstimator, step_work
from hetplan.estimator.paper import PaperEstimator
from hetplan.estimator.pipeline import StageShape
from hetplan.problem.placement import PlacementProblem

IntArray = NDArray[np.int64]

# Distance of neighbours on the grids, in the logarithm.
CONTEXT_STEP = 0.05
PROMPT_STEP = 0.1
# Mean context of a step's prompts: none, then doubling from here.
FIRST_REACH = 256.0
PROMPT_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class LayerTable:
    """One layer of a kind on a tensor-parallel group; T tokens of a step, N sequences, G contexts.

    Attributes
    ----------
    tokens_s : (T + 1,) float
        All but attention.
    decode_s : (N + 1, G) float
        Attention of so many sequences, each after ``exp(CONTEXT_STEP * g)`` tokens.
    prefill_s : (prompt counts, lengths, contexts) float
        Attention of a step's prompts.
    floor_s : float
        Least seconds of the layer in a step with prompts.
    extra_s : float
        More of every step.
    """

    tokens_s: FloatArray
    decode_s: FloatArray
    prefill_s: FloatArray
    floor_s: float
    extra_s: float


@dataclass(frozen=True, slots=True)
class StageTable:
    """A stage: how many layers of which `LayerTable`, and what it does beside them.

    Attributes
    ----------
    layers : tuple of (table, count)
        Tables by their number in `PipelineTables`.
    tokens_s, send_s : (T + 1,) float
        Embedding and engine by tokens of the step; and the send to the next stage, 0 after the last.
    sampled_s : (N + 1,) float
        The head, by prompts and sequences of the step.
    prefill_step_s : float
        More of a step with prompts.
    """

    layers: tuple[tuple[int, int], ...]
    tokens_s: FloatArray
    send_s: FloatArray
    sampled_s: FloatArray
    prefill_step_s: float


@dataclass(frozen=True, slots=True)
class PipelineTables:
    """The stages of a pipeline, and the layer tables that they share."""

    stages: tuple[StageTable, ...]
    layers: tuple[LayerTable, ...]


def prompt_lengths(max_step_tokens: int) -> FloatArray:
    """The grid of mean prompt lengths."""
    count = math.ceil(math.log(max(max_step_tokens, 2)) / PROMPT_STEP) + 1
    found: FloatArray = np.exp(PROMPT_STEP * np.arange(count))
    return found


def contexts(max_context: int) -> FloatArray:
    """The grid of contexts of sequences that decode."""
    count = math.ceil(math.log(max(max_context, 2)) / CONTEXT_STEP) + 1
    found: FloatArray = np.exp(CONTEXT_STEP * np.arange(count))
    return found


def reaches(max_context: int) -> FloatArray:
    """The grid of mean contexts of prompts."""
    count = max(math.ceil(math.log2(max(max_context, 2) / FIRST_REACH)), 0) + 1
    return np.concatenate([[0.0], FIRST_REACH * 2.0 ** np.arange(count)])


def pipeline_tables(
    problem: PlacementProblem,
    estimator: Estimator,
    stages: Sequence[StageShape],
    *,
    max_step_tokens: int,
    max_num_seqs: int,
    max_context: int,
) -> PipelineTables:
    """Tables of a pipeline's steps.

    Parameters
    ----------
    problem : PlacementProblem
    estimator : Estimator
        The calibrated one, or the paper's, whose mixed step is a prefill and a decode step one after the other.
    stages : sequence of StageShape
    max_step_tokens, max_num_seqs, max_context : int
        Most tokens of a step, sequences in flight, and tokens of a sequence.

    Raises
    ------
    UnsupportedFeatureError
        For an estimator whose steps are not known to be such sums.
    """
    size = (max_step_tokens, max_num_seqs, max_context)
    if isinstance(estimator, CalibratedEstimator):
        return _calibrated(problem, estimator, stages, size)
    if isinstance(estimator, PaperEstimator):
        return _paper(problem, estimator, stages, size)
    raise UnsupportedFeatureError(
        f"steps of the estimator {estimator.name!r} are not tabulated; simulate with 'calibrated' or 'paper'"
    )


def _grid(size: tuple[int, int, int]) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Every (prompt count, length, context), as columns, and their contexts for decoding."""
    count, length, reach = np.meshgrid(
        np.array(PROMPT_COUNTS, dtype=np.float64), prompt_lengths(size[0]), reaches(size[2]), indexing="ij"
    )
    return count, length, reach, contexts(size[2])


def _calibrated(
    problem: PlacementProblem,
    estimator: CalibratedEstimator,
    stages: Sequence[StageShape],
    size: tuple[int, int, int],
) -> PipelineTables:
    model = problem.model
    step_tokens = np.arange(size[0] + 1, dtype=np.float64)
    samples = np.arange(size[1] + 1, dtype=np.float64)
    tables: list[LayerTable] = []
    number: dict[tuple[str, int, int], int] = {}
    found = []
    for at, stage in enumerate(stages):
        machine, degree = stage.machine, stage.tensor_parallel
        held = []
        for kind, count in enumerate(model.kind_counts_in(*stage.layers)):
            if not count:
                continue
            key = (machine.name, degree, kind)
            if key not in number:
                number[key] = len(tables)
                tables.append(_calibrated_layer(problem, estimator, machine, degree, kind, size))
            held.append((number[key], count))
        first, last = at == 0, at + 1 == len(stages)
        # The ends add over tokens and over what is sampled; each is asked without the other.
        one = step_work(sequences=np.maximum(step_tokens, 1e-9))
        tokens_s = estimator.end_step_s(model, machine, degree, one, first=first, last=False)
        sampled_s = np.zeros(len(samples))
        if last:
            some = step_work(sequences=np.maximum(samples, 1e-9))
            ends = [
                estimator.end_step_s(model, machine, degree, some, first=False, last=head) for head in (True, False)
            ]
            sampled_s = ends[0] - ends[1]
        send_s = np.zeros(len(step_tokens))
        if not last:
            following = stages[at + 1]
            crossed = problem.cluster.zone_link(stage.place, following.place)
            send_s = estimator.send_step_s(
                model,
                machine,
                following.machine,
                one,
                same_node=stage.node == following.node,
                between=None if crossed is None else crossed.link,
            )
        overheads = estimator.kernels(model, machine, degree).overheads
        found.append(StageTable(tuple(held), tokens_s, send_s, sampled_s, overheads.prefill_step_s))
    return PipelineTables(tuple(found), tuple(tables))


def _calibrated_layer(
    problem: PlacementProblem,
    estimator: CalibratedEstimator,
    machine: InstanceType,
    degree: int,
    kind: int,
    size: tuple[int, int, int],
) -> LayerTable:
    model = problem.model
    count, length, reach, grid = _grid(size)
    new = step_work(prompts=count.ravel(), prompt_tokens=length.ravel(), prompt_context=reach.ravel())
    sequences = np.repeat(np.arange(1, size[1] + 1, dtype=np.float64), len(grid))
    old = step_work(sequences=sequences, context=np.tile(grid, size[1]))
    decode = estimator.layer_attention_s(model, kind, machine, degree, old, "decode").reshape(size[1], len(grid))
    overheads = estimator.kernels(model, machine, degree).overheads
    tokens = np.maximum(np.arange(size[0] + 1, dtype=np.float64), 1e-9)
    return LayerTable(
        tokens_s=estimator.layer_tokens_s(model, kind, machine, degree, tokens),
        decode_s=np.concatenate([np.zeros((1, len(grid))), decode]),
        prefill_s=estimator.layer_attention_s(model, kind, machine, degree, new, "prefill").reshape(count.shape),
        floor_s=overheads.prefill_layer_s,
        extra_s=overheads.layer_s,
    )


def _paper(
    problem: PlacementProblem,
    estimator: PaperEstimator,
    stages: Sequence[StageShape],
    size: tuple[int, int, int],
) -> PipelineTables:
    """A stage as one layer: its prefill of so many prompts, and its decode step."""
    model = problem.model
    count, length, _, grid = _grid(size)
    zeros = np.zeros(size[0] + 1)
    tables, found = [], []
    for at, stage in enumerate(stages):
        shared: dict[str, Any] = {
            "layers": stage.layers,
            "tensor_parallel": stage.tensor_parallel,
            "first": at == 0,
            "last": at + 1 == len(stages),
        }
        prefill = np.zeros(count.shape)
        for row, tokens in enumerate(length[0, :, 0].tolist()):
            seconds = estimator.stage_seconds(
                model, stage.machine, batch=count[:, 0, 0], input_tokens=tokens, output_tokens=1.0, phase="prefill",
                **shared,
            )[0]  # fmt: skip
            prefill[:, row, :] = seconds[:, np.newaxis]
        decode = np.zeros((size[1] + 1, len(grid)))
        batch = np.arange(1, size[1] + 1, dtype=np.float64)
        for column, context in enumerate(grid.tolist()):
            decode[1:, column] = estimator.stage_seconds(
                model, stage.machine, batch=batch, input_tokens=max(context - 1, 0.0), output_tokens=1.0,
                phase="decode", **shared,
            )[0]  # fmt: skip
        send = zeros
        if at + 1 < len(stages):
            following = stages[at + 1]
            crossed = problem.cluster.zone_link(stage.place, following.place)
            send = estimator.boundary_seconds(
                model,
                stage.machine,
                following.machine,
                same_node=stage.node == following.node,
                batch=np.maximum(np.arange(size[0] + 1, dtype=np.float64), 1e-9),
                input_tokens=1.0,
                output_tokens=1.0,
                phase="decode",
                between=None if crossed is None else crossed.link,
            )
        tables.append(LayerTable(zeros, decode, prefill, 0.0, 0.0))
        found.append(StageTable(((at, 1),), zeros, send, np.zeros(size[1] + 1), 0.0))
    return PipelineTables(tuple(found), tuple(tables))
