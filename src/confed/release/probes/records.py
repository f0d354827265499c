r"""Membership of records: was this record among those that the model was trained on?

Offline likelihood ratios (Carlini, Chien, Nasr, Song, Terzis and Tramèr 2022, "Membership inference attacks from first
principles"). The run is trained again on random halves of every site's training records. With l a record's loss under
a model, phi = -log(exp(l) - 1), which is the logit of the right answer's probability where l is a cross-entropy. A
record's score is

    phi(released model) - mean of phi(models trained without the record),

with one spread for all records, which no ranking depends on; with few models that is steadier than a spread of each.
Records that never were trained on are given halves too, and only the same share of the models counts for them, so that
members and others are treated alike.

Where a run takes too long for that, the threshold of the loss itself (:mod:`confed.attacks.membership`).
"""

import time

import numpy as np
import torch
from torch import Tensor

from confed.federation.randomness import generator
from confed.release.case import TEST, TRAIN, Case
from confed.release.probe import Finding, Measured, Probe
from confed.release.roc import Scored, curve_of

LEAST_MODELS, MOST_MODELS = 8, 32
ENOUGH = 1500  # members and others, from which on figures at 1 % say something


def phi(losses: Tensor) -> Tensor:
    """The logit of exp(-loss); of what is no cross-entropy a monotone function all the same."""
    return -torch.log(torch.expm1(losses.clamp(1e-12, 600.0)))


def likelihood_scores(target: Tensor, models: Tensor, without: Tensor) -> Tensor:
    """Scores (N,) from phi of the released model (N,), of models (S, N), and who was trained without whom, bool (S, N).

    A record that every model was trained with has NaN.
    """
    count = without.sum(0)
    mean = (models * without).sum(0) / count
    return target - mean


def _look(case: Case, seconds: float) -> Finding:
    rows, other_rows = case.records(TRAIN), case.records(TEST)
    began = time.perf_counter()
    target = phi(case.losses(case.released, rows, TRAIN)), phi(case.losses(case.released, other_rows, TEST))
    each = case.training_seconds + time.perf_counter() - began
    count = min(MOST_MODELS, int(seconds / each) // 2 * 2) if case.replayed else 0
    groups = case.groups(rows, TRAIN), case.groups(other_rows, TEST)
    if count < LEAST_MODELS:
        scores = target
        how = (
            "Threshold of the loss (Yeom et al. 2018): training again was too long for likelihood ratios "
            f"(at least {LEAST_MODELS} runs of {each:.0f} s). A weak attack: more may be possible."
        )
    else:
        scores = _ratios(case, rows, other_rows, target, count)
        how = f"Offline likelihood ratios from {count} runs on random halves (Carlini et al. 2022)."
    kept = [torch.isfinite(values) for values in scores]
    members, others = (
        Scored(values[finite].numpy(), group[finite.numpy()])
        for values, finite, group in zip(scores, kept, groups, strict=True)
    )
    return finding_of(members, others, how, case.setup.seed)


def _ratios(
    case: Case, rows: dict[str, Tensor], other_rows: dict[str, Tensor], target: tuple[Tensor, Tensor], count: int
) -> tuple[Tensor, Tensor]:
    """Scores of members and of others. Models come in pairs: what one is trained on the other is not."""
    phis: tuple[list[Tensor], list[Tensor]] = ([], [])
    without: tuple[list[Tensor], list[Tensor]] = ([], [])
    for number in range(count):
        rng = generator(case.setup.seed, number // 2, "", "random halves")
        trained_on = {name: _half(len(everyone), number % 2, rng) for name, everyone in case.everything.items()}
        models = case.trained(trained_on)
        phis[0].append(phi(case.losses(models, rows, TRAIN)))
        phis[1].append(phi(case.losses(models, other_rows, TEST)))
        without[0].append(_left_out(case, rows, trained_on))
        others = sum(map(len, other_rows.values()))
        held = torch.ones(others, dtype=torch.bool)
        held[_half(others, number % 2, rng)] = False
        without[1].append(held)
    members, others = (
        likelihood_scores(of_target, torch.stack(of_models), torch.stack(left_out))
        for of_target, of_models, left_out in zip(target, phis, without, strict=True)
    )
    return members, others


def _half(count: int, which: int, rng: torch.Generator) -> Tensor:
    """One half of so many numbers, or the other."""
    order = torch.randperm(count, generator=rng)
    return (order[: (count + 1) // 2] if which == 0 else order[(count + 1) // 2 :]).sort().values


def _left_out(case: Case, rows: dict[str, Tensor], trained_on: dict[str, Tensor]) -> Tensor:
    """Whether each record was not trained on; the one party of a pooled run has the sites' records in their order."""
    parts: list[Tensor] = []
    offset = 0
    for site in case.sites:
        pooled = site not in trained_on
        kept = next(iter(trained_on.values())) - offset if pooled else trained_on[site]
        if site in rows:
            parts.append(~torch.isin(rows[site], kept))
        offset += len(case.table(site, TRAIN)) if pooled else 0
    return torch.cat(parts)


def finding_of(members: Scored, others: Scored, how: str, seed: int = 0) -> Finding:
    """The attack's figures: higher scores mean members."""
    curve = curve_of(members, others, seed)
    count = len(members.scores)
    measures = [
        Measured(
            "membership_auc",
            "members told from others, AUC",
            curve.auc,
            curve.auc_low,
            curve.auc_high,
            0.5,
            curve.p,
            count,
            "membership_auc",
        )  # fmt: skip
    ]
    for share, (rate, low, high) in curve.rates.items():
        limit = "membership_tpr" if share == 0.01 else ""
        name = f"membership_tpr_{share:g}"
        title = f"members named at {share:.1%} false alarms"
        measures.append(Measured(name, title, rate, low, high, share, None, count, limit))
    notes = [how, f"{count} members, {len(others.scores)} others; intervals keep records of one picture together."]
    if min(count, len(others.scores)) < ENOUGH:
        notes.append(f"Fewer than {ENOUGH} of each: what happens at 1 % and below is known roughly.")
    notes.append("Others are the sites' test records; had they been drawn otherwise than training records, part of the "
                 "difference would be of that.")  # fmt: skip
    return Finding(measures, notes, (_drawing(members.scores, others.scores),))


def _drawing(members: np.ndarray, others: np.ndarray):
    """ROC curve with logarithmic axes."""
    from confed.report.figures.style import Drawing, style_axes

    thresholds = np.sort(np.concatenate([members, others]))[::-1]
    alarms = np.searchsorted(np.sort(-others), -thresholds, "right") / len(others)
    found = np.searchsorted(np.sort(-members), -thresholds, "right") / len(members)

    def draw(figure, palette) -> None:
        axes = figure.add_subplot()
        least = 0.5 / len(others)
        axes.plot(alarms.clip(least), found.clip(least), color=palette("m1"), linewidth=1.6)
        axes.plot([least, 1], [least, 1], color=palette("muted"), linewidth=1, linestyle=":")
        axes.set_xscale("log")
        axes.set_yscale("log")
        style_axes(axes, palette, "", "others named wrongly (dotted: guessing)", "members named")

    return Drawing("membership", 5.2, 3.4, draw)


PROBE = Probe(
    "records",
    "Membership of records",
    "Has the released model and a record, and can train models on like data.",
    lambda case: case.unasked,
    lambda case: 2.0,
    _look,
)
