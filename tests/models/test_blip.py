"""BLIP: the library's own scores, its checkpoints, and the mask that the library leaves out."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BlipConfig, BlipForQuestionAnswering

from confed.models.blip import blip, blip_mini
from refusals import refuses

START = 40
SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
TEXT = {"vocab_size": 42, "max_position_embeddings": 12, "encoder_hidden_size": 16, "bos_token_id": START,
        "sep_token_id": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip


def library() -> BlipForQuestionAnswering:
    """The library's model with large random values."""
    config = BlipConfig(text_config={**SIZE, **TEXT}, vision_config={**SIZE, "image_size": 16, "patch_size": 8})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BlipForQuestionAnswering(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    library().save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def batch() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(3)
    text = torch.randint(5, 40, (2, 6), generator=rng)
    pixels = torch.randn(2, 3, 16, 16, generator=rng)
    tokens = torch.tensor([[2, 7, 9, 3], [2, 8, 3, 0]])
    return {"image": pixels, "text": text, "text_mask": torch.ones_like(text), "answer_tokens": tokens}


def test_token_scores_are_the_librarys(saved: Path):
    model, body, given = blip(2, vocab_size=42, pretrained=saved).eval(), library(), batch()
    start = given["answer_tokens"].clone()
    start[:, 0] = START  # the decoder's own start token
    with torch.no_grad():
        picture = body.vision_model(given["image"]).last_hidden_state
        asked = body.text_encoder(given["text"], given["text_mask"], encoder_hidden_states=picture).last_hidden_state
        wanted = body.text_decoder(start, encoder_hidden_states=asked).logits[:, :-1]
        output = model(given)
    assert wanted.std() > 0.5
    # The library pads nothing here, so that all positions agree, those behind an end included.
    torch.testing.assert_close(output.logits, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.features, asked[:, 0], rtol=1e-4, atol=1e-4)


def test_padding_of_questions_changes_nothing(saved: Path):
    model, given = blip(2, vocab_size=42, pretrained=saved).eval(), batch()
    longer = {**given, "text": F.pad(given["text"], (0, 3), value=17), "text_mask": F.pad(given["text_mask"], (0, 3))}
    with torch.no_grad():
        torch.testing.assert_close(model(longer).logits, model(given).logits, rtol=1e-4, atol=1e-4)


def test_every_value_has_one_name():
    model = blip_mini(2, 60, pretrained=False)
    state = model.state_dict(keep_vars=True)
    assert len({id(tensor) for tensor in state.values()}) == len(state)


def test_published_sizes_have_adapters_in_36_blocks():
    with torch.device("meta"):
        model = blip(100, trainable="adapters")
    learned = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    head = {n: v for n, v in learned.items() if n.startswith("text_decoder.cls.")}
    assert sum(learned.values()) - sum(head.values()) == 36 * 74_544
    assert sum(head.values()) == 768 * 768 + 768 + 2 * 768 + 30_524


def test_dropout_is_that_of_the_recipe(saved: Path):
    rates = {m.p for m in blip(2, vocab_size=42, pretrained=saved, dropout=0.3).modules() if isinstance(m, nn.Dropout)}
    assert rates == {0.3}


def test_checkpoints_that_do_not_fit_are_refused(saved: Path, tmp_path: Path):
    refuses("has 42 tokens, got 30524", blip, 2, pretrained=saved)
    refuses("image_size must be the checkpoint's, 16", blip, 2, vocab_size=42, pretrained=saved, image_size=32)
    refuses("folder with a BLIP checkpoint or a hub name", blip, 2, pretrained=tmp_path / "nothing")
