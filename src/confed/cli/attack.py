"""Verbs that attack finished runs: attack."""

import importlib
import json
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

from rich.markup import escape

from confed.cli.app import (
    answer,
    app,
    argument,
    for_people,
    option,
    print_line,
    print_tables,
    progress_notes,
    showing,
    table_of,
)
from confed.cli.completion import complete_folder
from confed.system.events import Progress

ROWS = {
    "auc": "membership attack on {client}, AUC (0.5 is chance)",
    "accuracy": "global model on {client}'s test data",
    "global_seen": "global model on the others' test data",
    "personal": "personal models of the others",
    "global_unseen": "global model in unseen places",
}


@app.command()
def forget(
    folder: Annotated[
        Path, argument("A run folder; exact forgetting takes an unfinished one too.", autocompletion=complete_folder)
    ],
    client: Annotated[str, option("The client to forget.")],
    out: Annotated[Path | None, option("The new run folder; by default RUN-without-CLIENT.")] = None,
    approximate: Annotated[
        bool, option("Change the final model instead of training again; no guarantee.", "--approximate")
    ] = False,
    rounds: Annotated[int, option("With --approximate: rounds with the others afterwards.")] = 2,
) -> None:
    """Remove a client from a run, exactly or approximately.

    Starts from the last checkpoint before the client joined where there is one (`run.keep_checkpoints = "joins"`).
    """
    from confed.studies.runner import one_job
    from confed.unlearning.exact import Approximation, check_client, folder_without, recipe_of
    from confed.unlearning.exact import forget as forget_client

    how = Approximation(rounds=rounds) if approximate else None
    recipe = recipe_of(folder)
    check_client(recipe, client)
    target = folder_without(folder, client) if out is None else out
    result: dict[str, Any] = {}

    def work(progress: Progress) -> dict[str, Any]:
        result.update(forget_client(folder, client, target, approximate=how, progress=progress))
        return json.loads((target / "summary.json").read_text(encoding="utf-8"))

    with showing(target, rounds=True) as display:
        one_job(display, f"without {client}, seed {recipe.run.seed}", work)
    answer({"folder": str(target), **result})
    _show(target, client, result)


def _show(target: Path, client: str, result: dict[str, Any]) -> None:
    table = table_of("", "before", "after")
    for key, text in ROWS.items():
        values = (result[run][key] for run in ("original", "result"))
        style = "{:.3f}" if key == "auc" else "{:.1%}"
        table.add_row(escape(text.format(client=client)), *("–" if v is None else style.format(v) for v in values))
    shown = for_people()
    shown.print(table)
    start = f"round {result['from_round']}" if result["from_round"] else "the start"
    if result["approximate"] is None:
        kind = f"exact: run again from {start}, with the bytes of a run that never had {client}"
    else:
        kind = "approximate: nothing is guaranteed; the attack only shows what losses give away"
    shown.print(escape(f"{kind}\nwritten: {target}"), soft_wrap=True)


OF_TEST_TIME = {
    "trojan": "confed.analysis.trojan:trojan",
    "dual-key": "confed.analysis.dual_key:dual_key",
}
"""Name of an attack with options of its own -> ``"module:function"``.

The function takes the run and study folders and, as keywords, the options below that it names in its signature; it
returns a :class:`confed.analysis.victim.Finding`.
"""
PROBES = ("answers", "inversion", "labels", "pictures", "properties", "records", "sites", "text")
"""Attacks of which a dossier is made, by themselves; they have no options."""
KINDS = (*OF_TEST_TIME, *PROBES)


@app.command()
def attack(
    folders: Annotated[list[Path], argument("Folders of finished runs or studies.", autocompletion=complete_folder)],
    kind: Annotated[str, option(f"The attack: {', '.join(KINDS)}.")],
    examples: Annotated[int | None, option("Number of test questions.")] = None,
    client: Annotated[str | None, option("trojan: whose personal models [global ones].")] = None,
    eps: Annotated[float | None, option("trojan: largest change of a pixel (0 to 255), or of a feature.")] = None,
    steps: Annotated[int | None, option("trojan: gradient steps.")] = None,
    seed: Annotated[int | None, option("Seed of the choice of questions and of the search.")] = None,
    out: Annotated[
        Path | None, option("Folder for the page, tables and figures. [default: attack/ in the first]")
    ] = None,
) -> None:
    """Attack finished runs and report what attackers learn.

    trojan: pictures and questions of the test are changed until the models err. dual-key: what a backdoor does that
    poisoned clients planted during training (dataset `poisoned`). The others are the probes of a dossier, each by
    itself and without options. Docs: attacks.md, dossier.md.
    """
    from confed.analysis.victim import write
    from confed.release.page import attacked

    if kind not in KINDS:
        raise ValueError(f"--kind must be one of {', '.join(KINDS)}, got {kind!r}")
    run: Any = partial(attacked, kind)
    if kind in OF_TEST_TIME:
        module, _, name = OF_TEST_TIME[kind].partition(":")
        run = getattr(importlib.import_module(module), name)
    given: dict[str, Any] = {
        "examples": examples, "client": client, "eps": eps, "steps": steps, "seed": seed,
    }  # fmt: skip
    options = {key: value for key, value in given.items() if value is not None}
    parameters = signature(run).parameters
    for key in options:
        if key not in parameters:
            raise ValueError(f"--{key.replace('_', '-')} is no option of the attack {kind!r}")
    if "progress" in parameters:
        options["progress"] = progress_notes()
    finding = run(folders, **options)
    page = write(finding, out or folders[0] / "attack")
    answer(finding.values)
    print_tables(finding.tables)
    print_line(f"report: {escape(str(page))}")


# Whether a model may leave -------------------------------------------------------------------------------------


@app.command(short_help="Examine what a run's model gives away, and what sites gain.")
def dossier(
    folder: Annotated[Path, argument("Folder of a finished run.", autocompletion=complete_folder)],
    limits: Annotated[Path | None, option("TOML file with [release]; without, figures only.")] = None,
    out: Annotated[Path | None, option("Folder to write into. [default: dossier/ in the run folder]")] = None,
    minutes: Annotated[float, option("Time that may be spent; what does not fit is listed.")] = 30.0,
    key: Annotated[Path | None, option("Ed25519 private key to sign with, PEM or OpenSSH.")] = None,
) -> None:
    """Examine what a run's model gives away and what its sites gained, and hold it against limits.

    Writes dossier.html and dossier.json with a digest. Docs: dossier.md.
    """
    from confed.release.dossier import dossier as examine
    from confed.release.page import figures_table

    examined = examine(folder, limits, out=out, minutes=minutes, key=key, progress=progress_notes())
    answer(examined.content)
    print_line(escape(f"{examined.sentence} {examined.content['details']}"))
    print_tables([figures_table(examined.content)])
    for gain in examined.content["gains"]:
        print_line(escape(gain["sentence"]))
    print_line(escape(f"page: {examined.page}"))
