"""What checks find: violations, the meaning of their codes, and the checks that plans of every kind share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pydantic import field_validator

from hetplan.base import Frozen
from hetplan.plan import OPTIMALITY_GAP, Plan

# Sums of the same numbers in another order differ by less than this.
SAME = 1e-9

# Every code, and what it means; {value} and {limit} are the violation's.
COMMON: dict[str, str] = {
    "malformed": "{value}; a plan has {limit}",
    "check_failed": "could not be checked: {value}; needed: {limit}",
    "role_not_supported": "a pipeline in the role {value}; plans know {limit}",
    "layers_missing": "goes on at layer {value}; layer {limit} comes next and is nowhere",
    "layers_overlap": "starts at layer {value}; the layers before {limit} are placed already",
    "layers_outside_model": "ends at layer {value}; the model has {limit}",
    "stage_empty": "holds {value} layers; a stage has at least {limit}",
    "gpu_count_differs": "{value} GPUs; its tensor-parallel degree is {limit}",
    "node_unknown": "runs on node {value}; the pipeline's last is {limit}",
    "band_excludes_value": "predicts {value} outside its own band {limit}",
    "pipeline_cost_differs": "states {value} $/h; its machines and its egress cost {limit}",
    "pipeline_egress_differs": "states {value} $/h of egress; what it sends over zone links costs {limit}",
    "plan_cost_differs": "states {value} $/h; its machines and its egress cost {limit}",
    "plan_egress_differs": "states {value} $/h of egress; what its pipelines send over zone links costs {limit}",
    "token_price_differs": "states {value} $ per million output tokens; recomputed: {limit}",
    "route_query_type_unknown": "routes {value}; the workload has {limit}",
    "route_deployment_unknown": "leads to deployment {value}; the plan's last is {limit}",
    "objective_name_differs": "the plan's objective is {value}; the problem's is {limit}",
    "objective_differs": "states {value}; recomputed: {limit}",
    "bound_incomplete": "the plan gives {value}; bound, gap and certificate come together: {limit}",
    "bound_on_wrong_side": "the bound {value} contradicts the objective {limit}, which a plan reaches",
    "gap_differs": "states a gap of {value}; bound and objective are {limit} apart",
    "status_differs": "claims to be {value}; its gap makes it {limit}",
    "certificate_invalid": "{value}; needed: {limit}",
    "bound_not_proven": "the bound is {value}; the certificate proves {limit}",
}
OF_PLACEMENT: dict[str, str] = {
    "calibration_missing": "{value} is in the cluster without a calibration; needed: {limit}",
    "calibration_repeated": "{value} calibrations of one GPU; at most {limit}",
    "calibration_digest_missing": "the plan states the sha256 {value}; the calibration has {limit}",
    "calibration_changed": "the plan states the sha256 {value}; the calibration's content has {limit}",
    "price_not_positive": "costs {value} $/h; a price is above {limit}",
    "promise_not_checkable": "{value} cannot be checked; what can: {limit}",
    "model_differs": "serves {value}; the problem asks for {limit}",
    "instance_type_unknown": "runs on {value}; the cluster has {limit}",
    "tensor_parallel_invalid": "tensor-parallel degree {value}; the model and the machine allow {limit}",
    "gpu_outside_node": "uses GPU {value}; the machine's last is {limit}",
    "gpu_used_twice": "uses GPU {value}, which {limit} has",
    "compute_dtype_differs": "states {value}; its GPU multiplies in {limit}",
    "node_unused": "{value} stages run on it; a machine that is paid for has at least {limit}",
    "offer_unknown": "{value} is not offered; the cluster offers {limit}",
    "offer_of_other_type": "runs on a {value}; the node's offer is for a {limit}",
    "node_visited_twice": "its stages are {value} of the pipeline; a node's stages follow one another: {limit}",
    "regions_mixed": "its neighbour is in {limit}, it is in {value}; a pipeline crosses regions by zone links alone",
    "engine_limit_broken": "{value}; the engine asks that {limit}",
    "inventory_exceeded": "the plan uses {value} machines; the cluster has {limit}",
    "weights_do_not_fit": "weights, activations and the engine take {value} bytes a GPU; usable are {limit}",
    "weight_bytes_differ": "states {value} bytes of weights a GPU; the estimator gives {limit}",
    "weight_bytes_not_of_matrices": "states {value} bytes of weights a GPU; its matrices add up to {limit}",
    "activation_bytes_differ": "states {value} bytes of activations a GPU; the estimator gives {limit}",
    "other_bytes_differ": "states {value} bytes of the engine's own a GPU; the estimator gives {limit}",
    "reserved_bytes_differ": "keeps {value} bytes a GPU for a second engine; the problem asks for {limit}",
    "start_kv_cache_bytes_differ": "starts a second engine with {value} bytes of KV cache; its layers' take {limit}",
    "kv_cache_bytes_differ": "states {value} bytes of KV cache a GPU; what is left for it is {limit}",
    "kv_cache_too_small": "the sequences in flight take {value} bytes a GPU; the KV cache has {limit}",
    "longest_request_does_not_fit": "the longest request takes {value} bytes a GPU; the KV cache has {limit}",
    "max_model_len_too_short": "serves requests of up to {value} tokens; the problem asks for {limit}",
    "max_model_len_beyond_model": "serves requests of up to {value} tokens; the model handles {limit}",
    "batch_limit_exceeded": "keeps {value} sequences in flight; its engines take {limit}",
    "micro_batch_differs": "has micro-batches of {value}; its stages share its sequences as {limit}",
    "prediction_differs": "states {value}; recomputed: {limit}",
    "slo_broken": "{value} s; the hard limit is {limit} s",
    "plan_rate_differs": "states {value} req/s; its pipelines add up to {limit}",
    "demand_not_met": "serves {value} req/s; the workload brings {limit}",
    "route_fractions": "the fractions of its routes sum to {value}; they must sum to {limit}",
    "certificate_does_not_cover": "tensor-parallel degree {value}; the certificate counts {limit} only",
}
OF_ALLOCATION: dict[str, str] = {
    "pipelines_differ": "{value} pipelines; copies of one configuration are one pipeline with a count: {limit}",
    "model_unknown": "serves {value}; the problem has {limit}",
    "tier_unknown": "runs on {value}; the problem's machines are {limit}",
    "configuration_not_allowed": "{value}; the problem allows {limit}",
    "configuration_repeated": "is bought here again ({value}); it is bought in {limit}",
    "second_of_model_and_tier": "has {value} with other degrees; this problem has one, in {limit}",
    "replicas_not_one": "{value} replicas; this problem has {limit} of a configuration",
    "nodes_differ": "states the machines {value}; the configuration takes {limit}",
    "instance_type_differs": "runs on {value}; the pipeline's machine is {limit}",
    "tensor_parallel_differs": "tensor-parallel degree {value}; the pipeline's first stage has {limit}",
    "gpu_indices_differ": "uses the GPUs {value}; the next ones are {limit}",
    "layers_uneven": "holds {value} layers; an even split gives {limit}",
    "precision_differs": "states {value}; its tier's precision is {limit}",
    "weight_share_differs": "states {value} bytes of weights a GPU; its share at the tier's precision is {limit}",
    "activations_stated": "states {value} bytes beside weights and KV cache a GPU; this problem counts {limit}",
    "kv_cache_share_differs": "states {value} bytes of KV cache a GPU; its weights leave {limit}",
    "memory_exceeded": "weights and KV cache take {value} GB of a GPU; it has {limit}",
    "compute_exceeded": "what is sent there takes {value} of its replicas; bought are {limit}",
    "route_repeated": "sends {value} there again; {limit} does",
    "route_empty": "sends a share of {value}; a route has more than {limit}",
    "served_too_much": "its routes serve {value} of it; there is {limit}",
    "unserved_too_much": "{value} of it is unserved; at most {limit} may be",
    "delay_exceeded": "a mean delay of {value} s; the limit for what is served is {limit} s",
    "route_delay_exceeded": "a delay of {value} s; each route's limit is {limit} s",
    "ttft_exceeded": "a mean time to first token of {value} s; the limit for what is served is {limit} s",
    "route_ttft_exceeded": "a time to first token of {value} s; each route's limit is {limit} s",
    "error_exceeded": "a mean error of {value}; the limit for what is served is {limit}",
    "budget_exceeded": "rental and storage cost {value} $ over the horizon; the budget is {limit}",
    "storage_exceeded": "weights and traffic take {value} GB of storage; there are {limit}",
    "served_rate_differs": "states {value} req/s; its routes serve {limit}",
}
MEANINGS = COMMON | OF_PLACEMENT | OF_ALLOCATION


class Violation(Frozen):
    """One way in which a plan is unsound.

    Attributes
    ----------
    code : str
        What kind of fault it is.
    where : str
        The part of the plan, as a path such as ``deployments[0].pipelines[1].stages[0]``.
    value, limit : str or float
        What the plan has and what it should have or may have at most.
    """

    code: str
    where: str
    value: str | float
    limit: str | float

    @field_validator("value", "limit", mode="before")
    @classmethod
    def _spell_out(cls, value: Any) -> str | float:
        """Numbers as they are; infinities, NaN and anything else as text, so that a finding can always be stated."""
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        return str(value)

    def __str__(self) -> str:
        meaning = MEANINGS.get(self.code, "{value}; the limit is {limit}")
        return f"{self.where}: {meaning.format(value=_shown(self.value), limit=_shown(self.limit))} [{self.code}]"


def _shown(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.12g}"


def found(code: str, where: str, value: object, limit: object) -> Violation:
    """A violation of any values; what is no number is stated as text."""
    return Violation.from_dict({"code": code, "where": where, "value": value, "limit": limit})


def guarded(where: str, needed: str, check: Callable[..., Iterable[Violation]], *arguments: Any) -> list[Violation]:
    """What a check finds; an exception inside it is a finding too, since a damaged plan can break any assumption."""
    violations: list[Violation] = []
    try:
        for violation in check(*arguments):
            violations.append(violation)
    except Exception as error:
        violations.append(found("check_failed", where, f"{type(error).__name__}: {error}", needed))
    return violations


def close(one: float, other: float) -> bool:
    """Equal up to rounding; false for NaN."""
    return math.isclose(one, other, rel_tol=SAME)


def check_status(plan: Plan, minimised: bool) -> Iterator[Violation]:
    """Bound, gap and certificate come together, fit the objective, and earn the status."""
    parts = {"bound": plan.bound, "gap": plan.gap, "certificate": plan.certificate}
    present = [name for name, part in parts.items() if part is not None]
    if present and len(present) < len(parts):
        yield found("bound_incomplete", "plan", ", ".join(present), "all or none")
    earned = "optimal" if plan.gap is not None and plan.gap <= OPTIMALITY_GAP else "feasible"
    if plan.status != earned:
        yield found("status_differs", "status", plan.status, earned)
    if plan.bound is None:
        return
    slack = SAME * abs(plan.objective)
    excess = plan.bound - plan.objective if minimised else plan.objective - plan.bound
    if not excess <= slack:
        yield found("bound_on_wrong_side", "bound", plan.bound, plan.objective)
    gap = abs(plan.bound - plan.objective) / max(abs(plan.objective), 1e-9)
    if plan.gap is not None and not abs(plan.gap - gap) <= SAME * max(1.0, gap):
        yield found("gap_differs", "gap", plan.gap, gap)
