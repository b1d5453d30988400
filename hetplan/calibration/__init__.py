"""Measuring a device, and fitting what was measured to the rates that estimators use."""
