"""Solvers of the allocation problem."""
