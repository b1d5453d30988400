"""Fit hetplan/catalog/data/{links,all_reduce}.csv: the all-reduce of each kind of link and group size.

Run by hand: ``HETPLAN_DATA=folder python calibration/derive_links.py``. The folder holds
``aiconfigurator/comm_<GPU>.csv`` and ``vidur/comm.csv``.

The model is a ring, ``2 (P - 1) (latency_s + N / (P bytes_per_s))``: the latency comes from messages up
to 8 KiB, the bandwidth from 4 to 128 MiB. Beside it stand the curves of the switched links, which are alike on every
host: the faster of vLLM's custom kernels and NCCL, at eight sizes.
"""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from hetplan.calibration.fit import all_reduce_curves
from hetplan.calibration.tables import read_kernel_tables

LINKS_CSV = Path(__file__).resolve().parent.parent / "hetplan" / "catalog" / "data" / "links.csv"
CURVES_CSV = LINKS_CSV.with_name("all_reduce.csv")
GROUPS = (2, 4, 8)
SMALL_BYTES = 8 * 2**10
LARGE_BYTES = (4 * 2**20, 128 * 2**20)
Point = tuple[float, float]  # bytes, seconds


def fit(points: Iterable[Point], gpus: int, latency_s: float | None = None) -> Point:
    """Latency (unless given) and bandwidth of a ring over ``gpus``."""
    points = list(points)
    steps = 2 * (gpus - 1)
    if latency_s is None:
        latency_s = median(seconds for size, seconds in points if size <= SMALL_BYTES) / steps
    large = [(size, seconds) for size, seconds in points if LARGE_BYTES[0] <= size <= LARGE_BYTES[1]]
    return latency_s, median(steps * size / gpus / (seconds - steps * latency_s) for size, seconds in large)


def nccl(data: Path, gpu: str, gpus: int) -> list[Point]:
    """NCCL all-reduce rows of one 8-GPU box."""
    with (data / "aiconfigurator" / f"comm_{gpu}.csv").open(newline="", encoding="utf-8") as file:
        return [
            (float(row["bytes"]), float(row["latency_us"]) * 1e-6)
            for row in csv.DictReader(file)
            if row["op_name"] == "all_reduce" and row["lib"].startswith("nccl") and int(row["num_gpus"]) == gpus
        ]


def pairwise(data: Path, gpus: int) -> list[Point]:
    """All-reduce rows of an A100 PCIe box whose cards are bridged in pairs."""
    with (data / "vidur" / "comm.csv").open(newline="", encoding="utf-8") as file:
        return [
            (float(row["bytes"]), float(row["latency_ms"]) * 1e-3)
            for row in csv.DictReader(file)
            if row["op"] == "all_reduce"
            and row["fabric"] == "a100_pairwise_nvlink"
            and int(row["num_workers"]) == int(row["devices_per_node"]) == gpus
        ]


def build(data: Path) -> str:
    """The text of links.csv."""
    rows: list[tuple[str, int, float, float, str, str]] = []

    def add(link: str, gpus: int, fitted: Point, kind: str, source: str, digits: int = 3) -> None:
        latency_s, rate = (float(f"{number:.{digits}g}") for number in fitted)
        rows.append((link, gpus, latency_s, rate, kind, source))

    table = "nccl-2.27.3 all_reduce, aiconfigurator-core 0.12.0 comm_{}.csv"
    pcie = {p: fit(nccl(data, "L40S", p), p) for p in GROUPS}
    nvlink3 = {p: fit(nccl(data, "A100-SXM-80GB", p), p) for p in GROUPS}
    nvlink4 = {p: fit(nccl(data, "H100-SXM", p), p) for p in GROUPS}
    bridge = {p: fit(pairwise(data, p), p, nvlink3[p][0]) for p in (2, 4)}
    bridge_source = (
        "bandwidth: vidur network profile of A100 PCIe cards bridged in pairs (its small messages are too noisy); "
        "latency as nvlink3"
    )
    # Two digits: one box stands for all PCIe hosts, and the fit is no better than that.
    other_host = "measured on another PCIe host: one 8-GPU L40S box without peer-to-peer beyond pairs ({})"
    for p in GROUPS:
        add("pcie", p, pcie[p], "measured", other_host.format(table.format("L40S")), digits=2)
    for p in GROUPS:
        # Half the lanes' rate halves a pair; beyond a pair the host is the limit, not the lanes.
        slower = (pcie[p][0], pcie[p][1] / 2) if p == 2 else pcie[p]
        source = "datasheet-scaled: pair at half the rate of pcie (Gen3 to Gen4); larger groups as pcie"
        add("pcie3", p, slower, "scaled", source, digits=2)
    # One NVLink brick of six joins a pair on the V100 mesh (some pairs have two).
    for p in GROUPS:
        scale = 50 / 600 if p == 2 else 300 / 600
        source = "datasheet-scaled from nvlink3: {} of 600 GB/s; the mesh has one or two bricks per pair"
        add("nvlink2", p, (nvlink3[p][0], nvlink3[p][1] * scale), "scaled", source.format(50 if p == 2 else 300))
    for p in GROUPS:
        add("nvlink3", p, nvlink3[p], "measured", table.format("A100-SXM-80GB"))
    for p in (2, 4):
        add("nvlink3_bridge", p, bridge[p], "measured", bridge_source)
    for p in GROUPS:
        add("nvlink4", p, nvlink4[p], "measured", table.format("H100-SXM"))
    add("nvlink4_bridge", 2, bridge[2], "scaled", "datasheet-scaled from nvlink3_bridge: 600 of 600 GB/s")
    for p in GROUPS:
        source = "datasheet-scaled from nvlink4: 1800 of 900 GB/s"
        add("nvlink5", p, (nvlink4[p][0], nvlink4[p][1] * 2), "scaled", source)
    for p in GROUPS:
        source = "datasheet-scaled from nvlink4: 896 of 900 GB/s; Infinity Fabric itself was not measured"
        add("infinity_fabric", p, (nvlink4[p][0], nvlink4[p][1] * 896 / 900), "scaled", source)

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["link", "gpus", "latency_s", "bytes_per_s", "kind", "source"])
    writer.writerows((link, p, f"{a:.3g}", f"{b:.3g}", kind, source) for link, p, a, b, kind, source in rows)
    return out.getvalue()


def build_curves(data: Path) -> str:
    """The text of all_reduce.csv."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["link", "gpus", "library", "bytes", "seconds", "source"])
    for link, gpu in (("nvlink3", "A100-SXM4-80GB"), ("nvlink4", "H100-SXM5-80GB")):
        tables = read_kernel_tables(gpu, data / "aiconfigurator")
        source = f"aiconfigurator-core 0.12.0 {tables.names[-1]}"
        for curve in all_reduce_curves(tables.frames["comm"], source):
            for size, seconds in zip(curve.bytes, curve.seconds, strict=True):
                writer.writerow([link, curve.tensor_parallel, curve.library, f"{size:g}", f"{seconds:.4g}", source])
    return out.getvalue()


def main() -> None:
    """Run the script."""
    data = Path(os.environ.get("HETPLAN_DATA") or sys.exit("set HETPLAN_DATA to the data folder"))
    content = build(data)
    LINKS_CSV.write_text(content, encoding="utf-8")
    print(content, end="")
    CURVES_CSV.write_text(build_curves(data), encoding="utf-8")


if __name__ == "__main__":
    main()
