"""Every block of the README and of the documentation runs, and prints what the page shows."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def load(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


refresh_outputs = load("refresh_outputs")


@pytest.mark.parametrize("page", refresh_outputs.pages(), ids=lambda page: page.name)
def test_blocks_run_and_print_what_the_page_shows(page: Path) -> None:
    assert refresh_outputs.refreshed(page) == page.read_text(encoding="utf-8"), (
        f"an output changed: run python docs/refresh_outputs.py {page.name} and read the difference"
    )


@pytest.mark.parametrize("page", refresh_outputs.pages(), ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("#"):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_schema_of_plan_files_is_up_to_date() -> None:
    make_schema = load("make_schema")
    assert make_schema.FILE.read_text(encoding="utf-8") == make_schema.schema_text(), "run python docs/make_schema.py"


def test_the_routers_page_has_its_table_of_fields() -> None:
    page = load("make_router_table")
    assert page.table() in page.PAGE.read_text(encoding="utf-8"), "run python docs/make_router_table.py"


def test_paper_page_has_every_table() -> None:
    """The tables themselves are made by docs/make_paper_tables.py."""
    tables = load("make_paper_tables").TABLES
    text = (DOCS / "paper.md").read_text(encoding="utf-8")
    for name in tables:
        found = re.search(rf"<!-- begin: {name} -->\n(.*?)<!-- end: {name} -->", text, re.DOTALL)
        assert found is not None
        assert found[1].count("\n|") >= 3, f"table {name!r} is empty: run python docs/make_paper_tables.py"
