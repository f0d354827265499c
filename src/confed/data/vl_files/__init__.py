"""Readers of the official annotation files of vision-language datasets, one module per family of formats."""
