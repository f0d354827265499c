"""Options that several datasets have: what they are called, what they mean, and what values they may have."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from confed.data.picture_files import Check, PictureFiles


@dataclass(frozen=True)
class Options:
    """Options of datasets, each with its meaning where a dataset does not say another one.

    "{things}" stands for what a dataset calls its examples: questions, pictures, texts.

    Attributes:
        root: see the module.
        partition: how what was read is shared out among clients.
        unseen: places that no client trains on.
        clients: number of clients.
        alpha: concentration of "dirichlet".
        sigma: standard deviation of the log sizes of "quantity".
        median: median training {things} of a user ("users").
        largest: most training {things} of a user.
        minimum: fewest {things} of a client, of the skewed partitions.
        validation: share of a client's training pictures held out.
        test_share: share of each client's {things} that are its test.
        max_train: most training {things} per client.
        max_test: most test {things} per client.
        image_size: side of the pictures in pixels; other proportions are squeezed.
        unreadable: share of the pictures that may be left out because they cannot be read, with their examples.
        check: "decoded" or "present", see :class:`confed.data.picture_files.PictureFiles`.
        seed: chooses training and validation {things}; the test {things} are the same for all seeds.
    """

    root: Path | str = Path()
    partition: str | None = "iid"
    unseen: Sequence[str] = ()
    clients: int = 4
    alpha: float = 0.5
    sigma: float = 1.0
    median: float = 16.0
    largest: int = 80
    minimum: int = 10
    validation: float = 0.0
    test_share: float = 0.0
    max_train: int | None = None
    max_test: int | None = None
    image_size: int = 224
    unreadable: float = 0.01
    check: Check = "decoded"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, limit in (("max_train", self.max_train), ("max_test", self.max_test)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be None or at least 1, got {limit}")
        for name, share in (("validation", self.validation), ("test_share", self.test_share)):
            if not 0 <= share < 1:
                raise ValueError(f"{name} must be a share of the training examples in [0, 1), got {share}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")

    @property
    def folder(self) -> Path:
        """The root as a path."""
        return Path(self.root)

    def pictures(self, files: Iterable[Path | str] = ()) -> PictureFiles:
        """A table of picture files with these options."""
        return PictureFiles(files, self.image_size, unreadable=self.unreadable, check=self.check)
