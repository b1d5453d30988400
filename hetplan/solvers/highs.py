"""The one door to HiGHS: a mixed-integer program collected as arrays, its limits, and what came of it.

Nothing reaches stdout. One thread: with a node limit that ends the search before the time limit does, the same
program gives the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import highspy
import numpy as np
from numpy.typing import NDArray

Status = Literal["optimal", "feasible", "infeasible", "no solution"]

_INFINITY = highspy.kHighsInf
# Rows hold within this: a demand of 1 that is met but for a millionth is not met.
_FEASIBLE = 1e-9


@dataclass(frozen=True, slots=True)
class MilpResult:
    """What HiGHS found.

    Attributes
    ----------
    status : str
        "optimal" within the gap asked for, "feasible" when a limit came first, "infeasible" when proven, else
        "no solution".
    objective, bound : float or None
        Of the best solution, and what no solution exceeds; None where there is none.
    values : (columns,) float array or None
    """

    status: Status
    objective: float | None
    bound: float | None
    values: NDArray[np.float64] | None


@dataclass(slots=True)
class Milp:
    """A program to maximise, built column by column and row by row."""

    gains: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    index: list[int] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)

    def column(self, lower: float, upper: float, *, gain: float = 0.0, integer: bool = False) -> int:
        """Add a variable; its number."""
        self.gains.append(gain)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.gains) - 1

    def row(self, terms: Sequence[tuple[int, float]], *, least: float = -math.inf, most: float = math.inf) -> None:
        """Add ``least <= sum of coefficient * column <= most``; a column named twice counts twice."""
        summed: dict[int, float] = {}
        for column, coefficient in terms:
            summed[column] = summed.get(column, 0.0) + coefficient
        self.index += summed.keys()
        self.coefficients += summed.values()
        self.starts.append(len(self.index))
        self.row_lower.append(least)
        self.row_upper.append(most)


@dataclass(frozen=True, slots=True)
class LinearResult:
    """The optimum of a linear program.

    Attributes
    ----------
    values : (columns,) float array
    prices : (rows,) float array
        What one unit more of a row's limit would gain: its dual.
    """

    objective: float
    values: NDArray[np.float64]
    prices: NDArray[np.float64]


def maximise_linear(program: Milp) -> LinearResult | None:
    """Solve without the integer conditions; None where nothing is feasible."""
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in {"output_flag": False, "log_to_console": False, "threads": 1}.items():
        solver.setOptionValue(name, value)
    solver.passModel(_program(program, relaxed=True))
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    solution = solver.getSolution()
    # HiGHS reports the change of the objective per unit of the row, in its own sense: a gain here.
    return LinearResult(
        objective=float(solver.getInfo().objective_function_value),
        values=np.array(solution.col_value),
        prices=np.array(solution.row_dual),
    )


def maximise(
    milp: Milp,
    *,
    time_limit_s: float,
    gap: float = 1e-6,
    max_nodes: int | None = None,
    seed: int = 0,
    start: Mapping[int, float] | None = None,
) -> MilpResult:
    """Run HiGHS.

    Parameters
    ----------
    milp : Milp
    time_limit_s : float
        Seconds; the best solution so far is returned when they are over.
    gap : float
        Relative distance of bound and objective at which a solution counts as optimal.
    max_nodes : int, optional
        Most branch-and-bound nodes: a limit that is the same on every machine.
    seed : int
    start : mapping, optional
        Column -> value of a solution to begin from; HiGHS completes the columns it leaves out.
    """
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {
        "output_flag": False,
        "log_to_console": False,
        "threads": 1,
        "random_seed": seed % 2**31,
        "time_limit": max(time_limit_s, 0.0),
        "mip_rel_gap": gap,
        "mip_abs_gap": 0.0,
        "mip_feasibility_tolerance": _FEASIBLE,
        "primal_feasibility_tolerance": _FEASIBLE,
    }
    if max_nodes is not None:
        options["mip_max_nodes"] = max_nodes
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(_program(milp))
    if start:
        columns = np.array(sorted(start), dtype=np.int32)
        solver.setSolution(len(columns), columns, np.array([start[c] for c in columns.tolist()], dtype=np.float64))
    solver.run()
    return _result(solver)


class GrowingLinear:
    """A linear program to minimise that is solved again and again while columns and rows are added.

    A row's price is what one unit more of its limit would save, negated: never above 0 for an upper limit.
    """

    def __init__(self) -> None:
        self._solver = highspy.Highs()  # type: ignore[no-untyped-call]
        options: dict[str, Any] = {
            "output_flag": False,
            "log_to_console": False,
            "threads": 1,
            "presolve": "off",
            "solver": "simplex",
        }
        for name, value in options.items():
            self._solver.setOptionValue(name, value)

    def add_rows(self, lower: NDArray[np.float64], upper: NDArray[np.float64]) -> None:
        """Rows without terms, with their limits."""
        none = np.zeros(0)
        starts = np.zeros(len(lower), dtype=np.int32)
        self._solver.addRows(len(lower), _bounds(lower), _bounds(upper), 0, starts, np.zeros(0, dtype=np.int32), none)

    def add_columns(
        self,
        costs: NDArray[np.float64],
        upper: NDArray[np.float64],
        starts: NDArray[np.int64],
        rows: NDArray[np.int64],
        values: NDArray[np.float64],
    ) -> None:
        """Columns from 0 to ``upper``; those of column c stand at ``starts[c]`` and on, up to the next start."""
        self._solver.addCols(
            len(costs), np.asarray(costs, dtype=np.float64), np.zeros(len(costs)), _bounds(upper), len(rows),
            np.asarray(starts, dtype=np.int32), np.asarray(rows, dtype=np.int32), np.asarray(values, dtype=np.float64),
        )  # fmt: skip

    def add_row(self, lower: float, upper: float, columns: Sequence[int], values: Sequence[float]) -> None:
        """A row over columns that are there."""
        self._solver.addRow(
            max(lower, -_INFINITY), min(upper, _INFINITY), len(columns), np.array(columns, dtype=np.int32),
            np.array(values, dtype=np.float64),
        )  # fmt: skip

    def set_row(self, row: int, lower: float, upper: float) -> None:
        """Other limits for one row."""
        self._solver.changeRowBounds(row, max(lower, -_INFINITY), min(upper, _INFINITY))

    def set_bounds(self, column: int, lower: float, upper: float) -> None:
        """Other limits for one column."""
        self._solver.changeColBounds(column, lower, min(upper, _INFINITY))

    def set_costs(self, columns: NDArray[np.int64], costs: NDArray[np.float64]) -> None:
        """Other costs for some columns."""
        self._solver.changeColsCost(
            len(columns), np.asarray(columns, dtype=np.int32), np.asarray(costs, dtype=np.float64)
        )

    def set_coefficient(self, row: int, column: int, value: float) -> None:
        """Another coefficient of a column in a row."""
        self._solver.changeCoeff(row, column, value)

    def solve(self, time_limit_s: float = math.inf) -> LinearResult | None:
        """The optimum; None where nothing is feasible or time is over."""
        self._solver.setOptionValue("time_limit", self._solver.getRunTime() + max(time_limit_s, 0.0))
        self._solver.run()
        if self._solver.getModelStatus() == highspy.HighsModelStatus.kUnknown:
            # The basis it began from can be lost to rounding: once more, without it.
            self._solver.clearSolver()
            self._solver.run()
        if self._solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        solution = self._solver.getSolution()
        return LinearResult(
            objective=float(self._solver.getInfo().objective_function_value),
            values=np.array(solution.col_value),
            prices=np.array(solution.row_dual),
        )


def _program(milp: Milp, *, relaxed: bool = False) -> Any:
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(milp.gains), len(milp.row_lower)
    program.sense_ = highspy.ObjSense.kMaximize
    program.col_cost_ = np.array(milp.gains)
    program.col_lower_, program.col_upper_ = _bounds(milp.lower), _bounds(milp.upper)
    program.row_lower_, program.row_upper_ = _bounds(milp.row_lower), _bounds(milp.row_upper)
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    if not relaxed:
        program.integrality_ = [kinds[whole] for whole in milp.integer]
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.array(milp.starts, dtype=np.int32)
    program.a_matrix_.index_ = np.array(milp.index, dtype=np.int32)
    program.a_matrix_.value_ = np.array(milp.coefficients, dtype=np.float64)
    return program


def _bounds(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    return np.clip(np.asarray(values, dtype=np.float64), -_INFINITY, _INFINITY)


def _result(solver: Any) -> MilpResult:
    ended, info = solver.getModelStatus(), solver.getInfo()
    if ended == highspy.HighsModelStatus.kInfeasible:
        return MilpResult("infeasible", None, None, None)
    bound = float(info.mip_dual_bound)
    proven = bound if math.isfinite(bound) else None
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return MilpResult("no solution", None, proven, None)
    status: Status = "optimal" if ended == highspy.HighsModelStatus.kOptimal else "feasible"
    values = np.array(solver.getSolution().col_value)
    return MilpResult(status, float(info.objective_function_value), proven, values)
