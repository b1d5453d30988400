"""hetplan: plan LLM serving on heterogeneous GPUs, and prove how good the plan is.

Public names load on first use, so that ``import hetplan`` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "AllocationProblem": "hetplan.problem.allocation",
    "Availability": "hetplan.simulator.availability",
    "Calibration": "hetplan.catalog.calibration",
    "Cluster": "hetplan.catalog.offers",
    "GpuSpec": "hetplan.catalog.hardware",
    "HetplanError": "hetplan.errors",
    "InfeasibleError": "hetplan.errors",
    "InstanceType": "hetplan.catalog.hardware",
    "InvalidInputError": "hetplan.errors",
    "Link": "hetplan.catalog.hardware",
    "ModelSpec": "hetplan.catalog.model",
    "NoSolutionError": "hetplan.errors",
    "Offer": "hetplan.catalog.offers",
    "PlacementProblem": "hetplan.problem.placement",
    "Plan": "hetplan.plan",
    "QueryType": "hetplan.workload.requests",
    "Reason": "hetplan.errors",
    "Robust": "hetplan.problem.robust",
    "RouterError": "hetplan.errors",
    "SchemaVersionError": "hetplan.errors",
    "SimulationResult": "hetplan.simulator.results",
    "Slo": "hetplan.workload.requests",
    "SpotScenario": "hetplan.simulator.simulate",
    "StoreError": "hetplan.errors",
    "TokenDistribution": "hetplan.workload.requests",
    "Trace": "hetplan.workload.traces",
    "Traffic": "hetplan.simulator.traffic",
    "UnknownNameError": "hetplan.errors",
    "UnsupportedFeatureError": "hetplan.errors",
    "UnsupportedModelError": "hetplan.errors",
    "Violation": "hetplan.verification",
    "Workload": "hetplan.workload.requests",
    "compare": "hetplan.api",
    "estimate": "hetplan.api",
    "launch": "hetplan.api",
    "optimize": "hetplan.api",
    "placement_plans": "hetplan.api",
    "predict": "hetplan.api",
    "predict_many": "hetplan.api",
    "simulate": "hetplan.api",
    "verify": "hetplan.api",
}

__all__ = [
    "AllocationProblem",
    "Availability",
    "Calibration",
    "Cluster",
    "GpuSpec",
    "HetplanError",
    "InfeasibleError",
    "InstanceType",
    "InvalidInputError",
    "Link",
    "ModelSpec",
    "NoSolutionError",
    "Offer",
    "PlacementProblem",
    "Plan",
    "QueryType",
    "Reason",
    "Robust",
    "RouterError",
    "SchemaVersionError",
    "SimulationResult",
    "Slo",
    "SpotScenario",
    "StoreError",
    "TokenDistribution",
    "Trace",
    "Traffic",
    "UnknownNameError",
    "UnsupportedFeatureError",
    "UnsupportedModelError",
    "Violation",
    "Workload",
    "compare",
    "estimate",
    "launch",
    "optimize",
    "placement_plans",
    "predict",
    "predict_many",
    "simulate",
    "verify",
]

if TYPE_CHECKING:
    from hetplan.api import (
        compare,
        estimate,
        launch,
        optimize,
        placement_plans,
        predict,
        predict_many,
        simulate,
        verify,
    )
    from hetplan.catalog.calibration import Calibration
    from hetplan.catalog.hardware import GpuSpec, InstanceType, Link
    from hetplan.catalog.model import ModelSpec
    from hetplan.catalog.offers import Cluster, Offer
    from hetplan.errors import (
        HetplanError,
        InfeasibleError,
        InvalidInputError,
        NoSolutionError,
        Reason,
        RouterError,
        SchemaVersionError,
        StoreError,
        UnknownNameError,
        UnsupportedFeatureError,
        UnsupportedModelError,
    )
    from hetplan.plan import Plan
    from hetplan.problem.allocation import AllocationProblem
    from hetplan.problem.placement import PlacementProblem
    from hetplan.problem.robust import Robust
    from hetplan.simulator.availability import Availability
    from hetplan.simulator.results import SimulationResult
    from hetplan.simulator.simulate import SpotScenario
    from hetplan.simulator.traffic import Traffic
    from hetplan.verification import Violation
    from hetplan.workload.requests import QueryType, Slo, TokenDistribution, Workload
    from hetplan.workload.traces import Trace


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hetplan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
