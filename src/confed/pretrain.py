"""Making the mini backbone's weights from nothing, on one CPU core.

The public split of the built-in benchmark (random styles, no wording shift) comes with its scene graphs, so
the model learns two things at once: to answer, and to say what each token stands for. The second part is what
makes a Transformer of this size learn in minutes. It mirrors the word-patch alignment of ViLT's own
pre-training (Kim, Son and Kim, ICML 2021, section 3.2), with alignments that are known instead of inferred:

* after the first block every patch scores its noun, its colour, its size and its quadrant;
* after the first and after the second block every patch scores the colour of its right neighbour;
* after the second block every noun of the question scores the colour, the size and the quadrant of the thing
  it names and the colour of that thing's right neighbour, and every colour scores the noun of its thing and
  the number of its things.

Scores are dot products with the word embeddings of those very words, so patches and questions speak of the
same vectors. Without the third group the patches are recognised within an epoch or two, but the answers stay
at chance for many more, until words happen to find their patches; with it they bind at once.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.data.examples import Table, encode
from confed.models.layers import seeded_linear
from confed.models.pretrained import MINI_WEIGHTS, save
from confed.models.tokenizer import WordTokenizer
from confed.models.vilt import vilt_mini

if TYPE_CHECKING:
    from confed.data.scenes import Tags

__all__ = ["Tagger", "accuracy", "pretrain", "word_targets"]

GRID = 4
NOTHING = "[PAD]"
"""The token whose embedding stands for an empty cell and for a thing that is not there."""


class Tagger(nn.Module):
    """Scores of what each token stands for, as dot products with word embeddings.

    Args:
        width: features per token, d.
        words: token ids that the classes of each tag are made of: ``noun``, ``colour`` and ``size`` (C + 1,)
            with the id for "nothing" first, ``quadrant`` (4, 2), two words each, and ``number`` (6,).
        rng: source of the initial values.
    """

    def __init__(self, width: int, words: Mapping[str, Tensor], rng: torch.Generator) -> None:
        super().__init__()
        self.words = dict(words)
        self.layers = nn.ModuleDict()
        for name in ("patch", "patch_right", "late_right", "word", "word_right"):
            linear = seeded_linear(width, width, width**-0.5, rng)
            self.layers[name] = nn.Sequential(nn.LayerNorm(width), linear)

    def loss(self, layer: str, hidden: Tensor, targets: Mapping[str, Tensor], embeddings: Tensor) -> Tensor:
        """Sum over tags of the mean cross-entropy.

        Args:
            layer: which tokens they are, and what about them: ``patch``, ``patch_right``, ``late_right``
                (patches after the second block), ``word`` or ``word_right``.
            hidden: (B, T, d).
            targets: tag -> classes (B, T), -1 where a token has none.
            embeddings: the word embeddings, (vocabulary, d).
        """
        hidden, total = self.layers[layer](hidden), hidden.new_zeros(())
        for name, target in targets.items():
            ids = self.words[name]
            vectors = embeddings[ids] if ids.ndim == 1 else embeddings[ids].sum(1)
            weight = hidden.new_ones(len(vectors))
            if name in {"noun", "colour", "size"}:
                weight[0] = 0.2  # two cells in three are empty; at full weight they would drown the others
            scored = target >= 0
            if scored.any():
                total = total + F.cross_entropy(hidden[scored] @ vectors.T, target[scored], weight)
        return total


def word_targets(text: Tensor, words: Mapping[str, Tensor], cells: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the nouns and colours of questions stand for in their pictures.

    Args:
        text: token ids, (B, L).
        words: see :class:`Tagger`.
        cells: ``noun``, ``colour``, ``size`` and ``right`` (the colour of the right neighbour) of the B
            pictures, (B, 16), and ``quadrant`` (16,).

    Returns:
        ``colour`` and ``size`` of the thing a noun names, 0 if there is none; its ``quadrant`` and ``right``;
        the ``noun`` of the thing a colour names, 0 if there is none, and the ``number`` of such things. Each
        (B, L), -1 for all other tokens and where several things are meant.
    """
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for kind in ("noun", "colour"):
        matches = text[:, :, None] == words[kind][1:]
        named = torch.where(matches.any(-1), 1 + matches.int().argmax(-1), 0)
        present = (named[:, :, None] == cells[kind][:, None]) & (named > 0)[:, :, None]
        found[kind] = named > 0, present
    is_noun, things = found["noun"]
    is_colour, coloured = found["colour"]
    number = things.sum(-1)
    targets = {
        name: torch.where(is_noun & (number <= 1), (things * cells[name][:, None]).sum(-1), -1)
        for name in ("colour", "size")
    }
    for name, of_cell in (("quadrant", cells["quadrant"]), ("right", cells["right"][:, None])):
        targets[name] = torch.where(is_noun & (number == 1), (things * of_cell).sum(-1), -1)
    number = coloured.sum(-1)
    targets["noun"] = torch.where(is_colour & (number <= 1), (coloured * cells["noun"][:, None]).sum(-1), -1)
    targets["number"] = torch.where(is_colour & (number < len(words["number"])), number, -1)
    return targets


def pretrain(
    out: Path | str = MINI_WEIGHTS,
    *,
    questions: int = 96000,
    validation: int = 4000,
    epochs: int = 12,
    batch_size: int = 64,
    lr: float = 2e-3,
    warmup: float = 0.05,
    weight_decay: float = 0.01,
    tag_weight: float = 1.0,
    clip: float = 1.0,
    seed: int = 0,
    threads: int = 1,
    progress: bool = True,
) -> dict[str, float]:
    """Trains :func:`confed.models.vilt.vilt_mini` from nothing and writes its weights.

    After every epoch the weights so far go to ``out`` and the whole training state beside it, to
    ``<out>.state``; the same call after an interruption continues there and ends with the same weights. The
    state is removed at the end.

    Args:
        out: the safetensors file.
        questions: public questions to learn from, several per picture.
        validation: further public questions, about other pictures, to measure on.
        epochs: passes over the questions.
        batch_size: questions per step.
        lr: peak learning rate of AdamW; linear warm-up, then cosine decay to zero.
        warmup: share of the steps spent warming up.
        weight_decay: of matrices (not of biases, norms and embeddings).
        tag_weight: weight of the tags beside the answers.
        clip: largest gradient norm.
        seed: of the data, the initial weights and the order.
        threads: CPU threads; another number may change the last digits.
        progress: print each epoch's losses and held-out accuracies.

    Returns:
        Held-out accuracy per question family, and ``overall``.
    """
    from confed.data.scenes import ANSWERS, FAMILIES, public_split

    settings = _Settings(questions, validation, epochs, batch_size, lr, warmup, weight_decay, tag_weight, clip, seed)
    out, before = Path(out), torch.get_num_threads()
    state = out.with_name(out.name + ".state")
    torch.set_num_threads(threads)
    try:
        examples, tags = public_split(questions + validation, seed)
        tokenizer = WordTokenizer(_public_words())
        table = _trimmed(encode(examples, tokenizer, ANSWERS, FAMILIES))
        # Questions about one picture stay on one side.
        seen = table.image_index < table.image_index[questions] if validation else table.image_index >= 0
        learn, held_out = seen.nonzero()[:, 0], (~seen).nonzero()[:, 0]
        run = _Run(
            settings,
            tokenizer=tokenizer,
            answers=ANSWERS,
            table=table,
            targets=_targets(tags),
            examples=len(learn),
        )
        run.restore(state)
        result = accuracy(run.model, table, FAMILIES, held_out) if run.epoch else {}
        for epoch in range(run.epoch, epochs):
            losses = run.train(learn, epoch)
            result = accuracy(run.model, table, FAMILIES, held_out)
            facts = {"accuracy": result, "settings": settings._asdict(), "epochs_done": epoch + 1}
            save(run.model, out, words=tokenizer.words, answers=ANSWERS, **facts)
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
    """Share of right answers per question type, and ``overall``.

    Args:
        model: any model of the project.
        table: encoded questions.
        types: the question types, in the order of the table's column ``type``.
        rows: which questions count; default: all.
        batch_size: questions per forward pass.
    """
    training = model.training
    model.eval()
    rows = torch.arange(len(table)) if rows is None else rows
    right = [model(batch).logits.argmax(1).eq(batch["label"]) for batch in table.batches(batch_size, order=rows)]
    model.train(training)
    correct = torch.cat(right).double() if right else torch.zeros(0)
    result: dict[str, float] = {}
    for number, kind in enumerate(types):
        of_kind = table.columns["type"][rows] == number
        if of_kind.any():
            result[kind] = float(correct[of_kind].mean())
    return result | ({"overall": float(correct.mean())} if right else {})


class _Settings(NamedTuple):
    questions: int
    validation: int
    epochs: int
    batch_size: int
    lr: float
    warmup: float
    weight_decay: float
    tag_weight: float
    clip: float
    seed: int


class _Run:
    """A training run that can be kept and restored between epochs."""

    def __init__(
        self,
        settings: _Settings,
        *,
        tokenizer: WordTokenizer,
        answers: Sequence[str],
        table: Table,
        targets: Mapping[str, Tensor],
        examples: int,
    ) -> None:
        self.settings, self.table, self.targets, self.epoch = settings, table, targets, 0
        self.steps = settings.epochs * math.ceil(examples / settings.batch_size)
        self.model = vilt_mini(answers, tokenizer.vocab_size, pretrained=False, seed=settings.seed)
        rng = torch.Generator().manual_seed(settings.seed)
        self.tagger = Tagger(self.model.vilt.config.hidden_size, _tag_words(tokenizer), rng)
        self.modules = nn.ModuleDict({"model": self.model, "tagger": self.tagger})
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

    def train(self, rows: Tensor, epoch: int) -> tuple[float, float]:
        """One epoch in an order of its own; mean loss of answers and of tags."""
        rng = torch.Generator().manual_seed(1_000_003 * self.settings.seed + epoch)
        order = rows[torch.randperm(len(rows), generator=rng)]
        step = epoch * math.ceil(len(rows) / self.settings.batch_size)
        sums = torch.zeros(2)
        self.modules.train()
        for batch in self.table.batches(self.settings.batch_size, order):
            answers, tags = self.losses(batch)
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.lr * _schedule(step / self.steps, self.settings.warmup)
            self.optimizer.zero_grad()
            (answers + self.settings.tag_weight * tags).backward()
            nn.utils.clip_grad_norm_(self.modules.parameters(), self.settings.clip)
            self.optimizer.step()
            sums += torch.stack([answers.detach(), tags.detach()]) * len(batch["label"])
            step += 1
        self.epoch = epoch + 1
        answer_loss, tag_loss = (sums / len(rows)).tolist()
        return answer_loss, tag_loss

    def losses(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean loss of the answers, and of the tags."""
        pictures = self.table.image_index[batch["index"]]
        cells = {name: t if name == "quadrant" else t[pictures] for name, t in self.targets.items()}
        hidden, mask = self.model.embed(batch)
        last, states = self.model.vilt.encoder(hidden, mask, output_hidden_states=True, return_dict=False)
        answers = F.cross_entropy(self.model.classifier(self.model.pool(last)), batch["label"])
        cut, words = -GRID * GRID, self.model.vilt.get_input_embeddings().weight
        per_patch = {name: cells[name] for name in ("noun", "colour", "size")}
        per_patch["quadrant"] = cells["quadrant"].expand(len(pictures), -1)
        per_word = word_targets(batch["text"], self.tagger.words, cells)
        right, word_right = {"colour": cells["right"]}, {"colour": per_word.pop("right")}
        first, second, asked = states[1][:, cut:], states[2][:, cut:], states[2][:, : batch["text"].shape[1]]
        tags = (
            self.tagger.loss("patch", first, per_patch, words)
            + self.tagger.loss("patch_right", first, right, words)
            + self.tagger.loss("late_right", second, right, words)
            + self.tagger.loss("word", asked, per_word, words)
            + self.tagger.loss("word_right", asked, word_right, words)
        )
        return answers, tags

    def keep(self, file: Path) -> None:
        """Writes weights, optimiser moments and the number of epochs done."""
        from safetensors.torch import save_file

        tensors = dict(self.modules.state_dict())
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"moments.{index}.{name}": value for name, value in moments.items()}
        unfinished = file.with_name(file.name + ".part")
        notes = {"epoch": str(self.epoch), "settings": repr(self.settings)}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, notes)
        unfinished.replace(file)

    def restore(self, file: Path) -> None:
        """Continues from a kept state, if there is one of these settings."""
        from safetensors import safe_open

        if not file.is_file():
            return
        with safe_open(file, framework="pt") as content:
            notes = content.metadata() or {}
            if notes.get("settings") != repr(self.settings):
                return
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (no mapping)
        moments: dict[int, dict[str, Tensor]] = {}
        for name in [name for name in tensors if name.startswith("moments.")]:
            _, index, kind = name.split(".")
            moments.setdefault(int(index), {})[kind] = tensors.pop(name)
        self.modules.load_state_dict(tensors)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.epoch = int(notes["epoch"])


def _schedule(done: float, warmup: float) -> float:
    if done < warmup:
        return done / warmup
    return 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


def _public_words() -> tuple[str, ...]:
    from confed.data.scenes import WORDS

    return WORDS


def _trimmed(table: Table) -> Table:
    """Without the text columns that are padding everywhere."""
    longest = int(table.columns["text_mask"].sum(1).max())
    short = {name: c[:, :longest] if name.startswith("text") else c for name, c in table.columns.items()}
    return Table(table.images, table.image_index, short)


def _targets(tags: "Tags") -> dict[str, Tensor]:
    """The tags of every picture, and which quadrant each cell lies in."""
    targets = {name: torch.from_numpy(getattr(tags, name)) for name in ("noun", "colour", "size")}
    plane = targets["colour"].unflatten(1, (GRID, GRID))
    targets["right"] = F.pad(plane[:, :, 1:], (0, 1)).flatten(1)
    rows, columns = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    targets["quadrant"] = (2 * (rows >= GRID // 2) + (columns >= GRID // 2)).flatten()
    return targets


def _tag_words(tokenizer: WordTokenizer) -> dict[str, Tensor]:
    """Token ids of the words that tags are made of; see :class:`Tagger`."""
    from confed.data.scenes import COLOURS, NOUNS, SIZES

    ids = {word: index for index, word in enumerate(tokenizer.vocabulary)}
    groups = {
        name: torch.tensor([ids[word] for word in (NOTHING, *words)])
        for name, words in (("noun", NOUNS), ("colour", COLOURS), ("size", SIZES))
    }
    corners = [(ids[row], ids[column]) for row in ("top", "bottom") for column in ("left", "right")]
    numbers = [ids[str(number)] for number in range(6)]
    return groups | {"quadrant": torch.tensor(corners), "number": torch.tensor(numbers)}


def _show(epoch: int, losses: tuple[float, float], result: Mapping[str, float]) -> None:
    from rich import print as show

    shares = "  ".join(f"{name} {value:.3f}" for name, value in result.items())
    show(f"epoch {epoch:3d}  loss {losses[0]:.3f}  tags {losses[1]:.3f}  {shares}")
