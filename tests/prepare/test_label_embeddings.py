"""Label embeddings: prompts and variants against hand-made vectors, encoders against one text at a time, files."""

import json

import pytest
import torch
from safetensors.torch import save_file

from confed.models.label_embeddings import (
    LabelEmbeddings,
    clip_text_encoder,
    embed_labels,
    load_label_embeddings,
    mini_text_encoder,
    save_label_embeddings,
    sentence_encoder,
    write_mini_label_embeddings,
)
from confed.models.tokenizer import WordTokenizer
from refusals import refuses

WORDS = ["the", "photo", "contains", "positive", "negative", "cat", "dog", "kitten", "tabby", "puppy"]


class Recorder:
    """An encoder that remembers what it was given, and answers with letter counts."""

    def __init__(self):
        self.texts = []

    def __call__(self, texts):
        self.texts += list(texts)
        return torch.tensor([[float(text.count(letter)) for letter in "abcdegiopt,."] for text in texts])


def unit(row):
    return row / row.square().sum().sqrt()


def test_a_prompt_per_label_and_the_states():
    encode = Recorder()
    table = embed_labels(["cat", "dog"], encode)
    assert encode.texts == ["The photo contains cat.", "The photo contains dog.", "positive", "negative"]
    raw = Recorder()(encode.texts)
    for ours, row in zip((*table.vectors, table.positive, table.negative), raw, strict=True):
        torch.testing.assert_close(ours, unit(row))
    embed_labels(["cat"], encode, template="a {label}", states=("yes", "no"))
    assert encode.texts[-3:] == ["a cat", "yes", "no"]
    many = [f"{'a' * i}{'b' * (200 - i)}" for i in range(150)]
    assert embed_labels(many, Recorder()).vectors.shape == (150, 12)


def test_fine_names_of_coarse_labels():
    fine = {"cat": ["tabby", "kitten", "ab"], "dog": ["puppy"], "unused": ["x"]}
    encode = Recorder()
    joint = embed_labels(["cat", "dog"], encode, coarse="concat", fine=fine, most=2)
    assert encode.texts[:2] == ["The photo contains tabby,kitten.", "The photo contains puppy."]
    torch.testing.assert_close(joint.vectors[0], unit(Recorder()(encode.texts[:1])[0]))
    encode = Recorder()
    mean = embed_labels(["cat", "dog"], encode, coarse="avg", fine=fine, most=2)
    texts = [f"The photo contains {name}" for name in ("tabby", "kitten", "ab", "puppy")]
    assert encode.texts == [*texts, "positive", "negative"]
    rows = Recorder()(texts)
    torch.testing.assert_close(mean.vectors[0], (rows[0] + rows[1] + rows[2]) / 3)  # not divided by its length
    torch.testing.assert_close(mean.vectors[1], rows[3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "a photo"}, r"template must contain \{label\}, got 'a photo'"),
        ({"coarse": "sum"}, "coarse must be one of name, concat, avg, got 'sum'"),
        ({"most": 0}, "most must be at least 1"),
        ({"labels": []}, "at least one label"),
        ({"labels": ["ab", "ba"]}, "'ab' and 'ba' must have different embeddings"),
        ({"coarse": "avg", "fine": {"cat": ["a"]}}, "needs fine names of every label, 'dog' has none"),
    ],
)
def test_requests_that_cannot_be_embedded_are_refused(options, message):
    refuses(message, embed_labels, **{"labels": ["cat", "dog"], "encode": Recorder()} | options)


def clip_folder(folder):
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz.,"
    tokens = ["<|startoftext|>", *letters, *(f"{letter}</w>" for letter in letters), "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    tokenizer.save_pretrained(folder)
    config = CLIPTextConfig(
        vocab_size=len(tokens), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=40, projection_dim=12, bos_token_id=0, eos_token_id=len(tokens) - 1,
        pad_token_id=len(tokens) - 1,
    )  # fmt: skip
    model = CLIPTextModelWithProjection(config).eval()
    model.save_pretrained(folder)
    return model, {token: i for i, token in enumerate(tokens)}


def test_clips_text_encoder_reads_at_the_end_token(tmp_path):
    model, numbers = clip_folder(tmp_path)
    texts = ["cat", "a dog."]
    ids = [["c", "a", "t</w>"], ["a</w>", "d", "o", "g</w>", ".</w>"]]
    came = clip_text_encoder(tmp_path)(texts)
    assert came.shape == (2, 12)
    for row, spelt in zip(came, ids, strict=True):
        alone = torch.tensor([[numbers[t] for t in ("<|startoftext|>", *spelt, "<|endoftext|>")]])
        with torch.no_grad():
            states = model.text_model(input_ids=alone).last_hidden_state
            torch.testing.assert_close(row, states[0, -1] @ model.text_projection.weight.T, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"a text must have at most 40 tokens, 'dog.*' has 42"):
        clip_text_encoder(tmp_path)(["cat", "dog" * 13 + "s"])
    assert embed_labels(["cat", "dog"], clip_text_encoder(tmp_path)).vectors.shape == (2, 12)


def test_sentence_encoders_average_over_tokens(tmp_path):
    from transformers import BertConfig, BertModel

    tokenizer = WordTokenizer(WORDS, 10)
    tokenizer.save(tmp_path)
    config = BertConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=20,
    )  # fmt: skip
    model = BertModel(config).eval()
    model.save_pretrained(tmp_path)
    texts = ["The photo contains cat.", "dog"]
    came = sentence_encoder(tmp_path)(texts)
    for row, words in zip(came, (["the", "photo", "contains", "cat"], ["dog"]), strict=True):
        ids = torch.tensor([[2, *(7 + WORDS.index(word) for word in words), 3]])  # [CLS] words [SEP]
        with torch.no_grad():
            torch.testing.assert_close(row, model(input_ids=ids).last_hidden_state[0].mean(0), rtol=1e-4, atol=1e-5)


def test_no_encoder_there(tmp_path):
    for build in (clip_text_encoder, sentence_encoder):
        refuses("expected a folder with", build, tmp_path / "none")
    clip_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    refuses("no tokenizer could be read from", clip_text_encoder, tmp_path)
    (tmp_path / "tokenizer.json").unlink()  # the library makes up a tokenizer without words
    with pytest.raises(ValueError, match="it knows nothing of 'cat'"):
        clip_text_encoder(tmp_path)(["cat"])


def test_the_mini_encoder_knows_the_built_in_words():
    encode = mini_text_encoder()
    red, dog, both, also = encode(["red", "dog", "red dog", "quux red dog!"])
    assert red.shape == (64,)
    torch.testing.assert_close(both, (red + dog) / 2)
    assert torch.equal(both, also)
    refuses("none of 'quux'", encode, ["red", "quux"])

    def alike(one, other):
        return torch.cosine_similarity(*encode([one, other]).split(1)).item()

    assert alike("red", "orange") > 0.3 > alike("red", "cyan")
    assert alike("car", "bus") > 0.3 > alike("car", "cat")


def test_the_mini_table_for_the_built_in_labels(tmp_path):
    from confed.datasets.scenes import COLOURS, NOUNS

    labels = (*NOUNS, *COLOURS)
    written = write_mini_label_embeddings(labels, tmp_path / "scene.safetensors")
    read = load_label_embeddings(tmp_path / "scene.safetensors", labels[::-1], 64)
    assert torch.equal(read.vectors, written.vectors.flip(0))
    torch.testing.assert_close(read.vectors.norm(dim=1), torch.ones(len(labels)))
    assert not torch.equal(read.positive, read.negative)
    assert "albef_mini" in read.source
    with pytest.raises(ValueError, match="'red dog' and 'dog red' must have different"):
        write_mini_label_embeddings(["red dog", "dog red"], tmp_path / "same.safetensors")


def table(names=("a", "b", "c"), width=4):
    vectors = torch.arange(float(len(names) * width)).reshape(-1, width)
    return LabelEmbeddings(tuple(names), vectors, torch.ones(width), -torch.ones(width), "by hand")


def test_a_file_keeps_everything_and_is_read_by_name(tmp_path):
    file = tmp_path / "new" / "labels.safetensors"
    save_label_embeddings(table(), file)
    read = load_label_embeddings(str(file), ("c", "a"), 4)
    assert (read.names, read.source) == (("c", "a"), "by hand")
    assert torch.equal(read.vectors, torch.tensor([[8.0, 9, 10, 11], [0, 1, 2, 3]]))
    assert torch.equal(read.positive, torch.ones(4))
    assert torch.equal(read.negative, -torch.ones(4))
    assert [path.name for path in file.parent.iterdir()] == ["labels.safetensors"]


def test_missing_and_malformed_files_are_refused(tmp_path):
    file = tmp_path / "labels.safetensors"
    refuses(r"labels\.safetensors, found none", load_label_embeddings, file, ("a",), 4)
    file.write_bytes(b"no")
    refuses("must be a complete safetensors file", load_label_embeddings, file, ("a",), 4)
    save_label_embeddings(table(), file)
    with pytest.raises(ValueError, match=r"labels\.safetensors.*no row for 'd', 'e', 'f', 'g', 'h' and 1 more"):
        load_label_embeddings(file, tuple("adefghi"), 4)
    refuses("must have the model's 5 features, got 4", load_label_embeddings, file, ("a",), 5)
    save_file({"x": torch.zeros(2)}, file)
    with pytest.raises(ValueError, match=r"expected the tensors labels, positive and negative.* got the tensors x"):
        load_label_embeddings(file, ("a",), 4)
    tensors = {"labels": torch.zeros(2, 4), "positive": torch.zeros(4), "negative": torch.zeros(4)}
    for names, message in (
        (["a"], r"vectors must have shape \(1, d\)"),
        (["a", "a"], "every label must have one row, 'a' has 2"),
    ):
        save_file(tensors, file, {"names": json.dumps(names)})
        refuses(message, load_label_embeddings, file, ("a",), 4)
    save_file(tensors | {"labels": torch.full((2, 4), float("nan"))}, file, {"names": '["a", "b"]'})
    refuses("must be finite", load_label_embeddings, file, ("a",), 4)
