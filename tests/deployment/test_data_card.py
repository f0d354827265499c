"""A server that holds no examples: its card, what runs from it, cards of several sites, and faulty ones."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import confed
from confed.datasets.card import Card, CardClient, merged, read_card
from confed.deployment.provision import card_of_recipe, merge_cards, with_card, write_card
from confed.deployment.server import common_ground
from confed.deployment.site import open_site
from confed.recipes.recipe import Recipe, load_recipe
from confed.report.report import write_report
from confed.results.folder import read_jsonl
from confed.runs.build import prepare
from confed.runs.run import run
from refusals import refuses

SITES = ("warm", "cold", "both")
BASE = (
    "model.name=vilt_tiny", "model.width=16", "model.layers=1", "local.epochs=1", "run.rounds=1", "run.workers=1",
    "run.gallery=0", "study.methods=[]", "study.table=[]", "algorithm.name=fedavg",
)  # fmt: skip
SQUARES = ("data.name=toy_federation:own_squares", *BASE)
SHADES = (
    "data.name=toy_federation:own_shades", "task.name=multilabel", "algorithm.name=fedavg", "local.epochs=1",
    "model.name=toy_federation:means", "run.rounds=1", "run.workers=1", "run.gallery=0", "study.methods=[]",
    "study.table=[]",
)  # fmt: skip


def recipe_of(*overrides: str, name: str = "fedvqa_scenes") -> Recipe:
    return load_recipe(name, overrides)


def card_at(folder: Path, recipe: Recipe, name: str = "card.json") -> Path:
    folder.mkdir(exist_ok=True)
    write_card(card_of_recipe(recipe), folder / name)
    return folder / name


def united(folder: Path, settings: Sequence[str]) -> Path:
    """The card of three sites, each of which wrote one from its own data."""
    files = [card_at(folder, recipe_of(*settings, f"data.only={name}"), f"{name}.json") for name in SITES]
    write_card(merge_cards(files), folder / "all.json")
    return folder / "all.json"


def led(recipe: Recipe, card: Path, root: Path, sites: Sequence[str], own: Callable[[str], dict[str, str]]) -> Path:
    """The run folder of a server on a card, whose sites have data of their own."""
    from flwr.app import Context, RecordDict

    from confed.deployment.flower_app import apps
    from confed.engines.flower.loopback import LoopbackGrid

    file = root / "recipe.toml"
    root.mkdir(exist_ok=True)
    file.write_text(recipe.to_toml())
    server, client = apps(file)
    configs: dict[int, dict[str, Any]] = {
        number: {"site": name, "private": str(root / name), **own(name)} for number, name in enumerate(sites)
    }
    grid = LoopbackGrid(dict.fromkeys(configs, client), configs)
    config = {"state": str(root / "state"), "sites": len(sites), "wait": 60.0, "card": str(card)}
    server(grid, Context(1, 1, {}, RecordDict(), config))
    return root / "state"


def same(state: Path, simulated: Path) -> dict[str, Any]:
    """The model and the books of a run on a card are the simulator's, but for places that the server does not hold."""
    model = Path("models/global/trained.safetensors")
    assert (state / model).read_bytes() == (simulated / model).read_bytes()
    lines = [read_jsonl(root / "metrics.jsonl") for root in (state, simulated)]
    for own, other in zip(*lines, strict=True):
        for line in (own, other):
            for key in ("unseen", "unseen_pooled"):
                line.pop(key, None)
        assert own == other
    summary, expected = (json.loads((root / "summary.json").read_text()) for root in (state, simulated))
    for key in ("global_seen", "bytes_up", "bytes_down", "errors", "parameters", "clients"):
        assert summary[key] == expected[key], key
    return summary


# The same numbers -------------------------------------------------------------------------------------------------


def test_sites_with_own_words_and_a_card_give_the_simulators_run(tmp_path: Path) -> None:
    recipe, card = recipe_of(*SQUARES), united(tmp_path / "cards", SQUARES)
    state = led(recipe, card, tmp_path / "fed", SITES, lambda name: {"data-only": name, "data-card": str(card)})
    run(recipe_of(*SQUARES, f"data.card={card}"), tmp_path / "simulated")
    summary = same(state, tmp_path / "simulated")
    assert summary["scenes"] == []
    assert summary["examples"] == {name: {"train": 8} for name in SITES}
    assert "not tried on unseen places, as their examples are not here: everything" in summary["notes"]
    assert "not tried on unseen places" in write_report(state).read_text()
    led_by = load_recipe(state / "recipe.toml").sections["data"]
    assert led_by == {"name": "card", "file": str(card), "digest": led_by["digest"]}
    again = led(recipe, card, tmp_path / "fed", SITES, lambda name: {"data-only": name, "data-card": str(card)})
    same(again, tmp_path / "simulated")
    # The run goes on with its card, and with no other.
    card.write_text(card.read_text().replace("{", "{ ", 1))
    refuses("expected the card that this run began with", prepare, load_recipe(state / "recipe.toml"))
    with pytest.raises(ValueError, match="a run of another recipe"):
        led(recipe, card, tmp_path / "fed", SITES, lambda name: {"data-only": name, "data-card": str(card)})


def test_a_card_of_all_data_needs_no_card_at_the_sites(tmp_path: Path) -> None:
    recipe = recipe_of(*SQUARES)
    state = led(recipe, card_at(tmp_path / "cards", recipe), tmp_path / "fed", SITES, lambda _: {})
    run(recipe, tmp_path / "simulated")
    same(state, tmp_path / "simulated")


def test_labels_are_united_and_renumbered(tmp_path: Path) -> None:
    recipe, card = recipe_of(*SHADES), united(tmp_path / "cards", SHADES)
    assert read_card(card).answers == ("orange", "red", "blue", "cyan")
    state = led(recipe, card, tmp_path / "fed", SITES, lambda name: {"data-only": name, "data-card": str(card)})
    simulated = recipe_of(*SHADES, f"data.card={card}")
    run(simulated, tmp_path / "simulated")
    same(state, tmp_path / "simulated")
    # Independently: each picture has the labels that it had.
    before, after = (prepare(r)[1].dataset for r in (recipe, simulated))
    for name in SITES:
        rows = [split.clients[name].train for split in (before, after)]
        told = [[e.labels.table.labels_of(row) for row in e.image_index] for e in rows]
        assert [set(labels) for labels in told[0]] == [set(labels) for labels in told[1]]
        assert all((np.diff(rows[1].labels.table.present.values[a:b]) > 0).all() for a, b in zip(
            rows[1].labels.table.present.offsets, rows[1].labels.table.present.offsets[1:], strict=False
        ))  # fmt: skip


def test_clients_with_other_modalities_run_from_a_card(tmp_path: Path) -> None:
    settings = ("data.train=32", "data.validation=8", "data.test=8", "model.width=16", "model.layers=1")
    recipe = recipe_of(
        *settings, "run.rounds=1", "run.workers=1", "run.gallery=0", "study.methods=[]", "study.table=[]",
        "algorithm.name=fedavg", "run.modality_matrix=false", name="modalities",
    )  # fmt: skip
    card = card_at(tmp_path / "cards", recipe)
    owned = {name: own.modalities for name, own in read_card(card).clients.items()}
    assert len(set(owned.values())) > 2
    state = led(recipe, card, tmp_path / "fed", list(owned), lambda _: {})
    run(recipe, tmp_path / "simulated")
    same(state, tmp_path / "simulated")


def test_fedmd_scores_as_many_public_examples_as_the_card_says(tmp_path: Path) -> None:
    settings = (*SQUARES, "algorithm.name=fedmd", "algorithm.public=everything", "algorithm.items=3")
    recipe = recipe_of(*settings)
    card = card_at(tmp_path / "cards", recipe)
    setups = [prepare(r)[0].algorithm for r in (recipe, with_card(recipe, card))]
    assert [algorithm.scored for algorithm in setups] == [(4, 4), (4, 4)]
    root = led(recipe, card, tmp_path / "fed", SITES, lambda _: {})
    run(recipe, tmp_path / "simulated")
    lines, expected = (read_jsonl(folder / "metrics.jsonl") for folder in (root, tmp_path / "simulated"))
    assert [line for line in lines if line["event"] == "round"] == [e for e in expected if e["event"] == "round"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("feddat_scenes", ("data.train=24", "data.validation=8", "data.test=8")),
        ("captions_scenes", ()),
        ("bicsl_scenes", ("data.train=24", "data.validation=8", "data.test=8")),
        ("fedvqa_scenes", ("data.train=24", "data.validation=8", "data.test=8", "data.missing.image=0.5")),
    ],
)
def test_a_card_gives_the_common_ground_of_the_data(name: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    recipe = load_recipe(name, settings)
    recipe = recipe.method(recipe.methods[0]) if recipe.methods else recipe
    card = card_at(tmp_path, recipe)
    (setup, data), (other, none) = prepare(recipe), prepare(with_card(recipe, card))
    assert common_ground(recipe, data) == common_ground(recipe, none)
    assert data.shapes == none.shapes
    infos = [[(i.id, i.modalities, i.head) for i in map(s.population.info, range(len(s.population)))]
             for s in (setup, other)]  # fmt: skip
    assert infos[0] == infos[1]
    shapes = [{name: t.shape for name, t in s.model().state_dict().items()} for s in (setup, other)]
    assert shapes[0] == shapes[1]
    # A card of a card is the card.
    assert replace(card_of_recipe(with_card(recipe, card)), data=recipe.sections["data"]["name"]) == read_card(card)


def test_a_site_with_another_card_or_none_is_on_other_ground(tmp_path: Path) -> None:
    card = united(tmp_path, SQUARES)
    content = read_card(card)
    # As many words in another order, of which nothing in the model's shapes tells.
    write_card(replace(content, words=tuple(reversed(content.words))), tmp_path / "turned.json")
    own = [f"data.card={card}"], [f"data.card={tmp_path / 'turned.json'}"], []
    recipes = [with_card(recipe_of(*SQUARES), card), *(recipe_of(*SQUARES, "data.only=warm", *more) for more in own)]
    grounds = [common_ground(recipe, prepare(recipe)[1]) for recipe in recipes]
    assert [ground == grounds[0] for ground in grounds] == [True, True, False, False]


def test_a_card_holds_no_examples(tmp_path: Path) -> None:
    card = card_at(tmp_path, recipe_of(*SQUARES))
    content = json.loads(card.read_text())
    assert content["clients"]["warm"] == {"answers": [], "task": "", "modalities": []}
    assert content["places"] == {"everything": 4}
    assert content["picture"] == [64, 64]
    assert not any(text in card.read_text() for text in ("warm/train", "what colour has the"))


def test_a_model_that_was_led_without_data_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of(*SQUARES)
    state = led(recipe, card_at(tmp_path / "cards", recipe), tmp_path / "fed", SITES, lambda _: {})
    assert confed("export", str(state), str(tmp_path / "exported")) == 0, capsys.readouterr().err
    assert (tmp_path / "exported").is_dir()


# What is refused --------------------------------------------------------------------------------------------------


def test_cards_that_contradict_each_other_are_not_united(tmp_path: Path) -> None:
    card = card_of_recipe(recipe_of(*SQUARES))
    refuses("at least two cards, got 1", merged, [card])
    for changes, says in (
        ({"picture": (8, 8)}, r"agree on 'picture', got \(64, 64\), \(8, 8\)"),
        ({"data": "scenes"}, "agree on 'data'"),
        ({"places": {"everything": 5}}, "the same of 'everything' in 'places'"),
        ({"clients": {"far": CardClient(modalities=("audio",))}}, "which modalities their clients have"),
    ):
        refuses(says, merged, [card, replace(card, **changes)])
    assert merged([card, replace(card, picture=None)]).picture == (64, 64)


@pytest.mark.parametrize(
    ("changes", "overrides", "says"),
    [
        ({"answers": ("red", "orange", "blue")}, (), "no answer 'cyan'"),
        ({"words": ("which", "colour", "is", "this")}, (), "no word"),
        ({"types": ("shape",)}, (), "no question type 'colour'"),
        ({"picture": (8, 8)}, (), r"as the card says, \(8, 8\), and are \(64, 64\) here"),
        ({"clients": {"warm": CardClient()}}, (), "the card has no client"),
        ({"clients": dict.fromkeys(SITES, CardClient(modalities=("image",)))}, (), r"and are 'image\+text' here"),
        ({"clients": dict.fromkeys(SITES, CardClient(("red",)))}, (), "answers of its own must be as the card says"),
        ({"clients": dict.fromkeys(SITES, CardClient(task="nlvr2"))}, (), "task must be as the card says, 'nlvr2'"),
        ({"labels": True}, (), "labels in place of answers must be as the card says, True"),
        ({}, ("data.card=",), "data.card must name a card's file"),
        ({}, ("data.card=nowhere.json",), "nowhere.json does not exist"),
    ],
)
def test_data_that_a_card_does_not_cover_are_refused(
    changes: dict[str, Any], overrides: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    write_card(replace(card_of_recipe(recipe_of(*SQUARES)), **changes), tmp_path / "card.json")
    with pytest.raises(ValueError, match=says):
        prepare(recipe_of(*SQUARES, *(overrides or (f"data.card={tmp_path / 'card.json'}",))))


def test_nobody_trains_on_a_card(tmp_path: Path) -> None:
    recipe = recipe_of(*SQUARES)
    card = card_at(tmp_path, recipe)
    refuses("there are no examples to run on", run, with_card(recipe, card), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    own = recipe_of(*SQUARES, "data.only=warm", f"data.card={card}")
    refuses("no training examples of client 'cold' here", open_site, own, "cold", tmp_path / "private")


def test_labels_that_a_card_does_not_cover_are_refused(tmp_path: Path) -> None:
    card = card_of_recipe(recipe_of(*SHADES))
    for number, (changes, says) in enumerate((
        ({"answers": ("red", "blue")}, "no label 'cyan'"),
        ({"types": ("warm", "cold")}, "no kind of examples 'both'"),
        ({"picture": None, "texts": True}, "texts and pictures must be as the card says"),
        ({"picture": (9, 9)}, r"as the card says, \(9, 9\), and are \(8, 8\) here"),
    )):  # fmt: skip
        write_card(replace(card, **changes), tmp_path / f"{number}.json")
        refuses(says, prepare, recipe_of(*SHADES, f"data.card={tmp_path / f'{number}.json'}"))


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda content: {name: value for name, value in content.items() if name != key}


def one_client(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: {**content, "clients": {"a": {"answers": [], "task": "", "modalities": [], **values}}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("words"), "the card lacks words"),
        (without("confed_card"), "no key 'confed_card'"),
        (lambda c: {**c, "confed_card": 2}, "a card of format 1, .* got 2"),
        (lambda c: {**c, "more": 1}, "unknown key 'more'"),
        (lambda c: {**c, "answers": "red"}, "answers must be of type list, got 'red'"),
        (lambda c: {**c, "answers": ["red", "red"]}, "answers must have each entry once"),
        (lambda c: {**c, "clients": {}}, "at least one client"),
        (lambda c: {**c, "clients": {"a": {}}}, "clients.a lacks answers, task, modalities"),
        (one_client(answers=["x"]), "'x' is none of"),
        (one_client(modalities=["smell"]), "a modality of .* must be one of .*, got 'smell'"),
        (lambda c: {**c, "places": {"far": -1}}, "none negative"),
        (lambda c: {**c, "places": {"far": True}}, "places.far must be of type int, got True"),
        (lambda c: {**c, "labels": True, "picture": None}, "'picture' or 'texts' must say so"),
        (lambda c: {**c, "picture": [64]}, "picture must be two whole numbers from 1 to 65536, or null"),
        (lambda c: [c], "no key 'confed_card'"),
    ],
)
def test_a_faulty_card_is_named(change: Callable[[dict[str, Any]], Any], says: str, tmp_path: Path) -> None:
    file = card_at(tmp_path, recipe_of(*SQUARES))
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(ValueError, match=says) as raised:
        with_card(recipe_of(*SQUARES), file)
    assert str(file) in str(raised.value)


def failed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert confed(*arguments) == 2
    return " ".join(capsys.readouterr().err.split())


def test_damaged_files_and_cards_of_other_recipes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = card_at(tmp_path, recipe_of(*SQUARES))
    lead = ["server", "fedvqa_scenes", "--engine", "flare", "--card", str(file)]
    assert "is a card of the data 'toy_federation:own_squares', and the recipe's are 'scenes'" in failed(lead, capsys)
    file.write_text(file.read_text()[:-20])
    assert "expected a card, as `confed federation card` writes it, got" in failed(lead, capsys)
    assert "does not exist" in failed([*lead[:-1], str(tmp_path / "none.json")], capsys)


def test_cards_are_written_and_united_at_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def done(*arguments: str) -> dict[str, Any]:
        assert confed("federation", "card", *arguments, "--json") == 0
        return json.loads(capsys.readouterr().out)

    files = [str(tmp_path / f"{name}.json") for name in SITES]
    for name, file in zip(SITES, files, strict=True):
        found = done("fedvqa_scenes", *SQUARES, f"data.only={name}", "--out", file)
        assert (found["clients"], found["answers"]) == (1, 2)
    found = done("--merge", *files, "--out", str(tmp_path / "all.json"))
    assert {key: found[key] for key in ("clients", "answers", "types", "unseen places")} == {
        "clients": 3, "answers": 4, "types": 1, "unseen places": 1,
    }  # fmt: skip
    everything: Card = read_card(tmp_path / "all.json")
    assert everything.answers == ("red", "orange", "blue", "cyan")
    # No card is overwritten by another one; the same once more does no harm.
    done("--merge", *files, "--out", str(tmp_path / "all.json"))
    assert "is there already" in failed(["federation", "card", "--merge", *files[:2], "--out", files[2]], capsys)
