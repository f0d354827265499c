r"""A multimodal Trojan at test time: the picture and the question's last word are changed until the model errs.

As BiCSL describes its attack (Sun et al., "Bidirectional Contrastive Split Learning for Visual Question Answering",
AAAI 2024, section on adversarial robustness): the picture is perturbed by iterated gradients and projected after every
step so that it stays within the distribution of inputs; the last word of the question is replaced by one whose
embedding was optimised. No code of it was released; steps, projection and threat models are ours.

Notation: x a picture's region features or pixels, e the embedding of the question's last word, J what the attacker
raises. Projected gradient ascent (Madry et al., "Towards Deep Learning Models Resistant to Adversarial Attacks", ICLR
2018) with a start drawn at random, in the picture within the ball, of the word within a step of its embedding:

    x <- Pi(x + a sign(dJ/dx)),   Pi: |x - x_0| <= eps s and l <= x <= h, per dimension,
    e <- clamp(e + b s_e sign(dJ/de), l_e, h_e),

where s, l and h are the spread, minimum and maximum of clean training data (of the words' embeddings for e). Of all
iterates each example keeps the one with the largest J. The word is then the other one whose embedding is
nearest to e.

What J is, depends on what the attacker knows: the loss of the whole model (:func:`truth_loss`), or, of a model whose
other part a server keeps, how far the activations move (:func:`displacement`), or the loss of a head that the attacker
trained on its own data on top of the part it knows (:func:`fit_head`, :func:`surrogate_loss`).

Who knows what decides what is attacked (:data:`THREATS`). Where a client holds all of the model, so does an attacker at
a client. Where a server keeps a part, an attacker at a client has to guess it; that attack is the one to quote for the
method, and the attack with the whole model stands beside it, because parts that are merely hidden protect only as long
as they stay so.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.analysis.case import TRAIN
from confed.analysis.victim import (
    Finding,
    Linear,
    Questions,
    Victim,
    draw_questions,
    expand,
    fit_linear,
    joined_batches,
    names_of,
    ordinary_words,
    percent_cell,
    points_cell,
    scores,
)
from confed.comparison.records import distinct_labels
from confed.federation.protocols import Batch, Forward
from confed.federation.randomness import generator
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, check_fields
from confed.federation.specs import model_spec
from confed.metrics.statistics import holm
from confed.metrics.stratified import flip_interval, sign_flip
from confed.report.tables.cells import p_cell
from confed.report.tables.table import Cell, Column, Table
from confed.system import format as formats
from confed.system.events import Note, Progress, ignore


@dataclass(frozen=True)
class Text:
    """What replaces a word needs to know."""

    embedding: nn.Embedding  # the model's word embedding, (V, d)
    words: Tensor  # ids of the ordinary words, int64 (W,): what may stand in a question
    special: Tensor  # ids that are no words of a question ([CLS], [SEP], [PAD]), int64


def word_embedding(predict: Forward, model: nn.Module, batch: Batch) -> nn.Embedding:
    """The embedding that a model looks a batch's ``text`` up in, found by watching a pass."""
    embeddings: list[nn.Embedding] = []

    def watch(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if isinstance(module, nn.Embedding) and _same(arguments[0], batch["text"]):
            embeddings.append(module)

    handles = [m.register_forward_hook(watch) for m in model.modules() if isinstance(m, nn.Embedding)]
    try:
        with torch.no_grad():
            predict(batch)
    finally:
        for handle in handles:
            handle.remove()
    if not embeddings:
        raise ValueError(f"{type(model).__name__} looks its text up in no nn.Embedding, which this attack changes")
    return embeddings[0]


@contextmanager
def inserted(embedding: nn.Embedding, ids: Tensor, position: Tensor, vectors: Tensor) -> Iterator[None]:
    """Within the block, the words at some places have other embeddings."""

    def replace(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        if not _same(arguments[0], ids):
            return output
        here = F.one_hot(position, ids.shape[1]).to(torch.bool).unsqueeze(-1)
        return torch.where(here, vectors.unsqueeze(1).to(output.dtype), output)

    handle = embedding.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def last_words(batch: Batch, special: Tensor) -> Tensor:
    """The place of every question's last word, int64 (B,): the last token that is neither padding nor special."""
    real = (batch["text_mask"] != 0) & ~torch.isin(batch["text"], special.to(batch["text"].device))
    places = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, places, -1).amax(1)
    if bool((last < 0).any()):
        raise ValueError("every question must have a word that could be replaced, got one of special tokens only")
    return last


def with_words(batch: Batch, position: Tensor, token: Tensor) -> dict[str, Tensor]:
    """The batch with other words at some places, (B,) each."""
    changed = batch["text"].clone()
    changed[torch.arange(len(changed), device=changed.device), position] = token
    return {**batch, "text": changed}


def _same(given: object, ids: Tensor) -> bool:
    return isinstance(given, Tensor) and given.shape == ids.shape and bool(torch.equal(given, ids))


Objective = Callable[[Batch], Tensor]  # what the attacker raises: a batch -> one value per example, (B,)
Activations = Callable[[Batch], Tensor]  # the part of a model that the attacker knows: a batch -> (B, D)


@dataclass(frozen=True)
class Bounds:
    """Which values occur, per dimension, in shapes that broadcast with one example's."""

    low: Tensor
    high: Tensor
    spread: Tensor  # the unit of eps: the standard deviation, or a level of a pixel


@dataclass(frozen=True)
class Box:
    """Where values may move, all of shapes that broadcast with theirs."""

    clean: Tensor
    reach: Tensor  # how far from the clean values a search begins
    step: Tensor
    low: Tensor
    high: Tensor

    def start(self, rng: torch.Generator) -> Tensor:
        """Random values near the clean ones, where no gradient is."""
        noise = torch.rand(self.clean.shape, generator=rng, dtype=self.clean.dtype).to(self.clean.device)
        return torch.clamp(self.clean + (2 * noise - 1) * self.reach, self.low, self.high)

    def moved(self, values: Tensor, gradient: Tensor) -> Tensor:
        """Values after a step, projected."""
        return torch.clamp(values + self.step * gradient.sign(), self.low, self.high)


@dataclass(frozen=True)
class Triggered:
    """What an attack made of a batch."""

    # the perturbed regions or pixels in the shape of the clean ones; None where pictures are left alone
    visual: Tensor | None = None
    # the place of the question's last word, int64 (B,); None where questions are left alone
    position: Tensor | None = None
    vector: Tensor | None = None  # its optimised embedding, (B, d)
    # the ordinary word nearest to that, of those that do not stand there already, int64 (B,)
    token: Tensor | None = None


STEP = 2.5  # size of all steps together relative to eps, with which a search can cross the whole ball
WORD_STEP = 0.5  # size of a step of the embedding, in spreads of the words' embeddings


@dataclass(frozen=True)
class Trojan:
    """How the attack searches."""

    eps: Annotated[float, NOT_NEGATIVE] = 1.0  # largest change of a value, in units of spread
    steps: Annotated[int, AT_LEAST_ONE] = 20

    def __post_init__(self) -> None:
        check_fields(self, "")

    def __call__(
        self,
        batch: Batch,
        objective: Objective,
        rng: torch.Generator,
        *,
        visual: tuple[str, Bounds] | None = None,
        text: Text | None = None,
    ) -> Triggered:
        if visual is None and text is None:
            raise ValueError("visual or text must be given, got neither")
        boxes: dict[str, Box] = {}
        position = token = None
        if visual is not None:
            boxes["picture"] = self._picture(batch, *visual)
        if text is not None:
            position = last_words(batch, text.special)
            boxes["word"] = _word(batch, position, text)

        def value(point: Mapping[str, Tensor]) -> Tensor:
            changed = batch if visual is None else {**batch, visual[0]: point["picture"]}
            if text is None or position is None:
                return objective(changed)
            with inserted(text.embedding, batch["text"], position, point["word"]):
                return objective(changed)

        solution = _ascend(boxes, value, self.steps, rng)
        if text is not None and position is not None:
            words = text.words.to(batch["text"].device)
            distance = torch.cdist(solution["word"], text.embedding.weight.detach()[words])
            token = words[distance.masked_fill(words == _replaced(batch, position), torch.inf).argmin(1)]
        return Triggered(solution.get("picture"), position, solution.get("word"), token)

    def random(
        self, batch: Batch, rng: torch.Generator, *, visual: tuple[str, Bounds] | None = None, text: Text | None = None
    ) -> Triggered:
        """Random changes of the same size as the attack's, as its baseline: values moved by ±eps, any other word."""
        seen = position = vector = token = None
        if visual is not None:
            box = self._picture(batch, *visual)
            signs = 2 * torch.randint(2, box.clean.shape, generator=rng).to(box.clean) - 1
            seen = torch.clamp(box.clean + box.reach * signs, box.low, box.high)
        if text is not None:
            position = last_words(batch, text.special)
            words = text.words.to(batch["text"].device)
            order = torch.rand(len(position), len(words), generator=rng).to(words.device)
            token = words[order.masked_fill(words == _replaced(batch, position), -1).argmax(1)]
            vector = text.embedding.weight.detach()[token]
        return Triggered(seen, position, vector, token)

    def _picture(self, batch: Batch, key: str, bounds: Bounds) -> Box:
        """Within eps of the clean values, and within what occurs."""
        clean = batch[key]
        reach = (self.eps * bounds.spread).expand(clean.shape)
        if key == "regions":
            reach = reach * (clean != 0).any(-1, keepdim=True)
        # What is clean may lie outside the range of training data; a trigger need not bring it back.
        low = torch.maximum(torch.minimum(bounds.low, clean), clean - reach)
        high = torch.minimum(torch.maximum(bounds.high, clean), clean + reach)
        return Box(clean, reach, STEP / self.steps * reach, low, high)


def _word(batch: Batch, position: Tensor, text: Text) -> Box:
    """Embeddings of the last words, within what embeddings of words are."""
    bounds = embedding_bounds(text)
    size = WORD_STEP * bounds.spread
    clean = text.embedding.weight.detach()[_replaced(batch, position)[:, 0]]
    return Box(clean, size, size, bounds.low, bounds.high)


def _replaced(batch: Batch, position: Tensor) -> Tensor:
    """The words at some places, (B, 1)."""
    return batch["text"].gather(1, position.unsqueeze(1))


def _ascend(
    boxes: Mapping[str, Box], value_at: Callable[[Mapping[str, Tensor]], Tensor], steps: int, rng: torch.Generator
) -> dict[str, Tensor]:
    """Gradient ascent; returns for every example the point of the largest value among the start and all steps."""
    point = {name: box.start(rng) for name, box in boxes.items()}
    solution = dict(point)
    best: Tensor | float = -math.inf
    # Recurrent layers of cuDNN have no backward pass in evaluation mode.
    with torch.inference_mode(False), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        for step in range(steps + 1):
            point = {name: values.detach().requires_grad_() for name, values in point.items()}
            value = value_at(point)
            if not value.requires_grad:
                raise ValueError("the model's answers have no gradient with respect to what it reads")
            better = value.detach() > best
            best = torch.where(better, value.detach(), best)
            for name, values in point.items():
                rows = better.view(-1, *[1] * (values.ndim - 1))
                solution[name] = torch.where(rows, values.detach(), solution[name])
            if step < steps:
                gradients = torch.autograd.grad(value.sum(), list(point.values()), materialize_grads=True)
                for (name, values), gradient in zip(point.items(), gradients, strict=True):
                    point[name] = boxes[name].moved(values.detach(), gradient)
    return solution


# What the attacker raises -----------------------------------------------------------------------------------


def truth_loss(predict: Forward, temperature: float = 1.0) -> Objective:
    """Cross-entropy of the right answers under tempered scores, which does not flatten out where the model is sure."""

    def value(batch: Batch) -> Tensor:
        return F.cross_entropy(predict(batch).logits.float() / temperature, batch["label"], reduction="none")

    return value


def displacement(activations: Activations, clean: Tensor) -> Objective:
    """Squared Euclidean distance of a batch's activations from the clean ones (B, D)."""
    clean = clean.detach()
    return lambda batch: (activations(batch) - clean).square().sum(1)


def surrogate_loss(activations: Activations, head: Linear) -> Objective:
    """Cross-entropy of the right answers under the attacker's own head."""
    return lambda batch: F.cross_entropy(head(activations(batch).float()), batch["label"], reduction="none")


def fit_head(activations: Tensor, labels: Tensor, classes: int, decay: float = 1e-3) -> Linear:
    """Multinomial logistic regression on standardised activations."""
    if not len(labels):
        raise ValueError("a surrogate head needs at least one example of the attacker's own, got none")
    return fit_linear(activations, torch.zeros(classes), lambda scores: F.cross_entropy(scores, labels), decay)


# What occurs ------------------------------------------------------------------------------------------------


def feature_bounds(batches: Iterable[Batch]) -> Bounds:
    """Minimum, maximum and standard deviation of every feature dimension over the regions of clean training data."""
    count, least, most, moments = 0, list[Tensor](), list[Tensor](), list[Tensor]()
    for batch in batches:
        rows = batch["regions"][(batch["regions"] != 0).any(-1)].double()
        if len(rows):
            count += len(rows)
            least.append(rows.amin(0))
            most.append(rows.amax(0))
            moments.append(torch.stack([rows.sum(0), rows.square().sum(0)]))
    if not count:
        raise ValueError("the bounds of features need at least one region of training data, got none")
    mean, square = torch.stack(moments).sum(0) / count
    spread = (square - mean.square()).clamp_min(0).sqrt()
    return Bounds(torch.stack(least).amin(0).float(), torch.stack(most).amax(0).float(), spread.float())


def pixel_bounds() -> Bounds:
    """Pixels as models read floats, from -1 to 1; eps is then in levels of 0 to 255."""
    return Bounds(torch.tensor(-1.0), torch.tensor(1.0), torch.tensor(1 / 127.5))


def embedding_bounds(text: Text) -> Bounds:
    """Minimum, maximum and standard deviation of every dimension of the ordinary words' embeddings."""
    rows = text.embedding.weight.detach()[text.words]
    low, high = torch.aminmax(rows, dim=0)
    return Bounds(low, high, rows.std(0, correction=0))


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
_EMBEDDING = ("text (embedding)", "both (embedding)")
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

    def accuracy(self, condition: str) -> float:
        """The mean score."""
        return float(self.correct[condition].mean())

    def drop(self, condition: str) -> float | None:
        """The share of the clean accuracy that is lost; None where there is none to lose."""
        clean = self.accuracy("clean")
        return None if clean == 0 else 1 - self.accuracy(condition) / clean


def attack_victim(victim: Victim, questions: Questions, settings: Trojan, *, seed: int = 0) -> list[Attacked]:
    """Trojan attacks on one model, one per threat model that fits its method; report the first."""
    clean = list(questions.chunks(_CHUNK))
    key = "regions" if "regions" in clean[0] else "image"
    visual = key, pixel_bounds() if key == "image" else feature_bounds(_training(victim))
    words, special = ordinary_words(victim.run_data.tokenizer)
    text = Text(word_embedding(victim.network, victim.model, clean[0]), words, special)
    prepare: dict[str, Callable[[Batch], Objective]] = {}
    if victim.partly_known:
        prepare["activations"] = lambda batch: displacement(victim.activations, _without_gradient(victim, batch))
        head = _own_head(victim, seed)
        prepare["own head"] = lambda batch: surrogate_loss(victim.activations, head)
    prepare["whole model"] = lambda batch: truth_loss(victim.network, model_spec(victim.model).temperature)
    attacked: list[Attacked] = []
    for threat, objective in prepare.items():
        rng = generator(seed, 0, "", f"trojan {threat}")
        each = [_scores_under_attack(victim, batch, objective, settings, visual, text, rng) for batch in clean]
        attacked.append(Attacked(victim, threat, joined_batches(each)))
    return attacked


def _scores_under_attack(
    victim: Victim,
    batch: Batch,
    prepare: Callable[[Batch], Objective],
    settings: Trojan,
    visual: tuple[str, Bounds],
    text: Text,
    rng: torch.Generator,
) -> dict[str, Tensor]:
    """Scores of a batch by condition; under "both" the picture is attacked once more with the word that was found."""
    floats = {**batch, "image": batch["image"].float() / 127.5 - 1} if visual[0] == "image" else batch
    objective = prepare(floats)
    seen = settings(floats, objective, rng, visual=visual)
    read = settings(floats, objective, rng, text=text)
    together = settings(floats, objective, rng, visual=visual, text=text)
    assert together.position is not None
    assert together.token is not None
    again = settings(with_words(floats, together.position, together.token), objective, rng, visual=visual)
    triggers = {
        "clean": Triggered(),
        "vision": seen,
        "text": read,
        "both": replace(together, visual=again.visual),
        "vision (random)": settings.random(floats, rng, visual=visual),
        "text (random)": settings.random(floats, rng, text=text),
        "both (random)": settings.random(floats, rng, visual=visual, text=text),
    }
    correct: dict[str, Tensor] = {}
    for condition, triggered in triggers.items():
        correct[condition] = scores(victim, [_applied(batch, triggered, visual[0], settings)])[0]
    # The optimised embeddings themselves, which no question could have.
    for condition, triggered in zip(_EMBEDDING, (read, together), strict=True):
        assert triggered.vector is not None
        changed = _applied(batch, Triggered(triggered.visual), visual[0], settings)
        with inserted(text.embedding, batch["text"], together.position, triggered.vector):
            correct[condition] = scores(victim, [changed])[0]
    return correct


def _applied(batch: Batch, triggered: Triggered, key: str, settings: Trojan) -> dict[str, Tensor]:
    """The batch as it would be sent: whole pixels, and a word in place of its embedding."""
    changed = dict(batch)
    if triggered.visual is not None:
        pixels = key == "image"
        changed[key] = whole_pixels(triggered.visual, batch[key], settings.eps) if pixels else triggered.visual
    if triggered.position is not None and triggered.token is not None:
        changed = with_words(changed, triggered.position, triggered.token)
    return changed


def whole_pixels(perturbed: Tensor, clean: Tensor, eps: float) -> Tensor:
    """Floats in [-1, 1] as pixels, uint8, each at most eps (rounded down) levels from its clean one."""
    most = int(eps + 1e-6)
    levels = clean.int()
    change = (((perturbed + 1) * 127.5).round().int() - levels).clamp(-most, most)
    return (levels + change).clamp(0, 255).to(torch.uint8)


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


def _without_gradient(victim: Victim, batch: Batch) -> Tensor:
    with torch.no_grad():
        return victim.activations(batch)


def _training(victim: Victim) -> Iterator[Batch]:
    """Everybody's clean training examples, over which bounds are taken."""
    for site in victim.sites:
        yield from victim.table(site, TRAIN).batches(512)


def _own_head(victim: Victim, seed: int) -> Linear:
    """A head that an attacker at one client can train on top of the client's part."""
    table = victim.table(victim.places[0], TRAIN)
    order = torch.randperm(len(table), generator=generator(seed, 0, "", "the attacker's own examples"))[:_OWN]
    batches = list(table.batches(256, order))
    activations = torch.cat([_without_gradient(victim, batch) for batch in batches])
    labels = torch.cat([batch["label"] for batch in batches])
    return fit_head(activations, labels, len(victim.run_data.dataset.answers))


# What the test-time Trojan found, as tables ---------------------------------------------------------------------


def trojan(
    folders: Sequence[Path],
    *,
    eps: float | None = None,
    steps: int = 20,
    examples: int = 200,
    client: str = "",
    seed: int = 0,
    progress: Progress = ignore,
) -> Finding:
    """Attacks the models of finished runs, on the same test questions."""
    runs, notes = expand(folders, client)
    rows: list[Attacked] = []
    asked: list[Questions] = []
    for folder, name in zip(runs, names_of(runs), strict=True):
        progress(Note(f"attacking {folder}"))
        victim = Victim(folder, client, name)
        questions = draw_questions(victim, examples, seed)
        reads_pixels = "regions" not in questions.batch
        usual = 8.0 if reads_pixels else 0.5
        settings = Trojan(usual if eps is None else eps, steps)
        if reads_pixels and 0 < settings.eps < 1:
            raise ValueError(f"eps must be at least 1 where a model reads pixels ({victim.name}), got {eps}")
        rows += attack_victim(victim, questions, settings, seed=seed)
        asked.append(questions)
    first = asked[0]
    same = all(
        first.names == other.names and torch.equal(first.batch["label"], other.batch["label"]) for other in asked
    )
    if not same:
        notes.append("the runs have other test questions, so they are not compared example by example")
    values: dict[str, Any] = {
        "kind": "trojan",
        "settings": {"eps": eps, "steps": steps, "seed": seed, "client": client},
        "examples": len(first),
        "rows": [_values(row) for row in rows],
        "paired": paired(rows) if same else [],
        "notes": notes,
    }
    labels = _labels(rows)
    words = [
        f"{len(first)} test questions per model. The picture is changed by projected gradient ascent within eps of its "
        "clean values and within the range of training data; the question's last word is replaced by the word whose "
        "embedding is nearest to an optimised one; both together. Each change is made for its question alone.",
        "A low accuracy shows that an attack works. A high one does not show that none would: stronger searches, "
        "other starts and larger eps exist. Where the attacker lacks a part of the model, the row with the whole model "
        "says what hiding that part is worth; such an attacker can try each of its rows, so the lowest one counts.",
    ]
    for row in rows:
        bound = row.threat == "whole model" and row.victim.partly_known
        more = "; an upper bound of what an attacker at a client could do" if bound else ""
        words.append(f"{labels[row.victim.name, row.threat]}: {THREATS[row.threat]}{more}.")
    tables = [_table(rows, labels)]
    if values["paired"]:
        tables.append(_paired(values["paired"], labels))
    return Finding("trojan", "Multimodal Trojan at test time", [*words, *notes], tables, values)


def _values(row: Attacked) -> dict[str, Any]:
    return {
        "run": row.victim.name,
        "label": row.victim.label,
        "method": row.victim.recipe.sections["algorithm"]["name"],
        "threat": row.threat,
        "accuracy": {condition: row.accuracy(condition) for condition in row.correct},
        "relative_drop": {condition: row.drop(condition) for condition in row.correct if condition != "clean"},
    }


Labels = Mapping[tuple[str, str], str]  # run and threat -> name of the row: the run's, and the threat of several


def _labels(rows: Sequence[Attacked]) -> Labels:
    runs = distinct_labels({row.victim.name: row.victim.label for row in rows})
    labels: dict[tuple[str, str], str] = {}
    for row in rows:
        threat = f", {row.threat}" if row.victim.partly_known else ""
        labels[row.victim.name, row.threat] = runs[row.victim.name] + threat
    return labels


def _table(rows: Sequence[Attacked], labels: Labels) -> Table:
    columns = [Column("model", words=True), Column("the attacker knows", words=True)]
    columns += [Column(name, "accuracy, %", "%") for name in CONDITIONS]
    columns += [Column(name, "relative drop, %", "%") for name in CONDITIONS[1:]]
    columns += [Column(name.split()[0], "random, %", "%", detail=name != RANDOM[-1]) for name in RANDOM]
    columns += [Column(name, "accuracy, %", "%", detail=True) for name in _EMBEDDING]
    lines: list[tuple[Cell, ...]] = []
    embedded: list[str] = []
    for row in rows:
        label = labels[row.victim.name, row.threat]
        values = [row.accuracy(name) for name in CONDITIONS]
        values += [row.drop(name) for name in CONDITIONS[1:]]
        values += [row.accuracy(name) for name in (*RANDOM, *_EMBEDDING)]
        attacker_knows = "whole model" if row.threat == "whole model" else f"client's part ({row.threat})"
        run = Cell(label.removesuffix(f", {row.threat}"))
        lines.append((run, Cell(attacker_knows), *map(percent_cell, values)))
        by_text, by_both = (formats.percent(row.accuracy(name)) for name in _EMBEDDING)
        embedded.append(f"{label}: text {by_text}, both {by_both}")
    notes = (
        "Random: every value moved by eps in a random direction, and any other word in the last one's place.",
        f"With the optimised embedding itself, which no word has, instead of the nearest word: {'; '.join(embedded)}.",
    )
    return Table("Accuracy under a multimodal Trojan", tuple(columns), (tuple(lines),), notes)


def _paired(values: Sequence[Mapping[str, Any]], labels: Labels) -> Table:
    columns = (
        Column("model", words=True), Column("condition", words=True), Column("difference", unit="%"),
        Column("low", "95 % interval", "%"), Column("high", "95 % interval", "%"), Column("p uncorrected"), Column("p"),
    )  # fmt: skip
    lines = [
        (
            Cell(labels[entry["row"], entry["threat"]]), Cell(entry["condition"]), points_cell(entry["difference"]),
            points_cell(entry["low"]), points_cell(entry["high"]), p_cell(entry["p"]), p_cell(entry["p_holm"]),
        )
        for entry in values
    ]  # fmt: skip
    note = "Points of accuracy on the same questions; sign flips over questions and the interval that they give, "
    note += "p after Holm's correction over all pairs of rows under a condition."
    return Table(f"Difference from {next(iter(labels.values()))}", columns, (tuple(lines),), (note,))
