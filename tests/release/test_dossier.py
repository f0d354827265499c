"""Dossiers of real small runs: what is found, what is not, and how it is sealed, judged and said."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

import confed
from command_line import confed as command
from confed.analysis.case import Case
from confed.cli.attack import PROBES
from confed.recipes.recipe import load_recipe
from confed.release.gains import compared, robust_z, sent_by_site, spans, tensor_kinds
from confed.release.limits import Release, read_limits
from confed.release.probe import Estimate, probes
from confed.release.probes import pictures
from confed.release.seal import check_seal, seal
from confed.release.verdict import BEYOND, UNSET, WITHIN, judge, verdict
from confed.results.stored import records_of
from confed.runs.run import run

HEAD = (
    "study.methods=[]", "algorithm.name=fedavg", "model.trainable=head", "model.head=linear", "run.rounds=3",
    "data.classes=8", "data.shots=4", "data.validation_shots=2", "data.test_per_class=4", "data.new=none",
    "data.partition=iid", "run.gallery=0", "local.lr=0.05",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dossier") / "head"
    run(load_recipe("prompts_scenes", HEAD), folder)
    return folder


def test_a_dossier_says_what_left_and_what_was_found(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "STEPS", 5)
    limits = tmp_path / "limits.toml"
    limits.write_text("[release]\nleast_members = 4\nclient_epsilon = 8.0\n")
    key, secret = Ed25519PrivateKey.generate(), tmp_path / "key.pem"
    secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    found = confed.dossier(finished, limits, out=tmp_path / "out", key=secret)
    assert found.sentence == "Beyond the limits you set: client epsilon."
    sealed = json.loads((tmp_path / "out" / "dossier.json").read_text())
    check_seal(sealed, sealed["signature"]["public_key"])
    content = sealed["content"]
    figures = {row["name"]: row for row in content["figures"]}
    assert content["same_bits"] is True
    assert figures["labels_1"]["value"] > 0.5
    assert figures["client_epsilon"]["value"] == "infinite"
    assert figures["client_epsilon"]["verdict"] == "beyond"
    assert figures["least_members"]["verdict"] == "within"
    assert content["kinds"] == {"head": 8 * 64 + 8}
    assert [row["rounds"] for row in content["sent"]] == ["1–3"] * 4
    assert len(content["gains"]) == len(content["standing"]) == 4
    assert {row["what"] for row in content["not_examined"]} == {
        "Repeated text",
        "Answers at the cut",
        "Inputs at the cut",
    }
    page = (tmp_path / "out" / "dossier.html").read_text()
    assert "src=http" not in page
    assert sealed["sha256"] in page
    lead = page.partition("class=lead>")[2].partition("</p>")[0]
    assert len(lead.split()) <= 60


def test_training_again_gives_the_released_bits(finished: Path) -> None:
    case = Case(finished)
    _, same = case.replay
    assert same
    site = case.sites[0]
    fewer = case.trained({name: rows[: len(rows) // 2] for name, rows in case.everything.items()})
    assert any(not torch.equal(case.released[""][name], tensor) for name, tensor in fewer[""].items())
    assert set(case.without(site)) == {""}


def test_what_does_not_fit_into_the_time_is_listed_with_its_cost(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("dossier", str(finished), "--minutes", "0.001", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["sentence"] == UNSET
    listed = {row["what"]: row for row in content["not_examined"]}
    assert "replay" in listed["Pictures from updates"]["why"]
    assert listed["What each site gained"]["seconds"] > 0
    assert content["same_bits"] is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x", "must be a TOML file with a section"),
        ("a = 1", r"must have a section \[release\]"),
        ("[release]\nauc = 1", "unknown limit release.auc"),
        ("[release]\nmembership_auc = 0.4", r"release.membership_auc must lie in \[0.5, 1\], got 0.4"),
        ("[release]\ncut = true", "release.cut in .* must be a number, got True"),
    ],
)
def test_faulty_limits_are_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_limits(file)


def test_sentences_follow_from_figures_and_limits() -> None:
    auc = Estimate("a", "AUC", 0.7, limit="membership_auc", p=0.001)
    chance = Estimate("b", "site", 0.7, limit="site_advantage", p=0.2)
    size = Estimate("c", "members", 40, limit="least_members")
    figures = [("one", auc), ("two", chance), ("three", size)]

    def sentence(release: Release) -> str:
        return verdict(judge(figures, release), release, 0)[0]

    assert sentence(Release()) == UNSET
    assert sentence(Release(membership_auc=0.8, least_members=40)) == WITHIN
    assert sentence(Release(membership_auc=0.6, site_advantage=0.5)) == BEYOND.format(
        "membership auc, site advantage (not settled)"
    )
    assert sentence(Release(least_members=41, cut=0.1)) == BEYOND.format("least members, cut (not examined)")
    borderline = [("one", replace(auc, p=0.03)), ("two", replace(chance, p=0.04))]
    verdicts = [row["verdict"] for row in judge(borderline, Release(membership_auc=0.6))]
    assert verdicts == ["not settled", ""]  # Holm: 2 x 0.03


def test_a_changed_dossier_and_another_key_are_found_out() -> None:
    sealed: dict[str, Any] = seal({"a": [1.5, "é"]}, Ed25519PrivateKey.generate())
    check_seal(json.loads(json.dumps(sealed)))
    with pytest.raises(ValueError, match="it was changed"):
        check_seal({**sealed, "content": {"a": [1.6, "é"]}})
    with pytest.raises(ValueError, match="not signed by the expected key"):
        check_seal(sealed, "AAAA")
    other = seal({"a": [1.5, "é"]}, Ed25519PrivateKey.generate())["signature"]["value"]
    with pytest.raises(ValueError, match="signature does not fit"):
        check_seal({**sealed, "signature": {**sealed["signature"], "value": other}})


def test_whether_to_stay_follows_from_the_interval() -> None:
    right, wrong = torch.ones(60), torch.zeros(60)
    mixed = torch.tensor([0.0, 1.0]).repeat(30)
    local = {"personal/a/correct": wrong, "personal/b/correct": right, "personal/c/correct": mixed}
    federated = {"personal/a/correct": right, "personal/b/correct": wrong, "personal/c/correct": mixed.flip(0)}
    rows = compared(federated, local, {"global/a/correct": right}, ["a", "b", "c"])
    assert rows[0].sentence.startswith("a should stay: the federation is worth +100.0 points")
    assert rows[1].sentence.startswith("b should not stay for accuracy's sake")
    assert rows[2].sentence.startswith("c: not shown either way after correction, 0.0 points")
    assert rows[0].pooled == 1.0
    assert rows[0].p == pytest.approx(3 * 2**-59, rel=1e-6)
    assert "noise" not in rows[0].sentence
    noised = replace(rows[0], noised=True).sentence
    assert noised.endswith(" after the noise of its privacy, against a model alone without noise, to it.")


def test_account_of_rounds_kinds_and_outliers() -> None:
    assert spans([1, 2, 3, 5, 7, 8]) == "1–3, 5, 7–8"
    assert spans([]) == "none"
    lines = [{"event": "round", "round": r, "bytes_up": {"a": 10, "b": 5}, "errors": {"b": "x"}} for r in (1, 2)]
    rows = sent_by_site(records_of(lines), {"a": {"train": 7}}, ["a", "b"])
    assert [(row.rounds, row.times, row.bytes, row.records) for row in rows] == [
        ("1–2", 2, 20, 7),
        ("none", 0, 0, None),
    ]
    tensors = {"head.w": torch.zeros(3), "q.lora_a": torch.zeros(2), "body.w": torch.zeros(5)}
    assert tensor_kinds(tensors, ["head"]) == {"head": 3, "LoRA": 2, "other layers": 5}
    assert robust_z([1.0, 2.0, 3.0, 4.0, 100.0])[-1] == pytest.approx(0.6745 * 97)
    assert not robust_z([1.0, 1.0, 1.0, 9.0]).any()


def test_every_probe_says_what_its_attacker_knows() -> None:
    names = [probe.name for probe in probes()]
    assert names == list(PROBES)
    assert all(probe.attacker.endswith(".") for probe in probes())
