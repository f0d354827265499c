"""Table files of a study: Markdown, CSV and TeX beside its runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from confed.federation.checkpoint import write_atomically
from confed.report.tables.methods import label_tables, labelled_rows, paper_table
from confed.report.tables.table import in_files
from confed.results.runs import load


def write_tables(folder: Path, references: Sequence[str] | None = None, margin: float = 0.01) -> list[Path]:
    """Export of a study's tables to its folder: ``table`` (the paper's), ``compare`` and what goes with its data."""
    from confed.report.comparison import compare_runs
    from confed.report.tables import modalities as modality_matrix  # here: these build on this module

    study = load(Path(folder))
    texts = in_files("table", paper_table(study))
    if rows := labelled_rows(study):
        for name, table in label_tables(rows, every=True).items():
            texts |= in_files(name, table)
    if (matrix := modality_matrix.table(study)) is not None:
        texts |= in_files(modality_matrix.FILE, matrix)
    if len(study.methods) > 1:
        texts |= compare_runs(study.runs, references, margin).files()
    return write_files(study.folder, texts)


def write_files(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Atomic export of texts to a folder."""
    for name, text in texts.items():
        write_atomically(folder / name, text.encode())
    return [folder / name for name in texts]
