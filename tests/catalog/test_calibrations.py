"""The shipped calibrations: readable, honest about their sources, and reproduced by their script."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetplan.catalog.calibration import Calibration
from hetplan.catalog.tables import get_calibration, get_gpu, list_gpus
from hetplan.errors import InvalidInputError, SchemaVersionError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "hetplan" / "catalog" / "data" / "calibrations"
FILES = sorted(FOLDER.glob("*.json"))


def test_the_usual_gpus_have_a_file() -> None:
    names = {path.stem for path in FILES}
    assert {"L4", "A10G", "L40S", "T4", "A100-SXM4-40GB", "A100-SXM4-80GB", "H100-SXM5-80GB"} <= names
    assert names <= set(list_gpus())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_has_the_digest_it_states(path: Path) -> None:
    calibration = Calibration.load(path)
    assert calibration.gpu == path.stem
    assert json.loads(path.read_text())["sha256"] == calibration.sha256
    assert calibration == get_calibration(path.stem)


@pytest.mark.parametrize("gpu", list_gpus())
def test_rates_stay_below_the_datasheet_and_name_a_source(gpu: str) -> None:
    spec, calibration = get_gpu(gpu), get_calibration(gpu)
    for dtype, rate in calibration.compute_flops.items():
        assert rate.value <= spec.dense_flops[dtype]
        assert rate.reference
    assert calibration.memory_bytes_per_s.value <= spec.bandwidth_bytes_per_s
    assert {"bf16", "fp16"} & calibration.compute_flops.keys()
    assert 1e-6 < calibration.kernel_s.value < 1e-5


def test_measured_rates() -> None:
    l4 = get_calibration("L4")
    assert (l4.compute_flops["bf16"].value, l4.compute_flops["bf16"].source) == (55e12, "published")
    assert l4.datasheet_parts() == ()
    l40s = get_calibration("L40S")
    # The rows that fit into the L2 would say more than the DRAM can give.
    assert 0.75 * 864e9 < l40s.memory_bytes_per_s.value < 864e9
    assert l40s.compute_flops["fp8"].source == "measured"


def test_a_gpu_without_a_file_is_never_silently_its_datasheet() -> None:
    for gpu in ("RTX4090", "A10G", "MI300X", "V100-SXM2-32GB"):
        calibration = get_calibration(gpu)
        assert "memory bandwidth" in calibration.datasheet_parts()
        assert all(rate.source == "datasheet" for rate in calibration.compute_flops.values())
        assert calibration.kernel_s.source == "assumed"
    # H200 was not measured here, and nothing in its file claims so.
    h200 = get_calibration("H200")
    rates = [*h200.compute_flops.values(), h200.memory_bytes_per_s]
    assert {rate.source for rate in rates} == {"assumed", "datasheet"}


def test_a_changed_or_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "L4.json"
    content = json.loads(FILES[0].read_text())
    content["memory_bytes_per_s"]["value"] *= 2
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidInputError, match="sha256"):
        Calibration.load(path)
    content["schema_version"] = "hetplan.calibration/0"
    path.write_text(json.dumps(content))
    with pytest.raises(SchemaVersionError):
        Calibration.load(path)
    path.write_text("[]")
    with pytest.raises(InvalidInputError, match="JSON object"):
        Calibration.load(path)


def test_the_script_writes_what_is_shipped(data_dir: Path) -> None:
    """To the last digits but a few: fits end where a processor's own arithmetic lets them."""
    built = runpy.run_path(str(ROOT / "calibration" / "derive_calibrations.py"))["build"](data_dir)
    assert built.keys() == {path.stem for path in FILES}
    for path in FILES:
        found, shipped = json.loads(built[path.stem].model_dump_json()), json.loads(path.read_text())
        # The digest of all else.
        shipped.pop("sha256")
        assert list(different(found, shipped, path.stem)) == []


def different(found: Any, shipped: Any, where: str) -> Iterator[str]:
    """Where two documents are unlike."""
    if isinstance(found, dict) and isinstance(shipped, dict) and found.keys() == shipped.keys():
        for key in found:
            yield from different(found[key], shipped[key], f"{where}/{key}")
    elif isinstance(found, list) and isinstance(shipped, list) and len(found) == len(shipped):
        for number, (one, other) in enumerate(zip(found, shipped, strict=True)):
            yield from different(one, other, f"{where}[{number}]")
    elif isinstance(found, float) and isinstance(shipped, float):
        # Weights of a correction are about one; all else is of any size.
        if found != pytest.approx(shipped, rel=1e-3, abs=1e-6 if "weights" in where else 0):
            yield f"{where}: {found} for {shipped}"
    elif found != shipped:
        yield f"{where}: {found!r} for {shipped!r}"
