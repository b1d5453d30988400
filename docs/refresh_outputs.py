"""Run the code of a page and write what it prints into the page: ``python docs/refresh_outputs.py [PAGE ...]``.

A ```` ```python ```` block runs in the namespace of its page, in page order, in a copy of the examples' folder. What
it prints stands in the ```` ```text ```` block right after it, if there is one. In a ```` ```console ```` block each
line that starts with ``$ hetplan`` is run, and what it prints on both streams follows it. The tests call `refreshed`
and require that nothing changes.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from hetplan.cli import app

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n?```text\n(?P<out>.*?)^```\n)?|^```console\n(?P<console>.*?)^```\n",
    re.DOTALL | re.MULTILINE,
)


def pages() -> list[Path]:
    """Every page whose blocks are run."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@contextlib.contextmanager
def workplace() -> Iterator[None]:
    """A folder with the examples in it, where blocks may write."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples", Path(folder) / "examples")
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def refreshed(page: Path) -> str:
    """The page's text with the outputs that its blocks print now."""
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": f"page_{page.stem}"}

    def run(found: re.Match[str]) -> str:
        if found["console"] is not None:
            return f"```console\n{_console(found['console'])}```\n"
        line = text.count("\n", 0, found.start()) + 1
        # Blank lines in front make a traceback show the line of the page.
        code = compile("\n" * line + found["code"], str(page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if found["out"] is None:
            if printed.getvalue():
                raise AssertionError(f"{page.name}, line {line}: the block prints, and no text block shows it")
            return found[0]
        head = found[0][: found.start("out") - found.start()]
        return head + _trimmed(printed.getvalue()) + "```\n"

    with workplace():
        return _BLOCK.sub(run, text)


def _console(content: str) -> str:
    shown = []
    for command in re.findall(r"^\$ (.*)$", content, re.MULTILINE):
        words = shlex.split(command)
        if words[0] != "hetplan":
            raise AssertionError(f"only hetplan runs in a console block, not {command!r}")
        result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
        shown.append(f"$ {command}\n{_trimmed(result.output)}")
    return "".join(shown)


def _trimmed(output: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in output.rstrip().splitlines())


def main(names: list[str]) -> None:
    for page in [Path(name).resolve() for name in names] or pages():
        page.write_text(refreshed(page), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
