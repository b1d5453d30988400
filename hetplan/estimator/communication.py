"""Time of collectives and of sends in the alpha-beta model (eqs. 2 and 3 of ShuntServe)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.catalog.calibration import Calibration
from hetplan.catalog.hardware import InstanceType, Link
from hetplan.catalog.kernels import AllReduceCurve
from hetplan.estimator.collectives import curve_seconds

FloatArray = NDArray[np.float64]


def all_reduce_s(message_bytes: ArrayLike, link: Link, tensor_parallel: int) -> FloatArray:
    """Ring all-reduce time.

    Parameters
    ----------
    message_bytes : (B,) float array
        Bytes of one rank before the collective.
    link : Link
        Intra-node link of the group (latency in s, bandwidth in bytes/s).
    tensor_parallel : int
        Ranks in the ring, >= 1.

    Returns
    -------
    (B,) float array
        Seconds. Zero for one rank.

    Raises
    ------
    ValueError
        If ``tensor_parallel < 1``.

    Notes
    -----
    Equation (2) of ShuntServe, per collective: a reduce-scatter and an all-gather of P - 1 steps each.
    """
    return 2 * all_gather_s(message_bytes, link, tensor_parallel)


def all_gather_s(gathered_bytes: ArrayLike, link: Link, tensor_parallel: int) -> FloatArray:
    """Ring all-gather time: P - 1 steps that each pass a P-th of ``gathered_bytes``. Zero for one rank."""
    if tensor_parallel < 1:
        raise ValueError(f"tensor_parallel is at least 1, got {tensor_parallel}")
    size = np.asarray(gathered_bytes, dtype=np.float64)
    steps = tensor_parallel - 1
    if steps == 0:
        return np.zeros_like(size)
    return np.asarray(steps * (link.latency_s + size / (tensor_parallel * link.bytes_per_s)), dtype=np.float64)


def send_s(message_bytes: ArrayLike, link: Link) -> FloatArray:
    """Point-to-point time (eq. 3): one latency and the bytes over the bandwidth."""
    return np.asarray(link.latency_s + np.asarray(message_bytes, dtype=np.float64) / link.bytes_per_s, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The all-reduce of a group: its measured curve where there is one, and the alpha-beta link."""

    degree: int
    link: Link
    curve: AllReduceCurve | None

    def seconds(self, message_bytes: FloatArray) -> FloatArray:
        """(B,) seconds for (B,) bytes of one rank before the collective."""
        if self.curve is None:
            return all_reduce_s(message_bytes, self.link, self.degree)
        return curve_seconds(self.curve, message_bytes)


def all_reduce_for(instance_type: InstanceType, tensor_parallel: int, calibration: Calibration) -> AllReduce:
    """The all-reduce of a group: measured on this host, or on any host of the GPU, else what the host's link says."""
    link = instance_type.group_link(tensor_parallel)
    fits = [c for c in calibration.all_reduces if c.tensor_parallel == tensor_parallel]
    for host in (instance_type.name, None):
        for curve in fits:
            if curve.host == host:
                return AllReduce(tensor_parallel, curve_link(curve), curve)
    # A group that is smaller than the row of its link has no curve of its own.
    own = (
        link.all_reduce if link.all_reduce is not None and link.all_reduce.tensor_parallel == tensor_parallel else None
    )
    return AllReduce(tensor_parallel, link, own)


def curve_link(curve: AllReduceCurve) -> Link:
    """The alpha-beta of a ring that meets a curve at its smallest and its largest message."""
    steps = 2 * (curve.tensor_parallel - 1)
    latency = curve.seconds[0] / steps
    left = max(curve.seconds[-1] - curve.seconds[0], 1e-3 * curve.seconds[-1])
    return Link(
        latency_s=latency,
        bytes_per_s=steps * curve.bytes[-1] / curve.tensor_parallel / left,
        source=f"{curve.source}: {curve.reference}",
    )


def group_link(instance_type: InstanceType, tensor_parallel: int, calibration: Calibration) -> Link:
    """The alpha-beta link of a tensor-parallel group, measured on this very host where the calibration has it."""
    return all_reduce_for(instance_type, tensor_parallel, calibration).link


def boundary_link(
    sender: InstanceType, receiver: InstanceType, *, same_node: bool, between: Link | None = None
) -> Link:
    """The link that a stage boundary crosses: inside the node, or the slowest on the way between two network cards.

    Latencies do not add up: that of ``between``, a `ZoneLink`'s, is from machine to machine, the cards included.
    """
    if same_node:
        return sender.pair_link
    return slowest_link([sender.inter_node_link, receiver.inter_node_link], between)


def slowest_link(ends: Sequence[Link], between: Link | None) -> Link:
    """What a send gets of the links on its way, of which there may be none ``between`` the ends."""
    ends = [*ends, *([] if between is None else [between])]
    return Link(
        latency_s=max(end.latency_s for end in ends),
        bytes_per_s=min(end.bytes_per_s for end in ends),
        source=min(ends, key=lambda end: end.bytes_per_s).source,
    )
