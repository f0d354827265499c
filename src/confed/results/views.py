"""Views: which model is tested, and on whose examples."""

from enum import StrEnum


class View(StrEnum):
    """A model and the examples it is tested on; the value is its key in ``summary.json``."""

    DEPLOYED = "deployed"
    PERSONAL = "personal"
    SEEN = "global_seen"
    UNSEEN = "global_unseen"

    @property
    def heading(self) -> str:
        """Its name in tables and pages."""
        return _HEADINGS[self]

    @property
    def words(self) -> str:
        """Its name where no heading explains it."""
        return {View.DEPLOYED: "deployed at each client", View.PERSONAL: "personal on own data"}.get(self, self.heading)

    @property
    def evaluated(self) -> str:
        """Its name in histories and predictions."""
        return _EVALUATED[self]

    @property
    def mean(self) -> str:
        """Key in ``summary.json`` of its mean over places."""
        return f"{self}_mean"


_HEADINGS = {
    View.DEPLOYED: "deployed",
    View.PERSONAL: "personal",
    View.SEEN: "global on seen",
    View.UNSEEN: "global on unseen",
}
_EVALUATED = {View.PERSONAL: "personal", View.SEEN: "global", View.UNSEEN: "unseen"}

TESTED = (View.PERSONAL, View.SEEN, View.UNSEEN)
"""The views that a run itself tests; what is deployed is one of the first two."""

EVALUATED = tuple(_EVALUATED.values())
"""Their names in histories and predictions."""

OF_EVALUATED = {view.evaluated: view for view in TESTED}
"""Name in histories and predictions -> view."""
