"""Sites whose replies are tampered with."""

from collections.abc import Callable, Mapping

from confed.engines.remote.sites import Connection, Transport
from led_recipe import SITES_OF

COLD = SITES_OF.index("cold")


Tamper = Callable[[bytes, bytes], tuple[bytes, bytes]]


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
        reply = self.inner.receive(sent)
        waiting = self.tampers.get(self.kinds.get(sent, ""), [])
        return waiting.pop(0)(*reply) if isinstance(reply, tuple) and waiting else reply

    def wait(self, seconds: float) -> bool:
        return False

    def set_max_reply_bytes(self, largest: int) -> None: ...

    def forget(self, sent: str) -> None:
        self.inner.forget(sent)
