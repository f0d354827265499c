"""Run folders and studies that are written, not trained."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from safetensors.numpy import save_file

CLIENTS = ["transport", "sports", "school", "nature"]


SCENES = ["home", "shop"]


METHODS = {"local": "Local", "fedavg": "FedAvg", "fedprox": "FedProx", "fedp3": "FedP³", "central": "Central"}


TYPES = ["exist", "count", "qcolor", "qpos"]


ROUNDS, TEST = 6, 200


# Method -> accuracy of personal models, of the global model on seen and on unseen places.
LEVELS = {
    "local": (0.52, None, None),
    "fedavg": (0.55, 0.50, 0.47),
    "fedprox": (0.56, 0.51, 0.48),
    "fedp3": (0.60, 0.52, 0.46),
    "central": (0.64, 0.64, 0.50),
}


RECIPE = """[algorithm]
name = "{method}"
{extra}
[model]
name = "vilt_mini"
trainable = "adapters"

[data]
name = "scenes"
setting = "C"
train = {train}

[local]
epochs = 2
lr = 0.003

[run]
rounds = 6
seed = {seed}
"""


def picture(number: int) -> str:
    """A small picture with two shapes, base64 PNG."""
    image = Image.new("RGB", (64, 64), (200, 225 - 12 * number, 190))
    draw = ImageDraw.Draw(image)
    draw.rectangle((4, 36, 28, 60), fill=(40, 90, 200))
    draw.ellipse((34, 6 + number, 58, 30 + number), fill=(210, 60, 50), outline=(20, 20, 20))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def make_run(
    folder: Path, method: str, seed: int = 0, *, extra: str = "", train: int = 400, shift: float = 0.0
) -> Path:
    """A complete run folder; results depend on method and seed only, plus ``shift``."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng([seed, list(METHODS).index(method)])
    shared_noise = np.random.default_rng(seed)
    (folder / "recipe.toml").write_text(RECIPE.format(method=method, extra=extra, seed=seed, train=train))
    levels = {"personal": CLIENTS, "global": CLIENTS, "unseen": SCENES}
    wobble = {place: 0.06 * i - 0.09 + 0.01 * shared_noise.standard_normal() for i, place in enumerate(CLIENTS)}
    wobble |= {"home": 0.01, "shop": -0.01}
    predictions: dict[str, np.ndarray] = {}
    values: dict[str, dict[str, float]] = {"personal": {}, "global": {}, "unseen": {}}
    for (view, places), level in zip(levels.items(), LEVELS[method], strict=True):
        for place in places if level is not None else ():
            chance = level + wobble[place] + shift + 0.005 * rng.standard_normal()
            hard = np.random.default_rng([seed, CLIENTS.index(place) if place in CLIENTS else 9]).random(TEST)
            correct = (0.8 * hard + 0.2 * rng.random(TEST) < chance).astype(np.float32)
            predictions[f"{view}/{place}/correct"] = correct
            predictions[f"{view}/{place}/prediction"] = rng.integers(0, 5, TEST)
            values[view][place] = float(correct.mean())
    save_file(predictions, folder / "predictions.safetensors", {"format": "1"})
    traffic = 0 if method in ("local", "central") else 1_200_000
    write_metrics(folder, values, traffic, rng)
    summary = summarise(method, seed, values, traffic, rng)
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "gallery.json").write_text(json.dumps([sample(i, method, rng) for i in range(6)]))
    return folder


def write_metrics(folder: Path, values: dict[str, dict[str, float]], traffic: int, rng: np.random.Generator) -> None:
    lines: list[dict[str, Any]] = []
    for number in range(ROUNDS + 1):
        if number:
            up = dict.fromkeys(CLIENTS, traffic)
            loss = {client: 2.0 / number + 0.1 * rng.random() for client in CLIENTS}
            lines.append(
                {
                    "event": "round",
                    "round": number,
                    "loss": loss,
                    "errors": {},
                    "bytes_up": up,
                    "bytes_down": up,
                }
            )
        share = 1 - np.exp(-number / 2)
        views = {
            view: {place: {"accuracy": 0.3 + share * (v - 0.3), "loss": 1.0, "ece": 0.05} for place, v in found.items()}
            for view, found in values.items()
        }
        lines.append({"event": "evaluation", "round": number, "split": "validation", **views})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    timing = {"seconds": 5.0, "evaluation_seconds": 1.0, "cpu_seconds": 9.0, "peak_memory_bytes": 600_000_000}
    times = [{"round": number, **timing} for number in range(1, ROUNDS + 1)]
    (folder / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in times))


def summarise(
    method: str, seed: int, values: dict[str, dict[str, float]], traffic: int, rng: np.random.Generator
) -> dict[str, Any]:
    views = {
        "personal": values["personal"],
        "global_seen": values["global"],
        "global_unseen": values["unseen"],
    }
    own = values["personal"]
    matrix = {
        owner: {p: own[p] if p == owner else own[p] - 0.1 - 0.1 * rng.random() for p in CLIENTS} for owner in CLIENTS
    }
    rounds = {str(number): dict.fromkeys(CLIENTS, traffic) for number in range(1, ROUNDS + 1)}
    failed = {"round": 2, "client": "school", "error": "TimeoutError: no reply within 60 s"}
    return {
        "algorithm": method,
        "label": METHODS[method],
        "recipe": "fedvqa_scenes",
        "seed": seed,
        "rounds": ROUNDS,
        "metric": "accuracy",
        "clients": CLIENTS,
        "scenes": SCENES,
        **views,
        "personal_mean": float(np.mean(list(own.values()))),
        "personal_worst": min(own.values()),
        "personal_spread": max(own.values()) - min(own.values()),
        "global_seen_mean": float(np.mean(list(values["global"].values()))) if values["global"] else None,
        "global_unseen_mean": float(np.mean(list(values["unseen"].values()))) if values["unseen"] else None,
        "matrix": {} if method == "central" else matrix,
        "types": {
            view: {p: {kind: v + 0.05 * rng.standard_normal() for kind in TYPES} for p, v in found.items()}
            for view, found in views.items()
        },
        "ece": {view: {place: 0.04 + 0.05 * rng.random() for place in found} for view, found in views.items()},
        "examples": {client: {"train": 400, "validation": 400, "test": TEST} for client in CLIENTS},
        "facts": dict.fromkeys(CLIENTS, "400 train, 400 validation, 200 test; majority by family 38.1 %"),
        "bytes_up": rounds,
        "bytes_down": rounds,
        "bytes_total": 2 * traffic * ROUNDS * len(CLIENTS),
        "seconds": 36.0 + 10 * list(METHODS).index(method),
        "seconds_per_round": 6.0,
        "cpu_seconds": 54.0,
        "peak_memory_bytes": 600_000_000,
        "parameters": {
            "total": 1_490_000,
            "trained": 148_000,
            "sent": 148_000 if traffic else 0,
            "stored": 148_000,
        },
        "versions": {"confed": "0.1.0", "torch": "2.13.0"},
        "trainable": "adapters",
        "errors": [failed] if method == "fedprox" and seed == 0 else [],
        "notes": ["teacher cached per round"] if method == "fedp3" else [],
    }


def sample(number: int, method: str, rng: np.random.Generator) -> dict[str, Any]:
    place = [*CLIENTS, *SCENES][number % 6]
    questions = [
        "what color is the ball?",
        "is there a red box?",
        "whaur is the cup?",
        "hoo mony things are blue?",
    ]
    truth = ["red", "yes", "top left", "2", "no", "dog"][number]

    def answer() -> dict[str, Any]:
        weights = rng.random((4, 4)) ** 3
        given = truth if rng.random() < 0.6 else "blue"
        return {
            "answer": given,
            "probability": float(rng.uniform(0.3, 1)),
            "attention": (weights / weights.max()).tolist(),
        }

    seen = place in CLIENTS
    return {
        "place": place,
        "seen": seen,
        "question": questions[number % 4],
        "type": TYPES[number % 4],
        "answer": truth,
        "image": picture(number),
        "global": None if method == "local" else answer(),
        "personal": answer() if seen else None,
    }


def make_study(folder: Path, seeds: int = 2) -> Path:
    """A study of five methods, four clients and two unseen scenes."""
    runs = [{"method": m, "seed": s, "folder": f"{m}/seed-{s}"} for m in METHODS for s in range(seeds)]
    for run in runs:
        make_run(folder / run["folder"], run["method"], run["seed"])
    index = {
        "recipe": "fedvqa_scenes",
        "methods": list(METHODS),
        "labels": METHODS,
        "seeds": list(range(seeds)),
        "runs": runs,
    }
    (folder / "summary.json").write_text(json.dumps(index))
    return folder


def changed(run: Path, drop: tuple[str, ...] = (), **values: Any) -> None:
    path = run / "summary.json"
    summary = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in summary.items() if key not in drop}))
