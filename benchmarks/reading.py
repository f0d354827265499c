"""Seconds of reading people's own files in this tree and at another commit: 100,000 rows and 10,000 pictures.

python benchmarks/reading.py --against COMMIT [--repeats 2]

Files are made by code: questions as CSV and as JSON lines about 200 pictures, and JPEGs in folders of classes, a tenth
of them turned by their EXIF. Each tree reads all of them in a process of its own with one thread, in turns, and nothing
is kept between two of them. Printed are processor seconds, the least of the repetitions, and their ratio.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
ROWS, PICTURES, SHOWN = 100_000, 10_000, 200
READERS = {
    "100,000 rows of CSV": ("chat_records", "csv", {"partition": "iid", "image_size": 16}),
    "100,000 JSON lines": ("chat_records", "lines", {"partition": "iid", "image_size": 16}),
    "10,000 pictures": (
        "labelled_folders", "classes", {"partition": "iid", "shots": 0, "new": "none", "image_size": 32},
    ),
}  # fmt: skip
TIMED = """
import json, sys, time, warnings
from confed import registry
warnings.simplefilter("ignore")
name, folder, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
read = registry.datasets[name]
start = time.process_time()
read(folder, **options)
print(time.process_time() - start)
"""


def make_files(folder: Path) -> None:
    """The three folders."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, str]] = []
    for number in range(ROWS):
        asked = f"what is number {number % 977}?"
        rows.append({"image": f"{number % SHOWN}.png", "question": asked, "answer": f"answer {number % 50}"})
    for kind in ("csv", "lines"):
        (folder / kind / "images").mkdir(parents=True)
        for number in range(SHOWN):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / kind / "images" / f"{number}.png")
    table = "image,question,answer\n" + "".join(",".join(row.values()) + "\n" for row in rows)
    (folder / "csv" / "q.csv").write_text(table)
    (folder / "lines" / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turned = Image.Exif()
    turned[0x0112] = 6
    for number in range(PICTURES):
        place = folder / "classes" / f"class {number % 10}" / f"{number}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        picture = small.resize((128, 96), Image.Resampling.BICUBIC)
        picture.save(place, exif=turned.tobytes() if number % 10 == 3 else b"")


def seconds(tree: Path, reader: str, folder: Path) -> float:
    """Processor seconds of one reading by a tree's own code."""
    name, kind, options = READERS[reader]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", TIMED, name, str(folder / kind), json.dumps(options)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    """Prints a line for each reader."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--against", required=True, help="commit")
    arguments.add_argument("--repeats", type=int, default=2, help="readings by each tree")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, before = Path(place) / "files", Path(place) / "before"
        make_files(folder)
        subprocess.run(["git", "worktree", "add", "-q", "--detach", before, given.against], cwd=ROOT, check=True)
        try:
            for reader in READERS:
                times: dict[Path, list[float]] = {before: [], ROOT: []}
                for _ in range(given.repeats):
                    for tree, measured in times.items():
                        measured.append(seconds(tree, reader, folder))
                then, now = min(times[before]), min(times[ROOT])
                print(
                    f"{reader}: {then:.2f} s at {given.against}, {now:.2f} s here, ratio {now / then:.2f}", flush=True
                )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
