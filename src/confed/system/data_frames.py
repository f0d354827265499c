"""pandas, which is optional: data frames of results need it and nothing else does."""

from typing import Any

__all__ = ["pandas"]


def pandas() -> Any:
    """The module pandas.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError:
        raise ValueError(
            "data frames need pandas, which is not installed: pip install '.[notebook]' -c constraints.txt"
        ) from None
    return pandas
