"""Declared properties of models and tasks (:class:`ModelSpec`, :class:`TaskSpec`), and protocols of optional behaviour.

A property is declared where the model or task is registered, ``@register_model(spec=ModelSpec(...))``, or as an
attribute of the same name of the class or of the object. What is not declared has the field's default. All other code
asks :func:`model_spec` and :func:`task_spec`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_type_hints, runtime_checkable

import torch
from torch import Tensor, nn

from confed.federation.protocols import Batch, Counting, Output

Spec = TypeVar("Spec", "ModelSpec", "TaskSpec")


@dataclass(frozen=True)
class ModelSpec:
    """What a model reads and gives, and the submodules that methods ask for."""

    tokenizer: Callable[..., Any] | None = None  # makes the tokenizer of its texts, tokenizer(words, **options)
    # section [model] -> side in pixels of the pictures that it reads, which data.image_size is where a recipe does not
    # give it; None for any size
    picture_side: Callable[[Mapping[str, Any]], int | None] | None = None
    # section [model] -> how pictures become squares, which data.fit is where a recipe does not give it: "squeeze",
    # "crop" or "pad"
    picture_fit: Callable[[Mapping[str, Any]], str] | None = None
    reads: Literal["pictures", "regions"] = "pictures"  # pictures themselves, or features of their regions
    # "answers" or "captions", token by token; empty for a model that gives scores of answers or labels
    writes: Literal["", "answers", "captions"] = ""
    converses: bool = False  # whether it writes answers freely, behind any number of turns and pictures
    reads_absent: bool = False  # whether batches may lack some of the modalities
    reads_states: bool = False  # whether it can be told labels that are known, batch["known"]
    answer_head: str | None = None  # name of the submodule that turns features into scores of answers
    # where it has several heads, head as tasks call it -> submodule
    heads_of_tasks: Mapping[str, str] = field(default_factory=dict[str, str])
    # of a model made for split learning, "client" and "server" -> submodules
    split_parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    label_graph: str = ""  # name of the submodule that is a graph of labels
    temperature: float = 1.0  # what similarities are divided by to become logits
    exact: bool = True  # whether a run of it repeats to the bit, on a GPU too
    published_prefix: str = ""  # what stands before the names of a published model's tensors in this one

    @property
    def heads(self) -> dict[str, str]:
        """Head as tasks call it -> submodule; empty where the model names none."""
        return dict(self.heads_of_tasks) or ({} if self.answer_head is None else {"answers": self.answer_head})


@dataclass(frozen=True)
class TaskSpec:
    """Which head a task uses, which kind of output it judges, and how its labels are judged."""

    name: str = ""  # as in recipes
    head: str = "answers"  # the model's head that it trains and evaluates
    # scores of answers, answers that are written or chosen by likelihood, free texts, written captions, or scores of
    # any number of labels
    judges: Literal["scores", "answers", "texts", "captions", "labels"] = "scores"
    # largest share of labels that training batches state as known; None for tasks without label states
    known: float | None = None
    threshold: float = 0.5  # probability from which on a label is predicted
    # whether classes without positives count as 0 in means over classes, or are left out
    undefined: Literal["zero", "omit"] = "zero"
    score: str = ""  # metric that settings are chosen by, unless a recipe names another


def model_spec(model: object) -> ModelSpec:
    """What a model declares."""
    declarers = [model]
    if isinstance(model, FunctionType):
        declarers.append(get_type_hints(model).get("return"))
    return _declared(ModelSpec, declarers)


def task_spec(task: object) -> TaskSpec:
    """What a task or its class declares; a task that is :class:`Counting` judges labels unless it says otherwise."""
    spec = _declared(TaskSpec, [task])
    labels = spec.judges == "scores" and isinstance(task, Counting)
    return replace(spec, judges="labels") if labels else spec


def _declared(kind: type[Spec], declarers: Iterable[object]) -> Spec:
    """A spec from attributes of the fields' names; those of an attribute ``spec`` that are no defaults come first."""
    values: dict[str, Any] = {}
    for declarer in declarers:
        spec = getattr(declarer, "spec", None)
        for name, default in vars(kind()).items():
            if isinstance(spec, kind) and vars(spec)[name] != default:
                values.setdefault(name, vars(spec)[name])
            value = getattr(declarer, name, None)
            if value is not None and not isinstance(value, property):
                values.setdefault(name, value)
    return kind(**values)


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Names of the tensors that a model does not train, from its attribute ``frozen`` where it has one."""
    return frozenset(model.frozen) if isinstance(model, _HasFrozen) else frozenset()


@runtime_checkable
class _HasFrozen(Protocol):
    @property
    def frozen(self) -> Iterable[str]: ...


# Optional behaviour of models -----------------------------------------------------------------------------------


@runtime_checkable
class TaskAware(Protocol):
    """A model with several heads, or with answers of each client's own."""

    def begin(self, task: Any) -> None:
        """Selects the head, or the answers, of the task that comes next."""
        ...


@runtime_checkable
class Attends(Protocol):
    """A model that tells where it looked."""

    def attention(self, batch: Batch) -> Tensor:
        """Weights of patches (B, rows, columns), of regions (B, R), or of each label at places or tokens (B, C, L)."""
        ...


@runtime_checkable
class HasGrid(Protocol):
    """A model whose attention is over places of a picture."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of these places."""
        ...


@runtime_checkable
class SplitsPass(Protocol):
    """A model whose forward pass is ``suffix(prefix(batch))``; adapters are in the second part."""

    @property
    def prefix_is_frozen(self) -> bool:
        """Whether nothing in the first part is trained."""
        ...


@runtime_checkable
class BelowHead(Protocol):
    """A model whose head is more than one call of a module."""

    def below_head(self, state: Any) -> Any:
        """What the head reads; None for a batch whose pass has no such place."""
        ...

    def answer(self, below: Any) -> Output:
        """What the head makes of it."""
        ...


@runtime_checkable
class ChecksPictures(Protocol):
    """A model whose prompts hold as many tokens of a picture as its encoder gives features."""

    def check_pictures(self, image: Tensor) -> None:
        """Error where they differ for pictures of this size, uint8 (3, H, W)."""
        ...


@runtime_checkable
class PreparesPictures(Protocol):
    """A model that reads floating-point pictures as it prepares them itself, and not those in [-1, 1]."""

    def prepared_pictures(self, images: Tensor) -> Tensor:
        """What the network reads of pictures uint8 (B, 3, H, W), float32."""
        ...


# Optional behaviour of tasks ------------------------------------------------------------------------------------


@runtime_checkable
class WrapsModel(Protocol):
    """A task that puts its own modules in the place of a model's answer head."""

    def wrap(self, model: nn.Module, answers: Sequence[str], rng: torch.Generator) -> nn.Module:
        """The model with these modules."""
        ...


@runtime_checkable
class RanksTexts(Protocol):
    """A task for models that write answers, which are chosen from a list."""

    def choosing(self, candidates: Tensor) -> Any:
        """The same task with the tokens of these answers, int64 (C, T)."""
        ...


@runtime_checkable
class ComparesCaptions(Protocol):
    """A task that compares texts written by a model with captions written by people."""

    def reading(self, decoder: Any, references: Sequence[Sequence[str]]) -> Any:
        """The same task with a decoder of tokens, and the captions of all pictures of evaluations."""
        ...

    def written(self, output: Output, batch: Batch) -> list[dict[str, Any]]:
        """The caption of each example and its score."""
        ...


class Writing(NamedTuple):
    """How a model writes an answer."""

    max_new_tokens: int  # most tokens
    beams: int = 1  # width of the search; 1 takes the most probable token each time
    length_penalty: float = 1.0  # power of the length that log-probabilities are divided by


@runtime_checkable
class WritesAnswers(Protocol):
    """A task that answers are written for."""

    @property
    def writing(self) -> Writing | None:
        """How they are written; None where they are chosen from a list."""
        ...


@runtime_checkable
class HasAnswers(Protocol):
    """A task with a fixed number of answers."""

    @property
    def answers(self) -> int:
        """How many scores an example has, C."""
        ...


@runtime_checkable
class HasCandidates(Protocol):
    """A task with the answers that a writing model ranks."""

    @property
    def candidates(self) -> Tensor | None:
        """Their tokens, int64 (C, T); None before they are known."""
        ...


@runtime_checkable
class PlacesItself(Protocol):
    """A model that decides itself what goes to which device, such as one that is too large for one GPU."""

    def place(self, device: str) -> None:
        """Goes to a device, or to it and others of its kind; inputs come on the one that what learns is on."""
        ...


@runtime_checkable
class LearnsTokens(Protocol):
    """A task that knows which of a batch's token scores are of answers, and which of the padding behind them."""

    def learned(self, output: Output, batch: Batch) -> Tensor | None:
        """Positions of answers' tokens, bool (R, T); None for scores that are not of tokens."""
        ...


@runtime_checkable
class SearchesBeams(Protocol):
    """A task that says how captions are searched for."""

    @property
    def beams(self) -> int:
        """Width of the beam search."""
        ...

    @property
    def length_penalty(self) -> float:
        """Power of the length that log-probabilities are divided by."""
        ...


@runtime_checkable
class WeighsBatches(Protocol):
    """A task whose loss is a mean over something else than the examples of a batch, such as tokens."""

    def batch_weight(self, batch: Any) -> float:
        """What the loss of a batch divides by; the mean of two batches' losses weighted so is that of both together."""
        ...


@runtime_checkable
class Contrasting(Protocol):
    """A task whose loss compares the examples of a batch with each other."""

    @property
    def contrast(self) -> Any:
        """The loss, of two representations (B, S)."""
        ...
