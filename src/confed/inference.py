"""Asking a finished run's models about a picture, and handing them over in the Hugging Face layout."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from confed.data.examples import Tokenizer, channels_first
from confed.data.pictures import read_picture, resize
from confed.federation.protocols import Output
from confed.recipe import load_recipe
from confed.results.folder import RunFolder, is_run, is_study, read_jsonl, run_folders

__all__ = ["TrainedModel", "export", "load_exported", "predict", "run_of"]

_ADAPTER = re.compile(r"(.+)\.(\w+)\.(down|up)\.(weight|bias)$")
_STRANGE = "ꙮ"
"""A letter that no vocabulary has: its token is the one for unknown words."""


@dataclass(frozen=True)
class TrainedModel:
    """A model with everything that turns a picture and a question into answers.

    Attributes:
        model: the network, in evaluation mode.
        tokenizer: what it reads questions with.
        answers: an answer's text by its label.
        image_size: pixels per side of the pictures that it was trained on.
    """

    model: nn.Module
    tokenizer: Tokenizer
    answers: tuple[str, ...]
    image_size: int

    def ask(self, image: Path | str, question: str, top: int = 3) -> dict[str, Any]:
        """The most probable answers to a question about a picture.

        Args:
            image: a picture file of any size; it is squeezed to a square as the training pictures were.
            question: the question.
            top: how many answers, at most all.

        Returns:
            ``answers``, a list of ``answer`` and ``probability``, best first, and ``unknown_words``, the
            words of the question that the tokenizer does not know.

        Raises:
            ValueError: an empty question, a file that is no readable picture, or ``top`` below 1.
        """
        if not question.strip():
            raise ValueError(f"question must contain at least a word, got {question!r}")
        if top < 1:
            raise ValueError(f"top must be at least 1, got {top}")
        picture = resize(read_picture(image), self.image_size)
        text, mask = self.tokenizer([question])
        batch = {"image": channels_first(picture[None]), "text": text, "text_mask": mask}
        with torch.inference_mode():
            output: Output = self.model(batch)
        best = output.logits[0].float().softmax(0).topk(min(top, len(self.answers)))
        return {
            "answers": [
                {"answer": self.answers[int(label)], "probability": round(float(p), 6)}
                for p, label in zip(best.values, best.indices, strict=True)
            ],
            "unknown_words": self.unknown_words(question),
        }

    def unknown_words(self, question: str) -> list[str]:
        """The words of a question that the tokenizer turns into its token for unknown words."""
        words = list(dict.fromkeys(re.findall(r"[^\W_]+", question)))
        ids, _ = self.tokenizer([_STRANGE, *words])
        unknown = ids[0, 1]  # position 0 is the token that begins every text
        return [word for word, row in zip(words, ids[1:], strict=True) if bool((row == unknown).any())]


def predict(folder: Path, image: Path | str, question: str, client: str | None = None, top: int = 3) -> dict[str, Any]:
    """Asks a finished run's model about a picture.

    Args:
        folder: a run folder.
        image: a picture file of any size.
        question: the question.
        client: whose personal model answers; None for the global one.
        top: how many answers.

    Returns:
        ``model`` ("global" or the client), and ``answers`` and ``unknown_words`` as
        :meth:`TrainedModel.ask` has them.

    Raises:
        ValueError: the folder is not that of a finished run, it has no such model, the question is empty, or
            the picture cannot be read.
    """
    summary = _finished(folder)
    file = _model_file(folder, summary, client)
    if not question.strip():  # before the data are made, which takes seconds
        raise ValueError(f"question must contain at least a word, got {question!r}")
    read_picture(image)
    trained, workspace = _open(folder)
    _fill(workspace, file)
    return {"model": client or "global", **trained.ask(image, question, top)}


def export(folder: Path, target: Path) -> dict[str, str]:
    """Writes the global and every personal model of a finished run in the Hugging Face layout.

    Every folder is complete in itself: ``model.safetensors`` and ``config.json`` are those of
    ``transformers.ViltForQuestionAnswering``, beside them are the tokenizer, the picture preprocessing and a
    README. Adapters, which that class cannot hold, are in ``adapters.safetensors`` for :func:`load_exported`.

    Args:
        folder: a run folder.
        target: the folder to write; it appears only when it is complete.

    Returns:
        "global" and "personal/<client>", as far as the method has them -> folder.

    Raises:
        ValueError: the folder is not that of a finished run, the target exists, or the model is not a ViLT.
    """
    summary = _finished(folder)
    if target.exists():
        raise ValueError(f"{target} exists already; name a folder that does not")
    trained, workspace = _open(folder)
    models = RunFolder(folder).models
    files = {"global": models / "global" / "trained.safetensors"} if _has_global(folder) else {}
    files |= {f"personal/{name}": _personal(folder, name) for name in _owners(folder, summary)}
    unfinished = target.with_name(target.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    for name, file in files.items():
        _fill(workspace, file)
        _write(unfinished / name, trained, name, summary)
    unfinished.replace(target)
    return {name: str(target / name) for name in files}


def load_exported(directory: Path | str) -> TrainedModel:
    """A model that :func:`export` wrote, adapters included; nothing else of the run is needed.

    Args:
        directory: the folder of one model, such as ``target/global``.

    Raises:
        ValueError: the folder holds no exported ViLT.
    """
    from transformers import ViltConfig, ViltModel

    from confed.models.tokenizer import bert_tokenizer
    from confed.models.vilt import Vilt

    directory = Path(directory)
    missing = [n for n in ("config.json", "model.safetensors", "tokenizer.json") if not (directory / n).is_file()]
    if missing:
        raise ValueError(f"{directory} must hold an exported model, it lacks {', '.join(missing)}")
    options = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if options.get("model_type") != "vilt":
        raise ValueError(f"{directory}: model_type must be 'vilt', got {options.get('model_type')!r}")
    config = ViltConfig.from_dict(options)
    labels: Any = config.id2label
    answers = tuple(labels[i] for i in range(len(labels)))
    size = options.get("confed_image_size", config.image_size)
    # All values are replaced below; the fork keeps the caller's random numbers as they are.
    with torch.random.fork_rng(devices=[]):
        body = ViltModel(config)
    model = Vilt(body, len(answers), torch.Generator().manual_seed(0), (size, size))
    tensors = load_file(directory / "model.safetensors")
    adapters = directory / "adapters.safetensors"
    if adapters.is_file():
        tensors |= _host_adapters(model, adapters)
    model.load_state_dict(tensors)
    limit = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["truncation"]["max_length"]
    return TrainedModel(model.eval(), bert_tokenizer(directory, limit), answers, size)


# The run folder ---------------------------------------------------------------------------------------------


def run_of(folder: Path) -> Path:
    """The run to ask when a folder may be a study: its main method's first finished seed; a run is itself.

    Raises:
        ValueError: a study without a finished run.
    """
    if not is_study(folder):
        return folder
    finished = [path for path in run_folders(folder) if (path / "summary.json").is_file()]
    if not finished:
        raise ValueError(f"{folder} is a study, not a run, and none of its runs is finished yet")
    recipe = folder / "recipe.toml"
    main = load_recipe(recipe).sections["algorithm"]["name"] if recipe.is_file() else ""
    return next((path for path in finished if path.parent.name == main), finished[0])


def _finished(folder: Path) -> Mapping[str, Any]:
    """The summary of a finished run.

    Raises:
        ValueError: the folder is a study, no run at all, or an unfinished one.
    """
    if is_study(folder):
        runs = ", ".join(str(path) for path in run_folders(folder) if (path / "summary.json").is_file())
        raise ValueError(f"{folder} is a study, not a run; its finished run folders: {runs or 'there are none yet'}")
    if not is_run(folder):
        raise ValueError(f"{folder} is not a run folder: it has no recipe.toml")
    run = RunFolder(folder)
    if not run.summary.is_file():
        done = max((line.get("round", 0) for line in read_jsonl(run.metrics)), default=0)
        raise ValueError(
            f"{folder} is not finished: it stands at round {done}; continue it with `confed resume {folder}`"
        )
    return json.loads(run.summary.read_text(encoding="utf-8"))


def _personal(folder: Path, client: str) -> Path:
    return RunFolder(folder).models / "personal" / client / "trained.safetensors"


def _has_global(folder: Path) -> bool:
    return (RunFolder(folder).models / "global" / "trained.safetensors").is_file()


def _owners(folder: Path, summary: Mapping[str, Any]) -> list[str]:
    """The clients that have a model of their own, in the federation's order."""
    return [name for name in summary["clients"] if _personal(folder, name).is_file()]


def _model_file(folder: Path, summary: Mapping[str, Any], client: str | None) -> Path:
    owners = _owners(folder, summary)
    there = f"clients with one: {', '.join(owners)}" if owners else "no client has one"
    if client is None:
        if not _has_global(folder):
            raise ValueError(f"{summary['label']} has no global model; name a client's personal model: {there}")
        return RunFolder(folder).models / "global" / "trained.safetensors"
    if client not in summary["clients"]:
        raise ValueError(f"no client is called {client!r}; there are {', '.join(summary['clients'])}")
    if client not in owners:
        raise ValueError(f"{client!r} has no personal model, {there}; leave the client out for the global model")
    return _personal(folder, client)


def _open(folder: Path) -> tuple[TrainedModel, Any]:
    """A run's model with its initial values, and the workspace that takes trained ones."""
    from confed.experiment import load_run

    _, _, materials, workspace = load_run(folder)
    dataset = materials.dataset
    examples = next(iter(dataset.clients.values())).train
    trained = TrainedModel(workspace.model, materials.tokenizer, dataset.answers, examples.images.shape[1])
    return trained, workspace


def _fill(workspace: Any, file: Path) -> None:
    from safetensors import SafetensorError

    from confed.results.samples import fill

    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} must be a complete safetensors file: {error}") from error
    fill(workspace, tensors)


# The Hugging Face layout ------------------------------------------------------------------------------------


def _write(directory: Path, trained: TrainedModel, name: str, summary: Mapping[str, Any]) -> None:
    """One model's folder."""
    from confed.models.vilt import Vilt

    model = trained.model
    if not isinstance(model, Vilt):
        raise ValueError(f"only ViLT models have a Hugging Face layout here, got {type(model).__name__}")
    directory.mkdir(parents=True)
    # What a method added for its training (a projection, a second network) is no part of the model it leaves.
    own = ("vilt.", f"{model.answer_head}.")
    state = {key: t.detach().cpu().contiguous() for key, t in model.state_dict().items() if key.startswith(own)}
    extra = {key: state.pop(key) for key in list(state) if _is_adapter(key)}
    (directory / "model.safetensors").write_bytes(save(state, {"format": "pt"}))
    if extra:
        weights = {n: m.adapter_weights for n, m in model.named_modules() if hasattr(m, "adapter_weights")}
        metadata = {"format": "pt", "adapter_weights": json.dumps(weights)}
        (directory / "adapters.safetensors").write_bytes(save(extra, metadata))
    _json(directory / "config.json", _config(model, trained))
    _json(directory / "preprocessor_config.json", _preprocessing(trained.image_size, model.patch))
    keep: Any = getattr(trained.tokenizer, "save", None)
    if keep is not None:
        keep(directory)
        _tokenizer_settings(directory / "tokenizer_config.json")
    (directory / "README.md").write_text(_readme(trained, name, summary, bool(extra)), encoding="utf-8")


def _is_adapter(key: str) -> bool:
    return ".adapter" in key and _ADAPTER.match(key) is not None


def _config(model: Any, trained: TrainedModel) -> dict[str, Any]:
    labels = dict(enumerate(trained.answers))
    config = type(model.vilt.config).from_dict(
        {**model.vilt.config.to_dict(), "id2label": labels, "label2id": {a: i for i, a in labels.items()}}
    )
    config.architectures = ["ViltForQuestionAnswering"]
    return {**json.loads(config.to_json_string(use_diff=False)), "confed_image_size": trained.image_size}


def _preprocessing(size: int, patch: int) -> dict[str, Any]:
    return {
        "image_processor_type": "ViltImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": size},
        "size_divisor": patch,
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_pad": True,
    }


def _tokenizer_settings(path: Path) -> None:
    """Makes ``AutoTokenizer`` read ``tokenizer.json`` as it is."""
    from confed.models.tokenizer import SPECIAL_TOKENS

    if path.is_file():
        return
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    _json(path, {"tokenizer_class": "PreTrainedTokenizerFast", **dict(zip(names, SPECIAL_TOKENS, strict=True))})


def _json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _host_adapters(model: Any, file: Path) -> dict[str, Tensor]:
    """Adds to the model the adapters that a file holds, and returns the file's tensors."""
    from safetensors import safe_open

    from confed.models.adapters import add_adapters

    tensors = load_file(file)
    with safe_open(file, framework="pt") as content:
        weights = json.loads((content.metadata() or {})["adapter_weights"])
    for key, tensor in tensors.items():
        match = _ADAPTER.match(key)
        if match and match[3] == "down" and match[4] == "weight":
            bottleneck, width = tensor.shape
            add_adapters([model.get_submodule(match[1])], width, width // bottleneck, name=match[2])
    for host, values in weights.items():
        model.get_submodule(host).adapter_weights = values
    return tensors


def _readme(trained: TrainedModel, name: str, summary: Mapping[str, Any], adapters: bool) -> str:
    place = name.removeprefix("personal/")
    values: Mapping[str, float] = summary.get("personal" if name != "global" else "global_seen", {})
    value = values.get(place) if name != "global" else summary.get("global_seen_mean")
    figure = f", test {summary['metric']} {value:.1%}" if isinstance(value, float) else ""
    who = "The global model" if name == "global" else f"The personal model of the client {place!r}"
    plain = (
        "It contains adapters, which `ViltForQuestionAnswering` cannot hold: they are in\n"
        "`adapters.safetensors`, and `model.safetensors` alone gives other answers. Load it with confed:\n"
        if adapters
        else "`model.safetensors` and `config.json` are those of `transformers.ViltForQuestionAnswering`:\n\n"
        "```python\n"
        "from transformers import AutoTokenizer, ViltForQuestionAnswering\n\n"
        'model = ViltForQuestionAnswering.from_pretrained("this/folder")\n'
        'tokenizer = AutoTokenizer.from_pretrained("this/folder")\n'
        "```\n\n"
        "With confed:\n"
    )
    return (
        f"# {who} of a {summary['label']} run\n\n"
        f"Recipe {summary['recipe']}, seed {summary['seed']}, {summary['rounds']} rounds{figure}; "
        f"{len(trained.answers)} answers (`id2label` in `config.json`).\n\n{plain}\n"
        "```python\n"
        "from confed.inference import load_exported\n\n"
        'print(load_exported("this/folder").ask("picture.png", "is there a tree ?"))\n'
        "```\n\n"
        f"Pictures are squeezed to {trained.image_size} x {trained.image_size} pixels, not cropped, "
        "and scaled to [-1, 1].\nThe preprocessing of `transformers` keeps a picture's proportions instead: "
        "make pictures square before it.\n"
    )
