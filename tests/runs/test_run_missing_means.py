"""Devices and weights that are not there: one line before the first round, no folder, and no request to a hub."""

import socket
import urllib.request
from pathlib import Path

import pytest

import toy_federation  # its datasets have names then
from confed.deployment.site import open_site
from confed.models.hub_names import hub_name
from confed.models.pretrained import describe, published
from confed.models.tokenizer import bert_tokenizer
from confed.recipes.recipe import Recipe, load_recipe
from confed.runs.run import run
from confed.studies.study import open_study
from refusals import refuses

assert toy_federation.squares
TINY = (
    "data.name=squares", "data.train=6", "data.test=2", "algorithm.name=fedavg", "run.rounds=1", "local.epochs=1",
    "run.workers=1", "run.gallery=0",
)  # fmt: skip


def _recipe(*more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", ["study.methods=[]", *TINY, *more])


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
