"""Repeated text: do models that write know sentences of their training records by heart?

Exposure (Carlini, Liu, Erlingsson, Kos and Song 2019, "The secret sharer: evaluating and testing unintended
memorization in neural networks"): log2 |R| - log2 rank of a text's loss among |R| texts of the same length with other
words, here drawn from all training texts. Of every site some texts are looked at that no other site has, those with
most copies and the longest first. The run is trained once more without any record with one of them: what counts is how
much larger their exposure is under the released model, as language that is easy for both is no memory.

Longest run: the most words in a row of such a text that the released model writes, asked as in training; by chance, the
most that the model writes which was trained without them.

A text with many copies at one site is looked for among the repeated records (:mod:`confed.release.probes.records`).
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from confed.analysis.case import TRAIN, Case, Models, with_other_words
from confed.federation.randomness import generator
from confed.release.probe import Estimate, Finding, Probe, mean_estimate
from confed.tasks.captioning import Captioning
from confed.tasks.chat import Chat

TEXTS, OTHERS = 16, 31  # texts looked at per site, and texts of other words that each is ranked among
LEAST_WORDS = 3


def exposure(loss: float, others: Sequence[float]) -> float:
    """Bits: log2 of the number of texts over the rank of the one with this loss."""
    rank = 1 + sum(other <= loss for other in others)
    return math.log2((len(others) + 1) / rank)


def longest_run(written: Sequence[str], text: Sequence[str]) -> int:
    """Most words in a row that both have."""
    best, before = 0, [0] * (len(text) + 1)
    for word in written:
        row = [0] * (len(text) + 1)
        for place, other in enumerate(text, 1):
            row[place] = before[place - 1] + 1 if word == other else 0
        best, before = max(best, *row), row
    return best


def texts_of_one_site(case: Case) -> dict[str, dict[tuple[int, ...], list[int]]]:
    """Site -> the texts that it alone has, with most copies and the longest first -> the rows of each."""
    rows_of: dict[str, dict[tuple[int, ...], list[int]]] = {}
    for site in case.sites:
        rows_of[site] = {}
        for row, tokens in enumerate(case.texts(site).tolist()):
            text = tuple(token for token in tokens if token)
            rows_of[site].setdefault(text, []).append(row)
    sites_with = Counter(chain.from_iterable(rows_of.values()))
    chosen: dict[str, dict[tuple[int, ...], list[int]]] = {}
    for site, texts in rows_of.items():
        long_texts = [text for text in texts if len(text) >= LEAST_WORDS + 2]
        unshared = [text for text in long_texts if sites_with[text] == 1]
        unshared.sort(key=lambda text: (len(texts[text]), len(text)), reverse=True)
        chosen[site] = {text: texts[text] for text in unshared[: min(TEXTS, len(texts) // 2)]}
    return chosen


def _excluded(case: Case) -> str:
    if not case.writes and case.answer_column == "label":
        return "the model writes no texts"
    if not case.replayed or case.algorithm.traits.centralised or case.algorithm.global_model != "alone":
        return "no model could be trained without some texts, to compare with"
    return "" if any(texts_of_one_site(case).values()) else f"no site has a text of {LEAST_WORDS} words of its own"


def _look(case: Case, seconds: float) -> Finding:
    del seconds
    texts = texts_of_one_site(case)
    kept, first_rows = dict[str, Tensor](), dict[str, list[int]]()
    for site, everyone in case.everything.items():
        left_out = torch.tensor([*chain.from_iterable(texts[site].values())], dtype=torch.int64)
        kept[site] = everyone[~torch.isin(everyone, left_out)]
        first_rows[site] = [rows[0] for rows in texts[site].values()]
    without = case.trained(kept)
    after, longest = _known(case, case.released, first_rows)
    before, longest_by_chance = _known(case, without, first_rows)
    bits = [known - guessed for known, guessed in zip(after, before, strict=True)]
    title = "exposure of texts that one site alone has, bits gained by training on them, mean"
    mean = mean_estimate("exposure_mean", title, bits)
    title, lost = "the same, the most exposed text", max(0.0, -min(bits))
    measures = [mean, Estimate("exposure", title, max(bits), None, None, lost, mean.p, len(bits), "exposure")]
    if longest is not None:
        title = "words in a row of such a text that the model writes"
        measures.append(
            Estimate(
                "repeated_words", title, longest, chance=longest_by_chance, count=len(bits), limit="repeated_words"
            )
        )
    most = f"Each text is ranked among {OTHERS} of other words: at most {math.log2(OTHERS + 1):.0f} bits."
    return Finding(measures, [f"{most} By chance: the most that a text lost, and what a model writes that had none."])


def _known(case: Case, models: Models, rows: dict[str, list[int]]) -> tuple[list[float], int | None]:
    """Exposures of texts under a model, and the longest run of any that it writes; None where it does not write."""
    every = torch.cat([case.texts(site)[:, 1:].flatten() for site in case.sites])
    words = every[every != 0]
    exposures, runs = list[float](), list[int]()
    for site, of_site in rows.items():
        case.load(models, site)
        for row in of_site:
            batch = case.table(site, TRAIN).batch(torch.tensor([row]))
            rng = generator(case.setup.seed, row, site, "texts of other words")
            losses = [case.text_loss(batch, site)]
            for _ in range(OTHERS):
                changed = with_other_words(batch[case.answer_column], words, rng)
                losses.append(case.text_loss({**batch, case.answer_column: changed}, site))
            exposures.append(exposure(losses[0], losses[1:]))
            runs += _run(case, site, row)
    return exposures, max(runs, default=None)


def _run(case: Case, site: str, row: int) -> list[int]:
    """Longest run of a text in what the loaded model writes when asked as in training; none where it cannot write."""
    task = case.setup.task_of(site)
    batch = case.table(site, TRAIN).batch(torch.tensor([row]))
    hidden = ("text", "text_mask") if case.answer_column == "text" else ("answer_tokens", "answer_weight")
    asked = {name: tensor for name, tensor in batch.items() if name not in hidden}
    if not isinstance(task, Captioning | Chat) or task.decoder is None or "image" not in asked:
        return []
    with torch.no_grad():
        output = case.network(asked)
    if output.logits.is_floating_point():
        return []
    text = task.decoder.decode(case.texts(site)[row : row + 1])[0]
    return [longest_run(task.decoder.decode(output.logits)[0].split(), text.split())]


PROBE = Probe(
    "text", "Repeated text",
    "Has the released model, guesses texts and asks for them with the pictures and questions of training.",
    _excluded, lambda case: case.training_seconds, _look,
)  # fmt: skip
