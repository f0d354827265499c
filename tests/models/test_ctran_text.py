"""C-Tran for texts, against the same computation in NumPy, and what it must not depend on."""

import numpy as np
import pytest
import torch
from torch import Tensor

from confed.models.ctran import CTranText, ctran_text_mini
from confed.models.label_embeddings import LabelEmbeddings, save_label_embeddings
from refusals import refuses

LABELS = ("a", "b", "c")


def _model(**options) -> CTranText:
    options = {"width": 8, "max_length": 6, "attention_heads": 2, "dropout": 0.0} | options
    return ctran_text_mini(LABELS, 20, **options)


def _batch(rows: int = 3, length: int = 6) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    text = torch.randint(1, 20, (rows, length), generator=rng)
    mask = torch.ones_like(text)
    for row in range(rows):
        mask[row, length - row :] = 0
    return {"text": text * mask, "text_mask": mask}


def _norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    gap = x - x.mean(-1, keepdims=True)
    return gap / np.sqrt((gap**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def _layer(x: np.ndarray, seen: list[int], p: dict[str, np.ndarray], name: str, extra: np.ndarray | None) -> np.ndarray:
    """One post-norm layer for one example, head by head and token by token."""
    width, heads = x.shape[1], 2
    joint = x @ p[f"{name}.attention.weight"].T + p[f"{name}.attention.bias"]
    query, key, value = joint[:, :width], joint[:, width : 2 * width], joint[:, 2 * width :]
    mixed = np.zeros_like(x)
    for head in range(heads):
        part = slice(head * width // heads, (head + 1) * width // heads)
        for i in range(len(x)):
            scores = np.array([query[i, part] @ key[j, part] / np.sqrt(width / heads) for j in seen])
            if extra is not None:
                scores += extra[i, seen]
            weights = np.exp(scores - scores.max())
            mixed[i, part] = (weights / weights.sum()) @ value[seen, part]
    x = _norm(x + mixed @ p[f"{name}.output.weight"].T + p[f"{name}.output.bias"],
              p[f"{name}.norm1.weight"], p[f"{name}.norm1.bias"])  # fmt: skip
    inner = np.maximum(x @ p[f"{name}.linear1.weight"].T + p[f"{name}.linear1.bias"], 0)
    return _norm(x + inner @ p[f"{name}.linear2.weight"].T + p[f"{name}.linear2.bias"],
                 p[f"{name}.norm2.weight"], p[f"{name}.norm2.bias"])  # fmt: skip


@pytest.mark.parametrize("graph", [False, True])
def test_scores_are_those_of_numpy(graph: bool) -> None:
    model = _model(graph=graph).eval()
    if model.graph is not None:
        with torch.no_grad():
            model.graph.scale.fill_(0.7)
            model.graph.co_occurrence.copy_(torch.tensor([[0.5, 0.4, 0.1], [0.4, 0.6, 0.2], [0.1, 0.2, 0.3]]))
            model.graph.examples.fill_(20)
    batch = _batch() | {"known": torch.tensor([[-1, 0, 1], [1, -1, -1], [-1, -1, -1]], dtype=torch.int8)}
    p = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}
    got = model(batch)
    for row in range(3):
        length, text = int(batch["text_mask"][row].sum()), batch["text"][row].numpy()
        # What is padded is simply not there.
        x = p["words.weight"][text[:length]] + p["positions.weight"][:length]
        x = _norm(x, p["word_norm.weight"], p["word_norm.bias"])
        x = _layer(x, list(range(length)), p, "word_layers.0", None)
        states = {-1: np.zeros(8), 0: p["tokens.states"][0], 1: p["tokens.states"][1]}
        labels = np.stack([p["tokens.labels"][c] + states[int(batch["known"][row, c])] for c in range(3)])
        x = _norm(np.concatenate([x, labels]), p["norm.weight"], p["norm.bias"])
        extra = None
        if graph:
            shares = p["graph.co_occurrence"]
            extra = np.zeros((length + 3, length + 3))
            for i in range(3):
                for j in range(3):
                    if i != j:
                        both, one, two = shares[i, j], shares[i, i] - shares[i, j], shares[j, j] - shares[i, j]
                        parts = 20 * np.array([both, 1 - both - one - two, one, two]) + 0.5
                        extra[length + i, length + j] = 0.7 * np.log(parts[0] * parts[1] / parts[2] / parts[3])
        for layer in range(2):
            x = _layer(x, list(range(length + 3)), p, f"layers.{layer}", extra)
        expected = (x[length:] * p["classifier.weight"]).sum(1) + p["classifier.bias"]
        np.testing.assert_allclose(got.logits[row].detach().numpy(), expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got.features[row].detach().numpy(), x[length:].mean(0), rtol=1e-4, atol=1e-5)


def test_padding_and_its_length_change_nothing() -> None:
    model, batch = _model().eval(), _batch()
    plain = model(batch).logits
    filled = batch | {"text": batch["text"].masked_fill(batch["text_mask"] == 0, 7)}
    torch.testing.assert_close(model(filled).logits, plain)
    short = {name: tensor[2:, :4] for name, tensor in batch.items()}
    torch.testing.assert_close(model(short).logits, plain[2:])
    turned = batch | {"text": batch["text"].flip(1), "text_mask": batch["text_mask"]}
    assert not torch.allclose(model(turned).logits[0], plain[0])  # the order of words matters
    weights = model.attention(batch)
    assert weights.shape == (3, 3, 6)
    assert bool((weights[2, :, 4:] == 0).all())
    assert bool((weights.sum(-1) < 1).all())


def test_what_learns_and_what_is_constant(tmp_path) -> None:
    table = LabelEmbeddings(("c", "b", "a"), torch.randn(3, 8), torch.randn(8), torch.randn(8))
    save_label_embeddings(table, tmp_path / "e")
    fixed, states = _model(embeddings=tmp_path / "e"), _model(embeddings=tmp_path / "e", learn_labels=True)
    assert fixed.frozen == {"tokens.labels", "tokens.states"}
    assert states.frozen == {"tokens.states"}
    assert _model().frozen == set()
    torch.testing.assert_close(fixed.tokens.labels, table.vectors.flip(0))  # by name
    torch.testing.assert_close(fixed.tokens.states, torch.stack([table.negative, table.positive]))
    batch = _batch() | {"known": torch.tensor([[-1, 0, 1]] * 3, dtype=torch.int8)}
    model = _model()
    model(batch).logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    again = _model()
    for (name, one), (_, two) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(one, two), name
    assert not torch.equal(_model(seed=1).words.weight, again.words.weight)
    assert model.reads_states
    assert isinstance(model.get_submodule(model.answer_head), torch.nn.Module)


def test_embeddings_that_do_not_fit_are_refused(tmp_path) -> None:
    save_label_embeddings(LabelEmbeddings(LABELS, torch.randn(3, 4), torch.ones(4), torch.zeros(4)), tmp_path / "e")
    refuses("must have the model's 8 features, got 4", _model, embeddings=tmp_path / "e")
    refuses("answers must be the names, got their number 3", ctran_text_mini, 3, 20, embeddings=tmp_path / "e")
