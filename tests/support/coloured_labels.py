"""Pictures with several labels, a model for them, and the recipe of a run."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.ml_files.records import LabelRecord
from confed.data.ml_files.table import build_table
from confed.federation.protocols import Output
from confed.models.tokenizer import WordTokenizer

LABELS = ("red", "green", "blue", "never")


COARSE = {"red": "warm", "green": "cold", "blue": "cold", "never": "warm"}


CLIENTS, EACH = 4, 12


def colours_dataset(validation: bool = True, seed: int = 0) -> FederatedDataset:
    """Pictures whose channels are bright where the label is present; client 3 has no test examples."""
    del seed
    rng = np.random.default_rng(0)
    truth = rng.random((CLIENTS * EACH + 10, 3)) < np.array([0.6, 0.4, 0.25])
    noise = rng.integers(0, 120, (len(truth), 8, 8, 3))
    pictures = (noise + 100 * truth[:, None, None, :]).astype(np.uint8)
    records = [
        LabelRecord(Path("made up"), i, f"e{i}", tuple(np.array(LABELS)[:3][row]), picture=f"{i}.png")
        for i, row in enumerate(truth)
    ]
    table = build_table(records, LABELS)[""]
    kinds = [("pen", "ink")[i % 2] for i in range(len(truth))]

    def examples(start: int, stop: int) -> Examples:
        return Examples.labelled(table, pictures, np.arange(start, stop, dtype=np.int64), kinds)

    clients: dict[str, Split] = {}
    for k in range(CLIENTS):
        a = k * EACH
        middle = a + 8 if validation else a + 6
        stop = a + EACH if k < CLIENTS - 1 else middle
        clients[f"u{k}"] = Split(examples(a, a + 6), examples(a + 6, middle), examples(middle, stop))
    unseen = {"abroad": examples(CLIENTS * EACH, len(truth) - 4), "validation": examples(len(truth) - 4, len(truth))}
    return FederatedDataset("colours", LABELS, clients, unseen, facts={"origin": "made up"}, coarse=COARSE)


class Colours(nn.Module):
    """Linear in the mean colours."""

    reads_states = True  # says so and does not, for which a little training is no matter

    def __init__(self, answers: int, rng: torch.Generator) -> None:
        super().__init__()
        self.norm, self.classifier = nn.LayerNorm(3), nn.Linear(3, answers)
        with torch.no_grad():
            self.classifier.weight.copy_(0.1 * torch.randn(answers, 3, generator=rng))
            self.classifier.bias.zero_()

    def forward(self, batch: dict[str, Tensor]) -> Output:
        features = self.norm(batch["image"].float().mean((2, 3)) / 100)
        return Output(self.classifier(features), features)


def colours(answers, vocab_size: int = 0, *, seed: int = 0) -> Colours:
    del vocab_size
    return Colours(len(answers), torch.Generator().manual_seed(seed))


def blind(answers, vocab_size: int = 0, *, seed: int = 0) -> Colours:
    """The same, which does not say that it reads states."""
    model = colours(answers, vocab_size, seed=seed)
    model.reads_states = False
    return model


colours.tokenizer = blind.tokenizer = WordTokenizer  # type: ignore[attr-defined]


RECIPE = f"""
[algorithm]
name = "fedavg"
[model]
name = "{__name__}:colours"
[task]
name = "multilabel"
known = 0.75
[data]
name = "{__name__}:colours_dataset"
[local]
epochs = 1
batch_size = 4
lr = 0.05
[run]
rounds = 2
workers = 1
cohort = 3
sampling = "size"
"""


SHIFT = 0.5


class Told(Colours):
    """Every label that is known to be present adds to the logits of all; label c looks at place c of 2 x 3."""

    reads_states = True
    grid = (2, 3)

    def forward(self, batch: dict[str, Tensor]) -> Output:
        output = super().forward(batch)
        known = batch.get("known")
        more = 0 if known is None else SHIFT * (known == 1).sum(1, keepdim=True) - SHIFT * (known == 0).sum(1)[:, None]
        return Output(output.logits + more, output.features)

    def attention(self, batch: dict[str, Tensor]) -> Tensor:
        return 0.1 + 0.1 * torch.eye(4, 6).expand(len(batch["image"]), -1, -1)


def told(answers, vocab_size: int = 0, *, seed: int = 0) -> Told:
    del vocab_size
    return Told(answers if isinstance(answers, int) else len(answers), torch.Generator().manual_seed(seed))


told.tokenizer = WordTokenizer  # type: ignore[attr-defined]
