"""A cloud's notice as the controller has it, and as a policy is told: the one place where the two types meet."""

from __future__ import annotations

import datetime

from hetplan.policies import Notice as PolicyNotice
from hetplan.runtime.spot_notices.notice import Notice


def seconds_left(notice: Notice, now: datetime.datetime) -> float:
    """Seconds until the machine is taken, on the clock that saw the notice."""
    return max(0.0, notice.grace_s - (now - notice.observed_at).total_seconds())


def policy_notice(machine: str, pool: str, deadline_s: float, now_s: float) -> PolicyNotice:
    """What a policy is told of a machine under notice."""
    return PolicyNotice(now_s, pool, machine, max(0.0, deadline_s - now_s))
