"""Caches that grow: an engine starts on a slice beside the one that it replaces, and takes the rest when that has gone.

The store keeps the accounts of its node's memory. A worker borrows its cache there: as much of its stage's as is
free, at least the slice that the plan keeps for this. While the engine has less than its stage's cache, it asks again
every other second; when every stage can have more, all allocate their larger caches, copy the blocks that they have,
and the scheduler gets the new blocks. Requests in flight keep theirs.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import Any

import torch

from hetplan.runtime.tensor_store.client import StoreError
from hetplan.runtime.vllm_plugin.layout import Stage
from hetplan.runtime.vllm_plugin.lease import asked_for, lease

_logger = logging.getLogger("vllm.hetplan")
_ASK_EVERY_S = 2.0
# Growing copies the cache: not for less than this.
_WORTH_IT = 1.25


class Borrower:
    """What a worker does about its cache's memory; mixed into vLLM's workers."""

    stage: Stage
    rank: int
    cache_config: Any
    model_runner: Any
    vllm_config: Any
    cache_bytes: int = 0

    def determine_available_memory(self) -> int:
        """Bytes for the cache: what the store lends, at least the slice and at most the stage's."""
        if asked_for():
            granted = lease().store.borrow(self.stage.start_kv_cache_bytes, self.stage.kv_cache_bytes)
            self.cache_config.kv_cache_memory_bytes = granted
        available: int = super().determine_available_memory()  # type: ignore[misc]
        return available

    def initialize_from_config(self, config: Any) -> None:
        """Allocate the cache, and give back what its stage cannot use for want of room in others."""
        super().initialize_from_config(config)  # type: ignore[misc]
        if asked_for():
            self._settle(config)

    def whole_cache(self) -> int:
        """Bytes of the cache that the plan gives this stage."""
        return self.stage.kv_cache_bytes

    def ask_for_cache(self) -> int:
        """Bytes that this worker's cache could have by now; they are its own until it says how many it uses."""
        try:
            return lease().store.borrow(self.cache_bytes, self.stage.kv_cache_bytes)
        except StoreError:
            return self.cache_bytes

    def keep_cache(self) -> None:
        """Give back what was asked for."""
        with suppress(StoreError):
            lease().store.borrow(self.cache_bytes, self.cache_bytes)

    @torch.inference_mode()
    def grow_cache(self, configs: list[Any]) -> None:
        """Move the cache into a larger one. Both are held until the blocks are copied: the slice twice."""
        config, runner = configs[self.rank], self.model_runner
        before = list(runner.kv_caches)
        runner.kv_caches.clear()
        runner.initialize_kv_cache_tensors(config, runner._kernel_block_sizes)
        for old, new in zip(before, runner.kv_caches, strict=True):
            new[: old.shape[0]].copy_(old)
        runner.kv_cache_config = config
        self.cache_config.num_gpu_blocks = config.num_blocks
        if self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
            # Captured graphs point at the caches of before.
            runner.capture_model()
        self._settle(config)

    def _settle(self, config: Any) -> None:
        # All tensors of a cache lie in one allocation.
        self.cache_bytes = config.kv_cache_tensors[0].size if config.kv_cache_tensors else 0
        self.keep_cache()


def install() -> None:
    """Have engine cores ask for more; a second call does nothing."""
    from vllm.v1.engine.core import EngineCoreProc

    if getattr(EngineCoreProc, "grows_by_hetplan", False):
        return
    start, handle = EngineCoreProc.__init__, EngineCoreProc._handle_client_request

    def with_growth(self: Any, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        if self.scheduler.connector is not None:
            _logger.info("hetplan: a cache that a KV connector has registered does not grow")
        else:
            threading.Thread(target=_keep_asking, args=(self,), daemon=True, name="HetplanGrowth").start()

    def handle_request(self: Any, request_type: Any, request: Any) -> None:
        if isinstance(request_type, _Grow):
            try:
                request_type.complete = _grow(self)
            finally:
                request_type.done.set()
        else:
            handle(self, request_type, request)

    EngineCoreProc.__init__ = with_growth
    EngineCoreProc._handle_client_request = handle_request
    EngineCoreProc.grows_by_hetplan = True


class _Grow:
    """Among an engine core's requests: see whether there is more, between two steps."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.complete = False


def _keep_asking(core: Any) -> None:
    request = _Grow()
    while not request.complete:
        time.sleep(_ASK_EVERY_S)
        request.done.clear()
        core.input_queue.put_nowait((request, None))
        request.done.wait()


def _grow(core: Any) -> bool:
    """Grow by what all workers can have; whether that is all. Runs in the engine core's loop, between two steps."""
    from vllm.v1.core.kv_cache_utils import KVCacheBlock, generate_scheduler_kv_cache_config, get_kv_cache_configs

    started = time.perf_counter()
    executor, config = core.model_executor, core.vllm_config
    manager = core.scheduler.kv_cache_manager
    pool = manager.block_pool
    had = pool.num_gpu_blocks
    specs = executor.get_kv_cache_specs()
    whole = get_kv_cache_configs(config, specs, executor.collective_rpc("whole_cache"))[0].num_blocks
    if had >= whole:
        return True
    configs = get_kv_cache_configs(config, specs, executor.collective_rpc("ask_for_cache"))
    blocks = configs[0].num_blocks
    if blocks < whole and blocks < had * _WORTH_IT:
        executor.collective_rpc("keep_cache")
        return False
    executor.collective_rpc("grow_cache", args=(configs,))
    added = [KVCacheBlock(number, pool=pool) for number in range(had, blocks)]
    pool.blocks.extend(added)
    pool.free_block_queue.append_n(added)
    pool.num_gpu_blocks = blocks
    core.scheduler.kv_cache_config = manager.kv_cache_config = generate_scheduler_kv_cache_config(configs)
    config.cache_config.num_gpu_blocks = blocks
    _logger.info("hetplan: the cache grew from %d to %d blocks in %.3f s", had, blocks, time.perf_counter() - started)
    return bool(blocks >= whole)
