"""Candidates behind one prompt: read as a tree, they have the likelihoods that copies of the cache give."""

from typing import Any

import pytest
import torch
from torch import Tensor

from confed.models import create_model, create_tokenizer
from confed.models.hf import model as hf_model
from confed.models.hf.candidates import (
    candidate_trees,
    reads_trees,
    repeated_states,
    tree_likelihoods,
    tree_states,
)
from confed.tasks.generation import Generation
from vlm_families import HERE

ANSWERS = torch.tensor(
    [[5, 6, 7, 9], [5, 6, 8, 9], [5, 9, 0, 0], [4, 6, 7, 9], [9, 0, 0, 0], [4, 6, 9, 0], [5, 6, 9, 0]]
)
"""Four begin with 5, three of them with 5 6; one is a single token."""
SMALL = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 9,
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 32},
    "gemma2": {"sliding_window": 32},
    "gemma3_text": {"sliding_window": 32},
    "phi3": {},
    "smollm3": {},
}
NO_TREES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mistral": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6},
}


def decoder_of(family: str, attention: str = "sdpa", **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL, **options)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def begun(model: Any) -> tuple[Tensor, Any, Tensor]:
    """Mask, cache and last states of two prompts, one of them with padding."""
    ids = torch.randint(10, 32, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    found = model.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=True)
    return mask, found.past_key_values, found.last_hidden_state[:, -1]


def by_trees(model: Any, most: int) -> Tensor:
    mask, cache, _ = begun(model)
    decoder, embed = model.get_decoder(), model.get_input_embeddings()
    assert reads_trees(decoder, cache, mask.shape[1] + ANSWERS.shape[1] - 1)
    likelihood = torch.zeros(2, len(ANSWERS))
    for tree in candidate_trees(ANSWERS, most):
        hidden = tree_states(decoder, embed, cache, mask, tree)
        likelihood[:, tree.rows] = tree_likelihoods(hidden, tree, model.get_output_embeddings(), 32)
    return likelihood


def unbatchable_reason(model: Any) -> Tensor:
    """log p of all tokens of each answer but its first, from a pass through prompt and answer."""
    mask, _, _ = begun(model)
    ids = torch.randint(10, 32, (2, 7), generator=torch.Generator().manual_seed(1))
    found = torch.zeros(2, len(ANSWERS))
    for row in range(2):
        for number, answer in enumerate(ANSWERS):
            own = answer[answer != 0]
            whole = torch.cat([ids[row][mask[row] == 1], own])[None]
            scores = model(input_ids=whole).logits[0].log_softmax(-1)
            places = range(whole.shape[1] - len(own), whole.shape[1] - 1)
            found[row, number] = sum(scores[at, token] for at, token in zip(places, own[1:], strict=True))
    return found


def test_tree_of_candidates_has_a_node_for_each_beginning() -> None:
    (tree,) = candidate_trees(ANSWERS, 100)
    # 4, 4 6, 4 6 7, 5, 5 6, 5 6 7, 5 6 8
    assert tree.tokens.tolist() == [4, 6, 7, 5, 6, 7, 8]
    assert tree.depth.tolist() == [0, 1, 2, 0, 1, 2, 2]
    assert [row.nonzero().flatten().tolist() for row in tree.visible] == [
        [0], [0, 1], [0, 1, 2], [3], [3, 4], [3, 4, 5], [3, 4, 6]
    ]  # fmt: skip
    pairs = [*zip(tree.source.tolist(), tree.target.tolist(), strict=True)]
    assert pairs == [(0, 6), (1, 7), (1, 9), (2, 9), (3, 6), (3, 9), (4, 7), (4, 8), (4, 9), (5, 9), (6, 9)]
    followed = {
        r: [pairs[e] for e in own if e < len(pairs)]
        for r, own in zip(tree.rows.tolist(), tree.edges.tolist(), strict=True)
    }
    assert followed[1] == [(3, 6), (4, 8), (6, 9)]
    assert followed[4] == []


def test_trees_are_as_large_as_asked_and_hold_candidates_once() -> None:
    trees = candidate_trees(ANSWERS, 3)
    assert max(len(tree.tokens) for tree in trees) <= 3 < len(candidate_trees(ANSWERS, 100)[0].tokens)
    assert sorted(torch.cat([tree.rows for tree in trees]).tolist()) == list(range(len(ANSWERS)))


@pytest.mark.parametrize(
    ("family", "attention"),
    [(family, kind) for family in DECODERS for kind in ("sdpa", "eager") if (family, kind) != ("gemma2", "sdpa")],
)
def test_trees_have_the_likelihoods_of_whole_sequences(family: str, attention: str) -> None:
    model = decoder_of(family, attention, **DECODERS[family])
    with torch.no_grad():
        wanted = unbatchable_reason(model)
        for most in (100, 3):
            torch.testing.assert_close(by_trees(model, most), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", NO_TREES)
def test_layers_that_mix_what_stands_side_by_side_read_no_trees(family: str) -> None:
    model = decoder_of(family, **NO_TREES[family])
    with torch.no_grad():
        mask, cache, _ = begun(model)
        assert not reads_trees(model.get_decoder(), cache, mask.shape[1] + ANSWERS.shape[1] - 1)


def test_a_window_that_just_holds_prompt_and_answer_reads_trees() -> None:
    longest = 7 + ANSWERS.shape[1] - 1
    for window, reads in ((longest, True), (longest - 1, False)):
        model = decoder_of("mistral", sliding_window=window)
        with torch.no_grad():
            _, cache, _ = begun(model)
            assert reads_trees(model.get_decoder(), cache, longest) is reads
            if reads:
                torch.testing.assert_close(by_trees(model, 100), unbatchable_reason(model), rtol=1e-5, atol=1e-5)


def test_reading_a_tree_leaves_the_prompts_cache_as_it_was() -> None:
    model = decoder_of("llama")
    with torch.no_grad():
        mask, cache, _ = begun(model)
        (tree,) = candidate_trees(ANSWERS, 100)
        decoder, embed = model.get_decoder(), model.get_input_embeddings()
        before = [layer.keys.clone() for layer in cache.layers]
        tree_states(decoder, embed, cache, mask, tree)
        repeated_states(decoder, embed, cache, mask, ANSWERS)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


@pytest.mark.parametrize("family", [name for name in HERE if not name.startswith("qwen")])
def test_models_rank_alike_by_trees_and_by_copies(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = create_tokenizer("hf", (), source=f"tiny:{family}")
    model: Any = create_model("hf", answers=0, vocab_size=0, source=f"tiny:{family}").eval()
    text, mask = tokenizer(["what colour?", "is there a big red thing?"])
    image = torch.randint(0, 256, (2, 3, 40, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    answers = ["red", "light red", "light green", "r", "yes", "no", "yellow", "light"]
    model.begin(Generation(8).choosing(tokenizer.answers(answers)))
    batch = {"image": image, "text": text, "text_mask": mask}
    passes: list[int] = []
    model.body.get_decoder().register_forward_hook(lambda module, given, out: passes.append(len(out[0])))
    with torch.no_grad():
        by_tree = model(batch).logits
        assert passes == [2, 2]  # prompts, then all candidates in the same rows
        monkeypatch.setattr(hf_model, "reads_trees", lambda *given: False)
        by_copy = model(batch).logits
        assert passes[2:] == [2, 2 * len(answers)]
    torch.testing.assert_close(by_tree, by_copy, rtol=1e-5, atol=1e-5)


def test_gradients_by_trees_are_those_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = create_tokenizer("hf", (), source="tiny:llava")
    text, mask = tokenizer(["what colour?"])
    batch = {"image": torch.full((1, 3, 32, 32), 90, dtype=torch.uint8), "text": text, "text_mask": mask}
    found = []
    for whole in (True, False):
        monkeypatch.setattr(hf_model, "reads_trees", lambda *given, whole=whole: whole)
        model: Any = create_model("hf", answers=0, vocab_size=0, source="tiny:llava").train()
        model.begin(Generation(3).choosing(tokenizer.answers(["red", "light red", "light"])))
        model(batch).logits[0, 1].backward()
        found.append([value.grad for value in model.parameters() if value.requires_grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
