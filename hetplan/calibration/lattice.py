"""What a calibration run measures: fixed shapes by rule, at most 50 of each operation and dtype.

=================  ==========================================================================
operation          shape
=================  ==========================================================================
gemm, gemv         m, n, k: Y[m, n] = X[m, k] @ W[n, k].T, as a linear layer; gemv has m = 1
attention_prefill  batch, tokens, heads, kv_heads, head_dim: causal, each token a query
attention_decode   batch, tokens, heads, kv_heads, head_dim: one query over ``tokens`` of context
norm               tokens, hidden: residual add, then RMSNorm; see `NORM_KERNELS`
all_reduce         tensor_parallel, message_bytes: the sum over the ranks of one node
=================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from hetplan.catalog.dtypes import Dtype, dtype_bytes
from hetplan.units import GIB, KIB, MIB

Operation = Literal["gemm", "gemv", "attention_prefill", "attention_decode", "norm", "all_reduce"]
Kind = Literal["cuda", "rocm", "cpu"]
Key = tuple[str, str, tuple[tuple[str, int], ...]]

OPERATIONS: tuple[Operation, ...] = ("gemm", "gemv", "attention_prefill", "attention_decode", "norm", "all_reduce")
MOST_POINTS = 50
MOST_MESSAGES = 8
# The add and the RMSNorm are two kernels; they read the input and the residual and write the sum, then read the
# sum and write the result: five passes over tokens x hidden elements.
NORM_KERNELS = 2
NORM_PASSES = 5

# A call of more operations than this takes seconds on a CPU, and tells nothing that a smaller one does not.
_CPU_MOST_FLOP = 2.5e9


@dataclass(frozen=True, slots=True)
class _Lattice:
    """Sides of a gemv; (n, k) and m of a gemm; (heads, kv_heads, head_dim) of attention; sizes of the rest."""

    sides: tuple[int, ...]
    matrices: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    heads: tuple[tuple[int, int, int], ...]
    prompts: tuple[int, ...]
    prompt_batches: tuple[int, ...]
    most_prompt_tokens: int
    contexts: tuple[int, ...]
    decode_batches: tuple[int, ...]
    norm_sides: tuple[int, ...]
    norm_tokens: tuple[int, ...]


_GPU = _Lattice(
    sides=(256, 1024, 2048, 4096, 8192, 16384),
    matrices=(
        (1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096), (8192, 8192), (16384, 4096), (4096, 16384),
        (16384, 16384),
    ),
    rows=(4, 16, 64, 256, 1024, 8192),
    heads=((32, 32, 128), (32, 8, 128), (8, 1, 128), (32, 8, 64)),
    prompts=(128, 512, 2048, 8192),
    prompt_batches=(1, 4, 16),
    most_prompt_tokens=8192,
    contexts=(256, 1024, 4096, 16384),
    decode_batches=(1, 16, 128),
    norm_sides=(1024, 4096, 8192),
    norm_tokens=(1, 32, 256, 2048, 8192),
)  # fmt: skip
_CPU = _Lattice(
    sides=(256, 1024, 2048, 4096),
    matrices=((256, 1024), (1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096)),
    rows=(2, 4, 8, 16, 32, 128, 512),
    heads=((16, 8, 64), (16, 4, 128)),
    prompts=(64, 256, 1024),
    prompt_batches=(1, 4),
    most_prompt_tokens=1024,
    contexts=(128, 512, 2048),
    decode_batches=(1, 8),
    norm_sides=(1024, 4096),
    norm_tokens=(1, 32, 1024),
)


@dataclass(frozen=True, slots=True)
class Task:
    """One point to be measured."""

    operation: Operation
    dtype: Dtype
    sizes: tuple[tuple[str, int], ...]

    @property
    def shape(self) -> dict[str, int]:
        """Sizes by name."""
        return dict(self.sizes)

    @property
    def key(self) -> Key:
        """What makes two points the same, whatever the order of the sizes."""
        return point_key(self.operation, self.dtype, self.shape)

    @property
    def group(self) -> str:
        """Operation and dtype, for people."""
        return f"{self.operation} {self.dtype}"

    def __str__(self) -> str:
        return f"{self.group} " + " ".join(f"{name}={size}" for name, size in self.sizes)


def point_key(operation: str, dtype: str, shape: dict[str, int]) -> Key:
    """What makes two points the same."""
    return operation, dtype, tuple(sorted(shape.items()))


def streamed_bytes(task: Task) -> int:
    """Bytes that a call reads from memory in use: weights, keys and values, or the inputs of a norm.

    These are what a measurement repeats in enough copies to come from memory rather than from a cache.
    """
    s, width = task.shape, dtype_bytes(task.dtype)
    if task.operation in ("gemm", "gemv"):
        return int(s["n"] * s["k"] * width)
    if task.operation in ("attention_prefill", "attention_decode"):
        return int(2 * s["batch"] * s["tokens"] * s["kv_heads"] * s["head_dim"] * width)
    if task.operation == "norm":
        return int(2 * s["tokens"] * s["hidden"] * width)
    return s["message_bytes"]


def other_bytes(task: Task) -> int:
    """Bytes of what there is one copy of: activations in and out, in 16 bits at least."""
    s, width = task.shape, max(2.0, dtype_bytes(task.dtype))
    if task.operation in ("gemm", "gemv"):
        return int(s["m"] * (s["n"] + s["k"]) * width)
    if task.operation == "attention_prefill":
        return int(2 * s["batch"] * s["tokens"] * s["heads"] * s["head_dim"] * width)
    if task.operation == "attention_decode":
        return int(2 * s["batch"] * s["heads"] * s["head_dim"] * width)
    if task.operation == "norm":
        return int(2 * s["tokens"] * s["hidden"] * width)
    return 0


def flop(task: Task) -> float:
    """Multiplications and additions of a call; a causal prefill does half of the square."""
    s = task.shape
    if task.operation in ("gemm", "gemv"):
        return 2.0 * s["m"] * s["n"] * s["k"]
    if task.operation == "attention_prefill":
        return 2.0 * s["batch"] * s["heads"] * s["head_dim"] * s["tokens"] ** 2
    if task.operation == "attention_decode":
        return 4.0 * s["batch"] * s["heads"] * s["head_dim"] * s["tokens"]
    return 0.0


def tasks_for(
    kind: Kind,
    *,
    dtypes: Iterable[Dtype],
    operations: Collection[Operation],
    budget_bytes: int,
    gpu_count: int = 0,
) -> list[Task]:
    """The points of a device, in the order in which they are measured.

    Parameters
    ----------
    kind : str
        A GPU (cuda, rocm) gets large shapes, a CPU those that take it milliseconds.
    dtypes : iterable of str
        fp8 is measured for gemm and gemv only; all-reduce in the first of 16 bits or more.
    operations : collection of str
    budget_bytes : int
        What a point may hold in memory: larger shapes are left out.
    gpu_count : int
        GPUs of the node: all-reduce is measured in groups of 2, 4, 8 ... of them, on a CPU in groups of 2 processes.

    Returns
    -------
    list of Task
        One dtype after another; within it, operations take turns, so that a run that is cut short has some points of
        each. All-reduces come last, those of one group size together.
    """
    dtypes = tuple(dtypes)
    chosen: list[Task] = []
    for dtype in dtypes:
        places: list[tuple[float, Task]] = []
        for operation in operations:
            if operation == "all_reduce" or (dtype == "fp8" and operation not in ("gemm", "gemv")):
                continue
            tasks = [Task(operation, dtype, tuple(shape.items())) for shape in _shapes(kind, operation)]
            group = [task for task in tasks if _affordable(kind, task, budget_bytes)]
            places += [((i + 0.5) / len(group), task) for i, task in enumerate(group)]
        chosen += [task for _, task in sorted(places, key=lambda place: place[0])]
    wide = [dtype for dtype in dtypes if dtype_bytes(dtype) >= 2]
    if "all_reduce" in operations and wide:
        chosen += _all_reduces(kind, wide[0], budget_bytes, gpu_count)
    return chosen


def _affordable(kind: Kind, task: Task, budget_bytes: int) -> bool:
    fits = streamed_bytes(task) + other_bytes(task) <= budget_bytes
    return fits and (kind != "cpu" or flop(task) <= _CPU_MOST_FLOP)


def _shapes(kind: Kind, operation: Operation) -> Iterator[dict[str, int]]:
    lattice = _CPU if kind == "cpu" else _GPU
    if operation == "gemv":
        yield from ({"m": 1, "n": n, "k": k} for n, k in product(lattice.sides, repeat=2))
    elif operation == "gemm":
        yield from ({"m": m, "n": n, "k": k} for (n, k), m in product(lattice.matrices, lattice.rows))
    elif operation == "attention_prefill":
        for heads, tokens, batch in product(lattice.heads, lattice.prompts, lattice.prompt_batches):
            if batch * tokens <= lattice.most_prompt_tokens:
                yield _attention(batch, tokens, heads)
    elif operation == "attention_decode":
        for heads, tokens, batch in product(lattice.heads, lattice.contexts, lattice.decode_batches):
            yield _attention(batch, tokens, heads)
    elif operation == "norm":
        yield from ({"tokens": t, "hidden": h} for h, t in product(lattice.norm_sides, lattice.norm_tokens))


def _attention(batch: int, tokens: int, heads: tuple[int, int, int]) -> dict[str, int]:
    return {"batch": batch, "tokens": tokens, "heads": heads[0], "kv_heads": heads[1], "head_dim": heads[2]}


def _all_reduces(kind: Kind, dtype: Dtype, budget_bytes: int, gpu_count: int) -> Iterator[Task]:
    first, most, largest = (4 * KIB, 64 * MIB, 2) if kind == "cpu" else (16 * KIB, GIB // 4, gpu_count)
    messages = [first * 4**i for i in range(MOST_MESSAGES) if first * 4**i <= min(most, budget_bytes)]
    ranks = 2
    while ranks <= largest:
        for message_bytes in messages:
            yield Task("all_reduce", dtype, (("tensor_parallel", ranks), ("message_bytes", message_bytes)))
        ranks *= 2
