"""The wheel holds everything: installed alone, away from the checkout, it plans the paper's 24-GPU cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hetplan as hp

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "hetplan" / "catalog" / "data"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT]
    subprocess.run([str(part) for part in command], capture_output=True, check=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run([str(part) for part in pip], capture_output=True, check=True)
    take_over_compiled(target)
    return target


def take_over_compiled(target: Path) -> None:
    """What is compiled of the checkout's sources is not compiled again of the same sources."""
    for source in (ROOT / "hetplan").rglob("*.py"):
        copy, times = target / source.relative_to(ROOT), source.stat()
        assert copy.read_bytes() == source.read_bytes()
        # Numba knows a source by its size and time.
        os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))
    for compiled in (ROOT / "hetplan").rglob("*.nb[ic]"):
        copy = target / compiled.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(compiled, copy)


def run_installed(installed: Path, cwd: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_its_data_alone(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    data = {f"hetplan/{path.relative_to(ROOT / 'hetplan').as_posix()}" for path in DATA.rglob("*") if path.is_file()}
    code = {f"hetplan/{p.relative_to(ROOT / 'hetplan').as_posix()}" for p in (ROOT / "hetplan").rglob("*.py")}
    assert data | code | {"hetplan/py.typed"} <= names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"hetplan"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_names_its_command_and_what_it_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    (commands,) = (n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt"))
    text = archive.read(metadata).decode()
    assert "Requires-Dist: pydantic" in text
    assert "Requires-Python: >=3.11" in text
    assert "hetplan = hetplan.cli:main" in archive.read(commands).decode()


def test_the_installed_wheel_plans_24_gpus(installed: Path, tmp_path: Path) -> None:
    where = run_installed(installed, tmp_path, "-c", "import hetplan; print(hetplan.__file__)").strip()
    assert Path(where).is_relative_to(installed)
    machines = ["g6.12xlarge=3", "g5.12xlarge=2", "g6e.xlarge=4"]
    options = [option for machine in machines for option in ("--machine", machine)]
    command = ["-m", "hetplan", "optimize", "--model", "llama-3.1-70b", *options, "--out", "plan.json", "--json"]
    plan = json.loads(run_installed(installed, tmp_path, *command))
    assert plan["requests_per_s"] > 0
    assert hp.verify(hp.Plan.load(tmp_path / "plan.json")) == []
