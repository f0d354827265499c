"""Readers of the official files of multi-label pictures and texts, one module per dataset.

Every reader gives :class:`~confed.data.ml_files.records.LabelRecord` one by one: names only, no picture is opened.
:mod:`confed.data.ml_files.table` collects them into arrays, :mod:`confed.datasets.reader` reads pictures when a
batch asks for them, and :mod:`confed.data.partitions` deals the rows to clients.
"""
