"""Toy federation: small models, data and tasks on which the contract runs methods, and new methods can be tried.

Three clients, a model of about two hundred values with a frozen layer, BatchNorm and dropout, and a second one
with neither BatchNorm nor dropout for the two algebraic checks. Methods that train adapters (their class attribute
``finetuning`` is "adapters") get a model that has some, those of LoRA's factors ("lora") one with LoRA, those that
need representations of questions and answers apart ("contrastive") one that answers by similarity, with its task, those
that decide which labels a model is told ("states") one that reads label states, with the multi-label task, those that
learn prompts ("prompts") one that classifies by texts (``toy_prompts.py``), and those for clients with different
modalities ("modalities") a model and clients of that kind (``toy_modalities.py``).

Toy federation with missing modalities: one client has no sound, another no pictures.

Of three clients the first has pictures and texts, the second texts only, the third pictures and sound; so sound has
one owner, and no client has all three. Every modality is a vector of four numbers, a noisy view of what decides the
class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.data.examples import TableData
from confed.data.table import Table, concatenate_tables
from confed.engines.local import Members, Setup
from confed.federation.algorithm import Algorithm
from confed.federation.families.prompts import classes_of, scores_of
from confed.federation.families.public_data import ServerLearns, ServerSide, UsesPublicData
from confed.federation.local import Local
from confed.federation.protocols import Batch, Output, Task
from confed.federation.reports import SHARE, Number
from confed.losses.label_states import label_states
from confed.models.adapters import AdapterBank, Host
from confed.models.contrastive import ContrastiveAnswerer
from confed.tasks.contrastive import Contrastive
from confed.tasks.multilabel import Multilabel

OWNED = {"client-0": ("image", "text"), "client-1": ("text",), "client-2": ("image", "audio")}
"""Client -> the modalities of its examples."""

MODALITIES = ("image", "text", "audio")
VIEW, VECTOR, MAPPED, CLASSES = 4, 3, 5, 3


class _Map(nn.Module):
    """Linear map of one modality: z = Concat(v, x M), where M may be partly the client's."""

    def __init__(self, rng: torch.Generator) -> None:
        super().__init__()
        self.shared = _linear(VIEW, MAPPED, rng, bias=False)
        self.vector = nn.Parameter(torch.randn(VECTOR, generator=rng))
        self.lam = 0.0
        self.local: nn.Linear | None = None

    def personalise(self, lam: float) -> None:
        """M = lam M_loc + (1 - lam) M_up from now on."""
        self.lam = lam
        self.local = nn.Linear(VIEW, MAPPED, bias=False, device="meta")
        self.local.weight = nn.Parameter(self.shared.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        mapped = self.shared(x)
        if self.local is not None:
            mapped = self.lam * self.local(x) + (1 - self.lam) * mapped
        return torch.cat([self.vector.expand(len(x), VECTOR), mapped], dim=1)


class ToyModalModel(nn.Module):
    """Maps per modality, their mean over what is there, and a small classifier behind a frozen layer."""

    answer_head = "head"
    reads_absent: ClassVar[bool] = True
    frozen = frozenset({"stem.weight"})

    def __init__(self, noisy: bool, rng: torch.Generator) -> None:
        super().__init__()
        self.embed = nn.ModuleDict({m: _Map(rng) for m in MODALITIES})
        self.stem = _linear(VECTOR + MAPPED, 8, rng, bias=False).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8) if noisy else nn.Identity()
        self.drop = nn.Dropout(0.2 if noisy else 0.0)
        self.body = _linear(8, 8, rng, bias=False)
        self.head = _linear(8, CLASSES, rng, bias=False)

    def personalise_maps(self, lam: float) -> None:
        """Adds the local maps, with the values of the shared ones."""
        for module in self.embed.values():
            cast(_Map, module).personalise(lam)

    def forward(self, batch: Batch) -> Output:
        """Scores (B, 3) and features (B, 8) of the given ones of ``image``, ``text`` and ``audio`` (B, 4)."""
        tokens = [self.embed[m](batch[m]) for m in MODALITIES if m in batch]
        if not tokens:
            raise ValueError(f"a batch must have one of {', '.join(MODALITIES)}, got {sorted(batch)}")
        hidden = torch.tanh(self.norm(self.stem(torch.stack(tokens).mean(dim=0))))
        features = torch.relu(self.body(self.drop(hidden)))
        return Output(self.head(features), features)


def modal_clients(seed: int, sizes: Sequence[int], owned: Sequence[tuple[str, ...]] = ()) -> dict[str, TableData]:
    """Clients of the given sizes, whose examples have the modalities of :data:`OWNED`."""
    rng = torch.Generator().manual_seed(seed)
    truth = torch.randn(VIEW, CLASSES, generator=rng)
    views = {m: torch.randn(VIEW, VIEW, generator=rng) for m in MODALITIES}
    clients: dict[str, TableData] = {}
    for number, size in enumerate(sizes):
        name = f"client-{number}"
        factors = torch.randn(size, VIEW, generator=rng) + 0.3 * number
        seen = {m: factors @ views[m] + 0.3 * torch.randn(size, VIEW, generator=rng) for m in MODALITIES}
        has = owned[number] if owned else OWNED.get(name, MODALITIES)
        columns = {**{m: seen[m] for m in has}, "label": (factors @ truth).argmax(-1)}
        table = Table(None, torch.zeros(size, dtype=torch.int64), columns)
        clients[name] = TableData(table, table, table)
    return clients


WIDTH, CLASSES = 6, 3
TOKENS, TOKEN, SPACE, PATCHES = 2, 5, 4, 3


class ToyPromptModel(nn.Module):
    """A frozen projection of ``batch["x"]`` (B, 6) and of three class names, behind learned context (2, 5)."""

    answer_head = None

    def __init__(self, rng: torch.Generator) -> None:
        super().__init__()

        def frozen(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=rng) * shape[-1] ** -0.5, requires_grad=False)

        self.pictures, self.patches = frozen(SPACE, WIDTH), frozen(PATCHES, SPACE, WIDTH)
        self.names, self.words, self.texts = frozen(CLASSES, TOKEN), frozen(TOKEN, TOKEN), frozen(SPACE, TOKEN)
        self.context: Any = nn.Module()
        self.context.vectors = nn.Parameter(0.3 * torch.randn(TOKENS, TOKEN, generator=rng))

    frozen = frozenset({"pictures", "patches", "names", "words", "texts"})
    class_count = CLASSES
    context_shape = (TOKENS, TOKEN)
    feature_shape = (SPACE, CLASSES)

    def forward(self, batch: Batch) -> Output:
        """Scores (B, 3) and features (B, 4)."""
        features, classes = self.image_features(batch), classes_of(batch, CLASSES)
        texts = self.class_features(self.context.vectors, classes)
        return Output(scores_of(self.similarity_scores(features @ texts.T), classes, batch, CLASSES), features)

    def image_features(self, batch: Batch) -> Tensor:
        """f(x), (B, 4)."""
        return functional.normalize(batch["x"] @ self.pictures.T, dim=1)

    def patch_features(self, batch: Batch) -> Tensor:
        """Three patches, (B, 3, 4)."""
        return functional.normalize(torch.einsum("bi,voi->bvo", batch["x"], self.patches), dim=2)

    def class_features(self, context: Tensor, classes: Tensor) -> Tensor:
        """g(t_c), (K, 4)."""
        before = (context @ self.words).tanh().sum(dim=-2)
        return functional.normalize((before + self.names[classes]).tanh() @ self.texts.T, dim=1)

    def handwritten_features(self, classes: Tensor) -> Tensor:
        """Features of the names alone, (K, 4)."""
        return functional.normalize(self.names[classes].tanh() @ self.texts.T, dim=1)

    def initial_context(self) -> Tensor:
        """The context as it is, (2, 5)."""
        return self.get_parameter("context.vectors").detach().clone()

    def similarity_scores(self, similarities: Tensor) -> Tensor:
        """Cosines times 5."""
        return 5 * similarities


ANSWERS = ("red", "dark red", "blue")
SIZES = (12, 20, 16)


class ToyModel(nn.Module):
    """A frozen random projection and a small classifier."""

    def __init__(
        self, noisy: bool, rng: torch.Generator, adapters: bool = False, lora: bool = False, states: bool = False
    ) -> None:
        super().__init__()
        self.stem = _linear(WIDTH, 8, rng)
        self.stem.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8) if noisy else nn.Identity()
        self.drop = nn.Dropout(0.2 if noisy else 0.0)
        self.body = _linear(8, 8, rng)
        self.head = _linear(8, CLASSES, rng)
        self._fixed = {"stem.weight", "stem.bias"}
        if adapters:
            self.body.requires_grad_(False)
            self._fixed |= {"body.weight", "body.bias"}
            self.adapters = AdapterBank((Host(self.norm, 8), Host(self.body, 8)), 2, activation="gelu")
            self.adapters.add("adapter", rng)
        if lora:
            self.body = _LoRA(self.body, rng)
            self._fixed |= {"body.weight", "body.bias"}
        self.reads_states = states
        if states:
            self.states = _linear(2 * CLASSES, 8, rng, bias=False)

    answer_head = "head"

    @property
    def frozen(self) -> set[str]:
        """Names of the tensors that are not trained."""
        return self._fixed

    def forward(self, batch: Batch) -> Output:
        """Scores (B, 3) and features (B, 8) of ``batch["x"]`` (B, 6)."""
        hidden: Tensor = self.norm(self.stem(batch["x"]))
        if self.reads_states and "known" in batch:
            told = torch.cat([batch["known"] == 0, batch["known"] == 1], dim=1)
            hidden = hidden + self.states(told.to(hidden.dtype))
        features: Tensor = self.body(self.drop(torch.tanh(hidden)))
        return Output(self.head(torch.relu(features)), features)


def _linear(width: int, out: int, rng: torch.Generator, bias: bool = True) -> nn.Linear:
    layer = cast(nn.Linear, nn.utils.skip_init(nn.Linear, width, out, bias=bias))
    with torch.no_grad():
        layer.weight.normal_(0, width**-0.5, generator=rng)
        if bias:
            layer.bias.zero_()
    return layer


class _LoRA(nn.Linear):
    """A frozen linear layer with LoRA of rank 1, its factors named as the library ``peft`` names them."""

    def __init__(self, base: nn.Linear, rng: torch.Generator) -> None:
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = base.requires_grad_(False).weight, base.bias
        self.lora_A = nn.ModuleDict({"default": _linear(base.in_features, 1, rng, bias=False)})
        self.lora_B = nn.ModuleDict({"default": _linear(1, base.out_features, rng, bias=False)})
        nn.init.zeros_(self.get_parameter("lora_B.default.weight"))
        self.scaling = {"default": 2.0}

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output with 2 B A x added to it."""
        return super().forward(input) + 2 * self.lora_B["default"](self.lora_A["default"](input))


def toy_model(noisy: bool = True, adapters: bool = False, lora: bool = False, states: bool = False) -> ToyModel:
    """The toy model with its initial values, the same at every call."""
    return ToyModel(noisy, torch.Generator().manual_seed(7), adapters, lora, states)


def toy_contrastive_task(noisy: bool = True, **options: Any) -> Contrastive:
    return Contrastive(CLASSES, width=5, hidden=7, answer_words=3, embedding=4, batch_norm=noisy, **options)


def toy_contrastive_model(noisy: bool = True, **options: Any) -> ContrastiveAnswerer:
    """The toy model in a :class:`ContrastiveAnswerer` with three answers of one or two words, always the same."""
    rng = torch.Generator().manual_seed(8)
    return toy_contrastive_task(noisy, **options).wrap(toy_model(noisy), ANSWERS, rng)


@dataclass(frozen=True)
class ToyTask:
    """Classification with cross-entropy."""

    metric: str = "accuracy"
    single_label: bool = True

    @property
    def measures(self) -> dict[str, Number]:
        """See :attr:`confed.federation.protocols.Task.measures`."""
        return {"accuracy": SHARE}

    def labels(self, batch: Batch) -> Tensor:
        """The right classes, (B,)."""
        return batch["label"]

    def loss(self, output: Output, batch: Batch) -> Tensor:
        """Mean cross-entropy."""
        return functional.cross_entropy(output.logits, batch["label"])

    def tally(self, output: Output, batch: Batch) -> dict[str, tuple[float, float]]:
        """Correct answers and their number."""
        return {"accuracy": (float(self.predictions(output, batch).sum()), float(len(batch["label"])))}

    def predictions(self, output: Output, batch: Batch) -> Tensor:
        """1 where the best answer is right, else 0."""
        return (output.logits.argmax(-1) == batch["label"]).float()


def toy_clients(seed: int = 0, sizes: tuple[int, ...] = SIZES, kind: str = "") -> dict[str, TableData]:
    """Clients whose inputs and labels are skewed in different ways; multi-label ones have ``labels`` and ``known``."""
    if kind == "modalities":
        return modal_clients(seed, sizes)
    rng = torch.Generator().manual_seed(seed)
    truth = torch.randn(WIDTH, CLASSES, generator=rng)
    clients: dict[str, TableData] = {}
    for number, size in enumerate(sizes):
        x = torch.randn(size, WIDTH, generator=rng) + 0.5 * number
        scores = (x - 0.3 * number) @ truth
        labels = (scores > 0).float()
        known_labels = label_states(labels, torch.arange(size), number)
        columns = {"x": x, "label": scores.argmax(-1), "labels": labels, "known": known_labels}
        table = Table(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.zeros(size, dtype=torch.int64), columns)
        clients[f"client-{number}"] = TableData(table, table, table)
    return clients


def toy_setup(
    algorithm: Algorithm,
    *,
    clients: dict[str, TableData] | None = None,
    local: Local | None = None,
    rounds: int = 3,
    noisy: bool = True,
    seed: int = 0,
    kind: str | None = None,
) -> Setup:
    """A federation of toy clients, of the kind a method is made for; a pooled method gets one member with all data."""
    kind = algorithm.traits.made_for if kind is None else kind
    clients = toy_clients(kind=kind) if clients is None else clients
    local = Local(epochs=2, batch_size=4, lr=0.05) if local is None else local
    task: Task = Multilabel(CLASSES, known=0.75, reduction="mean") if kind == "states" else ToyTask()

    def build() -> nn.Module:
        if kind == "modalities":
            return ToyModalModel(noisy, torch.Generator().manual_seed(7))
        if kind == "prompts":
            return ToyPromptModel(torch.Generator().manual_seed(7))
        return toy_model(noisy, kind == "adapters", kind == "lora", kind == "states")

    if kind == "contrastive":
        task, build = toy_contrastive_task(noisy), partial(toy_contrastive_model, noisy)
    algorithm = algorithm.configure(build(), task)
    if algorithm.traits.centralised:
        everything = concatenate_tables([client.tables[0] for client in clients.values()])
        clients = {"everyone": TableData(everything, everything, everything)}
    owned = OWNED if kind == "modalities" else ()
    public = None
    if isinstance(algorithm, UsesPublicData):
        public = toy_clients(seed + 11, (10,), kind)["client-0"]
        if kind == "modalities":
            public = modal_clients(seed + 11, (10,), [("image", "text", "audio")])["client-0"]
        if isinstance(algorithm, ServerLearns):
            algorithm = algorithm.with_server_side(ServerSide(build, public, task, seed))
    return Setup(algorithm, Members(clients, owned), task, local, build, rounds=rounds, seed=seed, public=public)
