"""Base of methods whose clients share the public examples of one place."""

from typing import Protocol, Self, runtime_checkable

__all__ = ["UsesPublicData"]


@runtime_checkable
class UsesPublicData(Protocol):
    """Protocol of methods with public data; :attr:`confed.federation.client.Client.public` has them."""

    def public_place(self) -> str:
        """Name of the unseen place that is public, and so counts as unseen no longer."""
        ...

    def with_public_data(self, examples: int, answers: int) -> Self:
        """The method, told the size of the public data; called once per run, before training.

        Args:
            examples: number of public examples.
            answers: scores that a model gives each.
        """
        ...
