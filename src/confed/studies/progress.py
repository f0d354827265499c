"""Result of a finished run in one line, for progress displays."""

from typing import Any

__all__ = ["headline"]


def headline(summary: dict[str, Any]) -> str:
    """A run's results in one line."""
    names = {
        "personal_mean": "personal",
        "personal_worst": "worst client",
        "global_seen_mean": "global on seen",
        "global_unseen_mean": "on unseen",
    }
    if summary.get("has_personal") is False:
        del names["personal_mean"]  # it would be the global model's again
    # CIDEr is written times 100 as is usual, and is no share of anything: it can exceed 100.
    sign, before = ("", "CIDEr ") if summary.get("metric") == "cider" else ("%", "")
    values = [
        f"{before}{text} {100 * summary[key]:.1f}{sign}" for key, text in names.items() if summary.get(key) is not None
    ]
    if labelled := summary.get("multilabel"):
        values = [f"{metric} {labelled[labelled['headline']][metric]:.1%}" for metric in ("C-AP", "O-AP", "O-F1")]
    return ", ".join([*values, f"{summary['seconds']:.0f} s"])
