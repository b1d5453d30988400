"""Lets vLLM run pipeline stages eagerly on a CPU.

vLLM makes the buffer in which a later stage receives hidden states while it captures or profiles a model;
on the CPU with ``--enforce-eager`` it does neither, and the first request fails. The buffer is made on first use
instead.
"""

from __future__ import annotations

from typing import Any


def make_stage_buffers() -> None:
    """Replace the step that needs the buffer; a second call does nothing."""
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
