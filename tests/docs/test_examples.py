"""Every problem file in examples/ runs through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

import hetplan as hp
from hetplan.cli import app

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*(ROOT / "examples").glob("*.yaml"), *(ROOT / "examples" / "allocation").glob("*.yaml")])


def test_there_are_examples() -> None:
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_example_gives_one_plan_that_loads_and_holds(file: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["optimize", str(file), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    # One document, and nothing beside it on stdout.
    document = json.loads(result.stdout)
    saved = tmp_path / "plan.json"
    saved.write_text(result.stdout, encoding="utf-8")
    plan = hp.Plan.load(saved)
    assert hp.verify(plan) == []
    schema = json.loads((ROOT / "docs" / "schema" / "plan-1.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(document)


def test_readme_of_the_examples_names_each_file() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for file in FILES:
        assert f"`{file.relative_to(ROOT / 'examples')}`" in text
