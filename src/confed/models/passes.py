"""Passes of backbones as chains of steps, in which frozen steps can be kept and branches share a beginning."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from confed.federation.protocols import Batch, Output
from confed.federation.stages import KeptStates, Stage, frozen_stages, run_stages
from confed.models.finetuning import Finetunable

Step = tuple[Stage, Callable[[Any, Batch], Any]]
"""A stage, and the function from the state before it and the batch to the state after it."""


class Chain:
    """Mix-in of a module whose pass is :meth:`steps` in turn; implements :class:`confed.federation.stages.Staged`."""

    frozen_features: KeptStates | None = None

    @abstractmethod
    def steps(self) -> Sequence[Step]:
        """The steps in order."""

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages in order, of which frozen ones can be kept."""
        return [stage for stage, _ in self.steps()]

    @property
    def stage_variant(self) -> str:
        """Empty: there is one kind of pass."""
        return ""

    def forward(self, batch: Batch) -> Any:
        """The state after the last step, usually an ``Output``."""
        return run_stages(self, batch, len(self.steps()))

    def forward_stages(self, state: Any, first: int, last: int, batch: Batch) -> Any:
        """See :class:`confed.federation.stages.Staged`."""
        for _, step in self.steps()[first:last]:
            state = step(state, batch)
        return state


class SplitChain(Chain, Finetunable):
    """A chain whose first steps have no adapters, so that branches can share them: ``suffix(prefix(batch))``."""

    @property
    def before(self) -> int:
        """Number of steps before the first adapter."""
        return 1

    @property
    def prefix_is_frozen(self) -> bool:
        """Whether nothing in the first part learns, so that it needs no gradients and can be shared by branches."""
        learning = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        return frozen_stages(self, learning) >= self.before

    def prefix(self, batch: Batch) -> tuple[Any, Batch]:
        """The state before the first adapter, and the batch."""
        return run_stages(self, batch, self.before), dict(batch)

    def suffix(self, state: tuple[Any, Batch]) -> Output:
        """The rest of the pass, from the first adapter on, with the adapters that are switched on."""
        return self.forward_stages(state[0], self.before, len(self.steps()), state[1])

    @staticmethod
    def repeat(state: Any, n: int) -> Any:
        """The whole batch n times, one after the other: for n blends of adapters in one pass."""
        return tree_map_only(Tensor, lambda tensor: tensor.repeat(n, *[1] * (tensor.ndim - 1)), state)


class BlockChain(SplitChain):
    """Embeddings, Transformer blocks of which the first may host an adapter, and what reads the last block."""

    embedding_names: ClassVar[tuple[str, ...]]  # how the names of the tensors begin that embeddings read
    blocks_name: ClassVar[str]  # the submodule of the blocks

    @property
    def blocks(self) -> Any:
        return self.get_submodule(self.blocks_name)

    @property
    def first_place(self) -> int:
        """Number of the place for adapters in the first block."""
        return 0

    @abstractmethod
    def advance(self, block: Any, state: Any) -> Any:
        """The state after a block."""

    def adapt(self, state: Any) -> Any:
        """The state after the adapters of the first block."""
        return self.adapters.finish(self.first_place, state)

    def block_steps(self, what: str = "block") -> list[Step]:
        """A step per block; the first block ends where its adapter begins, which is a step of its own."""
        names, start, blocks = self.adapters.names, f"{self.blocks_name}.", self.blocks
        first = Stage(f"{what} 1 without adapter" if names else f"{what} 1", (), (f"{start}0.",), without=names)

        def adapter(state: Any, batch: Batch) -> Any:
            return self.adapt(state) if names else state

        def block(number: int, state: Any, batch: Batch) -> Any:
            with self.adapters.using({}) if names and number == 0 else nullcontext():
                return self.advance(blocks[number], state)

        steps: list[Step] = [(first, partial(block, 0))]
        steps.append((Stage(f"adapter of {what} 1", (), (f"{start}0.",)), adapter))
        for number in range(1, len(blocks)):
            steps.append((Stage(f"{what} {number + 1}", (), (f"{start}{number}.",)), partial(block, number)))
        return steps

    @property
    def before(self) -> int:
        return 2 if self.adapters.names else 1


class PatchGrid(nn.Module):
    """Mix-in of a module that reads pictures as a grid of patches."""

    patch: int  # pixels per side of a patch
    image_size: tuple[int, int]  # of pictures, (H, W)
    grid: tuple[int, int]  # patches along them

    def set_grid(self, config: Any, image_size: int | tuple[int, int] | None) -> None:
        """Takes over the size of pictures: the given one, or the configuration's."""
        self.patch, size = config.patch_size, image_size or config.image_size
        self.image_size = (size, size) if isinstance(size, int) else size
        if self.image_size[0] % self.patch or self.image_size[1] % self.patch:
            raise ValueError(f"image_size must be a multiple of the patch size {self.patch}, got {self.image_size}")
        self.grid = (self.image_size[0] // self.patch, self.image_size[1] // self.patch)
