"""Spot notices of Google Cloud: the value ``instance/preempted`` of the metadata server.

https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption and, for waiting,
https://cloud.google.com/compute/docs/metadata/querying-metadata#waitforchange
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

from hetplan.runtime.spot_notices.notice import Notice, Provider
from hetplan.runtime.spot_notices.service import ServiceError
from hetplan.runtime.spot_notices.watcher import Look, Watcher

_PREEMPTED = "/computeMetadata/v1/instance/preempted"
_FLAVOR = {"Metadata-Flavor": "Google"}
# A connection that dies while it waits is noticed after this and the time for an answer, within the 30 s of grace.
_WAIT_S = 10


class GcpWatcher(Watcher):
    """Waits for the value to change where the server gives an ETag, which tells at once; else asks again and again.

    The server names no time: the machine is taken 30 s after the value turns.
    """

    provider: ClassVar[Provider] = "gcp"
    # By number: metadata.google.internal would need a name server first.
    base_url: ClassVar[str] = "http://169.254.169.254"
    least_grace_s: ClassVar[float] = 30.0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._etag: str | None = None

    def _looks(self) -> tuple[Look, ...]:
        return (self._preempted,)

    async def _preempted(self) -> AsyncIterator[Notice]:
        query: dict[str, str] = {}
        if self._etag is not None:
            query = {"wait_for_change": "true", "timeout_sec": str(_WAIT_S), "last_etag": self._etag}
        # Whatever fails, the next question is a plain one.
        self._etag = None
        answer = await self._service.ask(
            "GET", _PREEMPTED, headers=_FLAVOR, query=query, wait_s=_WAIT_S if query else 0.0
        )
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise ServiceError(f"{_PREEMPTED}: not Google's metadata server (no Metadata-Flavor: Google)")
        value = answer.text()
        if value not in ("TRUE", "FALSE"):
            raise ServiceError(f"{_PREEMPTED}: neither TRUE nor FALSE")
        self._etag = answer.headers.get("ETag") or None
        if value == "TRUE":
            yield self._interruption("preempt", event_id="preempted", source=_PREEMPTED, deadline=None)
