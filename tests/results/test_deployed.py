"""Which model a method deploys, and methods without personal or global ones."""

import json
from html import escape
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy import stats

from confed.recipes.recipe import load_recipe
from confed.report.comparison import compare
from confed.report.figures.results import judged_curves
from confed.report.html.page import Tabs
from confed.report.report import render, save_figures
from confed.report.sections.general import learning, matrices, question_types
from confed.report.tables.methods import by_backbone, paper_table, study_table, table_of
from confed.report.tables.table import to_csv
from confed.results.history import evaluations, means
from confed.results.runs import load
from confed.results.summary import Summary, deployed_note, deploys, global_note, personal_note, with_deployed
from confed.results.views import View
from confed.studies.pool import headline
from confed.system import format as formats
from refusals import refuses
from synthetic_study import CLIENTS, changed, make_run

DRAWS = ("convergence",)

SEEDS = 5
ROWS = {"clf_local": ("local", "clf-L"), "adapter": ("fedpeft", "Adapter"), "dat": ("feddat", "FedDAT")}
SOURCES = {"clf_local": "local", "adapter": "fedavg", "dat": "fedp3"}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of a local row and two with heads of each client's own; values of all views differ."""
    root = tmp_path_factory.mktemp("deployed") / "study"
    runs: list[dict[str, object]] = []
    for seed in range(SEEDS):
        for row, (algorithm, label) in ROWS.items():
            folder = make_run(root / row / f"seed-{seed}", SOURCES[row], seed)
            summary = json.loads((folder / "summary.json").read_text())
            summary |= {"algorithm": algorithm, "label": label, "scenes": [], "own_heads": algorithm != "local"}
            summary["parameters"] = {"total": 1_000_000, "trained": 30_000, "sent": 0, "stored": 30_000}
            if algorithm != "local":
                summary["parameters"]["sent"] = 20_000
            summary = {key: value for key, value in summary.items() if not key.startswith("global_unseen")}
            (folder / "summary.json").write_text(json.dumps(summary))
            runs.append({"method": row, "seed": seed, "folder": f"{row}/seed-{seed}"})
    labels = {row: label for row, (_, label) in ROWS.items()}
    index = {"recipe": "toy", "methods": list(ROWS), "labels": labels, "seeds": list(range(SEEDS)), "runs": runs}
    (root / "summary.json").write_text(json.dumps(index))
    return root


def own(study: Path, row: str, seed: int, key: str) -> list[float]:
    """What a run's own file says of each client."""
    summary = json.loads((study / row / f"seed-{seed}" / "summary.json").read_text())
    return [summary[key][client] for client in CLIENTS]


def test_a_local_row_deploys_its_own_models(study: Path) -> None:
    values = compare([study]).values["deployed_mean"]
    for row, key in {"clf_local": "personal", "adapter": "global_seen", "dat": "global_seen"}.items():
        assert values[row] == pytest.approx({s: np.mean(own(study, row, s, key)) for s in range(SEEDS)})


def test_the_paired_tests_are_on_those_predictions(study: Path) -> None:
    comparison = compare([study], "adapter")
    views = {"clf_local": "personal", "adapter": "global", "dat": "global"}
    for row in ("clf_local", "dat"):
        total = np.zeros((len(CLIENTS), 200))
        for seed in range(SEEDS):
            a, b = (load_file(study / m / f"seed-{seed}/predictions.safetensors") for m in (row, "adapter"))
            total += [a[f"{views[row]}/{client}/correct"] - b[f"global/{client}/correct"] for client in CLIENTS]
        (found,) = (d for d in comparison.differences if (d.measure, d.method) == ("deployed_mean", row))
        assert found.signs is not None
        assert (found.signs.won, found.signs.lost) == ((total > 0).sum(), (total < 0).sum())
        assert found.over_examples is not None
        assert found.over_examples.difference == pytest.approx(total.mean() / SEEDS)
        keys = {row: "personal" if row == "clf_local" else "global_seen", "adapter": "global_seen"}
        a, b = ([np.mean(own(study, m, s, key)) for s in range(SEEDS)] for m, key in keys.items())
        assert found.over_seeds is not None
        assert found.over_seeds.p == pytest.approx(stats.ttest_rel(a, b).pvalue)
        # Holm over the three pairs of the column.
        keys = {"clf_local": "personal", "dat": "global_seen", "adapter": "global_seen"}
        means = {m: [np.mean(own(study, m, seed, key)) for seed in range(SEEDS)] for m, key in keys.items()}
        ps = sorted(stats.ttest_rel(means[a], means[b]).pvalue for a, b in combinations(means, 2))
        holm = np.minimum(1, np.maximum.accumulate(np.array(ps) * (3, 2, 1)))
        assert found.seeds_p == pytest.approx(holm[np.isclose(ps, found.over_seeds.p).argmax()])


def test_the_paper_table_shows_deployed_beside_sent(study: Path) -> None:
    table = paper_table(load(study))
    assert [c.full_title for c in table.columns] == [
        "method", "parameters trained", "parameters sent", "parameters share", "round and client sent up",
        *(f"deployed {client}" for client in CLIENTS), "deployed average", "deployed hurt",
    ]  # fmt: skip
    local, adapter, _ = table.rows
    assert [cell.text for cell in local[:5]] == ["clf-L", "30.0 k", "0", "0.00", "0 B"]
    assert [cell.text for cell in adapter[:5]] == ["Adapter", "30.0 k", "20.0 k", "2.00", "1.20 MB"]
    for i in range(len(CLIENTS)):
        expected = 100 * np.mean([own(study, "adapter", s, "global_seen")[i] for s in range(SEEDS)])
        assert adapter[5 + i].value == pytest.approx(expected)
    assert (
        "each client's own head where it has one (Adapter, FedDAT), or each client's own model (clf-L)"
        in table.notes[0]
    )
    assert "deployed average (%)" in to_csv(table).splitlines()[0]


def test_curves_follow_the_deployed_model(study: Path, tmp_path: Path) -> None:
    found = judged_curves(load(study))
    assert list(found) == list(ROWS)
    lines = (study / "dat/seed-3/metrics.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in lines if '"evaluation"' in line][-1]
    assert found["dat"][3][last["round"]] == pytest.approx(np.mean([v["accuracy"] for v in last["global"].values()]))
    run = load(study).of("clf_local")[0]
    assert found["clf_local"][0] == means(evaluations(run, "personal"))
    refuses("must be among clf_local, adapter, dat, got 'nobody'", save_figures, study, tmp_path, ["nobody"])
    names = {path.name for path in save_figures(study, tmp_path, ["dat", "adapter"])}
    assert {"convergence.png", "convergence.svg"} <= names
    svg = (tmp_path / "convergence.svg").read_text()
    assert ">FedDAT<" in svg
    assert ">clf-L<" not in svg


def test_the_recipe_or_the_command_may_say_otherwise(study: Path, tmp_path: Path) -> None:
    assert "deployed_mean" not in compare([study], headline="personal").values
    index = json.loads((study / "summary.json").read_text())
    try:
        (study / "summary.json").write_text(json.dumps({**index, "deploys": {"dat": "personal"}}))
        values = compare([study]).values["deployed_mean"]
        assert values["dat"][0] == pytest.approx(np.mean(own(study, "dat", 0, "personal")))
        assert values["adapter"][0] == pytest.approx(np.mean(own(study, "adapter", 0, "global_seen")))
    finally:
        (study / "summary.json").write_text(json.dumps(index))
    refuses("headline must be one of personal, global_seen, got", compare, [study], headline="best")


def test_recipes_say_it_for_the_study_or_a_row() -> None:
    recipe = load_recipe("feddat_scenes", ["study.headline=personal", "methods.adapter.headline=global_seen"])
    assert (recipe.deploys("adapter"), recipe.deploys("feddat")) == ("global_seen", "personal")
    assert "headline = " not in recipe.method("adapter").to_toml().replace('headline = ""', "")  # [task] has its own
    assert 'headline = "personal"' in recipe.to_toml()
    refuses(r"study\.headline", load_recipe, "feddat_scenes", ["study.headline=best"])
    with pytest.raises(
        ValueError, match=r"methods\.adapter\.headline must be one of personal, global_seen, got 'best'"
    ):
        load_recipe("feddat_scenes", ["methods.adapter.headline=best"])


def test_no_such_column_where_nobody_has_heads_of_their_own() -> None:
    plain = {"algorithm": "fedavg", "label": "FedAvg", "personal": {"a": 0.5}, "global_seen": {"a": 0.4}}
    assert deploys(Summary(plain)) == "personal"
    assert deploys(Summary(plain), "global_seen") == "global_seen"
    assert with_deployed([Summary(plain)]) == [Summary(plain)]
    heads = {**plain, "algorithm": "fedpeft"}  # an older summary, which does not say it: the method does
    both = with_deployed([Summary(plain), Summary(heads)])
    assert [one.values(View.DEPLOYED) for one in both] == [{"a": 0.5}, {"a": 0.4}]
    assert deploys(Summary({**heads, "global_seen": {}})) == "personal"
    columns = [column.header.plain for column in study_table([plain, heads]).columns]  # pyright: ignore
    assert any("deployed" in header for header in columns)


def test_tables_of_several_backbones_are_one(study: Path) -> None:
    table = paper_table(load(study))
    both = by_backbone({"vilt_mini": table, "albef_mini": table})
    assert [row[0].text for row in both.rows] == ["vilt_mini"] * 3 + ["albef_mini"] * 3
    assert both.rows[4][1:] == table.rows[1]
    assert both.notes == table.notes


@pytest.mark.parametrize(
    ("summary", "what"),
    [
        ({"algorithm": "fedlora", "global_model": "alone"}, "alone"),
        ({"algorithm": "fedlora", "global_model": "with own parts"}, "with own parts"),
        ({"algorithm": "fedlora", "traits": {"private_heads": True}}, "with own parts"),
        ({"algorithm": "mine", "traits": {"private_heads": False}}, "alone"),
        ({"algorithm": "feddat"}, "with own parts"),
        ({"algorithm": "fedavg", "own_heads": True}, "with own parts"),
        ({"algorithm": "fedper"}, "none"),
        ({"algorithm": "mine", "traits": {"has_global": False, "private_heads": True}}, "none"),
    ],
)
def test_what_is_global_is_read_from_summaries_of_all_versions(summary: dict[str, object], what: str) -> None:
    assert Summary(summary).global_model == what
    assert deploys(Summary(summary | {"global_seen": {"a": 0.5}})) == (
        "global_seen" if what == "with own parts" else "personal"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """FedAvg, and a method that says of itself that it makes no personal models."""
    make_run(tmp_path / "fedavg" / "seed-0", "fedavg", 0)
    split = make_run(tmp_path / "fedp3" / "seed-0", "fedp3", 0)
    changed(split, has_personal=False, matrix={}, label="Split", scenes=[])
    return tmp_path


NOTE = "Split: no models of the clients' own"


def test_it_is_known_of_runs_that_do_not_say_so_by_their_method() -> None:
    assert Summary({"algorithm": "bicsl"}).without_personal
    assert not Summary({"algorithm": "fedavg"}).without_personal
    assert not Summary({"algorithm": "of somebody else"}).without_personal
    assert not Summary({"algorithm": "bicsl", "has_personal": True}).without_personal
    assert personal_note({"FedAvg": Summary({"algorithm": "fedavg"})}) == ""


def test_tables_say_that_personal_values_are_global_ones(folder: Path) -> None:
    study = load(folder)
    for table in (table_of(study), paper_table(study)):
        assert any(note.startswith(NOTE) for note in table.notes)
    assert any(remark.startswith(NOTE) for remark in compare([folder]).remarks)
    assert escape(NOTE).replace("&#x27;", "&#39;") in render(study)


def test_a_run_on_its_own_has_no_figure_of_personal_models(folder: Path) -> None:
    html = render(load(folder / "fedp3" / "seed-0"))
    assert "personal models, mean over clients" not in html
    assert "the worst client (%)" in html
    line = headline({"personal_mean": 0.4, "personal_worst": 0.3, "global_seen_mean": 0.4, "has_personal": False,
                     "seconds": 1.0})  # fmt: skip
    assert line == "worst client 30.0%, global on seen 40.0%, 1 s"


def test_methods_without_a_global_model_are_named() -> None:
    assert Summary({"algorithm": "local"}).without_global
    assert Summary({"algorithm": "fedper"}).without_global
    assert not Summary({"algorithm": "fedavg"}).without_global
    assert not Summary({"algorithm": "of somebody else"}).without_global
    assert Summary({"algorithm": "of somebody else", "has_global": False}).without_global
    note = global_note({"Alone": Summary({"algorithm": "local"}), "FedAvg": Summary({"algorithm": "fedavg"})})
    assert note == "Alone trains no shared model, so its global columns are empty."
    assert Summary({}).public_place({"algorithm": {"public": "new"}}) == "new"
    assert Summary({"public_place": "shop"}).public_place({}) == "shop"
    assert Summary({}).public_place({"algorithm": {"public": 3}}) == ""


def test_a_run_without_a_global_model_is_not_said_to_have_one(tmp_path: Path) -> None:
    study = load(make_run(tmp_path / "seed-0", "local", 0))
    html = render(study)
    lead = html.split("<p class=lead>", maxsplit=1)[1].split("</p>", maxsplit=1)[0]
    assert "One thing is measured" in lead
    assert "There is no model for everybody." in lead
    assert "shared model" not in lead
    assert "every client trains alone" in lead
    assert "global model on the clients' data (%)" not in html
    assert "than the global model" not in html
    assert "and the global one" not in html
    assert any(note.startswith("Local trains no shared model") for note in table_of(study).notes)


def test_among_others_it_is_named(folder: Path) -> None:
    make_run(folder / "local" / "seed-0", "local", 0)
    html = render(load(folder))
    assert "Two things are measured" in html
    assert "(Local: nothing)" in html
    assert "Local trains no shared model, so its global columns are empty." in html


def test_private_heads_are_named_where_there_are_some() -> None:
    plain = {"algorithm": "fedavg", "own_heads": False, "global_seen": {"a": 0.5}, "personal": {"a": 0.4}}
    both = with_deployed([Summary(plain), Summary({**plain, "own_heads": True})], ["global_seen", "global_seen"])
    assert deployed_note({"A": both[0], "B, b": both[0]}) == (
        "Deployed, on each client's test data: the global model (A; B, b)."
    )
    assert "with each client's own head where it has one (A, B)" in deployed_note(dict(zip("AB", both, strict=True)))


def test_names_with_commas_are_told_apart() -> None:
    assert formats.names(["a", "b"]) == "a, b"
    assert formats.names(["a, in one place", "b"]) == "a, in one place; b"


def test_a_matrix_on_its_own_says_whose_it_is(folder: Path) -> None:
    assert "FedAvg" in matrices(load(folder), Tabs())


def test_losses_of_several_tasks_have_no_common_scale(folder: Path) -> None:
    assert "no common scale" not in learning(load(folder))
    path = folder / "fedp3" / "seed-0" / "recipe.toml"
    path.write_text(path.read_text() + '\n[task]\nname = "contrastive"\n')
    assert "no common scale" in learning(load(folder))


def test_the_judged_models_come_first_among_the_types(folder: Path) -> None:
    for row in ("fedavg", "fedp3"):
        types = {view: {"school": {"count": value}} for view, value in (("personal", 0.2), ("global_seen", 0.3))}
        changed(folder / row / "seed-0", own_heads=True, types=types)
    html = question_types(load(folder), Tabs())
    assert html.index("deployed") < html.index("personal")
    assert html.index("30.0") < html.index("20.0")


@pytest.mark.usefixtures("undrawn_figures")
def test_the_lead_claims_no_more_than_the_rows_have_in_common(folder: Path) -> None:
    html = render(load(folder))
    assert "Pictures and questions never leave a client;" in html
    assert "started from the same model" in html
    make_run(folder / "central" / "seed-0", "central", 0)
    path = folder / "fedp3" / "seed-0" / "recipe.toml"
    path.write_text(path.read_text() + '\n[task]\nname = "contrastive"\n')
    html = render(load(folder))
    assert "Central pools all data in one place, as an upper bound" in html
    assert "started from the same model" not in html
    assert "trained on the same data" in html
