"""A multi-label recipe from run to tables: metrics by hand, resume, workers, rounds, tuning, comparison."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from coloured_labels import CLIENTS, LABELS, RECIPE, colours_dataset
from confed import registry
from confed.cli.dataset_description import describe
from confed.comparison import Record
from confed.comparison.paired import against, all_pairs
from confed.comparison.pairing import paired_bootstrap
from confed.comparison.refusals import OtherExamples
from confed.engines.local import Simulation
from confed.federation.state import MemoryStore
from confed.inference.evaluate import evaluate
from confed.metrics.multilabel import flair_metrics, multilabel_metrics
from confed.recipes.recipe import Recipe, load_recipe
from confed.report.comparison import compare_runs
from confed.report.tables.methods import label_tables, main_tables, study_table
from confed.results.records import OUTCOMES, record_of
from confed.results.runs import load
from confed.results.summary import Summary
from confed.runs.build import prepare
from confed.runs.evaluate import PooledCounts
from confed.runs.run import run
from confed.studies.tune import validation_scores
from tiny_runs import stop_in_round


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    (tmp_path / "colours.toml").write_text(RECIPE)
    return load_recipe(tmp_path / "colours.toml", overrides)


def by_hand(scores: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """The eight metrics with loops; classes without positives count as 0."""

    def precision_recall(predicted, real):
        hits = sum(p and r for p, r in zip(predicted, real, strict=True))
        return hits / max(sum(predicted), 1), hits / max(sum(real), 1)

    def f1(p, r):
        return 2 * p * r / (p + r) if p + r else 0.0

    def ap(own, real):
        """Mean over positives of the precision among all entries that score at least as much."""
        found = [sum(real[own >= own[i]]) / sum(own >= own[i]) for i in range(len(own)) if real[i]]
        return float(np.mean(found)) if found else 0.0

    p, r, a = [], [], []
    for c in range(scores.shape[1]):
        own = precision_recall(list(scores[:, c] >= 0.5), list(truth[:, c] > 0))
        p.append(own[0] if truth[:, c].any() else 0.0)
        r.append(own[1])
        a.append(ap(scores[:, c], truth[:, c]))
    overall = precision_recall(list((scores >= 0.5).ravel()), list((truth > 0).ravel()))
    values = {"C-AP": np.mean(a), "C-P": np.mean(p), "C-R": np.mean(r), "C-F1": f1(np.mean(p), np.mean(r))}
    values |= {"O-AP": ap(scores.ravel(), truth.ravel()), "O-P": overall[0], "O-R": overall[1], "O-F1": f1(*overall)}
    return values


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("labels")
    run(recipe(root), root / "run")
    return root / "run"


def test_final_metrics_are_those_of_the_kept_probabilities(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    kept, found = load_file(finished / "predictions.safetensors"), summary["multilabel"]
    assert found["headline"] == "global"
    assert found["undefined"] == "zero"
    names = [f"u{k}" for k in range(CLIENTS - 1)]  # the last client has no test examples
    truth = np.concatenate([kept[f"labels/{n}"] for n in names])
    np.testing.assert_array_equal(
        truth, np.concatenate([colours_dataset().clients[n].test.labels.dense() for n in names]).astype(np.uint8)
    )
    for view in ("global", "personal"):
        scores = np.concatenate([kept[f"{view}/{n}/probabilities"] for n in names])
        for metric, value in by_hand(scores, truth).items():
            assert found[view][metric] == pytest.approx(value, abs=1e-6), (view, metric)
        # Coarse: the largest score and any label of its own.
        warm, cold = [0, 3], [1, 2]
        coarse = np.stack([scores[:, warm].max(1), scores[:, cold].max(1)], 1)
        real = np.stack([truth[:, warm].max(1), truth[:, cold].max(1)], 1)
        for metric, value in by_hand(coarse, real).items():
            assert found[view]["coarse"][metric] == pytest.approx(value, abs=1e-6), (view, metric)
        three = multilabel_metrics(scores, truth, top=3)
        assert found[view]["top3"] == pytest.approx({name: three[name] for name in found[view]["top3"]})
        assert "O-F1" in found[view]["top3"]
        assert found[view]["flair"] == pytest.approx(flair_metrics(scores, truth))
    assert (found["global"]["without_positives"], found["global"]["classes"]) == (1, 4)
    kept_classes = found["global"]["omit"]["C-AP"] * 3  # without the class that never occurs
    assert kept_classes == pytest.approx(found["global"]["C-AP"] * 4)
    assert [row["label"] for row in found["per_class"]] == list(LABELS)
    assert [row["positives"] for row in found["per_class"]] == truth.sum(0).tolist()
    assert found["per_class"][3]["AP"] is None
    assert [row["label"] for row in found["per_class_coarse"]] == ["warm", "cold"]
    # Per example: F1, whose mean per client is the run's metric.
    correct = kept["global/u0/correct"]
    scores, real = kept["global/u0/probabilities"] >= 0.5, kept["labels/u0"] > 0
    both = (scores & real).sum(1) * 2 / np.maximum(scores.sum(1) + real.sum(1), 1)
    both[(scores.sum(1) + real.sum(1)) == 0] = 1
    np.testing.assert_allclose(correct, both, atol=1e-6)
    assert summary["global_seen"]["u0"] == pytest.approx(both.mean())
    assert found["clients"]["global"]["u0"]["example_f1"] == pytest.approx(both.mean())
    # The place that rounds are looked at on is in no test result over places.
    assert {"unseen", "unseen/abroad", "unseen/validation"} <= found.keys()
    assert found["unseen"]["examples"] == found["unseen/abroad"]["examples"] == 6
    assert summary["metric"] == "example_f1"


def test_a_killed_run_ends_in_the_same_bytes_with_any_workers(finished: Path, tmp_path: Path) -> None:
    for workers in (1, 2):
        root = tmp_path / f"run-{workers}"
        with pytest.raises(RuntimeError):
            run(recipe(tmp_path, f"run.workers={workers}"), root, progress=stop_in_round(1, RuntimeError))
        run(load_recipe(root / "recipe.toml"), root, resume=True)
        for name in ("metrics.jsonl", "predictions.safetensors"):
            assert (root / name).read_bytes() == (finished / name).read_bytes(), (workers, name)


def test_rounds_are_evaluated_over_all_places_together(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["event"] == "evaluation"]
    assert len(evaluations) == 3
    assert set(evaluations[-1]["pooled"]) == {"global", "personal", "unseen/abroad", "unseen/validation"}
    assert set(evaluations[-1]["pooled"]["global"]) >= {"C-AP-binned", "O-AP-binned", "C-F1", "O-F1"}


def test_counts_of_places_add_up_to_the_metrics_of_all(tmp_path: Path) -> None:
    setup, run_data = prepare(recipe(tmp_path))
    with Simulation(setup, MemoryStore()) as simulation:
        model = simulation.executor.workspace.model
        servers = simulation.start(simulation.executor.workspace)
        pooled = PooledCounts(setup.task, setup.algorithm, run_data.unseen)
        simulation.evaluate(servers, 0, split="test", counted=pooled.add)
    batches = [batch for client in run_data.clients.values() for batch in client.test(100)]
    model.load_state_dict(servers["main"].params)
    scores = torch.cat([model(batch).logits.sigmoid() for batch in batches]).detach().numpy()
    expected = by_hand(scores, torch.cat([batch["labels"] for batch in batches]).numpy())
    found = pooled.values()["global"]
    for name in ("C-P", "C-R", "C-F1", "O-P", "O-R", "O-F1"):
        assert found[name] == pytest.approx(expected[name]), name
    assert found["C-AP-binned"] == pytest.approx(expected["C-AP"], abs=0.1)


def test_central_training_pools_labels_and_is_judged_everywhere(tmp_path: Path) -> None:
    summary = run(recipe(tmp_path, "algorithm.name=central", "run.evaluate_every=2"), tmp_path / "central")
    found = summary["multilabel"]
    assert found["headline"] == "global"
    assert "personal" not in found
    assert found["global"]["examples"] == 12
    assert list(found["clients"]["global"]) == ["u0", "u1", "u2"]
    setup, _ = prepare(recipe(tmp_path, "algorithm.name=central"))
    assert setup.population.info(0).num_examples == CLIENTS * 6
    assert setup.population.info(0).modalities == ("image",)


def test_tuning_is_by_pooled_validation_examples(tmp_path: Path) -> None:
    single = recipe(tmp_path, "run.rounds=1")
    (score,) = validation_scores(single, tmp_path / "cell")
    setup, run_data = prepare(single)
    views = {}
    for name, wanted in (("C-AP-binned", score), ("O-F1", None)):
        (found,) = validation_scores(recipe(tmp_path, "run.rounds=1", f"study.score={name}"), tmp_path / name)
        views[name] = found
        assert wanted is None or found == wanted
    assert views["O-F1"] != score
    with pytest.raises(ValueError, match=r"study.score must be one of C-P, .*, got 'accuracy'"):
        list(validation_scores(recipe(tmp_path, "run.rounds=1", "study.score=accuracy"), tmp_path / "faulty"))
    # Who has no validation examples is judged on the place of that name.
    (elsewhere,) = validation_scores(recipe(tmp_path, "run.rounds=1", "data.validation=false"), tmp_path / "place")
    assert 0 <= elsewhere <= 1
    assert "abroad" in run_data.unseen
    assert setup.task.score == "C-AP-binned"


def test_a_study_has_a_table_per_level_and_view(tmp_path: Path) -> None:
    values = dict.fromkeys(("C-AP", "C-P", "C-R", "C-F1", "O-AP", "O-P", "O-R", "O-F1"), 0.5)
    common = {"undefined": "zero", "threshold": 0.5, "per_class": [], "clients": {}}

    def summary(label, seed, value, headline="global"):
        view = {**values, "C-AP": value, "examples": 9, "without_positives": 1, "coarse": {**values, "C-AP": value / 2}}
        view |= {"classes": 4}
        view["coarse"]["without_positives"] = 0
        views = {"personal": view} | ({"global": view, "unseen": view} if headline == "global" else {})
        return Summary({
            "algorithm": label, "label": label, "seed": seed, "recipe": "made up", "seconds": 1.0, "bytes_total": 10,
            "multilabel": {**views, "headline": headline, **common},
        })  # fmt: skip

    methods = [
        ("fedavg", [summary("fedavg", 0, 0.4), summary("fedavg", 1, 0.6)]),
        ("local", [summary("local", 0, 0.3, "personal"), summary("local", 1, 0.3, "personal")]),
    ]
    found = label_tables(methods, cost=True)
    assert list(found) == ["table", "table-coarse", "table-personal", "table-unseen"]
    assert list(label_tables(methods, every=True)) == list(found)  # these summaries have no other counts
    first = found["table"]
    assert [column.title for column in first.columns] == ["method", *values, "sent", "time"]
    assert first.rows[0][1].value == pytest.approx(50)
    assert first.rows[0][1].sd == pytest.approx(100 * np.std([0.4, 0.6], ddof=1))
    assert first.rows[0][1].mark == ""  # two seeds tell nothing
    assert first.rows[1][1].text == "30.0 ± 0.0"
    said = (
        "1 of 4 classes have no positive test example and count as 0 in means over classes (C-AP, C-P, C-R): a model "
    )
    assert f"{said}without a mistake would have C-AP 75.0." in first.notes
    assert found["table-coarse"].rows[0][1].value == pytest.approx(25)
    assert found["table-unseen"].rows[1][1].text == "–"
    assert methods[0][1][0].label_value("C-AP", "global", "coarse") == pytest.approx(0.2)
    assert Summary({}).label_value("C-AP") is None
    assert study_table([one.content for _, runs in methods for one in runs]) is not None
    for label, runs in methods:
        for summary_of_run in runs:
            content = summary_of_run.content
            folder = tmp_path / label / f"seed-{content['seed']}"
            folder.mkdir(parents=True)
            (folder / "summary.json").write_text(json.dumps(content))
    study = load(tmp_path)
    assert len(main_tables(study)) == 4
    comparison = compare_runs(study.runs, "fedavg")
    by_measure = {d.measure: d for d in comparison.differences if d.method == "local"}
    assert by_measure["C-AP"].points == pytest.approx(-0.2)
    assert by_measure["C-AP"].over_seeds is not None
    assert by_measure["C-AP"].over_examples is None
    assert by_measure["personal C-AP"].points == pytest.approx(-0.2)
    assert "unseen C-AP" not in by_measure


def test_differences_are_tested_over_test_examples(finished: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(finished, other)
    kept, rng = load_file(other / "predictions.safetensors"), np.random.default_rng(0)
    places = sorted(key.split("/")[1] for key in kept if key.startswith("global/") and key.endswith("/probabilities"))
    for key in (f"global/{place}/probabilities" for place in places):
        kept[key] = (kept[key] + rng.random(kept[key].shape, dtype=np.float32)) / 2
    save_file(kept, other / "predictions.safetensors")
    shutil.rmtree(other / "records")
    scores = np.concatenate([kept[f"global/{place}/probabilities"] for place in places])
    truth = np.concatenate([kept[f"labels/{place}"] for place in places])
    summary = json.loads((other / "summary.json").read_text())
    summary["multilabel"]["global"] |= multilabel_metrics(scores, truth)
    (other / "summary.json").write_text(json.dumps(summary))
    (run_of_first,), (run_of_second,) = load(finished).runs, load(other).runs
    first, second = record_of(run_of_first), record_of(run_of_second)
    for measure, metric in (("C-AP", "C-AP"), ("O-F1", "O-F1")):
        same = paired_bootstrap([(first, first)], measure)
        assert (same.difference, same.low, same.high, same.p) == (0, 0, 0, 1)
        found = paired_bootstrap([(second, first)], measure)
        expected = [run.summary.label_value(metric, "global") for run in (run_of_second, run_of_first)]
        assert found.difference == pytest.approx(expected[0] - expected[1])
        assert found.low < found.difference < found.high
        assert found.n == len(truth)
    # Other names are other examples, even if all labels agree: nothing is paired. Older folders have no names.
    moved = {key: value[::-1].copy() if key == f"names/{places[0]}" else value for key, value in kept.items()}
    save_file(moved, other / "predictions.safetensors")
    reason = unpaired(other, first)
    assert (reason, isinstance(reason, OtherExamples)) == ("test examples in another order (seed 0)", False)
    moved[f"names/{places[0]}"] = moved[f"names/{places[0]}"] + 1
    save_file(moved, other / "predictions.safetensors")
    assert isinstance(reason := unpaired(other, first), OtherExamples)
    assert reason == "other test examples (seed 0)"
    # Then nothing is tested over seeds either.
    runs = {"fedavg": dict.fromkeys(range(5), first), "other": dict.fromkeys(range(5), record_of(load(other).runs[0]))}
    found = next(d for d in against(all_pairs(runs, OUTCOMES), "fedavg") if d.measure == "C-AP")
    assert (found.refused, found.over_seeds, found.unpaired) == (reason, None, "")
    older = {key: value for key, value in kept.items() if not key.startswith("names/")}
    save_file(older, other / "predictions.safetensors")
    assert not isinstance(unpaired(other, first), str)
    # Other test labels are another test set.
    kept[f"labels/{places[0]}"] = 1 - kept[f"labels/{places[0]}"]
    save_file(kept, other / "predictions.safetensors")
    assert unpaired(other, first) == "test examples with other labels (seed 0)"
    (other / "predictions.safetensors").unlink()
    assert unpaired(other, first) == "probabilities of both on test examples are missing"


def unpaired(other: Path, first: Record) -> object:
    return paired_bootstrap([(record_of(load(other).runs[0]), first)], "C-AP")


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("task.name=vqa", "'colours' has labels, not questions: set task.name = \"multilabel\", got 'vqa'"),
        ("task.known=1.5", r"task.known must lie in \[0, 1\], got 1.5"),
        ("run.sampling=often", "run.sampling"),
        ("model.name=mcan_s_mini", "answers questions, and dataset 'colours' has labels"),
        (
            "model.name=coloured_labels:blind",
            r"blind' reads no label states, .*: task.known must be 0 for it, got 0.75",
        ),
    ],
)
def test_faulty_recipes_are_refused(tmp_path: Path, override: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        prepare(recipe(tmp_path, override))


def test_questions_are_not_a_task_for_labels(tmp_path: Path) -> None:
    small = ("study.methods=[]", "algorithm.name=fedavg", "model.name=vilt_tiny", "data.train=8", "data.test=8")
    with pytest.raises(ValueError, match=r"has answers, not labels: set task.name = \"vqa\""):
        prepare(load_recipe("fedvqa_scenes", [*small, "task.name=multilabel", "data.validation=8", "data.unseen=[]"]))


@pytest.mark.parametrize(("method", "examples"), [("fedavg", 6), ("central", 6 * CLIENTS - 6)])
def test_training_batches_alone_are_told_labels(tmp_path: Path, method: str, examples: int) -> None:
    for known in (0.75, 0.0):
        setup, _ = prepare(recipe(tmp_path, f"algorithm.name={method}", f"task.known={known}", "run.without=['u1']"))
        data = setup.population.data(setup.population.info(0).id)
        assert len(data) == examples
        told = ["known" in batch for batch in data.train(4, torch.Generator().manual_seed(1))]
        assert told == [known > 0] * len(told)
        asked = [*data.validation(4), *data.test(4)]
        asked += [batch for place in setup.observers.values() for batch in place.test(4)]
        assert not any("known" in batch for batch in asked)


def test_clients_can_be_left_out(tmp_path: Path) -> None:
    setup, run_data = prepare(recipe(tmp_path, "run.without=['u1']", "run.joins={u2=2}"))
    assert list(run_data.clients) == list(run_data.dataset.clients) == ["u0", "u2", "u3"]
    assert [setup.population.info(i).id for i in range(3)] == ["u0", "u2", "u3"]


def test_a_dataset_is_described_and_drawn(tmp_path: Path, monkeypatch) -> None:
    registry.datasets.names()  # what is imported from here on would be forgotten
    monkeypatch.setattr(registry.datasets, "_entries", {**registry.datasets._entries, "colours": colours_dataset})
    found = describe("colours", (), tmp_path / "sheet.png")
    assert found["answers"] == 4
    first = colours_dataset().clients["u0"].train.labels.dense().sum(0)
    assert found["rows"][0] == {
        "place": "u0", "role": "train", "questions": 6, "pictures": 6, "answers": int((first > 0).sum()),
        "most_frequent": f"{LABELS[int(first.argmax())]} ({first.max() / 6:.1%})",
    }  # fmt: skip
    assert found["facts"] == {"clients": "4", "origin": "made up", "coarse labels": "2"}
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")


def test_controls_of_labels_are_sorted_against_frequencies(tmp_path: Path):
    summary = run(recipe(tmp_path, "run.controls=all"), tmp_path / "run")
    found, pooled = summary["controls"]["global_seen"], summary["multilabel"]["global"]
    assert set(found["means"]) == {"right", "permuted_image", "blank_image", "constant"}
    assert found["right"] == pytest.approx(summary["global_seen"])
    assert found["C-AP"]["right"] == pytest.approx(pooled["C-AP"], abs=1e-6)
    # A constant score sorts nothing: its AP is each label's share of the examples.
    rows = summary["multilabel"]["per_class"]
    share = [row["positives"] / pooled["examples"] for row in rows]
    assert found["C-AP"]["constant"] == pytest.approx(np.mean(share), abs=1e-6)
    assert found["C-AP"]["permuted_image"] != found["C-AP"]["right"] != found["C-AP"]["blank_image"]
    assert "validation" not in summary["controls"]["global_unseen"]["right"]
    # C-AP decides, not the score at a threshold.
    for view in ("personal", "global_seen", "global_unseen"):
        own = summary["controls"][view]
        above = own["C-AP"]["right"] > own["C-AP"]["constant"]
        assert own["passed"] == (above and own["p"]["permuted_image"] <= 0.05) == (not own["reasons"])
        assert own["p"]["permuted_image"] * 201 == pytest.approx(round(own["p"]["permuted_image"] * 201))


def test_a_finished_run_is_evaluated_with_its_metrics(tmp_path: Path):
    summary = run(recipe(tmp_path, "run.controls=none"), tmp_path / "run")
    found = evaluate(tmp_path / "run", models=["all"])
    values = {(t.model, t.place): t.values for t in found.tried}
    for place, own in summary["multilabel"]["clients"]["global"].items():
        assert values["global", place]["O-F1"] == pytest.approx(own["O-F1"])
        assert 0 <= values["global", place]["C-AP"] <= 1
    ap = summary["multilabel"]["unseen/abroad"]["C-AP"]
    assert values["global", "abroad"]["C-AP"] == pytest.approx(ap)
    assert found.tests
