"""Candidate answers behind cached prompts: a prefix tree that one row of a batch reads in one pass.

Candidates that begin alike share the tokens that they begin with, so all of them are a tree. Its nodes are read behind
the cached prompt as one sequence, in which every node sees the prompt, its ancestors and itself, at the position that
it has in its own answer: the *tree attention* of Miao et al., "SpecInfer", ASPLOS 2024. Reading costs a token per node,
where a copy of the cache for every candidate costs a row of a batch each.

Layers that mask by what they are given can do that. Convolutions and recurrent layers mix what stands side by side, and
sliding windows shorter than the sequence need masks of their own: for these every candidate gets its copy of the cache.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from confed.data.chat import answered
from confed.federation.specs import Writing
from confed.models.hf.prompts import ChatTokenizer

# Search for the most probable texts behind prompts ------------------------------------------------------------


def search(body: Any, read: Mapping[str, Tensor], tokenizer: ChatTokenizer, how: Writing) -> tuple[Tensor, Tensor]:
    """Written tokens, int64 (B, max_new_tokens), padded behind their end, and states of prompts' last tokens (B, d)."""
    from transformers import GenerationConfig

    end_tokens = body.generation_config.eos_token_id
    listed = end_tokens if isinstance(end_tokens, list) else [end_tokens]
    ends = {*listed, tokenizer.tokenizer.eos_token_id}
    config = GenerationConfig(
        max_new_tokens=how.max_new_tokens, num_beams=how.beams, length_penalty=how.length_penalty, do_sample=False,
        eos_token_id=sorted(filter(None, ends)) or None, pad_token_id=tokenizer.pad, use_cache=True,
    )  # fmt: skip
    features: list[Tensor] = []

    def keep(module: nn.Module, given: Any, output: Any) -> None:
        if not features:
            features.append(output.last_hidden_state[:: how.beams, -1])

    hook = body.get_decoder().register_forward_hook(keep)
    try:
        made = body.generate(**read, generation_config=config)
    finally:
        hook.remove()
    written = made[:, read["input_ids"].shape[1] :]
    # Behind the end the library's search repeats it where the token of padding has the id 0.
    ended = torch.isin(written, torch.tensor(sorted(filter(None, ends)), device=written.device)).long()
    written = written.masked_fill(ended.cumsum(1) > ended, tokenizer.pad)
    missing = how.max_new_tokens - written.shape[1]
    return nn.functional.pad(written, (0, missing), value=tokenizer.pad), features[0]


# Candidate answers behind cached prompts ----------------------------------------------------------------------

SCORES_AT_ONCE = 2**24  # vocabulary scores held at once while candidates are compared: 64 MiB in single precision
_MASKED = ("sdpa", "eager")  # implementations of attention that read a mask for each pair of tokens


@dataclass(frozen=True)
class CandidateTree:
    """Prefix tree of C candidates, behind a prompt.

    A node is what some candidates begin with, by its last token; an edge leads from a node to a token that follows it.
    There is no node for a whole candidate, which nothing follows, and no edge to first tokens, which follow the prompt.
    """

    rows: Tensor  # which candidates these are, int64 (C,)
    tokens: Tensor  # token ids of the nodes, int64 (N,), ancestors first
    depth: Tensor  # number of ancestors of each node, int64 (N,)
    visible: Tensor  # whether a node (row) reads another one (column): its ancestors and itself, bool (N, N)
    source: Tensor  # node of each edge, int64 (E,), ascending
    target: Tensor  # token id that the edge leads to, int64 (E,)
    edges: Tensor  # edges of each candidate, int64 (C, T - 1); E behind its last one

    def to(self, device: torch.device) -> "CandidateTree":
        return CandidateTree(*(value.to(device) for value in vars(self).values()))


def candidate_trees(answers: Tensor, most: int) -> tuple[CandidateTree, ...]:
    """Prefix trees of candidates, as few as have up to ``most`` nodes each."""
    lengths = answered(answers).sum(1).tolist()
    texts = [tuple(row[:length]) for row, length in zip(answers.tolist(), lengths, strict=True)]
    groups: list[list[int]] = []
    nodes = set[tuple[int, ...]]()
    for row in sorted(range(len(texts)), key=texts.__getitem__):  # so that those which begin alike come together
        prefixes = {texts[row][:end] for end in range(1, lengths[row])}
        if not groups or len(nodes | prefixes) > most:
            groups.append([])
            nodes = set()
        groups[-1].append(row)
        nodes |= prefixes
    items: list[CandidateTree] = []
    for group in groups:
        items.append(_tree(group, [texts[row] for row in group], max(answers.shape[1] - 1, 0)))
    return tuple(items)


def _tree(rows: Sequence[int], texts: Sequence[tuple[int, ...]], width: int) -> CandidateTree:
    steps = set[tuple[tuple[int, ...], int]]()  # beginning of a text, and the token that follows it
    for text in texts:
        steps |= {(text[:end], text[end]) for end in range(1, len(text))}
    nodes = {prefix: n for n, prefix in enumerate(sorted(dict(steps)))}
    tree_edges = sorted((nodes[prefix], token) for prefix, token in steps)
    number = {edge: n for n, edge in enumerate(tree_edges)}
    visible = torch.eye(len(nodes), dtype=torch.bool)
    for prefix, node in nodes.items():
        visible[node, [nodes[prefix[:end]] for end in range(1, len(prefix))]] = True
    edges = torch.full((len(texts), width), len(tree_edges), dtype=torch.int64)
    for row, text in enumerate(texts):
        node_numbers = [number[nodes[text[:end]], text[end]] for end in range(1, len(text))]
        edges[row, : len(node_numbers)] = torch.tensor(node_numbers, dtype=torch.int64)

    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    return CandidateTree(
        column(rows), column([prefix[-1] for prefix in nodes]), column([len(prefix) - 1 for prefix in nodes]), visible,
        column([source for source, _ in tree_edges]), column([target for _, target in tree_edges]), edges,
    )  # fmt: skip


def reads_trees(decoder: nn.Module, cache: Any, length: int) -> bool:
    """Whether a decoder can read a tree behind what a cache holds."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    config: Any = decoder.config
    masked = config._attn_implementation in _MASKED  # the library's only record of it

    def whole(layer: Any) -> bool:
        sliding = type(layer) is DynamicSlidingWindowLayer and length <= layer.sliding_window
        return type(layer) is DynamicLayer or sliding

    return masked and all(map(whole, cache.layers))


@contextmanager
def first_position_behind(decoder: nn.Module, length: int) -> Iterator[Callable[[], int]]:
    """Context in which a decoder reads prompts; afterwards the function says the position behind these.

    It is the prompts' length, but for families that count from 1 (PaliGemma).
    """
    read: list[Tensor | None] = []

    def keep(module: nn.Module, given: Any, named: dict[str, Any]) -> None:
        read.append(named.get("position_ids"))

    hook = decoder.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield lambda: length if read[0] is None else int(read[0].max()) + 1
    finally:
        hook.remove()


def tree_states(
    decoder: Any, embed: nn.Module, cache: Any, mask: Tensor, tree: CandidateTree, start: int | None = None
) -> Tensor:
    """Last layer's states of a tree's nodes behind prompts, (B, N, d)."""
    b, length = mask.shape
    first = length if start is None else start
    nodes = len(tree.tokens)
    prompt = mask.bool()[:, None, None].expand(b, 1, nodes, length)
    seen = torch.cat([prompt, tree.visible.expand(b, 1, nodes, nodes)], 3)
    embeds = embed(tree.tokens.expand(b, nodes))
    if decoder.config._attn_implementation == "eager":
        seen = torch.zeros(seen.shape, dtype=embeds.dtype, device=seen.device).masked_fill(
            ~seen, torch.finfo(embeds.dtype).min
        )
    return decoder(
        inputs_embeds=embeds, attention_mask=seen, past_key_values=_copied(cache), use_cache=True,
        position_ids=(first + tree.depth).expand(b, nodes), return_dict=True,
    ).last_hidden_state  # fmt: skip


def tree_likelihoods(
    hidden: Tensor, tree: CandidateTree, scores: Callable[[Tensor], Tensor], vocabulary: int
) -> Tensor:
    """Log-likelihoods of all but the first tokens of a tree's candidates, float32 (B, C)."""
    b, nodes = hidden.shape[:2]
    at_once = max(SCORES_AT_ONCE // max(vocabulary, 1), 1)
    width, height = max(at_once // max(b, 1), 1), max(min(b, at_once), 1)
    parts: list[Tensor] = []
    for first in range(0, nodes, width):
        chosen = (tree.source >= first) & (tree.source < first + width)
        source, target = tree.source[chosen] - first, tree.target[chosen]
        likelihoods = [
            scores(rows).float().log_softmax(-1)[:, source, target]
            for rows in hidden[:, first : first + width].split(height)
        ]
        parts.append(torch.cat(likelihoods))
    nothing = hidden.new_zeros(b, 1, dtype=torch.float32)
    return torch.cat([*parts, nothing], 1)[:, tree.edges].sum(2)


def repeated_states(
    decoder: Any, embed: nn.Module, cache: Any, mask: Tensor, answers: Tensor, start: int | None = None
) -> Tensor:
    """Last layer's states of C answers but their last token, each behind a copy of the prompts, (B C, T - 1, d)."""
    (b, length), (c, t) = mask.shape, answers.shape
    first = length if start is None else start
    repeated = answers.repeat(b, 1)
    copies = _copied(cache)
    copies.batch_repeat_interleave(c)
    seen = torch.cat([mask.repeat_interleave(c, 0), answered(repeated)[:, :-1].long()], 1)
    return decoder(
        inputs_embeds=embed(repeated[:, :-1]), attention_mask=seen, past_key_values=copies, use_cache=True,
        position_ids=torch.arange(first, first + t - 1, device=repeated.device).expand(b * c, -1), return_dict=True,
    ).last_hidden_state  # fmt: skip


def _copied(cache: Any) -> Any:
    """A cache that grows on its own; it shares its tensors, which growing replaces."""
    duplicate = copy(cache)
    duplicate.layers = [copy(layer) for layer in cache.layers]
    return duplicate
