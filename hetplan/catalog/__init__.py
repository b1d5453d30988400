"""Models, GPUs, machines, prices and calibrations, as data with sources."""
