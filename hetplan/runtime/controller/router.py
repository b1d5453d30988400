"""The router as the controller needs it: all of its targets at once, and which it was told last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from hetplan.errors import RouterError
from hetplan.runtime.router.admin import RouterAdmin
from hetplan.runtime.router.settings import RouteSettings, TargetSettings


class RouterTarget(NamedTuple):
    """A pipeline's engines, as the router sends to them."""

    pipeline: int
    address: str
    port: int
    weight: float
    model: str


class RouterClient(Protocol):
    """What the controller asks of a router. All raise `RouterError` where it refuses or is not there."""

    async def set_targets(
        self, targets: Sequence[RouterTarget], routes: Sequence[RouteSettings], *, grace_s: float | None = None
    ) -> int:
        """Have requests sent to these by these routes and, once they serve, to no others; returns the revision.

        Streams of those that are no longer listed are moved within ``grace_s``, or end where they are.
        """
        ...

    async def targets(self) -> tuple[tuple[RouterTarget, ...], int]:
        """What it was told to send to, and its revision."""
        ...

    async def demand(self, window_s: float) -> dict[str, Any]:
        """What was asked for in the last seconds; see `RouterAdmin.demand`."""
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
        self._url, self._key = url, key

    async def set_targets(
        self, targets: Sequence[RouterTarget], routes: Sequence[RouteSettings], *, grace_s: float | None = None
    ) -> int:
        async with RouterAdmin(self._url, self._key) as router:
            now = await router.targets()
            # What somebody else puts meanwhile is not overwritten unseen: the controller looks again.
            listed = [TargetSettings(**target._asdict()) for target in targets]
            answer = await router.set_targets(
                listed, routes=routes, revision=now["revision"], grace_s=grace_s, drain=not listed
            )
            return _listed(answer)[1]

    async def targets(self) -> tuple[tuple[RouterTarget, ...], int]:
        async with RouterAdmin(self._url, self._key) as router:
            return _listed(await router.targets())

    async def demand(self, window_s: float) -> dict[str, Any]:
        async with RouterAdmin(self._url, self._key) as router:
            return await router.demand(window_s)


def _listed(answer: dict[str, Any]) -> tuple[tuple[RouterTarget, ...], int]:
    try:
        wanted = tuple(
            RouterTarget(int(t["pipeline"]), str(t["address"]), int(t["port"]), float(t["weight"]), str(t["model"]))
            for t in answer["targets"]
            if t["wanted"]
        )
        return wanted, int(answer["revision"])
    except (KeyError, TypeError, ValueError) as error:
        raise RouterError(f"the router's answer makes no sense: {error!r}") from None
