"""Text embeddings of labels, computed once and kept local: FedLGT's universal label embedding (ULE).

A label becomes a prompt, the prompt a vector of a text encoder, divided by its length; so do the words for the states
"present" and "absent". The published ones are CLIP's. Where a coarse label stands for many fine ones there are the two
variants of FedLGT's released code: one prompt that lists the fine names (``"concat"``), or the mean over one prompt per
fine name, which is not divided by its length (``"avg"``).

A file of them is safetensors; the labels' names are in its metadata, and rows are found by name, never by position.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from confed.data.refusals import listed
from confed.federation.ranges import check_value
from confed.models.heads import COUNT
from confed.models.hub_names import hub_name
from confed.models.pretrained import (
    packaged,
    published,
    read_tensors,
    read_weights,
    reading,
    weights_file,
    write_weights,
)

# Text encoders for label embeddings: CLIP's, sentence encoders ------------------------------------------------

Encode = Callable[[Sequence[str]], Tensor]  # a text encoder: N texts to N vectors (N, d), not divided by their lengths


def clip_text_encoder(source: Path | str) -> Encode:
    """CLIP's text encoder with its projection."""
    from transformers import CLIPTextModelWithProjection

    model = published(CLIPTextModelWithProjection, source, 0).eval()
    tokenizer, longest = tokenizer_of(source), int(model.config.max_position_embeddings)

    def encode(texts: Sequence[str]) -> Tensor:
        with torch.no_grad():
            output: Any = model(**_tokens(tokenizer, texts, longest))
        return output.text_embeds.float()

    return encode


def sentence_encoder(source: Path | str) -> Encode:
    """Any text encoder of ``transformers``: the mean of its last states over a text's tokens."""
    from transformers import AutoModel

    model: Any = published(AutoModel, source, 0)
    model.eval()
    longest = int(getattr(model.config, "max_position_embeddings", 512))
    tokenizer = tokenizer_of(source)

    def encode(texts: Sequence[str]) -> Tensor:
        tokens = _tokens(tokenizer, texts, longest)
        with torch.no_grad():
            states: Tensor = model(**tokens).last_hidden_state.float()
        mask = tokens["attention_mask"].unsqueeze(-1).float()
        return (states * mask).sum(1) / mask.sum(1)

    return encode


def tokenizer_of(source: Path | str) -> Any:
    from transformers import AutoTokenizer

    where = Path(source).expanduser()
    name = str(where) if where.is_dir() else hub_name(str(source), short=True)
    if name is None:
        raise ValueError(f"expected a folder with a tokenizer or a hub name, got {str(source)!r}")
    with reading(source, "tokenizer"):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # pyright: ignore


def _tokens(tokenizer: Any, texts: Sequence[str], longest: int) -> dict[str, Tensor]:
    # Cut texts would silently stand for fewer names than they list.
    tokens = dict(tokenizer(list(texts), padding=True, return_tensors="pt"))
    if tokens["input_ids"].shape[1] > longest:
        worst = max(range(len(texts)), key=lambda i: int(tokens["attention_mask"][i].sum()))
        used = int(tokens["attention_mask"][worst].sum())
        raise ValueError(
            f"a text must have at most {longest} tokens, {texts[worst][:80]!r} has {used}; list fewer fine names in it"
        )
    # a folder without a vocabulary gives a tokenizer that knows special tokens alone, and says nothing.
    is_word = ~torch.isin(tokens["input_ids"], torch.tensor(tokenizer.all_special_ids))
    if not bool(is_word.any(1).all()):
        text = texts[int((~is_word.any(1)).nonzero()[0, 0])]
        raise ValueError(f"the encoder's tokenizer must know a part of every text, it knows nothing of {text!r}")
    return tokens


def mini_text_encoder(pretrained: bool | Path | str = True) -> Encode:
    """The words of ``albef_mini`` as a text encoder, d = 64: offline, for the built-in benchmark.

    A text is the mean over the word embeddings of ``albef_mini``'s answer decoder, which also score answers, so that
    things which look alike lie near each other. Words that it does not know do not count; neither does their order.
    """
    from confed.models.pretrained import describe
    from confed.models.tokenizer import SPECIAL_TOKENS, SUFFIXES, WordTokenizer

    file = weights_file("albef_mini", pretrained)
    tokenizer = WordTokenizer(describe(file)["words"], 64)
    table = read_tensors(file)["text_decoder.bert.embeddings.word_embeddings.weight"]

    def encode(texts: Sequence[str]) -> Tensor:
        ids, _ = tokenizer(texts)
        counts = (ids >= len(SPECIAL_TOKENS) + len(SUFFIXES)).unsqueeze(-1).float()
        word_counts = counts.sum(1)
        if not bool(word_counts.all()):
            text = texts[int((word_counts == 0).nonzero()[0, 0])]
            raise ValueError(f"albef_mini must know a word of every label, it knows none of {text!r}")
        return (table[ids] * counts).sum(1) / word_counts

    return encode


# Text embeddings of labels, computed once and kept local ------------------------------------------------------


TEMPLATE = "The photo contains {label}."
STATES = ("positive", "negative")
CHUNK = 64

Coarse = Literal["name", "concat", "avg"]


@dataclass(frozen=True)
class LabelEmbeddings:
    """Vectors of labels and of the two known states."""

    names: tuple[str, ...]
    vectors: Tensor  # one row per name, (C, d)
    positive: Tensor  # of the state "present", (d,)
    negative: Tensor  # of the state "absent", (d,)
    source: str = ""  # what made them, in words

    def __post_init__(self) -> None:
        rows, width = self.vectors.shape if self.vectors.ndim == 2 else (-1, -1)
        if rows != len(self.names) or any(state.shape != (width,) for state in (self.positive, self.negative)):
            shapes = ", ".join(str(tuple(t.shape)) for t in (self.vectors, self.positive, self.negative))
            raise ValueError(f"vectors must have shape ({len(self.names)}, d) and both states (d,), got {shapes}")
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ValueError(f"every label must have one row, {twice[0]!r} has {self.names.count(twice[0])}")
        if not all(bool(t.isfinite().all()) for t in (self.vectors, self.positive, self.negative)):
            raise ValueError("label embeddings must be finite numbers, some are not")

    def select(self, labels: Sequence[str]) -> "LabelEmbeddings":
        """The rows of some labels, in the order of ``labels``."""
        place = {name: i for i, name in enumerate(self.names)}
        missing = [label for label in labels if label not in place]
        if missing:
            near = get_close_matches(missing[0], self.names, 1)
            hint = f"; {missing[0]!r} is spelt much like {near[0]!r}" if near else ""
            raise ValueError(
                f"the label embeddings have no row for {listed([*map(repr, missing)], 5)}{hint}; `confed data prepare "
                "label-embeddings` makes a file of your labels"
            )
        rows = self.vectors[[place[label] for label in labels]]
        return LabelEmbeddings(tuple(labels), rows, self.positive, self.negative, self.source)

    def narrowed(self, width: int) -> "LabelEmbeddings":
        """The same vectors in another number of dimensions, for models of another width than the encoder's.

        All vectors, those of the states too, are turned together into the ``width`` directions in which they are
        longest (the singular value decomposition of the matrix of them). Inner products stay as they are where the
        labels and the two states are at most ``width`` (and wherever the encoder is no wider); beyond that, as nearly
        as that many dimensions allow.
        """
        check_value(width, COUNT, "width")
        rows = torch.cat([self.vectors, self.positive[None], self.negative[None]]).double()
        left, lengths, _ = torch.linalg.svd(rows, full_matrices=False)
        # The decomposition leaves signs open: each direction points where its largest entry is positive.
        left = left * torch.sign(left.gather(0, left.abs().argmax(0, keepdim=True)))
        turned = F.pad((left * lengths)[:, :width], (0, max(0, width - len(lengths)))).float()
        return LabelEmbeddings(self.names, turned[:-2].clone(), turned[-2].clone(), turned[-1].clone(), self.source)


def embed_labels(
    labels: Sequence[str],
    encode: Encode,
    *,
    template: str = TEMPLATE,
    coarse: Coarse = "name",
    fine: Mapping[str, Sequence[str]] | None = None,
    most: int = 20,
    states: tuple[str, str] = STATES,
    source: str = "",
) -> LabelEmbeddings:
    if "{label}" not in template:
        raise ValueError(f"template must contain {{label}}, got {template!r}")
    check_value(coarse, Coarse, "coarse")
    if not labels or most < 1:
        raise ValueError(f"there must be at least one label and most must be at least 1, got {len(labels)} and {most}")

    def prompt(text: str, pattern: str = template) -> str:
        return pattern.replace("{label}", text)

    if coarse == "name":
        vectors = F.normalize(_in_chunks(encode, [prompt(label) for label in labels]), dim=1)
    else:
        names = {label: list((fine or {}).get(label, ())) for label in labels}
        if lacking := [label for label, its in names.items() if not its]:
            raise ValueError(f"coarse = {coarse!r} needs fine names of every label, {lacking[0]!r} has none")
        if coarse == "concat":
            prompts = [prompt(",".join(names[label][:most])) for label in labels]
            vectors = F.normalize(_in_chunks(encode, prompts), dim=1)
        else:
            pattern = template.removesuffix(".")
            rows: list[Tensor] = []
            for label in labels:
                rows.append(_in_chunks(encode, [prompt(name, pattern) for name in names[label]]))
            vectors = torch.stack([row.mean(0) for row in rows])
    _check_different(labels, vectors)
    positive, negative = F.normalize(encode(states), dim=1)
    return LabelEmbeddings(tuple(labels), vectors, positive, negative, source)


def _in_chunks(encode: Encode, texts: Sequence[str]) -> Tensor:
    return torch.cat([encode(texts[start : start + CHUNK]) for start in range(0, len(texts), CHUNK)])


def _check_different(labels: Sequence[str], vectors: Tensor) -> None:
    """Check that labels have different embeddings; encoders that ignore word order may give equal ones."""
    seen: dict[tuple[float, ...], str] = {}
    for label, row in zip(labels, vectors.tolist(), strict=True):
        other = seen.setdefault(tuple(row), label)
        if other is not label:
            raise ValueError(f"the labels {other!r} and {label!r} must have different embeddings, they have the same")


def write_mini_label_embeddings(labels: Sequence[str], file: Path | str) -> LabelEmbeddings:
    """Makes embeddings of labels in the built-in benchmark's words by :func:`mini_text_encoder`, and writes them."""
    table = embed_labels(
        labels,
        mini_text_encoder(),
        template="{label}",
        states=("yes", "no"),
        source="mean over the word embeddings of albef_mini's answer decoder",
    )
    save_label_embeddings(table, file)
    return table


def save_label_embeddings(table: LabelEmbeddings, file: Path | str) -> None:
    """Writes embeddings as safetensors."""
    tensors = {"labels": table.vectors, "positive": table.positive, "negative": table.negative}
    metadata = {"names": json.dumps(table.names), "source": table.source}
    write_weights(Path(file), tensors, metadata)


def load_label_embeddings(source: Path | str, labels: Sequence[str], width: int) -> LabelEmbeddings:
    """The embeddings of some labels from a file."""
    is_packaged = isinstance(source, str) and source.isidentifier() and packaged(source)
    file = weights_file(str(source)) if is_packaged else Path(source).expanduser()
    tensors, metadata = read_weights(file)
    if not {"labels", "positive", "negative"} <= tensors.keys() or "names" not in metadata:
        raise ValueError(
            f"{file}: expected the tensors labels, positive and negative and the metadata names, got the "
            f"tensors {', '.join(sorted(tensors)) or 'none'} and the metadata {', '.join(metadata) or 'none'}"
        )
    vectors, positive, negative = (tensors[name].float() for name in ("labels", "positive", "negative"))
    try:
        names = tuple(json.loads(metadata["names"]))
        table = LabelEmbeddings(names, vectors, positive, negative, metadata.get("source", "")).select(labels)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if vectors.shape[1] != width:
        raise ValueError(f"{file}: label embeddings must have the model's {width} features, got {vectors.shape[1]}")
    return table
