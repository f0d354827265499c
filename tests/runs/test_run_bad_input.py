"""Bad input, settings that a method cannot have, and means that are missing: one clear line before anything is lost."""

import errno
import os
import socket
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import toy_federation  # its datasets have names then
from confed.algorithms.bicsl import BiCSL
from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedrep import FedRep
from confed.algorithms.split_learning import SplitLearning
from confed.data.encode import encode
from confed.data.examples import Examples, channels_first
from confed.data.table import Table, concatenate_tables
from confed.datasets.scenes import scenes
from confed.datasets.scenes.graph import GENERAL_NOUNS, OWN_NOUNS
from confed.deployment.site import open_site
from confed.federation.algorithm import Algorithm
from confed.federation.checkpoint import Checkpoints, CorruptCheckpoint
from confed.federation.evaluate import Tally, evaluate
from confed.federation.local import Local, Schedule
from confed.metrics.scores import summarise
from confed.models.hub_names import hub_name
from confed.models.pretrained import describe, published
from confed.models.tokenizer import bert_tokenizer
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import RunFolder, read_jsonl
from confed.runs.build import check_local
from confed.runs.encode import tokenizer_options
from confed.runs.run import load_run, prepare, run
from confed.runs.samples import fill
from confed.studies.study import open_study
from refusals import refuses
from tiny_runs import stop_in_round

TINY = (
    "algorithm.name=fedavg", "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.train=24",
    "data.validation=8", "data.test=16", "local.epochs=1", "run.rounds=3", "run.workers=1", "run.gallery=0",
    "run.evaluate_every=0",
)  # fmt: skip


def _tiny(*more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", [*TINY, *more]).method("fedavg")


def _examples(count: int = 3) -> Examples:
    return Examples(
        np.zeros((1, 4, 4, 3), dtype=np.uint8), np.zeros(count, dtype=np.int64), ["what is it?"] * count,
        ["dog"] * count, ["kind"] * count, [f"row-{i}" for i in range(count)],
    )  # fmt: skip


def _tokenizer(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    return torch.zeros(len(texts), 2, dtype=torch.int64), torch.ones(len(texts), 2, dtype=torch.int64)


def test_an_answer_outside_the_vocabulary_names_the_example() -> None:
    with pytest.raises(ValueError, match="example 'row-0': the answer 'dog' is not in the vocabulary of 2 answers"):
        encode(_examples(), _tokenizer, ("cat", "cow"), ("kind",))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"questions": ["fine?", "  ", "fine?"]}, "question of example 'row-1' is empty"),
        ({"answers": ["dog"]}, "answers must have one entry per question .3., got 1"),
        ({"images": np.zeros((1, 4, 4), dtype=np.uint8)}, r"images must be uint8 of shape \(M, H, W, 3\)"),
        ({"images": np.zeros((1, 4, 4, 3))}, "got float64"),
        ({"image_index": np.array([0, 0, 1])}, r"image_index must lie in \[0, 1\), got 0 to 1"),
    ],
)
def test_examples_whose_columns_do_not_fit_are_refused(change: dict, complaint: str) -> None:
    refuses(complaint, replace, _examples(), **change)


def test_pooling_shares_pictures_and_keeps_rows() -> None:
    images = channels_first(np.arange(2 * 2 * 2 * 3, dtype=np.uint8).reshape(2, 2, 2, 3))
    one = Table(images, torch.tensor([1, 0]), {"label": torch.tensor([1, 2])})
    two = Table(images, torch.tensor([0]), {"label": torch.tensor([3])})
    other = Table(images[:1].clone(), torch.tensor([0]), {"label": torch.tensor([4])})
    assert concatenate_tables([one, two]).images is images
    everything = concatenate_tables([one, other, two])
    assert everything.columns["label"].tolist() == [1, 2, 4, 3]
    for row, source in ((0, images[1]), (1, images[0]), (2, images[0]), (3, images[0])):
        assert torch.equal(everything.batch(torch.tensor([row]))["image"][0], source)


def test_a_client_with_one_example_takes_part(tmp_path: Path) -> None:
    summary = run(_tiny("data.train=1"), tmp_path / "run")
    assert summary["errors"] == []
    assert all(counts["train"] == 1 for counts in summary["examples"].values())


def test_a_folder_that_exists_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    refuses(r"exists already; continue it with `confed resume", run, _tiny(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_damaged_checkpoint_is_named_and_another_continues(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    run(_tiny(), reference)
    folder, messages = tmp_path / "run", list[str]()
    with pytest.raises(KeyboardInterrupt):
        run(_tiny(), folder, progress=stop_in_round(3))
    victim = folder / "checkpoint" / "round-000002" / "main-0.safetensors"
    victim.write_bytes(victim.read_bytes()[:-8])
    run(_tiny(), folder, resume=True, progress=lambda p: messages.append(p.text))
    assert any("damaged checkpoint" in m and "round-000002" in m for m in messages)
    assert RunFolder(folder).metrics.read_bytes() == RunFolder(reference).metrics.read_bytes()
    final = "models/global/trained.safetensors"
    assert (folder / final).read_bytes() == (reference / final).read_bytes()


def test_when_no_checkpoint_is_sound_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(_tiny("run.keep_checkpoints=1"), folder)
    (folder / "summary.json").unlink()
    victim = next((folder / "checkpoint").glob("round-*/checkpoint.json"))
    victim.write_text("{")
    history = RunFolder(folder).metrics.read_bytes()
    with pytest.raises(CorruptCheckpoint, match=r"no sound checkpoint .*checkpoint\.json"):
        run(_tiny("run.keep_checkpoints=1"), folder, resume=True)
    assert RunFolder(folder).metrics.read_bytes() == history


def test_a_full_disk_stops_the_run_and_it_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, folder = tmp_path / "reference", tmp_path / "run"
    run(_tiny(), reference)
    original, writes = os.replace, []

    def full(source: Path, target: Path) -> None:
        writes.append(target)
        if len(writes) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            run(_tiny(), folder)
    run(_tiny(), folder, resume=True)
    assert RunFolder(folder).metrics.read_bytes() == RunFolder(reference).metrics.read_bytes()


def test_a_run_without_clients(tmp_path: Path) -> None:
    recipe = load_recipe("fedvqa_scenes", ["data.name=test_run_bad_input:nobody"]).method("fedavg")
    refuses("has no clients; a federation needs at least one", run, recipe, tmp_path / "run")


def nobody():
    """A dataset without clients."""
    from confed.data.examples import FederatedDataset

    return FederatedDataset("nobody", ("yes",), {}, {}, ("word",))


def test_checkpoints_keep_their_distance_and_the_last_is_there(tmp_path: Path) -> None:
    run(_tiny("run.checkpoint_seconds=1e6", "run.keep_checkpoints=9"), tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoint").glob("round-*")) == ["round-000001", "round-000003"]


def test_soft_scores_can_be_trained_and_reported(tmp_path: Path) -> None:
    summary = run(_tiny("task.objective=bce", "run.rounds=1"), tmp_path / "run")
    assert summary["metric"] == "vqa_accuracy"
    assert set(summary["personal"]) == {"transport", "sports", "educational", "natural"}


def test_a_published_backbone_brings_its_folders_tokenizer() -> None:
    options = tokenizer_options({"name": "vilt_b32", "pretrained": "some/folder", "max_length": 40})
    assert options == {"path": "some/folder", "max_length": 40}
    assert tokenizer_options({"name": "vilt_mini", "pretrained": True, "max_length": 16}) == {"max_length": 16}


def test_clients_answer_with_their_own_nouns() -> None:
    dataset = scenes(train=80, validation=40, test=200)
    for name, split in dataset.clients.items():
        pool = {*GENERAL_NOUNS, *OWN_NOUNS[name]}
        for examples in (split.train, split.validation, split.test):
            nouns = {a for a, kind in zip(examples.answers, examples.types, strict=True) if kind == "qnoun"}
            assert nouns <= pool, name


TWO_ROUNDS = (
    "study.methods=[]", "model.name=vilt_tiny", "model.width=16", "model.layers=1", "data.train=24",
    "data.validation=8", "data.test=16", "data.unseen=[]", "run.without=['home', 'commercial']", "local.epochs=1",
    "run.rounds=2", "run.workers=1", "run.gallery=1", "run.evaluate_examples=8",
)  # fmt: skip
CLIENTS = {"transport", "sports", "educational", "natural"}


def _two_rounds(method: str, *more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", [f"algorithm.name={method}", *TWO_ROUNDS, *more])


@pytest.mark.parametrize(("method", "name"), [("feddc", "FedDC"), ("feddyn", "FedDyn"), ("scaffold", "SCAFFOLD")])
def test_methods_that_sum_over_clients_refuse_that_they_leave(tmp_path: Path, method: str, name: str) -> None:
    leaves = "run.leaves.sports=2"
    with pytest.raises(ValueError, match=rf"run\.leaves must be empty for {name}, got sports: the server's sums"):
        run(_two_rounds(method, leaves), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    prepare(_two_rounds(method, "run.joins.sports=2"))
    prepare(_two_rounds(method, leaves, "run.without=['home', 'commercial', 'sports']"))  # was never there
    prepare(_two_rounds("fedavg", leaves))


@pytest.mark.parametrize(
    ("method", "name"), [("fedper", "FedPer"), ("fedrep", "FedRep"), ("fedbn", "FedBN"), ("local", "Local only")]
)
def test_methods_without_a_global_model_need_personal_ones(method: str, name: str) -> None:
    more = ["algorithm.layers=all"] if method == "fedbn" else []
    with pytest.raises(ValueError, match=rf"run\.keep_personal must be true for {name}, got false: it has no global"):
        prepare(_two_rounds(method, *more, "run.keep_personal=false"))
    prepare(_two_rounds(method, *more))
    prepare(_two_rounds("fedavg", "run.keep_personal=false"))


@pytest.mark.parametrize(
    ("method", "local", "message"),
    [
        (FedRep(), Local(iterations=5), "iterations must be 0 for FedRep, got 5: its rounds are made of epochs"),
        (BiCSL(), Local(iterations=5), "iterations must be 0 for BiCSL, got 5: its rounds are made of epochs"),
        (
            BiCSL(),
            Local(schedule=Schedule("linear", horizon=5)),
            "horizon must be 0 for BiCSL, got 5",
        ),
        (
            SplitLearning(),
            Local(accumulate=4),
            "accumulate must be 1 for Split learning, got 4: client and",
        ),
    ],
)
def test_settings_of_local_training_that_a_method_cannot_have(method: Algorithm, local: Local, message: str) -> None:
    refuses(rf"^local\.(schedule\.)?{message}", check_local, method, local)
    check_local(FedAvg(), local)  # others may have each of them


def test_optimizer_whose_library_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confed.runs.build.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the library bitsandbytes: install confed with the extra 'quantised'"):
        prepare(_two_rounds("fedavg", "local.optimizer=adamw8bit"))


@pytest.mark.parametrize("method", ["fedper", "local"])
def test_the_shared_part_stands_in_for_who_never_took_part(tmp_path: Path, method: str) -> None:
    summary = run(_two_rounds(method, "run.cohort=1"), tmp_path)
    asked = {name for line in read_jsonl(tmp_path / "metrics.jsonl") for name in line.get("loss", ())}
    absent = CLIENTS - asked
    assert absent
    assert set(summary["personal"]) == CLIENTS
    assert summary["personal_mean"] == pytest.approx(sum(summary["personal"].values()) / 4)
    note = f"{len(absent)} clients never took part; the shared part with untrained private values stands in"
    assert any(note in line for line in summary["notes"])
    _, setup, run_data, workspace = load_run(tmp_path)
    checkpoint, _ = Checkpoints(tmp_path / "checkpoint").latest()
    held = checkpoint.servers["main"].params
    assert bool(held) == (method == "fedper")
    for name in absent:
        fill(workspace, held)
        own = load_file(tmp_path / f"models/personal/{name}/trained.safetensors")
        assert all(torch.equal(workspace.tensors[n], t) for n, t in own.items())
        tally = evaluate(workspace.model, Tally(setup.task), run_data.clients[name].test(50)).tallies
        assert summary["personal"][name] == pytest.approx(summarise(tally)["accuracy"])


assert toy_federation.squares
SQUARES = (
    "data.name=squares", "data.train=6", "data.test=2", "algorithm.name=fedavg", "run.rounds=1", "local.epochs=1",
    "run.workers=1", "run.gallery=0",
)  # fmt: skip


def _recipe(*more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", ["study.methods=[]", *SQUARES, *more])


def test_a_missing_graphics_card_is_said_before_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = _recipe("run.device=cuda", "model.name=vilt_tiny")
    expected = "run.device is 'cuda', and PyTorch finds no CUDA device on this machine"
    refuses(expected, run, recipe, tmp_path / "run")
    refuses(expected, open_study, recipe.with_rows(["fedavg"]), tmp_path / "study", [0])
    refuses(expected, open_site, recipe, "warm", tmp_path / "private")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_none_leave_no_folder(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64))
    recipe = _recipe(f"model.pretrained={picture}", "model.name=vilt_mini")
    refuses(r"picture\.png is no weights file that `confed weights pretrain` wrote", run, recipe, tmp_path / "run")
    assert list(tmp_path.iterdir()) == [picture]


def test_tensors_of_others_are_no_weights_of_ours(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.ones(1)}, tmp_path / "other.safetensors")
    refuses("lacks its words and answers", describe, tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("dandelin/vilt-b32-mlm", "dandelin/vilt-b32-mlm"), ("hub:weights/x", "weights/x"), ("weights/mistyped", None),
        ("Models/vilt", None), ("./a/b", None), ("/a/b", None), ("~/a", None), ("a/b/c", None), ("here/vilt", None),
        ("owner/file.safetensors", None), ("owner/a b", None), ("owner/..", None), ("bert-base-uncased", None),
    ],
)  # fmt: skip
def test_which_texts_are_names_on_a_hub(
    source: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub_name(source) == name
    assert hub_name("bert-base-uncased", short=True) == "bert-base-uncased"


def test_no_request_leaves_for_a_folder_with_a_slip(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kind:
        @staticmethod
        def from_pretrained(*arguments: object, **options: object) -> None:
            raise AssertionError("asked the hub")

    refuses("'weights/mistyped': there is no such folder", published, Kind, "weights/mistyped", 0)
    with pytest.raises(AssertionError, match="asked the hub"):
        published(Kind, "owner/name", 0)
    monkeypatch.setattr("tokenizers.Tokenizer", Kind)
    with pytest.raises(ValueError, match="expected a vocabulary file, a folder or a hub name, got 'weights/mistyped'"):
        bert_tokenizer("weights/mistyped", 8)
    refuses("'owner/name' is a name on the Hugging Face hub and could not be fetched", bert_tokenizer, "owner/name", 8)


def test_a_run_opens_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **named: object) -> None:
        raise AssertionError(f"a connection was asked for: {arguments}")

    for name in ("connect", "connect_ex", "sendto", "bind"):
        monkeypatch.setattr(socket.socket, name, refused)
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refused)
    with pytest.raises(AssertionError, match="was asked for"):
        urllib.request.urlopen("http://localhost:9/")
    run(_recipe("model.name=vilt_mini", "run.evaluate_every=1", "run.controls=none"), tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").is_file()
