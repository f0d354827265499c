"""Tasks, one module each: the training loss and the metrics."""
