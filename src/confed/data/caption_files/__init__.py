"""Streaming readers of caption, text and document files in published formats.

Readers give records; :mod:`confed.datasets.picture_captions` and :mod:`confed.datasets.caption_corpus` make datasets of
them.
"""
