"""The public surface: sorted, complete, documented."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest
from numpydoc.docscrape import FunctionDoc

import hetplan

FUNCTIONS = [name for name in hetplan.__all__ if inspect.isfunction(getattr(hetplan, name))]


def test_all_is_the_sorted_public_surface() -> None:
    assert hetplan.__all__ == sorted(set(hetplan._HOMES))


@pytest.mark.parametrize("name", hetplan.__all__)
def test_each_name_resolves_to_its_home(name: str) -> None:
    home = import_module(hetplan._HOMES[name])
    assert getattr(hetplan, name) is getattr(home, name)
    assert inspect.getdoc(getattr(hetplan, name))


def test_dir_lists_the_public_names_and_the_version() -> None:
    assert set(hetplan.__all__) | {"__version__"} == set(dir(hetplan))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="bogus"):
        hetplan.bogus  # noqa: B018
    assert not hasattr(hetplan, "bogus")


def test_star_import_gives_every_name() -> None:
    namespace: dict[str, object] = {}
    exec("from hetplan import *", namespace)
    assert set(hetplan.__all__) <= namespace.keys()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_documents_every_parameter_its_result_and_its_errors(name: str) -> None:
    function = getattr(hetplan, name)
    doc = FunctionDoc(function)
    assert doc["Summary"]
    assert doc["Returns"]
    described = " ".join(f"{entry.name} {' '.join(entry.desc)}" for entry in doc["Parameters"])
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            assert parameter.name in described, f"{name}: {parameter.name} is not described"
    if name != "verify":
        assert doc["Raises"]
