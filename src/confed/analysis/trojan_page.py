"""What the test-time Trojan found, as a table, a drawing (figure 7 of BiCSL) and samples (figure 6).

Who knows what decides what is attacked (:data:`THREATS`). Where a client holds all of the model, so does an attacker
at a client. Where a server keeps a part, an attacker at a client has to guess it; that attack is the one to quote for
the method, and the attack with the whole model stands beside it, because parts that are merely hidden protect only as
long as they stay so.
"""

import base64
import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from confed.analysis.victim import (
    Bars,
    Finding,
    Questions,
    Victim,
    draw_questions,
    expand,
    grouped_bars,
    names_of,
    open_victim,
    ordinary_words,
    percent_cell,
    points_cell,
    scores,
    test_examples,
    token_names,
)
from confed.attacks.trojan import (
    Bounds,
    Head,
    Objective,
    Text,
    Triggered,
    Trojan,
    displacement,
    feature_bounds,
    fit_head,
    inserted,
    last_words,
    pixel_bounds,
    surrogate_loss,
    truth_loss,
    with_words,
    word_embedding,
)
from confed.comparison.records import distinct_labels
from confed.federation.protocols import Batch
from confed.federation.randomness import generator
from confed.metrics.statistics import holm
from confed.metrics.stratified import flip_interval, sign_flip
from confed.report.figures.style import Drawing
from confed.report.html import page
from confed.report.html.media import ImageStore
from confed.report.tables.cells import p_cell
from confed.report.tables.table import Cell, Column, Table
from confed.system import format as formats
from confed.system.events import Note, Progress, ignore

# The test-time Trojan on finished runs: accuracy clean, and with the picture ----------------------------------

THREATS: Mapping[str, str] = {
    "whole model": "the attacker has all weights and raises the loss of the right answer",
    "activations": "the attacker has the client's part and pushes its activations away from the clean ones",
    "own head": "the attacker has the client's part, trains a linear head on training data of one client behind it, "
    "and raises that head's loss",
}
"""What an attacker knows -> in words."""

CONDITIONS = ("clean", "vision", "text", "both")
RANDOM = ("vision (random)", "text (random)", "both (random)")
"""Changes of the same size without a search: what is left of the drop is the attack's."""
_CHUNK = 64
_OWN = 2000  # training examples of the attacker's own head at most


@dataclass(frozen=True)
class Attacked:
    """One victim under one threat."""

    victim: Victim
    threat: str
    # condition -> score per example (N,): "clean", "vision", "text" and "both"; "text (embedding)" and "both
    # (embedding)" with the optimised embedding itself in place of the nearest word; "vision (random)" and so on for
    # random changes
    correct: Mapping[str, Tensor]
    predictions: Mapping[str, Tensor]  # condition -> answer per example (N,), but for embeddings
    triggered: Sequence[Triggered]  # what was changed in "both", chunk by chunk
    clean: Sequence[Batch]
    eps: float

    def accuracy(self, condition: str) -> float:
        """The mean score."""
        return float(self.correct[condition].mean())

    def drop(self, condition: str) -> float | None:
        """The share of the clean accuracy that is lost; None where there is none to lose."""
        clean = self.accuracy("clean")
        return None if clean == 0 else 1 - self.accuracy(condition) / clean


def attack_victim(
    victim: Victim, questions: Questions, settings: Trojan, *, absolute: bool = False, seed: int = 0
) -> list[Attacked]:
    """Trojan attacks on one model, one per threat model that fits its method; report the first."""
    clean = list(questions.chunks(_CHUNK))
    key = "regions" if "regions" in clean[0] else "image"
    bounds = pixel_bounds() if key == "image" else feature_bounds(_training(victim), absolute=absolute)
    words, special = ordinary_words(victim.run_data.tokenizer)
    text = Text(word_embedding(victim.predict, victim.model, clean[0]), words, special)
    prepare: dict[str, Callable[[Batch], Objective]] = {}
    if victim.partly_known:
        prepare["activations"] = lambda batch: displacement(victim.activations, _without_gradient(victim, batch))
        head = _own_head(victim, seed)
        prepare["own head"] = lambda batch: surrogate_loss(victim.activations, head)
    prepare["whole model"] = lambda batch: truth_loss(victim.predict, victim.temperature)
    attacked: list[Attacked] = []
    for threat, objective in prepare.items():
        rng = generator(seed, 0, "", f"trojan {threat}")
        made = [_search(batch, objective, settings, key, bounds, text, rng) for batch in clean]
        correct: dict[str, Tensor] = {}
        predictions: dict[str, Tensor] = {}
        correct["clean"], predictions["clean"] = scores(victim, clean)
        for condition in (*CONDITIONS[1:], *RANDOM):
            changed = [
                _applied(batch, parts[condition], key, settings) for batch, parts in zip(clean, made, strict=True)
            ]
            correct[condition], predictions[condition] = scores(victim, changed)
        for condition in ("text (embedding)", "both (embedding)"):
            triggers = [parts[condition] for parts in made]
            correct[condition] = _with_embeddings(victim, clean, triggers, key, settings, text)
        both = [parts["both"] for parts in made]
        attacked.append(Attacked(victim, threat, correct, predictions, both, clean, settings.eps))
    return attacked


def paired(rows: Sequence[Attacked]) -> list[dict[str, Any]]:
    """Rows against the first one: differences of accuracy on the same questions, with the test of sign flips.

    ``low`` and ``high`` are its 95 % interval, None with too few questions; ``p_holm`` is corrected over all pairs of
    rows under a condition. Only what an attacker at a client can do is compared, so not the whole model where a server
    keeps a part of it.
    """
    pairs: list[dict[str, Any]] = []
    compared = [row for row in rows[1:] if not (row.victim.partly_known and row.threat == "whole model")]
    for condition in CONDITIONS:
        scored = [row.correct[condition].double() - rows[0].correct[condition].double() for row in compared]
        tests = [sign_flip([one.numpy()[None]]) for one in scored]
        p = holm({str(i): test.p for i, test in enumerate(tests)}, tests=math.comb(len(compared) + 1, 2)).adjusted
        for i, (row, test) in enumerate(zip(compared, tests, strict=True)):
            interval = flip_interval([scored[i].numpy()[None]])
            pairs.append(
                {"row": row.victim.name, "threat": row.threat, "against": rows[0].victim.name,
                 "against_threat": rows[0].threat, "condition": condition, "difference": test.difference,
                 "low": interval and interval.low, "high": interval and interval.high, "p": test.p,
                 "p_holm": p[str(i)], "n": len(scored[i])}
            )  # fmt: skip
    order = [(row.victim.name, row.threat) for row in compared]
    return sorted(pairs, key=lambda entry: order.index((entry["row"], entry["threat"])))


def _search(
    batch: Batch,
    prepare: Callable[[Batch], Objective],
    settings: Trojan,
    key: str,
    bounds: Bounds,
    text: Text,
    rng: torch.Generator,
) -> dict[str, Triggered]:
    """The attacks on a batch, by condition.

    For "both" picture and embedding are searched together; then the picture once more with the word that was found in
    its place, since a word is not quite the embedding that the picture was made for.
    """
    floats = {**batch, "image": batch["image"].float() / 127.5 - 1} if key == "image" else batch
    objective = prepare(floats)
    visual = (key, bounds)
    seen = settings(floats, objective, rng, visual=visual)
    read = settings(floats, objective, rng, text=text)
    together = settings(floats, objective, rng, visual=visual, text=text)
    assert together.position is not None
    assert together.token is not None
    again = settings(with_words(floats, together.position, together.token), objective, rng, visual=visual)
    return {
        "vision": seen,
        "text": read,
        "both": replace(together, visual=again.visual),
        "text (embedding)": read,
        "both (embedding)": together,
        "vision (random)": settings.random(floats, rng, visual=visual),
        "text (random)": settings.random(floats, rng, text=text),
        "both (random)": settings.random(floats, rng, visual=visual, text=text),
    }


def _applied(batch: Batch, triggered: Triggered, key: str, settings: Trojan) -> dict[str, Tensor]:
    """The batch as it would be sent: whole pixels, and a word in place of its embedding."""
    changed = dict(batch)
    if triggered.visual is not None:
        changed[key] = (
            triggered.visual if key == "regions" else whole_pixels(triggered.visual, batch[key], settings.eps)
        )
    if triggered.position is not None and triggered.token is not None:
        changed = with_words(changed, triggered.position, triggered.token)
    return changed


def whole_pixels(perturbed: Tensor, clean: Tensor, eps: float) -> Tensor:
    """Floats in [-1, 1] as pixels, uint8, each at most eps (rounded down) levels from its clean one."""
    most = int(eps + 1e-6)
    levels = clean.int()
    change = (((perturbed + 1) * 127.5).round().int() - levels).clamp(-most, most)
    return (levels + change).clamp(0, 255).to(torch.uint8)


def _with_embeddings(
    victim: Victim, clean: Sequence[Batch], triggers: Sequence[Triggered], key: str, settings: Trojan, text: Text
) -> Tensor:
    """Scores with the optimised embeddings themselves, which no question could have."""
    embeddings: list[Tensor] = []
    for batch, triggered in zip(clean, triggers, strict=True):
        assert triggered.vector is not None
        changed = _applied(batch, Triggered(triggered.visual), key, settings)
        place = last_words(batch, text.special)
        with inserted(text.embedding, batch["text"], place, triggered.vector):
            embeddings.append(scores(victim, [changed])[0])
    return torch.cat(embeddings)


def _without_gradient(victim: Victim, batch: Batch) -> Tensor:
    with torch.no_grad():
        return victim.activations(batch)


def _training(victim: Victim) -> Iterator[Batch]:
    """Everybody's clean training examples, over which bounds are taken."""
    for data in victim.run_data.clients.values():
        yield from data.tables[0].batches(512)


def _own_head(victim: Victim, seed: int) -> Head:
    """A head that an attacker at one client can train on top of the client's part."""
    table = victim.run_data.clients[victim.places[0]].tables[0]
    order = torch.randperm(len(table), generator=generator(seed, 0, "", "the attacker's own examples"))[:_OWN]
    batches = list(table.batches(256, order))
    activations = torch.cat([_without_gradient(victim, batch) for batch in batches])
    labels = torch.cat([batch["label"] for batch in batches])
    return fit_head(activations, labels, len(victim.run_data.dataset.answers))


# What the test-time Trojan found, as a table, a drawing -------------------------------------------------------

SAMPLES = 6  # questions shown per victim
_EMBEDDING = ("text (embedding)", "both (embedding)")
_GAIN = 4  # by how much changes of pixels are enlarged to be seen


def finding(rows: Sequence[Attacked], questions_of_rows: Sequence[Questions], values: Mapping[str, Any]) -> Finding:
    labels = _labels(rows)
    count = len(questions_of_rows[0])
    words = [
        f"{count} test questions per model. The picture is changed by projected gradient ascent within eps of its "
        "clean values and within the range of training data; the question's last word is replaced by the word whose "
        "embedding is nearest to an optimised one; both together. Each change is made for its question alone.",
        "A low accuracy shows that an attack works. A high one does not show that none would: stronger searches, "
        "other starts and larger eps exist. Where the attacker lacks a part of the model, the row with the whole model "
        "says what hiding that part is worth; such an attacker can try each of its rows, so the lowest one counts.",
        *values.get("notes", ()),
    ]
    tables = [_table(rows, labels)]
    if values.get("paired"):
        tables.append(_paired(values["paired"], labels, rows))
    store = ImageStore()
    tabs = page.Tabs()
    panels = [
        (labels[i], _cards(row, questions, store))
        for i, (row, questions) in enumerate(zip(rows, questions_of_rows, strict=True))
        if row.threat == rows_of(rows, row)[0].threat
    ]
    sections = [
        ("threats", "Who knows what", page.definitions(_threats(rows, labels))),
        ("samples", "Samples: original and triggered", _explained(questions_of_rows[0]) + tabs(panels)),
    ]
    return Finding(
        "trojan", "Multimodal Trojan at test time", words, tables, values,
        {"attack-trojan": _drawing(rows, labels)}, sections, store.css + _CSS,
    )  # fmt: skip


def rows_of(rows: Sequence[Attacked], row: Attacked) -> list[Attacked]:
    """The rows of the same victim; the first is the one to quote."""
    return [other for other in rows if other.victim is row.victim]


def _labels(rows: Sequence[Attacked]) -> list[str]:
    """Names of the rows: the run's, and the threat where there are several."""
    runs = distinct_labels({row.victim.name: row.victim.label for row in rows})
    return [runs[row.victim.name] + (f", {row.threat}" if len(rows_of(rows, row)) > 1 else "") for row in rows]


def _threats(rows: Sequence[Attacked], labels: Sequence[str]) -> dict[str, str]:
    bound = "; an upper bound of what an attacker at a client could do"
    return {
        label: THREATS[row.threat] + (bound if row.threat == "whole model" and len(rows_of(rows, row)) > 1 else "")
        for row, label in zip(rows, labels, strict=True)
    }


def _table(rows: Sequence[Attacked], labels: Sequence[str]) -> Table:
    columns = [Column("model", words=True), Column("the attacker knows", words=True)]
    columns += [Column(name, "accuracy, %", "%") for name in CONDITIONS]
    columns += [Column(name, "relative drop, %", "%") for name in CONDITIONS[1:]]
    columns += [Column(name.split()[0], "random, %", "%", detail=name != RANDOM[-1]) for name in RANDOM]
    columns += [Column(name, "accuracy, %", "%", detail=True) for name in _EMBEDDING]
    lines: list[tuple[Cell, ...]] = []
    for row, label in zip(rows, labels, strict=True):
        values = [row.accuracy(name) for name in CONDITIONS]
        values += [row.drop(name) for name in CONDITIONS[1:]]
        values += [row.accuracy(name) for name in (*RANDOM, *_EMBEDDING)]
        attacker_knows = "whole model" if row.threat == "whole model" else f"client's part ({row.threat})"
        run = Cell(label.removesuffix(f", {row.threat}"))
        lines.append((run, Cell(attacker_knows), *map(percent_cell, values)))
    embedded = "; ".join(
        f"{label}: text {formats.percent(row.accuracy(_EMBEDDING[0]))}, "
        f"both {formats.percent(row.accuracy(_EMBEDDING[1]))}"
        for row, label in zip(rows, labels, strict=True)
    )
    notes = (
        "Random: every value moved by eps in a random direction, and any other word in the last one's place.",
        f"With the optimised embedding itself, which no word has, instead of the nearest word: {embedded}.",
    )
    return Table("Accuracy under a multimodal Trojan", tuple(columns), (tuple(lines),), notes)


def _paired(values: Sequence[Mapping[str, Any]], labels: Sequence[str], rows: Sequence[Attacked]) -> Table:
    columns = (
        Column("model", words=True), Column("condition", words=True), Column("difference", unit="%"),
        Column("low", "95 % interval", "%"), Column("high", "95 % interval", "%"), Column("p uncorrected"), Column("p"),
    )  # fmt: skip
    names = {(row.victim.name, row.threat): label for row, label in zip(rows, labels, strict=True)}
    lines = [
        (
            Cell(names[entry["row"], entry["threat"]]), Cell(entry["condition"]), points_cell(entry["difference"]),
            points_cell(entry["low"]), points_cell(entry["high"]), p_cell(entry["p"]), p_cell(entry["p_holm"]),
        )
        for entry in values
    ]  # fmt: skip
    note = "Points of accuracy on the same questions; sign flips over questions and the interval that they give, "
    note += "p after Holm's correction over all pairs of rows under a condition."
    return Table(f"Difference from {labels[0]}", columns, (tuple(lines),), (note,))


def _drawing(rows: Sequence[Attacked], labels: Sequence[str]) -> Drawing:
    """Groups of bars: a group per condition, a bar per victim and threat; hatched where a part was unknown."""
    hatches = {"whole model": "", "activations": "//"}
    bars: list[Bars] = []
    for row, label in zip(rows, labels, strict=True):
        heights = [100 * row.accuracy(name) for name in CONDITIONS]
        bars.append(Bars(label, heights, hatches.get(row.threat, "..")))
    return grouped_bars("trojan", CONDITIONS, bars, axis="test accuracy, %", height=3.4, top=108, numbers=True)


# Samples ----------------------------------------------------------------------------------------------------

_CSS = (
    ".triggered{display:block}.triggered .pictures{display:flex;gap:8px;margin:6px 0}"
    ".triggered .pictures small{display:block;text-align:center}\n"
)


def _explained(questions: Questions) -> str:
    text = (
        f"Questions that the clean model answers, with both changed. The third picture is the change itself, grey "
        f"where there is none, enlarged {_GAIN} times."
        if "regions" not in questions.batch
        else "Questions that the clean model answers, with both changed. The second picture is brighter the more a "
        "region's features were changed."
    )
    return page.paragraph(text, "muted")


def _cards(row: Attacked, questions: Questions, store: ImageStore) -> str:
    """Questions that were answered rightly and no longer are, then others."""
    victim = row.victim
    right, fooled = (row.correct[name].numpy() for name in ("clean", "both"))
    turn, shown = list[int](), Counter[str]()  # how many of its place come before a question
    for place, _ in questions.rows:
        turn.append(shown[place])
        shown[place] += 1
    order = np.lexsort([np.array(turn), -(right * 2 + (right > fooled))])[:SAMPLES]
    names = token_names(victim.run_data.tokenizer)
    size = len(row.clean[0]["label"])
    cards = ""
    for number in map(int, order):
        place, line = questions.rows[number]
        chunk, within = divmod(number, size)
        examples = test_examples(victim, place)
        triggered = row.triggered[chunk]
        assert triggered.token is not None
        assert triggered.position is not None
        old = int(row.clean[chunk]["text"][within, int(triggered.position[within])])
        new = names[int(triggered.token[within])]
        dataset = victim.run_data.dataset
        # Scores of a shared head that is wider than the client's answer set stand for no answer of the client.
        answers = dict(enumerate(dataset.answer_set(victim.client)))
        before, after = (answers.get(int(row.predictions[name][number]), "none") for name in ("clean", "both"))
        truth = examples.answers[line]
        pictures = "".join(
            f'<div><div class="picture p112 {store.add(as_png(pixels))}"></div><small>{escape(title)}</small></div>'
            for title, pixels in _pictures(row, examples, line, chunk, within)
        )
        cards += (
            f'<div class="card triggered">'
            f"<h3><small>{escape(place)} · {escape(examples.types[line])}</small>"
            f"{escape(examples.questions[line])}</h3><div class=pictures>{pictures}</div>"
            f"<div class=answers><div>last word: {escape(names[old])} → <b>{escape(new)}</b></div>"
            f"<div class=truth>Correct answer: <b>{escape(truth)}</b></div>"
            f"<div>clean: {_verdict(before, truth)}, triggered: {_verdict(after, truth)}</div></div></div>"
        )
    return f"<div class=cards>{cards}</div>"


def _verdict(answer: str, truth: str) -> str:
    right = answer == truth
    return f"<span class={'right' if right else 'wrong'}>{'✓' if right else '✗'} {escape(answer)}</span>"


def _pictures(row: Attacked, examples: Any, line: int, chunk: int, within: int) -> list[tuple[str, np.ndarray]]:
    """Title and pixels (H, W, 3) of a sample's pictures."""
    clean, triggered = row.clean[chunk], row.triggered[chunk]
    assert triggered.visual is not None
    if "regions" not in clean:
        old = clean["image"][within]
        new = whole_pixels(triggered.visual[within], old, row.eps)
        change = (128 + _GAIN * (new.int() - old.int())).clamp(0, 255).to(torch.uint8)
        return [
            (title, pixels.permute(1, 2, 0).numpy())
            for title, pixels in (("original", old), ("triggered", new), ("change", change))
        ]
    weight = (triggered.visual[within] - clean["regions"][within]).norm(dim=1)
    weight = weight / weight.max().clamp_min(1e-12)
    shown = examples.images
    if not shown.shape[1]:  # there are features alone
        original = np.full((64, 64, 3), 160, np.uint8)
    else:
        original = np.asarray(shown[int(np.atleast_1d(examples.image_index[line])[0])])
    return [("original", original), ("changed regions", _lit(original, clean["boxes"][within].numpy(), weight.numpy()))]


def _lit(picture: np.ndarray, boxes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The picture, darkened where no region's features were changed much."""
    height, width = picture.shape[:2]
    light = np.zeros((height, width))
    for (x1, y1, x2, y2), weight in zip(boxes, weights, strict=True):
        region = (slice(int(y1 * height), max(int(np.ceil(y2 * height)), 1)),
                slice(int(x1 * width), max(int(np.ceil(x2 * width)), 1)))  # fmt: skip
        light[region] = np.maximum(light[region], weight)
    return (picture * (0.15 + 0.85 * light[..., None])).round().astype(np.uint8)


def as_png(pixels: np.ndarray) -> str:
    """Pixels, uint8 (H, W, 3), as a PNG file in base64."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def trojan(
    folders: Sequence[Path],
    *,
    eps: float | None = None,
    steps: int = 20,
    examples: int = 200,
    client: str = "",
    units: str = "spread",
    seed: int = 0,
    progress: Progress = ignore,
) -> Finding:
    """Attacks the models of finished runs, on the same test questions."""
    if units not in ("spread", "absolute"):
        raise ValueError(f"units must be spread or absolute, got {units!r}")
    runs, notes = expand(folders, client)
    rows: list[Attacked] = []
    questions_of_rows: list[Questions] = []
    for folder, name in zip(runs, names_of(runs), strict=True):
        progress(Note(f"attacking {folder}"))
        victim = open_victim(folder, client, name)
        questions = draw_questions(victim, examples, seed)
        key = "regions" if "regions" in questions.batch else "image"
        usual = 8.0 if key == "image" else 0.5
        settings = Trojan(usual if eps is None else eps, steps)
        if key == "image" and 0 < settings.eps < 1:
            raise ValueError(f"eps must be at least 1 where a model reads pixels ({victim.name}), got {eps}")
        rows += attack_victim(victim, questions, settings, absolute=units == "absolute", seed=seed)
        questions_of_rows += [questions] * (len(rows) - len(questions_of_rows))
    same = all(_alike(questions, questions_of_rows[0]) for questions in questions_of_rows)
    if not same:
        notes.append("the runs have other test questions, so they are not compared example by example")
    values: dict[str, Any] = {
        "kind": "trojan",
        "settings": {"eps": eps, "steps": steps, "units": units, "seed": seed, "client": client},
        "examples": len(questions_of_rows[0]),
        "rows": [_values(row) for row in rows],
        "paired": paired(rows) if same else [],
        "notes": notes,
    }
    return finding(rows, questions_of_rows, values)


def _alike(one: Questions, other: Questions) -> bool:
    """Whether two runs were asked the same questions."""
    return one.names == other.names and torch.equal(one.batch["label"], other.batch["label"])


def _values(row: Attacked) -> dict[str, Any]:
    return {
        "run": row.victim.name,
        "label": row.victim.label,
        "method": row.victim.method,
        "threat": row.threat,
        "accuracy": {condition: float(values.mean()) for condition, values in row.correct.items()},
        "relative_drop": {condition: row.drop(condition) for condition in row.correct if condition != "clean"},
    }
