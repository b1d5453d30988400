"""The documentation builds as `make docs` builds it: without a single warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_documentation_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(tmp_path / "doctrees")]
    built = subprocess.run([*command, str(DOCS), str(tmp_path / "html")], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "html" / "index.html").is_file()
    # Nothing is fetched by a reader's browser.
    for page in (tmp_path / "html").glob("*.html"):
        assert 'src="http' not in page.read_text(encoding="utf-8"), page.name
