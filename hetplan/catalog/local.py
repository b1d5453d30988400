"""The machine at hand as an instance type: plans for it start real engines on this CPU, for trials and tests.

Its rates are round guesses at one slow core per "GPU", so that plans come out valid, not fast.
"""

from __future__ import annotations

from hetplan.catalog.hardware import GpuSpec, InstanceType, Link
from hetplan.units import GB, GIB, GIGA

PROVIDER = "local"
NAME = "local-cpu"
_SOURCE = "a guess at one core of an ordinary machine; calibrate it for predictions"

LOCAL_GPU = GpuSpec(
    name=NAME,
    vendor="any",
    memory_bytes=5 * GIB,
    bandwidth_bytes_per_s=5.0 * GB,
    dense_flops={"fp32": 50.0 * GIGA, "bf16": 25.0 * GIGA},
    native_dtypes=("fp32", "bf16"),
    source=_SOURCE,
)

LOCAL_MACHINE = InstanceType(
    name=NAME,
    provider=PROVIDER,
    gpu=LOCAL_GPU,
    gpu_count=2,
    intra_node_links={2: Link(latency_s=50e-6, bytes_per_s=1.0 * GB, source=_SOURCE)},
    inter_node_link=Link(latency_s=50e-6, bytes_per_s=1.0 * GB, source=_SOURCE),
    source=_SOURCE,
)
