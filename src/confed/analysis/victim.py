"""Finished runs as victims of an attack: their models, the examples they are asked, and what an attack found.

What is here brings attacks and run folders together.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from confed.data.examples import Examples
from confed.data.table import Table
from confed.engines.local import Setup, Workspace
from confed.federation.checkpoint import write_atomically
from confed.federation.file_names import name_of_file
from confed.federation.protocols import Batch, Forward, Output, Task
from confed.federation.randomness import generator
from confed.federation.specs import model_spec
from confed.inference.finished_run import FinishedRun
from confed.models.caption_tokenizer import AnswerTokenizer
from confed.models.tokenizer import SPECIAL_TOKENS, HasVocabulary
from confed.report.figures.style import Drawing
from confed.report.tables.table import Cell, in_files
from confed.report.tables.table import Table as Figures
from confed.results.folder import RunFolder, kind_of
from confed.runs.encode import RunData
from confed.runs.samples import fill
from confed.system import format as formats

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Victim:
    """A model of a finished run, ready to be asked."""

    name: str  # the run: its folder, or its study and row; no other run of an attack has the same
    label: str  # as people read it
    folder: Path
    method: str  # the algorithm's registered name
    client: str  # whose personal model it is; "" for the global one
    predict: Forward  # the network as it answers in evaluations
    model: nn.Module  # the module whose parts it has
    task: Any  # what is asked of it
    setup: Setup
    run_data: RunData
    workspace: Workspace  # what holds the model

    @property
    def partly_known(self) -> bool:
        """Whether the method hides a part of the model from its clients."""
        return self.setup.algorithm.traits.splits

    @property
    def places(self) -> tuple[str, ...]:
        """Whose test questions it is asked."""
        return (self.client,) if self.client else tuple(self.run_data.clients)

    @property
    def temperature(self) -> float:
        """By what its scores are divided before a softmax; 1 unless they are similarities."""
        return model_spec(self.model).temperature

    def activations(self, batch: Batch) -> Tensor:
        """What the client's part of the model hands on, (B, D): v_MHA, or what the answer head reads."""
        split_part = self.model.get_submodule("mha") if model_spec(self.model).split_parts else None
        output: Output = self.predict(batch) if split_part is None else split_part(batch)
        return output.features

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts other values into the model."""
        fill(self.workspace, tensors)


@dataclass(frozen=True)
class Questions:
    """Test examples drawn from several places, as one batch."""

    batch: Batch  # their tensors, first dimension N
    names: tuple[str, ...]  # their identifiers, which pair runs example by example
    rows: tuple[tuple[str, int], ...]  # place and row of each

    def __len__(self) -> int:
        return len(self.rows)

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


def open_victim(folder: Path, client: str = "", name: str = "") -> Victim:
    """A finished run's model."""
    from confed.runs.run import load_run

    FinishedRun(folder).check(client or None)
    recipe, setup, run_data, workspace = load_run(folder)
    if not client and (run_data.dataset.answer_sets or run_data.dataset.tasks):
        raise ValueError(f"{folder}: its clients have answers or tasks of their own; name one of them")
    run = RunFolder(folder)
    file = run.personal_model(client) if client else run.models / "global" / "trained.safetensors"
    fill(workspace, load_file(file))
    task: Task = setup.task_of(client) if client else setup.task
    workspace.set_task(task)
    summary: Mapping[str, Any] = json.loads(RunFolder(folder).summary.read_text(encoding="utf-8"))
    row = name_of_file(folder.parent.name) if kind_of(folder.parent.parent) == "study" else ""
    network = setup.algorithm.deployed_model(workspace.model).eval()
    method = recipe.sections["algorithm"]["name"]
    name = name or names_of([folder])[0]
    return Victim(
        name, _label(folder, row, summary), folder, method, client, network, workspace.model, task, setup, run_data,
        workspace,
    )  # fmt: skip


def draw_questions(victim: Victim, count: int, seed: int) -> Questions:
    """Test questions of all clients (of a personal model's client its own), drawn without replacement.

    Runs on the same data get the same ones. Questions whose answer is outside the vocabulary are left out.
    """
    if count < 1:
        raise ValueError(f"examples must be at least 1, got {count}")
    candidates: list[tuple[str, int]] = []
    for place in victim.places:
        labels = test_table(victim, place).columns["label"]
        candidates += [(place, row) for row in (labels >= 0).nonzero().flatten().tolist()]
    if not candidates:
        raise ValueError(f"{victim.name} has no test questions to attack")
    order = torch.randperm(len(candidates), generator=generator(seed, 0, "", "examples under attack"))[:count]
    chosen = sorted(candidates[int(i)] for i in order)
    parts: list[Mapping[str, Tensor]] = []
    names: list[str] = []
    for place in dict.fromkeys(place for place, _ in chosen):
        rows = [row for name, row in chosen if name == place]
        parts.append(test_table(victim, place).batch(torch.tensor(rows)))
        names += [test_examples(victim, place).names[row] for row in rows]
    return Questions(joined_batches(parts), tuple(names), tuple(chosen))


def test_table(victim: Victim, place: str) -> Table:
    """A place's test questions as tensors."""
    return victim.run_data.clients[place].tables[2]


def test_examples(victim: Victim, place: str) -> Examples:
    return victim.run_data.dataset.clients[place].test


def scores(victim: Victim, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Score in [0, 1] and predicted answer of every example, (N,) each."""
    score_batches: list[Tensor] = []
    answers: list[Tensor] = []
    with torch.no_grad():
        for batch in batches:
            output: Output = victim.predict(batch)
            score_batches.append(victim.task.predictions(output, batch).double())
            answers.append(output.logits.argmax(1))
    return torch.cat(score_batches), torch.cat(answers)


def joined_batches(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Several batches as one."""
    columns: dict[str, Tensor] = {}
    for key in batches[0]:
        columns[key] = torch.cat([batch[key] for batch in batches])
    return columns


# Words ------------------------------------------------------------------------------------------------------


def token_names(tokenizer: Any) -> tuple[str, ...]:
    inner: Any = tokenizer.questions if isinstance(tokenizer, AnswerTokenizer) else tokenizer
    if isinstance(inner, HasVocabulary):
        return tuple(inner.vocabulary)
    ids: Mapping[str, int] = inner._tokenizer.get_vocab()
    return tuple(sorted(ids, key=ids.__getitem__))


def ordinary_words(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Ids of whole words, and ids of special tokens, both int64.

    Pieces that continue a word, names in brackets and single marks are neither; [UNK] is what an unknown word is.
    """
    names = token_names(tokenizer)
    words = [i for i, name in enumerate(names) if name.isalnum()]
    special = [i for i, name in enumerate(names) if name in SPECIAL_TOKENS and name != "[UNK]"]
    return torch.tensor(words), torch.tensor(special)


# What is written --------------------------------------------------------------------------------------------


def percent_cell(value: float | None) -> Cell:
    return Cell(formats.percent(value), None if value is None else 100 * value)


def points_cell(value: float | None) -> Cell:
    return Cell(formats.points(value), None if value is None else 100 * value)


def number_cell(value: float | None) -> Cell:
    return Cell(formats.MISSING) if value is None else Cell(f"{value:.3g}", value)


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


def _label(folder: Path, row: str, summary: Mapping[str, Any]) -> str:
    """Label of the run for readers; a study's row may have its own."""
    if row:
        index = json.loads((folder.parent.parent / "summary.json").read_text(encoding="utf-8"))
        row_label = index.get("labels", {}).get(row)
        if row_label:
            return str(row_label)
    return str(summary.get("label") or summary.get("algorithm") or folder.name)
