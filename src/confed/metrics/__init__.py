"""Metrics: answer accuracy, calibration, and statistics that compare runs."""
