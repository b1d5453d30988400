"""Where bytes may come from: hosts on a list, and never this machine's neighbourhood by accident.

A name is resolved and checked before it is used, and again by the connection itself (`resolver`): an answer of the
DNS that changes in between changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from hetplan.errors import StoreError

if TYPE_CHECKING:
    from aiohttp.abc import AbstractResolver

Resolve = Callable[[str, int], list[str]]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})
# Metadata services that are not link-local: EC2 over IPv6, Alibaba Cloud.
_METADATA = frozenset({ipaddress.ip_address("fd00:ec2::254"), ipaddress.ip_address("100.100.100.200")})
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, from the system."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class HostRules:
    """What may be connected to.

    Parameters
    ----------
    allowed : collection of str
        Host names and addresses; also ``s3://bucket``, which is about buckets.
    resolve : callable
        Host and port to addresses.
    """

    def __init__(self, allowed: Collection[str], resolve: Resolve = resolve) -> None:
        self._allowed = frozenset(entry.lower().strip("[]") for entry in allowed if "://" not in entry)
        self._buckets = frozenset(
            entry.removeprefix("s3://").strip("/") for entry in allowed if entry.startswith("s3://")
        )
        self._resolve = resolve

    def require_bucket(self, bucket: str) -> None:
        """Refuse a bucket that is not on the list."""
        if bucket not in self._buckets:
            raise _refused(f"s3://{bucket} is not on the list", f"allow it with --allow-host s3://{bucket}")

    def require_host(self, host: str, port: int, domains: tuple[str, ...] = ()) -> list[str]:
        """The addresses of a host on the list, or in ``domains``; refused otherwise, or if one is out of bounds."""
        name = host.lower().strip("[]").rstrip(".")
        if name not in self._allowed and not name.endswith(domains):
            raise _refused(f"{host} is not on the list", f"allow it with --allow-host {host}")
        try:
            addresses = self._resolve(name, port)
        except OSError as error:
            raise StoreError("unreachable", f"{host} has no address: {error}") from None
        for text in addresses:
            self._require_address(name, text)
        return addresses

    def resolver(self, domains: tuple[str, ...] = ()) -> AbstractResolver:
        """These rules as what aiohttp asks for addresses when it connects; also lets hosts in ``domains`` through."""
        from aiohttp.abc import AbstractResolver, ResolveResult

        rules = self

        class Resolver(AbstractResolver):
            async def resolve(
                self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
            ) -> list[ResolveResult]:
                addresses = await asyncio.get_running_loop().run_in_executor(
                    None, rules.require_host, host, port, domains
                )
                return [_result(host, port, text) for text in addresses]

            async def close(self) -> None:
                """Nothing is held."""

        return Resolver()

    def _require_address(self, name: str, text: str) -> None:
        address = _meant(text)
        if address.is_link_local or address in _METADATA:
            raise _refused(f"{name} is {text}, where machines keep their metadata", "name another host")
        if address.is_unspecified or address.is_multicast:
            raise _refused(f"{name} is {text}, which is no host", "name another host")
        if address.is_loopback and name not in _LOOPBACK_NAMES and not _is_address(name):
            raise _refused(f"{name} is {text}, this machine itself", "allow localhost by that name if you mean it")


def _meant(text: str) -> Address:
    """The address that packets go to: IPv4 may be wrapped in IPv6."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _result(host: str, port: int, text: str) -> Any:
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    return {
        "hostname": host,
        "host": text,
        "port": port,
        "family": family,
        "proto": 0,
        "flags": socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
    }


def _refused(what: str, instead: str) -> StoreError:
    return StoreError("refused_host", f"{what}; weights come from hosts on the list only: {instead}")
