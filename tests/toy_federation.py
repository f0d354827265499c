"""Plain squares for federations in processes of their own: three clients that know two colours each."""

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import words
from confed.registry import register_dataset

RGB = {"red": (220, 40, 40), "orange": (240, 150, 30), "blue": (40, 60, 220), "cyan": (40, 200, 220)}
CLIENTS = {"warm": ("red", "orange"), "cold": ("blue", "cyan"), "both": ("red", "cyan")}
QUESTION = "which colour is this?"


@register_dataset
def squares(train: int = 24, test: int = 8, *, seed: int = 0) -> FederatedDataset:
    """The dataset.

    Args:
        train: training questions per client.
        test: validation and test questions per client.
        seed: decides the noise in the pictures.
    """
    rng = np.random.default_rng(seed)

    def draw(place: str, shown: tuple[str, ...], count: int) -> Examples:
        answers = [shown[i % len(shown)] for i in range(count)]
        plain = np.array([RGB[answer] for answer in answers]).reshape(-1, 1, 1, 3)
        noisy = plain + rng.normal(0, 40, (count, 64, 64, 3))
        return Examples(
            images=noisy.clip(0, 255).astype(np.uint8),
            image_index=np.arange(count),
            questions=[QUESTION] * count,
            answers=answers,
            types=["colour"] * count,
            names=[f"{place}-{i}" for i in range(count)],
        )

    def client(name: str, *shown: str) -> Split:
        sizes = {"train": train, "validation": test, "test": test}
        return Split(**{role: draw(f"{name}/{role}", shown, count) for role, count in sizes.items()})

    return FederatedDataset(
        name="squares",
        answers=tuple(RGB),
        clients={name: client(name, *shown) for name, shown in CLIENTS.items()},
        unseen={"everything": draw("everything", tuple(RGB), test)},
        words=words([QUESTION]),
    )
