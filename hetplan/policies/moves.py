"""What becomes of each request that has to leave a pipeline."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.errors import InvalidInputError

_STAY, _RECOMPUTE, _TRANSFER = "stay", "recompute", "transfer"


def choose_move(
    context_tokens: ArrayLike,
    remaining_tokens: ArrayLike,
    grace_left_s: float,
    recompute_s: ArrayLike,
    transfer_s: ArrayLike,
    step_s: float,
) -> NDArray[np.str_]:
    """For each request: finish where it is, have its cache built anew elsewhere, or have its cache sent.

    A request that is done within the grace stays: it loses nothing. Of the two ways to leave, the one that costs the
    request less time; its cache can be sent only if that ends within the grace. Each request is looked at alone; for
    those that share one link see `share_link`.

    Parameters
    ----------
    context_tokens, remaining_tokens : (R,) array
        Tokens in the cache, at least 1, and predicted tokens still to generate, from 0.
    grace_left_s : float
        Seconds until the machine is lost.
    recompute_s, transfer_s : (R,) array
        Predicted seconds to build each cache anew and to send it; infinity where it cannot be sent.
    step_s : float
        Seconds of one decode step.

    Returns
    -------
    (R,) string array
        "stay", "recompute" or "transfer". With equal times a cache is built anew, which needs nothing of the machine
        that is lost.

    Raises
    ------
    InvalidInputError
        If the arrays differ in length or hold a value out of range.

    Notes
    -----
    ShuntServe, section 5.1: recomputation grows faster than the context (attention), transfer in proportion to it, so
    that long contexts are sent and short ones computed; which is which depends on GPU and network (figure 5). Choosing
    per request is what section 8.1 names as future work.

    Examples
    --------
    >>> choose_move([500, 4000, 64_000], [10, 400, 400], 30.0, [0.1, 0.6, 7.6], [0.2, 0.8, 6.9], 0.1).tolist()
    ['stay', 'recompute', 'transfer']
    """
    context, remaining = _array("context_tokens", context_tokens), _array("remaining_tokens", remaining_tokens)
    recompute, transfer = _array("recompute_s", recompute_s), _array("transfer_s", transfer_s)
    if not context.shape == remaining.shape == recompute.shape == transfer.shape:
        raise InvalidInputError("context_tokens, remaining_tokens, recompute_s and transfer_s must be equally long")
    if (context < 1).any():
        raise InvalidInputError(f"context_tokens holds {context.min():g}; a request in flight has at least one token")
    if not (grace_left_s >= 0 and step_s >= 0):
        raise InvalidInputError(f"grace_left_s={grace_left_s}, step_s={step_s}: give seconds from 0")
    leave = np.where((transfer < recompute) & (transfer <= grace_left_s), _TRANSFER, _RECOMPUTE)
    return np.where(remaining * step_s <= grace_left_s, _STAY, leave)


def share_link(
    moves: NDArray[np.str_], recompute_s: ArrayLike, transfer_s: ArrayLike, grace_left_s: float
) -> NDArray[np.str_]:
    """Keep as many transfers as one link can send within the grace, one after another; the others are recomputed.

    Parameters
    ----------
    moves : (R,) string array
        As `choose_move` gives them.
    recompute_s, transfer_s : (R,) array
        Seconds to build each cache anew and to send it over the link alone.
    grace_left_s : float
        Seconds until the machine is lost.

    Returns
    -------
    (R,) string array
        ``moves`` with some "transfer" turned into "recompute".

    Notes
    -----
    A knapsack: seconds of recomputation spared, in a budget of seconds on the link. Caches are taken by what they spare
    for each second on the link, as long as they fit; where the single one that spares the most spares more than all of
    those, it is taken instead. That spares at least half of the most that can be spared.
    """
    recompute, transfer = _array("recompute_s", recompute_s), _array("transfer_s", transfer_s)
    wanted = np.flatnonzero(moves == _TRANSFER)
    spared = recompute[wanted] - transfer[wanted]
    # What takes no time on the link comes first.
    with np.errstate(divide="ignore", over="ignore"):
        order = np.argsort(-spared / transfer[wanted], kind="stable")
    left, sent = grace_left_s, []
    for index in order.tolist():
        if transfer[wanted[index]] <= left:
            left -= transfer[wanted[index]]
            sent.append(index)
    if wanted.size:
        most = int(np.argmax(np.where(transfer[wanted] <= grace_left_s, spared, -np.inf)))
        if transfer[wanted[most]] <= grace_left_s and spared[most] > spared[sent].sum():
            sent = [most]
    # Wide enough for every move, whatever the longest of these was.
    shared = moves.astype(f"<U{len(_RECOMPUTE)}")
    shared[wanted] = _RECOMPUTE
    shared[wanted[sent]] = _TRANSFER
    return shared


def _array(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not (array >= 0).all():
        raise InvalidInputError(f"{name} must be one row of numbers from 0")
    return array
