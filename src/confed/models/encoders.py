"""Any picture encoder, with or without a text encoder, of ``transformers``: pretrained towers under one small head.

What most people have is no vision-language model but an encoder: DINOv2, ConvNeXt, SigLIP's picture tower, the ResNet
of their hospital, a BERT. The towers are read by name or from a folder; what is frozen of them is computed once per
picture and once per text, one at a time, so that neither batches nor other examples change a bit of it.

Fusions: ``linear`` and ``product`` read one vector per picture and text (their element-wise product is the fusion of
VQA's first baselines, Antol et al., ICCV 2015); ``attention`` is a small Transformer over the cells of the picture and
the tokens of the text; ``labels`` is C-Tran, FedLGT's network, whose tokens of labels, and of what is known of them,
read the cells and each other. Own choice: vectors are normalised to zero mean and unit variance before the fusion, so
that one learning rate fits towers of any scale.

Answers are scored by learned rows, or by a learned projection onto the text embeddings of their names (FedLGT's
universal label embedding with a sentence encoder; retrieval of texts; classes that nobody trained on), for which random
vectors are the control. Both stay as they are, or are where learning starts. ``zero_shot`` learns nothing: the
probabilities of a classifier's own classes weigh the embeddings of their names, and the answer whose name lies nearest
to that mean is taken (ConSE: Norouzi et al., "Zero-shot learning by convex combination of semantic embeddings", ICLR
2014).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.data.examples import Pictures
from confed.data.regions import HeldRegions
from confed.federation.protocols import Batch, Output
from confed.federation.specs import ModelSpec
from confed.federation.stages import KeptStates, Stage, run_stages
from confed.models.adapters import Host
from confed.models.ctran import LabelReader
from confed.models.finetuning import Finetunable, Places
from confed.models.grid_features import PREFIX, VisionEncoder, colours_of, plane_of
from confed.models.heads import COUNT, answer_head, count
from confed.models.inputs import cropped_middle, needed, picture_fit, picture_side
from confed.models.label_embeddings import LabelEmbeddings, embed_labels, sentence_encoder, tokenizer_of
from confed.models.layers import seeded_linear
from confed.models.pretrained import published, seeded
from confed.models.tokenizer import FixedLength, WordTokenizer
from confed.models.variants import variant

Fusion = Literal["linear", "product", "attention", "labels"]
Reads = Literal["pictures", "texts"]
TINY = "tiny:"
"""Begins the names of towers of a few thousand random parameters, ``tiny:resnet``, for trials without a download."""

_BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_PATCHES = {**_BLOCKS, "image_size": 32, "patch_size": 8}
_TINY: Mapping[Reads, Mapping[str, Mapping[str, Any]]] = {
    "pictures": {
        "vit": _PATCHES,
        "dinov2": _PATCHES,
        "siglip_vision_model": _PATCHES,
        "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
        "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
        "mobilenet_v2": {"depth_multiplier": 0.25, "image_size": 32},
    },
    "texts": {
        "bert": _BLOCKS,
        "roberta": _BLOCKS,
        "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    },
}
_TINY_PIXELS = 32
_MEMORY = 256 * 2**20
"""Bytes of texts' vectors that a frozen text tower remembers."""
_LIKELIEST = 10
"""Classes of a classifier whose names make a picture's vector, as published."""
_CELLS = 7
"""Most cells per side of pictures as regions."""


# Towers as chains of blocks -------------------------------------------------------------------------------------


class _Reached(Exception):  # no error: it ends a pass at a block
    """The end of a pass at a block, with the state there."""

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.state = state


class Tower(nn.Module):
    """An encoder of ``transformers`` whose blocks can be left out or stopped at."""

    def __init__(self, model: nn.Module, probe: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model = model
        lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
        self.blocks_name, blocks = max(lists, key=lambda item: len(item[1]), default=("", ()))
        self.blocks: tuple[Any, ...] = ()
        self.widths: list[int] = []
        self.planes = False
        with torch.no_grad():
            states = self.states(probe)
            self.width = states.shape[1 if states.ndim == 4 else 2]
            if self._can_be_cut(tuple(blocks), probe, states):
                self.blocks = tuple(blocks)

    def _can_be_cut(self, blocks: Sequence[Any], probe: Mapping[str, Tensor], expected: Tensor) -> bool:
        """Whether a pass that ends before its last block and goes on from there gives the same states."""
        outputs: list[object] = []
        handles = [block.register_forward_hook(lambda _, __, output: outputs.append(output)) for block in blocks]
        self.states(probe)
        for handle in handles:
            handle.remove()
        tensors = [output for output in outputs if isinstance(output, Tensor) and output.ndim in (3, 4)]
        if not blocks or len(tensors) != len(blocks) or len(outputs) != len(blocks):
            return False
        self.planes = tensors[-1].ndim == 4
        self.widths = [output.shape[1 if self.planes else 2] for output in tensors]
        self.blocks = tuple(blocks)
        last = len(blocks) - 1
        try:
            with self._skipping(last, self.state_before(last, probe)):
                return torch.equal(self.states(probe), expected)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):
            return False
        finally:
            self.blocks = ()

    def states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Last states, (B, n, d) or (B, d, h, w)."""
        return self.model(**inputs).last_hidden_state

    def state_before(self, number: int, inputs: Mapping[str, Tensor]) -> Tensor:
        """What a block reads; the pass ends there."""

        def stop(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            raise _Reached(arguments[0] if arguments else named["hidden_states"])

        handle = self.blocks[number].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.states(inputs)
        except _Reached as end:
            return end.state
        finally:
            handle.remove()
        raise AssertionError(f"block {number} was not reached")

    @contextmanager
    def _skipping(self, number: int, state: Tensor | None) -> Iterator[None]:
        """Context in which the blocks before this one hand on a state that was computed before; without one, none."""
        skipped = self.blocks[:number] if state is not None else ()
        for block in skipped:  # with its hooks, such as those of adapters, which the state has passed already
            block._call_impl = lambda *_, **__: state
        try:
            yield
        finally:
            for block in skipped:
                del block._call_impl

    def last_blocks(self, number: int | None) -> range:
        """Numbers of the last blocks, of all where None is given."""
        return range(0 if number is None else max(len(self.blocks) - number, 0), len(self.blocks))

    def names_of(self, blocks: range) -> list[str]:
        """Prefixes of the names of some blocks' parameters, without the last dot."""
        return [f"model.{self.blocks_name}.{number}" for number in blocks]

    def names_behind(self) -> list[str]:
        """Names of the parameters behind the blocks."""
        names = [name for name, _ in self.named_parameters()]
        of_blocks = [place for place, name in enumerate(names) if name.startswith(f"model.{self.blocks_name}.")]
        return names[of_blocks[-1] + 1 :] if of_blocks and self.blocks else []

    @property
    def is_frozen(self) -> bool:
        """Whether nothing in it learns."""
        return not any(parameter.requires_grad for parameter in self.parameters())


def _plain_pass(tensor: Tensor) -> bool:
    """Whether examples can be told apart: on a CPU, outside of maps over clients."""
    return tensor.device.type == "cpu" and torch._C._functorch.maybe_current_level() is None  # pyright: ignore


class PictureTower(Tower):
    """A picture encoder as stages, one per block; implements :class:`confed.federation.stages.Staged`.

    On a CPU frozen stages compute one picture at a time: the same bits in any batch, and less than half of the time
    (29 against 75 ms a picture of 224 pixels in batches of 32, MobileNetV2 on one core).
    """

    frozen_features: KeptStates | None = None
    stage_variant = ""

    def __init__(
        self, model: nn.Module, colours: tuple[Sequence[float], Sequence[float]], middle: tuple[int, int],
        gives: Literal["vector", "cells", "names"], class_names: Tensor | None = None,
    ) -> None:  # fmt: skip
        size = getattr(model.config, "image_size", None) or _TINY_PIXELS
        sides = (size, size) if isinstance(size, int) else tuple(size)
        self.gives = gives
        super().__init__(model, {"pixel_values": torch.zeros(1, 3, *sides)})
        self.sides = sides
        self.mean, self.std = (tuple(map(float, values)) for values in colours)
        self.middle = middle
        patch = getattr(model.config, "patch_size", None)
        self.patch = patch if isinstance(patch, int) else 0
        self.register_buffer("class_names", class_names)
        self._stages: list[Stage] | None = None
        if class_names is not None:
            self.width, self.blocks = class_names.shape[1], ()

    def states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        output: Any = self.model(**inputs, **({"output_hidden_states": True} if self.gives == "names" else {}))
        return output.hidden_states[-1] if self.gives == "names" else output.last_hidden_state

    @property
    def stages(self) -> Sequence[Stage]:
        """A stage up to the end of each block, what follows the blocks, and the result handed on."""
        if self._stages is None:
            self._stages = self._divided()
        return self._stages

    def _divided(self) -> list[Stage]:
        of_blocks = [f"{block}." for block in self.names_of(range(len(self.blocks)))]
        behind = (*self.names_behind(), "class_names")
        elsewhere = (*of_blocks[1:], *behind)
        first = tuple(name for name, _ in self.named_parameters() if not name.startswith(elsewhere))
        parts = [first, *((block,) for block in of_blocks[1:]), behind]
        titles = [
            *(f"picture encoder, block {number + 1}" for number in range(max(len(of_blocks), 1))),
            "picture encoder",
        ]
        learning = [name for name, value in self.named_parameters() if value.requires_grad]
        alone = True
        stages: list[Stage] = []
        for title, part in zip(titles, parts, strict=True):
            alone = alone and not any(name.startswith(part) for name in learning)
            stages.append(Stage(title, ("image",), part, alone=alone))
        return [*stages, Stage("handing on", (), ("",))]

    def train(self, mode: bool = True) -> "PictureTower":
        self._stages = None
        return super().train(mode)

    def forward(self, batch: Batch) -> Tensor:
        return run_stages(self, batch, len(self.stages))

    def forward_stages(self, state: Any, first: int, last: int, batch: Batch) -> Tensor:
        """See :class:`confed.federation.stages.Staged`."""
        whole = len(self.stages) - 1
        if first == whole:
            return state
        last = min(last, whole)
        (image,) = needed(batch, "Encoders", "image")
        alone = sum(stage.alone for stage in self.stages)
        if first < alone and _plain_pass(image):
            until = min(alone, last)
            rows = range(len(image))
            state = torch.cat(
                [
                    self._between(None if state is None else state[i : i + 1], first, until, image[i : i + 1])
                    for i in rows
                ]
            )
            first = until
        return state if first == last else self._between(state, first, last, image)

    def _between(self, state: Tensor | None, first: int, last: int, image: Tensor) -> Tensor:
        """The state after ``last`` stages from that after ``first``."""
        edge, side = self.middle
        if edge and image.shape[-2:] == (edge, edge):
            start = (edge - side) // 2
            image = image[..., start : start + side, start : start + side]
        mean, std = (image.new_tensor(values, dtype=torch.float32)[:, None, None] for values in (self.mean, self.std))
        inputs = {"pixel_values": (image.float() / 255 - mean) / std}
        if self.gives == "names":
            return self._named(inputs)
        with self._skipping(first, state):
            if last < len(self.blocks):
                return self.state_before(last, inputs).contiguous()
            if last == len(self.blocks):
                return self._after_blocks(inputs).contiguous()
            return self._result(self.states(inputs), image.shape[-1]).contiguous()

    def _after_blocks(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The last block's output."""
        seen: list[Tensor] = []
        handle = self.blocks[-1].register_forward_hook(lambda _, __, output: seen.append(output))
        try:
            self.states(inputs)
        finally:
            handle.remove()
        return seen[0]

    def _result(self, states: Tensor, pixels: int) -> Tensor:
        plane = plane_of(states, pixels // self.patch if self.patch else 0)
        if self.gives == "cells":
            return plane.flatten(2).transpose(1, 2)
        has_class_token = states.ndim == 3 and states.shape[1] > plane.shape[2] * plane.shape[3]
        return states[:, 0] if has_class_token else plane.mean((2, 3))

    def _named(self, inputs: Mapping[str, Tensor]) -> Tensor:
        table: Any = self.class_names
        return mean_name(self.model(**inputs).logits, table)


class TextTower(Tower):
    """A text encoder; while it is frozen it reads each text once, alone and without padding."""

    def __init__(self, model: nn.Module) -> None:
        tokens = torch.ones(1, 3, dtype=torch.int64)
        super().__init__(model, {"input_ids": tokens, "attention_mask": tokens})
        self._read: dict[bytes, Tensor] = {}
        self._read_by: list[tuple[Tensor, int]] = []

    def forward(self, text: Tensor, mask: Tensor) -> Tensor:
        """States of the tokens, (B, L, e), zero where the mask is."""
        if not (self.is_frozen and _plain_pass(text)):
            return self.states({"input_ids": text, "attention_mask": mask}) * mask.unsqueeze(-1)
        self._forget_if_changed()
        lengths: Any = mask.sum(1).tolist()
        rows: list[Tensor] = []
        for tokens, length in zip(text, lengths, strict=True):
            states = self._states_of(tokens[: max(length, 1)])
            rows.append(F.pad(states, (0, 0, 0, text.shape[1] - len(states))))
        return torch.stack(rows) * mask.unsqueeze(-1)

    def _states_of(self, tokens: Tensor) -> Tensor:
        key = tokens.numpy().tobytes()
        states = self._read.get(key)
        if states is None:
            with torch.no_grad():
                inputs = {"input_ids": tokens[None], "attention_mask": torch.ones_like(tokens[None])}
                states = self.states(inputs)[0]
            if sum(1 for _ in self._read) * states.nbytes < _MEMORY:
                self._read[key] = states
        return states

    def _forget_if_changed(self) -> None:
        now = [*self.parameters(), *self.buffers()]
        same = len(now) == len(self._read_by) and all(
            tensor is known and tensor._version == version
            for tensor, (known, version) in zip(now, self._read_by, strict=True)
        )
        if not same:
            self._read, self._read_by = {}, [(tensor, tensor._version) for tensor in now]


# Heads ----------------------------------------------------------------------------------------------------------


class NameScores(nn.Module):
    """Scores of answers by fixed vectors: a learned projection of the features onto them, and one bias for all."""

    def __init__(self, width: int, vectors: Tensor, rng: torch.Generator) -> None:
        super().__init__()
        self.project = seeded_linear(width, vectors.shape[1], 0.01, rng)
        self.bias = nn.Parameter(torch.zeros(()))
        self.register_buffer("vectors", vectors)

    def forward(self, features: Tensor) -> Tensor:
        """Scores (B, C) of features (B, d)."""
        return self.project(features) @ self.vectors.T + self.bias  # pyright: ignore


class NearestNames(nn.Module):
    """Cosines of a picture's vector with the answers', times a scale: the one value that can learn."""

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(20.0))
        self.register_buffer("vectors", vectors)

    def forward(self, features: Tensor) -> Tensor:
        """Scores (B, C) of vectors (B, e)."""
        return self.scale * F.normalize(features, dim=1) @ self.vectors.T  # pyright: ignore


# The model ------------------------------------------------------------------------------------------------------


class Fused(NamedTuple):
    """What a fusion reads: vectors (B, d) and (B, e), or cells (B, n, d) and tokens (B, L, e) with their mask."""

    picture: Tensor
    text: Tensor | None
    mask: Tensor | None


class Encoders(Finetunable):
    """A picture tower, a text tower where there is one, a fusion, and an answer head.

    Batches have ``image``, uint8 (B, 3, H, W), and with a text tower ``text`` and ``text_mask``, int64 (B, L). Towers
    stay in evaluation mode where nothing in them learns, and so do batch normalisations unless their statistics are to
    learn.
    """

    answer_head: ClassVar[str] = "classifier"
    """Name of the submodule that scores answers: what methods with a head of each client's own keep private."""
    heads: ClassVar[tuple[str, ...]] = ("fusion", "classifier")
    """Submodules that always learn."""

    def __init__(
        self, vision: PictureTower, text: TextTower | None, fusion: Fusion, answers: int,
        labels: LabelEmbeddings | None, width: int, layers: int, dropout: float, blocks: int | None,
        tuned: Sequence[str], statistics: bool, rng: torch.Generator,
    ) -> None:  # fmt: skip
        super().__init__()
        self.vision, self.text, self.fusion_kind = vision, text, fusion
        self.last_blocks, self.tuned, self.statistics = blocks, tuple(tuned), statistics
        sizes = [tower.width for tower in (vision, text) if tower is not None]
        self.dropout = nn.Dropout(dropout)
        self.fusion = nn.ModuleList()
        fused = sum(sizes)
        if fusion != "linear":
            self.fusion.extend(seeded_linear(size, width, 0.02, rng) for size in sizes)
            fused = width if fusion == "attention" or text is None else 3 * width
        if fusion == "attention":
            seed = int(torch.randint(2**31, (1,), generator=rng))
            self.fusion.append(seeded(seed, lambda: _mixer(width, layers, dropout)))
        self.classifier: nn.Module
        self.add_head(fused, answers, labels, width, layers, dropout, rng)

    def add_head(
        self, fused: int, answers: int, labels: LabelEmbeddings | None, width: int, layers: int, dropout: float,
        rng: torch.Generator,
    ) -> None:  # fmt: skip
        """What scores answers, of fused features."""
        if self.vision.gives == "names":
            assert labels is not None
            self.classifier = NearestNames(labels.vectors)
        elif labels is not None:
            self.classifier = NameScores(fused, labels.vectors, rng)
        elif self.fusion_kind == "linear":
            self.classifier = seeded_linear(fused, answers, 0.01, rng)
        else:
            self.classifier = answer_head(fused, answers, rng)

    @property
    def label_vectors(self) -> tuple[nn.Module, str]:
        """The module that has the vectors of answers' names, and what it calls them."""
        return self.classifier, "vectors"

    @property
    def frozen(self) -> set[str]:
        """Names of the parameters that do not learn, and of the buffers, unless statistics are to learn."""
        learning = {f"{path}." for path, module in self.named_modules() if _is_batch_norm(module)}
        return {name for name in super().frozen if not (self.statistics and name.startswith(tuple(learning)))}

    @property
    def towers(self) -> dict[str, nn.Module]:
        """The encoders as ``transformers`` reads them, without those that something was added to."""
        towers = {"vision": self.vision, "text": self.text}
        added = (*self.adapters.names, "lora_A", "ia3_l")
        plain: dict[str, nn.Module] = {}
        for name, tower in towers.items():
            if tower is not None and not any(set(added) & set(path.split(".")) for path, _ in tower.named_modules()):
                plain[name] = tower.model
        return plain

    def train(self, mode: bool = True) -> "Encoders":
        """Training mode for what learns; frozen towers and, unless asked, batch normalisation stay as they are."""
        super().train(mode)
        for tower in (self.vision, self.text):
            if tower is not None and tower.is_frozen:
                tower.eval()
        for module in self.modules():
            if _is_batch_norm(module) and not self.statistics:
                module.eval()
        return self

    def forward(self, batch: Batch) -> Output:
        """Scores (B, C) and the features (B, d) that they are computed from."""
        return self._answered(self._encoded(batch))

    def _encoded(self, batch: Batch) -> Fused:
        picture = self.vision(batch)
        if self.text is None:
            return Fused(picture, None, None)
        text, mask = needed(batch, "Encoders", "text", "text_mask")
        tokens = self.text(text, mask)
        if self.fusion_kind == "attention":
            return Fused(picture, tokens, mask)
        return Fused(picture, tokens.sum(1) / mask.sum(1, keepdim=True).clamp_min(1), None)

    def _answered(self, state: Fused) -> Output:
        if self.vision.gives == "names":
            return Output(self.classifier(state.picture), state.picture)
        parts = [normalised(part) for part in (state.picture, state.text) if part is not None]
        if self.fusion_kind == "linear":
            features = self.dropout(torch.cat(parts, 1))
        elif self.fusion_kind == "product":
            vectors = [torch.tanh(project(part)) for project, part in zip(self.fusion, parts, strict=True)]
            if len(vectors) > 1:
                vectors.append(vectors[0] * vectors[1])
            features = self.dropout(torch.cat(vectors, 1))
        else:
            tokens = torch.cat([project(part) for project, part in zip(self.fusion, parts, strict=False)], 1)
            present = tokens.new_ones(state.picture.shape[:2], dtype=torch.int64)
            present = present if state.mask is None else torch.cat([present, state.mask], 1)
            mixed = self.fusion[-1](tokens, src_key_padding_mask=present == 0)
            weights = present.unsqueeze(-1).to(mixed.dtype)
            features = (mixed * weights).sum(1) / weights.sum(1)
        return Output(self.classifier(features), features)

    def places(self) -> Places:
        """What can be finetuned in the tuned towers: all, last blocks, LoRA on their linear layers, adapters."""
        top: list[str] = []
        linear: list[str] = []
        hosts: list[Host] = []
        for name, tower in (("vision", self.vision), ("text", self.text)):
            if tower is None or name not in self.tuned:
                continue
            upper = tower.names_of(tower.last_blocks(self.last_blocks or 1))
            top += [f"{name}.{block}." for block in upper] + [f"{name}.{behind}" for behind in tower.names_behind()]
            chosen = tower.last_blocks(self.last_blocks)
            prefixes = tuple(f"{block}." for block in tower.names_of(chosen)) if self.last_blocks else ("model.",)
            modules = tower.named_modules()
            linear += [f"{name}.{n}" for n, m in modules if isinstance(m, nn.Linear) and n.startswith(prefixes)]
            hosts += [Host(tower.blocks[i], tower.widths[i], planes=tower.planes) for i in chosen]
        others = [name for name in ("vision", "text") if name not in self.tuned]
        return Places(self.heads, fixed=tuple(others), top=tuple(top), hosts=hosts, lora=tuple(linear))


class LabelEncoders(Encoders, LabelReader):
    """C-Tran on a picture tower: tokens of labels and of their states read the picture's cells and each other.

    Batches may have ``known`` (B, C): -1 unknown, 0 known absent, 1 known present.
    """

    heads = ("fusion", "tokens", "norm", "layers", "classifier")

    def add_head(
        self, fused: int, answers: int, labels: LabelEmbeddings | None, width: int, layers: int, dropout: float,
        rng: torch.Generator,
    ) -> None:  # fmt: skip
        vectors = states = None
        if labels is not None:
            narrow = labels.narrowed(width)
            vectors, states = narrow.vectors, torch.stack([narrow.negative, narrow.positive])
        self.add_labels(
            answers, width, rng, layers=layers, heads=max(1, width // 32), dropout=dropout, embeddings=vectors,
            states=states,
        )  # fmt: skip

    @property
    def label_vectors(self) -> tuple[nn.Module, str]:
        return self.tokens, "labels"

    def forward(self, batch: Batch) -> Output:
        """Scores of the labels (B, C) before the sigmoid, and the mean of the labels' last states (B, d)."""
        (project,) = self.fusion
        return self.read_labels(project(normalised(self.vision(batch))), batch)


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def normalised(vectors: Tensor) -> Tensor:
    """Vectors of zero mean and unit variance each."""
    return F.layer_norm(vectors, vectors.shape[-1:])


def _mixer(width: int, layers: int, dropout: float) -> nn.Module:
    """A small Transformer."""
    layer = nn.TransformerEncoderLayer(width, max(1, width // 32), 4 * width, dropout, "gelu", batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


# Reading of towers, tokenizers and names ------------------------------------------------------------------------


def load_tower(name: str, reads: Reads, seed: int, vocab_size: int = 0, *, classifies: bool = False) -> nn.Module:
    """An encoder with its published weights, float32, in evaluation mode; of two, the one that reads these."""
    from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

    key, part, option = {
        "pictures": ("pixel_values", "vision_model", "model.vision"),
        "texts": ("input_ids", "text_model", "model.text"),
    }[reads]
    kind: Any = AutoModelForImageClassification if classifies else AutoModel
    if name.startswith(TINY):
        family, families = name.removeprefix(TINY), _TINY[reads]
        if family not in families:
            names = ", ".join(families)
            raise ValueError(f"{option} must be a name, a folder or tiny: and one of {names}, got {name!r}")
        sizes = {**families[family], **({"vocab_size": vocab_size} if reads == "texts" else {})}
        whole: Any = seeded(seed, lambda: kind.from_config(AutoConfig.for_model(family, **sizes)))
    else:
        try:
            whole = published(kind, name, seed, dtype=torch.float32)
        except ImportError as error:  # such as timm, for its models
            text = " ".join(str(error).split())[:200]
            raise ValueError(f"{option}: {name!r} needs a library that is not installed: {text}") from error
    tower = getattr(whole, part, whole)
    if getattr(tower, "main_input_name", key) != key:
        raise ValueError(f"{option} must read {reads}, and {name!r} reads {tower.main_input_name}")
    return tower.eval()


def _tower(kind: type[Tower], option: str, name: str, model: nn.Module, *options: Any) -> Any:
    """A tower of an encoder, tried on one blank input; one that does not work alone is a ``ValueError``."""
    try:
        return kind(model, *options)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        why = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{option}: {type(model).__name__} of {name!r} does not encode one input by itself: {why}"
        ) from error


def encoder_tokenizer(words: Sequence[str], text: str = "", max_length: int = 32) -> FixedLength:
    """The tokenizer of the text tower; without one, or with a tiny one, of the dataset's words."""
    if not text or text.startswith(TINY):
        return WordTokenizer(words, max_length)
    tokenizer = tokenizer_of(text)
    if not tokenizer.is_fast:
        raise ValueError(f"model.text must have a tokenizer.json, {text!r} has a tokenizer of another kind")
    return FixedLength(tokenizer.backend_tokenizer, max_length, tokenizer.pad_token)


def _named(
    answers: Sequence[str] | int, labels: str, template: str, width: int, seed: int
) -> LabelEmbeddings | None:  # fmt: skip
    """Unit vectors of the answers and of two states, by their names or random; None where rows are learned."""
    if not labels:
        return None
    if labels == "random":
        number = count(answers)
        rng = torch.Generator().manual_seed(seed)
        vectors = F.normalize(torch.randn(number + 2, width, generator=rng), dim=1)
        return LabelEmbeddings(tuple(map(str, range(number))), vectors[:-2], vectors[-2], vectors[-1], "random")
    if isinstance(answers, int):
        raise ValueError(f"model.labels needs the answers' names, got their number {answers}")
    return embed_labels(answers, sentence_encoder(labels), template=template)


def _pair(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    vision: str = "google/mobilenet_v2_1.0_224",
    text: str = "",
    fusion: Fusion = "linear",
    labels: str = "",
    template: str = "{label}",
    labels_learn: bool = False,
    zero_shot: bool = False,
    width: COUNT = 256,
    layers: COUNT = 1,
    blocks: COUNT | None = None,
    tuned: tuple[Literal["vision", "text"], ...] = ("vision", "text"),
    statistics: bool = False,
    max_length: int = 32,
    dropout: float = 0.0,
    seed: int,
    rng: torch.Generator,
) -> Encoders:
    """A picture tower and perhaps a text tower.

    Options:
        vision: picture encoder: a name on the hub, a folder in the layout of ``transformers``, or "tiny:" and a family.
        text: text encoder, likewise; empty for classes and labels, where the question says nothing.
        fusion: "linear", one linear layer on the normalised vectors; "product", which also multiplies the two;
            "attention", a Transformer over cells of the picture and tokens; "labels", one over cells of the picture
            and tokens of labels, of which some may be known (``task.known``): C-Tran, for several labels a picture.
        labels: what scores answers, or stands for labels: empty for learned rows; a text encoder, by whose vectors of
            their names a learned projection scores them; "random" for random vectors of ``width`` features in their
            place.
        template: what is said of a name, with {label}.
        labels_learn: these vectors are where learning starts; else they stay as they are.
        zero_shot: nothing learns: the classes of the picture encoder, which must be a classifier, are compared with
            the answers by their names; needs ``labels``.
        width: features of the fusion.
        layers: of the Transformer of "attention".
        blocks: last blocks of each tower that learn, have LoRA or host adapters; by default one for "top", else all.
        tuned: towers in which something may learn.
        statistics: batch normalisations learn their statistics where their tower learns.
        max_length: tokens of a text.
        dropout: dropout probability of the fused features.
    """
    named = _named(answers, labels, template, width, seed)
    if zero_shot and (named is None or text or labels == "random"):
        raise ValueError("model.zero_shot compares names: it needs a text encoder as model.labels, and no model.text")
    if fusion == "labels" and (text or zero_shot):
        raise ValueError('model.fusion = "labels" reads pictures alone: it needs no model.text and no model.zero_shot')
    if labels_learn and (named is None or zero_shot):
        raise ValueError("model.labels_learn is about vectors: it needs model.labels, and no model.zero_shot")
    encoder = load_tower(vision, "pictures", seed, classifies=zero_shot)
    gives = "cells" if fusion in ("attention", "labels") else "vector"
    gives = "names" if zero_shot else gives
    class_names = embed_names(encoder, labels) if zero_shot else None
    middle = cropped_middle({"source": vision})
    pictures = _tower(
        PictureTower, "model.vision", vision, encoder, colours_of(vision), middle, gives, class_names
    )  # fmt: skip
    texts = None
    if text:
        texts = _tower(TextTower, "model.text", text, load_tower(text, "texts", seed, vocab_size))
    kind = LabelEncoders if fusion == "labels" else Encoders
    model = kind(pictures, texts, fusion, count(answers), named, width, layers, dropout, blocks, tuned, statistics, rng)
    if labels_learn:
        module, name = model.label_vectors
        vectors: Tensor = getattr(module, name)
        delattr(module, name)
        module.register_parameter(name, nn.Parameter(vectors))
    return model


def embed_names(classifier: Any, encoder: str) -> Tensor:
    """Embeddings of the names of a classifier's classes, (K, e); a class 0 called "background" is left out."""
    names = [str(classifier.config.id2label[number]).split(",")[0] for number in sorted(classifier.config.id2label)]
    return F.normalize(sentence_encoder(encoder)(names[1:] if names[0] == "background" else names), dim=1)


def mean_name(scores: Tensor, names: Tensor) -> Tensor:
    """ConSE: mean (B, e) over the likeliest classes of their names' embeddings (K, e), by their probabilities."""
    best = scores[:, -len(names) :].softmax(1).topk(min(_LIKELIEST, len(names)))
    weights = best.values / best.values.sum(1, keepdim=True)
    return (weights.unsqueeze(2) * names[best.indices]).sum(1)


def cells_of(images: np.ndarray | Pictures, name: str) -> HeldRegions:
    """Pictures as regions, the cells of a frozen picture encoder: features (M, n, d) and boxes (M, n, 4)."""
    model: Any = load_tower(name, "pictures", 0)
    side = getattr(model.config, "image_size", _TINY_PIXELS)
    if tuple(images.shape[1:3]) != (side, side):
        size = images.shape[1:3]
        raise ValueError(f"{name!r} reads pictures of {side} pixels a side, got {size}: set data.image_size")
    encoder = VisionEncoder(model, side, *colours_of(name), _CELLS, f"{PREFIX}{name}#{_CELLS}")
    parts = [encoder(images[np.arange(start, min(start + 32, len(images)))]) for start in range(0, len(images), 32)]
    features = np.concatenate([part.features for part in parts])
    return HeldRegions(features, np.concatenate([part.boxes for part in parts]), encoder.name)


def encoder_source(model: Mapping[str, Any]) -> dict[str, Any]:
    return {"source": model.get("vision", "")}


encoders = variant(
    _pair, "encoders",
    "Any picture encoder, with or without a text encoder, of ``transformers``, under a small head.\n\n"
    "Raises ``ValueError``: a tower cannot be read, or reads something else.",
    "answers vocab_size vision text fusion labels template labels_learn zero_shot width layers blocks tuned statistics "
    "max_length dropout trainable peft seed",
    spec=ModelSpec(
        tokenizer=encoder_tokenizer, picture_side=lambda model: picture_side(encoder_source(model)),
        picture_fit=lambda model: picture_fit(encoder_source(model)),
    ),
    trainable="head",
)  # fmt: skip
