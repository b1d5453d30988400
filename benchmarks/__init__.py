"""Benchmarks: ``python -m benchmarks`` prints the figures that the documentation quotes."""
