"""Verbs that compare methods: compare."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from confed.cli.app import Json, app, console, plain, print_json, print_table


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Run or study folders.")],
    reference: Annotated[str, typer.Option(help="The method that the others are compared with.")] = "fedavg",
    out: Annotated[Path | None, typer.Option(help="Folder for compare.md, .csv and .tex.")] = None,
    as_json: Json = False,
) -> None:
    """Compare methods over seeds and over examples, with paired tests."""
    from dataclasses import asdict

    from confed.results.compare import compare as compare_folders

    comparison = compare_folders(folders, reference)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        texts = {"md": comparison.markdown(), "csv": comparison.csv(), "tex": comparison.latex()}
        for ending, text in texts.items():
            (out / f"compare.{ending}").write_text(text, encoding="utf-8")
        console.print(escape(f"written: {out}/compare.md, compare.csv, compare.tex"), soft_wrap=True, highlight=False)
    if as_json:
        print_json(plain(asdict(comparison)))
    else:
        print_table(comparison.rich())
