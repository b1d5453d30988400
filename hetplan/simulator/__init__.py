"""Discrete-event simulation of a plan: real traffic, continuous batching, spot machines that come and go."""
