"""Sections of reports: kept features, split steps, and runs with several labels."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from coloured_labels import LABELS, RECIPE, colours_dataset, told
from confed.datasets.scenes.questions import FAMILIES, TYPE_NAMES
from confed.recipes.recipe import load_recipe
from confed.report.html.page import Tabs
from confed.report.report import figures, render
from confed.report.sections.general import clients, cost, features_saved, question_types
from confed.report.sections.labels import label_scores, labelled, shares, unit
from confed.report.sections.split_steps import Span, busy, busy_table, drawing, section, spans_of, traffic_table
from confed.results.history import curve, judged_curve, judged_words, nobody_has_own
from confed.results.runs import load
from confed.runs.run import run
from synthetic_study import CLIENTS, TYPES, changed, make_run

DRAWS = ("steps", "labels", "labels-together")


def test_question_types_are_named_in_words_where_a_run_has_names(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "fedavg" / "seed-0", "fedavg", 0)
    plain = question_types(load(folder), Tabs())
    assert all(f">{kind}<" in plain for kind in TYPES)
    changed(folder, type_names={"qcolor": "which color", "count": "how <many>"})
    named = question_types(load(folder), Tabs())
    assert ">which color<" in named
    assert ">how &lt;many&gt;<" in named
    assert "qcolor" not in named
    assert ">exist<" in named


def test_every_question_family_has_a_name() -> None:
    assert set(TYPE_NAMES) == set(FAMILIES)
    assert len(set(TYPE_NAMES.values())) == len(FAMILIES)


USED = {"used": True, "stage": "block 2", "computed": 2656, "reused": 28064, "held": 21_000_000, "exact": True}


def with_features(folder: Path, said: dict[str, object]) -> Path:
    run = make_run(folder / "fedavg" / "seed-0", "fedavg", 0)
    changed(run, **said)
    return run


def test_served_and_computed_examples_are_in_the_costs(tmp_path: Path) -> None:
    study = load(with_features(tmp_path, {"features": USED}))
    said = features_saved(study)
    assert "(up to block 2)" in said
    assert "28.1 k examples served" in said
    assert "2.66 k computed" in said
    assert "21.0 MB kept in memory; the same bits as without" in said
    assert said in cost(study)


def test_difference_is_said_where_bits_were_not_the_same(tmp_path: Path) -> None:
    study = load(with_features(tmp_path, {"features": USED | {"exact": False, "difference": 2e-6}}))
    assert "relative difference at most 2.0e-06" in features_saved(study)


@pytest.mark.parametrize(
    "said",
    [{}, {"features": {"used": False, "reason": "run.features.keep is 'off'"}}, {"features": USED | {"used": False}}],
)
def test_nothing_is_said_where_no_features_were_used(tmp_path: Path, said: dict[str, object]) -> None:
    study = load(with_features(tmp_path, said))
    assert features_saved(study) == ""
    assert "Features of frozen layers" not in cost(study)


TRAFFIC = {
    "receive": {"calls": 12, "up": 0, "down": 1200},
    "step": {"calls": 60, "up": 60_000, "down": 30_000},
    "send": {"calls": 12, "up": 1200, "down": 0},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "fedavg" / "seed-0", "fedavg", 0)
    changed(run, traffic=TRAFFIC)
    spans = [
        (CLIENTS[0], "receive", 1.0, 1.5), (CLIENTS[1], "receive", 1.0, 2.0), ("main", "step", 2.0, 2.25),
        (CLIENTS[0], "step", 2.0, 3.0), ("aux", "send", 3.0, 3.0),
    ]  # fmt: skip
    lines = [{"round": 1, "party": p, "what": w, "start": s, "end": e} for p, w, s, e in spans]
    (run / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_run(tmp_path / "local" / "seed-0", "local", 0)
    return tmp_path


def test_busy_is_the_share_of_time_in_which_a_party_works() -> None:
    spans = [Span("a", "x", 0, 2), Span("a", "y", 1, 3), Span("a", "x", 5, 6), Span("b", "x", 9, 10)]
    assert busy(spans) == pytest.approx({"a": 0.4, "b": 0.1})  # overlapping spans count once
    assert busy([]) == {}
    assert busy([Span("a", "x", 1, 1)]) == {"a": 0.0}


def test_the_table_of_parties_has_clients_first(folder: Path) -> None:
    table = busy_table(load(folder))
    assert table is not None
    assert [column.title for column in table.columns] == [
        "method",
        CLIENTS[0],
        CLIENTS[1],
        "main",
        "aux",
        "spans",
        "time",
    ]
    (row,) = table.rows
    assert [cell.value for cell in row[1:5]] == pytest.approx([75, 50, 12.5, 0])
    assert (row[5].value, row[6].value) == (5, 2)


def test_bytes_are_per_call_and_per_round(folder: Path) -> None:
    study = load(folder)
    rounds = study.of("fedavg")[0].summary.content["rounds"]
    table = traffic_table(study)
    assert table is not None
    step = next(row for row in table.rows if row[1].text == "step")
    assert step[0].text == "FedAvg"
    assert [cell.value for cell in step[3:]] == pytest.approx(
        [1000, 500, 60 / rounds, 60_000 / rounds, 30_000 / rounds]
    )


def test_the_report_has_the_steps_and_says_what_travels(folder: Path) -> None:
    study = load(folder)
    assert len(spans_of(study.of("fedavg")[0])) == 5
    assert spans_of(study.of("local")[0]) == []
    picture = drawing(study)
    assert picture is not None
    assert picture.inline() == drawing(study).inline()  # type: ignore[union-attr]
    html = render(study)
    assert "Steps of split learning" in html
    assert "FedAvg: activations and their gradients" in html
    assert "Bytes per step and per round" in html


def test_runs_without_steps_have_no_such_section(tmp_path: Path) -> None:
    make_run(tmp_path / "fedavg" / "seed-0", "fedavg", 0)
    study = load(tmp_path)
    assert section(study) == ""
    assert "only model weights are exchanged" in render(study)
    (tmp_path / "fedavg" / "seed-0" / "timeline.jsonl").write_text('{"start": 1}\nnonsense\n')
    assert spans_of(load(tmp_path).runs[0]) == []


def test_every_action_of_split_methods_is_put_into_words(folder: Path) -> None:
    changed(folder / "fedavg" / "seed-0", traffic={**TRAFFIC, "top": {"calls": 20, "up": 10, "down": 10}})
    table = traffic_table(load(folder))
    assert table is not None
    assert all(row[2].text for row in table.rows)
    assert any("one call more than it has batches" in note for note in table.notes)


def test_rounds_are_those_of_the_runs_that_counted(folder: Path) -> None:
    broken = make_run(folder / "fedavg" / "seed-1", "fedavg", 1)
    (broken / "summary.json").unlink()
    lines = (broken / "metrics.jsonl").read_text().splitlines(keepends=True)
    (broken / "metrics.jsonl").write_text("".join(lines[:3]))  # it was interrupted in its second round
    study = load(folder)
    table = traffic_table(study)
    assert table is not None
    step = next(row for row in table.rows if row[1].text == "step")
    rounds = study.of("fedavg")[0].summary.content["rounds"]
    assert rounds != study.of("fedavg")[1].summary.content["rounds"]
    assert step[5].value == pytest.approx(60 / rounds)


def test_the_timeline_names_servers_and_says_they_take_turns(folder: Path) -> None:
    html = section(load(folder))
    assert "aux averages the clients" in html
    assert "take turns" not in html  # how many processes there were is not known here
    path = folder / "fedavg" / "seed-0" / "recipe.toml"
    path.write_text(path.read_text().replace("[run]", "[run]\nworkers = 1"))
    assert "take turns" in section(load(folder))


assert told  # the recipe below names it


@pytest.fixture(scope="module")
def label_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    text = RECIPE.replace('coloured_labels:colours"', 'coloured_labels:told"')
    (root / "told.toml").write_text(text.replace("[run]", "[run]\nevaluate_every = 1"))
    run(load_recipe(root / "told.toml", ["run.gallery=2"]), root / "fedavg" / "seed-0")
    run(load_recipe(root / "told.toml", ["algorithm.name='local'", "run.gallery=2"]), root / "local" / "seed-0")
    return root


def test_the_summary_counts_examples_and_pairs_of_labels(label_folder: Path) -> None:
    found = json.loads((label_folder / "fedavg/seed-0/summary.json").read_text())["multilabel"]
    dataset = colours_dataset()
    train = np.sum([split.train.labels.dense().sum(0) for split in dataset.clients.values()], axis=0)
    assert [row["train"] for row in found["per_class"]] == train.tolist()
    tensors = load_file(label_folder / "fedavg/seed-0/predictions.safetensors")
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


def test_labels_go_from_frequent_to_rare(label_folder: Path) -> None:
    study = load(label_folder)
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


def test_samples_say_what_is_there_and_what_is_predicted(label_folder: Path) -> None:
    samples = load(label_folder).of("fedavg")[0].gallery()
    tensors = load_file(label_folder / "fedavg/seed-0/predictions.safetensors")
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


def test_the_page_speaks_of_labels(label_folder: Path) -> None:
    study = load(label_folder)
    assert labelled(study)
    assert unit(study) == "pictures"
    html = render(study)
    for words in ("Pictures never leave a client", "Labels, from frequent to rare", "Labels that go together",
                  "coarse labels", "O-F1", "Sample pictures", "Frequent labels are learned first"):  # fmt: skip
        assert words in html
    assert "$" not in html.partition("<script>")[0]  # no formulas of the drawing library
    assert "Type of question" not in html
    assert "Pictures and questions" not in html
    assert "average precision, mean over labels" in render(load(label_folder / "fedavg" / "seed-0"))
    assert all(figures()[name](study) for name in ("average-precision-by-label", "labels-together"))


def test_curves_are_of_all_clients_together(label_folder: Path) -> None:
    study = load(label_folder)
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
