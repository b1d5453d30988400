"""Small allocation problems whose limits bind, and every reading of what the paper leaves open."""

from __future__ import annotations

from typing import get_args

import numpy as np

from hetplan.problem.allocation import AllocationProblem, Configuration, Decisions, QueryDemand, ServedModel, Tier


def readings() -> list[Decisions]:
    """The default, the paper's, and each with one option the other way."""
    found = []
    for begin in (Decisions(), Decisions.paper()):
        found.append(begin)
        for name, field in Decisions.model_fields.items():
            (other,) = (value for value in get_args(field.annotation) if value != getattr(begin, name))
            found.append(begin.replace(**{name: other}))
    return found


def small_problem(
    seed: int, decisions: Decisions, *, types: int = 2, estimated: bool = False, ttft: bool = False
) -> AllocationProblem:
    """A problem of two models on two tiers, where each limit is near what plans need."""
    r = np.random.default_rng(seed)

    def between(low: float, high: float) -> float:
        return float(r.uniform(low, high))

    queries = []
    for i in range(types):
        prompt, answer = between(50, 400), between(50, 400)
        error_limit = between(0.03, 0.08)
        queries.append(
            QueryDemand(
                name=f"type {i}",
                input_tokens=prompt,
                output_tokens=answer,
                requests_per_hour=between(4e3, 3e4),
                delay_limit_s=between(0.006, 0.03) * (prompt + answer),
                ttft_limit_s=between(0.004, 0.02) * prompt if ttft and i % 2 == 0 else None,
                error_limit=error_limit,
                delay_usd_per_ms=between(1e-4, 2e-3),
                unserved_usd=between(30, 300),
                storage_kb_per_token=between(5, 50),
                errors=(error_limit * between(0.8, 1.6), error_limit * between(0.3, 0.95)),
                max_unserved=1.0 if seed % 3 else between(0.3, 1.0),
            )
        )
    models = (
        ServedModel(
            name="small",
            weight_gb=between(6, 12),
            kv_bytes_per_token=between(1e5, 4e5),
            gflop_per_token=between(6, 12),
            activation_bytes_per_token=8192,
        ),
        ServedModel(
            name="large",
            weight_gb=between(20, 40),
            kv_bytes_per_token=between(1e5, 4e5),
            gflop_per_token=between(20, 40),
            activation_bytes_per_token=8192,
        ),
    )
    tiers = (
        Tier(
            name="first",
            gpu="first",
            memory_gb=between(14, 30),
            bandwidth_gb_per_s=between(600, 1200),
            tflops=between(30, 80),
            usd_per_hour=between(0.5, 0.9),
        ),
        Tier(
            name="second",
            gpu="second",
            memory_gb=between(22, 45),
            bandwidth_gb_per_s=between(1000, 2400),
            tflops=between(60, 160),
            usd_per_hour=between(0.9, 1.8),
            weight_scale=0.5,
            error_factor=between(1.0, 1.2),
        ),
    )
    traffic_gb = sum(q.storage_kb_per_token * 1e-6 * q.tokens * q.requests_per_hour for q in queries)
    given = ()
    if estimated:
        given = tuple(
            Configuration(
                model=j,
                tier=k,
                tensor_parallel=n,
                pipeline_parallel=1,
                machines=n,
                usd_per_hour=tiers[k].usd_per_hour * n * between(0.8, 1.2),
                delay_s=tuple(q.delay_limit_s * between(0.5, 1.6) / n**0.5 for q in queries),
                ttft_s=tuple(q.delay_limit_s * between(0.05, 0.2) / n for q in queries),
                capacity_per_hour=tuple(q.requests_per_hour * between(0.4, 1.5) * n for q in queries),
            )
            for j in range(2)
            for k in range(2)
            for n in (1, 2)
        )
    return AllocationProblem(
        query_types=tuple(queries),
        models=models,
        tiers=tiers,
        tensor_parallel=(1, 2),
        pipeline_parallel=(1, 2),
        budget_usd=between(50, 120),
        storage_capacity_gb=traffic_gb * between(0.9, 1.3) + between(20, 80),
        storage_usd_per_gb_hour=between(5e-4, 3e-3),
        decisions=decisions,
        configurations=given,
    )
