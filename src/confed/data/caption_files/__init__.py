"""Streaming readers of caption, text and document files in published formats."""
