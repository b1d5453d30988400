"""Collectives and sends: eqs. 2 and 3, and which link they cross."""

from __future__ import annotations

import numpy as np
import pytest
from builders import make_gpu, make_machine
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.catalog.hardware import InstanceType, Link
from hetplan.catalog.kernels import AllReduceCurve
from hetplan.catalog.tables import datasheet_calibration, get_calibration, get_instance_type
from hetplan.errors import InvalidInputError
from hetplan.estimator.communication import (
    all_gather_s,
    all_reduce_for,
    all_reduce_s,
    boundary_link,
    group_link,
    send_s,
)

LINK = Link(latency_s=10e-6, bytes_per_s=20e9)


def test_all_reduce_by_hand() -> None:
    """Four GPUs, 8 MB: 2 x 3 steps of 10 us + 2 MB / 20 GB/s = 110 us."""
    assert all_reduce_s(8e6, LINK, 4).item() == pytest.approx(6 * 110e-6)
    assert all_gather_s(8e6, LINK, 4).item() == pytest.approx(3 * 110e-6)


def test_a_send_by_hand() -> None:
    assert send_s(8e6, LINK).item() == pytest.approx(10e-6 + 400e-6)


@given(size=st.floats(0, 1e10), degree=st.integers(1, 16), latency=st.floats(0, 1e-3), rate=st.floats(1e6, 1e12))
@settings(max_examples=200, deadline=None)
def test_eq_2(size: float, degree: int, latency: float, rate: float) -> None:
    seconds = all_reduce_s(np.array([size]), Link(latency_s=latency, bytes_per_s=rate), degree)
    assert seconds.item() == pytest.approx(2 * (degree - 1) * (latency + size / (degree * rate)))
    assert seconds.item() >= 0


@pytest.mark.parametrize("sizes", [[0.0, 1e3, 1e6, 1e9]])
def test_more_bytes_take_longer(sizes: list[float]) -> None:
    for seconds in (all_reduce_s(sizes, LINK, 8), all_gather_s(sizes, LINK, 8), send_s(sizes, LINK)):
        assert np.all(np.diff(seconds) > 0)


def test_one_rank_has_nothing_to_exchange() -> None:
    assert all_reduce_s([1e3, 1e9], LINK, 1).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("degree", [0, -1])
def test_no_ranks_are_refused(degree: int) -> None:
    with pytest.raises(ValueError, match="tensor_parallel"):
        all_reduce_s(1.0, LINK, degree)


# ---- which link


def pcie_host() -> InstanceType:
    links = {2: Link(latency_s=1e-5, bytes_per_s=20e9), 4: Link(latency_s=2e-5, bytes_per_s=5e9)}
    return make_machine(gpu_count=4).replace(intra_node_links=links)


def test_a_group_takes_the_link_of_its_size() -> None:
    host, calibration = pcie_host(), datasheet_calibration(make_gpu())
    assert group_link(host, 2, calibration).bytes_per_s == 20e9
    assert group_link(host, 4, calibration).bytes_per_s == 5e9
    # A size between two rows takes the slower, larger one.
    assert group_link(host, 3, calibration).bytes_per_s == 5e9


def test_a_collective_measured_on_this_host_is_preferred() -> None:
    # 3 us and 7 GB/s: 2 x (3 us + N / 2 / 7 GB/s).
    curve = AllReduceCurve(
        host="box", tensor_parallel=2, library="own", bytes=(1e3, 7e9), seconds=(6e-6, 1 + 6e-6), source="measured",
        reference="own run",
    )  # fmt: skip
    calibration = datasheet_calibration(make_gpu()).replace(all_reduces=(curve,))
    assert group_link(pcie_host(), 2, calibration).bytes_per_s == pytest.approx(7e9)
    measured = all_reduce_for(pcie_host(), 2, calibration)
    assert measured.seconds(np.array([7e9])).item() == pytest.approx(1 + 6e-6)
    assert "measured" in group_link(pcie_host(), 2, calibration).source
    # Collectives are a property of the host: another host's measurement says nothing.
    other = pcie_host().replace(name="other")
    assert group_link(other, 2, calibration).bytes_per_s == 20e9
    assert group_link(pcie_host(), 4, calibration).bytes_per_s == 5e9


@pytest.mark.parametrize("degree", [1, 5, 8])
def test_a_group_that_the_machine_cannot_form_has_no_link(degree: int) -> None:
    with pytest.raises(InvalidInputError, match="box has 4 GPUs"):
        pcie_host().group_link(degree)


@pytest.mark.parametrize(("one", "other"), [(1e9, 5e9), (5e9, 1e9), (2e9, 2e9)])
def test_a_boundary_is_as_fast_as_its_slower_end(one: float, other: float) -> None:
    sender, receiver = make_machine("a", network=one), make_machine("b", network=other)
    assert boundary_link(sender, receiver, same_node=False).bytes_per_s == min(one, other)


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(0.03, 1e8), (0.03, 1e11), (0.0, 1e8), (0.0, 1e11)])
def test_a_boundary_over_a_zone_link_is_no_faster_than_any_link_on_its_way(
    latency_s: float, bytes_per_s: float
) -> None:
    sender, receiver = make_machine("a", network=1e9), make_machine("b", network=2e9)
    way = Link(latency_s=latency_s, bytes_per_s=bytes_per_s)
    got = boundary_link(sender, receiver, same_node=False, between=way)
    assert (got.latency_s, got.bytes_per_s) == (max(latency_s, 50e-6), min(bytes_per_s, 1e9))


def test_a_boundary_inside_a_node_stays_on_its_pair_link() -> None:
    assert boundary_link(pcie_host(), pcie_host(), same_node=True).bytes_per_s == 20e9


@pytest.mark.parametrize(("machine", "degrees"), [("g6.12xlarge", (2, 4)), ("p5.48xlarge", (2, 4, 8))])
def test_catalogued_machines_have_a_link_for_every_group(machine: str, degrees: tuple[int, ...]) -> None:
    host = get_instance_type(machine)
    for degree in degrees:
        link = group_link(host, degree, get_calibration(host.gpu))
        assert link.bytes_per_s > 1e8
        assert link.source


def test_larger_groups_on_one_pcie_host_are_slower() -> None:
    """20 / 5.1 / 1.5 GB/s at 2 / 4 / 8 GPUs: measured, and a property of the host."""
    rates = [get_instance_type("g6.48xlarge").group_link(degree).bytes_per_s for degree in (2, 4, 8)]
    assert rates[0] > rates[1] > rates[2]
