"""Solvers: each takes a problem and returns a `Solution`; see `hetplan.solvers.base` for the contract."""
