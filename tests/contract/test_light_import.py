"""``import hetplan`` costs next to nothing: heavy packages load on first use."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {
    "numba",
    "pandas",
    "scipy",
    "networkx",
    "pulp",
    "highspy",
    "torch",
    "matplotlib",
    "typer",
    "rich",
    "yaml",
    "fsspec",
    "s3fs",
    "aiohttp",
}


def loaded_after(code: str) -> set[str]:
    """Top-level packages in a fresh interpreter that ran ``code``."""
    script = f"{code}\nimport sys\nsys.stdout.write(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    loaded = loaded_after("import hetplan")
    assert "hetplan" in loaded
    assert not loaded & HEAVY


def test_sizes_need_no_solver_and_no_terminal() -> None:
    loaded = loaded_after("import hetplan; hetplan.ModelSpec.get('llama-3.1-8b').kv_bytes_per_token()")
    assert not loaded & HEAVY
