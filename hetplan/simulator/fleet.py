"""The replicas of a plan with their requests, between Python and the compiled `engine`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import InvalidInputError
from hetplan.estimator.base import Estimator, make_estimator
from hetplan.estimator.pipeline import StageShape, sequence_bytes
from hetplan.estimator.prediction import shapes_of
from hetplan.estimator.replica import Replica
from hetplan.estimator.step_tables import PipelineTables, pipeline_tables
from hetplan.plan import Pipeline, Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.simulator import engine
from hetplan.simulator.clock import make_clock
from hetplan.simulator.engine import BLOCK_TOKENS, REPLICA, REQUEST, Replicas, Router, Table
from hetplan.simulator.traffic import Traffic
from hetplan.workload.requests import Workload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

Routing = Literal["round_robin", "least_loaded"]


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """What copies of a pipeline share.

    Attributes
    ----------
    problem, estimator, stages
        Whose steps are timed.
    max_num_seqs, max_step_tokens : int
        The engine's limits: vLLM's max_num_seqs and max_num_batched_tokens.
    kv_tokens : int
        Tokens that its KV cache holds.
    weight : float
        Its share of the requests, against the others'.
    """

    problem: PlacementProblem
    estimator: Estimator
    stages: tuple[StageShape, ...]
    max_num_seqs: int
    max_step_tokens: int
    kv_tokens: int
    weight: float


def kinds_of(plan: Plan) -> list[ReplicaKind]:
    """The pipelines of a plan, each once whatever its count."""
    problem = plan.placement
    estimator = make_estimator(problem)
    return [
        kind_of(plan, problem, estimator, pipeline)
        for deployment in plan.deployments
        for pipeline in deployment.pipelines
    ]


def kind_of(plan: Plan, problem: PlacementProblem, estimator: Estimator, pipeline: Pipeline) -> ReplicaKind:
    """One pipeline of a plan."""
    stages = tuple(shapes_of(problem, pipeline))
    caches = [stage.kv_cache_bytes for stage in pipeline.stages]
    return ReplicaKind(
        problem,
        estimator,
        stages,
        pipeline.max_num_seqs,
        plan.max_num_batched_tokens(pipeline),
        kv_tokens(problem, estimator, stages, caches),
        pipeline.predictions.requests_per_s.value,
    )


def kind_of_replica(replica: Replica, workload: Workload, *, max_num_seqs: int | None = None) -> ReplicaKind:
    """A replica as `hetplan.predict` sees it, under a workload.

    Parameters
    ----------
    replica : Replica
    workload : Workload
        Whose mean lengths say how many tokens the KV cache holds.
    max_num_seqs : int, optional
        By default the engine's own.
    """
    problem, overheads = replica.problem.replace(workload=workload), replica.problem.step_overheads
    caches = [memory.kv_cache_bytes for memory in replica.memories]
    return ReplicaKind(
        problem,
        replica.estimator,
        replica.stages,
        overheads.max_num_seqs if max_num_seqs is None else max_num_seqs,
        overheads.max_num_batched_tokens,
        kv_tokens(problem, replica.estimator, replica.stages, caches),
        1.0,
    )


def kv_tokens(
    problem: PlacementProblem, estimator: Estimator, stages: Sequence[StageShape], cache_bytes: Sequence[int]
) -> int:
    """Tokens that the smallest stage's KV cache holds, in sequences as long as the workload's mean."""
    length = problem.workload.mean_input_tokens + problem.workload.mean_output_tokens
    each = sequence_bytes(problem, estimator, stages, length)
    tokens = [room / one * length for room, one in zip(cache_bytes, each, strict=True) if one > 0]
    # Layers that keep nothing of a sequence hold as many as the engine runs.
    return int(min(tokens)) if tokens else 2**40


@dataclass(frozen=True, slots=True)
class Limits:
    """An engine's limits, and its share of the requests; see `ReplicaKind`."""

    max_num_seqs: int
    max_step_tokens: int
    kv_tokens: int
    weight: float = 1.0


class Fleet:
    """Replicas that serve traffic.

    Parameters
    ----------
    kinds : sequence of ReplicaKind
        Of all replicas that there may be.
    traffic : Traffic
    routing : "round_robin" or "least_loaded"
        By weight: in turn, or where least is to do.
    log_steps : int
        Most engine steps that are logged for a timeline; a stretch of alike steps counts as one.

    Notes
    -----
    Replicas are added and stopped while time goes on; nothing here knows why.
    """

    def __init__(
        self, kinds: Sequence[ReplicaKind], traffic: Traffic, *, routing: Routing = "round_robin", log_steps: int = 0
    ) -> None:
        if not kinds:
            raise InvalidInputError("a fleet without replicas serves nothing")
        limits = [Limits(kind.max_num_seqs, kind.max_step_tokens, kind.kv_tokens, kind.weight) for kind in kinds]
        self._begin(_tables_of(kinds, traffic), limits, traffic, routing, log_steps)

    @classmethod
    def of_tables(
        cls,
        tables: Sequence[PipelineTables],
        limits: Sequence[Limits],
        traffic: Traffic,
        *,
        routing: Routing = "round_robin",
        log_steps: int = 0,
    ) -> Self:
        """Replicas whose steps are given as tables of one size."""
        fleet = cls.__new__(cls)
        fleet._begin(tables, limits, traffic, routing, log_steps)
        return fleet

    def _begin(
        self,
        tables: Sequence[PipelineTables],
        limits: Sequence[Limits],
        traffic: Traffic,
        routing: Routing,
        log_steps: int,
    ) -> None:
        if routing not in get_args(Routing):
            raise InvalidInputError(f"routing is 'round_robin' or 'least_loaded', got {routing!r}")
        self.traffic = traffic
        self.now_s = 0.0
        self._tables, self._limits = list(tables), list(limits)
        self._clock, self._first_stages = make_clock(self._tables)
        self.requests = _requests(traffic)
        self._replicas = _no_replicas(max(len(one.stages) for one in tables), max(one.max_num_seqs for one in limits))
        types, count = len(traffic.query_types), len(traffic)
        self._router = Router(
            weight=np.zeros((types, 0)),
            sent=np.zeros((types, 0)),
            numbers=np.zeros(7, dtype=np.int64),
            heap=np.zeros(count + 1, dtype=engine.LATER),
            log=np.zeros(log_steps, dtype=engine.STEP),
        )
        numbers = self._router.numbers
        numbers[engine.WAY] = get_args(Routing).index(routing)
        numbers[engine.HELD_HEAD] = numbers[engine.HELD_TAIL] = -1
        numbers[engine.CLIENTS] = traffic.clients
        if traffic.clients:
            first = np.arange(traffic.clients)
            numbers[engine.NEXT] = traffic.clients
            engine.submit(self.requests, self._router, first, traffic.arrival_s[first], np.full(len(first), -1))

    # ---- replicas

    def add(self, kind: int, *, weight: Sequence[float] | None = None) -> int:
        """A replica that takes requests from now on.

        Parameters
        ----------
        kind : int
            Index into the kinds.
        weight : (query types,) sequence of float, optional
            By default the kind's for every type.

        Returns
        -------
        int
            The replica's number; numbers are not used again.
        """
        own = self._limits[kind]
        shares = np.full(len(self.traffic.query_types), own.weight) if weight is None else np.asarray(weight, float)
        self._replicas = _with_one_more(self._replicas, own, self._first_stages[kind], len(self._tables[kind].stages))
        router = self._router
        # All begin again: a newcomer is not owed what the others had.
        self._router = router._replace(
            weight=np.column_stack([router.weight, shares]),
            sent=np.zeros((len(shares), router.sent.shape[1] + 1)),
        )
        return len(self._replicas.row) - 1

    def add_kind(self, kind: ReplicaKind) -> int:
        """A further kind, within the limits of those that are there; its number for `add`."""
        most = max(one.max_num_seqs for one in self._limits)
        steps = max(one.max_step_tokens for one in self._limits)
        limits = Limits(min(kind.max_num_seqs, most), min(kind.max_step_tokens, steps), kind.kv_tokens, kind.weight)
        longest = int((self.traffic.input_tokens + self.traffic.output_tokens).max())
        self._tables.append(
            pipeline_tables(
                kind.problem,
                kind.estimator,
                kind.stages,
                max_step_tokens=steps,
                max_num_seqs=most,
                max_context=longest,
            )
        )
        self._limits.append(limits)
        self._clock, self._first_stages = make_clock(self._tables)
        self._replicas = _with_stages(self._replicas, len(kind.stages))
        return len(self._limits) - 1

    def stages_of(self, kind: int) -> int:
        """Stages of a kind's pipeline."""
        return len(self._tables[kind].stages)

    def open_held(self) -> None:
        """Send what no replica took to those that are there now."""
        engine.release_held(self._clock, self.requests, self._replicas, self._router, self.now_s)

    def close(self, replica: int) -> None:
        """Send nothing more to a replica; what it has, it serves."""
        self._replicas.row["open"][replica] = 0
        self._router.sent[:] = 0.0

    def stop(self, replica: int) -> IntArray:
        """Take a replica away; its requests, which the caller must submit again."""
        found: IntArray = engine.stop(self._clock, self.requests, self._replicas, self._router, replica, self.now_s)
        self._router.sent[:] = 0.0
        return found

    def settle(self, replica: int) -> None:
        """Bring a replica's counts of emitted tokens up to now."""
        engine.settle(self._clock, self.requests, self._replicas, self._router, replica, self.now_s)

    def requests_at(self, replica: int) -> IntArray:
        """Requests that run or wait at a replica."""
        at: IntArray = np.flatnonzero(
            (self.requests["replica"] == replica) & np.isin(self.requests["status"], (engine.WAITING, engine.RUNNING))
        )
        return at

    def submit(self, requests: IntArray, times_s: FloatArray, *, replica: int = -1) -> None:
        """Let requests come again at times from now on, to a replica or to whom the router chooses."""
        if requests.size:
            engine.submit(self.requests, self._router, requests, times_s, np.full(requests.size, replica))

    # ---- time

    def advance(self, until_s: float) -> None:
        """Let everything happen up to a time; infinity runs until nothing is left to do."""
        last = engine.advance(self._clock, self.requests, self._replicas, self._router, until_s)
        self.now_s = max(self.now_s, last if math.isinf(until_s) else until_s)

    @property
    def idle(self) -> bool:
        """Whether nothing will happen any more."""
        numbers, replicas = self._router.numbers, self._replicas
        listed = not self.traffic.clients and numbers[engine.NEXT] < len(self.traffic)
        return not listed and numbers[engine.HEAP] == 0 and not np.isfinite(replicas.row["next_s"]).any()

    @property
    def held(self) -> bool:
        """Whether requests wait for a replica."""
        return bool(self._router.numbers[engine.HELD_HEAD] >= 0)

    @property
    def replicas(self) -> Table:
        """State of the replicas, of dtype `engine.REPLICA`; not to be changed."""
        return self._replicas.row

    @property
    def log(self) -> Table:
        """The logged steps, of dtype `engine.STEP`."""
        return self._router.log[: int(self._router.numbers[engine.LOGGED])]


def _tables_of(kinds: Sequence[ReplicaKind], traffic: Traffic) -> list[PipelineTables]:
    longest = int((traffic.input_tokens + traffic.output_tokens).max())
    return [
        pipeline_tables(
            kind.problem,
            kind.estimator,
            kind.stages,
            max_step_tokens=max(one.max_step_tokens for one in kinds),
            max_num_seqs=max(one.max_num_seqs for one in kinds),
            max_context=longest,
        )
        for kind in kinds
    ]


def _requests(traffic: Traffic) -> Table:
    """Requests that have not come yet."""
    found: Table = np.zeros(len(traffic), dtype=REQUEST)
    found["arrival_s"], found["query_type"] = traffic.arrival_s, traffic.query_type
    found["prompt"], found["answer"], found["cached"] = (
        traffic.input_tokens, traffic.output_tokens, traffic.cached_tokens,
    )  # fmt: skip
    for name in ("started_s", "first_s", "finish_s"):
        found[name] = math.nan
    for name in ("replica", "behind"):
        found[name] = -1
    return found


def _no_replicas(stages: int, most: int) -> Replicas:
    return Replicas(
        row=np.zeros(0, dtype=REPLICA),
        running=np.zeros((0, most), dtype=np.int64),
        stage_free_s=np.zeros((0, stages)),
        step_end_s=np.zeros((0, stages)),
        step_size=np.zeros((0, stages), dtype=np.int64),
        step_member=np.zeros((0, stages, most), dtype=np.int64),
    )


def _with_one_more(replicas: Replicas, kind: Limits, first_stage: int, stages: int) -> Replicas:
    row: Table = np.zeros(1, dtype=REPLICA)
    row["open"], row["first_stage"], row["stages"] = 1, first_stage, stages
    row["max_num_seqs"], row["max_step_tokens"] = kind.max_num_seqs, kind.max_step_tokens
    row["blocks"] = row["free"] = kind.kv_tokens // BLOCK_TOKENS
    row["head"] = row["tail"] = -1
    row["next_s"], row["busy_since_s"] = math.inf, math.nan
    grown = {
        name: np.concatenate([old, np.zeros((1, *old.shape[1:]), dtype=old.dtype)])
        for name, old in zip(Replicas._fields, replicas, strict=True)
    }
    grown["row"][-1] = row[0]
    grown["step_end_s"][-1] = math.inf
    return Replicas(**grown)


def _with_stages(replicas: Replicas, stages: int) -> Replicas:
    """Room for pipelines of more stages."""
    more = stages - replicas.stage_free_s.shape[1]
    if more <= 0:
        return replicas

    def wider(old: NDArray[Any], value: float) -> NDArray[Any]:
        rest = np.full((old.shape[0], more, *old.shape[2:]), value, dtype=old.dtype)
        return np.concatenate([old, rest], axis=1)

    return replicas._replace(
        stage_free_s=wider(replicas.stage_free_s, 0.0),
        step_end_s=wider(replicas.step_end_s, math.inf),
        step_size=wider(replicas.step_size, 0),
        step_member=wider(replicas.step_member, 0),
    )
