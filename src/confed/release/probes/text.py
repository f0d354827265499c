"""Repeated text: do models that write know sentences of their training records by heart?

Exposure (Carlini, Liu, Erlingsson, Kos and Song 2019, "The secret sharer: evaluating and testing unintended
memorization in neural networks"): log2 |R| - log2 rank of a text's loss among |R| texts of the same length with other
words, here drawn from all training texts. What counts is how much larger it is under the released model than under one
that was trained without the site that has the text: language that is easy for both is no memory.

Longest run: the most words in a row that the released model writes, asked as in training, of a text that only one
training record has.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from confed.federation.randomness import generator
from confed.federation.specs import task_spec
from confed.release.case import EVERYBODY, TRAIN, Case, Models
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


def _key(case: Case) -> str:
    """Name of the column that holds the texts to learn."""
    return "answer_tokens" if case.run_data.answer_tokens is not None else "text"


def _tokens(case: Case, site: str) -> Tensor:
    """Tokens of the texts that a site's records teach, (N, L), of several the first."""
    column = case.table(site, TRAIN).columns[_key(case)]
    return column if column.ndim == 2 else column[:, 0]


def _rare(case: Case, site: str, counts: Counter[tuple[int, ...]]) -> list[int]:
    """Rows of a site's rarest texts, the longest first."""
    tokens = _tokens(case, site)
    lengths = (tokens != 0).sum(1)
    rows = [row for row in range(len(tokens)) if lengths[row] >= LEAST_WORDS + 2]
    rows.sort(key=lambda row: (counts[tuple(tokens[row].tolist())], -int(lengths[row])))
    first = {tuple(tokens[row].tolist()): row for row in reversed(rows)}
    return [row for row in rows if first[tuple(tokens[row].tolist())] == row][:TEXTS]


def _excluded(case: Case) -> str:
    if case.run_data.answer_tokens is None and task_spec(case.setup.task).judges != "captions":
        return "the model writes no texts"
    if not case.replayed or case.algorithm.traits.centralised or case.algorithm.global_model != "alone":
        return "no model could be trained without a site, to compare with"
    longest = max(int((_tokens(case, site) != 0).sum(1).max()) for site in case.sites)
    return "" if longest >= LEAST_WORDS + 2 else f"no text to learn has {LEAST_WORDS} words"


def _look(case: Case, seconds: float) -> Finding:
    counts: Counter[tuple[int, ...]] = Counter()
    for site in case.sites:
        counts.update(tuple(row) for row in _tokens(case, site).tolist())
    every = torch.cat([_tokens(case, site)[:, 1:].flatten() for site in case.sites])
    bits, runs = list[float](), list[int]()
    for site in case.sites[: max(1, int(seconds / case.training_seconds))]:
        rows = _rare(case, site, counts)
        before = _exposures(case, case.without(site), site, rows, every[every != 0])
        after = _exposures(case, case.released, site, rows, every[every != 0])
        bits += [b - a for a, b in zip(before, after, strict=True)]
        runs += _runs(case, site, [row for row in rows if counts[tuple(_tokens(case, site)[row].tolist())] == 1])
    if not bits:
        return Finding([], ["No site has texts that are long enough."])
    mean = mean_estimate(
        "exposure_mean", "exposure of rare training texts, bits gained by training on them, mean", bits
    )
    title, lost = "the same, the most exposed text", max(0.0, -min(bits))
    measures = [mean, Estimate("exposure", title, max(bits), None, None, lost, mean.p, len(bits), "exposure")]
    if runs:
        title = "words in a row of a unique training text that the model writes"
        measures.append(Estimate("repeated_words", title, max(runs), count=len(runs), limit="repeated_words"))
    most = f"Each text is ranked among {OTHERS} of other words: at most {math.log2(OTHERS + 1):.0f} bits."
    return Finding(measures, [f"{most} By chance: the most that a text lost."])


def _exposures(case: Case, models: Models, site: str, rows: Sequence[int], words: Tensor) -> list[float]:
    case.load(models[EVERYBODY], site)
    task, values = case.setup.task_of(site), list[float]()
    for row in rows:
        batch = case.table(site, TRAIN).batch(torch.tensor([row]))
        rng = generator(case.setup.seed, row, site, "texts of other words")
        losses: list[float] = []
        for number in range(OTHERS + 1):
            changed = _other_words(batch, _key(case), words, rng) if number else batch
            with torch.no_grad():
                losses.append(float(task.loss(case.network(changed), changed)))
        values.append(exposure(losses[0], losses[1:]))
    return values


def _other_words(batch: Mapping[str, Tensor], key: str, words: Tensor, rng: torch.Generator) -> dict[str, Tensor]:
    """The same record with other words in its text, between its first token and its last."""
    text = batch[key].clone()
    first = text.flatten(0, -2)[0]
    count = int((first != 0).sum()) - 2
    first[1 : 1 + count] = words[torch.randint(len(words), (count,), generator=rng)]
    return {**batch, key: text}


def _runs(case: Case, site: str, rows: Sequence[int]) -> list[int]:
    """Longest runs of unique texts in what the released model, which is loaded, writes when asked as in training."""
    task, runs = case.setup.task_of(site), list[int]()
    if not isinstance(task, Captioning | Chat) or task.decoder is None:
        return runs
    hidden = ("text", "text_mask") if _key(case) == "text" else ("answer_tokens", "answer_weight")
    for row in rows:
        batch = case.table(site, TRAIN).batch(torch.tensor([row]))
        asked = {name: tensor for name, tensor in batch.items() if name not in hidden}
        if "image" in asked:
            with torch.no_grad():
                output = case.network(asked)
            if not output.logits.is_floating_point():
                text = task.decoder.decode(_tokens(case, site)[row : row + 1])[0]
                runs.append(longest_run(task.decoder.decode(output.logits)[0].split(), text.split()))
    return runs


PROBE = Probe(
    "text", "Repeated text",
    "Has the released model, guesses texts and asks for them with the pictures and questions of training.",
    _excluded, lambda case: case.training_seconds, _look,
)  # fmt: skip
