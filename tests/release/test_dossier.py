"""Dossiers of real small runs and of federations: what is found, sealed, judged and said, and their figures."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from scipy.stats import mannwhitneyu
from torch.nn import functional

import confed
from command_line import confed as command
from confed.analysis.case import Case
from confed.cli.attack import PROBES
from confed.deployment.provision import Federation, provision
from confed.deployment.server import run_server
from confed.engines.flower.transport import FlowerTransport
from confed.engines.remote.journal_chains import KNOWN
from confed.engines.remote.sites import Timeouts
from confed.federation.checkpoint import write_atomically
from confed.privacy.membership import auc_of
from confed.recipes.recipe import load_recipe
from confed.release.gains import compared, robust_z, sent_by_site, spans, tensor_kinds
from confed.release.limits import Release, read_limits
from confed.release.probe import Estimate, probes
from confed.release.probes import pictures
from confed.release.probes.labels import label_counts, largest_remainders, overlap
from confed.release.probes.pictures import nearest_errors, total_variation
from confed.release.probes.properties import explained_shares
from confed.release.probes.records import Scored, curve_of, finding_of, likelihood_scores, phi, rate_at
from confed.release.probes.sites import advantage, named_sites, site_membership
from confed.release.probes.text import exposure, longest_run
from confed.release.seal import check_seal, read_key, seal
from confed.release.verdict import BEYOND, UNSET, WITHIN, judge, verdict
from confed.results.stored import records_of
from confed.runs.run import run
from led_recipe import SITES_OF, grid_of, recipe_of
from refusals import refuses

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
    refuses(message, read_limits, file)


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
    refuses("it was changed", check_seal, {**sealed, "content": {"a": [1.6, "é"]}})
    refuses("not signed by the expected key", check_seal, sealed, "AAAA")
    other = seal({"a": [1.5, "é"]}, Ed25519PrivateKey.generate())["signature"]["value"]
    refuses("signature does not fit", check_seal, {**sealed, "signature": {**sealed["signature"], "value": other}})


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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's run folder of a federation of three sites, in the kit that the coordinator made."""
    root = tmp_path_factory.mktemp("federation")
    recipe = recipe_of("fedavg")
    provision(root / "kit", Federation(SITES_OF, "localhost", 9000, recipe.to_toml()))
    file = root / "recipe.toml"
    file.write_text(recipe.to_toml())
    state = root / "kit" / "server" / "state"
    run_server(recipe, state, FlowerTransport(grid_of(file, root)), timeouts=Timeouts(minimum=3))
    return state


def signed(server: Path, site: str, key_of: str, **changes: Any) -> None:
    """A site's own dossier in the server's folder, signed with the key of some site."""
    row = {**asdict(Estimate("membership_auc", "members told, AUC", 0.7, p=0.001, limit="membership_auc")), **changes}
    content = {"sentence": "No limits set: figures only.", "figures": [row]}
    sealed = seal(content, read_key(server.parents[1] / "sites" / key_of / "key"))
    folder = server / "statements"
    folder.mkdir(exist_ok=True)
    write_atomically(folder / f"{site}.json", json.dumps(sealed).encode())


def test_signed_statements_count_and_others_are_refused(server: Path, tmp_path: Path) -> None:
    signed(server, "warm", "warm")
    signed(server, "cold", "both")
    limits = confed.Release(least_members=5, membership_auc=0.6, cut=0.1)
    made = confed.dossier(server, limits, out=tmp_path)
    assert made.sentence == "Beyond the limits you set: membership auc, cut (not examined)."
    content = made.content
    statements = {row["site"]: row for row in content["statements"]}
    assert statements["warm"]["signed"]
    assert statements["cold"]["dossier"] == "refused: the dossier is not signed by the expected key"
    assert statements["both"]["dossier"] == "none in statements"
    assert all("audit" in row["journals"] for row in statements.values())
    figures = {(row["probe"], row["name"]): row for row in content["figures"]}
    assert figures["Told by warm", "membership_auc"]["verdict"] == "beyond"
    assert figures["Guarantees and sizes", "least_members"]["value"] == 8
    assert [(row["site"], row["times"], row["records"]) for row in content["sent"]] == [(s, 2, 8) for s in SITES_OF]
    left = {row["what"]: row["why"] for row in content["not_examined"]}
    assert left["Membership of records"] == "records and updates are at the sites"
    assert left["Statement of cold"].startswith("refused")
    assert "Statement of warm" not in left
    assert "What the sites have said and signed" in made.page.read_text()


def test_what_was_changed_or_cannot_be_a_figure_is_refused(server: Path, tmp_path: Path) -> None:
    signed(server, "warm", "warm", p=7)
    journals = json.loads((server / KNOWN).read_text())
    statement = json.loads(journals["cold"])
    statement["journals"]["audit"][0] += 1
    (server / KNOWN).write_text(json.dumps({**journals, "cold": json.dumps(statement)}))
    content = confed.dossier(server, out=tmp_path).content
    (server / KNOWN).write_text(json.dumps(journals))
    left = {row["what"]: row["why"] for row in content["not_examined"]}
    assert "must lie in [0, 1], got 7" in left["Statement of warm"]
    assert "no statement under this server's signature" in left["Journals of cold"]
    assert "Journals of warm" not in left
    assert content["sentence"] == "No limits set: figures only."


def test_area_is_the_mann_whitney_statistic_over_pairs() -> None:
    rng = np.random.default_rng(0)
    members, others = rng.integers(0, 9, 70).astype(float), rng.integers(0, 8, 50).astype(float)
    expected = mannwhitneyu(members, others, method="asymptotic").statistic / (70 * 50)
    assert auc_of(members, others) == pytest.approx(expected)


def test_rate_allows_as_many_false_alarms_as_the_share_says() -> None:
    others = np.arange(100.0)
    assert rate_at(np.array([98.5, 99.5, 200.0]), others, 0.01) == pytest.approx(1.0)
    assert rate_at(np.array([97.5, 98.0, 200.0]), others, 0.01) == pytest.approx(1 / 3)
    assert rate_at(np.array([98.5, 99.5, 200.0]), others, 0.001) == pytest.approx(2 / 3)


def test_standard_error_agrees_with_delong() -> None:
    rng = np.random.default_rng(1)
    members, others = rng.normal(0.4, 1, 400), rng.normal(0, 1, 500)
    curve = curve_of(Scored(members, np.arange(400)), Scored(others, np.arange(500)))
    placed_members = (members[:, None] > others[None]).mean(1)
    placed_others = (members[:, None] > others[None]).mean(0)
    error = math.sqrt(placed_members.var(ddof=1) / 400 + placed_others.var(ddof=1) / 500)
    assert (curve.auc[2] - curve.auc[1]) / (2 * 1.96) == pytest.approx(error, rel=0.15)


def test_intervals_are_wider_where_pictures_are_shared() -> None:
    rng = np.random.default_rng(2)
    picture = np.repeat(rng.normal(0, 1, 40), 10)
    alone = curve_of(Scored(picture, np.arange(400)), Scored(picture[::-1], np.arange(400)))
    grouped = curve_of(
        Scored(picture, np.repeat(np.arange(40), 10)), Scored(picture[::-1], np.repeat(np.arange(40), 10))
    )
    assert grouped.auc[2] - grouped.auc[1] > 2 * (alone.auc[2] - alone.auc[1])


def test_phi_is_the_logit_of_the_right_answers_probability() -> None:
    logits = torch.randn(20, 5, dtype=torch.float64)
    losses = functional.cross_entropy(logits, torch.zeros(20, dtype=torch.int64), reduction="none")
    assert torch.allclose(phi(losses), torch.logit(logits.softmax(1)[:, 0]))


def test_likelihood_scores_count_models_without_the_record_only() -> None:
    without = torch.tensor([[True, False], [True, True], [False, True]])
    models = torch.tensor([[1.0, 100.0], [3.0, 4.0], [100.0, 8.0]])
    assert likelihood_scores(torch.tensor([5.0, 5.0]), models, without).tolist() == [3.0, -1.0]


def _records(leak: float, seed: int) -> float:
    """Corrected p-value of a membership attack on one of many records whose difficulties differ."""
    rng = np.random.default_rng(seed)
    members, others = rng.normal(0, 1, 400) + leak, rng.normal(0, 1, 400)
    finding = finding_of(Scored(members, np.arange(400)), Scored(others, np.arange(400)), "", seed)
    assert finding.measures[0].p is not None
    return finding.measures[0].p


def test_membership_is_found_where_planted_and_not_in_controls() -> None:
    assert max(_records(0.5, seed) for seed in range(10)) < 0.001
    assert sum(_records(0.0, seed) < 0.05 for seed in range(10)) <= 1


def test_sites_are_told_where_planted_and_not_in_controls() -> None:
    rng = np.random.default_rng(0)
    losses = rng.normal(1, 0.01, (4, 5)) + np.pad(0.2 * np.eye(4), ((0, 0), (0, 1)))
    planted = site_membership(losses)
    assert planted.value == 1.0
    assert planted.p is not None
    assert planted.p < 0.01
    controls = [site_membership(np.random.default_rng(seed).normal(1, 0.01, (4, 5))).p for seed in range(10)]
    assert sum(p < 0.05 for p in controls if p is not None) <= 1


def test_advantage_is_the_largest_gap_of_distributions() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(0, 1, 30), rng.normal(0.7, 1, 20)
    points = np.concatenate([a, b])
    expected = max((a <= x).mean() - (b <= x).mean() for x in points)
    assert advantage(a, b) == pytest.approx(expected)


def test_outputs_name_sites_where_planted_only() -> None:
    rng = torch.Generator().manual_seed(0)
    owners, noise = torch.arange(3).repeat(100), torch.randn(300, 4, generator=rng)
    planted = named_sites(noise + 3 * functional.one_hot(owners, 4), owners, np.arange(300))
    assert planted.value > 0.5
    control = named_sites(noise, owners, np.arange(300))
    assert control.p is not None
    assert control.p > 0.05


def test_own_class_is_named_and_equal_sites_tell_nothing() -> None:
    shares = np.full((4, 10), 0.1)
    shares[:, 0] = 0.0
    shares[2, 0] = 0.3
    shares /= shares.sum(1, keepdims=True)
    rng = np.random.default_rng(0)
    answered = np.clip(shares + rng.normal(0, 0.01, shares.shape), 0, 1)
    measures = {measured.name: measured for measured in explained_shares(answered, shares)}
    assert measures["properties_owner"].value == 1.0
    assert measures["properties"].value > 0.5
    assert measures["properties"].p is not None
    assert measures["properties"].p < 0.01
    unrelated = [
        explained_shares(np.random.default_rng(s).dirichlet(np.ones(10) * 50, 4), shares)[0].p for s in range(10)
    ]
    assert sum(p < 0.05 for p in unrelated if p is not None) <= 1


def test_labels_follow_from_the_gradient_of_the_bias() -> None:
    rng = torch.Generator().manual_seed(0)
    features, labels = torch.randn(32, 6, generator=rng), torch.randint(5, (32,), generator=rng)
    weight, bias = torch.randn(5, 6, generator=rng), torch.zeros(5, requires_grad=True)
    logits = features @ weight.T + bias
    functional.cross_entropy(logits, labels).backward()
    assert bias.grad is not None
    truth = torch.bincount(labels, minlength=5)
    counts = label_counts(bias.grad, logits.softmax(1).mean(0).detach(), 32)
    assert torch.equal(counts, truth)
    assert overlap(counts, truth) == 1.0
    assert overlap(torch.tensor([2, 0]), torch.tensor([1, 1])) == 0.5
    assert largest_remainders(torch.tensor([0.5, 1.7, 0.8]), 3).tolist() == [0, 2, 1]


def test_exposure_is_the_information_in_the_rank() -> None:
    assert exposure(1.0, [2.0] * 31) == 5.0
    assert exposure(3.0, [2.0] * 31) == 0.0
    assert exposure(1.0, [0.5, 2.0, 3.0]) == 1.0


def test_longest_run_counts_words_in_a_row() -> None:
    assert longest_run(["the", "red", "dog", "sits"], ["a", "red", "dog", "sits", "up"]) == 3
    assert longest_run(["a", "b"], ["c", "d"]) == 0


def test_pictures_are_compared_with_the_nearest_one() -> None:
    truth = torch.stack([torch.zeros(3, 4, 4), torch.ones(3, 4, 4)])
    assert nearest_errors(torch.full((1, 3, 4, 4), 0.9), truth).item() == pytest.approx(0.01, rel=1e-4)
    stripes = torch.tensor([0.0, 1.0]).repeat(2).expand(1, 3, 4, 4)
    assert total_variation(stripes).item() == pytest.approx(1.0)
