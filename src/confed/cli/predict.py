"""Verbs that use trained models: predict, export, evaluate."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.markup import escape

from confed.cli.app import answer, app, argument, is_json, option, print_line, print_tables, progress_notes, remark, say
from confed.cli.completion import complete_folder

if TYPE_CHECKING:
    from confed.inference.finished_run import FinishedRun


@app.command()
def predict(
    folder: Annotated[
        Path,
        argument(
            "A finished run, a study (its main method's first seed), a site's private folder, a folder of "
            "`confed export`, or an export on the hub: hf:OWNER/NAME, hf:OWNER/NAME@REVISION.",
            autocompletion=complete_folder,
        ),
    ],
    image: Annotated[Path | None, option("A picture, of any size and format.")] = None,
    question: Annotated[
        list[str] | None, option("A question about it, or a statement to judge; of a model that converses, repeat it.")
    ] = None,
    client: Annotated[
        str | None, option("Use this client's personal model. [default: the global one; at a site the site's]")
    ] = None,
    shared: Annotated[
        bool, option("With --client: the global model with this client's private part.", "--shared")
    ] = False,
    picture2: Annotated[Path | None, option("A second picture, where the task has two.")] = None,
    choice: Annotated[list[str] | None, option("A choice, for tasks with choices; repeatable.")] = None,
    text: Annotated[str | None, option("A text, for models that label texts.")] = None,
    known: Annotated[
        list[str] | None, option("For label models: known labels, such as 'sky=yes,car=no'; repeatable.")
    ] = None,
    page: Annotated[Path | None, option("Write an HTML page with the labels and the attention of each.")] = None,
    top: Annotated[
        int | None, option("How many answers (3) or labels (those predicted, at least 10) to show.", show_default=False)
    ] = None,
) -> None:
    """Ask a trained model about a picture.

    At a site of a federation give its private folder once the run is over: the site's own model answers, and the global
    one where FOLDER is the folder run in it.

    A model that answers questions needs --image and --question; one that writes captions, --image alone; one that gives
    labels, --image or --text alone, and --known tells it labels that are certain. One that converses is asked every
    --question in turn, with what was said before in the prompt; without --question, every line of the input.
    """
    from confed.inference.ask import ask

    run, client = _asked(folder, client)
    blank = Counter[bool]()
    questions = _lines(blank) if run.answer_kind == "conversations" and question is None else question
    prediction = ask(
        run, image, questions, client, top=top, shared=shared, image2=picture2, choices=choice or (), text=text,
        known=known or (), attention=page is not None or (is_json() and run.answer_kind == "labels"), names=_OPTIONS,
        each=None if is_json() else lambda text: print(text, flush=True),
    )  # fmt: skip
    if page is not None:
        from confed.inference.ask import write_page

        write_page(page, prediction, image, text)
    answer(prediction | ({} if page is None else {"page": str(page)}))
    if not is_json():
        _print_prediction(prediction, page)
    if blank[True]:
        remark(f"{blank.total()} lines = {blank[False]} asked + {blank[True]} left out (blank)")


_OPTIONS = {"image": "--image", "question": "--question", "image2": "--picture2", "choices": "--choice"}
_OPTIONS |= {"text": "--text", "known": "--known", "attention": "--page", "top": "--top"}
"""Input of :func:`confed.inference.ask.ask` -> its option."""


def _lines(blank: Counter[bool]) -> Iterator[str]:
    """Lines of the input that say something, and how many are blank or not."""
    for line in sys.stdin:
        blank[not line.strip()] += 1
        if line.strip():
            yield line


def _print_prediction(prediction: Mapping[str, Any], page: Path | None) -> None:
    """A caption, or answers or labels with their probabilities, and what the model does not know."""
    if "caption" in prediction:
        print(prediction["caption"])
    if "labels" in prediction:
        print("\n".join(_label_lines(prediction, max(10, sum(entry["predicted"] for entry in prediction["labels"])))))
    for entry in prediction.get("answers", ()):
        print(f"{entry['probability']:6.1%}  {entry['answer']}")
    if prediction.get("unknown_words"):
        say(f"[yellow]words the model does not know:[/] {escape(', '.join(prediction['unknown_words']))}")
    if page is not None:
        say(f"page: {escape(str(page))}")


def _label_lines(prediction: Mapping[str, Any], shown: int) -> list[str]:
    """Labels sorted by probability, with a line where those predicted end."""
    lines = [
        f"known: {one['label']} {'yes' if one['state'] else 'no'} (alone the model says {one['alone']:.1%})"
        for one in prediction["known"]
    ]
    if prediction["known"]:
        lines.append("  told   alone  label")
    entries = prediction["labels"][:shown]
    mark = f"------ {prediction['threshold']:.0%}: labels below are not predicted"
    for number, entry in enumerate(entries):
        if not entry["predicted"] and (not number or entries[number - 1]["predicted"]):
            lines.append(mark)
        alone = f"  {entry['alone']:6.1%}" if "alone" in entry else ""
        turned = "alone" in entry and (entry["alone"] >= prediction["threshold"]) != entry["predicted"]
        lines.append(f"{entry['probability']:6.1%}{alone}  {entry['label']}{'  *' if turned else ''}")
    if any(line.endswith("  *") for line in lines):
        lines.append("* predicted otherwise without what is known")
    left = len(prediction["labels"]) - len(entries)
    return lines + ([f"and {left} less probable labels (--top, --json)"] if left else [])


@app.command()
def export(
    folder: Annotated[
        Path,
        argument(
            "A finished run, a study (its main method's first seed), or a site's private folder.",
            autocompletion=complete_folder,
        ),
    ],
    target: Annotated[Path, argument("Folder to write; must not exist.")],
    merged: Annotated[
        bool, option("Of a model by name: one whole model for transformers, with what was trained merged.")
    ] = False,
    client: Annotated[
        str | None, option("With --merged: the client whose personal model; the global one by default.")
    ] = None,
    hub: Annotated[
        str | None, option("Also upload to this model repository of the Hugging Face hub, OWNER/NAME.")
    ] = None,
    private: Annotated[bool, option("With --hub: a private repository.", "--private")] = False,
    personal: Annotated[
        bool, option("With --hub: upload personal models too, which are personal data.", "--personal")
    ] = False,
) -> None:
    """Export trained models for confed, transformers and peft.

    With --hub the folder has a model card with results, recipe, digests and privacy ledger, and is uploaded as it is;
    personal models are written and uploaded only with --personal. The token is that of HF_TOKEN or `hf auth login`.
    """
    from confed.inference.export import export_models

    if hub is None and (private or personal):
        raise ValueError(f"{'--private' if private else '--personal'} goes with --hub OWNER/NAME")
    if hub is not None and merged:
        raise ValueError("--hub goes without --merged: an export as it is can be loaded by name")
    folder, _ = _run_of(folder)
    if hub is not None:
        written = _published(folder, target, hub, private, personal)
    else:
        written = export_models(folder, target, merged=merged, client=client)
    answer(written)
    for name, path in written.items():
        print_line(escape(f"{name}: {path}"))


def _published(folder: Path, target: Path, hub: str, private: bool, personal: bool) -> dict[str, str]:
    """An export with its model card, uploaded; under "hub" the address of the commit."""
    from confed.inference.export import export as write
    from confed.inference.finished_run import FinishedRun
    from confed.inference.hub import hub_credentials, hub_name, publish, without_local_paths, write_card

    name = hub_name(hub)
    hub_credentials(name)
    run = FinishedRun(folder)
    written = write(folder, target, personal=personal)
    write_card(target, run, name.repository)
    without_local_paths(target, run.recipe)
    if personal:
        say("[yellow]personal models are uploaded:[/] they are personal data of the clients")
    address = publish(target, name, private=private, message=f"{run.summary.label}, {run.recipe.name}")
    return {**written, "hub": address}


def _asked(folder: Path, client: str | None) -> "tuple[FinishedRun, str | None]":
    """The run or the export, here or on the hub, and the client whose model answers."""
    from confed.inference.finished_run import FinishedRun
    from confed.inference.hub import PREFIX, fetch, hub_name
    from confed.inference.load import SOURCES, ExportedRun, is_exported
    from confed.runs.grants import check_grants

    if str(folder).startswith(PREFIX):
        exported = ExportedRun(fetch(hub_name(str(folder))))
        replaced = SOURCES if exported.facts["backbone"]["source"] is None else ()
        unread = ["data", *(f"model.{key}" for key in replaced)]
        check_grants(exported.recipe, str(folder), exported.folder, given=unread)
        return exported, client
    if is_exported(folder):
        return ExportedRun(folder), client
    folder, client = _run_of(folder, client)
    return FinishedRun(folder), client


def _run_of(folder: Path, client: str | None = None) -> tuple[Path, str | None]:
    """The run and the client whose model answers: in a site's private folder the site's own, if there is one."""
    from confed.deployment.site import site_of
    from confed.inference.finished_run import FinishedRun, run_of

    if (site := site_of(folder)) is not None:
        return site[0], client or (site[1] if site[1] in FinishedRun(site[0]).owners else None)
    run = run_of(folder)
    if run != folder:
        say(f"this is a study: taken is {escape(str(run))}; the folder of another run takes that one")
    return run, client


@app.command()
def evaluate(
    folders: Annotated[
        list[Path],
        argument("A finished run, or a study (its main method's first seed).", autocompletion=complete_folder),
    ],
    data: Annotated[list[str] | None, option("A key of the data section, such as root=DIR; repeatable.")] = None,
    model: Annotated[list[str] | None, option("global, personal:CLIENT or all; repeatable. [default: global]")] = None,
    against: Annotated[Path | None, option("A second run, compared on the same examples.")] = None,
    examples: Annotated[
        Literal["all", "test"], option("Of new data: all that were not learned from, or held-out tests.")
    ] = "all",
    known: Annotated[str, option("Labels: give these shares as known, such as 0,0.25,0.5.", metavar="SHARES")] = "",
    seed: Annotated[int, option("With --known: of the choice of labels.")] = 0,
    out: Annotated[Path | None, option("Folder. [default: RUN/evaluations/NUMBER]")] = None,
) -> None:
    """Evaluate trained models on other data, or with known labels.

    The result has the run's metric and, with --against, a paired test. With --known models of labels are given some
    labels of each test example: it says how much the prediction of the others improves, for all folders given, and is
    written into the first.
    """
    if known:
        if data or against is not None:
            raise ValueError(f"{'--data' if data else '--against'} goes without --known, which is of the run's tests")
        _evaluate_known(folders, known, model or ["global"], seed, out)
        return
    from confed.inference.evaluate import evaluate as tried_on
    from confed.inference.evaluate import write_evaluation
    from confed.inference.finished_run import run_of

    if len(folders) > 1:
        raise ValueError(f"evaluate takes one folder, and a second with --against; got {len(folders)}")
    run = run_of(folders[0])
    evaluation = tried_on(run, data or (), model or ("global",), None if against is None else run_of(against), examples)
    files = write_evaluation(evaluation, out or _next(run / "evaluations"))
    answer({**evaluation.content(), "files": {name: str(path) for name, path in files.items()}})
    print_tables([evaluation.table()])
    print_line(f"written: {escape(str(files['evaluation.json'].parent))}")


def _evaluate_known(folders: list[Path], shares: str, models: list[str], seed: int, out: Path | None) -> None:
    """How much known labels of an example improve the prediction of its others; page, table and figure."""
    from confed.analysis.known_labels import tell
    from confed.analysis.victim import write

    try:
        known_shares = [float(share) for share in shares.split(",")]
    except ValueError:
        raise ValueError(f"--known must be numbers separated by commas, got {shares!r}") from None
    kind, _, client = models[0].partition(":")
    if len(models) > 1 or kind not in ("global", "personal") or (kind == "personal") != bool(client):
        raise ValueError(f"with --known, --model must be global or personal:CLIENT, got {', '.join(models)}")
    finding = tell(folders, known_shares, client, seed, progress_notes())
    page = write(finding, out or folders[0], "")
    answer(finding.values)
    print_tables(finding.tables)
    for note in finding.values["notes"]:
        remark(escape(note))
    print_line(f"report: {escape(str(page))}")


def _next(root: Path) -> Path:
    """The first of the folders 1, 2, ... that does not exist."""
    return next(path for path in map(root.joinpath, map(str, count(1))) if not path.exists())
