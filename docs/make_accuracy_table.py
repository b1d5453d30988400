"""Rewrite the table of docs/calibration.md: ``HETPLAN_DATA=folder python docs/make_accuracy_table.py``.

The same figures as ``hetplan accuracy FOLDER``. Figures do not depend on the machine.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

from make_paper_tables import replace_block

from hetplan.scoring.accuracy import score_path
from hetplan.scoring.score import GroupScore

PAGE = Path(__file__).resolve().parent / "calibration.md"


def percent(value: float) -> str:
    """One decimal; a dash for what is not known."""
    return "-" if math.isnan(value) else f"{100 * value:.1f}"


def row(group: GroupScore) -> str:
    """One line of the table."""
    errors = " | ".join(percent(group.mean_error[method]) for method in ("datasheet", "paper", "ours"))
    rank = f"{group.pairs_right['ours']}/{group.pairs_ranked}" if group.pairs_ranked else ""
    band = "" if math.isnan(group.inside_band) else f"{percent(group.inside_band)} in ±{percent(group.half_width)}"
    bias = f"{100 * group.bias['ours']:+.1f}"
    median = percent(group.median_error["ours"])
    return f"| {group.group} | {group.rows} | {errors} | {median} | {bias} | {band} | {rank} |"


def main() -> None:
    """Run the script."""
    data = Path(os.environ.get("HETPLAN_DATA") or sys.exit("set HETPLAN_DATA to the data folder"))
    report = score_path(data)
    lines = [
        "| scored | rows | datasheet, % | paper, % | hetplan, % | median | bias | inside the band | ranked right |",
        "|---|---|---|---|---|---|---|---|---|",
        *(row(group) for group in report.groups if group.rows),
    ]
    reasons = sorted(
        {(group.group, reason, count) for group in report.groups for reason, count in group.left_out.items()}
    )
    left_out: dict[str, int] = {}
    for _, reason, count in reasons:
        left_out[reason] = left_out.get(reason, 0) + count
    lines += ["", "Rows left out, with the reason:", ""]
    lines += [f"- {count} rows: {reason}" for reason, count in sorted(left_out.items(), key=lambda item: -item[1])]
    replace_block(PAGE, "accuracy", "\n".join(lines))


if __name__ == "__main__":
    main()
