"""ALBEF: the published computation and parameter counts, adapters in their places, and passes that share work."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from confed.models.albef import Albef, AlbefConfig, albef, albef_mini, mini_answer_tokenizer, resized_positions
from confed.models.finetuning import Finetuning, finetune
from confed.models.pretrained import Pretrainable, save
from confed.tasks.generation import Generation
from refusals import refuses

ANSWERS = ("yes", "no", "dark blue", "light blue")
TINY = AlbefConfig(
    vocab_size=30, width=8, heads=2, image_size=16, patch=8, visual_layers=2, text_layers=3, fusion=1, decoder_layers=2,
    positions=9,
)  # fmt: skip


def tiny(trainable: Any = "all", **options: Any) -> Albef:
    """A model whose values are large enough to tell every part of it from its absence."""
    rng = torch.Generator().manual_seed(1)
    model = Albef(TINY, rng)
    finetune(model, trainable, Finetuning(**{"reduction": 2, **options}), model.places(), rng)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fresh = 0.4 * torch.randn(parameter.shape, generator=rng)
            parameter.copy_(
                fresh + 1 if "orm" in name and name.endswith("weight") and ".adapter" not in name else fresh
            )
    return model


def batch(rows: int = 3, written: bool = False) -> dict[str, Tensor]:
    """Pictures, and questions of different lengths."""
    rng = torch.Generator().manual_seed(2)
    text = torch.randint(5, 30, (rows, 5), generator=rng)
    mask = torch.ones_like(text)
    mask[0, 3:] = 0
    tokens = torch.tensor([[2, 7, 3, 0], [2, 8, 9, 3], [2, 10, 3, 0]])[:rows]
    found = {"image": torch.randint(0, 256, (rows, 3, 16, 16), generator=rng, dtype=torch.uint8)}
    found |= {"text": text * mask, "text_mask": mask}
    return found | ({"answer_tokens": tokens} if written else {})


class Reference:
    """The published computation, on a state dict: ViT (pre-norm), BERT (post-norm), cross-attention in between."""

    def __init__(self, model: Albef) -> None:
        self.s = {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x W^T + b."""
        return x @ self.s[f"{name}.weight"].T + self.s[f"{name}.bias"]

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """Layer normalisation from its definition."""
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        return scaled * self.s[f"{name}.weight"] + self.s[f"{name}.bias"]

    def attention(self, x: Tensor, y: Tensor, names: tuple[str, str, str], allowed: Tensor) -> Tensor:
        """Heads one after the other; ``allowed`` (T, S) says what may be looked at."""
        q, k, v = (self.linear(z, name) for z, name in zip((x, y, y), names, strict=True))
        parts: list[Tensor] = []
        for h in range(TINY.heads):
            own = slice(h * 4, h * 4 + 4)
            scores = (q[:, own] @ k[:, own].T / 4**0.5).masked_fill(~allowed, float("-inf"))
            parts.append(scores.softmax(-1) @ v[:, own])
        return torch.cat(parts, -1)

    def adapted(self, x: Tensor, host: str) -> Tensor:
        """up(relu(down(x))), 0 where there is no adapter."""
        if f"{host}.adapter.down.weight" not in self.s:
            return torch.zeros_like(x)
        return self.linear(self.linear(x, f"{host}.adapter.down").relu(), f"{host}.adapter.up")

    def picture(self, image: Tensor) -> Tensor:
        """(1 + P, d), or (1 + n + P, d) with n prompts."""
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (TINY.mean, TINY.std))
        e = "visual_encoder.embeddings"
        projection = self.s[f"{e}.patch_embeddings.projection.weight"], self.s[f"{e}.patch_embeddings.projection.bias"]
        patches = F.conv2d(((image / 255 - mean) / std)[None], *projection, stride=8)[0].flatten(1).T
        x = torch.cat([self.s[f"{e}.cls_token"][0], patches]) + self.s[f"{e}.position_embeddings"][0]
        everything = torch.ones(len(x), len(x), dtype=torch.bool)
        for i in range(TINY.visual_layers):
            n = f"visual_encoder.layers.{i}"
            y = self.norm(x, f"{n}.layernorm_before", 1e-6)
            names = (f"{n}.attention.q_proj", f"{n}.attention.k_proj", f"{n}.attention.v_proj")
            x = x + self.linear(self.attention(y, y, names, everything), f"{n}.attention.o_proj")
            y = self.norm(x, f"{n}.layernorm_after", 1e-6)
            x = x + self.linear(F.gelu(self.linear(y, f"{n}.mlp.fc1")), f"{n}.mlp.fc2")
            x = x + self.adapted(x, n)
        x = self.norm(x, "visual_encoder.layernorm", 1e-6)
        if "prompts.visual.embedding.weight" not in self.s:
            return x
        p = "prompts.visual"
        learned = self.linear(self.linear(self.s[f"{p}.embedding.weight"], f"{p}.mlp.0").tanh(), f"{p}.mlp.2")
        return torch.cat([x[:1], learned, x[1:]])

    def block(self, x: Tensor, n: str, allowed: Tensor, other: Tensor | None) -> Tensor:
        """One BERT layer, with cross-attention to ``other`` where it has it."""
        for part, y in (("attention", x), ("crossattention", other)):
            if y is not None and f"{n}.{part}.self.query.weight" in self.s:
                names = (f"{n}.{part}.self.query", f"{n}.{part}.self.key", f"{n}.{part}.self.value")
                may = allowed if part == "attention" else torch.ones(len(x), len(y), dtype=torch.bool)
                a = self.linear(
                    self.attention(x, x if part == "attention" else y, names, may), f"{n}.{part}.output.dense"
                )
                x = self.norm(a + x, f"{n}.{part}.output.LayerNorm", 1e-12)
        f = self.linear(F.gelu(self.linear(x, f"{n}.intermediate.dense")), f"{n}.output.dense")
        u = self.norm(f + x, f"{n}.output.LayerNorm", 1e-12)
        a = self.adapted(u, f"{n}.output.LayerNorm")
        return self.norm(f + a + x, f"{n}.output.LayerNorm", 1e-12) if bool(a.any()) else u

    def embed(self, ids: Tensor, n: str) -> Tensor:
        """Words, token type 0, positions."""
        x = self.s[f"{n}.word_embeddings.weight"][ids] + self.s[f"{n}.token_type_embeddings.weight"][0]
        return self.norm(x + self.s[f"{n}.position_embeddings.weight"][: len(ids)], f"{n}.LayerNorm", 1e-12)

    def scores(self, image: Tensor, question: Tensor, answer: Tensor) -> Tensor:
        """Token scores (T, V) of one question without padding and the beginning of one answer."""
        picture, x = self.picture(image), self.embed(question, "text_encoder.embeddings")
        everything = torch.ones(len(x), len(x), dtype=torch.bool)
        for i in range(TINY.text_layers):
            x = self.block(x, f"text_encoder.encoder.layer.{i}", everything, picture)
        y = self.embed(answer, "text_decoder.bert.embeddings")
        before = torch.ones(len(y), len(y), dtype=torch.bool).tril()
        for i in range(TINY.decoder_layers):
            y = self.block(y, f"text_decoder.bert.encoder.layer.{i}", before, x)
        h = "text_decoder.cls.predictions"
        y = self.norm(F.gelu(self.linear(y, f"{h}.transform.dense")), f"{h}.transform.LayerNorm", 1e-12)
        return y @ self.s["text_decoder.bert.embeddings.word_embeddings.weight"].T + self.s[f"{h}.bias"]


@pytest.mark.parametrize("trainable", ["all", "adapters", "prompt"])
def test_token_scores_are_those_of_the_published_computation(trainable: str):
    model, given = tiny(trainable), batch(written=True)
    reference = Reference(model)
    with torch.no_grad():
        found = model(given).logits
    for row, tokens in enumerate(given["answer_tokens"]):
        end = int((tokens != 0).sum()) - 1
        question = given["text"][row][given["text_mask"][row] == 1]
        wanted = reference.scores(given["image"][row].float(), question, tokens[:end])
        assert wanted.std() > 0.1
        torch.testing.assert_close(found[row, :end], wanted, rtol=1e-4, atol=1e-4)


def test_padding_of_questions_changes_nothing():
    model, given = tiny(), batch(written=True)
    longer = {**given, "text": F.pad(given["text"], (0, 3), value=17), "text_mask": F.pad(given["text_mask"], (0, 3))}
    with torch.no_grad():
        torch.testing.assert_close(model(longer).logits, model(given).logits, rtol=1e-5, atol=1e-5)


def test_the_decoder_starts_as_the_question_encoders_last_layers():
    model = Albef(TINY, torch.Generator().manual_seed(0))
    state = model.state_dict()
    for name, tensor in state.items():
        if name.startswith("text_decoder.bert.encoder.layer.1."):
            assert torch.equal(
                tensor, state[name.replace("text_decoder.bert.encoder.layer.1", "text_encoder.encoder.layer.2")]
            )
    words = "embeddings.word_embeddings.weight"
    assert torch.equal(state[f"text_decoder.bert.{words}"], state[f"text_encoder.{words}"])


def count(model: Albef, *, head: bool) -> int:
    """Values that learn, in the language-model head or outside of it."""
    inside = f"{model.answer_head}."
    return sum(p.numel() for n, p in model.named_parameters() if p.requires_grad and n.startswith(inside) is head)


@pytest.mark.parametrize(
    ("trainable", "values"),
    [
        ("adapters", 2_236_320),  # 30 adapters of 74,544
        ("lora", 30 * 49_152),  # r = 16 on queries and values of 30 self-attentions
        ("prompt", 299_712),
        ("head", 0),
    ],
)
def test_published_sizes_have_the_published_parameters(trainable: Any, values: int):
    with torch.device("meta"):
        model = albef(100, trainable=trainable)
    assert count(model, head=False) == values
    assert count(model, head=True) == 622_650


def test_prompts_are_read():
    model, given = tiny("prompt", tokens=3), batch(written=True)
    assert model.prefix(given)[0].shape == (3, 1 + 4, 8)  # they come behind the picture encoder
    assert model.prefix_is_frozen
    before = model(given).logits
    with torch.no_grad():
        model.prompts["visual"].embedding.weight.mul_(2)  # pyright: ignore
    assert not torch.allclose(model(given).logits, before)


def test_a_mini_learns_answers_of_several_words_by_heart():
    tokenizer = mini_answer_tokenizer(["is", "it"], ANSWERS)
    model = albef_mini(4, tokenizer.vocab_size, pretrained=False)
    task = Generation(4).choosing(tokenizer.answers(ANSWERS))
    model.begin(task)
    text, mask = tokenizer(["is it"] * 4)
    image = torch.randint(0, 256, (4, 3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    label = torch.tensor([2, 0, 3, 1])
    given = {"image": image, "text": text, "text_mask": mask, "label": label}
    assert task.candidates is not None
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(25):
        learned = {**given, "answer_tokens": task.candidates[label]}
        loss = task.loss(model(learned), learned)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(given).logits.argmax(1), label)


def test_positions_are_resized_as_planes():
    plane = torch.arange(4.0).view(1, 4, 1).expand(1, 4, 2)
    positions = torch.cat([torch.full((1, 1, 2), 9.0), plane], 1)
    assert resized_positions(positions, 2) is positions
    larger = resized_positions(positions, 4)
    assert larger.shape == (1, 17, 2)
    assert larger[0, 0, 0] == 9.0
    assert larger[0, 1:, 0].mean().item() == pytest.approx(1.5)


def test_sizes_that_do_not_fit_are_refused():
    refuses(r"decoder_layers must lie in 1\.\.6.*got 7", AlbefConfig, decoder_layers=7)
    refuses("multiple of the patch size 16, got 40", AlbefConfig, image_size=40)
    refuses("convert albef", albef, 2, pretrained="nowhere.safetensors")


def test_pretraining_sees_the_answers_loss_and_the_models_inside():
    model, given = tiny(), batch(written=True)
    states = model.pretraining_states(given)
    assert isinstance(model, Pretrainable)
    assert states.answer_loss is not None
    assert states.answer_loss.item() == pytest.approx(Generation(4).loss(model(given), given).item(), rel=1e-5)
    shapes = {name: tuple(value.shape) for name, value in states._asdict().items() if value is not None}
    assert shapes == {"answer_loss": (), "early": (3, 4, 8), "late": (3, 4, 8), "asked": (3, 5, 8), "words": (30, 8)}


def test_saved_weights_are_read_into_a_larger_vocabulary(tmp_path: Path):
    before = albef_mini(2, 40, pretrained=False, seed=1)
    save(before, tmp_path / "mini.safetensors", words=["is"], answers=["yes", "no"])
    after = albef_mini(7, 45, pretrained=tmp_path / "mini.safetensors", seed=2).state_dict()
    for name, tensor in before.state_dict().items():
        assert torch.equal(after[name][: len(tensor)], tensor), name
    assert len(after["text_decoder.cls.predictions.bias"]) == 45
    refuses("vocab_size must be at least 40", albef_mini, 2, 30, pretrained=tmp_path / "mini.safetensors")
