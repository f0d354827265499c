"""Reading folders back; also makes the synthetic study that the other tests of results use."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw
from safetensors.numpy import save_file

from confed.report.tables.cost import cost_to_target_table
from confed.results.runs import load

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


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_study(tmp_path_factory.mktemp("results") / "study")


def test_study_keeps_the_order_of_its_index(study: Path) -> None:
    found = load(study)
    assert found.methods == tuple(METHODS)
    assert found.labels["fedp3"] == "FedP³"
    assert found.seeds == (0, 1)
    assert found.clients == tuple(CLIENTS)
    assert found.scenes == tuple(SCENES)
    assert all(run.complete and not run.missing for run in found.runs)


def test_rows_with_one_label_are_told_apart(tmp_path: Path) -> None:
    entries = [{"method": row, "seed": 0, "folder": f"{row}/seed-0"} for row in ("mild", "strong", "fedavg")]
    for entry in entries:
        make_run(tmp_path / str(entry["folder"]), "fedavg" if entry["method"] == "fedavg" else "fedprox")
    expected = {"mild": "FedProx (mild)", "strong": "FedProx (strong)", "fedavg": "FedAvg"}
    assert load(tmp_path).labels == expected  # an index is missing: the labels are the runs' own
    labels = {"mild": "FedProx", "strong": "FedProx", "fedavg": "FedAvg"}
    index = {"methods": list(labels), "labels": labels, "runs": entries}
    (tmp_path / "summary.json").write_text(json.dumps(index))
    assert load(tmp_path).labels == load(tmp_path).rows == expected


def test_run_on_its_own_is_a_study_of_one(study: Path) -> None:
    found = load(study / "fedavg" / "seed-1")
    assert found.single
    assert [(run.method, run.seed) for run in found.runs] == [("fedavg", 1)]
    assert len(found.runs[0].rounds) == ROUNDS
    assert len(found.runs[0].evaluations) == ROUNDS + 1


def test_interrupted_run_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    for name in ("summary.json", "gallery.json", "predictions.safetensors", "timings.jsonl"):
        (folder / name).unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:6]) + '\n{"event": "round", "rou')
    run = load(folder).runs[0]
    assert not run.complete
    assert run.summary["rounds"] == 3
    assert run.clients == tuple(CLIENTS)
    assert run.scenes == tuple(SCENES)
    assert run.predictions() == {}
    assert run.gallery() == []
    assert set(run.missing) == {"summary.json", "gallery.json", "predictions.safetensors", "timings.jsonl"}


def test_study_without_index(study: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "fedavg" / "seed-0", "fedavg")
    make_run(tmp_path / "fedp3" / "seed-0", "fedp3")
    found = load(tmp_path)
    assert found.methods == ("fedavg", "fedp3")
    assert "interrupted" in found.remarks[0]


@pytest.mark.parametrize("name", ["empty", "absent"])
def test_neither_run_nor_study(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"must be a run folder .* or a study folder"):
        load(tmp_path / name)


def test_race_counts_rounds_and_bytes_to_the_end_of_fedavg(study: Path) -> None:
    table = cost_to_target_table(load(study))
    assert table is not None
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows["FedAvg"] == ["6", "57.6 MB"]  # 6 rounds, 4 clients, 1.2 MB each way
    assert rows["Local"] == ["not in 6", "–"]
    assert int(rows["FedP³"][0]) < 6
    assert "Central" not in rows
