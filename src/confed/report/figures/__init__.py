"""Figures of a study, as PNG and SVG."""
