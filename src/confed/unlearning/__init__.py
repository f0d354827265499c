"""Removal of a client from a finished run, exact or approximate."""
