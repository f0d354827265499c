"""Sites whose replies are tampered with, and servers of a recipe that are led with them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from confed.deployment.server import run_server
from confed.engines.flower.transport import FlowerTransport
from confed.engines.remote.protocol import Limits, open_body, seal
from confed.engines.remote.sites import Connection, Timeouts, Transport
from confed.federation.messages import Message
from confed.recipes.recipe import Recipe
from led_recipe import SITES_OF, grid_of

COLD = SITES_OF.index("cold")

Tamper = Callable[[str, bytes, bytes], tuple[bytes, bytes]]  # of the kind of the call, and of head and body of a reply


def honest(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    return head, body


def changing(change: Callable[[Message], Message], only: str = "") -> Tamper:
    """Another message in the place of a reply, or of those to one kind of call."""

    def tamper(kind: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        if only not in ("", kind):
            return head, body
        return head, seal(change(open_body(body, Limits(), {}, frozenset())))

    return tamper


def with_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Tamper:
    """Tensors that are changed in place."""

    def changed(message: Message) -> Message:
        tensors = {name: tensor.clone() for name, tensor in message.tensors.items()}
        change(tensors)
        return Message(tensors, message.scalars)

    return changing(changed)


def with_values(change: Callable[[torch.Tensor], torch.Tensor]) -> Tamper:
    """Other values in every tensor of floating-point numbers."""

    def changed(message: Message) -> Message:
        values = {n: change(t) if t.is_floating_point() and t.numel() else t for n, t in message.tensors.items()}
        return Message(values, message.scalars)

    return changing(changed)


def with_scalars(**scalars: object) -> Tamper:
    return changing(lambda message: Message(message.tensors, {**message.scalars, **scalars}))  # type: ignore[arg-type]


def with_header(header: object) -> Tamper:
    """A body of this header alone."""
    text = json.dumps(header).encode()
    return lambda kind, head, body: (head, len(text).to_bytes(8, "little") + text)


harmful = with_values(lambda tensor: torch.full_like(tensor, 1e6))


class Tampering:
    """A post that puts other replies in the place of one site's: the next of a list for every call of an action."""

    def __init__(self, inner: Transport, site: int, tampers: Mapping[str, list[Tamper]]) -> None:
        self.inner, self.site, self.tampers = inner, site, {kind: list(given) for kind, given in tampers.items()}
        self.kinds: dict[str, str] = {}

    def connections(self) -> Mapping[int, Connection]:
        return self.inner.connections()

    def send(self, to: int, kind: str, head: bytes, body: bytes, lasts: float) -> str | None:
        sent = self.inner.send(to, kind, head, body, lasts)
        if sent is not None and to == self.site:
            self.kinds[sent] = kind
        return sent

    def receive(self, sent: str) -> tuple[bytes, bytes] | str | None:
        reply, kind = self.inner.receive(sent), self.kinds.get(sent, "")
        waiting = self.tampers.get(kind, [])
        return waiting.pop(0)(kind, *reply) if isinstance(reply, tuple) and waiting else reply

    def wait(self, seconds: float) -> bool:
        return False

    def set_max_reply_bytes(self, largest: int) -> None: ...

    def forget(self, sent: str) -> None:
        self.inner.forget(sent)


def lead(
    recipe: Recipe, root: Path, tampers: Mapping[str, list[Tamper]] | None = None, minimum: int = 3, **options: Any
) -> dict[str, Any]:
    """The summary of a run in ``root/state`` with three sites over Flower, of which cold may be hostile."""
    (root / "recipe.toml").write_text(recipe.to_toml())
    post = FlowerTransport(grid_of(root / "recipe.toml", root))
    transport = post if tampers is None else Tampering(post, COLD, tampers)
    timeouts = Timeouts(minimum=minimum, interval=0.01)
    return run_server(recipe, root / "state", transport, timeouts=timeouts, **options)


def lines_of(root: Path, event: str = "") -> list[dict[str, Any]]:
    """What such a run wrote down of its rounds and evaluations, or of one kind of event."""
    lines = [json.loads(line) for line in (root / "state" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if event in ("", line["event"])]
