"""Pretraining of the mini backbones: data, duration and initial values of each.

A backbone rarely starts from nothing: VAuLT takes a ViLT and a BERT, ALBEF and BLIP a picture Transformer and a BERT
that were trained before. Here all of them take over what ``vilt_mini`` has: the picture embedding and blocks, and the
word embeddings.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.data.encode import encode
from confed.data.examples import Examples
from confed.data.refusals import check_choice, check_distinct, check_nothing_lacks, refuse
from confed.data.table import Table
from confed.models import create_model, create_tokenizer
from confed.models.caption_tokenizer import AnswerTokenizer
from confed.models.hf.prompts import ChatTokenizer
from confed.models.pretrained import MINI_WEIGHTS, Pretrainable, read_weights, save, write_weights
from confed.models.tokenizer import SPECIAL_TOKENS, WordTokenizer
from confed.prepare.pretraining.captions import ANSWERS as MATCHES
from confed.prepare.pretraining.captions import KINDS, CaptionLearner, captioned_scenes
from confed.prepare.pretraining.chat import CAPTION, QUESTIONS, ChatLearner, captions, trained_processor, word_ids
from confed.prepare.pretraining.dual import DualLearner, coloured_things_told
from confed.prepare.pretraining.tags import (
    LABELS,
    CellNames,
    Tagger,
    cell_targets,
    macro_average_precision,
    public_pictures,
    tag_words,
)
from confed.tasks.generation import Generation

# Initial values from the packaged vilt_mini where a mini has the same parts -----------------------------------

Start = Sequence[tuple[str, str]]
"""Pairs of a pattern that matches whole names of the new model, and the name in ``vilt_mini``, in which ``\\1`` and so
on stand for the pattern's groups; several names joined by ``+`` are stacked."""

_BLOCK = r"vilt.encoder.layer.\1."
_WORDS = (
    r"text_(?:encoder|decoder\.bert)\.embeddings\.((?:word_embeddings|position_embeddings|LayerNorm)\.\w+)",
    r"vilt.embeddings.text_embeddings.\1",
)

VAULT: Start = (
    (r"(vilt\..*)", r"\1"),
    (r"(classifier\..*)", r"\1"),
    # Not BERT's first normalisation: ViLT's own one follows behind BERT, so that fresh blocks change little.
    (r"language\.embeddings\.((?:word|position)_embeddings\.weight)", r"vilt.embeddings.text_embeddings.\1"),
)

ALBEF: Start = (
    (r"visual_encoder\.embeddings\.(.*)", r"vilt.embeddings.\1"),
    (r"visual_encoder\.layers\.(\d)\.attention\.q_proj\.(\w+)", _BLOCK + r"attention.attention.query.\2"),
    (r"visual_encoder\.layers\.(\d)\.attention\.k_proj\.(\w+)", _BLOCK + r"attention.attention.key.\2"),
    (r"visual_encoder\.layers\.(\d)\.attention\.v_proj\.(\w+)", _BLOCK + r"attention.attention.value.\2"),
    (r"visual_encoder\.layers\.(\d)\.attention\.o_proj\.(\w+)", _BLOCK + r"attention.output.dense.\2"),
    (r"visual_encoder\.layers\.(\d)\.mlp\.fc1\.(\w+)", _BLOCK + r"intermediate.dense.\2"),
    (r"visual_encoder\.layers\.(\d)\.mlp\.fc2\.(\w+)", _BLOCK + r"output.dense.\2"),
    (r"visual_encoder\.layers\.(\d)\.(layernorm_\w+\.\w+)", _BLOCK + r"\2"),
    _WORDS,
)

BLIP: Start = (
    (r"vision_model\.embeddings\.class_embedding", "vilt.embeddings.cls_token"),
    (r"vision_model\.embeddings\.position_embedding", "vilt.embeddings.position_embeddings"),
    (r"vision_model\.embeddings\.patch_embedding\.(\w+)", r"vilt.embeddings.patch_embeddings.projection.\1"),
    (
        r"vision_model\.encoder\.layers\.(\d)\.self_attn\.qkv\.(\w+)",
        "+".join(_BLOCK + rf"attention.attention.{name}.\2" for name in ("query", "key", "value")),
    ),
    (r"vision_model\.encoder\.layers\.(\d)\.self_attn\.projection\.(\w+)", _BLOCK + r"attention.output.dense.\2"),
    (r"vision_model\.encoder\.layers\.(\d)\.mlp\.fc1\.(\w+)", _BLOCK + r"intermediate.dense.\2"),
    (r"vision_model\.encoder\.layers\.(\d)\.mlp\.fc2\.(\w+)", _BLOCK + r"output.dense.\2"),
    (r"vision_model\.encoder\.layers\.(\d)\.layer_norm1\.(\w+)", _BLOCK + r"layernorm_before.\2"),
    (r"vision_model\.encoder\.layers\.(\d)\.layer_norm2\.(\w+)", _BLOCK + r"layernorm_after.\2"),
    _WORDS,
)


def copy(model: nn.Module, start: Start) -> None:
    """Copy the values of the packaged ``vilt_mini`` into a model where ``start`` says so."""
    from safetensors.torch import load_file

    source: Mapping[str, Tensor] = load_file(MINI_WEIGHTS)
    state = model.state_dict()
    for pattern, replacement in start:
        target_names = {
            name: match.expand(replacement).split("+") for name in state if (match := re.fullmatch(pattern, name))
        }
        if not target_names:
            refuse("the model", f"a tensor like {pattern!r} to start from {MINI_WEIGHTS.name}", found="none")
        for name, theirs in target_names.items():
            lacking = [other for other in theirs if other not in source]
            check_nothing_lacks(f"tensors that {name!r} starts from", lacking, len(theirs), MINI_WEIGHTS.name)
            value = torch.cat([source[other] for other in theirs])
            if value.shape != state[name].shape:
                refuse(name, f"the shape of {replacement!r}, {tuple(value.shape)}", tuple(state[name].shape))
            with torch.no_grad():
                state[name].copy_(value)


# Pretraining of the mini backbones: data, duration and initial values of each ---------------------------------

HELD_OUT = 25
"""One in so many captions is measured on, where the material decides which."""


class Settings(NamedTuple):
    """Training settings of a mini backbone; weight decay is of matrices, ``warmup`` a share of the steps."""

    questions: int = 96000
    validation: int = 4000
    epochs: int = 12
    batch_size: int = 64
    lr: float = 2e-3
    warmup: float = 0.05
    weight_decay: float = 0.01
    tag_weight: float = 1.0
    clip: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Material:
    """Training data of a mini backbone; ``sides``: rows to learn from and to measure on, where not by number."""

    table: Table
    cells: Mapping[str, Tensor]
    answers: tuple[str, ...]
    types: tuple[str, ...]
    tokenizer: Any
    candidates: Tensor | None = None
    words: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    sides: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Mini:
    """One mini backbone; ``bar``: what its packaged weights reach at least; ``together``: rows that share a batch."""

    name: str
    bar: float
    settings: Settings = field(default_factory=Settings)
    material: Callable[[str, int, int], Material] = field(default_factory=lambda: questions_about_scenes)
    start: Start = ()
    together: int = 1
    learner: Callable[[Any, int], nn.Module] | None = None
    folder: bool = False

    def create(self, material: Material, seed: int) -> nn.Module:
        """The untrained model, with the values of ``vilt_mini`` where it starts from them."""
        model = (
            self.learner(material.tokenizer, seed)
            if self.learner is not None
            else create_model(
                self.name,
                answers=material.answers,
                vocab_size=material.tokenizer.vocab_size,
                pretrained=False,
                seed=seed,
            )
        )
        if self.start:
            copy(model, self.start)
        if material.candidates is not None:
            task = Generation(len(material.candidates)).choosing(material.candidates)
            cast("Any", model).begin(task)
        return model


def questions_about_scenes(model: str, questions: int, seed: int) -> Material:
    """The public split of the built-in benchmark, with what stands in each cell."""
    from confed.datasets.scenes import ANSWERS, FAMILIES, WORDS, public_split

    examples, tags = public_split(questions, seed)
    # A separate vocabulary, because the model's tokenizer would put the packaged weights' words in front.
    tokenizer = WordTokenizer(WORDS) if model == "vilt_mini" else create_tokenizer(model, WORDS)
    table = _trimmed(encode(examples, tokenizer, ANSWERS, FAMILIES))
    candidates = None
    if isinstance(tokenizer, AnswerTokenizer):
        candidates = tokenizer.answers(ANSWERS)
        written = {**table.columns, "answer_tokens": candidates[table.columns["label"]]}
        table = replace(table, columns=written)
    return Material(table, cell_targets(tags), ANSWERS, FAMILIES, tokenizer, candidates, _words(tokenizer))


def conversations_about_scenes(model: str, questions: int, seed: int) -> Material:
    """The same questions with prompts of a tokenizer that is trained on them, and a caption of each picture."""
    from confed.datasets.scene_captions import tell_words
    from confed.datasets.scenes import ANSWERS, FAMILIES, public_split

    del model
    examples, tags = public_split(questions, seed, QUESTIONS)
    told = captions(tags, seed)
    tokenizer = ChatTokenizer(trained_processor([CAPTION, *ANSWERS, *tell_words(), *examples.questions, *told]))
    table = encode(examples, tokenizer, ANSWERS, FAMILIES)
    candidates = tokenizer.answers(ANSWERS)
    written = {
        "answer_tokens": candidates[table.columns["label"]],
        "caption_tokens": tokenizer.answers(told)[table.image_index],
    }
    table = replace(table, columns={**table.columns, **written})
    words = tag_words(lambda words: word_ids(tokenizer, words), nothing=0)
    return Material(table, cell_targets(tags), ANSWERS, FAMILIES, tokenizer, candidates, words)


def single_things(model: str, questions: int, seed: int) -> Material:
    """Pictures of one thing in none of the six styles of :mod:`confed.datasets.six_styles`; the answer is its noun."""
    from confed.datasets.scenes import NOUNS
    from confed.datasets.six_styles import QUESTION, plain_objects

    pictures, labels = plain_objects(questions, seed)
    answers = [NOUNS[label] for label in labels.tolist()]
    numbers = torch.arange(questions).numpy()
    names = [f"plain/{number:06d}" for number in range(questions)]
    examples = Examples(pictures, numbers, [QUESTION] * questions, answers, ["plain"] * questions, names)
    tokenizer = create_tokenizer(model, QUESTION.rstrip("?").split())
    return Material(_trimmed(encode(examples, tokenizer, NOUNS, ["plain"])), {}, NOUNS, ("plain",), tokenizer)


def names_of_things(model: str, questions: int, seed: int) -> Material:
    """As many public pictures, with the nouns and colours of what stands in them; nothing is asked."""
    del model
    table, tags = public_pictures(questions, seed)
    return Material(table, cell_targets(tags), LABELS, (), WordTokenizer(LABELS))


def captioned_things(model: str, questions: int, seed: int) -> Material:
    """Pictures of single coloured things with captions; some classes are reserved for the measurement."""
    from confed.datasets.scene_classes import RESERVED

    del model
    table, learned, held, tokenizer = coloured_things_told(questions, seed)
    return Material(table, {}, RESERVED, (), tokenizer, sides=(learned, held))


def masked_captions(model: str, questions: int, seed: int) -> Material:
    """Captions of as many public pictures, masked and mismatched; nothing is asked."""
    del model
    table, learned, held, tokenizer = captioned_scenes(questions, questions // HELD_OUT, seed)
    return Material(table, {}, MATCHES, KINDS, tokenizer, sides=(learned, held))


def _words(tokenizer: Any) -> dict[str, Tensor]:
    # The first token opens the text.
    return tag_words(lambda words: tokenizer(words)[0][:, 1], SPECIAL_TOKENS.index("[PAD]"))


def _trimmed(table: Table) -> Table:
    """Without the text columns that are padding everywhere."""
    longest = int(table.columns["text_mask"].sum(1).max())
    short = {name: c[:, :longest] if name.startswith("text") else c for name, c in table.columns.items()}
    return Table(table.images, table.image_index, short)


MINIS: Mapping[str, Mini] = {
    mini.name: mini
    for mini in (
        Mini("vilt_mini", bar=0.85),
        Mini(
            "vilt_mlm_mini",
            bar=0.8,
            settings=Settings(48000, 2000, epochs=3),
            material=masked_captions,
            learner=partial(CaptionLearner, "vilt_mlm_mini"),
        ),
        Mini(
            "vilt_mlm_middle",
            bar=0.8,
            settings=Settings(192000, 4000, epochs=10, lr=1e-3),
            material=masked_captions,
            learner=partial(CaptionLearner, "vilt_mlm_middle"),
        ),
        Mini("vit_mini", bar=0.85, settings=Settings(24000, 2000, epochs=10), material=single_things),
        Mini("vault_mini", bar=0.85, settings=Settings(48000, epochs=3, lr=1e-3), start=VAULT),
        Mini("albef_mini", bar=0.8, settings=Settings(48000, epochs=6), start=ALBEF),
        Mini("blip_mini", bar=0.8, settings=Settings(48000, epochs=6), start=BLIP),
        Mini(
            "resnet_multilabel_mini",
            bar=0.95,
            settings=Settings(16000, 2000, epochs=8, lr=3e-3),
            material=names_of_things,
        ),
        Mini(
            "smolvlm_mini",
            bar=0.85,
            settings=Settings(64000, 2000, epochs=5),
            material=conversations_about_scenes,
            together=QUESTIONS,
            learner=ChatLearner,
            folder=True,
        ),
        Mini(
            "clip_mini",
            bar=0.7,
            settings=Settings(16000, 2000, epochs=4, lr=1e-3),
            material=captioned_things,
            learner=DualLearner,
            folder=True,
        ),
    )
}
"""The minis by name."""


# Pretraining run: answers and tags together, saved after every epoch -----------------------------------------


def pretrain(
    model: str, out: Path | str, *, threads: int = 1, progress: bool = True, **changes: float
) -> dict[str, float]:
    """Pretraining of a mini backbone, whose weights are written."""
    check_choice("model", model, MINIS)
    check_distinct("settings", list(changes), Settings._fields)
    mini = MINIS[model]
    values = mini.settings._asdict() | changes
    settings = Settings(**values)  # pyright: ignore[reportArgumentType]
    out, before = Path(out), torch.get_num_threads()
    state = out.with_name(out.name + ".state")
    torch.set_num_threads(threads)
    try:
        material = mini.material(model, settings.questions + settings.validation, settings.seed)
        learn, held_out = material.sides or _split_by_picture(material.table, settings)
        run = _Run(mini, settings, material, len(learn))
        run.restore(state)
        result = run.accuracy(held_out) if run.epoch else {}
        for epoch in range(run.epoch, settings.epochs):
            losses = run.train(learn, epoch)
            result = run.accuracy(held_out)
            facts: dict[str, Any] = {"accuracy": result, "settings": settings._asdict(), "epochs_done": epoch + 1}
            if mini.start or mini.name == "clip_mini":
                facts["start"] = "vilt_mini" if mini.start else "vit_mini"
            if "labels" in material.table.columns:
                facts["metric"] = "C-AP"
            facts |= {"words": list(material.tokenizer.words), "answers": list(material.answers)}
            if mini.learner is not None:
                cast("Any", run.model).save(out, facts)
            else:
                save(run.model, out, **facts)
            run.keep(state)
            if progress:
                _show(epoch + 1, losses, result)
        state.unlink(missing_ok=True)
        return result
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def accuracy(
    model: nn.Module, table: Table, types: Sequence[str], rows: Tensor | None = None, batch_size: int = 256
) -> dict[str, float]:
    """Share of right answers per question type, and ``overall``; where there are several labels, average precision."""
    if "labels" in table.columns:
        return macro_average_precision(model, table, rows, batch_size)
    training = model.training
    model.eval()
    rows = torch.arange(len(table)) if rows is None else rows
    right: list[Tensor] = []
    for batch in table.batches(batch_size, order=rows):
        read = {name: tensor for name, tensor in batch.items() if name != "answer_tokens"}
        right.append(model(read).logits.argmax(1).eq(batch["label"]))
    model.train(training)
    correct = torch.cat(right).double() if right else torch.zeros(0)
    result: dict[str, float] = {}
    for number, kind in enumerate(types):
        of_kind = table.columns["type"][rows] == number
        if of_kind.any():
            result[kind] = float(correct[of_kind].mean())
    return result | ({"overall": float(correct.mean())} if right else {})


class _Run:
    """A training run that can be kept and restored between epochs."""

    def __init__(self, mini: Mini, settings: Settings, material: Material, examples: int) -> None:
        self.mini, self.settings, self.material, self.epoch = mini, settings, material, 0
        self.steps = settings.epochs * math.ceil(examples / settings.batch_size)
        self.model = mini.create(material, settings.seed)
        rng = torch.Generator().manual_seed(settings.seed)
        self.modules = nn.ModuleDict({"model": self.model})
        self.tagger: Tagger | CellNames | None = None
        states = self._states(material.table.batch(torch.arange(2 * mini.together)))
        if material.cells and states.words is not None:
            self.tagger = Tagger(states.words.shape[1], material.words, rng)
        elif material.cells and states.late is not None:
            self.tagger = CellNames(states.late.shape[2], rng)
        if self.tagger is not None:
            self.modules["tagger"] = self.tagger
        decayed, plain = [], []
        for name, parameter in self.modules.named_parameters():
            matrix = parameter.ndim >= 2 and "embeddings." not in name.replace("patch_embeddings.", "")
            (decayed if matrix else plain).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": plain, "weight_decay": 0.0}],
            lr=settings.lr,
            betas=(0.9, 0.98),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def accuracy(self, rows: Tensor) -> dict[str, float]:
        """Accuracy so far on some questions."""
        return accuracy(self.model, self.material.table, self.material.types, rows)

    def train(self, rows: Tensor, epoch: int) -> tuple[float, float]:
        """One epoch in a newly drawn order; mean loss of answers and of tags."""
        rng = torch.Generator().manual_seed(1_000_003 * self.settings.seed + epoch)
        groups = rows.view(-1, self.mini.together)
        order = groups[torch.randperm(len(groups), generator=rng)].flatten()
        step = epoch * math.ceil(len(rows) / self.settings.batch_size)
        sums = torch.zeros(2)
        self.modules.train()
        for batch in self.material.table.batches(self.settings.batch_size, order):
            answers, tags = self.losses(batch)
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.lr * _schedule(step / self.steps, self.settings.warmup)
            self.optimizer.zero_grad()
            (answers + self.settings.tag_weight * tags).backward()
            nn.utils.clip_grad_norm_(self.modules.parameters(), self.settings.clip)
            self.optimizer.step()
            sums += torch.stack([answers.detach(), tags.detach()]) * len(batch["index"])
            step += 1
        self.epoch = epoch + 1
        answer_loss, tag_loss = (sums / len(rows)).tolist()
        return answer_loss, tag_loss

    def losses(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean loss of the answers (of labels: over all of them), and of the tags."""
        states = self._states(batch)
        answers = states.answer_loss
        if answers is None and "labels" in batch:
            answers = F.binary_cross_entropy_with_logits(states.loss_logits, batch["labels"])
        elif answers is None:
            answers = F.cross_entropy(states.loss_logits, batch["label"])
        if self.tagger is None:
            return answers, torch.zeros(())
        pictures = self.material.table.image_index[batch["index"]]
        cells = {name: tags[pictures] for name, tags in self.material.cells.items()}
        if isinstance(self.tagger, CellNames):
            return answers, self.tagger.losses(states, cells)
        return answers, self.tagger.losses(states, batch["text"], cells)

    def keep(self, file: Path) -> None:
        """Write weights, optimiser moments and the number of finished epochs."""
        tensors = dict(self.modules.state_dict())
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"moments.{index}.{name}": value for name, value in moments.items()}
        write_weights(file, tensors, {"epoch": str(self.epoch), "settings": self._identity()})

    def restore(self, file: Path) -> None:
        """Continues from a kept state, if there is one of this model and these settings."""
        if not file.is_file():
            return
        tensors, notes = read_weights(file)
        if notes.get("settings") != self._identity():
            return
        moments: dict[int, dict[str, Tensor]] = {}
        for name in [name for name in tensors if name.startswith("moments.")]:
            _, index, kind = name.split(".")
            moments.setdefault(int(index), {})[kind] = tensors.pop(name)
        self.modules.load_state_dict(tensors)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.epoch = int(notes["epoch"])

    def _identity(self) -> str:
        return f"{self.mini.name} {self.settings!r}"

    def _states(self, batch: Mapping[str, Tensor]) -> Any:
        return cast("Pretrainable", self.model).pretraining_states(batch)


def _split_by_picture(table: Table, settings: Settings) -> tuple[Tensor, Tensor]:
    """Rows to learn from and held-out rows; questions about one picture stay on one side."""
    index = table.image_index
    seen = index < index[settings.questions] if settings.validation else index >= 0
    return seen.nonzero()[:, 0], (~seen).nonzero()[:, 0]


def _schedule(done: float, warmup: float) -> float:
    if done < warmup:
        return done / warmup
    return 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


def _show(epoch: int, losses: tuple[float, float], result: Mapping[str, float]) -> None:
    from rich import print as show

    shares = "  ".join(f"{name} {value:.3f}" for name, value in result.items())
    show(f"epoch {epoch:3d}  loss {losses[0]:.3f}  tags {losses[1]:.3f}  {shares}")
