"""Solvers that place one model on a heterogeneous cluster."""
