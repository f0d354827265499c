"""Control conditions: permuted and blank inputs, answers that see no picture, and the criterion that marks a model."""

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from confed.comparison.refusals import fails
from confed.data.controls import GREY, WordAnswers, controlled, controls_of, donors
from confed.data.examples import TableData
from confed.data.table import Table
from confed.metrics.controls import LEVEL, label_verdict, no_better, verdict
from confed.recipes.recipe import load_recipe
from confed.report.comparison import compare_runs
from confed.report.report import render
from confed.report.tables.control_marks import SIGN, controls_table
from confed.report.tables.methods import paper_table, results_table
from confed.report.tables.models import OVERALL, model_studies, model_tables
from confed.report.tables.sweep import Stage, sweep_table
from confed.report.tables.table import to_csv
from confed.results.records import record_of
from confed.results.runs import RunResults, StudyResults, load
from confed.results.summary import Summary
from confed.results.sweep import Point, Sweep
from confed.results.views import View
from confed.runs.run import load_data, run
from refusals import refuses

TINY = [
    "study.methods=[]", "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.train=16",
    "data.validation=4", "data.test=16", "local.epochs=1", "run.rounds=1", "run.evaluate_every=0", "run.gallery=0",
    "run.checkpoint_every=0", "run.controls=all",
]  # fmt: skip


def _table(pictures: list[int], texts: list[int]) -> Table:
    """Questions about pictures whose every value is the picture's number."""
    images = torch.arange(max(pictures) + 1, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2).contiguous()
    text = torch.tensor(texts).unsqueeze(1)
    columns = {"text": text, "text_mask": torch.ones_like(text), "label": torch.arange(len(texts))}
    return Table(images, torch.tensor(pictures), columns)


def _shown(table: Table, control: str, seed: int = 0, size: int = 3) -> dict[str, list[int]]:
    batches = list(controlled(table, size, control, torch.Generator().manual_seed(seed)))
    joined = {key: torch.cat([batch[key] for batch in batches]) for key in ("image", "text", "label", "index")}
    return {key: value.flatten(1)[:, 0].tolist() if value.ndim > 1 else value.tolist() for key, value in joined.items()}


def test_permuted_pictures_are_those_of_others():
    table = _table([0, 0, 0, 1, 1, 2, 3, 4], list(range(8)))
    found = _shown(table, "permuted_image")
    assert Counter(found["image"]) == Counter(table.image_index.tolist())
    assert all(a != b for a, b in zip(found["image"], table.image_index.tolist(), strict=True))
    # Nothing else changes, whatever the batch size.
    assert found["text"] == found["label"] == found["index"] == list(range(8))
    assert _shown(table, "permuted_image", size=8) == found
    assert _shown(table, "permuted_image", seed=1)["image"] != found["image"]


def test_permuted_questions_and_blank_pictures():
    table = _table([0, 1, 2, 3], [5, 5, 6, 7])
    found = _shown(table, "permuted_text")
    assert sorted(found["text"]) == [5, 5, 6, 7]
    assert found["image"] == found["label"] == [0, 1, 2, 3]
    assert all(a != b for a, b in zip(found["text"], [5, 5, 6, 7], strict=True))
    assert _shown(table, "blank_image")["image"] == [GREY] * 4


def test_a_picture_of_most_questions_is_still_permuted():
    given = donors(_table([0, 0, 0, 1], [1, 2, 3, 4]), "image", torch.Generator().manual_seed(0))
    assert sorted(given.tolist()) == [0, 1, 2, 3]
    assert donors(_table([0], [1]).take(0), "image", torch.Generator()).tolist() == []


def test_examples_of_the_same_modalities_exchange_inputs():
    table = _table([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6])
    present = torch.tensor([[True, True, False, False]] * 3 + [[True, False, False, False]] * 3)
    modal = Table(table.images, table.image_index, table.columns, present=present)
    given = donors(modal, "image", torch.Generator().manual_seed(0))
    assert sorted(given[:3].tolist()) == [0, 1, 2]
    assert sorted(given[3:].tolist()) == [3, 4, 5]
    assert [len(batch["image"]) for batch in controlled(modal, 8, "permuted_image", torch.Generator())] == [3, 3]
    assert controls_of(modal) == ("permuted_image", "permuted_text", "blank_image")


def test_controls_without_a_meaning_are_left_out():
    table = _table([0, 0], [1, 2])
    assert controls_of(table) == ("permuted_text", "blank_image")
    assert controls_of(table.take(0)) == ()
    offered = Table(table.images, table.image_index, {**table.columns, "choices": torch.zeros(2, 2, 3)})
    assert controls_of(offered) == ("blank_image",)
    assert controls_of(Table(None, table.image_index, table.columns)) == ("permuted_text",)
    with pytest.raises(
        ValueError, match=r"a control must be one of permuted_image, permuted_text, .*got 'hidden_image'"
    ):
        next(controlled(table, 2, "hidden_image", torch.Generator()))
    data = TableData(table, table, table)
    assert len(list(data.controlled_test(1, "permuted_text", torch.Generator()))) == 2


def test_one_sided_p_values_agree_with_all_assignments_of_signs():
    a = {"x": np.array([1, 1, 0, 1.0]), "y": np.array([0.9, 0.3, 1.0])}
    b = {"x": np.array([0, 1, 1, 0.0]), "y": np.array([0.6, 0.3, 0.7])}
    flat = np.concatenate([(a[place] - b[place]) / len(a[place]) for place in a])
    all_signs = np.array(list(product((-1, 1), repeat=len(flat)))) @ flat
    assert no_better(a, b) == pytest.approx((all_signs >= flat.sum() - 1e-12).mean())
    assert no_better(b, a) == pytest.approx(1 - no_better(a, b))
    assert no_better(a, a) == 1.0
    assert no_better({"x": np.ones(10)}, {"x": np.zeros(10)}) == pytest.approx(2**-10)


def test_control_tests_weigh_places_and_not_examples():
    # 40 questions of one place are worse by a little, 12 of another better by much: the mean over places is better.
    a = {"large": np.array([0.0] * 22 + [1.0] * 18), "small": np.ones(12)}
    b = {"large": 1 - a["large"], "small": np.zeros(12)}
    assert no_better(a, b) < LEVEL
    assert no_better({"all": a["large"]}, {"all": b["large"]}) > 0.5
    refuses("as many examples in both, got 2 and 1", no_better, {"x": np.ones(2)}, {"x": np.ones(1)})
    refuses("a place with examples in common", no_better, {"x": np.ones(2)}, {"y": np.ones(2)})


def test_a_true_null_is_rejected_at_the_level():
    rng, p = np.random.default_rng(3), []
    for _ in range(100):
        both = [{place: rng.integers(0, 2, n).astype(float) for place, n in (("a", 40), ("b", 160))} for _ in range(2)]
        p.append(no_better(*both))
    assert np.mean(np.array(p) <= LEVEL) < 0.12


def test_the_verdict_needs_a_picture_and_more_than_floors():
    right, other = {"x": np.array([1.0] * 30 + [0.0] * 10)}, {"x": np.array([0.0] * 30 + [1.0] * 10)}
    low, high = {"x": np.full(40, 0.5)}, {"x": np.full(40, 0.8)}
    good = verdict(right, {"permuted_image": other}, {"constant": low})
    assert good.passed
    assert good.reasons == ()
    assert good.p["permuted_image"] < 0.01
    blind = verdict(right, {"permuted_image": right, "permuted_text": other}, {"constant": low}, ["permuted_image"])
    assert not blind.passed
    assert blind.reasons == ("not better by more than chance than with permuted pictures (one-sided p = 1)",)
    assert verdict(right, {"permuted_image": right, "permuted_audio": other}, {}).passed  # any modality will do
    floor = verdict(right, {"permuted_image": other}, {"constant": low, "words": high})
    assert floor.reasons == ("no better than an answer from the question's words alone (75.0 % against 80.0 %)",)
    assert not verdict(low, {}, {"constant": low}).passed  # equal is no better
    assert verdict(right, {}, {}).passed  # nothing to compare with


def test_answers_from_words_follow_words_and_not_their_order():
    questions = ["Is there a cat?", "is there a dog?", "How many cats?", "how many dogs?"] * 5
    answers = ["yes", "no", "2", "3"] * 5
    learned = WordAnswers(questions, answers)
    assert learned(["a cat, is there", "many dogs: how?"]) == ["yes", "3"]
    assert learned(["how many cats?"], ["yes", "no", "3"]) != ["2"]
    assert learned(["zebra"], []) == [""]
    assert WordAnswers([], [])(["what?"]) == [""]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("controls") / "one"
    run(load_recipe("fedvqa_scenes", [*TINY, "run.workers=1"]), root)
    return root


def test_a_run_says_how_its_models_do_under_controls(finished: Path, tmp_path: Path):
    summary = json.loads((finished / "summary.json").read_text())
    found = summary["controls"]
    for view in ("personal", "global_seen", "global_unseen"):
        own = found[view]
        assert own["right"] == pytest.approx(summary[view])
        assert own["means"]["right"] == pytest.approx(summary[f"{view}_mean"])
        names = {"right", "permuted_image", "permuted_text", "blank_image", "constant", "words"}
        assert set(own["means"]) == names
        assert all(own[name].keys() == summary[view].keys() for name in names)
        assert own["passed"] == (not own["reasons"])
    # One round of a random network: it neither looks nor knows what a question's words tell.
    assert not found["global_unseen"]["passed"]
    # The same bytes for two workers; and what else a run leaves is as without controls.
    run(load_recipe("fedvqa_scenes", [*TINY, "run.workers=2"]), tmp_path / "two")
    assert json.loads((tmp_path / "two/summary.json").read_text())["controls"] == found
    bare = run(load_recipe("fedvqa_scenes", [*TINY, "run.workers=1", "run.controls=none"]), tmp_path / "bare")
    assert "controls" not in bare
    for name in ("metrics.jsonl", "predictions.safetensors"):
        assert (tmp_path / "bare" / name).read_bytes() == (finished / name).read_bytes()


def test_the_constant_floor_is_the_most_frequent_answer(finished: Path):
    dataset = load_data(load_recipe(finished / "recipe.toml")).dataset
    found = json.loads((finished / "summary.json").read_text())["controls"]
    train = [answer for split in dataset.clients.values() for answer in split.train.answers]
    for place, split in dataset.clients.items():
        own = Counter(split.train.answers).most_common(1)[0][0]
        assert found["personal"]["constant"][place] == pytest.approx(np.mean([a == own for a in split.test.answers]))
        all_ = Counter(train).most_common(1)[0][0]
        assert found["global_seen"]["constant"][place] == pytest.approx(
            np.mean([a == all_ for a in split.test.answers])
        )


def test_a_pooled_model_is_tried_once_and_says_so(tmp_path: Path):
    settings = ["algorithm.name=central", *TINY, "run.workers=1", 'data.unseen=["home"]', "data.test=8"]
    found = run(load_recipe("fedvqa_scenes", settings), tmp_path / "central")["controls"]
    assert set(found) == {"global_seen", "global_unseen", "left_out"}
    assert found["left_out"] == {"personal": "all data are in one place: the one model is tried as the global one"}


def _summary(label: str, passed: bool, seed: int = 0) -> dict:
    view = {"means": {"right": 0.4, "permuted_image": 0.4}, "p": {"permuted_image": 0.5}, "passed": passed}
    values = {"a": 0.4, "b": 0.5}
    return {
        "algorithm": label, "label": label, "seed": seed, "clients": ["a", "b"], "scenes": ["c"], "metric": "accuracy",
        "personal": values, "global_seen": values, "global_unseen": {"c": 0.3},
        "controls": {"personal": view, "global_seen": {**view, "passed": True}, "global_unseen": view},
    }  # fmt: skip


def test_tables_mark_models_that_fail():
    bad, good = _summary("bad", False), _summary("good", True)
    table = results_table([("bad", [Summary(bad)]), ("good", [Summary(good)])])
    cells = {row[0].text: {c.full_title: cell.text for c, cell in zip(table.columns, row, strict=True)}
             for row in table.rows}  # fmt: skip
    assert cells["bad"]["personal mean"].endswith(SIGN)
    assert cells["bad"]["global unseen"].endswith(SIGN)
    assert not cells["bad"]["global seen"].endswith(SIGN)
    assert not any(text.endswith(SIGN) for text in cells["good"].values())
    assert sum(note.startswith(f"{SIGN} Not shown to use its input") for note in table.notes) == 1
    assert SIGN not in to_csv(table)  # numbers stay numbers
    assert not any(SIGN in note for note in results_table([("good", [Summary(good)])]).notes)


def test_half_of_the_seeds_decide():
    bad, good = Summary(_summary("m", False)), Summary(_summary("m", True, seed=1))
    assert _fails(View.PERSONAL, bad, good)
    assert not _fails(View.PERSONAL, bad, good, good)
    assert not _fails(View.PERSONAL, Summary({}))
    del bad.content["controls"]["personal"]
    assert not _fails(View.PERSONAL, bad)
    assert _fails(View.DEPLOYED, replace(bad, deploys=View.UNSEEN))


def _fails(view: View, *summaries: Summary) -> bool:
    runs = [RunResults(Path("run"), "m", "M", 0, summary, {}) for summary in summaries]
    return fails([record_of(run) for run in runs], view.mean)


def test_a_report_shows_the_controls(finished: Path):
    study = load(finished)
    table = controls_table(study)
    assert table is not None
    assert [column.title for column in table.columns][2:4] == ["own input", "permuted pictures"]
    assert len(table.rows) == 3
    assert all(re.fullmatch(r"<0\.001|[01]\.\d{3}", row[-1].text) for row in table.rows)
    page = render(study)
    assert "Whether models use their input" in page
    assert SIGN in page
    assert any(SIGN in cell.text for row in paper_table(study).rows for cell in row)


def _runs(label: str, passed: bool, value: float) -> list[RunResults]:
    found: list[RunResults] = []
    for seed in range(3):
        summary = _summary(label, passed, seed)
        summary |= {"personal": {"a": value + seed / 100, "b": value}, "personal_mean": value + seed / 200}
        found.append(RunResults(Path(label) / str(seed), label, label, seed, Summary(summary), {}))
    return found


def test_two_models_that_fail_are_not_tested():
    blind, other, good = _runs("blind", False, 0.4), _runs("other", False, 0.5), _runs("good", True, 0.6)
    comparison = compare_runs([*blind, *other, *good], "blind")
    by_key = {(d.measure, d.method): d for d in comparison.differences}
    refused = by_key["personal_mean", "other"]
    assert refused.refused == "neither model is shown to use its input"
    assert refused.over_seeds is None and refused.points == pytest.approx(0.1)  # noqa: PT018
    # One that does use its input is still better than one that does not, and the global models are another view.
    assert by_key["personal_mean", "good"].over_seeds is not None
    assert by_key["global_seen_mean", "other"].refused == ""
    text = comparison.markdown()
    assert SIGN in text
    assert "Not shown to use its input" in text


def test_labels_are_judged_by_how_probabilities_sort():
    truth = (torch.rand(60, 4, generator=torch.Generator().manual_seed(0)) < 0.3).numpy()
    sorted_well = 0.05 + 0.3 * truth  # no probability reaches one half, so that example F1 is 0
    constant = np.broadcast_to(truth.mean(0), truth.shape)
    found = label_verdict(sorted_well, {"permuted_image": np.roll(sorted_well, 7, 0), "constant": constant}, truth)
    assert found.passed
    assert found.reasons == ()
    assert found.values["right"] == 1.0 > found.values["permuted_image"]
    assert found.p["permuted_image"] == pytest.approx(1 / 201)
    same = label_verdict(sorted_well, {"permuted_image": sorted_well, "constant": constant}, truth)
    assert same.reasons == ("not better by more than chance than with permuted pictures (one-sided p = 1)",)
    flat = label_verdict(constant, {"constant": constant}, truth)
    assert len(flat.reasons) == 1
    assert "no better than the most frequent training answer (C-AP" in flat.reasons[0]


def test_two_models_that_fail_are_not_compared_client_by_client():
    runs = [*_runs("blind", False, 0.4), *_runs("other", False, 0.5), *_runs("good", True, 0.6)]
    comparison = compare_runs(runs, "blind")
    table = comparison.relative("blind")
    shown = {cell.text for row in table.rows for cell in row}
    assert "good" in shown
    assert "other" not in shown
    assert "Not compared with other: neither model is shown to use its input." in table.notes
    stage = Stage(Point({"data.shards": "1"}, "1"), StudyResults(Path(), "", tuple(runs)), comparison)
    assert stage.improvement("other") == {}
    assert stage.improvement("good")


def test_a_sweep_marks_models_that_fail_and_says_at_which_values():
    def stage(value: str, passed: bool) -> Stage:
        runs = [*_runs("a", passed, 0.4), *_runs("b", passed, 0.5)]
        return Stage(Point({"k": value}, value), StudyResults(Path(), "", tuple(runs)), compare_runs(runs, "a"))

    found = [stage("1", True), stage("2", False)]
    table = sweep_table(Sweep("r", "k", tuple(s.point for s in found)), found)
    place = [column.title for column in table.columns].index("value")
    assert [row[place].text.endswith(SIGN) for row in table.rows] == [False, False, True, True]
    (note,) = (text for text in table.notes if "Not shown to use its input" in text)
    assert note.startswith("k=2 (2 clients): ")
    everywhere = [text for text in found[0].comparison.remarks if text in found[1].comparison.remarks]
    assert all(table.notes.count(text) == 1 for text in everywhere)
    only = [text for text in found[0].comparison.remarks if text not in everywhere]
    assert all(f"k=1 (2 clients): {text}" in table.notes for text in only)
    alone = sweep_table(Sweep("r", "k", ()), found[1:])
    assert any(text.startswith(f"{SIGN} Not shown") for text in alone.notes)


def test_a_model_counts_for_no_pair_of_methods_that_fail_with_it():
    studies: dict[str, StudyResults] = {}
    for model, passed in (("small", False), ("medium", True), ("large", True)):
        runs = [*_runs("a", passed, 0.4), *_runs("b", passed, 0.5), *_runs("c", True, 0.55 + len(model) / 100)]
        studies[model] = StudyResults(Path(), "", tuple(runs))
    models = model_studies(studies)
    tables = model_tables(models)
    by_key = {(row[0].text, row[1].text): row[2].text for row in tables["pairs"][OVERALL].rows}
    assert by_key == {("a", "b"): "2", ("a", "c"): "3", ("b", "c"): "3"}
    marks = {row[0].text: [SIGN in cell.text for cell in row[1:]] for row in tables["models"][OVERALL].rows}
    assert marks["small"] == [True, True, False]
    assert not any(marks["medium"] + marks["large"])
    notes = tables["models"][OVERALL].notes
    assert any("a and b: not tested with small, where neither is shown to use its input." in text for text in notes)
    assert sum(text.startswith(f"{SIGN} Not shown") for text in notes) == 1
