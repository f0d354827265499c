"""Answers as texts: the loss of their tokens, and candidates ranked by likelihood."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from confed.data.examples import Examples, FederatedDataset, Split
from confed.federation.protocols import Output, Task
from confed.models.albef import albef_mini, mini_answer_tokenizer
from confed.models.answer_ranking import OUTSIDE
from confed.models.caption_tokenizer import AnswerTokenizer, words_of
from confed.models.tokenizer import WordTokenizer
from confed.recipes.recipe import load_recipe
from confed.runs.run import prepare
from confed.tasks.generation import Generation, token_loss
from refusals import refuses

ANSWERS = ("yes", "no", "dark blue", "light blue", "dark red")


def scores() -> tuple[Tensor, dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    tokens = torch.tensor([[1, 4, 2, 0], [1, 5, 3, 2]])
    return torch.randn(2, 3, 6, generator=rng), {"answer_tokens": tokens, "label": torch.tensor([0, 1])}


def by_hand(logits: Tensor, tokens: Tensor) -> list[float]:
    """-log p(answer) of each row, with loops."""
    losses: list[float] = []
    for row, ids in zip(logits.double().numpy(), tokens.tolist(), strict=True):
        total = 0.0
        for t, target in enumerate(ids[1:]):
            if target != 0:
                total += math.log(np.exp(row[t]).sum()) - row[t][target]
        losses.append(total)
    return losses


def test_the_loss_is_summed_over_tokens_and_divided_by_the_batch():
    logits, batch = scores()
    wanted = by_hand(logits, batch["answer_tokens"])
    assert token_loss(logits, batch).tolist() == pytest.approx(wanted, rel=1e-5)
    task, output = Generation(3), Output(logits, torch.zeros(2, 4))
    assert task.loss(output, batch).item() == pytest.approx(sum(wanted) / 2, rel=1e-5)
    weighted = batch | {"answer_weight": torch.tensor([0.5, 0.1])}
    assert task.loss(output, weighted).item() == pytest.approx((0.5 * wanted[0] + 0.1 * wanted[1]) / 2, rel=1e-5)
    tally = task.tally(output, batch)
    assert tally["loss"] == (pytest.approx(sum(wanted), rel=1e-5), 2.0)


def test_a_text_is_right_if_all_its_tokens_are():
    logits, batch = scores()
    logits = logits.zero_()
    for row, ids in enumerate(batch["answer_tokens"].tolist()):
        for t, target in enumerate(ids[1:]):
            logits[row, t, target] = 1.0
    logits[0, 2] = torch.arange(6.0)  # behind the end nothing counts
    logits[1, 1, 0] = 2.0
    assert Generation(3).predictions(Output(logits, logits), batch).tolist() == [1.0, 0.0]


def test_candidates_are_scored_as_classes():
    batch = {"label": torch.tensor([1, 0]), "target": torch.tensor([[0.3, 0.6, 0.0], [0.0, 0.9, 0.3]])}
    output = Output(torch.tensor([[-1.0, -2.0, OUTSIDE], [-5.0, -4.0, -0.5]]), torch.zeros(2, 4))
    values = {s: Generation(3, s).predictions(output, batch).tolist() for s in ("exact", "soft", "any")}  # pyright: ignore
    assert values == {"exact": [0.0, 0.0], "soft": [pytest.approx(0.3)] * 2, "any": [1.0, 1.0]}
    assert Generation(3).metric == "accuracy"
    assert Generation(3, "soft").metric == "vqa_accuracy"
    total, weight = Generation(3, "any").tally(output, batch)["vqa_any"]
    assert (total, weight) == (2.0, 2.0)
    anybody = Generation(3, "any", ("colour",))
    found = anybody.tally(output, {**batch, "type": torch.tensor([0, 0])})
    assert anybody.metric == "vqa_any"
    assert found["vqa_any/colour"] == (2.0, 2.0)
    assert {"vqa_any", "vqa_any/colour"} <= anybody.measures.keys()
    # What is told is declared, and nothing goes by the name of the soft score.
    assert {key.partition("/")[0] for key in found} <= {key.partition("/")[0] for key in anybody.measures}
    assert not any("vqa_accuracy" in key for key in (*found, *anybody.measures))
    # The softmax over candidates of -1 and -2: e / (e + 1) and 1 / (e + 1); the loss is over candidates, too.
    assert Generation(3).tally(output, batch)["loss"][0] == pytest.approx(
        math.log(1 + math.e) + 5 + math.log(math.exp(-5) + math.exp(-4) + math.exp(-0.5)), rel=1e-4
    )


def asked() -> tuple[AnswerTokenizer, dict[str, Tensor]]:
    tokenizer = mini_answer_tokenizer(["is", "it"], ANSWERS)
    text, mask = tokenizer(["is it", "is it dark"])
    image = torch.randint(0, 256, (2, 3, 64, 64), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    return tokenizer, {"image": image, "text": text, "text_mask": mask}


def ranked(k: int) -> tuple[Tensor, Tensor]:
    """Scores of all candidates, and each one's log-likelihood from token scores of that candidate alone."""
    tokenizer, batch = asked()
    model = albef_mini(5, tokenizer.vocab_size, pretrained=False, k=k).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
        task = Generation(5).choosing(tokenizer.answers(ANSWERS))
        model.begin(task)
        found = model(batch).logits
        assert task.candidates is not None
        alone = [batch | {"answer_tokens": row.expand(2, -1)} for row in task.candidates]
        wanted = [[-v for v in by_hand(model(b).logits, b["answer_tokens"])] for b in alone]
    return found, torch.tensor(wanted).T


@pytest.mark.parametrize("at_once", [1, 2**15])
def test_scores_are_log_likelihoods(at_once: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("confed.models.answer_ranking._TOKENS", at_once)  # question by question, or all in one
    found, wanted = ranked(k=5)
    assert wanted.std() > 0.1
    torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-4)


def test_only_the_k_best_first_tokens_are_compared():
    everything, _ = ranked(k=5)
    few, wanted = ranked(k=2)
    assert few.isfinite().all()
    assert ((few > OUTSIDE / 2).sum(1) == 2).all()
    kept = few > OUTSIDE / 2
    torch.testing.assert_close(few[kept], everything[kept], rtol=1e-4, atol=1e-4)
    assert (few.argmax(1) == wanted.where(kept, torch.tensor(-math.inf)).argmax(1)).all()


def test_of_equal_first_tokens_the_earlier_candidates_compete():
    answers = tuple(f"dark {word}" for word in ("red", "blue", "grey", "green", "brown"))
    tokenizer, batch = asked()
    tokenizer = mini_answer_tokenizer(["is", "it"], answers)
    model = albef_mini(5, tokenizer.vocab_size, pretrained=False, k=3).eval()
    model.begin(Generation(5).choosing(tokenizer.answers(answers)))
    with torch.no_grad():
        kept = model(batch).logits > OUTSIDE / 2
    assert kept.tolist() == [[True, True, True, False, False]] * 2


def test_probabilities_of_all_first_words_add_up_to_one():
    tokenizer, batch = asked()
    model = albef_mini(1, tokenizer.vocab_size, pretrained=False, k=1000).eval()
    words = torch.arange(1, tokenizer.vocab_size)
    # Texts of one token: a start and a word; the padding token is no text, its probability is missing.
    task = Generation(1).choosing(torch.stack([torch.full_like(words, 2), words], 1))
    model.begin(task)
    with torch.no_grad():
        total = model(batch).logits.double().exp().sum(1)
        tokens = batch | {"answer_tokens": torch.tensor([[2, 1], [2, 1]])}
        padding = model(tokens).logits[:, 0].double().softmax(-1)[:, 0]
    torch.testing.assert_close(total + padding, torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-5)


def test_answers_become_tokens_from_start_to_end():
    tokenizer = AnswerTokenizer(WordTokenizer(["is", "it", *words_of(ANSWERS)], 8))
    ids = tokenizer.answers(["yes", "dark blue"])
    start, end = 2, 3
    place = {word: 7 + i for i, word in enumerate(tokenizer.words)}
    assert ids.tolist() == [[start, place["yes"], end, 0], [start, place["dark"], place["blue"], end]]
    assert words_of(["T-shirt", "t shirt", "3"]) == ("t", "shirt", "3")
    refuses("the answers 'blue' and 'Blue!' have the same tokens", tokenizer.answers, ["blue", "Blue!"])


def test_questions_may_lack_their_closing_token():
    closed, opened = (AnswerTokenizer(WordTokenizer(["is", "it"], 5), closing) for closing in (True, False))
    assert closed(["is it", "it"])[0].tolist() == [[2, 7, 8, 3, 0], [2, 8, 3, 0, 0]]
    ids, mask = opened(["is it", "it"])
    assert ids.tolist() == [[2, 7, 8, 0, 0], [2, 8, 0, 0, 0]]
    assert mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert opened.answers(["it"]).tolist() == [[2, 8, 3]]


def test_what_does_not_fit_is_refused():
    logits, batch = scores()
    with pytest.raises(ValueError, match=r"answer_tokens'\] of shape \(2, 4\), got none"):
        Generation(3).loss(Output(logits, logits), {"label": batch["label"]})
    with pytest.raises(ValueError, match=r"of shape \(2, 4\), got shape \(2, 3\)"):
        token_loss(logits, {"answer_tokens": batch["answer_tokens"][:, :3]})
    refuses("scores must be one of exact, soft, any, got 'best'", Generation, 3, "best")
    refuses("answers must be at least 1", Generation, 0)
    assert isinstance(Generation(3), Task)


def two_sites() -> FederatedDataset:
    """Two clients with answers of their own."""

    def examples(*answers: str) -> Examples:
        n = len(answers)
        images = np.zeros((n, 64, 64, 3), dtype=np.uint8)
        return Examples(images, np.arange(n), ["is it"] * n, answers, ["all"] * n, [f"{i}" for i in range(n)])

    a, b = examples("yes", "no", "yes"), examples("dark blue", "yes")
    pools = {"a": ("yes", "no"), "b": ("dark blue", "light blue", "yes")}
    splits = {"a": Split(a, a, a), "b": Split(b, b, b)}
    return FederatedDataset(
        "two_sites", ("yes", "no", "dark blue", "light blue"), splits, {}, ("is", "it"), answer_sets=pools
    )


RECIPE = """
[algorithm]
name = "fedavg"
[model]
name = "MODEL"
pretrained = false
[task]
name = "TASK"
[data]
name = "test_generation:two_sites"
[local]
batch_size = 2
[run]
rounds = 1
"""


def recipe(folder: Path, model: str, task: str):
    file = folder / f"{model}-{task}.toml"
    file.write_text(RECIPE.replace("MODEL", model).replace("TASK", task))
    return load_recipe(file)


def test_clients_choose_among_their_own_answers(tmp_path: Path):
    setup, run_data = prepare(recipe(tmp_path, "albef_mini", "generation"))
    tokens = run_data.answer_tokens
    assert tokens is not None
    assert tokens.shape == (4, 4)
    given = next(iter(setup.data("b").train(2, torch.Generator().manual_seed(0))))
    rows = {2: "dark blue", 0: "yes"}
    assert {tuple(r) for r in given["answer_tokens"].tolist()} == {tuple(tokens[i].tolist()) for i in rows}
    assert all("answer_tokens" not in batch for batch in setup.data("b").test(2))
    for client, wanted in (("a", [0, 1]), ("b", [2, 3, 0])):
        task = setup.task_of(client)
        assert isinstance(task, Generation)
        assert task.candidates is not None
        assert torch.equal(task.candidates, tokens[wanted])
    model = setup.model()
    batch = next(iter(setup.data("b").test(2)))
    assert model(batch).logits.shape == (2, 4)
    assert setup.algorithm.global_model == "alone"


def test_models_and_tasks_that_do_not_fit_each_other_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"'blip_mini' writes its answers: set task\.name = \"generation\""):
        prepare(recipe(tmp_path, "blip_mini", "vqa"))
    with pytest.raises(
        ValueError, match=r"'vilt_mini' does not write answers: set task\.name = \"vqa\", got 'generation'"
    ):
        prepare(recipe(tmp_path, "vilt_mini", "generation"))


def test_a_task_without_candidates_is_equal_to_one_with_them():
    task = Generation(2, types=("a",))
    assert task.choosing(torch.tensor([[1, 2], [1, 3]])) == task
    assert replace(task, answers=3).candidates is None
