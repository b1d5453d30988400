"""The made-up market: its published numbers, its correlation, its seed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.linalg import expm, null_space

from hetplan.errors import InvalidInputError
from hetplan.simulator.availability import Availability, window_scores
from hetplan.simulator.spot import HIGH_END, MID_TIER, MarketRates, spot_market

PAPER_POOLS = {"g6.12xlarge": 3, "g5.12xlarge": 2, "g6e.xlarge": 4}
QUIET = 688 / 1701
DAYS = 86_400.0
# Grows and shrinks so quickly that the counts tell the hidden states.
TELLING = MarketRates(
    plenty_s=7200,
    scarce_s=3600,
    plenty_leave_per_hour=0,
    plenty_return_per_hour=500,
    scarce_leave_per_hour=500,
    scarce_return_per_hour=0,
)


class WholeChain:
    """Hidden states and counts of all pools as one Markov chain, from the description of the market."""

    def __init__(self, capacities: tuple[int, ...], rates: MarketRates, correlation: float) -> None:
        self.rates, self.capacities = rates, capacities
        self.hidden = list(itertools.product((0, 1), repeat=len(capacities)))
        self.counts = list(itertools.product(*(range(c + 1) for c in capacities)))
        self.switching = self._switching(2 * correlation / (1 + correlation))
        self.share = self._stationary()

    def _switching(self, common: float) -> np.ndarray:
        rate = 3600 * (1 / self.rates.plenty_s + 1 / self.rates.scarce_s)
        flow = np.zeros((len(self.hidden),) * 2)
        for i, state in enumerate(self.hidden):
            for new, chance in ((1, self.rates.scarce_fraction), (0, 1 - self.rates.scarce_fraction)):
                flow[i, self.hidden.index((new,) * len(state))] += common * rate * chance
                for k in range(len(state)):
                    other = (*state[:k], new, *state[k + 1 :])
                    flow[i, self.hidden.index(other)] += (1 - common) * rate * chance
        return flow - np.diag(flow.sum(axis=1))

    def moves(self, counts: tuple[int, ...], state: tuple[int, ...]) -> list[tuple[tuple[int, ...], float]]:
        r, found = self.rates, []
        for k, (count, scarce) in enumerate(zip(counts, state, strict=True)):
            leave = (r.plenty_leave_per_hour, r.scarce_leave_per_hour)[scarce] * count
            back = (r.plenty_return_per_hour, r.scarce_return_per_hour)[scarce] * (self.capacities[k] - count)
            found += [((*counts[:k], count + step, *counts[k + 1 :]), rate) for step, rate in ((-1, leave), (1, back))]
        return [(other, rate) for other, rate in found if rate > 0]

    def _stationary(self) -> np.ndarray:
        states = [(c, h) for c in self.counts for h in self.hidden]
        index = {state: i for i, state in enumerate(states)}
        flow = np.kron(np.eye(len(self.counts)), self.switching)
        for (counts, hidden), i in index.items():
            for other, rate in self.moves(counts, hidden):
                flow[i, index[other, hidden]] += rate
                flow[i, i] -= rate
        share = null_space(flow.T)[:, 0]
        return (share / share.sum()).reshape(len(self.counts), len(self.hidden))

    def quiet(self, hours: float) -> float:
        """Chance that no count changes in a window."""
        total = 0.0
        for counts, share in zip(self.counts, self.share, strict=True):
            out = [sum(rate for _, rate in self.moves(counts, state)) for state in self.hidden]
            total += float((share @ expm((self.switching - np.diag(out)) * hours)).sum())
        return total

    def any_available(self, pool: int) -> float:
        return float(sum(s.sum() for c, s in zip(self.counts, self.share, strict=True) if c[pool] > 0))


def test_the_default_is_fitted_to_the_papers_quiet_windows() -> None:
    assert WholeChain((3, 2, 4), MID_TIER, 0.3).quiet(50 / 60) == pytest.approx(QUIET, abs=0.002)


def test_the_high_end_is_fitted_to_the_papers_h100() -> None:
    assert WholeChain((1,), HIGH_END, 0.0).any_available(0) == pytest.approx(0.2864, abs=0.001)


def test_quiet_windows_over_seeds() -> None:
    shares = [(window_scores(spot_market(PAPER_POOLS, 6 * DAYS, seed=seed))[1] == 0).mean() for seed in range(20)]
    error = np.std(shares, ddof=1) / np.sqrt(len(shares))
    assert error < 0.03
    assert abs(np.mean(shares) - QUIET) <= 3 * error


def any_share(market: Availability, pool: str) -> float:
    times, counts = market.steps(pool)
    return float(((counts > 0) * np.diff([*times, market.duration_s])).sum() / market.duration_s)


def test_the_h100_over_seeds() -> None:
    shares = [any_share(spot_market({"p5": 1}, 60 * DAYS, seed=s, rates=HIGH_END), "p5") for s in range(20)]
    assert abs(np.mean(shares) - 0.2864) <= 3 * np.std(shares, ddof=1) / np.sqrt(len(shares))


def test_a_pool_of_none_never_has_any() -> None:
    market = spot_market({"p6-b200": 0, "p5": 1}, 6 * DAYS, seed=0, rates=HIGH_END)
    assert market.steps("p6-b200")[1].tolist() == [0]


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_states_of_two_pools_are_correlated_as_asked(correlation: float) -> None:
    found = []
    for seed in range(5):
        market = spot_market({"a": 1, "b": 1}, 40 * DAYS, seed=seed, rates=TELLING, correlation=correlation)
        at = np.arange(0, market.duration_s, 600)
        seen = [market.steps(p)[1][np.searchsorted(market.steps(p)[0], at, side="right") - 1] for p in ("a", "b")]
        found.append(np.corrcoef(seen)[0, 1])
        assert any_share(market, "a") == pytest.approx(2 / 3, abs=0.1)
    assert abs(np.mean(found) - correlation) <= 3 * np.std(found, ddof=1) / np.sqrt(len(found)) + 0.01


def test_pools_with_correlation_one_are_scarce_together() -> None:
    market = spot_market({"a": 1, "b": 1}, 20 * DAYS, seed=0, rates=TELLING, correlation=1.0)
    at = np.arange(0, market.duration_s, 60)
    same = [market.count("a", t) == market.count("b", t) for t in at]
    assert np.mean(same) > 0.99


def test_the_seed_decides() -> None:
    one, again, other = (list(spot_market(PAPER_POOLS, DAYS, seed=s).changes()) for s in (1, 1, 2))
    assert one == again
    assert one != other


def test_counts_stay_within_the_pool() -> None:
    market = spot_market(PAPER_POOLS, 6 * DAYS, seed=3)
    for pool, capacity in PAPER_POOLS.items():
        counts = market.steps(pool)[1]
        assert counts.min() >= 0
        assert counts.max() <= capacity
        assert (np.abs(np.diff(counts)) == 1).all()


def test_each_pool_may_have_rates_of_its_own_without_correlation() -> None:
    market = spot_market({"g6": 3, "p5": 1}, DAYS, seed=0, rates={"g6": MID_TIER, "p5": HIGH_END}, correlation=0)
    assert market.pools == ("g6", "p5")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"pools": {}}, "without pools"),
        ({"pools": {"a": -1}}, "a has -1"),
        ({"duration_s": 0.0}, "duration_s"),
        ({"correlation": 1.1}, "correlation"),
        ({"rates": {"b": MID_TIER}}, "no rates for pool a"),
        ({"pools": {"a": 1, "b": 1}, "rates": {"a": MID_TIER, "b": HIGH_END}}, "different lengths"),
    ],
)
def test_wrong_markets_are_refused(changed: dict[str, object], told: str) -> None:
    values: dict[str, object] = {"pools": {"a": 1}, "duration_s": 100.0, "seed": 0, **changed}
    with pytest.raises(InvalidInputError, match=told):
        spot_market(values.pop("pools"), values.pop("duration_s"), **values)
