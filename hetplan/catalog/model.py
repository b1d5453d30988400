"""What a model is made of: layers by kind, each an explicit list of matrices, and its attention.

Everything about sizes follows from the matrices: parameter counts, bytes per GPU under tensor
parallelism, FLOPs. `hetplan.catalog.config_reader` builds a `ModelSpec` from a Hugging Face
config.json; nothing else needs to know the families.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hetplan.base import Frozen
from hetplan.catalog.dtypes import DTYPE_BITS, Dtype, Quantization, dtype_bytes
from hetplan.errors import InvalidInputError
from hetplan.units import BITS_PER_BYTE, format_bytes

Count = Annotated[int, Field(gt=0)]


class Linear(Frozen):
    """One weight matrix: ``outputs`` x ``inputs``, held ``experts`` times, used ``active_experts`` times a token.

    ``split`` is the side that tensor parallelism cuts ("none": every GPU holds it whole), in units of
    ``granularity`` (head_dim for attention projections, so that KV heads replicate when there are
    fewer of them than GPUs). Matrices of one ``fused`` group with equal inputs run as one GEMM.
    """

    name: str
    inputs: Count
    outputs: Count
    bias: bool = False
    split: Literal["outputs", "inputs", "none"] = "outputs"
    granularity: Count = 1
    experts: Count = 1
    active_experts: Count = 1
    quantized: bool = True
    fused: str | None = None

    @property
    def parameter_count(self) -> int:
        return self.experts * (self.inputs * self.outputs + (self.outputs if self.bias else 0))

    @property
    def active_parameter_count(self) -> int:
        return self.parameter_count // self.experts * self.active_experts

    def shape(self, tensor_parallel: int) -> tuple[int, int]:
        """(inputs, outputs) of one expert's matrix on one GPU of the group."""
        if self.split == "outputs":
            return self.inputs, _share(self.outputs, self.granularity, tensor_parallel)
        if self.split == "inputs":
            return _share(self.inputs, self.granularity, tensor_parallel), self.outputs
        return self.inputs, self.outputs

    def weight_bytes(self, tensor_parallel: int, base_dtype: Dtype, quantization: Quantization | None) -> int:
        """Bytes on one GPU of the group: weights, scales and bias."""
        inputs, outputs = self.shape(tensor_parallel)
        if quantization is not None and self.quantized:
            matrix = quantization.matrix_bytes(inputs, outputs)
        else:
            matrix = inputs * outputs * DTYPE_BITS[base_dtype] // BITS_PER_BYTE
        bias = outputs * DTYPE_BITS[base_dtype] // BITS_PER_BYTE if self.bias else 0
        return self.experts * (matrix + bias)


def _share(size: int, granularity: int, tensor_parallel: int) -> int:
    """The largest share of ``size`` on one of ``tensor_parallel`` GPUs, never below one unit."""
    units = -(-size // granularity)
    return min(size, max(1, -(-units // tensor_parallel)) * granularity)


class Attention(Frozen):
    """The attention of one layer, or what stands in its place, as its kernels and its cache see it.

    Parameters
    ----------
    kind : {"gqa", "mla", "linear", "mamba", "none"}
        ``gqa`` covers multi-head, grouped and multi-query attention. ``mla`` keeps one latent of
        ``kv_latent_size`` elements per token (DeepSeek: kv_lora_rank + qk_rope_head_dim) on every GPU of the
        group, whatever the degree. ``linear`` (gated delta rule, KDA) and ``mamba`` (Mamba-2) keep a state of
        constant size per sequence and nothing per token. ``none`` is a layer without attention; its heads are
        the model's and limit nothing.
    heads, kv_heads, head_dim, value_head_dim : int
        ``linear`` and ``mamba``: heads of values, heads (groups) of keys and queries, and their sizes, so that
        each head's state has head_dim x value_head_dim elements.
    window_tokens : int, optional
        Bounds what a token attends to and keeps. Chunked attention counts as a window of one chunk, which is
        what it keeps at most.
    compression_tokens : int, optional
        Tokens behind each further entry that is kept beside the window, for the whole sequence (DeepSeek V4).
    top_k_tokens : int, optional
        Most tokens that sparse attention attends to, of those outside a compressed layer's window.
    index_heads, index_head_dim : int, optional
        The indexer that scores all tokens to choose them; layers without take the choice of a layer before.
    index_bytes_per_token : int
        Index keys that one token adds, in a type of their own and whole on every GPU of the group.
    convolution_tokens : int
        Last inputs that the short convolution of ``linear`` and ``mamba`` keeps, in the base type.
    state_dtype : str
        Type of the state.
    """

    kind: Literal["gqa", "mla", "linear", "mamba", "none"] = "gqa"
    heads: Count
    kv_heads: Count
    head_dim: Count
    value_head_dim: Count
    kv_latent_size: Count | None = None
    kv_lora_rank: Count | None = None
    window_tokens: Count | None = None
    compression_tokens: Count | None = None
    top_k_tokens: Count | None = None
    index_heads: Count | None = None
    index_head_dim: Count | None = None
    index_bytes_per_token: Annotated[int, Field(ge=0)] = 0
    convolution_tokens: Annotated[int, Field(ge=0)] = 0
    state_dtype: Dtype = "fp32"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "mla" and (self.kv_latent_size is None or self.kv_lora_rank is None):
            raise ValueError("attention of kind 'mla' needs kv_latent_size and kv_lora_rank")
        if self.kind in ("linear", "mamba", "none"):
            cached = ("kv_latent_size", "window_tokens", "compression_tokens", "top_k_tokens", "index_heads")
            for name in cached:
                if getattr(self, name) is not None:
                    raise ValueError(f"attention of kind {self.kind!r} has no {name}: it caches no tokens")
        if (self.index_heads is None) != (self.index_head_dim is None):
            raise ValueError("index_heads and index_head_dim come together")
        return self

    @property
    def keeps_state(self) -> bool:
        """True when a sequence has a state of constant size in place of a KV cache."""
        return self.kind in ("linear", "mamba")

    def kv_elements_per_entry(self, tensor_parallel: int) -> int:
        """Elements of one entry of the KV cache of one GPU of the group."""
        if self.keeps_state or self.kind == "none":
            return 0
        if self.kv_latent_size is not None:
            return self.kv_latent_size
        return max(1, -(-self.kv_heads // tensor_parallel)) * (self.head_dim + self.value_head_dim)

    def kv_elements_per_token(self, tensor_parallel: int) -> int:
        """Elements that one token adds to the KV cache of one GPU of the group, within a window and beside it."""
        entry = self.kv_elements_per_entry(tensor_parallel)
        return entry if self.compression_tokens is None else entry + -(-entry // self.compression_tokens)

    def kept_entries(self, tokens: float) -> float:
        """Entries that a sequence of ``tokens`` keeps in the KV cache."""
        kept = tokens if self.window_tokens is None else min(tokens, self.window_tokens)
        return kept if self.compression_tokens is None else kept + tokens / self.compression_tokens

    def attended_entries(self, tokens: float) -> float:
        """Entries that the next token after ``tokens`` attends to: at most top_k_tokens of those it may choose."""
        near = tokens if self.window_tokens is None else min(tokens, self.window_tokens)
        if self.compression_tokens is None:
            return near if self.top_k_tokens is None else min(near, self.top_k_tokens)
        far = tokens / self.compression_tokens
        return near + (far if self.top_k_tokens is None else min(far, self.top_k_tokens))

    def kv_elements_per_sequence(self, tokens: float, tensor_parallel: int) -> float:
        """Elements that a sequence of ``tokens`` keeps in the KV cache of one GPU of the group."""
        return self.kept_entries(tokens) * self.kv_elements_per_entry(tensor_parallel)

    def state_bytes_per_sequence(self, tensor_parallel: int, base_dtype: Dtype) -> int:
        """Bytes that a sequence keeps on one GPU of the group, whatever its length."""
        if not self.keeps_state:
            return 0
        heads = -(-self.heads // tensor_parallel)
        groups = max(1, -(-self.kv_heads // tensor_parallel))
        state = heads * self.head_dim * self.value_head_dim * DTYPE_BITS[self.state_dtype]
        channels = heads * self.value_head_dim + 2 * groups * self.head_dim
        return (state + channels * self.convolution_tokens * DTYPE_BITS[base_dtype]) // BITS_PER_BYTE

    def valid_degree(self, tensor_parallel: int) -> bool:
        """True when the heads divide over the GPUs and the KV heads divide or, but for ``linear``, replicate."""
        if self.kind == "none":
            return True
        if self.heads % tensor_parallel:
            return False
        if self.kind == "mla":
            return True
        if self.kv_heads % tensor_parallel == 0:
            return True
        return self.kind != "linear" and tensor_parallel % self.kv_heads == 0


class LayerKind(Frozen):
    """One kind of decoder layer.

    ``other_parameter_count``: norms, sinks, short convolutions, router corrections (never quantised). The
    matrices before an MLP's activation are fused under a name that ends in "gate_up": two of them when the MLP
    is gated, one when it is not.
    """

    name: str
    attention: Attention
    linears: tuple[Linear, ...]
    other_parameter_count: Annotated[int, Field(ge=0)] = 0

    @property
    def parameter_count(self) -> int:
        return self.other_parameter_count + sum(m.parameter_count for m in self.linears)

    @property
    def active_parameter_count(self) -> int:
        return self.other_parameter_count + sum(m.active_parameter_count for m in self.linears)

    @property
    def experts(self) -> int:
        """Routed experts, 1 for a dense layer."""
        return max((m.experts for m in self.linears), default=1)

    @property
    def has_mlp(self) -> bool:
        """False for a layer of attention alone."""
        return any(m.fused is not None and m.fused.endswith("gate_up") for m in self.linears)


class ModelSpec(Frozen):
    """A decoder-only language model: everything hetplan needs to size and time it.

    ``layer_pattern`` gives, for each layer in order, the index of its kind in ``layer_kinds``.
    ``weight_dtype`` is what the quantised matrices are stored in, ``base_dtype`` everything else
    (embeddings, norms, unquantised matrices), ``kv_dtype`` the KV cache and ``compute_dtype`` what the GEMMs
    multiply in: the four are independent (W4A16 stores int4 and computes in bf16). ``residual_streams`` is
    how many copies of the hidden state go from layer to layer (hyper-connections have several).
    """

    name: str
    architecture: str
    source: str
    hidden_size: Count
    vocabulary_size: Count
    max_position_tokens: Count
    layer_kinds: Annotated[tuple[LayerKind, ...], Field(min_length=1)]
    layer_pattern: Annotated[tuple[int, ...], Field(min_length=1)]
    tied_embeddings: bool
    other_embedding_parameter_count: Annotated[int, Field(ge=0)] = 0
    head_bias: bool = False
    final_norm_parameter_count: Annotated[int, Field(ge=0)]
    residual_streams: Count = 1
    weight_dtype: Dtype
    base_dtype: Dtype
    kv_dtype: Dtype
    compute_dtype: Dtype
    quantization: Quantization | None = None
    checkpoint_bytes: Count | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        known = range(len(self.layer_kinds))
        if any(kind not in known for kind in self.layer_pattern):
            raise ValueError(f"layer_pattern names a kind outside 0..{len(self.layer_kinds) - 1}")
        if self.quantization is None and self.weight_dtype != self.base_dtype:
            raise ValueError(
                f"weight_dtype {self.weight_dtype} differs from base_dtype {self.base_dtype}; give quantization"
            )
        if self.checkpoint_bytes is not None and not 0.5 < self.checkpoint_bytes / self.computed_weight_bytes < 2:
            raise ValueError(
                f"the checkpoint index says {format_bytes(self.checkpoint_bytes)}, the configuration "
                f"{format_bytes(self.computed_weight_bytes)}: they are not of the same model"
            )
        return self

    # ---- reading

    @classmethod
    def from_config(cls, config: str | Path | Mapping[str, Any], *, name: str | None = None) -> ModelSpec:
        """Read a Hugging Face ``config.json``.

        Parameters
        ----------
        config : path or mapping
            A config.json, a folder that holds one (hf_quant_config.json and
            model.safetensors.index.json beside it are read too), or its content.
        name : str, optional
            Name to give the model; by default its ``_name_or_path``, folder or file name.

        Returns
        -------
        ModelSpec

        Raises
        ------
        InvalidInputError
            If the file is not a usable configuration; the message names the key.
        UnsupportedModelError
            If the architecture has parts that are not modelled; ``.features`` names them.
        """
        from hetplan.catalog.config_reader import read_config

        return read_config(config, name=name)

    @classmethod
    def get(cls, name: str) -> ModelSpec:
        """A catalogued model by short name or Hugging Face id; a path to a config.json works too."""
        from hetplan.catalog.models import get_model

        return get_model(name)

    # ---- sizes

    @property
    def layer_count(self) -> int:
        return len(self.layer_pattern)

    @property
    def embedding_parameter_count(self) -> int:
        return self.vocabulary_size * self.hidden_size + self.other_embedding_parameter_count

    @property
    def head_parameter_count(self) -> int:
        """Parameters that the LM head adds: none when it shares the embedding matrix."""
        bias = self.vocabulary_size if self.head_bias else 0
        return bias if self.tied_embeddings else self.vocabulary_size * self.hidden_size + bias

    @cached_property
    def kind_counts(self) -> tuple[int, ...]:
        """Layers of each kind."""
        return self.kind_counts_in(0, self.layer_count)

    @cached_property
    def kind_prefix(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each kind before each layer, and before the end: a range of layers is a difference of two rows."""
        rows = [(0,) * len(self.layer_kinds)]
        for kind in self.layer_pattern:
            rows.append(tuple(n + (k == kind) for k, n in enumerate(rows[-1])))
        return tuple(rows)

    def kind_counts_in(self, start: int, stop: int) -> tuple[int, ...]:
        """Layers of each kind among ``start <= layer < stop``."""
        return tuple(b - a for a, b in zip(self.kind_prefix[start], self.kind_prefix[stop], strict=True))

    @property
    def parameter_count(self) -> int:
        """All parameters of the language model, tied ones once."""
        layers = sum(n * kind.parameter_count for n, kind in zip(self.kind_counts, self.layer_kinds, strict=True))
        return layers + self.embedding_parameter_count + self.head_parameter_count + self.final_norm_parameter_count

    @property
    def active_parameter_count(self) -> int:
        """Parameters that one token touches: chosen experts only, everything else whole."""
        idle = sum(
            n * (kind.parameter_count - kind.active_parameter_count)
            for n, kind in zip(self.kind_counts, self.layer_kinds, strict=True)
        )
        return self.parameter_count - idle

    def layer_weight_bytes(self, kind: int, tensor_parallel: int = 1) -> int:
        """Bytes of one layer of a kind on one GPU of the group."""
        layer = self.layer_kinds[kind]
        other = layer.other_parameter_count * DTYPE_BITS[self.base_dtype] // BITS_PER_BYTE
        matrices = sum(m.weight_bytes(tensor_parallel, self.base_dtype, self.quantization) for m in layer.linears)
        return self._as_stored(other + matrices)

    def embedding_bytes(self, tensor_parallel: int = 1) -> int:
        """Bytes of the embedding on one GPU of the first stage (split over the vocabulary)."""
        rows = -(-self.vocabulary_size // tensor_parallel)
        count = rows * self.hidden_size + self.other_embedding_parameter_count
        return self._as_stored(count * DTYPE_BITS[self.base_dtype] // BITS_PER_BYTE)

    def head_bytes(self, tensor_parallel: int = 1, *, with_embedding: bool = False) -> int:
        """Bytes of the final norm and the LM head on one GPU of the last stage.

        A tied head costs nothing where the embedding already lives (``with_embedding``), and a copy
        of the matrix on a last stage of its own.
        """
        rows = -(-self.vocabulary_size // tensor_parallel)
        count = self.final_norm_parameter_count + (rows if self.head_bias else 0)
        if not (self.tied_embeddings and with_embedding):
            count += rows * self.hidden_size
        return self._as_stored(count * DTYPE_BITS[self.base_dtype] // BITS_PER_BYTE)

    @cached_property
    def computed_weight_bytes(self) -> int:
        """Bytes of all weights as the configuration implies, on one GPU."""
        layers = 0
        for count, kind in zip(self.kind_counts, self.layer_kinds, strict=True):
            other = kind.other_parameter_count * DTYPE_BITS[self.base_dtype] // BITS_PER_BYTE
            layers += count * (other + sum(m.weight_bytes(1, self.base_dtype, self.quantization) for m in kind.linears))
        rest = self.embedding_parameter_count + self.head_parameter_count + self.final_norm_parameter_count
        return layers + rest * DTYPE_BITS[self.base_dtype] // BITS_PER_BYTE

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights: the checkpoint index's total when one was read, else computed."""
        return self.computed_weight_bytes if self.checkpoint_bytes is None else self.checkpoint_bytes

    def _as_stored(self, computed: int) -> int:
        """Scale a part by what the checkpoint index says of the whole, rounded up."""
        if self.checkpoint_bytes is None:
            return computed
        return -(-computed * self.checkpoint_bytes // self.computed_weight_bytes)

    def kv_bytes_per_token(self, tensor_parallel: int = 1) -> int:
        """KV-cache bytes that one token adds on each GPU of the group, over all layers.

        KV heads replicate when there are fewer of them than GPUs; an MLA latent and index keys are whole on each.
        Layers with a sliding window count in full: past the window they add nothing. States of constant size add
        nothing.
        """
        elements = index_bytes = 0
        for count, kind in zip(self.kind_counts, self.layer_kinds, strict=True):
            elements += count * kind.attention.kv_elements_per_token(tensor_parallel)
            index_bytes += count * kind.attention.index_bytes_per_token
        return elements * DTYPE_BITS[self.kv_dtype] // BITS_PER_BYTE + index_bytes

    def layer_kv_bytes_per_sequence(self, kind: int, tokens: float, tensor_parallel: int = 1) -> float:
        """Bytes of KV cache, index keys and state that a sequence of ``tokens`` keeps in one layer, on one GPU."""
        attention = self.layer_kinds[kind].attention
        cached = attention.kv_elements_per_sequence(tokens, tensor_parallel) * dtype_bytes(self.kv_dtype)
        beside = attention.state_bytes_per_sequence(tensor_parallel, self.base_dtype)
        return cached + tokens * attention.index_bytes_per_token + beside

    def valid_tensor_parallel(self, max_degree: int = 8) -> list[int]:
        """Degrees up to ``max_degree`` at which every layer's heads divide and its KV heads divide or replicate."""
        kinds = self.layer_kinds
        return [d for d in range(1, max_degree + 1) if all(kind.attention.valid_degree(d) for kind in kinds)]

    def with_dtypes(
        self, *, weight_dtype: Dtype | None = None, kv_dtype: Dtype | None = None, base_dtype: Dtype | None = None
    ) -> ModelSpec:
        """The same model with other number formats.

        ``weight_dtype`` quantises the matrices of the layers when the engine loads them (one scale a
        tensor; embeddings, head and norms stay 16 bit); fp8 and int8 also compute in that type,
        4-bit weights compute in ``base_dtype``.
        """
        changes: dict[str, Any] = {}
        base = base_dtype or self.base_dtype
        if base != self.base_dtype:
            changes |= {"base_dtype": base}
            if DTYPE_BITS[base] != DTYPE_BITS[self.base_dtype]:
                changes["checkpoint_bytes"] = None
            for field in ("weight_dtype", "kv_dtype", "compute_dtype"):
                if getattr(self, field) == self.base_dtype:
                    changes[field] = base
        if weight_dtype is not None and weight_dtype != self.weight_dtype:
            if self.quantization is not None:
                raise InvalidInputError(
                    f"{self.name} is already quantised ({self.quantization.method}, {self.weight_dtype}); "
                    f"weight_dtype={weight_dtype!r} needs the unquantised checkpoint"
                )
            changes |= {"weight_dtype": weight_dtype, "checkpoint_bytes": None}
            if DTYPE_BITS[weight_dtype] >= DTYPE_BITS[base]:
                changes |= {"base_dtype": weight_dtype, "compute_dtype": weight_dtype}
                changes.setdefault("kv_dtype", weight_dtype if self.kv_dtype == self.base_dtype else self.kv_dtype)
            else:
                bits = DTYPE_BITS[weight_dtype]
                changes["quantization"] = Quantization(method=f"online-{weight_dtype}", bits=bits)
                changes["compute_dtype"] = weight_dtype if weight_dtype in ("fp8", "int8") else base
        if kv_dtype is not None:
            changes["kv_dtype"] = kv_dtype
        return self.replace(**changes) if changes else self
