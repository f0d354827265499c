"""Exports of runs with models and tokenizers of one's own: they load again, or are refused with the reason."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from confed.federation.protocols import Batch, Output
from confed.inference.export import export
from confed.inference.finished_run import FinishedRun
from confed.inference.load import load_exported
from confed.models.tokenizer import WordTokenizer
from confed.recipes.recipe import load_recipe
from confed.registry import ALLOWED
from confed.runs.run import run
from refusals import refuses

TINY = [
    "study.methods=[]", "algorithm.name=fedavg", "data.preset=dirichlet", "data.clients=2", "data.train=4",
    "data.validation=4", "data.test=4", "data.unseen=[]", "run.rounds=1", "run.workers=1", "run.gallery=0",
    "run.evaluate_every=0", "local.epochs=1",
]  # fmt: skip


class Net(nn.Module):
    def __init__(self, vocabulary: int, answers: int, body: Tensor) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.words = nn.Parameter(torch.randn(vocabulary, 4, generator=generator))
        self.body = nn.Parameter(body, requires_grad=False)
        self.head = nn.Linear(4, answers)
        nn.init.zeros_(self.head.bias)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(answers, 4, generator=generator))

    @property
    def frozen(self) -> frozenset[str]:
        return frozenset({"body"})

    def forward(self, batch: Batch) -> Output:
        features = self.words[batch["text"]].mean(dim=1) * self.body
        return Output(self.head(features), features)


class Letters:
    """Texts as letters; it can be written and read."""

    max_length = 8
    vocab_size = 27

    def __init__(self, words: Sequence[str] = (), first: str = "a") -> None:
        self.first = ord(first)

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        rows = [[(ord(letter) - self.first) % 27 for letter in text[:8].ljust(8)] for text in texts]
        return torch.tensor(rows).reshape(len(texts), 8), torch.ones(len(texts), 8, dtype=torch.int64)

    def save(self, directory: Path) -> None:
        (directory / "letters.json").write_text(json.dumps(self.first))

    @classmethod
    def load(cls, directory: Path) -> "Letters":
        return cls((), chr(json.loads((directory / "letters.json").read_text())))


class Mute(Letters):
    save = None  # pyright: ignore[reportAssignmentType]


def network(answers: Any, vocab_size: int, *, pretrained: str, seed: int = 0) -> Net:
    """A network that cannot be built without its weights."""
    body = load_file(Path(pretrained) / "body.safetensors")["body"]
    return Net(vocab_size, answers if isinstance(answers, int) else len(answers), body)


network.tokenizer = WordTokenizer  # pyright: ignore[reportFunctionMemberAccess]


def lettered(answers: Any, vocab_size: int, *, seed: int = 0) -> Net:
    return Net(vocab_size, answers if isinstance(answers, int) else len(answers), torch.ones(4))


lettered.tokenizer = Letters  # pyright: ignore[reportFunctionMemberAccess]


def muted(answers: Any, vocab_size: int, *, seed: int = 0) -> Net:
    return lettered(answers, vocab_size, seed=seed)


muted.tokenizer = Mute  # pyright: ignore[reportFunctionMemberAccess]


def check_same(root: Path, exported: Path) -> None:
    finished = FinishedRun(root)
    finished.load()
    client = finished.owners[0]
    batch = next(iter(finished.setup.population.data(client).test(4)))
    for name in (None, client):
        expected = finished.model(name)(batch).logits.clone()
        assert torch.equal(load_exported(exported, name)(batch).logits, expected)


def test_a_model_that_needs_its_weights_names_them(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    save_file({"body": torch.arange(1.0, 5.0)}, weights / "body.safetensors")
    given = [f"model.name={__name__}:network", f"model.pretrained={weights}"]
    run(load_recipe("fedvqa_scenes", [*TINY, *given]), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "exported")
    check_same(tmp_path / "run", tmp_path / "exported")
    save_file({"body": torch.ones(4)}, weights / "body.safetensors")
    refuses("is not the one that was trained on", load_exported, tmp_path / "exported")
    (weights / "body.safetensors").unlink()
    with pytest.raises(ValueError, match=r"needs its backbone '.*weights', which the export names and does not hold"):
        load_exported(tmp_path / "exported")


def test_a_tokenizer_of_one_s_own_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(load_recipe("fedvqa_scenes", [*TINY, f"model.name={__name__}:lettered"]), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "exported")
    check_same(tmp_path / "run", tmp_path / "exported")
    assert isinstance(load_exported(tmp_path / "exported").tokenizer, Letters)
    facts = json.loads((tmp_path / "exported" / "confed.json").read_text())
    assert facts["tokenizer"] == {"type": f"{__name__}:Letters"}
    facts["tokenizer"]["type"] = "os:system"
    (tmp_path / "exported" / "confed.json").write_text(json.dumps(facts))
    refuses("the tokenizer 'os:system' is code of the module 'os'", load_exported, tmp_path / "exported")
    monkeypatch.setenv(ALLOWED, "")
    refuses("which you have not allowed", load_exported, tmp_path / "exported")


def test_a_tokenizer_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    run(load_recipe("fedvqa_scenes", [*TINY, f"model.name={__name__}:muted"]), tmp_path / "run")
    with pytest.raises(ValueError, match=r"the tokenizer Mute of the model .* has no method save, so an export"):
        export(tmp_path / "run", tmp_path / "exported")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
