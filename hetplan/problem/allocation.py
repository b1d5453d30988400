"""The allocation problem of Cheng and Nguyen: which models on which GPUs in which numbers, and who is sent where.

=============  ======================================================================================================
paper          here
=============  ======================================================================================================
I, J, K        ``query_types``, ``models``, ``tiers``
h, f, lambda   ``input_tokens``, ``output_tokens``, ``requests_per_hour``
Delta, eps     ``delay_limit_s``, ``error_limit``
rho, phi       ``delay_usd_per_ms``, ``unserved_usd``
theta, zeta    ``storage_kb_per_token``, ``max_unserved``
tau, e-bar     ``slowness``, ``errors`` (by model) times the tier's ``error_factor``
B, beta        ``weight_gb``, ``kv_bytes_per_token``
alpha          ``gflop_per_token``
C, BW, P, p    ``memory_gb``, ``bandwidth_gb_per_s``, ``tflops``, ``usd_per_hour``
sigma          ``weight_scale``
N, M           ``tensor_parallel``, ``pipeline_parallel``
DT, delta      ``horizon_hours``, ``budget_usd``
C^s, p_s, eta  ``storage_capacity_gb``, ``storage_usd_per_gb_hour``, ``utilization``
=============  ======================================================================================================

Units are those of the paper's tables (GB = 10**9 bytes, KB, ms, hours), each in its name. What the paper leaves open,
or states in a way that cannot be meant, is a named option of `Decisions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hetplan.base import Frozen
from hetplan.catalog.dtypes import Dtype
from hetplan.catalog.hardware import InstanceType
from hetplan.catalog.model import ModelSpec
from hetplan.catalog.offers import Market, Offer

if TYPE_CHECKING:
    from hetplan.catalog.clusters import ClusterLike
    from hetplan.problem.allocation_catalog import ReplicaEstimator, ServedModelLike

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Degree = Annotated[int, Field(ge=1, le=1024)]

DecisionsName = Literal["default", "paper"]
_MOST_TYPES, _MOST_MODELS, _MOST_TIERS = 1000, 1000, 1000


class Decisions(Frozen):
    """What the paper leaves open, one option each. The defaults are ours; `paper` gives the literal reading.

    Attributes
    ----------
    model_storage : "once" or "per_query_type"
        Weights are stored once for each model on a tier, or (literal) once more for each query type sent there.
    slo_on : "served" or "all"
        Mean delay and error are of the served share, or (literal) sums over served shares against the whole limit, so
        that dropping traffic loosens it.
    delay : "average" or "each"
        The delay limit holds for the mean over a type's mix, or for every configuration that it is sent to. A limit on
        the time to first token follows the same option.
    kv_memory : "littles_law" or "residence"
        KV cache of the requests in flight (arrivals times delay), or (literal) of one request for the time its cache is
        read once, which is next to nothing.
    weights : "scaled" or "unscaled"
        Weights in memory at the tier's precision, or (literal) always at 16 bits.
    replicas : "many" or "one"
        Any whole number of each configuration, or (literal) one configuration of each model on a tier, once.
    penalties : "per_horizon" or "per_request"
        Delay and unserved penalties once for the horizon, as the paper's figures need, or for each request that
        arrives in it, as its text says.
    ranking_storage : "horizon" or "hour"
        Storage in the ranking of the greedy heuristics: over the horizon, or (literal, eq. 7) of one hour.
    """

    model_storage: Literal["once", "per_query_type"] = "once"
    slo_on: Literal["served", "all"] = "served"
    delay: Literal["average", "each"] = "average"
    kv_memory: Literal["littles_law", "residence"] = "littles_law"
    weights: Literal["scaled", "unscaled"] = "scaled"
    replicas: Literal["many", "one"] = "many"
    penalties: Literal["per_horizon", "per_request"] = "per_horizon"
    ranking_storage: Literal["horizon", "hour"] = "horizon"

    @classmethod
    def paper(cls) -> Decisions:
        """The paper's literal reading."""
        return cls(
            model_storage="per_query_type",
            slo_on="all",
            kv_memory="residence",
            weights="unscaled",
            replicas="one",
            ranking_storage="hour",
        )


class QueryDemand(Frozen):
    """A query type: how much of it arrives, and what it is promised.

    Attributes
    ----------
    errors : tuple of float
        Error rate on each model at full precision, in the problem's order of models.
    slowness : float
        Factor on every delay (tau).
    max_unserved : float
        Most of it that may be dropped, at ``unserved_usd`` for all of it.
    """

    name: str
    input_tokens: Positive
    output_tokens: Positive
    requests_per_hour: Positive
    delay_limit_s: Positive
    ttft_limit_s: Positive | None = None
    error_limit: Positive
    delay_usd_per_ms: NotNegative
    unserved_usd: NotNegative
    storage_kb_per_token: NotNegative = 0.0
    slowness: Positive = 1.0
    errors: Annotated[tuple[NotNegative, ...], Field(min_length=1)]
    max_unserved: Share = 1.0

    @property
    def tokens(self) -> float:
        """Of a request: prompt and answer (r)."""
        return self.input_tokens + self.output_tokens


class ServedModel(Frozen):
    """A model that may be served. ``weight_gb`` at 16 bits; ``spec`` where it is a catalogued one."""

    name: str
    weight_gb: Positive
    kv_bytes_per_token: NotNegative
    gflop_per_token: Positive
    activation_bytes_per_token: NotNegative = 0.0
    layers: Annotated[int, Field(ge=1)] = 32
    spec: ModelSpec | None = None


class Tier(Frozen):
    """A kind of GPU at a precision, rented one by one; ``instance_type`` and ``offer`` of a catalogued machine.

    ``weight_scale`` is the size of weights against 16 bits, ``error_factor`` what the precision does to error rates.
    """

    name: str
    gpu: str
    weight_dtype: Dtype = "fp16"
    memory_gb: Positive
    bandwidth_gb_per_s: Positive
    tflops: Positive
    usd_per_hour: Positive
    weight_scale: Positive = 1.0
    error_factor: Positive = 1.0
    link_gb_per_s: Positive = 600.0
    link_latency_s: NotNegative = 20e-6
    instance_type: InstanceType | None = None
    offer: Offer | None = None


class Configuration(Frozen):
    """A model on a tier with its degrees, where delays were estimated instead of given by the formulas.

    Attributes
    ----------
    model, tier : int
        Index into the problem's lists.
    machines : int
        Machines of the tier's instance type that one replica takes.
    delay_s, ttft_s : tuple of float
        Mean of each query type at the problem's utilisation.
    capacity_per_hour : tuple of float
        Requests of each type that one replica may be sent at the problem's utilisation when it serves nothing else.
    """

    model: Annotated[int, Field(ge=0)]
    tier: Annotated[int, Field(ge=0)]
    tensor_parallel: Degree
    pipeline_parallel: Degree
    machines: Annotated[int, Field(ge=1)]
    usd_per_hour: NotNegative
    delay_s: tuple[Positive, ...]
    ttft_s: tuple[Positive, ...]
    capacity_per_hour: tuple[Positive, ...]


class AllocationProblem(Frozen):
    """Everything that the solvers and the checker need: types, models, tiers, prices and limits.

    Attributes
    ----------
    tensor_parallel, pipeline_parallel : tuple of int
        Degrees that a configuration may have. At most one of the two lists is long: their product is searched.
    utilization : float
        Share of a GPU's peak that may be planned with (eta).
    decisions : Decisions, "default" or "paper"
    configurations : tuple of Configuration
        Where given, the only configurations there are, with their own delays and capacities; otherwise all degrees on
        all tiers, by the paper's formulas.

    Examples
    --------
    >>> AllocationProblem.canonical(query_types=6, models=6, tiers=10, seed=0).models[0].name
    'Llama-3.2-1B'
    """

    kind: Literal["allocation"] = "allocation"
    query_types: Annotated[tuple[QueryDemand, ...], Field(min_length=1, max_length=_MOST_TYPES)]
    models: Annotated[tuple[ServedModel, ...], Field(min_length=1, max_length=_MOST_MODELS)]
    tiers: Annotated[tuple[Tier, ...], Field(min_length=1, max_length=_MOST_TIERS)]
    tensor_parallel: Annotated[tuple[Degree, ...], Field(min_length=1)] = (1, 2, 4, 8)
    pipeline_parallel: Annotated[tuple[Degree, ...], Field(min_length=1)] = (1, 2, 4)
    horizon_hours: Positive = 24.0
    budget_usd: Positive
    storage_capacity_gb: Positive
    storage_usd_per_gb_hour: NotNegative
    utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    decisions: Decisions = Decisions()
    configurations: tuple[Configuration, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("decisions"), str):
            name = values["decisions"]
            if name not in ("default", "paper"):
                raise ValueError(f"decisions is 'default', 'paper' or a Decisions, got {name!r}")
            return values | {"decisions": Decisions.paper() if name == "paper" else Decisions()}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        for kind, names in (
            ("query type", [q.name for q in self.query_types]),
            ("model", [m.name for m in self.models]),
            ("tier", [t.name for t in self.tiers]),
        ):
            twice = sorted(n for n in set(names) if names.count(n) > 1)
            if twice:
                raise ValueError(f"{kind} {twice[0]!r} is listed twice; rename one")
        for query in self.query_types:
            if len(query.errors) != len(self.models):
                raise ValueError(
                    f"query type {query.name!r} has {len(query.errors)} errors for {len(self.models)} models; "
                    "give one for each model"
                )
        for number, one in enumerate(self.configurations):
            where = f"configurations[{number}]"
            if one.model >= len(self.models) or one.tier >= len(self.tiers):
                raise ValueError(
                    f"{where}: model {one.model} on tier {one.tier}; there are {len(self.models)} and {len(self.tiers)}"
                )
            machine, gpus = self.tiers[one.tier].instance_type, one.tensor_parallel * one.pipeline_parallel
            if (
                machine is not None
                and one.machines * (machine.gpu_count // one.tensor_parallel) * one.tensor_parallel < gpus
            ):
                raise ValueError(
                    f"{where}: {one.pipeline_parallel} groups of {one.tensor_parallel} GPUs do not fit {one.machines} "
                    f"{machine.name} of {machine.gpu_count}; a group stays in one machine"
                )
            for name in ("delay_s", "ttft_s", "capacity_per_hour"):
                if len(getattr(one, name)) != len(self.query_types):
                    raise ValueError(f"{where}: {name} has {len(getattr(one, name))} values; one for each query type")
        for name in ("tensor_parallel", "pipeline_parallel"):
            degrees = getattr(self, name)
            if len(set(degrees)) != len(degrees):
                raise ValueError(f"{name} names a degree twice: {degrees}")
        return self

    @classmethod
    def canonical(
        cls,
        *,
        query_types: int = 6,
        models: int = 6,
        tiers: int = 10,
        seed: int = 0,
        decisions: DecisionsName | Decisions = "default",
        budget_usd: float | None = None,
        storage: Literal["scaled", "literal"] = "scaled",
    ) -> AllocationProblem:
        """An instance of the paper's family, of any size.

        Parameters
        ----------
        query_types, models, tiers : int
            Sizes (I, J, K).
        seed : int
        decisions : "default", "paper" or Decisions
        budget_usd : float, optional
            By default 100, times I / 6 above six types.
        storage : "scaled" or "literal"
            Storage that all demand fits in, or the paper's 1,000 GB, in which it often does not.

        Returns
        -------
        AllocationProblem

        Raises
        ------
        InvalidInputError
            For sizes below one or above what a problem holds.
        """
        from hetplan.problem.instances import canonical

        return canonical(query_types, models, tiers, seed, decisions, budget_usd, storage)

    @classmethod
    def from_catalog(
        cls,
        *,
        query_types: Sequence[QueryDemand | Mapping[str, Any]],
        models: Sequence[ServedModelLike],
        cluster: ClusterLike,
        budget_usd: float,
        estimator: ReplicaEstimator | None = None,
        utilization: float = 0.7,
        tensor_parallel: Sequence[int] = (1, 2, 4, 8),
        pipeline_parallel: Sequence[int] = (1, 2),
        horizon_hours: float = 24.0,
        storage_capacity_gb: float | None = None,
        storage_usd_per_gb_hour: float = 0.0,
        decisions: DecisionsName | Decisions = "default",
        region: str = "us-west-2",
        market: Market = "on_demand",
        provider: str = "aws",
    ) -> AllocationProblem:
        """Catalogued models on catalogued or own machines, with an estimator's delays and capacities.

        Parameters
        ----------
        query_types : sequence of QueryDemand or mapping
            In a mapping, ``errors`` may be keyed by model name: no configuration file states error rates.
        models : sequence of str, path, mapping, ModelSpec or ServedModel
            Catalogued names, config.json files or specs.
        cluster : Cluster, mapping or path
            As in `hetplan.optimize`. Each pool is a tier, and whole machines are rented. Its count limits the machines
            of one replica; how many replicas there are is up to the budget.
        budget_usd : float
            For rent and storage over the horizon.
        estimator : callable, optional
            A `hetplan.problem.allocation_catalog.ReplicaEstimator`; by default
            `hetplan.estimator.allocation.estimate_replica`.
        utilization : float
            Share of a replica's capacity that may be planned with, below 1; delays are those at it.
        tensor_parallel, pipeline_parallel : sequence of int
            Degrees; those that the model's heads, the machine or the memory do not allow are left out. Groups stay in
            one machine, and n GPUs in each of m stages take ceil(n m / GPUs of a machine) machines.
        horizon_hours : float
        storage_capacity_gb : float, optional
            By default what everything takes: no limit.
        storage_usd_per_gb_hour : float
        decisions : "default", "paper" or Decisions
        region, market, provider : str
            Where a mapping's catalogued machines are rented.

        Returns
        -------
        AllocationProblem
            With its `configurations`.

        Raises
        ------
        InvalidInputError
            For bad values, unknown names, error rates that are missing and machines without a price.
        InfeasibleError
            If no model fits any machine.

        Notes
        -----
        For each configuration and query type alone, with the request rate X(b), latency T(b) and time to first token
        F(b) of b sequences in flight (`hetplan.predict` with ``schedule="in_flight"``), N sequences that fit, eta the
        utilisation, tau the type's slowness and scv = 1 that of the replica's seconds per request::

            mu       = X(N)
            capacity = eta mu
            wait     = eta / (1 - eta) (1 + scv) / 2 / mu
            ttft     = tau (F(b) + wait), delay = tau (T(b) + wait)     with X(b) = eta mu
        """
        from hetplan.problem.allocation_catalog import from_catalog

        asked = estimator
        if asked is None:
            from hetplan.estimator.allocation import estimate_replica

            asked = estimate_replica
        return from_catalog(
            query_types=query_types,
            models=models,
            cluster=cluster,
            estimator=asked,
            budget_usd=budget_usd,
            utilization=utilization,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            horizon_hours=horizon_hours,
            storage_capacity_gb=storage_capacity_gb,
            storage_usd_per_gb_hour=storage_usd_per_gb_hour,
            decisions=decisions,
            region=region,
            market=market,
            provider=provider,
        )

    @classmethod
    def from_tables(cls, folder: str | Path, *, budget_usd: float, **fields: Any) -> AllocationProblem:
        """A problem from CSV tables.

        Parameters
        ----------
        folder : path
            With ``query_types.csv``, ``models.csv``, ``tiers.csv`` and, where delays are measured or estimated,
            ``configurations.csv``; their columns are the fields of `QueryDemand`, `ServedModel`, `Tier` and
            `Configuration`. What is one for each model or query type has a column each: ``errors:llama-3.1-8b``,
            ``delay_s:chat``.
        budget_usd : float
        **fields
            Other fields of `AllocationProblem`. ``storage_capacity_gb`` is by default what everything takes,
            ``storage_usd_per_gb_hour`` 0.

        Returns
        -------
        AllocationProblem

        Raises
        ------
        InvalidInputError
            Naming file, line and column.
        """
        from hetplan.problem.allocation_files import from_tables

        return from_tables(Path(folder), budget_usd=budget_usd, **fields)

    def save(self, path: str | Path) -> None:
        """Write the problem as JSON, or as YAML where the name ends in .yaml or .yml; `hetplan optimize` reads both.

        Raises
        ------
        InvalidInputError
            For another ending, and for YAML above the size that is read.
        """
        from hetplan.problem.allocation_files import save

        save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> AllocationProblem:
        """Read what `save` wrote.

        Raises
        ------
        InvalidInputError
            If the file can't be read or has unknown keys or bad values.
        """
        from hetplan.problem.allocation_files import load

        return load(Path(path))
