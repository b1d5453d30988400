"""The study of robust plans: beside cheapest plans that may cost as much more, under stress."""

from __future__ import annotations

import sys
from statistics import fmean
from typing import Any

from page import by, table

from hetplan.problem.allocation import AllocationProblem
from hetplan.solvers.allocation.studies import robust_study

SEEDS = range(10)
SCENARIOS, TRAINING, TIME_LIMIT_S = 500, 50, 20.0
STRESSED, AS_DRAWN = 1.5, 1.0
EXTRA_COSTS = (0.05, 0.10, 0.20)
CHEAPEST, RAISED, TIGHTENED, ROBUST = "exact", "budget raised", "limits tightened", "robust"
# A plan of which fewer (scenario, query type) are violated than this stands stress as it is.
_SOUND = 0.01
# Dollars, or a share of violations, that are no difference.
_SAME = 1e-9

Runs = dict[int, dict[Any, dict[str, Any]]]


def robust() -> str:
    """The tables and what they say."""
    parts = []
    for stress in (STRESSED, AS_DRAWN):
        runs: Runs = {}
        for seed in SEEDS:
            problem = AllocationProblem.canonical(query_types=6, models=6, tiers=10, seed=seed)
            rows = robust_study(
                problem,
                extra_costs=EXTRA_COSTS,
                stress=stress,
                training_scenarios=TRAINING,
                scenarios=SCENARIOS,
                time_limit_s=TIME_LIMIT_S,
                on_progress=lambda doing, seed=seed, stress=stress: print(
                    f"robust: x{stress:g}, seed {seed} of {len(SEEDS)}: {doing}", file=sys.stderr
                ),
            )
            runs[seed] = by(rows, "plan", "extra_cost")
        title = f"### Delays and errors x{stress:g}"
        parts += [title, _by_seed(runs), _means(runs), _counts(runs), _sound(runs)]
    return "\n\n".join(parts)


def _cell(row: dict[str, Any]) -> str:
    return f"{row['placed_mean_usd']:.0f} ({100 * row['placed_violation_rate']:.1f})"


def _by_seed(runs: Runs) -> str:
    head = ["seed", "optimum, $", "exact"]
    head += [f"{name}, +{100 * extra:.0f}%" for extra in EXTRA_COSTS for name in (TIGHTENED, ROBUST)]
    rows = []
    for seed, run in runs.items():
        row = [str(seed), f"{run[CHEAPEST, 0.0]['nominal_usd']:.2f}", _cell(run[CHEAPEST, 0.0])]
        rows.append(row + [_cell(run[name, extra]) for extra in EXTRA_COSTS for name in (TIGHTENED, ROBUST)])
    return f"Mean cost in dollars over {SCENARIOS} scenarios (violations, %):\n\n{table(head, rows)}"


def _means(runs: Runs) -> str:
    asked = [(CHEAPEST, 0.0)] + [(name, extra) for extra in EXTRA_COSTS for name in (RAISED, TIGHTENED, ROBUST)]
    rows = []
    for name, extra in asked:
        each = [run[name, extra] for run in runs.values()]
        spent = [
            row["nominal_usd"] / run[CHEAPEST, 0.0]["nominal_usd"] - 1
            for row, run in zip(each, runs.values(), strict=True)
        ]
        rows.append(
            [f"+{100 * extra:.0f}%" if extra else "", name, f"{100 * fmean(spent):.1f}%"]
            + [
                text
                for way in ("placed", "any")
                for text in (
                    f"{fmean(row[f'{way}_mean_usd'] for row in each):.0f}",
                    f"{100 * fmean(row[f'{way}_violation_rate'] for row in each):.1f}",
                )
            ]
            + [f"{fmean(row['elapsed_s'] for row in each):.1f}"]
        )
    head = ["may cost", "plan", "costs more", "cost, $", "viol. %", "sent anywhere: cost, $", "viol. %", "s"]
    said = f"Means over the {len(runs)} seeds"
    return f'{said}, and where types may be sent to all that is bought (`reroute="any"`):\n\n{table(head, rows)}'


def _sound(runs: Runs) -> str:
    sound = [seed for seed, run in runs.items() if run[CHEAPEST, 0.0]["placed_violation_rate"] < _SOUND]
    if not sound:
        return f"There is no seed on which the exact plan violates less than {_SOUND:.0%}."
    return f"On seeds {', '.join(map(str, sound))} the exact plan violates less than {_SOUND:.0%} as it is."


def _counts(runs: Runs) -> str:
    """On how many seeds the robust plan violates less and costs less, as placed and sent anywhere."""

    def better(extra: float, other: tuple[str, float], way: str) -> str:
        return " / ".join(
            str(sum(run[ROBUST, extra][f"{way}_{what}"] < run[other][f"{way}_{what}"] - _SAME for run in runs.values()))
            for what in ("violation_rate", "mean_usd")
        )

    rows = []
    for extra in EXTRA_COSTS:
        row = [f"+{100 * extra:.0f}%"]
        row += [better(extra, (other, extra), way) for other in (RAISED, TIGHTENED) for way in ("placed", "any")]
        for name in (ROBUST, RAISED):
            same = [run[name, extra]["any_mean_usd"] == run[CHEAPEST, 0.0]["any_mean_usd"] for run in runs.values()]
            row.append(str(sum(same)))
        rows.append(row)
    head = ["may cost", "budget raised", "the same, sent anywhere", "limits tightened", "the same, sent anywhere",
            "robust buys what exact does", "budget raised does"]  # fmt: skip
    said = (
        f"Seeds of {len(runs)} on which the robust plan violates less / costs less than the other, and on which a plan"
    )
    return f"{said} buys what the exact one does:\n\n{table(head, rows)}"
