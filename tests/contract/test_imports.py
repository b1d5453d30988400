"""The rooms' import order, over the syntax tree: lazy imports inside functions and typing-only ones count too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hetplan

PACKAGE = Path(hetplan.__file__).parent

# Rank of a room: it may import rooms of lower rank, and its own modules. Rooms of one rank do not import each other.
RANKS = {
    "base": 0,
    "units": 0,
    "errors": 0,
    "files": 0,
    "catalog": 1,
    "workload": 1,
    "problem": 2,
    "plan": 3,
    "estimator": 4,
    "policies": 4,
    "calibration": 5,
    "simulator": 5,
    "solvers": 5,
    "verification": 5,
    "report": 6,
    "resolving": 7,
    "report_simulation": 6,
    "scoring": 6,
    "api": 7,
    "cli_calibrate": 7,
    "cli_compare": 8,
    "cli_measure": 7,
    "cli_models": 7,
    "cli_router": 7,
    "cli_serve": 8,
    "cli_shard": 8,
    "cli_simulate": 8,
    "cli_store": 8,
    "cli": 9,
    "precompile": 8,
    "__main__": 10,
}
# Ways to make a type that need what sits above it: `Calibration.fit` fits over the estimator, and
# `AllocationProblem.from_catalog` is handed an estimator, by default the package's own.
MADE_FROM_ABOVE = {
    ("hetplan.catalog.calibration", "hetplan.calibration.fit"),
    ("hetplan.problem.allocation", "hetplan.estimator.allocation"),
}
FOUNDATION = {room for room, rank in RANKS.items() if rank == 0}

# Rooms that run beside a plan, on the machines that serve it: they know a few rooms only, whatever their rank.
BESIDE = {
    "launchers": {*FOUNDATION, "catalog", "plan"},
    "runtime": {*FOUNDATION, "catalog", "plan", "policies", "launchers"},
}

# Heavy or dangerous packages, and the only modules, or rooms, that may import them.
ALLOWED = {
    "torch": ("hetplan.runtime", "hetplan.calibration.torch_backend", "hetplan.calibration.all_reduce_worker"),
    "ray": ("hetplan.runtime",),
    "aiohttp": ("hetplan.runtime",),
    "prometheus_client": ("hetplan.runtime",),
    "orjson": ("hetplan.runtime",),
    "fsspec": ("hetplan.runtime.tensor_store",),
    "s3fs": ("hetplan.runtime.tensor_store",),
    "boto3": ("hetplan.runtime.controller.aws",),
    "botocore": ("hetplan.runtime.controller.aws",),
    "highspy": ("hetplan.solvers.highs",),
    "pulp": ("hetplan.solvers.allocation.milp",),
    "matplotlib": ("hetplan.report",),
    "typer": ("hetplan.cli",),
    "rich": ("hetplan.cli", "hetplan.report"),
    "yaml": ("hetplan.files",),
}


def module_names() -> list[str]:
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("hetplan", *path.relative_to(PACKAGE).with_suffix("").parts)
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


@cache
def source_of(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports_of(module: str) -> frozenset[str]:
    """Every module that this one names in an import, wherever the statement stands."""
    return frozenset(_imports(source_of(module), module))


def _imports(tree: ast.Module, module: str) -> Iterator[str]:
    known = set(module_names())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: a relative import"
            assert node.module is not None
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known
            yield from submodules
            if len(submodules) < len(node.names):
                yield node.module


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


INSIDE = [name for name in module_names() if name != "hetplan"]


def test_every_room_has_its_place() -> None:
    assert {room_of(name) for name in INSIDE} <= {*RANKS, *BESIDE}


@pytest.mark.parametrize("module", INSIDE)
def test_a_room_imports_lower_rooms_only(module: str) -> None:
    room = room_of(module)
    for imported in imports_of(module):
        if not imported.startswith("hetplan"):
            continue
        other = room_of(imported)
        if other == "":
            # The facade: for its version, or whole for the command line, which sits above everything.
            assert room == "cli" or _takes_version_only(module), f"{module} imports the facade"
            continue
        if other == room or {room, other} <= FOUNDATION:
            continue
        if (module, imported) in MADE_FROM_ABOVE:
            continue
        if room in BESIDE:
            assert other in BESIDE[room], f"{module} imports {imported}"
            continue
        # What uses the rooms beside a plan: the verbs and the command line.
        assert RANKS.get(other, RANKS["report"]) < RANKS[room], f"{module} imports {imported}"


def _takes_version_only(module: str) -> bool:
    names = [
        alias.name
        for node in ast.walk(source_of(module))
        if isinstance(node, ast.ImportFrom) and node.module == "hetplan"
        for alias in node.names
    ]
    plain = [
        a for n in ast.walk(source_of(module)) if isinstance(n, ast.Import) for a in n.names if a.name == "hetplan"
    ]
    return names == ["__version__"] and not plain


def test_the_foundation_has_no_cycle() -> None:
    left = {
        f"hetplan.{room}": {n for n in imports_of(f"hetplan.{room}") if room_of(n) in FOUNDATION} for room in FOUNDATION
    }
    while left:
        free = [name for name, needed in left.items() if not needed & left.keys()]
        assert free, f"a cycle among {sorted(left)}"
        for name in free:
            del left[name]


@pytest.mark.parametrize("module", [name for name in INSIDE if room_of(name) == "verification"])
def test_the_checker_takes_times_of_single_stages_only(module: str) -> None:
    """What solvers use to combine stages into pipelines, the checker computes again by itself."""
    shared = {name for name in imports_of(module) if name.startswith(("hetplan.estimator", "hetplan.solvers"))}
    assert shared <= {"hetplan.estimator.base"}


@pytest.mark.parametrize("package", ALLOWED)
def test_a_heavy_package_stays_in_its_module(package: str) -> None:
    users = {name for name in module_names() if any(i.split(".")[0] == package for i in imports_of(name))}
    assert {name for name in users if not name.startswith(ALLOWED[package])} == set()


# What runs in the engine's own environment, where hetplan's wheel stands without its dependencies.
IN_THE_ENGINE = {
    # vLLM itself depends on safetensors.
    **{n: ("torch", "vllm", "safetensors") for n in INSIDE if n.startswith("hetplan.runtime.vllm_plugin")},
    "hetplan.runtime.tensor_store.cuda": ("torch",),
    **{f"hetplan.{n}": () for n in ("errors", "runtime", "runtime.tensor_store")},
    **{f"hetplan.runtime.tensor_store.{n}": () for n in ("client", "wire")},
}
# Runs before anything is installed, by its path.
ALONE = "hetplan.runtime.controller.guard"


def test_the_guard_needs_the_standard_library_only() -> None:
    assert {name.split(".")[0] for name in imports_of(ALONE)} <= sys.stdlib_module_names


@pytest.mark.parametrize("module", IN_THE_ENGINE)
def test_what_runs_in_the_engine_imports_what_is_there(module: str) -> None:
    inside = {name for name in imports_of(module) if name.startswith("hetplan")}
    assert inside <= IN_THE_ENGINE.keys()
    outside = {name.split(".")[0] for name in imports_of(module) - inside}
    assert outside - sys.stdlib_module_names <= set(IN_THE_ENGINE[module])


# The command line ends at signals, a guard is a process of its own, and whoever keeps processes sends them.
SIGNALS = {
    "hetplan.cli_serve",
    "hetplan.cli_store",
    "hetplan.runtime.controller.guard",
    "hetplan.runtime.controller.processes",
}


@pytest.mark.parametrize("module", INSIDE)
def test_library_code_does_not_print_or_configure_logging(module: str) -> None:
    """Only the command line writes to the terminal or ends at a signal; nothing touches global logging."""
    forbidden = {"logging"} if module in SIGNALS else {"logging", "signal"}
    if module.startswith("hetplan.runtime.vllm_plugin"):
        # Speaks through vLLM's own logger.
        forbidden -= {"logging"}
    assert not forbidden & imports_of(module)
    calls = {
        node.func.id for node in ast.walk(source_of(module)) if isinstance(node, ast.Call) and hasattr(node.func, "id")
    }
    assert "print" not in calls
