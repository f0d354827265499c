"""``confed federation card``: data card for a server that holds no examples."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from confed.cli.app import Json, print_json, say
from confed.cli.federation_new import federation_app

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
    from confed.deployment.data_card import card_of_recipe, merge_cards, write_card
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
