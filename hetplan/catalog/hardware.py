"""GPUs, links and machine sizes, as data."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from hetplan.base import Frozen
from hetplan.catalog.dtypes import Dtype
from hetplan.catalog.kernels import AllReduceCurve
from hetplan.catalog.model import ModelSpec
from hetplan.errors import InvalidInputError

Rate = Annotated[float, Field(gt=0)]


class Link(Frozen):
    """A connection in the alpha-beta model: ``latency_s`` once, then ``bytes_per_s`` (10**9 = 1 GB/s), one way.

    For a group of GPUs, ``bytes_per_s`` is what makes ``2 (P - 1) (latency_s + N / (P bytes_per_s))``
    the time of an all-reduce of N bytes over P GPUs; ``all_reduce`` holds measured times where there are some.
    """

    latency_s: Annotated[float, Field(ge=0)]
    bytes_per_s: Rate
    source: str = "given"
    all_reduce: AllReduceCurve | None = None


class GpuSpec(Frozen):
    """One GPU. ``memory_bytes`` is what the driver reports; ``dense_flops`` are dense peaks (FLOP/s), never sparse.

    ``sm_count``: streaming multiprocessors (compute units), which work on one tile of a matrix at a time.
    """

    name: str
    vendor: str
    memory_bytes: Annotated[int, Field(gt=0)]
    bandwidth_bytes_per_s: Rate
    dense_flops: dict[Dtype, Rate]
    native_dtypes: tuple[Dtype, ...]
    sm_count: Annotated[int, Field(gt=0)] | None = None
    source: str

    @model_validator(mode="after")
    def _check(self) -> Self:
        half = max((self.dense_flops.get(d, 0.0) for d in ("bf16", "fp16")), default=0.0)
        if half == 0.0:
            raise ValueError(f"{self.name} lists no 16-bit rate; give dense_flops for bf16 or fp16")
        eight = self.dense_flops.get("fp8")
        # 733/362.05 = 2.02 on one datasheet: vendors round each figure apart.
        if eight is not None and eight > 2.05 * half:
            raise ValueError(
                f"{self.name}: fp8 at {eight / 1e12:g} TFLOP/s is more than twice the 16-bit {half / 1e12:g}: "
                "that is the sparse figure; give the dense one"
            )
        return self

    def runs_as(self, dtype: Dtype) -> Dtype:
        """The type in which this GPU multiplies matrices that ask for ``dtype``.

        bf16 and fp16 stand in for one another (bf16 as fp16 on T4 and V100); an 8- or 4-bit type that is
        not native is stored as it is and computed in 16 bit (weight-only).
        """
        if dtype in self.native_dtypes and dtype in self.dense_flops:
            return dtype
        for other in ("bf16", "fp16", "fp32"):
            if other in self.native_dtypes and other in self.dense_flops:
                return other
        raise InvalidInputError(f"{self.name} multiplies none of bf16, fp16, fp32; add its rates to dense_flops")


class InstanceType(Frozen):
    """A machine size: GPUs of one kind, links between them per group size, and the network card.

    ``intra_node_links`` maps a group size (2 up to ``gpu_count``) to the link that such a group sees;
    two GPUs' link also carries a stage boundary inside the node.
    """

    name: str
    provider: str
    gpu: GpuSpec
    gpu_count: Annotated[int, Field(ge=1, le=64)]
    intra_node_links: dict[int, Link] = Field(default_factory=dict)
    inter_node_link: Link
    host_memory_bytes: Annotated[int, Field(gt=0)] | None = None
    source: str

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gpu_count > 1 and 2 not in self.intra_node_links:
            raise ValueError(
                f"{self.name} has {self.gpu_count} GPUs; give the link of a pair: intra_node_links={{2: ...}}"
            )
        wrong = [size for size in self.intra_node_links if not 2 <= size <= self.gpu_count]
        if wrong:
            raise ValueError(f"{self.name}: link for a group of {wrong[0]} GPUs; it has {self.gpu_count}")
        return self

    def group_link(self, tensor_parallel: int) -> Link:
        """The link of a group: its own row, else that of the next larger group, else of the largest."""
        if not 2 <= tensor_parallel <= self.gpu_count:
            raise InvalidInputError(
                f"{self.name} has {self.gpu_count} GPUs; a group of {tensor_parallel} has no link inside it"
            )
        larger = [size for size in self.intra_node_links if size >= tensor_parallel]
        return self.intra_node_links[min(larger) if larger else max(self.intra_node_links)]

    @property
    def pair_link(self) -> Link:
        """The link between two GPUs of the node, which carries a stage boundary inside it."""
        return self.group_link(2)

    def valid_tensor_parallel(self, model: ModelSpec) -> list[int]:
        """Degrees that the model allows and that divide the node's GPUs."""
        return [d for d in model.valid_tensor_parallel(self.gpu_count) if self.gpu_count % d == 0]
