"""Spot notices of Azure: scheduled events of the instance metadata service.

https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events

Azure turns the events on when a machine first asks for them, which takes up to two minutes: errors until then
are usual.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from hetplan.errors import InvalidInputError
from hetplan.runtime.spot_notices.notice import Notice, Provider
from hetplan.runtime.spot_notices.service import ServiceError, rfc_1123_time, text_of
from hetplan.runtime.spot_notices.watcher import Look, Watcher

_EVENTS = "/metadata/scheduledevents"
_EVENTS_VERSION = {"api-version": "2020-07-01"}
_NAME = "/metadata/instance/compute/name"
_NAME_VERSION = {"api-version": "2021-02-01", "format": "text"}
_METADATA = {"Metadata": "true"}
_VM_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class AzureWatcher(Watcher):
    """Asks for events of type Preempt that name this machine, of all those of its scale set.

    Parameters
    ----------
    vm_name : str, optional
        This machine's name; by default the service is asked for it, until it answers.
    **options
        As for every `Watcher`.
    """

    provider: ClassVar[Provider] = "azure"
    base_url: ClassVar[str] = "http://169.254.169.254"
    least_grace_s: ClassVar[float] = 30.0

    def __init__(self, *, vm_name: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        if vm_name is not None and not _VM_NAME.fullmatch(vm_name):
            raise InvalidInputError(f"vm_name is {vm_name!r}; give the machine's name: letters, digits, '.', '_', '-'")
        self._vm_name = vm_name
        self._incarnation: int | None = None

    async def acknowledge(self, notice: Notice) -> bool:
        if notice.provider != self.provider:
            raise InvalidInputError(f"the notice is from {notice.provider}; acknowledge it to its own watcher")
        start = {"StartRequests": [{"EventId": notice.event_id}]}
        try:
            await self._service.ask("POST", _EVENTS, headers=_METADATA, query=_EVENTS_VERSION, record=start)
        except ServiceError as error:
            self._count(error)
            return False
        return True

    def _looks(self) -> tuple[Look, ...]:
        return (self._events,)

    async def _events(self) -> AsyncIterator[Notice]:
        name = await self._own_name()
        record = (await self._service.ask("GET", _EVENTS, headers=_METADATA, query=_EVENTS_VERSION)).record()
        incarnation, events = record.get("DocumentIncarnation"), record.get("Events")
        if type(incarnation) is not int:
            raise ServiceError(f"{_EVENTS}: DocumentIncarnation is not a whole number")
        if incarnation == self._incarnation:
            return
        if not isinstance(events, list):
            raise ServiceError(f"{_EVENTS}: Events is not a list")
        fault: ServiceError | None = None
        for event in events:
            # A broken event hides no other one.
            try:
                notice = self._preempted(event, name)
            except ServiceError as error:
                fault = error
                continue
            if notice is not None:
                yield notice
        if fault is not None:
            raise fault
        self._incarnation = incarnation

    def _preempted(self, event: Any, name: str) -> Notice | None:
        """The notice that an event is, if it takes this machine."""
        if not isinstance(event, dict):
            raise ServiceError(f"{_EVENTS}: an event is not a JSON object")
        if text_of(event, "EventType", _EVENTS) != "Preempt":
            return None
        resources = event.get("Resources")
        if not isinstance(resources, list) or not all(isinstance(resource, str) for resource in resources):
            raise ServiceError(f"{_EVENTS}: Resources is not a list of names")
        # Azure keeps the case of names and does not tell them apart by it.
        if name.casefold() not in {resource.casefold() for resource in resources}:
            return None
        event_id, not_before = text_of(event, "EventId", _EVENTS), text_of(event, "NotBefore", _EVENTS)
        if not event_id:
            raise ServiceError(f"{_EVENTS}: EventId is empty")
        return self._interruption(
            "preempt",
            event_id=event_id,
            source=_EVENTS,
            deadline=rfc_1123_time(not_before, _EVENTS) if not_before else None,
            # An event that has begun has no time any more, and its grace is over.
            started=event.get("EventStatus") == "Started",
        )

    async def _own_name(self) -> str:
        if self._vm_name is None:
            name = (await self._service.ask("GET", _NAME, headers=_METADATA, query=_NAME_VERSION)).text()
            if not _VM_NAME.fullmatch(name):
                raise ServiceError(f"{_NAME}: not a machine's name")
            self._vm_name = name
        return self._vm_name
