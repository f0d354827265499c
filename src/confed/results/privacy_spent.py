"""Names of the privacy ledger's fields in a run's history and summary."""

__all__ = ["FIELD", "SHOWN"]


FIELD = "update_privacy"
"""Of a line of ``metrics.jsonl`` and of ``summary.json``."""


SHOWN = 8
"""Rounds in the report's table, spread evenly; and clients, those that paid most, times four."""
