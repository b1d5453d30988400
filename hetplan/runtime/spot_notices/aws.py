"""Spot notices of AWS: instance metadata, version 2 (session tokens).

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html and
.../rebalance-recommendations.html
"""

from __future__ import annotations

import datetime
import re
from collections.abc import AsyncIterator
from typing import Any, ClassVar, get_args

from hetplan.runtime.spot_notices.notice import Action, Notice, Provider
from hetplan.runtime.spot_notices.service import Answer, ServiceError, iso_time, text_of
from hetplan.runtime.spot_notices.watcher import Look, Watcher

_SESSION = "/latest/api/token"
_INSTANCE_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
# The longest life that the service grants.
_LIFE = datetime.timedelta(seconds=21_600)
# Renewed while the old one still holds for some looks.
_RENEW_BEFORE = datetime.timedelta(seconds=60)
_TOKEN = re.compile(r"[A-Za-z0-9+/=_-]{1,1024}")


class AwsWatcher(Watcher):
    """Asks for an interruption, which AWS announces two minutes ahead, and for a rebalance recommendation."""

    provider: ClassVar[Provider] = "aws"
    base_url: ClassVar[str] = "http://169.254.169.254"
    least_grace_s: ClassVar[float] = 120.0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._token: str | None = None
        self._token_made_at = self._now()

    def _looks(self) -> tuple[Look, ...]:
        return (self._instance_action, self._rebalance)

    async def _instance_action(self) -> AsyncIterator[Notice]:
        answer = await self._get(_INSTANCE_ACTION)
        if answer is None:
            return
        record = answer.record()
        action = next((known for known in get_args(Action) if known == record.get("action")), None)
        if action is None:
            raise ServiceError(f"{_INSTANCE_ACTION}: unknown action")
        deadline = iso_time(text_of(record, "time", _INSTANCE_ACTION), _INSTANCE_ACTION)
        event_id = f"{action}@{deadline.isoformat()}"
        yield self._interruption(action, event_id=event_id, source=_INSTANCE_ACTION, deadline=deadline)

    async def _rebalance(self) -> AsyncIterator[Notice]:
        answer = await self._get(_REBALANCE)
        if answer is None:
            return
        noticed = iso_time(text_of(answer.record(), "noticeTime", _REBALANCE), _REBALANCE)
        yield Notice(
            kind="rebalance",
            provider=self.provider,
            action=None,
            deadline=None,
            grace_s=self.least_grace_s,
            observed_at=self._now(),
            event_id=f"rebalance@{noticed.isoformat()}",
            source=_REBALANCE,
        )

    async def _get(self, path: str) -> Answer | None:
        """What the service has at a path; None for nothing yet."""
        answer = await self._ask(path)
        if answer.status == 401:
            # The token ran out before its time, as when the machine slept: one new one, or it is an error.
            self._token = None
            answer = await self._ask(path)
        if answer.status == 401:
            self._token = None
            raise ServiceError(f"{path}: status 401 with a new token")
        return None if answer.status == 404 else answer

    async def _ask(self, path: str) -> Answer:
        headers = {"X-aws-ec2-metadata-token": await self._fresh_token()}
        return await self._service.ask("GET", path, headers=headers, accepted=(200, 401, 404))

    async def _fresh_token(self) -> str:
        now = self._now()
        # A clock that was set back says nothing about a token's age.
        holds = datetime.timedelta(0) <= now - self._token_made_at < _LIFE - _RENEW_BEFORE
        if self._token is None or not holds:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(int(_LIFE.total_seconds()))}
            token = (await self._service.ask("PUT", _SESSION, headers=headers)).text()
            if not _TOKEN.fullmatch(token):
                raise ServiceError(f"{_SESSION}: not a token")
            self._token, self._token_made_at = token, now
        return self._token
