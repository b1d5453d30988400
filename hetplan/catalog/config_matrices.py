"""The parts that layers are put together from: matrices with their place in the checkpoint, in numbers only.

Builders read the numbers from a configuration; nothing here knows a family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hetplan.catalog.model import Attention, Linear

QKVO = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
EXPERTS = ("experts.{e}.gate_proj", "experts.{e}.up_proj", "experts.{e}.down_proj")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix and its module path inside the layer, where ``{e}`` is the expert's number."""

    linear: Linear
    module: str


@dataclass(frozen=True, slots=True)
class Layer:
    """One kind of layer before quantisation is known."""

    name: str
    attention: Attention
    matrices: tuple[Matrix, ...]
    other_parameter_count: int


def matrix(
    name: str,
    module: str,
    inputs: int,
    outputs: int,
    *,
    bias: bool = False,
    split: Literal["outputs", "inputs", "none"] = "outputs",
    granularity: int = 1,
    fused: str | None = None,
    quantized: bool = True,
) -> Matrix:
    """A matrix that every token uses."""
    linear = Linear(
        name=name,
        inputs=inputs,
        outputs=outputs,
        bias=bias,
        split=split,
        granularity=granularity,
        fused=fused,
        quantized=quantized,
    )
    return Matrix(linear, module)


def projections(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    modules: Sequence[str] = QKVO,
    qkv_bias: bool = False,
    output_bias: bool = False,
    own_values: bool = True,
    gated_output: bool = False,
) -> list[Matrix]:
    """Query, key, value and output projections; values may be the keys' projection, queries may carry a gate."""
    query_width = 2 * head_dim if gated_output else head_dim
    sizes = [("q", heads, query_width), ("k", kv_heads, head_dim)]
    if own_values:
        sizes.append(("v", kv_heads, head_dim))
    found = [
        matrix(f"{part}_proj", module, hidden, count * width, bias=qkv_bias, granularity=width, fused="qkv")
        for (part, count, width), module in zip(sizes, modules, strict=False)
    ]
    return [*found, output_projection(hidden, heads, head_dim, module=modules[-1], bias=output_bias)]


def output_projection(hidden: int, heads: int, head_dim: int, *, module: str = QKVO[-1], bias: bool = False) -> Matrix:
    """The projection of all heads back to the hidden state."""
    return matrix("o_proj", module, heads * head_dim, hidden, bias=bias, split="inputs", granularity=head_dim)


def latent_projections(
    hidden: int,
    heads: int,
    *,
    query_rank: int | None,
    kv_rank: int,
    rope_dim: int,
    no_rope_dim: int,
    value_dim: int,
    bias: bool = False,
    output_bias: bool = False,
) -> list[Matrix]:
    """The projections of DeepSeek's latent attention (MLA); the latents are whole on every GPU."""
    head_dim, module = no_rope_dim + rope_dim, "self_attn."
    if query_rank is None:
        matrices = [matrix("q_proj", f"{module}q_proj", hidden, heads * head_dim, granularity=head_dim)]
    else:
        matrices = [
            matrix("q_a_proj", f"{module}q_a_proj", hidden, query_rank, bias=bias, split="none", fused="qkv_a"),
            matrix("q_b_proj", f"{module}q_b_proj", query_rank, heads * head_dim, granularity=head_dim),
        ]
    fused = "qkv_a" if query_rank is not None else None
    latent, width = kv_rank + rope_dim, no_rope_dim + value_dim
    return [
        *matrices,
        matrix("kv_a_proj", f"{module}kv_a_proj_with_mqa", hidden, latent, bias=bias, split="none", fused=fused),
        matrix("kv_b_proj", f"{module}kv_b_proj", kv_rank, heads * width, granularity=width),
        output_projection(hidden, heads, value_dim, bias=output_bias),
    ]


def mlp(
    hidden: int,
    size: int,
    *,
    module: str = "mlp",
    paths: Sequence[str] = GATED,
    prefix: str = "",
    bias: bool = False,
    gated: bool = True,
) -> list[Matrix]:
    """An MLP: gate, up and down, or up and down when it is not gated. ``prefix`` names a shared expert's."""
    fused = "shared_gate_up" if prefix else "gate_up"
    ups = GATED[:2] if gated else GATED[1:2]
    *up_paths, down_path = paths
    return [
        *(
            matrix(f"{prefix}{name}", f"{module}.{path}", hidden, size, bias=bias, fused=fused)
            for name, path in zip(ups, up_paths, strict=True)
        ),
        matrix(f"{prefix}down_proj", f"{module}.{down_path}", size, hidden, bias=bias, split="inputs"),
    ]


def router(hidden: int, experts: int, *, module: str, bias: bool = False) -> Matrix:
    """The matrix that scores the experts; whole on every GPU and never quantised."""
    return matrix("router", module, hidden, experts, bias=bias, split="none", quantized=False)


def experts(
    inputs: int,
    size: int,
    count: int,
    active: int,
    *,
    module: str = "mlp",
    paths: Sequence[str] = EXPERTS,
    bias: bool = False,
    gated: bool = True,
) -> list[Matrix]:
    """Routed experts, each an MLP over ``inputs`` elements."""
    found = []
    for part in mlp(inputs, size, module=module, paths=paths, bias=bias, gated=gated):
        linear = part.linear.replace(name=f"experts.{part.linear.name}", experts=count, active_experts=active)
        found.append(Matrix(linear, part.module))
    return found
