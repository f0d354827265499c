"""What a multi-label model gains from being told some of an example's labels: C-Tran's inference with known labels.

Lanchantin, Wang, Ordonez and Qi, "General multi-label image classification with transformers" (CVPR 2021), table 3: a
random part of the labels is known at test time, and the others are predicted. FedLGT trains the same model, so the same
question can be put to any finished run whose model reads label states.

For each share s, floor(s C) of the C labels of each test example are told, a subset drawn at random; runs on the same
data are told the same ones. Metrics are those of the labels that are not told (the masked variant: means over classes
leave out classes without a positive among these entries), once with the others told and once without: the difference
is the gain, and it is of the very same entries.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from confed.analysis.case import TEST
from confed.analysis.victim import Finding, Victim, expand, names_of, percent_cell, points_cell
from confed.federation.randomness import derive
from confed.federation.specs import model_spec
from confed.losses.label_states import UNKNOWN, share_of_states
from confed.metrics.multilabel import multilabel_metrics
from confed.report.figures.style import HUES, Drawing, Palette, SeriesStyle, line_style, style_axes
from confed.report.tables.table import Cell, Column, Table
from confed.system.events import Note, Progress, ignore

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SHARES = (0.0, 0.25, 0.5, 0.75)  # shares of the labels that are told, unless asked otherwise
METRICS = ("C-AP", "C-F1", "O-AP", "O-F1")


@dataclass(frozen=True)
class Told:
    """One run with one share of labels told."""

    run: str
    share: float  # of the labels, told
    labels: int  # how many that are
    entries: int  # pairs of example and label that are judged, over all examples
    told: dict[str, float]  # METRICS on these entries where the other labels are told
    alone: dict[str, float]  # the same where nothing is told


def tell(
    folders: Sequence[Path],
    shares: Sequence[float] = SHARES,
    client: str = "",
    seed: int = 0,
    progress: Progress = ignore,
) -> Finding:
    """Tells the models of finished runs some labels of every test example."""
    if not shares or not all(0 <= share < 1 for share in shares):
        raise ValueError(f"shares must lie in [0, 1), at least one, got {', '.join(map(str, shares)) or 'none'}")
    paths, notes = expand(folders, client)
    told_rows: list[Told] = []
    labels: dict[str, str] = {}
    for folder, name in zip(paths, names_of(paths), strict=True):
        victim = Victim(folder, client, name)
        if victim.run_data.dataset.kind != "labels":
            raise ValueError(f"{folder}: its examples are questions; labels can be told where examples have labels")
        if not model_spec(victim.model).reads_states:
            notes.append(f"left out: {victim.label}, whose model ({type(victim.model).__name__}) reads no label states")
            continue
        progress(Note(f"telling {victim.label}"))
        labels[name] = victim.label
        told_rows += tell_model(victim, sorted(set(shares)), seed)
    if not told_rows:
        raise ValueError("no run has a model that can be told labels: " + "; ".join(notes))
    return _finding(told_rows, labels, notes, seed)


def tell_model(victim: Victim, shares: Sequence[float], seed: int = 0) -> list[Told]:
    """Accuracy of one model with each share of its labels known."""
    told_rows: list[Told] = []
    told: dict[float, list[Tensor]] = {share: [] for share in shares}
    hidden: dict[float, list[Tensor]] = {share: [] for share in shares}
    alone: list[Tensor] = []
    truth: list[Tensor] = []
    size = victim.setup.local.eval_batch_size
    for place in victim.places:
        table = victim.table(place, TEST)
        for start in range(0, len(table), size):
            batch = table.batch(torch.arange(start, min(start + size, len(table))))
            truth.append(batch["labels"].bool().cpu())
            alone.append(_probabilities(victim, batch))
            for share in shares:
                key = derive(seed, 0, place, "labels told")
                states = share_of_states(batch["labels"], batch["index"], key, share)
                told[share].append(_probabilities(victim, {**batch, "known": states}) if share else alone[-1])
                hidden[share].append((states == UNKNOWN).cpu())
    if not truth:
        raise ValueError(f"{victim.name} has no test examples")
    without, real = torch.cat(alone), torch.cat(truth)
    for share in shares:
        mask = torch.cat(hidden[share])
        both: list[dict[str, float]] = []
        for scores in (torch.cat(told[share]), without):
            values = multilabel_metrics(scores, real, mask, threshold=victim.task.threshold, undefined="omit")
            both.append({name: values[name] for name in METRICS})
        count = int(share * real.shape[1])
        told_rows.append(Told(victim.name, share, count, int(mask.sum()), *both))
    return told_rows


def _probabilities(victim: Victim, batch: Any) -> Tensor:
    with torch.no_grad():
        probabilities, _, _ = victim.task.scores(victim.network(batch), batch)
    return probabilities


def _finding(told_rows: Sequence[Told], labels: dict[str, str], notes: Sequence[str], seed: int) -> Finding:
    columns = [Column("run", words=True), Column("share told"), Column("labels told"), Column("entries judged")]
    for metric in METRICS:
        columns += [Column("told", metric, "%"), Column("alone", metric, "%"), Column("gain", metric, "points")]
    rows: list[tuple[Cell, ...]] = []
    for row in told_rows:
        cells = [Cell(labels[row.run]), percent_cell(row.share), Cell(str(row.labels), row.labels)]
        cells.append(Cell(str(row.entries), row.entries))
        for metric in METRICS:
            told, alone = row.told[metric], row.alone[metric]
            cells += [percent_cell(told), percent_cell(alone), points_cell(told - alone)]
        rows.append(tuple(cells))
    words = (
        "A share of each test example's labels, drawn at random, is told to the model; it is judged on the others, "
        "with what it is told and without. Runs on the same data are told the same labels.",
        *notes,
    )
    table = Table("Labels that are not told, with the others told and alone", tuple(columns), (tuple(rows),))
    values = {"kind": "told", "seed": seed, "rows": [asdict(row) for row in told_rows], "notes": list(notes)}
    drawings = {"told": _drawing(told_rows, labels)} if len({row.share for row in told_rows}) > 1 else {}
    return Finding("told", "What known labels say of the others", words, (table,), values, drawings)


def _drawing(told_rows: Sequence[Told], labels: dict[str, str]) -> Drawing:
    """C-AP against the share of labels told: solid with them told, dotted alone on the same entries."""

    def draw(figure: "Figure", palette: Palette) -> None:
        axes = figure.add_subplot()
        for hue, (run, label) in enumerate(labels.items()):
            rows = [row for row in told_rows if row.run == run]
            series = SeriesStyle(label, f"m{hue % HUES + 1}")
            x = [100 * row.share for row in rows]
            axes.plot(x, [100 * row.told["C-AP"] for row in rows], **line_style(series, palette, 5))
            axes.plot(
                x, [100 * row.alone["C-AP"] for row in rows], color=palette(series.colour), linewidth=1, linestyle=":"
            )
        style_axes(
            axes, palette, "", "labels told, % (dotted: the same entries with nothing told)", "C-AP of the others, %"
        )
        axes.legend(fontsize=8.5, frameon=False, labelcolor=palette("ink"))

    return Drawing("told labels", 5.2, 3.4, draw)
