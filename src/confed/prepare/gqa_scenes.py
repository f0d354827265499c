"""Preparation of the six scene datasets of FedVQA (section 8.4.1) from GQA and a scene classifier of Places365.

Each picture goes to the scene of its most probable category if that probability reaches a threshold, and is
left out otherwise. GQA's training questions become training questions, its validation questions the test.
The paper gives neither its threshold, nor its splits, nor the rule behind its 1,642 answers: those here are
choices, and :data:`confed.datasets.gqa_scenes.places.PUBLISHED` has the paper's counts to compare with. The answer
vocabulary is made of the most frequent answers of all six training sets. Training questions with another
answer are dropped; test questions with another answer are written and counted.
"""

import hashlib
import importlib.resources
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from confed.data.picture_files import find_pictures
from confed.data.refusals import check_apart, refuse
from confed.data.vl_files.gqa_questions import Question, Questions, question_files, questions_of
from confed.datasets.gqa_scenes.places import (
    FORMAT,
    PUBLISHED,
    SCENES,
    Prediction,
    digest,
    read_predictions,
    scene_of,
    write_predictions,
)
from confed.federation.ranges import AT_LEAST_ONE, SHARE, check_fields
from confed.system.events import Progress, StepProgress, ignore

_MAPPING = Path(str(importlib.resources.files("confed.datasets.gqa_scenes"))) / "places365_scenes.csv"
_SHOWN = 5


@dataclass(frozen=True)
class Options:
    """Options of the preparation."""

    threshold: Annotated[float, SHARE] = 0.5
    answers: Annotated[int, AT_LEAST_ONE] = 1642
    max_missing: Annotated[float, SHARE] = 0.01
    train_cap: Annotated[int, AT_LEAST_ONE] | None = None
    questions: Questions = "balanced"
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "")


def prepare(
    gqa: Path,
    images: Path,
    out: Path,
    options: Options | None = None,
    *,
    predictions: Path | None = None,
    weights: Path | None = None,
    device: str = "cpu",
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Preparation of ``<scene>/train.jsonl``, ``<scene>/test.jsonl``, ``answers.json`` and ``manifest.json``.

    Where pictures are missing, ``missing.txt`` has their ids, one per line. Equal inputs give equal bytes. Nothing
    that an earlier call made is touched before all checks have passed. With ``weights``, predictions go to
    ``out/places365-<hash of the weights>.csv`` as they are computed; a second call continues there.
    """
    options = options or Options()
    if (predictions is None) == (weights is None):
        remedy = "`confed weights convert places365` makes the weights from a published checkpoint"
        refuse(
            "scenes", "a file of predictions (--predictions FILE) or the weights of a classifier (--weights FILE)",
            found="both" if weights else "neither", remedy=remedy,
        )  # fmt: skip
    sources = question_files(gqa, options.questions)
    needed = _survey(sources, progress)
    files = find_pictures(images, needed)
    missing = sorted(needed - files.keys())
    _check_share("pictures are missing", len(needed), missing, options.max_missing, images)
    if weights is not None:
        predictions = _classified(weights, files, out, device, progress)
    assert predictions is not None
    guesses = read_predictions(predictions)
    unknown = sorted(files.keys() - guesses.keys())
    _check_share("pictures have no scene prediction", len(files), unknown, options.max_missing, predictions)
    scenes, counts = _sort(files, guesses, options.threshold)
    rows = _select(sources, scenes, progress)
    lines = "".join(f"{files[image].name} {files[image].stat().st_size}\n" for image in sorted(scenes))
    pictures = {
        "asked_about": len(needed), "missing": len(missing), "first_missing": missing[:_SHOWN],
        "without_prediction": len(unknown), **counts, "listing_sha256": hashlib.sha256(lines.encode()).hexdigest(),
    }  # fmt: skip
    manifest = {
        "format": FORMAT,
        "options": asdict(options),
        "images": str(images.expanduser().resolve()),
        "sources": {
            file.name: digest(file)
            for file in (*chain.from_iterable(sources.values()), predictions, *([weights] if weights else ()), _MAPPING)
        },
        "pictures": pictures,
        **_write(out, rows, missing, options),
    }
    text = json.dumps(manifest, indent=1, ensure_ascii=False)
    (out / "manifest.json").write_text(text + "\n", encoding="utf-8", newline="\n")
    return manifest


def _survey(sources: Mapping[str, Sequence[Path]], progress: Progress) -> set[str]:
    """The images that questions are about, after a check that ids are distinct and splits share no image."""
    ids: set[str] = set()
    images: dict[str, set[str]] = {}
    for role, parts in sources.items():
        role_images = images.setdefault(role, set())
        for source in parts:
            for question in questions_of(source):
                if question.id in ids:
                    refuse(source, "question ids that differ", found=f"{question.id!r} twice")
                ids.add(question.id)
                role_images.add(question.image)
                if len(ids) % 10000 == 0:
                    progress(StepProgress("reading questions", len(ids), 0))
    check_apart("images", images["train"], images["val"])
    return images["train"] | images["val"]


def _check_share(what: str, total: int, lacking: Sequence[str], most: float, where: Path) -> None:
    if len(lacking) > most * total:
        first = ", ".join(lacking[:_SHOWN]) + (", ..." if len(lacking) > _SHOWN else "")
        raise ValueError(
            f"{where}: {len(lacking)} of {total} {what} ({len(lacking) / max(total, 1):.1%}, at most {most:.1%} may "
            f"be): {first}"
        )


def _classified(weights: Path, files: Mapping[str, Path], out: Path, device: str, progress: Progress) -> Path:
    """The file of predictions of this classifier, completed by whatever pictures it lacks."""
    from confed.models.scene_classifier import classify, load_scene_classifier

    model = load_scene_classifier(weights)
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"places365-{digest(weights)['sha256'][:12]}.csv"
    done: dict[str, Prediction] = {}
    if file.is_file():
        text = file.read_text(encoding="utf-8")
        # A run killed while writing leaves half a line.
        file.write_text(text[: text.rfind("\n") + 1], encoding="utf-8", newline="\n")
        done = read_predictions(file) if text.count("\n") > 1 else {}
    if not done:
        write_predictions(file, ())
    names, left = list(scene_of()), [image for image in files if image not in done]
    written = 0
    for batch in classify(model, [files[image] for image in left], device=device):
        batch_rows = left[written : written + len(batch)]
        guesses = [(image, Prediction(names[n], p)) for image, (n, p) in zip(batch_rows, batch, strict=True)]
        write_predictions(file, guesses, append=True)
        written += len(batch)
        progress(StepProgress("naming scenes", len(done) + written, len(done) + len(left)))
    write_predictions(file, sorted(read_predictions(file).items()))
    return file


def _sort(
    files: Mapping[str, Path], guesses: Mapping[str, Prediction], threshold: float
) -> tuple[dict[str, str], dict[str, Any]]:
    """Image -> scene of those that have one, and how many were kept and left out."""
    scenes: dict[str, str] = {}
    unsure = elsewhere = 0
    for image in files:
        guess = guesses.get(image)
        if guess is None:
            continue
        scene = scene_of()[guess.category]
        if guess.confidence < threshold:
            unsure += 1
        elif scene is None:
            elsewhere += 1
        else:
            scenes[image] = scene
    return scenes, {"below_threshold": unsure, "in_no_scene": elsewhere, "kept": len(scenes)}


def _select(
    sources: Mapping[str, Sequence[Path]], scenes: Mapping[str, str], progress: Progress
) -> dict[tuple[str, str], list[Question]]:
    """(scene, "train" or "test") -> its questions, in the order of the files."""
    rows: dict[tuple[str, str], list[Question]] = {}
    for s in SCENES:
        for r in ("train", "test"):
            rows[(s, r)] = []
    chosen = 0
    for role, parts in sources.items():
        for source in parts:
            for question in questions_of(source):
                scene = scenes.get(question.image)
                if scene is not None:
                    rows[scene, "train" if role == "train" else "test"].append(question)
                    chosen += 1
                    if chosen % 10000 == 0:
                        progress(StepProgress("choosing questions", chosen, 0))
    for (scene, role), scene_questions in rows.items():
        if not scene_questions:
            remedy = "is the threshold too high, or are these predictions of other pictures?"
            refuse(f"the scene {scene!r}", f"a {role} question", found="none", remedy=remedy)
    return rows


def _write(
    out: Path, rows: Mapping[tuple[str, str], Sequence[Question]], missing: Sequence[str], options: Options
) -> dict[str, Any]:
    """Writes questions, answers and ids of missing pictures; the manifest's parts about them."""
    out.mkdir(parents=True, exist_ok=True)
    # From here on the folder is no whole dataset until its new manifest is there.
    for name in ("manifest.json", "missing.txt"):
        (out / name).unlink(missing_ok=True)
    capped = {
        key: _cap(scene_questions, options) if key[1] == "train" else scene_questions
        for key, scene_questions in rows.items()
    }
    counts = Counter[str]()
    for (_, role), scene_questions in capped.items():
        if role == "train":
            counts.update(question.answer for question in scene_questions)
    vocabulary = [a for a, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))][: options.answers]
    answer_set = set(vocabulary)
    facts: dict[str, Any] = {scene: {} for scene in SCENES}
    written: dict[str, Any] = {}
    for (scene, role), scene_questions in capped.items():
        inside = [q for q in scene_questions if q.answer in answer_set]
        questions = inside if role == "train" else scene_questions
        file = out / scene / f"{role}.jsonl"
        file.parent.mkdir(exist_ok=True)
        _lines(file, questions)
        written[f"{scene}/{role}.jsonl"] = digest(file)
        facts[scene][role] = {
            "questions": len(questions),
            "published": PUBLISHED[scene][role == "test"],
            "pictures": len({q.image for q in questions}),
            "outside_vocabulary": len(scene_questions) - len(inside),
            **({"beyond_cap": len(rows[scene, role]) - len(scene_questions)} if role == "train" else {}),
        }
    texts = {"answers.json": json.dumps(vocabulary, indent=0, ensure_ascii=False) + "\n"}
    if missing:
        texts["missing.txt"] = "".join(f"{image}\n" for image in missing)
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8", newline="\n")
        written[name] = digest(out / name)
    return {"answers": len(vocabulary), "distinct_answers": len(counts), "scenes": facts, "files": written}


def _cap(rows: Sequence[Question], options: Options) -> Sequence[Question]:
    """At most ``train_cap`` rows in their order: those whose hashed ids come first."""
    if options.train_cap is None or len(rows) <= options.train_cap:
        return rows
    ranks = {q.id: hashlib.sha256(f"{options.seed}/{q.id}".encode()).digest() for q in rows}
    last = sorted(ranks.values())[options.train_cap - 1]
    return [q for q in rows if ranks[q.id] <= last]


def _lines(file: Path, rows: Iterable[Question]) -> None:
    with file.open("w", encoding="utf-8", newline="\n") as text:
        for q in rows:
            row = {"question_id": q.id, "image_id": q.image, "question": q.question, "answer": q.answer, "type": q.type}
            text.write(json.dumps(row, ensure_ascii=False) + "\n")
