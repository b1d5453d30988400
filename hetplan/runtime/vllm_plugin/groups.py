"""Process groups of stages that have their own numbers of ranks."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import parallel_state

from hetplan.runtime.vllm_plugin.layout import Layout


class StageGroup:
    """Stands in for vLLM's pipeline group where stages differ in their number of ranks.

    A rank counts as its stage. Only leaders, the first rank of each stage, send and receive; what a leader received it
    broadcasts to its stage. Hidden states are the same on all ranks of a stage, so nothing is lost by that.
    """

    def __init__(self, leaders: Any, stage: int, layout: Layout, rank: int) -> None:
        self._leaders = leaders
        self._leads = rank in layout.leaders
        self.rank_in_group = stage
        self.world_size = len(layout.stages)
        self.ranks = layout.leaders
        self.is_first_rank = stage == 0
        self.is_last_rank = stage == self.world_size - 1

    def irecv_tensor_dict(self, src: int | None = None, **_: Any) -> tuple[dict[str, Any], list[Any], list[Any]]:
        """Receive and hand on; complete on return, so that there is nothing to wait for."""
        tensors = None
        if self._leads:
            tensors, handles, afterwards = self._leaders.irecv_tensor_dict(src)
            for handle in handles:
                handle.wait()
            for step in afterwards:
                step()
        stage = parallel_state.get_tp_group()
        if stage.world_size > 1:
            tensors = stage.broadcast_tensor_dict(tensors, src=0)
        return tensors or {}, [], []

    def isend_tensor_dict(self, tensor_dict: dict[str, Any], dst: int | None = None, **_: Any) -> list[Any]:
        handles: list[Any] = self._leaders.isend_tensor_dict(tensor_dict, dst) if self._leads else []
        return handles

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        found = self._leaders.broadcast_object(obj, src=src) if self._leads else None
        return parallel_state.get_tp_group().broadcast_object(found, src=0)

    def barrier(self) -> None:
        if self._leads:
            self._leaders.barrier()

    def destroy(self) -> None:
        self._leaders.destroy()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._leaders, name)


def initialize_stages(layout: Layout) -> None:
    """Make vLLM's groups: a tensor-parallel group per stage, a pipeline of their leaders, all else of one rank."""
    from vllm.config import get_current_vllm_config

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if size != layout.world_size:
        raise RuntimeError(f"the layout has {layout.world_size} ranks, the engine started {size}")
    world = parallel_state.get_world_group()
    backend = torch.distributed.get_backend(world.device_group)

    def group(ranks: list[list[int]], name: str, **options: Any) -> Any:
        return parallel_state.init_model_parallel_group(ranks, world.local_rank, backend, group_name=name, **options)

    stages = [stage.ranks for stage in layout.stages]
    alone = [[r] for r in range(size)]
    parallel_state._TP = group(stages, "tp", use_message_queue_broadcaster=True)
    parallel_state._ETP = parallel_state._TP
    parallel_state._DCP = group(alone, "dcp", use_message_queue_broadcaster=True)
    parallel_state._PCP = group(alone, "pcp")
    leaders = group([layout.leaders, *([r] for r in range(size) if r not in layout.leaders)], "pp")
    parallel_state._PP = StageGroup(leaders, layout.stage_of(rank), layout, rank)
    parallel_state._DP = group(alone, "dp")
    model = get_current_vllm_config().model_config
    if model is None or model.is_moe:
        parallel_state._EP = group(stages, "ep")
    parallel_state.logger.info(
        "hetplan: rank %d of %d is rank %d of %d of stage %d",
        rank,
        size,
        parallel_state._TP.rank_in_group,
        parallel_state._TP.world_size,
        layout.stage_of(rank),
    )
