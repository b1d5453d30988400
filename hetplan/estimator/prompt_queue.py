"""Prompts that wait for an engine's next step: a queue that is served in batches, one step after another.

Who arrives while a step goes on joins the next one, with all others that came meanwhile, as far as the step's tokens
go; the more prompts a step holds, the longer it takes, and the more come during it. The prompt tokens at the start of
each step are a Markov chain, here on a grid of token counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.estimator.base import FloatArray

CELLS = 256
# A mean prompt is so many cells, so that its own length is told apart from its neighbours'.
_CELLS_PER_PROMPT = 8
_LEAST_SHARE, _LEAST_WIDTH_S = 1e-8, 1e-9
# Between these shares a mixture's delays are taken as even: finer in the upper tail.
_SHARES = np.concatenate([np.linspace(0.0, 0.99, 496), 1 - np.geomspace(0.0099, 1e-6, 100), [1.0]])


@dataclass(frozen=True, slots=True, eq=False)
class Delays:
    """A mixture of delays, each even between ``start_s`` and ``start_s + width_s``, with its share; (K,) each."""

    start_s: FloatArray
    width_s: FloatArray
    share: FloatArray

    @property
    def mean_s(self) -> float:
        return float(self.share @ (self.start_s + self.width_s / 2))

    @property
    def variance_s2(self) -> float:
        second = self.start_s**2 + self.start_s * self.width_s + self.width_s**2 / 3
        return max(float(self.share @ second) - self.mean_s**2, 0.0)

    def covered(self, seconds: float, *, wait_share: float = 0.0, wait_s: float = 0.0) -> float:
        """Share of the delays that are at most ``seconds``.

        Parameters
        ----------
        seconds : float
        wait_share, wait_s : float
            An exponential wait of the mean ``wait_s`` comes before a share of them.
        """
        after, width = seconds - self.start_s, np.maximum(self.width_s, 1e-12)
        plain = float(self.share @ np.clip(after / width, 0.0, 1.0))
        if wait_share == 0:
            return plain

        def passed(at: FloatArray) -> FloatArray:
            """Integral of the exponential's distribution function."""
            at = np.maximum(at, 0.0)
            return np.asarray(at + wait_s * np.expm1(-at / wait_s))

        waited = float(self.share @ ((passed(after) - passed(after - width)) / width))
        return (1 - wait_share) * plain + wait_share * waited


def mixed(parts: list[tuple[float, Delays]]) -> Delays:
    """Delays of which a share is as each part says, in pieces that do not overlap."""
    start = np.concatenate([one.start_s for _, one in parts])
    width = np.maximum(np.concatenate([one.width_s for _, one in parts]), _LEAST_WIDTH_S)
    density = np.concatenate([share * one.share for share, one in parts]) / width
    ends = np.concatenate([start, start + width])
    order = np.argsort(ends, kind="stable")
    at = ends[order]
    slope = np.cumsum(np.concatenate([density, -density])[order])
    covered = np.concatenate([[0.0], np.cumsum(np.maximum(slope[:-1], 0.0) * np.diff(at))])
    bounds = np.interp(_SHARES, covered / covered[-1], at)
    return Delays(bounds[:-1], np.diff(bounds), np.diff(_SHARES))


@dataclass(frozen=True, slots=True, eq=False)
class PromptGrid:
    """Token counts ``cell_tokens * (0 .. CELLS - 1)``, and the shares of prompts on them."""

    cell_tokens: float
    prompt_share: FloatArray

    @property
    def tokens(self) -> FloatArray:
        return self.cell_tokens * np.arange(CELLS, dtype=np.float64)


def prompt_grid(tokens: FloatArray, shares: FloatArray) -> PromptGrid:
    """The grid for prompts of some lengths; a length between two cells is shared out so that the mean is kept."""
    mean = float(tokens @ shares)
    cell = max(mean / _CELLS_PER_PROMPT, float(tokens.max()) * 4 / CELLS)
    place = tokens / cell
    low = np.floor(place).astype(np.int64)
    found = np.zeros(CELLS)
    np.add.at(found, low, shares * (low + 1 - place))
    np.add.at(found, low + 1, shares * (place - low))
    return PromptGrid(cell, found)


def first_token_delays(
    grid: PromptGrid, *, requests_per_s: float, step_s: FloatArray, pass_s: FloatArray, step_tokens: float
) -> Delays:
    """Delays from arrival to first token, where steps follow one another without a pause.

    Parameters
    ----------
    grid : PromptGrid
    requests_per_s : float
        Poisson arrivals.
    step_s : (CELLS,) float array
        From the start of a step with so many prompt tokens to the start of the next one.
    pass_s : (CELLS,) float array
        From the start of such a step to its tokens: longer than ``step_s`` where the step passes several stages.
    step_tokens : float
        Most prompt tokens of a step.

    Returns
    -------
    Delays

    Notes
    -----
    With Q prompt tokens waiting when a step starts, the step takes t(Q) = ``step_s`` at min(Q, most), and the next one
    starts with max(Q - most, 0) and what arrived in t(Q): a compound Poisson number, by the transform
    exp(rate t (phi - 1)) of prompt lengths phi. Of the stationary shares p(Q), an arrival meets a step by p(Q) t(Q).
    It waits for the step's rest, even on 0 to t(Q), and for the steps that what is before it, and itself, takes. All
    arrivals of the step are counted as before it, which matters only where they fill a step.
    """
    most = max(min(int(step_tokens // grid.cell_tokens), CELLS - 1), 1)
    held = np.minimum(np.arange(CELLS, dtype=np.int64), most)
    left = np.arange(CELLS) - held
    during = step_s[held]
    size = 2 * CELLS
    lengths = np.fft.rfft(grid.prompt_share, size)
    arriving = np.exp(np.outer(requests_per_s * during, lengths - 1))
    share = _stationary(_shifted(np.fft.irfft(arriving, size)[:, :CELLS], left))
    ahead = _shifted(np.fft.irfft(arriving * lengths, size)[:, :CELLS], left)
    met = share * during
    ahead *= (met / met.sum())[:, np.newaxis]
    whole, rest = np.divmod(np.arange(CELLS), most)
    # A step that is just full is the last one.
    whole, rest = np.where((rest == 0) & (whole > 0), (whole - 1, np.full(CELLS, most)), (whole, rest))
    start = whole * step_s[most] + pass_s[rest]
    row, column = np.nonzero(ahead > _LEAST_SHARE)
    kept = ahead[row, column]
    return Delays(start[column], during[row], kept / kept.sum())


def immediate_delays(grid: PromptGrid, pass_s: FloatArray) -> Delays:
    """Delays of requests that start a step at once."""
    cells = np.flatnonzero(grid.prompt_share)
    return Delays(pass_s[cells], np.zeros(cells.size), grid.prompt_share[cells])


def _shifted(rows: FloatArray, by: NDArray[np.int64]) -> FloatArray:
    """Each row moved up by its number of cells; what passes the last one stays in it."""
    rows = np.maximum(rows, 0.0)
    moved = np.zeros_like(rows)
    for number, cells in enumerate(by.tolist()):
        moved[number, cells:] = rows[number, : CELLS - cells]
    moved[:, -1] += np.maximum(1.0 - moved.sum(axis=1), 0.0)
    return moved


def _stationary(following: FloatArray) -> FloatArray:
    """Stationary shares of a chain by its matrix of probabilities."""
    balance = following.T - np.eye(CELLS)
    balance[-1] = 1.0
    found = np.linalg.solve(balance, np.concatenate([np.zeros(CELLS - 1), [1.0]]))
    return np.asarray(np.maximum(found, 0.0) / math.fsum(np.maximum(found, 0.0)))
