"""Pretraining of ``clip_mini``: a small CLIP, which compares pictures of single things with their captions.

Radford et al., "Learning transferable visual models from natural language supervision", ICML 2021. As there are few
classes, a batch has several captions of one class, and all of them are right for its pictures: the target is uniform
over them (Yang et al., "Unified contrastive learning in image-text-label space", CVPR 2022).

A class is a colour and a noun. Pictures of reserved classes (:data:`confed.datasets.scene_classes.RESERVED`) are not
learned from here: they are what zero-shot accuracy is measured on. The picture tower starts from the packaged
``vit_mini``, which was trained to name the nouns, and no colours, in pictures of the same kind.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.data.seeding import generator
from confed.data.table import Table
from confed.federation.protocols import Batch, Output
from confed.models.pretrained import States, seeded, weights_file
from confed.prepare.pretraining.byte_pairs import byte_pair_tokenizer, write_folder

CAPTIONS = ("a {}.", "a photo of a {}.", "a drawing of a {}.", "there is a {}.", "a picture of one {}.")
"""Ways to say what a picture shows."""
PROMPT = "a photo of a {}."
"""The caption by which reserved classes are recognised."""

RESERVED_SHARE = 0.1
"""Share of the pictures that are of reserved classes."""

PIXELS, PATCH, WIDTH = 64, 8, 64
"""Side of a picture and of a patch; features per token, and of the common space."""
LENGTH = 64
"""Most tokens of a text: names that the tokenizer does not know are spelt in bytes."""
VOCABULARY = 512
SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
VIT_NAMES = {
    "self_attn.out_proj": "attention.o_proj", "self_attn": "attention", "layer_norm1": "layernorm_before",
    "layer_norm2": "layernorm_after",
}  # fmt: skip
"""Names inside a block of CLIP's picture tower -> those inside ViT's."""


class DualTokenizer:
    """A CLIP processor, with the words of the captions that its tokenizer was trained on."""

    def __init__(self, processor: Any, words: Sequence[str]) -> None:
        self.processor, self.words = processor, tuple(words)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Token ids, int64 (N, L), padded to the longest text."""
        return self.processor.tokenizer(list(texts), padding=True, return_tensors="pt")["input_ids"]


def coloured_things_told(count: int, seed: int) -> tuple[Table, Tensor, Tensor, DualTokenizer]:
    """Pictures of single coloured things with captions; rows to learn from; rows of reserved classes; the tokenizer."""
    from confed.datasets.scene_classes import CLASSES, RESERVED, class_parts
    from confed.datasets.six_styles import coloured_objects

    rng = generator(seed, "coloured objects", "public")
    reserved = [number for number, name in enumerate(CLASSES) if name in RESERVED]
    learned = [number for number, name in enumerate(CLASSES) if name not in RESERVED]
    apart = rng.random(count) < RESERVED_SHARE
    pair = torch.tensor(
        [(reserved if held else learned)[rng.integers(len(reserved if held else learned))] for held in apart]
    )
    nouns, colours = class_parts(pair.numpy())
    pictures = coloured_objects(nouns, colours, rng)
    position = {number: place for place, number in enumerate(reserved)}
    columns = {
        "pair": pair,
        "caption": torch.from_numpy(rng.integers(len(CAPTIONS), size=count)),
        "label": torch.tensor([position.get(number, 0) for number in pair.tolist()]),
    }
    images = torch.from_numpy(pictures.transpose(0, 3, 1, 2).copy())
    texts = [way.format(name) for way, name in product(CAPTIONS, CLASSES)]
    words = sorted({word.strip(".") for word in " ".join(texts).split()})
    held = torch.from_numpy(apart)
    table = Table(images, torch.arange(count), columns)
    return table, (~held).nonzero()[:, 0], held.nonzero()[:, 0], DualTokenizer(trained_processor(texts), words)


def trained_processor(texts: Sequence[str]) -> Any:
    """The processor: a byte-pair tokenizer trained on some texts, and pictures of 64 x 64 pixels."""
    from tokenizers import processors
    from transformers import CLIPProcessor, PreTrainedTokenizerFast
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    ends = [(name, SPECIAL.index(name)) for name in ("<bos>", "<eos>")]
    around = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=ends)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_pair_tokenizer(texts, VOCABULARY, SPECIAL, around), pad_token="<pad>",
        unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", padding_side="right", model_max_length=LENGTH,
    )  # fmt: skip
    side = {"height": PIXELS, "width": PIXELS}
    half = [0.5, 0.5, 0.5]
    pictures = CLIPImageProcessorPil(size=side, crop_size=side, do_center_crop=False, image_mean=half, image_std=half)
    return CLIPProcessor(pictures, tokenizer)


class DualLearner(nn.Module):
    """The untrained model, which learns from pictures and captions."""

    def __init__(self, tokenizer: DualTokenizer, seed: int) -> None:
        from transformers import AutoModel

        from confed.datasets.scene_classes import CLASSES, RESERVED

        super().__init__()
        self.tokenizer = tokenizer
        self.body: Any = seeded(seed, lambda: AutoModel.from_config(_config(tokenizer)))
        start_from_vit_mini(self.body.vision_model)
        self._told = tokenizer([way.format(name) for name, way in product(CLASSES, CAPTIONS)])
        self._asked = tokenizer([PROMPT.format(name) for name in CLASSES if name in RESERVED])

    def pretraining_states(self, batch: Batch) -> States:
        """The contrastive loss of a batch; see :class:`confed.models.pretrained.Pretrainable`."""
        rows, row_of = torch.unique(batch["pair"] * len(CAPTIONS) + batch["caption"], return_inverse=True)
        scores = self._scores(self._pictures(batch["image"]), self._texts(self._told[rows]))
        same = (batch["pair"][:, None] == (rows // len(CAPTIONS))[None, :]).to(scores.dtype)
        # A text counts as often as the batch has it, as if it stood there that many times.
        counts = torch.bincount(row_of, minlength=len(rows)).to(scores.dtype)
        wanted = same * counts
        by_picture = F.cross_entropy(scores + counts.log(), wanted / wanted.sum(1, keepdim=True))
        by_text = F.cross_entropy(scores.T, (same / same.sum(0)).T, reduction="none")
        return States(answer_loss=(by_picture + (by_text * counts).sum() / counts.sum()) / 2)

    def forward(self, batch: Batch) -> Output:
        """Scores of the reserved classes by their prompts, (B, C), and the pictures' features."""
        features = self._pictures(batch["image"])
        return Output(self._scores(features, self._texts(self._asked)), features)

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Writes weights and processor as ``transformers`` reads them, and how they were made."""
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.processor.save_pretrained(folder)
        self.body.config.save_pretrained(folder)
        write_folder(folder, self.body.state_dict(), facts)

    def _pictures(self, image: Tensor) -> Tensor:
        """Features of unit length, (B, d); pixels in [-1, 1] are what the processor makes."""
        pixels = image.float().div(127.5).sub(1)
        return F.normalize(self.body.get_image_features(pixel_values=pixels).pooler_output, dim=1)

    def _texts(self, ids: Tensor) -> Tensor:
        mask = (ids != SPECIAL.index("<pad>")).long()
        return F.normalize(self.body.get_text_features(input_ids=ids, attention_mask=mask).pooler_output, dim=1)

    def _scores(self, pictures: Tensor, texts: Tensor) -> Tensor:
        return self.body.logit_scale.exp().clamp_max(100) * pictures @ texts.T


def start_from_vit_mini(tower: nn.Module) -> None:
    """Initial values of a picture tower from the packaged ``vit_mini``, whose blocks have the same shapes."""
    from safetensors.torch import load_file

    saved = {name.removeprefix("vit."): value for name, value in load_file(weights_file("vit_mini")).items()}
    tower_state = tower.state_dict()
    positions = saved["embeddings.position_embeddings"][0].clone()
    positions[1:] += saved["embeddings.patch_embeddings.projection.bias"]
    values = {
        "embeddings.class_embedding": saved["embeddings.cls_token"][0, 0],
        "embeddings.patch_embedding.weight": saved["embeddings.patch_embeddings.projection.weight"],
        "embeddings.position_embedding.weight": positions,
        "post_layernorm.weight": saved["layernorm.weight"],
        "post_layernorm.bias": saved["layernorm.bias"],
        "pre_layrnorm.weight": tower_state["pre_layrnorm.weight"] * positions.std(1, correction=0).mean(),
    }
    for name in tower_state:
        if name.startswith("encoder.layers."):
            tower_name = name.removeprefix("encoder.")
            for new, old in VIT_NAMES.items():
                tower_name = tower_name.replace(new, old)
            values[name] = saved[tower_name]
    tower.load_state_dict({**tower_state, **values})


def _config(tokenizer: DualTokenizer) -> Any:
    from transformers import CLIPConfig

    common = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_attention_heads": 4, "hidden_act": "gelu"}
    text = {
        **common, "num_hidden_layers": 2, "vocab_size": len(tokenizer.processor.tokenizer),
        "max_position_embeddings": LENGTH, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
    }  # fmt: skip
    vision = {**common, "num_hidden_layers": 4, "image_size": PIXELS, "patch_size": PATCH}
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH)
