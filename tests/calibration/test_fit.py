"""A calibration from measured points: rates come back, what was not measured says so, and files hold."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pytest

import hetplan as hp
from hetplan.calibration.device_names import gpu_of
from hetplan.calibration.engine_steps import SMALL_DECODERS, fit_step_overheads, kernel_seconds
from hetplan.calibration.fit_run import fit_run
from hetplan.calibration.lattice import OPERATIONS, Operation, Task, tasks_for
from hetplan.calibration.raw_run import CalibrationRun, DeviceFacts
from hetplan.calibration.vllm_decoder import Decoder, DecoderTiming, StepTiming
from hetplan.catalog.calibration import Calibration, CalibrationPoint
from hetplan.catalog.kernels import DecodeAttentionFit, GemmFit, PrefillAttentionFit
from hetplan.catalog.steps import get_step_overheads
from hetplan.catalog.tables import get_calibration, get_gpu, list_gpus
from hetplan.errors import InvalidInputError, UnknownNameError
from hetplan.estimator.attention import decode_attention_seconds, prefill_attention_seconds
from hetplan.estimator.gemm import gemm_seconds
from hetplan.estimator.usual import usual_decode_attention, usual_gemm, usual_prefill_attention
from hetplan.units import GIB, MIB

H100 = DeviceFacts(
    kind="cuda",
    name="NVIDIA H100 80GB HBM3",
    driver="600.1",
    engine="torch 2.13.0",
    dtypes=("bf16",),
    memory_bytes=80 * GIB,
    cache_bytes=50 * MIB,
    gpu_count=2,
)
CPU = DeviceFacts(
    kind="cpu",
    name="Some CPU",
    engine="vllm 0.32.0+cpu, torch 2.13.0",
    dtypes=("fp32",),
    memory_bytes=16 * GIB,
    cache_bytes=32 * MIB,
    cores=2,
    threads=1,
)
PEAK_FLOPS, PEAK_BYTES_PER_S = 700e12, 2.9e12
KERNEL_S = 3e-6

Attention = tuple[PrefillAttentionFit, DecodeAttentionFit]


def gpu_truth() -> tuple[GemmFit, Attention]:
    """A GPU some way from the datasheet of an H100."""
    gemm = usual_gemm(PEAK_FLOPS, PEAK_BYTES_PER_S, sm_count=132, engine="torch")
    prefill = usual_prefill_attention(PEAK_FLOPS, PEAK_BYTES_PER_S)
    return gemm, (prefill, usual_decode_attention(PEAK_FLOPS, PEAK_BYTES_PER_S))


def seconds_of(task: Task, gemm: GemmFit, attention: Attention | None) -> float:
    s = task.shape
    if task.operation in ("gemm", "gemv"):
        return float(gemm_seconds(gemm, s["m"], s["n"], s["k"]))
    if task.operation == "norm":
        return 2 * KERNEL_S + 10 * s["tokens"] * s["hidden"] / (0.79 * PEAK_BYTES_PER_S)
    if task.operation == "all_reduce":
        return 1e-5 + s["message_bytes"] / 2e11
    assert attention is not None
    shape = {name: s[name] for name in ("heads", "kv_heads", "head_dim")} | {"value_head_dim": s["head_dim"]}
    if task.operation == "attention_prefill":
        told = {"sequences": s["batch"], "tokens": s["tokens"], "context": s["tokens"]}
        return float(prefill_attention_seconds(attention[0], **told, **shape))
    return float(decode_attention_seconds(attention[1], sequences=s["batch"], context=s["tokens"], **shape))


def measured(operations: tuple[Operation, ...] = OPERATIONS, device: DeviceFacts = H100) -> CalibrationRun:
    gemm, attention = gpu_truth()
    tasks = tasks_for("cuda", dtypes=("bf16",), operations=operations, budget_bytes=20 * GIB, gpu_count=2)
    points = [
        CalibrationPoint(
            operation=task.operation,
            dtype=task.dtype,
            shape=task.shape,
            seconds=seconds_of(task, gemm, attention),
            relative_spread=0.01,
        )
        for task in tasks
    ]
    day = datetime.date(2026, 1, 2)
    return CalibrationRun(device=device, points=tuple(points), elapsed_s=1.0, measured_on=day)


def test_a_measured_gpu_comes_back_with_its_rates() -> None:
    run = measured()
    found = fit_run(run)
    gemm, (prefill, decode) = gpu_truth()
    assert found.gpu == "H100-SXM5-80GB"
    assert (found.device, found.driver, found.engine) == (H100.name, "600.1", "torch 2.13.0")
    assert found.measured_on == datetime.date(2026, 1, 2)
    assert found.points == run.points
    assert found.compute_flops["bf16"].source == "measured"
    # fp16 was not measured, and runs at the rate of its twin; fp8 keeps the datasheet's.
    assert found.compute_flops["fp16"].value == found.compute_flops["bf16"].value
    assert found.compute_flops["fp8"].source == "datasheet"
    assert found.memory_bytes_per_s.value == pytest.approx(0.79 * PEAK_BYTES_PER_S, rel=0.05)
    assert found.kernel_s.value == pytest.approx(KERNEL_S, rel=0.1)

    # Shapes between those of the run.
    m, n, k = np.array([[1, 6144, 6144], [48, 5120, 13824], [700, 28672, 4096], [3000, 6000, 6000]], dtype=float).T
    assert gemm_seconds(found.gemms[0], m, n, k) == pytest.approx(gemm_seconds(gemm, m, n, k), rel=0.1)
    shape = {"heads": 32, "kv_heads": 8, "head_dim": 128, "value_head_dim": 128}
    load = {"sequences": 3, "tokens": 1500, "context": 1500}
    assert found.prefill_attention is not None
    assert found.decode_attention is not None
    assert prefill_attention_seconds(found.prefill_attention, **load, **shape) == pytest.approx(
        prefill_attention_seconds(prefill, **load, **shape), rel=0.1
    )
    assert decode_attention_seconds(found.decode_attention, sequences=40, context=3000, **shape) == pytest.approx(
        decode_attention_seconds(decode, sequences=40, context=3000, **shape), rel=0.1
    )
    (curve,) = found.all_reduces
    assert (curve.tensor_parallel, curve.library) == (2, "nccl")


def test_a_written_calibration_is_read_back_and_used(tmp_path: Path) -> None:
    found = fit_run(measured())
    found.save(tmp_path / "h100.json")
    again = Calibration.load(tmp_path / "h100.json")
    assert again == found
    assert again.sha256 == found.sha256
    own = hp.predict("llama-3.1-8b", "H100", calibration=again)
    assert own.tpot_s != hp.predict("llama-3.1-8b", "H100").tpot_s
    assert "calibrated 2026-01" in own.source


def test_what_was_not_measured_stays_with_the_datasheet() -> None:
    found = fit_run(measured(("gemm", "gemv")))
    assert found.prefill_attention is None
    assert found.decode_attention is None
    assert found.all_reduces == ()
    assert found.kernel_s.source == "assumed"
    with pytest.raises(InvalidInputError, match="measure the operations gemm and gemv"):
        fit_run(measured(("attention_decode",)))


def test_a_gpu_that_the_catalogue_lacks_takes_its_peaks_from_the_run() -> None:
    unknown = H100.replace(name="NVIDIA Q900")
    run = measured(("gemm", "gemv", "attention_decode"), unknown)
    with pytest.raises(UnknownNameError, match=r"NVIDIA Q900.*--gpu NAME"):
        fit_run(run)
    found = fit_run(run, "Q900")
    assert found.gpu == "Q900"
    assert set(found.compute_flops) == {"bf16"}
    assert found.compute_flops["bf16"].value == pytest.approx(600e12, rel=0.15)
    assert found.memory_bytes_per_s.value == pytest.approx(0.79 * PEAK_BYTES_PER_S, rel=0.1)
    # Told that it is a catalogued one, it has that one's datasheet for the rest.
    assert fit_run(run, "h200-sxm-141gb").compute_flops["fp8"].source == "datasheet"


def test_quantising_activations_is_added_to_kernels_that_take_them_quantised() -> None:
    bare = usual_gemm(1400e12, PEAK_BYTES_PER_S, sm_count=132, dtype="fp8", weight_bits=8, activation_bits=8)
    bare = bare.replace(quantise_row_s=0.0, quantise_bytes_per_s=None)
    tasks = tasks_for("cuda", dtypes=("fp8",), operations=("gemm", "gemv"), budget_bytes=20 * GIB)
    points = [
        CalibrationPoint(operation=task.operation, dtype="fp8", shape=task.shape, seconds=seconds_of(task, bare, None))
        for task in tasks
    ]
    run = CalibrationRun(device=H100.replace(dtypes=("bf16", "fp8")), points=tuple(points), elapsed_s=1.0)
    (found,) = fit_run(run).gemms
    load = (3000.0, 6000.0, 6000.0)
    fused = found.replace(quantise_row_s=0.0, quantise_bytes_per_s=None)
    assert float(gemm_seconds(fused, *load)) == pytest.approx(float(gemm_seconds(bare, *load)), rel=0.1)
    assert float(gemm_seconds(found, *load)) > 1.02 * float(gemm_seconds(fused, *load))


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIE-80GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000-SE"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_devices_are_known_by_the_names_that_drivers_give(name: str, gpu: str) -> None:
    assert gpu_of(H100.replace(name=name)) == gpu
    assert gpu in list_gpus()


def test_a_board_of_the_same_name_and_more_memory_is_another() -> None:
    with pytest.raises(UnknownNameError):
        gpu_of(H100.replace(name="NVIDIA GH200 480GB", memory_bytes=144 * GIB))


def serial_s(m: float, n: float, k: float) -> float:
    """A CPU that multiplies at 60 GFLOP/s, then streams at 7 GB/s."""
    return 3e-5 + 2 * m * n * k / 60e9 + (4 * n * k + 4 * m * k + 2 * m * n) / 7e9


def cpu_run() -> CalibrationRun:
    points = []
    tasks = tasks_for("cpu", dtypes=("fp32",), operations=OPERATIONS, budget_bytes=GIB)
    for task in tasks:
        s = task.shape
        if task.operation in ("gemm", "gemv"):
            seconds = serial_s(s["m"], s["n"], s["k"])
        elif task.operation == "norm":
            seconds = 2e-5 + 20 * s["tokens"] * s["hidden"] / 7e9
        elif task.operation == "attention_prefill":
            seconds = 5e-5 + s["batch"] * s["heads"] * s["head_dim"] * 2 * s["tokens"] ** 2 / 20e9
        elif task.operation == "attention_decode":
            seconds = 5e-5 + 8 * s["batch"] * s["kv_heads"] * s["head_dim"] * s["tokens"] / 6e9
        else:
            continue
        points.append(CalibrationPoint(operation=task.operation, dtype="fp32", shape=s, seconds=seconds))
    return CalibrationRun(device=CPU, points=tuple(points), elapsed_s=1.0)


def test_a_cpu_multiplies_and_streams_in_turn() -> None:
    found = fit_run(cpu_run())
    assert found.gpu == "local-cpu"
    (gemm,) = found.gemms
    assert gemm.engine == "vllm"
    assert gemm.sustained_flops == pytest.approx(60e9, rel=0.03)
    assert gemm.bytes_per_s == pytest.approx(7e9, rel=0.03)
    # A GEMV multiplies too, in turn.
    assert found.memory_bytes_per_s.value == pytest.approx(4 / (4 / 7e9 + 2 / 60e9), rel=0.02)
    # Where both count: neither the larger of the two alone, nor a norm of them.
    assert float(gemm_seconds(gemm, 20.0, 3000.0, 2000.0)) == pytest.approx(serial_s(20, 3000, 2000), rel=0.02)
    assert found.prefill_attention is not None
    assert found.decode_attention is not None
    shape = {"heads": 12, "kv_heads": 6, "head_dim": 64, "value_head_dim": 64}
    prefill = prefill_attention_seconds(
        found.prefill_attention, sequences=2, tokens=300, context=300, element_bytes=4, kv_element_bytes=4, **shape
    )
    assert float(prefill) == pytest.approx(5e-5 + 2 * 12 * 64 * 2 * 300**2 / 20e9, rel=0.25)
    decode = decode_attention_seconds(found.decode_attention, sequences=3, context=700, kv_element_bytes=4, **shape)
    assert float(decode) == pytest.approx(5e-5 + 8 * 3 * 6 * 64 * 700 / 6e9, rel=0.15)


def test_steps_of_small_decoders_give_what_a_step_and_a_layer_cost() -> None:
    calibration = fit_run(cpu_run())
    truth = get_step_overheads("vllm").replace(step_s=4e-3, layer_s=1e-3, prefill_step_s=2e-3, prefill_layer_s=0.0)
    whole = calibration.replace(step_overheads=(truth,))

    def timed(seconds: float) -> StepTiming:
        return StepTiming(median_s=seconds, fastest_s=seconds, relative_spread=0.0)

    timings = []
    for decoder in SMALL_DECODERS:
        prefill, decode = kernel_seconds(whole, decoder)
        timings.append(DecoderTiming(decoder=decoder, prefill=timed(prefill), decode=timed(decode)))
    found = fit_step_overheads(calibration, timings)
    assert (found.step_s, found.layer_s) == pytest.approx((4e-3, 1e-3), rel=1e-3)
    assert found.prefill_step_s == pytest.approx(2e-3, rel=1e-3)
    with pytest.raises(InvalidInputError, match="different numbers of layers"):
        fit_step_overheads(calibration, timings[:1])

    # The calibration's own go before the catalogue's, in a plan's prediction too.
    decoder = Decoder(hidden_size=512, intermediate_size=1408, layers=8, heads=8, kv_heads=4)
    own = kernel_seconds(calibration.replace(step_overheads=(found,)), decoder)[1]
    usual = kernel_seconds(calibration, decoder)[1]
    assert own - usual == pytest.approx(4e-3 + 8e-3 - get_step_overheads("vllm").step_s, rel=0.02)


# --- tables -----------------------------------------------------------------------------------------------------------


def write_gemms(folder: Path, engines: tuple[str, ...] = ("vllm",)) -> None:
    fit = gpu_truth()[0]
    lines = ["engine,dtype,m,n,k,latency_us"]
    for number, engine in enumerate(engines, 1):
        for m in (1, 8, 64, 512, 4096):
            for n, k in ((1024, 4096), (8192, 1024), (4096, 4096), (16384, 8192)):
                seconds = number * float(gemm_seconds(fit, m, n, k))
                lines.append(f"{engine},bfloat16,{m},{n},{k},{seconds * 1e6:.4f}")
    (folder / "gemm_L40S.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_decode(folder: Path, columns: str = "engine,batch,kv_len,n_heads,n_kv_heads,head_dim,latency_us") -> None:
    fit = gpu_truth()[1][1]
    lines = [columns]
    for batch in (1, 8, 64):
        for context in (128, 1024, 8192):
            for heads, kv_heads in ((32, 8), (16, 16)):
                seconds = decode_attention_seconds(
                    fit, sequences=batch, context=context, heads=heads, kv_heads=kv_heads, head_dim=128,
                    value_head_dim=128,
                )  # fmt: skip
                lines.append(f"vllm,{batch},{context},{heads},{kv_heads},128,{float(seconds) * 1e6:.4f}")
    (folder / "attn_decode_L40S.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_tables_of_gemms_alone_are_a_calibration(tmp_path: Path) -> None:
    write_gemms(tmp_path)
    found = Calibration.fit("L40S", tmp_path)
    assert [fit.dtype for fit in found.gemms] == ["bf16"]
    assert found.compute_flops["bf16"].source == "measured"
    assert found.prefill_attention is None
    assert found.decode_attention is None
    found.save(tmp_path / "l40s.json")
    assert Calibration.load(tmp_path / "l40s.json").sha256 == found.sha256


def test_tables_of_attention_alone_are_a_calibration(tmp_path: Path) -> None:
    write_decode(tmp_path)
    found = Calibration.fit("L40S", tmp_path)
    assert found.gemms == ()
    assert found.prefill_attention is None
    assert found.decode_attention is not None
    assert found.compute_flops["bf16"].source == "datasheet"
    assert found.engine is None


def test_the_engine_that_was_asked_for_is_taken(tmp_path: Path) -> None:
    write_gemms(tmp_path, ("vllm", "sglang"))
    usual, other = Calibration.fit("L40S", tmp_path), Calibration.fit("L40S", tmp_path, engine="sglang")
    assert (usual.engine, other.engine) == ("vllm", "sglang")
    assert other.compute_flops["bf16"].value < 0.7 * usual.compute_flops["bf16"].value
    with pytest.raises(InvalidInputError, match=r"engine 'trtllm'.*vllm, sglang"):
        Calibration.fit("L40S", tmp_path, engine="trtllm")


def test_a_table_without_a_column_is_refused_by_name(tmp_path: Path) -> None:
    write_decode(tmp_path, "engine,batch,length,n_heads,n_kv_heads,head_dim,latency_us")
    with pytest.raises(InvalidInputError, match=r"attn_decode_L40S\.csv: no column kv_len"):
        Calibration.fit("L40S", tmp_path)
    with pytest.raises(InvalidInputError, match="no table of L4"):
        Calibration.fit("L4", tmp_path)
    with pytest.raises(UnknownNameError):
        Calibration.fit("Q900", tmp_path)


def test_shipped_calibrations_keep_their_digests_without_the_field_that_cpus_need() -> None:
    shipped = get_calibration("H100")
    assert shipped.gemms
    assert "overlap_power" not in shipped.gemms[0].model_dump()
    own = shipped.gemms[0].replace(overlap_power=1.0)
    assert own.model_dump()["overlap_power"] == 1.0
    assert GemmFit.from_json(own.model_dump_json()) == own
    assert get_gpu("H100").sm_count == own.sm_count
