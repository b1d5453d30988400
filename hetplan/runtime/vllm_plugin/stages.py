"""Makes vLLM run stages that have their own tensor parallelism, on nodes with their own numbers of GPUs.

vLLM has one degree for all stages and one number of GPUs for all nodes. What depends on that is replaced here, in
every process of an engine that has a layout: the groups, who drives a stage, whose output counts, which ranks a node
starts, which layers a rank holds, and who is on whose node. All of it is private to vLLM: known versions only.
"""

from __future__ import annotations

from typing import Any

from hetplan.runtime.vllm_plugin.layout import Layout


def install(layout: Layout) -> None:
    """Replace what assumes equal stages; a second call does nothing."""
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

    if getattr(MultiprocExecutor, "staged_by_hetplan", False):
        return

    def initialize_model_parallel(*_: Any, **__: Any) -> None:
        from hetplan.runtime.vllm_plugin.groups import initialize_stages

        initialize_stages(layout)

    parallel_state.initialize_model_parallel = initialize_model_parallel

    def layers_of(self: Any, parallel_config: Any) -> tuple[int, int]:
        return layout.stages[layout.stage_of(parallel_config.rank)].layers

    ModelConfig.get_layers_start_end_indices = layers_of
    ParallelConfig.local_world_size = property(lambda self: layout.node_sizes[self.node_rank])
    _replace_configuration(layout, EngineArgs)
    _replace_executor(layout, MultiprocExecutor, WorkerProc)
    _replace_queues(layout, MessageQueue)


def _replace_configuration(layout: Layout, arguments: Any) -> None:
    create = arguments.create_engine_config

    def create_engine_config(self: Any, *given: Any, **options: Any) -> Any:
        nodes, node = self.nnodes, self.node_rank
        if self.pipeline_parallel_size != len(layout.stages) or nodes != len(layout.node_sizes) or node >= nodes:
            raise ValueError(
                f"the layout has {len(layout.stages)} stages on {len(layout.node_sizes)} nodes, the engine was started "
                f"with --pipeline-parallel-size={self.pipeline_parallel_size} --nnodes={nodes} --node-rank={node}"
            )
        # vLLM wants as many ranks on every node: it learns of the nodes when it has checked that.
        self.nnodes, self.node_rank = 1, 0
        try:
            config = create(self, *given, **options)
        finally:
            self.nnodes, self.node_rank = nodes, node
        parallel = config.parallel_config
        parallel.nnodes, parallel.node_rank, parallel.world_size = nodes, node, layout.world_size
        return config

    arguments.create_engine_config = create_engine_config


def _replace_executor(layout: Layout, executor: Any, worker: Any) -> None:
    def parallel_sizes(self: Any) -> tuple[int, int, int]:
        self.world_size = layout.world_size
        self.local_world_size = self.parallel_config.local_world_size
        return layout.world_size, 1, 1

    make = worker.make_worker_process

    def make_worker_process(*arguments: Any, rank: int, vllm_config: Any, **options: Any) -> Any:
        # The executor counts as if all nodes before this one were as large as this one.
        node = vllm_config.parallel_config.node_rank
        rank += layout.first_rank_of(node) - layout.node_sizes[node] * node
        options["is_driver_worker"] = rank in layout.leaders
        return make(*arguments, rank=rank, vllm_config=vllm_config, **options)

    executor._get_parallel_sizes = parallel_sizes
    executor._is_driver_worker = lambda self, rank: rank in layout.leaders
    executor._get_output_rank = lambda self: layout.leaders[-1]
    # The first model runner does not schedule ahead over stages.
    executor.supports_async_scheduling = classmethod(lambda cls: len(layout.stages) == 1)
    executor.staged_by_hetplan = True
    worker.make_worker_process = staticmethod(make_worker_process)


def _replace_queues(layout: Layout, message_queue: Any) -> None:
    def single_reader(
        pg: Any, max_chunk_bytes: int, max_chunks: int, reader_rank: int = 0, blocking: bool = False
    ) -> tuple[Any, list[Any]]:
        """Queues of all ranks to one reader.

        vLLM guesses from ranks and the number of devices who is on the reader's node; the layout knows.
        """
        import torch.distributed as dist

        rank = dist.get_rank()
        beside = layout.node_of(rank) == layout.node_of(reader_rank)
        queue = message_queue(
            n_reader=1, n_local_reader=1 if beside else 0, max_chunk_bytes=max_chunk_bytes, max_chunks=max_chunks
        )
        handles: list[Any] | None = [None] * dist.get_world_size(pg) if rank == reader_rank else None
        dist.gather_object(queue.export_handle(), handles, dst=reader_rank, group=pg)
        if blocking:
            queue.wait_until_ready()
        return queue, handles or []

    message_queue.create_from_process_group_single_reader = staticmethod(single_reader)
