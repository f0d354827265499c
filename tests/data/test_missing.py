"""Examples that lack modalities: what is lost, batches of one set each, stand-ins, whole runs."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from confed.data.encode import encode
from confed.data.examples import Examples, FederatedDataset, TableData, presence
from confed.data.imputation import drop_modalities, impute, missing_of
from confed.data.modalities import check_ownership, in_turns, modalities_of
from confed.data.modality_names import set_names
from confed.data.table import concatenate_tables
from confed.federation.local import Local
from confed.federation.protocols import Batch
from confed.federation.specs import model_spec
from confed.federation.train import epoch_steps
from confed.models.tokenizer import WordTokenizer
from confed.recipes.recipe import load_recipe
from confed.registry import models
from confed.runs.build import prepare
from confed.runs.encode import load_run_data
from confed.runs.run import run
from modal_examples import OWNED, ROLES, examples, gaps, plain, recipe_file, table
from refusals import refuses


def keys(batch: Batch) -> set[str]:
    return {name for name in batch if name not in ("label", "type", "index")}


# What an example has ----------------------------------------------------------------------------------------


def test_sets_are_written_in_one_order_whatever_is_there() -> None:
    own = examples("x", 2, ("series", "text", "audio"))
    assert set_names(presence(own)) == ["text+audio+series"] * 2
    assert set_names(presence(plain(2).clients["one"].train)) == ["image+text"] * 2


def test_clients_own_what_the_dataset_or_their_examples_say() -> None:
    assert modalities_of(gaps()) == OWNED
    unsaid = replace(gaps(), modalities={})
    assert modalities_of(unsaid) == dict.fromkeys(OWNED, ("image", "text", "audio", "series"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"present": {"smell": np.ones(4, bool)}}, "a modality of present must be one of .*, got 'smell'"),
        ({"present": {"audio": np.ones(4, bool)}}, "'x/0' is said to have audio, of which there is none"),
        ({"present": {"text": np.ones(3, bool)}}, r"present\['text'\] must be bool of shape \(4,\)"),
        ({"present": {"text": np.zeros(4, bool), "image": np.arange(4) > 1}}, r"'x/0' has none of .* \(2 such rows\)"),
        ({"sound_index": np.arange(4)}, "sound_index must be given with its table"),
        ({"present": None, "questions": ["dark", " ", "dark", "dark"]}, "the question of example 'x/1' is empty"),
    ],
)
def test_faulty_examples_are_named(changed: dict[str, Any], message: str) -> None:
    refuses(message, replace, examples("x", 4, ("image", "text")), **changed)


def test_a_sound_index_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sound_index must lie in \[0, 4\), got 1 to 4"):
        replace(examples("x", 4, ("audio",)), sound_index=np.arange(1, 5))


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        ({**OWNED, "both": ("image", "text", "audio")}, "client 'both' declares audio and has no training example"),
        ({**OWNED, "ears": ("audio",)}, "client 'ears' has examples with text, which it does not declare"),
        ({**OWNED, "sensor": ("smell",)}, "a modality of client 'sensor' must be one of .*, got 'smell'"),
        ({"both": ("image", "text")}, "nothing is said of 'ears'"),
        ({**OWNED, "nobody": ("image",)}, "there is no client 'nobody'"),
    ],
)
def test_ownership_that_does_not_fit_is_refused(owned: dict[str, tuple[str, ...]], message: str) -> None:
    refuses(message, check_ownership, replace(gaps(), modalities=owned))


# Losing -----------------------------------------------------------------------------------------------------


def test_as_many_are_lost_as_asked_and_nobody_loses_the_last() -> None:
    missing = missing_of({"image": 0.6, "text": 0.6})
    left = presence(drop_modalities(plain(3000), missing, 0).clients["one"].train)
    assert left[:, :2].any(axis=1).all()
    # Of both lost (0.36) one is spared, each as often.
    assert abs((~left[:, 0]).mean() - (0.6 - 0.18)) < 0.03
    assert abs((~left[:, 1]).mean() - (0.6 - 0.18)) < 0.03
    assert presence(drop_modalities(gaps(), missing_of({"audio": 0.9}), 0).clients["sensor"].train)[:, 3].all()


def test_what_is_lost_is_a_function_of_seed_client_role_and_row() -> None:
    missing = missing_of({"image": 0.5, "when": "both"})
    large, again, other = (drop_modalities(plain(n), missing, seed) for n, seed in ((300, 3), (300, 3), (300, 4)))
    small = drop_modalities(plain(100), missing, 3)

    def gone(dataset: FederatedDataset, client: str = "one", role: str = "train") -> list[bool]:
        return presence(getattr(dataset.clients[client], role))[:, 0].tolist()

    assert gone(large) == gone(again)
    assert gone(large)[:100] == gone(small)
    assert gone(large) != gone(other)
    assert gone(large) != gone(large, "two")
    assert gone(large) != gone(large, role="test")


@pytest.mark.parametrize(
    ("when", "roles"), [("train", {"train"}), ("test", {"validation", "test", "unseen"}), ("both", {*ROLES, "unseen"})]
)
def test_modalities_are_dropped_from_the_roles_asked_for(when: str, roles: set[str]) -> None:
    dataset = drop_modalities(plain(), missing_of({"image": 0.5, "when": when}), 0)
    parts = {role: getattr(dataset.clients["two"], role) for role in ROLES} | {"unseen": dataset.unseen["abroad"]}
    assert {role for role, part in parts.items() if not presence(part)[:, 0].all()} == roles
    assert "image of" in dataset.facts["missing"]


def test_a_clients_own_table_replaces_the_rates_for_all() -> None:
    dataset = drop_modalities(plain(), missing_of({"image": 0.5, "two": {"text": 0.5}}), 0)
    one, two = (presence(dataset.clients[name].train) for name in ("one", "two"))
    assert not one[:, 0].all()
    assert one[:, 1].all()
    assert two[:, 0].all()
    assert not two[:, 1].all()
    asked = dataset.clients["two"].train.questions
    assert [bool(text) for text in asked] == two[:, 1].tolist()


def test_types_that_name_the_set_follow_it_and_others_stay() -> None:
    own = drop_modalities(gaps(), missing_of({"text": 0.5}), 0).clients["both"].train
    assert own.types == set_names(presence(own))
    assert set(own.types) == {"image", "image+text"}
    assert set(drop_modalities(plain(), missing_of({"text": 0.5}), 0).clients["one"].train.types) == {"kind"}


def test_a_rate_of_zero_changes_nothing() -> None:
    dataset = plain()
    assert drop_modalities(dataset, missing_of({"image": 0, "when": "both"}), 0) is dataset


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"image": 1.0}, r"data.missing.image must be a rate in \[0, 1\), got 1.0"),
        ({"image": -0.1}, r"data.missing.image must be a rate in \[0, 1\), got -0.1"),
        ({"image": True}, r"data.missing.image must be a rate in \[0, 1\), got True"),
        ({"smell": 0.2}, r"unknown key data.missing.smell=0.2; valid keys: image, text, audio, series, when"),
        ({"one": {"fill": "mean"}}, r"unknown key data.missing.one.fill='mean'"),
        ({"image": 0.1, "when": "never"}, "data.missing.when must be one of train, test, both, got 'never'"),
        ({"fill": "noise"}, "data.missing.fill must be one of zero, mean, got 'noise'"),
        (0.3, "data.missing must be a section"),
    ],
)
def test_faulty_sections_are_named_when_the_recipe_is_read(section: Any, message: str) -> None:
    refuses(message, missing_of, section)
    given = json.dumps(section).replace(":", " =").replace('"one"', "one")
    refuses(message, load_recipe, "fedvqa_scenes", [f"data.missing={given}"])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"nobody": {"text": 0.2}}, "a client of data.missing must be one of both, ears, sensor, got 'nobody'"),
        ({"ears": {"image": 0.2}}, "data.missing.ears.image: the client owns text, audio only"),
    ],
)
def test_what_does_not_fit_the_data_is_refused(section: dict[str, Any], message: str) -> None:
    refuses(message, drop_modalities, gaps(), missing_of(section), 0)


def test_a_modality_that_nobody_owns_cannot_be_lost() -> None:
    with pytest.raises(ValueError, match=r"data.missing.audio: no client of 'plain' owns audio"):
        drop_modalities(plain(), missing_of({"audio": 0.2}), 0)


def test_the_recipe_keeps_the_section_and_reads_it_again(tmp_path: Path) -> None:
    recipe = load_recipe("fedvqa_scenes", ["data.missing={image=0.3}", "data.missing.when=both"])
    assert recipe.sections["data"]["missing"] == {"image": 0.3, "when": "both"}
    (tmp_path / "again.toml").write_text(recipe.to_toml())
    assert load_recipe(tmp_path / "again.toml").sections["data"] == recipe.sections["data"]
    assert "missing" not in load_recipe("fedvqa_scenes").sections["data"]


def test_who_loses_all_of_a_modality_owns_it_no_longer() -> None:
    # Of twenty examples with pictures none is left at a rate this close to one.
    with pytest.warns(UserWarning, match="leaves client 'both' no training example with image: .* has text only"):
        less = drop_modalities(gaps(), missing_of({"both": {"image": 0.999999}}), 0)
    assert modalities_of(less) == {**OWNED, "both": ("text",)}
    check_ownership(less)
    for role in ROLES:
        assert set_names(presence(getattr(less.clients["both"], role))) == ["text"] * 20
    # Where the data say nothing of who owns what, they do so now.
    with pytest.warns(UserWarning, match="client 'one'"):
        assert modalities_of(drop_modalities(plain(20), missing_of({"one": {"text": 0.999999}}), 0)) == {
            "one": ("image",), "two": ("image", "text"),
        }  # fmt: skip


def test_a_client_whose_tests_would_have_nothing_left_is_refused() -> None:
    split = gaps().clients["both"]
    bare = replace(split.test, present={"text": np.zeros(20, dtype=bool)})
    dataset = replace(gaps(), clients={**gaps().clients, "both": replace(split, test=bare)})
    section = missing_of({"both": {"image": 0.999999}})
    with (
        pytest.warns(UserWarning, match="no training example with image"),
        pytest.raises(ValueError, match=r"'both' .* has test examples with nothing else"),
    ):
        drop_modalities(dataset, section, 0)


def test_stand_ins_for_a_model_that_reads_gaps_are_refused(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, "sums", "plain")
    with pytest.raises(ValueError, match=r"data\.missing\.fill must be left out for the model 'modal_examples:sums'"):
        prepare(load_recipe(path, ['data.missing={ image = 0.3, fill = "mean" }']))


# Batches ----------------------------------------------------------------------------------------------------


def mixed(size: int = 200, owned: Sequence[str] = ("image", "text", "audio")) -> Examples:
    rng = np.random.default_rng(1)
    present = {name: rng.random(size) < 0.6 for name in owned}
    present[owned[0]] |= ~np.any(list(present.values()), axis=0)
    own = examples("mixed", size, owned)
    asked = [text if there else "" for text, there in zip(own.questions, present["text"], strict=True)]
    return replace(own, questions=asked, present=present)


def test_a_batch_has_the_keys_of_its_set_and_no_others() -> None:
    batch = table(examples("x", 4, ("text", "series"))).batch(torch.tensor([2, 0]))
    assert keys(batch) == {"text", "text_mask", "series", "series_length"}
    assert batch["series"].shape == (2, 5, 1)
    assert batch["series_length"].tolist() == [5, 3]
    assert batch["label"].tolist() == [0, 0]
    assert batch["index"].tolist() == [2, 0]
    assert keys(table(examples("x", 4, ("image", "audio"))).batch(torch.tensor([1]))) == {
        *("image", "audio", "audio_length")
    }


def test_every_batch_is_of_one_set_and_holds_examples_once() -> None:
    own = mixed()
    data = TableData(*[table(own)] * 3)
    names = np.array(set_names(presence(own)))
    for batches in (data.train(16, torch.Generator().manual_seed(1)), data.test(50)):
        seen: list[int] = []
        for batch in batches:
            rows = batch["index"].tolist()
            (kind,) = set(names[rows].tolist())
            assert {name for name in ("image", "text", "audio") if name in batch} == set(kind.split("+"))
            seen += rows
        assert sorted(seen) == list(range(200))


def test_the_generator_orders_batches_and_mixes_sets() -> None:
    data = TableData(*[table(mixed())] * 3)

    def order(seed: int) -> list[tuple[list[int], frozenset[str]]]:
        batches = data.train(8, torch.Generator().manual_seed(seed))
        return [(batch["index"].tolist(), frozenset(keys(batch))) for batch in batches]

    assert order(1) == order(1)
    assert order(1) != order(2)
    kinds = [kind for _, kind in order(1)]
    assert sum(a != b for a, b in itertools.pairwise(kinds)) > len(set(kinds))


def test_evaluation_keeps_the_order_and_begins_with_all_sets() -> None:
    dataset = plain(300)
    dataset = in_turns(drop_modalities(dataset, missing_of({"image": 0.5, "when": "both"}), 0))
    test = dataset.clients["one"].test
    data = TableData(*[table(test)] * 3)
    rows = [row for batch in data.test(250) for row in batch["index"].tolist()]
    assert rows == list(range(300))
    share = [presence(test)[:n, 0].mean() for n in (100, 300)]
    assert abs(share[0] - share[1]) < 0.2
    assert sorted(test.names) == sorted(plain(300).clients["one"].test.names)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_steps_are_the_batches_that_there_are(size: int) -> None:
    data = TableData(*[table(mixed(61))] * 3)
    batches = [len(batch["index"]) for batch in data.train(size, torch.Generator())]
    assert data.steps(size) == len(batches)
    assert data.steps(size, 2) == sum(n > 1 for n in batches)
    one = examples("x", 61, ("image", "text"))
    whole = TableData(*[encode(one, WordTokenizer(["dark"]), ("no", "yes"), ("image+text",))] * 3)
    assert whole.steps(size) == -(-61 // size)


def test_rows_of_several_sets_make_no_batch() -> None:
    refuses("must have the same modalities", table(mixed()).batch, torch.arange(50))


def test_groups_hold_all_rows() -> None:
    own = table(mixed())
    groups = own.groups(torch.arange(40))
    assert sorted(row for group in groups for row in group.tolist()) == list(range(40))
    assert all(own.batch(group) for group in groups)


def test_taking_and_pooling_keep_what_each_example_has() -> None:
    parts = [table(mixed()).take(30), *(table(split.train) for split in gaps(6).clients.values())]
    pooled = concatenate_tables(parts)
    assert len(pooled) == 30 + 3 * 6
    row = 0
    for part in parts:
        for own in range(len(part)):
            one, other = part.batch(torch.tensor([own])), pooled.batch(torch.tensor([row]))
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one if name not in ("index", "type"))
            row += 1


def test_recordings_of_two_rates_are_not_pooled() -> None:
    own = examples("x", 4, ("audio",))
    assert own.sounds is not None
    with pytest.raises(ValueError, match="sample rates must agree to be put together, got 8000, 16000"):
        concatenate_tables([table(own), table(replace(own, sounds=replace(own.sounds, rate=16000)))])


# Stand-ins --------------------------------------------------------------------------------------------------


def test_a_missing_picture_is_black_or_the_clients_mean() -> None:
    dataset = drop_modalities(plain(40), missing_of({"image": 0.5, "when": "both"}), 0)
    for fill in ("zero", "mean"):
        complete = impute(dataset, fill)
        for name, split in complete.clients.items():
            there = presence(split.train)[:, 0]
            mean = np.rint(dataset.clients[name].train.images[there].mean(axis=0))
            for role in ROLES:
                own: Examples = getattr(split, role)
                shown = own.images[own.image_index]
                gone = ~presence(own)[:, 0]
                assert gone.any()
                assert (shown[gone] == (0 if fill == "zero" else mean)).all()
                assert (shown[~gone] == getattr(dataset.clients[name], role).images[~gone]).all()


def test_a_shared_table_gets_one_stand_in_per_client() -> None:
    class Elsewhere:
        dtype, ndim, shape = np.dtype(np.uint8), 4, (40, 8, 8, 3)

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: Any) -> np.ndarray:
            return np.broadcast_to(np.asarray(index, np.uint8)[..., None, None, None], (*np.shape(index), 8, 8, 3))

    stored = Elsewhere()
    dataset = drop_modalities(plain(40), missing_of({"image": 0.5}), 0)
    clients = {
        name: replace(split, train=replace(split.train, images=stored), test=replace(split.test, images=stored))
        for name, split in dataset.clients.items()
    }
    complete = impute(replace(dataset, clients=clients), "mean")
    one, two = (split.train for split in complete.clients.values())
    assert one.images is two.images is complete.clients["one"].test.images
    assert one.images.shape == (42, 8, 8, 3)
    for own in (one, two):
        there = presence(own)[:, 0]
        level = round(float(np.arange(40)[there].mean()))
        wanted = np.where(there, np.arange(40), level)
        assert own.images[own.image_index][:, 0, 0, 0].tolist() == wanted.tolist()
        assert own.images[int(own.image_index[0])][0, 0, 0] == wanted[0]


def test_clients_without_pictures_get_black_ones() -> None:
    complete = impute(gaps(), "mean")
    ears = complete.clients["ears"].train
    assert not ears.images[ears.image_index].any()
    assert ears.images.shape[1:] == (8, 8, 3)
    blind = gaps()
    blind = replace(blind, clients={"ears": blind.clients["ears"]}, unseen={}, modalities={"ears": ("text", "audio")})
    refuses("those that 'gaps' lacks cannot be filled in", impute, blind, "zero")


# Runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "data", "missing"),
    [
        ("sums", "gaps", '{ text = 0.4, when = "both" }'),
        ("sums", "plain", '{ image = 0.4, text = 0.3, when = "both" }'),
        ("both", "plain", '{ image = 0.4, text = 0.3, when = "both", fill = "mean" }'),
    ],
)
def test_whole_runs_with_missing_modalities_finish(tmp_path: Path, model: str, data: str, missing: str) -> None:
    recipe = load_recipe(recipe_file(tmp_path, model, data), [f"data.missing={missing}"])
    run(recipe, tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert set(summary["clients"]) == set(OWNED if data == "gaps" else ("one", "two"))
    assert (tmp_path / "out" / "gallery.json").is_file()


def test_clients_have_their_modalities_and_the_pool_has_all(tmp_path: Path) -> None:
    setup, materials = prepare(load_recipe(recipe_file(tmp_path, "sums", "gaps")))
    infos = [setup.population.info(number) for number in range(3)]
    assert {info.id: info.modalities for info in infos} == OWNED
    assert materials.types == ("image+text", "image+text+audio+series", "series", "text+audio")
    central, _ = prepare(load_recipe(recipe_file(tmp_path, "sums", "gaps"), ["algorithm.name=central"]))
    assert central.population.info(0).modalities == ("image", "text", "audio", "series")
    assert len(central.population.data("everyone")) == 60


def test_a_model_that_cannot_read_what_a_client_has_is_refused(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, "both", "gaps")
    refuses("reads pictures and texts, of which sensor have neither", prepare, load_recipe(path))
    setup, _ = prepare(load_recipe(path, ['run.without=["sensor"]']))
    batch = next(iter(setup.population.data("ears").test(4)))
    assert not batch["image"].any()
    assert batch["text_mask"].any()


def test_a_model_or_its_class_says_that_it_reads_gaps() -> None:
    assert model_spec(models["modal_examples:sums"]).reads_absent
    assert not model_spec(models["modal_examples:both"]).reads_absent
    assert not model_spec(models["vilt_mini"]).reads_absent


def test_methods_and_models_with_stand_ins_share_what_is_lost() -> None:
    data = json.dumps({"name": "modal_examples:plain", "missing": {"image": 0.3, "when": "both"}})
    ours, theirs = (load_run_data(data, json.dumps({"name": f"modal_examples:{m}"}), 5) for m in ("sums", "both"))
    one, other = (m.dataset.clients["one"].test for m in (ours, theirs))
    assert one.names == other.names
    assert (presence(one) == presence(other)).all()
    stood_in: list[Tensor] = [batch["image"] for batch in theirs.clients["one"].test(100)]
    assert torch.equal(torch.cat(stood_in).flatten(1).sum(1) > 0, torch.from_numpy(presence(one)[:, 0]))


def test_labels_cannot_lose_modalities_which_is_said_before() -> None:
    # There is no such folder, of which nobody comes to complain.
    away = json.dumps({"name": "voc", "root": "/nowhere", "missing": {"image": 0.3}})
    with pytest.raises(ValueError, match=r"data.missing is for questions with answers; .* 'voc' have labels"):
        load_run_data(away, json.dumps({"name": "ctran_mini"}), 0)
    data = json.dumps({"name": "tagged_texts", "train": 20, "clients": 2, "missing": {"text": 0.3}})
    with pytest.raises(ValueError, match=r"data.missing is for questions with answers; .* 'tagged_texts' have labels"):
        load_run_data(data, json.dumps({"name": "ctran_mini"}), 0)


def test_training_counts_its_steps_by_the_data() -> None:
    class Counted:
        local = Local(batch_size=8)
        at_once = False
        data = TableData(*[table(mixed(61))] * 3)
        task, model = object(), nn.Linear(1, 1)

    client: Any = Counted()
    batches = list(client.data.train(8, torch.Generator()))
    assert epoch_steps(client) == len(batches) > -(-61 // 8)
