"""Pages that finished folders lead to, and the interface, as texts: what a change that moves code may not change.

python tests/golden/golden.py folders [NAME...]   makes finished folders with this tree's code, and their pages
python tests/golden/golden.py pages               writes the pages and the interface anew, from the folders as they are

The folders of versions 0.1.0 and 0.2.0 were made by these; nothing can make them anew.
"""

import argparse
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDERS, PAGES, INTERFACE = HERE / "folders", HERE / "pages", HERE / "interface"

SMALL = ("run.rounds=2", "local.epochs=1", "run.gallery=0", "run.workers=1", "--seeds", "2")
FEW = ("data.train=24", "data.validation=8", "data.test=12")
SCENES = ("fedvqa_scenes", *SMALL, *FEW, "model.name=vilt_tiny")
MADE: dict[str, tuple[str, ...]] = {
    "vqa": (*SCENES, "--methods", "local,fedavg,fedper,fedp3"),
    "gallery": (*SCENES, "run.gallery=1", "--methods", "local,fedp3", "--seeds", "1"),
    "labels": (
        "fedlgt_scenes", *SMALL, "model.pretrained=false", "run.cohort=3", "data.clients=6",
        "data.unseen=8", "--methods", "fedavg,fedlgt",
    ),
    "captions": ("captions_scenes", *SMALL, *FEW, "--methods", "local,fedavg"),
    "chat": ("chat_scenes", *SMALL, *FEW, "run.controls=none", "--methods", "local,fedavg,ditto"),
    "split": ("bicsl_scenes", *SMALL, *FEW, "--methods", "bicsl,split_learning,fedavg"),
    "modalities": ("modalities", *SMALL, "--methods", "fedavg,modality_transformer"),
    "prompts": ("prompts_scenes", *SMALL, "--methods", "zero_shot,promptfl,promptsrc"),
    "sweep": (*SCENES, "--methods", "local,fedavg", "--over", "local.epochs=1,2"),
}  # fmt: skip
"""Name -> arguments of the command that makes the folder; ``sweep`` is made by the command of that name."""
KEPT = (
    "summary.json", "recipe.toml", "metrics.jsonl", "timings.jsonl", "timeline.jsonl", "gallery.json",
    "predictions.safetensors", "sweep.json", "data.json", "sites.json", "audit.jsonl",
)  # fmt: skip
"""Files of a run, study or sweep that its pages are made from."""
UNEVEN = re.compile(r"(?<=confed )\d+\.\d+\.\d+\S*")
"""What differs between machines and versions of the package."""


class _Text(HTMLParser):
    """Text of a page, a line per element, without styles and scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._hidden = 0
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("style", "script", "svg")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("style", "script", "svg")

    def handle_data(self, data: str) -> None:
        if not self._hidden and data.strip():
            self.lines.append(" ".join(data.split()))


def _printed(*arguments: str) -> str:
    """Standard output of a command in this process."""
    from confed.cli import main

    out, before = io.StringIO(), sys.argv
    sys.argv = ["confed", *arguments]
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.suppress(SystemExit),
        ):
            main()
    finally:
        sys.argv = before
    return out.getvalue()


def _frames(folder: Path) -> Iterator[tuple[str, str]]:
    """Names and CSV of all data frames of a study or run."""
    from confed.api.run import Run, load_run
    from confed.api.study import load_study

    if (folder / "sweep.json").is_file():
        return
    runs: dict[str, Run] = {}
    if (folder / "metrics.jsonl").is_file():
        runs["run"] = load_run(folder)
    else:
        study = load_study(folder)
        yield "table", study.table.to_csv()
        runs = {f"{run.method}-{run.seed}": run for run in study}
    for frame in ("history", "evaluations", "results"):
        texts = [f"# {name}\n{getattr(run, frame).to_csv()}" for name, run in runs.items()]
        yield frame, "".join(texts)


def pages_of(archive: Path, scratch: Path) -> dict[str, str]:
    """Name -> text of everything that a finished folder is shown as."""
    folder = scratch / archive.stem
    with zipfile.ZipFile(archive) as content:
        content.extractall(folder)
        given = set(content.namelist())
    pages = {
        "report.txt": _printed("report", str(folder)),
        "compare.txt": _printed("compare", str(folder), "--out", str(folder / "compared")),
    }
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name in given or path.suffix not in (".csv", ".md", ".tex", ".json", ".html"):
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".html":
            name, text = f"{name}.txt", "\n".join(_Text(text).lines)
        pages[f"files/{name}"] = text
    pages |= {f"frames/{name}.csv": text for name, text in _frames(folder)}
    shutil.rmtree(folder)
    return {name: UNEVEN.sub("VERSION", text.replace(str(scratch), "")) for name, text in pages.items() if text}


def interface() -> dict[str, str]:
    """Name -> text of what ``show``, ``list`` and ``--help`` print, and the signatures of the Python interface."""
    names = ("methods", "models", "datasets", "tasks", "recipes", "settings", "commands", "api")
    with tempfile.TemporaryDirectory() as scratch:
        program = "import sys; from pathlib import Path; import site_pages; site_pages.generate(Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", program, scratch], cwd=HERE.parents[1] / "docs", check=True)
        return {f"{name}.md": (Path(scratch) / f"{name}.md").read_text(encoding="utf-8") for name in names}


def stored(folder: Path) -> dict[str, str]:
    """Name -> text of the files below a folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def _store(texts: dict[str, str], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def pack(folder: Path, name: str) -> None:
    """An archive of the files of a finished folder that its pages are made from."""
    FOLDERS.mkdir(exist_ok=True)
    with zipfile.ZipFile(FOLDERS / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(folder)
            if path.name in KEPT and not {"checkpoint", "models"} & set(relative.parts):
                archive.writestr(zipfile.ZipInfo(relative.as_posix()), path.read_bytes(), zipfile.ZIP_DEFLATED, 9)


def federation(folder: Path) -> None:
    """State of a server with two sites in this process, one of which is away at the end."""
    import confed
    from confed.deployment.server import run_server
    from confed.engines.flower.transport import FlowerTransport
    from confed.engines.remote.sites import Timeouts
    from confed.system.events import Event, RunProgress
    from hostile_reply import COLD
    from led_recipe import SITES_OF, grid_of, recipe_of

    confed.allow_code("toy_federation")
    recipe, root = recipe_of("fedper", "run.rounds=2"), folder.with_name(f"{folder.name}-sites")
    root.mkdir()
    (root / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    grid = grid_of(root / "recipe.toml", root)

    def away_at_the_end(event: Event) -> None:
        if isinstance(event, RunProgress) and event.stage == "evaluating" and event.round == 2:
            grid.since.pop(COLD, None)

    run_server(
        recipe, folder, FlowerTransport(grid), names=SITES_OF, wait=0.05, progress=away_at_the_end,
        timeouts=Timeouts(minimum=1, interval=0.01, away=0.0),
    )  # fmt: skip


def _make(name: str, scratch: Path) -> None:
    if name == "federation":
        federation(scratch / name)
        pack(scratch / name, name)
        return
    command = "compare" if name == "sweep" else "run"
    environment = os.environ | {"CONFED_CPU": "avx2", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "confed.cli", command, *MADE[name], "--out", str(scratch / name), "--quiet"]
    subprocess.run(line, env=environment, check=True, stdout=subprocess.DEVNULL)
    pack(scratch / name, name)


def main() -> None:
    """Makes folders, or writes texts anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("folders", "pages"))
    parser.add_argument("names", nargs="*", default=[*MADE, "federation"])
    options = parser.parse_args()
    sys.path.append(str(HERE.parent / "support"))
    os.environ |= {"COLUMNS": "160", "NO_COLOR": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        if options.what == "folders":
            for name in options.names:
                print(name, flush=True)
                _make(name, Path(scratch))
        for archive in sorted(FOLDERS.glob("*.zip")):
            _store(pages_of(archive, Path(scratch)), PAGES / archive.stem)
    _store(interface(), INTERFACE)


if __name__ == "__main__":
    main()
