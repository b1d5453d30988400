"""Checks plans against their own problem, with code that shares nothing with the solvers."""

from __future__ import annotations

from hetplan.verification.placement import Violation, verify_plan

__all__ = ["Violation", "verify_plan"]
