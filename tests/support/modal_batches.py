"""Batches of several modalities."""

import torch
from torch import Tensor

ALL = ("image", "text", "audio", "series")
KEYS = {
    "image": ("image",),
    "text": ("text", "text_mask"),
    "audio": ("audio", "audio_length"),
    "series": ("series", "series_length"),
}


def modal_batch(rows: int = 3, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    tokens, samples, steps = (torch.tensor(given[:rows]) for given in ([5, 3, 8], [900, 1400, 300], [20, 9, 16]))
    mask = (torch.arange(10) < tokens[:, None]).long()
    return {
        "image": torch.randint(0, 256, (rows, 3, 28, 28), dtype=torch.uint8, generator=rng),
        "text": torch.randint(1, 20, (rows, 10), generator=rng) * mask,
        "text_mask": mask,
        "audio": torch.randn(rows, 1500, generator=rng) * (torch.arange(1500) < samples[:, None]),
        "audio_length": samples,
        "series": torch.randn(rows, 20, 2, generator=rng) * (torch.arange(20) < steps[:, None])[..., None],
        "series_length": steps,
        "label": torch.tensor([0, 3, 4])[:rows],
    }


def only(batch: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    kept = {key for name in names for key in KEYS[name]} | {"label"}
    return {key: value for key, value in batch.items() if key in kept}
