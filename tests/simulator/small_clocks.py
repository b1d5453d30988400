"""Clocks whose seconds are known by heart."""

from __future__ import annotations

import numpy as np

from hetplan.estimator.step_tables import (
    PROMPT_COUNTS,
    LayerTable,
    PipelineTables,
    StageTable,
    contexts,
    prompt_lengths,
    reaches,
)


def straight_tables(
    *,
    stages: int = 1,
    max_step_tokens: int = 64,
    max_num_seqs: int = 8,
    max_context: int = 512,
    step_s: float = 0.01,
    token_s: float = 0.001,
    context_s: float = 0.00001,
    send_s: float = 0.0,
) -> PipelineTables:
    """A step costs so much, each token of it, and each token of context of each sequence that decodes."""
    grid = contexts(max_context)
    lengths = prompt_lengths(max_step_tokens)
    reach = reaches(max_context)
    decode = context_s * np.arange(max_num_seqs + 1)[:, None] * grid
    prefill = context_s * np.array(PROMPT_COUNTS)[:, None, None] * lengths[None, :, None] * (1 + 0 * reach)
    tokens = token_s * np.arange(max_step_tokens + 1.0)
    layer = LayerTable(tokens, decode, prefill, 0.0, 0.0)
    found = []
    for at in range(stages):
        last = at + 1 == stages
        # Later stages are slower, so that the order of steps matters.
        found.append(
            StageTable(
                ((0, 1 + at),),
                np.full(max_step_tokens + 1, step_s),
                np.full(max_step_tokens + 1, 0.0 if last else send_s),
                np.zeros(max_num_seqs + 1),
                0.0,
            )
        )
    return PipelineTables(tuple(found), (layer,))
