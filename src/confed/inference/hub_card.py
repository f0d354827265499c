"""Model card of an export on the Hugging Face hub: warning, results, use, recipe, provenance and privacy."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from confed.inference.ask import kind_of_answers
from confed.inference.finished_run import FinishedRun
from confed.inference.load import FACTS
from confed.models.hub_names import hub_name as published_name
from confed.recipes.recipe import Recipe
from confed.results.headline import HEADLINES, LABELS, headline, over_clients
from confed.results.privacy_spent import EXAMPLES, FIELD
from confed.results.runs import numbers
from confed.runs.grants import local_paths
from confed.system.release import VERSION

__all__ = ["card", "without_local_paths", "write_card"]

_NAMES: Mapping[str, str] = {
    "personal_mean": "personal models, mean over clients",
    "personal_worst": "personal models, worst client",
    "global_seen_mean": "global model, clients' test data",
    "global_unseen_mean": "global model, places that took no part",
}
_PIPELINES = {
    "answers": "visual-question-answering",
    "conversations": "image-text-to-text",
    "captions": "image-to-text",
    "labels": "image-classification",
}
_SHARED = (
    "> This repository holds what clients share, and no personal models. It was trained on the clients' examples and "
    "may still give some of them away where no noise protects them (see Privacy)."
)
_PERSONAL = (
    "> **Warning: this repository holds personal models, which are personal data.** Each was trained on the examples "
    "of one client, can give some of them away, and carries the client's name. Publish it only with the consent of "
    "every client; deletion from the hub does not take back copies."
)


def without_local_paths(folder: Path, recipe: Recipe) -> None:
    """The texts of an export with the last part of each path of this machine that its recipe names, in its place."""
    texts = [path for path in folder.rglob("*") if path.suffix in (".json", ".toml", ".md", ".txt", ".jinja")]
    for file in texts:
        before = text = file.read_text(encoding="utf-8")
        for path in local_paths(recipe):
            for written in (path, json.dumps(path)[1:-1]):
                text = text.replace(written, PureWindowsPath(path).name)
        if text != before:
            file.write_text(text, encoding="utf-8")


def _name(measure: str, run: FinishedRun) -> str:
    words = _NAMES.get(measure, measure)
    return words if measure == "global_unseen_mean" else over_clients(words, run.summary)


def write_card(folder: Path, run: FinishedRun, repository: str) -> None:
    """The model card of an export, written into it as README.md."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    recipe = (folder / "recipe.toml").read_text(encoding="utf-8")
    (folder / "README.md").write_text(card(run, facts, recipe, repository), encoding="utf-8")


def card(run: FinishedRun, facts: Mapping[str, Any], recipe: str, repository: str) -> str:
    """The model card in Markdown, with its metadata in front."""
    summary, clients = run.summary, list(facts["clients"])
    rounds = f", {summary['rounds']} rounds" if "rounds" in summary else ""
    parts = [
        f"---\n{_metadata(run, facts)}---\n",
        f"# {summary['label']}: {run.recipe.name}\n",
        f"Federated training with confed: recipe `{run.recipe.name}`, seed {run.recipe.run.seed}{rounds}, "
        f"{len(summary['clients'])} clients.\n",
        f"{_PERSONAL if clients else _SHARED}\n",
        *_results(run, clients),
        *_use(facts, clients, repository, asked=kind_of_answers(run) in ("answers", "conversations")),
        "## Privacy\n",
        f"{_privacy(summary)}\n",
        "## Provenance\n",
        f"{_provenance(summary, facts, run)}\n",
        f"## Recipe\n\n```toml\n{recipe.strip()}\n```\n",
    ]
    return "\n".join(parts)


def _metadata(run: FinishedRun, facts: Mapping[str, Any]) -> str:
    """The card's head, which the hub reads."""
    from huggingface_hub import EvalResult, ModelCardData

    base = _base(facts)
    task = _PIPELINES[kind_of_answers(run)]
    data = run.recipe.sections["data"]["name"]
    results = [
        EvalResult(task, data, data, str(run.summary.get("metric", "")), round(value, 6), metric_name=_name(name, run))
        for name, value in _values(run).items()
        if name in _NAMES
    ]
    given = {
        "library_name": "confed",
        "tags": ["federated-learning", "vision-language", str(run.summary["algorithm"]), *(["peft"] if base else [])],
        "base_model": base,
        "pipeline_tag": task,
    }
    # The hub asks for a name with results.
    found = ModelCardData(**given, **({"model_name": run.recipe.name, "eval_results": results} if results else {}))
    return found.to_yaml() + "\n"


def _base(facts: Mapping[str, Any]) -> str | None:
    source = facts["backbone"]["source"]
    return None if source is None else published_name(source, short=True)


def _values(run: FinishedRun) -> dict[str, float]:
    names = [*HEADLINES, *(LABELS if run.labelled else ())]
    return {name: value for name in names if (value := headline(run.summary, name)) is not None}


def _results(run: FinishedRun, clients: list[str]) -> list[str]:
    """Table of test results; single clients are named only where their models are here."""
    values = _values(run)
    if not values:
        return []
    metric = str(run.summary.get("metric", ""))
    rows = [(_name(name, run), value) for name, value in values.items()]
    rows += [(f"global model, {_escaped(place)}", v) for place, v in numbers(run.summary.get("global_unseen")).items()]
    personal = numbers(run.summary.get("personal"))
    rows += [(f"personal model, {_escaped(name)}", personal[name]) for name in clients if name in personal]
    lines = "\n".join(f"| {name} | {100 * value:.1f} |" for name, value in rows)
    note = "" if clients else " Personal models were measured and are not here."
    kept = note if any("personal" in name for name, _ in rows) else ""
    return [f"## Results\n\n| test {metric} in %, one seed | |\n|---|---:|\n{lines}\n{kept and chr(10) + kept.strip()}"]


def _escaped(name: str) -> str:
    """A name as Markdown shows it, in a cell of a table too: no markup, no HTML."""
    return re.sub(r"([\\`|<\[*])", r"\\\1", " ".join(name.split()))


def _use(facts: Mapping[str, Any], clients: list[str], repository: str, *, asked: bool) -> list[str]:
    who = f" --client {shlex.quote(clients[0])}" if clients and (facts["own_heads"] or not facts["global"]) else ""
    question = ' --question "..."' if asked else ""
    lines = [
        f"## Use\n\nWith confed {VERSION} or later:\n",
        f"```sh\nconfed predict hf:{repository} --image x.jpg{question}{who}\n```\n",
    ]
    if clients:
        lines.append(f"`--client` chooses a personal model: {', '.join(map(_escaped, clients))}.\n")
    lines.append(
        "The folders `global` and `clients/NAME` say in their own README how `transformers` and `peft` load them.\n"
    )
    return lines


def _privacy(summary: Mapping[str, Any]) -> str:
    """The ledger: the largest epsilon of a client, and what it means."""
    found: list[str] = []
    for key, what in ((FIELD, "Noise on updates"), (EXAMPLES, "Noise on gradients of examples")):
        ledger = summary.get(key)
        if not isinstance(ledger, Mapping):
            continue
        spent = numbers(ledger.get("epsilon"))
        most = f"ε = {max(spent.values()):.3g}" if spent else "ε is not bounded"
        found.append(f"- {what}: {most} at δ = {ledger['delta']:g} (the client that spent most). {ledger['guarantee']}")
    return "\n".join(found) or "No noise was added in training: there is no differential privacy, ε is not bounded."


def _provenance(summary: Mapping[str, Any], facts: Mapping[str, Any], run: FinishedRun) -> str:
    backbone = facts["backbone"]
    revision = run.recipe.sections["model"].get("revision")
    if backbone["source"] is not None:
        base = f"`{backbone['source']}`" + (f", revision `{revision}`" if revision else ", no revision pinned")
    else:
        base = "in this repository" + ("" if backbone["copied"] else ", trained as a whole")
    rows = {"base": base, "SHA-256 of its tensors": backbone["sha256"]}
    rows |= {f"version of {name}": version for name, version in summary.get("versions", {}).items()}
    rows |= {f"SHA-256 of {name}": digest for name, digest in summary.get("digests", {}).items()}
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
