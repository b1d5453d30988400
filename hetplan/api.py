"""The public verbs (over 500 lines, most of them docstrings): thin functions over the rooms that do the work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from hetplan.catalog.calibration import Calibration
from hetplan.catalog.clusters import ClusterLike, resolve_cluster
from hetplan.catalog.dtypes import DTYPE_ALIASES, Dtype
from hetplan.catalog.engines import DEFAULT_ENGINE, get_engine
from hetplan.catalog.hardware import GpuSpec, InstanceType
from hetplan.catalog.model import ModelSpec
from hetplan.catalog.offers import Cluster, Market
from hetplan.catalog.tables import (
    default_instance_type,
    get_calibration,
    get_instance_type,
    gpu_name,
)
from hetplan.errors import InfeasibleError, InvalidInputError, NoSolutionError
from hetplan.estimator.prediction import (
    PlanEstimate,
    ReplicaPrediction,
    estimate_plan,
    predict_replica,
    predict_replicas,
)
from hetplan.estimator.replica import Replica, Schedule, make_replica
from hetplan.launchers.shell import write_shell
from hetplan.launchers.stores import shard_source
from hetplan.launchers.vllm import cache_sharing
from hetplan.plan import Plan
from hetplan.problem.allocation import AllocationProblem
from hetplan.problem.placement import EstimatorName, Handling, Objective, PlacementProblem
from hetplan.problem.robust import Robust
from hetplan.simulator.availability import Availability
from hetplan.simulator.results import SimulationResult
from hetplan.simulator.simulate import SpotScenario, simulate_plan
from hetplan.simulator.traffic import Traffic, as_traffic
from hetplan.solvers.allocation.build import build_allocation_plan
from hetplan.solvers.allocation.placements import build_placement_plans
from hetplan.solvers.allocation.robust import solve_robust
from hetplan.solvers.base import AllocationSolution, OnIncumbent, get_allocation_solver, get_solver
from hetplan.solvers.build import build_plan
from hetplan.solvers.compare import Comparison, compare_solvers
from hetplan.solvers.expected import expected_cost_plan
from hetplan.solvers.promised import promised_plan
from hetplan.verification import Violation, verify_plan
from hetplan.workload.requests import Slo, Workload
from hetplan.workload.traces import Trace

if TYPE_CHECKING:
    from pandas import DataFrame

ModelLike = ModelSpec | str | Path | Mapping[str, Any]


def optimize(
    problem: PlacementProblem | AllocationProblem | None = None,
    *,
    model: ModelLike | None = None,
    cluster: ClusterLike | None = None,
    workload: Workload | None = None,
    objective: Objective = "throughput",
    solver: str = "auto",
    solver_options: Mapping[str, Any] | None = None,
    estimator: EstimatorName = "calibrated",
    time_limit_s: float = 60.0,
    seed: int = 0,
    region: str = "us-west-2",
    market: Market = "on_demand",
    provider: str = "aws",
    slo: Slo | None = None,
    latency_penalty: float = 0.0,
    engine: str | None = None,
    max_model_len: int | None = None,
    weight_dtype: str | None = None,
    kv_dtype: str | None = None,
    gpu_memory_utilization: float = 0.9,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    handover_sequences: int = 0,
    handover_layers: int = 0,
    handling: Handling = "both",
    calibrations: Mapping[str, Calibration] | None = None,
    warm_start: Plan | None = None,
    on_incumbent: OnIncumbent | None = None,
    robust: Robust | None = None,
    **more_solver_options: Any,
) -> Plan:
    """Find a plan: pipelines of stages on the machines at hand, with predictions, cost and a bound.

    Parameters
    ----------
    problem : PlacementProblem or AllocationProblem, optional
        A ready problem; otherwise a placement problem is made of the arguments that follow.
    model : ModelSpec, name, path or mapping
        A catalogued name, a Hugging Face id, a config.json (path or content), or a spec.
    cluster : Cluster, mapping or path
        ``{"g6.12xlarge": 3}``, a mapping or YAML file with own machines and offers, or a Cluster.
    workload : Workload
        What arrives.
    objective : str
        "throughput" (req/s), "throughput_per_cost" (req/s per $/h), "cost" ($/h for the workload's rate) or
        "expected_cost" ($ for a million output tokens with interruptions of spot machines, whose offers state
        ``interruptions_per_hour``).
    solver : str
        "auto", "exact", "dp-beam", "even", or a planner of another paper: "alpaserve", "helix", "hexgen", "spotserve";
        for an allocation problem "auto", "milp", "gh" or "agh";
        ``solver_options``, or further keywords such as ``beam_width=11`` and
        ``search="paper"``, go to it.
    estimator : "calibrated" or "paper"
    time_limit_s : float
        Seconds; the best plan so far is returned when they are over.
    seed : int
    region, market, provider : str
        Where a mapping's catalogued machines are rented.
    slo : Slo, optional
        Limits on mean latencies, or with ``percentile`` on those of all requests at the workload's rate, which the plan
        is simulated for; ``latency_penalty`` is gamma of eq. 7 for a soft one.
    engine : str, optional
        Plan within an engine's limits; None plans freely.
    max_model_len : int, optional
        Longest prompt + answer to serve, tokens; by default the workload's longest.
    weight_dtype, kv_dtype : str, optional
        Other number formats than the checkpoint's, such as "fp8".
    gpu_memory_utilization, max_num_seqs, max_num_batched_tokens
        As vLLM's flags of those names.
    handover_sequences, handover_layers : int
        Memory kept on every GPU so that a second engine can start beside the first and take over: with a KV cache for
        so many of the longest sequences, and with so many layers more in a stage. 0 keeps none.
    handling : "none", "migration", "concurrent" or "both"
        What is done about interruptions, for "expected_cost": whether requests keep their tokens, and whether the
        replacement starts at the notice.
    calibrations : mapping of str to Calibration, optional
        Own calibrations by GPU name, instead of the shipped ones.
    warm_start : Plan, optional
    on_incumbent : callable, optional
        Called with a `hetplan.solvers.base.Progress` at each better plan.
    robust : Robust, optional
        Make the plan of an allocation problem against scenarios, beginning from the certified optimum (solver "auto" or
        "milp"). Its objective and bound are still of the problem with nothing drawn; what the scenarios cost stands in
        ``plan.provenance.parameters``.

    Returns
    -------
    Plan

    Raises
    ------
    InvalidInputError
        For bad values, unknown names, files that cannot be read.
    InfeasibleError
        If no plan exists; ``.reasons`` lists each limit with the shortfall.
    NoSolutionError
        If none was found and none ruled out.

    Examples
    --------
    >>> import hetplan as hp
    >>> plan = hp.optimize(model="llama-3.1-8b", cluster={"g6.xlarge": 2},
    ...                    workload=hp.Workload(input_tokens=763, output_tokens=232))
    >>> plan.deployments[0].pipelines[0].stages[0].instance_type
    'g6.xlarge'
    """
    if problem is None:
        if model is None or cluster is None or workload is None:
            missing = [n for n, v in (("model", model), ("cluster", cluster), ("workload", workload)) if v is None]
            raise InvalidInputError(f"optimize needs {', '.join(missing)}; or a problem")
        problem = make_problem(
            model=model,
            cluster=cluster,
            workload=workload,
            region=region,
            market=market,
            provider=provider,
            weight_dtype=weight_dtype,
            kv_dtype=kv_dtype,
            calibrations=calibrations,
            objective=objective,
            estimator=estimator,
            slo=slo,
            latency_penalty=latency_penalty,
            engine=engine,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            handover_sequences=handover_sequences,
            handover_layers=handover_layers,
            handling=handling,
        )
    else:
        given = {
            "model": model,
            "cluster": cluster,
            "workload": workload,
            "objective": None if objective == "throughput" else objective,
            "estimator": None if estimator == "calibrated" else estimator,
            "slo": slo,
            "latency_penalty": latency_penalty or None,
            "engine": engine,
            "max_model_len": max_model_len,
            "weight_dtype": weight_dtype,
            "kv_dtype": kv_dtype,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "handover_sequences": handover_sequences or None,
            "handover_layers": handover_layers or None,
            "handling": None if handling == "both" else handling,
            "calibrations": calibrations,
        }
        twice = [name for name, value in given.items() if value is not None]
        if twice:
            raise InvalidInputError(
                f"the problem says it already: leave out {', '.join(twice)}, or problem.replace(...)"
            )
    if solver_options is not None and not isinstance(solver_options, Mapping):
        raise InvalidInputError(f"solver_options is a mapping, got {type(solver_options).__name__}")
    options = dict(solver_options or {}) | more_solver_options
    if robust is not None or isinstance(problem, AllocationProblem):
        began = time.monotonic()
        try:
            if robust is not None or not isinstance(problem, AllocationProblem):
                found = _robust(problem, robust, solver, options, time_limit_s, seed, on_incumbent)
            else:
                found = get_allocation_solver(solver, **options).solve(
                    problem, time_limit_s=time_limit_s, seed=seed, warm_start=warm_start, on_incumbent=on_incumbent
                )
        except InfeasibleError as error:
            if error.reasons or not isinstance(problem, AllocationProblem):
                raise
            # The search behind it is compiled code, which other verbs do without.
            from hetplan.solvers.allocation.shortfall import infeasible

            left_s = time_limit_s - (time.monotonic() - began)
            raise infeasible(problem, time_limit_s=left_s) from None
        return build_allocation_plan(found.options.problem, found, solver=solver, seed=seed)
    chosen = get_solver(solver, **options)
    if problem.slo is not None and problem.slo.percentile is not None:
        return promised_plan(
            problem,
            chosen,
            simulated_percentiles,
            solver_name=solver,
            time_limit_s=time_limit_s,
            seed=seed,
            warm_start=warm_start,
            on_incumbent=on_incumbent,
        )
    if problem.objective == "expected_cost":
        return expected_cost_plan(
            problem,
            chosen,
            solver_name=solver,
            time_limit_s=time_limit_s,
            seed=seed,
            warm_start=warm_start,
            on_incumbent=on_incumbent,
        )
    solution = chosen.solve(
        problem, time_limit_s=time_limit_s, seed=seed, warm_start=warm_start, on_incumbent=on_incumbent
    )
    return build_plan(problem, solution, solver=solver, seed=seed)


def _robust(
    problem: PlacementProblem | AllocationProblem,
    robust: Robust | None,
    solver: str,
    options: Mapping[str, Any],
    time_limit_s: float,
    seed: int,
    on_incumbent: OnIncumbent | None,
) -> AllocationSolution:
    if not isinstance(robust, Robust):
        raise InvalidInputError(f"robust is a hetplan.Robust, got {type(robust).__name__}")
    if not isinstance(problem, AllocationProblem):
        raise InvalidInputError(
            "robust plans are made of allocation problems, and this one places a model on given machines. Leave robust "
            "out, or make an AllocationProblem"
        )
    if solver not in ("auto", "milp") or options:
        given = ", ".join(options) or f"solver={solver!r}"
        raise InvalidInputError(
            f"a robust plan begins from the certified optimum, whatever the solver's options: leave out {given}"
        )
    return solve_robust(problem, robust, time_limit_s=time_limit_s, seed=seed, on_incumbent=on_incumbent)


def compare(
    problem: PlacementProblem,
    *,
    solvers: Sequence[str] | None = None,
    time_limit_s: float = 60.0,
    seed: int = 0,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Comparison:
    """Run every solver on one problem.

    Parameters
    ----------
    problem : PlacementProblem
        As `make_problem` or a problem file gives it.
    solvers : sequence of str, optional
        Names of solvers; all by default.
    time_limit_s : float
        Of each solver.
    seed : int
    on_progress : callable, optional
        Called with solvers done, solvers in all and the name of the next.

    Returns
    -------
    Comparison
        ``rows`` with each solver's plan or failure and its time, ``bound`` and ``gap(row)``.

    Raises
    ------
    InvalidInputError
        For unknown solvers and bad values.
    """
    return compare_solvers(problem, solvers=solvers, time_limit_s=time_limit_s, seed=seed, on_progress=on_progress)


def make_problem(
    *,
    model: ModelLike,
    cluster: ClusterLike,
    workload: Workload,
    region: str = "us-west-2",
    market: Market = "on_demand",
    provider: str = "aws",
    weight_dtype: str | None = None,
    kv_dtype: str | None = None,
    calibrations: Mapping[str, Calibration] | None = None,
    **options: Any,
) -> PlacementProblem:
    """A self-contained problem from names and values; parameters as in `optimize`."""
    spec = resolve_model(model, weight_dtype=weight_dtype, kv_dtype=kv_dtype)
    machines = resolve_cluster(cluster, region=region, market=market, provider=provider)
    own = calibrations or {}
    gpus = sorted({t.gpu.name for t in machines.instance_types})
    used = tuple(own[name] if name in own else get_calibration(machine_gpu(machines, name)) for name in gpus)
    return PlacementProblem(
        model=spec,
        cluster=machines,
        workload=workload,
        calibrations=used,
        **options,
    )


def machine_gpu(cluster: Cluster, name: str) -> GpuSpec:
    """The GPU of that name in a cluster."""
    return next(t.gpu for t in cluster.instance_types if t.gpu.name == name)


def resolve_model(model: ModelLike, *, weight_dtype: str | None = None, kv_dtype: str | None = None) -> ModelSpec:
    """A spec from a name, path, mapping or spec, in the asked number formats."""
    if isinstance(model, ModelSpec):
        spec = model
    elif isinstance(model, str):
        spec = ModelSpec.get(model)
    elif isinstance(model, (Path, Mapping)):
        spec = ModelSpec.from_config(model)
    else:
        raise InvalidInputError(f"model is a name, a path, a configuration or a ModelSpec, got {type(model).__name__}")
    return spec.with_dtypes(weight_dtype=_dtype(weight_dtype), kv_dtype=_dtype(kv_dtype))


def _dtype(name: str | None) -> Dtype | None:
    if name is None:
        return None
    if not isinstance(name, str) or name.lower() not in DTYPE_ALIASES:
        raise InvalidInputError(
            f"unknown number format {name!r}; there are {', '.join(sorted(set(DTYPE_ALIASES.values())))}"
        )
    return DTYPE_ALIASES[name.lower()]


def verify(plan: Plan) -> list[Violation]:
    """Check a plan against its own problem with code that shares nothing with the solvers.

    Parameters
    ----------
    plan : Plan

    Returns
    -------
    list of Violation
        Each with code, where, value and limit; empty when the plan is sound.
    """
    return verify_plan(plan, simulate=simulated_percentiles)


def simulated_percentiles(plan: Plan, level: float, seed: int) -> dict[str, float]:
    """A percentile of each latency that a plan's requests live through; see `hetplan.simulator.promised`."""
    # The simulator is compiled.
    from hetplan.simulator.promised import simulated_latencies

    return simulated_latencies(plan, level, seed=seed)


def estimate(plan: Plan, workload: Workload | None = None) -> PlanEstimate:
    """What a plan should do, for its own workload or another one, each pipeline kept full.

    Parameters
    ----------
    plan : Plan
    workload : Workload, optional
        By default the plan's own.

    Returns
    -------
    PlanEstimate
        Requests and tokens per second, dollars per million output tokens, latencies, each pipeline apart.

    Raises
    ------
    InfeasibleError
        If a request of the workload does not fit some stage.
    """
    return estimate_plan(plan, workload)


def simulate(
    plan: Plan,
    trace: Trace | Traffic,
    *,
    spot: SpotScenario | Availability | None = None,
    policy: str = "hetplan",
    routing: Literal["round_robin", "least_loaded"] = "round_robin",
    seed: int = 0,
    log_steps: int = 0,
    until_s: float = math.inf,
    replan: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> SimulationResult:
    """Live through traffic with a plan: continuous batching as vLLM schedules it, machines that come and go.

    Parameters
    ----------
    plan : Plan
        Of a placement problem; its own snapshot is used, prices of spot machines that it lacks come from the catalogue.
    trace : Trace or Traffic
        A trace is replayed as it was; `Traffic` makes others: faster, random, bursty, over a day, a closed loop.
    spot : SpotScenario or Availability, optional
        A spot market for the plan's machines. Without one all machines stand all the time.
    policy : str
        With an Availability, who deals with it: "on-demand", "none", "migration", "concurrent", "both", "skyserve",
        "parcae" or "hetplan"; see `hetplan.policies`.
    routing : "round_robin" or "least_loaded"
        By the pipelines' throughput: in turn, or where least is to do.
    seed : int
        Of start times and of which machine is taken. The same seed gives the same result.
    log_steps : int
        Most engine steps kept for ``write_chrome_trace``.
    until_s : float
        The run ends then at the latest, requests unfinished or not; cost and rates are of the time until then.
    replan : bool
        Whether a policy may have a plan made over fewer machines.
    on_progress : callable, optional
        Called with requests done and requests in all.

    Returns
    -------
    SimulationResult

    Raises
    ------
    InvalidInputError
        For bad values, and an availability that lacks a machine type of the plan.
    UnsupportedFeatureError
        For a plan of an allocation problem.

    Examples
    --------
    >>> import hetplan as hp
    >>> plan = hp.optimize(model="llama-3.1-8b", cluster={"g6.xlarge": 2}, solver="dp-beam",
    ...                    workload=hp.Workload(input_tokens=500, output_tokens=50))
    >>> trace = hp.Trace("two", "example", [0.0, 4.0], [100, 300], [20, 40])
    >>> hp.simulate(plan, trace).answered
    2
    """
    traffic = as_traffic(trace)
    if isinstance(spot, Availability):
        spot = SpotScenario.for_plan(plan, spot, policy)
    elif spot is not None and not isinstance(spot, SpotScenario):
        raise InvalidInputError(f"spot is a SpotScenario or an Availability, got {type(spot).__name__}")
    return simulate_plan(
        plan,
        traffic,
        spot=spot,
        routing=routing,
        seed=seed,
        log_steps=log_steps,
        until_s=until_s,
        replan=_plan_over if replan and spot is not None else None,
        on_progress=on_progress,
    )


# Seconds for a plan over the machines that are left: it is made while requests wait.
_REPLAN_S = 5.0


def _plan_over(plan: Plan, machines: Mapping[str, int]) -> Plan | None:
    """A plan of the same model over so many machines of each type; None where there is none."""
    problem = plan.placement
    pools = []
    for pool in problem.cluster.pools:
        count = min(machines.get(pool.offer.instance_type, 0), pool.count)
        if count:
            pools.append(pool.replace(count=count))
    if not pools:
        return None
    cluster = problem.cluster.replace(pools=tuple(pools), zone_links=())
    try:
        solution = get_solver("dp-beam").solve(
            problem.replace(cluster=cluster, objective="throughput", slo=None), time_limit_s=_REPLAN_S
        )
    except (InfeasibleError, NoSolutionError):
        return None
    return build_plan(
        problem.replace(cluster=cluster, objective="throughput", slo=None), solution, solver="dp-beam", seed=0
    )


def launch(
    plan: Plan,
    target: str = "shell",
    out: str | Path = "out",
    *,
    engine: str | None = None,
    model: str | Mapping[str, str] | None = None,
    first_port: int = 8000,
    kv_connector: str | None = None,
    kv_storage: str | Path | None = None,
    store: str | Path | None = None,
    dry_run: bool = False,
) -> list[Path]:
    """Write what starts a plan on an engine.

    Parameters
    ----------
    plan : Plan
        Of an allocation problem as well: all its deployments in one folder, as `placement_plans` places them, and the
        shares of query types in router.json.
    target : "shell"
        A folder with one script per machine, plan.json, router.json and a README.
    out : path
        A new or empty folder.
    engine : str, optional
        Engine version; by default the plan's own, else the newest that has been run.
    model : str, or mapping of str to str, optional
        Path or Hugging Face id that the engine loads, instead of the model's own id; for a plan of several models by
        their names.
    first_port : int
        HTTP port of the first pipeline; the others follow. Plans side by side take ports of their own.
    kv_connector : "ExampleConnector" or "NixlConnector", optional
        vLLM's connector by which engines hand caches to each other, so that a request can leave with its cache.
    kv_storage : path, optional
        With ExampleConnector: the absolute path of a folder that all engines see.
    store : path or URL, optional
        With engine "hetplan": engines take their weights from a tensor store on each machine, which reads the model's
        shards in this folder (an absolute path) or below this URL (http, https, s3).
    dry_run : bool
        Check everything and return the paths, write nothing.

    Returns
    -------
    list of Path
        The files, sorted by name.

    Raises
    ------
    InvalidInputError
        If the folder is not empty, a name is not fit for a command line, or the plan is not sound; and as
        `placement_plans`.
    InfeasibleError
        As `placement_plans`.
    UnsupportedFeatureError
        If the engine cannot run a pipeline; the message names the limit.
    """
    if target != "shell":
        raise InvalidInputError(f"target is 'shell', got {target!r}")
    violations = verify(plan)
    if violations:
        raise InvalidInputError(f"the plan is not sound: {violations[0]} (and {len(violations) - 1} more)")
    if not 1024 <= first_port <= 30_000:
        raise InvalidInputError(f"first_port is 1024 to 30000, got {first_port}")
    placed = placement_plans(plan)
    profile = get_engine(engine) if engine is not None else placed[0].placement.engine or get_engine(DEFAULT_ENGINE)
    sharing = cache_sharing(kv_connector, None if kv_storage is None else str(kv_storage))
    source = shard_source(None if store is None else str(store), profile)
    return write_shell(
        plan,
        Path(out),
        profile,
        placed=placed,
        model=model,
        first_port=first_port,
        sharing=sharing,
        source=source,
        dry_run=dry_run,
    )


def placement_plans(
    plan: Plan, *, engine: str | None = None, calibrations: Mapping[str, Calibration] | None = None
) -> tuple[Plan, ...]:
    """The plan of each deployment by itself: one model on the machines that are rented for it.

    An allocation plan says which configurations are bought; what is started needs the memory and the cache of each
    GPU. Both are computed here by the rules of placement plans, for the mix of query types that is sent there.

    Parameters
    ----------
    plan : Plan
        Of an allocation problem of catalogued models and machines, such as `AllocationProblem.from_catalog` makes.
        A plan that places one model is the only one.
    engine : str, optional
        Engine version within whose limits each plan has to be.
    calibrations : mapping of str to Calibration, optional
        Own calibrations by GPU name, instead of the shipped ones.

    Returns
    -------
    tuple of Plan
        One for each deployment, in order: as many machines at the same price, with the same degrees, layers spread
        evenly. Each is sound by itself, and predicts what its pipelines do when they are kept full.

    Raises
    ------
    InvalidInputError
        If the problem lists no configurations, a model has no ``spec`` or a tier no ``instance_type`` or ``offer``
        (those of the paper have none), a deployment is sent nothing, or what is made is not sound.
    InfeasibleError
        If weights and one longest request do not fit a GPU, though the allocation thought so; with both figures.

    Examples
    --------
    >>> import hetplan as hp
    >>> chat = {"name": "chat", "input_tokens": 400, "output_tokens": 200, "requests_per_hour": 9000,
    ...         "delay_limit_s": 25, "error_limit": 0.05, "delay_usd_per_ms": 1e-4, "unserved_usd": 500,
    ...         "errors": {"llama-3.1-8b": 0.04}}
    >>> plan = hp.optimize(hp.AllocationProblem.from_catalog(
    ...     query_types=[chat], models=["llama-3.1-8b"], cluster={"g6e.xlarge": 4}, budget_usd=300))
    >>> (one,) = hp.placement_plans(plan)
    >>> one.placement.cluster.pools[0].count, one.placement.workload.requests_per_s
    (1, 2.5)
    """
    if not isinstance(plan.problem, AllocationProblem):
        return (plan,)
    placed = build_placement_plans(
        plan, plan.problem, engine=None if engine is None else get_engine(engine), calibrations=calibrations
    )
    for number, one in enumerate(placed):
        violations = verify_plan(one)
        if violations:
            raise InvalidInputError(
                f"deployments[{number}] cannot be placed as the allocation has it: {violations[0]} (and "
                f"{len(violations) - 1} more). Correct its tier or its configuration"
            )
    return placed


def predict(
    model: ModelLike,
    gpu: str,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    batch: int = 8,
    input_tokens: float = 763,
    output_tokens: float = 232,
    weight_dtype: str | None = None,
    kv_dtype: str | None = None,
    instance_type: str | InstanceType | None = None,
    engine: str | None = None,
    calibration: Calibration | None = None,
    schedule: Schedule = "static",
    estimator: EstimatorName = "calibrated",
    gpu_memory_utilization: float | None = None,
) -> ReplicaPrediction:
    """How fast one replica is: a model on ``pipeline_parallel`` even stages, under a schedule.

    Parameters
    ----------
    model : ModelSpec, name, path or mapping
    gpu : str
        A catalogued GPU or alias.
    tensor_parallel, pipeline_parallel : int
        GPUs of a stage, and stages.
    batch : int
        Sequences: of the batch, in flight, or clients, as the schedule says.
    input_tokens, output_tokens : float
        Tokens of each sequence.
    weight_dtype, kv_dtype : str, optional
        Other number formats than the checkpoint's.
    instance_type : str or InstanceType, optional
        The host, for its links; by default the NVLink table of an SXM part, else a default PCIe host.
    engine : str, optional
        Whose step overheads to take, such as "vllm"; by default those that the schedule was measured with.
    calibration : Calibration, optional
        Own calibration of the GPU.
    schedule : "static", "in_flight" or "closed_loop"
        A batch that starts and ends together; ``batch`` sequences kept in flight from an endless queue, their prefill
        mixed into ``tpot_s`` and ``output_tokens_per_s``; or ``batch`` clients that each wait for their answer.
    estimator : "calibrated" or "paper"
    gpu_memory_utilization : float, optional
        As vLLM's flag of that name; by default the engine's, 0.9 for vLLM.

    Returns
    -------
    ReplicaPrediction
        ``ttft_s``, ``tpot_s`` (without the first token), ``latency_s``, ``output_tokens_per_s``, ``band``, ``source``.

    Raises
    ------
    InfeasibleError
        If the weights and one sequence do not fit; the shortfall is given in GiB.
    InvalidInputError
        For values out of range or unknown names.

    See Also
    --------
    predict_many : many loads of one replica at once.
    """
    replica = _replica(
        model, gpu, tensor_parallel, pipeline_parallel, weight_dtype, kv_dtype, instance_type, engine, calibration,
        schedule, estimator, gpu_memory_utilization,
    )  # fmt: skip
    return predict_replica(replica, batch=batch, input_tokens=input_tokens, output_tokens=output_tokens)


def predict_many(
    model: ModelLike,
    gpu: str,
    *,
    batch: ArrayLike,
    input_tokens: ArrayLike,
    output_tokens: ArrayLike,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    weight_dtype: str | None = None,
    kv_dtype: str | None = None,
    instance_type: str | InstanceType | None = None,
    engine: str | None = None,
    calibration: Calibration | None = None,
    schedule: Schedule = "static",
    estimator: EstimatorName = "calibrated",
    gpu_memory_utilization: float | None = None,
) -> DataFrame:
    """As `predict`, for many loads of one replica at once.

    Parameters
    ----------
    model, gpu
        As in `predict`.
    batch, input_tokens, output_tokens : array_like
        Broadcast together to (N,).
    tensor_parallel, pipeline_parallel, weight_dtype, kv_dtype, instance_type, engine, calibration, schedule
        As in `predict`.
    estimator, gpu_memory_utilization
        As in `predict`.

    Returns
    -------
    pandas.DataFrame
        (N, ...) the loads, ``max_batch``, and each figure with its band (``ttft_s``, ``ttft_s_low``, ...); NaN where
        not even one such sequence fits.

    Raises
    ------
    InvalidInputError
        As `predict`; also for arrays that do not broadcast, or hold anything but positive numbers.
    """
    import pandas

    names = ("batch", "input_tokens", "output_tokens")
    try:
        given = [np.asarray(value, dtype=np.float64) for value in (batch, input_tokens, output_tokens)]
        loads = [np.array(np.atleast_1d(one), dtype=np.float64) for one in np.broadcast_arrays(*given)]
    except ValueError as error:
        raise InvalidInputError(f"batch, input_tokens and output_tokens are numbers of one shape: {error}") from None
    for name, values in zip(names, loads, strict=True):
        wrong = ~(np.isfinite(values) & (values > 0))
        if values.ndim != 1 or wrong.any():
            said = f"has {values[wrong][0]}" if wrong.any() else f"has {values.ndim} dimensions"
            raise InvalidInputError(f"{name} {said}; positive numbers in one dimension are needed")
    replica = _replica(
        model, gpu, tensor_parallel, pipeline_parallel, weight_dtype, kv_dtype, instance_type, engine, calibration,
        schedule, estimator, gpu_memory_utilization,
    )  # fmt: skip
    return pandas.DataFrame(dict(zip(names, loads, strict=True)) | predict_replicas(replica, *loads))


def _replica(
    model: ModelLike,
    gpu: str,
    tensor_parallel: int,
    pipeline_parallel: int,
    weight_dtype: str | None,
    kv_dtype: str | None,
    instance_type: str | InstanceType | None,
    engine: str | None,
    calibration: Calibration | None,
    schedule: Schedule,
    estimator: EstimatorName,
    gpu_memory_utilization: float | None,
) -> Replica:
    if isinstance(model, str):
        spec = _named_model(model, weight_dtype, kv_dtype)
    else:
        spec = resolve_model(model, weight_dtype=weight_dtype, kv_dtype=kv_dtype)
    if isinstance(instance_type, str):
        machine = get_instance_type(instance_type)
    else:
        machine = instance_type or _default_host(gpu)
    if instance_type is not None and machine.gpu.name != gpu and machine.gpu.name != gpu_name(gpu):
        raise InvalidInputError(f"{machine.name} has {machine.gpu.name} GPUs, not {gpu}; change one of the two")
    return make_replica(
        spec,
        machine,
        calibration or get_calibration(machine.gpu),
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        schedule=schedule,
        engine=engine,
        estimator=estimator,
        gpu_memory_utilization=gpu_memory_utilization,
    )


@lru_cache(maxsize=64)
def _named_model(name: str, weight_dtype: str | None, kv_dtype: str | None) -> ModelSpec:
    return resolve_model(name, weight_dtype=weight_dtype, kv_dtype=kv_dtype)


@lru_cache(maxsize=64)
def _default_host(gpu: str) -> InstanceType:
    return default_instance_type(gpu)
