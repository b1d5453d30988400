"""Measures a device: GEMM, GEMV, attention, norms and all-reduce over a fixed lattice of shapes.

`measure` is the whole of it: it picks the points (`hetplan.calibration.lattice`), has a `Backend` prepare each and
times it here, and keeps them in a raw file (`hetplan.calibration.raw_run`) from which a run cut short goes on. The
backend is torch on the device at hand; it is the one place where a device is touched, so that what decides how long,
how often and in which order stands here, without torch.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, Protocol

from hetplan.calibration.lattice import OPERATIONS, Kind, Operation, Task, tasks_for
from hetplan.calibration.raw_run import CalibrationRun, DeviceFacts, RawRun, Timed
from hetplan.catalog.calibration import CalibrationPoint
from hetplan.catalog.dtypes import DTYPE_ALIASES, Dtype
from hetplan.errors import InvalidInputError, UnknownNameError, UnsupportedFeatureError

# Samples of a point: until they agree within the spread, or its time is spent; three at least, to have a median.
FEWEST_SAMPLES = 3
SETTLED_SAMPLES = 7
MOST_SAMPLES = 50
SETTLED_SPREAD = 0.02
POINT_LIMIT_S = 1.0
# A point holds no more than this part of the memory that is free: others may run on the machine.
MEMORY_SHARE = 0.25
ENGINES = ("torch", "vllm")
_USUAL_DTYPES: dict[Kind, tuple[Dtype, ...]] = {
    "cpu": ("fp32", "bf16", "fp16"),
    "cuda": ("bf16", "fp16", "fp8"),
    "rocm": ("bf16", "fp16", "fp8"),
}


@dataclass(frozen=True, slots=True)
class Progress:
    """Points done, of how many, and the one that comes next; empty at the end."""

    done: int
    total: int
    what: str


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call, the median of samples, and their interquartile range over it."""

    seconds: float
    relative_spread: float


@dataclass(frozen=True, slots=True)
class Round:
    """A task made ready: ``run()`` makes ``calls`` calls, one after another, and returns their seconds together."""

    calls: int
    run: Callable[[], float]
    timed: Timed


class Backend(Protocol):
    """A device and what runs on it."""

    @property
    def facts(self) -> DeviceFacts:
        """What the device is."""
        ...

    def free_bytes(self) -> int:
        """Memory that is free now."""
        ...

    def prepare(self, task: Task, budget_bytes: int) -> AbstractContextManager[Round]:
        """Make the tensors of a task, within a budget; they go when the context ends.

        Raises
        ------
        UnsupportedFeatureError
            If the device or torch does not do this operation in this dtype.
        MemoryError
            If the device has less memory than it said.
        """
        ...

    def all_reduce(self, tasks: Sequence[Task], limit_s: float) -> Iterable[Timing]:
        """Time an all-reduce of each task, all of one group size and dtype, in processes of their own.

        Raises
        ------
        UnsupportedFeatureError
            If the processes cannot form a group.
        """
        ...


Engine = Literal["torch", "vllm"]
OnProgress = Callable[[Progress], None]
Clock = Callable[[], float]


def measure(
    device: str | None = None,
    *,
    dtypes: Collection[Dtype] | None = None,
    operations: Collection[Operation] | None = None,
    raw_path: str | Path | None = None,
    on_progress: OnProgress | None = None,
    time_limit_s: float | None = None,
    point_limit_s: float = POINT_LIMIT_S,
    today: datetime.date | None = None,
    clock: Clock = time.perf_counter,
    engine: Engine = "torch",
    backend: Backend | None = None,
) -> CalibrationRun:
    """Measure the device that is here.

    Parameters
    ----------
    device : str, optional
        As torch names it: ``"cuda"``, ``"cuda:1"``, ``"cpu"``. A GPU if there is one, else the CPU.
    dtypes : collection of str, optional
        bf16, fp16 and fp8 on a GPU, fp32, bf16 and fp16 on a CPU; those that it does not have are skipped by name.
    operations : collection of str, optional
        All; on a CPU, all but all_reduce, which takes a process for each rank and is measured only when named.
    raw_path : str or path, optional
        File that takes each point as it comes. Where it exists, the run goes on from it.
    on_progress : callable, optional
        Called with a `Progress` before each point, and once at the end.
    time_limit_s : float, optional
        Seconds after which no new point is begun.
    point_limit_s : float
        Seconds of samples of one point; three samples are always taken.
    today : date, optional
        Written into the raw file.
    clock : callable, optional
        Seconds, for the limits.
    engine : str
        Whose linear layers: torch's, or on a CPU vllm's, which packs weights for oneDNN where torch does not.
    backend : Backend, optional
        What measures, instead of torch.

    Returns
    -------
    CalibrationRun
        Points of this run and of the raw file, and what was skipped and why.

    Raises
    ------
    InvalidInputError
        If torch or the device is not there, a dtype or operation is not known, or the raw file is of another device
        or torch.
    """
    started = clock()
    wanted = _operations(operations)
    if engine not in ENGINES:
        raise UnknownNameError("engine", str(engine), ENGINES)
    for limit, name in ((time_limit_s, "time_limit_s"), (point_limit_s, "point_limit_s")):
        if limit is not None and (isinstance(limit, bool) or not limit >= 0):
            raise InvalidInputError(f"{name} is a number of seconds from 0, got {limit!r}")
    if backend is None:
        from hetplan.calibration.torch_backend import TorchBackend

        backend = TorchBackend(device, engine)
    elif device is not None:
        raise InvalidInputError(f"give a device or a backend, not both: got {device!r}")
    facts = backend.facts
    present, skipped = _dtypes(dtypes, facts)
    if wanted is None:
        wanted = tuple(o for o in OPERATIONS if o != "all_reduce" or facts.kind != "cpu")
    run = RawRun(facts, raw_path, today)
    budget = int(MEMORY_SHARE * backend.free_bytes())
    tasks = tasks_for(facts.kind, dtypes=present, operations=wanted, budget_bytes=budget, gpu_count=facts.gpu_count)
    asked = {task.key for task in tasks}
    have = run.keys
    tasks = [task for task in tasks if task.key not in have]
    done, total = len(asked & have), len(asked)

    def late() -> bool:
        return time_limit_s is not None and clock() - started >= time_limit_s

    refused: dict[str, str] = {}
    too_large: list[str] = []
    remaining: list[str] = []
    for unit in _units(tasks):
        if unit[0].group in refused:
            done += len(unit)
            continue
        if late():
            remaining += [str(task) for task in unit]
            continue
        if on_progress is not None:
            on_progress(Progress(done, total, str(unit[0])))
        try:
            if unit[0].operation == "all_reduce":
                for task, timing in zip(unit, backend.all_reduce(unit, point_limit_s), strict=True):
                    run.add(_point(task, timing), "clock")
            else:
                with backend.prepare(unit[0], budget) as made:
                    run.add(_point(unit[0], sample(made, point_limit_s, clock)), made.timed)
        except UnsupportedFeatureError as error:
            # An operation refused in one dtype is refused in its other shapes too.
            refused[unit[0].group] = str(error)
        except MemoryError:
            too_large.append(f"{unit[0]}: memory ran out; others use the device")
        done += len(unit)
    if on_progress is not None:
        on_progress(Progress(total - len(remaining), total, ""))
    points = tuple(p for p in run.points if p.dtype in present and p.operation in wanted)
    return CalibrationRun(
        device=facts,
        points=points,
        skipped=(*skipped, *(f"{group}: {reason}" for group, reason in refused.items()), *too_large),
        remaining=tuple(remaining),
        elapsed_s=max(0.0, clock() - started),
        measured_on=run.header.measured_on,
    )


def sample(made: Round, limit_s: float, clock: Clock = time.perf_counter) -> Timing:
    """Run a round until its times agree or the limit is reached.

    The first two rounds warm up: kernels are chosen or compiled in the first, clocks and caches settle in the second.
    A round that alone takes the limit is warmed up once.
    """
    started = clock()
    made.run()
    if clock() - started < limit_s:
        made.run()
    seconds: list[float] = []
    while len(seconds) < MOST_SAMPLES:
        seconds.append(made.run() / made.calls)
        if len(seconds) < FEWEST_SAMPLES:
            continue
        if clock() - started >= limit_s:
            break
        if len(seconds) >= SETTLED_SAMPLES and relative_spread(seconds) <= SETTLED_SPREAD:
            break
    return Timing(statistics.median(seconds), relative_spread(seconds))


def relative_spread(seconds: Sequence[float]) -> float:
    """Interquartile range over median.

    >>> relative_spread([1.0, 2.0, 3.0, 4.0, 5.0])
    0.6666666666666666
    """
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else 0.0


def _point(task: Task, timing: Timing) -> CalibrationPoint:
    return CalibrationPoint(
        operation=task.operation,
        dtype=task.dtype,
        shape=task.shape,
        seconds=timing.seconds,
        relative_spread=timing.relative_spread,
    )


def _units(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    """What is done in one go: a task, or all messages of an all-reduce, for which one group of processes starts."""
    for _, members in groupby(enumerate(tasks), key=_unit):
        yield [task for _, task in members]


def _unit(place: tuple[int, Task]) -> object:
    index, task = place
    return task.shape["tensor_parallel"] if task.operation == "all_reduce" else (index, task.group)


def _operations(operations: Collection[Operation] | None) -> tuple[Operation, ...] | None:
    if operations is None:
        return None
    if isinstance(operations, str):
        raise InvalidInputError(f"operations is a list of names, got {operations!r}")
    for operation in operations:
        if operation not in OPERATIONS:
            raise UnknownNameError("operation", str(operation), OPERATIONS)
    return tuple(o for o in OPERATIONS if o in operations)


def _dtypes(dtypes: Collection[Dtype] | None, facts: DeviceFacts) -> tuple[tuple[Dtype, ...], list[str]]:
    """Those that are asked for and there, and a line for each that is not there."""
    if isinstance(dtypes, str):
        raise InvalidInputError(f"dtypes is a list of names, got {dtypes!r}")
    asked: list[Dtype] = []
    for name in _USUAL_DTYPES[facts.kind] if dtypes is None else dtypes:
        if name not in DTYPE_ALIASES:
            raise UnknownNameError("dtype", str(name), DTYPE_ALIASES)
        asked.append(DTYPE_ALIASES[name])
    present = tuple(dict.fromkeys(d for d in asked if d in facts.dtypes))
    if not present:
        raise InvalidInputError(
            f"{facts.name} with {facts.engine} multiplies in {', '.join(facts.dtypes)}, not in {', '.join(asked)}"
        )
    return present, [
        f"{d}: {facts.name} with {facts.engine} does not multiply in it" for d in asked if d not in present
    ]
