"""Where tensor stores read a model's shards, checked: a folder, a web server or a bucket."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from hetplan.catalog.engines import PLUGIN_ENGINE, EngineProfile
from hetplan.errors import InvalidInputError
from hetplan.launchers.names import argument

# The store's own format of --load-format.
LOAD_FORMAT = "hetplan"
_SCHEMES = ("http", "https", "s3")
# A name, or an IPv6 address.
_HOST = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?|[0-9a-f:.]+")


@dataclass(frozen=True, slots=True)
class ShardSource:
    """Folder or URL of shards, and the one host (without its port) or bucket that a store asks; None for a folder."""

    shards: str
    allowed_host: str | None = None


def shard_source(store: str | None, engine: EngineProfile) -> ShardSource | None:
    """What was asked for, checked; None for none.

    Raises
    ------
    InvalidInputError
        If the engine has no plugin that reads from a store, or the value is no absolute path and no plain URL of http,
        https or s3.
    """
    if store is None:
        return None
    if "--load-format" not in engine.flags:
        raise InvalidInputError(
            f"{engine.name} reads no tensor store; launch with engine={PLUGIN_ENGINE!r}, or leave store out"
        )
    argument(store, "store")
    if "://" not in store:
        if not PurePosixPath(store).is_absolute():
            raise InvalidInputError(
                f"store {store!r} is relative; give an absolute path, or a URL of http, https or s3"
            )
        return ShardSource(store)
    try:
        parts = urlsplit(store)
        # Reading the port checks it.
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise InvalidInputError(f"store {store!r} is no URL: {error}") from None
    if parts.scheme not in _SCHEMES:
        raise InvalidInputError(
            f"store {store!r} has the scheme {parts.scheme!r}; give an absolute path, or a URL of {', '.join(_SCHEMES)}"
        )
    if "@" in parts.netloc:
        raise InvalidInputError(
            "store holds a name or password, which would stand in a script; leave it out of the URL"
        )
    if parts.query or parts.fragment:
        raise InvalidInputError("store has a query or fragment; shards are asked for below its path alone")
    if not _HOST.fullmatch(host) or (parts.scheme == "s3" and port is not None):
        raise InvalidInputError(f"store {store!r} names no host or bucket; write it as in https://host/folder")
    return ShardSource(store, f"s3://{host}" if parts.scheme == "s3" else host)
