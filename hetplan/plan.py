"""The answer: deployments of pipelines of stages, what they should do and cost, and the problem they answer.

A plan carries a snapshot of its problem, so that checking, simulating and launching it never depend
on today's catalogue.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hetplan.base import Frozen
from hetplan.catalog.dtypes import Dtype
from hetplan.catalog.engines import engine_defaults
from hetplan.errors import InvalidInputError, SchemaVersionError, UnsupportedFeatureError
from hetplan.problem.allocation import AllocationProblem
from hetplan.problem.placement import PlacementProblem
from hetplan.units import format_bytes, format_seconds, format_share

SCHEMA: Literal["hetplan.plan/1"] = "hetplan.plan/1"
_SCHEMA_FAMILY = "hetplan.plan/"
_MAX_FILE_BYTES = 64 * 2**20

# A plan is optimal when its bound is within this relative gap of its objective.
OPTIMALITY_GAP = 1e-6

Share = Annotated[float, Field(ge=0, le=1)]
Bytes = Annotated[int, Field(ge=0)]


class Prediction(Frozen):
    """A predicted value with the band that should hold it at ``level``, and where the prediction comes from."""

    value: float
    low: float
    high: float
    level: Share
    source: str


class StageMemory(Frozen):
    """Memory of one GPU of a stage. What is left of ``usable_bytes`` holds the KV cache.

    ``reserved_bytes`` are kept for a second engine beside this one, ``start_kv_cache_bytes`` of them for its KV cache.
    """

    usable_bytes: Bytes
    weight_bytes: Bytes
    activation_bytes: Bytes
    other_bytes: Bytes
    reserved_bytes: Bytes = 0
    start_kv_cache_bytes: Bytes = 0

    @property
    def taken_bytes(self) -> int:
        """All that the KV cache does not get."""
        return self.weight_bytes + self.activation_bytes + self.other_bytes + self.reserved_bytes

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes left for the KV cache; negative when the weights do not fit."""
        return self.usable_bytes - self.taken_bytes


class Stage(Frozen):
    """Consecutive layers on one tensor-parallel group inside one node.

    ``layers`` is (start, stop), stop excluded. ``node`` indexes the pipeline's ``nodes``. Memory figures are per GPU;
    ``kv_cache_bytes`` is what the engine is told to reserve for the KV cache. ``other_bytes`` are the engine's context
    and libraries; None in plans of versions that did not state it. ``reserved_bytes`` are kept for a second engine
    beside this one, which starts with a KV cache of ``start_kv_cache_bytes``.
    """

    layers: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]]
    node: Annotated[int, Field(ge=0)]
    instance_type: str
    gpu_indices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    tensor_parallel: Annotated[int, Field(ge=1)]
    compute_dtype: Dtype
    weight_bytes: Bytes
    activation_bytes: Bytes
    kv_cache_bytes: Bytes
    other_bytes: Bytes | None = None
    reserved_bytes: Bytes = 0
    start_kv_cache_bytes: Bytes = 0

    @property
    def layer_count(self) -> int:
        return self.layers[1] - self.layers[0]


class PipelinePredictions(Frozen):
    """What one copy of a pipeline should do when it is kept full.

    ``latency_s`` is of a request that does not queue, ``ttft_s`` its own prefill, ``tpot_s`` (without the first
    token) the rest over its decode steps, so it holds the other requests' prefill too.
    """

    requests_per_s: Prediction
    ttft_s: Prediction
    tpot_s: Prediction
    latency_s: Prediction
    output_tokens_per_s: Prediction


class Pipeline(Frozen):
    """Stages in order, ``count`` identical copies. ``nodes`` names the offer of each machine of one copy.

    ``max_num_seqs`` sequences are kept in flight, ``micro_batch`` of them in a stage at a time. ``cost_usd_per_hour``
    is the price of one copy's machines and, when it is kept full, of what it sends over zone links, which alone is
    ``egress_usd_per_hour``.
    """

    nodes: Annotated[tuple[str, ...], Field(min_length=1)]
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    count: Annotated[int, Field(ge=1)] = 1
    role: Literal["both", "prefill", "decode"] = "both"
    max_num_seqs: Annotated[int, Field(ge=1)]
    micro_batch: Annotated[int, Field(ge=1)]
    max_model_len: Annotated[int, Field(ge=1)]
    predictions: PipelinePredictions
    cost_usd_per_hour: Annotated[float, Field(ge=0)]
    egress_usd_per_hour: Annotated[float, Field(ge=0)] = 0.0


class Deployment(Frozen):
    """A model and the pipelines that serve it."""

    model: str
    pipelines: Annotated[tuple[Pipeline, ...], Field(min_length=1)]


class Route(Frozen):
    """The share of a query type that goes to a deployment (an index into the plan's deployments)."""

    query_type: str
    deployment: Annotated[int, Field(ge=0)]
    fraction: Share


NotNegative = Annotated[float, Field(ge=0)]
Number = Annotated[int, Field(ge=0)]


class RowPrices(Frozen):
    """Prices of the rows of an allocation problem, in dollars for a row's whole limit; what is not listed is 0.

    A configuration is named by its number: the problem's ``configurations`` in their order, or where it gives none, all
    (model, tier, tensor_parallel, pipeline_parallel) in the order of the problem's lists, the last changing first. A
    pair is a model on a tier: model times the number of tiers plus tier.

    Attributes
    ----------
    link : tuple of (configuration, price for each query type)
        A type takes a pattern with the configuration no more often than there are replicas of it.
    spared : tuple of (query type, configuration, price)
        Where a branch pays a type's copy of the weights in any case: what its use of the configuration is spared.
    pair_link : tuple of (pair, price for each query type)
        A type takes a pattern with the pair no more often than its weights are stored (0 or 1).
    load, cache : tuple of (configuration, price)
        Its replicas hold what is put on them: compute, and memory for KV cache.
    ttft, unserved : tuple of (query type, price)
        Mean time to first token, and the share that may be left unserved.
    budget, storage : float
    """

    link: tuple[tuple[Number, tuple[NotNegative, ...]], ...] = ()
    spared: tuple[tuple[Number, Number, NotNegative], ...] = ()
    pair_link: tuple[tuple[Number, tuple[NotNegative, ...]], ...] = ()
    load: tuple[tuple[Number, NotNegative], ...] = ()
    cache: tuple[tuple[Number, NotNegative], ...] = ()
    ttft: tuple[tuple[Number, NotNegative], ...] = ()
    unserved: tuple[tuple[Number, NotNegative], ...] = ()
    budget: NotNegative = 0.0
    storage: NotNegative = 0.0


class BoundNode(Frozen):
    """A part of all answers of an allocation problem, and how it is bounded: by its prices, or by its parts.

    Attributes
    ----------
    prices : RowPrices or None
        None where neither the node's own bound nor ``closed`` is needed.
    closed : tuple of int
        Configurations that no answer below the stated bound has here, by the prices: with one replica of it more than
        none, they bound the node at the stated bound at least. Its parts do without them.
    replicas : (configuration, replicas) or None
        The node's parts are the answers with at most so many replicas of the configuration, and those with more.
    copied : (query type, configuration) or None
        The node's parts are the answers in which the type's copy of the configuration's weights is stored, and those in
        which the type does not use the configuration.
    parts : tuple of int
        Numbers of the two nodes, in that order, each above its own; empty where the prices bound all of it.
    """

    prices: RowPrices | None = None
    closed: tuple[Number, ...] = ()
    replicas: tuple[Number, Number] | None = None
    copied: tuple[Number, Number] | None = None
    parts: tuple[Number, ...] = ()


class Certificate(Frozen):
    """What proves the bound, for a checker that recomputes it.

    ``layer_rate``: with non-negative weights w per layer kind, no plan serves more than the sum over all
    machines of their best weighted layers per second, divided by the model's weighted layers.

    ``dual``: with a price per machine of each pool, in the unit of a pipeline's worth (requests/s after the latency
    penalty; for objective "cost" at most the demand), no pipeline is worth more than the machines it takes. The
    machines of the cluster together then bound every plan.

    ``enumeration``: the same prices, which here bound the plans less tightly than is stated. The pipelines that are
    worth nearly as much as their machines are few; no set of them that the machines allow passes the stated bound.

    ``tree``: of an allocation problem. Prices of its rows bound every answer in a part of them; the first node holds
    all answers, and the nodes without parts together hold all that may cost less than the stated bound.

    Attributes
    ----------
    kind_weights : tuple of float
        Of ``layer_rate``: one weight per layer kind of the model.
    pool_prices : tuple of float
        Of the other kinds: one price per pool of the problem's cluster, in its order.
    usd_per_hour_per_request_rate : float or None
        Of the other kinds, objective "cost" only: what one request/s is worth. A machine's price times this is at least
        what the machine costs.
    nodes : tuple of BoundNode
        Of ``tree``.
    """

    kind: Literal["layer_rate", "dual", "enumeration", "tree"]
    kind_weights: tuple[Annotated[float, Field(ge=0)], ...] = ()
    pool_prices: tuple[Annotated[float, Field(ge=0)], ...] = ()
    usd_per_hour_per_request_rate: Annotated[float, Field(ge=0)] | None = None
    nodes: tuple[BoundNode, ...] = ()


class Provenance(Frozen):
    """How the plan was made. No clock is read: the same input and seed give the same bytes."""

    solver: str
    parameters: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    seed: int = 0
    version: str


class PlanDiff(Frozen):
    """What changes from one plan to another, in pipelines and money."""

    kept: tuple[str, ...]
    removed: tuple[str, ...]
    added: tuple[str, ...]
    requests_per_s_change: float
    cost_usd_per_hour_change: float

    def __str__(self) -> str:
        lines = [f"  {line}" for line in self.kept]
        lines += [f"- {line}" for line in self.removed]
        lines += [f"+ {line}" for line in self.added]
        lines.append(f"{self.requests_per_s_change:+.3f} req/s, {self.cost_usd_per_hour_change:+.4f} $/h")
        return "\n".join(lines)


class Plan(Frozen):
    """A plan that can be saved, checked, compared and launched.

    Attributes
    ----------
    problem : PlacementProblem or AllocationProblem
        Snapshot of what was asked.
    status : "optimal" or "feasible"
        Optimal iff ``gap`` is at most 1e-6.
    objective, bound, gap : float
        Objective in its own unit (req/s, req/s per $/h, $/h, $ per million output tokens; $ over the horizon for an
        allocation), the proven bound on
        it and their relative distance; a heuristic alone leaves bound and gap None.
    requests_per_s, cost_usd_per_hour, usd_per_million_output_tokens : float
        Of all pipelines kept full: the price of the machines they use and of what they send over zone links.
    egress_usd_per_hour : float
        The part of the cost that is for zone links.
    """

    schema_version: Literal["hetplan.plan/1"] = SCHEMA
    problem: Annotated[PlacementProblem | AllocationProblem, Field(discriminator="kind")]
    deployments: Annotated[tuple[Deployment, ...], Field(min_length=1)]
    routes: tuple[Route, ...]
    requests_per_s: float
    cost_usd_per_hour: float
    egress_usd_per_hour: Annotated[float, Field(ge=0)] = 0.0
    usd_per_million_output_tokens: float
    status: Literal["optimal", "feasible"]
    objective_name: str
    objective: float
    bound: float | None = None
    gap: Annotated[float, Field(ge=0)] | None = None
    certificate: Certificate | None = None
    provenance: Provenance

    @model_validator(mode="after")
    def _check(self) -> Self:
        for route in self.routes:
            if route.deployment >= len(self.deployments):
                raise ValueError(f"a route names deployment {route.deployment}; there are {len(self.deployments)}")
        return self

    @property
    def placement(self) -> PlacementProblem:
        """The problem of a plan that places one model on machines.

        Raises
        ------
        UnsupportedFeatureError
            If the plan answers an allocation problem.
        """
        if isinstance(self.problem, AllocationProblem):
            raise UnsupportedFeatureError(
                "this plan answers an allocation problem, whose delays are its own table: it is verified, shown and "
                "launched; what needs one model on given machines takes one of hetplan.placement_plans(plan)"
            )
        return self.problem

    def max_num_batched_tokens(self, pipeline: Pipeline) -> int:
        """Tokens of one engine step of a pipeline: the problem's, or the least default of the engine on its GPUs."""
        problem = self.placement
        if problem.max_num_batched_tokens is not None:
            return problem.max_num_batched_tokens
        machines = [problem.cluster.instance_type(stage.instance_type) for stage in pipeline.stages]
        return max(min(engine_defaults(m.gpu).max_num_batched_tokens for m in machines), pipeline.max_num_seqs)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON (schema ``hetplan.plan/1``)."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def to_json(self) -> str:
        """The plan as JSON text; the same plan always gives the same bytes."""
        return json.dumps(self.model_dump(mode="json"), indent=1, allow_nan=False)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file.

        Raises
        ------
        InvalidInputError
            If the file is missing, too large, not JSON, or has unknown keys or bad values.
        SchemaVersionError
            If it was written for another schema version.
        """
        file = Path(path)
        try:
            size = file.stat().st_size
            if size > _MAX_FILE_BYTES:
                raise InvalidInputError(
                    f"{path}: {format_bytes(size)}; a plan file has at most {format_bytes(_MAX_FILE_BYTES)}"
                )
            content = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(f"{path}: not a readable plan file: {error}") from None
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA:
            if isinstance(version, str) and version.startswith(_SCHEMA_FAMILY):
                raise SchemaVersionError(f"{path} has schema {version!r}; this hetplan reads {SCHEMA!r}. Plan again")
            raise InvalidInputError(f"{path}: not a plan: schema_version is {version!r}, a plan has {SCHEMA!r}")
        return cls.from_json(json.dumps(content))

    def diff(self, other: Plan) -> PlanDiff:
        """What changes from this plan to ``other``: pipelines kept, removed and added, and totals."""
        mine, theirs = _pipeline_counts(self), _pipeline_counts(other)
        shared = {line: min(mine[line], theirs[line]) for line in mine if line in theirs}
        return PlanDiff(
            kept=tuple(f"{n} x {line}" for line, n in shared.items()),
            removed=tuple(f"{n - shared.get(line, 0)} x {line}" for line, n in mine.items() if n > shared.get(line, 0)),
            added=tuple(f"{n - shared.get(line, 0)} x {line}" for line, n in theirs.items() if n > shared.get(line, 0)),
            requests_per_s_change=other.requests_per_s - self.requests_per_s,
            cost_usd_per_hour_change=other.cost_usd_per_hour - self.cost_usd_per_hour,
        )

    def __str__(self) -> str:
        served = f"{len(self.problem.query_types)} query types" if isinstance(self.problem, AllocationProblem) else ""
        lines = [
            f"{served or self.placement.model.name}: {self.requests_per_s:.3f} req/s "
            f"for {self.cost_usd_per_hour:.4f} $/h"
            f"{_of_egress(self)}, "
            f"{self.usd_per_million_output_tokens:.3f} $ per million output tokens",
            f"{self.status}, objective {self.objective_name} = {self.objective:.6g}"
            + ("" if self.bound is None else f", bound {self.bound:.6g}, gap {self.gap or 0:.2%}"),
        ]
        for index, deployment in enumerate(self.deployments):
            if served:
                lines.append(_describe_routes(deployment, [r for r in self.routes if r.deployment == index]))
                continue
            for number, pipeline in enumerate(deployment.pipelines, start=1):
                lines += _describe_pipeline(number, pipeline)
        return "\n".join(lines)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def describe_stages(pipeline: Pipeline) -> str:
    """One line that identifies a pipeline: its stages' machines, degrees and layers."""
    return " -> ".join(
        f"{s.instance_type}[{','.join(map(str, s.gpu_indices))}] TP{s.tensor_parallel} "
        f"layers {s.layers[0]}-{s.layers[1] - 1}"
        for s in pipeline.stages
    )


def _of_egress(part: Plan | Pipeline) -> str:
    return f" ({part.egress_usd_per_hour:.4f} of it egress)" if part.egress_usd_per_hour else ""


def _pipeline_counts(plan: Plan) -> dict[str, int]:
    counts: dict[str, int] = {}
    for deployment in plan.deployments:
        for pipeline in deployment.pipelines:
            line = f"{deployment.model}: {describe_stages(pipeline)} on {', '.join(pipeline.nodes)}"
            counts[line] = counts.get(line, 0) + pipeline.count
    return counts


def _describe_routes(deployment: Deployment, routes: list[Route]) -> str:
    """One line: a model, its replicas, and which shares of which query types they serve."""
    replicas = ", ".join(
        f"{p.count} x {p.stages[0].instance_type} (TP {p.stages[0].tensor_parallel}, PP {len(p.stages)})"
        for p in deployment.pipelines
    )
    shares = ", ".join(f"{route.query_type} {format_share(route.fraction)}" for route in routes) or "nothing"
    return f"{deployment.model} on {replicas}: {shares}"


def _describe_pipeline(number: int, pipeline: Pipeline) -> list[str]:
    p = pipeline.predictions
    lines = [
        f"pipeline {number}"
        + (f" x {pipeline.count}" if pipeline.count > 1 else "")
        + f": {p.requests_per_s.value:.3f} req/s ({p.requests_per_s.low:.3f}-{p.requests_per_s.high:.3f}), "
        f"TTFT {format_seconds(p.ttft_s.value)}, TPOT {format_seconds(p.tpot_s.value)}, "
        f"{pipeline.max_num_seqs} sequences, {pipeline.cost_usd_per_hour:.4f} $/h{_of_egress(pipeline)}"
    ]
    for stage in pipeline.stages:
        lines.append(
            f"  layers {stage.layers[0]:>3}-{stage.layers[1] - 1:<3} {stage.instance_type} node {stage.node} "
            f"GPU {','.join(map(str, stage.gpu_indices))} TP{stage.tensor_parallel} {stage.compute_dtype}: "
            f"weights {format_bytes(stage.weight_bytes)}, KV cache {format_bytes(stage.kv_cache_bytes)} a GPU"
            + (f", {format_bytes(stage.reserved_bytes)} kept for a second engine" if stage.reserved_bytes else "")
        )
    lines.append(f"  {p.requests_per_s.source}")
    return lines
