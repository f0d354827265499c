"""Execution of the notebooks, with their outputs stored: ``python docs/run_notebooks.py [NAME ...]``."""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent / "notebooks"
SECONDS = 600
"""Longest time of a cell, on a busy machine."""


def executed(notebook: Path, folder: str) -> nbformat.NotebookNode:
    """A notebook with its outputs, without times and versions.

    Args:
        notebook: its file.
        folder: where its kernel works.
    """
    content = nbformat.read(notebook, as_version=4)
    NotebookClient(content, timeout=SECONDS, resources={"metadata": {"path": folder}}, record_timing=False).execute()
    content.metadata.language_info = {"name": "python"}
    return content


def main(names: list[str]) -> None:
    """Execution of the named notebooks, or of all."""
    for notebook in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(notebook, folder), notebook)


if __name__ == "__main__":
    main(sys.argv[1:])
