"""Models and data of a run, its digests, and which model is evaluated when."""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from coloured_labels import colours_dataset
from confed.data.examples import Examples, FederatedDataset
from confed.data.picture_tables import NoPictures
from confed.federation.client_info import ClientInfo
from confed.federation.params import named_tensors
from confed.federation.protocols import Batch, Output
from confed.federation.state import ClientState, MemoryStore
from confed.models.caption_tokenizer import AnswerTokenizer
from confed.models.tokenizer import WordTokenizer
from confed.models.vilt import Vilt
from confed.recipes.recipe import load_recipe
from confed.results.folder import RunFolder
from confed.runs import build
from confed.runs.build import prepare
from confed.runs.digests import LOOKED_AT, data_digest
from confed.runs.evaluate import Examination, _models
from confed.runs.run import run
from led_recipe import recipe_of
from refusals import refuses
from tiny_runs import TINY
from toy_federation import squares

PRIVATE = ("algorithm.update_privacy.clip=1",)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Every backbone that is made."""
    made: list[nn.Module] = []
    create: Callable[..., nn.Module] = build.create_model

    def counted(*args: Any, **options: Any) -> nn.Module:
        made.append(create(*args, **options))
        return made[-1]

    monkeypatch.setattr(build, "create_model", counted)
    return made


@pytest.mark.parametrize(("method", "options"), [("fedper", ()), ("fedavg", PRIVATE), ("feddyn", ())])
def test_model_built_once_for_checks_and_run(
    built: list[nn.Module], tmp_path: Path, method: str, options: tuple[str, ...]
) -> None:
    run(recipe_of(method, *options, "run.rounds=1"), tmp_path / "run")
    assert len(built) == 1


@pytest.mark.parametrize("method", ["fedavg", "fedper", "moon"])
def test_models_of_a_setup_are_apart_and_equal(method: str) -> None:
    setup, _ = prepare(recipe_of(method))
    first, second = (named_tensors(setup.model()) for _ in range(2))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert tensor.data_ptr() != second[name].data_ptr()


def with_train(change: Callable[[Examples], Examples]) -> FederatedDataset:
    dataset = squares(6, 4)
    warm = dataset.clients["warm"]
    return replace(dataset, clients={**dataset.clients, "warm": replace(warm, train=change(warm.train))})


def brighter(examples: Examples) -> Examples:
    images = np.array(examples.images)
    images[3, 5, 7, 1] ^= 1
    return replace(examples, images=images)


@pytest.mark.parametrize(
    "change",
    [
        brighter,
        lambda e: replace(e, answers=[e.answers[1], *e.answers[1:]]),
        lambda e: replace(e, questions=["which color is this?", *e.questions[1:]]),
        lambda e: replace(e, names=["other", *e.names[1:]]),
        lambda e: replace(e, image_index=e.image_index[::-1].copy()),
        lambda e: e.take([0, 1, 2]),
    ],
)
def test_any_change_of_examples_changes_the_digest(change: Callable[[Examples], Examples]) -> None:
    assert data_digest(with_train(change)) != data_digest(squares(6, 4)) == data_digest(squares(6, 4))


def test_who_has_examples_counts() -> None:
    dataset = squares(6, 4)
    order = dict(reversed(dataset.clients.items()))
    swapped = {name: replace(split, validation=split.test, test=split.validation) for name, split in order.items()}
    found = {data_digest(dataset), *(data_digest(replace(dataset, clients=c)) for c in (order, swapped))}
    assert len(found) == 3
    assert data_digest(replace(dataset, unseen={})) not in found


def test_labels_pictures_and_owners_count() -> None:
    dataset = colours_dataset()
    first = dataset.clients["u0"]
    darker = np.array(first.train.images)
    darker[0, 0, 0, 0] ^= 1
    parts = [dataset.clients, dict(list(dataset.clients.items())[1:]), {**dataset.clients, "u0": dataset.clients["u1"]}]
    parts.append({**dataset.clients, "u0": replace(first, train=replace(first.train, images=darker))})
    assert len({data_digest(replace(dataset, clients=clients)) for clients in parts}) == 4
    assert data_digest(dataset) == data_digest(colours_dataset())


class Files:
    """Pictures that are read when they are asked for."""

    dtype, ndim = np.dtype(np.uint8), 4

    def __init__(self, pictures: np.ndarray) -> None:
        self.pictures, self.shape, self.read = pictures, pictures.shape, 0

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        self.read += len(index)
        return self.pictures[index]


def test_some_pictures_of_files_are_looked_at() -> None:
    pictures = np.random.default_rng(0).integers(0, 255, (1000, 2, 2, 3), dtype=np.uint8)

    def digest(content: np.ndarray) -> tuple[str, int]:
        files = Files(content)
        dataset = with_train(lambda e: replace(e, images=files))
        return data_digest(dataset), files.read

    before, read = digest(pictures)
    assert read == LOOKED_AT
    assert digest(pictures)[0] == before != digest(pictures ^ 1)[0]


FEW = ["study.methods=[]", "data.train=8", "data.validation=4", "data.test=4", "run.gallery=0", "model.name=vilt_tiny"]


def test_questions_that_lose_their_end_are_counted_and_said():
    with pytest.warns(UserWarning, match=r"\d+ of \d+ different texts of 'scenes' .*max_length = 6 .*lose their end"):
        _, run_data = prepare(load_recipe("fedvqa_scenes", [*FEW, "model.max_length=6"]))
    data = run_data.dataset
    parts = [part for split in data.clients.values() for part in (split.train, split.validation, split.test)]
    texts = {text for part in (*parts, *data.unseen.values()) for text in part.questions}
    # Six positions are four words between [CLS] and [SEP]; punctuation is no word.
    long = sum(len(text.replace("?", " ").replace(",", " ").split()) > 4 for text in texts)
    assert run_data.texts_cut == (long, len(texts))
    assert 0 < long < len(texts)


def test_nothing_is_said_where_all_texts_fit():
    _, run_data = prepare(load_recipe("fedvqa_scenes", [*FEW, "model.max_length=16"]))  # warnings are errors here
    assert run_data.texts_cut[0] == 0


def test_a_tokenizer_of_questions_and_answers_counts_too():
    tokenizer = AnswerTokenizer(WordTokenizer(["is", "it", "red"], 4))
    assert tokenizer.shortened(["is it", "is it red", "red"]) == 1


def test_examples_without_pictures_need_no_table_of_any():
    def made(images: NoPictures | np.ndarray, index: list[int], there: list[bool]) -> Examples:
        n = len(index)
        return Examples(
            images, np.array(index), ["q"] * n, ["a"] * n, ["t"] * n, [str(i) for i in range(n)],
            present={"image": np.array(there)},
        )  # fmt: skip

    assert len(made(NoPictures(0), [0, 0], [False, False])) == 2
    pictures = np.zeros((1, 2, 2, 3), np.uint8)
    assert len(made(pictures, [0, 7], [True, False])) == 2  # of no meaning where there is none
    refuses(r"image_index must lie in \[0, 1\), got 0 to 7", made, pictures, [0, 7], [True, True])


@pytest.mark.parametrize(("answers", "expected"), [("alone", 1.0), ("with own parts", 5.0)])
def test_private_values_are_global_only_where_needed_to_answer(answers: str, expected: float) -> None:
    store = MemoryStore()
    store.save("a", ClientState(tensors={"private": {"w": torch.tensor(5.0)}}))
    algorithm = SimpleNamespace(global_model=answers, initial_private=lambda shared: {})
    simulation = SimpleNamespace(
        setup=SimpleNamespace(algorithm=algorithm, keep_personal=False),
        store=store,
        shared=lambda servers, info: {"w": torch.tensor(1.0)},
    )
    models = _models(Examination(), cast(Any, simulation), {}, ["a"], [], {"a": ClientInfo("a", 3)})
    assert float(models["a"]["w"]) == expected


ROUNDS, CLIENTS, UNSEEN = 5, 3, 1


@pytest.mark.parametrize(("every", "rounds"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (0, [])])
def test_validation_waits_and_nothing_is_evaluated_twice(
    every: int, rounds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, forward, folder = defaultdict[int, list[str]](list), Vilt.forward, RunFolder(tmp_path / "run")

    def events(kind: str) -> list[dict[str, Any]]:
        lines = folder.metrics.read_text().splitlines() if folder.metrics.is_file() else []
        return [line for line in map(json.loads, lines) if line["event"] == kind]

    def counted(model: Vilt, batch: Batch) -> Output:
        if not model.training:
            values = [*model.state_dict().values(), *(batch[key] for key in sorted(batch) if key != "index")]
            digest = sha256(b"".join(value.contiguous().numpy().tobytes() for value in values)).hexdigest()
            last = bool(rounds) and [e["round"] for e in events("evaluation")] == rounds  # the end of the run
            passes[ROUNDS + 1 if last or not rounds else len(events("round"))].append(digest)
        return forward(model, batch)

    monkeypatch.setattr(Vilt, "forward", counted)
    options = {**TINY, "algorithm.name": "fedavg", "run.rounds": ROUNDS, "run.evaluate_every": every}
    recipe = load_recipe("fedvqa_scenes", [f"{name}={value}" for name, value in options.items()])
    run(recipe.method("fedavg"), folder.root)
    end = passes.pop(ROUNDS + 1)
    assert [event["round"] for event in events("evaluation")] == sorted(passes) == rounds
    for round, seen in passes.items():
        # The global model at every client and unseen place, and each client's personal one where it has trained.
        assert len(seen) == CLIENTS * (1 + (round > 0)) + UNSEEN
    validated = [digest for seen in passes.values() for digest in seen]
    assert len(set(validated)) == len(validated)
    assert len(set(end)) == len(end)
    # Unseen places have test examples only, whose answers the end of the run keeps one by one.
    assert len(set(end) & set(validated)) == (UNSEEN if rounds else 0)
