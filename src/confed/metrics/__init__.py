"""What is measured: answer accuracy, calibration, and the statistics that compare runs."""
