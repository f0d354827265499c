"""ViT for pictures alone: equal to the library's, finetuned in every way."""

import pytest
import torch
from torch.nn import functional as F

from confed.models.finetuning import Finetuning, finetune
from confed.models.vit import Vit, vit_b16, vit_mini
from larger_values import spread
from refusals import refuses

CLASSES = 7


def batch(size=4, side=64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return {"image": torch.randint(0, 256, (size, 3, side, side), generator=rng, dtype=torch.uint8)}


def mini(**options):
    return vit_mini(CLASSES, 10, pretrained=False, **options)


@pytest.mark.parametrize("size", [(64, 64), (32, 48)])
def test_equals_the_transformers_forward(size):
    model = spread(mini())
    model = Vit(model.vit, CLASSES, torch.Generator(), size).eval()
    inputs = {"image": batch()["image"][:, :, : size[0], : size[1]]}
    pixels = (inputs["image"] / 255 - 0.5) / 0.5
    with torch.no_grad():
        ours = model(inputs)
        theirs = model.vit(pixel_values=pixels, interpolate_pos_encoding=True).last_hidden_state[:, 0]
        floats = model({"image": pixels})
    torch.testing.assert_close(ours.features, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.logits, F.linear(theirs, model.classifier.weight, model.classifier.bias))
    torch.testing.assert_close(floats.logits, ours.logits, rtol=1e-4, atol=1e-4)


def test_published_size_and_its_adapters():
    from transformers import ViTConfig, ViTModel

    with torch.device("meta"):
        body = ViTModel(ViTConfig(), add_pooling_layer=False)
    model = Vit(body, 100, torch.Generator())
    # 86,567,656 as published for 1,000 classes, less that classifier.
    assert sum(p.numel() for p in model.vit.parameters()) == 86_567_656 - 769_000
    finetune(model, "adapters", Finetuning(), model.places(), torch.Generator())
    learning = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert sum(n for name, n in learning.items() if not name.startswith("classifier.")) == 12 * 74_544


def test_adapters_sit_behind_the_residual_sum():
    model = spread(mini(trainable="adapters"))
    seen = []
    model.vit.layers[1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        plain = mini(seed=1)
        plain.vit.load_state_dict({k: v for k, v in model.vit.state_dict().items() if ".adapter." not in k})
        before = []
        plain.vit.layers[1].register_forward_hook(lambda module, inputs, output: before.append(output))
        first = model.vit.layers[0](model.embed(batch()), None)
        model.vit.layers[1](first, None)
        plain.eval().vit.layers[1](first, None)
        x, adapter = before[0], model.vit.layers[1].adapter
        expected = x + F.relu(x @ adapter.down.weight.T + adapter.down.bias) @ adapter.up.weight.T + adapter.up.bias
    torch.testing.assert_close(seen[-1], expected, rtol=1e-4, atol=1e-3)


def test_reads_a_published_classifier(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=32, patch_size=16
    )
    theirs = spread(ViTForImageClassification(config))
    theirs.save_pretrained(tmp_path)
    model = vit_b16(CLASSES, pretrained=tmp_path, trainable="head").eval()
    inputs = batch(side=32)
    pixels = (inputs["image"] / 255 - 0.5) / 0.5
    with torch.no_grad():
        features = model(inputs).features
        expected = theirs(pixel_values=pixels).logits
    torch.testing.assert_close(theirs.classifier(features), expected, rtol=1e-4, atol=1e-4)
    assert vit_b16(CLASSES, pretrained=tmp_path, image_size=(48, 32))(
        {"image": torch.zeros(1, 3, 48, 32, dtype=torch.uint8)}
    ).logits.shape == (1, CLASSES)


def test_sizes_and_checkpoints_that_do_not_fit_are_refused(tmp_path):
    refuses("multiple of the patch size 8", Vit, mini().vit, 2, torch.Generator(), (60, 64))
    refuses(r"expected a folder with a ViT checkpoint.*got '\./no", vit_b16, 2, pretrained="./nowhere")
    refuses("no ViT checkpoint could be read from", vit_b16, 2, pretrained=tmp_path)
