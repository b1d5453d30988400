"""Caches that grow: an engine starts on a slice beside the one that it replaces, and takes the rest when that has gone.

The store keeps the accounts of its node's memory. A worker borrows its cache there: its stage's whole cache, or where
that is not to be had the slice that the plan keeps for this; nothing in between, as ranks that share a device would
take each other's. While an engine has a slice it asks again every other second; when every rank can have its whole
cache, all allocate them, copy the blocks that they have, and the scheduler gets the new blocks. Requests in flight
keep theirs.
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
# What counts as a whole cache: weights may be a little larger than the planner took them to be.
_WHOLE = 0.9


class Borrower:
    """What a worker does about its cache's memory; mixed into vLLM's workers."""

    stage: Stage
    rank: int
    cache_config: Any
    model_runner: Any
    vllm_config: Any
    cache_bytes: int = 0

    def determine_available_memory(self) -> int:
        """Bytes for the cache: the stage's whole one, or the slice that an engine beside another starts on."""
        if asked_for():
            slice_bytes = self.stage.start_kv_cache_bytes
            try:
                granted = self._borrow_whole()
            except StoreError as error:
                if error.code != "no_room":
                    raise
                granted = lease().store.borrow(slice_bytes, slice_bytes)
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
            return self._borrow_whole()
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

    def _borrow_whole(self) -> int:
        whole = self.stage.kv_cache_bytes
        least = max(int(_WHOLE * whole), self.stage.start_kv_cache_bytes)
        return lease().store.borrow(min(least, whole), whole)

    def _settle(self, config: Any) -> None:
        # All tensors of a cache lie in one allocation.
        self.cache_bytes = config.kv_cache_tensors[0].size if config.kv_cache_tensors else 0
        self.keep_cache()


def install() -> None:
    """Have engine cores ask for more; a second call does nothing."""
    from vllm.v1.engine.core import EngineCoreProc

    if getattr(EngineCoreProc, "grows_by_hetplan", False):
        return
    # Plugins are loaded while an engine core is being made: what it does afterwards can still be replaced.
    run, handle = EngineCoreProc.run_busy_loop, EngineCoreProc._handle_client_request

    def run_busy_loop(self: Any) -> Any:
        if self.scheduler.connector is not None:
            _logger.info("hetplan: a cache that a KV connector has registered does not grow")
        else:
            threading.Thread(target=_keep_asking, args=(self,), daemon=True, name="HetplanGrowth").start()
        return run(self)

    def handle_request(self: Any, request_type: Any, request: Any) -> None:
        if isinstance(request_type, _Grow):
            try:
                request_type.complete = _grow(self)
            finally:
                request_type.done.set()
        else:
            handle(self, request_type, request)

    EngineCoreProc.run_busy_loop = run_busy_loop
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
    """Grow if all workers can have their whole caches; whether all have them now.

    Runs in the engine core's loop, so between two steps.
    """
    from vllm.v1.core.kv_cache_utils import KVCacheBlock, generate_scheduler_kv_cache_config, get_kv_cache_configs

    started = time.perf_counter()
    executor, config = core.model_executor, core.vllm_config
    manager = core.scheduler.kv_cache_manager
    pool = manager.block_pool
    had = pool.num_gpu_blocks
    specs = executor.get_kv_cache_specs()
    whole = get_kv_cache_configs(config, specs, executor.collective_rpc("whole_cache"))[0].num_blocks
    if had >= int(_WHOLE * whole):
        return True
    configs = get_kv_cache_configs(config, specs, executor.collective_rpc("ask_for_cache"))
    blocks = configs[0].num_blocks
    if blocks < int(_WHOLE * whole):
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
    return True
