"""What a calibration run measures, in which order, and how it goes on after it was cut short: with a fake device."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetplan.calibration.all_reduce import time_all_reduce
from hetplan.calibration.host import read_processor
from hetplan.calibration.lattice import OPERATIONS, Kind, Operation, Task, flop, other_bytes, streamed_bytes, tasks_for
from hetplan.calibration.measure import (
    FEWEST_SAMPLES,
    MOST_SAMPLES,
    Progress,
    Round,
    Timing,
    measure,
    sample,
)
from hetplan.calibration.raw_run import CalibrationRun, DeviceFacts, read_raw_run
from hetplan.catalog.dtypes import Dtype
from hetplan.errors import InvalidInputError, SchemaVersionError, UnknownNameError, UnsupportedFeatureError
from hetplan.units import GIB, MIB

GPU = DeviceFacts(
    kind="cuda",
    name="Some GPU",
    driver="600.1",
    engine="torch 2.13.0+cu130",
    dtypes=("bf16", "fp16"),
    memory_bytes=80 * GIB,
    cache_bytes=50 * MIB,
    gpu_count=4,
)
CPU = DeviceFacts(
    kind="cpu",
    name="Some CPU",
    engine="torch 2.13.0+cpu",
    dtypes=("fp32", "bf16"),
    memory_bytes=16 * GIB,
    cache_bytes=32 * MIB,
    cores=2,
    threads=2,
)
FEW: tuple[Operation, ...] = ("norm",)


class FakeDevice:
    """A device whose calls take 1 ms each of a clock of its own, and which may refuse, run out or be unplugged."""

    def __init__(self, facts: DeviceFacts = GPU, *, free_bytes: int = 64 * GIB, call_s: float = 1e-3) -> None:
        self.facts = facts
        self.now_s = 0.0
        self.asked: list[Task] = []
        self.refuses: tuple[str, str] | None = None
        self.too_large: Task | None = None
        self.unplugged_after: int | None = None
        self._free_bytes = free_bytes
        self._call_s = call_s

    def clock(self) -> float:
        return self.now_s

    def free_bytes(self) -> int:
        return self._free_bytes

    def _take(self, task: Task) -> None:
        if self.unplugged_after is not None and len(self.asked) == self.unplugged_after:
            raise KeyboardInterrupt
        self.asked.append(task)
        if self.refuses == (task.operation, task.dtype):
            raise UnsupportedFeatureError("no kernel")
        if task == self.too_large:
            raise MemoryError

    @contextmanager
    def prepare(self, task: Task, budget_bytes: int) -> Iterator[Round]:
        assert streamed_bytes(task) + other_bytes(task) <= budget_bytes
        self._take(task)

        def run() -> float:
            self.now_s += 10 * self._call_s
            return 10 * self._call_s

        yield Round(10, run, "graph")

    def all_reduce(self, tasks: Sequence[Task], limit_s: float) -> Iterator[Timing]:
        for task in tasks:
            self._take(task)
            yield Timing(1e-3, 0.0)


def run(device: FakeDevice, **options: object) -> CalibrationRun:
    return measure(backend=device, clock=device.clock, **options)  # type: ignore[arg-type]


def lattice(kind: Kind, **options: object) -> list[Task]:
    dtypes = ("fp32", "bf16") if kind == "cpu" else ("bf16", "fp16", "fp8")
    defaults = {"dtypes": dtypes, "operations": OPERATIONS, "budget_bytes": 20 * GIB, "gpu_count": 8}
    return tasks_for(kind, **(defaults | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cuda", "rocm", "cpu"])
def test_at_most_fifty_points_of_an_operation_and_dtype_and_none_twice(kind: Kind) -> None:
    tasks = lattice(kind)
    assert len({task.key for task in tasks}) == len(tasks)
    counts = Counter(
        (t.operation, t.dtype, t.shape.get("tensor_parallel")) for t in tasks if t.operation != "all_reduce"
    )
    assert max(counts.values()) <= 50
    assert {operation for operation, _, _ in counts} == set(OPERATIONS) - {"all_reduce"}
    assert min(counts.values()) >= 6


def test_a_gpu_is_measured_from_one_row_to_8192_and_from_256_to_16384_columns() -> None:
    gemms = [task.shape for task in lattice("cuda") if task.operation in ("gemm", "gemv")]
    assert {min(s["m"] for s in gemms), max(s["m"] for s in gemms)} == {1, 8192}
    for side in ("n", "k"):
        assert {min(s[side] for s in gemms), max(s[side] for s in gemms)} == {256, 16384}
    heads = {task.shape["head_dim"] for task in lattice("cuda") if task.operation.startswith("attention")}
    assert heads == {64, 128}


def test_no_point_holds_more_than_the_budget() -> None:
    small = lattice("cuda", budget_bytes=100 * MIB)
    assert small
    assert all(streamed_bytes(task) + other_bytes(task) <= 100 * MIB for task in small)
    assert len(small) < len(lattice("cuda"))


def test_a_cpu_is_not_given_a_call_of_seconds() -> None:
    assert max(flop(task) for task in lattice("cpu")) <= 2.5e9


def test_groups_of_two_four_and_eight_get_eight_messages_each() -> None:
    messages = Counter(t.shape["tensor_parallel"] for t in lattice("cuda") if t.operation == "all_reduce")
    assert messages == {2: 8, 4: 8, 8: 8}
    assert not [t for t in lattice("cuda", gpu_count=1) if t.operation == "all_reduce"]
    assert {t.shape["tensor_parallel"] for t in lattice("cpu") if t.operation == "all_reduce"} == {2}


def test_fp8_is_measured_where_matrices_are_multiplied_only() -> None:
    assert {task.operation for task in lattice("cuda") if task.dtype == "fp8"} == {"gemm", "gemv"}


def test_a_run_cut_short_has_points_of_each_operation() -> None:
    first = lattice("cuda", dtypes=("bf16",), gpu_count=1)[:20]
    assert {task.operation for task in first} == set(OPERATIONS) - {"all_reduce"}


def test_a_run_measures_each_point_once_and_says_how_far_it_is() -> None:
    device = FakeDevice()
    steps: list[Progress] = []
    found = run(device, on_progress=steps.append)
    assert len(found.points) == len(device.asked) == len(set(device.asked))
    assert [p.seconds for p in found.points] == pytest.approx([1e-3] * len(found.points))
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    assert steps[0].done == 0
    assert steps[-1] == Progress(len(found.points), len(found.points), "")
    assert found.remaining == ()
    # A GPU's usual types are bf16, fp16 and fp8: this one lacks fp8, and the run says so by name.
    assert [line.split(":")[0] for line in found.skipped] == ["fp8"]


def test_a_cpu_all_reduces_only_when_asked() -> None:
    assert "all_reduce" not in {p.operation for p in run(FakeDevice(CPU)).points}
    asked = run(FakeDevice(CPU), operations=["all_reduce"])
    assert {p.operation for p in asked.points} == {"all_reduce"}
    assert len(asked.points) == 8


def test_a_run_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    killed = FakeDevice()
    killed.unplugged_after = 7
    with pytest.raises(KeyboardInterrupt):
        run(killed, raw_path=raw, dtypes=["bf16"])
    assert len(read_raw_run(raw)[1]) == 7

    again = FakeDevice()
    steps: list[Progress] = []
    found = run(again, raw_path=raw, dtypes=["bf16"], on_progress=steps.append)
    assert not set(killed.asked) & set(again.asked)
    assert steps[0].done == 7
    assert found.points == run(FakeDevice(), dtypes=["bf16"]).points
    header, points = read_raw_run(raw)
    assert header.device == GPU
    assert tuple(points) == found.points

    nothing_left = FakeDevice()
    assert run(nothing_left, raw_path=raw, dtypes=["bf16"]).points == found.points
    assert nothing_left.asked == []


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_last_line_is_measured_again(tmp_path: Path, cut: int) -> None:
    raw = tmp_path / "raw.jsonl"
    whole = run(FakeDevice(), raw_path=raw, operations=FEW)
    raw.write_bytes(raw.read_bytes()[:-cut])
    device = FakeDevice()
    found = run(device, raw_path=raw, operations=FEW)
    assert len(device.asked) == 1
    assert found.points == whole.points
    assert all(json.loads(line) for line in raw.read_text().splitlines())


def test_a_torn_header_begins_anew(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    run(FakeDevice(), raw_path=raw, operations=FEW)
    raw.write_bytes(raw.read_bytes()[:40])
    device = FakeDevice()
    found = run(device, raw_path=raw, operations=FEW)
    assert tuple(read_raw_run(raw)[1]) == found.points
    assert len(device.asked) == len(found.points)


@pytest.mark.parametrize(
    "change",
    [{"name": "Another GPU"}, {"engine": "torch 2.14.0+cu130"}, {"driver": "601.0"}],
    ids=lambda change: next(iter(change)),
)
def test_points_of_two_devices_or_torches_are_not_mixed(tmp_path: Path, change: dict[str, str]) -> None:
    raw = tmp_path / "raw.jsonl"
    run(FakeDevice(), raw_path=raw, operations=FEW)
    before = raw.read_bytes()
    (there,) = change.values()
    with pytest.raises(InvalidInputError, match=there.replace("+", r"\+")):
        run(FakeDevice(GPU.replace(**change)), raw_path=raw, operations=FEW)
    assert raw.read_bytes() == before


def test_a_cpu_run_with_other_threads_is_another_run(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    run(FakeDevice(CPU), raw_path=raw, operations=FEW)
    with pytest.raises(InvalidInputError, match="threads 2, here it is 1"):
        run(FakeDevice(CPU.replace(threads=1)), raw_path=raw, operations=FEW)


@pytest.mark.parametrize("content", ["not ours", "not ours\nat all\n", '{"a": 1}\n', "[1]\n"])
def test_a_file_of_another_kind_is_left_alone(tmp_path: Path, content: str) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_text(content)
    with pytest.raises((InvalidInputError, SchemaVersionError), match="raw_path"):
        run(FakeDevice(), raw_path=raw, operations=FEW)
    assert raw.read_text() == content


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    run(FakeDevice(), raw_path=raw, operations=FEW)
    lines = raw.read_text().splitlines(keepends=True)
    raw.write_text("".join([*lines[:2], "{torn\n", *lines[3:]]))
    with pytest.raises(InvalidInputError, match="line 3"):
        run(FakeDevice(), raw_path=raw, operations=FEW)


def test_a_path_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    device = FakeDevice()
    with pytest.raises(InvalidInputError, match="cannot write"):
        run(device, raw_path=tmp_path / "no folder" / "raw.jsonl")
    assert device.asked == []


def test_the_time_limit_leaves_the_rest_for_later(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    device = FakeDevice()
    found = run(device, raw_path=raw, dtypes=["bf16"], time_limit_s=1.0)
    assert 0 < len(found.points) == len(device.asked)
    assert found.elapsed_s <= 1.2
    rest = run(FakeDevice(), raw_path=raw, dtypes=["bf16"])
    assert len(rest.points) == len(found.points) + len(found.remaining)
    assert run(FakeDevice(), time_limit_s=0).points == ()


def test_an_operation_refused_in_a_type_is_skipped_by_name() -> None:
    device = FakeDevice()
    device.refuses = ("attention_decode", "fp16")
    found = run(device)
    assert "attention_decode fp16: no kernel" in found.skipped
    assert sum((t.operation, t.dtype) == device.refuses for t in device.asked) == 1
    assert {p.dtype for p in found.points if p.operation == "attention_decode"} == {"bf16"}


def test_a_shape_that_runs_out_of_memory_is_skipped_alone() -> None:
    device = FakeDevice()
    device.too_large = lattice("cuda")[3]
    found = run(device)
    assert any(line.startswith(str(device.too_large)) for line in found.skipped)
    assert len(found.points) == len(device.asked) - 1


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"dtypes": ["bf17"]}, UnknownNameError, "bf17"),
        ({"dtypes": ["fp8"]}, InvalidInputError, "not in fp8"),
        ({"dtypes": "bf16"}, InvalidInputError, "list"),
        ({"operations": ["gemm", "conv"]}, UnknownNameError, "conv"),
        ({"operations": "gemm"}, InvalidInputError, "list"),
        ({"engine": "sglang"}, UnknownNameError, "sglang"),
        ({"time_limit_s": -1}, InvalidInputError, "time_limit_s"),
        ({"point_limit_s": float("nan")}, InvalidInputError, "point_limit_s"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        run(FakeDevice(), **options)


def test_a_device_is_named_or_its_backend_given_not_both() -> None:
    with pytest.raises(InvalidInputError, match="not both"):
        measure("cuda", backend=FakeDevice())


def test_types_have_all_their_names() -> None:
    assert {p.dtype for p in run(FakeDevice(), dtypes=["bfloat16"], operations=FEW).points} == {"bf16"}


def test_samples_stop_when_they_agree_and_at_the_limit() -> None:
    steady, noisy = FakeClockRound([1.0]), FakeClockRound([1.0, 3.0])
    assert sample(steady.round, 100.0, steady.clock) == Timing(1.0, 0.0)
    assert steady.rounds < 12
    spread = sample(noisy.round, 1000.0, noisy.clock).relative_spread
    assert noisy.rounds == MOST_SAMPLES + 2
    assert spread > 0.5
    slow = FakeClockRound([50.0])
    sample(slow.round, 1.0, slow.clock)
    assert slow.rounds == FEWEST_SAMPLES + 1


class FakeClockRound:
    """A round that takes given seconds in turn."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds, self._now_s, self.rounds = seconds, 0.0, 0
        self.round = Round(1, self._run, "clock")

    def clock(self) -> float:
        return self._now_s

    def _run(self) -> float:
        took = self._seconds[self.rounds % len(self._seconds)]
        self.rounds += 1
        self._now_s += took
        return took


def test_a_processor_with_two_threads_a_core_has_half_the_cores() -> None:
    thread = "processor\t: {0}\nmodel name\t: Xeon\nphysical id\t: 0\ncore id\t\t: {1}\nflags\t\t: fpu avx2 amx_bf16\n"
    found = read_processor("\n".join(thread.format(i, i % 2) for i in range(4)))
    assert (found.name, found.cores, found.isa_flags) == ("Xeon", 2, ("avx2", "amx_bf16"))
    arm = read_processor("processor\t: 0\nFeatures\t: fp asimd asimdhp bf16\n\nprocessor\t: 1\nFeatures\t: fp\n")
    assert (arm.cores, arm.isa_flags) == (2, ("asimdhp", "bf16"))
    assert read_processor("").cores >= 1


def test_without_torch_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'hetplan\[calibrate\]'"):
        measure("cpu")


def test_a_rank_that_fails_ends_the_group_with_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The workers start this Python, in which a torch of one line stands in for a broken one."""
    (tmp_path / "torch.py").write_text("raise SystemExit('no torch today')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    dtype: Dtype = "bf16"
    tasks = [Task("all_reduce", dtype, (("tensor_parallel", 2), ("message_bytes", 4096)))]
    with pytest.raises(UnsupportedFeatureError, match="no torch today"):
        time_all_reduce("cpu", tasks, 0.1)


def gpu_is_here() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    torch = importlib.import_module("torch")
    return bool(torch.cuda.is_available())


# Defined only where it can run: a test that is skipped on every machine but one says nothing on the others.
if gpu_is_here():

    @pytest.mark.gpu
    def test_this_gpu_is_measured_by_replayed_graphs(tmp_path: Path) -> None:
        raw = tmp_path / "raw.jsonl"
        found = measure("cuda", raw_path=raw, point_limit_s=0.02)
        assert found.device.driver is not None
        assert not [line for line in found.skipped if not line.startswith("fp8")]
        assert set(OPERATIONS) - {"all_reduce"} <= {p.operation for p in found.points}
        timed = Counter(json.loads(line).get("timed") for line in raw.read_text().splitlines()[1:])
        assert timed["stream"] == 0
        for point in found.points:
            if point.operation == "gemm":
                shape = point.shape
                assert 1e8 < 2 * shape["m"] * shape["n"] * shape["k"] / point.seconds < 1e16, point
        assert measure("cuda", raw_path=raw).points == found.points
