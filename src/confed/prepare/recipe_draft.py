"""Recipe with comments for a folder of the user's own data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from confed.federation.specs import model_spec
from confed.prepare.own_data import Found, stated
from confed.registry import models


@dataclass(frozen=True)
class Training:
    """What a form of data is trained with, in a size that a CPU core learns in minutes."""

    model: Mapping[str, Any]
    task: Mapping[str, Any]
    local: Mapping[str, Any]
    larger: str
    methods: tuple[str, ...] = ("local", "fedavg", "fedavg_ft", "central")
    rounds: int = 5


_STEPS = {"epochs": 2, "batch_size": 32, "lr": 1e-3}
_VQA = {"name": "vqa"}
_TRAINING: Mapping[str, Training] = {
    "classes": Training(
        {"name": "vit_mini", "trainable": "all"}, _VQA, _STEPS,
        'published weights: name = "vit_b16" with data.image_size = 224; or name = "clip", source = '
        '"openai/clip-vit-base-patch32", trainable = "prompt" with the methods promptfl and fedpgp, without image_size',
    ),
    "labels": Training(
        {"name": "resnet_multilabel_mini"}, {"name": "multilabel"}, {**_STEPS, "optimizer": "adam", "batch_size": 16},
        'a Transformer over labels: name = "ctran_mini" with task.known = 0.75 and the method fedlgt',
    ),
    "questions": Training(
        {"name": "vilt_mini", "trainable": "all"}, _VQA, _STEPS,
        'published weights: name = "vilt_b32" with data.image_size = 384; or a model that writes: name = "hf", '
        'source = "HuggingFaceTB/SmolVLM-256M-Instruct", trainable = "lora" with task.name = "chat"',
    ),
    "conversations": Training(
        {"name": "hf", "source": "smolvlm_mini", "trainable": "lora"},
        {"name": "chat", "metric": "f1", "max_new_tokens": 16}, {"epochs": 1, "batch_size": 16, "lr": 1e-2},
        'the packaged smolvlm_mini is for trials; published weights: source = "HuggingFaceTB/SmolVLM-256M-Instruct" '
        "with local.lr = 2e-4; pictures have the size that the model reads, or data.image_size",
    ),
    "captions": Training(
        {"name": "caption_transformer_mini", "max_length": 48}, {"name": "captioning"},
        {"epochs": 3, "batch_size": 16, "lr": 2e-3},
        "of the packaged models this one writes captions from nothing; `confed show hf` tells of pretrained ones",
    ),
    "regions": Training(
        {"name": "mcan_s_mini"}, _VQA, _STEPS,
        "the published sizes: mcan_small, mcan_large, butd, ban_4, mfb, mmnas_small",
    ),
    "texts": Training(
        {"name": "ctran_text_mini"}, {"name": "multilabel"}, {**_STEPS, "optimizer": "adam"},
        "of the packaged models only this one reads texts alone",
    ),
    "sensors": Training(
        {"name": "modal_transformer_mini"}, _VQA, _STEPS, "the paper's size: modal_transformer",
    ),
}  # fmt: skip
_TRAINING = {**_TRAINING, "objects": _TRAINING["labels"], "vqa": _TRAINING["questions"]}

_CNN = {"optimizer": "adam", "epochs": 2, "batch_size": 32, "lr": 2e-3}
_ENCODERS = "another encoder: any vision, and text, of `transformers` by name or folder; `confed show encoders`"


def candidates(form: str, vision: str, text: str) -> dict[str, Training]:
    """Title -> what a form of data can be trained with: the packaged model, a small CNN, encoders."""
    usual = _TRAINING[form]
    options = {f"{usual.model['name']}, packaged": usual}
    reads_labels = usual.task["name"] == "multilabel"
    if form not in ("classes", "labels", "objects", "questions", "vqa"):
        return options
    if not reads_labels:
        options["cnn_words, from nothing"] = replace(usual, model={"name": "cnn_words"}, local=_CNN)
    if not vision:
        return options
    model: dict[str, Any] = {"name": "encoders", "vision": vision}
    local: dict[str, Any] = {"optimizer": "sgd", "epochs": 2, "batch_size": 32, "lr": 0.1}
    if reads_labels:  # whose loss is a sum over labels and examples
        local["lr"] = 3e-4
    if text:
        model, local = {**model, "text": text, "fusion": "product"}, {**_CNN, "lr": 1e-3}
    # Features of a frozen encoder are kept, so that further rounds cost little.
    encoders = replace(usual, model=model, local=local, larger=_ENCODERS, rounds=20)
    return {**options, f"encoders with {Path(vision).name}": encoders}


_KEYS = {
    "root": "the folder; another machine needs its own path",
    "source": "the folder; or owner/name on the hub",
    "partition": "how examples are shared out among clients; `confed show {dataset}` lists the ways",
    "clients": "number of clients",
    "alpha": "skew of the shares: 0.1 is strong, 10 is none",
    "columns": "what a column means here = its name in your files",
    "question": "asked of every picture",
    "image_size": "pixels per side; what the model below reads",
    "shots": "training examples per class and client; 0: all",
    "new": '"half": classes that no client trains on',
    "validation": "share of the training examples held out to choose settings on",
    "test_share": "share held out for tests",
    "unreadable": "share of the pictures that may be missing or damaged",
    "categories": '"coco80": COCO\'s own list; "file": those of the file',
    "test": "split that is the test; empty: a share of each client's pictures",
    "minimum": "fewest pictures of a client",
    "min_answers": "least occurrences of an answer that can be given",
    "domains": "the upper folders are domains",
}  # fmt: skip
"""Comments on keys of ``[data]``."""


def draft(
    reading: Found,
    name: str,
    left: str = "",
    rounds: int | None = None,
    device: str = "cpu",
    training: Training | None = None,
    tried: Sequence[str] = (),
) -> str:
    """The text of a recipe that runs as it is, with the usual model of its form, or another training."""
    training = training or _TRAINING[reading.form]
    rounds = rounds or training.rounds
    head = ["Written by `confed init`. What was found:", *(f"- {line}" for line in reading.saw)]
    head += [f"- not read: {left}"] if left else []
    head += [f"- {line}" for line in tried]
    head += [
        "",
        f"confed data describe {name}    clients, splits, examples and faults; with --html FILE as a page",
        f"confed run {name}              trains and tests; prints a table and writes report.html",
        f"confed tune {name} --budget 6  searches settings on validation data before anything is claimed",
        "confed list, confed show NAME: methods, models and all their settings",
    ]
    sized = model_spec(models[training.model["name"]]).picture_side is not None
    unset = {key for key, value in reading.options.items() if value is None} | ({"image_size"} if sized else set())
    data = {"name": reading.dataset, **{key: v for key, v in reading.options.items() if key not in unset}}
    comments = {key: text.format(dataset=reading.dataset) for key, text in _KEYS.items()}
    local = {"epochs": "passes over a client's examples per round", "lr": "learning rate; the first thing to tune"}
    run = {
        "rounds": "communication rounds",
        "device": '"cuda" on a GPU',
        "evaluate_every": "rounds between evaluations on validation data; 0: only the last",
    }
    parts = [
        "\n".join(f"# {line}".rstrip() for line in head),
        _section("algorithm", {"name": "fedavg"}, {"name": "of a single run; [study] lists what is compared"}),
        f"# {training.larger}\n" + _section("model", training.model, {}),
        _section("task", training.task, {}),
        _section("data", data, comments),
        _section("local", training.local, local),
        _section("run", {"rounds": rounds, "device": device, "evaluate_every": max(rounds // 5, 1)}, run),
        "# Each method trains once. local: no federation; central: all data in one place, the upper bound.\n"
        + _section("study", {"methods": list(training.methods)}, {}),
    ]
    return "\n\n".join(parts) + "\n"


def _section(name: str, values: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    lines = [f"[{name}]"]
    for key, value in values.items():
        line = f"{key} = {stated(value)}"
        lines.append(f"{line:<32}  # {comments[key]}" if key in comments else line)
    return "\n".join(lines)
