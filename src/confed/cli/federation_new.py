"""Verbs that create a federation across machines: ``confed federation new``, ``sign``, ``key`` and ``demo``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from confed.cli.app import Json, app, notes, print_json, say, show
from confed.cli.federation import Chosen, Engine, Method, Overrides, need_flower, single_recipe

federation_app = typer.Typer(help="Create a federation across machines, or try one on this machine.")
app.add_typer(federation_app, name="federation", rich_help_panel="Federation")


@federation_app.command("new")
def new(
    folder: Annotated[Path, typer.Argument(help="Folder of the federation; must not exist.")],
    sites: Annotated[str, typer.Option(help="Names of the clients, one site each: a,b,c.")],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Name or address under which sites reach the server.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port of the server.")] = 8443,
    recipe: Annotated[str, typer.Option(help="What to train.")] = "fedvqa_scenes",
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
    from confed.deployment.provision import AUTHORITY, Federation, names_of_data
    from confed.runs.cohorts import pinned

    if engine is Engine.flare:
        from confed.cli.federation_flare import check_names, provision
    else:
        need_flower()
        from confed.deployment.provision import provision

        def check_names(federation: Federation) -> None:
            del federation

    loaded = pinned(single_recipe(recipe, list(overrides or []), method))
    names = tuple(name.strip() for name in sites.split(",") if name.strip())
    federation = Federation(names, host, port, loaded.to_toml(), days, card, wheel)
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
    recipe: Annotated[str, typer.Option(help="What to train.")] = "fedvqa_scenes",
    method: Method = None,
    out: Annotated[Path, typer.Option(help="Folder for everything; must not exist.")] = Path("federation-demo"),
    engine: Chosen = Engine.flower,
    as_json: Json = False,
) -> None:
    """Run a whole federation on this machine: server and sites in separate processes, with TLS, keys and sockets."""
    if engine is Engine.flare:
        from confed.cli.federation_flare import need_flare

        need_flare()
    else:
        need_flower()
    from confed.deployment.demo import demonstrate

    given = [*(_SMALL if recipe == "fedvqa_scenes" else ()), *(overrides or ())]
    loaded = single_recipe(recipe, given, method)
    summary = demonstrate(loaded, out, sites, notes(), engine.value)
    show(out / "server" / "state", [summary], as_json)


# A size of fedvqa_scenes that trains in half a minute to an accuracy of about 60 %.
_SMALL = ("data.train=200", "data.validation=40", "data.test=100", "run.rounds=3", "local.epochs=1")


if TYPE_CHECKING:
    from confed.data.card_files import Card


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
