r"""What an honest-but-curious server learns of the answers from the gradients that supervised split learning sends it.

Where the last layers and the labels are the client's (the U-shaped configuration), a client sends dL/dz up, one row per
example. With a linear last layer of weights W and cross-entropy this is (softmax(W z + b) - e_y) W / B: early in
training, and for every example that is not yet answered well, its direction is mostly that of -W_y. So rows of one
answer lie together, and a server that never sees a label can group them (Li et al., "Label leakage and protection in
two-party split learning", ICLR 2022, for two classes, by norm and by cosine; here for any number, by clusters of
directions). Groups are named as in :mod:`confed.attacks.answer_recovery`.

A server that also knows the client's last layers, as it does when the auxiliary server that averages them tells it,
needs no groups: it has made z itself, tries every answer, and takes the one whose gradient points where the row points
(:func:`matched`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.federation.protocols import Batch, Output
from confed.privacy.cut import CutPrivacy

Loss = Callable[[Output, Batch], Tensor]
"""A task's training loss."""


@dataclass(frozen=True)
class SentGradients:
    """What went up in some steps, what the server had sent down before, and the truth to judge attacks by.

    Attributes:
        rows: dL/dz as sent, (N, D).
        z: what the client's last layers read, made by the server, (N, D).
        labels: the answers, int64 (N,); the server does not see them.
    """

    rows: Tensor
    z: Tensor
    labels: Tensor

    @property
    def directions(self) -> Tensor:
        """The rows scaled to length 1, (N, D); rows of zeros stay zero."""
        return functional.normalize(self.rows, dim=1)


def observe_gradients(
    model: nn.Module,
    top: nn.Module,
    loss: Loss,
    batches: Iterable[Batch],
    *,
    middle: nn.Module | None = None,
    privacy: CutPrivacy | None = None,
    rng: torch.Generator | None = None,
    learn: Callable[[Batch], None] | None = None,
) -> SentGradients:
    """Records the gradients that a client sends up while it goes through its batches.

    The server makes z of activations that were released too, so that their noise is in z and in the gradients.
    """
    privacy = CutPrivacy() if privacy is None else privacy
    rng = torch.Generator().manual_seed(0) if rng is None else rng
    if middle is None and privacy.clip is not None:
        raise ValueError("activations are clipped or noised before the server reads them: say which module that is")
    read: list[Tensor] = []

    def release(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (privacy.activations(inputs[0], rng),)

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        read.append(inputs[0].detach().requires_grad_())
        return (read[-1],)

    sent: list[tuple[Tensor, Tensor, Tensor]] = []
    for batch in batches:
        handles = [top.register_forward_pre_hook(keep)]
        if middle is not None:
            handles.append(middle.register_forward_pre_hook(release))
        try:
            with torch.enable_grad():
                value = loss(model(batch), batch)
        finally:
            for handle in handles:
                handle.remove()
        z = read.pop()
        (gradient,) = torch.autograd.grad(value, z)
        sent.append((privacy.gradients(gradient, rng).cpu(), z.detach().cpu(), batch["label"].cpu()))
        if learn is not None:
            learn(batch)
    if not sent:
        raise ValueError("an audit of the cut needs at least one batch that is sent, got none")
    return SentGradients(*(torch.cat(column) for column in zip(*sent, strict=True)))


def matched(seen: SentGradients, top: nn.Module, loss: Loss, answers: int) -> Tensor:
    """For a server that knows the client's last layers: the answer whose gradient points where the row points.

    argmax_c cos(row, dL(top(z), c)/dz), which neither the size of a batch nor clipping changes.

    Returns:
        int64 (N,).
    """
    best = torch.full((len(seen.rows),), -torch.inf)
    guesses = torch.zeros(len(seen.rows), dtype=torch.int64)
    for answer in range(answers):
        z = seen.z.clone().requires_grad_()
        with torch.enable_grad():
            value = loss(Output(top(z), z), {"label": torch.full((len(z),), answer)})
        (gradient,) = torch.autograd.grad(value, z)
        cosine = functional.cosine_similarity(seen.rows, gradient, dim=1)
        closer = cosine > best
        best[closer], guesses[closer] = cosine[closer], answer
    return guesses
