"""The test-time Trojan on finished runs: accuracy clean, and with the picture, the question or both changed.

Who knows what decides what is attacked (:data:`THREATS`). Where a client holds all of the model, so does an attacker
at a client. Where a server keeps a part, an attacker at a client has to guess it; that attack is the one to quote for
the method, and the attack with the whole model stands beside it, because parts that are merely hidden protect only as
long as they stay so.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from confed.analysis.victim import (
    Questions,
    Victim,
    ordinary_words,
    scores,
)
from confed.attacks.trojan import (
    Bounds,
    Head,
    Objective,
    Triggered,
    Trojan,
    displacement,
    feature_bounds,
    fit_head,
    pixel_bounds,
    surrogate_loss,
    truth_loss,
)
from confed.attacks.words import Text, inserted, last_words, with_words, word_embedding
from confed.federation.protocols import Batch
from confed.federation.randomness import generator
from confed.metrics.statistics import holm
from confed.metrics.stratified import flip_interval, sign_flip

__all__ = ["CONDITIONS", "RANDOM", "THREATS", "Attacked", "attack_victim", "whole_pixels"]

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
_OWN = 2000
"""Training examples of the attacker's own head at most."""


@dataclass(frozen=True)
class Attacked:
    """One victim under one threat.

    Attributes:
        victim: who.
        threat: key of :data:`THREATS`.
        correct: condition -> score per example (N,): "clean", "vision", "text" and "both"; "text (embedding)" and "both
            (embedding)" with the optimised embedding itself in place of the nearest word; "vision (random)" and so on
            for random changes.
        predictions: condition -> answer per example (N,), but for embeddings.
        triggered: what was changed in "both", chunk by chunk.
        clean: the clean chunks.
        eps: the largest change.
    """

    victim: Victim
    threat: str
    correct: Mapping[str, Tensor]
    predictions: Mapping[str, Tensor]
    triggered: Sequence[Triggered]
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
    """Trojan attacks on one model, one per threat model that fits its method; report the first.

    A model without gradients, or without a word embedding, is refused with a ValueError.

    Args:
        victim: the model.
        questions: what it is asked.
        settings: of the search.
        absolute: eps of region features is in their own units.
        seed: of the start of the search.
    """
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
    found: list[Attacked] = []
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
        found.append(Attacked(victim, threat, correct, predictions, both, clean, settings.eps))
    return found


def paired(rows: Sequence[Attacked]) -> list[dict[str, Any]]:
    """Rows against the first one: differences of accuracy on the same questions, with the test of sign flips.

    ``low`` and ``high`` are its 95 % interval, None with too few questions; ``p_holm`` is corrected over all pairs of
    rows under a condition. Only what an attacker at a client can do is compared, so not the whole model where a server
    keeps a part of it.
    """
    found: list[dict[str, Any]] = []
    compared = [row for row in rows[1:] if not (row.victim.partly_known and row.threat == "whole model")]
    for condition in CONDITIONS:
        scored = [row.correct[condition].double() - rows[0].correct[condition].double() for row in compared]
        tests = [sign_flip([one.numpy()[None]]) for one in scored]
        p = holm({str(i): test.p for i, test in enumerate(tests)}, tests=math.comb(len(compared) + 1, 2)).adjusted
        for i, (row, test) in enumerate(zip(compared, tests, strict=True)):
            interval = flip_interval([scored[i].numpy()[None]])
            found.append(
                {"row": row.victim.name, "threat": row.threat, "against": rows[0].victim.name,
                 "against_threat": rows[0].threat, "condition": condition, "difference": test.difference,
                 "low": interval and interval.low, "high": interval and interval.high, "p": test.p,
                 "p_holm": p[str(i)], "n": len(scored[i])}
            )  # fmt: skip
    order = [(row.victim.name, row.threat) for row in compared]
    return sorted(found, key=lambda entry: order.index((entry["row"], entry["threat"])))


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
    found: list[Tensor] = []
    for batch, triggered in zip(clean, triggers, strict=True):
        assert triggered.vector is not None
        changed = _applied(batch, Triggered(triggered.visual), key, settings)
        place = last_words(batch, text.special)
        with inserted(text.embedding, batch["text"], place, triggered.vector):
            found.append(scores(victim, [changed])[0])
    return torch.cat(found)


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
