"""The placement problem: one model, the machines at hand, what arrives and what is promised."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hetplan.base import Frozen
from hetplan.catalog.calibration import Calibration
from hetplan.catalog.dtypes import Dtype
from hetplan.catalog.engines import EngineProfile, LimitName, get_engine
from hetplan.catalog.hardware import GpuSpec
from hetplan.catalog.model import ModelSpec
from hetplan.catalog.offers import Cluster
from hetplan.catalog.steps import DEFAULT_STEP_ENGINE, StepOverheads, get_step_overheads
from hetplan.errors import UnsupportedFeatureError
from hetplan.workload.requests import Slo, Workload

Objective = Literal["throughput", "throughput_per_cost", "cost", "expected_cost"]
Handling = Literal["none", "migration", "concurrent", "both"]
EstimatorName = Literal["calibrated", "paper"]


class PlacementProblem(Frozen):
    """Everything that a solver, the checker and the launcher need, and nothing from outside.

    Attributes
    ----------
    objective : str
        "throughput": most requests/s from the cluster. "throughput_per_cost": most requests/s per $/h.
        "cost": least $/h that serves the workload's ``requests_per_s``. "expected_cost": least $ for a million output
        tokens with interruptions of spot machines, for that rate, or where none is stated of what the plan generates.
    slo : Slo or None
        Limits on the mean latency of a request that does not queue; with a percentile, on that of all requests of the
        plan at the workload's rate.
    latency_penalty : float
        gamma of eq. 7, used with a soft Slo.
    engine : EngineProfile, its name, or None
        Limits to plan within; None plans freely.
    max_model_len : int or None
        Longest prompt + answer to be served, tokens; None takes the workload's longest. The KV cache of
        every pipeline holds at least one such request.
    gpu_memory_utilization : float
        Share of a GPU's memory that the engine may use (vLLM's flag of that name).
    max_num_seqs : int or None
        Most sequences an engine keeps running; None lets the plan choose, up to 1,024.
    max_num_batched_tokens : int or None
        Most tokens in one engine step; None takes vLLM's default for the GPU.
    handover_sequences : int
        Sequences of the longest length that a second engine can start with beside the first, on the same GPUs and the
        same weights, when it takes over: every GPU keeps room for its activations and context and for their KV cache.
        0 keeps none.
    handover_layers : int
        Layers that a stage of the second engine may have more: room for their weights and their part of that cache.
    handling : "none", "migration", "concurrent" or "both"
        What is done about interruptions, for "expected_cost"; see `hetplan.estimator.interruption.interruption_cost`.
    start_s, start_deviation_s : float
        Mean and standard deviation of the seconds from renting a machine until its pipeline serves, for
        "expected_cost"; by default as ShuntServe measured it, section 7.2.4.
    calibrations : tuple of Calibration
        One for each GPU of the cluster.
    step_overheads : StepOverheads
        What an engine step costs beside its kernels; by default the engine's, or vLLM's without one. A calibration
        that was timed with the same engine goes before it.
    """

    kind: Literal["placement"] = "placement"
    model: ModelSpec
    cluster: Cluster
    workload: Workload
    objective: Objective = "throughput"
    estimator: EstimatorName = "calibrated"
    slo: Slo | None = None
    latency_penalty: Annotated[float, Field(ge=0)] = 0.0
    engine: EngineProfile | None = None
    max_model_len: Annotated[int, Field(gt=0)] | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    max_num_seqs: Annotated[int, Field(gt=0, le=65536)] | None = None
    max_num_batched_tokens: Annotated[int, Field(gt=0)] | None = None
    handover_sequences: Annotated[int, Field(ge=0, le=65536)] = 0
    handover_layers: Annotated[int, Field(ge=0)] = 0
    handling: Handling = "both"
    start_s: Annotated[float, Field(ge=0)] = 111.3
    start_deviation_s: Annotated[float, Field(ge=0)] = 11.0
    calibrations: tuple[Calibration, ...]
    calibration_sha256: dict[str, str] = Field(default_factory=dict)
    step_overheads: StepOverheads = Field(default_factory=lambda: get_step_overheads(DEFAULT_STEP_ENGINE))

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """An engine's name becomes its profile, calibrations without digests get them, overheads are looked up."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if isinstance(values.get("engine"), str):
            values["engine"] = get_engine(values["engine"])
        calibrations = values.get("calibrations")
        if "calibration_sha256" not in values and isinstance(calibrations, (tuple, list)):
            values["calibration_sha256"] = {c.gpu: c.sha256 for c in calibrations if isinstance(c, Calibration)}
        if values.get("step_overheads") is None:
            engine = values.get("engine")
            # Another engine's name is refused by its own field.
            name = engine.name if isinstance(engine, EngineProfile) else DEFAULT_STEP_ENGINE
            values["step_overheads"] = get_step_overheads(name)
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        gpus = {t.gpu.name for t in self.cluster.instance_types}
        missing = gpus - {c.gpu for c in self.calibrations}
        if missing:
            raise ValueError(f"no calibration for {', '.join(sorted(missing))}; add one for each GPU of the cluster")
        if self.objective == "cost" and self.workload.requests_per_s is None:
            raise ValueError("objective 'cost' needs a demand; give the workload requests_per_s")
        if self.objective == "expected_cost":
            self._check_interruptions()
        per_cost = self.objective == "throughput_per_cost" or (
            self.objective == "expected_cost" and self.workload.requests_per_s is None
        )
        if per_cost and any(not p.offer.billed_usd_per_hour for p in self.cluster.pools):
            raise ValueError(
                f"objective {self.objective!r} divides by prices, and an owned machine has none; "
                "give it a price_usd_per_hour or use objective 'throughput'"
            )
        if self.slo is not None and self.slo.percentile is not None:
            if self.workload.requests_per_s is None:
                raise ValueError("a percentile depends on what arrives; give the workload requests_per_s")
            if self.estimator != "calibrated":
                raise ValueError("a percentile needs times of single engine steps; use estimator='calibrated'")
        if self.slo is not None and not self.slo.hard and self.objective in ("cost", "expected_cost"):
            raise ValueError(f"objective {self.objective!r} takes hard limits only; set hard=True on the Slo")
        if self.slo is not None and not self.slo.hard and self.latency_penalty == 0:
            raise ValueError("a soft Slo changes nothing with latency_penalty 0; give a latency_penalty, or hard=True")
        if self.handover_layers and not self.handover_sequences:
            raise ValueError(
                f"handover_layers {self.handover_layers} are a second engine's, for which handover_sequences 0 keeps "
                "no room; set it to 1 or more, or leave handover_layers out"
            )
        mean = self.workload.mean_input_tokens + self.workload.mean_output_tokens
        if self.max_model_len is not None and self.max_model_len < mean:
            raise ValueError(
                f"max_model_len {self.max_model_len} is below the mean request of {mean:.0f} tokens; raise it"
            )
        longest = self.model.max_position_tokens
        if self.longest_request_tokens > longest:
            raise ValueError(
                f"{self.model.name} handles {longest:,} tokens; the longest request has "
                f"{self.longest_request_tokens:,}. Lower max_model_len or the token counts"
            )
        return self

    def _check_interruptions(self) -> None:
        """What is said of spot machines, and promised of them."""
        for pool in self.cluster.pools:
            if pool.offer.market != "spot":
                continue
            for name, said in (("interruptions_per_hour", "how often"), ("notice_s", "with what warning")):
                if getattr(pool.offer, name) is None:
                    raise ValueError(
                        f"objective 'expected_cost' needs to know {said} {pool.offer.name} is taken; give its offer "
                        f"{name}, or use objective 'cost'"
                    )
        if self.slo is not None and self.slo.percentile is not None:
            raise ValueError("objective 'expected_cost' takes limits on means; leave percentile out, or use 'cost'")

    @property
    def longest_request_tokens(self) -> int:
        """Tokens of the longest request that must fit: max_model_len, else the workload's longest."""
        return self.workload.max_tokens if self.max_model_len is None else self.max_model_len

    @property
    def limits(self) -> tuple[LimitName, ...]:
        """The engine's limits that a pipeline has to keep; none without an engine."""
        return () if self.engine is None else self.engine.limits

    def compute_dtype(self, gpu: GpuSpec) -> Dtype:
        """What a stage's GPUs multiply in; the paper's estimator does not ask them."""
        wanted = self.model.compute_dtype
        return wanted if self.estimator == "paper" else gpu.runs_as(wanted)

    def calibration(self, gpu: str) -> Calibration:
        """The calibration of a GPU of the cluster."""
        return next(c for c in self.calibrations if c.gpu == gpu)

    def refuse_unsupported(self) -> None:
        """Raise `UnsupportedFeatureError` for what no solver answers yet."""
        if self.objective == "expected_cost":
            raise UnsupportedFeatureError(
                "a solver by itself plans without interruptions; hetplan.optimize answers 'expected_cost': it asks for "
                "plans at derated prices and compares them"
            )
        if self.slo is not None and self.slo.percentile is not None:
            raise UnsupportedFeatureError(
                "a solver by itself plans for means; hetplan.optimize answers a percentile: it judges plans by "
                "queueing and simulates them"
            )
        if any(q.slo is not None for q in self.workload.query_types):
            raise UnsupportedFeatureError(
                "an Slo per query type needs routing between deployments; give one Slo for the problem"
            )
