"""Toy federation with missing modalities: one client has no sound, another no pictures.

Of three clients the first has pictures and texts, the second texts only, the third pictures and sound; so sound has
one owner, and no client has all three. Every modality is a vector of four numbers, a noisy view of what decides the
class.
"""

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from confed.data.examples import TableData
from confed.data.table import Table
from confed.federation.protocols import Batch, Output

OWNED = {"client-0": ("image", "text"), "client-1": ("text",), "client-2": ("image", "audio")}
"""Client -> the modalities of its examples."""

MODALITIES = ("image", "text", "audio")
VIEW, VECTOR, MAPPED, CLASSES = 4, 3, 5, 3


class _Map(nn.Module):
    """Linear map of one modality: z = Concat(v, x M), where M may be partly the client's."""

    def __init__(self, rng: torch.Generator) -> None:
        super().__init__()
        self.shared = _linear(VIEW, MAPPED, rng)
        self.vector = nn.Parameter(torch.randn(VECTOR, generator=rng))
        self.lam = 0.0
        self.local: nn.Linear | None = None

    def personalise(self, lam: float) -> None:
        """M = lam M_loc + (1 - lam) M_up from now on."""
        self.lam = lam
        self.local = nn.Linear(VIEW, MAPPED, bias=False, device="meta")
        self.local.weight = nn.Parameter(self.shared.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        mapped = self.shared(x)
        if self.local is not None:
            mapped = self.lam * self.local(x) + (1 - self.lam) * mapped
        return torch.cat([self.vector.expand(len(x), VECTOR), mapped], dim=1)


class ToyModalModel(nn.Module):
    """Maps per modality, their mean over what is there, and a small classifier behind a frozen layer."""

    answer_head = "head"
    reads_absent: ClassVar[bool] = True
    frozen = frozenset({"stem.weight"})

    def __init__(self, noisy: bool, rng: torch.Generator) -> None:
        super().__init__()
        self.embed = nn.ModuleDict({m: _Map(rng) for m in MODALITIES})
        self.stem = _linear(VECTOR + MAPPED, 8, rng).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8) if noisy else nn.Identity()
        self.drop = nn.Dropout(0.2 if noisy else 0.0)
        self.body = _linear(8, 8, rng)
        self.head = _linear(8, CLASSES, rng)

    def personalise_maps(self, lam: float) -> None:
        """Adds the local maps, with the values of the shared ones."""
        for module in self.embed.values():
            cast(_Map, module).personalise(lam)

    def forward(self, batch: Batch) -> Output:
        """Scores (B, 3) and features (B, 8) of the given ones of ``image``, ``text`` and ``audio`` (B, 4)."""
        tokens = [self.embed[m](batch[m]) for m in MODALITIES if m in batch]
        if not tokens:
            raise ValueError(f"a batch must have one of {', '.join(MODALITIES)}, got {sorted(batch)}")
        hidden = torch.tanh(self.norm(self.stem(torch.stack(tokens).mean(dim=0))))
        features = torch.relu(self.body(self.drop(hidden)))
        return Output(self.head(features), features)


def modal_clients(seed: int, sizes: Sequence[int], owned: Sequence[tuple[str, ...]] = ()) -> dict[str, TableData]:
    """Clients of the given sizes, whose examples have the modalities of :data:`OWNED`."""
    rng = torch.Generator().manual_seed(seed)
    truth = torch.randn(VIEW, CLASSES, generator=rng)
    views = {m: torch.randn(VIEW, VIEW, generator=rng) for m in MODALITIES}
    clients: dict[str, TableData] = {}
    for number, size in enumerate(sizes):
        name = f"client-{number}"
        factors = torch.randn(size, VIEW, generator=rng) + 0.3 * number
        seen = {m: factors @ views[m] + 0.3 * torch.randn(size, VIEW, generator=rng) for m in MODALITIES}
        has = owned[number] if owned else OWNED.get(name, MODALITIES)
        columns = {**{m: seen[m] for m in has}, "label": (factors @ truth).argmax(-1)}
        table = Table(None, torch.zeros(size, dtype=torch.int64), columns)
        clients[name] = TableData(table, table, table)
    return clients


def _linear(width: int, out: int, rng: torch.Generator) -> nn.Linear:
    layer = cast(nn.Linear, nn.utils.skip_init(nn.Linear, width, out, bias=False))
    with torch.no_grad():
        layer.weight.normal_(0, width**-0.5, generator=rng)
    return layer
