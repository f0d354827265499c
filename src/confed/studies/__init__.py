"""Studies: methods by seeds, values of a setting or models; tuning."""
