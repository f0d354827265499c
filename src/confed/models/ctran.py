"""C-Tran in two sizes, with learned label embeddings or with FedLGT's fixed text embeddings (ULE).

The model itself is :class:`confed.models.ctran_module.CTran`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from confed.models.ctran_module import CTran
from confed.models.heads import count
from confed.models.label_embeddings import constant_tokens
from confed.models.layers import Norm
from confed.models.resnet import freeze_body, mini_resnet, resnet18
from confed.models.tokenizer import WordTokenizer
from confed.registry import register_model


@register_model
def ctran(
    answers: Sequence[str] | int,
    vocab_size: int = 0,
    *,
    pretrained: Path | str | None = None,
    embeddings: Path | str | None = None,
    learn_labels: bool = False,
    swap_states: bool = False,
    graph: bool = False,
    norm: Norm = "batch",
    picture_frozen: bool = False,
    image_size: int | tuple[int, int] = 256,
    layers: int = 3,
    attention_heads: int = 4,
    dropout: float = 0.1,
    max_length: int = 16,
    seed: int = 0,
) -> CTran:
    """C-Tran as FedLGT has it: ResNet-18, 64 visual tokens of 512 features, 3 encoder layers with 4 heads.

    Raises ``ValueError``: no checkpoint or file at a given path, embeddings that lack a label or have another width, or
    an option that is out of range.

    Args:
        answers: the labels, or how many there are.
        vocab_size: ignored, as no words are read.
        pretrained: the ResNet, a folder written by ``save_pretrained`` or a hub name such as
            ``"microsoft/resnet-18"``; its configuration then decides the width. None: random weights.
        embeddings: a file of text embeddings (:mod:`confed.models.label_embeddings`), or the name of one that comes
            with the package; labels are found in it by name, and all its vectors are constant. None: label and state
            embeddings are learned, as in the original C-Tran.
        learn_labels: with a file, learn label embeddings nevertheless and take the states alone from it: FedC-Tran as
            FedLGT's authors released it.
        swap_states: with a file, "known absent" gets the vector of "positive" and "known present" that of
            "negative", as in FedLGT's released code.
        graph: add a prior between label tokens; see :class:`confed.models.ctran_module.LabelGraph`.
        norm: "batch"; "frozen": batch normalisation whose four tensors are constant; "group": group normalisation.
        picture_frozen: the ResNet does not learn and is run once per picture; not with ``norm`` "batch".
        image_size: pixels per side or (H, W).
        layers: encoder layers.
        attention_heads: heads of each; must divide the width.
        dropout: dropout probability of the encoder layers.
        max_length: of questions, which are ignored.
        seed: of all fresh values.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    body = resnet18(pretrained, norm, seed)
    config: Any = body.config
    options: dict[str, Any] = dict(
        constant_tokens(answers, config.hidden_sizes[-1], embeddings, learn_labels, swap_states)
    )
    options |= {"image_size": size, "layers": layers, "heads": attention_heads, "dropout": dropout, "graph": graph}
    model = CTran(body, count(answers), torch.Generator().manual_seed(seed), **options)
    freeze_body(model, norm, picture_frozen)
    return model


@register_model
def ctran_mini(
    answers: Sequence[str] | int,
    vocab_size: int = 0,
    *,
    pretrained: bool | Path | str = False,
    embeddings: Path | str | None = None,
    learn_labels: bool = False,
    swap_states: bool = False,
    graph: bool = False,
    norm: Norm = "batch",
    picture_frozen: bool = False,
    dropout: float = 0.0,
    max_length: int = 16,
    seed: int = 0,
) -> CTran:
    """A C-Tran for 64 x 64 pictures, small enough to learn on one CPU core: 64 visual tokens of 64 features.

    Args:
        answers: the labels, or how many there are.
        vocab_size: ignored, as no words are read.
        pretrained: load the body of the packaged weights of ``resnet_multilabel_mini``, or of a file that
            ``confed pretrain`` wrote for it; everything else starts fresh.
        embeddings: see :func:`ctran`.
        learn_labels: see :func:`ctran`.
        swap_states: see :func:`ctran`.
        graph: see :func:`ctran`.
        norm: see :func:`ctran`.
        picture_frozen: see :func:`ctran`.
        dropout: dropout probability of the encoder layers.
        max_length: of questions, which are ignored.
        seed: of all fresh values.
    """
    body = mini_resnet(pretrained, norm, seed)
    config: Any = body.config
    options: dict[str, Any] = dict(
        constant_tokens(answers, config.hidden_sizes[-1], embeddings, learn_labels, swap_states)
    )
    options |= {"image_size": (64, 64), "dropout": dropout, "graph": graph}
    model = CTran(body, count(answers), torch.Generator().manual_seed(seed), **options)
    freeze_body(model, norm, picture_frozen)
    return model


# What is asked of a dataset's pictures is not read, but batches may have it.
ctran.tokenizer = WordTokenizer  # pyright: ignore[reportFunctionMemberAccess]
ctran_mini.tokenizer = WordTokenizer  # pyright: ignore[reportFunctionMemberAccess]
