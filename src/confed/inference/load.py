"""Models that :func:`confed.inference.export.export` wrote, loaded again; and the layout that both agree on.

An export is one folder for all models of a run, because they share a backbone:

| file | content |
|---|---|
| ``confed.json``, ``recipe.toml`` | how the network is built |
| ``backbone/`` | configuration and tokenizer; ``model.safetensors`` unless the backbone is a published one |
| ``global/`` | what the clients share |
| ``clients/<name>/`` | a client's own model: its head, its private tensors, its version of what is shared |

A model's folder holds ``config.json`` (answers and task under "confed") and, as far as it has them,
``adapter_config.json`` with ``adapter_model.safetensors`` (LoRA and IA3, as ``peft`` has them, with the head where
the plain class has the same), ``adapters.safetensors`` (bottleneck adapters, prompts, what a method added),
``head.safetensors``, ``trained.safetensors`` (a finetuned part of the backbone), or ``model.safetensors`` (all of it).
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from confed.engines.perform import Workspace
from confed.federation.client_info import ClientInfo
from confed.federation.file_names import path_of
from confed.federation.params import copy_into, matches_any
from confed.federation.randomness import generator
from confed.federation.reading import check_entries, faults_of, read_bounded
from confed.federation.specs import (
    ComparesCaptions,
    RanksTexts,
    TaskAware,
    WrapsModel,
    WritesAnswers,
    model_spec,
    task_spec,
)
from confed.federation.state import ServerState
from confed.federation.structure import adapter_bank, heads_of
from confed.inference.finished_run import FinishedRun, TrainedModel
from confed.models import create_model
from confed.models.pretrained import check_fit, read_tensors
from confed.models.tokenizer import known_words
from confed.recipes.recipe import Recipe, load_recipe
from confed.registry import allowing_code, models, trusted
from confed.registry import tasks as registered_tasks
from confed.results.summary import Summary
from confed.runs.encode import derived_options
from confed.tasks.contrastive import Contrastive

FACTS = "confed.json"
SOURCES = ("pretrained", "language", "source")  # options of models that name published weights
# Keys that the files of an export must have, and the types of their values.
_FACTS: Mapping[str, type | tuple[type, ...]] = {
    "vocab_size": int, "image_size": int, "heads": list, "tokenizer": dict, "backbone": dict, "extended": bool,
    "own_heads": bool, "global": bool, "clients": list,
}  # fmt: skip
_BACKBONE = {"copied": bool, "source": (str, type(None)), "sha256": (str, type(None))}
_MOST_SIDE = 8192  # pixels of a picture's side, and features of a region
_OWN = {"answers": list, "task": str, "head": str, "tensors": list}
_PEFT, _PREFIX = "adapter_model.safetensors", "base_model.model."
_FILES = ("model.safetensors", "trained.safetensors", "head.safetensors", "adapters.safetensors", _PEFT)
_INJECTED = re.compile(r"(.+)\.(lora_\w+|ia3_l)\.default(\.\w+)?")
_STORED = re.compile(r"(.+)\.(lora_\w+|ia3_l)(\.\w+)?")


def load_exported(
    directory: Path | str, client: str | None = None, *, shared: bool = False, allow_code: Sequence[str] = ()
) -> TrainedModel:
    """A model of an exported run; nothing else of the run is needed.

    A folder that holds no export or no such model, a missing or damaged file, tensors that do not fit (the message
    names the first few), a backbone that is missing or another one than in training, and a module that is not allowed
    are all refused with a ValueError.

    Args:
        directory: the folder that :func:`confed.inference.export.export` wrote.
        client: whose model; None for the global one.
        shared: the global values of all that is shared with the client's own head and private tensors, instead of
            the client's own version of what is shared.
        allow_code: modules of yours whose methods, models, tasks and tokenizers the export may name, beside those that
            are allowed anyway (:func:`confed.registry.allow_code`); its recipe can run what is in them.
    """
    with allowing_code(allow_code):
        return ExportedRun(Path(directory)).model(client, shared=shared)


def _load(run: "ExportedRun", client: str | None, shared: bool) -> TrainedModel:
    """A model of an exported run."""
    directory, facts, recipe = run.folder, run.facts, run.recipe
    place = directory / "global" if client is None else path_of(directory / "clients", client)
    if not (place / "config.json").is_file():
        raise ValueError(f"{place} must hold an exported model, it lacks config.json")
    model_facts = _own_facts(place / "config.json")
    tokenizer = _tokenizer(directory / "backbone", facts["tokenizer"])
    if facts["vocab_size"] != tokenizer.vocab_size:  # before a table of that many rows is made
        raise ValueError(
            f"{directory / FACTS}: vocab_size must be that of the tokenizer beside it, {tokenizer.vocab_size}, got "
            f"{facts['vocab_size']}"
        )
    answers: tuple[str, ...] = tuple(model_facts["answers"])
    model: nn.Module = _built(
        recipe, facts, len(answers) if model_facts["head"] == "answers" else 1, known_words(tokenizer)
    )
    task = task_of(recipe, model_facts["task"], answers, tokenizer)
    if isinstance(task, WrapsModel):
        wrapping = _without_glove(task, directory) if facts["backbone"]["copied"] else task
        model = wrapping.wrap(model, answers, torch.Generator().manual_seed(recipe.run.seed))
    _fill_backbone(model, directory, facts)
    algorithm: Any = run.algorithm.configure(model, task)
    if facts["extended"]:
        algorithm.add_modules(model, generator(recipe.run.seed, 0, "", "extend"))
    prefix = model_spec(model).published_prefix
    tensors = _read(place, prefix)
    if client is not None and shared:
        common = ServerState(0, _read(directory / "global", prefix))
        received = algorithm.broadcast(common, ClientInfo(client, 0, head=model_facts["head"])).tensors
        tensors |= {name: tensor for name, tensor in received.items() if name in tensors}
    _copy(model.state_dict(keep_vars=True), tensors, model_facts["tensors"], place)
    if isinstance(model, TaskAware):
        model.begin(task)
    network = algorithm.deployed_model(model.eval())
    return TrainedModel(
        network,
        tokenizer,
        answers,
        facts["image_size"],
        task,
        facts.get("regions", {}).get("encoder"),
        recipe.sections["data"].get("fit", "squeeze"),
    )


# The layout -------------------------------------------------------------------------------------------------


def backbone_of(model: nn.Module) -> dict[str, Tensor]:
    """The live tensors of a model without heads and without what a finetuning added, under their plain names."""
    bank = adapter_bank(model)
    inside = tuple(f"*.{name}.*" for name in (bank.names if bank is not None else ()))
    heads = tuple(f"{head}." for head in heads_of(model).values())
    live: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():  # digests have tied tensors under all their names
        if not (name.startswith((*heads, "prompts.")) or matches_any(name, inside) or _INJECTED.fullmatch(name)):
            live[name.replace(".base_layer.", ".")] = tensor
    return live


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, kinds, shapes and values."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def to_peft(name: str, prefix: str = "") -> str | None:
    """What ``peft`` calls a tensor of LoRA or IA3 in its files; None for other tensors."""
    match = _INJECTED.fullmatch(name.removeprefix(prefix))
    return f"{_PREFIX}{match[1]}.{match[2]}{match[3] or ''}" if match else None


def from_peft(name: str, prefix: str = "") -> str:
    """The model's name of a tensor in one of ``peft``'s files; see :func:`to_peft`."""
    name = prefix + name.removeprefix(_PREFIX)
    match = _STORED.fullmatch(name)
    return f"{match[1]}.{match[2]}.default{match[3] or ''}" if match else name


# Checks -----------------------------------------------------------------------------------------------------


def read_facts(directory: Path) -> dict[str, Any]:
    """Content of an export's :data:`FACTS`, checked: an export may be a download; a fault is a ValueError."""
    file = directory / FACTS
    if not file.is_file():
        raise ValueError(f"{directory} must be a folder that `confed export` wrote, it has no {FACTS}")
    facts = _json(file)
    check_entries(facts, _FACTS, file)
    check_entries(facts["backbone"], _BACKBONE, f"{file}: backbone")
    how = facts["tokenizer"]
    ours = {"max_length": int} if how.get("chat") else {"max_length": int, "answers": bool, "closing": bool}
    check_entries(
        {"captions": False, **how}, {"type": str} if "type" in how else ours | {"captions": bool}, f"{file}: tokenizer"
    )
    for key in ("regions", "shapes"):
        check_entries({key: {}, **facts}, {key: dict}, file)
    regions = {"width": 0, "encoder": None, **facts.get("regions", {})}
    check_entries(regions, {"width": int, "encoder": (str, type(None))}, f"{file}: regions")
    sizes = {"image_size": facts["image_size"], "regions.width": regions["width"]}
    for key, size in sizes.items():
        if not 0 <= size <= _MOST_SIDE:
            raise ValueError(f"{file}: {key} must lie in 0 to {_MOST_SIDE}, got {size}")
    _check_texts(facts, ("heads", "clients"), file)
    return facts


def _own_facts(file: Path) -> dict[str, Any]:
    """What a model's configuration says to confed, checked."""
    content = _json(file)
    check_entries(content, {"confed": dict}, file)
    facts: dict[str, Any] = content["confed"]
    check_entries(facts, _OWN, f"{file}: confed")
    _check_texts(facts, ("answers", "tensors"), f"{file}: confed")
    return facts


def _json(file: Path) -> Any:
    with faults_of(file, "a JSON object"):
        return json.loads(read_bounded(file).decode())


def _check_texts(content: Mapping[str, Any], keys: Iterable[str], where: object) -> None:
    for key in keys:
        if other_values := [value for value in content[key] if not isinstance(value, str)]:
            raise ValueError(f"{where}: {key} must be texts, got {str(other_values[0])[:40]!r}")


# Loading ----------------------------------------------------------------------------------------------------


def _tokenizer(directory: Path, facts: Mapping[str, Any]) -> Any:
    from confed.models.caption_tokenizer import AnswerTokenizer
    from confed.models.tokenizer import bert_tokenizer

    if facts.get("chat"):
        from confed.models.hf.prompts import ChatTokenizer

        return ChatTokenizer.load(directory, facts["max_length"])
    if "type" in facts:
        return trusted("tokenizer", facts["type"]).load(directory)
    if facts.get("captions"):
        from confed.models.caption_tokenizer import saved_tokenizer

        return saved_tokenizer(directory, facts["max_length"])
    questions = bert_tokenizer(directory, facts["max_length"])
    return AnswerTokenizer(questions, facts["closing"]) if facts["answers"] else questions


def task_of(recipe: Recipe, name: str, answers: Sequence[str], tokenizer: Any) -> Any:
    """What is asked of a model; it selects the head, or says which answers a model that writes them chooses from."""
    listed = recipe.sections["task"]["name"]  # of a task of one's own "module:Class", where `name` is the class's
    if name not in (listed, task_spec(registered_tasks[listed]).name):
        return registered_tasks[name]()
    task: Any = recipe.construct("task", answers=len(answers), types=())
    if isinstance(task, ComparesCaptions):
        task = task.reading(tokenizer, [("nothing",) * 10])  # texts are decoded, and compared with nothing here
    if isinstance(task, WritesAnswers) and task.writing is not None:
        return task
    return task.choosing(tokenizer.answers(answers)) if isinstance(task, RanksTexts) else task


def _without_glove(task: Any, directory: Path) -> Any:
    """The task, with embeddings of the stored width in the place of those of a file that is not here."""
    if not isinstance(task, Contrastive) or task.glove is None or task.glove.is_file():
        return task
    stored = read_tensors(directory / "backbone" / "model.safetensors")
    return replace(task, glove=None, embedding=stored["apn.embedding.weight"].shape[1])


def _built(recipe: Recipe, facts: Mapping[str, Any], answers: int, words: Sequence[str]) -> nn.Module:
    """The network; its backbone has published weights, or values that the export replaces."""
    options = dict(recipe.sections["model"])
    name = options.pop("name")
    parameters = signature(models[name]).parameters
    for key in (*SOURCES, "glove") if facts["backbone"]["source"] is None else ():
        if key == "glove" and options.get(key) is not None and Path(options[key]).is_file():
            continue  # its vectors have the width of the embedding
        if key in parameters and (parameters[key].default is None or isinstance(parameters[key].default, bool)):
            options[key] = False if isinstance(parameters[key].default, bool) else None
    if facts["heads"]:
        options["heads"] = tuple(facts["heads"])
    shapes = {key: tuple(value) if isinstance(value, list) else value for key, value in facts.get("shapes", {}).items()}
    options |= derived_options(name, facts.get("regions", {}).get("width", 0), words, shapes)
    try:
        return create_model(name, answers=answers, vocab_size=facts["vocab_size"], seed=recipe.run.seed, **options)
    except OSError as error:
        source = facts["backbone"]["source"]
        if source is None:
            raise
        raise ValueError(
            f"the model {name!r} needs its backbone {source!r}, which the export names and does not hold: {error}"
        ) from error


def _fill_backbone(model: nn.Module, directory: Path, facts: Mapping[str, Any]) -> None:
    expected = facts["backbone"]["sha256"]
    if expected is None:  # all of it was trained
        return
    tensors = backbone_of(model)
    file = directory / "backbone" / "model.safetensors"
    if facts["backbone"]["copied"]:
        _copy(tensors, read_tensors(file), tensors, file)
    file_digest = digest(tensors)
    if file_digest != expected:
        source = file if facts["backbone"]["copied"] else facts["backbone"]["source"]
        raise ValueError(
            f"the backbone {str(source)!r} is not the one that was trained on: the SHA-256 of its tensors must be "
            f"{expected}, got {file_digest}"
        )


def _copy(live: Mapping[str, Tensor], tensors: Mapping[str, Tensor], needed: Iterable[str], source: object) -> None:
    """Copies tensors into a model's."""
    check_fit(live, tensors, needed, f"{source} does not fit the model")
    copy_into([live[name] for name in tensors], list(tensors.values()))


def _read(place: Path, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of a model's folder, by the model's names."""
    values: dict[str, Tensor] = {}
    for name in _FILES:
        if (place / name).is_file():
            tensors = read_tensors(place / name)
            values |= {from_peft(key, prefix): t for key, t in tensors.items()} if name == _PEFT else tensors
    return values


# An exported run, to be asked like the folder of a finished one -----------------------------------------------


def is_exported(folder: Path) -> bool:
    return (folder / FACTS).is_file()


class ExportedRun(FinishedRun):
    """A folder that :func:`confed.inference.export.export` wrote, as a run without data and results."""

    def __init__(self, folder: Path) -> None:  # not the base's, which reads a run folder
        self.folder = folder
        self.facts = read_facts(folder)
        self.recipe = load_recipe(folder / "recipe.toml")
        self.algorithm: Any = self.recipe.construct("algorithm")
        self.summary = Summary({"label": self.algorithm.title, "clients": self.facts["clients"]})
        self.owners = list(self.facts["clients"])
        self._loaded: tuple[str | None, bool, TrainedModel] | None = None

    @property
    def global_file(self) -> Path:
        """Configuration of what is shared, if anything is."""
        return self.folder / "global" / "config.json"

    @property
    def needs_own_parts(self) -> bool:
        """Whether what is shared answers with parts of a client's own only, such as its head."""
        return bool(self.facts["own_heads"])

    @property
    def shapes(self) -> dict[str, Any]:
        """What pictures, sounds and series of the training data are like."""
        return dict(self.facts.get("shapes", {}))

    def load(self) -> None:
        """Nothing: a model is loaded when it is asked for."""

    def model(self, client: str | None, *, shared: bool = False) -> TrainedModel:
        """The global or a personal model, loaded once in a row."""
        if self._loaded is None or self._loaded[:2] != (client, shared):
            self.check(client, shared=shared)
            trained = _load(self, client, shared)
            self._loaded, self.workspace = (client, shared, trained), Workspace(trained.model)
        return self._loaded[2]
