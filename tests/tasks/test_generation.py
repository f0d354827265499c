"""Tasks whose answers are written: one answer, and several with scores."""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from confed.algorithms.feddat import FedDAT
from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.table import concatenate_tables
from confed.engines.perform import Workspace
from confed.federation.client import Client
from confed.federation.families.branches import Branches
from confed.federation.messages import Message
from confed.federation.params import Scope
from confed.federation.protocols import Output, Task
from confed.federation.state import ClientState
from confed.models.albef import albef_mini, mini_answer_tokenizer
from confed.models.answer_ranking import OUTSIDE
from confed.models.blip import blip_mini
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


SEVERAL = ("yes", "no", "dark blue", "light blue", "very dark blue")
GONE = None
GIVEN = (  # per question: answer and weight, or a place without an answer
    (("dark blue", 0.5), ("yes", 0.3), ("light blue", 0.2)),
    (("no", 1.0), GONE, GONE),
    (("yes", 0.7), GONE, ("no", 0.2)),
)


def asked_by_several(given: Any = GIVEN) -> dict[str, Tensor]:
    """Three questions with up to three answers each; there is more padding than needed on every side."""
    tokenizer = mini_answer_tokenizer(["is", "it"], SEVERAL)
    ids = F.pad(tokenizer.answers(SEVERAL), (0, 1))
    text, mask = tokenizer(["is it", "is it dark", "it"])
    tokens, weight = torch.zeros(3, 4, ids.shape[1], dtype=torch.int64), torch.zeros(3, 4)
    for row, answers in enumerate(given):
        for slot, answer in enumerate(answers):
            if answer is not GONE:
                tokens[row, slot], weight[row, slot] = ids[SEVERAL.index(answer[0])], answer[1]
    image = torch.randint(0, 256, (3, 3, 64, 64), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    batch = {"image": image, "text": text, "text_mask": mask, "label": torch.tensor([2, 1, 0])}
    return batch | {"answer_tokens": tokens, "answer_weight": weight}


def vocabulary() -> int:
    return mini_answer_tokenizer(["is", "it"], SEVERAL).vocab_size


def writer(kind: Any, trainable: Any = "all") -> Any:
    """A mini with random weights large enough to matter."""
    model = kind(5, vocabulary(), pretrained=False, trainable=trainable)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


def unbatchable_reason(batch: Mapping[str, Tensor]) -> list[tuple[int, int, dict[str, Tensor]]]:
    """Question, place and a batch of that question with that answer alone, for each answer there is."""
    found: list[tuple[int, int, dict[str, Tensor]]] = []
    for row, slot in batch["answer_weight"].nonzero().tolist():
        alone = {n: t[row : row + 1] for n, t in batch.items() if not n.startswith("answer")}
        tokens = batch["answer_tokens"][row, slot]
        found.append((row, slot, alone | {"answer_tokens": tokens[None, : int((tokens != 0).sum())]}))
    return found


def loop(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss: one pass and one plain cross-entropy per answer."""
    total = torch.zeros((), dtype=torch.float64)
    for row, slot, alone in unbatchable_reason(batch):
        scores, target = model(alone).logits[0], alone["answer_tokens"][0, 1:]
        total = total + batch["answer_weight"][row, slot] * F.cross_entropy(scores, target, reduction="sum")
    return total / len(batch["text"])


ALL = (GIVEN[0], GIVEN[0], GIVEN[0])
"""Every place taken."""
SINGLE = tuple((row[0],) for row in GIVEN)


@pytest.mark.parametrize("kind", [albef_mini, blip_mini])
@pytest.mark.parametrize("given", [GIVEN, ALL, SINGLE])
def test_loss_and_gradient_are_those_of_single_answers(kind: Any, given: Any):
    model, batch = writer(kind).double(), asked_by_several(given)
    wanted = loop(model, batch)
    slow = torch.autograd.grad(wanted, list(model.parameters()))
    output = model(batch)
    loss = Generation(5).loss(output, batch)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-9)
    assert output.logits.shape == (int((batch["answer_weight"] > 0).sum()), 3, vocabulary())
    assert len(output.features) == 3
    for fast, plain in zip(torch.autograd.grad(loss, list(model.parameters())), slow, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-11)


def test_the_question_is_encoded_once_for_all_answers():
    model, batch = writer(albef_mini), asked_by_several()
    rows: dict[str, list[int]] = {}

    def count(name: str) -> Any:
        return lambda _, __, output: rows.setdefault(name, []).append(output.shape[0] * output.shape[1])

    layer = model.text_decoder.bert.encoder.layer[1]
    model.visual_encoder.embeddings.register_forward_hook(count("picture"))
    model.text_encoder.embeddings.register_forward_hook(count("question"))
    layer.intermediate.register_forward_hook(count("answer"))
    layer.crossattention.self.key.register_forward_hook(count("keys"))
    model(batch)
    assert rows == {"picture": [3 * 17], "question": [3 * 16], "answer": [6 * 3], "keys": [3 * 16]}


def test_the_loss_by_hand():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(3, 2, 7))  # three answers of two questions, two tokens each
    tokens = torch.tensor([[[1, 4, 2, 0], [1, 2, 0, 0]], [[9, 9, 9, 9], [1, 5, 2, 0]]])
    weight = torch.tensor([[0.6, 0.4], [0.0, 0.5]])
    surprise = [sum(np.log(np.exp(s).sum()) - s[t] for s, t in zip(row, ids, strict=False)) for row, ids in zip(
        scores, ([4, 2], [2], [5, 2]), strict=True)]  # fmt: skip
    batch = {"answer_tokens": tokens, "answer_weight": weight, "label": torch.tensor([0, 1])}
    output = Output(torch.tensor(scores), torch.zeros(2, 4))
    assert token_loss(output.logits, batch).tolist() == pytest.approx(surprise)
    wanted = 0.6 * surprise[0] + 0.4 * surprise[1] + 0.5 * surprise[2]
    task = Generation(3)
    assert task.loss(output, batch).item() == pytest.approx(wanted / 2)
    assert task.tally(output, batch)["loss"] == (pytest.approx(wanted), 2.0)


def test_a_question_scores_the_weights_of_written_answers():
    tokens = torch.tensor([[[1, 4, 2], [1, 2, 0]], [[1, 5, 2], [0, 0, 0]]])
    batch = {"answer_tokens": tokens, "answer_weight": torch.tensor([[0.7, 0.3], [0.9, 0.0]])}
    logits = F.one_hot(torch.tensor([[4, 2], [3, 2], [5, 2]]), 7).float()  # of the second answer the token is wrong
    output = Output(logits, torch.zeros(2, 4))
    assert Generation(3).predictions(output, batch).tolist() == pytest.approx([0.7, 0.9])
    assert Generation(3).tally(output, batch)["accuracy"] == (pytest.approx(1.6), 2.0)


def test_faulty_scores_and_columns_are_refused():
    model, batch = writer(albef_mini), asked_by_several()
    without = {n: t for n, t in batch.items() if n != "answer_weight"}
    message = r"several answers need batch\['answer_weight'\] of shape \(3, 4\)"
    refuses(message + ", positive where there is an answer, got none", model, without)
    refuses(message + r".*got shape \(3,\)", model, without | {"answer_weight": torch.ones(3)})
    refuses(message + ", got none", Generation(5).tally, model(batch), without)
    with pytest.raises(ValueError, match=r"answer_tokens'\] of shape \(6, 3\), got shape \(6, 6\)"):
        token_loss(model(batch).logits[:, :2], batch)  # the longest answer has one token more
    refuses(r"shape \(B, T\), got shape \(3, 4, 6\)", model.pretraining_states, batch)


# FedDAT's two branches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [GIVEN, SINGLE])
@pytest.mark.parametrize("kind", [albef_mini, blip_mini])
def test_branches_share_what_is_equal(kind: Any, given: Any):
    model, batch = writer(kind, "adapters"), asked_by_several(given)
    model.adapters.add("local", torch.Generator().manual_seed(1))
    branches = Branches(model, "test", Generation(5))
    assert branches.split
    passes: list[int] = []
    model.text_decoder.bert.encoder.layer[0].register_forward_hook(lambda *_: passes.append(1))
    model.text_decoder.bert.encoder.layer[0].attention.register_forward_hook(lambda *_: passes.append(1))
    state, blends = branches.begin(batch), ({"adapter": 1.0}, {"adapter": 0.5, "local": 0.5})
    different: list[Tensor] = []
    for blend, together in zip(blends, branches.together(state, *blends), strict=True):
        with model.adapters.using(blend):
            alone = model(batch)
        passes.clear()
        output, again = branches.answered(state, blend)
        assert again is not None
        repeated = again()
        assert len(passes) == 1  # the decoder ran once
        for other in (together, output, repeated):
            torch.testing.assert_close(other.logits, alone.logits, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(other.features, alone.features, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            model.text_decoder.cls.predictions.bias.add_(1)
        torch.testing.assert_close(again().logits, output.logits + 1)
        with torch.no_grad():
            model.text_decoder.cls.predictions.bias.sub_(1)
        different.append(alone.logits)
    assert not torch.allclose(different[0], different[1], atol=1e-3)
    assert branches.answered(branches.begin(batch), {})[1] is not None
    choosing = {n: t for n, t in batch.items() if not n.startswith("answer_")}
    model.begin(Generation(5).choosing(mini_answer_tokenizer(["is", "it"], SEVERAL).answers(SEVERAL)))
    output, again = branches.answered(branches.begin(choosing), {})
    assert output.logits.shape == (3, 5)
    assert again is None  # there the head is in the middle of the pass


# Data ---------------------------------------------------------------------------------------------------------


def people() -> FederatedDataset:
    """A client whose questions ten people answered, one whose questions have one answer."""

    def examples(answers: tuple[str, ...], annotations: Any = None) -> Examples:
        n = len(answers)
        images = np.zeros((n, 64, 64, 3), dtype=np.uint8)
        kinds, names = ["all"] * n, [f"{i}" for i in range(n)]
        return Examples(images, np.arange(n), ["is it"] * n, answers, kinds, names, annotations)

    several = [
        ("yes",) * 6 + ("no",) * 3 + ("dark blue",),  # the last one is in the other client's pool only
        ("no",) * 7 + ("turquoise",) * 2 + ("?",),  # a word that nobody knows, and no word at all
        ("dark-blue",) * 2 + ("Dark blue",) * 3 + ("yes",) * 5,  # one answer in two spellings
        ("turquoise",) * 10,
    ]
    a, b = examples(("yes", "no", "yes", "no"), several), examples(("dark blue", "yes"))
    pools = {"a": ("yes", "no"), "b": ("dark blue", "light blue", "yes")}
    union = ("yes", "no", "dark blue", "light blue")
    return FederatedDataset(
        "people", union, {"a": Split(a, a, a), "b": Split(b, b, b)}, {}, ("is", "it"), answer_sets=pools
    )


def prepared(folder: Path, method: str = "fedpeft", data: str = "people", **algorithm: Any) -> Any:
    file = folder / f"{method}-{data}.toml"
    options = "".join(f"{key} = {value!r}\n" for key, value in algorithm.items())
    file.write_text(
        f'[algorithm]\nname = "{method}"\n{options}[model]\nname = "albef_mini"\npretrained = false\n'
        f'trainable = "adapters"\n[task]\nname = "generation"\n[data]\n'
        f'name = "test_generation:{data}"\n'
        "[local]\nbatch_size = 3\nepochs = 2\nlr = 0.01\n[run]\nrounds = 1\n"
    )
    return prepare(load_recipe(file))


def test_answers_are_learned_by_the_share_of_people(tmp_path: Path):
    _, run_data = prepared(tmp_path)
    tokens = run_data.answer_tokens
    yes, no, dark = (tuple(row) for row in tokens[:3].tolist())
    rows = run_data.clients["a"].tables[0].columns
    read = [
        {tuple(t): pytest.approx(w) for t, w in zip(answers, weights, strict=True) if w > 0}
        for answers, weights in zip(rows["answer_tokens"].tolist(), rows["answer_weight"].tolist(), strict=True)
    ]
    assert read == [{yes: 0.6, no: 0.3, dark: 0.1}, {no: 0.7}, {yes: 0.5, dark: 0.5}, {no: 1.0}]
    assert rows["answer_tokens"].shape == (4, 3, 4)
    assert (rows["answer_weight"].diff(dim=1) <= 0).all()  # places without an answer come last
    single = run_data.clients["b"].tables[0].columns
    assert single["answer_weight"].tolist() == [[1, 0, 0], [1, 0, 0]]
    assert [tuple(row) for row in single["answer_tokens"][:, 0].tolist()] == [dark, yes]
    together = concatenate_tables([client.tables[0] for client in (run_data.clients["b"], run_data.clients["b"])])
    assert together.columns["answer_tokens"].shape == (4, 3, 4)
    assert all("answer_tokens" not in run_data.clients["a"].tables[part].columns for part in (1, 2))


def test_at_most_ten_different_answers_are_learned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("confed.runs.encode.MOST_ANSWERS", 2)
    rows = prepared(tmp_path, data="fewer")[1].clients["a"].tables[0].columns
    torch.testing.assert_close(rows["answer_weight"][0], torch.tensor([0.6, 0.3]))


def fewer() -> FederatedDataset:
    """The same data under another name, which nothing has been kept of."""
    return people()


def test_clients_answered_once_keep_one_answer_per_row(tmp_path: Path):
    _, run_data = prepared(tmp_path, data="once")
    columns = run_data.clients["b"].tables[0].columns
    assert columns["answer_tokens"].shape == (2, 4)
    assert "answer_weight" not in columns


def once() -> FederatedDataset:
    """Nobody was asked twice."""
    data = people()
    b = data.clients["b"]
    return FederatedDataset("once", data.answers, {"b": b}, {}, data.words, answer_sets={"b": data.answer_sets["b"]})


@pytest.mark.parametrize("order", ["shared_first", "teacher_first"])
def test_feddat_fits_as_if_it_ran_the_second_branch_anew(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fit() -> dict[str, Tensor]:
        setup, _ = prepared(tmp_path, "feddat", order=order, preset="code")
        assert isinstance(setup.algorithm, FedDAT)
        workspace = Workspace(setup.model())
        info = next(i for i in map(setup.population.info, range(2)) if i.id == "a")
        shared = (setup.data("a"), workspace.model, workspace.tensors, setup.task_of("a"), setup.local, ClientState())
        client = Client(
            info, *shared, workspace.scopes(setup.algorithm, info), workspace.initial, round=0, rounds=1, seed=0
        )
        start = {n: workspace.initial[n].clone() for n in client.names(Scope.SHARED)}
        sent = setup.algorithm.actions()["fit"](client, Message(copy.deepcopy(start)))
        assert all(not torch.equal(sent.tensors[n], start[n]) for n in start)
        return {**sent.tensors, **client.state.tensors["private"]}

    fast = fit()
    monkeypatch.setattr(Branches, "answered", lambda self, state, blend: (self.run(state, blend), None))
    plain = fit()
    assert fast.keys() == plain.keys()
    for name, tensor in fast.items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-5, atol=1e-6, msg=name)
