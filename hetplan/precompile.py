"""Compile the searches and the checker once per installation: ``python -m hetplan.precompile``, about a minute.

Without it the first ``optimize`` takes some 20 s longer, the first of a large inventory 15 s more, and the first
``verify`` of a plan whose bound is proven by prices another 40 s.
"""

from __future__ import annotations

import sys
import threading
import time

from hetplan import api
from hetplan.errors import HetplanError
from hetplan.workload.requests import Workload


def main() -> None:
    """A small and a larger problem, solved and checked."""
    began = time.monotonic()
    workload = Workload(input_tokens=763, output_tokens=232)
    small: dict[str, int] = {"g6.12xlarge": 1, "g5.12xlarge": 1}
    # More sets of machines than are enumerated.
    larger: dict[str, int] = {"g6.xlarge": 40, "g5.xlarge": 40}
    plan = api.optimize(model="llama-3.1-8b", cluster=small, workload=workload)
    checking = threading.Thread(target=api.verify, args=(plan,))
    checking.start()
    try:
        api.optimize(model="llama-3.1-8b", cluster=larger, workload=workload, time_limit_s=1.0)
    except HetplanError as error:
        sys.stderr.write(f"not compiled for large inventories: {error}\n")
    checking.join()
    sys.stderr.write(f"compiled in {time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
