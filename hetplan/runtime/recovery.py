"""What becomes of each running request when its machine is announced to go, from costs that were given or observed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from hetplan.base import Frozen
from hetplan.errors import InvalidInputError
from hetplan.policies.moves import choose_move, share_link

RecoveryMove = Literal["stay", "recompute", "transfer"]


class TransferCost(Frozen):
    """Sending a cache from one engine to another: ``latency_s + context * cache_bytes_per_token / bytes_per_s``.

    ``cache_bytes_per_token`` is over all layers; ``latency_s`` is what a send takes before and after the bytes, such as
    the request that makes the source write. ``source`` says where the figures come from.
    """

    latency_s: float = Field(ge=0)
    cache_bytes_per_token: int = Field(gt=0)
    bytes_per_s: float = Field(gt=0)
    source: str = Field(min_length=1)

    def seconds(self, context_tokens: ArrayLike) -> NDArray[np.float64]:
        """Predicted seconds to send caches of so many tokens, each alone on the link."""
        tokens = np.asarray(context_tokens, dtype=np.float64)
        return self.latency_s + tokens * self.cache_bytes_per_token / self.bytes_per_s


class RecoveryCosts(Frozen):
    """What a choice is predicted from.

    ``recompute_s[i]`` is the seconds to build a cache of ``context_tokens[i]`` tokens anew on the pipeline that takes
    over, from the request to its first token. Tokens ascend and seconds never fall. ``step_s`` is the seconds of one
    decode step where the request runs now. ``transfer`` is None where caches cannot be sent.
    """

    context_tokens: tuple[int, ...] = Field(min_length=1)
    recompute_s: tuple[float, ...]
    recompute_source: str = Field(min_length=1)
    step_s: float = Field(ge=0)
    step_source: str = Field(min_length=1)
    transfer: TransferCost | None = None

    @model_validator(mode="after")
    def _a_rising_table(self) -> Self:
        if len(self.context_tokens) != len(self.recompute_s):
            raise InvalidInputError(
                f"{len(self.context_tokens)} context_tokens and {len(self.recompute_s)} recompute_s; give one for each"
            )
        if self.context_tokens[0] < 1 or any(b <= a for a, b in pairwise(self.context_tokens)):
            raise InvalidInputError(f"context_tokens are {self.context_tokens}; they ascend from at least 1")
        if self.recompute_s[0] < 0 or any(b < a for a, b in pairwise(self.recompute_s)):
            raise InvalidInputError(f"recompute_s are {self.recompute_s}; from 0, a longer context takes no less")
        return self

    def recompute_seconds(self, context_tokens: ArrayLike) -> NDArray[np.float64]:
        """Predicted seconds to build caches anew: straight lines between the table's points.

        Below the first point a line from nothing, beyond the last one the last line goes on. Attention makes long
        contexts dearer than that, so a table should reach as far as contexts do.
        """
        tokens = np.asarray(context_tokens, dtype=np.float64)
        known, seconds = np.array([0, *self.context_tokens], float), np.array([0.0, *self.recompute_s])
        slope = (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])
        within: NDArray[np.float64] = np.interp(tokens, known, seconds)
        beyond: NDArray[np.float64] = np.maximum(tokens - known[-1], 0.0) * slope
        return within + beyond


class RunningRequest(Frozen):
    """A request on the machine that goes.

    ``context_tokens`` is prompt and answer so far. ``remaining_tokens`` is what may still come. Where nobody predicts
    it, it is the rest of ``max_tokens``: an upper bound, taken as given. A request then stays only where even its
    longest answer fits, and may be moved though it would have ended in time. ``sendable`` is False where this one's
    cache cannot be sent, whatever the costs say.
    """

    request_id: str = Field(min_length=1)
    context_tokens: int = Field(ge=1)
    remaining_tokens: int = Field(ge=0)
    sendable: bool = True


class Recovery(Frozen):
    """What to do with a request, and the predictions that say so.

    ``stay_s`` is until it ends where it is, ``recompute_s`` and ``transfer_s`` until it goes on elsewhere; None where
    nothing is known of it, or where its cache cannot be sent.
    """

    move: RecoveryMove
    stay_s: float | None
    recompute_s: float | None
    transfer_s: float | None


def choose_recovery(
    requests: Sequence[RunningRequest], grace_left_s: float, costs: RecoveryCosts | None
) -> dict[str, Recovery]:
    """For each request of a machine under notice: end there, have its cache built anew elsewhere, or have it sent.

    Parameters
    ----------
    requests : sequence of RunningRequest
        All that run there; they share the machine's link.
    grace_left_s : float
        Seconds until the machine is lost, from 0.
    costs : RecoveryCosts or None
        None where nothing is known yet: every request is then recomputed, which needs nothing of the machine that goes.

    Returns
    -------
    dict of str to Recovery
        By request id, in the order given.

    Raises
    ------
    InvalidInputError
        If two requests have one id, or the grace is negative.

    Notes
    -----
    `hetplan.policies.moves.choose_move` for each alone, then `share_link` for those that would be sent; the simulator
    decides by the same two. Requests that are recomputed are each predicted as if they were alone on their new
    pipeline.

    Examples
    --------
    >>> link = TransferCost(latency_s=0.1, cache_bytes_per_token=131_072, bytes_per_s=1.25e9, source="datasheet")
    >>> costs = RecoveryCosts(
    ...     context_tokens=(1000, 64_000),
    ...     recompute_s=(0.15, 9.5),
    ...     recompute_source="calibration",
    ...     step_s=0.1,
    ...     step_source="calibration",
    ...     transfer=link,
    ... )
    >>> running = [
    ...     RunningRequest(request_id="ends", context_tokens=500, remaining_tokens=10),
    ...     RunningRequest(request_id="short", context_tokens=500, remaining_tokens=400),
    ...     RunningRequest(request_id="long", context_tokens=64_000, remaining_tokens=400),
    ... ]
    >>> {name: recovery.move for name, recovery in choose_recovery(running, 30.0, costs).items()}
    {'ends': 'stay', 'short': 'recompute', 'long': 'transfer'}
    """
    if not grace_left_s >= 0:
        raise InvalidInputError(f"grace_left_s={grace_left_s}: give seconds from 0")
    ids = [request.request_id for request in requests]
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise InvalidInputError(f"request {twice!r} is there twice; give each once")
    if costs is None:
        return {name: Recovery(move="recompute", stay_s=None, recompute_s=None, transfer_s=None) for name in ids}
    context = np.array([request.context_tokens for request in requests], float)
    remaining = np.array([request.remaining_tokens for request in requests], float)
    recompute = costs.recompute_seconds(context)
    transfer = np.full(len(ids), np.inf)
    if costs.transfer is not None:
        sendable = np.array([request.sendable for request in requests], bool)
        transfer[sendable] = costs.transfer.seconds(context[sendable])
    moves = choose_move(context, remaining, grace_left_s, recompute, transfer, costs.step_s)
    moves = share_link(moves, recompute, transfer, grace_left_s)
    return {
        name: Recovery(
            move=move,
            stay_s=stay_s,
            recompute_s=recompute_s,
            transfer_s=transfer_s if np.isfinite(transfer_s) else None,
        )
        for name, move, stay_s, recompute_s, transfer_s in zip(
            ids,
            moves.tolist(),
            (remaining * costs.step_s).tolist(),
            recompute.tolist(),
            transfer.tolist(),
            strict=True,
        )
    }


class ObservedCosts:
    """Costs as they are seen while serving, for engines that nobody has calibrated.

    Contexts fall into buckets, each up to twice as long as the one before. A bucket's point is its median context at
    its median seconds per token, over the last ``kept`` observations: a few that waited in a queue or met a cache do
    not move it.

    Parameters
    ----------
    kept : int
        Observations that count, in each bucket and of steps, at least 1. More than half of them must stray to mislead.

    Examples
    --------
    >>> seen = ObservedCosts()
    >>> for seconds in (0.11, 0.10, 3.0):
    ...     seen.prefill(1000, seconds)
    >>> seen.step(0.02)
    >>> costs = seen.costs()
    >>> float(costs.recompute_seconds(2000)), costs.step_s
    (0.22, 0.02)
    """

    def __init__(self, kept: int = 33) -> None:
        if kept < 1:
            raise InvalidInputError(f"kept={kept}: keep at least one observation")
        self._kept = kept
        self._prefills: dict[int, deque[tuple[int, float]]] = {}
        self._steps: deque[float] = deque(maxlen=kept)

    def prefill(self, tokens: int, seconds: float) -> None:
        """A prompt of ``tokens`` gave its first token after ``seconds``.

        Tokens that the engine says it had in its cache do not count. What a request waits in the engine's queue does:
        one that is resubmitted waits too. Observations that cannot be, such as no tokens, are left out.
        """
        if tokens >= 1 and 0 <= seconds < np.inf:
            self._prefills.setdefault(tokens.bit_length(), deque(maxlen=self._kept)).append((tokens, seconds))

    def step(self, seconds: float) -> None:
        """A request's next token came ``seconds`` after the one before."""
        if 0 <= seconds < np.inf:
            self._steps.append(seconds)

    def costs(self, transfer: TransferCost | None = None) -> RecoveryCosts | None:
        """What is known by now; None until a prefill and a step were seen.

        Parameters
        ----------
        transfer : TransferCost, optional
            What sending costs: it is not observed here.
        """
        if not self._prefills or not self._steps:
            return None
        buckets = [np.array(self._prefills[size]) for size in sorted(self._prefills)]
        tokens = np.array([np.median(bucket[:, 0]) for bucket in buckets]).round()
        seconds = tokens * [np.median(bucket[:, 1] / bucket[:, 0]) for bucket in buckets]
        count = sum(len(bucket) for bucket in buckets)
        return RecoveryCosts(
            # Medians stay in their buckets, so they ascend. Noise may let seconds fall; a longer context takes no less.
            context_tokens=tuple(int(value) for value in tokens),
            recompute_s=tuple(np.maximum.accumulate(seconds).tolist()),
            recompute_source=f"medians of {count} observed prefills in {len(buckets)} buckets",
            step_s=float(np.median(self._steps)),
            step_source=f"median of {len(self._steps)} observed steps",
            transfer=transfer,
        )
