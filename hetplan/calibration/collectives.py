"""All-reduce curves from at most 8 measured sizes of each library and group size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.catalog.calibration import Source
from hetplan.catalog.kernels import AllReduceCurve
from hetplan.errors import InvalidInputError
from hetplan.estimator.collectives import curve_seconds

# Sizes to measure, as powers of two: every 8x where latency rules, every 4x where bandwidth takes over, from less than
# one token's hidden state to a whole step of prompts.
POWERS = (9, 12, 15, 18, 20, 22, 24, 27)


def choose_all_reduce_points(message_bytes: ArrayLike) -> NDArray[np.intp]:
    """Indices of the sizes nearest to `POWERS`, rising: at most 8."""
    logs = np.log2(np.asarray(message_bytes, dtype=np.float64))
    chosen = np.array([int(np.argmin(np.abs(logs - power))) for power in POWERS])
    _, first = np.unique(logs[chosen], return_index=True)
    return np.asarray(chosen[first], dtype=np.intp)


def fit_all_reduce(
    message_bytes: ArrayLike,
    seconds: ArrayLike,
    *,
    host: str | None,
    tensor_parallel: int,
    library: str,
    source: Source,
    reference: str,
) -> AllReduceCurve:
    """A curve through the sizes of `choose_all_reduce_points`.

    Parameters
    ----------
    message_bytes, seconds : (N,) array_like
        Measured sizes, bytes of one rank before the collective, and their times.
    host : str or None
        Instance type, or None for every host of the GPU.
    tensor_parallel : int
    library : str
        "nccl-2.27.3", "vllm-custom", "trtllm-custom" ...
    source, reference : str

    Returns
    -------
    AllReduceCurve

    Raises
    ------
    InvalidInputError
        Fewer than two different sizes.
    """
    chosen = choose_all_reduce_points(message_bytes)
    if len(chosen) < 2:
        raise InvalidInputError(f"{library} on {tensor_parallel} GPUs: one size; give at least two")
    # A larger message never takes less: a single slow measurement does not stand for its neighbours.
    times = np.asarray(seconds, dtype=np.float64)[chosen]
    times = np.minimum.accumulate(times[::-1])[::-1]
    return AllReduceCurve(
        host=host,
        tensor_parallel=tensor_parallel,
        library=library,
        bytes=tuple(np.asarray(message_bytes, dtype=np.float64)[chosen].tolist()),
        seconds=tuple(times.tolist()),
        source=source,
        reference=reference,
    )


def merge_all_reduces(curves: Sequence[AllReduceCurve]) -> AllReduceCurve:
    """What an engine runs that takes the fastest library at each size.

    Keeps the first curve's sizes: give first the engine's own library. Its tables say NCCL's time already from where
    the engine itself hands over (vLLM's custom all-reduce takes less than 8 MiB, TensorRT-LLM's strategy is automatic).

    Raises
    ------
    InvalidInputError
        No curve, or curves of different hosts or group sizes.
    """
    if not curves:
        raise InvalidInputError("no all-reduce curve to merge; give one at least")
    first = curves[0]
    for curve in curves[1:]:
        if (curve.host, curve.tensor_parallel) != (first.host, first.tensor_parallel):
            raise InvalidInputError(
                f"all-reduce of {curve.tensor_parallel} GPUs on {curve.host} and of {first.tensor_parallel} on "
                f"{first.host} are two curves; merge libraries of one group only"
            )
    fastest = np.min([curve_seconds(curve, first.bytes) for curve in curves], axis=0)
    return first.replace(
        library=" or ".join(dict.fromkeys(curve.library for curve in curves)), seconds=tuple(fastest.tolist())
    )
