"""Search for the most probable texts behind prompts, by ``transformers``' own generation."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from confed.federation.specs import Writing
from confed.models.hf.prompts import ChatTokenizer

__all__ = ["search"]


def search(body: Any, read: Mapping[str, Tensor], tokenizer: ChatTokenizer, how: Writing) -> tuple[Tensor, Tensor]:
    """Written tokens, int64 (B, max_new_tokens), padded behind their end, and features (B, d).

    Features are the last layer's state of the prompt's last token.

    Args:
        body: the library's model.
        read: prompts and pictures as the model reads them, ``input_ids`` (B, L) among them.
        tokenizer: of the prompts.
        how: length and width of the search.
    """
    from transformers import GenerationConfig

    own = body.generation_config.eos_token_id
    ends = {*([] if own is None else own if isinstance(own, list) else [own]), tokenizer.tokenizer.eos_token_id}
    config = GenerationConfig(
        max_new_tokens=how.max_new_tokens, num_beams=how.beams, length_penalty=how.length_penalty, do_sample=False,
        eos_token_id=sorted(filter(None, ends)) or None, pad_token_id=tokenizer.pad, use_cache=True,
    )  # fmt: skip
    features: list[Tensor] = []

    def keep(module: nn.Module, given: Any, output: Any) -> None:
        del module, given
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
