"""Clusters that a user describes: a YAML file or mapping with own machines and offers, or a CSV of offers.

::

    region: us-west-2                 # defaults of the offers below
    market: on_demand                 # spot | on_demand | owned
    provider: aws
    machines: {g6.12xlarge: 3}        # catalogued machines at catalogued prices
    gpus:                             # own GPUs
      - {name: X1, memory_bytes: 48 GiB, bandwidth_bytes_per_s: 900.0e+9,
         dense_flops: {bf16: 300.0e+12}, native_dtypes: [bf16]}
    instance_types:                   # own machines, of own or catalogued GPUs
      - {name: box, gpu: X1, gpu_count: 4, link: pcie, network_gbps: 25}
    offers:                           # own prices, of own or catalogued machines
      - {instance_type: box, count: 2, market: owned, provider: own, region: cellar}
    zone_links:                       # where pipelines may cross regions, and what is between zones of one region
      - {ends: [aws/us-west-2, own/cellar], latency_s: 0.03, gbps: 5, egress_usd_per_gb: 0.09}
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetplan.catalog import tables
from hetplan.catalog.hardware import GpuSpec, InstanceType, Link
from hetplan.catalog.offers import Cluster, Market, Offer, Pool, ZoneLink
from hetplan.errors import InvalidInputError
from hetplan.files import read_csv_rows, read_yaml
from hetplan.units import BITS_PER_BYTE, GB, parse_bytes

ClusterLike = Cluster | Mapping[str, Any] | str | Path

MAX_AGE_DAYS = 90

_KEYS = ("region", "market", "provider", "machines", "gpus", "instance_types", "offers", "zone_links")
_GPU_KEYS = ("name", "vendor", "memory_bytes", "bandwidth_bytes_per_s", "dense_flops", "native_dtypes", "source")
_TYPE_KEYS = ("name", "provider", "gpu", "gpu_count", "link", "network_gbps", "host_memory_bytes", "source")
_OFFER_KEYS = (
    "instance_type", "count", "market", "price_usd_per_hour", "region", "zone", "provider", "notice_s",
    "interruptions_per_hour", "observed_on", "source",
)  # fmt: skip
_LINK_KEYS = ("ends", "latency_s", "gbps", "bytes_per_s", "egress_usd_per_gb", "source")
_CSV_COLUMNS = ("instance_type", "count")
_CSV_OPTIONAL = ("market", "price_usd_per_hour", "region", "provider", "observed_on", "source")


def resolve_cluster(
    cluster: ClusterLike, *, region: str = "us-west-2", market: Market = "on_demand", provider: str = "aws"
) -> Cluster:
    """A cluster from counts of catalogued machines, an own mapping, a file, or itself."""
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, Mapping):
        if any(isinstance(value, (Mapping, list, tuple)) for value in cluster.values()):
            return cluster_from_dict({"region": region, "market": market, "provider": provider, **cluster})
        return Cluster.from_counts(cluster, region=region, market=market, provider=provider)
    if isinstance(cluster, (str, Path)):
        if isinstance(cluster, str) and cluster in tables.list_instance_types():
            raise InvalidInputError(f"cluster={cluster!r} names one machine; say how many: {{{cluster!r}: 1}}")
        return cluster_from_file(cluster)
    raise InvalidInputError(
        f"cluster is a mapping such as {{'g6.12xlarge': 3}}, a file or a Cluster, got {type(cluster).__name__}"
    )


def cluster_from_file(path: str | Path) -> Cluster:
    """A cluster from a YAML file (see this module's head) or a CSV file of offers.

    A CSV has one row per offer: ``instance_type, count``, and where wanted ``market, price_usd_per_hour, region,
    provider, observed_on, source``.

    Raises
    ------
    InvalidInputError
        Naming the file and the entry or line.
    """
    kind = Path(path).suffix.lower()
    if kind in (".yaml", ".yml", ".json"):
        return cluster_from_dict(read_yaml(path), source=str(path))
    if kind != ".csv":
        raise InvalidInputError(f"{path}: a cluster is a .yaml, .yml, .json or .csv file; rename or convert it")
    rows = read_csv_rows(path, _CSV_COLUMNS, _CSV_OPTIONAL)
    entries = [(f"{path}, line {line}", {k: _csv_value(k, v) for k, v in row.items() if v}) for line, row in rows]
    return _cluster({}, entries, {}, str(path))


def cluster_from_dict(values: Mapping[str, Any], *, source: str = "cluster") -> Cluster:
    """A cluster from plain data, with the keys of a cluster file.

    Parameters
    ----------
    values : mapping
        See this module's head.
    source : str
        What error messages call it.

    Raises
    ------
    InvalidInputError
        For an unknown key, a value out of range or a price that is missing, naming the entry.

    Examples
    --------
    >>> own = {"instance_type": "g6.12xlarge", "count": 2, "market": "owned", "region": "lab"}
    >>> cluster_from_dict({"offers": [own]}).gpu_count
    8
    """
    given = _mapping(values, source, _KEYS)
    with _at(source):
        gpus = {spec.name: spec for spec in (_gpu(*entry, source) for entry in _entries(given, "gpus", source))}
        types = [_instance_type(*entry, gpus, source) for entry in _entries(given, "instance_types", source)]
    own = {machine.name: machine for machine in types}
    if len(own) != len(types) or len(gpus) != len(given.get("gpus") or ()):
        raise InvalidInputError(f"{source}: two gpus or two instance_types have one name; rename one")
    return _cluster(given, _entries(given, "offers", source), own, source)


def price_warnings(offers: Iterable[Offer], today: datetime.date, max_age_days: int = MAX_AGE_DAYS) -> list[str]:
    """What to doubt about prices: their age, a missing date, a spot price that saves nothing.

    Parameters
    ----------
    offers : iterable of Offer
        Prices in use.
    today : datetime.date
        Against which ages are counted.
    max_age_days : int
        The oldest price that raises no warning.

    Returns
    -------
    list of str
        One sentence per doubt, in the order of the offers; empty when there is none.
    """
    offers = [offer for offer in offers if offer.price_usd_per_hour is not None]
    warnings = []
    for offer in offers:
        age = offer.age_days(today)
        price = f"{offer.name}: ${offer.billed_usd_per_hour:g}/h"
        if age is None:
            warnings.append(f"{price}: the source states no day ({offer.source}). Check it before renting")
        elif age > max_age_days:
            warnings.append(f"{price} is {age} days old (limit {max_age_days}). Check it before renting")
        elif age < 0:
            warnings.append(f"{price} is dated {offer.observed_on}, after today ({today}). Check the date")
        regular = _on_demand_usd_per_hour(offer, offers) if offer.market == "spot" else None
        if regular is not None and offer.billed_usd_per_hour >= regular:
            warnings.append(f"{price} on spot is not below ${regular:g}/h on demand. Check it, or rent on demand")
    return warnings


def _on_demand_usd_per_hour(spot: Offer, offers: Iterable[Offer]) -> float | None:
    """The on-demand price beside a spot price: among the given offers, else the catalogue's."""
    catalogued = tables.list_offers(
        instance_type=spot.instance_type, region=spot.region, market="on_demand", provider=spot.provider
    )
    same = (spot.provider, spot.region, spot.instance_type, "on_demand")
    for offer in [*offers, *catalogued]:
        if (offer.provider, offer.region, offer.instance_type, offer.market) == same:
            return offer.price_usd_per_hour
    return None


# --- entries to types -------------------------------------------------------------------------------------------------


def _cluster(
    given: Mapping[str, Any], entries: Iterable[tuple[str, Any]], own: Mapping[str, InstanceType], source: str
) -> Cluster:
    types: dict[str, InstanceType] = {}
    pools: list[Pool] = []
    if "machines" in given:
        with _at(f"{source}: machines"):
            if "region" not in given:
                raise InvalidInputError("catalogued machines need a region; add one, such as region: us-west-2")
            listed = tables.cluster_from_counts(
                given["machines"],
                region=given["region"],
                market=given.get("market", "on_demand"),
                provider=given.get("provider", "aws"),
            )
        types |= {machine.name: machine for machine in listed.instance_types}
        pools += listed.pools
    for place, entry in entries:
        with _at(place):
            machine, pool = _pool(_mapping(entry, place, _OFFER_KEYS), given, own, source)
            if types.setdefault(machine.name, machine) != machine:
                raise InvalidInputError(f"{machine.name!r} is your own and a catalogued machine; rename yours")
        pools.append(pool)
    with _at(source):
        if not pools:
            raise InvalidInputError("the cluster is empty: give machines or offers")
        links = tuple(_zone_link(*entry, source) for entry in _entries(given, "zone_links", source))
        return Cluster(instance_types=tuple(types.values()), pools=tuple(pools), zone_links=links)


def _pool(
    entry: dict[str, Any], given: Mapping[str, Any], own: Mapping[str, InstanceType], source: str
) -> tuple[InstanceType, Pool]:
    for key in ("instance_type", "count"):
        if key not in entry:
            raise InvalidInputError(f"{key} is missing; give one")
    name = str(entry.pop("instance_type"))
    count = tables.machine_count(entry.pop("count"), name)
    defaults = {key: given[key] for key in ("region", "market", "provider") if key in given}
    machine = own[name] if name in own else tables.get_instance_type(name)
    if name not in own:
        defaults.pop("provider", None)
    offer = {"provider": machine.provider, "source": f"given in {source}"} | defaults | entry
    if "market" not in offer:
        raise InvalidInputError(f"market is missing; give one of {', '.join(tables.MARKETS)}")
    if "region" not in offer and offer["market"] == "owned":
        offer["region"] = "own"
    if offer["market"] == "spot":
        offer.setdefault("notice_s", tables.notice_s(str(offer["provider"])))
    return machine, Pool(offer=Offer(instance_type=machine.name, **offer), count=count)


def _zone_link(place: str, entry: Any, source: str) -> ZoneLink:
    with _at(place):
        values = _mapping(entry, place, _LINK_KEYS)
        for key in ("ends", "latency_s"):
            if key not in values:
                raise InvalidInputError(f"{key} is missing; give one")
        if ("gbps" in values) == ("bytes_per_s" in values):
            raise InvalidInputError("one of gbps (Gbit/s) and bytes_per_s is needed; give one")
        ends = values["ends"]
        if not isinstance(ends, (list, tuple)) or len(ends) != 2 or not all(isinstance(end, str) for end in ends):
            raise InvalidInputError(f"ends is {ends!r}; give two places, such as [aws/us-west-2, aws/us-east-1]")
        rate = values["bytes_per_s"] if "bytes_per_s" in values else _gbps(values["gbps"], "gbps") * GB / BITS_PER_BYTE
        link = Link(latency_s=values["latency_s"], bytes_per_s=rate, source=values.get("source", f"given in {source}"))
        return ZoneLink(ends=tuple(ends), link=link, egress_usd_per_gb=values.get("egress_usd_per_gb", 0.0))


def _gbps(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InvalidInputError(f"{key} is {value!r}; give Gbit/s above 0")
    return value


def _gpu(place: str, entry: Any, source: str) -> GpuSpec:
    with _at(place):
        values = {"vendor": "own", "source": f"given in {source}"} | _mapping(entry, place, _GPU_KEYS)
        return GpuSpec(**_sized(values, "memory_bytes"))


def _instance_type(place: str, entry: Any, gpus: Mapping[str, GpuSpec], source: str) -> InstanceType:
    with _at(place):
        values = {"provider": "own", "source": f"given in {source}"} | _mapping(entry, place, _TYPE_KEYS)
        values = _sized(values, "host_memory_bytes")
        if "gpu" not in values or "gpu_count" not in values:
            raise InvalidInputError("gpu and gpu_count are needed; give both")
        gpu, count = str(values.pop("gpu")), values["gpu_count"]
        link, gbps = values.pop("link", None), values.pop("network_gbps", None)
        if gbps is not None:
            _gbps(gbps, "network_gbps")
        if not isinstance(count, int) or count < 1:
            raise InvalidInputError(f"gpu_count is {count!r}; give a whole number from 1")
        return InstanceType(
            **values,
            gpu=gpus[gpu] if gpu in gpus else tables.get_gpu(gpu),
            intra_node_links={} if link is None else _group_links(link, count, source),
            inter_node_link=tables.network_link(gbps, f"given in {source}"),
        )


def _group_links(link: Any, gpu_count: int, source: str) -> dict[int, Link]:
    if isinstance(link, str):
        return tables.intra_node_links(link, gpu_count)
    links = {}
    for size, values in _mapping(link, "link", None).items():
        with _at(f"link of {size} GPUs"):
            if isinstance(size, bool) or not str(size).isdecimal():
                raise InvalidInputError("give group sizes as numbers, such as {2: {latency_s: ..., bytes_per_s: ...}}")
            fields = _mapping(values, "link", ("latency_s", "bytes_per_s", "source"))
            links[int(size)] = Link(**{"source": f"given in {source}"} | fields)
    return links


def _sized(values: dict[str, Any], key: str) -> dict[str, Any]:
    """The values with a size such as ``48 GiB`` turned into bytes."""
    if isinstance(values.get(key), str):
        try:
            values[key] = parse_bytes(values[key])
        except ValueError as error:
            raise InvalidInputError(f"{key}: {error}") from None
    return values


def _entries(given: Mapping[str, Any], key: str, source: str) -> list[tuple[str, Any]]:
    """A list of entries, each with the place that errors name."""
    entries = given.get(key) or []
    if not isinstance(entries, (list, tuple)):
        raise InvalidInputError(f"{source}: {key} must be a list of entries")
    return [(f"{source}: {key}[{index}]", entry) for index, entry in enumerate(entries)]


def _mapping(values: Any, place: str, known: tuple[str, ...] | None) -> dict[Any, Any]:
    if not isinstance(values, Mapping):
        raise InvalidInputError(f"{place}: must be a mapping of keys to values, not {type(values).__name__}")
    unknown = [] if known is None else [key for key in values if key not in known]
    if unknown:
        raise InvalidInputError(f"{place}: unknown key {unknown[0]!r}. Known: {', '.join(known or ())}")
    for key, value in values.items():
        # A cluster has no yes-or-no key, and pydantic would read True as 1.
        if isinstance(value, bool):
            raise InvalidInputError(f"{place}: {key} is {value!r}; give a value, not yes or no")
    return dict(values)


def _csv_value(key: str, text: str) -> Any:
    """Counts are whole numbers everywhere else too; other values are read by the types themselves."""
    return int(text) if key == "count" and text.removeprefix("-").isdecimal() else text


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Name the place in any error from inside, keeping its kind."""
    try:
        yield
    except InvalidInputError as error:
        if not str(error).startswith(place):
            error.args = (f"{place}: {error}",)
        raise
