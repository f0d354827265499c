"""ResNet for multi-label classification: C-Tran's picture encoder, and a baseline with a linear head.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016; the modules, and hence the checkpoint
names, are those of ``transformers``' ``ResNetModel``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from confed.federation.protocols import Batch, Output
from confed.federation.ranges import check_value
from confed.federation.specs import ModelSpec
from confed.federation.stages import Stage, run_stages
from confed.models.heads import COUNT, count
from confed.models.inputs import checked_image
from confed.models.layers import Norm, constant_names, renormalise, uniform_linear
from confed.models.passes import Chain, Step
from confed.models.pretrained import States, check_fit, describe, published, read_tensors, seeded, weights_file
from confed.models.tokenizer import WordTokenizer
from confed.models.variants import variant

if TYPE_CHECKING:
    from transformers import ResNetModel


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class PictureModel(Chain, nn.Module, ABC):
    """What models of pictures alone have in common: a ResNet body, and how it reads a batch."""

    answer_head = "classifier"
    """Name of the submodule that scores labels: what methods with a head of each client's own keep private."""

    mean: Tensor
    std: Tensor

    def __init__(self, body: "ResNetModel", image_size: int | tuple[int, int]) -> None:
        super().__init__()
        config: Any = body.config
        image_size = (image_size, image_size) if isinstance(image_size, int) else image_size
        check_value(image_size, tuple[COUNT, ...], "model.image_size")
        self.resnet = body.train()
        self.width: int = config.hidden_sizes[-1]  # channels of the last plane, d
        self.image_size = image_size
        halvings = 1 + len(config.hidden_sizes) + int(config.downsample_in_first_stage)
        # Every halving rounds up, hence all of them together do.
        self.grid = (-(-image_size[0] // 2**halvings), -(-image_size[1] // 2**halvings))  # its rows and columns (h, w)
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(IMAGENET_STD)[:, None, None], persistent=False)

    @property
    def frozen(self) -> set[str]:
        """Names of the parameters that do not learn and of the buffers that are constants (:class:`Constants`)."""
        return constant_names(self) | {name for name, value in self.named_parameters() if not value.requires_grad}

    @abstractmethod
    def scored(self, plane: Tensor, batch: Batch) -> Output:
        """Scores and features of the last plane of the pictures, (B, d, h, w)."""

    def plane(self, batch: Batch) -> Tensor:
        """The last plane of the pictures, (B, d, h, w), computed once where the ResNet is frozen."""
        return run_stages(self, batch, 1)

    def steps(self) -> Sequence[Step]:
        """The picture's last plane, and what reads it: scores (B, C) before the sigmoid, and features (B, d)."""
        return (
            (Stage("last plane of the ResNet", ("image",), ("resnet.",)), lambda _, batch: self._plane(batch)),
            (Stage("labels", (), ("",)), self.scored),
        )

    def _plane(self, batch: Batch) -> Tensor:
        image = checked_image(batch, self.image_size, type(self).__name__)
        if not image.is_floating_point():
            image = (image.to(self.mean.dtype) / 255 - self.mean) / self.std
        return self.resnet.encoder(self.resnet.embedder(image)).last_hidden_state


class ResNetMultilabel(PictureModel):
    """A ResNet, the mean over its last plane, and a linear layer with one score per label.

    Batches have ``image``, uint8 (B, 3, H, W) or floats that are already normalised by ImageNet's mean and deviation.
    """

    def __init__(
        self, body: "ResNetModel", labels: int, rng: torch.Generator, image_size: int | tuple[int, int] = 256
    ) -> None:
        super().__init__(body, image_size)
        self.classifier = uniform_linear(self.width, labels, rng)

    def scored(self, plane: Tensor, batch: Batch) -> Output:
        """Scores of the labels (B, C) before the sigmoid, and the mean over the last plane (B, d)."""
        features = plane.mean((2, 3))
        return Output(self.classifier(features), features)

    def pretraining_states(self, batch: Batch) -> States:
        """Scores, and the positions of the last plane; see :class:`confed.models.pretrained.States`."""
        plane = self.plane(batch)
        return States(loss_logits=self.classifier(plane.mean((2, 3))), late=plane.flatten(2).transpose(1, 2))


def resnet18(pretrained: Path | str | None, norm: Norm, seed: int) -> "ResNetModel":
    """ResNet-18, or whichever ResNet a checkpoint holds; (B, 3, 256, 256) becomes (B, 512, 8, 8)."""
    from transformers import ResNetConfig, ResNetModel

    if pretrained is not None:
        body = published(ResNetModel, pretrained, seed)
    else:
        _check_frozen(norm)
        config = ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512])
        body = seeded(seed, lambda: ResNetModel(config))
    renormalise(body, norm)
    return body


def mini_resnet(pretrained: bool | Path | str, norm: Norm, seed: int) -> "ResNetModel":
    """A ResNet of two stages for 64 x 64 pictures, 0.2 million parameters; they become (B, 64, 8, 8)."""
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=32, layer_type="basic", depths=[2, 2], hidden_sizes=[32, 64])
    body = seeded(seed, lambda: ResNetModel(config))
    if pretrained:
        _load_body(body, weights_file("resnet_multilabel_mini", pretrained))
    else:
        _check_frozen(norm)
    renormalise(body, norm)
    return body


def freeze_body(model: PictureModel, norm: Norm, frozen: bool) -> None:
    """Takes the ResNet of a model out of what learns."""
    if not frozen:
        return
    if norm == "batch":
        raise ValueError(
            "model.picture_frozen needs statistics that stay as they are: set model.norm to 'frozen' or 'group'"
        )
    model.resnet.requires_grad_(False)


def _check_frozen(norm: str) -> None:
    if norm == "frozen":
        raise ValueError(
            "model.norm = 'frozen' needs pretrained weights: statistics that were never computed would stay so; "
            "'group' works from random weights"
        )


def _load_body(body: nn.Module, file: Path) -> None:
    tensors = {n.removeprefix("resnet."): t for n, t in read_tensors(file).items() if n.startswith("resnet.")}
    check_fit(body.state_dict(), tensors, body.state_dict(), f"{file} does not have the tensors of this ResNet")
    body.load_state_dict(tensors)


def _load_head(head: nn.Linear, file: Path, answers: Sequence[str]) -> None:
    """Takes over the file's head if its labels are these, in this order."""
    if describe(file).get("answers") == list(answers):
        saved = read_tensors(file)
        head.load_state_dict({name: saved[f"classifier.{name}"] for name in ("weight", "bias")})


def picture_options(*, norm: Norm = "batch", picture_frozen: bool = False) -> None:
    """Options of models with a ResNet.

    Options:
        answers: the labels, or how many there are.
        pretrained: a folder written by ``save_pretrained`` or a hub name such as ``"microsoft/resnet-18"``, whose
            configuration then decides the sizes, and whose classifier is left out. None: random weights.
        norm: "batch"; "frozen": batch normalisation whose four tensors are constant, as FLAIR's benchmark has it;
            "group": group normalisation, for training from random weights.
        picture_frozen: the head alone learns, on features that are computed once; not with ``norm`` "batch".
        max_length: of questions, which are ignored.
    """


def _full(
    answers: Sequence[str] | int,
    *,
    pretrained: Path | str | None,
    norm: Norm,
    picture_frozen: bool,
    image_size: int | tuple[int, int],
    seed: int,
    rng: torch.Generator,
) -> ResNetMultilabel:
    model = ResNetMultilabel(resnet18(pretrained, norm, seed), count(answers), rng, image_size)
    freeze_body(model, norm, picture_frozen)
    return model


def _mini(
    answers: Sequence[str] | int,
    *,
    pretrained: bool | Path | str,
    norm: Norm,
    picture_frozen: bool,
    seed: int,
    rng: torch.Generator,
) -> ResNetMultilabel:
    """A small ResNet.

    Options:
        pretrained: load the packaged weights, or those of a file that ``confed weights pretrain`` wrote; the head
            starts fresh, unless the labels are those of the file.
        norm: see :func:`resnet_multilabel`.
        picture_frozen: see :func:`resnet_multilabel`.
    """
    model = ResNetMultilabel(mini_resnet(pretrained, norm, seed), count(answers), rng, (64, 64))
    if pretrained and not isinstance(answers, int):
        _load_head(model.classifier, weights_file("resnet_multilabel_mini", pretrained), answers)
    freeze_body(model, norm, picture_frozen)
    return model


# What is asked of a dataset's pictures is not read, but batches may have it.
resnet_multilabel = variant(
    _full, "resnet_multilabel",
    "ResNet-18 with a linear head: what FedLGT's tables call FedAvg.\n\n"
    "Raises ``ValueError``: no checkpoint at the given path, or an option is out of range.",
    "answers vocab_size pretrained norm picture_frozen image_size max_length seed",
    sources=(picture_options,), spec=ModelSpec(tokenizer=WordTokenizer), vocab_size=0, pretrained=None, image_size=256,
)  # fmt: skip
resnet_multilabel_mini = variant(
    _mini, "resnet_multilabel_mini",
    "A ResNet of two stages for 64 x 64 pictures with a linear head, small enough to learn on one CPU core.\n\n"
    "Raises ``ValueError``: the weights are missing or another model's, or an option is out of range.",
    "answers vocab_size pretrained norm picture_frozen max_length seed",
    sources=(picture_options,), spec=ModelSpec(tokenizer=WordTokenizer), vocab_size=0, pretrained=False,
)  # fmt: skip
