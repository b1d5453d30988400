"""The shipped catalogue, and the clusters made from it or described by a user."""

from __future__ import annotations

import datetime
import runpy
from pathlib import Path
from typing import Any

import pytest

from hetplan.catalog import tables
from hetplan.catalog.clusters import cluster_from_dict, cluster_from_file, price_warnings
from hetplan.catalog.offers import Cluster, Offer
from hetplan.errors import InvalidInputError, UnknownNameError
from hetplan.units import GB, MIB

ROOT = Path(__file__).resolve().parents[2]
CATALOG = ROOT / "hetplan" / "catalog" / "data"
TODAY = datetime.date(2026, 12, 1)
SIZES = {"g4dn": "metal", "g5": "48xlarge", "g6": "48xlarge", "g6e": "48xlarge"}
CLUSTER_76 = {f"{family}.{size}": 1 for family, most in SIZES.items() for size in ("xlarge", "12xlarge", most)} | {
    "p4d.24xlarge": 1,
    "p5.48xlarge": 1,
    "p6-b200.48xlarge": 1,
}


@pytest.mark.parametrize(
    ("gpu", "mib"),
    [
        ("H100-SXM5-80GB", 81559),
        ("A100-SXM4-80GB", 81920),
        ("A100-PCIE-80GB", 81920),
        ("L40S", 46068),
        ("L4", 23034),
        ("A10G", 23028),
        ("T4", 15360),
    ],
)
def test_memory_is_what_the_driver_reports(gpu: str, mib: int) -> None:
    assert tables.get_gpu(gpu).memory_bytes == mib * MIB


@pytest.mark.parametrize("gpu", tables.list_gpus())
def test_rates_are_dense_and_native_types_known(gpu: str) -> None:
    spec = tables.get_gpu(gpu)
    half = max(spec.dense_flops.get(dtype, 0.0) for dtype in ("bf16", "fp16"))
    # L40S's own sheet rounds each figure: 733 / 362.05.
    assert spec.dense_flops.get("fp8", 0.0) <= 2.03 * half
    assert spec.native_dtypes
    assert spec.source
    assert {spec.runs_as("bf16"), spec.runs_as("fp8")} <= set(spec.native_dtypes)


def test_published_dense_rates() -> None:
    assert tables.get_gpu("L40S").dense_flops["fp8"] == pytest.approx(733e12)
    assert tables.get_gpu("H100-PCIE-80GB").dense_flops["fp16"] == pytest.approx(756.5e12, rel=1e-3)
    assert tables.get_gpu("T4").runs_as("bf16") == "fp16"
    assert tables.get_gpu("A100-SXM").runs_as("fp8") == "bf16"


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("A100-80GB", "A100-SXM4-80GB"),
        ("A100-SXM", "A100-SXM4-80GB"),
        ("a100-sxm-80gb", "A100-SXM4-80GB"),
        ("A100-PCIE", "A100-PCIE-80GB"),
        ("H100", "H100-SXM5-80GB"),
        ("h100-sxm", "H100-SXM5-80GB"),
        ("H200", "H200-SXM-141GB"),
        ("H200-SXM", "H200-SXM-141GB"),
        ("B200", "B200-SXM-180GB"),
        ("RTX-PRO-6000-SE", "RTXPRO6000-SE"),
        ("l40s", "L40S"),
    ],
)
def test_gpu_aliases(alias: str, name: str) -> None:
    assert tables.get_gpu(alias).name == name


def test_an_ambiguous_or_unknown_gpu_lists_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="ambiguous") as caught:
        tables.get_gpu("A100")
    assert set(caught.value.nearest) == {"A100-PCIE-40GB", "A100-PCIE-80GB", "A100-SXM4-40GB", "A100-SXM4-80GB"}
    with pytest.raises(UnknownNameError, match="L40S"):
        tables.get_gpu("L4OS")
    with pytest.raises(UnknownNameError):
        tables.get_gpu("")


def test_every_machine_has_links_a_network_and_a_source() -> None:
    names = tables.list_instance_types()
    assert len(names) == len(set(names)) > 100
    for name in names:
        machine = tables.get_instance_type(name)
        assert machine.source
        assert machine.inter_node_link.latency_s == pytest.approx(50e-6)
        assert machine.provider == "local" or "assumed" in machine.inter_node_link.source
        for degree in range(2, machine.gpu_count + 1):
            assert machine.group_link(degree).source
    assert tables.list_instance_types("gcp") == [n for n in names if tables.get_instance_type(n).provider == "gcp"]


def test_network_is_the_baseline_and_pcie_is_flagged() -> None:
    machine = tables.get_instance_type("g6.12xlarge", provider="aws")
    assert machine.inter_node_link.bytes_per_s == pytest.approx(40 * GB / 8)
    assert tables.get_instance_type("g5.xlarge").inter_node_link.bytes_per_s == pytest.approx(2.5 * GB / 8)
    assert {size: link.bytes_per_s / GB for size, link in tables.intra_node_links("pcie", 8).items()} == {
        2: pytest.approx(20),
        4: pytest.approx(5.1),
        8: pytest.approx(1.5),
    }
    assert "measured on another PCIe host" in machine.group_link(4).source
    # Three GPUs are not faster than four.
    assert tables.intra_node_links("pcie", 3)[3] == tables.intra_node_links("pcie", 4)[4]
    assert "assumed" in tables.get_instance_type("gpu_8x_h100_sxm5").inter_node_link.source


def test_unknown_machines_name_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"g6\.12xlarge"):
        tables.get_instance_type("g6.12xlarg")
    with pytest.raises(UnknownNameError, match="belongs to provider 'gcp'"):
        tables.get_instance_type("g2-standard-96", provider="aws")


def test_the_host_assumed_without_a_machine_says_so() -> None:
    pcie = tables.default_instance_type("L4")
    assert pcie.name == "default-pcie-host[L4]"
    assert pcie.gpu_count == 8
    assert "no machine named: the default PCIe host" in pcie.source
    nvlink = tables.default_instance_type("H100")
    assert "nvlink4" in nvlink.source
    assert nvlink.group_link(8).bytes_per_s > 100 * pcie.group_link(8).bytes_per_s
    assert "PCIe" in tables.default_instance_type("A100-PCIE").source
    for gpu in tables.list_gpus():
        assert tables.default_instance_type(gpu).gpu.name == gpu


def test_the_24_gpu_cluster_costs_what_the_paper_paid() -> None:
    counts = {"g6.12xlarge": 3, "g5.12xlarge": 2, "g6e.xlarge": 4}
    cluster = Cluster.from_counts(counts, region="us-west-2")
    assert cluster.gpu_count == 24
    assert round(cluster.price_usd_per_hour * 50 / 60, 2) == 27.16


def test_the_76_gpu_cluster_is_catalogued() -> None:
    cluster = Cluster.from_counts(CLUSTER_76, region="us-west-2")
    assert len(cluster.pools) == 15
    assert cluster.gpu_count == 76
    assert len({machine.gpu.name for machine in cluster.instance_types}) == 7
    assert cluster.price_usd_per_hour == pytest.approx(287.40, abs=0.01)


@pytest.mark.parametrize(
    "counts", [{}, None, {"g5.xlarge": 0}, {"g5.xlarge": -1}, {"g5.xlarge": True}, {"g5.xlarge": 1.0}]
)
def test_counts_that_are_not_whole_numbers_are_refused(counts: Any) -> None:
    with pytest.raises(InvalidInputError):
        Cluster.from_counts(counts, region="us-west-2")


def test_a_missing_offer_lists_where_there_is_one() -> None:
    with pytest.raises(UnknownNameError, match="on_demand in us-east-1, us-west-2, eu-central-1"):
        Cluster.from_counts({"g6e.xlarge": 1}, region="eu-west-1")
    with pytest.raises(UnknownNameError, match="spot in"):
        Cluster.from_counts({"p5e.48xlarge": 1}, region="us-west-2", market="on_demand")
    with pytest.raises(UnknownNameError, match="owned"):
        Cluster.from_counts({"g6e.xlarge": 1}, region="us-west-2", market="cheap")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="given twice"):
        Cluster.from_counts({"g5.xlarge": 1, "G5.xlarge": 1}, region="us-west-2")


def test_owned_machines_need_no_price() -> None:
    cluster = Cluster.from_counts({"p5e.48xlarge": 2}, region="lab", market="owned")
    assert cluster.price_usd_per_hour == 0


def test_offers_carry_a_source_a_date_and_a_notice() -> None:
    offers = tables.list_offers()
    assert len(offers) > 300
    for offer in offers:
        assert offer.source
        assert offer.observed_on is not None or "seen" in offer.source
        assert tables.get_instance_type(offer.instance_type).provider == offer.provider
    notice = {offer.provider: offer.notice_s for offer in tables.list_offers(market="spot")}
    assert notice == {"aws": 120, "gcp": 30, "azure": 30}
    assert tables.notice_s("runpod") == 0
    assert tables.notice_s("alibaba") == 300
    assert tables.get_offer("g5.xlarge", region="us-west-2").notice_s is None
    assert tables.get_offer("gpu_1x_h100_pcie", region="us-east-1").region == "all"


def test_prices_to_doubt_are_named_against_an_injected_day() -> None:
    day = datetime.date(2026, 11, 1)
    common: dict[str, Any] = {"instance_type": "g5.xlarge", "provider": "aws", "region": "us-west-2", "source": "test"}
    fresh = Offer(**common, market="on_demand", price_usd_per_hour=1.0, observed_on=day)
    undated = Offer(**common, market="on_demand", price_usd_per_hour=1.0)
    assert price_warnings([fresh], TODAY) == []
    assert "30 days old (limit 29)" in price_warnings([fresh], TODAY, max_age_days=29)[0]
    assert "states no day" in price_warnings([undated], TODAY)[0]
    assert "after today" in price_warnings([fresh], datetime.date(2026, 1, 1))[0]
    # Compared with the offer given beside it, else with the catalogue's.
    spot = Offer(**common, market="spot", price_usd_per_hour=1.0, observed_on=day)
    assert "not below $1/h" in price_warnings([spot, fresh], TODAY)[0]
    dear = spot.replace(price_usd_per_hour=1.006)
    assert "not below $1.006/h" in price_warnings([dear], TODAY)[0]
    assert price_warnings([spot], TODAY) == []
    owned = Offer(**common, market="owned")
    assert price_warnings([owned], TODAY) == []


OWN = """\
region: us-west-2
market: spot
machines: {g6.12xlarge: 2}
gpus:
  - {name: X1, memory_bytes: 48 GiB, bandwidth_bytes_per_s: 900.0e+9,
     dense_flops: {bf16: 300.0e+12}, native_dtypes: [bf16]}
instance_types:
  - {name: box, gpu: X1, gpu_count: 4, link: pcie, network_gbps: 25}
  - name: pair
    gpu: l40s
    gpu_count: 2
    link: {2: {latency_s: 5.0e-6, bytes_per_s: 25.0e+9}}
offers:
  - {instance_type: box, count: 2, market: owned}
  - {instance_type: pair, count: 1, price_usd_per_hour: 3.5, provider: gcp, region: here}
  - {instance_type: g5.12xlarge, count: 1, market: on_demand, price_usd_per_hour: 5, observed_on: 2026-11-01}
"""


def test_a_cluster_file_mixes_own_and_catalogued_machines(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(OWN)
    cluster = cluster_from_file(path)
    assert cluster.gpu_count == 2 * 4 + 2 * 4 + 2 + 4
    offers = {pool.offer.instance_type: pool.offer for pool in cluster.pools}
    assert offers["box"].market == "owned"
    assert offers["box"].price_usd_per_hour is None
    assert offers["pair"].notice_s == 30
    assert offers["g6.12xlarge"].notice_s == 120
    assert offers["g5.12xlarge"].observed_on == datetime.date(2026, 11, 1)
    assert offers["g5.12xlarge"].provider == "aws"
    box = cluster.instance_type("box")
    assert box.gpu.memory_bytes == 48 * 2**30
    assert box.group_link(4) == tables.intra_node_links("pcie", 4)[4]
    assert str(path) in box.source
    pair = cluster.instance_type("pair")
    assert pair.pair_link.bytes_per_s == 25e9
    assert "assumed" in pair.inter_node_link.source
    assert tables.get_calibration(box.gpu).datasheet_parts()


def test_a_csv_of_offers(tmp_path: Path) -> None:
    path = tmp_path / "offers.csv"
    path.write_text(
        "instance_type,count,market,price_usd_per_hour,region,provider,observed_on,source\n"
        "g6.12xlarge,3,spot,2.1,us-west-2,aws,2026-11-20,console\n"
        "g6e.xlarge,4,owned,,lab,,,\n"
    )
    cluster = cluster_from_file(path)
    assert cluster.gpu_count == 16
    first, second = (pool.offer for pool in cluster.pools)
    assert (first.price_usd_per_hour, first.source, first.notice_s) == (2.1, "console", 120)
    assert (second.market, second.price_usd_per_hour, second.provider) == ("owned", None, "aws")
    for row, words in (
        ("g6.12xlarge,0,spot,1", "line 2: count of 'g6.12xlarge' is 0"),
        ("g6.12xlarge,one,spot,1", "line 2: count of 'g6.12xlarge' is 'one'"),
        ("g6.12xlarge,1,spot,nan", "line 2: Offer.price_usd_per_hour"),
        ("g6.12xlarge,1,spot,-1", "line 2: Offer.price_usd_per_hour"),
        ("g6.12xlarge,1,spot,", "has no price"),
        ("g6.12xlarge,1,,1", "line 2: market is missing"),
        ("g6.12xlarg,1,spot,1", "line 2: unknown instance type"),
    ):
        path.write_text(f"instance_type,count,market,price_usd_per_hour,region\n{row},here\n")
        with pytest.raises(InvalidInputError) as caught:
            cluster_from_file(path)
        assert words in str(caught.value)
        assert str(caught.value).startswith(str(path))


LAB = {"region": "lab", "market": "owned"}
TWO_LABS = {"offers": [LAB | {"instance_type": "g5.xlarge", "count": 1, "provider": "own", "region": r} for r in "ab"]}
WAY = {"ends": ["own/a", "own/b"], "latency_s": 0.01, "gbps": 10}
GPU = {
    "name": "X",
    "memory_bytes": 1,
    "bandwidth_bytes_per_s": 1,
    "dense_flops": {"bf16": 1},
    "native_dtypes": ["bf16"],
}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "the cluster is empty"),
        ({"machine": {}}, "unknown key 'machine'"),
        ({"machines": {"g5.xlarge": 1}}, "machines: catalogued machines need a region"),
        ({"machines": {"g5.xlarge": -1}, "region": "us-west-2"}, "machines: count of 'g5.xlarge' is -1"),
        ({"machines": {5: 1}, "region": "us-west-2"}, "machines: unknown instance type '5'"),
        ({"machines": [1], "region": "us-west-2"}, "machines: the cluster is empty"),
        ({"offers": {"a": 1}}, "offers must be a list"),
        ({"offers": ["g5.xlarge"]}, "offers[0]: must be a mapping"),
        ({"offers": [{"count": 1}]}, "offers[0]: instance_type is missing"),
        ({"offers": [LAB | {"instance_type": "g5.xlarge", "count": 1, "pirce": 2}]}, "offers[0]: unknown key 'pirce'"),
        ({"offers": [LAB | {"instance_type": "g5.xlarge", "count": True}]}, "offers[0]: count is True"),
        (
            {"offers": [LAB | {"instance_type": "g5.xlarge", "count": 1, "price_usd_per_hour": 0}]},
            "offers[0]: Offer.price_usd_per_hour",
        ),
        (
            {"offers": [LAB | {"instance_type": "g5.xlarge", "count": 1, "price_usd_per_hour": float("nan")}]},
            "offers[0]: Offer.price_usd_per_hour",
        ),
        ({"gpus": [GPU | {"memory_bytes": "lots"}]}, "gpus[0]: memory_bytes: not a size"),
        ({"gpus": [GPU | {"dense_flops": {"bf16": float("inf")}}]}, "gpus[0]: GpuSpec.dense_flops"),
        ({"gpus": [GPU | {"dense_flops": {"bf16": 1, "fp8": 4}}]}, "sparse figure"),
        ({"gpus": [GPU, GPU]}, "have one name"),
        ({"instance_types": [{"name": "b", "gpu": "L4"}]}, "instance_types[0]: gpu and gpu_count are needed"),
        ({"instance_types": [{"name": "b", "gpu": "L4", "gpu_count": 0}]}, "instance_types[0]: gpu_count is 0"),
        ({"instance_types": [{"name": "b", "gpu": "L4", "gpu_count": 2}]}, "give the link of a pair"),
        ({"instance_types": [{"name": "b", "gpu": "L9", "gpu_count": 1}]}, "instance_types[0]: unknown GPU 'L9'"),
        (
            {"instance_types": [{"name": "b", "gpu": "L4", "gpu_count": 2, "link": "pci"}]},
            "instance_types[0]: unknown link class 'pci'",
        ),
        (
            {"instance_types": [{"name": "b", "gpu": "L4", "gpu_count": 2, "link": {2: {"bytes_per_s": 1}}}]},
            "link of 2 GPUs: Link.latency_s: missing",
        ),
        (
            {"instance_types": [{"name": "b", "gpu": "L4", "gpu_count": 1, "network_gbps": -1}]},
            "instance_types[0]: network_gbps is -1",
        ),
        (TWO_LABS | {"zone_links": {"ends": []}}, "zone_links must be a list"),
        (TWO_LABS | {"zone_links": [{"latency_s": 1}]}, "zone_links[0]: ends is missing"),
        (TWO_LABS | {"zone_links": [WAY | {"ends": "own/a"}]}, "zone_links[0]: ends is 'own/a'; give two places"),
        (TWO_LABS | {"zone_links": [WAY | {"ends": ["own/a"]}]}, "zone_links[0]: ends is ['own/a']"),
        (TWO_LABS | {"zone_links": [WAY | {"ends": ["own/a", "own/a"]}]}, "two places that lie apart"),
        (TWO_LABS | {"zone_links": [WAY | {"ends": ["own/a", "own/a/z"]}]}, "two places that lie apart"),
        (TWO_LABS | {"zone_links": [WAY | {"ends": ["own/a", "own/c"]}]}, "'own/c', where the cluster has no machine"),
        (TWO_LABS | {"zone_links": [WAY | {"ends": ["a", "b"]}]}, "its places: own/a, own/b"),
        (TWO_LABS | {"zone_links": [WAY, WAY | {"ends": ["own/b", "own/a"]}]}, "listed twice"),
        (TWO_LABS | {"zone_links": [WAY | {"bytes_per_s": 1}]}, "zone_links[0]: one of gbps"),
        (TWO_LABS | {"zone_links": [{"ends": ["own/a", "own/b"], "latency_s": 0}]}, "zone_links[0]: one of gbps"),
        (TWO_LABS | {"zone_links": [WAY | {"gbps": 0}]}, "zone_links[0]: gbps is 0"),
        (TWO_LABS | {"zone_links": [WAY | {"egress_usd_per_gb": -1}]}, "ZoneLink.egress_usd_per_gb"),
        (TWO_LABS | {"zone_links": [WAY | {"latency_s": -1}]}, "zone_links[0]: Link.latency_s"),
        (TWO_LABS | {"zone_links": [WAY | {"usd": 1}]}, "zone_links[0]: unknown key 'usd'"),
    ],
)
def test_mistakes_in_a_cluster_name_the_place(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        cluster_from_dict(values)
    assert str(caught.value).startswith("cluster")
    assert words in str(caught.value)


def test_a_cluster_file_says_where_pipelines_may_cross(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "provider: aws\nmarket: on_demand\n"
        "offers:\n"
        "  - {instance_type: g6.xlarge, count: 1, region: us-west-2, zone: usw2-az1, price_usd_per_hour: 0.8}\n"
        "  - {instance_type: g6.xlarge, count: 2, region: us-east-1, price_usd_per_hour: 0.8}\n"
        "  - {instance_type: g6.xlarge, count: 2, region: eu-west-1, price_usd_per_hour: 0.9}\n"
        "zone_links:\n"
        "  - {ends: [aws/us-west-2, aws/us-east-1], latency_s: 0.03, gbps: 4, egress_usd_per_gb: 0.02}\n"
    )
    cluster = cluster_from_file(path)
    (link,) = cluster.zone_links
    assert (link.link.bytes_per_s, link.link.latency_s, link.egress_usd_per_gb) == (5e8, 0.03, 0.02)
    assert link.link.source == f"given in {path}"
    assert cluster.pool_groups() == [[0, 1], [2]]
    assert cluster.zone_link("aws/us-east-1", "aws/us-west-2/usw2-az1") == link
    assert cluster.zone_link("aws/us-east-1", "aws/eu-west-1") is None


def test_of_several_links_the_one_that_names_more_zones_counts() -> None:
    offer = {"instance_type": "g6.xlarge", "count": 1, "market": "owned", "provider": "own"}
    places = [("a", "z0"), ("a", "z1"), ("b", "z0"), ("b", "z1")]
    links = [["own/a", "own/b"], ["own/a/z0", "own/b"], ["own/a/z0", "own/b/z0"], ["own/a/z0", "own/a/z1"]]

    def made(ends: list[list[str]]) -> Cluster:
        return cluster_from_dict(
            {
                "offers": [offer | {"region": region, "zone": zone} for region, zone in places],
                "zone_links": [{"ends": pair, "latency_s": 0.01, "gbps": 1} for pair in ends],
            }
        )

    cluster = made(links)
    for one, other, which in [("a/z1", "b/z1", 0), ("a/z0", "b/z1", 1), ("b/z0", "a/z0", 2), ("a/z1", "a/z0", 3)]:
        assert cluster.zone_link(f"own/{one}", f"own/{other}") == cluster.zone_links[which]
    assert cluster.zone_link("own/b/z0", "own/b/z1") is None
    assert cluster.pool_groups() == [[0, 1, 2, 3]]
    with pytest.raises(InvalidInputError, match="own/a/z0 and own/b/z0 are joined by several zone links"):
        made([["own/a/z0", "own/b"], ["own/a", "own/b/z0"]])


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"\.yaml, \.yml, \.json or \.csv"):
        cluster_from_file(tmp_path / "cluster.toml")


def test_the_catalogue_is_what_the_scripts_write(data_dir: Path) -> None:
    written = runpy.run_path(str(ROOT / "calibration" / "import_tables.py"))["build"](data_dir)
    written["links.csv"] = runpy.run_path(str(ROOT / "calibration" / "derive_links.py"))["build"](data_dir)
    for name, content in written.items():
        assert (CATALOG / name).read_text(encoding="utf-8") == content, name
