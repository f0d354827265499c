"""Verbs of what confed keeps of examples between runs: cache list, cache clear."""

import shutil
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from confed.cli.app import Json, app, print_json, say

cache_app = typer.Typer(help="List or clear what confed keeps of examples between runs.")
app.add_typer(cache_app, name="cache", rich_help_panel="Data and weights")
KINDS = {"features": "outputs of frozen layers for examples", "pictures": "which picture files were found whole"}


@cache_app.callback()
def options() -> None:
    """List or clear what confed keeps of examples between runs."""


@cache_app.command("list")
def list_(as_json: Json = False) -> None:
    """Show what is kept, where, and how large it is; CONFED_FEATURES=off keeps no features."""
    folders: dict[str, dict[str, Any]] = {}
    for kind, (folder, files) in _kept().items():
        size = sum(file.stat().st_size for file in files)
        folders[kind] = {"folder": str(folder), "files": len(files), "bytes": size}
    if as_json:
        print_json(folders)
        return
    for kind, held in folders.items():
        print(f"{kind} ({KINDS[kind]}): {held['files']} files, {held['bytes']:,} bytes in {held['folder']}")


@cache_app.command()
def clear() -> None:
    """Remove all that is kept; runs compute it again."""
    for folder, files in _kept().values():
        if folder.is_dir():
            shutil.rmtree(folder)
            say(f"removed {len(files)} files in {escape(str(folder))}")


def _kept() -> dict[str, tuple[Path, list[Path]]]:
    from confed.data.ml_files.integrity import cache_folder

    folders = {kind: cache_folder().parent / kind for kind in KINDS}
    result: dict[str, tuple[Path, list[Path]]] = {}
    for kind, folder in folders.items():
        result[kind] = (folder, [p for p in folder.rglob("*") if p.is_file()])
    return result
