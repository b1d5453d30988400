"""The default for allocation problems: the adaptive heuristic, then branch and price until the gap is small."""

from __future__ import annotations

from typing import ClassVar

from hetplan.solvers.allocation.exact import Exact


class Auto(Exact):
    """As `Exact`, ended sooner.

    The literal heuristics lock in what their first phase opens; here they only start the search. What improves on them
    is in `branching`: options ranked by the bound that they allow, a restricted integer program on the best of them,
    and shares by linear programming.

    Parameters
    ----------
    gap : float
        Relative distance of plan and bound at which the search ends.
    """

    name: ClassVar[str] = "auto"

    def __init__(self, gap: float = 1e-3) -> None:
        super().__init__(gap=gap)
