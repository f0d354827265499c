"""Clipping, noise, privacy accounting and secure aggregation."""
