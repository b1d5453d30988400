"""From a machine that is taken away to the router: each interruption's notice is told until the router has it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from hetplan.errors import InvalidInputError, RouterError
from hetplan.runtime.spot_notices import Notice, Watcher, make_watcher

_TIMEOUT_S = 5.0
_RETRY_S = 1.0
# After its deadline a notice is of no use; one without grace is told this long all the same.
_LEAST_TRIES_S = 30.0

OnEvent = Callable[[str, dict[str, Any]], None]


def forward_notices(
    provider: str, *, pipeline: int, router: str, key: str, base_url: str | None, on_event: OnEvent
) -> None:
    """Watch this machine until it is gone, and tell the router.

    Parameters
    ----------
    provider : "aws", "gcp" or "azure"
    pipeline : int
        The pipeline that this machine is part of.
    router : str
        Address of the router, http or https.
    key : str
        The router's key for notices.
    base_url : str, optional
        Address of the metadata service; by default the provider's own.
    on_event : callable
        Told of each notice and of what became of it.

    Raises
    ------
    UnknownNameError
        If the provider has no watcher.
    InvalidInputError
        If an address is wrong.
    """
    if not router.startswith(("http://", "https://")):
        raise InvalidInputError(f"the router's address is {router!r}; give http://HOST:PORT")
    watcher = make_watcher(provider, base_url=base_url)
    asyncio.run(_forward(watcher, pipeline, router.rstrip("/"), key, on_event, asyncio.sleep))


async def _forward(
    watcher: Watcher,
    pipeline: int,
    router: str,
    key: str,
    on_event: OnEvent,
    sleep: Callable[[float], Awaitable[None]],
) -> None:
    async for notice in watcher.notices():
        on_event("notice", {"pipeline": pipeline, **notice.model_dump(mode="json")})
        # A machine at risk is not one that goes: what to do about it is the operator's choice.
        if notice.kind == "interruption":
            told = await _tell(notice, pipeline, router, key, sleep)
            on_event("told" if told is None else "not_told", {"pipeline": pipeline, "reason": told})


async def _tell(
    notice: Notice, pipeline: int, router: str, key: str, sleep: Callable[[float], Awaitable[None]]
) -> str | None:
    """Tell the router until it answers; returns why not, if it never does."""
    from hetplan.runtime.router.admin import RouterAdmin

    left, reason = notice.grace_s, ""
    spent = 0.0
    async with RouterAdmin(router, key, timeout_s=_TIMEOUT_S) as admin:
        while spent <= max(notice.grace_s, _LEAST_TRIES_S):
            try:
                await admin.notice(pipeline, max(0.0, left))
                return None
            except RouterError as error:
                reason = str(error)
                if error.status is not None and 400 <= error.status < 500:
                    return reason
            await sleep(_RETRY_S)
            spent += _RETRY_S
            left -= _RETRY_S
    return reason
