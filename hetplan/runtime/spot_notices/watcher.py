"""What all watchers share: when they ask, what they remember, how they meet errors."""

from __future__ import annotations

import asyncio
import datetime
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import ClassVar

from hetplan.errors import InvalidInputError
from hetplan.runtime.spot_notices.notice import Action, Notice, Provider
from hetplan.runtime.spot_notices.service import MetadataService, ServiceError

Look = Callable[[], AsyncIterator[Notice]]

# Longest pause after errors: a third of the shortest grace, so that the end of an outage is seen in time.
_MAX_BACKOFF_S = 10.0
# Doubling stops here; the pause has long reached its limit.
_MAX_DOUBLINGS = 16
# No cloud announces an interruption earlier: a time beyond it is a mistake, of theirs or of this machine's clock.
_FAR = datetime.timedelta(days=1)


def utc_now() -> datetime.datetime:
    """The machine's clock."""
    return datetime.datetime.now(datetime.UTC)


class Watcher(ABC):
    """Reads a cloud's notices; one reader at a time.

    A cloud's watcher says its name, its service's address and its least grace, and lists its ``_looks``: each asks one
    question and gives the notices that it finds. A look that fails does not keep another from being taken.

    Parameters
    ----------
    base_url : str, optional
        Address of the service, http or https; by default the cloud's own.
    interval_s : float
        Seconds between looks, above 0.
    timeout_s : float
        Seconds for a whole answer, above 0.
    now : callable
        The clock, with its zone.
    sleep : callable
        Awaited between looks, with the seconds.

    Attributes
    ----------
    errors : int
        Questions without a good answer so far.
    last_error : str or None
        The latest of them: the path, and what was wrong.

    Raises
    ------
    InvalidInputError
        If a parameter is wrong, or aiohttp is not installed.
    """

    provider: ClassVar[Provider]
    base_url: ClassVar[str]
    least_grace_s: ClassVar[float]

    def __init__(
        self,
        *,
        base_url: str | None = None,
        interval_s: float = 1.0,
        timeout_s: float = 2.0,
        now: Callable[[], datetime.datetime] = utc_now,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        for name, value in (("interval_s", interval_s), ("timeout_s", timeout_s)):
            if not 0 < value < math.inf:
                raise InvalidInputError(f"{name} is {value}; give seconds above 0")
        if now().utcoffset() is None:
            raise InvalidInputError("now() gives a time without a zone; use datetime.now(UTC)")
        self._service = MetadataService(self.base_url if base_url is None else base_url, timeout_s)
        self._interval_s = interval_s
        self._now = now
        self._sleep = sleep
        self._seen: set[tuple[str, str]] = set()
        # Found and not yet handed out: a reader that is cancelled in between loses none of them.
        self._found: deque[Notice] = deque()
        self.errors = 0
        self.last_error: str | None = None

    async def notices(self) -> AsyncIterator[Notice]:
        """Each notice once, for as long as they are read.

        Between two notices nothing is open, so that a reader may stop at any time; cancelling it ends a question
        that is being asked.
        """
        failed_rounds = 0
        while True:
            answered = [await self._take(look) for look in self._looks()]
            while self._found:
                yield self._found.popleft()
            failed_rounds = 0 if any(answered) else failed_rounds + 1
            await self._sleep(self._pause_s(failed_rounds))

    async def acknowledge(self, notice: Notice) -> bool:
        """Tell the cloud that it need not wait any longer, where it can be told.

        Parameters
        ----------
        notice : Notice
            One of this watcher's notices.

        Returns
        -------
        bool
            Whether the cloud was told. False where it takes no such word, and after an error, which is counted.
        """
        return False

    @abstractmethod
    def _looks(self) -> tuple[Look, ...]:
        """The questions of one round, the most urgent first."""

    async def _take(self, look: Look) -> bool:
        try:
            async for notice in look():
                key = (notice.kind, notice.event_id)
                if key not in self._seen:
                    self._seen.add(key)
                    self._found.append(notice)
        except ServiceError as error:
            self._count(error)
            return False
        return True

    def _count(self, error: ServiceError) -> None:
        self.errors += 1
        self.last_error = str(error)

    def _pause_s(self, failed_rounds: int) -> float:
        doubled_s = self._interval_s * 2.0 ** min(max(failed_rounds - 1, 0), _MAX_DOUBLINGS)
        return max(self._interval_s, min(doubled_s, _MAX_BACKOFF_S))

    def _interruption(
        self, action: Action, *, event_id: str, source: str, deadline: datetime.datetime | None, started: bool = False
    ) -> Notice:
        now = self._now()
        if started:
            grace_s = 0.0
        elif deadline is None or deadline - now > _FAR:
            grace_s = self.least_grace_s
        else:
            grace_s = max((deadline - now).total_seconds(), 0.0)
        return Notice(
            kind="interruption",
            provider=self.provider,
            action=action,
            deadline=deadline,
            grace_s=grace_s,
            observed_at=now,
            event_id=event_id,
            source=source,
        )
