"""Dossier of a federation at its server: journals, the sites' signed dossiers, and what is refused."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import confed
from confed.deployment.provision import Federation, provision
from confed.deployment.server import run_server
from confed.engines.flower.transport import FlowerTransport
from confed.engines.remote.journal_chains import KNOWN
from confed.engines.remote.sites import Timeouts
from confed.federation.checkpoint import write_atomically
from confed.release.probe import Estimate
from confed.release.seal import read_key, seal
from led_recipe import SITES_OF, grid_of, recipe_of


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's run folder of a federation of three sites, in the kit that the coordinator made."""
    root = tmp_path_factory.mktemp("federation")
    recipe = recipe_of("fedavg")
    provision(root / "kit", Federation(SITES_OF, "localhost", 9000, recipe.to_toml()))
    file = root / "recipe.toml"
    file.write_text(recipe.to_toml())
    state = root / "kit" / "server" / "state"
    run_server(recipe, state, FlowerTransport(grid_of(file, root)), timeouts=Timeouts(minimum=3))
    return state


def signed(server: Path, site: str, key_of: str, **changes: Any) -> None:
    """A site's own dossier in the server's folder, signed with the key of some site."""
    row = {**asdict(Estimate("membership_auc", "members told, AUC", 0.7, p=0.001, limit="membership_auc")), **changes}
    content = {"sentence": "No limits set: figures only.", "figures": [row]}
    sealed = seal(content, read_key(server.parents[1] / "sites" / key_of / "key"))
    folder = server / "statements"
    folder.mkdir(exist_ok=True)
    write_atomically(folder / f"{site}.json", json.dumps(sealed).encode())


def test_signed_statements_count_and_others_are_refused(server: Path, tmp_path: Path) -> None:
    signed(server, "warm", "warm")
    signed(server, "cold", "both")
    limits = confed.Release(least_members=5, membership_auc=0.6, cut=0.1)
    made = confed.dossier(server, limits, out=tmp_path)
    assert made.sentence == "Beyond the limits you set: membership auc, cut (not examined)."
    content = made.content
    statements = {row["site"]: row for row in content["statements"]}
    assert statements["warm"]["signed"]
    assert statements["cold"]["dossier"] == "refused: the dossier is not signed by the expected key"
    assert statements["both"]["dossier"] == "none in statements"
    assert all("audit" in row["journals"] for row in statements.values())
    figures = {(row["probe"], row["name"]): row for row in content["figures"]}
    assert figures["Told by warm", "membership_auc"]["verdict"] == "beyond"
    assert figures["Guarantees and sizes", "least_members"]["value"] == 8
    assert [(row["site"], row["times"], row["records"]) for row in content["sent"]] == [(s, 2, 8) for s in SITES_OF]
    left = {row["what"]: row["why"] for row in content["not_examined"]}
    assert left["Membership of records"] == "records and updates are at the sites"
    assert left["Statement of cold"].startswith("refused")
    assert "Statement of warm" not in left
    assert "What the sites have said and signed" in made.page.read_text()


def test_what_was_changed_or_cannot_be_a_figure_is_refused(server: Path, tmp_path: Path) -> None:
    signed(server, "warm", "warm", p=7)
    journals = json.loads((server / KNOWN).read_text())
    statement = json.loads(journals["cold"])
    statement["journals"]["audit"][0] += 1
    (server / KNOWN).write_text(json.dumps({**journals, "cold": json.dumps(statement)}))
    content = confed.dossier(server, out=tmp_path).content
    (server / KNOWN).write_text(json.dumps(journals))
    left = {row["what"]: row["why"] for row in content["not_examined"]}
    assert "must lie in [0, 1], got 7" in left["Statement of warm"]
    assert "no statement under this server's signature" in left["Journals of cold"]
    assert "Journals of warm" not in left
    assert content["sentence"] == "No limits set: figures only."
