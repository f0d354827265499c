r"""Inputs at the cut: pictures and questions rebuilt from the activations that split learning sends.

The attacker has f, the client's part of the model, as the auxiliary server and every client have it, and the training
records of the other sites about other pictures. It sees v = f(x) of one site's training records.

1. **A learned decoder** (:func:`fit_decoder`): a network trained on pairs (f(x), x) of the attacker's own (He, Zhang
   and Lee, "Model inversion attacks against collaborative inference", ACSAC 2019, "black box").
2. **Search in the input** (:func:`searched`; Mahendran and Vedaldi, "Understanding deep image representations by
   inverting them", CVPR 2015): gradient steps that lower

       ||f(x) - v||^2 / ||v||^2 + lambda mean ((x - m) / s)^2,

   from the mean input m, with the spread s of the attacker's data; the question is taken as known.
3. **A probe for words** (:func:`fit_word_probe`): for every word a logistic regression on v says whether the question
   has it.

Every number is to be read beside that of an attacker who sees nothing: the mean input, and the most frequent words.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.analysis.case import TRAIN, VALIDATION, Case
from confed.analysis.victim import Linear, fit_linear, joined_batches, ordinary_words, token_names
from confed.data.table import Table
from confed.federation.protocols import Batch
from confed.federation.randomness import generator, isolated
from confed.privacy.cut import CutPrivacy, cut_privacy
from confed.release.probe import Estimate, Finding, Probe
from confed.release.probes.answers import NONE, OWN, defences, with_cost

HELD_OUT = 10  # every tenth example of the attacker's own decides when training stops
EXAMPLES, EPOCHS, STEPS = 200, 60, 200  # records looked at; of the decoder at most; of the search
MOST_OWN = 2000  # examples of the attacker's own
SEARCHED = 32  # examples whose inputs are searched for; the search runs the model hundreds of times
NOISES = (0.1, 1.0)


@dataclass(frozen=True)
class Decoder:
    """A network with one hidden layer from activations to inputs, both standardised."""

    network: nn.Sequential
    centre: Tensor
    scale: Tensor
    mean: Tensor
    spread: Tensor
    shape: tuple[int, ...]

    def __call__(self, v: Tensor) -> Tensor:
        """Inputs (B, ...) of activations (B, D)."""
        with torch.no_grad():
            rebuilt = self.network((v.float() - self.centre) / self.scale) * self.spread + self.mean
        return rebuilt.reshape(len(v), *self.shape)


def fit_decoder(
    v: Tensor, x: Tensor, rng: torch.Generator, *, hidden: int = 256, epochs: int = 60, batch_size: int = 64
) -> Decoder:
    """Trains a decoder on the attacker's own pairs; of all epochs the one with the least error on held-out pairs."""
    v, flat = v.detach().clone().float(), x.detach().clone().float().flatten(1)
    centre, scale, mean = v.mean(0), v.std(0).clamp_min(1e-6), flat.mean(0)
    spread = flat.std().clamp_min(1e-6)
    inputs, targets = (v - centre) / scale, (flat - mean) / spread
    held = torch.arange(len(v)) % HELD_OUT == 0
    fitting_rows = (~held).nonzero()[:, 0]
    with torch.inference_mode(False), torch.enable_grad(), isolated(int(torch.randint(2**31, (), generator=rng))):
        network = nn.Sequential(nn.Linear(v.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, flat.shape[1]))
        optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=1e-2, fused=True)
        best, least = copy.deepcopy(network), math.inf
        for _ in range(epochs):
            for rows in fitting_rows[torch.randperm(len(fitting_rows), generator=rng)].split(batch_size):
                optimizer.zero_grad()
                F.mse_loss(network(inputs[rows]), targets[rows]).backward()  # pyright: ignore
                optimizer.step()
            with torch.no_grad():
                error = float(F.mse_loss(network(inputs[held]), targets[held]))
            if error < least:
                best, least = copy.deepcopy(network), error
    return Decoder(best, centre, scale, mean, spread, tuple(x.shape[1:]))


def searched(
    known_layers: Callable[[Batch], Tensor],
    batch: Batch,
    target: Tensor,
    key: str,
    attacker_inputs: Tensor,
    *,
    steps: int = 200,
    lr: float = 0.05,
    prior: float = 1e-2,
) -> Tensor:
    """Searches for inputs whose activations are those that were seen; every example for itself."""
    attacker_inputs = attacker_inputs.detach().clone().float()
    mean, spread = mean_input(attacker_inputs), attacker_inputs.std(0).clamp_min(1e-6)
    low, high = attacker_inputs.amin(0), attacker_inputs.amax(0)
    present = (batch[key] != 0).any(-1, keepdim=True) if key == "regions" else torch.ones((), dtype=torch.bool)
    target = target.detach().clone().float()
    size = target.square().sum(1).clamp_min(1e-12)

    def inputs(z: Tensor) -> Tensor:
        return torch.clamp(mean + spread * z, low, high) * present

    with torch.inference_mode(False), torch.enable_grad():
        z = torch.zeros_like(batch[key], dtype=torch.float32).requires_grad_()
        best, least = inputs(z.detach()), torch.full((len(target),), math.inf)
        optimizer = torch.optim.Adam([z], lr=lr)
        for _ in range(steps + 1):
            x = inputs(z)
            fixed_columns = {name: column.clone() for name, column in batch.items() if name != key}
            far = (known_layers({**fixed_columns, key: x}).float() - target).square().sum(1) / size
            value = far + prior * z.square().flatten(1).mean(1)
            better = value.detach() < least
            least = torch.where(better, value.detach(), least)
            best = torch.where(better.reshape(-1, *[1] * (x.ndim - 1)), x.detach(), best)
            (z.grad,) = torch.autograd.grad(value.sum(), z)
            optimizer.step()
    return best


def fit_word_probe(v: Tensor, words: Tensor, decay: float = 1e-3) -> tuple[Linear, Tensor]:
    """A logistic regression per word, and in which share of the attacker's questions each word is, (V,)."""
    words = words.detach().clone().float()
    frequency = words.mean(0)

    def loss(scores: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(scores, words, reduction="sum") / len(words)

    return fit_linear(v, torch.logit(frequency, eps=1e-4), loss, decay), frequency


def questions_as_sets(text: Tensor, mask: Tensor, vocabulary: int, special: Tensor) -> Tensor:
    """Which words each question has, float32 (N, V); special tokens are no words."""
    is_word = mask.bool() & ~torch.isin(text, special)
    sets = torch.zeros(len(text), vocabulary + 1)
    sets.scatter_(1, torch.where(is_word, text, vocabulary), 1.0)
    return sets[:, :vocabulary]


def mean_input(inputs: Tensor) -> Tensor:
    """The mean of inputs; of regions over those that are there, as rows that are all zero are padding."""
    if inputs.ndim != 3:
        return inputs.mean(0)
    count = (inputs != 0).any(-1, keepdim=True).sum(0)
    return inputs.sum(0) / count.clamp_min(1)


def judge(rebuilt: Tensor, truth: Tensor, mean: Tensor) -> float:
    """Explained variance of reconstructions, 1 - error over the mean input's: 1 is a copy, 0 no better than it."""
    blind = mean.expand_as(truth)
    if truth.ndim == 3:  # regions, of which rows of zeros are padding
        present = (truth != 0).any(-1)
        rebuilt, truth, blind = (x[present] for x in (rebuilt, truth, blind))
    error, baseline = (float((x.double() - truth.double()).square().mean()) for x in (rebuilt, blind))
    return 1 - error / baseline if baseline > 0 else 0.0


def judge_words(scores: Tensor, words: Tensor, frequency: Tensor) -> tuple[float, int]:
    """Share of a question's k words among the k most probable, minus that among the k most frequent, and questions."""
    count = words.sum(1).long()
    has_words = count > 0
    if not bool(has_words.any()):
        return 0.0, 0

    def share(guesses: Tensor) -> float:
        order = guesses[has_words].argsort(dim=1, descending=True, stable=True)
        first = torch.arange(order.shape[1]) < count[has_words][:, None]
        hits = (words[has_words].gather(1, order) * first).sum(1)
        return float((hits / count[has_words]).mean())

    return share(scores) - share(frequency.expand_as(scores)), int(has_words.sum())


# The probe -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """Inputs, their activations and the words of their questions, first dimension N each."""

    batch: Batch
    inputs: Tensor
    v: Tensor
    words: Tensor


def pictures_of(table: Table, rows: Tensor) -> set[tuple[int, int]]:
    """The pictures of some rows: which table of pictures, and where in it."""
    return {(_store(table), picture) for picture in table.image_index[rows].flatten().tolist()}


def fresh(table: Table, seen: set[tuple[int, int]]) -> Tensor:
    """The rows of a table that are not about these pictures: clients may have questions about the same ones."""
    seen_pictures = torch.tensor([picture for store, picture in seen if store == _store(table)], dtype=torch.int64)
    apart = ~torch.isin(table.image_index, seen_pictures)
    return (apart if apart.ndim == 1 else apart.all(1)).nonzero()[:, 0]


def _store(table: Table) -> int:
    return id(table.images if table.regions is None else table.regions)


def _order(table: Table, seed: int, number: int) -> Tensor:
    return torch.randperm(len(table), generator=generator(seed, 0, str(number), "inverted examples"))


def _others(tables: Sequence[Table], seen: set[tuple[int, int]], seed: int) -> Batch:
    """The attacker's own examples, drawn without replacement, about as many from each table, as one batch."""
    share = -(-MOST_OWN // len(tables))
    parts: list[dict[str, Tensor]] = []
    for number, table in enumerate(tables, 1):
        order = _order(table, seed, number)
        parts.append(table.batch(order[torch.isin(order, fresh(table, seen))][:share]))
    return {key: column[:MOST_OWN] for key, column in joined_batches(parts).items()}


def _seen(case: Case, batch: Batch) -> _Seen:
    """A batch with what the attacker sees of it and wants to know of it."""
    _, special = ordinary_words(case.run_data.tokenizer)
    sets = questions_as_sets(batch["text"], batch["text_mask"], len(token_names(case.run_data.tokenizer)), special)
    activations: list[Tensor] = []
    with torch.no_grad():
        for i in range(0, len(batch["text"]), 256):
            activations.append(case.activations({key: tensor[i : i + 256] for key, tensor in batch.items()}))
    inputs = batch["regions"].float() if "regions" in batch else batch["image"]
    if not inputs.is_floating_point():  # pictures in [-1, 1]
        inputs = inputs.float() / 127.5 - 1
    return _Seen(batch, inputs, torch.cat(activations).float(), sets)


def _search(case: Case, theirs: _Seen, sent: Tensor, inputs: Tensor, privacy: CutPrivacy, steps: int) -> Tensor:
    """What a search in the input finds; ``inputs`` are some of the attacker's."""
    key = "regions" if "regions" in theirs.batch else "image"
    batch = {name: column[:SEARCHED] for name, column in theirs.batch.items()} | {key: theirs.inputs[:SEARCHED]}
    clipped, unused = CutPrivacy(clip=privacy.clip), torch.Generator()

    def activations(changed: Batch) -> Tensor:
        return clipped.activations(case.activations(changed), unused)

    return searched(activations, batch, sent[:SEARCHED], key, inputs, steps=steps)


def _look(case: Case, seconds: float) -> Finding:
    del seconds
    site, seed = case.sites[0], case.setup.seed
    case.load(case.released, site)
    table = case.table(site, TRAIN)
    chosen = _order(table, seed, 0)[:EXAMPLES]
    theirs = _seen(case, table.batch(chosen))
    others = [case.table(name, TRAIN) for name in case.sites if name != site] or [case.table(site, VALIDATION)]
    attacker_view = _seen(case, _others(others, pictures_of(table, chosen), seed))
    set_by_run = cut_privacy(case.algorithm)
    tried = {OWN: set_by_run}
    if set_by_run.off:
        tried = defences(float(attacker_view.v.norm(dim=1).median().clamp_min(1e-6)), NOISES)
        tried = {name: privacy for name, privacy in tried.items() if not privacy.distinct}
    measures: list[Estimate] = []
    mean = mean_input(attacker_view.inputs)
    for name, privacy in tried.items():
        rng = generator(seed, 0, site, f"inversion {name}")
        # The attacker knows the defence, and prepares with activations that are noised likewise.
        decoder_inputs, sent = privacy.activations(attacker_view.v, rng), privacy.activations(theirs.v, rng)
        rebuilt = fit_decoder(decoder_inputs, attacker_view.inputs, rng, epochs=EPOCHS)(sent)
        searched_for = _search(case, theirs, sent, attacker_view.inputs, privacy, STEPS)
        probe, frequency = fit_word_probe(decoder_inputs, attacker_view.words)
        gained, questions = judge_words(probe(sent), theirs.words, frequency)
        limit, defence = "cut" if name in (NONE, OWN) else "", with_cost(name, privacy.noise)
        for how, inputs in (("by a decoder", rebuilt), ("by search", searched_for)):
            title, count = f"inputs rebuilt {how}, variance explained, {defence}", len(inputs)
            explained = judge(inputs, theirs.inputs[:count], mean)
            measures.append(Estimate("cut_inputs", title, explained, chance=0.0, count=count, limit=limit))
        title = f"words of questions above the most frequent ones, {defence}"
        measures.append(Estimate("cut_words", title, gained, chance=0.0, count=questions, limit=limit))
    note = (
        "Explained: 1 - mean squared error over that of the mean input; 1 is a copy. The search takes the question as "
        f"known and is tried on {SEARCHED} records. Words: of a question's k distinct words, those among the k most "
        "probable. Rows without the run's defence show what others would do."
    )
    return Finding(measures, [note])


def _excluded(case: Case) -> str:
    if not case.algorithm.traits.splits:
        return f"{case.algorithm.title} has no cut"
    site, roles = case.sites[0], TRAIN if len(case.sites) > 1 else VALIDATION
    others = sum(len(case.table(name, roles)) for name in case.sites if name != site or len(case.sites) == 1)
    return "" if others >= 2 * HELD_OUT else f"the other sites have fewer than {2 * HELD_OUT} records to learn from"


PROBE = Probe(
    "inversion", "Inputs at the cut",
    "Is the main server; it knows the client's part of the model and has the other sites' records of other pictures.",
    _excluded, lambda case: 60.0, _look,
)  # fmt: skip
