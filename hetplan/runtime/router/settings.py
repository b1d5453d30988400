"""What the router is told: targets with weights, routes, limits. Read from the ``router.json`` of a launch folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from hetplan.base import Frozen
from hetplan.errors import InvalidInputError
from hetplan.units import MIB

_MAX_FILE_BYTES = 4 * 2**20
MAX_TARGETS = 4096
MAX_ROUTES = 4096
MAX_GRACE_S = 86_400
# Bodies of what only an administrator may send.
MAX_ADMIN_BYTES = 4 * MIB
_VARIABLE = re.compile(r"\$\{([A-Z][A-Z0-9_]{0,127})(?::-([^}]*))?\}")

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Count = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(gt=0, le=1e9)]


class TargetSettings(Frozen):
    """A pipeline's HTTP address, and its share of the traffic in proportion to ``weight``.

    ``max_in_flight`` requests are sent to it at a time, more wait for another target or for their turn; by default
    what the plan keeps in flight is not enforced here, as the engine queues by itself.
    """

    pipeline: Annotated[int, Field(ge=1)]
    address: Annotated[str, Field(min_length=1, max_length=255)]
    port: Annotated[int, Field(ge=1, le=65_535)]
    weight: Weight = 1.0
    model: str | None = None
    max_in_flight: Count | None = None

    @model_validator(mode="after")
    def _address_is_a_host(self) -> Self:
        try:
            host = urlsplit(self.url).hostname
        except ValueError:
            host = None
        bare = self.address.strip("[]")
        if host is None or host != bare.lower() or re.search(r"[\s/?#@\\]", self.address):
            raise ValueError(f"{self.address!r} is not a host name or an address")
        return self

    @property
    def url(self) -> str:
        """Base address of the engine's HTTP service."""
        host = f"[{self.address}]" if ":" in self.address and not self.address.startswith("[") else self.address
        return f"http://{host}:{self.port}"


class KvTransferSettings(Frozen):
    """How a cache is sent to another pipeline when a machine is announced to go, and what that takes.

    ``storage`` is the folder of vLLM's ExampleConnector; without it engines run its NixlConnector. ``block_tokens`` and
    ``layers`` are of the model and its engine, ``source`` says where the figures come from.
    """

    storage: str | None = None
    block_tokens: Count = 16
    layers: Count
    cache_bytes_per_token: Count
    bytes_per_s: Annotated[float, Field(gt=0)]
    latency_s: Annotated[float, Field(ge=0)] = 0.1
    source: Annotated[str, Field(min_length=1)] = "router.json"


class RouteSettings(Frozen):
    """The share of a query type that goes to a model's targets."""

    query_type: Annotated[str, Field(min_length=1, max_length=256)]
    model: Annotated[str, Field(min_length=1, max_length=512)]
    fraction: Annotated[float, Field(ge=0, le=1)]


def each_has_its_own_address(targets: Sequence[TargetSettings]) -> None:
    """Raise `ValueError` where two targets are one engine."""
    seen: set[str] = set()
    for target in targets:
        if target.url in seen:
            raise ValueError(f"two targets at {target.address}:{target.port}; give each pipeline its own")
        seen.add(target.url)


def routes_lead_somewhere(routes: Sequence[RouteSettings], models: Collection[str]) -> None:
    """Raise `ValueError` where a route names none of these models, or a query type's routes send nothing anywhere."""
    totals: dict[str, float] = {}
    for route in routes:
        if route.model not in models:
            raise ValueError(f"a route of {route.query_type!r} names {route.model!r}, which no target serves")
        totals[route.query_type] = totals.get(route.query_type, 0.0) + route.fraction
    for kind, total in totals.items():
        if total <= 0:
            raise ValueError(f"the routes of {kind!r} send nothing anywhere; give fractions above 0")


class TargetSet(Frozen):
    """The targets that there are to be, as they are put to a running router.

    Attributes
    ----------
    targets : tuple of TargetSettings
        All of them. Others leave, once another has taken their place.
    routes : tuple of RouteSettings, optional
        All of them; by default they stay as they are.
    revision : int, optional
        The one that this follows; refused where it is not the present one.
    grace_s : float, optional
        Streams of a target that leaves are moved within so long, or end there; by default all end there.
    drain : bool
        Others leave at once, also where nothing takes their place.
    """

    targets: Annotated[tuple[TargetSettings, ...], Field(max_length=MAX_TARGETS)]
    routes: Annotated[tuple[RouteSettings, ...], Field(max_length=MAX_ROUTES)] | None = None
    revision: Annotated[int, Field(ge=0)] | None = None
    grace_s: Annotated[float, Field(ge=0, le=MAX_GRACE_S)] | None = None
    drain: bool = False

    @model_validator(mode="after")
    def _targets_agree(self) -> Self:
        each_has_its_own_address(self.targets)
        return self


class RouterSettings(Frozen):
    """Everything the router is told, with its limits.

    Attributes
    ----------
    model : str
        Model of the targets that name none.
    targets : tuple of TargetSettings
    routes : tuple of RouteSettings
        Shares per query type (header ``X-Query-Type``); without any, a request goes to the targets of its model.
    kv_transfer : KvTransferSettings, optional
        How caches are sent on a notice; by default they are computed anew.
    max_body_bytes, max_in_flight, max_choices
        A larger request, more requests at a time, or more sequences per request (prompts times ``n``) are refused.
    max_wait_s : float
        A request without a live target waits so long, with comments sent every ``keepalive_s``.
    stall_s, first_token_s : float
        A stream is taken for dead when its target has sent nothing to anyone for ``stall_s`` while it was decoding, or
        nothing at all for ``first_token_s``.
    slow_client_s : float
        A client that takes nothing for so long is cut off; it can come back for the rest.
    request_s : float
        Longest life of a request.
    health_interval_s, health_timeout_s : float
    prefill_tokens : int
        Prompt tokens of migrated requests that a target is given at a time before their first new token.
    drain_s : float
        After SIGTERM running requests may finish for so long.
    journal_folder : str, optional
        Keeps the journal on disk too, and the targets that were put last, so that a restarted router goes on; else in
        memory only.
    journal_fsync : bool
        Each entry reaches the disk before it is sent; survives a machine, not only a process.
    journal_bytes, retention_s
        Bound of the journal in memory, and how long a request that ended or lost its client is kept.
    """

    model: Annotated[str, Field(min_length=1, max_length=512)]
    targets: Annotated[tuple[TargetSettings, ...], Field(min_length=1, max_length=MAX_TARGETS)]
    routes: tuple[RouteSettings, ...] = ()
    kv_transfer: KvTransferSettings | None = None
    max_body_bytes: Annotated[int, Field(ge=1024, le=2**30)] = 16 * MIB
    max_in_flight: Count = 4096
    max_choices: Count = 128
    max_wait_s: Seconds = 300.0
    keepalive_s: Seconds = 10.0
    stall_s: Seconds = 10.0
    first_token_s: Seconds = 300.0
    slow_client_s: Seconds = 60.0
    request_s: Seconds = 3600.0
    health_interval_s: Seconds = 1.0
    health_timeout_s: Seconds = 3.0
    prefill_tokens: Count = 8192
    drain_s: Seconds = 120.0
    journal_folder: str | None = None
    journal_fsync: bool = False
    journal_bytes: Annotated[int, Field(ge=2**20)] = 512 * MIB
    retention_s: Seconds = 600.0

    @model_validator(mode="after")
    def _targets_and_routes_agree(self) -> Self:
        each_has_its_own_address(self.targets)
        routes_lead_somewhere(self.routes, {self.model_of(target) for target in self.targets})
        return self

    def model_of(self, target: TargetSettings) -> str:
        """The model that a target serves."""
        return target.model or self.model

    @classmethod
    def load(cls, path: str | Path, environment: Mapping[str, str] | None = None) -> Self:
        """Read a ``router.json``; ``${NAME}`` as a target's address is taken from the environment.

        Raises
        ------
        InvalidInputError
            If the file cannot be read, holds a wrong field, or names a variable that is not set.
        """
        known = os.environ if environment is None else environment
        path = Path(path)
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise InvalidInputError(f"{path} has more than {_MAX_FILE_BYTES} bytes; it is no router.json")
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidInputError(
                f"cannot read {path}: {error.strerror}. `hetplan launch` writes a router.json"
            ) from None
        except ValueError as error:
            raise InvalidInputError(f"{path} is not JSON: {error}") from None
        if isinstance(content, dict) and isinstance(content.get("targets"), list):
            for target in content["targets"]:
                if isinstance(target, dict) and isinstance(target.get("address"), str):
                    target["address"] = _resolved(target["address"], known)
        return cls.from_dict(content)


def _resolved(address: str, known: Mapping[str, str]) -> str:
    found = _VARIABLE.fullmatch(address)
    if found is None:
        return address
    value = known.get(found[1], "").strip() or found[2]
    if not value:
        raise InvalidInputError(f"{found[1]} is not set; export the private address of that machine")
    return value
