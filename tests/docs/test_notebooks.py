"""Every notebook runs from top to bottom, and is stored without outputs."""

from __future__ import annotations

import warnings
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
FILES = sorted(FOLDER.glob("*.ipynb"))


def test_there_is_a_notebook() -> None:
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_notebook_is_valid_and_stored_without_outputs(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_notebook_runs(file: Path) -> None:
    with warnings.catch_warnings():
        # Jupyter's own: event loops, paths, sockets closed late. The notebook's warnings stay in its kernel.
        for module in ("jupyter_client", "jupyter_core", "nbclient", "zmq", "traitlets"):
            warnings.filterwarnings("ignore", module=rf"{module}(\..*)?")
        warnings.filterwarnings("ignore", category=ResourceWarning)
        from nbclient import NotebookClient

        notebook = nbformat.read(file, as_version=4)
        client = NotebookClient(
            notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
        )
        client.execute()
    figures = [
        o for c in notebook.cells if c.cell_type == "code" for o in c.outputs if "image/png" in o.get("data", {})
    ]
    assert figures, "the notebook draws no figure"
