"""Two engines of one model with weights of their own and on a tensor store: memory, and how soon weights are there."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from hetplan.units import format_bytes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "vllm"))

ROUNDS = 3


def store() -> None:
    """Real vLLM on this CPU, a model of 3.9 GB."""
    from environment import large_model, shards_of, vllm_environment
    from pairs import run_pair

    environment = vllm_environment()
    model = large_model(environment)
    shards = shards_of(environment, model, 1)
    print("\n## two engines, weights of their own against a store, vLLM on this CPU\n")
    print("| round | their own | on a store | ratio | store's pages | loading, s | attaching, s | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    ratios, faster = [], []
    for number in range(1, ROUNDS + 1):
        with tempfile.TemporaryDirectory() as folder:
            own = run_pair(environment, Path(folder) / "own", model, None)
            shared = run_pair(environment, Path(folder) / "shared", model, shards)
        ratios.append(shared.pss_bytes / own.pss_bytes)
        faster.append(min(own.load_s) / min(shared.load_s))
        print(
            f"| {number} | {format_bytes(own.pss_bytes)} | {format_bytes(shared.pss_bytes)} | {ratios[-1]:.2f} "
            f"| {format_bytes(shared.weights_pss_bytes)} | {min(own.load_s):.2f} | {min(shared.load_s):.3f} "
            f"| {faster[-1]:.0f} |",
            flush=True,
        )
    print(f"\nmemory (asked: at most 0.6) {min(ratios):.2f}, attaching (asked: at least 4 times) {max(faster):.0f}")
