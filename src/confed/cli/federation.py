"""Verbs of a federation across machines: server, client, and those that create one: new, sign, key, demo, card."""

import json
import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from confed.cli.app import (
    FAILED,
    Json,
    Private,
    Site,
    SiteData,
    SiteKey,
    Unsigned,
    app,
    console,
    handling,
    interruptible,
    notes,
    print_json,
    say,
    show,
    tell_asks,
)
from confed.system.folder_lock import exclusive

if TYPE_CHECKING:
    from confed.data.card_files import Card
    from confed.deployment.manifest import Manifest
    from confed.engines.remote.sites import Timeouts
    from confed.engines.remote.update_bounds import Bounds
    from confed.recipes.recipe import Recipe
    from confed.system.events import Event


class Engine(StrEnum):
    """Transport of the messages."""

    flower = "flower"
    flare = "flare"


Chosen = Annotated[Engine, typer.Option("--engine", help="Transport of the messages.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="section.key=TOML, such as run.rounds=20.")
]
Source = Annotated[str, typer.Argument(help="The federation's recipe: a file or a name.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS: others can read and change messages.")]
Trained = Annotated[str, typer.Option(help="What to train.")]
Method = Annotated[str | None, typer.Option(help="A method of a study. [default: the recipe's main method]")]


@app.command()
def server(
    recipe: Source,
    overrides: Overrides = None,
    state: Annotated[Path, typer.Option(help="The run folder; an existing one is resumed.")] = Path("state"),
    tls: Annotated[Path | None, typer.Option(help="Folder of server.crt, server.key, sites.json.")] = None,
    sites: Annotated[Path | None, typer.Option(help="Sites and their public keys. [default: sites.json there]")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8443,
    method: Method = None,
    minimum: Annotated[int, typer.Option(help="Fewest sites for a round.")] = 1,
    wait: Annotated[
        float,
        typer.Option(help="Seconds for all sites to come; with --deliver, for a late one."),
    ] = 600.0,
    deadline: Annotated[float, typer.Option(help="Seconds from a request to its reply.")] = 3600.0,
    away: Annotated[float, typer.Option(help="Seconds without a connection that a round puts up with.")] = 60.0,
    update_bound: Annotated[float, typer.Option(help="Largest norm of an update, in medians; 0: none.")] = 10.0,
    weight_bound: Annotated[float, typer.Option(help="Largest number of examples, in medians; 0: none.")] = 10.0,
    whole: Annotated[
        bool, typer.Option("--whole", help="Send the server's part of split methods to be evaluated.")
    ] = False,
    deliver: Annotated[bool, typer.Option("--deliver", help="No rounds: late sites get the final model.")] = False,
    insecure: Insecure = False,
    card: Annotated[Path | None, typer.Option(help="A data card, for a server without examples.")] = None,
    engine: Chosen = Engine.flower,
    as_json: Json = False,
) -> None:
    """Run the server of a federation across machines.

    Sites run `confed client` with the same recipe. Ctrl-C stops; the same command resumes. Needs the extra "flower";
    with --engine flare the extra "flare", and --tls is the folder that `confed federation new --engine flare` made,
    which knows address and port.
    """
    from confed.api.progress import StatusPage
    from confed.engines.remote.sites import Timeouts
    from confed.engines.remote.update_bounds import Bounds

    bounds = Bounds(update_bound, weight_bound)
    if engine is Engine.flare:
        if insecure or (host, port) != ("127.0.0.1", 8443):
            raise ValueError("with --engine flare the kit sets address and port, and TLS is always on")
        if deliver:
            raise ValueError("--deliver is for Flower; with --engine flare the same command hands out the final models")
        loaded, timeouts = _led(recipe, list(overrides or []), method, card), Timeouts(minimum, deadline, away)
        with _private():
            _serve_flare(loaded, tls, sites, state, timeouts, wait, whole, as_json, bounds)
        return
    need_flower()
    from confed.deployment.provision import SITES, read_sites
    from confed.deployment.server import run_server
    from confed.deployment.site import signatures_by_list
    from confed.engines.flower.superlink import open_superlink
    from confed.engines.flower.supernode import read_public
    from confed.engines.flower.transport import FlowerTransport

    if (tls is None) != insecure:
        raise ValueError("give either --tls DIR, or --insecure to go without")
    listed = sites or (tls / SITES if tls is not None else None)
    if listed is None:
        raise ValueError("--sites must name the list of sites and their public keys")
    named = read_sites(listed)
    keys = {read_public(key): name for name, key in named.items()}
    if len(keys) < len(named):
        raise ValueError(f"every site needs its own key; in {listed} some have the same")
    loaded = _led(recipe, list(overrides or []), method, card)
    timeouts = Timeouts(minimum=minimum, deadline=deadline, away=away)
    certificate, key = (None, None) if tls is None else (tls / "server.crt", tls / "server.key")
    with _private(), exclusive(state):
        pass  # a second server on the state is refused before it touches the first one's messages
    waiting = state.with_name(f"{state.name}.post")  # beside the run folder, which may not be there yet
    with (
        _private(),
        interruptible(state, "the same command"),
        open_superlink(keys, host, port, certificate=certificate, key=key, waiting=waiting) as (grid, opened),
        StatusPage(console, state, quiet=as_json) as page,
    ):
        page.line(f"listening on {host}:{opened}" + (", without TLS" if insecure else ""))
        summary = run_server(
            loaded, state, FlowerTransport(grid, keys), names=list(keys.values()), wait=wait, timeouts=timeouts,
            whole=whole, bounds=bounds, signatures=signatures_by_list(loaded, named), deliver=deliver, progress=page,
        )  # fmt: skip
    show(state, [summary], as_json)


def _serve_flare(
    recipe: "Recipe", kit: Path | None, sites: Path | None, state: Path, timeouts: "Timeouts", wait: float, whole: bool,
    as_json: bool, bounds: "Bounds",
) -> None:  # fmt: skip
    """Server of a federation over FLARE: ``confed server --engine flare``."""
    need_flare()
    from confed.api.progress import StatusPage
    from confed.deployment.flare.job import ServerSettings
    from confed.deployment.flare.server import serve
    from confed.deployment.provision import SITES, read_sites

    if kit is None or not (kit / "startup" / "fed_server.json").is_file():
        raise ValueError("with --engine flare, --tls must be the server's folder, with startup/fed_server.json in it")
    kit = kit.resolve()
    settings = ServerSettings(
        recipe="run/recipe.toml", state=str(state.resolve()), bulletin="run", sites=read_sites(sites or kit / SITES),
        minimum=timeouts.minimum, deadline=timeouts.deadline, away=timeouts.away, wait=wait, whole=whole,
        update_bound=bounds.update, weight_bound=bounds.weight,
    )  # fmt: skip
    with interruptible(state, "the same command"), StatusPage(console, state, quiet=as_json) as page:
        summary = serve(recipe, kit, settings, progress=page)
    show(state, [summary], as_json)


@app.command()
def client(
    recipe: Source,
    overrides: Overrides = None,
    site: Site = "",
    server: Annotated[str, typer.Option(help="The server, HOST:PORT.")] = "127.0.0.1:8443",
    ca: Annotated[Path | None, typer.Option(help="Certificate of the server's authority (ca.crt).")] = None,
    key: SiteKey = Path("key"),
    members: Annotated[
        Path | None,
        typer.Option(help="For secure aggregation: sites and keys. [default: sites.json beside --key]"),
    ] = None,
    private: Private = Path("private"),
    data: SiteData = None,
    card: Annotated[Path | None, typer.Option(help="The merged data card, with common answers and words.")] = None,
    device: Annotated[str | None, typer.Option(help='"cpu", "cuda" or "auto". [default: the recipe\'s]')] = None,
    method: Method = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="Stop training when the privacy cost of updates reaches this."),
    ] = None,
    evaluations: Annotated[
        str | None,
        typer.Option(
            help="Evaluations: exact, noise=8 or off, with per_round=5, in_all=40, least=50. [default: as before; "
            "else exact, one per round, until --epsilon is spent]"
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End when the run is over.")] = False,
    patience: Annotated[float, typer.Option(help="With --once: seconds without a server.")] = 3600.0,
    engine: Chosen = Engine.flower,
    kit: Annotated[Path, typer.Option(help="With FLARE: this site's folder, for --ca and --key.")] = Path("."),
    insecure: Insecure = False,
    unsigned: Unsigned = False,
) -> None:
    """Take part in a federation across machines as a site.

    Only opens outgoing connections. Ctrl-C stops; the same command resumes. Needs the extra "flower", or with --engine
    flare "flare".
    """
    from confed.deployment.manifest import accept, check_serial

    given = [f"data.{pair}" for pair in data or []] + ([f"run.device={device}"] if device is not None else [])
    given += [f"data.card={json.dumps(str(card.resolve()))}"] if card is not None else []
    if engine is Engine.flare:
        if insecure or ca is not None:
            raise ValueError("with --engine flare the kit sets the server and its certificate, and TLS is always on")
        stop = threading.Event()
        if not unsigned and (kit / "startup" / "fed_client.json").is_file():  # else it is no kit, which is said below
            anchor = kit / "startup" / "rootCA.pem"
            with _private():
                accept(private, _certificate(anchor), check_signed(kit, anchor, recipe, card, site))
        with _private(), _stopping(stop):
            loaded = _handed_out(recipe, [*(overrides or []), *given], method)
            need_flare()
            from confed.deployment.flare.server import join

            join(
                loaded, kit.resolve(), private, stop, site=site or None, epsilon=epsilon, evaluations=evaluations,
                once=once, patience=patience, progress=notes(),
            )  # fmt: skip
        return
    need_flower()
    from confed.deployment.site import ASK_FOR_IT, open_site, signer_by_list
    from confed.engines.flower.supernode import SuperNode, public_of, read_key
    from confed.engines.flower.transport import client_app
    from confed.system.events import Note

    if (ca is None) != insecure:
        raise ValueError("give either --ca FILE, or --insecure to go without TLS")
    if not site:
        raise ValueError("--site must name the client of the data that this site is")
    signed = None
    if ca is not None and not unsigned:
        signed = check_signed(ca.parent, ca, recipe, card, site, public_of(read_key(key)))
        check_serial(private, _certificate(ca), signed)
    loaded = _handed_out(recipe, [*(overrides or []), *given], method)
    secret = read_key(key)
    root = None if ca is None else _certificate(ca)

    stop, say = threading.Event(), notes(site)

    def progress(event: "Event") -> None:
        say(event)
        if once and opened.problem is not None:
            stop.set()

    with _private(), exclusive(private):
        if root is not None and signed is not None:
            accept(private, root, signed)
        opened = open_site(
            loaded, site, private, progress, limit=epsilon, evaluations=evaluations,
            signer=signer_by_list(loaded, site, key, members, None if signed is None else signed.sites),
            over=stop.set if once else lambda: None,
        )  # fmt: skip
        line = SuperNode(server, secret, root, largest=opened.largest, progress=progress)
        with _stopping(stop):
            gone = line.serve(client_app(lambda _: opened), stop, patience if once else math.inf)
    if gone:
        say(Note(f"{gone}: the run may be over; {ASK_FOR_IT}"))
    if gone or opened.problem is not None:
        raise typer.Exit(FAILED)


def _led(source: str, overrides: list[str], method: str | None, card: Path | None) -> "Recipe":
    """A recipe of one run, with a card in place of its data where there is one."""
    from confed.deployment.provision import with_card

    loaded = single_recipe(source, overrides, method)
    tell_asks(loaded, source)
    return loaded if card is None else with_card(loaded, card)


def _handed_out(source: str, overrides: list[str], method: str | None) -> "Recipe":
    """A recipe of the coordinator's, which gets no more than what was granted; a packaged one came with confed."""
    from confed.runs.grants import check_grants

    loaded = single_recipe(source, overrides, method)
    if Path(source).is_file():
        check_grants(loaded, source, Path(source).parent, given=overrides)
    return loaded


def single_recipe(source: str, overrides: list[str], method: str | None) -> "Recipe":
    """A recipe of one run; a fault is a ValueError."""
    from confed.recipes.recipe import load_recipe

    loaded = load_recipe(source, overrides)
    if method is None and loaded.methods:
        method_name = str(loaded.sections["algorithm"]["name"])
        return loaded.method(method_name if method_name in loaded.methods else loaded.methods[0])
    if method is None:
        return loaded
    if method not in loaded.methods:
        raise ValueError(f"--method must be one of {', '.join(loaded.methods) or 'none'}, got {method!r}")
    return loaded.method(method)


def check_signed(
    folder: Path, authority: Path, recipe: str, card: Path | None, site: str, public: str = ""
) -> "Manifest":
    """Check of the coordinator's signature of this site's recipe, card and key."""
    from confed.deployment.manifest import check_site, public_half, verified

    manifest = verified(folder, _certificate(authority))
    certificate = folder / "startup" / "client.crt"
    if not public and certificate.is_file():  # with FLARE the certificate says who this is
        public = public_half(certificate.read_bytes())
        site = next((name for name, key in manifest.sites.items() if key == public), site)
    check_site(manifest, site, public, recipe=Path(recipe) if Path(recipe).is_file() else None, card=card)
    return manifest


def _certificate(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"--ca: cannot read {path}: {error.strerror}") from error


def need_flower() -> None:
    """Check that Flower is installed; a fault is a ValueError."""
    if find_spec("flwr") is None:
        raise ValueError("a federation across machines needs Flower: pip install '.[flower]' -c constraints.txt")


def need_flare() -> None:
    """Check that FLARE is installed; a fault is a ValueError."""
    if find_spec("nvflare") is None:
        raise ValueError("a federation over FLARE needs it: pip install '.[flare]' -c constraints.txt")


@contextmanager
def _private() -> Iterator[None]:
    """Files and folders with access for their owner only, within the ``with`` block."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def _stopping(stop: threading.Event) -> Iterator[None]:
    """Orderly end of a site on Ctrl-C and on the signal of a service manager."""
    signals: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if signals:  # asked twice
            raise SystemExit(128 + number)
        signals.append(number)
        stop.set()

    with handling(dict.fromkeys((signal.SIGINT, signal.SIGTERM), end)):
        yield
    if signals:
        raise typer.Exit(128 + signals[0])


# Creation of a federation ----------------------------------------------------------------------------------------

federation_app = typer.Typer(help="Create a federation across machines, or try one here.")
app.add_typer(federation_app, name="federation")


@federation_app.command("new")
def new(
    folder: Annotated[Path, typer.Argument(help="Folder of the federation; must not exist.")],
    sites: Annotated[str, typer.Option(help="Names of the clients, one site each: a,b,c.")],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Name or address under which sites reach the server.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port of the server.")] = 8443,
    recipe: Trained = "fedvqa_scenes",
    method: Method = None,
    days: Annotated[int, typer.Option(help="Days for which certificates are valid.")] = 365,
    card: Annotated[Path | None, typer.Option(help="A data card, copied into all folders.")] = None,
    wheel: Annotated[Path | None, typer.Option(help="A wheel file of confed, copied into all sites' folders.")] = None,
    engine: Chosen = Engine.flower,
    as_json: Json = False,
) -> None:
    """Make certificates, keys, a folder for every site and one for the server, each with its README.

    The new certificate authority signs the recipe, the card and the list of sites; sites check the signature.
    """
    from confed.deployment.provision import AUTHORITY, Federation, names_of_data, provision
    from confed.runs.cohorts import pinned

    need_flare() if engine is Engine.flare else need_flower()
    loaded = pinned(single_recipe(recipe, list(overrides or []), method))
    names = tuple(name.strip() for name in sites.split(",") if name.strip())
    federation = Federation(names, host, port, loaded.to_toml(), days, card, wheel)
    if engine is Engine.flare:
        from confed.deployment.flare.provision import check_names
        from confed.deployment.flare.provision import provision_flare as provision

        check_names(federation)
    client_names = names_of_data(loaded, card)
    if client_names is None:
        say("[yellow]the names of sites were not checked:[/] the recipe's data are not here, and there is no --card")
    elif strange := [name for name in names if name not in client_names]:
        raise ValueError(
            f"--sites: the recipe's data have no client {strange[0]!r}; there are {', '.join(client_names)}"
        )
    provision(folder, federation)
    if as_json:
        print_json({"folder": str(folder), "sites": list(names)})
        return
    say(f"made {escape(str(folder))}: begin with {escape(str(folder / 'server' / 'README.md'))}")
    if engine is Engine.flower:
        say(f"the authority's key is {escape(str(folder / AUTHORITY / 'ca.key'))}: keep it offline")


@federation_app.command("sign")
def sign(
    folder: Annotated[Path, typer.Argument(help="The server's folder, with the present recipe.toml and sites.json.")],
    key: Annotated[
        Path | None,
        typer.Option(
            help="The authority's private key, with FLARE provision/cert.json. [default: authority/ca.key beside the "
            "server's folder]"
        ),
    ] = None,
    card: Annotated[Path | None, typer.Option(help="A new data card, copied to all parties.")] = None,
    serial: Annotated[
        int | None, typer.Option(help="Serial number, above all that sites have accepted. [default: the last plus 1]")
    ] = None,
) -> None:
    """Sign recipe, card and list of sites again after one of them changed; sites refuse unsigned files."""
    from confed.deployment.manifest import MANIFEST, SIGNATURE
    from confed.deployment.provision import SITES, key_of_authority, sign_again

    server = folder.resolve()
    written = sign_again(server, key or key_of_authority(server), card, serial)
    say(f"signed in {escape(', '.join(str(path) for path in written))}")
    say(f"every site needs the new {MANIFEST} and {SIGNATURE}, and recipe, card and {SITES} if they changed")


@federation_app.command("key")
def key(path: Annotated[Path, typer.Argument(help="File for the private key; must not exist.")]) -> None:
    """Make a site's private key; prints the public key, for the server's sites.json."""
    need_flower()
    from confed.deployment.provision import make_key

    print(make_key(path))


@federation_app.command("demo")
def demo(
    overrides: Overrides = None,
    sites: Annotated[int, typer.Option(help="Number of sites.")] = 3,
    recipe: Trained = "fedvqa_scenes",
    method: Method = None,
    out: Annotated[Path, typer.Option(help="Folder for everything; must not exist.")] = Path("federation-demo"),
    engine: Chosen = Engine.flower,
    as_json: Json = False,
) -> None:
    """Run a whole federation on this machine: server and sites in separate processes, with TLS, keys and sockets."""
    need_flare() if engine is Engine.flare else need_flower()
    from confed.deployment.demo import demonstrate

    given = [*(_SMALL if recipe == "fedvqa_scenes" else ()), *(overrides or ())]
    loaded = single_recipe(recipe, given, method)
    summary = demonstrate(loaded, out, sites, notes(), engine.value)
    show(out / "server" / "state", [summary], as_json)


# A size of fedvqa_scenes that trains in half a minute to an accuracy of about 60 %.
_SMALL = ("data.train=200", "data.validation=40", "data.test=100", "run.rounds=3", "local.epochs=1")


@federation_app.command("card")
def card(
    recipe: Annotated[str, typer.Argument(help="The recipe whose data are described; with --merge the first card.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value of the recipe; with --merge further cards.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("card.json"),
    merge: Annotated[bool, typer.Option("--merge", help="Merge the cards of several sites.")] = False,
    as_json: Json = False,
) -> None:
    """Write a data card, for a server without examples: answers, types, words, clients and shapes of a recipe's data.

    Run it where the data are. If the data of the sites differ, each writes a card; the merged card goes to the server
    and, as answers and words must be the same everywhere, to every site.
    """
    from confed.deployment.provision import card_of_recipe, merge_cards, write_card
    from confed.recipes.recipe import load_recipe

    data_card: Card
    if merge:
        data_card = merge_cards([Path(recipe), *map(Path, overrides or ())])
    else:
        data_card = card_of_recipe(load_recipe(recipe, overrides or ()))
    write_card(data_card, out)
    counts = {
        "clients": len(data_card.clients),
        "labels" if data_card.labels else "answers": len(data_card.answers),
        "types": len(data_card.types),
        "words": len(data_card.words),
        "unseen places": len(data_card.places),
    }
    if as_json:
        print_json({"file": str(out), **counts})
        return
    told = ", ".join(f"{count} {what.removesuffix('s') if count == 1 else what}" for what, count in counts.items())
    say(escape(f"made {out}: {told}; read it before you send it"))
    if merge:
        say("every site needs it too: confed client ... --card")
