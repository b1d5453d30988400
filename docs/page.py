"""What the scripts beside it share: tables in Markdown, and blocks of a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def by(rows: list[dict[str, Any]], *names: str) -> dict[Any, dict[str, Any]]:
    """Rows by the values of some of their columns."""
    return {tuple(row[name] for name in names): row for row in rows}


def replace_block(page: Path, name: str, content: str) -> None:
    """Put content between the markers of a page."""
    text = page.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{page} has no block {name!r}")
    made = f"Made by `python docs/make_allocation_studies.py {name}`.\n\n{content}"
    page.write_text(pattern.sub(lambda found: f"{found[1]}{made}\n{found[2]}", text), encoding="utf-8")
