"""Twenty kills under forty streams: real vLLM on this CPU, a real router, and every token accounted for."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "vllm"))

# "both" is two kills.
TIMES = {"engine": 4, "stage_worker": 4, "router": 4, "stall": 4, "both": 2}
PROMPTS = 64
BEST_OF = 3


def soak() -> None:
    """Kinds, pipelines and moments are drawn with the seed in HETPLAN_SEED, 0 by default."""
    from disturbance import Kill, disturb, standing
    from environment import tiny_model, vllm_environment

    seed = int(os.environ.get("HETPLAN_SEED", "0"))
    kinds = np.random.default_rng(seed).permutation([kind for kind, times in TIMES.items() for _ in range(times)])
    environment = vllm_environment()
    print(f"\n## twenty kills of vLLM on this CPU and of the router, seed {seed}\n")
    print("| kill | kind | pipeline | streams hit | longest gap, s | recovered after, s | restart-and-retry, s |")
    print("|---|---|---|---|---|---|---|")
    number = 0

    def show(kill: Kill) -> None:
        nonlocal number
        number += 1
        retry = "" if kill.retry_s is None else f"{kill.retry_s:.1f}"
        print(
            f"| {number} | {kill.kind} | {kill.pipeline or ''} | {kill.streams} | {kill.longest_gap_s:.2f} "
            f"| {kill.recovered_s:.1f} | {retry} |",
            flush=True,
        )

    with (
        tempfile.TemporaryDirectory() as folder,
        standing(environment, tiny_model(environment), Path(folder)) as stand,
    ):
        lived = disturb(stand, kinds.tolist(), seed=seed, prompts=PROMPTS, on_kill=show)
    _, differences = lived.compared()
    ratios = [kill.ratio for kill in lived.kills if kill.ratio is not None]
    print(f"\n{lived.summary()}")
    print(
        "longest gap after a kill of a pipeline to the restart after the same kill (asked: at most 0.2): "
        f"best of the first {BEST_OF} {min(ratios[:BEST_OF]):.2f}, median {np.median(ratios):.2f}, "
        f"largest {max(ratios):.2f}, {sum(ratio > 0.2 for ratio in ratios)} of {len(ratios)} above"
    )
    faults = [*lived.errors, *differences, *lived.different_texts]
    for fault in faults:
        print(f"- {fault}")
    if faults or lived.lost_tokens or lived.doubled_tokens:
        raise SystemExit("a stream was broken")
