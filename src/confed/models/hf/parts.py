"""Parts of a vision-language model of ``transformers``: language part, connector, picture encoder; what can learn."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from confed.models.adapters import Host
from confed.models.finetuning import Finetunable, Places

__all__ = ["LibraryParts"]


class LibraryParts(Finetunable):
    """A library's model by its parts.

    Attributes:
        body: the library's model.
    """

    body: Any
    published_prefix = "body."

    @property
    def frozen(self) -> set[str]:
        """Names of all tensors that do not learn, the scales of quantised weights among them."""
        fixed = {name for name, tensor in self.state_dict(keep_vars=True).items() if not tensor.requires_grad}
        return fixed | {name for name, _ in self.named_buffers()}

    def part(self, name: str) -> str:
        """Name of the submodule of the language part or of the picture encoder.

        Args:
            name: "language" or "vision".
        """
        wanted = self.body.get_decoder() if name == "language" else self.body.get_encoder("image")
        return next(own for own, module in self.named_modules() if module is wanted)

    def places(self, parts: tuple[str, ...], reduction: int = 16) -> Places:
        """What can be finetuned: linear layers, the decoder's blocks as places of adapters, tokens before prompts.

        Args:
            parts: of "language", "connector" and "vision".
            reduction: usual reduction of the adapters.
        """
        language, vision = self.part("language"), self.part("vision")
        names = [name for name, module in self.named_modules() if isinstance(module, nn.Linear)]
        head = self.body.get_output_embeddings()
        own = {
            "language": [n for n in names if n.startswith(f"{language}.")],
            "vision": [n for n in names if n.startswith(f"{vision}.")],
        }
        rest = [n for n in names if not n.startswith((f"{language}.", f"{vision}."))]
        own["connector"] = [n for n in rest if self.get_submodule(n) is not head]
        layers = self.body.get_decoder().layers
        width = self.body.get_decoder().config.hidden_size
        return Places(
            heads=(),
            top=(f"{language}.layers.{len(layers) - 1}.",),
            hosts=[Host(layer, width) for layer in layers] if "language" in parts else [],
            reduction=reduction,
            lora=tuple(name for part in parts for name in own[part]),
            ia3=tuple(n for n in own["language"] if n.endswith((".k_proj", ".v_proj"))),
            ia3_inputs=tuple(n for n in own["language"] if n.endswith((".down_proj", ".fc2"))),
            prompts={"text": width} if "language" in parts else {},
        )

    def is_head(self, name: str) -> bool:
        """Whether a parameter is the output layer's, which turns states into scores of tokens.

        Args:
            name: the parameter's.
        """
        head = self.body.get_output_embeddings()
        own = next(own for own, module in self.named_modules() if module is head)
        return name.startswith(f"{own}.")

    @property
    def prefix_names(self) -> tuple[str, ...]:
        """None: the first part makes inputs and has no layers."""
        return ()

    def layers(self) -> Iterator[str]:
        """Names of the linear layers that learn, for ``confed doctor model``."""
        learning = {name.rpartition(".lora_")[0] for name, p in self.named_parameters() if p.requires_grad}
        yield from sorted(filter(None, learning))
