"""Finetuning of pretrained backbones: all parameters, a part, or added ones (parameter-efficient).

Adapters: Houlsby et al. 2019 (:mod:`confed.models.adapters`). LoRA: Hu et al., "LoRA: Low-Rank Adaptation of Large
Language Models", ICLR 2022. IA3: Liu et al., "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than
In-Context Learning", NeurIPS 2022. Bias: Ben Zaken et al., "BitFit", ACL 2022. Prompt: as FedDAT has it (Chen et
al., AAAI 2024), learned tokens that a small network makes, one network per modality (its released code runs the
text's for both). LoRA and IA3 are those of the library ``peft``.

Heads always learn. A backbone says what it offers in :class:`Places`; :func:`finetune` does the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from confed.federation.ranges import AT_LEAST_ONE, POSITIVE, check_fields, check_value
from confed.federation.stages import KeptStates
from confed.models.adapters import Activation, AdapterBank, Host
from confed.models.pretrained import seeded

Trainable = Literal["all", "top", "head", "adapters", "lora", "ia3", "prompt", "prefix", "bias"]
"""What learns beside the heads: all; the last block and what follows it; nothing; or what the kind adds."""


@dataclass(frozen=True)
class Finetuning:
    """How a backbone is finetuned; each kind reads its own options and ignores the others'.

    Attributes:
        reduction: adapters: width over bottleneck; None for the backbone's usual one.
        activation: adapters: function between the two matrices.
        zero_up: adapters: start as the plain backbone (default: both matrices from N(0, 0.02), as released by
            FedDAT's authors).
        rank: LoRA: rank r of the update ``alpha / r * B A``.
        alpha: LoRA: its scale; FedDAT has 1, so that the factor is 1/16.
        targets: LoRA and IA3: names of the layers, as they end ("query", "output.dense"); empty for the usual.
        reset_base: LoRA: replace the pretrained weights of these layers by fresh ones, whose biases learn. It
            reproduces a defect of FedDAT's released code, which explains the low LoRA rows of its tables.
        tokens: prompt: tokens per modality.
    """

    __pydantic_config__ = {"extra": "forbid"}  # a recipe's misspelt key is an error  # noqa: RUF012

    reduction: Annotated[int, AT_LEAST_ONE] | None = None
    activation: Activation = "relu"
    zero_up: bool = False
    rank: Annotated[int, AT_LEAST_ONE] = 16
    alpha: Annotated[float, POSITIVE] = 1.0
    targets: tuple[str, ...] = ()
    reset_base: bool = False
    tokens: Annotated[int, AT_LEAST_ONE] = 5

    def __post_init__(self) -> None:
        check_fields(self, "model.peft")


USUAL = Finetuning()  # the default options: FedDAT's


@dataclass(frozen=True)
class Places:
    """What of a backbone can be finetuned."""

    heads: tuple[str, ...]  # submodules that always learn
    fixed: tuple[str, ...] = ()  # submodules that never do, whatever is finetuned
    top: tuple[str, ...] = ()  # name prefixes of the parameters that learn with "top", without the heads'
    hosts: Sequence[Host] = ()  # places of adapters, from input to output
    reduction: int = 16  # the usual reduction of its adapters
    lora: tuple[str, ...] = ()  # the usual layers of LoRA, as their names end
    ia3: tuple[str, ...] = ()  # the usual layers of IA3 whose output is scaled (keys and values)
    # the usual layers of IA3 whose input is scaled (the second one of a feed-forward block)
    ia3_inputs: tuple[str, ...] = ()
    # modality -> features of its tokens, for prompts; the backbone inserts model.prompts[modality]()
    prompts: Mapping[str, int] = field(default_factory=dict[str, int])
    has_prompt: bool = False  # whether "prompt" learns a head that is a prompt, in place of tokens that are added
    finetuned: Callable[[], None] = lambda: None  # what the model does when it is known what learns
    # gives the model its prefixes, from the options and a generator; or why there cannot be any
    prefix: Callable[[Finetuning, torch.Generator], Sequence[str]] | str = (
        "its attention takes no keys and values from outside"
    )


class Finetunable(nn.Module):
    """A backbone that :func:`finetune` has been given."""

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    adapters: AdapterBank
    prompts: nn.ModuleDict
    # see Staged. mean, std: of each colour channel, as pictures are normalised.
    frozen_features: KeptStates | None = None

    @property
    def frozen(self) -> set[str]:
        """Names of the parameters that do not learn, and of the buffers, which are constants."""
        # By all its names, where output and input embeddings are one tensor.
        named = self.named_parameters(remove_duplicate=False)
        return {name for name, parameter in named if not parameter.requires_grad} | {
            name for name, _ in self.named_buffers()
        }


class Prompt(nn.Module):
    """Learned tokens: ``Embedding(n, d)``, ``Linear(d, d/4)``, tanh, ``Linear(d/4, d)``."""

    def __init__(self, tokens: int, width: int, rng: torch.Generator) -> None:
        super().__init__()
        self.tokens = tokens

        def build() -> tuple[nn.Embedding, nn.Sequential]:
            with torch.device("cpu"):
                layers = nn.Sequential(nn.Linear(width, width // 4), nn.Tanh(), nn.Linear(width // 4, width))
                return nn.Embedding(tokens, width), layers

        self.embedding, self.mlp = _seeded(rng, build)

    def forward(self) -> Tensor:
        """The tokens, (n, d)."""
        return self.mlp(self.embedding.weight)


def finetune(model: nn.Module, trainable: Trainable, peft: Finetuning, places: Places, rng: torch.Generator) -> None:
    """Adds to a model what the kind of finetuning needs, and says which parameters learn.

    Afterwards ``model.adapters`` is the model's bank (without adapters unless the kind is "adapters"), and
    ``model.prompts`` holds the prompts by modality (no modality unless the kind is "prompt"). What did not learn
    before, such as fixed word vectors, does not begin to.
    """
    check_value(trainable, Trainable, "model.trainable")
    name = type(model).__name__
    within: Any = model
    reduction = peft.reduction or places.reduction
    within.adapters = AdapterBank(places.hosts, reduction, activation=peft.activation, zero_up=peft.zero_up)
    within.prompts = nn.ModuleDict()
    learning: set[str] = set()
    still = {id(value) for value in model.parameters() if not value.requires_grad}
    names = {parameter for parameter, _ in model.named_parameters()}
    if trainable == "all":
        learning = names
    elif trainable == "top":
        _offered(places.top, name, "top", "it names no last block")
        learning = {parameter for parameter in names if parameter.startswith(places.top)}
    elif trainable == "bias":
        learning = {parameter for parameter in names if "bias" in parameter}
    elif trainable == "adapters":
        _offered(places.hosts, name, "adapters", "it has no places for them")
        within.adapters.add("adapter", rng)
    elif trainable == "prompt":
        _offered(places.prompts or places.has_prompt, name, "prompt", "it cannot insert tokens")
        for modality, width in places.prompts.items():
            within.prompts[modality] = Prompt(peft.tokens, width, rng)
    elif trainable == "prefix":
        if isinstance(places.prefix, str):
            raise ValueError(f"model.trainable = 'prefix' does not work with {name}: {places.prefix}")
        learning = set(places.prefix(peft, rng))
    elif trainable in ("lora", "ia3"):
        learning = _inject(model, trainable, peft, places, rng)
    if trainable in ("adapters", "prompt"):  # what was added
        learning = {parameter for parameter, _ in model.named_parameters()} - names
    heads = tuple(f"{module_name}." for module_name in places.heads)
    fixed = tuple(f"{module_name}." for module_name in places.fixed)
    for parameter, value in model.named_parameters():
        learns = parameter in learning and not parameter.startswith(fixed)
        value.requires_grad_((learns or parameter.startswith(heads)) and id(value) not in still)
    places.finetuned()


def _offered(places: object, model: str, kind: str, reason: str) -> None:
    if not places:
        raise ValueError(f"model.trainable = {kind!r} does not work with {model}: {reason}")


def _inject(
    model: nn.Module, kind: Literal["lora", "ia3"], peft: Finetuning, places: Places, rng: torch.Generator
) -> set[str]:
    """Lets the library ``peft`` replace layers; the names of the parameters that learn then."""
    from peft import IA3Config, LoraConfig, inject_adapter_in_model

    before = {id(parameter) for parameter in model.parameters()}
    if kind == "lora":
        layers = _layers(model, peft.targets or places.lora, places)
        if peft.reset_base:
            _seeded(rng, lambda: [model.get_submodule(layer).reset_parameters() for layer in layers])  # pyright: ignore
        biases = [model.get_submodule(layer).bias for layer in layers] if peft.reset_base else []
        config: Any = LoraConfig(r=peft.rank, lora_alpha=peft.alpha, target_modules=layers)  # pyright: ignore
    else:
        inputs = _layers(model, peft.targets or places.ia3_inputs, places, places.ia3_inputs)
        layers = _layers(model, peft.targets or (*places.ia3, *places.ia3_inputs), places)
        biases = []
        config = IA3Config(target_modules=layers, feedforward_modules=inputs)
    _seeded(rng, lambda: inject_adapter_in_model(config, model))
    fresh = {id(bias) for bias in biases}
    return {name for name, value in model.named_parameters() if id(value) not in before or id(value) in fresh}


def _layers(model: nn.Module, targets: Sequence[str], places: Places, among: Sequence[str] | None = None) -> list[str]:
    """Full names of the linear layers, outside of heads and of what never learns, whose names end as the targets do."""
    others = tuple(f"{module_name}." for module_name in (*places.heads, *places.fixed))
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and not f"{n}.".startswith(others)]
    if among is None:
        for target in targets:
            if not any(_ends(name, (target,)) for name in names):
                endings = ", ".join(dict.fromkeys(_ending(name) for name in names)) or "none"
                raise ValueError(
                    f"model.peft.targets: no layer of {type(model).__name__} is called {target!r}; there are {endings}"
                )
        if not targets:
            raise ValueError(f"model.peft.targets must name layers; {type(model).__name__} has no usual ones")
    return [n for n in names if _ends(n, targets) and (among is None or _ends(n, among))]


def _ends(name: str, targets: Sequence[str]) -> bool:
    return any(f".{name}".endswith(f".{target}") for target in targets)


def _ending(name: str) -> str:
    """Kind of a layer from its name: the part after the last number, at most two words."""
    words = name.split(".")
    numbers = [i for i, word in enumerate(words) if word.isdigit()]
    return ".".join(words[numbers[-1] + 1 if numbers else 0 :][-2:])


def _seeded(rng: torch.Generator, build: Callable[[], Any]) -> Any:
    return seeded(int(torch.randint(2**31, (1,), generator=rng, device="cpu")), build)
