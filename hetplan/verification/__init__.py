"""Checks plans against their own problem, with code that shares nothing with the solvers."""

from __future__ import annotations

from hetplan.verification.placement import Violation, confirmed_bound, examine_plan, verify_plan

__all__ = ["Violation", "confirmed_bound", "examine_plan", "verify_plan"]
