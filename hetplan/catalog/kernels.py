"""Fitted kernels as data: what `hetplan.calibration` fits and `hetplan.estimator` evaluates."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from hetplan.base import Frozen
from hetplan.catalog.dtypes import Dtype

Positive = Annotated[float, Field(gt=0)]
Rate = Positive
NotNegative = Annotated[float, Field(ge=0)]
Seconds = NotNegative
Bits = Annotated[float, Field(gt=0, le=32)]


class AllReduceCurve(Frozen):
    """All-reduce times of one group size on one host, by message size.

    Attributes
    ----------
    host : str or None
        The instance type it was measured on; None where it stands for every host of its GPU.
    tensor_parallel : int
        GPUs of the group.
    library : str
        Whose collectives, such as "nccl-2.27.3"; several where an engine takes the fastest at each size.
    bytes : tuple of float
        Bytes of one rank before the collective, rising.
    seconds : tuple of float
        Time at each size.
    source, reference : str
    """

    host: str | None
    tensor_parallel: Annotated[int, Field(ge=2)]
    library: str
    bytes: Annotated[tuple[Positive, ...], Field(min_length=2, max_length=8)]
    seconds: Annotated[tuple[Positive, ...], Field(min_length=2, max_length=8)]
    source: Literal["measured", "published", "datasheet", "assumed"]
    reference: str

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.bytes) != len(self.seconds):
            raise ValueError(f"{len(self.bytes)} sizes and {len(self.seconds)} times; give one time for each size")
        if any(b >= a for b, a in zip(self.bytes, self.bytes[1:], strict=False)):
            raise ValueError("sizes must rise")
        return self


class LogCorrection(Frozen):
    """Smooth factor on a kernel's time: ``exp`` of a Gaussian-process mean over the logarithms of its sizes.

    The covariance is rational quadratic, ``1 / (1 + (distance / reach)**2 / 2)``: it fades away from the measured
    shapes, and costs a quarter of one with an exponential.

    Attributes
    ----------
    reach : float
        Length scale, in natural logarithms of a size.
    shape : tuple of tuples of float
        Natural logarithms of the sizes of each measured kernel.
    weights : tuple of float
        Weight of each, in log-seconds.
    """

    reach: Positive
    shape: Annotated[tuple[tuple[float, ...], ...], Field(min_length=1)]
    weights: Annotated[tuple[float, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.shape) != len(self.weights):
            raise ValueError(f"{len(self.shape)} shapes and {len(self.weights)} weights; give one weight per shape")
        if len({len(sizes) for sizes in self.shape}) > 1:
            raise ValueError("every shape has the same number of sizes")
        return self


class GemmFit(Frozen):
    """One engine's matrix multiplications in one number format on one GPU.

    ``correction`` is over m, n and k.
    """

    engine: str
    dtype: Dtype
    source: str
    sm_count: Annotated[int, Field(gt=0)]
    """Streaming multiprocessors: tiles that run at once."""
    boost_flops: Positive
    """Rate of a short kernel that keeps the whole chip busy, before the latency of its main loops."""
    sustained_flops: Positive
    """The same of a long kernel, after the power limit has lowered the clock."""
    bytes_per_s: Positive
    """Memory bandwidth of a large transfer."""
    launch_s: NotNegative
    """Fixed cost of a kernel."""
    wave_fraction: Annotated[float, Field(ge=0, le=1)]
    """Part of the compute that comes in full waves: 1 where each SM sets its pace, 0 where the chip's power does."""
    k_step_s: NotNegative
    """Latency of one element of k in a tile's main loop, however small the tile."""
    dispatch_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """How far that latency grows with m: 0 where the library searches for the best tile (cuBLAS), 1 where m alone
    sets the tile's rows, 64, 128 or 256 (CUTLASS in vLLM), few as the tiles may be."""
    fill_inputs: NotNegative
    """Filling the main loop's pipeline and writing the tile, in elements of k."""
    split_s: NotNegative
    """Fixed cost of splitting k over idle SMs: a workspace and a second kernel that adds up."""
    quantise_row_s: NotNegative = 0.0
    """Quantising activations before the kernel, per row; zero for 16-bit activations."""
    quantise_bytes_per_s: Positive | None = None
    """Rate at which that pass reads 16-bit and writes quantised activations."""
    weight_bits: Bits = 16
    """Stored width of a weight, scales included."""
    activation_bits: Bits = 16
    """Width of an activation as the kernel reads it."""
    overlap_power: Annotated[float, Field(ge=1)] | None = None
    """Exponent of the norm that adds compute and memory: 1 where one follows the other, as on a CPU's cores; None
    for that of GPUs."""
    correction: LogCorrection | None = None

    @model_serializer(mode="wrap")
    def _without_absent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without an ``overlap_power`` that is not set: digests of files that were written before it hold."""
        content: dict[str, Any] = handler(self)
        if content.get("overlap_power") is None:
            content.pop("overlap_power", None)
        return content


class PrefillAttentionFit(Frozen):
    """Prefill attention of one engine on one GPU.

    Attributes
    ----------
    launch_s : float
        A call that has nothing to do.
    compute_flops : float
        FLOP/s with every processor busy, over the attended pairs.
    block_flops : float
        FLOP/s of one query block, which one processor works through alone: the longest one bounds small batches.
    block_s : float
        Overhead of a query block of one head, over the whole GPU.
    padding_tokens : float
        Keys that a query computes in vain: tiles that the causal mask cuts.
    memory_bytes_per_s : float
        Queries in and outputs out.
    kv_bytes_per_s : float
        Keys and values of the new tokens: read, written to the KV cache where the engine does it here, read again.
    cached_bytes_per_s : float
        Rate of both while they fit in the cache.
    cache_bytes : float
        Bytes up to which they do.
    """

    launch_s: Seconds
    compute_flops: Rate
    block_flops: Rate
    block_s: Seconds
    padding_tokens: Annotated[float, Field(ge=0)]
    memory_bytes_per_s: Rate
    kv_bytes_per_s: Rate
    cached_bytes_per_s: Rate
    cache_bytes: Rate
    correction: LogCorrection | None = None


class DecodeAttentionFit(Frozen):
    """Decode attention of one engine on one GPU, one query token per sequence.

    Attributes
    ----------
    launch_s : float
        A call that has nothing to do.
    split_s : float
        More where several blocks share a head's KV: a second kernel combines them.
    memory_bytes_per_s : float
        KV read from memory.
    cached_bytes_per_s, cache_bytes : float
        KV read from the cache, and up to how many bytes it is. A benchmark repeats one call; between two layers of
        a model other layers pass, so a caller who knows the cache to be cold sets ``cache_bytes`` to 1.
    unsplit_bytes_per_s : float
        KV of one sequence and head where query heads do not share it: one block reads it in some engines.
    split_bytes_per_s : float
        KV of one sequence and head where they do.
    unit_s : float
        Overhead of a sequence's KV head, over the whole GPU.
    head_s : float
        The same of a query head.
    compute_flops : float
        FLOP/s over query heads and context.
    """

    launch_s: Seconds
    split_s: Seconds
    memory_bytes_per_s: Rate
    cached_bytes_per_s: Rate
    cache_bytes: Rate
    unsplit_bytes_per_s: Rate
    split_bytes_per_s: Rate
    unit_s: Seconds
    head_s: Seconds
    compute_flops: Rate
    correction: LogCorrection | None = None
