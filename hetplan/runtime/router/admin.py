"""A client of a router's administration, for who starts and ends pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

import aiohttp
import orjson

from hetplan.errors import InvalidInputError, RouterError
from hetplan.runtime.router.settings import RouteSettings, TargetSettings
from hetplan.runtime.router.targets import whole

_MAX_ANSWER_BYTES = 16 * 2**20
_MESSAGE_CHARACTERS = 2000


class RouterAdmin:
    """Targets, demand and notices of a router. Close it, or use it in ``async with``.

    Parameters
    ----------
    base_url : str
        Address of the router, http or https.
    key : str
        The router's HETPLAN_ADMIN_KEY.
    timeout_s : float
        Seconds that an answer may take.

    Raises
    ------
    InvalidInputError
        If the address is wrong.

    Notes
    -----
    All methods raise `RouterError` where the router refuses, and where it does not answer as a router does. ``.status``
    tells what it answered: 409 where targets were put meanwhile by somebody else, or where none of those put serves or
    starts; None where it was not reached.
    """

    def __init__(self, base_url: str, key: str, *, timeout_s: float = 10.0) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise InvalidInputError(f"the router's address is {base_url!r}; give http://HOST:PORT")
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def targets(self) -> dict[str, Any]:
        """The present ``revision``, ``targets`` with what each is doing, and ``routes``."""
        return await self._ask("GET", "/admin/targets")

    async def set_targets(
        self,
        targets: Iterable[TargetSettings],
        *,
        revision: int | None = None,
        routes: Iterable[RouteSettings] | None = None,
        grace_s: float | None = None,
        drain: bool = False,
    ) -> dict[str, Any]:
        """These are the targets from now on; returns what `targets` would.

        Parameters
        ----------
        targets : iterable of TargetSettings
            All of them. Others leave, once another has taken their place.
        revision : int, optional
            The one that was looked at; refused where it is not the present one.
        routes : iterable of RouteSettings, optional
            All of them; by default they stay as they are.
        grace_s : float, optional
            Streams of a target that leaves are moved within so long, or end there; by default all end there.
        drain : bool
            Others leave at once, also where nothing takes their place.
        """
        body: dict[str, Any] = {
            "targets": [target.model_dump() for target in targets],
            "revision": revision,
            "grace_s": grace_s,
            "drain": drain,
        }
        if routes is not None:
            body["routes"] = [route.model_dump() for route in routes]
        return await self._ask("PUT", "/admin/targets", body)

    async def demand(self, window_s: float = 60.0) -> dict[str, Any]:
        """What was asked for lately: ``covered_s``, and lines by model and query type as ``demand``."""
        return await self._ask("GET", f"/admin/demand?window_s={window_s:g}")

    async def notice(self, pipeline: int, grace_s: float | None, *, address: str | None = None) -> dict[str, Any]:
        """A pipeline's machine goes in so many seconds; None takes that back.

        ``address``, as HOST:PORT, says which engine, where two have one number.
        """
        where = {} if address is None else {"address": address}
        return await self._ask("POST", "/admin/notices", {"pipeline": pipeline, "grace_s": grace_s, **where})

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, trust_env=False)
        try:
            async with self._session.request(method, self._base_url + path, json=body, allow_redirects=False) as reply:
                status = reply.status
                try:
                    content = await whole(reply, _MAX_ANSWER_BYTES)
                except ValueError:
                    raise RouterError(f"{self._base_url} answers more than {_MAX_ANSWER_BYTES} bytes", status) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RouterError(
                f"{self._base_url} does not answer: {type(error).__name__}. Is the router there?"
            ) from None
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError:
            answer = None
        if status == 200 and isinstance(answer, dict):
            return answer
        told = answer.get("error") if isinstance(answer, dict) else None
        message = told.get("message") if isinstance(told, dict) else None
        said = (
            message[:_MESSAGE_CHARACTERS] if isinstance(message, str) else "no router's answer; is the address right?"
        )
        raise RouterError(f"{method} {path.partition('?')[0]} was answered {status}: {said}", status)
