"""Learn what `hetplan.estimator.gemm` shares over GPUs, and score it on tables that others measured.

Run by hand: ``HETPLAN_DATA=folder python calibration/learn_gemm.py``. The folder holds
``aiconfigurator/gemm_<GPU>.csv``; its README explains them. Prints the constants for ``Shared``, ``DEFAULTS`` and
``QUANTISED_DEFAULTS``, then the error of each table on its rows that are not among the 50 calibration points:

- shipped: with the constants in the code;
- left out: shared constants and defaults learnt without that GPU, its own points kept;
- datasheet: no points of its own, defaults learnt without it;
- roofline: the two rates of derive_scalars.py (large GEMMs, GEMVs beyond the L2), the larger of both times.

L40S timed small weights out of its L2 (96 MiB), so weights below 32 MB are left out there. Rows that beat the
datasheet's bandwidth came from the L2 as well; "all rows" keeps them, the other columns do not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hetplan.calibration import gemm as calibration
from hetplan.calibration.gemm import Default, choose_gemm_points, datasheet_gemm, fit_gemm
from hetplan.estimator.gemm import SHARED, GemmFit, Shared, gemm_seconds, parametric_seconds

Floats = NDArray[np.float64]

# NVIDIA datasheets: dense 16-bit and fp8 FLOP/s, memory bytes/s, SMs.
SHEETS = {
    "A100-SXM-80GB": ({"bfloat16": 312e12}, 2039e9, 108),
    "H100-SXM": ({"bfloat16": 989.4e12, "fp8": 1978.9e12}, 3352e9, 132),
    "L40S": ({"bfloat16": 362.05e12, "fp8": 733e12}, 864e9, 142),
}
COLD_BYTES = {"L40S": 32e6}
LEARNING_ROWS = 800  # of each table
SHARED_PULL = 0.5  # weight of a shared constant's log ratio to the shipped one: a tiebreak
SPREAD_FLOOR = 0.1  # three GPUs do not show less
BEYOND_L2_BYTES = 128 * 2**20


class Table(NamedTuple):
    """One engine's table for one number format."""

    gpu: str
    engine: str
    dtype: str
    shapes: Floats
    latency_s: Floats

    @property
    def bits(self) -> int:
        """Width of weights and activations."""
        return {"bfloat16": 16, "fp8": 8}[self.dtype]

    def real(self) -> NDArray[np.bool_]:
        """Rows that can have come from memory."""
        return calibration.served_from_memory(self.shapes, self.latency_s, SHEETS[self.gpu][1], self.bits, self.bits)


def read(folder: Path) -> list[Table]:
    """Every engine and number format."""
    tables = []
    for gpu in SHEETS:
        frame = pd.read_csv(folder / f"gemm_{gpu}.csv")
        frame = frame[frame.n * frame.k * 2 >= COLD_BYTES.get(gpu, 0)]
        for (engine, dtype), rows in frame.groupby(["engine", "dtype"]):
            shapes = rows[["m", "n", "k"]].to_numpy(float)
            tables.append(Table(gpu, str(engine), str(dtype), shapes, rows.latency_us.to_numpy(float) * 1e-6))
    return tables


def sheet(table: Table) -> dict[str, float | int | str]:
    """Arguments of `fit_gemm` and `datasheet_gemm`."""
    flops, bytes_per_s, sm_count = SHEETS[table.gpu]
    return {
        "peak_flops": flops[table.dtype], "peak_bytes_per_s": bytes_per_s, "sm_count": sm_count, "dtype": table.dtype,
        "engine": table.engine, "weight_bits": table.bits, "activation_bits": table.bits,
    }  # fmt: skip


def learn(
    tables: Sequence[Table], start: dict[str, Default], fixed: Shared | None
) -> tuple[Shared, dict[str, Default]]:
    """Each table's own parameters and the shared ones in a single fit; medians and spreads of the former."""
    names = list(start)
    centre = np.array([calibration._to_free(name, start[name].value) for name in names])
    spread = np.array([start[name].spread for name in names])
    shared_centre = np.log(SHARED)
    samples = []
    for table in tables:
        rows = np.random.default_rng(0).permutation(np.flatnonzero(table.real()))[:LEARNING_ROWS]
        samples.append((datasheet_gemm(**sheet(table), defaults=start), table.shapes[rows].T, table.latency_s[rows]))  # type: ignore[arg-type]

    def misfit(index: int, free: Floats, shared: Shared) -> Floats:
        base, (m, n, k), latency_s = samples[index]
        values = {name: calibration._from_free(name, value) for name, value in zip(names, free, strict=True)}
        flops, bytes_per_s, _ = SHEETS[tables[index].gpu]
        fit = base.model_copy(update=calibration._fields(values, flops[tables[index].dtype], bytes_per_s))
        return np.log(parametric_seconds(fit, m, n, k, shared=shared) / latency_s)

    def residuals(free: Floats) -> Floats:
        own = free[: centre.size * len(tables)].reshape(len(tables), -1)
        shared = fixed or Shared(*np.exp(free[own.size :]))
        parts = [misfit(index, row, shared) for index, row in enumerate(own)]
        drawn = ((own - centre) / spread * calibration.LOSS_SCALE).ravel()
        return np.concatenate(
            [*parts, drawn, (free[own.size :] - shared_centre) * SHARED_PULL if fixed is None else []]
        )

    first = np.concatenate([np.tile(centre, len(tables)), shared_centre if fixed is None else []])
    best = least_squares(residuals, first, bounds=(first - 3, first + 3), loss="soft_l1", f_scale=0.1, max_nfev=40).x
    own = best[: centre.size * len(tables)].reshape(len(tables), -1)
    # One table shows no spread, and two little.
    found = np.maximum(own.std(axis=0), SPREAD_FLOOR) if len(tables) > 2 else spread
    values = [calibration._from_free(name, value) for name, value in zip(names, np.median(own, axis=0), strict=True)]
    defaults = {name: Default(value, float(s)) for name, value, s in zip(names, values, found, strict=True)}
    return fixed or Shared(*np.exp(best[own.size :])), defaults


def roofline(table: Table) -> Floats:
    """The larger of FLOPs and bytes over one rate each."""
    m, n, k = table.shapes.T
    flops, moved = 2 * m * n * k, (n * k + m * k) * table.bits / 8 + m * n * 2
    large, gemv = (m >= 1024) & (n >= 4096) & (k >= 4096), (m == 1) & (n * k * table.bits / 8 > BEYOND_L2_BYTES)
    rates = np.median((flops / table.latency_s)[large]), np.median((moved / table.latency_s)[gemv])
    return np.maximum(flops / rates[0], moved / rates[1])


def error(predicted: Floats, table: Table, rows: NDArray[np.bool_]) -> tuple[float, float, float]:
    """Mean and median absolute error, and median signed error, in percent."""
    off = 100 * (predicted[rows] / table.latency_s[rows] - 1)
    return float(np.abs(off).mean()), float(np.median(np.abs(off))), float(np.median(off))


def predict(fit: GemmFit, table: Table) -> Floats:
    """Seconds of every row."""
    return gemm_seconds(fit, *table.shapes.T)


def main() -> None:
    """Learn, print, score."""
    data = Path(os.environ.get("HETPLAN_DATA") or sys.exit("set HETPLAN_DATA to the data folder"))
    tables = read(data / "aiconfigurator")
    half, eight = ([t for t in tables if t.bits == bits] for bits in (16, 8))

    def learn_without(gpu: str) -> tuple[Shared, dict[str, Default], dict[str, Default]]:
        shared, defaults = learn([t for t in half if t.gpu != gpu], calibration.DEFAULTS, None)
        _, quantised = learn([t for t in eight if t.gpu != gpu], calibration.QUANTISED_DEFAULTS, shared)
        return shared, defaults, quantised

    shared, *both = learn_without("")
    print(shared)
    for defaults in both:
        print(*(f"    {name}: {d.value:.3g}, spread {d.spread:.2f}" for name, d in defaults.items()), sep="\n")
    print(
        "\nMAPE / median / bias, % of rows that are not points:  shipped | left out | datasheet | roofline | all rows"
    )
    held_out = {gpu: learn_without(gpu) for gpu in SHEETS}
    for table in tables:
        points = choose_gemm_points(table.shapes)
        others = np.ones(len(table.latency_s), bool)
        others[points] = False
        rows = others & table.real()
        measured = (*table.shapes[points].T, table.latency_s[points])
        shipped = predict(fit_gemm(*measured, **sheet(table)), table)  # type: ignore[arg-type]
        without, *known = held_out[table.gpu]
        known_defaults = known[0 if table.bits == 16 else 1]
        out = fit_gemm(*measured, **sheet(table), defaults=known_defaults, shared=without)  # type: ignore[arg-type]
        left_out = parametric_seconds(out, *table.shapes.T, shared=without)
        left_out = left_out * predict(out, table) / parametric_seconds(out, *table.shapes.T)
        bare = parametric_seconds(
            datasheet_gemm(**sheet(table), defaults=known_defaults),  # type: ignore[arg-type]
            *table.shapes.T,
            shared=without,
        )
        columns = [error(p, table, rows) for p in (shipped, left_out, bare, roofline(table))]
        columns.append(error(shipped, table, others))
        cells = " | ".join("{:5.1f} {:5.1f} {:+5.1f}".format(*column) for column in columns)
        print(f"{table.gpu:14} {table.engine:7} {table.dtype:9} {rows.sum():5} rows  {cells}")


if __name__ == "__main__":
    main()
