"""Transport of a federation: the one thing in which federations over Flower and over FLARE differ.

Recipes, manifests, policies, run folders and what is said on the way are the same. A transport makes the kits of the
parties, starts the server's end, hands calls to sites and takes their reports back, and stops.
"""

from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any, Literal, Protocol

from confed.deployment.manifest import Manifest
from confed.deployment.policy import SitePolicy
from confed.deployment.provision import Federation
from confed.engines.remote.sites import Timeouts
from confed.engines.remote.update_bounds import Bounds
from confed.federation.step_checkpoints import EVERY
from confed.recipes.recipe import Recipe
from confed.system.events import Progress

Engine = Literal["flower", "flare"]
HOST, PORT = "127.0.0.1", 8443
Signature = tuple[bytes, Manifest]  # certificate of the federation's authority, and what it signed


@dataclass(frozen=True)
class Leading:
    """How a server leads: its folders and address, how long it waits for sites, and how far it trusts them."""

    state: Path
    kit: Path | None = None  # with certificate, key and list of sites; None without TLS
    sites: Path | None = None  # the list of sites; None for the kit's
    host: str = HOST
    port: int = PORT
    timeouts: Timeouts = field(default_factory=Timeouts)
    wait: float = 600.0
    bounds: Bounds = field(default_factory=Bounds)
    whole: bool = False
    deliver: bool = False
    insecure: bool = False


@dataclass(frozen=True)
class Joining:
    """How a site takes part: who it is, the server, its key or kit, and what may be asked of it."""

    site: str
    private: Path
    server: str = f"{HOST}:{PORT}"
    ca: Path | None = None
    key: Path = Path("key")
    members: Path | None = None
    kit: Path = Path(".")
    policy: SitePolicy = field(default_factory=SitePolicy)
    once: bool = False
    patience: float = 3600.0
    insecure: bool = False
    checkpoint: str = EVERY  # of training, from one checkpoint to the next; 0 for none


class FederationTransport(Protocol):
    """Kits, a server that leads and sites that join, over one network library."""

    def provision(self, root: Path, federation: Federation) -> None:
        """Folders of all parties, with keys, certificates and the signed manifest."""
        ...

    def lead(self, recipe: Recipe, leading: Leading, progress: Progress) -> dict[str, Any]:
        """Run of a recipe with sites as clients, begun or continued; returns its summary."""
        ...

    def signature(self, joining: Joining, recipe: str, card: Path | None, unsigned: bool) -> Signature | None:
        """What the coordinator signed, checked against a site's files; None where nothing is."""
        ...

    def join(
        self, recipe: Recipe, joining: Joining, signature: Signature | None, stop: Event, progress: Progress
    ) -> bool:
        """Participation until told to stop; whether the site could take part."""
        ...

    def commands(self, port: int) -> tuple[str, str]:
        """Options of ``confed server`` and ``confed client`` in the parties' folders; SITE stands for the name."""
        ...


_NEEDED = {
    "flower": ("flwr", "confed.deployment.flower", "a federation across machines needs Flower"),
    "flare": ("nvflare", "confed.deployment.flare.server", "a federation over FLARE needs it"),
}


def transport_of(engine: Engine) -> FederationTransport:
    """The transport of a name; a ValueError where its library is not installed."""
    package, module, needs = _NEEDED[engine]
    if find_spec(package) is None:
        raise ValueError(f"{needs}: pip install '.[{engine}]' -c constraints.txt")
    return import_module(module).TRANSPORT
