"""Options that several datasets have: what they are called, what they mean, and what values they may have."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from confed.data.picture_files import Check, PictureFiles
from confed.federation.ranges import AT_LEAST_ONE, BELOW_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Range, check_fields

SOME_OF_ALL = Range(0, 1, above=True, below=True)
"""A share that is something and leaves something."""


@dataclass(frozen=True)
class Options:
    """Options of datasets, each with its meaning where a dataset does not say another one.

    "{things}" stands for what a dataset calls its examples: questions, pictures, texts.

    Attributes:
        root: the data set's folder, see the module.
        partition: how what was read is shared out among clients.
        unseen: places that no client trains on.
        clients: number of clients, where nothing in the data says who they are.
        alpha: concentration of the skewed partitions; smaller is more uneven.
        sigma: standard deviation of the log sizes of "quantity".
        median: median training {things} of a user ("users").
        largest: most training {things} of a user.
        minimum: fewest {things} of a client, of the skewed partitions.
        validation: share of a client's training pictures held out, where nothing else is to validate on.
        test_share: share of each client's {things} that are its test, where nothing else is.
        max_train: most training {things} per client.
        max_test: most test {things} per client and unseen place.
        image_size: side of the pictures in pixels; other proportions are squeezed.
        unreadable: share of the pictures that may be left out because they cannot be read, with their examples.
        check: "decoded" or "present", see :class:`confed.data.picture_files.PictureFiles`.
        seed: chooses training and validation {things}; the test {things} are the same for all seeds.
    """

    root: Path | str = Path()
    partition: str | None = "iid"
    unseen: Sequence[str] = ()
    clients: Annotated[int, AT_LEAST_ONE] = 4
    alpha: Annotated[float, POSITIVE] = 0.5
    sigma: Annotated[float, NOT_NEGATIVE] = 1.0
    median: Annotated[float, POSITIVE] = 16.0
    largest: Annotated[int, AT_LEAST_ONE] = 80
    minimum: Annotated[int, NOT_NEGATIVE] = 10
    validation: Annotated[float, BELOW_ONE] = 0.0
    test_share: Annotated[float, BELOW_ONE] = 0.0
    max_train: Annotated[int | None, AT_LEAST_ONE] = None
    max_test: Annotated[int | None, AT_LEAST_ONE] = None
    image_size: Annotated[int, AT_LEAST_ONE] = 224
    unreadable: Annotated[float, SHARE] = 0.01
    check: Check = "decoded"
    seed: Annotated[int, NOT_NEGATIVE] = 0

    def __post_init__(self) -> None:
        check_fields(self, "data")

    @property
    def folder(self) -> Path:
        """The root as a path."""
        return Path(self.root)

    def pictures(self, files: Iterable[Path | str] = ()) -> PictureFiles:
        """A table of picture files with these options."""
        return PictureFiles(files, self.image_size, unreadable=self.unreadable, check=self.check)


@dataclass(frozen=True)
class DrawnOptions:
    """Options of datasets that are drawn by the package itself.

    Attributes:
        train: training {things} per client.
        validation: validation {things} per client.
        test: test {things} per client and per unseen place.
        unseen: places without a client.
        clients: number of clients, where places do not say who they are.
        alpha: concentration of "dirichlet"; smaller is more uneven.
        conflict: how far places turn the colour wheel, 0 to 1: the same colour then has other names.
        test_seed: decides the test {things}.
        seed: decides training and validation {things}.
    """

    train: Annotated[int, AT_LEAST_ONE] = 200
    validation: Annotated[int, AT_LEAST_ONE] = 40
    test: Annotated[int, AT_LEAST_ONE] = 60
    unseen: tuple[str, ...] = ()
    clients: Annotated[int, AT_LEAST_ONE] = 4
    alpha: Annotated[float, POSITIVE] = 0.5
    conflict: Annotated[float, SHARE] = 0.5
    test_seed: Annotated[int, NOT_NEGATIVE] = 0
    seed: Annotated[int, NOT_NEGATIVE] = 0

    def __post_init__(self) -> None:
        check_fields(self, "data")

    def size(self, role: str) -> int:
        """Examples per client in a role."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[role]

    def seed_of(self, role: str) -> int:
        """The seed that a role's examples depend on."""
        return self.test_seed if role == "test" else self.seed
