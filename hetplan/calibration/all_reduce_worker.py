"""One rank of an all-reduce: ``python -m hetplan.calibration.all_reduce_worker``, started by `time_all_reduce`.

Rank 0 writes one JSON object a message to stdout: the seconds of the slowest rank, and their spread.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from hetplan.calibration.measure import FEWEST_SAMPLES, MOST_SAMPLES, relative_spread

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# A sample is this many all-reduces in a row, as layers follow each other.
_CALLS = 4
_GROUP_LIMIT_S = 120


def main(argv: Sequence[str] | None = None) -> None:
    """Join the group, time each message, leave."""
    import torch
    import torch.distributed as dist

    options = _options(argv)
    gpu = options.kind != "cpu"
    device = torch.device("cuda", options.rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=dist.FileStore(options.store, options.ranks),
        rank=options.rank,
        world_size=options.ranks,
        timeout=datetime.timedelta(seconds=_GROUP_LIMIT_S),
    )
    dtype = getattr(torch, _DTYPES[options.dtype])
    for message_bytes in options.message_bytes:
        message = torch.zeros(message_bytes // dtype.itemsize, dtype=dtype, device=device)
        for _ in range(2):
            _seconds(torch, dist, message)
        # The number of samples comes of the slowest rank's time, so that all ranks take as many.
        once = _slowest(torch, dist, [_seconds(torch, dist, message)], device)[0]
        count = max(FEWEST_SAMPLES, min(MOST_SAMPLES, int(options.limit_s / max(once * _CALLS, 1e-9))))
        samples = _slowest(torch, dist, [_seconds(torch, dist, message) for _ in range(count)], device)
        if options.rank == 0:
            answer = {"seconds": statistics.median(samples), "relative_spread": relative_spread(samples)}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()


def _seconds(torch: Any, dist: Any, message: Any) -> float:
    """Seconds of one all-reduce, of a few in a row that all ranks begin together."""
    dist.barrier()
    if message.is_cuda:
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_CALLS):
            dist.all_reduce(message)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000 / _CALLS
    began = time.perf_counter()
    for _ in range(_CALLS):
        dist.all_reduce(message)
    return (time.perf_counter() - began) / _CALLS


def _slowest(torch: Any, dist: Any, seconds: list[float], device: Any) -> list[float]:
    """Of each sample, the longest of all ranks."""
    together = torch.tensor(seconds, dtype=torch.float32, device=device)
    dist.all_reduce(together, op=dist.ReduceOp.MAX)
    slowest: list[float] = together.tolist()
    return slowest


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hetplan.calibration.all_reduce_worker")
    parser.add_argument("--kind", choices=("cuda", "rocm", "cpu"), required=True)
    parser.add_argument("--dtype", choices=sorted(_DTYPES), required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("message_bytes", type=int, nargs="+")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
