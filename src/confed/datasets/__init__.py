"""Registered datasets, one file each, and the generators of built-in pictures."""
