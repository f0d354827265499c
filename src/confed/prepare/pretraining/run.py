"""Pretraining run: answers and tags together, saved after every epoch."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.data.refusals import check_choice, check_distinct
from confed.data.table import Table
from confed.models.pretrained import Pretrainable, save
from confed.prepare.pretraining.labels import CellNames, macro_average_precision
from confed.prepare.pretraining.minis import MINIS, Material, Mini, Settings
from confed.prepare.pretraining.tags import Tagger


def pretrain(
    model: str, out: Path | str, *, threads: int = 1, progress: bool = True, **changes: float
) -> dict[str, float]:
    """Pretraining of a mini backbone, whose weights are written.

    After every epoch the weights so far go to ``out`` and the whole training state beside it, to
    ``<out>.state``; the same call after an interruption continues there and ends with the same weights. The
    state is removed at the end.
    """
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
        from safetensors.torch import save_file

        tensors = dict(self.modules.state_dict())
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"moments.{index}.{name}": value for name, value in moments.items()}
        unfinished = file.with_name(file.name + ".part")
        notes = {"epoch": str(self.epoch), "settings": self._identity()}
        # Copies, because the format refuses tensors that share memory.
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, unfinished, notes)
        unfinished.replace(file)

    def restore(self, file: Path) -> None:
        """Continues from a kept state, if there is one of this model and these settings."""
        from safetensors import safe_open

        if not file.is_file():
            return
        with safe_open(file, framework="pt") as content:
            notes = content.metadata() or {}
            if notes.get("settings") != self._identity():
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
