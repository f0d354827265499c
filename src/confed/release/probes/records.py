r"""Membership of records: was this record among those that the model was trained on?

Offline likelihood ratios (Carlini, Chien, Nasr, Song, Terzis and Tramèr 2022, "Membership inference attacks from first
principles"). The run is trained again on random halves of every site's training records. With l a record's loss under
a model, phi = -log(exp(l) - 1), which is the logit of the right answer's probability where l is a cross-entropy. A
record's score is

    phi(released model) - mean of phi(models trained without the record),

with one spread for all records, which no ranking depends on; with few models that is steadier than a spread of each.
Records that never were trained on are given halves too, and only the same share of the models counts for them, so that
members and others are treated alike. Where a run takes too long for that: the threshold of the loss itself.
"""

import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from confed.federation.randomness import generator
from confed.release.case import TEST, TRAIN, Case, Rows
from confed.release.probe import Estimate, Finding, Probe
from confed.release.roc import Scored, curve_of
from confed.report.figures.style import Drawing, Palette, style_axes

LEAST_MODELS, MOST_MODELS = 8, 32
ENOUGH = 1500  # members and others, from which on figures at 1 % say something


def phi(losses: Tensor) -> Tensor:
    """The logit of exp(-loss); of what is no cross-entropy a monotone function all the same."""
    return -torch.log(torch.expm1(losses.clamp(1e-12, 600.0)))


def likelihood_scores(target: Tensor, models: Tensor, without: Tensor) -> Tensor:
    """Scores (N,) from phi of the released model (N,), of models (S, N), and who was trained without whom, bool (S, N).

    A record that every model was trained with has NaN.
    """
    return target - (models * without).sum(0) / without.sum(0)


def _look(case: Case, seconds: float) -> Finding:
    rows = {TRAIN: case.records(TRAIN), TEST: case.records(TEST)}
    began = time.perf_counter()
    scores = {role: phi(case.losses(case.released, rows[role], role)) for role in rows}
    each = case.training_seconds + time.perf_counter() - began
    count = min(MOST_MODELS, int(seconds / each) // 2 * 2) if case.replayed else 0
    how = f"Offline likelihood ratios from {count} runs on random halves (Carlini et al. 2022)."
    if count < LEAST_MODELS:
        how = f"Threshold of the loss, a weak attack: {LEAST_MODELS} runs of {each:.0f} s do not fit into the time."
    else:
        scores = _ratios(case, rows, scores, count)
    samples: list[Scored] = []
    for role, values in scores.items():
        finite = torch.isfinite(values).numpy()
        samples.append(Scored(values.numpy()[finite], case.groups(rows[role], role)[finite]))
    return finding_of(samples[0], samples[1], how, case.setup.seed)


def _ratios(case: Case, rows: Mapping[int, Rows], target: Mapping[int, Tensor], count: int) -> dict[int, Tensor]:
    """Scores of members and of others. Models come in pairs: what one is trained on the other is not."""
    phis: dict[int, list[Tensor]] = {TRAIN: [], TEST: []}
    without: dict[int, list[Tensor]] = {TRAIN: [], TEST: []}
    others = sum(map(len, rows[TEST].values()))
    for number in range(count):
        rng = generator(case.setup.seed, number // 2, "", "random halves")
        trained_on = {name: _half(len(everyone), number % 2, rng) for name, everyone in case.everything.items()}
        models = case.trained(trained_on)
        for role, of_role in rows.items():
            phis[role].append(phi(case.losses(models, of_role, role)))
        without[TRAIN].append(_left_out(case, rows[TRAIN], trained_on))
        without[TEST].append(~torch.isin(torch.arange(others), _half(others, number % 2, rng)))
    return {role: likelihood_scores(target[role], torch.stack(phis[role]), torch.stack(without[role])) for role in rows}


def _half(count: int, which: int, rng: torch.Generator) -> Tensor:
    """One half of so many numbers, or the other."""
    order, middle = torch.randperm(count, generator=rng), (count + 1) // 2
    return (order[middle:] if which else order[:middle]).sort().values


def _left_out(case: Case, rows: Rows, trained_on: Rows) -> Tensor:
    """Whether each record was not trained on; the one party of a pooled run has the sites' records in their order."""
    parts: list[Tensor] = []
    offset = 0
    for site in case.sites:
        kept = trained_on[site] if site in trained_on else next(iter(trained_on.values())) - offset
        if site in rows:
            parts.append(~torch.isin(rows[site], kept))
        offset += len(case.table(site, TRAIN))
    return torch.cat(parts)


def finding_of(members: Scored, others: Scored, how: str, seed: int = 0) -> Finding:
    """The attack's figures: higher scores mean members."""
    curve, count = curve_of(members, others, seed), len(members.scores)
    title = "members told from others, AUC"
    measures = [Estimate("membership_auc", title, *curve.auc, 0.5, curve.p, count, "membership_auc")]
    for share, triple in curve.rates.items():
        title, limit = f"members named at {share:.1%} false alarms", "membership_tpr" if share == 0.01 else ""
        measures.append(Estimate(f"membership_tpr_{share:g}", title, *triple, share, None, count, limit))
    title, certainty = "the member that stands out most, standard deviations of the others", outlying(members, others)
    measures.append(Estimate("membership_most", title, *certainty, count))
    notes = [how, f"{count} members, {len(others.scores)} others: the sites' test records, taken to be drawn alike."]
    if min(count, len(others.scores)) < ENOUGH:
        notes.append(f"Fewer than {ENOUGH} of each: what happens at 1 % and below is known roughly.")
    return Finding(measures, notes, (_drawing(members.scores, others.scores),))


def outlying(members: Scored, others: Scored) -> tuple[float, None, None, None, float]:
    """How far the largest score of a member is from the others' mean, in their deviations, and its p-value.

    The others' scores are taken to be of Student's t with their excess kurtosis, and the p-value is times the number of
    members (Bonferroni).
    """
    from scipy.stats import kurtosis, t

    heavy = max(float(kurtosis(others.scores)), 0.0)
    freedom = 4 + 6 / heavy if heavy > 0 else 1e6
    largest = float((members.scores.max() - others.scores.mean()) / others.scores.std())
    tail = t.sf(largest * np.sqrt(freedom / (freedom - 2)), freedom)
    return largest, None, None, None, min(1.0, float(tail) * len(members.scores))


def _drawing(members: np.ndarray, others: np.ndarray) -> Drawing:
    """ROC curve with logarithmic axes."""
    from matplotlib.figure import Figure

    thresholds = np.sort(np.concatenate([members, others]))[::-1]
    alarms, named = ((values[:, None] >= thresholds).mean(0) for values in (others, members))

    def draw(figure: Figure, palette: Palette) -> None:
        axes, least = figure.add_subplot(), 0.5 / len(others)
        axes.loglog(alarms.clip(least), named.clip(least), color=palette("m1"), linewidth=1.6)
        axes.loglog([least, 1], [least, 1], color=palette("muted"), linewidth=1, linestyle=":")
        ticks = [tick for tick in (0.001, 0.01, 0.1, 1.0) if tick >= least]
        axes.set_xticks(ticks, [f"{tick:.1%}" for tick in ticks])
        axes.set_yticks(ticks, [f"{tick:.1%}" for tick in ticks])
        style_axes(axes, palette, "", "others named wrongly (dotted: guessing)", "members named")

    return Drawing("membership", 5.2, 3.4, draw)


PROBE = Probe(
    "records", "Membership of records", "Has the released model and a record, and can train models on like data.",
    lambda case: case.unasked, lambda case: 2.0, _look,
)  # fmt: skip
