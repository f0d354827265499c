"""Small folders of digits: recordings and pictures in the published layout, and photographs of as many classes."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def write_digits(root: Path, speakers: Sequence[str], rate: int = 100) -> Path:
    """60 pictures of each digit, each one's number in its first two pixels, and 10 recordings of each speaker's."""
    digit = np.repeat(np.arange(10), 60)
    images = np.zeros((600, 28, 28), np.uint8)
    images[:, 0, 0], images[:, 0, 1] = np.arange(600) // 256, np.arange(600) % 256
    np.savez(root / "images.npz", images=images, digit=digit.astype(np.uint8))
    clips = [(s, d, t) for s in range(len(speakers)) for d in range(10) for t in range(10)]
    # A recording's number is its first sample, so that it can be found again behind its pause.
    waves = [np.array([1 + i, *[-1] * (3 + i % 4)], np.int16) for i in range(len(clips))]
    columns = {
        name: np.array([clip[i] for clip in clips], np.uint8) for i, name in enumerate(("speaker", "digit", "take"))
    }
    offsets = np.concatenate([[0], np.cumsum([len(wave) for wave in waves])]).astype(np.int64)
    np.savez(root / "audio.npz", waveform=np.concatenate(waves), offsets=offsets, **columns)
    meta = {"sample_rate": rate, "speakers": [{"name": name} for name in speakers]}
    (root / "meta.json").write_text(json.dumps(meta))
    return root


def write_photographs(root: Path, classes: int = 10) -> Path:
    """60 photographs of each class, whose names are in the order of digits, each of its class's shade."""
    (root / "images").mkdir(parents=True)
    rows: list[dict[str, str]] = []
    for number in range(60 * classes):
        kind, name = number % classes, f"{number:04d}.png"
        Image.fromarray(np.full((8, 8, 3), 20 * kind + 5, np.uint8)).save(root / "images" / name)
        rows.append({"image": name, "label": "abcdefghijk"[kind]})
    (root / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root
