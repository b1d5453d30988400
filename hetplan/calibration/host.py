"""What is known of the machine without asking a device: processor, memory, caches, kernel drivers."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from hetplan.units import parse_bytes

# Instructions that decide how fast a CPU multiplies, x86 and then ARM, as the kernel calls them.
ISA_FLAGS = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16", "amx_int8",
    "asimdhp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
_CPU = Path("/sys/devices/system/cpu/cpu0/cache")
_DRIVERS = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Processor:
    """A CPU as /proc/cpuinfo describes it."""

    name: str
    cores: int
    isa_flags: tuple[str, ...]


def read_processor(text: str) -> Processor:
    """The processor of a /proc/cpuinfo; its physical cores are counted once however many threads they run.

    >>> read_processor("processor: 0\\nmodel name: Some CPU\\ncore id: 0\\nflags: fpu avx2\\n")
    Processor(name='Some CPU', cores=1, isa_flags=('avx2',))
    """
    entries = [
        dict(re.findall(r"^([^:\n]+?)\s*:[ \t]*(.*?)[ \t]*$", block, re.MULTILINE)) for block in text.split("\n\n")
    ]
    entries = [entry for entry in entries if "processor" in entry]
    first = entries[0] if entries else {}
    name = first.get("model name") or platform.processor() or platform.machine() or "unknown CPU"
    places = {(e.get("physical id", "0"), e["core id"]) for e in entries if "core id" in e}
    flags = set((first.get("flags") or first.get("Features") or "").split())
    return Processor(
        name, len(places) or len(entries) or os.cpu_count() or 1, tuple(f for f in ISA_FLAGS if f in flags)
    )


def processor() -> Processor:
    """The processor of this machine."""
    return read_processor(_text(Path("/proc/cpuinfo")))


def memory_bytes() -> tuple[int, int]:
    """Memory of this machine, and how much of it is free to take: in all, and within this container's limit."""
    lines: list[tuple[str, str]] = re.findall(r"^(\w+):\s+(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
    fields = dict(lines)
    if "MemTotal" not in fields:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES") // 4
    total = 1024 * int(fields["MemTotal"])
    free = 1024 * int(fields.get("MemAvailable", fields.get("MemFree", "0")))
    limit, used = _text(_CGROUP / "memory.max"), _text(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        total, free = min(total, int(limit)), min(free, max(0, int(limit) - int(used)))
    return total, free


def last_level_cache_bytes() -> int:
    """The largest cache that the kernel lists for a core; 32 MiB where it lists none."""
    sizes = [_text(path) for path in _CPU.glob("index*/size")]
    return max([parse_bytes(f"{size}iB") for size in sizes if re.fullmatch(r"\d+[KMG]", size)], default=32 * 2**20)


def gpu_driver() -> str | None:
    """Version of the kernel's NVIDIA or AMD driver, where it is a module with one."""
    return next((version for version in map(_text, _DRIVERS) if version), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
