"""The operations themselves: one call of torch, or of an engine, for each copy of what is streamed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from hetplan.calibration.lattice import Task
from hetplan.errors import InvalidInputError, UnsupportedFeatureError

Call = Callable[[], object]
# A matrix of weights (n, k) to what multiplies activations by it.
Linear = Callable[[Any], Callable[[Any], Any]]

_PRIMITIVES = 32  # cached shapes of activations for each matrix, as vLLM's CPU linear layers have


def calls_for(
    torch: Any, task: Task, copies: Iterable[Any], activations: Callable[..., Any], linear: Linear
) -> Iterator[Call]:
    """One call for each copy.

    Parameters
    ----------
    torch : module
    task : Task
    copies : iterable of tensor
        Flat: weights, keys and values, or input and residual.
    activations : callable
        Makes a tensor of a shape.
    linear : callable
        See `torch_linear`.
    """
    s, functional = task.shape, torch.nn.functional
    if task.operation in ("gemm", "gemv"):
        x = activations(s["m"], s["k"])
        one = torch.ones((), device=x.device)
        for weights in copies:
            matrix = weights.view(s["n"], s["k"])
            if task.dtype == "fp8":
                scaled = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
                yield partial(scaled, x, matrix.t())
            else:
                yield partial(linear(matrix), x)
    elif task.operation in ("attention_prefill", "attention_decode"):
        prefill = task.operation == "attention_prefill"
        query = activations(s["batch"], s["heads"], s["tokens"] if prefill else 1, s["head_dim"])
        attention = partial(
            functional.scaled_dot_product_attention, is_causal=prefill, enable_gqa=s["heads"] != s["kv_heads"]
        )
        for pair in copies:
            key, value = pair.view(2, s["batch"], s["kv_heads"], s["tokens"], s["head_dim"])
            yield partial(attention, query, key, value)
    elif task.operation == "norm":
        weight = activations(s["hidden"])
        for pair in copies:
            x, residual = pair.view(2, s["tokens"], s["hidden"])
            yield partial(_add_and_norm, functional.rms_norm, x, residual, weight)
    else:
        raise UnsupportedFeatureError(f"{task.operation} is not measured on one device")


def _add_and_norm(rms_norm: Callable[..., Any], x: Any, residual: Any, weight: Any) -> Any:
    return rms_norm(x + residual, (x.shape[-1],), weight, 1e-5)


def torch_linear(torch: Any) -> Linear:
    """Torch's linear layer, which vLLM calls on GPUs too."""

    def linear(matrix: Any) -> Callable[[Any], Any]:
        return lambda x: torch.nn.functional.linear(x, matrix)

    return linear


def vllm_cpu_linear(torch: Any) -> tuple[Linear, str]:
    """vLLM's linear layer on a CPU, and vLLM's version: oneDNN with packed weights, torch's where that is refused.

    Raises
    ------
    InvalidInputError
        If vLLM for CPUs is not installed.
    """
    try:
        from vllm import _custom_ops

        version = importlib.metadata.version("vllm")
    except ImportError:
        raise InvalidInputError("engine='vllm' needs vLLM in this environment; leave it out to time torch") from None
    if not getattr(_custom_ops, "_supports_onednn", False):
        raise InvalidInputError(f"engine='vllm': vllm {version} is not built for CPUs here. Leave it out to time torch")
    plain = torch_linear(torch)

    def linear(matrix: Any) -> Callable[[Any], Any]:
        try:
            packed = _custom_ops.create_onednn_mm(matrix.t(), _PRIMITIVES)
        except RuntimeError:
            return plain(matrix)
        return lambda x: _custom_ops.onednn_mm(packed, x, None)

    return linear, version
