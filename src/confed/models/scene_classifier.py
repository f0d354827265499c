"""ResNet scene classifier with the 365 categories of Places365 (Zhou et al., TPAMI 2018).

The published networks are torchvision's ResNet-18 and ResNet-50 with 365 outputs; ``confed weights convert places365``
turns their checkpoints into the files that :func:`load_scene_classifier` reads. Pictures are prepared as the
authors' own example does it: squeezed to 256 x 256, the central 224 x 224, ImageNet's mean and deviation.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from confed.data.intake.opening import read_picture
from confed.models.pretrained import check_fit, read_weights

if TYPE_CHECKING:
    from transformers import ResNetConfig, ResNetForImageClassification


Architecture = Literal["resnet18", "resnet50"]

CATEGORIES = 365
_SIZES: dict[str, dict[str, Any]] = {
    "resnet18": {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]},
    "resnet50": {"layer_type": "bottleneck", "depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048]},
}
_RESIZED, _CROPPED = 256, 224
_MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
_DEVIATION = np.array([0.229, 0.224, 0.225], dtype=np.float32)


def build_scene_classifier(architecture: str) -> "ResNetForImageClassification":
    """The network without values (its tensors are on the device "meta"), in evaluation mode."""
    from transformers import ResNetForImageClassification

    with torch.device("meta"):
        return ResNetForImageClassification(_config(architecture)).eval()


def _config(architecture: str) -> "ResNetConfig":
    from transformers import ResNetConfig

    if architecture not in _SIZES:
        raise ValueError(f"the architecture must be one of {', '.join(_SIZES)}, got {architecture!r}")
    options: dict[str, Any] = {"embedding_size": 64, "num_labels": CATEGORIES, **_SIZES[architecture]}
    return ResNetConfig(**options)


def load_scene_classifier(file: Path) -> "ResNetForImageClassification":
    """The network of a file that ``confed weights convert places365`` wrote, in evaluation mode."""
    tensors, metadata = read_weights(file)
    if "architecture" not in metadata:
        raise ValueError(
            f"{file}: expected its metadata to name an architecture, found none; make it from a published checkpoint "
            "with `confed weights convert places365`"
        )
    model = build_scene_classifier(metadata["architecture"])
    state = model.state_dict()
    check_fit(state, tensors, state, f"{file} does not have the tensors of a {metadata['architecture']}")
    model.load_state_dict(tensors, assign=True)
    return model


def config_of(architecture: str) -> dict[str, Any]:
    """The configuration of an architecture as ``transformers`` reads it."""
    return json.loads(_config(architecture).to_json_string(use_diff=False))


def prepare_picture(picture: np.ndarray) -> Tensor:
    """What the network reads of a picture: float32, shape (3, 224, 224)."""
    squeezed = Image.fromarray(picture).resize((_RESIZED, _RESIZED), Image.Resampling.BILINEAR)
    first = (_RESIZED - _CROPPED) // 2
    pixels = np.asarray(squeezed, dtype=np.float32)[first : first + _CROPPED, first : first + _CROPPED] / 255
    return torch.from_numpy(np.ascontiguousarray(((pixels - _MEAN) / _DEVIATION).transpose(2, 0, 1)))


def classify(
    model: "ResNetForImageClassification", files: Sequence[Path], batch_size: int = 32, device: str = "cpu"
) -> Iterator[list[tuple[int, float]]]:
    """The most probable category of every picture, batch by batch."""
    network: Any = model.to(device)  # pyright: ignore[reportArgumentType]
    for start in range(0, len(files), batch_size):
        batch = torch.stack([prepare_picture(read_picture(file)) for file in files[start : start + batch_size]])
        with torch.inference_mode():
            best = network(pixel_values=batch.to(device)).logits.float().softmax(dim=1).max(dim=1)
        yield list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
