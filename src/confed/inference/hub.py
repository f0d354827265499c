"""Exported models on the Hugging Face hub: uploading an export, and fetching one by name.

``hf:OWNER/NAME`` names a model repository, ``hf:OWNER/NAME@REVISION`` a commit, branch or tag of it. Requests go to
``HF_ENDPOINT``, with the token of ``HF_TOKEN`` or of ``hf auth login``, as everywhere with ``huggingface_hub``.
"""

import json
import os
import re
import shlex
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from confed.inference.finished_run import FinishedRun
from confed.inference.load import FACTS
from confed.models.hub_names import hub_name as published_name
from confed.recipes.recipe import Recipe
from confed.results.summary import EXAMPLE_PRIVACY, LABELS, PRIVACY, WORST, Summary, numbers
from confed.results.views import View
from confed.runs.grants import local_paths
from confed.system.plain_text import without_password
from confed.system.release import VERSION

# Model card of an export on the Hugging Face hub: warning, results, use ---------------------------------------

_NAMES: Mapping[str, str] = {
    View.PERSONAL.mean: "personal models, mean over clients",
    WORST: "personal models, worst client",
    View.SEEN.mean: "global model, clients' test data",
    View.UNSEEN.mean: "global model, places that took no part",
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
    return words if measure == View.UNSEEN.mean else run.summary.over_clients(words)


def write_card(folder: Path, run: FinishedRun, repository: str) -> None:
    """The model card of an export, written into it as README.md."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    recipe = (folder / "recipe.toml").read_text(encoding="utf-8")
    (folder / "README.md").write_text(card(run, facts, recipe, repository), encoding="utf-8")


def card(run: FinishedRun, facts: Mapping[str, Any], recipe: str, repository: str) -> str:
    """The model card in Markdown, with its metadata in front."""
    summary, clients = run.summary, list(facts["clients"])
    rounds = f", {summary.rounds} rounds" if summary.rounds else ""
    parts = [
        f"---\n{_metadata(run, facts)}---\n",
        f"# {summary.label}: {run.recipe.name}\n",
        f"Federated training with confed: recipe `{run.recipe.name}`, seed {run.recipe.run.seed}{rounds}, "
        f"{len(summary.clients)} clients.\n",
        f"{_PERSONAL if clients else _SHARED}\n",
        *_results(run, clients),
        *_use(facts, clients, repository, reads_question=run.answer_kind in ("answers", "conversations")),
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

    source = facts["backbone"]["source"]
    base = None if source is None else published_name(source, short=True)
    task = _PIPELINES[run.answer_kind]
    data = run.recipe.sections["data"]["name"]
    results = [
        EvalResult(task, data, data, run.summary.metric, round(value, 6), metric_name=_name(name, run))
        for name, value in _values(run).items()
        if name in _NAMES
    ]
    given = {
        "library_name": "confed",
        "tags": ["federated-learning", "vision-language", run.summary.algorithm, *(["peft"] if base else [])],
        "base_model": base,
        "pipeline_tag": task,
    }
    # The hub asks for a name with results.
    card_data = ModelCardData(**given, **({"model_name": run.recipe.name, "eval_results": results} if results else {}))
    return card_data.to_yaml() + "\n"


def _values(run: FinishedRun) -> dict[str, float]:
    names = [*_NAMES, *(LABELS if run.answer_kind == "labels" else ())]
    return {name: value for name in names if (value := run.summary.headline(name)) is not None}


def _results(run: FinishedRun, clients: list[str]) -> list[str]:
    """Table of test results; single clients are named only where their models are here."""
    values = _values(run)
    if not values:
        return []
    metric = run.summary.metric
    rows = [(_name(name, run), value) for name, value in values.items()]
    rows += [(f"global model, {_escaped(place)}", v) for place, v in run.summary.values(View.UNSEEN).items()]
    personal = run.summary.values(View.PERSONAL)
    rows += [(f"personal model, {_escaped(name)}", personal[name]) for name in clients if name in personal]
    lines = "\n".join(f"| {name} | {100 * value:.1f} |" for name, value in rows)
    absent = not clients and any("personal" in name for name, _ in rows)
    note = "\nPersonal models were measured and are not here." if absent else ""
    return [f"## Results\n\n| test {metric} in %, one seed | |\n|---|---:|\n{lines}\n{note}"]


def _escaped(name: str) -> str:
    """A name as Markdown shows it, in a cell of a table too: no markup, no HTML."""
    return re.sub(r"([\\`|<\[*])", r"\\\1", " ".join(name.split()))


def _use(facts: Mapping[str, Any], clients: list[str], repository: str, *, reads_question: bool) -> list[str]:
    who = f" --client {shlex.quote(clients[0])}" if clients and (facts["own_heads"] or not facts["global"]) else ""
    question = ' --question "..."' if reads_question else ""
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


def _privacy(summary: Summary) -> str:
    """The ledger: the largest epsilon of a client, and what it means."""
    sentences: list[str] = []
    for key, what in ((PRIVACY, "Noise on updates"), (EXAMPLE_PRIVACY, "Noise on gradients of examples")):
        ledger = summary.privacy(key)
        if not ledger:
            continue
        spent = numbers(ledger.get("epsilon"))
        most = f"ε = {max(spent.values()):.3g}" if spent else "ε is not bounded"
        sentences.append(
            f"- {what}: {most} at δ = {ledger['delta']:g} (the client that spent most). {ledger['guarantee']}"
        )
    return "\n".join(sentences) or "No noise was added in training: there is no differential privacy, ε is not bounded."


def _provenance(summary: Summary, facts: Mapping[str, Any], run: FinishedRun) -> str:
    backbone = facts["backbone"]
    revision = run.recipe.sections["model"].get("revision")
    if backbone["source"] is not None:
        base = f"`{backbone['source']}`" + (f", revision `{revision}`" if revision else ", no revision pinned")
    else:
        base = "in this repository" + ("" if backbone["copied"] else ", trained as a whole")
    rows = {"base": base, "SHA-256 of its tensors": backbone["sha256"]}
    rows |= {f"version of {name}": version for name, version in summary.versions.items()}
    rows |= {f"SHA-256 of {name}": digest for name, digest in summary.digests.items()}
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)


# Exported models on the Hugging Face hub: uploading an export -------------------------------------------------

PREFIX = "hf:"
_OURS = ("global/*", "clients/*", "backbone/*")
"""What an earlier export into the same repository may have left and a new one lacks."""
_READ = ("*.json", "*.safetensors", "*.toml", "*.txt", "*.md", "*.model", "*.jinja")
"""Files that an export may hold; none of them is code."""
MOST_BYTES = 100 * 2**30  # largest export that is fetched, in bytes


@dataclass(frozen=True)
class HubName:
    """Name of a model repository."""

    repository: str
    revision: str | None = None  # commit, branch or tag; None for the main branch

    def __str__(self) -> str:
        return PREFIX + self.repository + ("" if self.revision is None else f"@{self.revision}")


def hub_name(text: str) -> HubName:
    """The repository that a text names, with or without ``hf:`` in front; a fault is a ValueError."""
    name_pattern = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
    match = re.fullmatch(rf"({name_pattern}/{name_pattern})(?:@([\w./+-]+))?", text.removeprefix(PREFIX))
    if match is None or ".." in match[1] or "--" in match[1]:
        raise ValueError(f"a repository of the hub must be OWNER/NAME or OWNER/NAME@REVISION, got {text!r}")
    return HubName(match[1], match[2])


def hub_credentials(name: HubName) -> None:
    """Check before anything is computed that an upload can be tried; a fault is a ValueError."""
    from huggingface_hub import get_token

    if name.revision is not None:
        raise ValueError(f"an export goes to the main branch: leave @{name.revision} out")
    if get_token() is None:
        raise ValueError(
            f"no token to upload {name.repository} with: set HF_TOKEN, or log in once with `hf auth login` (a token "
            "with write access)"
        )


def publish(folder: Path, name: HubName, *, private: bool = False, message: str = "") -> str:
    """Upload of an export into a model repository, which is made if it is missing; returns the commit's address."""
    from huggingface_hub import HfApi

    if not (folder / FACTS).is_file():
        raise ValueError(f"{folder} must be a folder that `confed export` wrote, it has no {FACTS}")
    hub_credentials(name)
    api = HfApi(endpoint=_endpoint())
    with _plainly(name):
        api.create_repo(name.repository, private=private, exist_ok=True)
        if private and not api.repo_info(name.repository).private:
            raise ValueError(
                f"{name.repository} is there already and public, so nothing was uploaded: make it private on its page, "
                "choose another name, or leave --private out"
            )
        commit = api.upload_folder(
            repo_id=name.repository,
            folder_path=folder,
            commit_message=message or "Export of confed",
            delete_patterns=list(_OURS),
        )
    return str(commit.commit_url)


def fetch(name: HubName) -> Path:
    """Folder of an export of the hub, downloaded into the cache of ``huggingface_hub`` as far as it is not there."""
    from huggingface_hub import snapshot_download

    with _plainly(name):
        size = _size(name)
        if size > MOST_BYTES:
            raise ValueError(f"{name} has {size / 2**30:,.1f} GiB, at most {MOST_BYTES / 2**30:,.1f} are fetched")
        folder = Path(
            snapshot_download(name.repository, revision=name.revision, allow_patterns=list(_READ), endpoint=_endpoint())
        )
    if not (folder / FACTS).is_file():
        raise ValueError(f"{name} holds no export of confed: it has no {FACTS}")
    return folder


def _size(name: HubName) -> int:
    """Bytes of the files that would be fetched; 0 where the hub does not answer, and the cache may have them."""
    from huggingface_hub import HfApi, errors
    from huggingface_hub.utils import filter_repo_objects

    unreachable = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage] (httpx or httpx2, by version)
    with suppress(unreachable, ConnectionError):  # the download meets them again, and `_plainly` words them
        repository_info = HfApi(endpoint=_endpoint()).model_info(
            name.repository, revision=name.revision, files_metadata=True
        )
        read = filter_repo_objects(
            repository_info.siblings or [], allow_patterns=list(_READ), key=lambda file: file.rfilename
        )
        return sum(file.size or 0 for file in read)
    return 0


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


@contextmanager
def _plainly(name: HubName) -> Generator[None]:
    """Errors of the hub in one sentence that says what to do."""
    from huggingface_hub import errors, is_offline_mode

    repo = name.repository
    unreachable = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage] (httpx or httpx2, by version)
    try:
        yield
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{repo} is gated: ask for access on its page on the hub, then log in (HF_TOKEN or `hf auth login`)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{repo} has no revision {name.revision!r}: give a commit, branch or tag of it") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"no repository {repo} on the hub, or a private one that your token (HF_TOKEN, `hf auth login`) may not see"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ValueError(f"the hub refuses {repo} ({status}): the token needs write access to it") from error
        raise RuntimeError(f"the hub answered {status} about {repo}: {_short(error)}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, unreachable, ConnectionError) as error:
        where = without_password(_endpoint() or "the hub")
        why = "HF_HUB_OFFLINE is set" if is_offline_mode() else _short(error)
        cached = f", and {name} is not in the cache" if isinstance(error, errors.LocalEntryNotFoundError) else ""
        raise RuntimeError(f"{where} cannot be reached{cached}: {why}") from error


def _short(error: Exception) -> str:
    return without_password(" ".join(str(error).split()))[:200]
