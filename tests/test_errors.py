"""Errors say the value, the limit and the next step, and behave as Python errors do."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from builders import TINY_LLAMA, WORKLOAD, tiny_llama

import hetplan as hp
from hetplan import errors
from hetplan.errors import nearest_names

TREE = {
    "InvalidInputError": "HetplanError",
    "UnknownNameError": "InvalidInputError",
    "UnsupportedModelError": "InvalidInputError",
    "UnsupportedFeatureError": "InvalidInputError",
    "SchemaVersionError": "InvalidInputError",
    "InfeasibleError": "HetplanError",
    "NoSolutionError": "HetplanError",
    "RouterError": "HetplanError",
    "StoreError": "HetplanError",
}
EXAMPLES: dict[str, errors.HetplanError] = {
    "HetplanError": hp.HetplanError("said"),
    "InvalidInputError": hp.InvalidInputError("said"),
    "UnknownNameError": hp.UnknownNameError("GPU", "H1000", ["H100", "H200"], "Describe your own."),
    "UnsupportedModelError": hp.UnsupportedModelError("a model", ["encoder", "vision tower"]),
    "UnsupportedFeatureError": hp.UnsupportedFeatureError("said"),
    "SchemaVersionError": hp.SchemaVersionError("said"),
    "InfeasibleError": hp.InfeasibleError("said", [hp.Reason("memory", "a model", 756.2, 625.8, "GiB")]),
    "NoSolutionError": hp.NoSolutionError("said"),
    "RouterError": hp.RouterError("said", 409),
    "StoreError": hp.StoreError("no_room", "said"),
}
NOT_THE_CALLERS = ("InfeasibleError", "NoSolutionError", "RouterError", "StoreError")


@pytest.mark.parametrize(("name", "parent"), TREE.items())
def test_the_tree_is_as_drawn(name: str, parent: str) -> None:
    assert getattr(errors, name).__bases__[0] is getattr(errors, parent)
    assert name in (errors.__doc__ or "")


def test_every_error_is_public() -> None:
    assert set(errors.__all__) == {*EXAMPLES, "Reason"}
    assert set(errors.__all__) <= set(hp.__all__)


@pytest.mark.parametrize("name", [n for n in EXAMPLES if n not in ("HetplanError", *NOT_THE_CALLERS)])
def test_bad_input_is_also_a_value_error(name: str) -> None:
    assert isinstance(EXAMPLES[name], ValueError)


@pytest.mark.parametrize("name", NOT_THE_CALLERS)
def test_what_is_not_the_callers_mistake_is_no_value_error(name: str) -> None:
    assert not isinstance(EXAMPLES[name], ValueError)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_error_comes_back_whole_from_another_process(name: str) -> None:
    """Sweeps run in pools; an error that does not unpickle breaks the pool instead of being raised."""
    error = EXAMPLES[name]
    returned = pickle.loads(pickle.dumps(error))
    assert type(returned) is type(error)
    assert str(returned) == str(error)
    assert vars(returned) == vars(error)


# ---- messages


def test_an_unknown_name_lists_the_nearest_and_the_way_out() -> None:
    error = EXAMPLES["UnknownNameError"]
    assert str(error) == "unknown GPU 'H1000'. Nearest: H100, H200. Describe your own."
    assert isinstance(error, hp.UnknownNameError)
    assert (error.kind, error.name, error.nearest) == ("GPU", "H1000", ("H100", "H200"))


def test_an_unsupported_model_names_its_features() -> None:
    error = EXAMPLES["UnsupportedModelError"]
    assert isinstance(error, hp.UnsupportedModelError)
    assert error.features == ("encoder", "vision tower")
    assert "encoder; vision tower" in str(error)


def test_a_reason_reads_as_a_sentence() -> None:
    error = EXAMPLES["InfeasibleError"]
    assert isinstance(error, hp.InfeasibleError)
    assert str(error.reasons[0]) == "memory: a model needs 756.2 GiB, 625.8 GiB available"


@pytest.mark.parametrize(
    ("name", "known", "nearest"),
    [
        ("h100", ["H100-SXM5-80GB", "A100-SXM4-80GB", "L4"], ("H100-SXM5-80GB",)),
        ("llama3", ["llama-3-8b", "qwen3-32b", "mixtral"], ("llama-3-8b",)),
        ("", ["a", "b"], ()),
        ("zzz", ["llama"], ()),
    ],
)
def test_nearest_names(name: str, known: list[str], nearest: tuple[str, ...]) -> None:
    assert nearest_names(name, known) == nearest


def test_nearest_names_are_few() -> None:
    assert len(nearest_names("g", [f"g{i}" for i in range(100)])) == 5


def test_every_fault_of_a_record_is_told_at_once() -> None:
    with pytest.raises(hp.InvalidInputError) as refusal:
        hp.Link.from_dict({"latency_s": -1, "bytes_per_s": 0, "colour": "red"})
    lines = str(refusal.value).splitlines()
    assert len(lines) == 3
    assert any(line.startswith("Link.latency_s:") and "(got -1)" in line for line in lines)
    assert any(line.startswith("Link.bytes_per_s:") and "(got 0)" in line for line in lines)
    assert any(line.startswith("Link.colour: unknown key") for line in lines)


def test_an_overlong_value_is_not_repeated() -> None:
    with pytest.raises(hp.InvalidInputError) as refusal:
        hp.Link.from_dict({"latency_s": "x" * 10_000, "bytes_per_s": 1})
    assert len(str(refusal.value)) < 200


def test_a_refusal_hides_the_machinery() -> None:
    """The traceback ends at the refusal: no validation library's own error before it."""
    with pytest.raises(hp.InvalidInputError) as refusal:
        hp.Workload(input_tokens=-1, output_tokens=1)
    assert refusal.value.__cause__ is None
    assert refusal.value.__suppress_context__


def test_arguments_that_miss_are_named() -> None:
    with pytest.raises(hp.InvalidInputError, match="cluster, workload"):
        hp.optimize(model=tiny_llama())
    with pytest.raises(hp.InvalidInputError, match="model, cluster, workload"):
        hp.optimize()


@pytest.mark.parametrize("extra", [{"model": "llama-3.1-70b"}, {"workload": WORKLOAD}, {"objective": "cost"}])
def test_arguments_that_a_ready_problem_overrules_are_refused(extra: dict[str, object]) -> None:
    problem = hp.optimize(model=tiny_llama(), cluster={"g6.xlarge": 1}, workload=WORKLOAD).problem
    with pytest.raises(hp.InvalidInputError, match=next(iter(extra))):
        hp.optimize(problem, **extra)  # type: ignore[arg-type]


WRONG_TYPES: dict[str, dict[str, object]] = {
    "model": {"model": 5},
    "cluster": {"cluster": 5},
    "cluster list": {"cluster": ["g6.xlarge"]},
    "workload": {"workload": 5},
    "objective": {"objective": 5},
    "solver": {"solver": 5},
    "no solver": {"solver": None},
    "solver_options": {"solver_options": 5},
    "estimator": {"estimator": 5},
    "time_limit_s": {"time_limit_s": "long"},
    "no time_limit_s": {"time_limit_s": None},
    "seed": {"seed": "one"},
    "region": {"region": 5},
    "market": {"market": 5},
    "provider": {"provider": 5},
    "slo": {"slo": 5},
    "latency_penalty": {"latency_penalty": "high"},
    "engine": {"engine": 5},
    "max_model_len": {"max_model_len": "long"},
    "weight_dtype": {"weight_dtype": 8},
    "kv_dtype": {"kv_dtype": 8},
    "gpu_memory_utilization": {"gpu_memory_utilization": "all"},
    "max_num_seqs": {"max_num_seqs": "many"},
    "calibrations": {"calibrations": {"L4": 5}},
    "beam_width": {"beam_width": "wide"},
    "max_stages": {"max_stages": "many", "solver": "dp-beam"},
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_bad_input(case: str) -> None:
    """Values come from YAML files and notebooks: a wrong type is the caller's mistake, never a crash."""
    arguments: dict[str, object] = {"model": TINY_LLAMA, "cluster": {"g6.xlarge": 1}, "workload": WORKLOAD}
    with pytest.raises(hp.InvalidInputError):
        hp.optimize(**(arguments | WRONG_TYPES[case]))  # type: ignore[arg-type]


def test_a_calibration_file_nested_without_end_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text("[" * 100_000)
    with pytest.raises(hp.InvalidInputError, match="calibration"):
        hp.Calibration.load(path)
