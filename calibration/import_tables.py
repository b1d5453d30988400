"""Rewrite hetplan/catalog/data/{gpus,instances,offers}.csv from the collected tables.

Run by hand: ``HETPLAN_DATA=folder python calibration/import_tables.py``. The folder holds
``instances/{gpus,instances,offers}.csv``; its README explains their columns.
"""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

CATALOG = Path(__file__).resolve().parent.parent / "hetplan" / "catalog" / "data"
Row = dict[str, str]

# The board's native types in our names; tf32 and fp64 are not types a served model is stored in.
DTYPES = {name: name for name in ("fp32", "fp16", "bf16", "fp8", "int8", "fp4")} | {"fp8(fnuz)": "fp8"}
DROPPED_DTYPES = {"tf32", "fp64"}

# The link class of links.csv, by the board's fastest link; a machine's own link may be slower.
GPU_LINKS = {
    "PCIe Gen3": "pcie3",
    "PCIe Gen4": "pcie",
    "PCIe Gen5": "pcie",
    "PCIe Gen4 (peer-to-peer disabled by driver)": "pcie",
    # A bridge is an option that a machine may lack: without a machine, count on PCIe.
    "NVLink3 bridge (pairs) or PCIe Gen4": "pcie",
    "NVLink4 bridge (pairs) or PCIe Gen5": "pcie",
    "NVLink4 bridge (pairs)": "pcie",
    "NVLink2": "nvlink2",
    "NVLink3 + NVSwitch": "nvlink3",
    "NVLink4 + NVSwitch": "nvlink4",
    "NVLink-C2C to CPU": "nvlink4",
    "NVLink5 + NVSwitch": "nvlink5",
    "Infinity Fabric": "infinity_fabric",
    "Infinity Fabric (full mesh of 8)": "infinity_fabric",
}
MACHINE_LINKS = {
    "none (1 GPU)": "",
    "PCIe Gen3": "pcie3",
    "PCIe Gen4": "pcie",
    "PCIe Gen5": "pcie",
    "NVLink2 mesh": "nvlink2",
    "NVLink3 + NVSwitch": "nvlink3",
    "NVLink4 + NVSwitch": "nvlink4",
    "NVLink5 + NVSwitch": "nvlink5",
    "NVLink3 bridge in pairs; PCIe Gen4 between pairs": "nvlink3_bridge",
    "NVLink4 bridge (pair)": "nvlink4_bridge",
}

# Streaming multiprocessors (NVIDIA's whitepapers and product briefs) or compute units (AMD's).
SM_COUNTS = {
    "T4": 40, "V100-SXM2-16GB": 80, "V100-SXM2-32GB": 80, "A10": 72, "A10G": 80, "L4": 58, "L40": 142, "L40S": 142,
    "RTX4090": 128, "RTXA6000": 84, "A40": 84, "RTX6000Ada": 142, "A100-PCIE-40GB": 108, "A100-SXM4-40GB": 108,
    "A100-PCIE-80GB": 108, "A100-SXM4-80GB": 108, "H100-PCIE-80GB": 114, "H100-SXM5-80GB": 132,
    "H100-NVL-94GB": 132, "H200-SXM-141GB": 132, "GH200-96GB": 132, "B200-SXM-180GB": 148, "RTXPRO6000-SE": 188,
    "RTXPRO6000-WS": 188, "MI250": 104, "MI300X": 304,
}  # fmt: skip

# The operating system sees one MI250 board as two devices: a row here is one device, half of every figure.
DEVICES_PER_BOARD = {"MI250": 2}
MI250_DEVICE_MIB = 65536


def read(path: Path) -> list[Row]:
    """Rows of one CSV."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def gpu(row: Row) -> Row:
    """One row of gpus.csv."""
    devices = DEVICES_PER_BOARD.get(row["gpu_name"], 1)
    rates = {f"{name}_tflops": row[f"{name}_tflops"] for name in ("fp32", "fp16", "bf16", "fp8")}
    rates["int8_tops"] = row["int8_tops"]
    if devices > 1:
        rates = {name: f"{float(rate) / devices:g}" if rate else "" for name, rate in rates.items()}
    native = [name for name in row["native_dtypes"].split(";") if name not in DROPPED_DTYPES]
    return {
        "name": row["gpu_name"],
        "vendor": row["vendor"],
        "memory_mib": row["memory_mib_driver"] or str({"MI250": MI250_DEVICE_MIB}[row["gpu_name"]]),
        "bandwidth_gb_s": f"{float(row['bandwidth_gb_s']) / devices:g}",
        **rates,
        "native_dtypes": " ".join(DTYPES[name] for name in native),
        "sm_count": str(SM_COUNTS[row["gpu_name"]]),
        "link": GPU_LINKS[row["gpu_link"]],
        "source": row["source"],
        "checked": row["checked"],
        "note": row["note"],
    }


def instance(row: Row) -> Row:
    """One row of instances.csv."""
    return {
        "provider": row["provider"],
        "name": row["instance_type"],
        "gpu": row["gpu_name"],
        "gpu_count": row["gpu_count"],
        "link": MACHINE_LINKS[row["intra_node_link"]],
        "network_gbps": row["network_baseline_gbps"],
        "host_memory_gib": row["host_memory_gib"],
        "source": row["source"],
        "source_date": row["source_date"],
        "checked": row["checked"],
        "note": row["note"].strip(" ;"),
    }


def offer(row: Row) -> Row:
    """One row of offers.csv; a placeholder day of an undated source becomes the window it stands for."""
    dated = row["date_precision"] == "day"
    return {
        "provider": row["provider"],
        "region": row["region"],
        "instance_type": row["instance_type"],
        "market": row["market"],
        "price_usd_per_hour": row["price_usd_per_hour"],
        "observed_on": row["observed_on"] if dated else "",
        "seen_between": "" if dated else row["date_precision"].removeprefix("inferred").strip(),
        "source": row["source"],
        "checked": row["checked"],
        "note": row["note"],
    }


def text(rows: Iterable[Mapping[str, str]]) -> str:
    """CSV text with a header and Unix line ends."""
    rows = list(rows)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def build(data: Path) -> dict[str, str]:
    """The text of each catalogue file, by name."""
    tables = data / "instances"
    instances = [instance(row) for row in read(tables / "instances.csv")]
    known = {(row["provider"], row["name"]) for row in instances}
    offers = [offer(row) for row in read(tables / "offers.csv")]
    return {
        "gpus.csv": text(gpu(row) for row in read(tables / "gpus.csv")),
        "instances.csv": text(instances),
        "offers.csv": text(row for row in offers if (row["provider"], row["instance_type"]) in known),
    }


def main() -> None:
    """Run the script."""
    data = Path(os.environ.get("HETPLAN_DATA") or sys.exit("set HETPLAN_DATA to the data folder"))
    for name, content in build(data).items():
        (CATALOG / name).write_text(content, encoding="utf-8")
        given = len(read(data / "instances" / name))
        kept = len(list(csv.DictReader(io.StringIO(content))))
        print(f"{name}: {kept} rows, {given - kept} dropped", "(no such instance)" if name == "offers.csv" else "")


if __name__ == "__main__":
    main()
