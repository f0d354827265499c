"""The report of multi-label runs: counts by hand, samples, drawings, and no word about questions."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from coloured_labels import LABELS, RECIPE, colours_dataset, told
from confed.recipes.recipe import load_recipe
from confed.report.figures.save import figures
from confed.report.report import render
from confed.report.sections.general import clients
from confed.report.sections.labels import label_scores, labelled, shares, unit
from confed.results.history import curve, judged_curve, judged_words, nobody_has_own
from confed.results.runs import load
from confed.runs.run import run
from synthetic_study import changed, make_run

assert told  # the recipe below names it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    text = RECIPE.replace('coloured_labels:colours"', 'coloured_labels:told"')
    (root / "told.toml").write_text(text.replace("[run]", "[run]\nevaluate_every = 1"))
    run(load_recipe(root / "told.toml", ["run.gallery=2"]), root / "fedavg" / "seed-0")
    run(load_recipe(root / "told.toml", ["algorithm.name='local'", "run.gallery=2"]), root / "local" / "seed-0")
    return root


def test_the_summary_counts_examples_and_pairs_of_labels(folder: Path) -> None:
    found = json.loads((folder / "fedavg/seed-0/summary.json").read_text())["multilabel"]
    dataset = colours_dataset()
    train = np.sum([split.train.labels.dense().sum(0) for split in dataset.clients.values()], axis=0)
    assert [row["train"] for row in found["per_class"]] == train.tolist()
    tensors = load_file(folder / "fedavg/seed-0/predictions.safetensors")
    places = [name for name in dataset.clients if f"labels/{name}" in tensors]
    truth = np.concatenate([tensors[f"labels/{name}"] for name in places])
    scores = np.concatenate([tensors[f"global/{name}/probabilities"] for name in places])
    pairs = found["co_occurrence"]
    counts = dict(zip(LABELS, train, strict=True))
    assert pairs["labels"] == sorted(LABELS, key=lambda name: -counts[name])
    for i, a in enumerate(pairs["labels"]):
        for j, b in enumerate(pairs["labels"]):
            x, y = LABELS.index(a), LABELS.index(b)
            assert pairs["truth"][i][j] == sum(int(row[x] and row[y]) for row in truth)
            assert pairs["predicted"][i][j] == sum(int(row[x] >= 0.5 and row[y] >= 0.5) for row in scores)


def test_shares_are_of_the_rows_label() -> None:
    found = shares([[4, 1, 0], [1, 2, 0], [0, 0, 0]])
    expected = [[np.nan, 0.25, 0], [0.5, np.nan, 0], [np.nan, np.nan, np.nan]]
    np.testing.assert_array_equal(found, expected)


def test_labels_go_from_frequent_to_rare(folder: Path) -> None:
    study = load(folder)
    found = label_scores(study)
    assert found is not None
    assert list(found.train) == sorted(found.train, reverse=True)
    summary = study.of("fedavg")[0].summary.content["multilabel"]
    own = {row["label"]: row["AP"] for row in summary["per_class"]}
    for name, value in zip(found.labels, found.values["fedavg"], strict=True):
        assert np.isnan(value) if own[name] is None else value == own[name]
    positives = {row["label"]: row["positives"] for row in summary["per_class"]}
    examples = summary["global"]["examples"]
    np.testing.assert_allclose(found.chance, [positives[name] / examples for name in found.labels])


def test_samples_say_what_is_there_and_what_is_predicted(folder: Path) -> None:
    samples = load(folder).of("fedavg")[0].gallery()
    tensors = load_file(folder / "fedavg/seed-0/predictions.safetensors")
    places = list(dict.fromkeys(sample["place"] for sample in samples))
    assert places == ["u0", "u1", "u2", "abroad"]  # u3 has no test examples, and "validation" is no test place
    for place in places:
        own = [sample for sample in samples if sample["place"] == place]
        assert len(own) == 2
        view = "global" if own[0]["seen"] else "unseen"
        truth, scores = tensors[f"labels/{place}"], tensors[f"{view}/{place}/probabilities"]
        for sample, row in zip(own, (0, len(truth) // 2), strict=True):
            assert sample["labels"] == [LABELS[c] for c in range(4) if truth[row][c]]
            assert (sample["personal"] is None) == (not sample["seen"])
            assert len(sample["global"]["labels"]) == 4
            for entry in sample["global"]["labels"]:
                c = LABELS.index(entry["label"])
                assert entry["probability"] == pytest.approx(float(scores[row][c]), abs=1e-4)
                assert entry["there"] == bool(truth[row][c])
        assert "attention" in own[0]["global"]["labels"][0]
        assert "attention" not in own[1]["global"]["labels"][0]


def test_the_page_speaks_of_labels(folder: Path) -> None:
    study = load(folder)
    assert labelled(study)
    assert unit(study) == "pictures"
    html = render(study)
    for words in ("Pictures never leave a client", "Labels, from frequent to rare", "Labels that go together",
                  "coarse labels", "O-F1", "Sample pictures", "Frequent labels are learned first"):  # fmt: skip
        assert words in html
    assert "$" not in html.partition("<script>")[0]  # no formulas of the drawing library
    assert "Type of question" not in html
    assert "Pictures and questions" not in html
    assert "average precision, mean over labels" in render(load(folder / "fedavg" / "seed-0"))
    assert all(figures()[name](study) for name in ("average-precision-by-label", "labels-together"))


def test_curves_are_of_all_clients_together(folder: Path) -> None:
    study = load(folder)
    one = study.of("fedavg")[0]
    lines = one.records.measured("pooled")
    assert judged_words(study) == "global"
    assert judged_curve(study, one) == {r: p["global"]["C-AP-binned"] for r, p in lines.items()}
    assert curve(one, "unseen") == {r: p["unseen/abroad"]["C-AP-binned"] for r, p in lines.items()}


def test_without_personal_models_the_global_one_is_shown(tmp_path: Path) -> None:
    changed(make_run(tmp_path / "fedp3" / "seed-0", "fedp3", 0), has_personal=False, algorithm="bicsl")
    study = load(tmp_path)
    assert nobody_has_own(study)
    assert judged_words(study) == "global"
    html = clients(study)
    assert "The global models, on each client" in html
    assert "ersonal" not in html
    alone = clients(load(tmp_path / "fedp3" / "seed-0"))
    assert "The global model, on each client" in alone
    assert "ersonal" not in alone
    make_run(tmp_path / "fedavg" / "seed-0", "fedavg", 0)
    assert "Personal models, on each client" in clients(load(tmp_path))
