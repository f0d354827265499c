"""HTML gallery of multi-label samples: labels, predictions and attention of each label."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from confed.report.html.gallery import ImageStore, attention_overlay
from confed.report.html.page import Tabs
from confed.results.headline import is_bound
from confed.results.runs import Study, number

__all__ = ["attention", "bar", "gallery", "words"]

_STRIP = 6
"""Labels whose attention is drawn below an example."""

Sample = Mapping[str, Any]


def gallery(study: Study, tabs: Tabs, store: ImageStore) -> str:
    """Cards of all samples, one tab per method, and first a table of all methods.

    Args:
        study: gives the samples of each method's first seed.
        tabs: makes the tabs.
        store: takes the pictures; its rules must be put into the page.

    Returns:
        HTML, empty if there are no samples.
    """
    found = {m: next((own for run in study.of(m) if (own := _labelled(run.gallery()))), []) for m in study.methods}
    found = {m: own for m, own in found.items() if own}
    if not found:
        return ""
    panels = [
        (study.labels[m], f'<div class="cards labels">{"".join(_card(sample, store) for sample in own)}</div>')
        for m, own in found.items()
    ]
    attends = any(_strips(sample) for own in found.values() for sample in own)
    note = (
        "<p class=muted>"
        "<span class=right>✓ label</span> is there and predicted, <span class=wrong>✗ label</span> is predicted and "
        "not there, <span class=missed>label</span> is there and missed; the others are neither. The line in a bar is "
        "the probability from which on a label is predicted."
        + (" Below the first example of each place: how much each label looked at each part of it." if attends else "")
        + "</p>"
    )
    if len(panels) == 1:
        return note + tabs(panels)
    first = next((i for i, m in enumerate(found) if not is_bound(study.of(m)[0].summary)), 0)
    return note + tabs([("All methods", _glance(study, found, store)), *panels], 1 + first)


def bar(label: str, probability: float, threshold: float, there: bool | None, beside: str = "") -> str:
    """A label as a row: its name, marked right or wrong where the truth is known, and its probability as a bar.

    Args:
        label: the name.
        probability: in [0, 1].
        threshold: from which probability on it is predicted.
        there: whether it is there; None if unknown.
        beside: HTML of a further cell.
    """
    predicted = probability >= threshold
    name = escape(label)
    if there is not None and predicted:
        name = f"<span class={'right' if there else 'wrong'}>{'✓' if there else '✗'} {name}</span>"
    elif there:
        name = f"<span class=missed>{name}</span>"
    elif predicted:
        name = f"<b>{name}</b>"
    width = 100 * min(max(probability, 0.0), 1.0)
    inner = f'<i style="width:{width:.0f}%"></i><em style="left:{100 * threshold:.0f}%"></em>'
    return f"<tr><td>{name}</td><td><div class=share>{inner}</div></td><td>{_percent(probability)}</td>{beside}</tr>"


def attention(picture: str, weights: object, size: str = "p112") -> str:
    """A picture under the attention of one label; nothing without a usable map.

    Args:
        picture: its CSS class.
        weights: (rows, columns), maximum 1.
        size: CSS class of its extent.
    """
    layer = attention_overlay(weights)
    return f'<div class="picture {size} {picture}">{layer}</div>' if layer and picture else ""


def words(tokens: Sequence[str], weights: Sequence[float]) -> str:
    """A text whose words are shaded by attention; marks of beginning and end are left out.

    Args:
        tokens: L tokens; one that begins with ## belongs to the word before it.
        weights: L, maximum 1.
    """
    cells = ""
    for token, weight in zip(tokens, weights, strict=False):
        if token in ("[CLS]", "[SEP]", "[PAD]"):
            continue
        text = "(unknown)" if token == "[UNK]" else token.removeprefix("##")
        gap = "" if token.startswith("##") or not cells else " "
        cells += f'{gap}<span style="background:rgb(var(--heat) / {0.6 * min(max(weight, 0.0), 1.0):.2f})">'
        cells += f"{escape(text)}</span>"
    return f"<span class=words>{cells}</span>"


def _labelled(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if isinstance(sample.get("labels"), list)]


def _views(sample: Sample) -> list[tuple[str, Sample]]:
    return [(view, given) for view in ("global", "personal") if isinstance(given := sample.get(view), Mapping)]


def _entries(given: Sample) -> list[Sample]:
    found = given.get("labels")
    return [entry for entry in found if isinstance(entry, Mapping)] if isinstance(found, list) else []


def _card(sample: Sample, store: ImageStore) -> str:
    """One example, what the method's two models say of it, and where labels looked."""
    tables = "".join(_table(view, given, _threshold(sample)) for view, given in _views(sample))
    kind = f" · {sample['type']}" if sample.get("type") else ""
    truth = ", ".join(map(str, sample["labels"])) or "none"
    strips = _strip(sample, store.add(sample.get("image")))
    return (
        f"<div class=card><h3><small>{escape(_place(sample) + kind)}</small>{_title(sample)}</h3>"
        f"<div>{_example(sample, store)}<p class=note>Labels: {escape(truth)}</p></div>"
        f"<div class=answers>{tables}</div>{strips}</div>"
    )


def _table(view: str, given: Sample, threshold: float) -> str:
    rows = "".join(
        bar(str(entry.get("label", "")), number(entry.get("probability")) or 0.0, threshold, bool(entry.get("there")))
        for entry in _entries(given)
    )
    others = int(number(given.get("others")) or 0)
    more = f"<small>and {others} more that are there or predicted</small>" if others else ""
    return f"<div><small>{escape(view)} model</small><table class=shares>{rows}</table>{more}</div>"


def _strips(sample: Sample) -> list[Sample]:
    """The labels of the first model that says where it looked: those predicted or there before the others."""
    for _, given in _views(sample):
        found = [entry for entry in _entries(given) if entry.get("attention") is not None]
        if found:
            threshold = _threshold(sample)
            return sorted(found, key=lambda e: not (e.get("there") or e.get("probability", 0) >= threshold))[:_STRIP]
    return []


def _strip(sample: Sample, picture: str) -> str:
    """Attention of labels to the example."""
    entries = _strips(sample)
    if not entries:
        return ""
    tokens = sample.get("words")
    if isinstance(tokens, list):
        rows = "".join(
            f"<tr><td>{escape(str(e.get('label', '')))}</td><td>{words(tokens, e['attention'])}</td></tr>"
            for e in entries
            if isinstance(e.get("attention"), list)
        )
        return f"<table class=looks>{rows}</table>"
    cells = "".join(
        f"<div>{drawn}<small>{escape(str(entry.get('label', '')))}</small></div>"
        for entry in entries
        if (drawn := attention(picture, entry["attention"]))
    )
    return f"<div class=strip>{cells}</div>" if cells else ""


def _glance(study: Study, found: Mapping[str, Sequence[Sample]], store: ImageStore) -> str:
    """A row per example, a column per method: what its global model predicts, or the personal one without such."""
    keyed = {m: {_key(sample): sample for sample in own} for m, own in found.items()}
    order = list(dict.fromkeys(key for own in keyed.values() for key in own))
    head = "".join(f"<th scope=col>{escape(study.labels[m])}</th>" for m in keyed)
    rows = ""
    for key in order:
        sample = next(own[key] for own in keyed.values() if key in own)
        cells = ""
        for own in keyed.values():
            given = _views(own[key])[:1] if key in own else []
            cells += f"<td>{_predicted(given[0][1], _threshold(sample)) if given else '–'}</td>"
        truth = ", ".join(map(str, sample["labels"])) or "no label"
        rows += (
            f'<tr><td><div class="picture p64 {store.add(sample.get("image"))}"></div></td><td>{_title(sample)}'
            f"<b>{escape(truth)}</b><br><small>{escape(_place(sample))}</small></td>{cells}</tr>"
        )
    return (
        '<div class="scroll wide"><table class=glance><thead><tr><td></td>'
        "<th scope=col class=left>labels that are there</th>"
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        "<p class=note>What the global model predicts or misses (the personal one where there is no global one).</p>"
    )


def _predicted(given: Sample, threshold: float) -> str:
    cells: list[str] = []
    for entry in _entries(given):
        name, there = escape(str(entry.get("label", ""))), bool(entry.get("there"))
        if (number(entry.get("probability")) or 0.0) >= threshold:
            cells.append(f"<span class={'right' if there else 'wrong'}>{'✓' if there else '✗'} {name}</span>")
        elif there:
            cells.append(f"<span class=missed>{name}</span>")
    others = int(number(given.get("others")) or 0)
    cells += [f"<small>and {others} more</small>"] if others else []
    return " ".join(cells) or "<small>none</small>"


def _example(sample: Sample, store: ImageStore) -> str:
    """The picture; a text is the heading of its card."""
    picture = store.add(sample.get("image"))
    return f'<div class="picture p256 {picture}"></div>' if picture else ""


def _title(sample: Sample) -> str:
    """The text of an example of texts in a table; its name above a card says nothing to a stranger."""
    return "" if "text" not in sample else f"{escape(str(sample['text']))}<br>"


def _place(sample: Sample) -> str:
    return f"{sample.get('place', '')}{'' if sample.get('seen', True) else ' (unseen)'}"


def _threshold(sample: Sample) -> float:
    found = number(sample.get("threshold"))
    return 0.5 if found is None else found


def _key(sample: Sample) -> tuple[str, str]:
    return str(sample.get("place", "")), str(sample.get("name", ""))


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %" if np.isfinite(value) else "–"
