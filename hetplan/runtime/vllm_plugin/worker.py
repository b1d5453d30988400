"""Workers that know their stage; named on the command line as ``--worker-cls``."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from hetplan.runtime.vllm_plugin.growth import Borrower
from hetplan.runtime.vllm_plugin.layout import Stage, read_layout
from hetplan.runtime.vllm_plugin.lease import asked_for

# Of a GPU's memory, what vLLM wants to find free at the start: no more than an engine beside another can have.
_SHARE_BESIDE_ANOTHER = 0.01


def _enter_stage(vllm_config: Any, rank: int) -> Stage:
    """Make one rank's configuration that of its stage: its degree, and its own memory for the cache."""
    layout = read_layout()
    if layout is None:
        raise RuntimeError("a staged worker needs HETPLAN_LAYOUT; start it by the script that `hetplan launch` wrote")
    stage = layout.stages[layout.stage_of(rank)]
    config = vllm_config.parallel_config
    config.tensor_parallel_size = stage.tensor_parallel
    config.world_size = layout.world_size
    config.rank = rank
    vllm_config.cache_config.kv_cache_memory_bytes = stage.kv_cache_bytes
    return stage


class StagedGpuWorker(Borrower, Worker):
    """vLLM's GPU worker in a stage of a layout. Has not been run: no GPU was at hand."""

    def __init__(self, vllm_config: Any, local_rank: int, rank: int, *arguments: Any, **options: Any) -> None:
        self.stage = _enter_stage(vllm_config, rank)
        if asked_for():
            vllm_config.cache_config.gpu_memory_utilization = _SHARE_BESIDE_ANOTHER
        super().__init__(vllm_config, local_rank, rank, *arguments, **options)


if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker

    class StagedCpuWorker(Borrower, CPUWorker):
        """vLLM's CPU worker in a stage of a layout."""

        def __init__(self, vllm_config: Any, local_rank: int, rank: int, *arguments: Any, **options: Any) -> None:
            self.stage = _enter_stage(vllm_config, rank)
            super().__init__(vllm_config, local_rank, rank, *arguments, **options)
