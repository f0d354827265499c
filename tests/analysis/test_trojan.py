"""The test-time Trojan: exact on linear models, inside its bounds, and as a command."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor, nn

from command_line import confed as command
from confed.analysis import trojan
from confed.analysis.trojan import (
    CONDITIONS,
    Attacked,
    Bounds,
    Text,
    Trojan,
    attack_victim,
    displacement,
    embedding_bounds,
    feature_bounds,
    fit_head,
    inserted,
    last_words,
    paired,
    surrogate_loss,
    truth_loss,
    whole_pixels,
    with_words,
    word_embedding,
)
from confed.analysis.victim import Victim, draw_questions, expand, names_of, ordinary_words, token_names
from confed.federation.protocols import Batch, Output
from confed.models.tokenizer import WordTokenizer
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from refusals import refuses

TINY = (
    "study.methods=[]", "algorithm.name=fedavg", "model.name=vilt_tiny", "model.width=16", "model.layers=1",
    "data.train=24", "data.validation=4", "data.test=20", "data.unseen=[]",
    "run.without=['home', 'commercial', 'educational', 'natural']", "local.epochs=1", "run.rounds=1", "run.workers=1",
    "run.gallery=0", "run.evaluate_every=0", "run.checkpoint_every=0",
)  # fmt: skip


class Linear(nn.Module):
    """Two answers; the score of the second is linear in the sum of all regions and in the words' embeddings."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(3)
        self.words = nn.Embedding.from_pretrained(torch.randn(8, 3, generator=rng))
        self.register_buffer("of_regions", torch.randn(4, generator=rng))
        self.register_buffer("of_words", torch.randn(3, generator=rng))

    of_regions: Tensor
    of_words: Tensor

    def forward(self, batch: Batch) -> Output:
        features = batch["regions"].sum(1)
        read = (self.words(batch["text"]) * batch["text_mask"].unsqueeze(2)).sum(1)
        score = features @ self.of_regions + read @ self.of_words
        return Output(torch.stack([torch.zeros_like(score), score], dim=1), features)


def _batch() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(1)
    regions = torch.randn(3, 5, 4, generator=rng)
    regions[0, 3:] = 0  # padding
    text = torch.tensor([[2, 5, 6, 3, 0], [2, 7, 3, 0, 0], [2, 5, 6, 7, 3]])  # 2 [CLS], 3 [SEP], 0 [PAD]
    return {"regions": regions, "text": text, "text_mask": (text != 0).long(), "label": torch.tensor([0, 1, 1])}


BOUNDS = Bounds(torch.full((4,), -0.8), torch.full((4,), 0.9), torch.tensor([0.1, 0.2, 0.4, 1.0]))
SPECIAL = torch.tensor([0, 2, 3])
ORDINARY = torch.tensor([4, 5, 6, 7])


def _text(model: Linear) -> Text:
    return Text(model.words, ORDINARY, SPECIAL)


def _rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# The picture -----------------------------------------------------------------------------------------------


def test_on_a_linear_model_the_search_ends_in_the_best_corner() -> None:
    model, batch = Linear(), _batch()
    found = Trojan(eps=0.5, steps=20)(batch, truth_loss(model), _rng(), visual=("regions", BOUNDS)).visual
    assert found is not None
    clean, weights = batch["regions"].numpy(), model.of_regions.numpy()
    for b, label in enumerate(batch["label"].tolist()):
        sign = np.sign(weights) if label == 0 else -np.sign(weights)  # away from the right answer
        for r in range(5):
            for d in range(4):
                x = float(clean[b, r, d])
                if b == 0 and r >= 3:
                    assert found[b, r, d] == 0
                    continue
                moved = x + sign[d] * 0.5 * float(BOUNDS.spread[d])
                # Inside the range of training data, which the clean value itself may exceed.
                expected = min(max(moved, min(-0.8, x)), max(0.9, x))
                assert float(found[b, r, d]) == pytest.approx(expected, abs=1e-6)


def test_the_best_of_all_iterates_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trojan, "STEP", 6.0)
    model, batch = Linear(), _batch()
    # One step that is far too long overshoots; the value is still at least that of the start.
    seen: list[Tensor] = []

    def objective(changed: Batch) -> Tensor:
        value = -(changed["regions"] - batch["regions"]).square().sum((1, 2))  # best where nothing changes
        seen.append(value.detach())
        return value

    found = Trojan(eps=1.0, steps=3)(batch, objective, _rng(), visual=("regions", BOUNDS)).visual
    assert found is not None
    best = torch.stack(seen).amax(0)
    torch.testing.assert_close(-(found - batch["regions"]).square().sum((1, 2)), best)
    del model


def test_pixels_are_whole_and_within_eps() -> None:
    rng = torch.Generator().manual_seed(5)
    clean = torch.randint(0, 256, (2, 3, 4, 4), generator=rng, dtype=torch.uint8)
    change = (torch.rand(clean.shape, generator=rng) * 2 - 1) * 7.9
    sent = whole_pixels((clean.float() + change) / 127.5 - 1, clean, 4.5)
    for x, d, y in zip(clean.flatten().tolist(), change.flatten().tolist(), sent.flatten().tolist(), strict=True):
        assert y == min(max(x + min(max(round(d), -4), 4), 0), 255)


def test_bounds_are_those_of_the_regions_that_are_there() -> None:
    batch = _batch()
    rows = np.concatenate([batch["regions"].numpy()[0, :3], *batch["regions"].numpy()[1:]])
    halves = [{"regions": batch["regions"][:1]}, {"regions": batch["regions"][1:]}]
    bounds = feature_bounds(halves)
    np.testing.assert_allclose(bounds.low, rows.min(0))
    np.testing.assert_allclose(bounds.high, rows.max(0))
    np.testing.assert_allclose(bounds.spread, rows.std(0), rtol=1e-5)
    refuses("at least one region", feature_bounds, [])


# The question ----------------------------------------------------------------------------------------------


def test_the_last_word_becomes_the_nearest_to_the_best_corner() -> None:
    model, batch = Linear(), _batch()
    text = _text(model)
    found = Trojan(steps=40)(batch, truth_loss(model), _rng(), text=text)
    assert found.visual is None
    assert found.position is not None
    assert found.vector is not None
    assert found.token is not None
    assert found.position.tolist() == [2, 1, 3]
    table = model.words.weight.numpy()
    bounds = embedding_bounds(text)
    np.testing.assert_allclose(bounds.low, table[4:].min(0))
    for b, (place, label) in enumerate(zip([2, 1, 3], batch["label"].tolist(), strict=True)):
        up = (model.of_words.numpy() > 0) == (label == 0)
        corner = np.where(up, table[4:].max(0), table[4:].min(0))
        np.testing.assert_allclose(found.vector[b], corner, atol=1e-6)
        old = int(batch["text"][b, place])
        distances = {w: float(np.linalg.norm(table[w] - corner)) for w in (4, 5, 6, 7) if w != old}
        assert int(found.token[b]) == min(distances, key=distances.__getitem__)


def test_a_word_is_moved_away_from_its_clean_activations() -> None:
    model, batch = Linear(), _batch()

    def read(changed: Batch) -> Tensor:
        return (model.words(changed["text"]) * changed["text_mask"].unsqueeze(2)).sum(1)

    with torch.no_grad():
        clean = read(batch)
    found = Trojan(steps=40)(batch, displacement(read, clean), _rng(), text=_text(model))
    assert found.vector is not None
    # The activations are sums of embeddings, so the furthest point of the box is a corner, per dimension a bound.
    bounds = embedding_bounds(_text(model))
    ends = torch.minimum((found.vector - bounds.low).abs(), (found.vector - bounds.high).abs())
    assert float(ends.max()) < 1e-6


def test_an_inserted_embedding_is_read_in_its_place_only() -> None:
    model, batch = Linear(), _batch()
    vectors, place = torch.full((3, 3), 9.0), last_words(batch, SPECIAL)
    before = model.words(batch["text"])
    with inserted(model.words, batch["text"], place, vectors):
        during, other = model.words(batch["text"]), model.words(batch["text"][:, :2])
    for b in range(3):
        for i in range(5):
            expected = vectors[b] if i == int(place[b]) else before[b, i]
            assert torch.equal(during[b, i], expected)
    assert torch.equal(other, before[:, :2])  # another text
    assert torch.equal(model.words(batch["text"]), before)  # and nothing is left behind
    changed = with_words(batch, place, torch.tensor([4, 4, 4]))
    assert changed["text"].tolist() == [[2, 5, 4, 3, 0], [2, 4, 3, 0, 0], [2, 5, 6, 4, 3]]
    assert batch["text"][0, 2] == 6


def test_which_words_may_stand_in_a_question() -> None:
    tokenizer = WordTokenizer(["cat", "dog"], 6)
    words, special = ordinary_words(tokenizer)
    names = token_names(tokenizer)
    assert [names[i] for i in words] == ["cat", "dog"]
    assert {names[i] for i in special} == {"[PAD]", "[CLS]", "[SEP]", "[MASK]"}
    text, mask = tokenizer(["a dog", "strange"])
    assert last_words({"text": text, "text_mask": mask}, special).tolist() == [2, 1]
    refuses("must have a word", last_words, {"text": text[:, [0, -1]], "text_mask": mask[:, [0, -1]]}, special)


def test_the_embedding_is_found_by_watching_or_missed_by_name() -> None:
    model, batch = Linear(), _batch()
    assert word_embedding(model, model, batch) is model.words
    refuses(r"Identity looks its text up in no nn\.Embedding", word_embedding, model, nn.Identity(), batch)


def test_random_change_is_of_full_size_and_never_the_same_word() -> None:
    model, batch = Linear(), _batch()
    wide = Bounds(torch.tensor(-100.0), torch.tensor(100.0), BOUNDS.spread)
    found = Trojan(eps=0.5).random(batch, _rng(), visual=("regions", wide), text=_text(model))
    assert found.visual is not None
    assert found.token is not None
    real = (batch["regions"] != 0).any(-1, keepdim=True)
    torch.testing.assert_close((found.visual - batch["regions"]).abs(), (0.5 * BOUNDS.spread * real).expand(3, 5, 4))
    assert all(int(new) != old for new, old in zip(found.token, [6, 7, 7], strict=True))


# What the attacker raises ----------------------------------------------------------------------------------


def test_objectives_are_those_of_their_formulas() -> None:
    model, batch = Linear(), _batch()
    logits = model(batch).logits.double().numpy() / 0.5
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(3), batch["label"]]
    np.testing.assert_allclose(truth_loss(model, 0.5)(batch), expected, rtol=1e-5)
    clean = torch.zeros(3, 4)
    moved = displacement(lambda b: b["regions"].sum(1), clean)(batch)
    np.testing.assert_allclose(moved, (batch["regions"].numpy().sum(1) ** 2).sum(1), rtol=1e-5)


def test_the_attackers_head_minimises_its_loss() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32) * [1, 10, 0.1] + 2
    y = rng.integers(0, 3, 40)
    head = fit_head(torch.tensor(x, dtype=torch.float32), torch.tensor(y), 3, decay=0.01)
    z = (x - x.mean(0)) / x.std(0)
    w = head.weight.numpy() * x.std(0)  # as it acts on standardised activations
    scores = x @ head.weight.numpy().T + head.bias.numpy()
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    gradient = (p - np.eye(3)[y]).T @ z / len(y) + 2 * 0.01 * w
    assert np.abs(gradient).max() < 2e-3
    loss = surrogate_loss(lambda b: b["a"], head)({"a": torch.tensor(x, dtype=torch.float32), "label": torch.tensor(y)})
    np.testing.assert_allclose(loss, -np.log(p[np.arange(40), y]), rtol=1e-3, atol=1e-4)
    refuses("at least one example", fit_head, torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": -1.0}, "eps must not be negative, got -1"),
        ({"eps": float("nan")}, "eps must be a number, got nan"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
    ],
)
def test_faulty_settings_are_refused(options: dict[str, float], message: str) -> None:
    refuses(message, Trojan, **options)


def test_what_cannot_be_attacked_is_refused() -> None:
    model, batch = Linear(), _batch()
    with pytest.raises(ValueError, match="visual or text must be given"):
        Trojan()(batch, truth_loss(model), _rng())
    with pytest.raises(ValueError, match="no gradient"):
        Trojan()(batch, lambda b: torch.zeros(3), _rng(), visual=("regions", BOUNDS))


# Finished runs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trojan") / "run"
    run(load_recipe("fedvqa_scenes", TINY), folder)
    return folder


def test_a_server_that_keeps_a_part_leaves_the_attacker_to_guess(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = Victim(finished)
    questions = draw_questions(victim, 12, seed=0)
    assert questions.names == draw_questions(victim, 12, seed=0).names
    assert len(set(questions.names)) == 12
    settings = Trojan(eps=4, steps=2)
    (known,) = attack_victim(victim, questions, settings)
    assert known.threat == "whole model"
    method = type(victim.setup.algorithm)
    monkeypatch.setattr(method, "traits", replace(method.traits, splits=True))
    partly = attack_victim(victim, questions, settings)
    assert [row.threat for row in partly] == ["activations", "own head", "whole model"]
    for row in (known, *partly):
        assert torch.equal(row.correct["clean"], known.correct["clean"])
    assert torch.equal(partly[-1].correct["both"], known.correct["both"])  # seeded: the same search
    compared = paired([known, *partly])
    assert {entry["threat"] for entry in compared} == {"activations", "own head"}
    first = compared[-1]
    gap = partly[1].correct[first["condition"]].mean() - known.correct[first["condition"]].mean()
    assert first["difference"] == pytest.approx(float(gap))
    won = [int((partly[1].correct[c] > known.correct[c]).sum()) for c in CONDITIONS]
    lost = [int((partly[1].correct[c] < known.correct[c]).sum()) for c in CONDITIONS]
    for entry, n, m in zip(compared[len(CONDITIONS) :], won, lost, strict=True):
        exact = binomtest(min(n, m), n + m).pvalue if n + m else 1.0
        assert entry["p"] == pytest.approx(exact)  # of right and wrong answers sign flips are McNemar's exact test
        pair = [other["p"] for other in compared if other["condition"] == entry["condition"]]
        expected = 3 * entry["p"] if entry["p"] == min(pair) else max(3 * min(pair), 2 * entry["p"])
        assert entry["p_holm"] == pytest.approx(min(1.0, expected))
        assert entry["low"] is None or entry["low"] <= entry["difference"] <= entry["high"]


def test_differences_of_rows_are_corrected_over_all_pairs() -> None:
    def row(name: str, right: int, known: bool = True) -> Attacked:
        victim = cast("Victim", SimpleNamespace(name=name, partly_known=not known))
        correct = torch.tensor([1.0] * right + [0.0] * (20 - right))
        return Attacked(victim, "whole model", dict.fromkeys(CONDITIONS, correct))

    found = paired([row("a", 4), row("b", 12), row("hidden", 9, known=False), row("c", 11)])
    assert [entry["row"] for entry in found] == ["b"] * 4 + ["c"] * 4
    b, c = found[0], found[4]
    assert (b["difference"], c["difference"]) == pytest.approx((0.4, 0.35))
    assert (b["p"], c["p"]) == pytest.approx((2 * 0.5**8, 2 * 0.5**7))
    assert (b["p_holm"], c["p_holm"]) == pytest.approx((3 * b["p"], max(3 * b["p"], 2 * c["p"])))
    assert 0 < b["low"] < 0.4 < b["high"]
    few = paired([row("a", 1), row("b", 1)])
    assert (few[0]["low"], few[0]["high"], few[0]["p"]) == (None, None, 1.0)


def test_runs_of_one_name_are_told_apart(finished: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "run"
    shutil.copytree(finished, other)
    assert names_of([finished]) == ["run"]
    assert names_of([finished, other]) == [str(finished), str(other)]
    study = tmp_path / "study"
    for seed in (0, 1):
        shutil.copytree(finished, study / "fedavg" / f"seed-{seed}")
    runs = [{"method": "fedavg", "seed": seed, "folder": f"fedavg/seed-{seed}"} for seed in (1, 0)]
    (study / "summary.json").write_text(json.dumps({"runs": runs}))
    places = [study / run["folder"] for run in runs]
    assert names_of(places[:1]) == ["study/fedavg"]
    assert len(set(names_of(places))) == 2  # seeds of one row
    assert expand([study, finished, places[1], finished]) == ([places[1], finished], [])
    (study / "summary.json").write_text('{"runs": []}')
    refuses("is a study without runs", expand, [study])


def test_the_command_writes_a_page_tables_and_json(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["attack", str(finished), "--kind", "trojan", "--examples", "8", "--steps", "2", "--out", str(out)]
    assert command(*arguments, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    (row,) = values["rows"]
    assert row["threat"] == "whole model"
    assert 0 <= row["accuracy"]["both"] <= 1
    assert (out / "attack-trojan.json").is_file()
    page = (out / "attack-trojan.html").read_text()
    assert "the attacker has all weights" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "both" in (out / "attack-trojan.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "telepathy"], "--kind must be one of trojan"),
        (["--kind", "dual-key", "--eps", "1"], "--eps is no option of the attack 'dual-key'"),
        (["--kind", "dual-key"], "none of the runs was trained on poisoned data"),
        (["--kind", "dual-key", "--examples", "0"], "examples must be at least 1, got 0"),
        (["--kind", "trojan", "--eps", "0.5"], "eps must be at least 1 where a model reads pixels (run), got 0.5"),
        (["--kind", "trojan", "--examples", "0"], "examples must be at least 1, got 0"),
        (["--kind", "trojan", "--client", "nobody"], "no client is called 'nobody'"),
    ],
)
def test_faulty_commands_say_why(
    finished: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("attack", str(finished), *arguments) == 2
    assert message in capsys.readouterr().err
