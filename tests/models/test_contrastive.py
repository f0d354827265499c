"""Answers by similarity: modules against NumPy, the task, and training of whole models."""

import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.datasets.scene_classes import RESERVED
from confed.engines.local import Simulation, Workspace, simulate
from confed.federation.algorithm import Algorithm
from confed.federation.evaluate import Tally, evaluate
from confed.federation.families.branches import Branches
from confed.federation.families.prompts import CONTEXT
from confed.federation.local import Local
from confed.federation.params import named_tensors
from confed.federation.protocols import Output, SingleLabel, Task
from confed.federation.state import MemoryStore
from confed.federation.structure import adapters_of
from confed.federation.teacher import teacher
from confed.federation.traits import Traits
from confed.losses.info_nce import Contrast, info_nce
from confed.models import create_model
from confed.models.clip import (
    FAMILIES,
    _processor,  # pyright: ignore[reportPrivateUsage]
)
from confed.models.contrastive import AnswerProjection, ContrastiveAnswerer, NonlinearHeadAdapter, answer_words
from confed.models.pretrained import WEIGHTS, describe
from confed.prepare.pretraining import MINIS, pretrain
from confed.prepare.pretraining.dual import coloured_things_told
from confed.recipes.recipe import load_recipe
from confed.runs.build import prepare
from confed.tasks.contrastive import Contrastive, same_answer_share
from confed.tasks.vqa import VQA
from confed.testing import CHECKS
from confed.testing.toy import toy_clients, toy_contrastive_model, toy_contrastive_task, toy_model, toy_setup
from refusals import refuses

ANSWERS = ("yes", "no no no", "dark red", "Red")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def apn(**changes: Any) -> AnswerProjection:
    options: dict[str, Any] = {"words": 4, "hidden": 6, "masked": True, "table": None, "width": 5, "rng": seeded()}
    return AnswerProjection(ANSWERS, **{**options, **changes})


def toy_batch(rows: int = 6, seed: int = 1) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 6, generator=seeded(seed)), "label": torch.arange(rows) % 3}


# APN, NHA, LTA ----------------------------------------------------------------------------------------------------


def by_hand(module: AnswerProjection, answer: str, words: int) -> np.ndarray:
    """One answer through APN, word by word."""
    vocabulary = AnswerProjection.vocabulary(ANSWERS, words)
    table, weight, bias = (
        t.detach().numpy() for t in (module.embedding.weight, module.project.weight, module.project.bias)
    )
    rows = [table[vocabulary.index(word)] for word in answer.lower().split()[:words]]
    if not module.masked:
        rows += [np.zeros_like(table[0])] * (words - len(rows))
    return np.max([np.maximum(weight @ row + bias, 0) for row in rows], axis=0)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("words", [1, 2, 4])
def test_answer_projection_against_loops(masked: bool, words: int) -> None:
    module = apn(masked=masked, words=words)
    wanted = np.stack([by_hand(module, answer, words) for answer in ANSWERS])
    with torch.no_grad():
        np.testing.assert_allclose(module.all_answers().numpy(), wanted, rtol=1e-5, atol=1e-6)
        labels = torch.tensor([3, 0, 2, 0, 1])
        np.testing.assert_allclose(module(labels).numpy(), wanted[labels.numpy()], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset", ["paper", "code"])
def test_the_papers_answer_projection_is_padded_with_zeros(preset: Any) -> None:
    """8 words, padded with vectors of zeros; a linear layer, ReLU, and the maximum over all 8 positions."""
    task = Contrastive(len(ANSWERS), preset=preset, width=4, hidden=16, embedding=5)
    module: Any = task.wrap(toy_model(noisy=False), ANSWERS, seeded()).apn
    with torch.no_grad():
        module.project.bias.normal_(generator=seeded(1))  # biases begin at 0, where padding cannot win
    vocabulary = AnswerProjection.vocabulary(ANSWERS, 8)
    table, weight, bias = (t.detach().numpy() for t in (module.embedding.weight, *module.project.parameters()))
    for label, answer in enumerate(ANSWERS):
        padded = np.zeros((8, 5), np.float32)
        for position, word in enumerate(answer.lower().split()):
            padded[position] = table[vocabulary.index(word)]
        activations = np.maximum(padded @ weight.T + bias, 0)
        wanted = activations.max(axis=0)
        own = activations[: len(answer.split())].max(axis=0)
        assert not np.allclose(wanted, own), "a padded position wins somewhere"
        with torch.no_grad():
            np.testing.assert_allclose(module.all_answers()[label].numpy(), wanted, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(module(torch.tensor([label]))[0].numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_rows_of_the_official_recipe_warm_up_for_10_000_steps() -> None:
    recipe = load_recipe("bicsl_vqa2_official", ["data.root=somewhere"])
    for row in recipe.methods:
        own = recipe.method(row)
        clients = 1 if own.sections["algorithm"]["name"] == "central" else 2
        steps = 443_757 / clients / own.local.batch_size * own.local.epochs * own.run.rounds
        assert own.local.schedule.warmup * steps == pytest.approx(10_000, rel=0.005), row


def test_equal_answers_have_exactly_equal_rows() -> None:
    module, labels = apn(hidden=37, width=61), torch.randint(0, 4, (129,), generator=seeded())
    rows = module(labels)
    assert len(torch.unique(rows.detach(), dim=0)) == 4
    # Their gradients add up.
    rows.sum().backward()
    once = apn(hidden=37, width=61)
    (once(torch.arange(4)) * labels.bincount(minlength=4).unsqueeze(1)).sum().backward()
    torch.testing.assert_close(module.project.weight.grad, once.project.weight.grad, rtol=1e-4, atol=1e-4)


def test_padding_can_win_the_maximum_only_where_it_is_not_masked() -> None:
    table, labels = torch.full((4, 3), 1.0), torch.arange(4)
    for masked, wanted in ((True, 0.0), (False, 2.0)):
        module = apn(masked=masked, table=table, hidden=1)
        with torch.no_grad():
            module.project.weight.fill_(-9.0)
            module.project.bias.fill_(2.0)
        # A word gives ReLU(-27 + 2) = 0, a position of zeros ReLU(2); no answer here fills four positions.
        assert module(labels).tolist() == module.all_answers().tolist() == [[wanted]] * 4


def test_answers_become_words() -> None:
    assert answer_words("T-shirt, 2 of it's") == ("t", "shirt", "2", "of", "it", "s")
    assert answer_words(" ? ") == ("?",)
    assert answer_words("") == ("",)
    assert AnswerProjection.vocabulary(("b a", "a c", "C d e"), 2) == ("b", "a", "c", "d")
    strange = AnswerProjection(("", "?"), words=2, hidden=3, masked=True, table=None, width=4, rng=seeded())
    assert strange.all_answers().shape == (2, 3)


def test_embeddings_are_learned_or_frozen() -> None:
    learned = apn()
    learned(torch.tensor([0, 1])).sum().backward()
    gradient = learned.embedding.weight.grad
    assert gradient is not None
    assert gradient[:2].abs().sum() > 0  # "yes", "no"
    assert gradient[2:].abs().sum() == 0
    assert not apn(table=torch.ones(4, 3)).embedding.weight.requires_grad


def test_answers_without_word_vectors_are_refused() -> None:
    table = torch.ones(4, 3)
    table[2:] = 0  # "dark" and "red" are unknown
    refuses(r"2 of 4 answers have a word with a vector; 2 have none \('dark red', 'Red'\)", apn, table=table)
    table[2] = 1  # "dark" is known: enough for "dark red", not for "Red"
    refuses(
        r"3 of 4 answers have a word with a vector; 1 have none \('Red'\), more than task\.glove_mis", apn, table=table
    )
    refuses("must have 4 rows, got 3", apn, table=table[:3])
    with pytest.raises(ValueError, match="answer_words must be at least 1, got 0"):
        apn(words=0)
    with pytest.raises(ValueError, match="at least one answer"):
        AnswerProjection((), words=1, hidden=1, masked=True, table=None, width=1, rng=seeded())


def test_glove_vectors_of_a_file(tmp_path: Path) -> None:
    pytest.importorskip("confed.data.glove")
    file = tmp_path / "glove.3d.txt"
    file.write_text("red 1 2 3\nthe 0 0 1\ndark 0.5 -1 0\nblue 0 1 0\n")
    model = toy_contrastive_model(glove=file)
    assert model.apn.embedding.weight.tolist() == [[1, 2, 3], [0.5, -1, 0], [0, 1, 0]]
    assert model.frozen == {"mha.stem.weight", "mha.stem.bias", "apn.embedding.weight"}
    file.write_text("red 1 2 3\ndark 0.5 -1 0\n")
    with pytest.raises(
        ValueError, match=r"answers have a word with a vector; 1 have none \('blue'\), more than task\.glove_mi"
    ):
        toy_contrastive_model(glove=file)
    with pytest.warns(UserWarning, match=r"answers have a word with a vector; the others start as zeros: 'blue'"):
        model = toy_contrastive_model(glove=file, glove_missing=0.5)
    assert bool(model.apn.all_answers().isfinite().all())


def test_nonlinear_head_adapter_by_hand() -> None:
    module = NonlinearHeadAdapter(3, 4, 2, True, seeded())
    x = torch.randn(5, 3, generator=seeded(2))
    first, second = (
        [t.detach().numpy() for t in (layer.weight, layer.bias)] for layer in (module.first, module.second)
    )
    plain = np.maximum(x.numpy() @ first[0].T + first[1], 0) @ second[0].T + second[1]
    wanted = (plain - plain.mean(0)) / np.sqrt(plain.var(0) + 1e-5)
    np.testing.assert_allclose(module(x).detach().numpy(), wanted, rtol=1e-4, atol=1e-5)
    module = NonlinearHeadAdapter(3, 4, 2, True, seeded()).eval()
    np.testing.assert_allclose(module(x).detach().numpy(), plain / np.sqrt(1 + 1e-5), rtol=1e-5, atol=1e-6)
    assert max(p.abs().max().item() for p in module.first.parameters()) <= 3**-0.5


def test_sizes_of_the_paper() -> None:
    model = ContrastiveAnswerer(create_model("vilt_tiny", answers=2, vocab_size=9), ("yes", "no"), rng=seeded())
    sizes = {name: tuple(t.shape) for name, t in named_tensors(model).items() if not name.startswith("mha.")}
    assert sizes == {
        "apn.embedding.weight": (2, 300),
        "apn.project.weight": (512, 300),
        "apn.project.bias": (512,),
        "nha.first.weight": (512, 32),
        "nha.first.bias": (512,),
        "nha.second.weight": (256, 512),
        "nha.second.bias": (256,),
        "nha.norm.weight": (256,),
        "nha.norm.bias": (256,),
        "nha.norm.running_mean": (256,),
        "nha.norm.running_var": (256,),
        "nha.norm.num_batches_tracked": (),
        "lta.weight": (256, 512),
        "lta.bias": (256,),
    }
    assert model.apn.tokens.tolist() == [[0, -1], [1, -1]]


# The model --------------------------------------------------------------------------------------------------------


def test_the_backbones_head_is_gone() -> None:
    model = toy_contrastive_model()
    assert not [name for name in named_tensors(model) if "head" in name]
    assert model.frozen == {"mha.stem.weight", "mha.stem.bias"}
    parts = {part for group in model.split_parts.values() for part in group}
    assert {name.split(".")[0] for name in named_tensors(model)} == parts
    assert torch.equal(toy_contrastive_model().lta.weight, model.lta.weight)


def test_similarities_in_a_batch_and_with_all_answers() -> None:
    model, batch = toy_contrastive_model(noisy=False), toy_batch()
    v_mha, v_apn = model.cut(batch)
    assert v_mha.shape == (6, 8)
    assert v_apn.shape == (6, 7)
    v, u = (t.detach().double().numpy() for t in model.project(v_mha, v_apn))
    norms = np.linalg.norm(v, axis=1)[:, None] * np.linalg.norm(u, axis=1)[None]
    inside = model.train()(batch)
    np.testing.assert_allclose(inside.logits.detach().numpy(), v @ u.T / norms, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(inside.features.detach().numpy(), v, rtol=1e-5)
    everything = model.eval()(batch)
    # Labels are 0, 1, 2, 0, ...: the first three columns are all answers.
    np.testing.assert_allclose(everything.logits.detach().numpy(), (v @ u.T / norms)[:, :3], rtol=1e-4, atol=1e-5)
    unasked = {"x": batch["x"]}
    assert torch.equal(model.train()(unasked).logits, everything.logits)


def test_the_code_evaluates_with_dot_products() -> None:
    model, batch = toy_contrastive_model(noisy=False, preset="code").eval(), toy_batch()
    v, u = model.project(*model.cut(batch))
    assert not model.apn.masked
    torch.testing.assert_close(model(batch).logits, (v @ u.T)[:, :3].detach())
    assert model.train()(batch).logits.abs().max() <= 1 + 1e-6


def change_in_place(model: ContrastiveAnswerer) -> None:
    with torch.no_grad():
        model.lta.weight.mul_(-1)


def change_unseen(model: ContrastiveAnswerer) -> None:
    model.lta.weight.data.mul_(-1)  # leaves the version counter as it was


def change_an_embedding(model: ContrastiveAnswerer) -> None:
    with torch.no_grad():
        model.apn.embedding.weight[0] += 3


def load_others(model: ContrastiveAnswerer) -> None:
    other = {name: torch.full_like(t, 0.1) for name, t in model.state_dict().items() if name.startswith("lta")}
    model.load_state_dict(other, strict=False)


def take_a_step(model: ContrastiveAnswerer) -> None:
    optimizer = torch.optim.AdamW(model.apn.parameters(), lr=0.5, fused=True)
    model.train()
    model(toy_batch()).logits.sum().backward()
    optimizer.step()
    model.eval()


@pytest.mark.parametrize(
    "change", [change_in_place, change_unseen, change_an_embedding, load_others, take_a_step], ids=lambda f: f.__name__
)
def test_changed_answers_are_noticed(change: Callable[[ContrastiveAnswerer], None]) -> None:
    model, batch = toy_contrastive_model(noisy=False).eval(), toy_batch()
    before = model(batch).logits
    change(model)
    fresh = toy_contrastive_model(noisy=False).eval()
    fresh.load_state_dict(model.state_dict())
    assert not torch.equal(model(batch).logits, before)
    assert torch.equal(model(batch).logits, fresh(batch).logits)


def test_answers_are_computed_once_for_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    compute = AnswerProjection.all_answers
    monkeypatch.setattr(AnswerProjection, "all_answers", lambda self: calls.append(1) or compute(self))
    model, task = toy_contrastive_model().eval(), toy_contrastive_task()
    evaluate(model, Tally(task), [toy_batch(seed=i) for i in range(4)])
    assert len(calls) == 1
    model.train()
    model(toy_batch())
    assert len(calls) == 1
    change_in_place(model)
    evaluate(model, Tally(task), [toy_batch(seed=i) for i in range(4)])
    assert len(calls) == 2


def test_other_values_for_one_call() -> None:
    model, batch = toy_contrastive_model(noisy=False).eval(), toy_batch()
    before = model(batch).logits
    other = {"lta.weight": -model.lta.weight.detach(), "lta.bias": -model.lta.bias.detach()}
    torch.testing.assert_close(teacher(model, other)(batch).logits, -before.detach())
    assert torch.equal(model(batch).logits, before)
    copied = deepcopy(model)
    assert torch.equal(copied(batch).logits, before)
    with torch.inference_mode():
        change_in_place(model)
        assert not torch.equal(model(batch).logits, before)
    assert not model.answers().is_inference()


def test_autocast_changes_little() -> None:
    model, batch = toy_contrastive_model(noisy=False).eval(), toy_batch()
    before = model(batch).logits
    with torch.autocast("cpu", torch.bfloat16):
        inside = model(batch).logits
        model.train()(batch)
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, before, atol=0.02, rtol=0)


def vilt(answers: tuple[str, ...] = ANSWERS, **options: Any) -> nn.Module:
    return create_model("vilt_tiny", answers=answers, vocab_size=20, **options)


def vilt_batch(rows: int = 3) -> dict[str, Tensor]:
    return {
        "image": torch.randint(0, 256, (rows, 3, 64, 64), dtype=torch.uint8, generator=seeded()),
        "text": torch.randint(5, 20, (rows, 7), generator=seeded()),
        "text_mask": torch.ones(rows, 7, dtype=torch.int64),
        "label": torch.arange(rows),
    }


def test_vilt_looks_at_what_its_answer_depends_on() -> None:
    task = Contrastive(4, width=6, hidden=5, embedding=4)
    model = task.wrap(vilt(), ANSWERS, seeded()).eval()
    batch = vilt_batch()
    assert not [name for name in named_tensors(model) if "classifier" in name]
    with torch.inference_mode():
        maps = model.attention(batch)
    assert maps.shape == (3, 4, 4)
    # By hand: the gradient of the best answer's log-probability at the patches.
    embedded, mask, _ = model.mha.embed(batch)
    embedded = embedded.detach().requires_grad_()
    v = model.nha(model.mha.pool(model.mha.vilt.encoder(embedded, mask)[0]))
    scores = nn.functional.cosine_similarity(v.unsqueeze(1), model.answers().unsqueeze(0), dim=2) / 0.07
    (gradient,) = torch.autograd.grad(scores.log_softmax(1).amax(1).sum(), embedded)
    wanted = gradient[:, -16:].square().sum(2)
    torch.testing.assert_close(maps.flatten(1), wanted / wanted.amax(1, keepdim=True), rtol=1e-3, atol=1e-4)
    assert torch.equal(model(batch).features, model(batch).features)


def test_what_a_backbone_offers_is_passed_on() -> None:
    task = Contrastive(4, width=6, hidden=5, embedding=4)
    bare = toy_contrastive_model()
    assert not hasattr(bare, "attention")
    assert not hasattr(bare, "adapters")
    assert not hasattr(bare, "get_input_embeddings")
    bare.mha.get_input_embeddings = lambda: bare.mha.stem
    assert bare.get_input_embeddings() is bare.mha.stem
    bare.begin(task)  # nothing to tell
    model = task.wrap(vilt(trainable="adapters"), ANSWERS, seeded())
    assert adapters_of(model, "X") is model.mha.adapters
    assert "mha.vilt.layernorm.weight" in model.frozen
    assert not [name for name in model.frozen if "adapter." in name or not name.startswith("mha.")]
    model.begin(task)


def test_models_that_cannot_be_used() -> None:
    refuses("'answer_head' must name", ContrastiveAnswerer, nn.Linear(2, 2), ANSWERS, rng=seeded())
    with pytest.raises(ValueError, match="no heads for other tasks, the model has nlvr2"):
        ContrastiveAnswerer(vilt(heads=("nlvr2",)), ANSWERS, rng=seeded())
    refuses("width must be at least 1, got 0", ContrastiveAnswerer, vilt(), ANSWERS, width=0, rng=seeded())


def test_a_weight_normalised_head_tells_its_width() -> None:
    backbone = vilt()
    for dim in (0, None):
        backbone.classifier = nn.utils.parametrizations.weight_norm(nn.Linear(32, 4), dim=dim)
        model = ContrastiveAnswerer(deepcopy(backbone), ANSWERS, hidden=5, width=6, rng=seeded())
        assert model.nha.first.in_features == 32
        assert not [name for name in named_tensors(model) if "classifier" in name]


# The task ---------------------------------------------------------------------------------------------------------


def test_presets_and_single_options() -> None:
    assert Contrastive(3).contrast == Contrast(0.07, "exclude", "cosine", "sum")
    code = Contrastive(3, preset="code")
    assert code.contrast == Contrast(0.07, "include", "cosine", "mean")
    assert [code.option(name) for name in ("eval_similarity", "masked")] == ["dot", False]
    own = Contrastive(3, preset="code", denominator="exclude", masked=True, symmetric=True, temperature=0.2)
    assert own.contrast == Contrast(0.2, "exclude", "cosine", "mean", symmetric=True)
    assert own.option("masked") is True
    assert isinstance(own, Task)
    assert isinstance(own, SingleLabel)
    assert not own.single_label


def test_the_loss_is_info_nce_of_the_models_two_representations() -> None:
    batch = toy_batch()
    for options in ({}, {"preset": "code"}, {"mask_same_answer": True}, {"similarity": "dot", "symmetric": True}):
        task, model = toy_contrastive_task(**options), toy_contrastive_model(noisy=False, **options)
        v, u = model.project(*model.cut(batch))
        contrast, labels = task.contrast, batch["label"]
        wanted = info_nce(
            v,
            u,
            denominator=contrast.denominator,
            similarity=contrast.similarity,
            reduction=contrast.reduction,
            same=labels[None] == labels[:, None] if task.mask_same_answer else None,
            symmetric=contrast.symmetric,
        )
        torch.testing.assert_close(task.loss(model(batch), batch), wanted)
        torch.testing.assert_close(contrast(v, u, task.same(batch)), wanted)


def test_tally_reports_strict_and_soft_accuracy_by_type() -> None:
    task = Contrastive(3, types=("yes/no", "other"))
    logits = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.1], [0.3, 0.2, 0.1], [0.0, 0.1, 0.5]])
    output = Output(logits, torch.zeros(4, 2))
    target = torch.tensor([[1.0, 0, 0], [0.6, 0.3, 0], [0, 1, 0], [0, 0, 0.9]])
    batch = {"label": torch.tensor([0, 0, 1, 2]), "type": torch.tensor([0, 0, 1, 1]), "target": target}
    tally = task.tally(output, batch)
    assert tally["accuracy"] == (2, 4)
    assert tally["accuracy/yes/no"] == (1, 2)
    assert tally["accuracy/other"] == (1, 2)
    assert tally["vqa_accuracy"] == (pytest.approx(1 + 0.3 + 0 + 0.9), 4)
    wanted = nn.functional.cross_entropy(logits / 0.07, batch["label"], reduction="sum").item()
    assert tally["loss"] == (pytest.approx(wanted), 4)
    assert task.predictions(output, batch).tolist() == [1, 0, 0, 1]
    unknown = {"label": torch.tensor([0, -1, 1, 2]), "answerable": torch.tensor([True, False, True, True])}
    assert task.tally(output, unknown)["accuracy"] == (2, 4)
    scaled = Output(logits / 0.07, output.features)
    assert task.tally(output, batch) == VQA(3, "ce", task.types).tally(scaled, batch)
    soft = Contrastive(3, types=task.types, headline="vqa_accuracy")
    assert soft.metric == "vqa_accuracy"
    assert soft.predictions(output, batch).tolist() == pytest.approx([1, 0.3, 0, 0.9])
    assert soft.tally(output, batch)["vqa_accuracy/yes/no"] == (pytest.approx(1.3), 2)
    assert soft.tally(output, batch)["accuracy"] == (2, 4)
    refuses(r"task\.headline must be one of '', accuracy, vqa_accuracy, got 'best'", Contrastive, 3, headline="best")


def test_share_of_same_answers() -> None:
    labels = torch.tensor([0] * 6 + [1] * 3 + [2])
    # All in one batch: 6 * 5 + 3 * 2 of 10 * 9 ordered pairs.
    assert same_answer_share(labels, 10, seeded()) == pytest.approx(36 / 90)
    # In smaller batches as much on average, whatever their size.
    shares = [same_answer_share(labels, 4, seeded(i)) for i in range(400)]
    assert np.mean(shares) == pytest.approx(36 / 90, abs=0.02)
    assert same_answer_share(labels, 4, seeded(3)) == same_answer_share(labels, 4, seeded(3))
    assert same_answer_share(labels, 1, seeded()) == same_answer_share(labels[:0], 4, seeded()) == 0.0
    refuses("batch_size must be at least 1, got 0", same_answer_share, labels, 0, seeded())


@pytest.mark.usefixtures("faulty_arguments")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "book"}, "task.preset must be one of paper, code, got 'book'"),
        ({"temperature": 0}, "task.temperature must be positive, got 0"),
        ({"denominator": "some"}, "task.denominator must be one of exclude, include, got 'some'"),
        ({"eval_similarity": "l1"}, "task.eval_similarity must be one of cosine, dot, got 'l1'"),
        ({"reduction": "none"}, "task.reduction must be one of sum, mean, got 'none'"),
        ({"hidden": 0}, "task.hidden must be at least 1, got 0"),
        ({"answers": 0}, "answers must be at least 1, got 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    refuses(message, Contrastive, **{"answers": 3, **options})


def test_scores_and_tables_of_other_shapes_are_refused() -> None:
    task, batch = toy_contrastive_task(), toy_batch()
    refuses(r"within the batch, \(6, 6\).* got \(6, 3\)", task.loss, toy_contrastive_model().eval()(batch), batch)
    refuses("has 3 answers, got the texts of 4", task.wrap, vilt(), ANSWERS, seeded())
    refuses(r"batch\['label'\]", task.loss, Output(torch.zeros(2, 2), torch.zeros(2, 1)), {})


# Training whole models ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole(Algorithm):
    """FedAvg over the whole model, as the contract's contrastive toy."""

    traits = Traits(made_for="contrastive", neutral="a batch's negatives depend on who is in it")


@dataclass(frozen=True)
class Pooled(Whole):
    """The same on everybody's data."""

    traits = replace(Whole.traits, centralised=True)


@pytest.mark.parametrize("method", [Whole(), Pooled()], ids=["fedavg", "central"])
def test_training_brings_questions_to_their_answers(method: Algorithm) -> None:
    everything = {key: torch.cat([c.tables[0].columns[key] for c in toy_clients().values()]) for key in ("x", "label")}
    local = Local(epochs=10, batch_size=8, lr=0.01)
    setup = toy_setup(method, local=local, rounds=3, noisy=False)
    simulation = Simulation(setup, MemoryStore())
    before, after = setup.model().eval(), setup.model().eval()
    *_, last = simulate(simulation, simulation.start(Workspace(setup.model())))
    after.load_state_dict(last.servers["main"].params, strict=False)
    logits = [model(everything).logits.detach() for model in (before, after)]
    positive = [scores.gather(1, everything["label"][:, None]).mean() for scores in logits]
    others = [(scores.sum(1).mean() - own) / 2 for scores, own in zip(logits, positive, strict=True)]
    assert positive[1] - others[1] > positive[0] - others[0] + 0.2
    right = (logits[1].argmax(1) == everything["label"]).float().mean()
    assert right > 0.5 > everything["label"].bincount().max() / len(everything["label"])


def test_a_lone_last_example_is_left_out_without_batch_norm_too() -> None:
    setup = toy_setup(Whole(), clients=toy_clients(sizes=(9, 5)), rounds=1, noisy=False)
    simulation = Simulation(setup, MemoryStore())
    (record,) = simulate(simulation, simulation.start(Workspace(setup.model())))
    assert not record.errors
    assert set(record.losses) == {"client-0", "client-1"}


LEFT_OUT = ("neutral", "full step", "Flower", "FLARE")  # the transports see it in the contract of BiCSL


@pytest.mark.parametrize("check", [check for check in CHECKS if not any(word in check for word in LEFT_OUT)])
def test_the_toy_keeps_the_contract(check: str) -> None:
    CHECKS[check](Whole())


def test_a_recipe_with_the_task(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text(
        '[algorithm]\nname = "fedavg"\n[model]\nname = "vilt_tiny"\n[data]\nname = "scenes"\ntrain = 8\ntest = 4\n'
        '[task]\nname = "contrastive"\nwidth = 6\nhidden = 7\nembedding = 5\npreset = "code"\n[run]\nrounds = 1\n'
    )
    recipe = load_recipe(file)
    again = tmp_path / "again.toml"
    again.write_text(recipe.to_toml())
    assert load_recipe(again).sections == recipe.sections
    setup, run_data = prepare(recipe)
    model = setup.model()
    assert isinstance(model, ContrastiveAnswerer)
    assert len(model.apn.tokens) == len(run_data.dataset.answers)
    assert torch.equal(model.lta.weight, setup.model().lta.weight)
    batch = next(iter(next(iter(run_data.clients.values())).train(4, seeded())))
    setup.task.loss(model(batch), batch).backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained >= {"apn.embedding.weight", "nha.first.weight", "lta.weight", "mha.vilt.layernorm.weight"}


def test_clients_with_answers_of_their_own_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "r.toml"
    file.write_text(
        '[model]\nname = "vilt_tiny"\n[data]\nname = "scenes"\ntrain = 8\ntest = 4\n[task]\nname = "contrastive"\n'
        '[algorithm]\nname = "local"\n'
    )
    from confed.runs import build as preparing

    load = preparing.load_data

    def own(recipe: Any) -> Any:
        run_data = load(recipe)
        pools = dict.fromkeys(run_data.clients, run_data.dataset.answers)
        return replace(run_data, dataset=replace(run_data.dataset, pools=pools))

    monkeypatch.setattr(preparing, "load_data", own)
    refuses(r'"contrastive" needs the same answers .* answer sets of their own', prepare, load_recipe(file))


NAMES = ("red dog", "cat", "blue_bus")
PLAIN = ("red dog", "cat", "blue bus")


def encoder(family: str, **options: Any) -> Any:
    return create_model("clip", answers=NAMES, source=f"tiny:{family}", **options).eval()


def pictures(count: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, 40, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


def library(model: Any, family: str, texts: list[str]) -> Any:
    """What the library's own model makes of the same pictures and texts, with its processor's usual options."""
    processor = _processor(f"tiny:{family}", "")
    whole = "siglip" in family
    padding = {"padding": "max_length", "max_length": 64} if whole else {"padding": True}
    tokens = processor.tokenizer(texts, return_tensors="pt", **padding)
    told = {"input_ids": tokens["input_ids"]} if whole else dict(tokens)
    told.pop("token_type_ids", None)
    images = [np.ascontiguousarray(p.permute(1, 2, 0).numpy()) for p in pictures()]
    with torch.no_grad():
        return model.body(**told, **processor.image_processor(images, return_tensors="pt"))


@pytest.mark.parametrize("family", FAMILIES)
def test_zero_shot_scores_are_the_librarys(family: str) -> None:
    model = encoder(family, trainable="head", template="This is a photo of {}.")
    wanted = library(model, family, [f"This is a photo of {name}." for name in PLAIN])
    with torch.no_grad():
        output = model({"image": pictures()})
    torch.testing.assert_close(output.logits, wanted.logits_per_image, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_context_of_plain_words_gives_the_librarys_text_features(family: str) -> None:
    model = encoder(family, context="a photo of a")
    wanted = library(model, family, [f"a photo of a {name}." for name in PLAIN])
    with torch.no_grad():
        output = model({"image": pictures()})
    torch.testing.assert_close(output.logits, wanted.logits_per_image, rtol=1e-5, atol=1e-5)


def test_prompt_ensemble_is_the_mean_of_the_librarys_features() -> None:
    templates = ("a photo of a {}.", "a drawing of a {}.", "one {}.")
    model = encoder("clip", trainable="head", templates=templates)
    each = [library(model, "clip", [t.format(name) for name in PLAIN]) for t in templates]
    texts = F.normalize(torch.stack([out.text_embeds for out in each]).mean(0), dim=-1)
    wanted = each[0].image_embeds @ texts.T * model.body.logit_scale.exp()
    with torch.no_grad():
        output = model({"image": pictures()})
    torch.testing.assert_close(output.logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_learning_trains_the_context_and_nothing_else(family: str) -> None:
    model = encoder(family, context=4)
    assert model.context.vectors.shape == (4, 32)
    model.train()
    F.cross_entropy(model({"image": pictures()}).logits, torch.tensor([0, 1, 2])).backward()
    learned = {name for name, p in model.named_parameters() if p.grad is not None}
    assert learned == {CONTEXT} == {n for n, _ in model.named_parameters()} - model.frozen
    assert model.context.vectors.grad.abs().sum() > 0


def test_context_of_each_class_reaches_its_own_class_alone() -> None:
    model, classes = encoder("clip", context=2), torch.arange(3)
    context = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model.class_features(context, classes)
        context[1] += 1
        after = model.class_features(context, classes)
    assert [bool(torch.equal(a, b)) for a, b in zip(before, after, strict=True)] == [True, False, True]


def test_classes_that_are_not_offered_cannot_win() -> None:
    model = encoder("clip", context=2)
    offered = torch.tensor([[True, False, True]] * 3)
    with torch.no_grad():
        whole, some = model({"image": pictures()}).logits, model({"image": pictures(), "offered": offered}).logits
    torch.testing.assert_close(some[:, [0, 2]], whole[:, [0, 2]], rtol=1e-5, atol=1e-5)
    assert (some.softmax(1)[:, 1] == 0).all()


def test_a_frozen_towers_features_are_computed_once_per_picture() -> None:
    model, passes = encoder("clip"), []
    model.body.vision_model.register_forward_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        first = model.image_features({"image": pictures()})
        again = model.image_features({"image": pictures().flip(0)})
    assert len(passes) == 1
    assert torch.equal(first, again.flip(0))


def test_the_text_encoder_runs_once_per_step_and_evaluation() -> None:
    model, passes = encoder("clip"), []
    model.body.text_model.register_forward_hook(lambda *_: passes.append(1))
    model({"image": pictures()})
    assert len(passes) == 1
    with torch.no_grad():
        for _ in range(3):
            model({"image": pictures()})
        model.context.vectors.add_(1)
        model({"image": pictures()})
    assert len(passes) == 3


def test_lora_changes_both_towers_and_nothing_is_kept() -> None:
    model = encoder("clip", trainable="lora")
    learned = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[1] for name in learned} == {"text_model", "vision_model"}
    model.train()
    F.cross_entropy(model({"image": pictures()}).logits, torch.tensor([0, 1, 2])).backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if n in learned)
    assert model._pictures.bytes_kept == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_has_two_names(family: str) -> None:
    # Training of everything would step twice along its gradient, and send it twice.
    tensors = named_tensors(encoder(family, trainable="all"))
    assert len({id(tensor) for tensor in tensors.values()}) == len(tensors)


def test_linear_head_learns_alone_on_unit_features() -> None:
    model = encoder("siglip", head="linear", trainable="head")
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"classifier.weight", "classifier.bias"}
    features = model({"image": pictures()}).features
    torch.testing.assert_close(features.norm(dim=1), torch.ones(3))


def test_attention_adapter_is_fedclips_network() -> None:
    model = encoder("clip", head="attention", trainable="head")
    assert {n.split(".")[0] for n, p in model.named_parameters() if p.requires_grad} == {"picture_adapter"}
    plain, adapter = model.image_features({"image": pictures()}), model.picture_adapter
    with torch.no_grad():
        adapter.output.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
        network = torch.nn.Sequential(adapter.hidden, torch.nn.Tanh(), adapter.output, torch.nn.Softmax(dim=1))
        weighed = network(plain * 24**0.5) * plain
        wanted = weighed / weighed.norm(dim=1, keepdim=True) @ model.handwritten_features(torch.arange(3)).T
        output = model({"image": pictures()})
    torch.testing.assert_close(output.logits, wanted * model.body.logit_scale.exp())
    assert (output.features - plain).abs().max() > 0.01


def test_bottleneck_adapter_is_clip_adapters_network() -> None:
    model = encoder("siglip", head="adapter", trainable="head")
    learned = {n for n, p in model.named_parameters() if p.requires_grad}
    assert learned == {"picture_adapter.down.weight", "picture_adapter.up.weight"}
    plain, adapter = model.image_features({"image": pictures()}), model.picture_adapter
    assert adapter.down.weight.shape == (plain.shape[1] // 4, plain.shape[1])
    with torch.no_grad():
        hidden = (plain @ adapter.down.weight.T).clamp_min(0) @ adapter.up.weight.T
        mixed = 0.2 * hidden.clamp_min(0) + 0.8 * plain
        output = model({"image": pictures()})
    torch.testing.assert_close(output.features, mixed / mixed.norm(dim=1, keepdim=True))
    F.cross_entropy(model.train()({"image": pictures()}).logits, torch.tensor([0, 1, 2])).backward()
    assert adapter.down.weight.grad.abs().sum() > 0


def test_branches_in_the_picture_tower_are_whole_passes() -> None:
    model, batch = encoder("clip", trainable="adapters"), {"image": pictures()}
    model.adapters.add("second", seeded())
    blends = ({"adapter": 1.0}, {"second": 40.0})
    branches = Branches(model, "X")
    with torch.no_grad():
        together = branches.together(branches.begin(batch), *blends)
        for output, blend in zip(together, blends, strict=True):
            with model.adapters.using(blend):
                torch.testing.assert_close(output.logits, model(batch).logits, rtol=1e-4, atol=1e-4)
    assert not torch.equal(together[0].logits, together[1].logits)


def test_patch_features_are_projected_and_of_unit_length() -> None:
    found = encoder("clip").patch_features({"image": pictures()})
    assert found.shape == (3, 16, 24)
    torch.testing.assert_close(found.norm(dim=2), torch.ones(3, 16))
    refuses("pools them by attention", encoder("siglip").patch_features, {"image": pictures()})


def test_a_model_without_a_text_tower_is_refused(tmp_path: Path) -> None:
    from transformers import ViTConfig

    ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="it is of the kind 'vit', and dual encoders are clip, siglip"):
        create_model("clip", answers=NAMES, source=str(tmp_path))


NAME = "clip_mini"


def test_weights_take_at_most_four_megabytes() -> None:
    assert sum(file.stat().st_size for file in (WEIGHTS / NAME).iterdir()) <= 4_000_000


def test_zero_shot_accuracy_on_classes_without_captions() -> None:
    """Of 44 classes; chance is 0.023. The pictures are new, of another seed than the training's."""
    table, _, held, _ = coloured_things_told(3000, 987)
    model: Any = create_model("clip", answers=RESERVED, source=NAME, trainable="head").eval()
    batch = table.batch(held)
    with torch.no_grad():
        right = (model(batch).logits.argmax(1) == batch["label"]).float().mean()
    assert len(held) > 250
    assert right >= MINIS[NAME].bar
    assert describe(WEIGHTS / NAME)["accuracy"]["overall"] >= MINIS[NAME].bar


def test_names_that_were_never_captions_differ_too() -> None:
    model: Any = create_model("clip", answers=("annual crop", "sea lake", "river"), source=NAME)
    texts = model.handwritten_features(torch.arange(3))
    assert (texts @ texts.T - torch.eye(3)).abs().max() < 0.9999


def test_learned_and_measured_pictures_have_no_class_in_common() -> None:
    table, learned, held, _ = coloured_things_told(400, 3)
    pairs = table.columns["pair"]
    assert not set(pairs[learned].tolist()) & set(pairs[held].tolist())
    assert len(learned) + len(held) == 400


@pytest.mark.slow
def test_pretraining_writes_a_folder_that_the_library_reads(tmp_path: Path) -> None:
    from transformers import AutoModel

    result = pretrain(NAME, tmp_path / "mini", progress=False, questions=200, validation=40, epochs=1)
    assert describe(tmp_path / "mini")["accuracy"] == result
    assert type(AutoModel.from_pretrained(tmp_path / "mini")).__name__ == "CLIPModel"
    create_model("clip", answers=("a", "b"), source=str(tmp_path / "mini"))


@pytest.fixture(scope="module")
def pair() -> dict[str, str]:
    folder = Path(os.environ.get("CONFED_WEIGHTS", Path(__file__).parents[3] / "shared" / "weights"))
    if not (folder / "mobilenet_v2_imagenet").is_dir():
        pytest.skip("no real encoders here; set CONFED_WEIGHTS to their folder")
    return {"source": str(folder / "mobilenet_v2_imagenet"), "text": str(folder / "minilm_l3")}


def test_a_classifier_and_a_text_encoder_compare_names(pair: dict[str, str]) -> None:
    names = ("dog", "bird", "aeroplane")
    model = create_model("clip", answers=names, template="{}", trainable="head", **pair).eval()
    alone = create_model(
        "encoders", answers=names, vocab_size=0, vision=pair["source"], labels=pair["text"], zero_shot=True
    )
    image = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = alone.eval()({"image": image}).logits
        prepared = (image.float() / 255 - 0.5) / 0.5
        # names are embedded in the precision of their file there, in float32 here
        torch.testing.assert_close(model({"image": prepared}).logits, expected, rtol=2e-3, atol=5e-3)


def test_context_of_a_pair_is_all_that_learns(pair: dict[str, str]) -> None:
    model = create_model("clip", answers=NAMES, context="a photo of a", trainable="prompt", **pair)
    plain = create_model("clip", answers=NAMES, template="a photo of a {}.", trainable="head", **pair)
    output = model({"image": torch.zeros(1, 3, 224, 224)})
    torch.testing.assert_close(output.logits, plain({"image": torch.zeros(1, 3, 224, 224)}).logits)
    output.logits[0, 0].backward()
    assert [name for name, value in model.named_parameters() if value.grad is not None] == [CONTEXT]
    refuses(r"leave model\.text empty", model.patch_features, {})
    refuses("no places for them", create_model, "clip", answers=NAMES, trainable="adapters", **pair)
