"""Pretrained weights with their words and answers, in one safetensors file or in a folder of ``transformers``.

Also what a backbone tells :mod:`confed.prepare.pretraining` about its inside, so that one engine makes every mini
model.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from confed.federation.atomic import write_atomically
from confed.federation.protocols import Batch
from confed.federation.reading import check_header
from confed.models.hub_names import gated, hub_name

WEIGHTS = Path(__file__).parent / "weights"
MINI_WEIGHTS = WEIGHTS / "vilt_mini.safetensors"
FACTS = "pretraining.json"  # file of a folder of weights that says how they were made
_GROWING = ("word_embeddings.weight", "position_embeddings.weight", "cls.predictions.bias")
"""Endings of the names of tensors with one row per token id or text position; pictures' positions are no layers."""


class States(NamedTuple):
    """What a model says about a batch in pre-training; what it does not have is None."""

    loss_logits: Tensor | None = None  # scores of the answers or classes, shape (B, C), for a cross-entropy with label
    answer_loss: Tensor | None = None  # of a generative model instead, the loss of the right answer's tokens, a scalar
    # patches after the first visual block, row by row and without class token, shape (B, P, d)
    early: Tensor | None = None
    late: Tensor | None = None  # patches after the second visual block, shape (B, P, d)
    asked: Tensor | None = None  # the question's tokens after they have seen the picture, shape (B, L, d)
    words: Tensor | None = None  # the word embeddings, shape (vocabulary, d)


@runtime_checkable
class Pretrainable(Protocol):
    """A backbone that :func:`confed.prepare.pretraining.pretrain` can make from nothing."""

    def pretraining_states(self, batch: Batch) -> States:
        """The model's inside on a batch, in training mode."""
        ...


def packaged(model: str) -> bool:
    """Whether the package has weights of this mini model."""
    return (WEIGHTS / f"{model}.safetensors").is_file() or (WEIGHTS / model / FACTS).is_file()


def weights_file(model: str, pretrained: bool | Path | str = True) -> Path:
    """Where a model's weights lie: the packaged file or folder for True, else the given one."""
    if not isinstance(pretrained, bool):
        return Path(pretrained)
    if not packaged(model):
        raise ValueError(
            f"{model} comes without weights: make them with `confed weights pretrain {model} --out FILE` and give "
            "pretrained=FILE, or give pretrained=false"
        )
    folder = WEIGHTS / model
    return folder if folder.is_dir() else WEIGHTS / f"{model}.safetensors"


def save(model: nn.Module, file: Path, *, words: Sequence[str], answers: Sequence[str], **facts: Any) -> None:
    """Writes a model's tensors and, as metadata, its words, its answers and further JSON facts."""
    metadata = {"words": list(words), "answers": list(answers), **facts}
    write_weights(file, model.state_dict(), {key: json.dumps(value) for key, value in metadata.items()})


def write_weights(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file, which appears under its name only when it is complete."""
    from safetensors.torch import save

    file.parent.mkdir(parents=True, exist_ok=True)
    # Copies, because the format refuses tensors that share memory, as tied embeddings do.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    write_atomically(file, save(copies, dict(metadata)))


def describe(file: Path = MINI_WEIGHTS) -> dict[str, Any]:
    """The metadata of a file that :func:`save` wrote: ``words``, ``answers`` and what pre-training noted."""
    if (file / FACTS).is_file():
        return json.loads((file / FACTS).read_text(encoding="utf-8"))
    try:
        metadata = {key: json.loads(value) for key, value in read_weights(file)[1].items()}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no weights file that `confed weights pretrain` wrote: {error}") from error
    if not {"words", "answers"} <= metadata.keys():
        raise ValueError(f"{file} is no weights file of `confed weights pretrain`: it lacks its words and answers")
    return metadata


def read_weights(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; a fault is a ValueError."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise ValueError(f"expected a safetensors file at {file}, found none")
    try:
        check_header(file)
        with safe_open(file, framework="pt") as content:
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
            return tensors, content.metadata() or {}
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file} must be a complete safetensors file: {error}") from error


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The content of a safetensors file; a fault is a ValueError."""
    return read_weights(file)[0]


def mini_words(model: str = "vilt_mini") -> tuple[str, ...]:
    """The words that a packaged mini model was pre-trained with; empty if the package has no weights of it."""
    return tuple(describe(weights_file(model))["words"]) if packaged(model) else ()


def load_into(model: nn.Module, file: Path, answers: Sequence[str] | None) -> None:
    """Copies saved values into a model.

    Tensors with one row per token or text position may have more rows than the file: the additional rows keep
    their fresh values. The head is copied only if ``answers`` equals the saved answers, in order.
    """
    noted = describe(file)["answers"]
    with_head = answers is not None and list(answers) == noted
    saved = read_tensors(file)
    state = model.state_dict()
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    faults: list[str] = []
    for name, value in saved.items():
        if name.startswith("classifier.") and not with_head:
            continue
        target = state.get(name)
        if target is None:
            raise ValueError(f"the weights {file.name} have a tensor {name!r} that the model lacks")
        if name.endswith(_GROWING) and target.ndim == value.ndim:
            rows = min(len(value), len(target)) if "position" in name else len(value)
            if len(target) < rows:
                raise ValueError(f"vocab_size must be at least {rows} for the weights {file.name}, got {len(target)}")
            copies.append((target[:rows], value[:rows]))
        elif target.shape != value.shape:
            faults.append(f"{name} must have the shape {tuple(value.shape)}, the model's is {tuple(target.shape)}")
        else:
            copies.append((target, value))
    refuse_faults(faults, f"the weights {file.name} do not fit")
    with torch.no_grad():
        for target, value in copies:
            target.copy_(value)


# Backbones of transformers: randomly initialised from a seed --------------------------------------------------

Body = TypeVar("Body")


def seeded(seed: int, build: Callable[[], Body]) -> Body:
    """What ``build`` returns; the library's initial values come from ``seed`` and the global generator is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build()


@contextmanager
def reading(source: Path | str, what: str) -> Iterator[None]:
    """Context in which the library reads files of a model; what it cannot read is a ValueError that says why."""
    from safetensors import SafetensorError

    try:
        with without_progress_bars():
            yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        why = gated(str(source), error) or f"no {what} could be read from {str(source)!r}: {unread_because(error)}"
        raise ValueError(why) from error


def read_whole(auto: Any, source: str, expected: str, what: str, **options: Any) -> Any:
    """A model of the library by one of its automatic classes, of a source that has all of its tensors."""
    with reading(source, what):
        body, description = auto.from_pretrained(
            place_of(source, expected), output_loading_info=True, trust_remote_code=False, use_safetensors=True,
            **options,
        )  # fmt: skip
    if missing := sorted(description["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"the weights of {source!r} lack {missing[0]}{more}; nothing is made up in their place")
    return body


def published(kind: type[Body], source: Path | str, seed: int, **options: Any) -> Body:
    """A checkpoint as a model of the library."""
    model: Any = kind
    name, family = str(source), _family(kind)
    path = Path(name).expanduser()
    # A Path is a folder's here as a text is: recipes give either.
    where = checked_folder(path) if path.is_dir() else hub_name(name)
    if where is None:
        raise ValueError(
            f"expected a folder with a {family} checkpoint or a hub name owner/name, got {name!r}: there is no such "
            "folder (hub:owner/name is always a hub name)"
        )
    # With other shapes the library ends in an error that does not say which; they are reported here instead.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with reading(name, f"{family} checkpoint"):
        body, description = seeded(
            seed, lambda: model.from_pretrained(where, trust_remote_code=False, use_safetensors=True, **options)
        )
    faults = [
        f"{tensor} has shape {tuple(came)}, expected {tuple(expected)}"
        for tensor, came, expected in sorted(description["mismatched_keys"])
    ]
    faults += [f"{tensor} is missing" for tensor in sorted(description["missing_keys"]) if "pooler." not in tensor]
    refuse_faults(faults, f"{name!r} is not a checkpoint of this {family}")
    return body


def body_of(
    kind: type[Body], config: type[Any], pretrained: Path | str | None, seed: int, dropout: float, *,
    pooling: bool = False, **sizes: Any,
) -> Body:  # fmt: skip
    """A model of the library from a checkpoint, or of the given sizes with random weights."""
    model: Any = kind
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if pretrained is not None:
        return published(kind, pretrained, seed, add_pooling_layer=pooling, **drop)
    return seeded(seed, lambda: model(config(**sizes, **drop), add_pooling_layer=pooling))


def check_fit(live: Mapping[str, Tensor], tensors: Mapping[str, Tensor], needed: Iterable[str], what: str) -> None:
    """A ValueError that names the first tensors that a model lacks, does not know, or has in another shape."""
    faults = [f"{name} is missing" for name in needed if name not in tensors]
    faults += [f"{name} is unknown" for name in tensors if name not in live]
    faults += [
        f"{name} has shape {tuple(tensor.shape)}, expected {tuple(live[name].shape)}"
        for name, tensor in tensors.items()
        if name in live and tensor.shape != live[name].shape
    ]
    refuse_faults(faults, what)


def refuse_faults(faults: Sequence[str], what: str) -> None:
    """A ValueError that lists the first three of some faults."""
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise ValueError(f"{what}: {'; '.join(faults[:3])}{more}")


def place_of(source: str, expected: str) -> str:
    """A packaged model's folder, a folder, or a name on the hub; a ValueError that says what is expected."""
    packaged = WEIGHTS / source
    path = packaged if packaged.parent == WEIGHTS and packaged.is_dir() else Path(source).expanduser()
    where = checked_folder(path) if source and path.is_dir() else hub_name(source)
    if where is None:
        raise ValueError(f"model.source must be {expected}; there is no folder {source!r}")
    return where


def checked_folder(folder: Path) -> str:
    """A folder with a model of the library; a ValueError where it has pickles alone, or adapts a model elsewhere."""
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder} holds an adapter of another model (adapter_config.json), which is not followed")
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} has its weights in {pickled[0]}, and runs read safetensors only: `confed weights convert model "
            f"{folder} OUT` writes them so, without running what is in the file"
        )
    return str(folder)


def unread_because(error: Exception) -> str:
    """What the library says of a model that it cannot read, on one line, without its advice to run foreign code."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return "its files bring code of their own (auto_map), which is never run; classes of `transformers` alone are"
    if "use_safetensors" in text:
        return (
            "it has no weights as safetensors, and runs read no others: "
            "`confed weights convert model FOLDER OUT` writes them"
        )
    return text[:300]


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Context in which the library draws no bars and no tables of unused tensors between the lines of a run."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def _family(kind: type[Any]) -> str:
    """What people call the model of a class of ``transformers``."""
    name = kind.__name__.removesuffix("Model").removesuffix("ForQuestionAnswering")
    return {"Auto": "model", "Vilt": "ViLT", "Bert": "BERT", "ViT": "ViT", "Blip": "BLIP"}.get(name, name)
