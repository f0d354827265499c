"""Models and tasks of one's own are checked before round 1: one line each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import confed
from confed.federation.protocols import Batch, Output
from confed.models.tokenizer import WordTokenizer
from confed.recipes.recipe import Recipe
from confed.registry import register_model, register_task, tasks
from confed.runs.build import prepare
from confed.tasks.vqa import VQA
from refusals import refuses

TINY = {"name": "scenes", "setting": "C", "train": 4, "validation": 2, "test": 2, "unseen": []}


class Bag(nn.Module):
    """Mean colours and mean words."""

    def __init__(self, answers: int, words: int, picture_side: int = 0) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 8)
        self.picture = nn.Linear(3 * picture_side**2 if picture_side else 3, 8)
        self.flat, self.head = bool(picture_side), nn.Linear(8, answers)

    def forward(self, batch: Mapping[str, Tensor]) -> Output:
        image = batch["image"].float() / 255
        features = self.picture(image.flatten(1) if self.flat else image.mean((2, 3)))
        features = features + self.words(batch["text"]).mean(1)
        return Output(self.head(features), features)


def registered(name: str, change: Callable[[Bag], object] = lambda m: None, **options: Any) -> str:
    def build(answers: Any, vocab_size: int, *, seed: int = 0) -> nn.Module:
        """A bag.

        Args:
            answers: all.
            vocab_size: ids.
            seed: of values.
        """
        torch.manual_seed(seed)
        model = Bag(answers if isinstance(answers, int) else len(answers), vocab_size, **options)
        change(model)
        return model

    build.__name__, build.tokenizer = name, WordTokenizer  # pyright: ignore[reportFunctionMemberAccess]
    register_model(build)
    return name


@dataclass(frozen=True)
class Forgets:
    """The task of answers, without what its tally declares."""

    answers: int
    types: tuple[str, ...] = ()
    extra: bool = False

    name = "forgets"
    head = "answers"
    metric = "accuracy"
    single_label = True

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return VQA(self.answers).loss(output, batch)

    def tally(self, output: Output, batch: Batch) -> dict[str, tuple[float, float]]:
        return {**VQA(self.answers).tally(output, batch), "surprise": (1.0, 1.0)}

    def predictions(self, output: Output, batch: Batch) -> Tensor:
        return VQA(self.answers).predictions(output, batch)


class Declares(Forgets):
    """As much of it as another task declares."""

    name = "declares"

    @property
    def measures(self) -> Mapping[str, tuple[float, float]]:
        return VQA(self.answers).measures


def test_good_models_of_ones_own_are_prepared():
    setup, _ = prepare(Recipe(model=registered("good_bag"), data=TINY))
    assert len(setup.population) > 1


@pytest.mark.parametrize(
    ("name", "change", "options", "message"),
    [
        ("complex_bag", lambda m: m.register_buffer("freq", torch.zeros(2, dtype=torch.complex64)), {},
         "the model 'complex_bag' cannot be trained: 'freq' is complex64"),
        ("grid_bag", lambda m: m.register_buffer("grid", torch.zeros(1, 4).expand(5, 4)), {},
         "the model 'grid_bag' cannot be trained: values of 'grid' share memory"),
        ("small_bag", lambda m: None, {"picture_side": 8},
         r"'small_bag' raises RuntimeError: .* with pictures of 64 x 64 pixels: set data.image_size"),
    ],
)  # fmt: skip
def test_models_of_ones_own_are_refused_before_round_1(name: str, change: Any, options: Any, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        prepare(Recipe(model=registered(name, change, **options), data=TINY))
    assert "\n" not in str(caught.value)


def test_a_module_of_the_session_is_checked_before_it_is_named():
    module = Bag(3, 10)
    module.register_buffer("grid", torch.zeros(1, 4).expand(5, 4))
    refuses("the model 'Bag' cannot be trained: values of 'grid' share memory", Recipe, model=module, data=TINY)


def test_a_model_without_tokenizer_is_told_how_to_name_one():
    def bare_bag(answers: Any, vocab_size: int) -> nn.Module:
        """Bare.

        Args:
            answers: all.
            vocab_size: ids.
        """
        return Bag(len(answers), vocab_size)

    register_model(bare_bag)
    with pytest.raises(ValueError, match=r"'bare_bag' names no tokenizer: .*my_model.tokenizer = WordTokenizer"):
        prepare(Recipe(model="bare_bag", data=TINY))


@pytest.mark.parametrize(
    ("task", "message"),
    [(Forgets, "the task 'forgets' does not declare what it scores: give it measures, a mapping of each"),
     (Declares, "the task 'declares' scores 'surprise' and does not declare it: its measures must have 'surprise'")],
)  # fmt: skip
def test_forgotten_measures_are_refused_before_round_1(task: Any, message: str, tmp_path: Path):
    register_task(task)
    with pytest.raises(ValueError, match=message):
        confed.run(
            Recipe(model="vilt_tiny", data=TINY, task=task.name, run={"rounds": 1}), folder=tmp_path / "run",
            progress=False,
        )  # fmt: skip
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_all_registered_tasks_declare_what_they_score():
    assert [name for name in tasks.names() if not hasattr(tasks[name], "measures") and name != "forgets"] == []
