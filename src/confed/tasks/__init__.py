"""Tasks, one file each: the loss to train and the tally to report."""
