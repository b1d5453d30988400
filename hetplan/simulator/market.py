"""A spot market as a renter meets it: machines granted, warned of and taken, one event at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import InvalidInputError, UnknownNameError
from hetplan.policies import Loss, MarketEvent, Notice, Return
from hetplan.simulator.availability import Availability

__all__ = ["Market", "interruptions"]


class _Pool:
    """Availability of one pool, and the machines held there."""

    def __init__(self, name: str, times_s: NDArray[np.float64], counts: NDArray[np.int64], notice_s: float) -> None:
        self.name = name
        self.times_s = times_s
        self.counts = counts
        # Step i comes at times_s[i]; if it is a drop, it is announced at known_s[i]. Compared everywhere with the same
        # array, so that no rounding parts what was announced from what may still be granted.
        self.known_s = np.maximum(times_s - notice_s, 0.0)
        self.announced = 0
        self.made = 0
        # Machines that stand, in the order they were granted, and when those under notice will be lost.
        self.held: list[str] = []
        self.deadlines_s: dict[str, float] = {}

    def step(self, now_s: float) -> int:
        return int(np.searchsorted(self.times_s, now_s, side="right")) - 1

    def free(self, now_s: float) -> int:
        """Machines that can be had and are not to be taken back at once."""
        first = self.step(now_s)
        known = int(np.searchsorted(self.known_s, now_s, side="right"))
        lasting = int(self.counts[first : max(known, first + 1)].min())
        return max(lasting - (len(self.held) - len(self.deadlines_s)), 0)

    def safe(self) -> list[str]:
        return [node for node in self.held if node not in self.deadlines_s]


class Market:
    """Spot pools over time, driven by a simulator: it asks when something may happen and advances to then.

    Parameters
    ----------
    availability : Availability
        What each pool has over time.
    notice_s : float or mapping of str to float
        Seconds of warning before a machine is taken, for all pools or for each: AWS 120, GCP and Azure 30, Alibaba 300,
        or 0.
    seed : int
        Decides which of the machines held are taken.
    held : mapping of str to int, optional
        Machines held from before time 0, at most what each pool has then; `nodes` tells what came of it.

    Raises
    ------
    InvalidInputError
        For a notice below 0 or missing for a pool, or a count below 0.
    UnknownNameError
        For a pool that the availability lacks.

    Notes
    -----
    When a pool is to have fewer machines than are held, as many as are too many are given notice ``notice_s`` before,
    or at time 0 if that is past, and are lost when the pool shrinks. A notice is never taken back, even if another
    machine is released meanwhile. Within its notice of shrinking a pool grants only what it will
    still have, so no machine is granted to be taken back at once. At no time are more machines held than the pool has.

    Examples
    --------
    >>> steps = {"g6": ([0, 600], [2, 1])}
    >>> market = Market(Availability(steps, duration_s=3000), notice_s=120, seed=0)
    >>> market.acquire("g6", 3)
    ['g6/0', 'g6/1']
    >>> market.next_change_s()
    480.0
    >>> market.advance(480.0)
    [Notice(time_s=480.0, pool='g6', node='g6/1', grace_s=120.0)]
    >>> market.advance(3000.0)
    [Loss(time_s=600.0, pool='g6', node='g6/1')]
    """

    def __init__(
        self,
        availability: Availability,
        *,
        notice_s: float | Mapping[str, float],
        seed: int,
        held: Mapping[str, int] | None = None,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._now_s = 0.0
        self._pools: dict[str, _Pool] = {}
        moments = []
        for name in availability.pools:
            notice = _notice_s(name, notice_s)
            times, counts = availability.steps(name)
            pool = self._pools[name] = _Pool(name, times, counts, notice)
            drops = np.flatnonzero(np.diff(counts) < 0) + 1
            moments += [times[1:], pool.known_s[drops]]
        self._moments_s = np.unique(np.concatenate(moments))
        # Notices at time 0 are still to come.
        self._next = 0
        for name, count in (held or {}).items():
            pool = self._pool(name)
            _check_count(name, count)
            self._grant(pool, min(count, int(pool.counts[0])))

    @property
    def now_s(self) -> float:
        """The time to which the market has advanced."""
        return self._now_s

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the pools, sorted."""
        return tuple(self._pools)

    def nodes(self, pool: str) -> tuple[str, ...]:
        """Machines that stand in the pool, those under notice too, in the order they were granted."""
        return tuple(self._pool(pool).held)

    def free(self, pool: str) -> int:
        """Machines that the pool would grant now."""
        return self._pool(pool).free(self._now_s)

    def deadline_s(self, node: str) -> float | None:
        """When a machine under notice is lost; None for one that is not under notice."""
        for pool in self._pools.values():
            if node in pool.held:
                return pool.deadlines_s.get(node)
        raise UnknownNameError("held machine", node, [n for pool in self._pools.values() for n in pool.held])

    def next_change_s(self, after_s: float | None = None) -> float:
        """The first moment after ``after_s`` at which an event may come; infinity when none is left.

        Parameters
        ----------
        after_s : float, optional
            Seconds; by default the first moment that `advance` has not yet passed, which may be now.
        """
        if after_s is None:
            index = self._next
        else:
            index = max(int(np.searchsorted(self._moments_s, after_s, side="right")), self._next)
        return float(self._moments_s[index]) if index < self._moments_s.size else math.inf

    def advance(self, to_s: float) -> list[MarketEvent]:
        """Go on to a time and tell what happened up to it, it included.

        Parameters
        ----------
        to_s : float
            Seconds, not before now.

        Returns
        -------
        list of Notice, Loss and Return
            In the order of time; at one moment notices, losses, returns, by pool. A return says that the pool grew and
            has machines to grant.

        Raises
        ------
        InvalidInputError
            If ``to_s`` lies before now.
        """
        if not to_s >= self._now_s:
            raise InvalidInputError(f"advance to {to_s} s, but it is {self._now_s} s already")
        events: list[MarketEvent] = []
        while self._next < self._moments_s.size and self._moments_s[self._next] <= to_s:
            self._now_s = float(self._moments_s[self._next])
            self._next += 1
            for happening in (self._notices, self._losses, self._returns):
                for pool in self._pools.values():
                    events += happening(pool)
        self._now_s = float(to_s)
        return events

    def acquire(self, pool: str, count: int) -> list[str]:
        """Rent up to ``count`` machines of a pool now: the names of those granted, which may be fewer or none."""
        chosen = self._pool(pool)
        _check_count(pool, count)
        return self._grant(chosen, min(count, chosen.free(self._now_s)))

    def release(self, pool: str, node: str) -> None:
        """Give a machine back; one under notice is then not lost.

        Raises
        ------
        UnknownNameError
            If no such machine is held there.
        """
        chosen = self._pool(pool)
        if node not in chosen.held:
            raise UnknownNameError(f"machine held in {pool}", node, chosen.held)
        chosen.held.remove(node)
        chosen.deadlines_s.pop(node, None)

    def _pool(self, name: str) -> _Pool:
        try:
            return self._pools[name]
        except KeyError:
            raise UnknownNameError("pool", name, self._pools) from None

    def _grant(self, pool: _Pool, count: int) -> list[str]:
        granted = [f"{pool.name}/{pool.made + i}" for i in range(count)]
        pool.made += count
        pool.held += granted
        return granted

    def _notices(self, pool: _Pool) -> list[Notice]:
        events = []
        known = int(np.searchsorted(pool.known_s, self._now_s, side="right"))
        for step in range(pool.announced, known):
            safe = pool.safe()
            excess = len(safe) - int(pool.counts[step])
            if excess <= 0:
                continue
            deadline = float(pool.times_s[step])
            for index in sorted(self._rng.choice(len(safe), excess, replace=False).tolist()):
                pool.deadlines_s[safe[index]] = deadline
                events.append(Notice(self._now_s, pool.name, safe[index], deadline - self._now_s))
        pool.announced = known
        return events

    def _losses(self, pool: _Pool) -> list[Loss]:
        lost = [node for node in pool.held if pool.deadlines_s.get(node, math.inf) <= self._now_s]
        for node in lost:
            self.release(pool.name, node)
        return [Loss(self._now_s, pool.name, node) for node in lost]

    def _returns(self, pool: _Pool) -> list[Return]:
        step = pool.step(self._now_s)
        grew = step > 0 and pool.times_s[step] == self._now_s and pool.counts[step] > pool.counts[step - 1]
        free = pool.free(self._now_s)
        return [Return(self._now_s, pool.name, free)] if grew and free else []


def _notice_s(pool: str, notice_s: float | Mapping[str, float]) -> float:
    if isinstance(notice_s, Mapping):
        if pool not in notice_s:
            raise InvalidInputError(f"no notice_s for pool {pool}; give the seconds of warning of every pool")
        notice_s = notice_s[pool]
    if not (math.isfinite(notice_s) and notice_s >= 0):
        raise InvalidInputError(f"notice_s of pool {pool} is {notice_s}; give a finite number from 0")
    return notice_s


def _check_count(pool: str, count: int) -> None:
    if count < 0:
        raise InvalidInputError(f"{count} machines of {pool}; give 0 or more")


def interruptions(
    availability: Availability, held: Mapping[str, int], *, notice_s: float | Mapping[str, float], seed: int
) -> list[MarketEvent]:
    """What befalls a renter who wants so many machines of each pool at all times, and rents again when they return.

    Parameters
    ----------
    availability : Availability
        What each pool has over time.
    held : mapping of str to int
        Machines wanted of each pool, from before time 0 on.
    notice_s : float or mapping of str to float
        Seconds of warning, as for `Market`.
    seed : int
        Decides which machines are taken.

    Returns
    -------
    list of Notice, Loss and Return
        In the order of time, to the end of the availability.

    Raises
    ------
    InvalidInputError, UnknownNameError
        As `Market`.
    """
    market = Market(availability, notice_s=notice_s, seed=seed, held=held)
    events: list[MarketEvent] = []
    while (moment := market.next_change_s()) <= availability.duration_s:
        news = market.advance(moment)
        events += news
        for event in news:
            if isinstance(event, Return):
                standing = sum(market.deadline_s(node) is None for node in market.nodes(event.pool))
                market.acquire(event.pool, max(held.get(event.pool, 0) - standing, 0))
    return events
