"""C-Tran in two sizes, with learned label embeddings or with FedLGT's fixed text embeddings (ULE).

The model itself is :class:`confed.models.ctran_module.CTran`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from confed.federation.specs import ModelSpec
from confed.models.ctran_module import CTran, label_options
from confed.models.heads import count
from confed.models.label_embeddings import constant_tokens
from confed.models.layers import Norm
from confed.models.resnet import freeze_body, mini_resnet, picture_options, resnet18
from confed.models.tokenizer import WordTokenizer
from confed.models.variants import variant

if TYPE_CHECKING:
    from transformers import ResNetModel


def assemble(
    body: "ResNetModel", answers: Sequence[str] | int, *, embeddings: Path | str | None, learn_labels: bool,
    swap_states: bool, norm: Norm, picture_frozen: bool, attention_heads: int, seed: int, vocab_size: int,
    max_length: int, image_size: int | tuple[int, int] = 64, **options: Any,
) -> CTran:  # fmt: skip
    """A C-Tran on a ResNet."""
    del vocab_size, max_length
    config: Any = body.config
    constants = constant_tokens(answers, config.hidden_sizes[-1], embeddings, learn_labels, swap_states)
    rng = torch.Generator().manual_seed(seed)
    model = CTran(body, count(answers), rng, image_size=image_size, heads=attention_heads, **options, **constants)
    freeze_body(model, norm, picture_frozen)
    return model


def _full(
    *, pretrained: Path | str | None, norm: Norm = "batch", image_size: int | tuple[int, int], seed: int, **options: Any
) -> CTran:
    """C-Tran on ResNet-18.

    Options:
        pretrained: the ResNet, a folder written by ``save_pretrained`` or a hub name such as
            ``"microsoft/resnet-18"``; its configuration then decides the width. None: random weights.
        embeddings: a file of text embeddings (:mod:`confed.models.label_embeddings`), or the name of one that comes
            with the package; labels are found in it by name, and all its vectors are constant. None: label and state
            embeddings are learned, as in the original C-Tran.
        learn_labels: with a file, learn label embeddings nevertheless and take the states alone from it: FedC-Tran as
            FedLGT's authors released it.
        norm: "batch"; "frozen": batch normalisation whose four tensors are constant; "group": group normalisation.
        picture_frozen: the ResNet does not learn and is run once per picture; not with ``norm`` "batch".
        layers: encoder layers.
        dropout: dropout probability of the encoder layers.
    """
    return assemble(resnet18(pretrained, norm, seed), norm=norm, image_size=image_size, seed=seed, **options)


def _mini(*, pretrained: bool | Path | str, norm: Norm = "batch", seed: int, **options: Any) -> CTran:
    """C-Tran on a small ResNet.

    Options:
        pretrained: load the body of the packaged weights of ``resnet_multilabel_mini``, or of a file that
            ``confed weights pretrain`` wrote for it; everything else starts fresh.
        dropout: dropout probability of the encoder layers.
    """
    return assemble(mini_resnet(pretrained, norm, seed), norm=norm, seed=seed, **options)


SOURCES = (label_options, picture_options)
SPEC = ModelSpec(tokenizer=WordTokenizer)  # what is asked of a dataset's pictures is not read, but batches may have it
SAME = ("embeddings", "learn_labels", "swap_states", "graph", "norm", "picture_frozen")

ctran = variant(
    _full, "ctran",
    "C-Tran as FedLGT has it: ResNet-18, 64 visual tokens of 512 features, 3 encoder layers with 4 heads.\n\n"
    "Raises ``ValueError``: no checkpoint or file at a given path, embeddings that lack a label or have another width, "
    "or\nan option that is out of range.",
    "answers vocab_size pretrained embeddings learn_labels swap_states graph norm picture_frozen image_size layers "
    "attention_heads dropout max_length seed",
    sources=SOURCES, spec=SPEC, vocab_size=0, pretrained=None, image_size=256, layers=3, dropout=0.1,
)  # fmt: skip
ctran_mini = variant(
    _mini, "ctran_mini",
    "A C-Tran for 64 x 64 pictures, small enough to learn on one CPU core: 64 visual tokens of 64 features.",
    "answers vocab_size pretrained embeddings learn_labels swap_states graph norm picture_frozen dropout max_length "
    "seed",
    sources=SOURCES, spec=SPEC, described=dict.fromkeys(SAME, "see :func:`ctran`."), vocab_size=0, pretrained=False,
    layers=3, attention_heads=4,
)  # fmt: skip
