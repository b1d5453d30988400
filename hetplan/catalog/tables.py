"""The shipped catalogue: GPUs, machine sizes, prices and calibrations, read on first use.

The tables are CSV files in ``data/``, each row with its source; ``calibration/`` at the repository root
holds the scripts that wrote them. Clusters that a user describes are in `hetplan.catalog.clusters`.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from functools import cache
from importlib.resources import as_file, files

from hetplan.catalog.calibration import Calibration, Quantity
from hetplan.catalog.dtypes import DTYPE_BITS, Dtype
from hetplan.catalog.hardware import GpuSpec, InstanceType, Link
from hetplan.catalog.kernels import AllReduceCurve
from hetplan.catalog.local import LOCAL_GPU, LOCAL_MACHINE
from hetplan.catalog.offers import Cluster, Market, Offer, Pool
from hetplan.errors import InvalidInputError, UnknownNameError
from hetplan.files import parse_csv
from hetplan.units import BITS_PER_BYTE, GB, GIB, MIB, TERA

MARKETS: tuple[Market, ...] = ("spot", "on_demand", "owned")

# Warning before a spot machine is taken, by provider; any other provider gives none.
NOTICE_S = {"aws": 120.0, "gcp": 30.0, "azure": 30.0, "alibaba": 300.0}

# Prices of these providers hold everywhere.
EVERY_REGION = "all"

# Latency between machines of one region: no source of the tables states it.
INTER_NODE_LATENCY_S = 50e-6
# For machines whose network no source states, and for the synthetic default hosts.
ASSUMED_NETWORK_GBPS = 10.0
DEFAULT_HOST_NETWORK_GBPS = 100.0
DEFAULT_HOST_GPUS = 8

# An uncalibrated GPU: between the A40, A100 and H100 of calibration/derive_scalars.py.
ASSUMED_KERNEL_S = 4e-6

GPU_ALIASES = {
    "a100-80gb": "A100-SXM4-80GB",
    "a100-sxm": "A100-SXM4-80GB",
    "a100-sxm-80gb": "A100-SXM4-80GB",
    "a100-pcie": "A100-PCIE-80GB",
    "h100": "H100-SXM5-80GB",
    "h100-sxm": "H100-SXM5-80GB",
    "h200": "H200-SXM-141GB",
    "h200-sxm": "H200-SXM-141GB",
    "b200": "B200-SXM-180GB",
    "rtx-pro-6000-se": "RTXPRO6000-SE",
}


def list_gpus() -> list[str]:
    """Names of the catalogued GPUs."""
    return list(_gpus())


def gpu_name(name: str) -> str:
    """The catalogue's spelling of a GPU name or alias, in any case.

    Raises
    ------
    UnknownNameError
        If the name is unknown, or stands for several boards (such as ``A100``).

    Examples
    --------
    >>> gpu_name("h100")
    'H100-SXM5-80GB'
    """
    wanted = str(name).strip().lower()
    by_lower = {known.lower(): known for known in _gpus()} | GPU_ALIASES
    if wanted in by_lower:
        return by_lower[wanted]
    meant = [known for known in _gpus() if wanted and _family(known).startswith(_family(wanted))]
    if meant:
        raise UnknownNameError("GPU", str(name), meant, "The name alone is ambiguous or incomplete: give one of these.")
    raise UnknownNameError("GPU", str(name), [*_gpus(), *(a.upper() for a in GPU_ALIASES)], "Or describe your own GPU.")


def get_gpu(name: str) -> GpuSpec:
    """A GPU by its catalogue name or a fixed alias, in any case; see `gpu_name`."""
    return _gpus()[gpu_name(name)]


def list_instance_types(provider: str | None = None) -> list[str]:
    """Names of the catalogued machine sizes, of one provider or of all."""
    return [t.name for t in _instance_types().values() if provider in (None, t.provider)]


def get_instance_type(name: str, provider: str | None = None) -> InstanceType:
    """A machine size by name; names are unique over the catalogued providers.

    Raises
    ------
    UnknownNameError
        If there is none, or the named provider has none.
    """
    found = _instance_types().get(str(name).strip().lower())
    if found is None or provider not in (None, found.provider):
        hint = f"{found.name} belongs to provider {found.provider!r}." if found else "Or describe your own machine."
        raise UnknownNameError("instance type", str(name), list_instance_types(provider), hint)
    return found


def default_instance_type(gpu: str | GpuSpec) -> InstanceType:
    """The host assumed for a GPU when no machine is named; ``source`` says so.

    Eight GPUs on the NVLink (or Infinity Fabric) of an SXM part, otherwise on the default PCIe host.
    """
    spec = get_gpu(gpu) if isinstance(gpu, str) else gpu
    link = _gpu_links().get(spec.name, "pcie")
    if link.startswith("pcie"):
        name, kind = f"default-pcie-host[{spec.name}]", "the default PCIe host (collectives as on another PCIe host)"
    else:
        name, kind = f"default-{link.replace('_', '-')}-host[{spec.name}]", f"a host with the {link} table"
    return InstanceType(
        name=name,
        provider="default",
        gpu=spec,
        gpu_count=DEFAULT_HOST_GPUS,
        intra_node_links=intra_node_links(link, DEFAULT_HOST_GPUS),
        inter_node_link=network_link(DEFAULT_HOST_NETWORK_GBPS, "assumed"),
        source=f"no machine named: {kind}, {DEFAULT_HOST_GPUS} GPUs and {DEFAULT_HOST_NETWORK_GBPS:g} Gbit/s assumed",
    )


def list_link_classes() -> list[str]:
    """Names of the catalogued link classes, such as ``pcie`` and ``nvlink4``."""
    return list(_links())


def intra_node_links(link_class: str, gpu_count: int) -> dict[int, Link]:
    """The all-reduce link of each group size inside a machine with ``gpu_count`` GPUs of one link class."""
    table = _links().get(link_class)
    if table is None:
        raise UnknownNameError("link class", link_class, _links(), f"Known: {', '.join(_links())}.")
    links = {size: link for size, link in table.items() if size <= gpu_count}
    larger = [size for size in table if size > gpu_count]
    # Three GPUs are slower than two: a size between two rows takes the slower of them.
    if gpu_count > 1 and gpu_count not in links and larger:
        links[gpu_count] = table[min(larger)]
    return links


def network_link(gbps: float | None, source: str) -> Link:
    """The link between machines: the network's baseline rate, and an assumed latency."""
    if gbps is None:
        gbps, source = ASSUMED_NETWORK_GBPS, f"{ASSUMED_NETWORK_GBPS:g} Gbit/s assumed: no source states the network"
    return Link(
        latency_s=INTER_NODE_LATENCY_S,
        bytes_per_s=gbps * GB / BITS_PER_BYTE,
        source=f"{source}; latency of {INTER_NODE_LATENCY_S * 1e6:g} us assumed",
    )


def list_offers(
    *,
    instance_type: str | None = None,
    region: str | None = None,
    market: str | None = None,
    provider: str | None = None,
) -> list[Offer]:
    """The catalogued prices that match every given key; one that holds in every region matches any."""
    kind = None if instance_type is None else instance_type.lower()
    return [
        offer
        for offer in _offers()
        if kind in (None, offer.instance_type.lower())
        and (region is None or offer.region in (region, EVERY_REGION))
        and market in (None, offer.market)
        and provider in (None, offer.provider)
    ]


def get_offer(instance_type: str, *, region: str, market: str = "on_demand", provider: str | None = None) -> Offer:
    """The catalogued price of a machine in a place and market.

    Raises
    ------
    UnknownNameError
        If there is no such machine, or no price there; the places that have one are listed.
    """
    machine = get_instance_type(instance_type, provider)
    found = list_offers(instance_type=machine.name, region=region, market=market, provider=machine.provider)
    if found:
        return found[0]
    known = list_offers(instance_type=machine.name)
    places: dict[str, list[str]] = {}
    for offer in known:
        places.setdefault(offer.market, []).append(offer.region)
    has = "; ".join(f"{name} in {', '.join(regions)}" for name, regions in places.items()) or "no price at all"
    raise UnknownNameError(
        "offer",
        f"{machine.provider}/{region}/{machine.name}/{market}",
        [offer.name for offer in known],
        f"{machine.name} has {has}. Choose one of these, give your own offer with a price, or market owned for a "
        "machine of your own.",
    )


def notice_s(provider: str) -> float:
    """Seconds between a provider's notice and the loss of a spot machine."""
    return NOTICE_S.get(provider, 0.0)


def cluster_from_counts(
    counts: Mapping[str, int], *, region: str, market: Market = "on_demand", provider: str = "aws"
) -> Cluster:
    """Catalogued machines of one provider, region and market; see `Cluster.from_counts`."""
    if not isinstance(counts, Mapping) or not counts:
        raise InvalidInputError("the cluster is empty: give at least one machine, such as {'g6.12xlarge': 1}")
    if market not in MARKETS:
        raise UnknownNameError("market", str(market), MARKETS, f"Use one of {', '.join(MARKETS)}.")
    pools: dict[str, Pool] = {}
    machines = []
    for name, count in counts.items():
        machine = get_instance_type(name, provider)
        if machine.name in pools:
            raise InvalidInputError(f"machine {machine.name!r} is given twice; add the counts")
        pools[machine.name] = Pool(
            offer=_owned(machine, region)
            if market == "owned"
            else get_offer(name, region=region, market=market, provider=provider),
            count=machine_count(count, name),
        )
        machines.append(machine)
    return Cluster(instance_types=tuple(machines), pools=tuple(pools.values()))


def machine_count(count: object, name: str) -> int:
    """A count of machines, checked: a whole number from 1."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidInputError(f"count of {name!r} is {count!r}; give a whole number from 1, or leave the machine out")
    return count


def get_calibration(gpu: str | GpuSpec) -> Calibration:
    """Effective rates of a GPU: the shipped calibration, else its datasheet, each number saying which.

    Parameters
    ----------
    gpu : str or GpuSpec
        A catalogued GPU (or alias), or a user's own: that one has only its datasheet.

    Examples
    --------
    >>> get_calibration("L4").compute_flops["bf16"].source
    'published'
    >>> get_calibration("RTX4090").compute_flops["bf16"].source
    'datasheet'
    """
    spec = get_gpu(gpu) if isinstance(gpu, str) else gpu
    if _gpus().get(spec.name) == spec:
        return _shipped_calibration(spec.name)
    return datasheet_calibration(spec)


def datasheet_calibration(spec: GpuSpec) -> Calibration:
    """A calibration that holds datasheet peaks and assumed overheads, and says so in each number."""

    def peak(value: float) -> Quantity:
        return Quantity(value=value, source="datasheet", reference=f"peak, not measured: {spec.source}")

    assumed = "not measured on this GPU: between A40, A100 and H100"
    return Calibration(
        gpu=spec.name,
        compute_flops={dtype: peak(rate) for dtype, rate in spec.dense_flops.items()},
        memory_bytes_per_s=peak(spec.bandwidth_bytes_per_s),
        kernel_s=Quantity(value=ASSUMED_KERNEL_S, source="assumed", reference=assumed),
    )


# --- the files --------------------------------------------------------------------------------------------------------


def _rows(name: str, columns: str) -> list[dict[str, str]]:
    text = (files("hetplan.catalog") / "data" / name).read_text(encoding="utf-8")
    return [row for _, row in parse_csv(text, name, columns.split())]


@cache
def _gpu_rows() -> list[dict[str, str]]:
    return _rows(
        "gpus.csv",
        "name vendor memory_mib bandwidth_gb_s fp32_tflops fp16_tflops bf16_tflops fp8_tflops int8_tops native_dtypes "
        "sm_count link source checked note",
    )


@cache
def _gpu_links() -> dict[str, str]:
    return {row["name"]: row["link"] for row in _gpu_rows()}


@cache
def _gpus() -> dict[str, GpuSpec]:
    columns: dict[Dtype, str] = {dtype: f"{dtype}_tflops" for dtype in ("fp32", "fp16", "bf16", "fp8")}
    columns["int8"] = "int8_tops"
    return {
        row["name"]: GpuSpec(
            name=row["name"],
            vendor=row["vendor"],
            memory_bytes=int(row["memory_mib"]) * MIB,
            bandwidth_bytes_per_s=float(row["bandwidth_gb_s"]) * GB,
            dense_flops={dtype: float(row[column]) * TERA for dtype, column in columns.items() if row[column]},
            native_dtypes=tuple(dtype for dtype in DTYPE_BITS if dtype in row["native_dtypes"].split()),
            sm_count=int(row["sm_count"]),
            source=_with_doubts(row),
        )
        for row in _gpu_rows()
    } | {LOCAL_GPU.name: LOCAL_GPU}


@cache
def _links() -> dict[str, dict[int, Link]]:
    table: dict[str, dict[int, Link]] = {}
    curves = _curves()
    for row in _rows("links.csv", "link gpus latency_s bytes_per_s kind source"):
        link = Link(
            latency_s=float(row["latency_s"]),
            bytes_per_s=float(row["bytes_per_s"]),
            source=f"{row['link']} at {row['gpus']} GPUs, {row['source']}",
            all_reduce=curves.get((row["link"], int(row["gpus"]))),
        )
        table.setdefault(row["link"], {})[int(row["gpus"])] = link
    return table


def _curves() -> dict[tuple[str, int], AllReduceCurve]:
    groups: dict[tuple[str, int], list[dict[str, str]]] = {}
    for row in _rows("all_reduce.csv", "link gpus library bytes seconds source"):
        groups.setdefault((row["link"], int(row["gpus"])), []).append(row)
    return {
        (link, gpus): AllReduceCurve(
            host=None,
            tensor_parallel=gpus,
            library=rows[0]["library"],
            bytes=tuple(float(row["bytes"]) for row in rows),
            seconds=tuple(float(row["seconds"]) for row in rows),
            source="measured",
            reference=rows[0]["source"],
        )
        for (link, gpus), rows in groups.items()
    }


@cache
def _instance_types() -> dict[str, InstanceType]:
    columns = "provider name gpu gpu_count link network_gbps host_memory_gib source source_date checked note"
    types: dict[str, InstanceType] = {}
    for row in _rows("instances.csv", columns):
        gpu_count = int(row["gpu_count"])
        gbps = float(row["network_gbps"]) if row["network_gbps"] else None
        types[row["name"].lower()] = InstanceType(
            name=row["name"],
            provider=row["provider"],
            gpu=_gpus()[row["gpu"]],
            gpu_count=gpu_count,
            intra_node_links=intra_node_links(row["link"], gpu_count) if row["link"] else {},
            inter_node_link=network_link(gbps, f"Ethernet baseline of {row['name']}"),
            host_memory_bytes=int(float(row["host_memory_gib"]) * GIB) if row["host_memory_gib"] else None,
            source=_with_doubts(row),
        )
    types[LOCAL_MACHINE.name] = LOCAL_MACHINE
    return types


@cache
def _offers() -> tuple[Offer, ...]:
    columns = "provider region instance_type market price_usd_per_hour observed_on seen_between source checked note"
    offers = []
    for row in _rows("offers.csv", columns):
        seen = f"; seen {row['seen_between']}" if row["seen_between"] else ""
        offers.append(
            Offer(
                instance_type=row["instance_type"],
                provider=row["provider"],
                region=row["region"],
                market="spot" if row["market"] == "spot" else "on_demand",
                price_usd_per_hour=float(row["price_usd_per_hour"]),
                source=row["source"] + seen,
                observed_on=datetime.date.fromisoformat(row["observed_on"]) if row["observed_on"] else None,
                notice_s=notice_s(row["provider"]) if row["market"] == "spot" else None,
            )
        )
    return tuple(offers)


@cache
def _shipped_calibration(name: str) -> Calibration:
    file = files("hetplan.catalog") / "data" / "calibrations" / f"{name}.json"
    if not file.is_file():
        return datasheet_calibration(_gpus()[name])
    with as_file(file) as path:
        return Calibration.load(path)


def _with_doubts(row: dict[str, str]) -> str:
    return row["source"] + ("" if row["checked"] == "yes" else "; not checked against a second source")


def _family(name: str) -> str:
    """A name without dashes and case, for recognising an incomplete one."""
    return name.lower().replace("-", "").replace(" ", "")


def _owned(machine: InstanceType, region: str) -> Offer:
    return Offer(
        instance_type=machine.name, provider=machine.provider, region=region, market="owned", source="given by the user"
    )
