"""Verbs of a federation across machines: server, client, and those that create one: new, sign, key, demo, card."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from confed.cli.app import (
    FAILED,
    answer,
    app,
    argument,
    console,
    handling,
    interruptible,
    is_json,
    notes,
    option,
    remark,
    say,
    show,
    tell_asks,
)
from confed.cli.options import Private, Site, SiteData, SiteKey, Unsigned
from confed.deployment.roles import Action, Role, described

if TYPE_CHECKING:
    from confed.datasets.card import Card
    from confed.recipes.recipe import Recipe


class Engine(StrEnum):
    """Transport of the messages."""

    flower = "flower"
    flare = "flare"


Chosen = Annotated[Engine, option("Transport of the messages.", "--engine")]
Overrides = Annotated[list[str] | None, argument("section.key=TOML, such as run.rounds=20.", metavar="[KEY=VALUE]...")]
Source = Annotated[str, argument("The federation's recipe: a file or a name.")]
Insecure = Annotated[bool, option("Without TLS: others can read and change messages.", "--insecure")]
Trained = Annotated[str, option("What to train.")]
Method = Annotated[str | None, option("A method of a study. [default: its main one]")]
Page = Annotated[int | None, option("Port of a page, /metrics and /healthz, here.")]
Notify = Annotated[str | None, option("Notices: https://... or smtp://USER@HOST/TO.")]
Log = Annotated[Path | None, option("File for a log of JSON lines.")]


@app.command()
def server(
    recipe: Source,
    overrides: Overrides = None,
    state: Annotated[Path, option("The run folder; an existing one is resumed.")] = Path("state"),
    tls: Annotated[Path | None, option("Folder of server.crt, server.key, sites.json.")] = None,
    sites: Annotated[Path | None, option("Sites and their keys. [default: sites.json there]")] = None,
    host: Annotated[str, option("Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, option("Port to listen on.")] = 8443,
    method: Method = None,
    minimum: Annotated[int, option("Fewest sites for a round.")] = 1,
    wait: Annotated[float, option("Seconds for all sites to come; with --deliver, for a late one.")] = 600.0,
    deadline: Annotated[float, option("Seconds from a request to its reply.")] = 3600.0,
    away: Annotated[float, option("Seconds away that a round puts up with.")] = 60.0,
    update_bound: Annotated[float, option("Largest norm of an update, in medians; 0: none.")] = 10.0,
    weight_bound: Annotated[float, option("Largest number of examples, in medians; 0: none.")] = 10.0,
    whole: Annotated[bool, option("Evaluate split methods: send the server's part.", "--whole")] = False,
    deliver: Annotated[bool, option("No rounds: late sites get the final model.", "--deliver")] = False,
    insecure: Insecure = False,
    card: Annotated[Path | None, option("A data card, for a server without examples.")] = None,
    engine: Chosen = Engine.flower,
    page: Page = None,
    notify: Notify = None,
    log: Log = None,
) -> None:
    """Run the server of a federation across machines.

    Sites run `confed client` with the same recipe. Ctrl-C stops; the same command resumes. With --engine flare, --tls
    is the kit, which knows address and port.
    """
    from confed.api.progress import StatusPage
    from confed.deployment.monitor import monitored
    from confed.deployment.provision import with_card
    from confed.deployment.transports import Leading, transport_of
    from confed.engines.remote.sites import Timeouts
    from confed.engines.remote.update_bounds import Bounds

    transport = transport_of(engine.value)
    leading = Leading(
        state, tls, sites, host, port, Timeouts(minimum, deadline, away), wait, Bounds(update_bound, weight_bound),
        whole, deliver, insecure,
    )  # fmt: skip
    loaded = single_recipe(recipe, list(overrides or []), method)
    tell_asks(loaded, recipe)
    loaded = loaded if card is None else with_card(loaded, card)
    with (
        _private(),
        interruptible(state, "the same command"),
        StatusPage(console, state, quiet=is_json()) as shown,
        monitored(shown, state, _title(loaded), kit=tls, page=page, notify=notify, log=log) as progress,
    ):
        summary = transport.lead(loaded, leading, progress)
    show(state, [summary])


@app.command()
def client(
    recipe: Source,
    overrides: Overrides = None,
    site: Site = "",
    server: Annotated[str, option("The server, HOST:PORT.")] = "127.0.0.1:8443",
    ca: Annotated[Path | None, option("Certificate of the server's authority (ca.crt).")] = None,
    key: SiteKey = Path("key"),
    members: Annotated[Path | None, option("For secure sums. [default: sites.json beside --key]")] = None,
    private: Private = Path("private"),
    data: SiteData = None,
    card: Annotated[Path | None, option("The merged data card of all sites.")] = None,
    device: Annotated[str | None, option('"cpu", "cuda" or "auto". [default: the recipe\'s]')] = None,
    method: Method = None,
    epsilon: Annotated[float | None, option("Most that updates may cost in privacy.")] = None,
    evaluations: Annotated[
        str | None,
        option("exact, noise=8 or off, with per_round=5, in_all=40, least=50. [default: as before; else exact]"),
    ] = None,
    policy: Annotated[Path | None, option("What may be asked of this site. [default: ./policy.toml]")] = None,
    once: Annotated[bool, option("End when the run is over.", "--once")] = False,
    patience: Annotated[float, option("With --once: seconds without server.")] = 3600.0,
    checkpoint: Annotated[str, option("Most work that a kill costs: '5 min', '500 steps'.")] = "60 s",
    engine: Chosen = Engine.flower,
    kit: Annotated[Path, option("With FLARE: this site's folder.")] = Path("."),
    insecure: Insecure = False,
    unsigned: Unsigned = False,
    page: Page = None,
    notify: Notify = None,
    log: Log = None,
) -> None:
    """Take part in a federation across machines as a site.

    Only opens outgoing connections. Ctrl-C stops; the same command resumes. Needs the extra "flower", or with --engine
    flare "flare".
    """
    from confed.datasets.card import read_card
    from confed.deployment.manifest import check_serial
    from confed.deployment.monitor import monitored
    from confed.deployment.policy import check_policy, policy_of
    from confed.deployment.transports import Joining, transport_of
    from confed.system.events import Note

    given = [f"data.{pair}" for pair in data or []] + ([f"run.device={device}"] if device is not None else [])
    given += [f"data.card={json.dumps(str(card.resolve()))}"] if card is not None else []
    transport = transport_of(engine.value)
    joining = Joining(
        site, private, server, ca, key, members, kit, policy_of(policy, epsilon, evaluations), once, patience,
        insecure, checkpoint,
    )  # fmt: skip
    signature = transport.signature(joining, recipe, card, unsigned)
    if signature is not None:
        check_serial(private, *signature)
    if card is not None:
        check_policy(read_card(card), site, joining.policy.file)
    stop = threading.Event()
    with _private(), _stopping(stop):
        loaded = _handed_out(recipe, [*(overrides or []), *given], method)
        title, who = _title(loaded), site or kit.resolve().name
        with monitored(notes(site), private, title, site=who, page=page, notify=notify, log=log) as progress:
            if joining.policy.file:
                progress(Note(f"policy: {joining.policy.file}"))
            took_part = transport.join(loaded, joining, signature, stop, progress)
    if not took_part:
        raise typer.Exit(FAILED)


def _title(recipe: "Recipe") -> str:
    """Name of a run on its page and in its notices."""
    return f"{recipe.name}, {recipe.sections['algorithm']['name']}"


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

federation_app = typer.Typer(help=f"Create a federation across machines, or try one here.\n\n{described()}")
app.add_typer(federation_app, name="federation")


@federation_app.command("new")
def new(
    folder: Annotated[Path, argument("Folder of the federation; must not exist.")],
    sites: Annotated[str, option("Names of the clients, one site each: a,b,c.")],
    overrides: Overrides = None,
    host: Annotated[str, option("Name or address under which sites reach the server.")] = "localhost",
    port: Annotated[int, option("Port of the server.")] = 8443,
    recipe: Trained = "fedvqa_scenes",
    method: Method = None,
    days: Annotated[int, option("Days for which certificates are valid.")] = 365,
    card: Annotated[Path | None, option("A data card, copied into all folders.")] = None,
    wheel: Annotated[Path | None, option("A wheel file of confed, copied into all sites' folders.")] = None,
    engine: Chosen = Engine.flower,
    authority: Annotated[Path | None, option("An authority made before. [default: a new one]")] = None,
) -> None:
    """Make certificates, keys, a folder for every site and one for the server, each with its README.

    The new certificate authority signs the recipe, the card and the list of sites; sites check the signature.
    """
    from confed.deployment.provision import AUTHORITY, Federation, names_of_data
    from confed.deployment.transports import transport_of
    from confed.runs.same_recipe import pinned

    transport = transport_of(engine.value)
    loaded = pinned(single_recipe(recipe, list(overrides or []), method))
    names = tuple(name.strip() for name in sites.split(",") if name.strip())
    federation = Federation(names, host, port, loaded.to_toml(), days, card, wheel, authority)
    client_names = names_of_data(loaded, card)
    if client_names is None:
        say("[yellow]the names of sites were not checked:[/] the recipe's data are not here, and there is no --card")
    elif strange := [name for name in names if name not in client_names]:
        raise ValueError(
            f"--sites: the recipe's data have no client {strange[0]!r}; there are {', '.join(client_names)}"
        )
    transport.provision(folder, federation)
    answer({"folder": str(folder), "sites": names})
    remark(f"made {escape(str(folder))}: begin with {escape(str(folder / 'server' / 'README.md'))}")
    if (folder / AUTHORITY).is_dir():
        remark(f"the authority's key is {escape(str(folder / AUTHORITY / 'ca.key'))}: keep it offline")


@federation_app.command("sign")
def sign(
    folder: Annotated[Path, argument("The server's folder, with the present recipe.toml and sites.json.")],
    key: Annotated[
        Path | None,
        option(
            "The authority's private key, with FLARE provision/cert.json. [default: authority/ca.key beside the "
            "server's folder]"
        ),
    ] = None,
    card: Annotated[Path | None, option("A new data card, copied to all parties.")] = None,
    serial: Annotated[
        int | None, option("Serial number, above all that sites have accepted. [default: the last plus 1]")
    ] = None,
) -> None:
    """Sign recipe, card and list of sites again after one of them changed; sites refuse unsigned files."""
    from confed.deployment.provision import key_of_authority, sign_again
    from confed.deployment.roster import check_key

    server = folder.resolve()
    authority = key or key_of_authority(server)
    check_key(server, authority, Action.sign)
    _tell_signed(sign_again(server, authority, card, serial))


ServerFolder = Annotated[Path, argument("The server's folder of the federation.")]
SiteName = Annotated[str, argument("Name of the site.")]
OwnKey = Annotated[Path | None, option("Your key. [default: the server's]", "--key")]
CaKey = Annotated[Path | None, option("The authority's private key. [default: beside the folder]", "--key")]
Encrypt = Annotated[bool, option("Protect the key by a passphrase (CONFED_PASSPHRASE).", "--encrypt")]
Days = Annotated[int, option("Days for which the certificate is valid.")]


@federation_app.command("key")
def key(path: Annotated[Path, argument("File for the private key; must not exist.")], encrypt: Encrypt = False) -> None:
    """Make a site's private key; prints the public key, for the server's sites.json."""
    from confed.deployment.authority import make_key

    print(make_key(path, encrypt))


@federation_app.command("ca")
def ca(
    folder: Annotated[Path, argument("Folder for ca.key and ca.crt.")],
    days: Days = 730,
    encrypt: Encrypt = False,
    beside: Annotated[
        Path | None, option("The server's folder of a federation whose sites shall trust it as well.")
    ] = None,
    key: OwnKey = None,
) -> None:
    """Make a certificate authority, apart from any server; with --beside the next one of a federation."""
    from confed.deployment.authority import make_authority
    from confed.deployment.roster import rotate_authority

    if beside is None:
        make_authority(folder, days, encrypt)
    else:
        rotate_authority(beside.resolve(), folder, days, encrypt, key)
        say("every site needs the new ca.crt, which holds both, before `confed federation renew --authority`")
    say(f"made {escape(str(folder))}: keep ca.key offline")


@federation_app.command("add")
def add(
    folder: ServerFolder,
    site: SiteName,
    role: Annotated[Role, option("Role of who is added.")] = Role.site,
    public: Annotated[str, option("The public key. [default: a new key in sites/ or officers/NAME]")] = "",
    host: Annotated[str, option("Name or address of the server, for the site's README.")] = "localhost",
    port: Annotated[int, option("Port of the server.")] = 8443,
    again: Annotated[bool, option("Another key for a site that lost its own.", "--again")] = False,
    key: CaKey = None,
) -> None:
    """Add a site; a running server lets it in at once, and it takes part from the next round. Or a lead or auditor."""
    from confed.deployment.roster import OFFICERS, add_officer, add_site

    if role is not Role.site:
        add_officer(folder.resolve(), site, role, public, key, again)
        say(f"signed {escape(str(folder / OFFICERS))}: {escape(site)} is on it as {role.value}")
        return
    _tell_signed(add_site(folder.resolve(), site, public, key, (host, port), again))


@federation_app.command("revoke")
def revoke(folder: ServerFolder, site: SiteName, key: CaKey = None) -> None:
    """Take somebody's key off its list; a running server refuses it at once, and the run goes on."""
    from confed.deployment.roster import revoke_site

    _tell_signed(revoke_site(folder.resolve(), site, key))


@federation_app.command("quarantine")
def quarantine(
    folder: ServerFolder,
    site: SiteName,
    release: Annotated[bool, option("End the quarantine.", "--release")] = False,
    key: OwnKey = None,
) -> None:
    """Ask a site nothing until it is released; it stays connected, and the run goes on without it."""
    from confed.deployment.roster import quarantine_site

    quarantine_site(folder.resolve(), site, release, key)
    say(f"{escape(site)} {'is asked again' if release else 'is in quarantine'}")


@federation_app.command("renew")
def renew(
    folder: ServerFolder,
    host: Annotated[str, option("Name or address under which sites reach the server.")],
    days: Days = 365,
    authority: Annotated[Path | None, option("Folder of the authority. [default: beside the folder]")] = None,
) -> None:
    """Make a new certificate and key of the server; a running one takes them for new connections."""
    from confed.deployment.roster import renew_server

    renew_server(folder.resolve(), authority, host, days)
    say(f"made {escape(str(folder / 'server.crt'))}, valid for {days} days")


@federation_app.command("audit")
def audit(
    state: Annotated[Path, argument("The server's run folder.")],
    private: Annotated[list[Path] | None, argument("Private folders of sites, where at hand.")] = None,
    key: OwnKey = None,
) -> None:
    """Verify the server's signatures under all sites' journals, and the journals where they are at hand."""
    from confed.deployment.audit import audit as examine
    from confed.deployment.roster import check_key

    check_key(state.resolve().parent, key, Action.audit)
    lines = examine(state, private or [])
    answer([asdict(line) for line in lines])
    for line in lines:
        here = "" if line.here is None else f", {line.here} here"
        remark(escape(f"{line.site}: {line.journal}: {line.signed} entries signed{here}: {line.verdict}"))
    if not all(line.sound for line in lines):
        raise typer.Exit(FAILED)


@federation_app.command("erase")
def erase(
    state: Annotated[Path, argument("The server's run folder, of a finished run.")],
    site: SiteName,
    key: OwnKey = None,
) -> None:
    """Remove what a server's run folder holds of one site alone, and say what is left of it."""
    from confed.deployment.audit import erase as remove
    from confed.deployment.roster import check_key

    check_key(state.resolve().parent, key, Action.erase)
    for sentence in remove(state, site):
        say(escape(f"left: {sentence}"))


@federation_app.command("retain")
def retain(
    folder: Annotated[Path, argument("A server's run folder, or a site's private one; not in use.")],
    days: Annotated[int, option("Days without a change after which states and checkpoints go.")],
    key: OwnKey = None,
) -> None:
    """Remove states, checkpoints and models set aside that are older, with a record in removed.jsonl."""
    from confed.deployment.audit import retain as remove_old
    from confed.deployment.roster import check_key

    check_key(folder.resolve().parent, key, Action.retain)
    for sentence in remove_old(folder, days) or ["nothing is that old"]:
        say(escape(sentence))


@federation_app.command("pass")
def make_pass(
    key: Annotated[Path, argument("Private key of a lead or an auditor.")],
    hours: Annotated[float, option("Hours for which the token is good.")] = 8.0,
) -> None:
    """Print a token of your own for the server's page, /audit.json and /dossier."""
    from confed.deployment.monitor import make_pass as signed

    print(signed(key, hours))


def _tell_signed(folders: list[Path]) -> None:
    """Where a new manifest is, and who needs it."""
    from confed.deployment.manifest import MANIFEST, SIGNATURE

    say(f"signed in {escape(', '.join(map(str, folders)))}")
    say(f"sites that are elsewhere need the new {MANIFEST}, {SIGNATURE} and sites.json, and recipe and card if changed")


@federation_app.command("demo")
def demo(
    overrides: Overrides = None,
    sites: Annotated[int, option("Number of sites.")] = 3,
    recipe: Trained = "fedvqa_scenes",
    method: Method = None,
    out: Annotated[Path, option("Folder for everything; must not exist.")] = Path("federation-demo"),
    engine: Chosen = Engine.flower,
) -> None:
    """Run a whole federation on this machine: server and sites in separate processes, with TLS, keys and sockets."""
    from confed.deployment.demo import demonstrate

    given = [*(_SMALL if recipe == "fedvqa_scenes" else ()), *(overrides or ())]
    loaded = single_recipe(recipe, given, method)
    summary = demonstrate(loaded, out, sites, notes(), engine.value)
    show(out / "server" / "state", [summary])


# A size of fedvqa_scenes that trains in half a minute to an accuracy of about 60 %.
_SMALL = ("data.train=200", "data.validation=40", "data.test=100", "run.rounds=3", "local.epochs=1")


@federation_app.command("card")
def card(
    recipe: Annotated[str, argument("The recipe whose data are described; with --merge the first card.")],
    overrides: Annotated[
        list[str] | None, argument("section.key=value of the recipe; with --merge further cards.")
    ] = None,
    out: Annotated[Path, option("The file to write.")] = Path("card.json"),
    merge: Annotated[bool, option("Merge the cards of several sites.", "--merge")] = False,
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
    answer({"file": str(out), **counts})
    told = ", ".join(f"{count} {what.removesuffix('s') if count == 1 else what}" for what, count in counts.items())
    remark(escape(f"made {out}: {told}; read it before you send it"))
    if merge:
        remark("every site needs it too: confed client ... --card")


@federation_app.command("consent")
def consent(
    card: Annotated[Path, argument("The site's data card, which gets the consent.")],
    site: SiteName,
    by: Annotated[str, option("Who consents: name and office.")],
    key: SiteKey = Path("key"),
    policy: Annotated[Path, option("The policy that is agreed to.")] = Path("policy.toml"),
) -> None:
    """Record in a site's card who consents to its part under which policy, signed with the site's key."""
    from confed.deployment.policy import give_consent

    give_consent(card, site, by, key, policy)
    say(escape(f"{by} consents for {site}: {card} has it, signed"))
