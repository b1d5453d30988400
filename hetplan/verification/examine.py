"""Checks a plan against its own problem, whichever kind that is."""

from __future__ import annotations

from hetplan.errors import InvalidInputError
from hetplan.plan import Plan
from hetplan.problem.allocation import AllocationProblem
from hetplan.verification.allocation import examine_allocation
from hetplan.verification.findings import Violation, found
from hetplan.verification.placement import Simulate, examine_placement


def verify_plan(plan: Plan, *, simulate: Simulate | None = None) -> list[Violation]:
    """Check a plan against its own problem.

    Parameters
    ----------
    plan : Plan
        Also one whose fields were changed without being checked.
    simulate : callable, optional
        Percentiles of "ttft_s", "tpot_s" and "e2e_s" that a plan's requests live through, given the plan, the level and
        a seed. A promised percentile cannot be checked without.

    Returns
    -------
    list of Violation
        Empty when the plan is sound. A fault often shows in several places: changed layers also change times.
    """
    return examine_plan(plan, simulate=simulate)[0]


def confirmed_bound(plan: Plan) -> str | None:
    """Which bound of the plan is proven and by what, as a phrase; None without a proven bound."""
    return examine_plan(plan)[1]


def examine_plan(plan: Plan, *, simulate: Simulate | None = None) -> tuple[list[Violation], str | None]:
    """What `verify_plan` and `confirmed_bound` say, at the cost of one."""
    violations: list[Violation] = []
    try:
        # A fresh copy has no cached values of an earlier state.
        plan = Plan.from_dict(plan.model_dump(warnings=False))
    except Exception as error:
        lines = str(error).splitlines() if isinstance(error, InvalidInputError) else [repr(error)]
        violations += [found("malformed", "plan", line, "valid fields") for line in lines]
    if isinstance(plan.problem, AllocationProblem):
        more, confirmed = examine_allocation(plan, plan.problem, not violations)
    else:
        more, confirmed = examine_placement(plan, not violations, simulate)
    return list(dict.fromkeys(violations + more)), confirmed[0] if confirmed else None
