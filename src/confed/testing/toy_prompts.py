"""Toy model that classifies by texts, on which the contract runs methods that learn prompts."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.federation.families.prompts import classes_of, scores_of
from confed.federation.protocols import Batch, Output

WIDTH, CLASSES = 6, 3
TOKENS, TOKEN, SPACE, PATCHES = 2, 5, 4, 3


class ToyPromptModel(nn.Module):
    """A frozen projection of ``batch["x"]`` (B, 6) and of three class names, behind learned context (2, 5)."""

    answer_head = None

    def __init__(self, rng: torch.Generator) -> None:
        super().__init__()

        def frozen(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=rng) * shape[-1] ** -0.5, requires_grad=False)

        self.pictures, self.patches = frozen(SPACE, WIDTH), frozen(PATCHES, SPACE, WIDTH)
        self.names, self.words, self.texts = frozen(CLASSES, TOKEN), frozen(TOKEN, TOKEN), frozen(SPACE, TOKEN)
        self.context = nn.Module()
        self.context.vectors = nn.Parameter(0.3 * torch.randn(TOKENS, TOKEN, generator=rng))

    frozen = frozenset({"pictures", "patches", "names", "words", "texts"})
    class_count = CLASSES
    context_shape = (TOKENS, TOKEN)
    feature_shape = (SPACE, CLASSES)

    def forward(self, batch: Batch) -> Output:
        """Scores (B, 3) and features (B, 4)."""
        features, classes = self.image_features(batch), classes_of(batch, CLASSES)
        texts = self.class_features(self.get_parameter("context.vectors"), classes)
        return Output(scores_of(self.similarity_scores(features @ texts.T), classes, batch, CLASSES), features)

    def image_features(self, batch: Batch) -> Tensor:
        """f(x), (B, 4)."""
        return functional.normalize(batch["x"] @ self.pictures.T, dim=1)

    def patch_features(self, batch: Batch) -> Tensor:
        """Three patches, (B, 3, 4)."""
        return functional.normalize(torch.einsum("bi,voi->bvo", batch["x"], self.patches), dim=2)

    def class_features(self, context: Tensor, classes: Tensor) -> Tensor:
        """g(t_c), (K, 4)."""
        before = (context @ self.words).tanh().sum(dim=-2)
        return functional.normalize((before + self.names[classes]).tanh() @ self.texts.T, dim=1)

    def handwritten_features(self, classes: Tensor) -> Tensor:
        """Features of the names alone, (K, 4)."""
        return functional.normalize(self.names[classes].tanh() @ self.texts.T, dim=1)

    def initial_context(self) -> Tensor:
        """The context as it is, (2, 5)."""
        return self.get_parameter("context.vectors").detach().clone()

    def similarity_scores(self, similarities: Tensor) -> Tensor:
        """Cosines times 5."""
        return 5 * similarities
