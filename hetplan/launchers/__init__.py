"""From a plan to files that start it: one module per target."""
