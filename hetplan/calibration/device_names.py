"""Which catalogued GPU a device is, by the name that torch and its driver give it."""

from __future__ import annotations

import re

from hetplan.calibration.raw_run import DeviceFacts
from hetplan.catalog.local import LOCAL_GPU
from hetplan.catalog.tables import list_gpus
from hetplan.errors import UnknownNameError
from hetplan.units import GIB

# Pattern of the whole device name, without "NVIDIA" or "AMD Instinct" -> catalogue name. The names are those of
# nvidia-smi and rocm-smi. A name without its memory is told by the memory.
_NAMES: tuple[tuple[str, str], ...] = (
    (r"(Tesla )?T4", "T4"),
    (r"(Tesla )?V100-SXM[23]-16GB", "V100-SXM2-16GB"),
    (r"(Tesla )?V100-SXM[23]-32GB", "V100-SXM2-32GB"),
    (r"A10", "A10"),
    (r"A10G", "A10G"),
    (r"L4", "L4"),
    (r"L40", "L40"),
    (r"L40S", "L40S"),
    (r"(GeForce )?RTX 4090", "RTX4090"),
    (r"RTX A6000", "RTXA6000"),
    (r"A40", "A40"),
    (r"RTX 6000 Ada Generation", "RTX6000Ada"),
    (r"A100-PCIE-40GB", "A100-PCIE-40GB"),
    (r"A100-SXM4-40GB", "A100-SXM4-40GB"),
    (r"A100(-PCIE-80GB| 80GB PCIe)", "A100-PCIE-80GB"),
    (r"A100-SXM4-80GB", "A100-SXM4-80GB"),
    (r"H100 PCIe", "H100-PCIE-80GB"),
    (r"H100 80GB HBM3", "H100-SXM5-80GB"),
    (r"H100 NVL", "H100-NVL-94GB"),
    (r"H200", "H200-SXM-141GB"),
    (r"GH200 (96|480)GB", "GH200-96GB"),
    (r"B200", "B200-SXM-180GB"),
    (r"RTX PRO 6000 Blackwell (Max-Q )?(Server|Data Center) Edition", "RTXPRO6000-SE"),
    (r"RTX PRO 6000 Blackwell Workstation Edition", "RTXPRO6000-WS"),
    (r"MI250X?( / MI250X?)?", "MI250"),
    (r"MI300X( VF| OAM)?", "MI300X"),
)
_MAKERS = re.compile(r"^(NVIDIA|AMD)\s+(Instinct\s+|Radeon\s+)?", re.IGNORECASE)
# GH200 480GB names the host's memory; the 144 GB board has the same name, and other rates.
_GH200_96_BYTES = 100 * GIB


def gpu_of(device: DeviceFacts) -> str:
    """The catalogue's name of a measured device; a CPU is ``local-cpu``.

    Raises
    ------
    UnknownNameError
        If the catalogue does not hold it.

    Examples
    --------
    >>> facts = DeviceFacts(kind="cuda", name="NVIDIA H100 80GB HBM3", engine="torch 2.13", dtypes=("bf16",),
    ...                     memory_bytes=80 * 2**30, cache_bytes=50 * 2**20)
    >>> gpu_of(facts)
    'H100-SXM5-80GB'
    """
    if device.kind == "cpu":
        return LOCAL_GPU.name
    name = _MAKERS.sub("", device.name.strip())
    for pattern, gpu in _NAMES:
        if re.fullmatch(pattern, name, re.IGNORECASE) and not (
            gpu == "GH200-96GB" and device.memory_bytes > _GH200_96_BYTES
        ):
            return gpu
    raise UnknownNameError("device", device.name, list_gpus(), "Say which GPU it is with gpu= (--gpu NAME).")
