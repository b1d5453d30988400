"""Kernel tables scored off the points that our fits were made from.

Each table is fitted on the points that the calibration's own rules choose, and scored on every other row. Beside it
stand the paper's roofline over its scalars, medians over this table's own large GEMMs and GEMVs (all of them, those
that are scored too), and the same roofline over the datasheet's peaks. Collectives have no datasheet prediction: the
catalogue does not hold the vendors' link rates. Kernels have no band.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetplan.calibration.attention import (
    LARGE_KV_BYTES,
    AttentionTable,
    choose_decode_points,
    choose_prefill_points,
    fit_decode_attention,
    fit_prefill_attention,
)
from hetplan.calibration.collectives import choose_all_reduce_points, fit_all_reduce
from hetplan.calibration.fit import fit_gemm_rows
from hetplan.calibration.gemm import served_from_memory
from hetplan.calibration.tables import DTYPE_LABELS, MICROSECOND, KernelTables, attention_table
from hetplan.catalog.hardware import GpuSpec, Link
from hetplan.catalog.tables import get_calibration, get_gpu
from hetplan.estimator.collectives import curve_seconds
from hetplan.estimator.communication import all_reduce_s
from hetplan.estimator.gemm import gemm_seconds
from hetplan.estimator.rates import compute_rate
from hetplan.scoring.score import Scored, count_left_out
from hetplan.units import BITS_PER_BYTE, MIB

if TYPE_CHECKING:
    from pandas import DataFrame

FloatArray = NDArray[np.float64]
Mask = NDArray[np.bool_]
LeftOut = dict[str, dict[str, int]]
Part = tuple[list[Scored], LeftOut]

CALIBRATION_POINT = "calibration points"
# What the paper's scalars are medians of: GEMMs that no GPU here is too large for, and GEMVs beyond every L2.
LARGE_TOKENS, LARGE_SIDE = 1024, 4096
BEYOND_L2_BYTES = 128 * MIB
# Tables that were timed over and over with the same 16-bit weights: smaller ones stayed in the L2, which serving's
# layer after layer never does.
TIMED_IN_L2_BYTES = {"L40S": 32e6}
# The paper's latency is that of small messages, its bandwidth that of messages of a step of prompts.
LATENCY_BYTES, BANDWIDTH_BYTES = 8192, (4e6, 1.4e8)
NO_DATASHEET = float("nan")


class Rates(NamedTuple):
    """A roofline."""

    flops: float
    bytes_per_s: float

    def seconds(self, flops: FloatArray, moved_bytes: FloatArray) -> FloatArray:
        """Eq. 1 of ShuntServe: the slower of computing and scanning."""
        return np.maximum(flops / self.flops, moved_bytes / self.bytes_per_s)


class Predicted(NamedTuple):
    """Rows of one table with their three predictions, (N,) seconds each, and how each is called."""

    measured: FloatArray
    datasheet: FloatArray
    paper: FloatArray
    ours: FloatArray
    label: Callable[[int], str]
    source: str


def score_kernels(tables: KernelTables, kind: str, name: str) -> Part:
    """Score one kind of kernels of a GPU.

    Parameters
    ----------
    tables : KernelTables
        All tables of the GPU: attention takes the paper's scalars from the GEMMs.
    kind : str
        "gemm", "attn_prefill", "attn_decode" or "comm".
    name : str
        What labels call the table.

    Returns
    -------
    scored : list of Scored
    left_out : dict of str to dict of str to int
        Rows that were not scored, by group and reason.
    """
    spec, frame = get_gpu(tables.gpu), tables.frames[kind]
    left_out: LeftOut = {}
    if kind == "gemm":
        found = list(_gemms(spec, frame, name, left_out))
    elif kind == "comm":
        found = list(_all_reduces(spec, frame, name, left_out))
    else:
        phase = kind.removeprefix("attn_")
        found = list(_attention(spec, tables, phase, name, left_out))
    return found, left_out


def _scored(group: str, rows: Predicted, kept: Mask) -> Iterator[Scored]:
    nothing = float("nan")
    for at in np.flatnonzero(kept).tolist():
        columns = (rows.measured, rows.datasheet, rows.paper, rows.ours)
        measured, datasheet, paper, ours = (float(column[at]) for column in columns)
        yield Scored(group, rows.label(at), measured, datasheet, paper, ours, nothing, nothing, rows.source)


# --- GEMMs ------------------------------------------------------------------------------------------------------------


def _gemms(spec: GpuSpec, frame: DataFrame, name: str, left_out: LeftOut) -> Iterator[Scored]:
    for (engine, label), rows in frame.groupby(["engine", "dtype"], sort=True):
        group = f"GEMM {label} {spec.name} {engine}"
        if label not in DTYPE_LABELS or spec.runs_as(DTYPE_LABELS[label].dtype) != DTYPE_LABELS[label].dtype:
            count_left_out(left_out, group, f"no model of {label} on {spec.name}", len(rows))
            continue
        # Repeated shapes count once, at their median: the rule chooses among shapes.
        mine = rows.groupby(["m", "n", "k"], as_index=False)["latency_us"].median()
        least = TIMED_IN_L2_BYTES.get(spec.name, 0.0)
        cold = mine[2 * mine["n"] * mine["k"] >= least]
        if least:
            in_l2 = f"timed with the weight in L2: under {least / 1e6:g} MB"
            count_left_out(left_out, group, in_l2, len(mine) - len(cold))
        predicted, chosen, shapes = _predicted_gemms(spec, cold, str(label), str(engine), name)
        count_left_out(left_out, group, CALIBRATION_POINT, len(chosen))
        kept = np.ones(len(cold), dtype=bool)
        kept[chosen] = False
        bits = DTYPE_LABELS[label]
        real = served_from_memory(
            shapes, predicted.measured, spec.bandwidth_bytes_per_s, bits.weight_bits, bits.activation_bits
        )
        faster = int((kept & ~real).sum())
        if not faster:
            yield from _scored(group, predicted, kept)
            continue
        reasons = left_out.pop(group)
        everything = f"{group}, all rows from {least / 1e6:g} MB" if least else f"{group}, all rows"
        served = f"{group}, rows that memory could have served"
        left_out[everything] = reasons
        left_out[served] = reasons | {"faster than the datasheet's memory bandwidth allows": faster}
        yield from _scored(everything, predicted, kept)
        yield from _scored(served, predicted, kept & real)


def _predicted_gemms(
    spec: GpuSpec, rows: DataFrame, label: str, engine: str, name: str
) -> tuple[Predicted, NDArray[np.intp], FloatArray]:
    fit, chosen = fit_gemm_rows(spec, rows, label, engine, name)
    shapes = rows[["m", "n", "k"]].to_numpy(dtype=np.float64)
    m, n, k = shapes.T
    measured = rows["latency_us"].to_numpy(dtype=np.float64) * MICROSECOND
    bits = DTYPE_LABELS[label]
    flops = 2 * m * n * k
    # Table 2 counts the input and the weights.
    read = (n * k * bits.weight_bits + m * k * bits.activation_bits) / BITS_PER_BYTE
    peaks = Rates(spec.dense_flops[spec.runs_as(bits.dtype)], spec.bandwidth_bytes_per_s)
    scalars = _median_rates(rows, bits.weight_bits)
    predicted = Predicted(
        measured=measured,
        datasheet=peaks.seconds(flops, read),
        paper=scalars.seconds(flops, read),
        ours=gemm_seconds(fit, m, n, k),
        label=lambda at: f"{name} {engine} {label} m={m[at]:g} n={n[at]:g} k={k[at]:g}",
        source=fit.source,
    )
    return predicted, chosen, shapes


def _median_rates(rows: DataFrame, weight_bits: float) -> Rates:
    """The paper's scalars of some GEMMs; NaN where none is large enough."""
    m, n, k = (rows[size].to_numpy(dtype=np.float64) for size in "mnk")
    seconds = rows["latency_us"].to_numpy(dtype=np.float64) * MICROSECOND
    weight_bytes = n * k * weight_bits / BITS_PER_BYTE
    large = (m >= LARGE_TOKENS) & (n >= LARGE_SIDE) & (k >= LARGE_SIDE)
    streamed = (m == 1) & (weight_bytes >= BEYOND_L2_BYTES)
    flops, moved = (2 * m * n * k / seconds)[large], (weight_bytes / seconds)[streamed]
    return Rates(
        float(np.median(flops)) if len(flops) else float("nan"), float(np.median(moved)) if len(moved) else float("nan")
    )


# --- attention --------------------------------------------------------------------------------------------------------


def _attention(spec: GpuSpec, tables: KernelTables, phase: str, name: str, left_out: LeftOut) -> Iterator[Scored]:
    flops = max(spec.dense_flops.get(dtype, 0.0) for dtype in ("bf16", "fp16"))
    peaks = Rates(flops, spec.bandwidth_bytes_per_s)
    scalars = _sixteen_bit_rates(spec, tables)
    for engine, rows in tables.frames[f"attn_{phase}"].groupby("engine", sort=True):
        table = attention_table(rows, phase)
        group = f"attention {phase} {spec.name} {engine}"
        kept = np.ones(len(table.seconds), dtype=bool)
        if phase == "prefill":
            chosen = choose_prefill_points(table)
            ours = table.prefill_seconds(
                fit_prefill_attention(table.rows(chosen), peak_flops=peaks.flops, peak_bytes_per_s=peaks.bytes_per_s)
            )
        else:
            chosen = choose_decode_points(table)
            ours = table.decode_seconds(
                fit_decode_attention(table.rows(chosen), peak_flops=peaks.flops, peak_bytes_per_s=peaks.bytes_per_s)
            )
            kept = table.kv_bytes > LARGE_KV_BYTES
            small = f"KV of {LARGE_KV_BYTES / 1e6:g} MB at most: hardly any of a step's time"
            count_left_out(left_out, group, small, int((~kept).sum()))
        count_left_out(left_out, group, CALIBRATION_POINT, int(kept[chosen].sum()))
        kept[chosen] = False
        work = _attention_work(table, phase)
        yield from _scored(
            group,
            Predicted(
                measured=table.seconds,
                datasheet=peaks.seconds(*work),
                paper=scalars.seconds(*work),
                ours=ours,
                label=_attention_label(f"{name} {engine}", table),
                source=f"measured: {len(chosen)} points of {name}",
            ),
            kept,
        )


def _attention_label(name: str, table: AttentionTable) -> Callable[[int], str]:
    prefix = np.broadcast_to(table.prefix_tokens, table.seconds.shape)

    def label(at: int) -> str:
        after = f" after {prefix[at]:g}" if prefix[at] else ""
        heads = f"{table.heads[at]:g}/{table.kv_heads[at]:g} heads"
        return f"{name} batch {table.sequences[at]:g} x {table.tokens[at]:g} tokens{after}, {heads}"

    return label


def _attention_work(table: AttentionTable, phase: str) -> tuple[FloatArray, FloatArray]:
    """FLOPs and bytes of Table 2; cached tokens before a prompt's are attended and scanned as its own are."""
    h, h_kv = table.heads * table.head_dim, table.kv_heads * table.head_dim
    batch, context = table.sequences, table.tokens + np.asarray(table.prefix_tokens)
    if phase == "prefill":
        flops, elements = 4 * batch * table.tokens * context * h, batch * table.tokens * h + 2 * batch * context * h_kv
    else:
        flops, elements = 4 * batch * context * h, batch * h + 2 * batch * context * h_kv
    return flops, elements * table.kv_element_bytes


def _sixteen_bit_rates(spec: GpuSpec, tables: KernelTables) -> Rates:
    """The paper's scalars: of the GPU's own 16-bit GEMMs where they were measured, else of its calibration."""
    frame = tables.frames.get("gemm")
    if frame is not None:
        half = frame[frame["dtype"].isin(["bfloat16", "float16"])]
        rates = _median_rates(half, 16)
        if np.isfinite(rates).all():
            return rates
    calibration = get_calibration(spec)
    compute = compute_rate(calibration, spec, spec.runs_as("bf16"))
    return Rates(compute.value, calibration.memory_bytes_per_s.value)


# --- collectives ------------------------------------------------------------------------------------------------------


def _all_reduces(spec: GpuSpec, frame: DataFrame, name: str, left_out: LeftOut) -> Iterator[Scored]:
    for library, rows in frame.groupby("lib", sort=True):
        group = f"all-reduce {spec.name} {library}"
        for operation, others in rows[rows["op_name"] != "all_reduce"].groupby("op_name"):
            count_left_out(left_out, group, f"{operation}: only all-reduce is fitted", len(others))
        for _, mine in rows[rows["op_name"] == "all_reduce"].groupby("num_gpus"):
            degree = int(mine["num_gpus"].iloc[0])
            once = mine.groupby("bytes", as_index=False)["latency_us"].median()
            size = once["bytes"].to_numpy(dtype=np.float64)
            seconds = once["latency_us"].to_numpy(dtype=np.float64) * MICROSECOND
            chosen = choose_all_reduce_points(size)
            curve = fit_all_reduce(
                size, seconds, host=None, tensor_parallel=degree, library=str(library), source="measured",
                reference=name,
            )  # fmt: skip
            kept = np.ones(len(size), dtype=bool)
            kept[chosen] = False
            count_left_out(left_out, group, CALIBRATION_POINT, len(chosen))
            rows_of = Predicted(
                measured=seconds,
                datasheet=np.full_like(size, NO_DATASHEET),
                paper=all_reduce_s(size, _alpha_beta(size, seconds, degree), degree),
                ours=curve_seconds(curve, size),
                label=_message_label(f"{name} {library} TP{degree}", size),
                source=f"measured: {len(chosen)} points of {name}",
            )
            yield from _scored(group, rows_of, kept)


def _message_label(name: str, size: FloatArray) -> Callable[[int], str]:
    return lambda at: f"{name} {size[at]:g} bytes"


def _alpha_beta(size: FloatArray, seconds: FloatArray, degree: int) -> Link:
    """The paper's link: latency off the small messages, bandwidth off the large ones."""
    steps = 2 * (degree - 1)
    small, (least, most) = size <= LATENCY_BYTES, BANDWIDTH_BYTES
    large = (size >= least) & (size <= most)
    latency = float(np.median(seconds[small])) if small.any() else float(seconds.min())
    # A table without such messages gives its bandwidth with the largest.
    large = large if large.any() else size == size.max()
    left = np.maximum(seconds[large] - latency, 1e-3 * seconds[large])
    rate = float(np.median(steps * size[large] / degree / left))
    return Link(latency_s=latency / steps, bytes_per_s=rate, source="alpha-beta of the table")
