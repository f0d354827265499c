"""What could be rebuilt of a client's pictures and questions from the activations of a finished run of split learning.

The attacker has the client's part of the model, as the auxiliary server and every client have it, and the training
data of the other clients about other pictures; it sees the activations of one client's training examples, with and
without noise on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from confed.analysis.audit import DELTA, defences, spent
from confed.analysis.victim import (
    Finding,
    Victim,
    client_table,
    expand,
    joined_batches,
    number_cell,
    ordinary_words,
    percent_cell,
    split_victims,
    token_names,
)
from confed.attacks.inversion import (
    Reconstruction,
    WordRecovery,
    fit_decoder,
    fit_word_probe,
    judge,
    judge_words,
    mean_input,
    questions_as_sets,
    searched,
)
from confed.comparison.records import distinct_labels
from confed.data.table import Table as Rows
from confed.federation.protocols import Batch
from confed.federation.randomness import generator
from confed.privacy.cut import CutPrivacy, cut_privacy
from confed.report.figures.style import Drawing, Palette
from confed.report.tables.table import Cell, Column, Table
from confed.system.events import Progress, ignore

if TYPE_CHECKING:
    from matplotlib.figure import Figure


OWN = 2000  # examples of the attacker's own at most
SEARCHED = 32  # examples whose inputs are searched for; the search runs the model hundreds of times
SHOWN = 6  # pictures that are drawn beside what was rebuilt of them
NOISES = (0.1, 1.0)

EPOCHS = 60  # of the decoder at most


@dataclass(frozen=True)
class Audited:
    """What was rebuilt from one run's activations under one defence."""

    run: str
    defence: str
    cost: float | None  # epsilon of one released row, None where nothing is guaranteed or it could not be computed
    decoder: Reconstruction  # by the learned decoder
    search: Reconstruction | None  # by search in the input; None where it was not tried
    words: WordRecovery


def inversion(
    folders: Sequence[Path],
    *,
    examples: int = 200,
    client: str = "",
    steps: int = 200,
    seed: int = 0,
    progress: Progress = ignore,
) -> Finding:
    """Audits what the activations at the cut say of pictures and questions."""
    if examples < 1 or steps < 0:
        raise ValueError(f"examples must be at least 1 and steps not negative, got {examples} and {steps}")
    runs, notes = expand(folders)
    rows: list[Audited] = []
    names: dict[str, str] = {}
    drawings: dict[str, Drawing] = {}
    for victim in split_victims(runs, "no activations", notes, progress):
        names[victim.name] = victim.label
        audited, drawing = _audit(victim, examples, client, steps, seed)
        rows += audited
        if drawing is not None:
            drawings[f"attack-inversion-{len(names)}"] = drawing
    if not rows:
        raise ValueError("; ".join(notes))
    return _finding(rows, distinct_labels(names), notes, drawings)


@dataclass(frozen=True)
class _Seen:
    """Inputs, their activations and the words of their questions, first dimension N each."""

    batch: Batch
    inputs: Tensor
    v: Tensor
    words: Tensor


def _audit(victim: Victim, examples: int, client: str, steps: int, seed: int) -> tuple[list[Audited], Drawing | None]:
    clients = victim.run_data.clients
    client = client or next(iter(clients))
    table = client_table(victim, client)
    chosen = _order(table, seed, 0)[:examples]
    theirs = _seen(victim, table.batch(chosen))
    others = [data.tables[0] for name, data in clients.items() if name != client] or [clients[client].tables[1]]
    attacker_view = _seen(victim, _others(others, pictures_of(table, chosen), seed))
    set_by_run = cut_privacy(victim.setup.algorithm)
    tried = {"the run's": set_by_run}
    if set_by_run.off:
        tried = defences(float(attacker_view.v.norm(dim=1).median().clamp_min(1e-6)), NOISES)
        tried = {name: privacy for name, privacy in tried.items() if not privacy.distinct}
    rows: list[Audited] = []
    drawing = None
    for name, privacy in tried.items():
        rng = generator(seed, 0, client, f"inversion {name}")
        # The attacker knows the defence, and prepares with activations that are noised likewise.
        decoder_inputs, sent = privacy.activations(attacker_view.v, rng), privacy.activations(theirs.v, rng)
        rebuilt = fit_decoder(decoder_inputs, attacker_view.inputs, rng, epochs=EPOCHS)(sent)
        probe = fit_word_probe(decoder_inputs, attacker_view.words)
        mean = mean_input(attacker_view.inputs)
        recovered = _search(victim, theirs, sent, attacker_view.inputs, privacy, steps) if steps else None
        searched_for = None if recovered is None else judge(recovered, theirs.inputs[: len(recovered)], mean)
        words = judge_words(probe(sent), theirs.words, probe.frequency)
        by_decoder = judge(rebuilt, theirs.inputs, mean)
        rows.append(Audited(victim.name, name, spent(privacy.noise), by_decoder, searched_for, words))
        if drawing is None and theirs.inputs.ndim == 4:
            drawing = _pictures(theirs.inputs, rebuilt, recovered)
    return rows, drawing


def pictures_of(table: Rows, rows: Tensor) -> set[tuple[int, int]]:
    """The pictures of some rows: which table of pictures, and where in it."""
    return {(_store(table), picture) for picture in table.image_index[rows].flatten().tolist()}


def fresh(table: Rows, seen: set[tuple[int, int]]) -> Tensor:
    """The rows of a table that are not about these pictures: clients may have questions about the same ones."""
    seen_pictures = torch.tensor([picture for store, picture in seen if store == _store(table)], dtype=torch.int64)
    apart = ~torch.isin(table.image_index, seen_pictures)
    return (apart if apart.ndim == 1 else apart.all(1)).nonzero()[:, 0]


def _store(table: Rows) -> int:
    return id(table.images if table.regions is None else table.regions)


def _order(table: Rows, seed: int, number: int) -> Tensor:
    return torch.randperm(len(table), generator=generator(seed, 0, str(number), "inverted examples"))


def _others(tables: Sequence[Rows], seen: set[tuple[int, int]], seed: int) -> Batch:
    """The attacker's own examples, drawn without replacement, about as many from each table, as one batch."""
    share = -(-OWN // len(tables))
    parts: list[dict[str, Tensor]] = []
    for number, table in enumerate(tables, 1):
        order = _order(table, seed, number)
        parts.append(table.batch(order[torch.isin(order, fresh(table, seen))][:share]))
    return {key: column[:OWN] for key, column in joined_batches(parts).items()}


def _seen(victim: Victim, batch: Batch) -> _Seen:
    """A batch with what the attacker sees of it and wants to know of it."""
    _, special = ordinary_words(victim.run_data.tokenizer)
    sets = questions_as_sets(batch["text"], batch["text_mask"], len(token_names(victim.run_data.tokenizer)), special)
    activations: list[Tensor] = []
    with torch.no_grad():
        for i in range(0, len(batch["text"]), 256):
            activations.append(victim.activations({key: tensor[i : i + 256] for key, tensor in batch.items()}))
    inputs = batch["regions"].float() if "regions" in batch else batch["image"]
    if not inputs.is_floating_point():  # pictures in [-1, 1]
        inputs = inputs.float() / 127.5 - 1
    return _Seen(batch, inputs, torch.cat(activations).float(), sets)


def _search(victim: Victim, theirs: _Seen, sent: Tensor, inputs: Tensor, privacy: CutPrivacy, steps: int) -> Tensor:
    """What a search in the input finds; ``inputs`` are some of the attacker's."""
    key = "regions" if "regions" in theirs.batch else "image"
    batch = {name: column[:SEARCHED] for name, column in theirs.batch.items()} | {key: theirs.inputs[:SEARCHED]}
    clipped, unused = CutPrivacy(clip=privacy.clip), torch.Generator()

    def activations(changed: Batch) -> Tensor:
        return clipped.activations(victim.activations(changed), unused)

    return searched(activations, batch, sent[:SEARCHED], key, inputs, steps=steps)


def _pictures(truth: Tensor, rebuilt: Tensor, recovered: Tensor | None) -> Drawing:
    """True pictures above what the decoder and the search made of their activations."""
    lines: Mapping[str, Tensor | None] = {"the picture": truth, "decoder": rebuilt, "search": recovered}
    pictures = {name: images for name, images in lines.items() if images is not None}
    columns = min(SHOWN, *(len(images) for images in pictures.values()))

    def draw(figure: "Figure", palette: Palette) -> None:
        for line, (name, images) in enumerate(pictures.items()):
            for column in range(columns):
                axes = figure.add_subplot(len(pictures), columns, line * columns + column + 1)
                axes.imshow(((images[column] + 1) / 2).clamp(0, 1).permute(1, 2, 0).numpy())
                axes.set_axis_off()
                if column == 0:
                    axes.set_title(name, fontsize=8.5, color=palette("ink"), loc="left")

    return Drawing("inversion", 1.5 * columns, 1.7 * len(pictures), draw)


def _finding(
    rows: Sequence[Audited], labels: Mapping[str, str], notes: Sequence[str], drawings: Mapping[str, Drawing]
) -> Finding:
    columns = [Column("run", words=True), Column("defence", words=True), Column("ε per row")]
    for kind in ("decoder", "search"):
        columns += [Column("explained", f"{kind}, %", "%"), Column("cosine", kind)]
    columns += [Column("cosine", "mean input"), Column("found", "words, %", "%"), Column("guessed", "words, %", "%")]
    lines: list[tuple[Cell, ...]] = []
    for row in rows:
        cells = [Cell(labels[row.run]), Cell(row.defence), number_cell(row.cost)]
        for result in (row.decoder, row.search):
            cells += [percent_cell(result and result.explained), number_cell(result and result.cosine)]
        cells += [
            number_cell(row.decoder.baseline_cosine),
            percent_cell(row.words.recovered),
            percent_cell(row.words.baseline),
        ]
        lines.append(tuple(cells))
    table = Table(
        "Inputs rebuilt from activations",
        tuple(columns),
        (tuple(lines),),
        (
            "Explained: 1 - mean squared error / that of the mean input; 100 is a perfect copy, 0 no better than the "
            f"mean, negative worse. The search takes the question as known and is tried on {SEARCHED} examples.",
            "Found: of a question's k distinct words, how many are among the probe's k most probable. Guessed: among "
            "the k most frequent words.",
            f"ε per row: of one release at δ = {DELTA:g} where an example may be replaced by any other.",
        ),
    )
    words = (
        "The attacker has the client's part of the model with the weights the run ended with, and the training data of "
        "the other clients about other pictures; what it sees are activations of the client's training examples, in "
        "evaluation mode.",
        "A failed reconstruction is no proof: better decoders and searches exist. Only noise with its epsilon is a "
        "guarantee.",
        *notes,
    )
    values: dict[str, Any] = {
        "kind": "inversion", "delta": DELTA, "rows": [asdict(row) for row in rows], "notes": list(notes),
    }  # fmt: skip
    return Finding("inversion", "What activations give away", words, (table,), values, drawings)
