"""The load format ``hetplan``: weights come from the node's tensor store and stay where they are.

A model is built as by vLLM's own loader, but the memory of each parameter is given back as soon as it is registered;
then each is laid over the store's memory. On a CPU that is a private mapping of the store's sealed memory: code that
runs after loading may write to it, and gets pages of its own where it does. Then the mapping becomes read-only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from hetplan.runtime.tensor_store.client import Attached, Mapping, Part
from hetplan.runtime.tensor_store.wire import close_all
from hetplan.runtime.vllm_plugin import VERSIONS
from hetplan.runtime.vllm_plugin.identity import config_sha256
from hetplan.runtime.vllm_plugin.layout import read_layout
from hetplan.runtime.vllm_plugin.lease import lease

FORMAT = "hetplan"
# Under vLLM's own name, so that its logging shows it.
_logger = logging.getLogger("vllm.hetplan")


@register_model_loader(FORMAT)
class StoreLoader(BaseModelLoader):
    """Loads by attaching to the store at ``HETPLAN_STORE``."""

    def download_model(self, model_config: Any) -> None:
        """Nothing: the store has the weights."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        self._rank = vllm_config.parallel_config.rank
        self._mappings: list[Mapping] = []
        with _plain_cpu_linears():
            model: nn.Module = super().load_model(vllm_config, model_config, prefix)
        for mapping in self._mappings:
            mapping.protect()
        model.hetplan_mappings = self._mappings
        return model

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        with _parameters_without_memory():
            model: nn.Module = super().create_model(vllm_config, model_config, prefix)
        return model

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Lay every parameter over the store's memory, and copy the few buffers.

        Raises
        ------
        StoreError
            If the store has no such model, or not as this engine would lay it out.
        RuntimeError
            If a tensor has another shape or type than the model's.
        """
        started = time.perf_counter()
        wanted = model.state_dict(keep_vars=True)
        attached = _attach(self._rank, list(wanted), model_config)
        found: dict[str, torch.Tensor] = {}
        for part in attached.parts:
            found |= self._tensors(part, wanted.keys())
        for name, tensor in wanted.items():
            stored = found[name]
            if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
                raise RuntimeError(
                    f"the store has {name} as {stored.dtype} {tuple(stored.shape)}, this engine wants {tensor.dtype} "
                    f"{tuple(tensor.shape)}. Make shards with --dtype={str(tensor.dtype).removeprefix('torch.')}"
                )
            if isinstance(tensor, nn.Parameter):
                tensor.data = stored
            else:
                tensor.copy_(stored)
        _logger.info(
            "hetplan: attached %.1f MB in %.3f s: %.1f MB fetched, %.1f MB copied in the store, %.1f MB already there",
            sum(part.bytes for part in attached.parts) / 1e6,
            time.perf_counter() - started,
            attached.fetched_bytes / 1e6,
            attached.reused_bytes / 1e6,
            attached.held_bytes / 1e6,
        )

    def _tensors(self, part: Part, names: Any) -> dict[str, torch.Tensor]:
        if part.kind == "cuda":
            from hetplan.runtime.tensor_store.cuda import open_handle

            storage = open_handle(part.handle or {})
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        else:
            mapping = Mapping(part)
            close_all([] if part.fd is None else [part.fd])
            self._mappings.append(mapping)
            whole = torch.frombuffer(mapping.memory, dtype=torch.uint8)
        return {
            name: whole[place.offset : place.offset + place.bytes].view(getattr(torch, place.dtype)).view(place.shape)
            for name, place in part.tensors.items()
            if name in names
        }


def _attach(rank: int, names: list[str], model_config: Any) -> Attached:
    held = lease()
    layout = read_layout()
    stage = None if layout is None else layout.stages[layout.stage_of(rank)]
    return held.store.attach(
        model=held.model,
        engine=f"vllm-{VERSIONS[-1]}",
        config_sha256=config_sha256(model_config.hf_config),
        tensor_parallel=get_tensor_model_parallel_world_size(),
        rank=get_tensor_model_parallel_rank(),
        tensors=names,
        device="cpu" if current_platform.is_cpu() else f"cuda:{torch.cuda.current_device()}",
        hold_bytes=0 if stage is None else stage.hold_bytes,
        what=f"{held.model} rank {rank}"
        + ("" if stage is None else f", layers {stage.layers[0]}-{stage.layers[1] - 1}"),
        fingerprint=held.fingerprint,
    )


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Give back the memory of each parameter that a module registers; its shape stays."""

    def release(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter.untyped_storage().resize_(0)

    hook = register_module_parameter_registration_hook(release)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _plain_cpu_linears() -> Iterator[None]:
    """On a CPU vLLM repacks the weights of linear layers, each process for itself: multiply them as they are."""
    if not current_platform.is_cpu():
        yield
        return
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    original = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = plain
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = original
