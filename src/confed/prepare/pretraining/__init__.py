"""Pretraining of the mini backbones from nothing, each in minutes on one CPU core.

The public split of the built-in benchmark (random styles, no wording shift) comes with its scene graphs, so a
model learns two things at once: to answer, and to say what each token stands for. The second part is what makes
a Transformer of this size learn in minutes. It mirrors the word-patch alignment of ViLT's own pre-training
(Kim, Son and Kim, ICML 2021, section 3.2), with alignments that are known instead of inferred; see
:mod:`confed.prepare.pretraining.tags`. :data:`MINIS` says for each backbone what it learns from, where it starts and
what share of held-out questions its packaged weights must answer.
"""

from confed.prepare.pretraining.minis import MINIS, Mini, accuracy, pretrain
from confed.prepare.pretraining.tags import Tagger, word_targets

__all__ = ["MINIS", "Mini", "Tagger", "accuracy", "pretrain", "word_targets"]
