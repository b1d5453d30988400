"""Checks plans against their own problem, with code that shares nothing with the solvers."""

from __future__ import annotations

from hetplan.verification.examine import confirmed_bound, examine_plan, verify_plan
from hetplan.verification.findings import Violation

__all__ = ["Violation", "confirmed_bound", "examine_plan", "verify_plan"]
