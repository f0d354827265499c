"""Contract checks of engines: the same bits through serialised messages, through Flower and through FLARE."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from confed.engines.perform import Setup
from confed.engines.remote.server import Remote
from confed.engines.remote.sites import Timeouts, Transport
from confed.federation.algorithm import Algorithm
from confed.federation.checkpoint import DirectoryStore
from confed.federation.messages import Call, Reply
from confed.federation.state import ClientState, MemoryStore, Store
from confed.testing.trial import Bytes, ContractViolation, Outcome, Recording, run, same, toy, undisturbed


def survives_the_wire(algorithm: Algorithm) -> None:
    """Everything through bytes, and a new model object for every message: the same bits come out."""
    same("survives the wire", undisturbed(algorithm), run(toy(algorithm), Bytes))


def simulator_equals_flower(algorithm: Algorithm) -> None:
    """Through Flower's own application objects and messages, with states in the sites' folders: the same bits."""
    _same_through("simulator equals Flower", algorithm, flower_in)


def simulator_equals_flare(algorithm: Algorithm) -> None:
    """Through FLARE's own Collab objects and serialiser, with states in the sites' folders: the same bits."""
    _same_through("simulator equals FLARE", algorithm, flare_in)


def flower_in(setup: Setup, folder: Path) -> Transport:
    """Flower's applications and messages in this process."""
    from confed.engines.flower.loopback import sites_in
    from confed.engines.flower.transport import FlowerTransport

    return FlowerTransport(sites_in(setup, folder))


def flare_in(setup: Setup, folder: Path) -> Transport:
    """FLARE's Collab objects and serialiser in this process."""
    from confed.engines.flare.loopback import transport_in

    return transport_in(setup, folder)


def run_through(setup: Setup, transport: Callable[[Setup, Path], Transport]) -> Outcome:
    """A run whose clients answer behind a transport, with states in the sites' folders."""
    with TemporaryDirectory() as folder:
        sites = Path(folder)
        return run(setup, lambda s: _ThroughSites(s, transport(s, sites)), store=_SitesStore(sites))


def _same_through(check: str, algorithm: Algorithm, transport: Callable[[Setup, Path], Transport]) -> None:
    through = run_through(toy(algorithm), transport)
    here = undisturbed(algorithm)
    same(check, here, through)
    if here.losses != through.losses or here.errors != through.errors:
        raise ContractViolation(f"{check}: losses or errors differ: {through.losses}, {through.errors}")


class _ThroughSites(Recording):
    """Asks sites in this process, as if they were on other machines."""

    def __init__(self, setup: Setup, transport: Transport) -> None:
        super().__init__(setup)
        names = [setup.population.info(number).id for number in range(len(setup.population))]
        self.remote = Remote(setup, transport, timeouts=Timeouts(interval=1e-4))
        self.remote.sites.gather(names, wait=60)

    def __call__(self, calls: Sequence[Call], store: Store, round: int) -> Iterator[Reply]:
        for call, reply in zip(calls, self.remote(calls, store, round), strict=True):
            self.replies.append((call.client.id, call, reply))
            yield reply


class _SitesStore(MemoryStore):
    """The states that the sites below a folder keep."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def load(self, client_id: str) -> ClientState:
        (root,) = (self._folder / client_id / "state").iterdir()
        store = DirectoryStore(root)
        store.version = store.newest(client_id)
        return store.load(client_id)
