"""Views: which model is tested, and on whose examples."""

from enum import StrEnum
from typing import Self


class View(StrEnum):
    """A model and the examples it is tested on; the value is its key in ``summary.json``.

    Attributes:
        heading: its name in tables and pages.
        words: its name where no heading explains it.
        evaluated: its name in histories and predictions; empty for what is deployed, which is one of the others.
    """

    heading: str
    words: str
    evaluated: str

    DEPLOYED = "deployed", "deployed", "deployed at each client", ""
    PERSONAL = "personal", "personal", "personal on own data", "personal"
    SEEN = "global_seen", "global on seen", "global on seen", "global"
    UNSEEN = "global_unseen", "global on unseen", "global on unseen", "unseen"

    def __new__(cls, key: str, heading: str = "", words: str = "", evaluated: str = "") -> Self:
        view = str.__new__(cls, key)
        view._value_, view.heading, view.words, view.evaluated = key, heading, words, evaluated
        return view

    @property
    def mean(self) -> str:
        """Key in ``summary.json`` of its mean over places."""
        return f"{self}_mean"


TESTED = (View.PERSONAL, View.SEEN, View.UNSEEN)
"""The views that a run itself tests; what is deployed is one of the first two."""

OF_EVALUATED = {view.evaluated: view for view in TESTED}  # name in histories and predictions -> view
EVALUATED = tuple(OF_EVALUATED)  # their names in histories and predictions
