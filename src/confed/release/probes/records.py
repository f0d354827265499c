r"""Membership of records: was this record among those that the model was trained on?

**Likelihood ratios** (Carlini, Chien, Nasr, Song, Terzis and Tramèr 2022, "Membership inference attacks from first
principles", offline). The run is trained again on random halves of every site's training records. With l a record's
loss under a model, phi = -log(exp(l) - 1), which is the logit of the right answer's probability where l is a
cross-entropy. A record's score is

    phi(released model) - mean of phi(models trained without the record),

with one spread for all records, which no ranking depends on; with few models that is steadier than a spread of each.
Records that never were trained on are given halves too, and only the same share of the models counts for them, so that
members and others are treated alike.

**Canaries in one run** (Steinke, Nasr and Jagielski 2023, :mod:`confed.privacy.audit`). Of half of the records, drawn
at random, each gets another answer, or other words, and takes part with probability 1/2; the run is trained once, and
the attacker names those with the smallest losses. Canaries in and out differ by a coin only, so that nothing need be
known of what a loss would be without training. Where likelihood ratios take too long these figures stand for them;
where canaries do not fit into the time either: the threshold of the loss, under which "within" counts as not settled.

**A repeated record**: the one of which a site has most copies, against :data:`ALONE` runs that have all other records
and none of these, with other seeds: phi of a model that had none would be one more draw. Asked are the released model
and, where a server sees them, the site's updates, which the mean over sites has not yet washed out: the mean of phi
over the rounds, which scatters less than phi of any one of them.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from confed.analysis.case import TEST, TRAIN, Case, Models, Rows, sent_model, with_other_words
from confed.data.table import Table
from confed.federation.messages import Call, Reply
from confed.federation.randomness import derive, generator
from confed.privacy.audit import audited_epsilon
from confed.release.probe import Estimate, Finding, Probe
from confed.release.roc import Scored, curve_of
from confed.report.figures.style import Drawing, Palette, style_axes

LEAST_MODELS, MOST_MODELS = 8, 32
ALONE = 12  # runs without a repeated record; one more has it
MOST_CANARIES, LEAST_CANARIES, DELTA = 1000, 20, 1e-5
ENOUGH = 1500  # members and others, from which on figures at 1 % say something


def phi(losses: Tensor) -> Tensor:
    """The logit of exp(-loss); of what is no cross-entropy a monotone function all the same."""
    return -torch.log(torch.expm1(losses.clamp(1e-12, 600.0)))


def likelihood_scores(target: Tensor, models: Tensor, without: Tensor) -> Tensor:
    """Scores (N,) from phi of the released model (N,), of models (S, N), and who was trained without whom (S, N)."""
    return target - (models * without).sum(0) / without.sum(0)


def _look(case: Case, seconds: float) -> Finding:
    began = time.perf_counter()
    case.losses(case.released, case.records(TRAIN), TRAIN)
    each = case.training_seconds + time.perf_counter() - began
    runs = int(seconds / each) if case.replayed else 0
    most = most_repeated(case) if runs > ALONE else None
    runs -= 0 if most is None else ALONE + 1
    unplanted = no_canaries(case)
    with_ratios = not case.unasked and runs - 1 >= LEAST_MODELS
    findings: list[Finding] = []
    if not case.unasked:
        planted_instead = runs >= 1 and not unplanted
        count = min(MOST_MODELS, (runs - 1) // 2 * 2) if with_ratios else 0
        findings.append(_released(case, count, "" if planted_instead and not with_ratios else "membership"))
    if runs >= 1 and not unplanted:
        findings.append(canary_figures(case, "" if with_ratios else "membership"))
    else:
        why = unplanted or f"one more run of {each:.0f} s does not fit into the time"
        findings.append(Finding([], [f"No canaries were planted: {why}."]))
    if most is not None:
        findings.append(RepeatedRecord(case, *most).finding(case.everything))
    measures, notes, drawings = list[Estimate](), list[str](), list[Drawing]()
    for finding in findings:
        measures += finding.measures
        notes += finding.notes
        drawings += finding.drawings
    return Finding(measures, notes, drawings)


def _released(case: Case, count: int, limits: str) -> Finding:
    """The released model's records against test records: ratios to so many models, or the threshold of the loss."""
    rows = {TRAIN: case.records(TRAIN), TEST: case.records(TEST)}
    scores = {role: phi(case.losses(case.released, rows[role], role)) for role in rows}
    how = f"Offline likelihood ratios from {count} runs on random halves (Carlini et al. 2022)."
    if count:
        scores = _ratios(case, rows, scores, count)
    else:
        how = f"Threshold of the loss, a weak attack: {LEAST_MODELS} runs on random halves do not fit into the time."
    samples: list[Scored] = []
    for role, values in scores.items():
        finite = torch.isfinite(values).numpy()
        samples.append(Scored(values.numpy()[finite], case.groups(rows[role], role)[finite]))
    return finding_of(samples[0], samples[1], how, case.setup.seed, limits, weak=not count)


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


def finding_of(
    members: Scored, others: Scored, how: str, seed: int = 0, limits: str = "membership", weak: bool = False
) -> Finding:
    """The attack's figures: higher scores mean members."""
    count = len(members.scores)
    measures = [replace(measured, weak=weak) for measured in _curve(members, others, "membership", seed, limits)]
    title, certainty = "the member that stands out most, standard deviations of the others", outlying(members, others)
    measures.append(Estimate("membership_most", title, *certainty, count))
    notes = [how, f"{count} members, {len(others.scores)} others: the sites' test records, taken to be drawn alike."]
    if min(count, len(others.scores)) < ENOUGH:
        notes.append(f"Fewer than {ENOUGH} of each: what happens at 1 % and below is known roughly.")
    return Finding(measures, notes, (_drawing(members.scores, others.scores),))


def _curve(members: Scored, others: Scored, name: str, seed: int, limits: str) -> list[Estimate]:
    """Area under the curve and shares of members that are named."""
    curve, count = curve_of(members, others, seed), len(members.scores)
    who = {"membership": "members", "canaries": "canaries"}[name]
    limit = f"{limits}_auc" if limits else ""
    measures = [Estimate(f"{name}_auc", f"{who} told from others, AUC", *curve.auc, 0.5, curve.p, count, limit)]
    for share, triple in curve.rates.items():
        limit = f"{limits}_tpr" if limits and share == 0.01 else ""
        title = f"{who} named at {share:.1%} false alarms"
        measures.append(Estimate(f"{name}_tpr_{share:g}", title, *triple, share, None, count, limit))
    return measures


# Canaries in one run ------------------------------------------------------------------------------------------


def no_canaries(case: Case) -> str:
    """Why no canaries can be planted in a run like this one, as the end of a sentence; "" where they can."""
    if case.algorithm.traits.centralised:
        return "all records are in one place"
    for site in case.sites:
        table = case.table(site, TRAIN)
        if table.targets is not None and not case.writes:
            return "several people answered each question, so a wrong answer is none of one's own"
        if case.answer_column not in table.columns:
            return "records have no single answer or text that could be another"
    total = sum(len(case.table(site, TRAIN)) for site in case.sites)
    return "" if total >= 2 * LEAST_CANARIES else f"there are fewer than {2 * LEAST_CANARIES} records"


def _with_other_answers(table: Table, rows: Tensor, column: str, classes: int, rng: torch.Generator) -> Table:
    """The same records, some with an answer that is not theirs, or with words of other records in their text."""
    changed = table.columns[column].clone()
    if column == "label":
        changed[rows] = (changed[rows] + torch.randint(1, classes, (len(rows),), generator=rng)) % classes
    else:
        words = changed[..., 1:]
        changed[rows] = with_other_words(changed[rows], words[words != 0], rng)
    return replace(table, columns={**table.columns, column: changed})


def planted(case: Case) -> tuple[dict[str, Table], dict[str, Tensor], dict[str, Tensor]]:
    """Records with canaries among them, rows that are canaries, and whether each of these takes part, bool."""
    total = sum(len(case.table(site, TRAIN)) for site in case.sites)
    share = min(0.5, MOST_CANARIES / total)
    tables, rows, taken = dict[str, Table](), dict[str, Tensor](), dict[str, Tensor]()
    for site in case.sites:
        table, rng = case.table(site, TRAIN), generator(case.setup.seed, 0, site, "canaries")
        chosen = torch.randperm(len(table), generator=rng)[: round(share * len(table))].sort().values
        if "label" in table.columns:
            chosen = chosen[table.columns["label"][chosen] >= 0]
        rows[site] = chosen
        taken[site] = torch.rand(len(chosen), generator=rng) < 0.5
        tables[site] = _with_other_answers(table, chosen, case.answer_column, case.classes, rng)
    return tables, rows, taken


def canary_figures(case: Case, limits: str) -> Finding:
    """Canaries told from others by a run with half of them, and the least epsilon that this shows."""
    tables, rows, taken = planted(case)
    trained_on: dict[str, Tensor] = {}
    for site, everyone in case.everything.items():
        trained_on[site] = everyone[~torch.isin(everyone, rows[site][~taken[site]])]
    models = case.trained(trained_on, tables)
    scores = -case.learnt_losses(models, rows, tables).numpy()
    took_part, groups = torch.cat(list(taken.values())).numpy(), case.groups(rows, TRAIN)
    members, others = (Scored(scores[mask], groups[mask]) for mask in (took_part, ~took_part))
    measures = _curve(members, others, "canaries", case.setup.seed, limits)
    privacy = case.algorithm.record_privacy
    delta = DELTA if privacy is None else privacy.delta
    guesses, order = len(scores) // 4, np.argsort(scores)
    correct = int(took_part[order[-guesses:]].sum()) + int((~took_part[order[:guesses]]).sum())
    least = audited_epsilon(correct, 2 * guesses, len(scores), delta)
    measures.append(Estimate("canaries_epsilon", "ε per record, at least (95 %)", least, count=len(scores)))
    words = (
        f"Canaries in one run (Steinke et al. 2023): {len(scores)} records with another answer or other words, each in "
        f"training with probability 1/2; {correct} of {2 * guesses} guesses are right, δ = {delta:g}. They are harder "
        "to learn than the sites' records, so that these figures are rather those of the most exposed ones."
    )
    return Finding(measures, [words])


# A repeated record --------------------------------------------------------------------------------------------


def most_repeated(case: Case) -> tuple[str, Tensor] | None:
    """Site and rows of the record, or text to write, of which a site has most copies; None where each is there once."""
    if case.algorithm.traits.centralised:
        return None
    best: tuple[str, Tensor] | None = None
    for site in case.sites:
        rows_of: dict[bytes, list[int]] = {}
        for row, content in enumerate(_contents(case, site)):
            rows_of.setdefault(content, []).append(row)
        most = max(rows_of.values(), key=len, default=[])
        if len(most) > (1 if best is None else len(best[1])):
            best = site, torch.tensor(most)
    return best


def _contents(case: Case, site: str) -> Iterator[bytes]:
    """Digest of every training record of a site, or of its text where models write."""
    if case.writes:
        yield from (text.tobytes() for text in case.texts(site).numpy())
        return
    for batch in case.table(site, TRAIN).batches(256):
        columns = [column.numpy() for name, column in sorted(batch.items()) if name != "index"]
        for number in range(len(batch["index"])):
            yield blake2b(b"".join(column[number].tobytes() for column in columns)).digest()


def memory_of(known: float, without: Sequence[float], copies: int, name: str, how: str) -> Estimate:
    """Bits by which a record is better known than in trainings without it, with Student's t."""
    from scipy.stats import t

    error = max(float(np.std(without, ddof=1)) * math.sqrt(1 + 1 / len(without)), 1e-9)
    gained, reach = known - float(np.mean(without)), float(t.ppf(0.975, len(without) - 1)) * error
    p = float(t.sf(gained / error, len(without) - 1))
    bits = [value / math.log(2) for value in (gained, gained - reach, gained + reach)]
    title = f"a record that is there {copies} times, bits by which {how} better than without it"
    return Estimate(name, title, bits[0], bits[1], bits[2], 0.0, p, copies, "repeated_record")


class RepeatedRecord:
    """A record with copies at a site, and what trainings know of it: their released models, and the site's updates."""

    def __init__(self, case: Case, site: str, copies: Tensor) -> None:
        self._case, self._site, self._copies = case, site, copies
        self.kept = {**case.everything, site: case.everything[site][~torch.isin(case.everything[site], copies)]}
        self._sees_updates = case.algorithm.global_model == "alone" and not case.algorithm.traits.changes
        self._sees_updates &= not case.unseen_updates

    def _known(self, models: Models) -> float:
        return float(phi(self._case.learnt_losses(models, {self._site: self._copies[:1]})))

    def _training(self, trained_on: Rows, seed: int | None = None) -> tuple[float, float]:
        """Phi under the models of a training, and under the site's as it sent them, the mean over rounds."""
        sent: list[float] = []

        def listen(call: Call, reply: Reply) -> None:
            if self._sees_updates and call.client.id == self._site:
                sent.append(self._known(sent_model(call, reply)))

        models = self._case.trained(trained_on, seed=seed, listener=listen)
        return self._known(models), float(np.mean(sent)) if sent else math.nan

    @cached_property
    def _without(self) -> list[tuple[float, float]]:
        seeds = [derive(self._case.setup.seed, n, self._site, "without a repeated record") for n in range(ALONE)]
        return [self._training(self.kept, seed) for seed in seeds]

    def finding(self, trained_on: Rows) -> Finding:
        """The record in the released model, which was trained on these records, and in the site's updates."""
        by_model, by_updates = zip(*self._without, strict=True)
        released, copies = self._known(self._case.released), len(self._copies)
        measures = [memory_of(released, by_model, copies, "repeated_record", "the released model knows it")]
        sent = self._training(trained_on)[1] if self._sees_updates else math.nan
        if np.isfinite([sent, *by_updates]).all():
            how = "the site's updates know it, mean over rounds,"
            measures.append(memory_of(sent, by_updates, copies, "repeated_record_sent", how))
        words = "Of the repeated record the attacker is taken to have all others, as privacy per record supposes."
        return Finding(measures, [words])


# Figures ------------------------------------------------------------------------------------------------------


def outlying(members: Scored, others: Scored) -> tuple[float, None, None, None, float]:
    """How far the largest member's score is from the others' mean, in deviations; its p-value by Student's t."""
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


def _excluded(case: Case) -> str:
    return case.unasked if no_canaries(case) else ""


PROBE = Probe(
    "records", "Membership of records", "Has the released model and a record, and can train models on like data.",
    _excluded, lambda case: 2.0, _look,
)  # fmt: skip
