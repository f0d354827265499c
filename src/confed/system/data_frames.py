"""pandas, which is optional: data frames of results need it and nothing else does."""

from typing import Any

from confed.system.installing import for_this_installation

__all__ = ["pandas"]


def pandas() -> Any:
    """The module pandas.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError:
        text = "data frames need pandas, which is not installed: pip install '.[notebook]' -c constraints.txt"
        raise ValueError(for_this_installation(text)) from None
    return pandas
