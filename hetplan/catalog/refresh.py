"""Fresh prices from gpuhunt (the extra ``prices``) as a CSV of offers that a cluster file takes."""

from __future__ import annotations

import csv
import datetime
import io
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from hetplan.catalog.tables import list_instance_types
from hetplan.errors import InvalidInputError

COLUMNS = ("instance_type", "count", "market", "price_usd_per_hour", "region", "provider", "observed_on", "source")


class PriceRow(Protocol):
    """What is read of a gpuhunt catalogue item."""

    instance_name: str
    location: str
    price: float
    spot: bool
    provider: str


def gpuhunt_query(providers: Iterable[str]) -> Iterable[PriceRow]:
    """Ask gpuhunt's published catalogue.

    Raises
    ------
    InvalidInputError
        If gpuhunt is not installed, or its catalogue cannot be reached.
    """
    try:
        import gpuhunt
    except ImportError:
        raise InvalidInputError("fresh prices need gpuhunt; install hetplan[prices]") from None
    try:
        rows: Iterable[PriceRow] = gpuhunt.query(provider=list(providers), min_gpu_count=1)
    except Exception as error:
        raise InvalidInputError(
            f"gpuhunt's catalogue cannot be read: {error}. The catalogue's own prices stay"
        ) from None
    return rows


def refreshed_offers(
    providers: Iterable[str],
    today: datetime.date,
    *,
    query: Callable[[Iterable[str]], Iterable[PriceRow]] = gpuhunt_query,
) -> str:
    """Prices of the catalogued machines as CSV text, one machine each.

    Parameters
    ----------
    providers : iterable of str
        Such as ``["aws"]``.
    today : datetime.date
        Written as the day of observation.
    query : callable
        Where rows come from.

    Returns
    -------
    str
        With the columns of an offers file; edit the counts, delete rows, and give it to a cluster.

    Raises
    ------
    InvalidInputError
        If no row is of a catalogued machine, or a price is not positive.
    """
    known = {name.lower(): name for name in list_instance_types()}
    found: dict[tuple[str, str, str, bool], dict[str, Any]] = {}
    for item in query(providers):
        name = known.get(item.instance_name.lower())
        if name is None:
            continue
        if not (math.isfinite(item.price) and item.price > 0):
            raise InvalidInputError(
                f"{item.provider} {name} in {item.location}: price {item.price}; prices are above 0"
            )
        key = (item.provider, item.location, name, item.spot)
        # Of several prices for one offer the lowest counts.
        if key in found and float(found[key]["price_usd_per_hour"]) <= item.price:
            continue
        found[key] = {
            "instance_type": name,
            "count": 1,
            "market": "spot" if item.spot else "on_demand",
            "price_usd_per_hour": f"{item.price:g}",
            "region": item.location,
            "provider": item.provider,
            "observed_on": today.isoformat(),
            "source": "gpuhunt",
        }
    if not found:
        raise InvalidInputError(f"no price of a catalogued machine for {', '.join(providers)}; try other providers")
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found[key] for key in sorted(found))
    return text.getvalue()
