"""Caveats of a comparison of methods, in sentences: what may be claimed and what not."""

from collections.abc import Sequence

from confed.metrics.statistics import smallest_p
from confed.report.statistics.paired import LEVEL, MEASURES, MIN_SEEDS, Difference, Methods
from confed.report.tables.labels import without_positives
from confed.results import format as formats
from confed.results.deployed import deployed_note, is_shown, personal_note
from confed.results.headline import is_bound, is_labelled
from confed.results.settings import tuning_note

__all__ = ["remarks", "table_remarks"]


def remarks(found: Sequence[Difference], methods: Methods) -> list[str]:
    """Caveats of differences between methods, common to all tables.

    Args:
        found: the differences.
        methods: what was compared.
    """
    said = [*_on_seeds(found), *_on_examples(found), *_on_refusals(found, methods)]
    return [*said, *_on_methods(methods), *_on_tuning(methods)]


def table_remarks(found: Sequence[Difference], pairs: Sequence[Difference], margin: float) -> list[str]:
    """Caveats of one table of differences: its tests of equivalence, and the family of Holm's correction.

    Args:
        found: the differences.
        pairs: all pairs of methods, of all measures.
        margin: of the tests of equivalence, a fraction.
    """
    return [*_on_margin(found, margin), *_on_families(pairs)]


def _on_tuning(methods: Methods) -> list[str]:
    """The tuned values, in which methods may differ beside their algorithms."""
    note = tuning_note([next(iter(runs.values())) for runs in methods.values()])
    return [f"{note} A difference between methods includes that of their tuned values."] if note else []


def _on_seeds(found: Sequence[Difference]) -> list[str]:
    """Caveats of tests over seeds."""
    if not found:
        return ["No method shares a seed and a measure with the reference: nothing can be compared."]
    least, most = (choose(len(d.seeds) for d in found) for choose in (min, max))
    if most < 2:
        return ["One seed in common: nothing can be said about other seeds."]
    seeds = f"{most}" if least == most else f"{least} to {most}"
    lines = [
        f"Over seeds: paired t-test over {seeds} seeds. A test of signs or ranks over {most} seeds cannot give "
        f"a p-value below {smallest_p(most):.4g}."
    ]
    if least < MIN_SEEDS:
        few = least if most >= MIN_SEEDS else seeds
        lines.append(
            f"With {few} seeds no significance is claimed at the level of seeds (that takes {MIN_SEEDS}); "
            "intervals and p-values over seeds are for orientation."
        )
    if any(d.over_seeds and not d.over_seeds.sd for d in found):
        lines.append(
            "Where all seeds show the same difference there is no spread: the interval is a point, there are no "
            "p-values over seeds, and Holm's correction is without that row."
        )
    if most >= MIN_SEEDS:
        lines.append(f"* p-value over seeds at most {LEVEL} after Holm's correction.")
    return lines


def _on_margin(found: Sequence[Difference], margin: float) -> list[str]:
    """Interpretation of the tests of equivalence."""
    if not any(d.equivalence for d in found):
        return []
    points = f"{100 * margin:g} point" + ("" if margin == 0.01 else "s")
    return [
        f"Margin: two one-sided t-tests over seeds (TOST). A small p says that the method loses less than {points} "
        f"(no worse), or differs by less than {points} either way (equal). A large p shows nothing: a difference "
        "that is not significant is not equality."
    ]


def _on_examples(found: Sequence[Difference]) -> list[str]:
    """Caveats of tests over examples."""
    resampled = [d for d in found if d.over_examples]
    if not resampled:
        # Reasons for single pairs are said one by one.
        unsaid = bool(found) and not all(d.refused or d.unpaired for d in found)
        return ["No tests over examples: predictions of both methods on the same examples are missing."] * unsaid
    means = [d for d in resampled if d.signs]
    line = "Over examples: these trained models on this test data; it says nothing about other seeds."
    if means:
        line += (
            " p is of sign flips within clients, and the interval holds what they do not reject; clients are averaged "
            "as in the values, and an example counts once, with its mean over seeds."
        )
    if len(means) < len(resampled):
        line += " C-AP and O-F1 are of all examples together; their p and interval are of a bootstrap over them."
    bound = max((d.signs.smallest_p for d in means if d.signs and d.signs.won + d.signs.lost), default=0.0)
    return [line + (f" Sign flips cannot give a p-value below {bound:.2g} in some rows." if bound > 1e-4 else "")]


def _on_refusals(found: Sequence[Difference], methods: Methods) -> list[str]:
    """Pairs that were not tested, or not over examples, with reasons: one sentence per pair and reason."""
    lines: list[str] = []
    for words, read in (("Not tested", _refused), ("No tests over examples", _unpaired)):
        pairs: dict[tuple[str, str, str], list[str]] = {}
        for d in found:
            if reason := read(d):
                pairs.setdefault((d.method, d.reference, reason), []).append(MEASURES[d.measure].words)
        for (method, reference, reason), measures in pairs.items():
            a, b = (next(iter(methods[name].values())).label for name in (method, reference))
            lines.append(f"{words}: {a} against {b} ({', '.join(measures)}): {reason}.")
    return lines


def _refused(difference: Difference) -> str:
    return difference.refused


def _unpaired(difference: Difference) -> str:
    return difference.unpaired


def _on_families(pairs: Sequence[Difference]) -> list[str]:
    """Note on multiple comparisons: the size of Holm's families."""
    most = max((sum(pair.measure == measure for pair in pairs) for measure in MEASURES), default=0)
    if most < 2:
        return []
    return [
        f"p-values are corrected by Holm's procedure over all pairs of methods on a measure, up to {most}, whichever "
        "of them a table shows: a pair has the same p-value in every table."
    ]


def _on_methods(methods: Methods) -> list[str]:
    """Deployed models, and rows that are bounds."""
    shown = {run.label: run.summary for runs in methods.values() for run in [*runs.values()][:1]}
    lines = [deployed_note(shown)] if all(map(is_shown, shown.values())) else []
    lines += filter(None, [personal_note(shown)])
    labelled = [s["multilabel"] for s in shown.values() if is_labelled(s)]
    lines += without_positives([(m, m.get(m.get("headline", ""))) for m in labelled])
    firsts = [next(iter(runs.values())) for runs in methods.values()]
    bounds = [run.label for run in firsts if is_bound(run.summary)]
    if bounds:
        lines.append(f"{formats.names(bounds)}: all data in one place, a bound and not a federated method.")
    return lines
