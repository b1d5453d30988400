"""The router as the controller needs it: all of its targets at once, under a number that only grows."""

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
    """What the controller asks of a router."""

    async def set_targets(self, targets: Sequence[RouterTarget], revision: int) -> None:
        """Have requests sent to these and to no others. Those that are no longer listed take nothing new.

        Raises
        ------
        RouterError
            If it did not take them.
        """
        ...

    async def targets(self) -> tuple[tuple[RouterTarget, ...], int]:
        """What it sends to, and the revision; raises `RouterError`."""
        ...


class HttpRouter:
    """A router at an address; see `RouterClient`.

    Parameters
    ----------
    url : str
        http or https.
    key : str
        Its key for notices and targets.
    """

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = f"{url.rstrip('/')}/hetplan/targets", key

    async def set_targets(self, targets: Sequence[RouterTarget], revision: int) -> None:
        await to_thread(self._ask, "PUT", {"revision": revision, "targets": [t._asdict() for t in targets]})

    async def targets(self) -> tuple[tuple[RouterTarget, ...], int]:
        found = await to_thread(self._ask, "GET", None)
        try:
            listed = tuple(
                RouterTarget(int(t["pipeline"]), str(t["address"]), int(t["port"]), float(t.get("weight", 1.0)))
                for t in found["targets"]
            )
            return listed, int(found["revision"])
        except (KeyError, TypeError, ValueError) as error:
            raise RouterError(f"the router's answer makes no sense: {error!r}") from None

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
