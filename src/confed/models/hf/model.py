"""Wrapper of generative vision-language models of ``transformers``.

The library's model is not taken apart: it reads what its own processor makes of a picture and a prompt. What a family
packs into one axis (all pictures of a batch, or the patches of all of them) is kept example by example, first dimension
B, with as many pictures as the example with the most, and joined where the library's model is called.

Blocks follow each other over the devices, each of which computes in turn; activations travel. The factors of LoRA are
parameters of one device, so that methods, optimisers and messages know of one only, and go to their layer's device
where a pass needs them: they are small, and gradients come back the same way.

The library's models take what its picture encoder and connector made in place of pictures (``mm_encoder_outputs``), so
that a language part can learn behind frozen features that are computed once.

NF4 with double quantisation is that of QLoRA (Dettmers et al., NeurIPS 2023), 8-bit is LLM.int8() (Dettmers et al.,
NeurIPS 2022). Connector, picture encoder, embeddings and output layer stay bf16.

Prompt tuning of vision-language models: learned tokens before everything else that a prompt has.

Lester, Al-Rfou and Constant, "The power of scale for parameter-efficient prompt tuning", EMNLP 2021. In a prompt's ids
a learned token is a number behind the vocabulary, so that positions, masks and caches are made by the library's model
as for any other token; its embedding layer gives the learned values there.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.data.chat import answered, trimmed
from confed.federation.protocols import Batch, Output
from confed.federation.specs import HasCandidates, WritesAnswers, Writing
from confed.federation.stages import Stage, run_stages
from confed.models.adapters import AdapterBank, Host
from confed.models.finetuning import Finetunable, Places, Prompt
from confed.models.hf.candidates import (
    SCORES_AT_ONCE,
    CandidateTree,
    candidate_trees,
    first_position_behind,
    reads_trees,
    repeated_states,
    search,
    tree_likelihoods,
    tree_states,
)
from confed.models.hf.prompts import TEXT_INPUTS, ChatTokenizer, Placeholder, typed_inputs
from confed.models.inputs import needed
from confed.models.passes import SplitChain


def with_learned(ids: Tensor, mask: Tensor, tokens: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Prompts with ids of learned tokens in front."""
    absent = (mask == 0).sum(1, keepdim=True)
    column = torch.arange(tokens + ids.shape[1], device=ids.device).expand(len(ids), -1)
    before, behind = ids.gather(1, column.clamp_max(ids.shape[1] - 1)), ids.gather(1, (column - tokens).clamp_min(0))
    token_ids = torch.where(column < absent, before, vocabulary + column - absent)
    return torch.where(column < absent + tokens, token_ids, behind), (column >= absent).to(mask.dtype)


class LearnedTokens(nn.Module):
    """Hooks of an embedding layer, which give the learned values where a prompt has learned tokens."""

    def __init__(self, prompt: Prompt, embedding: Any) -> None:
        super().__init__()
        self.vocabulary = int(embedding.weight.shape[0])
        self._prompt, self._asked = [prompt], list[Tensor]()  # in a list: it is a submodule of the model already
        # Methods of a module, which are copied with it.
        embedding.register_forward_pre_hook(self._below)
        embedding.register_forward_hook(self._filled)

    @property
    def tokens(self) -> int:
        """Number of learned tokens, n."""
        return self._prompt[0].tokens

    def _below(self, module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self._asked[:] = [given[0]]
        return given[0].clamp_max(self.vocabulary - 1), *given[1:]

    def _filled(self, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        ids = self._asked.pop()
        learned = ids >= self.vocabulary
        if not bool(learned.any()):
            return output
        values = self._prompt[0]().to(output.dtype)[(ids - self.vocabulary).clamp_min(0)]
        return torch.where(learned[..., None], values, output)


# Quantised frozen weights of a language part ------------------------------------------------------------------

_BLOCK = 64  # values that share a scale; on CPUs the library's 0.50 gives wrong weights where a block spans two rows
Part = Literal["language", "connector", "vision"]  # parts of a model that finetuning applies to
Quantised = Literal["int8", "nf4"]
"""8 bits with a scale per row and outliers in bf16, or 4 bits with a scale per 64 values."""


def quantise(model: nn.Module, part: nn.Module, kind: Quantised) -> None:
    """Replacement of linear layers of a part by quantised ones, in place; the rest of the model becomes bf16.

    With "nf4" layers whose number of inputs is no multiple of 64 stay bf16.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise ValueError(
            f"model.base = {kind!r} needs the library bitsandbytes: install confed with the extra 'quantised'"
        ) from error
    layers: Any = bitsandbytes.nn
    if any(isinstance(module, layers.Linear4bit | layers.Linear8bitLt) for module in part.modules()):
        raise ValueError(f"model.base = {kind!r}: the source is quantised already; set model.base = 'bf16'")
    for parameter in model.parameters():  # buffers, such as frequencies of positions, keep their precision
        parameter.data = parameter.data.to(torch.bfloat16)
    linears = [(name, module) for name, module in part.named_modules() if type(module) is nn.Linear]
    chosen = [(name, linear) for name, linear in linears if kind == "int8" or linear.in_features % _BLOCK == 0]
    if not chosen:
        raise ValueError(
            f"model.base = {kind!r} needs linear layers with a multiple of {_BLOCK} inputs; the model has none"
        )
    for name, linear in chosen:
        parent, _, child = name.rpartition(".")
        setattr(part.get_submodule(parent), child, _quantised(linear, kind, layers))


def _quantised(linear: nn.Linear, kind: Quantised, layers: Any) -> nn.Module:
    shape = (linear.in_features, linear.out_features, linear.bias is not None)
    with torch.device("meta"):
        if kind == "nf4":
            layer = layers.Linear4bit(*shape, compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=True)
        else:
            layer = layers.Linear8bitLt(*shape, has_fp16_weights=False, threshold=6.0)
    weight = linear.weight.data.contiguous()
    layer.weight = (
        layers.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True, module=layer)
        if kind == "nf4"
        else layers.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    )
    layer.bias = linear.bias
    layer.requires_grad_(False)
    return layer.to(linear.weight.device)  # moving a weight quantises it


# Pictures as a processor of transformers prepares them --------------------------------------------------------

_KEPT = 256 * 2**20  # bytes of processed pictures that are kept; beyond these the oldest are made again


class Pictures:
    """Inputs that a processor makes of pictures, kept up to a number of bytes."""

    def __init__(self, placeholder: Placeholder, kept: int = _KEPT) -> None:
        self._placeholder, self._budget, self._bytes = placeholder, kept, 0
        self._kept: OrderedDict[bytes, dict[str, Tensor]] = OrderedDict()
        grey = np.zeros((32, 48, 3), np.uint8)
        # input -> what its first axis is of in the library's model: "example", or "packed": all pictures of a batch,
        # or parts of all of them, such as tiles and patches
        self.axes = {key: "example" if len(value) == 1 else "packed" for key, value in self._made(grey, grey).items()}

    @property
    def bytes_kept(self) -> int:
        return self._bytes

    def __call__(self, images: Tensor, only: Collection[str] | None = None) -> dict[str, Tensor]:
        """Inputs of the library's model for pictures, each (B, P, ...)."""
        keys = [key for key in self.axes if only is None or key in only]
        if not keys:
            return {}
        rows = [self._one(picture) for picture in images.cpu().flatten(0, 1).permute(0, 2, 3, 1).contiguous().numpy()]
        made: dict[str, Tensor] = {}
        for key in keys if rows else ():
            made[key] = torch.stack([row[key] for row in rows])
        return {key: value.unflatten(0, images.shape[:2]).to(images.device) for key, value in made.items()}

    def _made(self, *pictures: np.ndarray) -> dict[str, Tensor]:
        """What the processor makes of the pictures of one example, beside its text."""
        made = self._placeholder.processed(*pictures)
        return {key: value for key, value in made.items() if key not in TEXT_INPUTS}

    def _one(self, picture: np.ndarray) -> dict[str, Tensor]:
        key = picture.tobytes() + bytes(str(picture.shape), "ascii")
        inputs = self._kept.get(key)
        if inputs is None:
            made = self._made(picture)
            inputs = {name: made[name] if axis == "packed" else made[name][0] for name, axis in self.axes.items()}
            size = sum(value.nbytes for value in inputs.values()) + len(key)
            if size <= self._budget:
                self._kept[key] = inputs
                self._bytes += size
            while self._bytes > self._budget:
                old, gone = self._kept.popitem(last=False)
                self._bytes -= sum(value.nbytes for value in gone.values()) + len(old)
        return inputs

    def joined(self, inputs: Mapping[str, Tensor], shown: Tensor) -> dict[str, Tensor]:
        """The same inputs as the library's model reads them; nothing where no example has a picture."""
        if not bool(shown.any()):
            return {}
        joined_inputs: dict[str, Tensor] = {}
        for key, value in inputs.items():
            if self.axes[key] == "packed":
                joined_inputs[key] = value[shown].flatten(0, 1)
                continue
            is_shown = shown.view(*shown.shape, *[1] * (value.ndim - 2))
            padded = torch.where(is_shown, value, torch.zeros_like(value))  # so does the processor pad pictures
            joined_inputs[key] = (
                padded.sum(1) if value.ndim == 2 else padded.flatten(1, 2)
            )  # one number per example counts something
        return joined_inputs


# Features that the language part of a model of transformers reads of ------------------------------------------

BESIDE = ("image_grid_thw",)
"""Inputs made of pictures that the language part reads beside their features: Qwen's, for positions."""

_FLAT, _LIST = 0, -1


class PictureStates(NamedTuple):
    """What a picture encoder and a connector make of each example's pictures."""

    # N tokens for the language part, and as many for each of its first S layers where these read pictures, too
    # (Qwen3-VL): (B, 1 + S, N, d)
    features: Tensor
    # tokens of a picture where the library has one tensor (P, T, d); 0 for (P T, d), -1 for a list of tensors
    each: int

    def of(self, rows: Tensor) -> "PictureStates":
        """Those of some of the examples, which may come several times."""
        return PictureStates(self.features[rows], self.each)

    def outputs(self) -> dict[str, Any]:
        """What the library's model takes as ``mm_encoder_outputs``."""
        pooled, *deep = self.features.unbind(1)
        whole: Any = list(pooled)
        if self.each != _LIST:
            whole = pooled.reshape(-1, *((self.each,) if self.each else ()), pooled.shape[-1])
        features = SimpleNamespace(pooler_output=whole)
        if deep:
            features.deepstack_features = [list(level) for level in deep]
        return {"image": features}


def encoded(body: Any, inputs: Mapping[str, Tensor], examples: int) -> PictureStates:
    """What picture encoder and connector make of pictures."""
    features = body.get_image_features(**inputs, return_dict=True)
    pooled = features.pooler_output
    each = _LIST
    if isinstance(pooled, Tensor):
        each = pooled.shape[1] if pooled.ndim == 3 else _FLAT
    levels = [_rows(pooled), *map(_rows, features.get("deepstack_features") or ())]
    tokens = len(levels[0])
    if tokens % examples:
        raise ValueError(f"{examples} examples with pictures of one size have {tokens} tokens of pictures in all")
    return PictureStates(torch.stack([level.view(examples, -1, level.shape[-1]) for level in levels], 1), each)


def _rows(features: Any) -> Tensor:
    """One tensor or several as tokens, (N, d)."""
    each = [features] if isinstance(features, Tensor) else features
    return torch.cat([rows.flatten(0, -2) for rows in each])


# Frozen base of a vision-language model spread over several devices -------------------------------------------

SHARE = 0.8  # share of a GPU's free memory that the base may take; the rest is for activations


def check_spreadable(model: nn.Module, body: nn.Module) -> None:
    """Check that nothing that learns lies within the base but factors of LoRA."""
    factors = chain.from_iterable(linear.parameters() for linear in _factors(body))
    factor_ids = set(map(id, factors))
    for name, parameter in body.named_parameters():
        if parameter.requires_grad and id(parameter) not in factor_ids:
            raise ValueError(
                f"model.device_map = 'auto' spreads a base in which the factors of LoRA alone learn, and {name!r} is "
                f"none of them in this {type(model).__name__}; set model.device_map = 'one', or another method"
            )


def gpus(device: str) -> list[tuple[torch.device, int]]:
    """GPUs of this machine with the bytes that a base may take of each; none for a single device such as "cuda:1"."""
    if device != "cuda" or not torch.cuda.is_available():
        return []
    return [
        (torch.device("cuda", number), int(SHARE * torch.cuda.mem_get_info(number)[0]))
        for number in range(torch.cuda.device_count())
    ]


def spread(model: nn.Module, body: Any, places: Sequence[tuple[torch.device, int]]) -> torch.device:
    """Placement of a base on several devices; returns the one that what learns is on, as are inputs and results."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory, send_to_device

    whole: Any = body._no_split_modules  # declared by the library
    options: dict[str, Any] = {"no_split_module_classes": sorted(whole or ())}
    given: Any = {number: size for number, (_, size) in enumerate(places)}
    room: Any = get_balanced_memory(body, max_memory=given, **options)
    device_map: Any = infer_auto_device_map(body, max_memory=room, **options)
    if not all(isinstance(number, int) for number in device_map.values()):
        needed, available = sum(tensor.nbytes for tensor in body.parameters()), sum(size for _, size in places)
        raise ValueError(
            f"model.device_map = 'auto': the base has {needed / 2**30:.1f} GiB and does not fit on {len(places)} "
            f"devices, of which it may take {available / 2**30:.1f} GiB"
        )
    for linear in _factors(body):
        linear.forward = _at_input(linear)
    devices = {name: places[int(number)][0] for name, number in device_map.items()}
    table = body.get_input_embeddings()
    embedding = next(name for name, module in body.named_modules() if module is table)
    main = next(device for name, device in devices.items() if _within(embedding, name))
    skipped: Any = body._skip_keys_device_placement  # caches stay with their layers
    for name, block in body.named_modules():
        device = next((device for module_name, device in devices.items() if _within(name, module_name)), None)
        if device is None:  # it spans several
            continue
        if name in devices:
            block.to(device)
        block.register_forward_pre_hook(_sender(device, skipped), with_kwargs=True)
    for child in model.children():
        if child is not body:
            child.to(main)
    for parameter in body.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(main)

    def home(module: nn.Module, given: Any, output: Any) -> Any:
        return send_to_device(output, main, skip_keys=["past_key_values"])

    for module in (body.model, body.get_decoder(), body.get_output_embeddings()):
        module.register_forward_hook(home)
    return main


def _sender(device: torch.device, skipped: Any) -> Any:
    """Hook before a module's pass that brings what it is given to its device."""
    from accelerate.utils import send_to_device

    def send(module: nn.Module, given: Any, named: Any) -> Any:
        return send_to_device(given, device), send_to_device(named, device, skip_keys=skipped)

    return send


def _factors(body: nn.Module) -> list[nn.Linear]:
    """Linear layers A and B of LoRA."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in body.modules() if isinstance(module, LoraLayer)]
    result: list[nn.Linear] = []
    for layer in layers:
        for factors in (layer.lora_A, layer.lora_B):
            result += cast("list[nn.Linear]", list(factors.values()))
    return result


def _at_input(linear: nn.Linear) -> Any:
    """A linear layer's pass with its weights brought to where its input is."""

    def forward(given: Tensor) -> Tensor:
        bias = None if linear.bias is None else linear.bias.to(given.device)  # pyright: ignore[reportUnnecessaryComparison]
        return functional.linear(given, linear.weight.to(given.device), bias)

    return forward


def _within(name: str, block: str) -> bool:
    return not block or name == block or name.startswith(f"{block}.")


# Wrapper of generative vision-language models of transformers -------------------------------------------------


_TOKENS = 2**14  # tokens of candidates that are read at once, where each has its own copy of the prompt
_NODES = 256  # tokens of candidates that are read at once behind one prompt


class Asked(NamedTuple):
    """Prompts with their pictures, before the first layer."""

    ids: Tensor  # prompts with the tokens of their pictures, padded on the left, int64 (B, L)
    mask: Tensor  # 1 for tokens, int64 (B, L)
    pictures: Mapping[str, Tensor]  # what the processor made of each example's pictures, each (B, P, ...)
    tokens: Tensor | None  # tokens of the answers to learn, (B, K, T), or None
    shown: Tensor  # which of the P pictures each example has, bool (B, P)
    counted: Tensor | None = None  # which answers there are, bool (B, K); None where all are
    # what the picture encoder made of the pictures, where its outputs are kept; pictures are few then
    seen: PictureStates | None = None


class HuggingFaceVLM(Finetunable):
    """An image-text-to-text model of ``transformers`` that writes answers, or chooses among given ones by likelihood.

    Batches have ``image``, uint8 (B, 3, H, W), or of several pictures (B, P, 3, H, W) with ``image_count`` (B,), and
    ``text`` and ``text_mask``, int64 (B, L), prompts of :class:`confed.models.hf.prompts.ChatTokenizer`. Training
    batches have ``answer_tokens`` too, (B, T), or (B, K, T) with ``answer_weight`` (B, K); what comes out is as in
    :class:`confed.models.answer_ranking.GenerativeAnswerer`: token scores (R, T - 1, V) of training batches,
    log-likelihoods of the candidates (B, C) of all others. Where the task says how answers are written, these are
    texts instead, int64 (B, max_new_tokens), padded behind their end. Features are the last layer's state of the
    prompt's last token, (B, d).
    """

    writes = "answers"
    converses = True
    published_prefix = "body."
    prefix_is_frozen = True  # the first part makes inputs and has no layers
    mixed = False  # whether what does not learn is bf16, so that passes run under autocast
    is_loaded_in_4bit = False  # whether linear layers are quantised to 4 bits; the library peft asks
    is_loaded_in_8bit = False  # whether they are quantised to 8 bits
    # "auto" for a base that is spread over the GPUs that there are, "one" for one device
    device_map: Literal["one", "auto"] = "one"
    exact: bool = True  # whether passes on a GPU repeat to the bit

    def __init__(
        self,
        body: nn.Module,
        tokenizer: ChatTokenizer,
        checkpointing: bool = False,
        parts: Sequence[Part] = ("language",),
    ) -> None:
        super().__init__()
        self.body: Any = body
        self.parts = parts  # of which something may learn
        self.tokenizer, self.pictures = tokenizer, Pictures(tokenizer.placeholder)
        self.prompts, self.adapters = nn.ModuleDict(), AdapterBank((), 1)
        self._candidates: Tensor | None = None
        self._trees: tuple[CandidateTree, ...] | None = None
        self._writing: Writing | None = None
        self._main: torch.device | None = None
        self._typed = typed_inputs(body, tokenizer.placeholder)
        # those before prompts, where the kind of finetuning is "prompt"
        self.learned_tokens: LearnedTokens | None = None
        self._checkpointing = checkpointing
        if checkpointing:
            self.body.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        self.body.config.use_cache = False
        self.train()

    def place(self, device: str) -> None:
        """See :class:`confed.federation.specs.PlacesItself`."""
        if torch.device(device).type == "cuda":
            torch.backends.cuda.enable_math_sdp(True)
            torch.backends.cuda.enable_flash_sdp(not self.exact)
            torch.backends.cuda.enable_mem_efficient_sdp(not self.exact)
            torch.backends.cuda.enable_cudnn_sdp(not self.exact)
        if self.device_map == "auto":
            check_spreadable(self, self.body)
        several = gpus(device) if self.device_map == "auto" else []
        if len(several) < 2:
            self.to(device)
        else:
            self._main = spread(self, self.body, several)

    # Parts -----------------------------------------------------------------------------------------------------------

    @property
    def frozen(self) -> set[str]:
        """Names of all tensors that do not learn, the scales of quantised weights among them."""
        fixed = {name for name, tensor in self.state_dict(keep_vars=True).items() if not tensor.requires_grad}
        return fixed | {name for name, _ in self.named_buffers()}

    def part(self, name: str) -> str:
        """Name of the submodule of the language part or of the picture encoder."""
        wanted = self.body.get_decoder() if name == "language" else self.body.get_encoder("image")
        return next(module_name for module_name, module in self.named_modules() if module is wanted)

    def places(self) -> Places:
        """What can be finetuned: linear layers, the decoder's blocks as places of adapters, tokens before prompts."""
        language, vision = self.part("language"), self.part("vision")
        names = [name for name, module in self.named_modules() if isinstance(module, nn.Linear)]
        head = self.body.get_output_embeddings()
        layers_of_part = {
            "language": [n for n in names if n.startswith(f"{language}.")],
            "vision": [n for n in names if n.startswith(f"{vision}.")],
        }
        rest = [n for n in names if not n.startswith((f"{language}.", f"{vision}."))]
        layers_of_part["connector"] = [n for n in rest if self.get_submodule(n) is not head]
        layers = self.body.get_decoder().layers
        width = self.body.get_decoder().config.hidden_size
        return Places(
            heads=(),
            top=(f"{language}.layers.{len(layers) - 1}.",),
            hosts=[Host(layer, width) for layer in layers] if "language" in self.parts else [],
            lora=tuple(chain.from_iterable(layers_of_part[name] for name in self.parts)),
            ia3=tuple(n for n in layers_of_part["language"] if n.endswith((".k_proj", ".v_proj"))),
            ia3_inputs=tuple(n for n in layers_of_part["language"] if n.endswith((".down_proj", ".fc2"))),
            prompts={"text": width} if "language" in self.parts else {},
            finetuned=self.keep_to_parts,
        )

    def keep_to_parts(self) -> None:
        """Takes what is outside of its parts out of what learns; beside a base of bf16 what learns is fp32."""
        if "text" in self.prompts:
            self.learned_tokens = LearnedTokens(cast(Prompt, self.prompts["text"]), self.body.get_input_embeddings())
        language, vision = f"{self.part('language')}.", f"{self.part('vision')}."
        for name, parameter in self.named_parameters():
            of_part: Part = "connector"
            if name.startswith((language, "prompts.")) or self.is_head(name):
                of_part = "language"
            elif name.startswith(vision):
                of_part = "vision"
            if of_part not in self.parts:
                parameter.requires_grad_(False)
            if parameter.requires_grad and self.mixed:
                parameter.data = parameter.data.float()
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise ValueError(
                f"model.trainable finds nothing to learn in model.parts = {list(self.parts)}: try 'lora' or 'adapters'"
            )

    def is_head(self, name: str) -> bool:
        """Whether a parameter is the output layer's, which turns states into scores of tokens."""
        head = self.body.get_output_embeddings()
        head_name = next(head_name for head_name, module in self.named_modules() if module is head)
        return name.startswith(f"{head_name}.")

    # Passes -------------------------------------------------------------------------------------------------------

    def begin(self, task: Any) -> None:
        """Takes over how answers are written, or which there are to choose from: ``candidates``, int64 (C, T)."""
        self._candidates = task.candidates if isinstance(task, HasCandidates) else None
        self._trees = None
        self._writing = task.writing if isinstance(task, WritesAnswers) else None

    def forward(self, batch: Batch) -> Output:
        """Scores and features; see the class."""
        return self.suffix(self.prefix(batch))

    def prefix(self, batch: Batch) -> Asked:
        """Prompts with the tokens of their pictures, and what the processor makes of these."""
        needed(batch, "the model 'hf'", "image", "text", "text_mask")
        image, count = self._shown(batch)
        ids, mask = trimmed(batch["text"], batch["text_mask"])
        if len(image):
            first = image[0, 0].cpu().permute(1, 2, 0).contiguous().numpy()
            ids, mask = self.tokenizer.placeholder.put_in(ids, mask, first, count.tolist())
            if self.learned_tokens is not None:
                ids, mask = with_learned(ids, mask, self.learned_tokens.tokens, self.learned_tokens.vocabulary)
        tokens, counted = batch.get("answer_tokens"), None
        if tokens is not None and tokens.ndim == 3:
            counted = batch["answer_weight"] > 0
        if tokens is not None and tokens.ndim == 2:
            tokens = tokens[:, None]
        shown = torch.arange(image.shape[1], device=count.device) < count[:, None]
        # Examples with different numbers of pictures have no features of one shape.
        alike = self.frozen_features is not None and bool(shown.any()) and bool(shown.all())
        seen = run_stages(self, batch, 1) if alike else None
        pictures = self.pictures(image, None if seen is None else BESIDE)
        return Asked(ids, mask, pictures, tokens, shown, counted, seen)

    @staticmethod
    def _shown(batch: Batch) -> tuple[Tensor, Tensor]:
        """Pictures (B, P, 3, H, W), and how many each example has, (B,)."""
        image, count = batch["image"], batch.get("image_count")
        if image.dtype != torch.uint8 or image.ndim != 4 + (count is not None):
            shape = "(B, 3, H, W)" if count is None else "(B, P, 3, H, W)"
            raise ValueError(f"image must be uint8 of shape {shape}, got {image.dtype} {tuple(image.shape)}")
        if count is None:
            return image[:, None], image.new_ones(len(image), dtype=torch.int64)
        return image, count

    @property
    def stages(self) -> Sequence[Stage]:
        """The picture encoder with the connector, and the language part."""
        later = (f"{self.part('language')}.", "prompts.")
        staged_names = [n for n in self.state_dict(keep_vars=True) if not n.startswith(later) and not self.is_head(n)]
        return (
            Stage("picture encoder and connector", ("image", "image_count"), tuple(staged_names)),
            Stage("language part", (), ("",)),
        )

    @property
    def stage_variant(self) -> str:
        """The settings by which inputs are made of pictures."""
        return self.tokenizer.placeholder.settings

    def forward_stages(self, state: Any, first: int, last: int, batch: Batch) -> Any:
        """See :class:`confed.federation.stages.Staged`; the state after the first stage is a :class:`PictureStates`.

        Of examples that have all P pictures.
        """
        if first == 0 and last > 0:
            image, _ = self._shown(batch)
            shown = image.new_ones(image.shape[:2], dtype=torch.bool)
            with self._precision(image.device):
                state = encoded(self.body, self._own(self.pictures.joined(self.pictures(image), shown)), len(image))
        return self.suffix(self.prefix(batch)._replace(seen=state)) if last == 2 else state

    def suffix(self, state: Asked) -> Output:
        """The library's model, with the adapters that are switched on."""
        home = state.ids.device
        if self._main is not None:
            from accelerate.utils import send_to_device

            state = cast(Asked, send_to_device(state, self._main))
        output = self._answer(state)
        return Output(output.logits.to(home), output.features.to(home))

    def _answer(self, state: Asked) -> Output:
        with self._precision(state.ids.device):
            if state.tokens is not None:
                return self._token_scores(state, state.tokens)
            return self.rank(state) if self._writing is None else self.write(state, self._writing)

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        # What learns is fp32 and adds to the states of a bf16 base, as peft's own training has it.
        return torch.autocast(device.type, torch.bfloat16) if self.mixed else nullcontext()

    def _token_scores(self, state: Asked, tokens: Tensor) -> Output:
        """Scores of the answers' tokens, (R, T - 1, V), and features (B, d)."""
        b, k, t = tokens.shape
        rows = torch.arange(b, device=state.ids.device).repeat_interleave(k)
        answers = tokens.flatten(0, 1)
        if state.counted is not None:
            counted = state.counted.flatten()
            rows, answers = rows[counted], answers[counted]
            t = max(int(answered(answers).sum(1).max()), 2) if len(answers) else 2
            answers = answers[:, :t]
        hidden = self._hidden(state, rows, answers)
        length = state.ids.shape[1]
        first = torch.zeros(b, dtype=torch.int64, device=rows.device).scatter_reduce(
            0, rows, torch.arange(len(rows), device=rows.device), "amin", include_self=False
        )
        return Output(self._scores(hidden[:, length - 1 : length + t - 2]), hidden[first, length - 1])

    repeat = staticmethod(SplitChain.repeat)

    def rank(self, state: Asked) -> Output:
        """Log-likelihoods of the candidates, (B, C), the prompt computed once for all of them."""
        if self._candidates is None:
            raise ValueError("the model 'hf' chooses among given answers and got none: task.name must be 'generation'")
        # Layers that are recomputed keep no cache, and some families count positions on several axes.
        if (self.training and self._checkpointing) or hasattr(self.body.model, "get_rope_index"):
            return self._rank_whole(state, self._candidates.to(state.ids.device))
        answers = self._candidates.to(state.ids.device)[:, 1:]
        base = self.body.model
        read = self._inputs(state.ids, state.mask, state.pictures, state.shown, seen=state.seen)
        with first_position_behind(self.body.get_decoder(), state.ids.shape[1]) as start:
            begun = base(**read, use_cache=True, return_dict=True)
        last = begun.last_hidden_state[:, -1:]
        first = self._scores(last)[:, 0].float().log_softmax(-1)
        likelihood = first[:, answers[:, 0]]
        if answers.shape[1] > 1:
            likelihood = likelihood + self._continued(state, begun.past_key_values, answers, start())
        return Output(likelihood, last[:, 0])

    def _rank_whole(self, state: Asked, candidates: Tensor) -> Output:
        """As :meth:`rank`, with a prompt of its own before each candidate."""
        b, c = len(state.ids), len(candidates)
        token_scores = self._token_scores(state, candidates.expand(b, -1, -1))
        target = candidates[:, 1:].repeat(b, 1)
        scores = token_scores.logits.float().log_softmax(-1).gather(2, target[..., None])[..., 0]
        return Output((scores * answered(target)).sum(1).view(b, c), token_scores.features)

    def _continued(self, state: Asked, cache: Any, answers: Tensor, start: int) -> Tensor:
        """Log-likelihood of all but the first token of c answers given the cached prompts, (B, c)."""
        (b, length), (c, t) = state.ids.shape, answers.shape
        decoder, embed = self.body.get_decoder(), self.body.get_input_embeddings()
        if reads_trees(decoder, cache, length + t - 1):
            if self._trees is None:
                self._trees = candidate_trees(answers, _NODES)
            likelihood = torch.zeros(b, c, device=answers.device)
            for tree in (tree.to(answers.device) for tree in self._trees if len(tree.tokens)):
                hidden = tree_states(decoder, embed, cache, state.mask, tree, start)
                likelihoods = tree_likelihoods(hidden, tree, self._scores, self.tokenizer.vocab_size)
                likelihood = likelihood.index_add(1, tree.rows, likelihoods)
            return likelihood
        at_once = max(_TOKENS // max(b * (t - 1), 1), 1)
        parts: list[Tensor] = []
        for answer_rows in answers.split(at_once):
            hidden = repeated_states(decoder, embed, cache, state.mask, answer_rows, start)
            parts.append(self._copied_likelihoods(hidden, answer_rows.repeat(b, 1)[:, 1:]).view(b, len(answer_rows)))
        return torch.cat(parts, 1)

    def _copied_likelihoods(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Log-likelihoods of answers' tokens by the states before them, (R,), a part of the rows at a time."""
        at_once = max(SCORES_AT_ONCE // (self.tokenizer.vocab_size * target.shape[1]), 1)
        likelihoods = [
            self._scores(states).float().log_softmax(-1).gather(2, target_rows[..., None])[..., 0]
            for states, target_rows in zip(hidden.split(at_once), target.split(at_once), strict=True)
        ]
        return (torch.cat(likelihoods) * answered(target)).sum(1)

    def write(self, state: Asked, how: Writing) -> Output:
        """The most probable texts that a search finds behind prompts, int64 (B, max_new_tokens), and features."""
        read = self._inputs(state.ids, state.mask, state.pictures, state.shown, seen=state.seen)
        return Output(*search(self.body, read, self.tokenizer, how))

    def check_pictures(self, image: Tensor) -> None:
        """Check that a picture has as many tokens in a prompt as the picture encoder gives features."""
        placed = self.tokenizer.placeholder.tokens(image.cpu().permute(1, 2, 0).contiguous().numpy())
        tokens = placed.count(self._picture_token)
        device = next(self.body.parameters()).device
        shown = torch.ones(1, 1, dtype=torch.bool, device=device)
        inputs = self.pictures.joined(self.pictures(image[None, None].to(device)), shown)
        training = self.training
        self.eval()  # what was checked is trained afterwards: no statistics of batches may change
        with torch.no_grad():
            output = self.body.get_image_features(**self._own(inputs))
        self.train(training)
        features = len(_rows(getattr(output, "pooler_output", output)))
        if features != tokens:
            raise ValueError(
                f"a picture of {image.shape[1]} x {image.shape[2]} pixels has {tokens} tokens in a prompt and "
                f"{features} features of the picture encoder: processor and model do not fit together"
            )

    def _hidden(self, state: Asked, rows: Tensor, answers: Tensor) -> Tensor:
        """Last layer's states of prompts and answers, (R, L + T - 1, d); answers without their start and last token."""
        read = answers[:, 1:-1]
        ids = torch.cat([state.ids[rows], read], 1)
        mask = torch.cat([state.mask[rows], answered(answers)[:, 1:-1].long()], 1)
        pictures = {key: value[rows] for key, value in state.pictures.items()}
        seen = None if state.seen is None else state.seen.of(rows)
        inputs = self._inputs(ids, mask, pictures, state.shown[rows], read.shape[1], seen)
        return self.body.model(**inputs, return_dict=True).last_hidden_state

    def _inputs(
        self, ids: Tensor, mask: Tensor, pictures: Mapping[str, Tensor], shown: Tensor, answers: int = 0,
        seen: PictureStates | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """What the library's model reads; the last ``answers`` of the ids are an answer's."""
        picture_inputs: dict[str, Any] = self._own(self.pictures.joined(pictures, shown))
        if seen is not None:
            picture_inputs["mm_encoder_outputs"] = seen.outputs()
        behind = torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] - answers
        kinds = {True: (ids == self._picture_token).long(), False: behind.long().expand_as(ids)}
        typed = {name: kinds[pictures_marked] for name, pictures_marked in self._typed.items()}
        return {"input_ids": ids, "attention_mask": mask, **picture_inputs, **typed}

    def _own(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inputs of the picture encoder in its precision."""
        dtype = self.body.dtype
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}

    @property
    def _picture_token(self) -> int:
        config = self.body.config
        return int(getattr(config, "image_token_id", None) or config.image_token_index)

    def _scores(self, hidden: Tensor) -> Tensor:
        return self.body.get_output_embeddings()(hidden)
