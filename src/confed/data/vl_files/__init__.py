"""Readers of the official annotation files of vision-language datasets, one module per family of formats.

Every reader takes a folder and a split and gives :class:`~confed.data.vl_files.records.Record` one by one: texts and
names, no pictures opened. :mod:`confed.datasets.feddat_benchmarks` turns them into a federation.
"""
