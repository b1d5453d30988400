"""Where weights come from: a folder, HTTP or S3.

Secrets come from the environment only: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN; without them S3
is asked anonymously.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import SplitResult, urlsplit

from hetplan.errors import InvalidInputError, StoreError
from hetplan.runtime.tensor_store.hosts import HostRules
from hetplan.runtime.tensor_store.manifest import FILE, MAX_MANIFEST_BYTES, Manifest
from hetplan.units import MIB

if TYPE_CHECKING:
    import aiohttp

_CONNECT_S = 10.0
_SILENCE_S = 60.0
_PORTS = {"http": 80, "https": 443}
_BEYOND_END = 416
_S3_ATTEMPTS = 3
# Before an HTTP request that broke is sent again.
_PAUSES_S = (0.2, 1.0)
# Where buckets are without an endpoint of one's own.
_AMAZON = (".amazonaws.com", ".amazonaws.com.cn")


class Source(Protocol):
    """Where a manifest and its tensors are."""

    location: str

    def read(self, file: str, start: int, stop: int, into: memoryview) -> int:
        """Copy a range of a file to the beginning of ``into``, as far as there is room; how long the range really was.

        It is shorter than asked where the file ends before ``stop``.
        """
        ...


class Folder:
    """A source on this machine."""

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        self._path = path

    def read(self, file: str, start: int, stop: int, into: memoryview) -> int:
        with (self._path / file).open("rb") as opened:
            opened.seek(start)
            count = opened.readinto(into)
            return count + len(opened.read(stop - start - count))


class Remote:
    """A source behind a file system of fsspec.

    Parameters
    ----------
    location : str
    filesystem : AbstractFileSystem
    passing : tuple of type
        Errors after which it is tried again: those that the file system does not try again by itself.
    """

    def __init__(self, location: str, filesystem: Any, passing: tuple[type[Exception], ...] = ()) -> None:
        self.location = location
        self._filesystem = filesystem
        self._passing = passing

    def read(self, file: str, start: int, stop: int, into: memoryview) -> int:
        content = self._content(f"{self.location}/{file}", start, stop)
        length = min(len(content), len(into))
        into[:length] = memoryview(content)[:length]
        return len(content)

    def _content(self, address: str, start: int, stop: int) -> bytes:
        for pause_s in _PAUSES_S:
            try:
                return self._asked_once(address, start, stop)
            except self._passing:
                time.sleep(pause_s)
        return self._asked_once(address, start, stop)

    def _asked_once(self, address: str, start: int, stop: int) -> bytes:
        try:
            return bytes(self._filesystem.cat_file(address, start=start, end=stop))
        except Exception as error:
            if _is_beyond_end(error):
                return b""
            raise


def open_source(location: str, rules: HostRules, threads: int) -> Source:
    """The source at a folder or an address.

    Raises
    ------
    InvalidInputError
        If it is of another kind, holds secrets, or a package is not installed.
    StoreError
        If its host is not allowed.
    """
    address = urlsplit(location)
    if address.scheme in ("", "file"):
        return Folder(_local_path(location, address))
    if address.scheme not in ("http", "https", "s3"):
        raise InvalidInputError(f"{location}: weights come from a folder, file, http, https or s3")
    if "@" in address.netloc or address.query or address.fragment or not address.hostname:
        raise InvalidInputError(
            f"{address.scheme}://{address.hostname or ''}{address.path}: an address has a host and a path, no user, "
            "query or fragment; secrets come from the environment"
        )
    location = location.rstrip("/")
    try:
        if address.scheme == "s3":
            return _s3(location, address.netloc, rules, threads)
        rules.require_host(address.hostname, address.port or _PORTS[address.scheme])
        return _http(location, rules, threads)
    except ModuleNotFoundError as error:
        raise InvalidInputError(f"{address.scheme} needs {error.name}; pip install 'hetplan[store]'") from None


def read_manifest(source: Source) -> Manifest:
    """The manifest of a source.

    Raises
    ------
    InvalidInputError
        If it is none, or too large.
    StoreError
        If it cannot be read.
    """
    where = f"{source.location}/{FILE}"
    content = bytearray(MIB)
    with explained(where):
        length = source.read(FILE, 0, MIB, memoryview(content))
        if length == MIB:
            content = bytearray(MAX_MANIFEST_BYTES + 1)
            length = source.read(FILE, 0, len(content), memoryview(content))
    return Manifest.parse(bytes(content[:length]), where)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """What goes wrong while reading, as a StoreError that says of what."""
    try:
        yield
    except FileNotFoundError:
        raise StoreError("missing_shard", f"{what} is not there. Copy the file, or make the shards again") from None
    except Exception as error:
        refused = _cause(error, StoreError)
        if isinstance(refused, StoreError):
            raise StoreError(refused.code, f"{what}: {refused}") from None
        raise StoreError("unreachable", f"{what}: {type(error).__name__}: {error}") from None


def _cause(error: BaseException | None, kind: type[BaseException]) -> BaseException | None:
    """The first error of a kind among what an error was raised from: clients wrap what a resolver raises."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _is_beyond_end(error: BaseException | None) -> bool:
    """Whether a range began behind the end of a file, as aiohttp or botocore say it."""
    while error is not None:
        response = getattr(error, "response", None)
        if getattr(error, "status", None) == _BEYOND_END:
            return True
        if isinstance(response, dict) and response.get("Error", {}).get("Code") == "InvalidRange":
            return True
        error = error.__cause__ or error.__context__
    return False


def _local_path(location: str, address: SplitResult) -> Path:
    if address.scheme == "":
        return Path(location)
    if address.netloc not in ("", "localhost"):
        raise InvalidInputError(f"{location}: a file address has three slashes, file:///path")
    return Path(address.path)


def _http(location: str, rules: HostRules, threads: int) -> Remote:
    import aiohttp
    from fsspec.implementations.http import HTTPFileSystem

    async def session(**_: Any) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=rules.resolver(), use_dns_cache=False, limit=threads),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S),
            # What was packed may grow without limit.
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
            raise_for_status=_require_the_range,
        )

    filesystem = HTTPFileSystem(get_client=session, allow_redirects=False, skip_instance_cache=True)
    return Remote(location, filesystem, (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError))


async def _require_the_range(response: aiohttp.ClientResponse) -> None:
    """Refuse an answer that is not the range asked for, before its body is read."""
    if 300 <= response.status < 400:
        there = urlsplit(response.headers.get("Location", "")).hostname
        raise StoreError(
            "refused_host", f"it is redirected to {there or 'elsewhere'}; redirects are not followed: name that address"
        )
    if response.status == 404:
        raise FileNotFoundError(str(response.url))
    response.raise_for_status()
    start, stop = map(int, response.request_info.headers["Range"].removeprefix("bytes=").split("-"))
    length = response.content_length
    # A whole file is fine where it is no longer than the range.
    if length is None or length > stop - start + 1 or (response.status != 206 and start > 0):
        raise StoreError(
            "unreachable",
            f"status {response.status} with {length} bytes for bytes {start} to {stop}; the server must answer ranges",
        )


def _s3(location: str, bucket: str, rules: HostRules, threads: int) -> Remote:
    from s3fs import S3FileSystem

    rules.require_bucket(bucket)
    # The same names as boto3; its files are not read, so that secrets and addresses have one place.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    if endpoint is not None:
        address = urlsplit(endpoint)
        if address.scheme not in _PORTS or not address.hostname or "@" in address.netloc:
            raise InvalidInputError("AWS_ENDPOINT_URL is not an http or https address with a host and without a user")
        rules.require_host(address.hostname, address.port or _PORTS[address.scheme])
    key = os.environ.get("AWS_ACCESS_KEY_ID")
    filesystem = S3FileSystem(
        anon=key is None,
        key=key,
        secret=os.environ.get("AWS_SECRET_ACCESS_KEY"),
        token=os.environ.get("AWS_SESSION_TOKEN"),
        endpoint_url=endpoint,
        client_kwargs={"region_name": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")},
        config_kwargs={
            "connector_args": {"resolver": rules.resolver(() if endpoint else _AMAZON), "use_dns_cache": False},
            "connect_timeout": _CONNECT_S,
            "read_timeout": _SILENCE_S,
            "max_pool_connections": threads,
            # s3fs tries again by itself, and does so for each attempt of botocore's.
            "retries": {"total_max_attempts": 1},
            # A proxy would be one more host, and would find out addresses by itself.
            "proxies": {},
            "ignore_configured_endpoint_urls": True,
            # A bucket in the host's name would be another host.
            "s3": {"addressing_style": "path" if endpoint else "auto"},
        },
        skip_instance_cache=True,
    )
    # Of a request, and as often of what makes it up: nine in all.
    filesystem.retries = _S3_ATTEMPTS
    return Remote(location, filesystem)
