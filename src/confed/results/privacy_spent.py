"""Names of the privacy ledgers' fields in a run's history and summary."""

__all__ = ["EXAMPLES", "FIELD", "SHOWN"]


FIELD = "update_privacy"
"""Of a line of ``metrics.jsonl`` and of ``summary.json``."""


EXAMPLES = "example_privacy"
"""Of ``summary.json``: the guarantee of single examples."""


SHOWN = 8
"""Rounds in the report's table, spread evenly; and clients, those that paid most, times four."""
