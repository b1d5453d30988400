"""Fixtures that several rooms share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of measured data that is not part of the repository: HETPLAN_DATA, else beside the checkout."""
    root = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("HETPLAN_DATA") or root.parent / "shared" / "data")
    if folder.is_dir():
        return folder
    reason = f"no measured data at {folder}; set HETPLAN_DATA"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
