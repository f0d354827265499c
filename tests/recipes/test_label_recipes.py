"""The recipes of FedLGT's tables say what was published, and their remarks what the built-in data are."""

from typing import Any

import pytest

from confed.recipes.recipe import Recipe, load_recipe

ROOT = ["data.root=somewhere"]
# The released command: Adam 1e-4 without weight decay, batches of 16, 5 epochs, 50 rounds, clip 10.
LOCAL = {"optimizer": "adam", "epochs": 5, "batch_size": 16, "lr": 1e-4, "weight_decay": 0.0, "clip": 10.0}
DATA: dict[str, dict[str, Any]] = {
    "fedlgt_flair": {"name": "flair", "level": "coarse", "validation": 0.0, "max_train": None},
    "fedlgt_flair_fine": {"name": "flair", "level": "fine", "validation": 0.0, "max_train": None},
    "fedlgt_coco": {"name": "coco", "level": "category", "partition": "iid", "train": "train2014", "test": "val2014",
                    "unlabelled": False},
    "fedlgt_voc": {"name": "voc", "partition": "iid", "train": ("VOC2007:trainval",), "test": ("VOC2007:test",)},
}  # fmt: skip


def _plain(section: Any) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in section.items()}


@pytest.mark.parametrize("name", list(DATA))
def test_hyper_parameters_are_the_published_ones(name: str) -> None:
    recipe = load_recipe(name, ROOT)
    for row in {*recipe.methods, *recipe.table}:
        sections, known = recipe.method(row).sections, 0.0 if row == "fedavg" else 0.75
        expected = LOCAL | ({"epochs": 1} if row == "central" and "flair" in name else {})
        assert expected.items() <= sections["local"].items(), row
        assert sections["task"]["known"] == known, row
        assert sections["task"]["reduction"] == "sum", row
        assert sections["model"]["name"] == ("resnet_multilabel" if row == "fedavg" else "ctran"), row
        assert sections["model"]["pretrained"] == "microsoft/resnet-18", row
    assert DATA[name].items() <= _plain(recipe.sections["data"]).items()
    assert recipe.sections["data"]["image_size"] == 256
    assert (recipe.run.rounds, recipe.run.evaluate_every) == (50, 10)
    lgt = recipe.method("fedlgt").construct("algorithm")
    assert (lgt.tau, lgt.eps, lgt.preset, lgt.guidance) == (0.5, 0.02, "paper", True)
    assert lgt.server.plain
    assert recipe.method("fedprox").construct("algorithm").mu == 0.001
    model = recipe.method("fedlgt").sections["model"]
    assert (model["layers"], model["attention_heads"], model["dropout"]) == (3, 4, 0.1)
    assert not model["swap_states"]
    if name.startswith("fedlgt_flair"):
        assert (recipe.run.cohort, recipe.run.sampling) == (50, "size")
    else:  # equal shares, all of which take part
        assert recipe.sections["data"]["clients"] == 50
        assert recipe.run.cohort in (None, 0, 50)


def test_flairs_own_benchmark() -> None:
    # Values of pfl-research's baseline for FLAIR.
    recipe = load_recipe("flair_benchmark", ROOT)
    assert {"name": "flair", "level": "coarse", "max_train": 512}.items() <= recipe.sections["data"].items()
    local = {"optimizer": "sgd", "epochs": 2, "batch_size": 16, "lr": 0.01, "clip": 10.0}
    assert local.items() <= recipe.sections["local"].items()
    assert (recipe.run.rounds, recipe.run.cohort, recipe.run.sampling) == (5000, 200, "uniform")
    server = recipe.method("flair").construct("algorithm").server
    assert (server.optimizer, server.lr, server.tau) == ("adam", 0.1, 0.01)
    assert recipe.sections["task"]["reduction"] == "labels"
    norms = {row: recipe.method(row).sections["model"]["norm"] for row in recipe.table}
    assert norms == {"flair": "frozen", "scratch": "group", "fedavg": "frozen"}


ALL = [*DATA, "fedlgt_scenes", "fedlgt_ablation", "fedlgt_growing", "fedlgt_ucm", "fedlgt_coco_mini", "fedlgt_texts"]


def _is(recipe: Recipe, row: str) -> tuple[str, bool, bool]:
    """Method, whether labels are learned, and whether the global model guides."""
    single = recipe.method(row)
    algorithm, model = single.construct("algorithm"), single.sections["model"]
    learned = bool(model.get("learn_labels")) or not model.get("embeddings")
    name = single.sections["algorithm"]["name"]
    return name, learned, name == "fedlgt" and algorithm.guidance


@pytest.mark.parametrize("name", ALL)
def test_rows_are_what_their_labels_say(name: str) -> None:
    recipe = load_recipe(name, ROOT if name in DATA or name.endswith(("ucm", "mini")) else [])
    said = {
        "FedC-Tran": ("fedavg", True, False),
        "FedC-Tran + ULE": ("fedavg", False, False),
        "ULE": ("fedavg", False, False),
        "neither": ("fedavg", True, False),
        "FedC-Tran + CA-MLE": ("fedlgt", True, True),
        "CA-MLE": ("fedlgt", True, True),
        "FedLGT": ("fedlgt", False, True),
        "both (FedLGT)": ("fedlgt", False, True),
        "Central C-Tran": ("central", True, False),
    }
    rows = {*recipe.methods, *recipe.table}
    labels = {recipe.label(row): row for row in rows}
    assert len(labels) == len(rows)
    assert len(set(labels) & set(said)) >= 3
    for label, row in labels.items():
        if label in said:
            assert _is(recipe, row) == said[label], (row, label)


def test_the_ablation_changes_one_choice_at_a_time() -> None:
    recipe = load_recipe("fedlgt_ablation")
    base = recipe.method("fedlgt")
    other: dict[str, set[str]] = {}
    for row in {*recipe.table} - {"fedlgt"}:
        sections = recipe.method(row).sections
        other[row] = {
            f"{section}.{key}"
            for section in ("algorithm", "model", "task", "local", "data", "run")
            for key in {*sections[section], *base.sections[section]}
            if sections[section].get(key) != base.sections[section].get(key) and key in sections[section]
        }
    assert other == {
        "neither": {"algorithm.name", "model.learn_labels"},
        "ule": {"algorithm.name"},
        "camle": {"model.learn_labels"},
        "first_only": {"algorithm.first_sample_only"},
        "swapped": {"model.swap_states"},
        "code": {"algorithm.preset", "model.swap_states"},
        "uniform": {"run.sampling"},
        "code_uniform": {"algorithm.preset", "model.swap_states", "run.sampling"},
        "no_states": {"algorithm.name", "task.known"},
        "graph": {"model.graph"},
        "graph_alone": {"algorithm.guidance", "model.graph"},
        "graph_noisy": {"algorithm.graph_noise", "model.graph"},
    }
    scenes = load_recipe("fedlgt_scenes")
    for section in ("model", "task", "data", "local", "run"):
        assert base.sections[section] == scenes.method("fedlgt").sections[section]


def test_who_appears_later_draws_clip_art() -> None:
    recipe, scenes = load_recipe("fedlgt_growing"), load_recipe("fedlgt_scenes")
    assert set(recipe.run.joins.values()) == {8}
    for section in ("model", "task", "data", "local"):
        assert recipe.sections[section] == scenes.sections[section]
    assert recipe.run.keep_checkpoints == "joins"


@pytest.mark.parametrize(("name", "model"), [("fedlgt_flair", "ctran_mini"), ("fedlgt_scenes", "ctran")])
def test_rows_keep_their_text_embeddings_in_another_model(name: str, model: str) -> None:
    recipe = load_recipe(name, [*(ROOT if name in DATA else []), f"model.name={model}"])
    assert _is(recipe, "fedctran_ule") == ("fedavg", False, False)
    assert _is(recipe, "fedlgt") == ("fedlgt", False, True)
