"""Methods whose clients all hold the examples of one public place besides their own."""

from dataclasses import dataclass
from typing import Self

from confed.federation.algorithm import Algorithm

__all__ = ["UsesPublicData"]


@dataclass(frozen=True)
class UsesPublicData(Algorithm):
    """A method with public data, which its actions find in :attr:`confed.federation.client.Client.public`."""

    def public_place(self) -> str:
        """Name of the unseen place that is public, and so counts as unseen no longer."""
        raise NotImplementedError

    def with_public_data(self, examples: int, answers: int) -> Self:
        """The method, told the size of the public data; itself by default. Called once per run, before training.

        Args:
            examples: number of public examples.
            answers: scores that a model gives each.
        """
        del examples, answers
        return self
