"""Rewrite the table of docs/router.md from the table that the router works by: ``python docs/make_router_table.py``."""

from __future__ import annotations

from pathlib import Path

from hetplan.runtime.router.fields import TABLE, Handling

PAGE = Path(__file__).resolve().parent / "router.md"


def table() -> str:
    """Rows of one handling, one reason and the same endpoints stand in one line."""
    lines = ["| field | of | survives | how |", "|---|---|---|---|"]
    for handling in Handling:
        groups: dict[tuple[str, str], list[str]] = {}
        for row in TABLE:
            if row.handling is handling:
                of = "both" if len(row.endpoints) == 2 else row.endpoints[0]
                name = f"`{row.name}`" + ("" if row.values == "any" else f" ({row.values})")
                groups.setdefault((of, row.why), []).append(name)
        for (of, why), names in groups.items():
            lines.append(f"| {', '.join(names)} | {of} | {handling.value} | {why} |")
    return "\n".join(lines)


def main() -> None:
    """Run the script."""
    from make_paper_tables import replace_block

    replace_block(PAGE, "fields", table())


if __name__ == "__main__":
    main()
