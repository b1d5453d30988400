"""The device at hand, through torch: facts, tensors, and calls timed by device events or by the clock.

On a GPU the calls of a round are captured in a CUDA graph, as serving engines run decode steps: what is timed is the
device's work, not Python's. Where a capture is refused, calls go to the stream one by one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import cycle, islice
from typing import Any

from hetplan.calibration import host
from hetplan.calibration.all_reduce import time_all_reduce
from hetplan.calibration.lattice import Kind, Task, flop, other_bytes, streamed_bytes
from hetplan.calibration.measure import Engine, Round, Timing
from hetplan.calibration.raw_run import DeviceFacts
from hetplan.calibration.torch_calls import Call, Linear, calls_for, torch_linear, vllm_cpu_linear
from hetplan.catalog.dtypes import Dtype
from hetplan.errors import InvalidInputError, UnsupportedFeatureError
from hetplan.units import GB, MB, MIB

# Copies of the weights hold this much together, and four caches at least: each call then reads its own from memory.
# AMD's largest GPUs have 256 MB of cache that they do not list as L2.
_COLD_BYTES: dict[Kind, int] = {"cuda": 256 * MB, "rocm": GB, "cpu": 64 * MB}
_CACHES = 4
_MOST_COPIES = 1024
# Calls of a graph: enough that the time between an event and the first kernel does not count.
_GRAPH_CALLS = 16
# A round on a CPU takes about this long, at rates that any CPU reaches.
_ROUND_S = 0.02
_SLOW_FLOPS = 2e10
_SLOW_BYTES_PER_S = 5e9
# Weights are about as small as a model's; what they are does not matter to the time, that they differ does to power.
_WEIGHT_SCALE = 0.05
_RANDOM_ELEMENTS = MIB


class TorchBackend:
    """Torch on one device.

    Parameters
    ----------
    device : str, optional
        As torch names it; a GPU if there is one, else the CPU.
    engine : str
        Whose linear layers on a CPU: torch's or vllm's, which must then be installed here.

    Raises
    ------
    InvalidInputError
        If torch or vLLM is not installed, or there is no such device.
    """

    def __init__(self, device: str | None = None, engine: Engine = "torch") -> None:
        self._torch = torch = import_torch()
        self._device = _find_device(torch, device)
        self._linear: Linear = torch_linear(torch)
        software = f"torch {torch.__version__}"
        if engine == "vllm":
            if self._device.type != "cpu":
                raise InvalidInputError("on a GPU vLLM's linear layers are torch's: leave engine='vllm' out")
            self._linear, version = vllm_cpu_linear(torch)
            software = f"vllm {version}, {software}"
        self._dtypes = _torch_dtypes(torch, self._device)
        self._facts = _facts(torch, self._device, tuple(self._dtypes), software)
        self._pool: tuple[Dtype, Any] | None = None

    @property
    def facts(self) -> DeviceFacts:
        return self._facts

    def free_bytes(self) -> int:
        """Memory that nobody uses now."""
        if self._facts.kind == "cpu":
            return host.memory_bytes()[1]
        free: int = self._torch.cuda.mem_get_info(self._device)[0]
        return free

    def all_reduce(self, tasks: Sequence[Task], limit_s: float) -> list[Timing]:
        return time_all_reduce(self._facts.kind, tasks, limit_s)

    @contextmanager
    def prepare(self, task: Task, budget_bytes: int) -> Iterator[Round]:
        torch = self._torch
        with torch.inference_mode(), self._here():
            try:
                copies = self._copies(task, budget_bytes)
                calls = list(calls_for(torch, task, self._tensors(task, copies), self._empty(task.dtype), self._linear))
                yield self._clocked(task, calls) if self._facts.kind == "cpu" else self._captured(calls)
            except torch.OutOfMemoryError as error:
                raise MemoryError(str(error)) from None
            except RuntimeError as error:
                # torch says so for a dtype or a shape without a kernel.
                raise UnsupportedFeatureError(str(error).strip().split("\n")[0]) from None

    def _here(self) -> AbstractContextManager[object]:
        here: AbstractContextManager[object] = (
            nullcontext() if self._facts.kind == "cpu" else self._torch.cuda.device(self._device)
        )
        return here

    def _copies(self, task: Task, budget_bytes: int) -> int:
        size = streamed_bytes(task)
        cold = max(_COLD_BYTES[self._facts.kind], _CACHES * self._facts.cache_bytes)
        # An engine that packs weights holds each twice.
        room = (budget_bytes - other_bytes(task)) // size // 2
        return max(1, min(math.ceil(cold / size), room, _MOST_COPIES))

    def _tensors(self, task: Task, copies: int) -> list[Any]:
        """Flat random tensors, one for each copy: slices of one that all tasks of a dtype share."""
        dtype = self._dtypes[task.dtype]
        each = streamed_bytes(task) // dtype.itemsize
        if self._pool is None or self._pool[0] != task.dtype or self._pool[1].numel() < each * copies:
            self._pool = None
            if self._facts.kind != "cpu":
                self._torch.cuda.empty_cache()
            block = self._torch.randn(_RANDOM_ELEMENTS, device=self._device).mul_(_WEIGHT_SCALE).to(dtype)
            times = math.ceil(each * copies / _RANDOM_ELEMENTS)
            # By bytes: not every torch repeats fp8.
            self._pool = (task.dtype, block.view(self._torch.uint8).repeat(times).view(dtype))
        pool = self._pool[1]
        return [pool[i * each : (i + 1) * each] for i in range(copies)]

    def _empty(self, dtype: Dtype) -> Callable[..., Any]:
        """Makes activations: random numbers of a shape."""

        def make(*shape: int) -> Any:
            return self._torch.randn(shape, device=self._device).to(self._dtypes[dtype])

        return make

    def _clocked(self, task: Task, calls: list[Call]) -> Round:
        about_s = flop(task) / _SLOW_FLOPS + streamed_bytes(task) / _SLOW_BYTES_PER_S
        count = max(1, min(len(calls), int(_ROUND_S / about_s)))
        ring = cycle(calls)

        def run() -> float:
            mine = list(islice(ring, count))
            start = time.perf_counter()
            for call in mine:
                call()
            return time.perf_counter() - start

        return Round(count, run, "clock")

    def _captured(self, calls: list[Call]) -> Round:
        torch = self._torch
        calls = calls * math.ceil(_GRAPH_CALLS / len(calls))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Kernels are chosen, and workspaces made, outside the capture and off the default stream.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

        def timed(work: Call) -> float:
            start.record()
            work()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000

        def one_by_one() -> None:
            for call in calls:
                call()

        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                one_by_one()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            torch.cuda.synchronize()
            return Round(len(calls), partial(timed, one_by_one), "stream")
        return Round(len(calls), partial(timed, graph.replay), "graph")


def import_torch() -> Any:
    """The torch that is installed.

    Raises
    ------
    InvalidInputError
        If none is.
    """
    try:
        import torch
    except ImportError:
        raise InvalidInputError("measuring needs torch, which is not here: pip install 'hetplan[calibrate]'") from None
    return torch


def _find_device(torch: Any, name: str | None) -> Any:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if count else "cpu"))
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise InvalidInputError(f"device {name!r}: give 'cuda', 'cuda:0' ... (NVIDIA and AMD) or 'cpu'")
    if device.type == "cpu":
        return torch.device("cpu")
    if (device.index or 0) >= count:
        raise InvalidInputError(
            f"device {name!r}: torch {torch.__version__} sees {count} GPUs here. Use another, or 'cpu'"
        )
    return torch.device("cuda", device.index or 0)


def _torch_dtypes(torch: Any, device: Any) -> dict[Dtype, Any]:
    """What the device multiplies in; on a GPU only what it does without converting to another type first."""
    if device.type == "cpu":
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    found: dict[Dtype, Any] = {}
    with torch.cuda.device(device):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            found["bf16"] = torch.bfloat16
        found["fp16"] = torch.float16
        for name in ("float8_e4m3fn", "float8_e4m3fnuz"):
            if hasattr(torch, name) and _multiplies_fp8(torch, device, getattr(torch, name)):
                found["fp8"] = getattr(torch, name)
                break
    return found


def _multiplies_fp8(torch: Any, device: Any, dtype: Any) -> bool:
    ones = torch.ones(64, 64, device=device).to(dtype)
    one = torch.ones((), device=device)
    try:
        torch._scaled_mm(ones, ones.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        torch.cuda.synchronize(device)
    except (RuntimeError, AttributeError):
        return False
    return True


def _facts(torch: Any, device: Any, dtypes: tuple[Dtype, ...], engine: str) -> DeviceFacts:
    if device.type == "cpu":
        processor = host.processor()
        return DeviceFacts(
            kind="cpu",
            name=processor.name,
            engine=engine,
            dtypes=dtypes,
            memory_bytes=host.memory_bytes()[0],
            cache_bytes=host.last_level_cache_bytes(),
            cores=processor.cores,
            threads=torch.get_num_threads(),
            isa_flags=processor.isa_flags,
        )
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        kind="rocm" if torch.version.hip else "cuda",
        name=properties.name,
        driver=host.gpu_driver(),
        engine=engine,
        dtypes=dtypes,
        memory_bytes=properties.total_memory,
        cache_bytes=getattr(properties, "L2_cache_size", 0),
        gpu_count=torch.cuda.device_count(),
    )
