"""The modality matrix: which sets are tried, values by hand, where it is shown; parameters of clients that differ."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from confed.data.examples import TableData
from confed.federation.ownership import narrowed
from confed.federation.params import named_tensors
from confed.recipes.recipe import load_recipe
from confed.report.html.page import Tabs
from confed.report.report import render, save_figures, write_tables
from confed.report.tables import modalities as modality_matrix
from confed.report.tables.methods import cost_table
from confed.results.runs import load
from confed.runs.build import prepare
from confed.runs.evaluate import restriction, sets_at, sets_tried, widest
from confed.runs.run import run
from modal_examples import OWNED, Sums, examples, recipe_file, table

DRAWS = True
QUICK = ["run.workers=1", "run.gallery=0", "run.evaluate_every=0"]
LOST = 'data.missing={ text = 0.4, when = "both" }'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("matrix")
    recipe = load_recipe(recipe_file(root, "sums", "gaps"), [LOST, *QUICK])
    run(recipe, root / "out")
    return root / "out"


def data(*owned: tuple[str, ...]) -> TableData:
    """Test examples of the given sets."""
    rows = [table(examples("x", 2, own)) for own in owned]
    return TableData(*[replace(rows[0], present=torch.cat([r.present for r in rows]))] * 3)


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


# Which sets ------------------------------------------------------------------------------------------------------


def test_every_part_of_a_set_that_the_model_reads() -> None:
    tensors = {f"embed.{name}.weight": torch.zeros(1) for name in ("image", "audio", "text")}
    assert sets_tried([("image", "text"), ("audio",)], tensors) == [
        ("image",), ("text",), ("audio",), ("image", "text"),
    ]  # fmt: skip
    assert sets_tried([("image", "text", "series")], {"embed.image.weight": torch.zeros(1)}) == [("image",)]
    assert not sets_tried([("image",)], {"body.weight": torch.zeros(1)})


def test_places_whose_sets_are_part_of_anothers_are_left_out() -> None:
    places = {"a": data(("image",)), "b": data(("image", "text")), "c": data(("audio",)), "d": data(("image", "text"))}
    assert widest(places) == ["b", "c", "d"]
    assert sets_at(places["b"]) == [("image", "text")]


def test_others_examples_are_shown_as_their_owner_reads_them() -> None:
    there = data(("image", "text"))
    assert restriction(there, ("image", "text", "audio")) == {}
    assert restriction(there, ()) == {}
    assert restriction(there, ("text", "audio")) == {"modalities": "text"}
    assert restriction(there, ("audio",)) is None


def test_batches_keep_what_may_stay() -> None:
    both = {"image": torch.zeros(1), "text": torch.zeros(1), "text_mask": torch.zeros(1), "label": torch.zeros(1)}
    deaf = {"audio": torch.zeros(1), "label": torch.zeros(1)}
    found = list(narrowed([both, deaf], ("text", "audio")))
    assert [set(batch) for batch in found] == [{"text", "text_mask", "label"}, {"audio", "label"}]
    assert [set(batch) for batch in narrowed([both, deaf], ("image", "text"), complete=True)] == [set(both)]
    assert not list(narrowed([deaf], ("image", "audio"), complete=True))


# Values ----------------------------------------------------------------------------------------------------------


def test_each_cell_is_the_accuracy_on_examples_with_the_set(folder: Path) -> None:
    found = summary(folder)["modality_matrix"]
    assert set(found["personal"]) == set(found["global_seen"]) == set(OWNED)
    assert {client: set(sets) for client, sets in found["personal"].items()} == {
        "both": {"image", "text", "image+text"}, "ears": {"text", "audio", "text+audio"}, "sensor": {"series"},
    }  # fmt: skip
    setup, run_data = prepare(load_recipe(folder / "recipe.toml"))
    rows = run_data.clients["both"].tables[2]
    for view, name in (("personal", "personal/both"), ("global_seen", "global")):
        model = Sums()
        tensors = load_file(folder / "models" / name / "trained.safetensors")
        model.load_state_dict({**model.state_dict(), **tensors})
        for shown, value in found[view]["both"].items():
            names = shown.split("+")
            right = count = 0
            for batch in rows.batches(100):
                if all(name in batch for name in names):
                    kept = {key: batch[key] for key in (*names, "label", "index")}
                    right += int((model(kept).logits.argmax(1) == batch["label"]).sum())
                    count += len(batch["label"])
            assert value == pytest.approx(right / count)
            assert found["examples"]["both"][shown] == count
    assert 0 < found["examples"]["both"]["text"] < found["examples"]["both"]["image"] == 20
    assert setup.population.info(0).modalities == ("image", "text")


def test_other_clients_examples_are_shown_in_part_or_not_at_all(folder: Path) -> None:
    found = summary(folder)
    assert {owner: set(places) for owner, places in found["matrix"].items()} == {
        "both": {"both", "ears"}, "ears": {"both", "ears"}, "sensor": {"sensor"},
    }  # fmt: skip
    assert any("shown the modalities that its owner has" in note for note in found["notes"])
    model = Sums()
    tensors = load_file(folder / "models/personal/both/trained.safetensors")
    model.load_state_dict({**model.state_dict(), **tensors})
    _, run_data = prepare(load_recipe(folder / "recipe.toml"))
    right, count = 0, 0
    for batch in run_data.clients["ears"].tables[2].batches(100):
        if "text" in batch:
            right += int((model({"text": batch["text"]}).logits.argmax(1) == batch["label"]).sum())
            count += len(batch["label"])
    assert found["matrix"]["both"]["ears"] == pytest.approx(right / count)


def test_a_model_for_everybody_has_no_rows_of_clients_own(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path, "sums", "gaps"), ["algorithm.name=central", *QUICK])
    run(recipe, tmp_path / "out")
    found = summary(tmp_path / "out")["modality_matrix"]
    assert set(found) == {"global_seen", "global_unseen", "examples"}
    assert len(found["global_unseen"]["all"]) == 2**4 - 1
    assert "parameters_of" not in summary(tmp_path / "out")


def test_it_can_be_left_out(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path, "sums", "gaps"), ["run.modality_matrix=false", *QUICK])
    run(recipe, tmp_path / "out")
    assert "modality_matrix" not in summary(tmp_path / "out")
    assert not (tmp_path / "out/modalities.csv").exists()
    assert modality_matrix.table(load(tmp_path / "out")) is None
    assert modality_matrix.drawing(load(tmp_path / "out")) is None


# Where it is shown -----------------------------------------------------------------------------------------------


def test_cells_without_a_value_are_empty_and_never_0(folder: Path) -> None:
    modality_matrix.write(folder)
    rows = {
        (r["model"], r["examples of"]): r for r in csv.DictReader((folder / "modalities.csv").read_text().splitlines())
    }
    assert set(rows) == {(m, c) for m in ("own", "global") for c in OWNED} | {("global", "all")}
    sensor = rows["own", "sensor"]
    assert {key for key, value in sensor.items() if key.endswith("(%)") and value} == {"series (%)"}
    value = summary(folder)["modality_matrix"]["personal"]["both"]["image"]
    assert float(rows["own", "both"]["image (%)"]) == pytest.approx(100 * value)
    html = render(load(folder))
    start = html.index("With only some of the modalities</h2>")
    part = html[start : html.index("</section>", start)]
    assert "<td>global model, all</td>" in part
    assert part.count("<td>sensor</td>") == 1
    assert part.count('class="heat own"') == len(rows)


def test_studies_have_a_panel_per_method_and_means_over_seeds(folder: Path, tmp_path: Path) -> None:
    for method, seed, value in (("fedavg", 0, 0.5), ("fedavg", 1, 0.7), ("local", 0, 0.9)):
        place = tmp_path / method / f"seed-{seed}"
        place.mkdir(parents=True)
        content = summary(folder) | {"seed": seed, "algorithm": method, "label": method}
        content["modality_matrix"]["personal"]["both"]["text"] = value
        (place / "summary.json").write_text(json.dumps(content))
        (place / "recipe.toml").write_text((folder / "recipe.toml").read_text())
    runs = [{"method": m, "seed": s} for m, s in (("fedavg", 0), ("fedavg", 1), ("local", 0))]
    index = {"methods": ["fedavg", "local"], "labels": {"fedavg": "FedAvg", "local": "Local"}, "runs": runs}
    (tmp_path / "summary.json").write_text(json.dumps(index))
    write_tables(tmp_path)
    rows = list(csv.DictReader((tmp_path / "modalities.csv").read_text().splitlines()))
    own = next(r for r in rows if (r["model"], r["examples of"]) == ("own", "both"))
    assert float(own["text (%)"]) == pytest.approx(60.0)
    assert float(own["text sd (%)"]) == pytest.approx(100 * 0.02**0.5)
    assert len(rows) == 2 * 7
    assert "modalities.png" in [path.name for path in save_figures(tmp_path, tmp_path / "out")]
    svg = (tmp_path / "out/modalities.svg").read_text()
    assert ">60.0<" in svg
    assert ">90.0<" in svg


# Parameters ------------------------------------------------------------------------------------------------------


def test_parameters_are_counted_by_client_where_they_differ(folder: Path) -> None:
    found, model = summary(folder), Sums()
    sizes = {name: sum(p.numel() for p in model.embed[name].parameters()) for name in model.KEYS}
    head = sum(t.numel() for n, t in named_tensors(model).items() if n.startswith("head"))
    for client, owned in OWNED.items():
        counts = found["parameters_of"][client]
        assert counts["trained"] == counts["sent"] == head + sum(sizes[name] for name in owned)
    each = [counts["sent"] for counts in found["parameters_of"].values()]
    assert found["parameters"]["sent"] == round(sum(each) / 3)
    cost = cost_table(load(folder))
    assert cost is not None
    assert f"{min(each)} to {max(each)}" in [cell.text for cell in cost.rows[0]]


def test_a_report_says_that_a_model_travels_only_where_one_does(folder: Path, tmp_path: Path) -> None:
    assert "only model weights are exchanged" in render(load(folder))
    (tmp_path / "recipe.toml").write_text((folder / "recipe.toml").read_text())
    content = summary(folder) | {"bytes_total": 10, "parameters": {"sent": 0}, "public_place": "new"}
    (tmp_path / "summary.json").write_text(json.dumps(content))
    html = render(load(tmp_path))
    assert "common examples is exchanged, and nothing of a model" in html
    assert "only model tensors" not in html
    del content["public_place"]  # a few bytes say that a client is done, and nothing else
    (tmp_path / "summary.json").write_text(json.dumps(content))
    html = render(load(tmp_path))
    assert "every client trains alone" in html
    assert "common examples" not in html


def test_a_matrix_without_a_model_for_everybody_speaks_of_none(folder: Path, tmp_path: Path) -> None:
    assert "below the rule the global model" in modality_matrix.section(load(folder), Tabs())
    (tmp_path / "recipe.toml").write_text((folder / "recipe.toml").read_text())
    matrix = {"personal": summary(folder)["modality_matrix"]["personal"]}
    content = summary(folder) | {"global_model": "none", "modality_matrix": matrix}
    content["traits"]["has_global"] = False
    (tmp_path / "summary.json").write_text(json.dumps(content))
    assert "global" not in modality_matrix.section(load(tmp_path), Tabs())
