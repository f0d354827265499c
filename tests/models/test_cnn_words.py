"""Convolutions with averaged words: which inputs count, an independent pass, what learns, faults."""

from functools import partial

import torch
from torch.nn import functional as F

from confed.models import create_model, create_tokenizer
from confed.models.cnn_words import cnn_words
from small_pictures import asked_pictures

batch = partial(asked_pictures, 9, length=6, first=3)


def test_the_pass_equals_one_written_out():
    model, inputs = cnn_words(5, 9, width=8, channels=(8, 8), image_size=16, seed=1), batch(side=16)
    hidden = inputs["image"].float() / 127.5 - 1
    for convolution, norm, *_ in model.picture:
        hidden = F.conv2d(hidden, convolution.weight, padding=1)
        hidden = F.max_pool2d(F.group_norm(hidden, 8, norm.weight, norm.bias, norm.eps).relu(), 2)
    picture = (hidden.flatten(1) @ model.project.weight.T + model.project.bias).tanh()
    rows = [
        model.words.weight[ids[: int(seen.sum())]].mean(0)
        for ids, seen in zip(inputs["text"], inputs["text_mask"], strict=True)
    ]
    words = torch.stack(rows).tanh()
    expected = torch.cat([picture, words, picture * words], 1)
    output = model(inputs)
    torch.testing.assert_close(output.features, expected)
    torch.testing.assert_close(output.logits, model.classifier(expected))
    torch.testing.assert_close(model({**inputs, "image": inputs["image"] / 127.5 - 1}).logits, output.logits)


def test_padding_counts_for_nothing_and_both_inputs_count():
    model, inputs = cnn_words(5, 9), batch()
    logits = model(inputs).logits
    padded = {**inputs, "text": torch.where(inputs["text_mask"] == 1, inputs["text"], 0)}
    assert torch.equal(model(padded).logits, logits)
    assert not torch.equal(model({**inputs, "image": inputs["image"].flip(0)}).logits, logits)
    assert not torch.equal(model({**inputs, "text": inputs["text"].flip(0)}).logits, logits)


def test_only_the_head_learns_where_a_recipe_says_so():
    learns = {name for name, p in cnn_words(5, 9, trainable="head").named_parameters() if p.requires_grad}
    assert learns == {
        f"classifier.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
    }


def test_it_learns_what_is_in_pictures_and_questions():
    """Brighter or darker than grey, as it is or turned round by the question: neither input alone tells."""
    rng = torch.Generator().manual_seed(0)
    bright, turned = torch.randint(0, 2, (64,), generator=rng), torch.randint(0, 2, (64,), generator=rng)
    image = (torch.rand(64, 3, 16, 16, generator=rng) * 100 + 155 * bright[:, None, None, None]).to(torch.uint8)
    ids, mask = create_tokenizer("cnn_words", ("bright", "dark"))([("bright", "dark")[int(i)] for i in turned])
    model = create_model("cnn_words", answers=("yes", "no"), vocab_size=9, channels=(8, 8), image_size=16)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    inputs, label = {"image": image, "text": ids, "text_mask": mask}, bright ^ turned
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).logits, label).backward()
        optimizer.step()
    assert (model(inputs).logits.argmax(1) == label).float().mean() == 1
