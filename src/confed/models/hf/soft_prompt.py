"""Prompt tuning of vision-language models: learned tokens before everything else that a prompt has.

Lester, Al-Rfou and Constant, "The power of scale for parameter-efficient prompt tuning", EMNLP 2021. In a prompt's ids
a learned token is a number behind the vocabulary, so that positions, masks and caches are made by the library's model
as for any other token; its embedding layer gives the learned values there.
"""

from typing import Any

import torch
from torch import Tensor, nn

from confed.models.finetuning import Prompt


def with_learned(ids: Tensor, mask: Tensor, tokens: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Prompts with ids of learned tokens in front."""
    absent = (mask == 0).sum(1, keepdim=True)
    column = torch.arange(tokens + ids.shape[1], device=ids.device).expand(len(ids), -1)
    before, behind = ids.gather(1, column.clamp_max(ids.shape[1] - 1)), ids.gather(1, (column - tokens).clamp_min(0))
    token_ids = torch.where(column < absent, before, vocabulary + column - absent)
    return torch.where(column < absent + tokens, token_ids, behind), (column >= absent).to(mask.dtype)


class LearnedTokens(nn.Module):
    """Hooks of an embedding layer, which give the learned values where a prompt has learned tokens."""

    def __init__(self, prompt: Prompt, embedding: Any) -> None:
        super().__init__()
        self.vocabulary = int(embedding.weight.shape[0])
        self._prompt, self._asked = [prompt], list[Tensor]()  # in a list: it is a submodule of the model already
        # Methods of a module, which are copied with it.
        embedding.register_forward_pre_hook(self._below)
        embedding.register_forward_hook(self._filled)

    @property
    def tokens(self) -> int:
        """Number of learned tokens, n."""
        return self._prompt[0].tokens

    def _below(self, module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        del module
        self._asked[:] = [given[0]]
        return given[0].clamp_max(self.vocabulary - 1), *given[1:]

    def _filled(self, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        del module, given
        asked = self._asked.pop()
        learned = asked >= self.vocabulary
        if not bool(learned.any()):
            return output
        values = self._prompt[0]().to(output.dtype)[(asked - self.vocabulary).clamp_min(0)]
        return torch.where(learned[..., None], values, output)
