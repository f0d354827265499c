"""Files of label embeddings for the multi-label datasets: which labels, and which text encoder.

What a recipe names as ``model.embeddings``; see :mod:`confed.models.label_embeddings`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from confed.data.refusals import check_choice, refuse
from confed.models.label_embeddings import (
    TEMPLATE,
    Encode,
    LabelEmbeddings,
    clip_text_encoder,
    embed_labels,
    save_label_embeddings,
    sentence_encoder,
    write_mini_label_embeddings,
)

LISTS = ("flair", "flair-fine", "coco", "coco-groups", "voc", "ucm", "captions", "scenes")
"""Label lists that have a name; any other is a text file with one label a line."""

Kind = Literal["clip", "sentence", "mini"]


def label_names(labels: str, root: Path | None = None) -> tuple[tuple[str, ...], Mapping[str, tuple[str, ...]]]:
    """A list of labels, and of FLAIR's coarse ones their fine names, the most frequent in training first."""
    from confed.data.ml_files.coco import COCO_LABELS, COCO_SUPERCATEGORIES
    from confed.data.ml_files.records import listed_labels
    from confed.datasets.flair import FLAIR_LABELS, flair_fine_labels, flair_fine_names
    from confed.datasets.object_labels import VOC_LABELS
    from confed.datasets.scene_labels import COARSE, FINE
    from confed.datasets.tagged_texts import TAGS
    from confed.datasets.ucm import UCM_LABELS

    vocabularies = {"flair": FLAIR_LABELS, "coco": COCO_LABELS, "coco-groups": COCO_SUPERCATEGORIES, "voc": VOC_LABELS}
    vocabularies |= {"ucm": UCM_LABELS, "captions": TAGS, "scenes": (*FINE, *COARSE)}
    if labels == "flair-fine":
        if root is None:
            refuse("--root", "the folder with label_relationship.txt for the list flair-fine", found="none")
        return flair_fine_labels(root / "label_relationship.txt"), {}
    if labels in vocabularies:
        return vocabularies[labels], flair_fine_names(root) if labels == "flair" and root is not None else {}
    file = Path(labels)
    if not file.is_file():
        refuse("labels", f"one of {', '.join(LISTS)} or a text file", labels)
    return listed_labels(file), {}


def write_label_embeddings(
    labels: str,
    out: Path,
    *,
    encoder: Kind = "clip",
    source: str = "openai/clip-vit-base-patch16",
    root: Path | None = None,
    coarse: Literal["name", "concat", "avg"] = "name",
    template: str = TEMPLATE,
    most: int = 20,
    width: int | None = None,
) -> LabelEmbeddings:
    """Write a file of label embeddings."""
    if coarse != "name" and (labels != "flair" or root is None):
        refuse("--root", f"the folder with FLAIR's fine names for coarse = {coarse!r}", found="none")
    names, fine = label_names(labels, root if coarse != "name" or labels == "flair-fine" else None)
    if encoder == "mini":
        if coarse != "name" or template != TEMPLATE or width not in (None, 64):
            expected = "bare names without a prompt, and 64 features: coarse, template and width are left out"
            refuse("the encoder mini", expected, found=f"{coarse!r}, {template!r} and {width}")
        return write_mini_label_embeddings(names, out)
    makers: dict[str, Callable[[str], Encode]] = {"clip": clip_text_encoder, "sentence": sentence_encoder}
    check_choice("encoder", encoder, [*makers, "mini"])
    encode = makers[encoder](source)
    spoken_labels = {label: tuple(map(_said, its)) for label, its in fine.items()}
    made = embed_labels(
        list(map(_said, names)),
        encode,
        template=template,
        coarse=coarse,
        fine={_said(label): its for label, its in spoken_labels.items()},
        most=most,
        source=f"{source}, {template!r}, {coarse}",
    )
    # Rows are found by the dataset's own names.
    table = LabelEmbeddings(names, made.vectors, made.positive, made.negative, made.source)
    table = table if width is None else table.narrowed(width)
    save_label_embeddings(table, out)
    return table


def _said(name: str) -> str:
    return name.replace("_", " ").replace("-", " ")
