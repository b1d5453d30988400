"""The router as the controller needs it: all of its targets at once, and which it was told last."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from asyncio import to_thread
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from hetplan.errors import HetplanError

_TIMEOUT_S = 10.0


class RouterError(HetplanError):
    """The router cannot be reached, or has refused."""

    def __init__(self, message: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(message)


class RouterTarget(NamedTuple):
    """A pipeline's engines, as the router sends to them."""

    pipeline: int
    address: str
    port: int
    weight: float


class RouterClient(Protocol):
    """What the controller asks of a router. Both raise `RouterError` where it refuses or is not there."""

    async def set_targets(self, targets: Sequence[RouterTarget], *, grace_s: float | None = None) -> int:
        """Have requests sent to these and, once they serve, to no others; returns the router's revision.

        Streams of those that are no longer listed are moved within ``grace_s``, or end where they are.
        """
        ...

    async def targets(self) -> tuple[tuple[RouterTarget, ...], int]:
        """What it was told to send to, and its revision."""
        ...


class HttpRouter:
    """A router at an address; see `RouterClient`.

    Parameters
    ----------
    url : str
        http or https.
    key : str
        Its key for administration.
    """

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = f"{url.rstrip('/')}/admin/targets", key

    async def set_targets(self, targets: Sequence[RouterTarget], *, grace_s: float | None = None) -> int:
        now = await self.targets()
        # What somebody else has put meanwhile is not overwritten unseen: the controller looks again.
        body = {"revision": now[1], "grace_s": grace_s, "targets": [target._asdict() for target in targets]}
        answer = await to_thread(self._ask, "PUT", body if targets else {**body, "drain": True})
        return _listed(answer)[1]

    async def targets(self) -> tuple[tuple[RouterTarget, ...], int]:
        return _listed(await to_thread(self._ask, "GET", None))

    def _ask(self, method: str, body: dict[str, Any] | None) -> dict[str, Any]:
        request = urllib.request.Request(  # noqa: S310 - http or https, checked by the command line
            self._url,
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
            method=method,
        )
        # No proxy: the router is near.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=_TIMEOUT_S) as answer:
                content: dict[str, Any] = json.load(answer)
                return content
        except urllib.error.HTTPError as error:
            with error:
                raise RouterError(f"the router answered {error.code}", error.code) from None
        except (OSError, ValueError) as error:
            raise RouterError(f"the router cannot be reached: {error}") from None


def _listed(answer: dict[str, Any]) -> tuple[tuple[RouterTarget, ...], int]:
    try:
        wanted = tuple(
            RouterTarget(int(t["pipeline"]), str(t["address"]), int(t["port"]), float(t["weight"]))
            for t in answer["targets"]
            if t["wanted"]
        )
        return wanted, int(answer["revision"])
    except (KeyError, TypeError, ValueError) as error:
        raise RouterError(f"the router's answer makes no sense: {error!r}") from None
