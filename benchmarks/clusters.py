"""The two clusters of the ShuntServe paper and its workload."""

from __future__ import annotations

import hetplan as hp

WORKLOAD = hp.Workload(input_tokens=763, output_tokens=232)

GPUS_24 = {"g6.12xlarge": 3, "g5.12xlarge": 2, "g6e.xlarge": 4}

GPUS_76 = {
    f"{family}.{size}": 1
    for family, sizes in {
        "g4dn": ("xlarge", "12xlarge", "metal"),
        "g5": ("xlarge", "12xlarge", "48xlarge"),
        "g6": ("xlarge", "12xlarge", "48xlarge"),
        "g6e": ("xlarge", "12xlarge", "48xlarge"),
        "p4d": ("24xlarge",),
        "p5": ("48xlarge",),
        "p6-b200": ("48xlarge",),
    }.items()
    for size in sizes
}
