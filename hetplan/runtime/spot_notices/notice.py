"""That a machine will be taken, or may be: what every watcher hands out."""

from __future__ import annotations

import datetime
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, AwareDatetime, Field

from hetplan.base import Frozen
from hetplan.errors import InvalidInputError

Kind = Literal["interruption", "rebalance"]
Provider = Literal["aws", "gcp", "azure", "kubernetes"]
Action = Literal["terminate", "stop", "hibernate", "preempt"]


def _to_utc(moment: datetime.datetime) -> datetime.datetime:
    return moment.astimezone(datetime.UTC)


Moment = Annotated[AwareDatetime, AfterValidator(_to_utc)]


class Notice(Frozen):
    """A machine will be taken (an interruption), or is likelier than others to be (a rebalance).

    Attributes
    ----------
    kind : "interruption" or "rebalance"
        After a rebalance the machine may still be kept, and an interruption is a notice of its own.
    provider : "aws", "gcp", "azure" or "kubernetes"
        Who says so.
    action : "terminate", "stop", "hibernate", "preempt" or None
        What becomes of the machine, in the provider's word; None for a rebalance.
    deadline : datetime or None
        When the machine is taken at the earliest, in UTC; None where no time is named.
    grace_s : float
        Seconds from ``observed_at`` to the deadline, 0 once it is over. Where no time is named, or one more than a day
        ahead, what the provider grants at least.
    observed_at : datetime
        When the notice was seen, in UTC, on the watcher's clock.
    event_id : str
        What tells this notice from others of its provider and kind.
    source : str
        Where it was read: a path of the metadata service, or "sigterm".
    """

    kind: Kind
    provider: Provider
    action: Action | None
    deadline: Moment | None
    grace_s: Annotated[float, Field(ge=0)]
    observed_at: Moment
    event_id: Annotated[str, Field(min_length=1)]
    source: Annotated[str, Field(min_length=1)]

    @classmethod
    def from_sigterm(cls, grace_s: float, now: datetime.datetime) -> Self:
        """The notice that a SIGTERM is, on Kubernetes and wherever else a node is drained by one.

        Whoever installs the handler makes the notice: this does not.

        Parameters
        ----------
        grace_s : float
            Seconds between SIGTERM and SIGKILL: the pod's ``terminationGracePeriodSeconds``.
        now : datetime
            When the signal came, with its zone.

        Returns
        -------
        Notice
            An interruption by "kubernetes".

        Raises
        ------
        InvalidInputError
            If ``grace_s`` is negative, or reaches beyond the calendar, or ``now`` has no zone.

        Examples
        --------
        >>> import datetime
        >>> now = datetime.datetime(2026, 3, 1, 12, 0, tzinfo=datetime.UTC)
        >>> Notice.from_sigterm(25.0, now).deadline.isoformat()
        '2026-03-01T12:00:25+00:00'
        """
        try:
            deadline = now + datetime.timedelta(seconds=grace_s)
        except (OverflowError, ValueError):
            raise InvalidInputError(f"grace_s is {grace_s}; give the seconds until SIGKILL") from None
        return cls(
            kind="interruption",
            provider="kubernetes",
            action="terminate",
            deadline=deadline,
            grace_s=grace_s,
            observed_at=now,
            event_id=f"sigterm@{now.isoformat()}",
            source="sigterm",
        )
