"""Readers of captions, texts and documents as others publish them: one record after the other, never a file at once.

Readers give records; :mod:`confed.datasets.picture_captions` and :mod:`confed.datasets.caption_corpus` make datasets of
them.
"""
