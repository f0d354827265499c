"""Page about a dataset: clients, splits, answers, examples with pictures, and faults."""

import base64
import io
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from confed.data.examples import Examples, FederatedDataset, presence
from confed.report.figures.answers import CLIENTS, answers_of, places_of
from confed.report.html import page
from confed.report.html.media import ImageStore

SHOWN, ANSWERS, SIDE = 8, 12, 128  # examples per client; answers per client; pixels of a picture's longer side

_CSS = """
.examples { display: grid; grid-template-columns: repeat(auto-fill, minmax(132px, 1fr)); gap: 12px; }
.examples figure { margin: 0; }
.examples .picture { aspect-ratio: 1; background-size: contain; background-repeat: no-repeat; }
.shares { width: auto; } .shares th { text-align: left; font-weight: 400; } .shares td:last-child { width: 240px; }
.shares .bar { background: none; } .shares .bar i { display: block; height: 10px; background: var(--accent); }
.scroll { overflow-x: auto; }
"""


def dataset_page(
    dataset: FederatedDataset,
    rows: Sequence[Mapping[str, Any]],
    faults: Sequence[str],
    source: str,
    shown: Sequence[tuple[np.ndarray, str]] = (),
    how: str = "",
) -> str:
    """A page that is complete in itself; ``shown``: pictures with texts, ``how`` a model reads them."""
    store = ImageStore()
    tabs = page.Tabs()
    head = f"<h1>{page.escape(dataset.name)}</h1>" + page.paragraph(source, "muted")
    head += page.tiles(
        [
            (f"{len(dataset.clients):,}", "clients"),
            (f"{sum(int(row['questions']) for row in rows):,}", "examples"),
            (f"{sum(int(row['pictures']) for row in rows):,}", "pictures, client by client"),
            (f"{len(dataset.answers):,}", "labels" if dataset.kind == "labels" else "answers"),
        ]
    )
    panels: list[tuple[str, str]] = []
    shares: list[tuple[str, str]] = []
    for place, examples in islice(places_of(dataset), CLIENTS):
        panels.append((place, page.component("examples", _examples(examples, store), template="dataset")))
        shares.append((place, page.component("shares", _shares(examples), template="dataset")))
    as_read = [(store.add(_png(pixels, max(pixels.shape[:2]))), text, "") for pixels, text in shown]
    drawing = answers_of(dataset)
    by_place = page.figure(drawing.inline(), title="Answers of each place") if drawing else ""
    faults_shown = page.callout(faults) if faults else page.paragraph("Nothing was found to be wrong.")
    sections = [
        ("faults", "Faults", faults_shown),
        ("pictures", f"Pictures {how}", page.component("examples", as_read, template="dataset") if as_read else ""),
        ("clients", "Clients and splits", page.component("counts", rows, template="dataset")),
        ("answers", "Most frequent answers of each client", by_place + (tabs(shares) if shares else "")),
        ("examples", "Examples", tabs(panels) if panels else ""),
        ("facts", "Facts", page.definitions(dict(dataset.facts))),
    ]
    return page.document(f"{dataset.name}: data", head, sections, store.css + _CSS)


def _shares(examples: Examples) -> list[tuple[str, int, float]]:
    """Answers or labels, counts, and widths of bars in percent."""
    listed = [(answer, count) for answer, count in examples.counted_answers().most_common(ANSWERS) if count]
    most = max((count for _, count in listed), default=1)
    return [(answer, count, round(100 * count / most, 1)) for answer, count in listed]


def _examples(examples: Examples, store: ImageStore) -> list[tuple[str, str, str]]:
    """CSS class of the picture, question and answer of a few examples with different pictures."""
    first = np.reshape(examples.image_index, (len(examples), -1))[:, 0]
    shown = presence(examples)[:, 0] if len(examples) else np.zeros(0, bool)
    rows = {int(first[row]) if shown[row] else -1 - row: row for row in reversed(range(len(examples)))}
    cards: list[tuple[str, str, str]] = []
    for row in sorted(rows.values())[:SHOWN]:
        picture = store.add(_png(np.asarray(examples.images[int(first[row])]))) if shown[row] else ""
        cards.append((picture, examples.questions[row], examples.right_answer(row) or "no label"))
    return cards


def _png(pixels: np.ndarray, side: int = SIDE) -> str:
    """A picture in at most so many pixels per side, as base64 PNG."""
    from PIL import Image

    picture = Image.fromarray(np.asarray(pixels))
    picture.thumbnail((side, side))
    stream = io.BytesIO()
    picture.save(stream, format="PNG", optimize=True)
    return base64.b64encode(stream.getvalue()).decode()
