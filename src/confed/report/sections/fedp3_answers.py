"""Report section on the answers that FedP³'s filter picks (figure 8.5 of FedVQA).

For training questions of every client, the client's last local model is the student and the final global model the
teacher. Shown are the answers with the largest r, the softmax of the filter's scores (Eqs. 8.11 and 8.12).
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from confed.report.html import page
from confed.report.html.image_store import ImageStore
from confed.report.html.page import Tabs
from confed.results.runs import StudyResults
from confed.results.summary import number

_FORMULAS: Mapping[str, str] = {
    "gain": "log p_T − log(H_T/H_S) · log p_S, Eq. 8.12",
    "diff": "log p_T − log p_S, Eq. 8.11",
    "p_t": "log p_T",
    "p_s": "log p_S",
}


def section(study: StudyResults, tabs: Tabs, store: ImageStore) -> str:
    """Cards of training questions, one tab per method that has a filter, the last in front; nothing without any."""
    panels: list[tuple[str, str]] = []
    for method in study.methods:
        samples_shown = next((samples for run in study.of(method) if (samples := _samples(run.gallery()))), [])
        if samples_shown:
            formula = _FORMULAS.get(str(samples_shown[0]["forgotten"].get("filter")), "")
            cards = "".join(_card(sample, store) for sample in samples_shown)
            text = page.paragraph(f"r = softmax({formula}) over all answers.", "muted") if formula else ""
            panels.append((study.labels[method], f"{text}<div class=cards>{cards}</div>"))
    if not panels:
        return ""
    text = (
        "Training questions of every client, with the answers that the filter ranks first as the most easily "
        "forgotten: r is the filter's distribution, T the final global model (teacher), S the client's last local "
        "model (student). Percentages are probabilities over all answers."
    )
    return page.paragraph(text) + tabs(panels, len(panels) - 1)


def _samples(gallery: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [sample for sample in gallery if isinstance(sample.get("forgotten"), Mapping)]


def _card(sample: Mapping[str, Any], store: ImageStore) -> str:
    picture, truth = store.add(sample.get("image")), str(sample.get("answer", ""))
    given = sample["forgotten"].get("answers")
    rows = "".join(_answer(entry, truth) for entry in given if isinstance(entry, Mapping)) if given else ""
    return (
        f"<div class=card><h3><small>{escape(str(sample.get('place', '')))} · {escape(str(sample.get('type', '')))}"
        f"</small>{escape(str(sample.get('question', '')))}</h3>"
        f'<div class="picture p256 {picture}"></div>'
        f"<div class=answers><div class=truth>Correct answer: <b>{escape(truth)}</b></div>{rows}</div></div>"
    )


def _answer(entry: Mapping[str, Any], truth: str) -> str:
    """One answer's r as a bar, and what the models think of it."""
    r, teacher, student = (number(entry.get(name)) or 0.0 for name in ("r", "teacher", "student"))
    name = str(entry.get("answer", ""))
    style = " class=right" if name == truth else ""
    return (
        f'<div><b{style}>{escape(name)}</b><div class=bar><i style="width:{100 * r:.1f}%"></i></div>'
        f"<small>r {_percent(r)} · T {_percent(teacher)} · S {_percent(student)}</small></div>"
    )


def _percent(share: float) -> str:
    """A probability; small ones keep their first digit, for the filter often picks improbable answers."""
    value = 100 * share
    text = f"{value:.1f} %" if value >= 0.1 else f"{value:.1g} %"
    text = text if value >= 1e-3 else "≈ 0"
    return text.replace(" ", "\N{NO-BREAK SPACE}")
