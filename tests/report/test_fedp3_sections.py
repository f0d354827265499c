"""Figures 8.4 and 8.5: what the filter picks, and accuracy and cost against the number of answers compared."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedp3 import FedP3
from confed.recipes.recipe import load_recipe
from confed.report.report import render, write_report
from confed.report.sections import fedp3 as filter_size
from confed.results.runs import load
from confed.runs.run import load_run, run
from confed.runs.samples import fill, filter_of, picked
from synthetic_study import make_run, picture

DRAWS = ("filter",)

ANSWERS = ("airport", "field", "road", "park")


def test_the_picked_answers_are_those_of_the_golden_distribution() -> None:
    student = torch.tensor([[2, 1, 0, -1], [0.5, -0.5, 1.5, 0]], dtype=torch.float64)
    teacher = torch.tensor([[1, 2, 0.5, -1], [0, 0, 2, 1]], dtype=torch.float64)
    first, second = picked(student, teacher, "gain", ANSWERS)
    assert [entry["answer"] for entry in first] == ["field", "airport", "road"]
    assert [entry["answer"] for entry in second] == ["road", "park", "airport"]
    assert [entry["r"] for entry in first] == pytest.approx([0.609917, 0.209586, 0.145694], abs=5e-4)
    e = np.exp([1.0, 2.0, 0.5, -1.0])
    assert first[0]["teacher"] == pytest.approx(e[1] / e.sum(), abs=5e-4)
    two = picked(student[:, :2], teacher[:, :2], "diff", ANSWERS[:2])
    assert [len(entries) for entries in two] == [2, 2]


def test_only_a_filter_that_ranks_has_something_to_show() -> None:
    assert filter_of(FedP3()) == "gain"
    assert filter_of(FedP3(filter="diff")) == "diff"
    for method in (FedAvg(), FedP3(pairs="all"), FedP3(pairs="sorted"), FedP3(filter="random")):
        assert filter_of(method) is None


def test_a_run_leaves_what_its_filter_picks(tmp_path: Path) -> None:
    sizes = ["data.train=32", "data.validation=4", "data.test=8", 'data.unseen=["home"]', "data.clients=4"]
    settings = ["run.rounds=1", "run.workers=1", "run.gallery=1", "run.evaluate_every=0", "run.checkpoint_every=0"]
    recipe = load_recipe("fedvqa_scenes", [*sizes, *settings, "study.methods=[]"])
    folder = tmp_path / "run"
    run(recipe, folder)
    gallery = json.loads((folder / "gallery.json").read_text())
    shown = [sample for sample in gallery if "forgotten" in sample]
    _, _, run_data, workspace = load_run(folder)
    names = run_data.dataset.answers
    assert [sample["place"] for sample in shown] == list(run_data.dataset.clients)
    assert [sample for sample in gallery if "forgotten" not in sample] == gallery[: -len(shown)]
    sample = shown[0]
    split = run_data.dataset.clients[sample["place"]].train
    # The question is a training question, and r follows from the two models that the run wrote.
    rows = [i for i, question in enumerate(split.questions) if question == sample["question"]]
    found = []
    for row in rows:
        logits = []
        for model in (f"personal/{sample['place']}", "global"):
            fill(workspace, load_file(folder / "models" / model / "trained.safetensors"))
            batch = run_data.clients[sample["place"]].tables[0].batch(torch.tensor([row]))
            with torch.no_grad():
                logits.append(workspace.model(batch).logits[0].double().numpy())
        log_s, log_t = (np.maximum(z - z.max() - np.log(np.exp(z - z.max()).sum()), -30) for z in logits)
        h_s, h_t = (-(np.exp(log_p) * log_p).sum() for log_p in (log_s, log_t))
        score = log_t - np.log(h_t / h_s) * log_s
        chosen = [score[names.index(entry["answer"])] for entry in sample["forgotten"]["answers"]]
        found.append(np.allclose(chosen, -np.sort(-score)[:3], atol=1e-3))
    assert any(found)
    html = write_report(folder).read_text()
    assert 'id="forgotten"' in html
    assert 'id="filter"' not in html


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """FedAvg, KL and FedP³ with N = 20 and 5, whose rounds take 5, 5.26, 6.04 and 5.52 seconds."""
    rows = {"fedavg": ("fedavg", "", 5.0), "kl": ("fedprox", "", 5.26), "n20": ("fedp3", "top_n = 20", 6.04),
            "n5": ("fedp3", "top_n = 5", 5.52)}  # fmt: skip
    entries = []
    for row, (method, extra, seconds) in rows.items():
        folder = make_run(tmp_path / row / "seed-0", method, extra=extra)
        times = [{"round": r, "seconds": 99.0 if r == 1 else seconds, "evaluation_seconds": 0} for r in range(1, 7)]
        (folder / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in times))
        summary = json.loads((folder / "summary.json").read_text())
        summary["examples"] = {client: {"train": 400} for client in summary["clients"]}
        if row == "kl":
            summary["algorithm"] = "st"
        (folder / "summary.json").write_text(json.dumps(summary))
        if method == "fedp3":
            entry = {
                "place": "transport", "seen": True, "role": "train", "question": "what <is> new?", "type": "qobject",
                "answer": "tram", "image": picture(7),
                "forgotten": {"filter": "gain", "of": 1642, "answers": [
                    {"answer": "canoe", "r": 0.75, "teacher": 0.001234, "student": 1e-9}]},
            }  # fmt: skip
            (folder / "gallery.json").write_text(json.dumps([entry]))
        entries.append({"method": row, "seed": 0, "folder": f"{row}/seed-0"})
    index = {"recipe": "topn", "methods": list(rows), "labels": {"kl": "KL"}, "seeds": [0], "runs": entries}
    (tmp_path / "summary.json").write_text(json.dumps(index))
    return tmp_path


def test_points_are_the_papers_and_timed_against_fedavg(study: Path) -> None:
    points = {p.method: p for p in filter_size.points(load(study))}
    assert list(points) == ["n5", "n20", "kl", "fedavg"]
    assert {m: p.count for m, p in points.items()} == {"n5": 25, "n20": 400, "kl": 1642, "fedavg": None}
    # 4 clients x 2 epochs x 13 batches = 104 steps a round; the slow first round does not count.
    assert points["n5"].extra == pytest.approx((5.0,))
    assert points["n20"].extra == pytest.approx((10.0,))
    assert points["kl"].extra == pytest.approx((2.5,))
    summary = json.loads((study / "n5" / "seed-0" / "summary.json").read_text())
    assert points["n5"].personal == pytest.approx((100 * summary["personal_mean"],))


def test_the_report_draws_both_figures(study: Path) -> None:
    html = render(load(study))
    assert filter_size.section(load(study)) in html  # the same bytes twice
    assert 'id="filter"' in html
    assert html.index('id="forgotten"') > html.index('id="cost"')
    assert "what &lt;is&gt; new?" in html
    assert "r 75.0 % · T 0.1 % · S ≈ 0" in html.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize("change", [("top_n = 5", "top_n = 5\nlam = 2.0"), ("lr = 0.003", "lr = 0.3")])
def test_rows_that_differ_otherwise_are_no_curve(study: Path, change: tuple[str, str]) -> None:
    recipe = study / "n5" / "seed-0" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace(*change))
    assert filter_size.points(load(study)) == []
    assert 'id="filter"' not in render(load(study))
