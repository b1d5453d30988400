"""What a robust allocation plan is made against: scenarios, what of their costs counts, and what it may cost more."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hetplan.base import Frozen

Spread = Annotated[float, Field(ge=0, lt=1)]
RobustObjective = Literal["expected_cost", "cvar"]

_MOST_SCENARIOS = 1000


class Robust(Frozen):
    """Scenarios to plan an allocation against; those drawn are as `hetplan.solvers.allocation.scenarios` draws them.

    Attributes
    ----------
    scenarios : int
        Drawn for the plan to be made against, each as likely as the others.
    seed : int
        Of the draws. Judge the plan with another one.
    delay_spread, error_spread, arrival_spread : float
        How far a factor on a delay, an error or on arrivals may be from 1; uniform.
    stress : float
        Factor on every delay and error.
    objective : "expected_cost" or "cvar"
        The mean of the cost over the scenarios, or the mean of its worst part.
    cvar_level : float
        Share of the scenarios that is left out of that worst part.
    max_violation_rate : float, optional
        Most (scenario, query type) of which more than 1% may be unserved, as a share of all.
    max_extra_cost : float, optional
        Share by which the plan, with nothing drawn, may cost more than the cheapest one. None leaves it to the
        budget; a plan may then even leave traffic unserved as planned where that pays in the scenarios.

    Examples
    --------
    >>> Robust(stress=1.5, max_extra_cost=0.05).scenarios
    20
    """

    scenarios: Annotated[int, Field(ge=1, le=_MOST_SCENARIOS)] = 20
    seed: Annotated[int, Field(ge=0)] = 0
    delay_spread: Spread = 0.25
    error_spread: Spread = 0.25
    arrival_spread: Spread = 0.20
    stress: Annotated[float, Field(gt=0)] = 1.0
    objective: RobustObjective = "expected_cost"
    cvar_level: Spread = 0.9
    max_violation_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    max_extra_cost: Annotated[float, Field(ge=0)] | None = 0.05
