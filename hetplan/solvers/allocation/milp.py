"""The paper's own program (5a)-(5k) with its McCormick rows (4), to read, to write to a file, and to compare with.

==========================  ==========================================================================================
paper                       here, by name in the file
==========================  ==========================================================================================
w (n, m of j on k)          ``buys``: replicas of an option, 0 or 1 as in the paper, any number where decided
q                           ``in_use``: the model is on the tier
y                           ``gpus``: of the tier, for the model
x, z                        ``share``, ``serves``: of a type by a model on a tier, and whether any
v = x w                     ``part``: the share at the option's degrees
u                           ``unserved``
(5b)-(5k)                   ``demand``, ``budget``, ``one_configuration``, ``count_gpus``, ``memory``, ``compute``,
                            ``storage``, ``delay``, ``error``, ``placed``, ``deployed``
(4)                         ``within_share``, ``within_buy``, ``at_least``
==========================  ==========================================================================================

Rows are divided by their limits: a delay is a share of the type's limit, dollars of the budget, gigabytes of the
capacity.
Where it departs:

- Configurations whose weights do not fit are left out; (5f) would bar them. Its terms of KV cache are left out where
  all types together can't fill the memory, as with the paper's residence time: coefficients of 1e-11 lead HiGHS astray.
- Every option of the problem's `Decisions` is honoured, and a limit on the time to first token is a row as (5i).
- Where replicas are many, a product of shares and replicas means nothing: parts are chosen themselves and add up to the
  share, a part needs a replica, and each option's replicas have their own rows of compute and memory.
- Configurations with estimated capacities have a row of compute over parts; it counts the KV cache already.

The solver of the package (`hetplan.solvers.allocation.exact`) does not use this form, whose relaxation is weak.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pulp

from hetplan.errors import InfeasibleError, InvalidInputError
from hetplan.problem.allocation import AllocationProblem
from hetplan.solvers.allocation.assignment import NEXT_TO_NOTHING, Assignment, total_usd
from hetplan.solvers.allocation.options import SLACK, make_options
from hetplan.solvers.base import check_time_limit
from hetplan.solvers.highs import Milp, Status, maximise, maximise_linear

# Characters of a name in a variable's: PuLP refuses to write names of more than a hundred.
_LABEL = 22
_SENSES = {"<=": pulp.LpConstraintLE, "=": pulp.LpConstraintEQ, ">=": pulp.LpConstraintGE}
_SUFFIXES = (".lp", ".mps")

_Terms = list[tuple[pulp.LpVariable, float]]


class LiteralResult(NamedTuple):
    """What came of the literal program; the assignment is over ``make_options(problem, prune=False)``."""

    status: Status
    usd: float | None
    bound_usd: float | None
    assignment: Assignment | None


def literal_model(problem: AllocationProblem) -> pulp.LpProblem:
    """The paper's program as a PuLP problem, which minimises dollars over the horizon."""
    return _Literal(problem).model


def write_model(problem: AllocationProblem, path: str | Path, *, overwrite: bool = False) -> None:
    """Write the paper's program as LP or MPS.

    Parameters
    ----------
    problem : AllocationProblem
    path : path
        Ends in ``.lp`` or ``.mps``.
    overwrite : bool
        Replace a file that is there.

    Raises
    ------
    InvalidInputError
        For another ending, a file that is there, or one that cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise InvalidInputError(
            f"{path}: a model is written as .lp or .mps, not {path.suffix!r}. Choose another ending"
        )
    if path.exists() and not overwrite:
        raise InvalidInputError(f"{path} is there already; remove it or choose another name")
    model = literal_model(problem)
    try:
        if path.suffix.lower() == ".lp":
            model.writeLP(str(path))
        else:
            model.writeMPS(str(path))
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror}. Choose another folder") from None


def solve_literal(problem: AllocationProblem, *, time_limit_s: float = 60.0, gap: float = 1e-6) -> LiteralResult:
    """Solve the paper's program with HiGHS.

    Parameters
    ----------
    problem : AllocationProblem
    time_limit_s : float
        Of the search, once the program stands.
    gap : float
        Relative distance of bound and best answer at which it ends.
    """
    check_time_limit(time_limit_s)
    literal = _Literal(problem)
    program, column_of = _program(literal.model)
    found = maximise(program, time_limit_s=time_limit_s, gap=gap)
    usd = None if found.objective is None else -found.objective
    bound_usd = None if found.bound is None else -found.bound
    if found.values is None:
        return LiteralResult(found.status, usd, bound_usd, None)
    o, values = literal.options, found.values
    replicas = np.array([round(values[column_of[v.name]]) for v in literal.buys], dtype=np.int64)
    shares = np.zeros(o.most.shape)
    for (i, number), part in literal.part.items():
        value = values[column_of[part.name]]
        if value > NEXT_TO_NOTHING and replicas[number] > 0:
            shares[i, number] = value
    return LiteralResult(found.status, usd, bound_usd, Assignment(replicas, shares, total_usd(o, replicas, shares)))


def relaxed_usd(model: pulp.LpProblem) -> float:
    """The bound of a program's linear relaxation, in dollars.

    Raises
    ------
    InfeasibleError
        If not even fractions keep its limits.
    """
    found = maximise_linear(_program(model)[0])
    if found is None:
        raise InfeasibleError("the program's linear relaxation has no solution", [])
    return -found.objective


def _program(model: pulp.LpProblem) -> tuple[Milp, dict[str, int]]:
    """The same program for HiGHS, which maximises what is not spent, and the column of each variable by name."""
    program = Milp()
    column_of: dict[str, int] = {}
    costs = {variable.name: float(usd) for variable, usd in model.objective.items()}
    for variable in model.variables():
        upper = np.inf if variable.upBound is None else float(variable.upBound)
        column_of[variable.name] = program.column(
            float(variable.lowBound), upper, gain=-costs.get(variable.name, 0.0), integer=variable.cat == pulp.LpInteger
        )
    for row in model.constraints():
        limit = -float(row.constant)
        program.row(
            [(column_of[variable.name], float(value)) for variable, value in row.items()],
            least=-np.inf if row.sense == pulp.LpConstraintLE else limit,
            most=np.inf if row.sense == pulp.LpConstraintGE else limit,
        )
    return program, column_of


def _labels(names: Iterable[str]) -> list[str]:
    """Names that a file can hold, each its own, without the double underscore that stands between them."""
    labels: list[str] = []
    for name in names:
        label = re.sub(r"_+", "_", re.sub(r"[^A-Za-z0-9.]", "_", name)).strip("_")[:_LABEL].rstrip("_") or "unnamed"
        if label in labels:
            label = next(numbered for n in range(2, len(labels) + 3) if (numbered := f"{label}_{n}") not in labels)
        labels.append(label)
    return labels


class _Literal:
    """The program while it is built: variables by what they are of, and rows in the paper's order."""

    def __init__(self, problem: AllocationProblem) -> None:
        self.problem = problem
        self.options = make_options(problem, prune=False)
        o = self.options
        self.types = range(len(problem.query_types))
        self.pairs = range(o.pairs)
        self.members: list[list[int]] = [np.flatnonzero(o.pair == pair).tolist() for pair in self.pairs]
        self.model = pulp.LpProblem("allocation", pulp.LpMinimize)
        self._name()
        self._variables()
        self._objective()
        self._rows()
        for i in self.types:
            for pair in self.pairs:
                self._link(i, pair)

    def _name(self) -> None:
        o = self.options
        models = _labels(model.name for model in self.problem.models)
        tiers = _labels(tier.name for tier in self.problem.tiers)
        self.of_type = _labels(query.name for query in self.problem.query_types)
        self.of_option = [
            f"{models[o.model[n]]}__{tiers[o.tier[n]]}__tp{o.tensor_parallel[n]}_pp{o.pipeline_parallel[n]}"
            for n in range(o.count)
        ]
        seen: dict[str, int] = {}
        for number, name in enumerate(self.of_option):
            # Estimated configurations may have the same degrees, on machines of another number.
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > 1:
                self.of_option[number] = f"{name}_{seen[name]}"
        self.of_pair = [f"{models[o.model[members[0]]]}__{tiers[o.tier[members[0]]]}" for members in self.members]

    def _variables(self) -> None:
        o, problem = self.options, self.problem
        most = o.most_replicas().tolist()

        def integer(name: str, most: float) -> pulp.LpVariable:
            return self.model.add_variable(name, 0, most, pulp.LpInteger)

        self.most = [float(count) for count in most]
        self.buys = [integer(f"buys__{self.of_option[n]}", self.most[n]) for n in range(o.count)]
        self.in_use = [integer(f"in_use__{name}", 1) for name in self.of_pair]
        self.gpus = [
            integer(f"gpus__{name}", sum(float(o.gpus[n]) * self.most[n] for n in members))
            for name, members in zip(self.of_pair, self.members, strict=True)
        ]
        self.serves, self.share, self.part = {}, {}, {}
        for i in self.types:
            for pair, members in enumerate(self.members):
                name = f"{self.of_type[i]}__{self.of_pair[pair]}"
                self.share[i, pair] = self.model.add_variable(f"share__{name}", 0, 1)
                self.serves[i, pair] = integer(f"serves__{name}", 1)
                for n in members:
                    # Where the delay of each option is limited, one that is slower serves none of the type.
                    upper = 0 if self._is_too_slow(i, n) else 1
                    self.part[i, n] = self.model.add_variable(f"part__{self.of_type[i]}__{self.of_option[n]}", 0, upper)
        self.unserved = [
            self.model.add_variable(f"unserved__{name}", 0, float(query.max_unserved))
            for name, query in zip(self.of_type, problem.query_types, strict=True)
        ]

    def _is_too_slow(self, i: int, number: int) -> bool:
        o = self.options
        if self.problem.decisions.delay == "average":
            return False
        return bool(o.delay[i, number] > 1 + SLACK or (o.ttft is not None and o.ttft[i, number] > 1 + SLACK))

    def _add(self, name: str, terms: _Terms, sense: str, limit: float) -> None:
        self.model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), _SENSES[sense], name, limit))

    def _objective(self) -> None:
        """(5a): rent, stored weights, stored tokens with delay, and what is unserved."""
        o = self.options
        terms: _Terms = [(self.buys[n], float(o.rent_usd[n])) for n in range(o.count)]
        terms += [(variable, float(o.pair_usd[pair])) for pair, variable in self._stored()]
        terms += [(variable, float(o.unit_usd[i, n])) for (i, n), variable in self.part.items()]
        terms += [(self.unserved[i], float(o.unserved_usd[i])) for i in self.types]
        self.model.setObjective(pulp.LpAffineExpression(terms))

    def _stored(self) -> Sequence[tuple[int, pulp.LpVariable]]:
        """What weights are stored for: a type on a pair, or a pair."""
        if self.options.stored_per_type:
            return [(pair, variable) for (_, pair), variable in self.serves.items()]
        return list(enumerate(self.in_use))

    def _rows(self) -> None:
        o, problem = self.options, self.problem
        for i in self.types:
            shares = [(self.share[i, pair], 1.0) for pair in self.pairs]
            self._add(f"demand__{self.of_type[i]}", [*shares, (self.unserved[i], 1.0)], "=", 1.0)
        rent = [(self.buys[n], float(o.rent_usd[n]) / problem.budget_usd) for n in range(o.count)]
        for name, of_pair, of_type, limit, others in (
            ("budget", o.pair_usd, o.storage_usd, problem.budget_usd, rent),
            ("storage", o.pair_gb, o.storage_gb, problem.storage_capacity_gb, []),
        ):
            weights = [(variable, float(of_pair[pair]) / limit) for pair, variable in self._stored()]
            tokens = [(variable, float(of_type[i]) / limit) for (i, _), variable in self.share.items()]
            self._add(name, [*others, *weights, *tokens], "<=", 1.0)
        for pair in self.pairs:
            self._of_pair(pair)
        limited = [("delay", o.delay), ("error", o.error)]
        if o.ttft is not None:
            limited.append(("first_token", o.ttft))
        for name, values in limited:
            if name != "error" and problem.decisions.delay == "each":
                continue
            for i in self.types:
                if not values[i].any():
                    continue
                terms = [(self.part[i, n], float(values[i, n])) for n in range(o.count)]
                if o.served:
                    # Of what is served: the limit times (1 - unserved).
                    terms.append((self.unserved[i], 1.0))
                self._add(f"{name}__{self.of_type[i]}", terms, "<=", 1.0)

    def _of_pair(self, pair: int) -> None:
        """(5d)-(5g) of a model on a tier."""
        o, name, members = self.options, self.of_pair[pair], self.members[pair]
        gpus = [(self.buys[n], float(o.gpus[n])) for n in members]
        self._add(f"count_gpus__{name}", [*gpus, (self.gpus[pair], -1.0)], "=", 0.0)
        if o.many:
            for n in members:
                label = self.of_option[n]
                self._add(f"deployed__{label}", [(self.buys[n], 1.0), (self.in_use[pair], -self.most[n])], "<=", 0.0)
                for row, values in (("memory", o.cache), ("compute", o.load)):
                    if row == "memory" and not self._cache_can_fill([n]):
                        continue
                    used = [(self.part[i, n], float(values[i, n])) for i in self.types]
                    self._add(f"{row}__{label}", [*used, (self.buys[n], -1.0)], "<=", 0.0)
            return
        bought = [(self.buys[n], 1.0) for n in members]
        self._add(f"one_configuration__{name}", [*bought, (self.in_use[pair], -1.0)], "=", 0.0)
        if self.problem.configurations:
            used = [(self.part[i, n], float(o.load[i, n])) for i in self.types for n in members]
            self._add(f"compute__{name}", [*used, (self.in_use[pair], -1.0)], "<=", 0.0)
            return
        weights = {n: self._weights_share(n) for n in members}
        held = [(self.buys[n], weights[n]) for n in members]
        used = []
        if self._cache_can_fill(members):
            used = [(self.part[i, n], float(o.cache[i, n]) * (1 - weights[n])) for i in self.types for n in members]
        self._add(f"memory__{name}", [*held, *used, (self.in_use[pair], -1.0)], "<=", 0.0)
        # What all of a type takes of one GPU's compute is the same at all degrees.
        first = members[0]
        used = [(self.share[i, pair], float(o.load[i, first] * o.gpus[first])) for i in self.types]
        self._add(f"compute__{name}", [*used, (self.gpus[pair], -1.0)], "<=", 0.0)

    def _cache_can_fill(self, members: Sequence[int]) -> bool:
        """Whether all types together could fill the memory that weights leave, on any of some options."""
        return bool(self.options.cache[:, members].sum(axis=0).max() > 1)

    def _weights_share(self, number: int) -> float:
        """Of a GPU's memory, what an option's weights take."""
        o, problem = self.options, self.problem
        model, tier = problem.models[int(o.model[number])], problem.tiers[int(o.tier[number])]
        scale = tier.weight_scale if problem.decisions.weights == "scaled" else 1.0
        return model.weight_gb * scale / int(o.gpus[number]) / tier.memory_gb

    def _link(self, i: int, pair: int) -> None:
        """(5k) and (4) of a type and a model on a tier."""
        share, serves = self.share[i, pair], self.serves[i, pair]
        name = f"{self.of_type[i]}__{self.of_pair[pair]}"
        self._add(f"placed__{name}", [(share, 1.0), (serves, -1.0)], "<=", 0.0)
        self._add(f"deployed__{name}", [(serves, 1.0), (self.in_use[pair], -1.0)], "<=", 0.0)
        if self.options.many:
            parts = [(self.part[i, n], 1.0) for n in self.members[pair]]
            self._add(f"parts__{name}", [*parts, (share, -1.0)], "=", 0.0)
        for n in self.members[pair]:
            part, buys, label = self.part[i, n], self.buys[n], f"{self.of_type[i]}__{self.of_option[n]}"
            self._add(f"within_buy__{label}", [(part, 1.0), (buys, -1.0)], "<=", 0.0)
            if not self.options.many:
                self._add(f"within_share__{label}", [(part, 1.0), (share, -1.0)], "<=", 0.0)
                self._add(f"at_least__{label}", [(part, 1.0), (share, -1.0), (buys, -1.0)], ">=", -1.0)
