"""Finished runs as victims of an attack: their models, the examples they are asked, and what an attack found.

What is here brings attacks and run folders together.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from confed.analysis.case import TEST, Case
from confed.data.examples import Examples
from confed.federation.checkpoint import write_atomically
from confed.federation.file_names import name_of_file
from confed.federation.protocols import Batch, Output
from confed.federation.randomness import generator
from confed.inference.finished_run import FinishedRun
from confed.models.caption_tokenizer import AnswerTokenizer
from confed.models.tokenizer import SPECIAL_TOKENS, HasVocabulary
from confed.report.figures.style import Drawing
from confed.report.tables.table import Cell, in_files
from confed.report.tables.table import Table as Figures
from confed.results.folder import RunFolder, kind_of
from confed.results.summary import Summary
from confed.runs.samples import fill
from confed.system import format as formats


class Victim(Case):
    """A finished run whose model is loaded, ready to be asked."""

    def __init__(self, folder: Path, client: str = "", name: str = "") -> None:
        FinishedRun(folder).check(client or None)
        super().__init__(folder)
        self.client = client  # whose personal model it is; "" for the global one
        self.name = name or names_of([folder])[0]  # no other run of an attack has the same
        self.label = _label(folder, self.summary)  # as people read it
        if not client and (self.run_data.dataset.answer_sets or self.run_data.dataset.tasks):
            raise ValueError(f"{folder}: its clients have answers or tasks of their own; name one of them")
        file = RunFolder(folder).personal_model(client) if client else self.finished.global_file
        fill(self.workspace, load_file(file))
        self.task: Any = self.setup.task_of(client) if client else self.setup.task
        self.workspace.set_task(self.task)
        self.network.eval()

    @property
    def model(self) -> nn.Module:
        """The module whose parts the network has."""
        return self.workspace.model

    @property
    def partly_known(self) -> bool:
        """Whether the method hides a part of the model from its clients."""
        return self.algorithm.traits.splits

    @property
    def places(self) -> tuple[str, ...]:
        """Whose test questions it is asked."""
        return (self.client,) if self.client else tuple(self.sites)


@dataclass(frozen=True)
class Questions:
    """Test examples drawn from several places, as one batch."""

    batch: Batch  # their tensors, first dimension N
    names: tuple[str, ...]  # their identifiers, which pair runs example by example

    def __len__(self) -> int:
        return len(self.names)

    def chunks(self, size: int) -> Iterator[Batch]:
        """The same as batches of at most ``size``."""
        for start in range(0, len(self), size):
            yield {key: column[start : start + size] for key, column in self.batch.items()}


@dataclass(frozen=True)
class Finding:
    """What an attack found, for people and for programs."""

    kind: str  # the attack's name, which files are called after
    title: str  # heading of the page
    words: Sequence[str]  # what was done and what it does and does not show, in sentences
    tables: Sequence[Figures]  # figures; the first is the result
    values: Mapping[str, Any]  # the same and more as JSON
    drawings: Mapping[str, Drawing] = field(default_factory=dict[str, Drawing])  # name of a file -> drawing


def expand(folders: Sequence[Path], client: str = "") -> tuple[list[Path], list[str]]:
    """The run folders of runs and studies."""
    run_paths: list[Path] = []
    left: list[str] = []
    for folder in folders:
        if kind_of(folder) != "study":
            run_paths.append(folder)
            continue
        index = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        first = min((int(run["seed"]) for run in index["runs"]), default=0)
        if not index["runs"]:
            left.append(f"left out: {folder} is a study without runs")
        for run in index["runs"]:
            if int(run["seed"]) != first:
                continue
            try:
                FinishedRun(folder / run["folder"]).check(client or None)
                run_paths.append(folder / run["folder"])
            except ValueError as error:
                left.append(f"left out: {error}")
    if not run_paths:
        raise ValueError("; ".join(left) or "no run folder was given")
    return list({folder.resolve(): folder for folder in run_paths}.values()), left


def names_of(folders: Sequence[Path]) -> list[str]:
    """Short names of run folders, all different: the folder's, or its study's and row's; else the whole path."""
    short = [
        f"{folder.parent.parent.name}/{name_of_file(folder.parent.name)}"
        if kind_of(folder.parent.parent) == "study"
        else folder.name
        for folder in map(Path.resolve, folders)
    ]
    return [name if short.count(name) == 1 else str(folder) for name, folder in zip(short, folders, strict=True)]


def draw_questions(victim: Victim, count: int, seed: int) -> Questions:
    """Test questions with answers in the vocabulary, without replacement; the same for runs on the same data."""
    if count < 1:
        raise ValueError(f"examples must be at least 1, got {count}")
    candidates: list[tuple[str, int]] = []
    for place in victim.places:
        labels = victim.table(place, TEST).columns["label"]
        candidates += [(place, row) for row in (labels >= 0).nonzero().flatten().tolist()]
    if not candidates:
        raise ValueError(f"{victim.name} has no test questions to attack")
    order = torch.randperm(len(candidates), generator=generator(seed, 0, "", "examples under attack"))[:count]
    chosen = sorted(candidates[int(i)] for i in order)
    parts: list[Mapping[str, Tensor]] = []
    names: list[str] = []
    for place in dict.fromkeys(place for place, _ in chosen):
        rows = [row for name, row in chosen if name == place]
        parts.append(victim.table(place, TEST).batch(torch.tensor(rows)))
        names += [test_examples(victim, place).names[row] for row in rows]
    return Questions(joined_batches(parts), tuple(names))


def test_examples(victim: Victim, place: str) -> Examples:
    return victim.run_data.dataset.clients[place].test


def scores(victim: Victim, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Score in [0, 1] and predicted answer of every example, (N,) each."""
    score_batches: list[Tensor] = []
    answers: list[Tensor] = []
    with torch.no_grad():
        for batch in batches:
            output: Output = victim.network(batch)
            score_batches.append(victim.task.predictions(output, batch).double())
            answers.append(output.logits.argmax(1))
    return torch.cat(score_batches), torch.cat(answers)


def joined_batches(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Several batches as one."""
    columns: dict[str, Tensor] = {}
    for key in batches[0]:
        columns[key] = torch.cat([batch[key] for batch in batches])
    return columns


@dataclass(frozen=True)
class Linear:
    """A linear classifier that an attacker trained."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Scores (B, C) of inputs (B, D)."""
        return functional.linear(x.float(), self.weight, self.bias)


def fit_linear(x: Tensor, bias: Tensor, loss: Callable[[Tensor], Tensor], decay: float) -> Linear:
    """Classifier of least loss of its scores, from weights of zero on standardised inputs, by L-BFGS; not random."""
    with torch.inference_mode(False), torch.enable_grad():
        x = x.detach().clone().float()
        centre, scale = x.mean(0), x.std(0, correction=0).clamp_min(1e-6)
        x, bias = (x - centre) / scale, bias.detach().clone().to(x.device).requires_grad_()
        weight = torch.zeros(len(bias), x.shape[1], device=x.device, requires_grad=True)
        optimizer = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = loss(functional.linear(x, weight, bias)) + decay * weight.square().sum()
            value.backward()  # pyright: ignore[reportUnknownMemberType]
            return value

        optimizer.step(closure)  # pyright: ignore[reportUnknownMemberType, reportArgumentType]
    weight = weight.detach() / scale
    return Linear(weight, bias.detach() - weight @ centre)


# Words ------------------------------------------------------------------------------------------------------


def token_names(tokenizer: Any) -> tuple[str, ...]:
    inner: Any = tokenizer.questions if isinstance(tokenizer, AnswerTokenizer) else tokenizer
    if isinstance(inner, HasVocabulary):
        return tuple(inner.vocabulary)
    ids: Mapping[str, int] = inner._tokenizer.get_vocab()
    return tuple(sorted(ids, key=ids.__getitem__))


def ordinary_words(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Ids of whole words, without pieces, names in brackets and single marks, and of special tokens, both int64."""
    names = token_names(tokenizer)
    words = [i for i, name in enumerate(names) if name.isalnum()]
    special = [i for i, name in enumerate(names) if name in SPECIAL_TOKENS and name != "[UNK]"]
    return torch.tensor(words), torch.tensor(special)


# What is written --------------------------------------------------------------------------------------------


def percent_cell(value: float | None) -> Cell:
    return Cell(formats.percent(value), None if value is None else 100 * value)


def points_cell(value: float | None) -> Cell:
    return Cell(formats.points(value), None if value is None else 100 * value)


def write(finding: Finding, out: Path, prefix: str = "attack-") -> Path:
    """Writes a finding as a page, tables, drawings and JSON, all called after its kind, with a prefix."""
    from confed.report.html import page
    from confed.report.tables.table import to_html

    out.mkdir(parents=True, exist_ok=True)
    name = f"{prefix}{finding.kind}"
    text = json.dumps(finding.values, indent=1, ensure_ascii=False)
    write_atomically(out / f"{name}.json", text.encode())
    for number, table in enumerate(finding.tables):
        ending = f"-{number + 1}" if number else ""
        for file, content in in_files(name + ending, table).items():
            write_atomically(out / file, content.encode())
    for key, drawing in finding.drawings.items():
        write_atomically(out / f"{key}.svg", drawing.svg())
        write_atomically(out / f"{key}.png", drawing.png())
    drawn = "".join(page.figure(drawing.inline()) for drawing in finding.drawings.values())
    head = f"<h1>{page.escape(finding.title)}</h1>" + "".join(map(page.paragraph, finding.words))
    tables = "".join(f"<h3>{page.escape(table.title)}</h3>{to_html(table)}" for table in finding.tables)
    sections = [("result", "Result", drawn + tables)]
    write_atomically(out / f"{name}.html", page.document(finding.title, head, sections).encode())
    return out / f"{name}.html"


def _label(folder: Path, summary: Summary) -> str:
    """Label of the run for readers; a study's row may have its own."""
    study = folder.parent.parent
    if kind_of(study) == "study":
        labels = json.loads((study / "summary.json").read_text(encoding="utf-8")).get("labels", {})
        row = name_of_file(folder.parent.name)
        return str(labels.get(row) or summary.label)
    return summary.label
