"""Finished runs on new data: the run's metric, what does not fit, and paired tests."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from command_line import confed as command
from confed.data.encode import encode
from confed.data.examples import Examples, FederatedDataset, Split
from confed.datasets.scenes import scenes
from confed.inference.evaluate import (
    Evaluation,
    Tried,
    blind_notes,
    compared,
    evaluate,
    left_out,
    paired,
    write_evaluation,
)
from confed.inference.finished_run import unknown_words
from confed.models import create_tokenizer
from confed.models.tokenizer import WordTokenizer
from confed.recipes.recipe import Recipe, load_recipe
from confed.registry import register_dataset
from confed.results.stored import read_examples
from confed.results.summary import Summary
from confed.runs.run import run
from refusals import refuses

TINY = [
    "study.methods=[]", "model.name=vilt_tiny", "data.train=24", "data.validation=8", "data.test=24",
    "data.unseen=[]", "run.rounds=1", "run.workers=1", "run.evaluate_every=0", "run.gallery=0",
    "run.controls=none",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("evaluating")
    for name in ("fedavg", "fedprox"):
        run(load_recipe("fedvqa_scenes", [f"algorithm.name={name}", *TINY]), root / name)
    return root / "fedavg", root / "fedprox"


def _changed(examples: Examples) -> Examples:
    """One answer that no run knows, and one word."""
    answers, questions = list(examples.answers), list(examples.questions)
    answers[0], questions[1] = "quokka", f"{questions[1]} wombat"
    return Examples(examples.images, examples.image_index, questions, answers, examples.types, examples.names)


@register_dataset
def strange_scenes(test: int = 24) -> FederatedDataset:
    """Scenes of which the first client has another name, a strange answer and a strange word."""
    made = scenes("C", train=8, validation=4, test=test, unseen=())
    first, *rest = made.clients
    split = made.clients[first]
    own = Split(split.train, split.validation, _changed(split.test))
    return FederatedDataset(
        "strange", (*made.answers, "quokka"), {"newcomer": own, **{n: made.clients[n] for n in rest}}, {}, made.words
    )


def test_the_runs_own_data_give_its_own_results(runs: tuple[Path, Path]):
    found = evaluate(runs[0], models=["all"])
    summary, kept = json.loads((runs[0] / "summary.json").read_text()), load_file(runs[0] / "predictions.safetensors")
    values = {(t.model, t.place): t.values["accuracy"] for t in found.tried}
    assert {p: values["global", p] for p in summary["clients"]} == pytest.approx(summary["global_seen"])
    assert {p: values[f"personal:{p}", p] for p in summary["clients"]} == pytest.approx(summary["personal"])
    for t in found.tried:
        view = "global" if t.model == "global" else "personal"
        assert t.correct.equal(kept[f"{view}/{t.place}/correct"])
        assert t.names.equal(kept[f"names/{t.place}"])
        assert t.truth is not None
        assert t.truth.equal(kept[f"truth/{t.place}"])
    assert found.notes == ()


def test_what_does_not_fit_is_counted_and_counts_as_wrong(runs: tuple[Path, Path], tmp_path: Path):
    found = evaluate(runs[0], ["name=strange_scenes"], ["global", "personal:natural"], examples="test")
    assert found.notes == (
        "144 of 216 examples of these data are used: only those that the data hold out as tests",
        "1 of 144 test questions have an answer that the run's models cannot give and count as wrong: 'quokka'",
        "1 of 144 test questions have a word that the run's models do not know: 'wombat'",
    )
    newcomer = next(t for t in found.tried if t.place == "newcomer")
    assert newcomer.truth is not None
    assert (newcomer.truth[0], newcomer.correct[0]) == (-1, 0)
    # A personal model is tried at home; of a client that the data do not have, everywhere.
    assert [t.place for t in found.tried if t.model == "personal:natural"] == ["natural"]
    everywhere = evaluate(runs[0], ["name=strange_scenes"], ["personal:transport"])
    assert [t.place for t in everywhere.tried] == ["newcomer", "sports", "educational", "natural", "home", "commercial"]
    files = write_evaluation(found, tmp_path / "out")
    content = json.loads(files["evaluation.json"].read_text())
    assert content["data"]["name"] == "strange_scenes"
    assert content["results"][0]["values"]["accuracy"] == found.tried[0].values["accuracy"]
    assert "mean over places" in files["evaluation.md"].read_text()
    assert files["evaluation.csv"].read_text().count("\n") == 1 + len(found.tried) + 2
    kept = load_file(files["predictions.safetensors"])
    assert {"0/global/newcomer/correct", "names/newcomer", "0/truth/newcomer"} <= set(kept)
    recorded = read_examples(tmp_path / "out", "global")["newcomer"]
    for name, key in (("correct", "0/global/newcomer/correct"), ("name", "names/newcomer")):
        assert recorded[name].tolist() == kept[key].tolist()
    refuses("has an evaluation already", write_evaluation, found, tmp_path / "out")


def test_what_a_run_has_learned_from_is_no_test(runs: tuple[Path, Path]):
    found = evaluate(runs[0], ["test=10"])
    assert found.notes == ("60 of 252 examples of these data are used: the models have learned from the others",)
    assert {len(t.correct) for t in found.tried} == {10}
    strange = evaluate(runs[0], ["name=strange_scenes"])
    assert strange.notes[0] == "216 of 216 examples of these data are used"
    (newcomer,) = (t for t in strange.tried if t.place == "newcomer")
    assert (len(newcomer.correct), len(newcomer.names), len(newcomer.names.unique())) == (36, 36, 36)
    assert newcomer.truth is not None
    assert newcomer.truth[0] == -1
    refuses("examples must be one of all, test, got 'train'", evaluate, runs[0], ["test=10"], examples="train")


def _folder(root: Path, count: int, start: int) -> Path:
    rows = []
    for number in range(start, start + count):
        grey = np.full((8, 8, 3), 40 + 90 * (number % 2), np.uint8)
        grey[0, 0] = number
        (root / "images").mkdir(parents=True, exist_ok=True)
        Image.fromarray(grey).save(root / "images" / f"{number}.png")
        rows.append({"image": f"{number}.png", "question": "is it dark?", "answer": ("yes", "no")[number % 2]})
    (root / "q.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return root


def test_all_rows_of_a_new_folder_are_tests(tmp_path: Path):
    old, new = _folder(tmp_path / "old", 24, 0), _folder(tmp_path / "new", 60, 100)
    data = {"name": "chat_records", "root": str(old), "clients": 2, "image_size": 16, "max_test": 1, "max_train": 4}
    made = Recipe(model={"name": "vilt_tiny", "image_size": 16}, data=data,
                  run={"rounds": 1, "workers": 1, "controls": "none", "gallery": 0})  # fmt: skip
    run(made, tmp_path / "run")
    found = evaluate(tmp_path / "run", [f"root={new}"])
    assert found.notes[0] == "60 of 60 examples of these data are used"
    assert sum(len(t.correct) for t in found.tried) == 60
    held_out = evaluate(tmp_path / "run", [f"root={new}"], examples="test")
    assert held_out.notes[0] == "2 of 14 examples of these data are used: only those that the data hold out as tests"
    told = evaluate(tmp_path / "run", [f"root={new}", "max_test=3", "max_train=2"])
    assert sum(len(t.correct) for t in told.tried) < 20


def test_examples_that_a_run_learned_from_are_no_tests(tmp_path: Path):
    data = {"name": "scene_labels", "clients": 2, "train": 8, "validation": 2, "test": 4, "unseen": 0}
    made = Recipe(model="resnet_multilabel_mini", data=data,
                  run={"rounds": 1, "workers": 1, "controls": "none", "gallery": 0})  # fmt: skip
    run(made, tmp_path / "run")
    same = evaluate(tmp_path / "run", ["test=5"])
    assert {len(t.correct) for t in same.tried} == {5}
    assert "the models have learned from the others" in same.notes[0]


def test_two_runs_are_compared_example_by_example(runs: tuple[Path, Path]):
    found = evaluate(runs[0], ["test=30"], ["global"], against=runs[1])
    (test,) = found.tests
    a, b = ([t for t in found.tried if t.run == str(folder)] for folder in runs)
    means = [sum(t.values["accuracy"] for t in own) / len(own) for own in (a, b)]
    assert test["difference"] == pytest.approx(means[0] - means[1], abs=1e-6)
    assert 0 < test["p"] <= 1
    if test["won"] + test["lost"]:
        assert test["low"] <= test["difference"] <= test["high"]
    else:  # all answers are equal: nothing to flip
        assert (test["low"], test["high"]) == (None, None)
    assert test["won"] == sum(int((x.correct > y.correct).sum()) for x, y in zip(a, b, strict=True))
    (self_test,) = evaluate(runs[0], ["test=30"], ["global"], against=runs[0]).tests or [{"p": 1.0}]
    assert self_test["p"] == 1.0


def test_unknown_words_are_those_without_a_token_of_their_own():
    words = ["is", "the", "ball", "red", "is", "it", "a", "wombat", "or", "a", "wombat"]
    assert unknown_words(WordTokenizer(["is", "the", "ball", "red", "it", "a"]), words) == ["wombat", "or"]
    for source in ("tiny:idefics3", "tiny:qwen2_vl"):  # which read bytes, between the tokens of a prompt
        assert unknown_words(create_tokenizer("hf", (), source=source), words) == []


LABELS = ["name=scene_labels", "clients=2", "train=8", "unseen=4"]
SMALL = ["name=modalities", "train=8", "test=4"]


@pytest.mark.parametrize(
    ("data", "models", "message"),
    [
        (LABELS, ["global"], "the run's models give answers, and the examples of 'scene_labels' have"),
        (SMALL, ["global"], r"trained with picture size \(64, 64\), and that of .* is \(32, 32\)"),
        ([], ["personal:nobody"], "no client is called 'nobody'"),
        ([], ["own"], "a model is global, personal:<client> or all, got 'own'"),
        (["tset=3"], ["global"], "unknown key data.tset"),
    ],
)
def test_what_cannot_be_tried_is_refused_in_a_line(runs: tuple[Path, Path], data, models, message):
    refuses(message, evaluate, runs[0], data, models)


def test_questions_with_choices_may_have_no_training_examples():
    made = scenes("C", train=8, validation=4, test=4, unseen=()).clients["sports"].train
    offered = replace(made, answers=["0"] * len(made), choices=[["a", "b"]] * len(made))
    table = encode(offered.take([]), WordTokenizer(["a", "b"], 5), ["0", "1"], sorted({*made.types}))
    assert table.columns["choices"].shape == (0, 0, 5)


def test_the_command_writes_and_prints(runs: tuple[Path, Path], capfd: pytest.CaptureFixture[str]):
    arguments = ["evaluate", str(runs[0]), "--data", "test=10", "--model", "global", "--json"]
    assert command(*arguments) == 0
    content = json.loads(capfd.readouterr().out)
    assert content["files"]["evaluation.csv"].endswith("evaluations/1/evaluation.csv")
    assert {row["examples"] for row in content["results"]} == {10}


def _tried(model: str, place: str, scores: list[float], names: list[int], run: str = "r") -> Tried:
    correct = torch.tensor(scores)
    return Tried(run, model, place, "accuracy", {"accuracy": float(correct.mean())}, correct, correct.long(),
                 torch.tensor(names, dtype=torch.int64), None)  # fmt: skip


def test_tests_of_several_models_are_corrected():
    base = [_tried("global", "a", [1.0] * 8, [*range(8)]), _tried("global", "b", [1.0] * 2, [0, 1])]
    others = [
        [_tried("personal:a", "a", [0.0] * 8, [*range(8)]), _tried("personal:a", "b", [1.0] * 2, [1, 0])],
        [_tried("personal:b", "a", [0.0] * 7 + [1.0], [*range(8)]), _tried("personal:b", "b", [1.0], [])],
        [_tried("personal:c", "c", [1.0], [0])],
    ]
    pairs = [paired(base, other) for other in others]
    family = 3  # the two others against each other too; the last one has a place of its own
    assert sum(bool(paired(a, b).same) for a, b in combinations([base, *others], 2)) == family
    first, second = compared(pairs, family)
    assert first["p_holm"] == pytest.approx(3 * first["p"])
    assert second["p_holm"] == pytest.approx(max(3 * first["p"], 2 * second["p"]))
    assert left_out(pairs) == [
        "global and personal:a are not compared on 'b': the examples differ",
        "global and personal:b are not compared on 'b': a model saw only some of the examples",
        "1 of 3 pairs of models have no place in common and are not compared",
    ]
    found = Evaluation({}, (*base,), (first, second), family=family)
    assert "after Holm's correction over 3 pairs" in found.table().notes[0]


def test_names_of_examples_outlast_a_model_of_some_of_them(tmp_path: Path):
    rows = (_tried("global", "a", [1.0, 0.0], [5, 6]), _tried("personal:b", "a", [1.0], []))
    files = write_evaluation(Evaluation({}, rows), tmp_path)
    assert load_file(files["predictions.safetensors"])["names/a"].tolist() == [5, 6]


def test_two_runs_that_fail_their_controls_are_warned_about():
    bad, good = (Summary({"controls": {"global_seen": {"passed": passed}}}) for passed in (False, True))
    (note,) = blind_notes((bad, bad), ["global"])
    assert note.startswith("† The global models of the two runs: neither model is shown to use its input")
    assert blind_notes((bad, good), ["global"]) == []
